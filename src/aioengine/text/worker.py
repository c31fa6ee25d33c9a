"""Threads for work that is too long for the event loop."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, ParamSpec, TypeVar

from aioengine.turns import turns_here

P = ParamSpec("P")
T = TypeVar("T")


class TextWorker:
    """Run short text work at once and long text work in a thread, one after the other, in order.

    One thread, because tokenizing scales by the library's own threads if at all, and because a bound is needed: what
    waits here is bounded by the callers that wait for it. The thread is made by the first long text.
    """

    # Encoding takes 0.2 µs a character of English and 0.9 µs of Japanese or emoji (16,000 byte-level tokens): at most
    # a millisecond for so many characters. Handing over to the thread and back costs 0.1 ms.
    MAX_INLINE_CHARS = 1000

    def __init__(self) -> None:
        self._executor: ThreadPoolExecutor | None = None
        self._threads: list[threading.Thread] = []
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
            # The thread keeps its initializer: one that knew this worker would keep a dropped worker alive, and itself.
            self._executor = ThreadPoolExecutor(1, "aioengine-text", _append_this_thread, (self._threads,))
        try:
            return asyncio.get_running_loop().run_in_executor(self._executor, function)
        except RuntimeError:  # the interpreter exits, and still waits for threads that use the engine
            return _begin_abandonable(function)

    async def aclose(self) -> None:
        """Wait for the work that is still wanted, then end the thread. Closing twice is harmless.

        Cancelling stops the wait: work that has not begun is dropped, and the thread ends after what it is doing.
        """
        self._is_closed = True
        executor, self._executor = self._executor, None
        if executor is None:
            return
        try:
            # The thread works in order: after this one it has nothing left to do. At the interpreter's exit it takes no
            # more, and has ended.
            with contextlib.suppress(RuntimeError):
                await asyncio.get_running_loop().run_in_executor(executor, _nothing)
        finally:
            executor.shutdown(wait=False, cancel_futures=True)
        # Not joined: that would hold the loop for as long as the thread, which only unwinds now, waits for the GIL.
        while any(thread.is_alive() for thread in self._threads):  # noqa: ASYNC110 - a thread's end sets no event
            await asyncio.sleep(0)


async def run_abandonable(function: Callable[[], T]) -> T:
    """Call the function in a daemon thread of its own, for work that nothing can stop, such as a download.

    Cancelling abandons it: the thread goes on to the function's end by itself, and nobody waits for it, not even the
    interpreter's exit.
    """
    return await _begin_abandonable(function)


def _begin_abandonable(function: Callable[[], T]) -> asyncio.Future[T]:
    loop = asyncio.get_running_loop()
    outcome: asyncio.Future[T] = loop.create_future()

    def settle(result: Any, error: BaseException | None) -> None:
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
        except BaseException as exc:  # whatever it was, the one who waits must hear it
            error = exc
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits
            loop.call_soon_threadsafe(settle, result, error)

    threading.Thread(target=work, name="aioengine-download", daemon=True).start()
    return outcome


def _append_this_thread(threads: list[threading.Thread]) -> None:
    threads.append(threading.current_thread())


def _nothing() -> None:
    pass
