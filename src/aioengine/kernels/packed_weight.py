"""A matrix of weights in the layout that a device's products read, packed and unpacked a block of rows at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

Quantization = Literal["int8", "int4"]

PANEL = 64
"""Outputs of a panel; rows of a block are a multiple."""

BLOCK_NUMBERS = 2**18
"""Numbers that are packed or unpacked at once, about: 1 MiB of each float32 copy that is made of them."""


@dataclass(frozen=True, slots=True)
class PackedWeight:
    """What `Operations.pack` makes, and only the operations of the same implementation can read.

    Attributes:
        values: in any shape and dtype.
        scales: of quantised values, in any shape; None: the values are not quantised.
        shape: of the dense matrix, (out_features, in_features).
        dtype: of what it is multiplied with and of its embeddings; of the dense matrix, if it is not quantised.
        layout: what ``values`` and ``scales`` look like; "rows": ``values`` is the dense matrix itself.
    """

    values: Tensor
    scales: Tensor | None
    shape: tuple[int, int]
    dtype: torch.dtype
    layout: str

    @property
    def nbytes(self) -> int:
        """Bytes of values and scales."""
        return self.values.nbytes + (self.scales.nbytes if self.scales is not None else 0)


@dataclass(frozen=True, slots=True)
class UnpackedRows:
    """The dense matrix of a packed weight, of which only the rows that are asked for are unpacked.

    Attributes:
        unpack: of the operations that packed it.
    """

    packed: PackedWeight
    unpack: Callable[[PackedWeight, slice], Tensor]

    @property
    def shape(self) -> tuple[int, int]:
        return self.packed.shape

    @property
    def dtype(self) -> torch.dtype:
        return self.packed.dtype if self.packed.scales is None else torch.float32

    @property
    def device(self) -> torch.device:
        return self.packed.values.device

    def __getitem__(self, rows: slice) -> Tensor:
        """One of the `row_blocks`."""
        return self.unpack(self.packed, rows)

    def whole(self) -> Tensor:
        """A copy, made block by block."""
        dense = torch.empty(self.shape, dtype=self.dtype, device=self.device)
        for rows in row_blocks(self.shape):
            dense[rows] = self[rows]
        return dense


def row_blocks(shape: tuple[int, ...]) -> Iterator[slice]:
    """Of [rows, columns], in order: whole panels but for the last, of about `BLOCK_NUMBERS`."""
    num_rows, num_columns = shape
    size = max(PANEL, BLOCK_NUMBERS // num_columns // PANEL * PANEL)
    return (slice(first, min(first + size, num_rows)) for first in range(0, num_rows, size))
