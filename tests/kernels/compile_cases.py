"""What Triton's compiler is asked for when operations are launched at sizes that serving has.

Nothing is compiled and nothing launched: a `Recorder` stands in the compiler's place, so that no GPU is needed. Tensors
are on the CPU, and never touched. To be imported without ``TRITON_INTERPRET``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from aioengine.kernels import triton_operations as ops
from aioengine.kernels.attention.choices import (
    DECODE,
    DECODE_IN_SPLITS,
    PREFILL,
    AttentionShape,
    Choice,
    candidates,
    default_choice,
    trying,
)
from aioengine.kernels.sampling.sample_rows import SAMPLE_WORDS

BF16, FP16, FP32, FP8 = torch.bfloat16, torch.float16, torch.float32, torch.float8_e4m3fn
INT32 = torch.int32
VOCAB = 151_936
FLOAT8_CAPABILITY = 89


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
        is_default: launched unless another choice was measured to be faster, so that it has to fit into any GPU; what
            is only tried is passed over where it does not.
    """

    name: str
    kernel: Any
    signature: dict[str, str]
    constants: dict[tuple[int, ...], Any]
    attributes: dict[tuple[int, ...], Any]
    options: dict[str, Any]
    min_capability: int
    is_default: bool


class NoDriver:
    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)


class Recorder:
    """Stands in the compiler's place from now on, and tells ``on_asked`` what it is asked for.

    Args:
        on_asked: called with the kernel, the key of the variant, signature, constants, options, attributes.
    """

    def __init__(self, on_asked: Callable[[Any, str, Any, Any, Any, Any], None]) -> None:
        def do_compile(
            kernel: Any, key: Any, signature: Any, device: Any, constants: Any, options: Any, attributes: Any, *_: Any
        ) -> None:
            on_asked(kernel, str(key), signature, constants, options, attributes)

        driver.set_active(NoDriver())
        JITFunction._do_compile = do_compile


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """An operation at one size; `CompileCase` says what the fields are."""

    name: str
    run: Callable[[], object]
    choice: Choice | None = None
    min_capability: int = 80
    is_default: bool = True


def compile_cases() -> list[CompileCase]:
    """All of them; the first of each kernel runs on any GPU from 8.0 on."""
    found: dict[tuple[str, str], CompileCase] = {}
    launch = Launch(name="", run=lambda: None)

    def on_asked(kernel: Any, key: str, signature: Any, constants: Any, options: Any, attributes: Any) -> None:
        has_float8 = any("fp8" in kind for kind in signature.values())
        case = CompileCase(
            name=launch.name,
            kernel=kernel,
            signature=signature,
            constants=constants,
            attributes=attributes,
            options={name: getattr(options, name) for name in ("num_warps", "num_stages", "enable_fp_fusion")},
            min_capability=max(launch.min_capability, FLOAT8_CAPABILITY if has_float8 else 80),
            is_default=launch.is_default,
        )
        found.setdefault((kernel.__name__, key), case)

    Recorder(on_asked)
    for launch in (*of_layers(), *of_rows(), *of_sampling(), *of_decode(), *of_prefill()):
        with trying(launch.choice) if launch.choice is not None else nullcontext():
            launch.run()
    return list(found.values())


def ints(*shape: int) -> Tensor:
    return torch.empty(shape, dtype=INT32)


def floats(*shape: int, dtype: torch.dtype = FP32) -> Tensor:
    return torch.empty(shape, dtype=dtype)


def name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def of_layers() -> Iterator[Launch]:
    for rows, width, dtype in (
        (1, 14336, BF16),
        (64, 14336, BF16),
        (64, 3072, BF16),
        (64, 14336, FP16),
        (64, 14336, FP32),
    ):
        gate_up = floats(rows, 2 * width, dtype=dtype)
        yield Launch(
            name=f"{rows} rows of {width}, {name_of(dtype)}",
            run=lambda gate_up=gate_up: ops.gated_activation(gate_up),
        )
    for width, dtype in ((4096, BF16), (1024, BF16), (5120, FP16), (4096, FP32)):
        x, weight = floats(64, width, dtype=dtype), floats(width, dtype=dtype)
        name = f"{width} wide, {name_of(dtype)}"
        yield Launch(name=name, run=lambda x=x, weight=weight: ops.rms_norm(x, weight, 1e-5))
        yield Launch(name=name, run=lambda x=x, weight=weight: ops.add_rms_norm(x, x, weight, 1e-5))
    for heads, kv_heads, head_dim, has_norm in (
        *((32, 8, 128, False), (16, 8, 128, True), (14, 2, 64, False), (8, 4, 256, True)),
    ):
        for dtype, cache in ((BF16, BF16), (BF16, FP8), (FP16, FP16)):
            keys = floats(64, 16, kv_heads, head_dim, dtype=cache)
            weight = floats(heads + kv_heads, head_dim, dtype=dtype) if has_norm else None
            table, qkv = (
                floats(999, 2 * head_dim, dtype=dtype),
                floats(7, (heads + 2 * kv_heads) * head_dim, dtype=dtype),
            )
            tensors = (qkv, ints(7), ints(7), table, weight)
            yield Launch(
                name=f"{heads}/{kv_heads} heads of {head_dim}{', normalised' * has_norm}, {name_of(dtype)}, "
                f"cache {name_of(cache)}",
                run=lambda tensors=tensors, keys=keys: ops.rotate_and_write(*tensors, 1e-5, keys, keys),
            )


def of_rows() -> Iterator[Launch]:
    history, tables = ints(9, 8193), ints(9, 513)
    yield Launch(name="", run=lambda: ops.append_tokens(history, ints(7, SAMPLE_WORDS), ints(7)))
    yield Launch(name="", run=lambda: ops.gather_tokens(ints(7, 4), history, tables, 16, 99))
    yield Launch(name="", run=lambda: ops.put_spans(history, ints(7, 4), ints(99)))
    for shape, dtype in (((16, 8, 128), BF16), ((16, 4, 128), BF16), ((7, 11, 1), FP8)):
        caches = floats(2, 9, *shape, dtype=dtype)
        yield Launch(
            name=f"blocks of {caches[0, 0].nbytes} bytes",
            run=lambda caches=caches: ops.copy_blocks(caches, ints(3), ints(3)),
        )


def of_sampling() -> Iterator[Launch]:
    samples, of_row, history, logits = ints(7, SAMPLE_WORDS), ints(9), ints(9, 8193), floats(7, VOCAB)
    edits = (ints(64), ints(64), floats(64), ints(64))
    yield Launch(name="", run=lambda: ops.edit_logits(logits, samples, of_row, *edits))
    words = (ints(64), ints(65), ints(99), floats(64))
    yield Launch(name="", run=lambda: ops.ends_of_bad_words(samples, of_row, history, *words))
    yield Launch(name="", run=lambda: ops.penalise(logits, samples, history, ints(9, VOCAB)))
    yield Launch(name="", run=lambda: ops.look_up(logits, ints(7), ints(7), floats(7), floats(7), ints(7)))
    for name, has_mask, has_filters, is_greedy in (
        *(("plain", False, False, False), ("greedy", False, False, True), ("filters", False, True, False)),
        *(("greedy, masks", True, False, True), ("masks", True, False, False), ("filters, masks", True, True, False)),
    ):
        masks = ints(2, -(-VOCAB // 32)) if has_mask else None
        yield Launch(
            name=name,
            run=lambda masks=masks, filters=has_filters, greedy=is_greedy: ops.draw(
                logits, samples, masks, ints(7), ints(7), has_filters=filters, is_greedy=greedy
            ),
        )
    for vocab, k in ((151_936, 20), (151_936, 5), (151_936, 0), (128_256, 20), (1_000_000, 20)):
        yield Launch(
            name=f"{k} of {vocab}",
            run=lambda vocab=vocab, k=k: ops.top_logprobs(
                floats(7, vocab), samples, floats(7), ints(7, k), floats(7, k)
            ),
        )


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
        yield from attention(kernel, heads, kv_heads, head_dim, dtype, cache, None)


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
        yield from attention(PREFILL, heads, kv_heads, head_dim, dtype, cache, window)


def attention(
    kernel: str,
    heads: int,
    kv_heads: int,
    head_dim: int,
    dtype: torch.dtype,
    cache: torch.dtype,
    window: int | None,
) -> Iterator[Launch]:
    """A launch for each choice that may be made on Hopper, the default one first."""
    q, keys = floats(3, heads, head_dim, dtype=dtype), floats(64, 16, kv_heads, head_dim, dtype=cache)
    tensors = (q, keys, keys, ints(9, 513))
    keywords = {"scale": 0.1, "window": window}
    shape = AttentionShape.of(q, keys)

    def run() -> None:
        if kernel == PREFILL:
            ops.attend_prefill(*tensors, ints(3, 4), torch.empty_like(q), **keywords)
        else:
            num_splits = 2 if kernel == DECODE_IN_SPLITS else 1
            ops.attend_decode(
                *tensors, ints(3, 3), torch.empty_like(q), **keywords, num_splits=num_splits, max_context=8192
            )

    features = ", window" if window else ""
    for choice in candidates(kernel, shape, 90):
        constants = "/".join(str(size) for _, size in choice.constants)
        yield Launch(
            name=f"{kernel}, {heads}/{kv_heads} heads of {head_dim}, {name_of(dtype)}, cache {name_of(cache)}"
            f"{features}, {constants}/{choice.num_warps}/{choice.num_stages}",
            run=run,
            choice=choice,
            min_capability=80 if choice in candidates(kernel, shape, 80) else 90,
            is_default=choice == default_choice(kernel, shape),
        )
