"""The host's CPU as an `Accelerator`: work runs at once, events are times, and its memory is the host's."""

from __future__ import annotations

import ctypes
import os
import time
from collections.abc import Callable, Iterable
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
from llvmlite import binding
from torch import Tensor

from aioengine.errors import InternalError
from aioengine.executor.accelerator import Accelerator, DeviceEvent, DeviceMemory, Graph, HostWords, Ts, Work
from aioengine.executor.memory import available_memory
from aioengine.kernels.attention_launches import PROGRAMS_PER_MULTIPROCESSOR
from aioengine.kernels.native.compilation import Compilation
from aioengine.kernels.native.native_operations import NativeOperations
from aioengine.kernels.native.team import Team
from aioengine.kernels.operations import Operations, plain_torch
from aioengine.kernels.zeros import untouched_bytes
from aioengine.processes.threads import CGROUPS, OWN_CGROUP, processor_quota


class Chunk(NamedTuple):
    """Lower bounds of the prompt tokens in a step with decodes. benchmarks/README.md has measurements of both ends.

    Attributes:
        tokens: least number; with fewer, products leave the matrix rate, and prompts lose more than streams gain.
        token_bytes: least tokens times bytes of weights; smaller steps of a small model are mostly overhead.
    """

    tokens: int
    token_bytes: float


SMALL_CHUNK, LARGE_CHUNK = Chunk(64, 4e9), Chunk(128, 16e9)
"""The second for bfloat16 with AVX-512 products: such a core computes a token several times as fast as others."""


def chunk_tokens(weight_bytes: int, dtype: torch.dtype) -> int:
    """Most prompt tokens in a step in which rows decode, for a model of so many bytes that computes in ``dtype``."""
    is_fast = dtype == torch.bfloat16 and binding.get_host_cpu_features().get("avx512bf16", False)
    chunk = LARGE_CHUNK if is_fast else SMALL_CHUNK
    return max(chunk.tokens, int(chunk.token_bytes / weight_bytes))


def num_usable_threads(cgroups: Path = CGROUPS, own: Path = OWN_CGROUP) -> int:
    """torch's number of threads: OMP_NUM_THREADS, or the physical cores that this process may run on; at most the
    number that its control groups allow (`processor_quota`)."""
    return max(1, int(min(torch.get_num_threads(), processor_quota(cgroups, own))))


def num_usable_cores() -> int:
    """Number of cores that this process may run on; at most the number that its control groups allow."""
    num_cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, int(min(num_cores, processor_quota())))


def use_torch_threads(num_threads: int) -> None:
    """Use at most so many threads from torch's next operation in this thread on.

    `torch.set_num_threads` would also change the default of all threads that have not called torch yet.
    """
    torch.get_num_threads()  # a thread's first operation would set the process's number
    for set_number in _thread_setters():
        set_number(num_threads)


@cache
def _thread_setters() -> list[Callable[[int], Any]]:
    """The functions of OpenMP and MKL, as far as torch has them, that set the number of the calling thread alone."""
    linked = ctypes.PyDLL(torch._C.__file__)  # also finds functions of the libraries that it is linked with
    names = "omp_set_num_threads", "MKL_Set_Num_Threads_Local"
    return [getattr(linked, name) for name in names if hasattr(linked, name)]


class HostEvent:
    """A time; all work that was enqueued before has run."""

    def __init__(self) -> None:
        self._at_s = time.perf_counter()

    def is_done(self) -> bool:
        return True

    def wait(self) -> None:
        pass

    def seconds_since(self, earlier: DeviceEvent) -> float:
        assert isinstance(earlier, HostEvent)
        return self._at_s - earlier._at_s


class HostAccelerator(Accelerator):
    """See `Accelerator`. `enqueue` raises the errors of its work.

    Args:
        num_threads: threads of native kernels; None: there are no native kernels.
        parts: the parts of the kernels' library that the model needs.
    """

    is_host = True
    device = torch.device("cpu")
    name = "cpu"
    capability = 0

    def __init__(self, *, num_threads: int | None = None, parts: Iterable[str] = ()) -> None:
        self.can_capture = num_threads is not None
        self._num_threads = num_threads or 1
        # `PROGRAMS_PER_MULTIPROCESSOR` cuts contexts into as many programs as there are threads.
        self.num_multiprocessors = max(1, self._num_threads // PROGRAMS_PER_MULTIPROCESSOR)
        self._team: Team | None = None
        self._compilation = Compilation(parts) if num_threads is not None else None
        self.operations: Operations = plain_torch

    def newer_operations(self) -> Operations | None:
        library = self._compilation.poll() if self._compilation is not None else None
        if library is None:
            return None
        self._team = Team(library, self._num_threads)
        return NativeOperations(self._team)

    def use_threads(self, num_threads: int) -> None:
        """Use at most so many threads from the next operation on."""
        if self._compilation is not None and self._compilation.is_running:
            # torch's threads would wait for the thread whose core the compiler takes.
            num_threads = max(1, num_threads - 1)
        if num_threads != torch.get_num_threads():
            use_torch_threads(num_threads)
        if self._team is not None:
            self._team.use_threads(num_threads)

    def enqueue(self, work: Callable[[*Ts], None], *args: *Ts) -> None:
        work(*args)

    def record(self) -> HostEvent:
        return HostEvent()

    def copy_out(self, source: Tensor, target: HostWords, num_words: int) -> HostEvent:
        if self._compilation is not None:
            self._compilation.begin()  # the first step has run
        target.tensor[:num_words].copy_(source[:num_words])
        return HostEvent()

    def host_words(self, num_words: int) -> HostWords:
        return HostWords(torch.empty(num_words, dtype=torch.int32))

    def capture(self, work: Work) -> Graph:
        if self._team is None:
            raise InternalError("plain torch is not captured")
        return self._team.capture(work)

    def memory(self) -> DeviceMemory:
        free = max(0, available_memory() - untouched_bytes())
        return DeviceMemory(total=free, free=free, allocated=0)

    def peak_of(self, work: Callable[[*Ts], None], *args: *Ts) -> int:
        work(*args)
        return 0

    def close(self) -> None:
        if self._compilation is not None:
            self._compilation.close()
        if self._team is not None:
            self._team.close()
