"""Plain torch's operations, but for weights that are packed in an order of their own, in the memory that they have: the
last row first, in one dimension."""

from __future__ import annotations

import torch
from torch import Tensor

from aioengine.kernels.packed_weight import CodedRows, CodedWeight, PackedWeight, Quantization, UnpackedRows
from aioengine.kernels.torch import products
from aioengine.kernels.torch.operations import *  # noqa: F403 (all but the four below)


def pack(
    weight: Tensor | UnpackedRows | CodedWeight | CodedRows,
    quantization: Quantization | None = None,
    dtype: torch.dtype | None = None,
) -> PackedWeight:
    if quantization is not None or isinstance(weight, CodedWeight | CodedRows):
        return products.pack(weight, quantization, dtype)
    assert isinstance(weight, Tensor)
    weight.copy_(weight.flip(0))
    return PackedWeight(weight.view(-1), None, (weight.shape[0], weight.shape[1]), weight.dtype, "flipped")


def unpack(packed: PackedWeight, rows: slice | None = None) -> Tensor:
    return packed.values.view(packed.shape).flip(0) if packed.layout == "flipped" else products.unpack(packed, rows)


def linear(x: Tensor, packed: PackedWeight, bias: Tensor | None, out_dtype: torch.dtype | None = None) -> Tensor:
    return products.linear(x, products.pack(unpack(packed)) if packed.layout == "flipped" else packed, bias, out_dtype)


def embed(token_ids: Tensor, packed: PackedWeight) -> Tensor:
    return products.embed(token_ids, products.pack(unpack(packed)) if packed.layout == "flipped" else packed)
