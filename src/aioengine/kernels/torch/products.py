"""Products with weights in plain torch: cuBLAS on a GPU, oneDNN and MKL on a CPU. They are Triton's, too."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from aioengine.kernels.packed_weight import PackedWeight, Quantization
from aioengine.kernels.torch.quantized import linear_quantized, pack_quantized, unpack_quantized


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
    return F.linear(x, weight, bias).to(dtype)


def embed(token_ids: Tensor, packed: PackedWeight) -> Tensor:
    """As `Operations.embed`."""
    rows = F.embedding(token_ids, packed.values)
    if packed.scales is None:
        return rows
    assert packed.layout == "int8"
    return (rows * packed.scales[token_ids]).to(packed.dtype)
