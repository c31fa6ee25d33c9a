"""What Triton's compiler is asked for when operations are launched at sizes that serving has.

Nothing is compiled and nothing launched (see `launch_storm`). To be imported without ``TRITON_INTERPRET``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from kernels.launch_storm import LLAMA_8B, ODD, Recorder, Storm, ops

from aioengine.kernels.operations import PagedKV

BF16, FP16, FP32, FP8 = torch.bfloat16, torch.float16, torch.float32, torch.float8_e4m3fn
FLOAT8_CAPABILITY = 89

Launch = tuple[str, Callable[[], object]]
"""An operation at one size: its name with the sizes, and a call of it."""

DECODE, DECODE_IN_SPLITS, PREFILL = "attend_decode", "attend_decode, in splits", "attend_prefill"


@dataclass(frozen=True, slots=True, kw_only=True)
class CompileCase:
    """A kernel with the types of its arguments, as a launch has it compiled.

    Attributes:
        name: of the launch, with its sizes.
        kernel: decorated by ``triton.jit``.
        signature: the arguments' types by name, such as ``{"x": "*bf16", "n": "i32"}``; "constexpr" for constants.
        constants, attributes: values of constants, and what other arguments are divisible by: by the argument's place.
        options: num_warps, num_stages and enable_fp_fusion.
        min_capability: such as 80 or 90: older GPUs do not run it.
    """

    name: str
    kernel: Any
    signature: dict[str, str]
    constants: dict[tuple[int, ...], Any]
    attributes: dict[tuple[int, ...], Any]
    options: dict[str, Any]
    min_capability: int


def compile_cases() -> list[CompileCase]:
    """All of them; the first of each kernel runs on any GPU from 8.0 on."""
    found: dict[tuple[str, str], CompileCase] = {}
    launch: Launch = ("", lambda: None)

    def on_asked(kernel: Any, key: str, signature: Any, constants: Any, options: Any, attributes: Any) -> None:
        has_float8 = any("fp8" in kind for kind in signature.values())
        case = CompileCase(
            name=launch[0],
            kernel=kernel,
            signature=signature,
            constants=constants,
            attributes=attributes,
            options={name: getattr(options, name) for name in ("num_warps", "num_stages", "enable_fp_fusion")},
            min_capability=FLOAT8_CAPABILITY if has_float8 else 80,
        )
        found.setdefault((kernel.__name__, key), case)

    Recorder(on_asked)
    for launch in (*of_models(), *of_decode(), *of_prefill()):
        launch[1]()
    return list(found.values())


def name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


MODELS = {
    "8B": LLAMA_8B,
    "0.6B": replace(LLAMA_8B, vocab=151_936, hidden=1024, intermediate=3072, num_heads=16, has_norm=True),
    "float16": replace(LLAMA_8B, vocab=151_936, hidden=5120, dtype=FP16, cache_dtype=FP16),
    "float32": replace(LLAMA_8B, dtype=FP32, cache_dtype=FP32),
    "float8 cache": replace(LLAMA_8B, num_heads=14, num_kv_heads=2, head_dim=64, cache_dtype=FP8),
    "256 wide": replace(LLAMA_8B, num_heads=8, num_kv_heads=4, head_dim=256, has_norm=True),
    "odd": ODD,
}


def of_models() -> Iterator[Launch]:
    """What a start launches, of each."""
    for name, model in MODELS.items():
        yield f"start of {name}", Storm(model, seed=0).start


def of_decode() -> Iterator[Launch]:
    for heads, kv_heads, head_dim, dtype, cache, is_split in (
        (32, 8, 128, BF16, BF16, False),
        (32, 8, 128, BF16, BF16, True),
        (16, 8, 128, BF16, BF16, False),
        (32, 8, 128, BF16, FP8, False),
        (32, 8, 128, FP32, FP32, False),
        (32, 8, 64, FP16, FP16, True),
        (32, 32, 80, BF16, BF16, False),
        (32, 32, 96, BF16, BF16, False),
        (16, 8, 256, BF16, BF16, False),
        (16, 8, 256, BF16, FP8, False),
        (16, 8, 256, FP32, FP32, True),
        (32, 8, 128, FP32, FP8, False),
        (71, 1, 64, BF16, BF16, True),
        (64, 1, 256, BF16, BF16, False),
        (64, 1, 256, BF16, FP8, False),
        (128, 1, 256, BF16, BF16, True),
        (128, 1, 256, BF16, FP8, False),
        (128, 1, 128, BF16, BF16, False),
    ):
        kernel = DECODE_IN_SPLITS if is_split else DECODE
        yield attention(kernel, heads, kv_heads, head_dim, dtype, cache, None)
        if head_dim in EXTRAS:
            yield attention(kernel, heads, kv_heads, head_dim, dtype, cache, None, EXTRAS[head_dim])


EXTRAS = {64: "sinks", 256: "soft_cap"}
"""By head size, about as models have them: gpt-oss, Gemma 2."""


def of_prefill() -> Iterator[Launch]:
    for heads, kv_heads, head_dim, dtype, cache, window in (
        (32, 8, 128, BF16, BF16, None),
        (16, 8, 128, BF16, BF16, None),
        (32, 8, 128, BF16, BF16, 4096),
        (32, 8, 128, BF16, FP8, None),
        (32, 8, 128, FP32, FP32, None),
        (32, 8, 128, FP32, FP8, None),
        (71, 1, 64, BF16, BF16, None),
        (32, 8, 64, FP16, FP16, None),
        (32, 32, 80, BF16, BF16, None),
        (32, 32, 96, BF16, BF16, 2047),
        (16, 8, 256, BF16, BF16, None),
        (16, 8, 256, BF16, BF16, 4096),
        (16, 8, 256, BF16, FP8, 4096),
        (16, 8, 256, FP32, FP32, 4096),
    ):
        yield attention(PREFILL, heads, kv_heads, head_dim, dtype, cache, window)
        if head_dim in EXTRAS:
            yield attention(PREFILL, heads, kv_heads, head_dim, dtype, cache, window, EXTRAS[head_dim])


def attention(
    kernel: str,
    heads: int,
    kv_heads: int,
    head_dim: int,
    dtype: torch.dtype,
    cache: torch.dtype,
    window: int | None,
    extra: str | None = None,
) -> Launch:
    ints = partial(torch.empty, dtype=torch.int32)
    q, keys = torch.empty(3, heads, head_dim, dtype=dtype), torch.empty(64, 16, kv_heads, head_dim, dtype=cache)
    extras: dict[str, Any] = {extra: 50.0 if extra == "soft_cap" else torch.empty(heads)} if extra else {}
    kv = PagedKV(keys, keys, ints(9, 513), 0.1, window, **extras)

    def run() -> None:
        if kernel == PREFILL:
            ops.attend_prefill(q, kv, ints(3, 4), torch.empty_like(q))
        else:
            num_splits = 2 if kernel == DECODE_IN_SPLITS else 1
            ops.attend_decode(q, kv, ints(3, 3), torch.empty_like(q), num_splits=num_splits, max_context=8192)

    features = (", window" if window else "") + (f", extra: {extra}" if extra else "")
    sizes = f"{heads}/{kv_heads} heads of {head_dim}, {name_of(dtype)}, cache {name_of(cache)}"
    return f"{kernel}, {sizes}{features}", run
