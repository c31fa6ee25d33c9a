"""The device thread: one resident thread that owns the device and runs jobs in order.

Its results come back through a `Waker`; those of jobs that only launch work on the device, from the completion thread
beside it. The thread knows neither the `DeviceThread` that started it nor that one's owner: when no reference to them
is left, or their loop is closed, it drops what it holds and ends, and the completion thread before it.
"""

from __future__ import annotations

import asyncio
import atexit
import logging
import queue
import threading
import weakref
from collections.abc import Callable
from typing import Any, TypeVar, TypeVarTuple

import torch

from aioengine.core.executor_protocol import DeviceLost
from aioengine.executor.completion_thread import CompletionThread, DeferredResult, Pending, Waker
from aioengine.executor.host import use_torch_threads
from aioengine.kernels.native.team import start_thread

T = TypeVar("T")
Ts = TypeVarTuple("Ts")

logger = logging.getLogger("aioengine")

THREAD_NAME = "aioengine-device"

CLOSED = "the device was closed"

LOOP_CHECK_INTERVAL_S = 0.5
"""How often an idle thread looks whether its loop still lives: no event tells of a loop that is closed."""

EXIT_DEADLINE_S = 10.0
"""How long the interpreter's exit waits for a running job, and for what was launched: a thread that is killed inside
torch aborts the process."""

DRAIN_DEADLINE_S = 10.0
"""How long an ending thread waits for what was launched, before it says that the device is lost: steps take seconds at
most, and a device that hangs must not hang the program."""


class DeviceThread:
    """Runs jobs in order, each under ``torch.inference_mode``, in one thread.

    A job that returns a `DeferredResult` has launched its work: the next job runs at once, and the completion thread,
    which the first such job starts, brings the result. An ordinary job's may come before those of earlier launches.

    To be made and used on one event loop. What must live as long as the thread belongs to the jobs, and is let go by
    ``on_end``.

    Args:
        num_threads: threads of one torch operation in the thread; None: torch's number. Other threads keep theirs.
        on_end: the thread's last act, to free what the jobs have made, when all that was launched has ended; must not
            refer to this object.
    """

    def __init__(self, *, num_threads: int | None = None, on_end: Callable[[], None] = lambda: None) -> None:
        self._work = _ThreadState(asyncio.get_running_loop(), num_threads, on_end)
        self._ended = self._work.ended
        weakref.finalize(self, self._work.stop)
        try:
            start_thread(self._work.thread)
        except RuntimeError:  # too many threads
            self._work.waker.release()
            raise

    @property
    def should_stop(self) -> Callable[[], bool]:
        """For long jobs to ask from the thread: whether it is to end, since it was told so or its loop is gone."""
        return self._work.should_stop

    def submit(self, job: Callable[[*Ts], T | DeferredResult[T]], *args: *Ts) -> Pending[T]:
        """Queue a job with its arguments, without waiting. Once the thread is to stop, it fails with `DeviceLost`."""
        pending: Pending[T] = Pending(lambda: job(*args))
        if self._work.is_stopping:
            pending.fail(DeviceLost(CLOSED))
        else:
            self._work.queue.put(pending)
        return pending

    async def aclose(self) -> None:
        """Stop after the job that runs, failing the queued ones with `DeviceLost`, and see the threads end. Idempotent.

        What was launched still runs to its end on the device, and brings its results. If that takes longer than
        `DRAIN_DEADLINE_S` the device hangs: the launched jobs fail with `DeviceLost`, too, this returns, and what
        ``on_end`` frees stays until the device comes back, if ever. Cancelling stops the wait; the threads end all the
        same.
        """
        self._work.stop()
        if asyncio.get_running_loop() is self._work.loop():
            await self._ended.wait()
        # It has nothing left to do, and is gone in some µs; a join would hold the loop.
        while self._work.thread.is_alive() and not self._work.is_given_up:  # noqa: ASYNC110 - no event tells of a thread's end
            await asyncio.sleep(0)


class _ThreadState:
    """What the thread and its `DeviceThread` share."""

    def __init__(self, loop: asyncio.AbstractEventLoop, num_threads: int | None, on_end: Callable[[], None]) -> None:
        self.queue: queue.SimpleQueue[Pending[Any] | None] = queue.SimpleQueue()
        self.loop = weakref.ref(loop)
        self.waker = Waker(loop)
        self.is_stopping = False
        self.is_given_up = False
        """The thread is to end, and waits in vain for what was launched."""
        self.ended = asyncio.Event()
        self.num_threads = num_threads
        self.on_end = on_end
        self.thread = threading.Thread(target=_run, args=(self,), name=THREAD_NAME, daemon=True)
        _running.add(self)

    def stop(self) -> None:
        """Tell the thread to end; from any thread."""
        self.is_stopping = True
        self.queue.put(None)

    def should_stop(self) -> bool:
        loop = self.loop()
        return self.is_stopping or loop is None or loop.is_closed()

    def next_job(self) -> Pending[Any] | None:
        """Wait for a job; None when it is time to end."""
        while not self.is_stopping:
            try:
                return self.queue.get(timeout=LOOP_CHECK_INTERVAL_S)
            except queue.Empty:
                self.is_stopping = self.should_stop()
        return None

    def call_on_loop(self, callback: Callable[[], object]) -> None:
        """Call back on the loop, or stop if there is none any more."""
        try:
            self.waker.call(callback)
        except RuntimeError:
            self.is_stopping = True

    def fail_queued(self) -> None:
        while True:
            try:
                pending = self.queue.get_nowait()
            except queue.Empty:
                return
            if pending is not None:
                pending.fail(DeviceLost(CLOSED))
                self.wake(pending)

    def wake(self, pending: Pending[Any]) -> None:
        self.call_on_loop(pending.wake)

    def end(self) -> None:
        """The thread's last word, on the loop."""
        self.waker.release()
        self.ended.set()


def _run(work: _ThreadState) -> None:
    """The thread's whole life."""
    waiter = CompletionThread(work.wake)
    if work.num_threads is not None:
        use_torch_threads(work.num_threads)
    with torch.inference_mode():
        while (pending := work.next_job()) is not None:
            pending.run()
            if pending.is_launched:
                waiter.add(pending)  # which wakes the loop: once a step
            else:
                work.wake(pending)
            del pending  # or its result would live until the next job
    work.fail_queued()
    _drain(work, waiter)
    try:
        work.on_end()
    finally:
        _running.discard(work)
        work.call_on_loop(work.end)


def _drain(work: _ThreadState, waiter: CompletionThread) -> None:
    """Wait for the end of all that was launched. If that takes too long, fail what waits for it, and wait alone."""
    if waiter.end(DRAIN_DEADLINE_S):
        return
    logger.error(
        "the device was closed and has not finished its work after %g s; its memory is in use until it does",
        DRAIN_DEADLINE_S,
    )
    waiter.give_up(lambda: DeviceLost(f"{CLOSED}, and has not finished its work"))
    work.is_given_up = True
    work.call_on_loop(work.ended.set)
    waiter.end(None)


_running: weakref.WeakSet[_ThreadState] = weakref.WeakSet()


def _stop_all_at_exit() -> None:
    for work in list(_running):
        work.stop()
        work.thread.join(EXIT_DEADLINE_S)


atexit.register(_stop_all_at_exit)
