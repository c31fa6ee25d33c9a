"""What a job brings, and the thread that waits for what comes later than the job's end.

On a GPU a job only launches its work. It returns a `DeferredResult`, the device thread goes on with the next plan, and
the waiter thread blocks until the device gets there: one wake of the loop a step, and no look at the clock. Other ways
of waiting are measured beside it in ``benchmarks/gpu/waiting.md``; each would be another `Waiter`.
"""

from __future__ import annotations

import asyncio
import queue
import threading
import traceback
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from typing import Any, Generic, TypeVar

import torch

from aioengine.errors import TRACEBACK, linked

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)

THREAD_NAME = "aioengine-waiter"


class DeferredResult(ABC, Generic[T_co]):
    """What a job returns that has launched work on the device and not waited for it.

    To be derived from: other things with a ``wait``, such as a process or an event, are results.
    """

    @abstractmethod
    def wait(self) -> T_co:
        """Block until the device is done, without the GIL; return the job's result, or raise what became of it.

        Called once, in the waiter thread, under ``torch.inference_mode``, after those of all earlier jobs.
        """


class Pending(Generic[T]):
    """What a job will bring. Made on the loop; a thread sets the outcome, and then wakes who waits on the loop.

    Attributes:
        is_launched: the job has run, and has returned a `DeferredResult`, which is or was to be waited for.
        is_done: the outcome is there.
    """

    def __init__(self, job: Callable[[], T | DeferredResult[T]]) -> None:
        self._job: Callable[[], T | DeferredResult[T]] | None = job
        self._result: T | None = None
        self._error: BaseException | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._outcome = threading.Lock()
        self.is_launched = False
        self.is_done = False

    async def wait(self) -> T:
        """The job's result, or what it raised. Cancelling stops the wait, not the job: one may wait again."""
        if not self.is_done:
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        if self._error is not None:
            raise self._error
        return self._result  # type: ignore[return-value]  # a job that raised nothing brought a T

    def run(self) -> None:
        """Run the job, in the device thread; once it is launched, wait for its end, in the waiter thread."""
        assert self._job is not None
        try:
            result = self._job()
        except BaseException as error:  # whatever it was, the one who waits must hear it, and the thread go on
            _forget_locals(error)
            self._job = None
            self._end(None, error)
            return
        if isinstance(result, DeferredResult) and not self.is_launched:
            self._job = result.wait
            self.is_launched = True
        else:
            self._job = None
            self._end(result, None)  # type: ignore[arg-type]  # no DeferredResult: the condition above is too much for mypy

    def fail(self, error: Exception) -> None:
        """Bring an error instead of the job's outcome, unless that is there. What is launched is still waited for."""
        if not self.is_launched:
            self._job = None
        self._end(None, error)

    def wake(self) -> None:
        """Let `wait` return if the outcome is there, on the loop."""
        if self.is_done and self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def _end(self, result: T | None, error: BaseException | None) -> None:
        # Never released: of two threads the first one counts, where a device that was given up comes back after all.
        if self._outcome.acquire(blocking=False):
            self._result = result
            self._error = error
            self.is_done = True


class Waiter:
    """Waits for launched jobs, in order, in a daemon thread that the first of them starts.

    For the device thread alone, which must call `end`.

    Args:
        on_done: called with each job when it is done, in the thread that saw it; must not raise.
    """

    def __init__(self, on_done: Callable[[Pending[Any]], object]) -> None:
        self._on_done = on_done
        self._queue: queue.SimpleQueue[Pending[Any] | None] = queue.SimpleQueue()
        self._launched: deque[Pending[Any]] = deque()
        """Those that are not done."""
        self._thread: threading.Thread | None = None

    def add(self, pending: Pending[Any]) -> None:
        """Wait for a job that is launched. Returns at once, but where no thread can be had: then it waits itself."""
        self._launched.append(pending)
        if self._thread is None and not self._start():
            self._finish(pending)
        else:
            self._queue.put(pending)

    def end(self, timeout_s: float | None) -> bool:
        """Block until all jobs are done and the thread has ended; False if they are not by then. May be repeated."""
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
                del pending  # or its result would live until the next one

    def _finish(self, pending: Pending[Any]) -> None:
        pending.run()
        self._launched.popleft()
        self._on_done(pending)


def _forget_locals(error: BaseException) -> None:
    """Free what the failed job's functions held, or an error that someone keeps would keep the model alive."""
    for link in linked(error):
        traceback.clear_frames(TRACEBACK.__get__(link))
