"""Each replica's part of its machine: a GPU of its own, or a share of the cores and of the memory."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from msgspec.structs import replace

from aioengine.config import MOST_HOST_SHARE, EngineConfig, ProcessOptions
from aioengine.errors import ConfigError
from aioengine.processes.threads import CGROUPS, OWN_CGROUP, processor_quota

VISIBLE = "CUDA_VISIBLE_DEVICES"
NUM_THREADS = "OMP_NUM_THREADS"
"""Torch and the native kernels take the number of a process's threads from it."""

Devices = tuple[int | str, ...]


class HostShare(NamedTuple):
    """One replica's part of its machine.

    Attributes:
        visible_devices: its CUDA_VISIBLE_DEVICES; None: as in this process.
        num_threads: of its steps on a CPU; None: as many as a process takes by itself.
        memory: of the part of the host's memory that one engine would take.
    """

    visible_devices: Devices | None = None
    num_threads: int | None = None
    memory: float = 1.0

    def environment(self, environ: Mapping[str, str]) -> dict[str, str]:
        """Variables to add to a process's environment; a number of threads that is set there holds."""
        return {NUM_THREADS: str(self.num_threads)} if self.num_threads and NUM_THREADS not in environ else {}

    def config(self, config: EngineConfig) -> EngineConfig:
        """The shared config with this replica's share of memory."""
        if self.memory == 1.0:
            return config
        return replace(config, memory_utilization=(config.memory_utilization or MOST_HOST_SHARE) * self.memory)

    def options(self, options: ProcessOptions) -> ProcessOptions:
        """The shared options with this replica's GPU."""
        return options if self.visible_devices is None else replace(options, visible_devices=self.visible_devices)


class HostSlots:
    """The shares of one host, each taken by one rank.

    Args:
        devices: the GPUs, in the order in which they are handed out; None: none are, and cores are shared.
        num_cores: that processes here may keep busy.
    """

    def __init__(self, devices: Devices | None, num_cores: int) -> None:
        self._devices = devices
        self._num_cores = num_cores
        self._slot_of: dict[int, int] = {}

    @classmethod
    def find(cls, config: EngineConfig, options: ProcessOptions, num_local: int) -> HostSlots:
        """Find the shares of this host; reads files.

        Raises:
            ConfigError: as `find_devices`.
        """
        return cls(find_devices(config, options, num_local, os.environ), count_cores())

    def take(self, rank: int, num_local: int) -> HostShare:
        """The share of a rank, which keeps its GPU until `free`.

        Args:
            num_local: replicas of this host, this one among them.
        Raises:
            ConfigError: no GPU is left for it.
        """
        taken = {slot for other, slot in self._slot_of.items() if other != rank}
        slot = self._slot_of.get(rank, next(slot for slot in range(len(taken) + 1) if slot not in taken))
        if self._devices is None:
            self._slot_of[rank] = slot
            return share_cores(self._num_cores, num_local)
        if slot >= len(self._devices):
            raise ConfigError(
                f"replica {rank} needs a GPU of its own, and this machine shows {len(self._devices)} "
                f"({', '.join(map(str, self._devices))}): start fewer replicas here, show more of them "
                f"(visible_devices, {VISIBLE}), or compute on the CPU (device='cpu')"
            )
        self._slot_of[rank] = slot
        return HostShare((self._devices[slot],))

    def free(self, rank: int) -> None:
        """This rank is gone for good. Idempotent."""
        self._slot_of.pop(rank, None)


def share_cores(num_cores: int, num_local: int) -> HostShare:
    """An equal share of cores and memory for each of so many replicas; a single one takes what it takes by itself.

    Threads are counted and not bound to cores: a replica without work leaves those to others. With all threads in
    each of two replicas a token takes 6 % more processor time (benchmarks/README.md).
    """
    return HostShare(num_threads=max(1, num_cores // num_local), memory=1 / num_local) if num_local > 1 else HostShare()


def find_devices(
    config: EngineConfig,
    options: ProcessOptions,
    num_local: int,
    environ: Mapping[str, str],
    files: Path = Path("/dev"),
) -> Devices | None:
    """The GPUs that replicas of this host are to share, without asking the driver; None: each sees all.

    A single replica gets the first, so that there may be more later.

    Args:
        files: the folder of the devices' files.
    Raises:
        ConfigError: ``device`` names one GPU for several replicas.
    """
    if config.device == "cpu":
        return None
    devices = options.visible_devices
    if devices is None and options.executor is None:  # what another executor computes on is not known
        devices = _of_environment(environ[VISIBLE]) if VISIBLE in environ else _of_files(files)
    if not devices:
        return None
    if ":" in config.device and num_local > 1:
        raise ConfigError(
            f"device={config.device!r} is one GPU, and {num_local} replicas need one each: name them in "
            f"visible_devices, or in {VISIBLE}, and give device='cuda'"
        )
    return devices if ":" not in config.device else None


def count_cores(
    topology: Path = Path("/sys/devices/system/cpu"), cgroups: Path = CGROUPS, own: Path = OWN_CGROUP
) -> int:
    """Physical cores that this process may run on, no more than the processor time that its control groups allow.

    Args:
        topology: of the machine; where it is not told, each logical core counts.
        cgroups, own: as for `processor_quota`.
    """
    cores = set()
    for number in os.sched_getaffinity(0):
        cores.add(str(number))
        with contextlib.suppress(OSError):
            siblings = (topology / f"cpu{number}" / "topology" / "thread_siblings_list").read_text()
            cores.remove(str(number))
            cores.add(siblings.strip())
    return max(1, int(min(len(cores), processor_quota(cgroups, own))))


def _of_environment(value: str) -> Devices:
    """As CUDA reads it: up to the first entry that is none."""
    devices: list[int | str] = []
    for entry in map(str.strip, value.split(",")):
        if not entry or entry == "-1":
            break
        devices.append(int(entry) if entry.isdecimal() else entry)
    return tuple(devices)


def _of_files(folder: Path) -> Devices:
    """The GPUs of NVIDIA's driver, which has a file for each."""
    try:
        names = os.listdir(folder)
    except OSError:
        return ()
    return tuple(range(sum(re.fullmatch(r"nvidia\d+", name) is not None for name in names)))
