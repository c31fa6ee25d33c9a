"""Products with weights in plain torch: cuBLAS on a GPU, oneDNN and MKL on a CPU. They are Triton's, too."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional as F

from aioengine.kernels.packed_weight import CodedRows, CodedWeight, PackedWeight, Quantization, UnpackedRows, row_blocks
from aioengine.kernels.torch.quantized import (
    coded_rows,
    embed_quantized,
    int4_rows,
    pack_coded,
    pack_int8,
    quantize_rows,
    unpack_quantized,
)

HAS_PRODUCTS = {
    torch.bfloat16: torch.ops.mkldnn._is_mkldnn_bf16_supported(),
    torch.float16: torch.ops.mkldnn._is_mkldnn_fp16_supported(),
    torch.int8: torch.cpu._is_vnni_supported(),
}
"""Whether oneDNN multiplies a dtype on this processor; a loop of torch's own takes the others, row by row."""
WIDENED_OUTPUTS = 512
"""Outputs of a weight that are float32 at once: 2 MiB at 1,024 inputs, which stays in a core's caches."""
ROWS_TO_WIDEN = 8
"""From so many rows on a product of widened weights is faster than torch's loop for 16 bits: 1.4 times at 8 rows, 4
times at 64 and more (AVX2, 1024 × 3072). Its loop for int8 is slower for any number of rows, 26 times at 64."""


def pack(
    weight: Tensor | UnpackedRows | CodedWeight | CodedRows,
    quantization: Quantization | None = None,
    dtype: torch.dtype | None = None,
) -> PackedWeight:
    """As `Operations.pack`: a weight that is not quantised stays as it is."""
    if isinstance(weight, CodedWeight | CodedRows):
        return pack_coded(weight.rows() if isinstance(weight, CodedWeight) else weight, dtype or torch.float32)
    if quantization == "int4":
        return pack_coded(int4_rows(weight), dtype or weight.dtype)
    if quantization == "int8":
        return pack_int8(weight, dtype or weight.dtype)
    assert isinstance(weight, Tensor)
    rows, columns = weight.shape
    return PackedWeight(weight, None, (rows, columns), weight.dtype, "rows")


def unpack(packed: PackedWeight, rows: slice | None = None) -> Tensor:
    """As `Operations.unpack`."""
    if packed.scales is None:
        return packed.values if rows is None else packed.values[rows]
    return UnpackedRows(packed, unpack_quantized).whole() if rows is None else unpack_quantized(packed, rows)


def unpack_codes(packed: PackedWeight) -> CodedRows:
    """As `Operations.unpack_codes`."""
    assert packed.scales is not None
    assert packed.coding is not None
    has_offsets, device = len(packed.scales) == 2, packed.values.device
    make = partial(coded_rows, packed)
    return CodedRows(packed.shape, packed.coding, packed.scales.dtype, has_offsets, device, make)


def linear(x: Tensor, packed: PackedWeight, bias: Tensor | None, out_dtype: torch.dtype | None = None) -> Tensor:
    """As `Operations.linear`.

    On a GPU wider outputs are the product's own float32 sums, where torch gives them: rounding to 16 bits would make
    ties of logits that are none, and a second tensor as large as the vocabulary.
    """
    weight, dtype = packed.values, out_dtype or x.dtype
    if packed.coding is not None:
        x, blocks = x.float(), row_blocks(packed.shape)
        product = torch.cat([F.linear(x, unpack_quantized(packed, rows)) for rows in blocks], dim=-1)
    elif packed.scales is not None:
        values, steps = quantize_rows(x)
        if x.is_cuda or HAS_PRODUCTS[torch.int8]:
            product = torch._int_mm(values, weight.t()).float()
        else:
            product = _multiply_widened(values, weight)
        product *= steps * packed.scales.view(1, -1)
    elif x.is_cuda and bias is None and dtype != x.dtype and hasattr(torch.ops.aten.mm, "dtype"):
        return torch.mm(x, weight.t(), out_dtype=dtype)
    elif x.is_cuda or len(x) < ROWS_TO_WIDEN or HAS_PRODUCTS.get(x.dtype, True):
        return F.linear(x, weight, bias).to(dtype)
    else:
        product = _multiply_widened(x, weight)
    return (product if bias is None else product + bias.float()).to(dtype)


def some_rows(packed: PackedWeight, rows: slice) -> PackedWeight:
    """Some outputs of a weight that `pack` packed, as a view."""
    scales = packed.scales
    if scales is not None:
        scales = scales[rows] if packed.coding is None else scales[:, rows]
    return replace(packed, values=packed.values[rows], scales=scales, shape=(rows.stop - rows.start, packed.shape[1]))


def _multiply_widened(x: Tensor, weight: Tensor) -> Tensor:
    """A product in float32 [rows, outputs], some outputs' weights after the other."""
    x = x.float()
    return torch.cat([F.linear(x, some.float()) for some in weight.split(WIDENED_OUTPUTS)], dim=-1)


def embed(token_ids: Tensor, packed: PackedWeight) -> Tensor:
    """As `Operations.embed`."""
    return F.embedding(token_ids, packed.values) if packed.scales is None else embed_quantized(token_ids, packed)
