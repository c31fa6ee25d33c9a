"""What this machine does at best, measured: ``python -m benchmarks.cpu.limits --out FILE [--threads N]``.

Every operation that might reach a limit is tried, the fastest one tells it: a bound that the engine could exceed would
be none. The engine's own kernels are tried, too.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterable
from pathlib import Path

import msgspec
import torch
from torch import Tensor
from torch.nn import functional as F

from aioengine.kernels.operations import Operations
from benchmarks.cpu.workloads import Limits

READ_BYTES = 2**30
ROWS, IN_FEATURES, OUT_FEATURES = 1024, 1024, 4096
MEASURE_S = 0.5
LARGE_INPUTS = 1024
"""Of a weight that is read in whole by a product with one row."""

Operation = Callable[[], object]


def best_s(operation: Operation, seconds: float) -> float:
    """The shortest of all calls in this time, after one to warm up."""
    operation()
    best, end = float("inf"), time.perf_counter() + seconds
    while time.perf_counter() < end:
        begin = time.perf_counter()
        operation()
        best = min(best, time.perf_counter() - begin)
    return best


def reads(native: Operations | None) -> Iterable[tuple[str, Operation]]:
    """Operations that read `READ_BYTES`."""
    words = torch.ones(READ_BYTES // 4)
    yield "torch.sum", words.sum
    weight = torch.ones(READ_BYTES // 2 // LARGE_INPUTS, LARGE_INPUTS, dtype=torch.bfloat16)
    row = torch.ones(1, LARGE_INPUTS, dtype=torch.bfloat16)
    for name, product in bfloat16_products(native, row, weight):
        yield f"{name}, 1 row", product


def bfloat16_products(native: Operations | None, x: Tensor, weight: Tensor) -> Iterable[tuple[str, Operation]]:
    yield "F.linear", lambda: F.linear(x, weight)
    if torch._C._has_mkldnn and torch.ops.mkldnn._is_mkldnn_bf16_supported():
        packed = torch.ops.mkldnn._reorder_linear_weight(weight, len(x))
        yield "oneDNN packed", lambda: torch.ops.mkldnn._linear_pointwise(x, packed, None, "none", [], "")
    if native is not None:
        panels = native.pack(weight)
        yield "native", lambda: native.linear(x, panels, None)


def int8_products(native: Operations | None) -> Iterable[tuple[str, Operation]]:
    if native is not None:
        rows = torch.randn(ROWS, IN_FEATURES).bfloat16()
        panels = native.pack(torch.randn(OUT_FEATURES, IN_FEATURES).bfloat16(), "int8")
        yield "native, rows quantised", lambda: native.linear(rows, panels, None)
    if not torch.cpu._is_vnni_supported():
        return  # oneDNN takes minutes then
    x = torch.randint(0, 255, (ROWS, IN_FEATURES), dtype=torch.uint8)
    weight = torch.randint(-127, 128, (OUT_FEATURES, IN_FEATURES), dtype=torch.int8)
    scales, zeros = torch.rand(OUT_FEATURES), torch.zeros(OUT_FEATURES, dtype=torch.int32)
    packed = torch.ops.onednn.qlinear_prepack(weight, None)

    def product() -> Tensor:
        return torch.ops.onednn.qlinear_pointwise(
            x, 0.02, 128, packed, scales, zeros, None, 1.0, 0, torch.bfloat16, "none", [], ""
        )

    yield "oneDNN u8×s8 packed", product


def fastest(operations: Iterable[tuple[str, Operation]], seconds: float) -> tuple[float, str]:
    return min((best_s(operation, seconds), name) for name, operation in operations)


def native_operations(*, compiles: bool) -> Operations | None:
    """The engine's own, if it has any. Where they are not compiled yet, that is done, or there are none."""
    try:
        from aioengine.kernels.native.compilation import compile_library
        from aioengine.kernels.native.library import find_library
        from aioengine.kernels.native.native_operations import NativeOperations
        from aioengine.kernels.native.parts import parts_of
        from aioengine.kernels.native.team import Team
    except ImportError:  # an earlier version
        return None
    parts = parts_of("bfloat16", "int8")
    library = find_library(parts) or (compile_library(parts) if compiles else None)
    return NativeOperations(Team(library, torch.get_num_threads())) if library is not None else None


def measure(native: Operations | None, seconds: float) -> Limits:
    x, weight = (torch.randn(n, IN_FEATURES).bfloat16() for n in (ROWS, OUT_FEATURES))
    flops, found_by = {}, {}
    read_s, found_by["read"] = fastest(reads(native), seconds)
    # Without products of bfloat16 a processor computes in float32.
    wide_x, wide_weight = x.float(), weight.float()
    of_bfloat16 = (*bfloat16_products(native, x, weight), ("float32", lambda: F.linear(wide_x, wide_weight)))
    for dtype, products in (("bfloat16", of_bfloat16), ("int8", int8_products(native))):
        product_s, found_by[dtype] = fastest(products, seconds)
        flops[dtype] = 2 * ROWS * IN_FEATURES * OUT_FEATURES / product_s
    return Limits(READ_BYTES / read_s, flops, found_by)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--tiny", action="store_true", help="to try the command; measures nothing")
    args = parser.parse_args()
    if args.threads:
        torch.set_num_threads(args.threads)
    # Compiled here, what a measured engine would compile beside its steps disturbs none.
    native = native_operations(compiles=not args.tiny)
    args.out.write_bytes(msgspec.json.encode(measure(native, MEASURE_S / 25 if args.tiny else MEASURE_S)))


if __name__ == "__main__":
    main()
