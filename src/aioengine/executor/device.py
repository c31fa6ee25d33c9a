"""The device thread: one resident thread that owns the device and runs jobs in order.

Its results come back through ``call_soon_threadsafe``. The thread knows neither the `DeviceThread` that started it nor
that one's owner: when nobody refers to them any more, or their loop is closed, it drops what it holds and ends.
"""

from __future__ import annotations

import asyncio
import atexit
import queue
import threading
import traceback
import weakref
from collections.abc import Callable
from typing import Any, Generic, TypeVar

import torch

from aioengine.executor.protocol import DeviceLost

T = TypeVar("T")

THREAD_NAME = "aioengine-device"

LOOP_CHECK_INTERVAL_S = 0.5
"""How often an idle thread looks whether its loop still lives: nobody tells it when a loop is closed."""

EXIT_DEADLINE_S = 10.0
"""How long the interpreter's exit waits for a running job: a thread that is killed inside torch aborts the process."""


class Pending(Generic[T]):
    """What a job will bring. Made on the loop; the thread sets the outcome, and then wakes who waits on the loop."""

    def __init__(self, job: Callable[[], T]) -> None:
        self._job: Callable[[], T] | None = job
        self._result: T | None = None
        self._error: BaseException | None = None
        self._waiter: asyncio.Future[None] | None = None
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
        """Run the job, in the thread."""
        assert self._job is not None
        try:
            self._result = self._job()
        except BaseException as error:  # whatever it was, the one who waits must hear it, and the thread go on
            _forget_locals(error)
            self._error = error
        self._job = None
        self.is_done = True

    def fail(self, error: Exception) -> None:
        """Bring an error instead of running."""
        self._job = None
        self._error = error
        self.is_done = True

    def wake(self) -> None:
        """Let `wait` return, on the loop."""
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


class DeviceThread:
    """Runs jobs in order, each under ``torch.inference_mode``, in one thread.

    To be made and used on one event loop. What must live as long as the thread belongs to the jobs, and is let go by
    ``on_end``.

    Args:
        num_threads: threads of one torch operation in the thread; None: torch's number. Other threads keep theirs.
        on_end: the thread's last act, to free what the jobs have made; must not refer to this object.
    """

    def __init__(self, *, num_threads: int | None = None, on_end: Callable[[], None] = lambda: None) -> None:
        self._work = _Work(asyncio.get_running_loop(), num_threads, on_end)
        self._ended = self._work.ended
        weakref.finalize(self, self._work.stop)
        self._work.thread.start()

    @property
    def should_stop(self) -> Callable[[], bool]:
        """For long jobs to ask from the thread: whether it is to end, since it was told so or its loop is gone."""
        return self._work.should_stop

    def submit(self, job: Callable[[], T]) -> Pending[T]:
        """Queue a job without waiting. Once the thread is told to stop, a job fails with `DeviceLost`."""
        pending = Pending(job)
        if self._work.is_stopping:
            pending.fail(_closed())
        else:
            self._work.queue.put(pending)
        return pending

    async def aclose(self) -> None:
        """Stop after the job that runs, failing the queued ones with `DeviceLost`, and see the thread end. Idempotent.

        Cancelling stops the wait; the thread ends all the same.
        """
        self._work.stop()
        if asyncio.get_running_loop() is self._work.loop():
            await self._ended.wait()
        # It has nothing left to do, and is gone in some µs; a join would hold the loop.
        while self._work.thread.is_alive():  # noqa: ASYNC110 - no event can tell that the thread itself has ended
            await asyncio.sleep(0)


class _Work:
    """What the thread and its `DeviceThread` share."""

    def __init__(self, loop: asyncio.AbstractEventLoop, num_threads: int | None, on_end: Callable[[], None]) -> None:
        self.queue: queue.SimpleQueue[Pending[Any] | None] = queue.SimpleQueue()
        self.loop = weakref.ref(loop)
        self.is_stopping = False
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
        """Call back on the loop, or stop if there is none any more: nobody is left to hear of it."""
        loop = self.loop()
        try:
            if loop is None:
                raise RuntimeError("the loop is gone")
            loop.call_soon_threadsafe(callback)
        except RuntimeError:
            self.is_stopping = True

    def fail_queued(self) -> None:
        while True:
            try:
                pending = self.queue.get_nowait()
            except queue.Empty:
                return
            if pending is not None:
                pending.fail(_closed())
                self.call_on_loop(pending.wake)


def _run(work: _Work) -> None:
    """The thread's whole life."""
    if work.num_threads is not None:
        torch.set_num_threads(work.num_threads)
    with torch.inference_mode():
        while (pending := work.next_job()) is not None:
            pending.run()
            work.call_on_loop(pending.wake)
            del pending  # or its result would live until the next job
    work.fail_queued()
    try:
        work.on_end()
    finally:
        _running.discard(work)
        work.call_on_loop(work.ended.set)


def _forget_locals(error: BaseException) -> None:
    """Free what the failed job's functions held, or an error that someone keeps would keep the model alive."""
    link: BaseException | None = error
    while link is not None:
        traceback.clear_frames(link.__traceback__)
        link = link.__cause__ or link.__context__


def _closed() -> DeviceLost:
    return DeviceLost("the device was closed")


_running: weakref.WeakSet[_Work] = weakref.WeakSet()


def _stop_all_at_exit() -> None:
    for work in list(_running):
        work.stop()
        work.thread.join(EXIT_DEADLINE_S)


atexit.register(_stop_all_at_exit)
