"""Zeros that take memory as they are written."""

from __future__ import annotations

import contextlib
import math
import mmap

import numpy as np
import torch
from torch import Tensor


def lazy_zeros(*size: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """``torch.zeros``; in the host's memory in pages of their own, which the system hands out when they are first
    written and has back with the last reference.

    torch.zeros writes them all; calloc does so, too, with memory that it had before, and keeps what was freed.

    Raises:
        torch.OutOfMemoryError: there is no room for them.
    """
    if device.type != "cpu":
        return torch.zeros(size, dtype=dtype, device=device)
    num_bytes = math.prod(size) * dtype.itemsize
    pages = mmap.mmap(-1, max(num_bytes, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(AttributeError, OSError):  # not on every system
        pages.madvise(mmap.MADV_HUGEPAGE)
    return torch.from_numpy(np.frombuffer(pages, np.uint8, num_bytes)).view(dtype).view(size)
