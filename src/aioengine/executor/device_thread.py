"""The device thread: one resident thread that owns the device and runs jobs in order.

A job of a GPU only launches its work and returns a `DeferredResult`. The device thread goes on with the next plan, and
the completion thread blocks until the device is done: one wake of the loop a step, no polling. Other ways to wait are
measured in ``benchmarks/gpu/waiting.md``; each would be another `CompletionThread`.

The device thread knows neither the `DeviceThread` that started it nor that one's owner: when no reference to them
is left, or their loop is closed, it drops what it holds and ends, and the completion thread before it.
"""

from __future__ import annotations

import asyncio
import atexit
import contextvars
import logging
import os
import queue
import threading
import traceback
import weakref
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from typing import Any, Generic, TypeVar, TypeVarTuple

import torch

from aioengine.core.executor_protocol import DeviceLost
from aioengine.errors import TRACEBACK, linked
from aioengine.executor.host import use_torch_threads
from aioengine.kernels.native.team import start_thread

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)
Ts = TypeVarTuple("Ts")

logger = logging.getLogger("aioengine")

THREAD_NAME = "aioengine-device"
COMPLETION_THREAD_NAME = "aioengine-completion"

CLOSED = "the device was closed"

LOOP_CHECK_INTERVAL_S = 0.5
"""How often an idle thread looks whether its loop still lives: closing a loop raises no event."""

EXIT_DEADLINE_S = 10.0
"""How long the interpreter's exit waits for a running job, and for what was launched: a thread that is killed inside
torch aborts the process."""

DRAIN_DEADLINE_S = 10.0
"""How long an ending thread waits for what was launched, before the device is lost. Steps take seconds at most, and a
device that hangs must not hang the program."""


class DeferredResult(ABC, Generic[T_co]):
    """The return value of a job that has launched work on the device and not waited for it.

    Must be subclassed: other objects with a ``wait``, such as a process or an event, are plain results.
    """

    @abstractmethod
    def wait(self) -> T_co:
        """Block until the device is done, without the GIL; return the job's result, or raise its error.

        Called once, in the completion thread, under ``torch.inference_mode``, after the waits of all earlier jobs.
        """


class Pending(Generic[T]):
    """The future outcome of a job. Made on the loop; a thread sets the outcome, and then wakes the loop.

    Attributes:
        is_launched: whether the job has run and returned a `DeferredResult`, which the completion thread waits for.
        is_done: whether the outcome is set.
    """

    def __init__(self, job: Callable[[], T | DeferredResult[T]]) -> None:
        self._job: Callable[[], T | DeferredResult[T]] | None = job
        self._result: Any = None
        self._error: BaseException | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._outcome = threading.Lock()
        self.is_launched = False
        self.is_done = False

    async def finish(self) -> T:
        """Return the job's result, or raise its error. Cancelling stops the wait, not the job: one may wait again."""
        if not self.is_done:
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        if self._error is not None:
            try:
                raise self._error
            finally:
                del self  # the error's traceback has this frame
        result: T = self._result
        return result

    def run(self) -> None:
        """Run the job, in the device thread; if it is launched, wait for its end, in the completion thread."""
        assert self._job is not None
        try:
            result = self._job()
        except BaseException as error:  # of any kind: the waiter on the loop must get it, and the thread go on
            # Free the local variables of the failed functions: an error that is kept would keep the model alive.
            for link in linked(error):
                traceback.clear_frames(TRACEBACK.__get__(link))
            self._job = None
            self._end(None, error)
            del self, link  # the error's traceback has this frame
            return
        if isinstance(result, DeferredResult) and not self.is_launched:
            self._job = result.wait
            self.is_launched = True
        else:
            self._job = None
            self._end(result, None)

    def fail(self, error: Exception) -> None:
        """Set an error as the outcome, unless there is one. A launched job is still waited for."""
        if not self.is_launched:
            self._job = None
        self._end(None, error)

    def wake(self) -> None:
        """Let `finish` return if the outcome is set. On the loop."""
        if self.is_done and self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def _end(self, result: Any, error: BaseException | None) -> None:
        # Never released: the first outcome counts, if a device that was given up returns after all.
        if self._outcome.acquire(blocking=False):
            self._result = result
            self._error = error
            self.is_done = True


class CompletionThread:
    """Waits for launched jobs, in order, in a daemon thread that the first of them starts.

    For the device thread alone, which must call `end`.

    Args:
        on_done: called with each job when it is done, in the completion thread or the caller's; must not raise.
    """

    def __init__(self, on_done: Callable[[Pending[Any]], object]) -> None:
        self._on_done = on_done
        self._queue: queue.SimpleQueue[Pending[Any] | None] = queue.SimpleQueue()
        self._launched: deque[Pending[Any]] = deque()
        """The launched jobs that are not done, in order."""
        self._thread: threading.Thread | None = None

    def add(self, pending: Pending[Any]) -> None:
        """Wait for a launched job in the thread. Returns at once, unless no thread can start: then it waits itself."""
        self._launched.append(pending)
        if self._thread is None:
            thread = threading.Thread(target=self._run, name=COMPLETION_THREAD_NAME, daemon=True)
            try:
                thread.start()
            except RuntimeError:  # too many threads, or the interpreter is about to exit
                self._finish(pending)
                return
            self._thread = thread
        self._queue.put(pending)

    def end(self, timeout_s: float | None) -> bool:
        """Block until all jobs are done and the thread has ended; False after a timeout. May be repeated."""
        if self._thread is None:
            return True
        self._queue.put(None)
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def give_up(self, error: Callable[[], Exception]) -> None:
        """Fail all jobs that are not done. The thread still waits for them."""
        for pending in self._launched.copy():
            pending.fail(error())
            self._on_done(pending)

    def _run(self) -> None:
        with torch.inference_mode():
            while (pending := self._queue.get()) is not None:
                self._finish(pending)
                del pending  # or its result would live until the next job

    def _finish(self, pending: Pending[Any]) -> None:
        pending.run()
        self._launched.popleft()
        self._on_done(pending)


class Waker:
    """Calls functions on a loop, from other threads, in order. Made on that loop, to which it holds a weak reference.

    Uses a file descriptor that the loop keeps reading. With ``call_soon_threadsafe`` the waiting coroutine goes on a
    quarter later, and twice as late on a busy uvloop (see ``benchmarks/gpu/waiting.md``): asyncio sends a byte through
    a socket and reads until that is empty, and uvloop makes one more round before it calls.

    Uses ``call_soon_threadsafe`` if the system has no such descriptors.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = weakref.ref(loop)
        self._callbacks: deque[Callable[[], object]] = deque()
        self._lock = threading.Lock()
        """Held while the descriptor is used: a callback that the loop runs early may close the descriptor."""
        self._fd = -1
        if hasattr(os, "eventfd"):
            self._fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
            # In an empty context: the loop would keep alive all objects of the caller's context.
            contextvars.Context().run(loop.add_reader, self._fd, self._on_readable)

    def call(self, callback: Callable[[], object]) -> None:
        """Call ``callback`` on the loop soon; it must not raise. Not for use once `release` may have been called.

        Raises:
            RuntimeError: the loop is closed or gone.
        """
        loop = self._loop()
        if loop is None or loop.is_closed():
            raise RuntimeError("the loop is gone")
        if self._fd < 0:
            loop.call_soon_threadsafe(callback)
        else:
            with self._lock:
                self._callbacks.append(callback)  # first, or a loop that is quick would not find it
                os.eventfd_write(self._fd, 1)

    def release(self) -> None:
        """Stop reading, and close the descriptor. On the loop. Idempotent."""
        loop = self._loop()
        if self._fd >= 0 and loop is not None:
            loop.remove_reader(self._fd)
            self._close()

    def _on_readable(self) -> None:
        os.eventfd_read(self._fd)
        while self._callbacks:
            self._callbacks.popleft()()

    def _close(self) -> None:
        with self._lock:
            fd, self._fd = self._fd, -1
        os.close(fd)

    def __del__(self) -> None:
        # A loop that was closed before `release` has dropped the descriptor and this object; an open loop holds both.
        if self._fd >= 0:
            self._close()


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
        """Whether the thread is to end, since it is closed or its loop is gone; long jobs ask it from the thread."""
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
        while self._work.thread.is_alive() and not self._work.is_given_up:  # noqa: ASYNC110 - a thread's end raises no event
            await asyncio.sleep(0)


class _ThreadState:
    """State that the thread and its `DeviceThread` share."""

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
        """Have the thread end; from any thread."""
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

    def wake(self, pending: Pending[Any]) -> None:
        self.call_on_loop(pending.wake)

    def end(self) -> None:
        """End on the loop, after all that the thread does."""
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
    while not work.queue.empty():  # `submit` puts nothing any more
        queued = work.queue.get()
        if queued is not None:
            queued.fail(DeviceLost(CLOSED))
            work.wake(queued)
    if not waiter.end(DRAIN_DEADLINE_S):
        logger.error(
            "the device was closed and has not finished its work after %g s; its memory is in use until it does",
            DRAIN_DEADLINE_S,
        )
        waiter.give_up(lambda: DeviceLost(f"{CLOSED}, and has not finished its work"))
        work.is_given_up = True
        work.call_on_loop(work.ended.set)
        waiter.end(None)
    try:
        work.on_end()
    finally:
        _running.discard(work)
        work.call_on_loop(work.end)


_running: weakref.WeakSet[_ThreadState] = weakref.WeakSet()


def _stop_all_at_exit() -> None:
    for work in list(_running):
        work.stop()
        work.thread.join(EXIT_DEADLINE_S)


atexit.register(_stop_all_at_exit)
