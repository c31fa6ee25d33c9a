"""An event loop with an engine, in a thread of its own, for blocking calls from any thread."""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import logging
import os
import threading
from collections import deque
from collections.abc import Callable, Coroutine
from typing import Any, Generic, TypeVar

import anyio
import uvloop

from aioengine.engine import Engine
from aioengine.errors import EngineClosed
from aioengine.processes.turns import running_loop

T = TypeVar("T")

CLOSE_DEADLINE_S = 10.0
"""Longest wait for an engine's end, at the interpreter's exit or in the thread that drops the engine."""

SIGNAL_INTERVAL_S = 0.5
"""Time between a waiting thread's checks for signals: a signal just before it blocks in a lock does not wake it."""

CLOSED = "the engine was closed meanwhile"

logger = logging.getLogger("aioengine")


class LoopThread:
    """Starts an engine on a loop of its own in a daemon thread, and closes it there.

    Calls come from any thread, and run concurrently. Ctrl-C in the main thread cancels that thread's call, and is
    raised once the call has cleaned up; calls of other threads go on. A second Ctrl-C is raised at once, and the
    cleanup goes on by itself. Other exceptions of signal handlers do the same.

    Args:
        owner: for messages, the name of the class that blocks.
        start: makes the engine.
    Raises:
        RuntimeError: the calling thread runs an event loop.
        ConfigError, ModelLoadError: the engine cannot be started; nothing is left behind.
    """

    def __init__(self, owner: str, start: Callable[[], Coroutine[Any, Any, Engine]]) -> None:
        self._owner = owner
        self._pid = os.getpid()
        self._calls: set[_BlockingCall[Any]] = set()
        self.is_open = True
        self._refuse_running_loop()
        self._loop: asyncio.AbstractEventLoop = uvloop.new_event_loop()
        # Tasks to be started: anyio starts a task only from within a task, not from a callback.
        self._inbox: deque[Callable[[], Coroutine[Any, Any, None]]] = deque()
        self._changed = asyncio.Event()
        self._starting = _BlockingCall(start)
        self._thread = threading.Thread(target=self._run, name="aioengine-loop", daemon=True)
        try:
            self._thread.start()
            self._starting.wait()
            self._starting.check()
        except BaseException:
            self.stop()
            if self._thread.ident is None:  # there are too many threads
                self._loop.close()
            else:
                self._thread.join()
            raise
        # The function that is registered last is called first: before the device threads are stopped.
        atexit.unregister(_close_all)
        atexit.register(_close_all)

    @property
    def engine(self) -> Engine:
        """The engine, for calls that neither wait nor need its loop.

        Raises:
            RuntimeError: this object was made before a fork, in the parent process.
            EngineClosed: the engine is closed.
        """
        if os.getpid() != self._pid:
            raise RuntimeError(f"this {self._owner} was made in another process, before a fork: make one here")
        if not self.is_open:
            raise self._closed()
        return self._starting.result

    def run(
        self,
        work: Callable[[Engine], Coroutine[Any, Any, T]],
        *,
        every_s: float = SIGNAL_INTERVAL_S,
        meanwhile: Callable[[], None] = lambda: None,
    ) -> T:
        """Run ``work`` on the loop, and return its result.

        Args:
            every_s: seconds between two calls of ``meanwhile``, in this thread, during the wait.
        Raises:
            RuntimeError: this thread runs an event loop, or this object was made before a fork.
            EngineClosed: the engine is closed, or was closed while the work ran.
            KeyboardInterrupt: Ctrl-C; the work was cancelled.
        """
        engine = self.engine
        self._refuse_running_loop()
        call = _BlockingCall(lambda: work(engine))
        self._calls.add(call)
        try:
            if not self.is_open:  # else the thread ends all calls, this one included, before its own end
                raise self._closed()
            self.start_soon(call.run)
            call.wait(every_s, meanwhile)
        except BaseException:
            self._call_soon(call.cancel)
            call.wait()
            raise
        finally:
            self._calls.discard(call)
        call.check()
        return call.result

    def ask(self, question: Callable[[Engine], T]) -> T:
        """Call a function on the loop, and return its result; errors as of `run`."""

        async def answer(engine: Engine) -> T:
            return question(engine)

        return self.run(answer)

    def start_soon(self, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Start a task that raises nothing; for any thread. The task is cancelled once the engine has been closed."""
        self._call_soon(self._begin, work)

    def stop(self) -> None:
        """Begin to close the engine and to end the thread. Idempotent; for any thread, at any moment."""
        if os.getpid() == self._pid:  # a forked child has its parent's loop
            self._call_soon(self._stop)

    def close(self) -> None:
        """Close the engine, and wait for the thread's end. Idempotent."""
        if self.is_open:
            self._refuse_running_loop()
        self.stop()
        self._thread.join()

    def drop(self) -> None:
        """Close an engine that is no longer used. Waits for its end, except in a thread of an engine or event loop."""
        self.stop()
        if not (running_loop() or threading.current_thread().name.startswith("aioengine")):
            self._thread.join(CLOSE_DEADLINE_S)

    # In the thread

    def _run(self) -> None:
        _running.add(self)
        try:
            with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
                runner.run(self._serve())
        finally:
            self.is_open = False
            self._inbox.clear()
            for call in list(self._calls):
                call.end(self._closed())
            _running.discard(self)

    async def _serve(self) -> None:
        await self._starting.run()
        if not hasattr(self._starting, "result"):
            return
        async with anyio.create_task_group() as tasks:
            while self.is_open:
                await self._changed.wait()
                self._changed.clear()
                while self._inbox:
                    tasks.start_soon(self._inbox.popleft())
            try:
                await self._starting.result.aclose()
            except Exception as error:
                logger.error("closing an engine failed: %s", error)
            tasks.cancel_scope.cancel()

    def _begin(self, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
        self._inbox.append(work)
        self._changed.set()

    def _stop(self) -> None:
        self.is_open = False
        self._starting.cancel()
        self._changed.set()

    def _call_soon(self, function: Callable[..., object], *args: object) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed, and all calls have ended or soon will
            self._loop.call_soon_threadsafe(function, *args)

    def _closed(self) -> EngineClosed:
        return EngineClosed(f"this {self._owner} is closed; make a new one")

    def _refuse_running_loop(self) -> None:
        if running_loop() is not None:
            raise RuntimeError(
                f"{self._owner} blocks, and this thread runs an event loop, which would stand still: use "
                "`engine = await aioengine.Engine.start(...)` and `await engine.generate(...)` here"
            )


class _BlockingCall(Generic[T]):
    """A coroutine that runs on the loop, and its outcome for the one thread that waits for it."""

    result: T

    def __init__(self, work: Callable[[], Coroutine[Any, Any, T]]) -> None:
        self._work = work
        self._scope: anyio.CancelScope | None = None
        self._error: BaseException | None = None
        self._is_ended = False
        # Not an Event: Ctrl-C may be raised inside an Event's Python code, and leave its lock taken for ever.
        self._end = threading.Lock()
        self._end.acquire()

    async def run(self) -> None:
        """Run the work, on the loop. Raises nothing: `check` raises the work's error in the thread that waits."""
        if self._is_ended:
            return
        try:
            with anyio.CancelScope() as self._scope:
                self.result = await self._work()
                self.end(None)
        except asyncio.CancelledError:  # all tasks of the loop are cancelled: the engine has been closed
            pass
        except BaseException as error:
            self.end(error)
        self.end(EngineClosed(CLOSED))  # a call that has no outcome by now was cancelled

    def cancel(self) -> None:
        """Cancel the work, on the loop. Idempotent; no effect once the work has ended."""
        if self._scope is None:
            self.end(EngineClosed(CLOSED))
        elif not self._is_ended:
            self._scope.cancel()

    def end(self, error: BaseException | None) -> None:
        """Set the outcome, on the loop. Only the first call counts."""
        if not self._is_ended:
            self._error = error
            self._is_ended = True
            self._end.release()

    def wait(self, every_s: float = SIGNAL_INTERVAL_S, meanwhile: Callable[[], None] = lambda: None) -> None:
        """Block until the work has ended. May be repeated, after an exception has ended the wait."""
        while not self._is_ended:
            if not self._end.acquire(timeout=every_s):
                meanwhile()

    def check(self) -> None:
        """Raise the work's error, once."""
        error, self._error = self._error, None
        try:
            if error is not None:
                raise error
        finally:
            del error  # its traceback has this frame, which must not keep the caller's objects alive


_running: set[LoopThread] = set()


def _close_all() -> None:
    threads = list(_running)
    for thread in threads:
        thread.stop()
    for thread in threads:
        thread._thread.join(CLOSE_DEADLINE_S)
