"""Logits in blocks with their maxima, so that nearly all of them are only read once.

A greedy row costs one pass, where ``argmax`` takes six times as long.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

BLOCK = 64
"""Logits that share a maximum."""

CHUNK_ELEMENTS = 2**20
"""Logits of the rows that are worked on together: bounds the temporaries to a few MB."""


class BlockedLogits(NamedTuple):
    """Logits, and the maximum of each block of them.

    Attributes:
        values: float32 [n, blocks, BLOCK], padded with -inf.
        maxima: float32 [n, blocks].
    """

    values: Tensor
    maxima: Tensor

    def rows(self, index: Tensor | slice) -> BlockedLogits:
        if isinstance(index, slice):
            return BlockedLogits(self.values[index], self.maxima[index])
        return BlockedLogits(self.values.index_select(0, index), self.maxima.index_select(0, index))


class Scratch:
    """Memory for the temporaries of a draw, reused: fresh pages cost more than the arithmetic on them."""

    def __init__(self) -> None:
        self._tensors: dict[str, Tensor] = {}

    def blocks(self, name: str, num_blocks: int, dtype: torch.dtype) -> Tensor:
        """[num_blocks, BLOCK] of anything, valid until the next call with that name."""
        tensor = self._tensors.get(name)
        if tensor is None or len(tensor) < num_blocks:
            tensor = torch.empty(1 << (num_blocks - 1).bit_length(), BLOCK, dtype=dtype)
            self._tensors[name] = tensor
        return tensor[:num_blocks]


def row_index(rows: NDArray[np.int64]) -> Tensor | slice:
    """Ascending ``rows`` as an index; a slice if none is left out between them, since that copies nothing."""
    first, end = int(rows[0]), int(rows[-1]) + 1
    return slice(first, end) if end - first == len(rows) else torch.from_numpy(rows)


def distinct(rows: NDArray[np.int64]) -> tuple[NDArray[np.int64], Tensor | None]:
    """Ascending ``rows`` without repetition; and for each, which of those it is: int64, None where none is repeated."""
    if (rows[1:] != rows[:-1]).all():
        return rows, None
    members, inverse = np.unique(rows, return_inverse=True)
    return members, torch.from_numpy(inverse)


def put_rows(logits: Tensor, rows: list[int], values: Tensor) -> None:
    """``logits[rows] = values``, in a fifth of the time where rows are long."""
    for row, of_row in zip(rows, values, strict=True):
        logits[row].copy_(of_row)


def block(logits: Tensor) -> BlockedLogits:
    vocab = logits.shape[1]
    if vocab % BLOCK:
        logits = F.pad(logits, (0, -vocab % BLOCK), value=-torch.inf)
    values = logits.view(len(logits), -1, BLOCK)
    return BlockedLogits(values, values.amax(dim=-1))


def likeliest(logits: BlockedLogits) -> tuple[Tensor, Tensor]:
    """int64 [n], the token id of each row's highest logit, the lowest id of several; and float32 [n], that logit.

    A NaN counts as the highest.
    """
    each = torch.arange(len(logits.maxima))
    best_block = logits.maxima.argmax(dim=-1)
    top = logits.maxima.amax(dim=-1)  # both take less than `max`, which brings both
    return best_block * BLOCK + logits.values[each, best_block].argmax(dim=-1), top


def largest(logits: BlockedLogits, k: int) -> tuple[Tensor, Tensor]:
    """The ``k`` highest logits of each row, in descending order, and their token ids: [n, k] each, k at most vocab.

    They lie in the ``k`` blocks with the highest maxima: any other block's logits are all at most its maximum, below
    those ``k`` maxima.
    """
    num_rows, num_blocks, _ = logits.values.shape
    if 4 * k > num_blocks:  # most blocks would have to be looked into
        flat = logits.values.view(num_rows, -1)
        if 8 * k > flat.shape[1]:
            values, ids = flat.sort(descending=True)  # faster than topk for so many
            return values[:, :k], ids[:, :k]
        return flat.topk(k)
    blocks = logits.maxima.topk(k).indices
    candidates = logits.values.gather(1, blocks[:, :, None].expand(-1, -1, BLOCK)).view(num_rows, -1)
    values, places = candidates.topk(k)
    return values, blocks.gather(1, places // BLOCK) * BLOCK + places % BLOCK
