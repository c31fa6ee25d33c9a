"""How many KV blocks fit, by the memory that is free and by what the sequences could ever use; and giving it back."""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
from bisect import bisect_right
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

from aioengine.config import MODEST_HOST_SHARE, MOST_HOST_SHARE, EngineConfig
from aioengine.errors import ConfigError
from aioengine.executor.accelerator import DeviceMemory
from aioengine.scheduler.cache_layout import CacheLayout

logger = logging.getLogger("aioengine")

FALLBACK_MEMORY_BYTES = 8 * 2**30
"""Taken for the machine's memory where the system does not report it."""


def num_kv_blocks(
    config: EngineConfig,
    layout: CacheLayout,
    *,
    max_model_len: int,
    memory: DeviceMemory,
    peak_bytes: int | None,
    max_in_flight: int = 1,
) -> list[int]:
    """Blocks of each pool of the cache: as many as the config grants, but no more than its sequences could use.

    On a CPU ``memory_utilization`` is a share of what the host has free, by its control groups, too, and less what
    other engines of this process have reserved and not written yet. Absent it is a tenth, or what one sequence of
    ``max_model_len`` needs if that is more, up to four tenths: an engine is a guest, and the memory fills over time.
    ``gpu_memory_utilization`` is a share of all that a GPU has, of which what is in use and what the steps take are no
    part of the cache.

    Args:
        memory: with the weights loaded.
        peak_bytes: what the largest steps take on a GPU, and their graphs; None: it is the host.
        max_in_flight: steps.
    Raises:
        ConfigError: not even one sequence of ``max_model_len`` tokens fits, or more is asked for than is free.
    """
    available_bytes = max(0, memory.free - (peak_bytes or 0))
    held = held_by_sequence(config, layout, max_model_len, max_in_flight)
    needed_bytes = layout.count_bytes(held)
    granted_bytes, source = granted_kv_bytes(config, memory, peak_bytes, needed_bytes)
    if granted_bytes < needed_bytes:

        def bytes_for(num_tokens: int) -> int:
            return layout.count_bytes(held_by_sequence(config, layout, num_tokens, max_in_flight))

        fitting = bisect_right(range(max_model_len), granted_bytes, key=bytes_for) - 1
        remedy = f"set max_model_len to {fitting} at most, or grant more" if fitting > 1 else "grant more"
        if any(group.reach is not None for group in layout.groups):
            remedy += ", or lower max_num_batched_tokens, since a step's tokens are held beside the windows"
        raise ConfigError(
            f"a sequence of max_model_len={max_model_len} tokens needs {needed_bytes} bytes of KV cache; {source} "
            f"grants {granted_bytes}: {remedy}"
        )
    most_bytes = config.max_num_seqs * needed_bytes
    if config.kv_cache_memory_bytes is not None and granted_bytes > most_bytes:
        logger.info(
            "of kv_cache_memory_bytes=%d %d are taken: max_num_seqs=%d sequences of %d tokens use no more",
            config.kv_cache_memory_bytes,
            most_bytes,
            config.max_num_seqs,
            max_model_len,
        )
    num_blocks = layout.share_bytes(granted_bytes, held, config.max_num_seqs)
    if layout.count_bytes(num_blocks) > available_bytes:
        raise ConfigError(
            f"kv_cache_memory_bytes={config.kv_cache_memory_bytes} is more than the {available_bytes} bytes that are "
            "free; lower it, or lower max_num_seqs or max_model_len"
        )
    return num_blocks


def held_by_sequence(config: EngineConfig, layout: CacheLayout, num_tokens: int, max_in_flight: int) -> list[int]:
    """By pool, the most blocks that a sequence holds on its way to so many tokens."""
    return layout.most_held_by_pool(
        num_tokens, config.block_size, max_in_flight=max_in_flight, max_step_tokens=config.max_num_batched_tokens
    )


def granted_kv_bytes(
    config: EngineConfig, memory: DeviceMemory, peak_bytes: int | None, sequence_bytes: int
) -> tuple[int, str]:
    """Return the bytes that the config grants the KV cache, and by which rule, in words.

    Args:
        config, memory, peak_bytes: as in `num_kv_blocks`.
        sequence_bytes: of one sequence of the greatest length.
    """
    if config.kv_cache_memory_bytes is not None:
        return config.kv_cache_memory_bytes, "kv_cache_memory_bytes"
    if peak_bytes is None:
        if (share := config.memory_utilization) is not None:
            return int(share * memory.free), f"memory_utilization={share:g} of {memory.free} free bytes"
        most_bytes = int(MOST_HOST_SHARE * memory.free)
        granted_bytes = max(int(MODEST_HOST_SHARE * memory.free), min(sequence_bytes, most_bytes))
        return granted_bytes, f"{MOST_HOST_SHARE:g} of {memory.free} free bytes, unless memory_utilization says more,"
    used_bytes = memory.total - memory.free
    return max(0, int(config.gpu_memory_utilization * memory.total) - used_bytes - peak_bytes), (
        f"gpu_memory_utilization={config.gpu_memory_utilization:g} of {memory.total} bytes, less {used_bytes} in use "
        f"and {peak_bytes} for the steps,"
    )


def available_memory(proc: Path = Path("/proc"), cgroups: Path = Path("/sys/fs/cgroup")) -> int:
    """Bytes that this process may still take: the least of what the system and each of its control groups leave.

    Where there is no ``/proc/meminfo``, half of the machine's memory is taken for free. Reads files: not for the loop.

    Args:
        proc, cgroups: where the kernel's files are mounted.
    """
    available = _read_table(proc / "meminfo").get("MemAvailable:")
    if available is not None:
        available *= 1024
    else:
        try:
            available = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2
        except (AttributeError, OSError, ValueError):
            available = FALLBACK_MEMORY_BYTES // 2
    return min(available, *_cgroups_available(proc, cgroups), 2**63)


def return_freed_memory() -> None:
    """Let the C library give freed pages back to the system: it keeps them where it thinks that they will be wanted.

    Of each thread's memory glibc keeps the end all the same, up to 64 MiB. Does nothing without glibc.
    Takes milliseconds: not for the loop.
    """
    with contextlib.suppress(OSError, AttributeError, TypeError):
        ctypes.CDLL(None).malloc_trim(0)  # glibc's


_V1 = "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"
_V2 = "memory.max", "memory.current", "inactive_file"
"""A control group's files of its limit and usage; and the line of memory.stat for cached file pages, which count as
used and are given up first."""


def _cgroups_available(proc: Path, cgroups: Path) -> Iterator[int]:
    """Yield the bytes that each of this process's groups leaves; groups without a limit are left out."""
    for line in _read(proc / "self" / "cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            root, names = cgroups, _V2
        elif "memory" in controllers.split(","):
            root, names = cgroups / "memory", _V1
        else:
            continue
        own = PurePosixPath(path.lstrip("/"))
        for group in (own, *own.parents):
            limit, usage = (_read(root / group / name).strip() for name in names[:2])
            if limit.isdecimal() and usage.isdecimal():  # "max": no limit
                inactive = _read_table(root / group / "memory.stat").get(names[2], 0)
                yield max(0, int(limit) - int(usage) + inactive)


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""


def _read_table(path: Path) -> dict[str, int]:
    """Lines of a name and a number, and perhaps a unit."""
    words = (line.split() for line in _read(path).splitlines())
    return {line[0]: int(line[1]) for line in words if len(line) > 1 and line[1].isdecimal()}
