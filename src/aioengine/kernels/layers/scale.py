"""Numbers times a factor, in place, with a soft cap or without: y = x · factor, or c · tanh(y / c).

For embeddings and logits of families that scale them. A program does a part of all numbers. Bound: each is read and
written once, at the memory's speed; with few the time of a launch (2 to 3 µs).

Stays if, at 64 rows of 262,144 float32 logits, it beats torch's three operations of a soft cap by 2; not measured.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from aioengine.kernels.launch_checks import FLOATS, check_tensor

BLOCK = 1024
NUM_WARPS = 4


@triton.jit(do_not_specialize=["num_values"])
def _scale_kernel(x_ptr, num_values, factor, soft_cap, HAS_CAP: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    is_inside = at < num_values
    x = tl.load(x_ptr + at, is_inside, 0.0).to(tl.float32) * factor
    if HAS_CAP:
        # tanh(z) = 2 · σ(2z) - 1, which neither overflows.
        x = soft_cap * (2.0 * tl.sigmoid(2.0 * (x / soft_cap)) - 1.0)
    tl.store(x_ptr + at, x.to(x_ptr.dtype.element_ty), is_inside)


def scale(x: Tensor, factor: float, soft_cap: float | None = None) -> None:
    """As `Operations.scale`."""
    check_tensor("scale: x", x, (None, None), FLOATS, x.device)
    if x.numel():
        _scale_kernel[(-(-x.numel() // BLOCK),)](
            x,
            x.numel(),
            float(factor),
            float(soft_cap or 1.0),
            HAS_CAP=soft_cap is not None,
            BLOCK=BLOCK,
            num_warps=NUM_WARPS,
            enable_fp_fusion=True,
        )
