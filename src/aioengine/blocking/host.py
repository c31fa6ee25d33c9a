"""A private event loop with an engine on it, driven by blocking calls."""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import logging
import os
import signal
import threading
import time
import weakref
from collections.abc import Callable, Coroutine
from typing import Any, Self, TypeVar

from aioengine.engine import Engine
from aioengine.errors import EngineClosed

T = TypeVar("T")

EXIT_DEADLINE_S = 10.0
"""How long the interpreter's exit waits for a daemon thread that is in a call."""

logger = logging.getLogger("aioengine")


class Host:
    """Runs an engine while somebody waits for it, in the thread that made it; there is no thread of its own.

    Between two calls the loop stands still; the device ends what it has begun. Ctrl-C in a call cancels what the call
    awaits, and is raised once that has cleaned up; the host stays usable. A second one does not wait for the cleaning
    up, which goes on with the next call. A third is raised wherever it hits, for a loop that hangs.

    One that is dropped, or left to the interpreter's exit, closes itself: scripts of this kind never close.

    Args:
        owner: for messages, the name of the class that blocks.
        start: makes the engine.
    Raises:
        RuntimeError: this thread runs an event loop.
        ConfigError, ModelLoadError: the engine cannot be started; nothing is left behind.
    """

    def __init__(self, owner: str, start: Callable[[], Coroutine[Any, Any, Engine]]) -> None:
        self._owner = owner
        self._thread = threading.current_thread()
        self._pid = os.getpid()
        self._refuse_loop()
        self._runner = asyncio.Runner(loop_factory=_make_loop)
        try:
            self._engine = _run(self._runner, start)
        except BaseException:
            self._runner.close()
            raise
        self._closer = weakref.finalize(self, _close_dropped, self._runner, self._engine, self._pid)
        _close_at_exit(self._closer)

    @property
    def is_open(self) -> bool:
        return self._closer.alive

    @property
    def engine(self) -> Engine:
        """The engine, for what does not wait; raises as `check_usable`."""
        self.check_usable()
        return self._engine

    def check_usable(self) -> None:
        """Raise where nothing can be asked of the engine.

        Raises:
            RuntimeError: this is not the thread that made it.
            EngineClosed: it is closed.
        """
        self._check_thread()
        if not self.is_open:
            raise EngineClosed(f"this {self._owner} is closed; make a new one")

    def run(self, work: Callable[[Engine], Coroutine[Any, Any, T]]) -> T:
        """Do this work on the loop, and wait for it.

        Raises:
            RuntimeError: this thread runs an event loop, or is not the one that made the host.
            EngineClosed: it is closed.
            KeyboardInterrupt: Ctrl-C; the work was cancelled.
        """
        engine = self.engine
        self._refuse_loop()
        return _run(self._runner, lambda: work(engine))

    def close(self) -> None:
        """Close the engine and the loop. Idempotent."""
        self._check_thread()
        if not self.is_open:
            return
        self._refuse_loop()
        self._closer.detach()
        _close(self._runner, self._engine)

    def _check_thread(self) -> None:
        if os.getpid() != self._pid:
            raise RuntimeError(f"this {self._owner} was made in another process, before a fork: make one here")
        if threading.current_thread() is not self._thread:
            raise RuntimeError(
                f"this {self._owner} was made in the thread {self._thread.name!r} and lives on its loop: use it there, "
                "make one in this thread, or share an async `aioengine.Engine` through "
                "asyncio.run_coroutine_threadsafe"
            )

    def _refuse_loop(self) -> None:
        if _is_loop_running():
            raise RuntimeError(
                f"{self._owner} blocks, and this thread runs an event loop, which would stand still: use "
                "`engine = await aioengine.Engine.start(...)` and `await engine.generate(...)` here"
            )


def _make_loop() -> asyncio.AbstractEventLoop:
    try:
        import uvloop
    except ImportError:
        return asyncio.new_event_loop()
    loop: asyncio.AbstractEventLoop = uvloop.new_event_loop()
    return loop


def _is_loop_running() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


class _Interrupts:
    """What Ctrl-C does while a loop runs in the main thread, where nobody else has decided that.

    Not what `asyncio.Runner` does: that raises KeyboardInterrupt wherever the loop is if the work has just ended, and
    that may be in the middle of the engine, which would not survive it.
    """

    def __init__(self) -> None:
        self._num_heard = 0
        self._task: asyncio.Task[Any] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._handler = self._on_signal

    def __enter__(self) -> Self:
        is_main = threading.current_thread() is threading.main_thread()
        if is_main and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            signal.signal(signal.SIGINT, self._handler)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: object) -> None:
        if signal.getsignal(signal.SIGINT) is self._handler:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        if self._num_heard and not isinstance(error, KeyboardInterrupt):
            raise KeyboardInterrupt from None

    async def guard(self, make_work: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """Do the work; from now on a signal cancels it."""
        self._task, self._loop = asyncio.current_task(), asyncio.get_running_loop()
        if self._num_heard:
            raise asyncio.CancelledError
        return await make_work()

    def _on_signal(self, number: int, frame: object) -> None:
        self._num_heard += 1
        if self._task is None or self._loop is None or self._task.done():
            return
        if self._num_heard == 1:
            self._task.cancel()
            self._loop.call_soon_threadsafe(lambda: None)  # it may be waiting for a file or a timer
        elif self._num_heard == 2:
            self._loop.call_soon_threadsafe(self._loop.stop)
        else:
            raise KeyboardInterrupt


def _run(runner: asyncio.Runner, make_work: Callable[[], Coroutine[Any, Any, T]]) -> T:
    with _Interrupts() as interrupts:
        return runner.run(interrupts.guard(make_work))


def _close(runner: asyncio.Runner, engine: Engine) -> None:
    try:
        _run(runner, engine.aclose)
    finally:
        runner.close()


def _close_dropped(runner: asyncio.Runner, engine: Engine, pid: int) -> None:
    """Close what nobody refers to any more: in whatever thread drops it, or at the interpreter's exit."""
    if os.getpid() != pid:
        return  # a forked child has its parent's
    if _is_loop_running():
        # Garbage is collected anywhere, also in a coroutine of the caller's. Not a daemon: the exit waits for it.
        threading.Thread(target=_close_quietly, args=(runner, engine), name="aioengine-closing").start()
    else:
        _close_quietly(runner, engine)


def _close_quietly(runner: asyncio.Runner, engine: Engine) -> None:
    is_exiting = not threading.main_thread().is_alive()
    try:
        _end_call(runner.get_loop(), engine)
        _close(runner, engine)
    except Exception as error:
        # At exit the interpreter has ended the text threads itself, so that closing them fails: that is no news.
        if not is_exiting:
            logger.error("closing an engine that was dropped failed: %s", error)


def _end_call(loop: asyncio.AbstractEventLoop, engine: Engine) -> None:
    """Where the interpreter exits while a daemon thread is in a call: let that hear `EngineClosed`, and return."""
    if not loop.is_running():
        return
    asyncio.run_coroutine_threadsafe(_aclose_quietly(engine), loop)
    deadline = time.monotonic() + EXIT_DEADLINE_S
    # The call may end, and the loop stand still, before the closing is done: that is gone on with here.
    while loop.is_running() and time.monotonic() < deadline:
        time.sleep(0.01)


async def _aclose_quietly(engine: Engine) -> None:
    with contextlib.suppress(Exception):
        await engine.aclose()


_closers: set[weakref.finalize[..., Host]] = set()


def _close_at_exit(closer: weakref.finalize[..., Host]) -> None:
    closer.atexit = False
    _closers.difference_update([other for other in _closers if not other.alive])
    _closers.add(closer)
    # To the end of the line, which is the first to be called: before the device threads are told to stop.
    atexit.unregister(_close_all)
    atexit.register(_close_all)


def _close_all() -> None:
    for closer in list(_closers):
        closer()
