"""Threads for work that is too long for the event loop."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Generic, NamedTuple, ParamSpec, TypeVar

import anyio

from aioengine.turns import turns_here

P = ParamSpec("P")
T = TypeVar("T")


class TextWorker:
    """Run short text work at once and long text work in a thread, one after the other, in order.

    One thread, unless it is for chats: tokenizing scales by the library's own threads if at all, and a bound is needed,
    so that what waits here is bounded by the callers that wait for it. Threads are made by the first long texts.

    Args:
        num_threads: the most. With several, what takes long leaves the others to what comes after it.
    """

    # Encoding takes 0.2 µs a character of English and 0.9 µs of Japanese or emoji (16,000 byte-level tokens): at most
    # a millisecond for so many characters. Handing over to the thread and back costs 0.1 ms.
    MAX_INLINE_CHARS = 1000

    def __init__(self, num_threads: int = 1) -> None:
        self._num_threads = num_threads
        self._executor: ThreadPoolExecutor | None = None
        self._is_closed = False

    async def run(self, function: Callable[P, T], /, size: int | None, *args: P.args, **kwargs: P.kwargs) -> T:
        """Call the function and return what it returns or raise what it raises.

        Cancelling stops the wait: work that has not begun is dropped, work that has begun goes on to its end in the
        thread and its result is lost.

        Args:
            size: characters to work on; None, always in the thread, is for work whose time is not the text's (a chat
                template: the first one compiles and imports).
        Raises:
            RuntimeError: the worker is closed.
        """
        if self._is_closed:
            raise RuntimeError("this TextWorker is closed")
        if size is not None and size <= self.MAX_INLINE_CHARS:
            await turns_here().take()
            return function(*args, **kwargs)
        return await self.begin(lambda: function(*args, **kwargs))

    def begin(self, function: Callable[[], T]) -> asyncio.Future[T]:
        """Call the function in the thread; what it brings is in the future, for whoever cares. `aclose` waits."""
        if self._executor is None:
            self._executor = ThreadPoolExecutor(self._num_threads, "aioengine-text")
        try:
            return asyncio.get_running_loop().run_in_executor(self._executor, function)
        except RuntimeError:  # the interpreter exits, and still waits for threads that use the engine
            return _begin_abandonable(function).outcome

    async def aclose(self) -> None:
        """Wait for the work that is still wanted, then end the thread. Closing twice is harmless.

        Cancelling stops the wait: work that has not begun is dropped, and the thread ends after what it is doing.
        """
        self._is_closed = True
        executor, self._executor = self._executor, None
        if executor is None:
            return
        try:
            # Not here, where it would hold the loop. At the interpreter's exit no thread may start, and all have ended.
            with contextlib.suppress(RuntimeError):
                await run_abandonable(executor.shutdown)
        finally:
            executor.shutdown(wait=False, cancel_futures=True)


async def run_abandonable(function: Callable[[], T], *, grace_s: float = 0.0) -> T:
    """Call the function in a daemon thread of its own, for work that nothing can stop: a download, a library's loading.

    Cancelling waits ``grace_s`` for it, then abandons it: the thread goes on to the function's end by itself, and
    nothing waits for it, not even the interpreter's exit.
    """
    # A loop with a virtual clock must know that something goes on outside of it.
    outside_work = getattr(asyncio.get_running_loop(), "outside_work", None)
    with outside_work("loading") if outside_work is not None else contextlib.nullcontext():
        begun = _begin_abandonable(function)
        try:
            return await begun.outcome
        finally:
            with anyio.CancelScope(shield=True), anyio.move_on_after(grace_s):
                await begun.ended.wait()
            # It only unwinds now; a join would hold the loop for as long as it waits for the GIL.
            while begun.ended.is_set() and begun.thread.is_alive():  # noqa: ASYNC110 - a thread's end sets no event
                await asyncio.sleep(0)


class _Abandonable(NamedTuple, Generic[T]):
    """Work in a daemon thread: what it brings, whether it has ended, and the thread."""

    outcome: asyncio.Future[T]
    ended: asyncio.Event
    thread: threading.Thread


def _begin_abandonable(function: Callable[[], T]) -> _Abandonable[T]:
    loop = asyncio.get_running_loop()
    outcome: asyncio.Future[T] = loop.create_future()
    ended = asyncio.Event()

    def settle(result: Any, error: BaseException | None) -> None:
        ended.set()
        if outcome.done():
            return
        if error is not None:
            outcome.set_exception(error)
        else:
            outcome.set_result(result)

    def work() -> None:
        result, error = None, None
        try:
            result = function()
        except BaseException as exc:  # whatever it was, the one that waits must hear it
            error = exc
        with contextlib.suppress(RuntimeError):  # the loop is closed
            loop.call_soon_threadsafe(settle, result, error)

    thread = threading.Thread(target=work, name="aioengine-load", daemon=True)
    thread.start()
    return _Abandonable(outcome, ended, thread)
