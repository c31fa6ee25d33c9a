"""A device as the executor sees it: work in order on a stream, copies beside it, events, graphs, memory.

`aioengine.executor.cuda` is a GPU, `aioengine.executor.host` the processor itself. All device work goes through
`Accelerator.enqueue` and its like, so that a fake one can run it late, as a GPU does: that the host is ahead of the
device can be tested without a GPU.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol, TypeVarTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from aioengine.errors import InternalError
from aioengine.kernels.operations import Operations

Ts = TypeVarTuple("Ts")

Work = Callable[[], None]
"""Launches operations on tensors of the device. Called once, at some time; it must not read what the device has
computed, nor anything of the host's that may change before the device is done."""


class DeviceEvent(Protocol):
    """A point in a stream."""

    def is_done(self) -> bool: ...

    def wait(self) -> None:
        """Block the thread, without the GIL, until the device has come to it.

        Raises:
            Exception: the device failed on the way.
        """

    def seconds_since(self, earlier: DeviceEvent) -> float:
        """Device time between two events that are done."""


class Graph(Protocol):
    """Work that was recorded once, to be enqueued as one."""

    def replay(self) -> None: ...


class DeviceMemory(NamedTuple):
    """Bytes.

    Attributes:
        total: of the device.
        free: that no process has.
        allocated: by this process's tensors.
    """

    total: int
    free: int
    allocated: int


class HostWords:
    """Page-locked host memory for copies from and to the device: int32 words, the host's or the device's at a time.

    Attributes:
        tensor: int32 [any], for the device's copies.
    """

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor
        self._array: NDArray[np.int32] = tensor.numpy()
        self._lent_until: DeviceEvent | None = None

    def __len__(self) -> int:
        return len(self._array)

    def lend(self, until: DeviceEvent) -> None:
        """From now until that event it is the device's."""
        self._lent_until = until

    def take_back(self) -> None:
        """Have them be the host's again.

        Raises:
            InternalError: the device has them.
        """
        until = self._lent_until  # two threads may ask
        if until is not None:
            if not until.is_done():
                raise InternalError("host memory was used while a copy from or to it was under way")
            self._lent_until = None

    @property
    def array(self) -> NDArray[np.int32]:
        """The words, to read and write on the host; raises as `take_back`."""
        self.take_back()
        return self._array


class Accelerator(Protocol):
    """A device and its streams; for one thread, `DeviceEvent.wait` aside. Work runs in the order of its enqueueing.

    To be subclassed: a method without a result does nothing where a device has nothing to do.

    Attributes:
        operations: what computes on it from the start.
        is_host: its memory is the host's, and work has run when `enqueue` returns.
        can_capture: work becomes graphs.
        device: where tensors are made.
        name: such as "NVIDIA H200".
        num_multiprocessors: programs that run at once.
        capability: such as 90.
    """

    operations: Operations
    is_host: bool
    can_capture: bool
    device: torch.device
    name: str
    num_multiprocessors: int
    capability: int

    def newer_operations(self) -> Operations | None:
        """Faster ones than ``operations`` that have become ready, once; None: none have."""
        return None

    def use_threads(self, num_threads: int) -> None:
        """Compute with so many of the host's threads, where it is the host that computes."""
        return

    def enqueue(self, work: Callable[[*Ts], None], *args: *Ts) -> None:
        """Run it with these arguments, behind what was enqueued before."""

    def enqueue_after(self, event: DeviceEvent) -> None:
        """Let what is enqueued from now on begin after an event of the copy stream."""
        return

    def record(self) -> DeviceEvent:
        """An event behind what was enqueued."""

    def copy_out(self, source: Tensor, target: HostWords, num_words: int) -> DeviceEvent:
        """Copy the first words behind what was enqueued, on a stream of its own; an event at its end.

        ``source`` must stay as it is until then. ``target`` is lent until then.
        """

    def host_words(self, num_words: int) -> HostWords:
        """Memory for copies; allocating it may stop the device for a while."""

    def capture(self, work: Work) -> Graph:
        """Record ``work``, without running it. The tensors that it makes live as long as the graph, in memory that
        graphs share: what one leaves there lasts until another is replayed.

        It must have run before, so that nothing is left to be compiled.
        """

    def synchronize(self) -> None:
        """Block the thread until the device has nothing left to do."""
        return

    def memory(self) -> DeviceMemory: ...

    def peak_of(self, work: Callable[[*Ts], None], *args: *Ts) -> int:
        """Run ``work`` with these arguments, and wait for it.

        Returns:
            the most bytes that tensors took, beyond those that were there before.
        """

    def release(self) -> None:
        """Give back to the system what tensors and graphs that are gone have left."""
        return

    def close(self) -> None:
        """As `release`, at the end, when nothing of the engine is left: slow, and it looks for what cycles hold."""
        self.release()

    def profiler_activities(self) -> list[Any]:
        """Activities that torch's profiler records beside the host's."""
        return []
