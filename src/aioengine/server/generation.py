"""The engine's streams behind one HTTP request, read together, and the way of their events to the client."""

from __future__ import annotations

import asyncio
import functools
import math
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Self

from aioengine.engine import Stream
from aioengine.errors import AioEngineError
from aioengine.outputs import CompletionDelta, RequestOutput
from aioengine.server.exchange import Exchange


class StreamGroup:
    """Several streams as one: `watch`, then `wait` and `take` until it `is_ended`.

    Entering hands all of them to the engine, or none; leaving, for any reason, aborts what has not ended.

    Args:
        streams: one for each prompt, not entered yet.
        num_choices: of each prompt; a choice's number counts through all prompts.
    """

    def __init__(self, streams: list[Stream], num_choices: int) -> None:
        self._streams = streams
        self._num_choices = num_choices
        self._num_entered = 0
        self._with_news: list[int] = []
        """Places of streams that have something to take, once for each choice of theirs, and once for their end."""
        self._num_open = 0
        self._failure: AioEngineError | None = None
        self._waiter: asyncio.Future[None] | None = None

    async def __aenter__(self) -> Self:
        try:
            for stream in self._streams:
                await stream.__aenter__()
                self._num_entered += 1
        except BaseException:
            await self.__aexit__(None, None, None)
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for stream in self._streams[: self._num_entered]:
            await stream.__aexit__(kind, error, traceback)

    @property
    def is_ended(self) -> bool:
        """All has been taken."""
        return not self._num_open

    def watch(self) -> None:
        """Be told of news from now on, for `wait` and `take`."""
        self._num_open = len(self._streams) * self._num_choices
        for place, stream in enumerate(self._streams):
            stream.watch(functools.partial(self._on_news, place))

    async def wait(self) -> bool:
        """Wait for something to `take`, or for the end; False where it was `wake` that ended the wait."""
        if not self._with_news:
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        return bool(self._with_news)

    def wake(self) -> None:
        """End a `wait`, without news."""
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def take(self) -> list[tuple[int, CompletionDelta]]:
        """What is new, with the number of its choice.

        Raises:
            StepFailed, EngineDead, EngineClosed: a request has failed, and all that had arrived of it was taken.
        """
        if self._failure is not None:
            raise self._failure
        places, self._with_news = self._with_news, []
        taken: list[tuple[int, CompletionDelta]] = []
        for place in places:
            stream = self._streams[place]
            try:
                # A single choice has one delta for each time that it told of news: asking again costs half of it.
                while (delta := stream.take()) is not None:
                    taken.append((place * self._num_choices + delta.index, delta))
                    if delta.finish_reason is not None:
                        self._num_open -= 1
                    if self._num_choices == 1:
                        break
            except AioEngineError as error:
                if not taken:
                    raise
                self._failure = error
                self._with_news.append(place)  # to be asked again
                break
        return taken

    async def finish(self) -> list[RequestOutput]:
        """Wait for the end of all; one output for each prompt."""
        return [await stream.finish() for stream in self._streams]

    def outputs(self) -> list[RequestOutput]:
        """All prompts' outputs as far as they have come."""
        return [stream.result for stream in self._streams[: self._num_entered]]

    def output(self, place: int) -> RequestOutput:
        """One prompt's output as far as it has come."""
        return self._streams[place].result

    def _on_news(self, place: int) -> None:
        self._with_news.append(place)
        self.wake()


class EventWriter:
    """Writes a stream's events, and looks now and then at how that goes: a client that takes nothing for long is
    cut off, and where there was nothing to write for long somebody is told.

    Looking at the clock before each write costs 0.1 µs; a timeout around it would cost 4.

    Args:
        timeout_s: how long one write may wait for its client.
        on_stuck: called when the connection has been cut.
        idle_s: how long nothing may be written.
        on_idle: called then, and again after each such time.
    """

    def __init__(
        self,
        exchange: Exchange,
        *,
        timeout_s: float,
        on_stuck: Callable[[], None],
        idle_s: float = math.inf,
        on_idle: Callable[[], None] = lambda: None,
    ) -> None:
        self._exchange = exchange
        self._timeout_s = timeout_s
        self._on_stuck = on_stuck
        self._idle_s = idle_s
        self._on_idle = on_idle
        self._loop = asyncio.get_running_loop()
        self._is_writing = False
        self._since = self._loop.time()
        """When the last write began."""
        self._interval_s = min(timeout_s, idle_s)
        self._timer = self._loop.call_later(self._interval_s, self._look)

    async def start(self, status: int, headers: Mapping[str, str]) -> None:
        """Begin the response; waits as `write` does, where the client has not read an earlier one."""
        self._begin()
        await self._exchange.start(status, headers)
        self._is_writing = False

    async def write(self, data: bytes) -> None:
        """Write; waits while the client reads more slowly than it is written to."""
        self._begin()
        await self._exchange.write(data)
        self._is_writing = False

    async def end(self) -> None:
        """End the response; waits as `write` does."""
        self._begin()
        await self._exchange.end()
        self._is_writing = False

    def close(self) -> None:
        """Look no more. Idempotent."""
        self._timer.cancel()

    def _begin(self) -> None:
        self._since = self._loop.time()
        self._is_writing = True

    def _look(self) -> None:
        now = self._loop.time()
        if self._is_writing and now - self._since >= self._timeout_s:
            self._exchange.cut()
            self._on_stuck()
            return
        next_at = now + self._interval_s
        if self._is_writing:
            next_at = self._since + self._timeout_s
        elif now - self._since >= self._idle_s:
            self._since = now
            self._on_idle()
        self._timer = self._loop.call_at(next_at, self._look)
