"""Threads for work that is too long for the event loop."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import queue
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any, Generic, ParamSpec, TypeVar

import anyio

from aioengine.errors import EngineClosed
from aioengine.processes.threads import start_with_stack
from aioengine.processes.turns import turns_here

P = ParamSpec("P")
T = TypeVar("T")


class TextWorker:
    """Runs short text work at once and long text work in one daemon thread, in order of arrival.

    The first long text starts the thread. One is enough: tokenizing scales by the library's own threads if at all. The
    queue is bounded by the callers that wait for their work. `leave_behind` lets another thread serve the queue.

    Args:
        close_grace_s: the longest wait of closing; None: wait for all work.
        stack_bytes: size of the thread's stack; 0: the system's default.
    """

    # Encoding takes 0.2 µs a character of English and 0.9 µs of Japanese or emoji (16,000 byte-level tokens), at most a
    # millisecond for 1,000 characters. Handing over to the thread and back costs 0.1 ms.
    MAX_INLINE_CHARS = 1000

    def __init__(self, *, close_grace_s: float | None = None, stack_bytes: int = 0) -> None:
        self._close_grace_s = close_grace_s
        self._is_closed = False
        self._unfinished: set[_Call[Any]] = set()
        self._threads = _Threads(stack_bytes)
        self.leave_behind = self._threads.leave_behind
        weakref.finalize(self, self._threads.close).atexit = False

    async def run(self, function: Callable[P, T], /, size: int | None, *args: P.args, **kwargs: P.kwargs) -> T:
        """Call the function, and return its result or raise its exception.

        Cancelling stops the wait: work that has not begun is dropped; work that has begun goes on to its end in the
        thread, and its result is lost.

        Args:
            size: characters to work on; None: always use the thread, for work whose time does not depend on the text's
                size (a chat template: the first one compiles and imports).
        Raises:
            RuntimeError: the worker is closed.
        """
        if self._is_closed:
            raise RuntimeError("this TextWorker is closed")
        if size is not None and size <= self.MAX_INLINE_CHARS:
            await turns_here().take()
            return function(*args, **kwargs)
        with outside_work("text"):
            return await self.begin(lambda: function(*args, **kwargs))

    def begin(self, function: Callable[[], T]) -> asyncio.Future[T]:
        """Queue the function for the thread; the future gets its result or exception. `aclose` waits for it."""
        call = _Call(function)
        self._threads.add(call)
        self._unfinished.add(call)
        call.outcome.add_done_callback(lambda _: self._unfinished.discard(call))
        return call.outcome

    async def aclose(self) -> None:
        """Wait for the work, at most ``close_grace_s``, then end the thread. Closing twice is harmless.

        Work that is not done then ends with `EngineClosed`, also when the wait is cancelled; the thread ends after its
        current call.
        """
        self._is_closed = True
        self._threads.close()
        try:
            if self._threads.alive or self._unfinished:
                # In a thread, since it would hold the loop. At the interpreter's exit no thread may start.
                with contextlib.suppress(RuntimeError):
                    await run_abandonable(functools.partial(self._threads.join, self._close_grace_s))
        finally:
            for call in list(self._unfinished):
                call.end(None, EngineClosed("the engine is closed"))


class _Threads:
    """The resident thread and those of long work. They hold no reference to the worker, which may be dropped."""

    def __init__(self, stack_bytes: int) -> None:
        self._stack_bytes = stack_bytes
        self.alive: set[threading.Thread] = set()
        self._waiting: queue.SimpleQueue[_Call[Any] | None] = queue.SimpleQueue()
        """Calls in order, with a None after them once closed. The resident thread alone waits for the next one."""
        self._lock = threading.Lock()
        self._resident: threading.Thread | None = None

    def add(self, call: _Call[Any]) -> None:
        with self._lock:
            if self._resident is None:
                self._start_resident()
            self._waiting.put(call)

    def leave_behind(self) -> None:
        """Let another thread serve the queue, since the resident one's work takes long. From any thread."""
        with self._lock:
            self._resident = None
            if not self._waiting.empty():
                self._start_resident()

    def close(self) -> None:
        """Let the threads end once the queue is empty."""
        self._waiting.put(None)

    def join(self, timeout_s: float | None) -> None:
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        for thread in list(self.alive):
            thread.join(None if deadline is None else max(0.0, deadline - time.monotonic()))

    def _start_resident(self) -> None:
        thread = threading.Thread(target=self._work, name="aioengine-text", daemon=True)
        # First: if no thread can be started, the next call tries again.
        start_with_stack(thread, self._stack_bytes)
        self.alive.add(thread)
        self._resident = thread

    def _work(self) -> None:
        with self._lock:  # held until this thread has been made the resident one
            here = threading.current_thread()
        while self._resident is here:
            call = self._waiting.get()
            if call is None:
                self._waiting.put(None)  # for a thread that was left behind when its work was already done
                break
            if not call.outcome.done():  # nothing has ended it
                call.run()
            del call
        self.alive.discard(here)


async def run_abandonable(function: Callable[[], T], *, grace_s: float = 0.0) -> T:
    """Call the function in a daemon thread of its own, for work that cannot be stopped: a download, loading a library.

    Cancelling waits ``grace_s`` for the function, then abandons it: its thread goes on to the end by itself, and
    nothing waits for that, not even the interpreter's exit.
    """
    with outside_work("loading"):
        call = _Call(function)
        thread = threading.Thread(target=call.run, name="aioengine-load", daemon=True)
        thread.start()
        try:
            return await call.outcome
        finally:
            with anyio.CancelScope(shield=True), anyio.move_on_after(grace_s):
                await call.ended.wait()
            if call.ended.is_set():
                await _wait_for_unwinding(thread)


async def _wait_for_unwinding(thread: threading.Thread) -> None:
    """Wait for the end of a thread whose work is done, even when cancelled, since that takes microseconds.

    A join would hold the loop for as long as the thread waits for the GIL.
    """
    cancelled = None
    while thread.is_alive():
        try:
            await asyncio.sleep(0)
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is not None:
        try:
            raise cancelled
        finally:
            del cancelled  # its traceback holds this frame


def outside_work(name: str) -> contextlib.AbstractContextManager[Any]:
    """A context in which a loop with a virtual clock counts work outside of it; no effect on other loops."""
    tell = getattr(asyncio.get_running_loop(), "outside_work", None)
    return contextlib.nullcontext() if tell is None else tell(name)


class _Call(Generic[T]):
    """A function for a thread to call, and its outcome for the loop that waits.

    Attributes:
        outcome: the function's result or exception; the loop may cancel it, or `end` it with another.
        ended: set when the function has returned, even if the loop no longer waited, or when `end` was called.
    """

    def __init__(self, function: Callable[[], T]) -> None:
        self._function = function
        self._loop = asyncio.get_running_loop()
        self.outcome: asyncio.Future[T] = self._loop.create_future()
        self.ended = asyncio.Event()

    def run(self) -> None:
        result: Any = None
        error = None
        try:
            result = self._function()
        except BaseException as exc:  # any exception belongs to the caller that waits
            error = exc
        with contextlib.suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(self.end, result, error)
        del self, error  # the error's traceback has this frame

    def end(self, result: Any, error: BaseException | None) -> None:
        """Set the outcome, on the loop; only the first call counts."""
        self.ended.set()
        if self.outcome.done():
            return
        if error is not None:
            self.outcome.set_exception(error)
        else:
            self.outcome.set_result(result)
