"""Each kernel at serving sizes, against the time that its bytes or its operations take at the bounds' rates.

On a GPU these are the Triton kernels; on a CPU plain torch, which says that the calls are right and no more.
A call is timed with the GPU's cache overwritten before it, so that ratios stay below 1; in a step some of what a kernel
reads is in the cache, and the small ones cost their launch alone.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator

import msgspec
import torch

from aioengine.kernels.kernel_cases import GROUPS, Case, CaseSizes, Inputs
from aioengine.kernels.kernel_check import call_times
from aioengine.kernels.operations import Operations, plain_torch
from aioengine.kernels.triton import find_launchers, triton_operations
from benchmarks.gpu.rows import Bounds, KernelResult
from benchmarks.gpu.running import describe


def measure(sizes: CaseSizes, device: str, bounds: Bounds, repetitions: int) -> Iterator[KernelResult]:
    """Yield what becomes of each case; one that fails says why, and the others go on."""
    operations = plain_torch if device == "cpu" else triton_operations()
    inputs = Inputs(sizes, torch.device(device), torch.bfloat16 if device == "cuda" else torch.float32, operations)
    for make in GROUPS:
        try:
            cases = [case for case in make(inputs) if case.operation in find_launchers()]
        except Exception as error:
            yield KernelResult(name=make.__name__.strip("_"), size="", device=device, reason=describe(error))
            continue
        for case in cases:
            yield time_case(case, operations, repetitions, inputs.device, bounds)


def time_case(
    case: Case, operations: Operations, repetitions: int, device: torch.device, bounds: Bounds
) -> KernelResult:
    result = KernelResult(name=case.operation, size=case.size, device=device.type)
    try:
        call, _ = case.prepare(operations)
        median_s = statistics.median(call_times(call, device, repetitions=repetitions))
    except Exception as error:
        return msgspec.structs.replace(result, reason=describe(error))
    of_bytes, of_flops = case.count_bytes(operations) / bounds.copy_bytes_per_s, case.flops / bounds.matrix_flops
    bound_s = max(of_bytes, of_flops)
    return msgspec.structs.replace(
        result,
        median_us=median_s * 1e6,
        bound_us=bound_s * 1e6,
        bound_of="bytes" if of_bytes >= of_flops else "operations",
        ratio=bound_s / median_s,
    )
