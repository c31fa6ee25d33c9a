"""How long calls take: on a GPU between CUDA events, on a CPU by the clock."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch

CACHE_BYTES = 256 * 2**20
"""More than any GPU's L2: what is written between two calls, so that none finds its inputs there."""
AHEAD = 20
"""Calls that are queued before the first of them is waited for."""


def call_times(
    call: Callable[[], object], device: torch.device, *, repetitions: int, warm_up: int = 3, is_cold: bool = True
) -> list[float]:
    """Seconds of each call.

    Args:
        is_cold: whether the GPU's cache is overwritten before each.
    """
    for _ in range(warm_up):
        call()
    if device.type != "cuda":
        times = []
        for _ in range(repetitions):
            begin_s = time.perf_counter()
            call()
            times.append(time.perf_counter() - begin_s)
        return times
    trash = torch.empty(CACHE_BYTES if is_cold else 1, dtype=torch.int8, device=device)
    times = []
    for first in range(0, repetitions, AHEAD):
        events = []
        for _ in range(min(AHEAD, repetitions - first)):
            # It also keeps the GPU busy while the host launches the call, whose launch is then not in its time.
            trash.zero_()
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            call()
            end.record()
            events.append((begin, end))
        torch.cuda.synchronize()
        times += [begin.elapsed_time(end) / 1e3 for begin, end in events]
    return times


def copy_bytes_per_s(device: torch.device, num_bytes: int = 2**28) -> float:
    """Bytes read and written a second in copies. They are random, since a GPU's clock is higher on zeros."""
    source = torch.randint(0, 2**31, (num_bytes // 4,), dtype=torch.int32, device=device)
    target = torch.empty_like(source)
    times = call_times(lambda: target.copy_(source), device, repetitions=7, is_cold=False)
    return 2 * num_bytes / statistics.median(times)
