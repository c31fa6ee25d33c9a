"""An NVIDIA GPU as an `Accelerator`, through torch.

A compute stream and a copy stream of this engine's own: nothing here waits for, or holds up, work of the app's on the
same GPU. The whole process shares two things. Torch's peak of memory is reset at the start. An app that waits for the
whole device (``torch.cuda.synchronize``) while a graph is being captured gets an error, and there is no graph. To be
made in the thread that uses it, whose current stream becomes the compute stream.
"""

from __future__ import annotations

import contextlib
import gc
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from aioengine.errors import ConfigError
from aioengine.executor.accelerator import Accelerator, DeviceEvent, DeviceMemory, Graph, HostWords, Ts, Work
from aioengine.kernels.operations import Operations

MIN_CAPABILITY = 80
"""bfloat16 and asynchronous copies begin with Ampere."""


def find_cuda(device: str) -> torch.device | None:
    """The GPU that ``device`` names: "auto" (None where there is none), "cpu" (None), "cuda" or "cuda:1".

    Raises:
        ConfigError: there is no such GPU.
    """
    if device == "cpu":
        return None
    if not torch.cuda.is_available():
        if device == "auto":
            return None
        built = "" if torch.version.cuda else f"; this torch ({torch.__version__}) is built without CUDA"
        raise ConfigError(f"device={device!r} needs an NVIDIA GPU, and torch finds none{built}. Use device='cpu'")
    found = torch.device("cuda" if device == "auto" else device)
    index = found.index if found.index is not None else torch.cuda.current_device()
    if index >= torch.cuda.device_count():
        raise ConfigError(f"device={device!r} is not there: torch finds {torch.cuda.device_count()}, counted from 0")
    major, minor = torch.cuda.get_device_capability(index)
    if major * 10 + minor < MIN_CAPABILITY:
        if device == "auto":
            return None
        raise ConfigError(
            f"{torch.cuda.get_device_name(index)} has compute capability {major}.{minor}; 8.0 or newer is needed"
        )
    return torch.device("cuda", index)


class CudaEvent:
    """A `DeviceEvent`; a thread that waits for it sleeps, and holds no lock of Python's."""

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self._device = stream.device
        self._event = torch.cuda.Event(enable_timing=True, blocking=True)
        self._event.record(stream)

    def is_done(self) -> bool:
        return bool(self._event.query())

    def wait(self) -> None:
        # A thread that has no device yet would make itself a context on the first one: some 500 MiB of another GPU.
        torch.cuda.set_device(self._device)
        self._event.synchronize()

    def seconds_since(self, earlier: DeviceEvent) -> float:
        assert isinstance(earlier, CudaEvent)
        return float(earlier._event.elapsed_time(self._event)) / 1e3


class CudaAccelerator(Accelerator):
    """See `Accelerator`."""

    is_host = False

    def __init__(self, device: torch.device, operations: Operations) -> None:
        torch.cuda.set_device(device)  # of this thread
        properties = torch.cuda.get_device_properties(device)
        self.operations = operations
        self.can_capture = operations.is_capturable
        self.device = device
        self.name = properties.name
        self.num_multiprocessors = properties.multi_processor_count
        self.capability = properties.major * 10 + properties.minor
        self._compute = torch.cuda.Stream(device)
        self._copies = torch.cuda.Stream(device)
        self._pool: Any = None
        self._graphs: weakref.WeakSet[Any] = weakref.WeakSet()
        """Graphs that share the pool."""
        torch.cuda.set_stream(self._compute)  # of this thread

    def enqueue(self, work: Callable[[*Ts], None], *args: *Ts) -> None:
        work(*args)

    def enqueue_after(self, event: DeviceEvent) -> None:
        assert isinstance(event, CudaEvent)
        self._compute.wait_event(event._event)

    def record(self) -> CudaEvent:
        return CudaEvent(self._compute)

    def copy_out(self, source: Tensor, target: HostWords, num_words: int) -> CudaEvent:
        self._copies.wait_stream(self._compute)
        with torch.cuda.stream(self._copies):
            target.tensor[:num_words].copy_(source[:num_words], non_blocking=True)
        done = CudaEvent(self._copies)
        target.lend(done)
        return done

    def host_words(self, num_words: int) -> HostWords:
        return HostWords(torch.empty(num_words, dtype=torch.int32, pin_memory=True))

    def capture(self, work: Work) -> Graph:
        if not self._graphs:  # torch refuses a pool that graphs have had, of which none is left
            self._pool = torch.cuda.graph_pool_handle()
        graph = torch.cuda.CUDAGraph()
        # Other threads of the process, and the app's own work, go on with theirs meanwhile. Not `torch.cuda.graph`: it
        # empties the allocator's cache and collects garbage, 100 ms each time.
        try:
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                work()
            finally:
                graph.capture_end()
        except BaseException:
            # After a failure torch leaves the allocator in the pool for good: it would free nothing any more.
            with contextlib.suppress(Exception):
                torch._C._cuda_endAllocateToPool(self.device.index, self._pool)
            raise
        self._graphs.add(graph)
        captured: Graph = graph
        return captured

    def synchronize(self) -> None:
        self._compute.synchronize()
        self._copies.synchronize()

    def memory(self) -> DeviceMemory:
        free, total = torch.cuda.mem_get_info(self.device)
        return DeviceMemory(total=total, free=free, allocated=torch.cuda.memory_allocated(self.device))

    def peak_of(self, work: Callable[[*Ts], None], *args: *Ts) -> int:
        self.release()
        before = torch.cuda.memory_reserved(self.device)  # which counts what lies between tensors, too
        torch.cuda.reset_peak_memory_stats(self.device)
        work(*args)
        self.synchronize()
        peak = torch.cuda.max_memory_reserved(self.device) - before
        self.release()
        return max(0, peak)

    def release(self) -> None:
        self.synchronize()
        torch.cuda.empty_cache()
        empty_host_cache = getattr(torch._C, "_host_emptyCache", None)
        if empty_host_cache is not None:  # page-locked memory, which torch keeps for ever
            empty_host_cache()

    def close(self) -> None:
        gc.collect()  # a cycle may hold a tensor
        # cuBLAS's workspaces, some MiB a stream, are not freed by torch; captured graphs go on using theirs, and the
        # app's graphs are known to the app alone.
        if not any(isinstance(thing, torch.cuda.CUDAGraph) for thing in gc.get_objects()):
            torch._C._cuda_clearCublasWorkspaces()
        self.release()

    def profiler_activities(self) -> list[Any]:
        return [torch.profiler.ProfilerActivity.CUDA]
