"""What the device can do: bytes a second in a large copy, and operations a second in a large matrix product."""

from __future__ import annotations

import statistics

import torch

from aioengine.kernels.kernel_check import call_times, copy_bytes_per_s
from benchmarks.gpu.rows import Bounds
from benchmarks.gpu.sizes import Sizes

DTYPE = torch.bfloat16


def measure(sizes: Sizes, device: str) -> Bounds:
    """Medians; random data, since a GPU's clock is higher on zeros."""
    on, n = torch.device(device), sizes.matrix
    a, b = (torch.randn(n, n, device=on).to(DTYPE) for _ in range(2))
    out = torch.empty(n, n, device=on, dtype=DTYPE)
    times = call_times(lambda: torch.mm(a, b, out=out), on, repetitions=sizes.repetitions, is_cold=False)
    return Bounds(
        device=device,
        copy_bytes_per_s=copy_bytes_per_s(on, sizes.copy_bytes),
        matrix_flops=2 * n**3 / statistics.median(times),
        matrix_dtype=str(DTYPE).removeprefix("torch."),
        sizes={"copied bytes": sizes.copy_bytes, "matrix": f"{n}³"},
    )
