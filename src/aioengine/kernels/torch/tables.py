"""Writes to tables that a CUDA graph can record: no shape depends on a value, and the host waits for none."""

from __future__ import annotations

import math

import torch
from torch import Tensor

INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def as_integers(numbers: Tensor) -> Tensor:
    """The bits of numbers as a view, in the widest integers that its last dimension consists of."""
    strides = (each * numbers.itemsize for each in (*numbers.stride()[:-1], numbers.storage_offset()))
    word_bytes = math.gcd(8, numbers.shape[-1] * numbers.itemsize, *strides)
    return numbers.view(INTEGERS[word_bytes])


def put_where(table: Tensor, places: Tensor, values: Tensor, is_put: Tensor) -> None:
    """``table[places] = values``, in place, where ``is_put``; other places and values may be anything.

    The others add 0 to the first row. Differences of integers wrap around, so that the sums are exact.

    Args:
        table: integers [any, ...].
        places: integers [m], each once where ``is_put``.
        values: [m, ...], of the table's dtype.
        is_put: bool [m].
    """
    if not table.numel():
        return
    places = torch.where(is_put, places, 0)
    change = values - table.index_select(0, places)
    table.index_add_(0, places, change.masked_fill_(~is_put.view(-1, *[1] * (values.dim() - 1)), 0))
