"""What launchers refuse, since a kernel believes what it is told; and that nothing to do is no launch."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator
from functools import partial
from types import ModuleType
from typing import Any

import pytest
import torch
from kernels.harness import BOTH, DEVICE, FLOAT8, LAUNCHED, NOT_KERNELS, OPERATIONS, native, triton
from torch import Tensor

from aioengine.errors import InternalError
from aioengine.kernels.operations import ExpertWeights, PagedKV
from aioengine.kernels.sample_rows import SAMPLE_WORDS
from aioengine.kernels.triton import attend_decode as paged_decode
from aioengine.kernels.triton.rms_norm import MAX_WIDTH
from aioengine.kernels.triton.rotate_and_write import MAX_HEAD_DIM

ints = partial(torch.zeros, dtype=torch.int32, device=DEVICE)
floats = partial(torch.ones, device=DEVICE)

SAMPLES = ints(2, SAMPLE_WORDS)
PAGED = {"q": floats(3, 4, 64), "k_cache": floats(2, 4, 2, 64), "v_cache": floats(2, 4, 2, 64)}
PAGED |= {"block_tables": ints(2, 3), "out": floats(3, 4, 64)}

RIGHT: dict[str, dict[str, Any]] = {
    "rms_norm": {"x": floats(4, 8), "weight": floats(8), "eps": 1e-6},
    "add_rms_norm": {"x": floats(4, 8), "residual": floats(4, 8), "weight": floats(8), "eps": 1e-6},
    "rms_norm_add": {"x": floats(4, 8), "residual": floats(4, 8), "weight": floats(8), "eps": 1e-6},
    "gated_activation": {"gate_up": floats(2, 8)},
    "scale": {"x": floats(2, 8), "factor": 2.0},
    "route": {"logits": floats(2, 5), "num_experts": 4, "num_chosen": 3, "is_normalised": True},
    "experts": {"x": floats(2, 8), "ids": ints(2, 1), "weights": floats(2, 2), "shared": floats(2, 8)},
    "rotate_and_write": {
        **{"qkv": floats(3, 128), "positions": ints(3), "slots": ints(3), "rope_table": floats(5, 32), "eps": 1e-6},
        **{"qk_weight": floats(6, 16), "k_cache": floats(2, 4, 2, 16), "v_cache": floats(2, 4, 2, 16)},
    },
    "attend_decode": {
        **PAGED,
        **{"decodes": ints(2, 3) + 1, "scale": 0.1, "window": None, "num_splits": 1, "max_context": 8},
    },
    "attend_prefill": {**PAGED, "tiles": ints(2, 4), "scale": 0.1, "window": None},
    "put_spans": {"target": ints(2, 3), "spans": ints(1, 4), "words": ints(5)},
    "copy_rows": {"target": ints(2, 3), "source": ints(2, 3), "rows": ints(2)},
    "gather_tokens": {
        **{"rows": ints(1, 4), "history": ints(2, 4), "block_tables": ints(1, 2, 3), "block_size": 2, "num_tokens": 1}
    },
    "rows_of_tokens": {"rows": ints(1, 4), "num_rows": 2, "num_tokens": 1},
    "append_tokens": {"history": ints(2, 4), "samples": SAMPLES, "token_ids": ints(2)},
    "copy_blocks": {"caches": floats(2, 3, 1, 1, 4), "copied_from": ints(2), "copied_to": ints(2) + 1},
    "edit_logits": {"logits": floats(2, 8), "samples": SAMPLES, "sample_of_row": ints(3), "edits": ints(4, 5)},
    "ends_of_bad_words": {
        **{"samples": SAMPLES, "sample_of_row": ints(2), "history": ints(2, 4), "word_rows": ints(2)},
        **{"word_offsets": ints(3), "word_ids": ints(2), "edit_values": floats(2)},
    },
    "penalise": {"logits": floats(2, 5), "samples": SAMPLES, "history": ints(2, 9), "counters": ints(2, 5)},
    "draw": {
        **{"logits": floats(2, 7), "samples": SAMPLES, "masks": ints(2, 1), "token_ids": ints(2), "status": ints(2)},
        **{"has_filters": False, "is_greedy": False},
    },
    "top_logprobs": {
        **{"logits": floats(2, 5), "samples": SAMPLES, "log_mass": floats(2), "ids": ints(2, 3)},
        "logprobs": floats(2, 3),
    },
    "look_up": {
        **{"logits": floats(2, 5), "logits_rows": ints(3), "token_ids": ints(3), "log_mass": floats(3)},
        **{"logprobs": floats(3), "ranks": ints(3)},
    },
}


def call(ops: ModuleType, operation: str, **changes: Any) -> tuple[Any, dict[str, Any]]:
    """What it returns, and its arguments afterwards, which are copies."""
    given = {**RIGHT[operation], **changes}
    copies = {name: value.clone() if isinstance(value, Tensor) else value for name, value in given.items()}
    strided = {name: value for name, value in changes.items() if isinstance(value, Tensor)}
    arguments = {**copies, **strided}
    bundled = dict(arguments)
    if operation.startswith("attend"):
        bundled["kv"] = PagedKV(**{name: bundled.pop(name) for name in PagedKV._fields if name in bundled})
    if operation == "experts":
        gate_up, down = (ops.pack(floats(64, inputs).clone()) for inputs in (8, 3))
        bundled["of_layer"] = ExpertWeights(num_experts=1, hidden=8, intermediate=3, gate_up=gate_up, down=down)
    return getattr(ops, operation)(**bundled), arguments


@BOTH
def test_the_arguments_of_this_table_are_taken(ops: ModuleType) -> None:
    assert RIGHT.keys() == {*OPERATIONS} - NOT_KERNELS
    for operation in RIGHT:
        call(ops, operation)


def spoiled(tensor: Tensor) -> Iterator[Tensor]:
    """In ways that no operation can take: another dtype, another number of dimensions, not contiguous."""
    yield tensor.double() if tensor.is_floating_point() else tensor.long()
    yield tensor[None]
    yield torch.stack((tensor, tensor), dim=-1)[..., 0]


@pytest.mark.parametrize("operation", sorted(LAUNCHED))
def test_tensors_that_a_kernel_would_misread_are_refused(operation: str) -> None:
    tensors = {name: value for name, value in RIGHT[operation].items() if isinstance(value, Tensor)}
    for name, tensor in tensors.items():
        for wrong in spoiled(tensor):
            if name == "caches" and wrong.is_contiguous() and wrong.dim() == tensor.dim():
                continue  # blocks are copied whatever their dtype
            with pytest.raises(InternalError, match=name):
                call(triton, operation, **{name: wrong})
        if len(tensors) > 1:
            with pytest.raises(InternalError, match="is on"):
                call(triton, operation, **{name: tensor.to("meta")})


@pytest.mark.parametrize("operation", RIGHT)
def test_native_kernels_refuse_tensors_that_they_would_misread(operation: str) -> None:
    for name, tensor in RIGHT[operation].items():
        for wrong in (*spoiled(tensor), tensor.to("meta")) if isinstance(tensor, Tensor) else ():
            if name == "caches" and wrong.is_contiguous() and not wrong.is_meta and wrong.dim() == tensor.dim():
                continue
            if wrong.dim() != tensor.dim() and operation not in CHECKED_DIMS:
                continue
            with pytest.raises(InternalError):
                call(native, operation, **{name: wrong})  # type: ignore[arg-type]


CHECKED_DIMS = ("rms_norm", "add_rms_norm", "rms_norm_add", "scale", "attend_decode", "attend_prefill")


def test_native_products_refuse_what_does_not_fit_the_weight() -> None:
    half = partial(torch.ones, dtype=torch.bfloat16)
    for quantization in (None, "int8", "int4"):
        packed = native.pack(half(6, 64), quantization)
        native.linear(half(2, 64), packed, None)
        for x in (half(2, 62), floats(2, 64), half(2, 128)[:, ::2], half(64)):
            with pytest.raises(InternalError, match="x"):
                native.linear(x, packed, None)
        for bias in (half(5), half(6).double(), half(12)[::2]):
            with pytest.raises(InternalError, match="bias"):
                native.linear(half(2, 64), packed, bias)
        with pytest.raises(InternalError, match="bias"):
            native.linear(half(2, 64), packed, floats(6), torch.float32)
        if quantization != "int4":
            with pytest.raises(InternalError, match="token_ids"):
                native.embed(ints(2).long(), packed)


INT8 = torch.zeros(2, 4, 2, 20, dtype=torch.int8)
WIDE, ODD = floats(2, 4, 2, MAX_HEAD_DIM + 2), floats(2, 4, 2, 15)
MISFITS: list[tuple[str, str, dict[str, Any]]] = [
    ("rms_norm", "weight has shape", {"weight": floats(4)}),
    ("rms_norm", "weight is torch.float16", {"weight": floats(8).half()}),
    ("rms_norm", "1 to", {"x": floats(1, 0), "weight": floats(0)}),
    ("rms_norm", "1 to", {"x": floats(1, MAX_WIDTH + 1), "weight": floats(MAX_WIDTH + 1)}),
    ("add_rms_norm", "residual has shape", {"residual": floats(3, 8)}),
    ("add_rms_norm", "residual is torch.float16", {"residual": floats(4, 8).half()}),
    ("gated_activation", "not equally wide", {"gate_up": floats(2, 7)}),
    ("rotate_and_write", "qkv is 120 wide", {"qkv": floats(3, 120)}),
    ("rotate_and_write", "qkv is 64 wide", {"qkv": floats(3, 64)}),
    ("rotate_and_write", "positions has shape", {"positions": ints(2)}),
    ("rotate_and_write", "slots has shape", {"slots": ints(2)}),
    ("rotate_and_write", "rope_table has shape", {"rope_table": floats(5, 16)}),
    ("rotate_and_write", "rope_table is torch.float16", {"rope_table": floats(5, 32).half()}),
    ("rotate_and_write", "qk_weight has shape", {"qk_weight": floats(4, 16)}),
    ("rotate_and_write", "k_cache is torch.float16", {"k_cache": floats(2, 4, 2, 16).half()}),
    ("rotate_and_write", "k_cache is torch.int8", {"k_cache": INT8, "v_cache": INT8}),
    ("rotate_and_write", "v_cache has shape", {"v_cache": floats(1, 4, 2, 16)}),
    ("rotate_and_write", "v_cache is torch.float8", {"v_cache": floats(2, 4, 2, 16).to(FLOAT8)}),
    ("rotate_and_write", f"heads of {MAX_HEAD_DIM + 2}", {"k_cache": WIDE, "v_cache": WIDE}),
    ("rotate_and_write", "heads of 15", {"k_cache": ODD, "v_cache": ODD}),
    *(
        (operation, message, changes)
        for operation in ("attend_decode", "attend_prefill")
        for message, changes in (
            ("3 query heads cannot share 2", {"q": floats(3, 3, 64), "out": floats(3, 3, 64)}),
            ("heads of 63", {"q": floats(3, 4, 63)}),
            ("k_cache is torch.float16", {"k_cache": PAGED["k_cache"].half()}),
            ("k_cache is torch.int8", {"k_cache": PAGED["k_cache"].to(torch.int8)}),
            ("k_cache has shape", {"k_cache": floats(2, 4, 2, 56)}),
            ("v_cache has shape", {"v_cache": floats(1, 4, 2, 64)}),
            ("v_cache is torch.float8", {"v_cache": PAGED["v_cache"].to(FLOAT8)}),
            ("out is torch.float16", {"out": PAGED["out"].half()}),
            ("out has shape", {"out": floats(2, 4, 64)}),
            ("window is 0", {"window": 0}),
            ("sinks has shape", {"sinks": floats(2)}),
        )
    ),
    ("attend_decode", "decodes has shape", {"decodes": ints(2, 2)}),
    ("attend_decode", "num_splits is 0", {"num_splits": 0}),
    ("attend_prefill", "tiles has shape", {"tiles": ints(2, 3)}),
    ("penalise", "counters has shape", {"counters": ints(2, 6)}),
    ("penalise", "counters are for 1 samples", {"counters": ints(1, 5)}),
    ("draw", "no vocabulary", {"logits": floats(2, 0)}),
    ("draw", "masks has shape", {"masks": ints(2, 2)}),
    ("draw", "token_ids has shape", {"token_ids": ints(3)}),
    ("draw", "status has shape", {"status": ints(3)}),
    ("top_logprobs", "log_mass has shape", {"log_mass": floats(3)}),
    ("top_logprobs", "ids has shape", {"ids": ints(3, 3)}),
    ("top_logprobs", "logprobs has shape", {"ids": ints(2, 4)}),
    ("top_logprobs", "6 tokens of 5", {"ids": ints(2, 6), "logprobs": floats(2, 6)}),
]


@pytest.mark.parametrize(
    ("operation", "message", "changes"), MISFITS, ids=lambda value: None if type(value) is dict else value
)
def test_what_does_not_fit_is_refused_by_what_is_wrong(operation: str, message: str, changes: dict[str, Any]) -> None:
    with pytest.raises(InternalError, match=message):
        call(triton, operation, **changes)


@pytest.mark.parametrize("operation", ["attend_decode", "attend_prefill"])
def test_old_gpus_are_refused_float8_caches_alone(monkeypatch: pytest.MonkeyPatch, operation: str) -> None:
    monkeypatch.setattr(paged_decode, "_capability", lambda device: (8, 0))
    caches = {name: PAGED[name].to(FLOAT8) for name in ("k_cache", "v_cache")}
    with pytest.raises(InternalError, match="float8_e4m3fn"):
        call(triton, operation, **caches)
    call(triton, operation)


NOTHING: list[tuple[str, dict[str, Any]]] = [
    ("rms_norm", {"x": floats(0, 8)}),
    ("add_rms_norm", {"x": floats(0, 8), "residual": floats(0, 8)}),
    ("rms_norm_add", {"x": floats(0, 8), "residual": floats(0, 8)}),
    ("scale", {"x": floats(0, 8)}),
    ("gated_activation", {"gate_up": floats(0, 8)}),
    ("gated_activation", {"gate_up": floats(3, 0)}),
    ("rotate_and_write", {"qkv": floats(0, 128), "positions": ints(0), "slots": ints(0)}),
    ("attend_decode", {"decodes": ints(0, 3)}),
    ("attend_prefill", {"tiles": ints(0, 4)}),
    ("put_spans", {"spans": ints(0, 4)}),
    ("put_spans", {"words": ints(0)}),
    ("gather_tokens", {"rows": ints(0, 4), "num_tokens": 0}),
    ("gather_tokens", {"num_tokens": 0}),
    ("append_tokens", {"samples": SAMPLES[:0], "token_ids": ints(0)}),
    ("copy_blocks", {"copied_from": ints(0), "copied_to": ints(0)}),
    ("copy_blocks", {"caches": floats(2, 3, 0, 1, 4)}),
    ("edit_logits", {"edits": ints(4, 0)}),
    ("edit_logits", {"logits": floats(0, 8)}),
    ("edit_logits", {"samples": SAMPLES[:0]}),
    ("ends_of_bad_words", {"word_rows": ints(0), "word_offsets": ints(1), "edit_values": floats(0)}),
    ("penalise", {"samples": SAMPLES[:0]}),
    ("penalise", {"logits": floats(0, 5)}),
    ("draw", {"samples": SAMPLES[:0], "token_ids": ints(0), "status": ints(0)}),
    ("top_logprobs", {"samples": SAMPLES[:0], "log_mass": floats(0), "ids": ints(0, 3), "logprobs": floats(0, 3)}),
    ("top_logprobs", {"logits": floats(0, 5)}),
    (
        "look_up",
        {**dict.fromkeys(("logits_rows", "token_ids", "ranks"), ints(0)), "log_mass": floats(0), "logprobs": floats(0)},
    ),
]


@BOTH
@pytest.mark.parametrize(("operation", "changes"), NOTHING, ids=lambda value: None if type(value) is dict else value)
def test_nothing_to_do_launches_nothing_and_changes_nothing(
    monkeypatch: pytest.MonkeyPatch, operation: str, changes: dict[str, Any], ops: ModuleType
) -> None:
    module = sys.modules[inspect.unwrap(getattr(ops, operation)).__module__]
    for name in [name for name in vars(module) if name.endswith("_kernel")]:
        monkeypatch.setattr(module, name, None)
    returned, arguments = call(ops, operation, **changes)
    parts = returned if isinstance(returned, tuple) else () if returned is None else (returned,)
    assert all(part.numel() == 0 for part in parts)
    for name, value in {**RIGHT[operation], **changes}.items():
        assert not isinstance(value, Tensor) or torch.equal(arguments[name], value), name
