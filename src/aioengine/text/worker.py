"""Threads for work that is too long for the event loop."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Generic, NamedTuple, ParamSpec, TypeVar

import anyio

from aioengine.errors import EngineClosed
from aioengine.turns import turns_here

P = ParamSpec("P")
T = TypeVar("T")


class TextWorker:
    """Run short text work at once and long text work in a thread, one after the other, in order.

    One thread: tokenizing scales by the library's own threads if at all, and a bound is needed, so that what waits here
    is bounded by the callers that wait for it. It is made by the first long text.
    """

    # Encoding takes 0.2 µs a character of English and 0.9 µs of Japanese or emoji (16,000 byte-level tokens): at most
    # a millisecond for so many characters. Handing over to the thread and back costs 0.1 ms.
    MAX_INLINE_CHARS = 1000

    def __init__(self) -> None:
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
            self._executor = ThreadPoolExecutor(1, "aioengine-text")
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


class ChatWorker(TextWorker):
    """Run one rendering of a chat after the other in a daemon thread, for which nothing waits for long.

    A rendering that is overdue keeps its thread (`give_way`), which ends after it; what follows gets another.
    """

    CLOSE_GRACE_S = 1.0
    """How long closing waits for renderings, which their closed lanes stop at the next step."""

    def __init__(self) -> None:
        super().__init__()
        self._threads = _ChatThreads()
        self._begun: set[_Rendering] = set()
        """Those whose callers have not heard yet."""
        self.give_way = self._threads.give_way
        weakref.finalize(self, self._threads.close).atexit = False

    def begin(self, function: Callable[[], T]) -> asyncio.Future[T]:
        loop = asyncio.get_running_loop()
        rendering = _Rendering(function, loop)
        self._begun.add(rendering)
        rendering.outcome.add_done_callback(lambda _: self._begun.discard(rendering))
        # A loop with a virtual clock must know that something goes on outside of it.
        outside_work = getattr(loop, "outside_work", None)
        if outside_work is not None:
            work = outside_work("a rendering")
            rendering.outcome.add_done_callback(lambda _: work.done())
        self._threads.add(rendering)
        return rendering.outcome

    async def aclose(self) -> None:
        """Wait a little for what runs. What waits, and what does not end, ends for its caller with `EngineClosed`."""
        self._is_closed = True
        for rendering in self._threads.close():
            rendering.end(None, EngineClosed("the engine is closed"))
        if not self._threads.alive:
            return
        try:
            with contextlib.suppress(RuntimeError):  # at the interpreter's exit no thread may start
                await run_abandonable(functools.partial(self._threads.join, self.CLOSE_GRACE_S))
            await asyncio.sleep(0)  # what they have brought is behind in the loop's line
        finally:
            for rendering in list(self._begun):
                rendering.end(None, EngineClosed("the engine is closed"))


class _Rendering:
    """A call for a thread, and what it brings."""

    def __init__(self, function: Callable[[], Any], loop: asyncio.AbstractEventLoop) -> None:
        self.outcome: asyncio.Future[Any] = loop.create_future()
        self._function = function
        self._loop = loop

    def run(self) -> None:
        if self.outcome.done():
            return
        result, error = None, None
        try:
            result = self._function()
        except BaseException as exc:  # whatever it was, the one that waits must hear it
            error = exc
        with contextlib.suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(self.end, result, error)

    def end(self, result: Any, error: BaseException | None) -> None:
        """On the loop; the first end holds."""
        if self.outcome.done():
            return
        if error is not None:
            self.outcome.set_exception(error)
        else:
            self.outcome.set_result(result)


class _ChatThreads:
    """The thread that runs what is quick, and those of overdue renderings; without the worker, which may be dropped."""

    def __init__(self) -> None:
        self.alive: set[threading.Thread] = set()
        self._waiting: deque[_Rendering] = deque()
        self._changed = threading.Condition()
        self._resident: threading.Thread | None = None
        self._is_closed = False

    def add(self, rendering: _Rendering) -> None:
        with self._changed:
            self._waiting.append(rendering)
            self._changed.notify()
            self._man()

    def give_way(self) -> None:
        """Have what waits run in another thread, if this is the one that would."""
        with self._changed:
            if self._resident is threading.current_thread():
                self._resident = None
                self._man()

    def close(self) -> list[_Rendering]:
        """End the threads, each after what it runs; returns what was not begun."""
        with self._changed:
            self._is_closed = True
            dropped = list(self._waiting)
            self._waiting.clear()
            self._changed.notify_all()
        return dropped

    def join(self, timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        for thread in list(self.alive):
            thread.join(max(0.0, deadline - time.monotonic()))

    def _man(self) -> None:
        if self._resident is None and self._waiting:
            self._resident = threading.Thread(target=self._work, name="aioengine-text-chat", daemon=True)
            self.alive.add(self._resident)
            self._resident.start()

    def _work(self) -> None:
        here = threading.current_thread()
        while (rendering := self._take(here)) is not None:
            rendering.run()
            del rendering
        self.alive.discard(here)

    def _take(self, thread: threading.Thread) -> _Rendering | None:
        with self._changed:
            while not (self._waiting or self._is_closed) and self._resident is thread:
                self._changed.wait()
            return self._waiting.popleft() if self._waiting and self._resident is thread else None


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
