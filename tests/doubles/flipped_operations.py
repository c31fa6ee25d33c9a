"""Plain torch's operations, but for weights that are packed in an order of their own, in the memory that they have: the
last row first, in one dimension."""

from __future__ import annotations

import torch
from torch import Tensor

from aioengine.kernels.operations import Operations
from aioengine.kernels.packed_weight import CodedRows, CodedWeight, PackedWeight, Quantization, UnpackedRows


class FlippedOperations(Operations):
    def pack(
        self,
        weight: Tensor | UnpackedRows | CodedWeight | CodedRows,
        quantization: Quantization | None = None,
        dtype: torch.dtype | None = None,
    ) -> PackedWeight:
        if quantization is not None or isinstance(weight, CodedWeight | CodedRows):
            return super().pack(weight, quantization, dtype)
        assert isinstance(weight, Tensor)
        weight.copy_(weight.flip(0))
        return PackedWeight(weight.view(-1), None, (weight.shape[0], weight.shape[1]), weight.dtype, "flipped")

    def unpack(self, packed: PackedWeight, rows: slice | None = None) -> Tensor:
        return packed.values.view(packed.shape).flip(0) if packed.layout == "flipped" else super().unpack(packed, rows)

    def linear(
        self, x: Tensor, packed: PackedWeight, bias: Tensor | None, out_dtype: torch.dtype | None = None
    ) -> Tensor:
        return super().linear(x, self._in_order(packed), bias, out_dtype)

    def embed(self, token_ids: Tensor, packed: PackedWeight) -> Tensor:
        return super().embed(token_ids, self._in_order(packed))

    def _in_order(self, packed: PackedWeight) -> PackedWeight:
        return super().pack(self.unpack(packed)) if packed.layout == "flipped" else packed


flipped_operations = FlippedOperations()
