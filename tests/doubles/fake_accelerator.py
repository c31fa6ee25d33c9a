"""A GPU without a GPU: runs the device's work on the host, as late as a GPU might."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from aioengine.executor.accelerator import Accelerator, DeviceEvent, DeviceMemory, HostWords, Ts, Work
from aioengine.kernels.operations import Operations
from aioengine.kernels.operations import plain_torch as reference
from doubles.fake_graph import FakeGraph

GIB = 2**30


class FakeEvent:
    """A point in the stream of a `FakeAccelerator`, which runs its work no earlier than when it is waited for.

    Attributes:
        has_ended: the device has come to it.
    """

    def __init__(self, device: FakeAccelerator) -> None:
        self._device = device
        self._ended_at_s = 0.0
        self.has_ended = False

    def is_done(self) -> bool:
        if not self.has_ended:
            self._device.check()
        return self.has_ended

    def wait(self) -> None:
        self._device.run_until(self)

    def seconds_since(self, earlier: DeviceEvent) -> float:
        assert isinstance(earlier, FakeEvent)
        assert self.has_ended
        assert earlier.has_ended
        return self._ended_at_s - earlier._ended_at_s

    def end(self) -> None:
        """The device has come to it."""
        self._ended_at_s = time.perf_counter()
        self.has_ended = True


class FakeAccelerator(Accelerator):
    """An `Accelerator` whose work runs on the host's tensors, lazily.

    Nothing runs when it is enqueued. Work runs, in order, when a thread waits for an event behind it; a copy runs when
    its own event is waited for, or when later work has to wait for it, and no earlier. Memory that is reused
    too soon, or a wait that is forgotten, gives wrong results every time, and not once in a thousand. An exception that
    the work raises loses the device: all further waits raise it, and so does asking for an event that never came.

    Args:
        total_bytes, free_bytes: of memory, as it says.

    Attributes:
        is_held: while True nothing runs, and waits last.
        num_enqueued: pieces of work, graphs counting as one.
        graphs: that were captured.
        num_releases: how often memory was given back.
    """

    def __init__(self, *, total_bytes: int = 8 * GIB, free_bytes: int = 6 * GIB) -> None:
        self.operations: Operations = reference
        self.is_host = False
        self.can_capture = True
        self.device = torch.device("cpu")
        self.name = "fake"
        self.num_multiprocessors = 4
        self.capability = 90
        self.graphs: list[FakeGraph] = []
        self.num_enqueued = 0
        self.num_releases = 0
        self._memory = DeviceMemory(total_bytes, free_bytes, 0)
        self._stream: deque[Callable[[], None]] = deque()
        self._copies: dict[FakeEvent, tuple[FakeEvent, Work]] = {}
        """By the event at a copy's end: what it comes after, and the copy."""
        self._running = threading.RLock()
        self._may_run = threading.Event()
        self._may_run.set()
        self._error: BaseException | None = None

    @property
    def is_held(self) -> bool:
        return not self._may_run.is_set()

    def hold(self) -> None:
        """Let nothing run until `go_on`."""
        self._may_run.clear()

    def go_on(self) -> None:
        self._may_run.set()

    def run_ahead(self) -> None:
        """Run all that was enqueued, held or not, and no copy but those that it comes after."""
        with self._running, torch.inference_mode():
            self._run_until(self.record())

    def lose(self, error: BaseException) -> None:
        """Let the device fail: waits raise ``error`` from now on."""
        self._error = error
        self._may_run.set()

    def check(self) -> None:
        """Raise what the device was lost by, if it was."""
        if self._error is not None:
            raise self._error

    def enqueue(self, work: Callable[[*Ts], None], *args: *Ts) -> None:
        self.num_enqueued += 1
        self._stream.append(lambda: work(*args))

    def enqueue_after(self, event: DeviceEvent) -> None:
        assert isinstance(event, FakeEvent)
        self._stream.append(lambda: self._run_until(event))

    def record(self) -> FakeEvent:
        event = FakeEvent(self)
        self._stream.append(event.end)
        return event

    def copy_out(self, source: Tensor, target: HostWords, num_words: int) -> FakeEvent:
        computed, done = self.record(), FakeEvent(self)

        def copy() -> None:
            target.tensor[:num_words].copy_(source[:num_words])

        self._copies[done] = computed, copy
        target.lend(done)
        return done

    def host_words(self, num_words: int) -> HostWords:
        return HostWords(torch.full((num_words,), 0x7F7F7F7F, dtype=torch.int32))  # what was not written is no token id

    def capture(self, work: Work) -> FakeGraph:
        graph = FakeGraph(self.enqueue)
        self._stream.append(partial(graph.record, work))  # memory is where the work before has put it
        self.graphs.append(graph)
        return graph

    def synchronize(self) -> None:
        self.run_until(self.record())
        for event in list(self._copies):
            self.run_until(event)

    def memory(self) -> DeviceMemory:
        return self._memory

    def peak_of(self, work: Callable[[*Ts], None], *args: *Ts) -> int:
        self.enqueue(work, *args)
        self.synchronize()
        return 0

    def release(self) -> None:
        self.synchronize()
        self.num_releases += 1

    def run_until(self, event: FakeEvent) -> None:
        """Run what is before ``event``, in the thread that waits for it."""
        self._may_run.wait()
        with self._running, torch.inference_mode():
            try:
                if self._error is None:
                    self._run_until(event)
            except BaseException as error:
                self._error = error
            if not event.has_ended:
                self.check()

    def _run_until(self, event: FakeEvent) -> None:
        if event in self._copies:
            computed, copy = self._copies.pop(event)
            self._run_until(computed)
            copy()
            event.end()
        while not event.has_ended:
            self._stream.popleft()()
