"""Threads with stacks of their own size, for C and Rust code that recurses; and how many cores keep them busy."""

from __future__ import annotations

import contextlib
import math
import threading
from pathlib import Path

CGROUPS, OWN_CGROUP = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")

_lock = threading.Lock()
"""The size is the interpreter's: of two that set it at once the second would take the first one's for the usual."""


def start_with_stack(thread: threading.Thread, num_bytes: int) -> None:
    """Start a thread with a stack of so many bytes; 0: of the usual size.

    Raises:
        RuntimeError: there are too many threads.
    """
    with _lock:
        before = threading.stack_size(num_bytes) if num_bytes else 0
        try:
            thread.start()
        finally:
            if num_bytes:
                threading.stack_size(before)


def processor_quota(cgroups: Path = CGROUPS, own: Path = OWN_CGROUP) -> float:
    """The processor time that a process's control groups (Linux, version 2) allow it, in cores; inf: any.

    Args:
        own: the file that names its group.
    """
    try:
        group = cgroups / own.read_text().rpartition("::")[2].strip().lstrip("/")
    except OSError:
        return math.inf
    quota = math.inf
    for each in (group, *group.parents):
        with contextlib.suppress(OSError, ValueError):  # "max": no limit
            quota_us, period_us = (each / "cpu.max").read_text().split()
            quota = min(quota, float(quota_us) / float(period_us))
    return quota
