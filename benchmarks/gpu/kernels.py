"""Each kernel at serving sizes, against the time that its bytes or its operations take at the bounds' rates.

On a GPU these are the Triton kernels; on a CPU the torch oracles, which say that the calls are right and no more.
A call is timed with the GPU's cache overwritten before it, so that ratios stay below 1; in a step some of what a kernel
reads is in the cache, and the small ones cost their launch alone.
"""

from __future__ import annotations

import importlib
import statistics
from collections.abc import Iterator
from typing import Any

import msgspec

from benchmarks.gpu.kernel_cases import CASES, Case, Inputs
from benchmarks.gpu.rows import Bounds, KernelResult
from benchmarks.gpu.running import describe
from benchmarks.gpu.sizes import KernelSizes
from benchmarks.gpu.timing import call_times


def measure(sizes: KernelSizes, device: str, bounds: Bounds) -> Iterator[KernelResult]:
    """Yield what becomes of each case; one that fails says why, and the others go on."""
    name = "triton_operations" if device == "cuda" else "torch.operations"
    operations = importlib.import_module(f"aioengine.kernels.{name}")
    for make in CASES:
        try:
            cases = list(make(Inputs(sizes, device, operations)))
        except Exception as error:
            yield KernelResult(name=make.__name__.strip("_"), size="", device=device, reason=describe(error))
            continue
        for case in cases:
            yield time_case(case, operations, sizes.repetitions, device, bounds)


def time_case(case: Case, operations: Any, repetitions: int, device: str, bounds: Bounds) -> KernelResult:
    result = KernelResult(name=case.operation, size=case.size, device=device)
    try:
        operation = getattr(operations, case.operation)
        median_s = statistics.median(call_times(lambda: case.call(operation), device, repetitions=repetitions))
    except Exception as error:
        return msgspec.structs.replace(result, reason=describe(error))
    of_bytes, of_flops = case.num_bytes / bounds.copy_bytes_per_s, case.flops / bounds.matrix_flops
    bound_s = max(of_bytes, of_flops)
    return msgspec.structs.replace(
        result,
        median_us=median_s * 1e6,
        bound_us=bound_s * 1e6,
        bound_of="bytes" if of_bytes >= of_flops else "operations",
        ratio=bound_s / median_s,
    )
