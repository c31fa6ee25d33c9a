"""Results of jobs, the thread that waits for results later than their jobs' end, and how threads wake the loop.

A job of a GPU only launches its work and returns a `DeferredResult`. The device thread goes on with the next plan, and
the completion thread blocks until the device is done: one wake of the loop a step, no polling. Other ways to wait are
measured in ``benchmarks/gpu/waiting.md``; each would be another `CompletionThread`.
"""

from __future__ import annotations

import asyncio
import contextvars
import os
import queue
import threading
import traceback
import weakref
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from typing import Any, Generic, TypeVar

import torch

from aioengine.errors import TRACEBACK, linked

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)

THREAD_NAME = "aioengine-completion"


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
            _forget_locals(error)
            self._job = None
            self._end(None, error)
            del self  # the error's traceback has this frame
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
        if self._thread is None and not self._start():
            self._finish(pending)
        else:
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

    def _start(self) -> bool:
        thread = threading.Thread(target=self._run, name=THREAD_NAME, daemon=True)
        try:
            thread.start()
        except RuntimeError:  # too many threads, or the interpreter is about to exit
            return False
        self._thread = thread
        return True

    def _run(self) -> None:
        with torch.inference_mode():
            while (pending := self._queue.get()) is not None:
                self._finish(pending)
                del pending  # or its result would live until the next job

    def _finish(self, pending: Pending[Any]) -> None:
        pending.run()
        self._launched.popleft()
        self._on_done(pending)


def _forget_locals(error: BaseException) -> None:
    """Free the local variables of the failed job's functions: an error that is kept would keep the model alive."""
    for link in linked(error):
        traceback.clear_frames(TRACEBACK.__get__(link))


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
