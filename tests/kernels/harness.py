"""What tests of kernels share: where they run, random and poisoned tensors, comparisons, the interpreter put right."""

from __future__ import annotations

import os
import re
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import aioengine.kernels.triton as triton_package
from aioengine.kernels.native.compilation import compile_library
from aioengine.kernels.native.native_operations import NativeOperations
from aioengine.kernels.native.team import Team
from aioengine.kernels.operations import NAMES, plain_torch
from aioengine.kernels.triton import find_launchers, triton_operations

DEVICE = "cpu" if os.environ.get("TRITON_INTERPRET") else "cuda"
FLOAT8 = torch.float8_e4m3fn
POISON = 0x7F7F7F7F
KERNELS = {
    name
    for file in Path(triton_package.__file__).parent.glob("*.py")
    for name in re.findall(r"^def (_\w+_kernel)\(", file.read_text(), re.MULTILINE)
}
assert KERNELS
OPERATIONS = NAMES
NOT_KERNELS = {"prefill_tile", "attention_output", "pack", "unpack", "unpack_codes", "linear", "embed"}
"""The last five are torch's own products on a GPU, too."""
triton = triton_operations()
LAUNCHED = find_launchers().keys() - NOT_KERNELS
"""The operations that Triton computes; the others are plain torch on a GPU."""


class _Native:
    """Native kernels, compiled when one is first asked for. One thread: the caller's, so that none is left."""

    def __getattr__(self, operation: str) -> Any:
        return getattr(_native(), operation)


@cache
def _native() -> NativeOperations:
    return NativeOperations(Team(compile_library(), 1))


native = _Native()
_OF_CPU = [pytest.param(native, id="native")] if DEVICE == "cpu" else []
_OF_GPU = pytest.param(triton, id="triton")
COMPILED = pytest.mark.parametrize("ops", [_OF_GPU, *_OF_CPU])
ALL = pytest.mark.parametrize("ops", [_OF_GPU, *_OF_CPU, pytest.param(plain_torch, id="plain")])
BOTH = pytest.mark.parametrize("ops", [triton, plain_torch], ids=["triton", "plain"])
SMALL = pytest.mark.parametrize("ops", [*_OF_CPU, pytest.param(plain_torch, id="plain")])
"""For operations that have no Triton kernel."""
TOLERANCES = {torch.float32: 3e-6, torch.bfloat16: 8e-3, torch.float16: 1e-3}
"""A unit in the last place of a value near 1, about; the first of sums of some products."""
# numpy's, in the interpreter, where infinities and NaN are meant.
quiet_numpy = pytest.mark.filterwarnings("ignore::RuntimeWarning")


def int32(values: object) -> Tensor:
    return torch.tensor(values, dtype=torch.int32, device=DEVICE)


def poisoned(*shape: int) -> Tensor:
    return torch.full(shape, POISON, dtype=torch.int32, device=DEVICE)


def normal(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0, scale: float = 1.0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(shape, generator=generator) * scale).to(DEVICE, dtype)


def assert_close(computed: Tensor, expected: Tensor, *, factor: float = 1.0) -> None:
    """Within `TOLERANCES`, times a factor; with NaN where there is to be NaN, such as on lines that are not written."""
    tolerance = factor * TOLERANCES[expected.dtype]
    torch.testing.assert_close(computed, expected, rtol=tolerance, atol=tolerance, equal_nan=True)


def assert_same(made: Tensor, expected: Tensor) -> None:
    """To the last bit, NaN where NaN is."""
    torch.testing.assert_close(made, expected, rtol=0, atol=0, equal_nan=True)


def make_conversions_right(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter cuts bfloat16 off instead of rounding it, multiplies its bits as if they were integers, and loses
    carries and NaN on the way to float8: torch does it."""
    if DEVICE != "cpu":
        return
    import triton.language as tl
    from triton.runtime import interpreter

    dtypes = {tl.float32: torch.float32, tl.bfloat16: torch.bfloat16, tl.float16: torch.float16, tl.float8e4nv: FLOAT8}
    words = {1: torch.uint8, 2: torch.int16, 4: torch.int32}

    def convert(data: Any, source: Any, target: Any, rounding: Any) -> Any:
        values = torch.from_numpy(np.ascontiguousarray(data).view(f"i{source.primitive_bitwidth // 8}"))
        values = values.view(dtypes[source])
        if dtypes[target] == FLOAT8:
            # Some versions of torch saturate. What the kernel leaves to its compiler must show.
            values = torch.where(values.abs() > 448, torch.nan, values)
        converted = values.to(dtypes[target])
        return converted.view(words[converted.itemsize]).numpy().view(f"u{converted.itemsize}")

    def multiply(a: Any, b: Any, total: Any) -> Any:
        a, b = (convert(x.data, tl.bfloat16, tl.float32, None).view(np.float32) for x in (a, b))
        return interpreter.TensorHandle(a @ b + total.data, tl.float32)

    def dot(builder: Any, a: Any, b: Any, total: Any, *options: Any) -> Any:
        return multiply(a, b, total) if a.dtype.scalar == tl.bfloat16 else as_it_was(builder, a, b, total, *options)

    as_it_was = interpreter.InterpreterBuilder.create_dot
    monkeypatch.setattr(interpreter, "_convert_float", convert)
    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_dot", dot)
