"""Products of a few rows with weights at each width: ``python -m benchmarks.cpu.products [--threads N] [--rows N,…]``.

For each kind of weight: its bits, the time of a product, and the bytes of the weight that are read in a second, beside
what the same product with bfloat16 weights reads.
"""

from __future__ import annotations

import argparse

import torch

from aioengine.kernels.native.compilation import compile_library
from aioengine.kernels.native.kernels.parts import ALL_PARTS
from aioengine.kernels.native.operations import NativeOperations
from aioengine.kernels.native.team import Team
from aioengine.kernels.operations import Operations
from aioengine.kernels.packed_weight import CodedWeight, PackedWeight, Quantization
from benchmarks.cpu.limits import best_s

OUT_FEATURES, IN_FEATURES = 16384, 8192
"""134 million weights: more than caches hold, even of 4 bits."""

E2M1 = torch.tensor([0.0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
E4M3 = torch.arange(256).to(torch.uint8).view(torch.float8_e4m3fn).float().nan_to_num(448.0)
NORMAL = torch.erfinv(torch.linspace(-0.99, 0.99, 16))

CODED = {
    "4 bits, groups of 32, float16 scales (GGUF's Q4_0)": (4, None, 32, torch.float16, False),
    "4 bits, groups of 32, scales and offsets (Q4_K)": (4, None, 32, torch.float32, True),
    "4 bits, groups of 128, scales and offsets (GPTQ, AWQ)": (4, None, 128, torch.float16, True),
    "4 bits, e2m1, groups of 32 (MXFP4)": (4, E2M1, 32, torch.bfloat16, False),
    "4 bits, any table, groups of 64 (NF4)": (4, NORMAL, 64, torch.float32, False),
    "8 bits, groups of 16 (Q6_K)": (8, None, 16, torch.float32, False),
    "8 bits, groups of 32, float16 scales (Q8_0)": (8, None, 32, torch.float16, False),
    "8 bits, e4m3, groups of 128 (FP8)": (8, E4M3, 128, torch.float32, False),
}
"""Bits, table, group, dtype of scales, whether there are offsets."""


def of_codes(bits: int, table: torch.Tensor | None, group: int, dtype: torch.dtype, has_offsets: bool) -> CodedWeight:
    codes = torch.randint(0, 1 << bits, (OUT_FEATURES, IN_FEATURES), dtype=torch.uint8)
    scales = torch.rand(OUT_FEATURES, -(-IN_FEATURES // group)).to(dtype).float()
    return CodedWeight(codes, bits, table, scales, scales if has_offsets else None, group)


def weights(operations: Operations) -> dict[str, PackedWeight]:
    dense = torch.ones(OUT_FEATURES, IN_FEATURES, dtype=torch.bfloat16)
    quantizations: tuple[Quantization | None, ...] = (None, "int8", "int4")
    made = {quantization or "bfloat16": operations.pack(dense.clone(), quantization) for quantization in quantizations}
    return made | {name: operations.pack(of_codes(*coding), None, torch.bfloat16) for name, coding in CODED.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--rows", default="1", help="numbers of rows, such as 1,8,64")
    parser.add_argument("--seconds", type=float, default=1.0, help="for each, of which the shortest call counts")
    args = parser.parse_args()
    team = Team(compile_library(ALL_PARTS), args.threads)
    operations = NativeOperations(team)
    packed = weights(operations)
    for num_rows in map(int, args.rows.split(",")):
        print(f"{num_rows} rows, {args.threads} threads")
        x, dense_s = torch.randn(num_rows, IN_FEATURES).bfloat16(), 0.0
        for name, weight in packed.items():

            def product(weight: PackedWeight = weight) -> object:
                return operations.linear(x, weight, None)  # noqa: B023 (called before the next)

            seconds = best_s(product, args.seconds)
            dense_s = dense_s or seconds
            bits = 8 * weight.nbytes / (OUT_FEATURES * IN_FEATURES)
            print(
                f"  {bits:5.2f} bits {seconds * 1e3:8.2f} ms {weight.nbytes / seconds / 1e9:6.1f} GB/s "
                f"{dense_s / seconds:5.2f} × bfloat16  {name}"
            )
    team.close()


if __name__ == "__main__":
    main()
