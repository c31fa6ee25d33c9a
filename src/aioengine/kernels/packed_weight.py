"""A matrix of weights in the layout that a device's products read, packed and unpacked a block of rows at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

Quantization = Literal["int8", "int4"]

PANEL = 64
"""Outputs of a panel; rows of a block are a multiple."""

BLOCK_NUMBERS = 2**18
"""Numbers that are packed or unpacked at once, about: 1 MiB of each float32 copy that is made of them."""


@dataclass(frozen=True, slots=True)
class CodedWeight:
    """A matrix as a quantised checkpoint holds it, its codes unpacked: table[code] · scale + offset, in float32.

    Attributes:
        codes: uint8 [out_features, in_features], below 2 ** bits.
        bits: 4 or 8.
        table: float32 [2 ** bits], what codes stand for; None: code - 2 ** (bits - 1).
        scales: float32 [out_features, ⌈in_features / group⌉].
        offsets: float32, as many; None: 0.
        group: consecutive inputs that share a scale and an offset; the last group of a row may be shorter.
    """

    codes: Tensor
    bits: int
    table: Tensor | None
    scales: Tensor
    offsets: Tensor | None
    group: int

    @property
    def shape(self) -> tuple[int, int]:
        return self.codes.shape[0], self.codes.shape[1]

    @property
    def device(self) -> torch.device:
        return self.codes.device

    def dense(self) -> Tensor:
        """float32 [out_features, in_features]: the product rounded, then the sum."""
        if self.table is None:
            values = self.codes.float().sub_(1 << (self.bits - 1))
        else:
            values = self.table.index_select(0, self.codes.flatten().int()).view(self.codes.shape)
        return scale_groups(values, self.scales, self.offsets, self.group)

    def to(self, device: torch.device) -> CodedWeight:
        table, offsets = (tensor if tensor is None else tensor.to(device) for tensor in (self.table, self.offsets))
        codes, scales = self.codes.to(device), self.scales.to(device)
        return replace(self, codes=codes, table=table, scales=scales, offsets=offsets)

    def __getitem__(self, rows: slice | Tensor) -> CodedWeight:
        """Some rows, in the order of their indices if these are a tensor."""
        offsets = None if self.offsets is None else self.offsets[rows]
        return replace(self, codes=self.codes[rows], scales=self.scales[rows], offsets=offsets)

    def spread(self, ids: Tensor, num_rows: int) -> CodedWeight:
        """The matrix of so many rows in which these are the ones with ``ids``, int64 [out_features]; others are 0."""
        if torch.equal(ids, torch.arange(num_rows)):
            return self
        ids, kept = ids.to(self.device), {}
        for name in ("codes", "scales", "offsets"):
            values = getattr(self, name)
            if values is not None:
                kept[name] = values.new_zeros(num_rows, values.shape[1]).index_copy_(0, ids, values)
        return replace(self, **kept)

    def _widened(self, bits: int, group: int) -> CodedWeight:
        """The same values in codes of as many bits or more, if there is no table, in groups that its own consist of."""
        if (bits, group) == (self.bits, self.group):
            return self
        codes = self.codes + ((1 << (bits - 1)) - (1 << (self.bits - 1)))
        times, num_groups = self.group // group, -(-self.shape[1] // group)
        scales = self.scales.repeat_interleave(times, dim=1)[:, :num_groups]
        offsets = None if self.offsets is None else self.offsets.repeat_interleave(times, dim=1)[:, :num_groups]
        return replace(self, codes=codes, bits=bits, scales=scales, offsets=offsets, group=group)

    def rows(self) -> CodedRows:
        kept = [self.scales] if self.offsets is None else [self.scales, self.offsets]
        dtypes = (torch.bfloat16, torch.float16)
        exact = (dtype for dtype in dtypes if all(torch.equal(each.to(dtype).float(), each) for each in kept))
        coding = Coding(self.bits, self.table, min(self.group, self.shape[1]))
        return CodedRows(self.shape, coding, next(exact, torch.float32), len(kept) > 1, self.device, self.__getitem__)

    @staticmethod
    def cat(parts: Sequence[CodedWeight]) -> CodedWeight:
        """One below the other, with the values that they have, in the most bits and the smallest group of them.

        Raises:
            ValueError: no group of these would do for all, they have other tables, or other numbers of inputs.
        """
        bits, group = max(part.bits for part in parts), min(part.group for part in parts)
        first = parts[0]
        for part in parts:
            if part.group % group or part.shape[1] != first.shape[1]:
                raise ValueError("matrices of these groups or inputs cannot be one coded matrix")
            if not have_same_table(part.table, first.table):
                raise ValueError("matrices with other tables cannot be one coded matrix")
        parts = [part._widened(bits, group) for part in parts]
        first = parts[0]
        offsets = None
        if any(part.offsets is not None for part in parts):
            offsets = torch.cat([torch.zeros_like(p.scales) if p.offsets is None else p.offsets for p in parts])
        codes, scales = torch.cat([part.codes for part in parts]), torch.cat([part.scales for part in parts])
        return replace(first, codes=codes, scales=scales, offsets=offsets)


def have_same_table(one: Tensor | None, other: Tensor | None) -> bool:
    return one is other or (one is not None and other is not None and torch.equal(one, other))


def scale_groups(values: Tensor, scales: Tensor, offsets: Tensor | None, group: int) -> Tensor:
    """Multiply each group by its scale, and add its offset, in place.

    Args:
        values: float32 [rows, columns].
        scales, offsets: float32 [rows, ⌈columns / group⌉].
    Returns:
        ``values``.
    """
    num_whole = values.shape[1] // group
    whole = values[:, : num_whole * group].unflatten(1, (num_whole, group))
    rest = values[:, num_whole * group :]
    whole.mul_(scales[:, :num_whole, None])
    rest.mul_(scales[:, num_whole:])
    if offsets is not None:
        whole.add_(offsets[:, :num_whole, None])
        rest.add_(offsets[:, num_whole:])
    return values


@dataclass(frozen=True, slots=True)
class Coding:
    """The values of codes, before scales and offsets.

    Attributes:
        bits, table, group: as in `CodedWeight`.
        lookup: the table as the operations read it that packed the codes, if that is otherwise.
    """

    bits: int
    table: Tensor | None
    group: int
    lookup: Tensor | None = None

    def is_same(self, other: Coding) -> bool:
        return (self.bits, self.group) == (other.bits, other.group) and have_same_table(self.table, other.table)


@dataclass(frozen=True, slots=True)
class CodedRows:
    """A coded matrix whose rows are made when they are asked for.

    Attributes:
        scales_dtype: in which all scales and offsets are exact.
        make: a block of rows.
    """

    shape: tuple[int, int]
    coding: Coding
    scales_dtype: torch.dtype
    has_offsets: bool
    device: torch.device
    make: Callable[[slice], CodedWeight]

    def __getitem__(self, rows: slice) -> CodedWeight:
        """One of the `row_blocks`."""
        return self.make(rows)


@dataclass(frozen=True, slots=True)
class PackedWeight:
    """A weight as `Operations.pack` makes it, which only the operations of the same implementation can read.

    Attributes:
        values: in any shape and dtype.
        scales: of quantised values, in any shape; None: the values are not quantised.
        shape: of the dense matrix, (out_features, in_features).
        dtype: of what it is multiplied with and of its embeddings; of the dense matrix, if it is not quantised.
        layout: what ``values`` and ``scales`` look like; "rows": ``values`` is the dense matrix itself.
        coding: of values that are codes, as they are in a `CodedWeight`; their scales are [1 or 2, …], offsets second.
    """

    values: Tensor
    scales: Tensor | None
    shape: tuple[int, int]
    dtype: torch.dtype
    layout: str
    coding: Coding | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of values and scales."""
        return self.values.nbytes + (self.scales.nbytes if self.scales is not None else 0)

    def is_alike(self, other: PackedWeight) -> bool:
        """Whether the values and scales of the other, packed by the same operations, can take the place of these."""
        ours, theirs = (
            [(each.shape, each.dtype) for each in (packed.values, packed.scales) if each is not None]
            for packed in (self, other)
        )
        if self.coding is None or other.coding is None:
            return ours == theirs and self.coding is other.coding
        return ours == theirs and self.coding.is_same(other.coding)


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
    """Cut [rows, columns] into blocks of whole panels (but for the last), of about `BLOCK_NUMBERS` numbers."""
    num_rows, num_columns = shape
    size = max(PANEL, BLOCK_NUMBERS // num_columns // PANEL * PANEL)
    return (slice(first, min(first + size, num_rows)) for first in range(0, num_rows, size))


def in_panels(num_rows: int) -> int:
    """Rows of whole panels that so many rows take: what of a stack of matrices begins a panel begins a multiple of."""
    return -(-num_rows // PANEL) * PANEL
