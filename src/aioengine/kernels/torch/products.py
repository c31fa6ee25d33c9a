"""Products with weights in plain torch: cuBLAS on a GPU, oneDNN and MKL on a CPU. They are Triton's, too."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from aioengine.kernels.packed_weight import PackedWeight, Quantization
from aioengine.kernels.torch.quantized import linear_quantized, pack_quantized, unpack_quantized

HAS_HALF_PRODUCTS = {
    torch.bfloat16: torch.ops.mkldnn._is_mkldnn_bf16_supported(),
    torch.float16: torch.ops.mkldnn._is_mkldnn_fp16_supported(),
}
"""Dtypes of 16 bits that oneDNN multiplies on this processor; torch's own loop takes the others, row by row."""
WIDENED_OUTPUTS = 512
"""Outputs of a weight that are float32 at once: 2 MiB at 1,024 inputs, which stays in a core's caches."""
ROWS_TO_WIDEN = 8
"""From so many rows on a product in float32, its weights widened, is faster than torch's own loop: 1.4 times at 8 rows,
4 times at 64 and more (AVX2, 1024 × 3072)."""


def pack(weight: Tensor, quantization: Quantization | None = None, dtype: torch.dtype | None = None) -> PackedWeight:
    """As `Operations.pack`: a weight that is not quantised stays as it is."""
    if quantization is not None:
        return pack_quantized(weight, quantization, dtype or weight.dtype)
    rows, columns = weight.shape
    return PackedWeight(weight, None, (rows, columns), weight.dtype, "rows")


def unpack(packed: PackedWeight) -> Tensor:
    """As `Operations.unpack`."""
    return packed.values if packed.scales is None else unpack_quantized(packed)


def linear(x: Tensor, packed: PackedWeight, bias: Tensor | None, out_dtype: torch.dtype | None = None) -> Tensor:
    """As `Operations.linear`.

    On a GPU wider outputs are the product's own float32 sums, where torch gives them: rounding to 16 bits would make
    ties of logits that are none, and a second tensor as large as the vocabulary.
    """
    weight, dtype = packed.values, out_dtype or x.dtype
    if packed.scales is not None:
        return linear_quantized(x, packed, bias, dtype)
    if x.is_cuda and bias is None and dtype != x.dtype and hasattr(torch.ops.aten.mm, "dtype"):
        return torch.mm(x, weight.t(), out_dtype=dtype)
    if not x.is_cuda and len(x) >= ROWS_TO_WIDEN and not HAS_HALF_PRODUCTS.get(x.dtype, True):
        wide = x.float()
        product = torch.cat([F.linear(wide, some.float()) for some in weight.split(WIDENED_OUTPUTS)], dim=-1)
        return (product if bias is None else product + bias).to(dtype)
    return F.linear(x, weight, bias).to(dtype)


def embed(token_ids: Tensor, packed: PackedWeight) -> Tensor:
    """As `Operations.embed`."""
    rows = F.embedding(token_ids, packed.values)
    if packed.scales is None:
        return rows
    assert packed.layout == "int8"
    return (rows * packed.scales[token_ids]).to(packed.dtype)
