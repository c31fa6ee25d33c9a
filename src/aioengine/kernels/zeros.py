"""Zeros that take memory as they are written."""

from __future__ import annotations

import contextlib
import ctypes
import math
import mmap
import weakref

import numpy as np
import torch
from torch import Tensor

_mappings: dict[int, int] = {}
"""Bytes of living mappings, by their addresses."""


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
    try:
        pages = mmap.mmap(-1, max(num_bytes, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:  # a system that promises no more than it has
        raise torch.OutOfMemoryError(f"{num_bytes} bytes: {error}") from error
    with contextlib.suppress(AttributeError, OSError):  # not on every system
        pages.madvise(mmap.MADV_HUGEPAGE)
    data = np.frombuffer(pages, np.uint8, num_bytes)
    _mappings[data.ctypes.data] = len(pages)
    weakref.finalize(pages, _mappings.pop, data.ctypes.data)
    return torch.from_numpy(data).view(dtype).view(size)


def untouched_bytes() -> int:
    """Return how many bytes of `lazy_zeros` in this process the system still counts as free. Milliseconds a GiB."""
    untouched = 0
    for address, num_bytes in list(_mappings.items()):
        is_resident = np.zeros(-(-num_bytes // mmap.PAGESIZE), np.uint8)
        arguments = ctypes.c_void_p(address), ctypes.c_size_t(num_bytes), ctypes.c_void_p(is_resident.ctypes.data)
        if ctypes.CDLL(None).mincore(*arguments) == 0:  # else they went meanwhile
            untouched += mmap.PAGESIZE * int(np.count_nonzero(is_resident & 1 == 0))
    return untouched
