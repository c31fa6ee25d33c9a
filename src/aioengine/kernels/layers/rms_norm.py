"""RMSNorm (Zhang and Sennrich, 2019, arXiv:1910.07467), alone or with the addition to the residual stream before it.

y = x / √(mean(x²) + ε) · w

One program a row, which it holds in registers: each value is read once and written once. Bound: 2 · T · hidden values
moved by `rms_norm` and 4 by `add_rms_norm`, at the memory's speed; with few rows the time of a launch (2 to 3 µs).
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from aioengine.errors import InternalError
from aioengine.kernels.launch_checks import FLOATS, check_tensor

MAX_WIDTH = 1 << 15
"""Wider rows would not fit into the registers of a program."""


@triton.jit
def _normalised(x, weight, eps, WIDTH: tl.constexpr):
    return x * tl.rsqrt(tl.sum(x * x, 0) / WIDTH + eps) * weight


@triton.jit
def _rms_norm_kernel(x_ptr, weight_ptr, out_ptr, eps, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    columns = tl.arange(0, BLOCK)
    is_inside = columns < WIDTH
    first = tl.program_id(0).to(tl.int64) * WIDTH
    x = tl.load(x_ptr + first + columns, is_inside, 0.0).to(tl.float32)
    # Loaded before the sum, so that it does not wait for it.
    weight = tl.load(weight_ptr + columns, is_inside, 0.0).to(tl.float32)
    out = _normalised(x, weight, eps, WIDTH)
    tl.store(out_ptr + first + columns, out.to(out_ptr.dtype.element_ty), is_inside)


@triton.jit
def _add_rms_norm_kernel(x_ptr, residual_ptr, weight_ptr, out_ptr, eps, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    columns = tl.arange(0, BLOCK)
    is_inside = columns < WIDTH
    first = tl.program_id(0).to(tl.int64) * WIDTH
    x = tl.load(x_ptr + first + columns, is_inside, 0.0).to(tl.float32)
    residual = tl.load(residual_ptr + first + columns, is_inside, 0.0).to(tl.float32)
    weight = tl.load(weight_ptr + columns, is_inside, 0.0).to(tl.float32)
    # The norm is that of what is kept: of the rounded sum.
    total = (x + residual).to(residual_ptr.dtype.element_ty)
    tl.store(residual_ptr + first + columns, total, is_inside)
    out = _normalised(total.to(tl.float32), weight, eps, WIDTH)
    tl.store(out_ptr + first + columns, out.to(out_ptr.dtype.element_ty), is_inside)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """As `Operations.rms_norm`."""
    out = torch.empty_like(x)
    constants = _check(x, weight)
    if len(x):
        _rms_norm_kernel[(len(x),)](x, weight, out, float(eps), **constants, enable_fp_fusion=True)
    return out


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
    """As `Operations.add_rms_norm`."""
    out = torch.empty_like(x)
    constants = _check(x, weight)
    check_tensor("rms_norm: residual", residual, tuple(x.shape), x.dtype, x.device)
    if len(x):
        _add_rms_norm_kernel[(len(x),)](x, residual, weight, out, float(eps), **constants, enable_fp_fusion=True)
    return out


def _check(x: Tensor, weight: Tensor) -> dict[str, Any]:
    """The constants of a launch."""
    check_tensor("rms_norm: x", x, (None, None), FLOATS, x.device)
    width = x.shape[1]
    check_tensor("rms_norm: weight", weight, (width,), x.dtype, x.device)
    if not 0 < width <= MAX_WIDTH:
        raise InternalError(f"rms_norm: rows of {width} values; 1 to {MAX_WIDTH} can be done")
    return _constants(width)


@cache
def _constants(width: int) -> dict[str, Any]:
    return {"WIDTH": width, "BLOCK": triton.next_power_of_2(width), "num_warps": num_warps(width)}


def num_warps(width: int) -> int:
    """16 values a thread: two loads of 128 bits of 16-bit values on the way at once; 4 to 16 warps."""
    return 4 if width <= 2048 else 8 if width <= 4096 else 16
