"""What the device can do: bytes a second in a large copy, and operations a second in a large matrix product."""

from __future__ import annotations

import statistics

import torch

from benchmarks.gpu.rows import Bounds
from benchmarks.gpu.sizes import Sizes
from benchmarks.gpu.timing import call_times

DTYPE = torch.bfloat16


def measure(sizes: Sizes, device: str) -> Bounds:
    """Medians; random data, since a GPU's clock is higher on zeros."""
    copy_s, product_s = _copy_s(sizes, device), _product_s(sizes, device)
    return Bounds(
        device=device,
        copy_bytes_per_s=2 * sizes.copy_bytes / statistics.median(copy_s),
        matrix_flops=2 * sizes.matrix**3 / statistics.median(product_s),
        matrix_dtype=str(DTYPE).removeprefix("torch."),
        sizes={"copied bytes": sizes.copy_bytes, "matrix": f"{sizes.matrix}³"},
    )


def _copy_s(sizes: Sizes, device: str) -> list[float]:
    source = torch.randint(0, 2**31, (sizes.copy_bytes // 4,), dtype=torch.int32, device=device)
    target = torch.empty_like(source)
    return call_times(lambda: target.copy_(source), device, repetitions=sizes.repetitions, is_cold=False)


def _product_s(sizes: Sizes, device: str) -> list[float]:
    n = sizes.matrix
    a, b = (torch.randn(n, n, device=device).to(DTYPE) for _ in range(2))
    out = torch.empty(n, n, device=device, dtype=DTYPE)
    return call_times(lambda: torch.mm(a, b, out=out), device, repetitions=sizes.repetitions, is_cold=False)
