"""A request's streams, one for each of its prompts, read as one."""

from __future__ import annotations

import asyncio
import contextlib
import functools

from aioengine.engine import Stream
from aioengine.errors import AioEngineError
from aioengine.outputs import CompletionDelta, RequestOutput


class StreamGroup:
    """Several streams as one: `enter`, `watch`, then `wait` and `take` until it `is_ended`.

    Args:
        streams: one for each prompt, not entered yet, and of as many choices; a choice's number counts through all.
    """

    def __init__(self, streams: list[Stream]) -> None:
        self.streams = streams
        self._num_choices = streams[0].params.n
        """Choices of each prompt."""
        self._entered: list[Stream] = []
        self._ready: list[int] = []
        """Numbers of streams that have something to take; each may occur several times, for its choices and its end."""
        self._num_open = 0
        self._failures: list[AioEngineError] = []
        """A failure that came after deltas, to be raised by the next `take`."""
        self._waiter: asyncio.Future[None] | None = None

    async def enter(self, stack: contextlib.AsyncExitStack) -> None:
        """Hand the streams to the engine, all or none; leaving the stack, for any reason, aborts what has not ended."""
        for stream in self.streams:
            await stack.enter_async_context(stream)
            self._entered.append(stream)

    @property
    def is_ended(self) -> bool:
        """All choices have been taken to their end."""
        return not self._num_open

    def watch(self) -> None:
        """Follow the streams from now on, for `wait` and `take`."""
        self._num_open = len(self.streams) * self._num_choices
        for number, stream in enumerate(self.streams):
            stream.watch(functools.partial(self._mark_ready, number))

    def _mark_ready(self, number: int) -> None:
        self._ready.append(number)
        self.wake()

    async def wait(self) -> bool:
        """Wait until there is something to `take`; False if `wake` ended the wait without it."""
        if not self._ready:
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        return bool(self._ready)

    def wake(self) -> None:
        """End a `wait`, though there may be nothing to take."""
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def take(self) -> list[tuple[int, CompletionDelta]]:
        """All deltas that have come, each with the number of its choice.

        Raises:
            StepFailed, EngineDead, EngineClosed: a request has failed, and all of its deltas were taken.
        """
        if self._failures:
            raise self._failures.pop()  # its traceback leads here, where it must not stay
        numbers, self._ready = self._ready, []
        taken: list[tuple[int, CompletionDelta]] = []
        for number in numbers:
            stream = self.streams[number]
            try:
                # A single choice has one delta each time that it is ready: a second call would cost half of this.
                while (delta := stream.take()) is not None:
                    taken.append((number * self._num_choices + delta.index, delta))
                    if delta.finish_reason is not None:
                        self._num_open -= 1
                    if self._num_choices == 1:
                        break
            except AioEngineError as error:
                if not taken:
                    raise
                self._failures.append(error.anew())
                self._ready.append(number)  # to be asked again
                break
        return taken

    async def finish(self) -> list[RequestOutput]:
        """Wait until all streams have ended; returns one output for each prompt."""
        return [await stream.finish() for stream in self.streams]

    def outputs(self) -> list[RequestOutput]:
        """All entered prompts' outputs so far."""
        return [stream.result for stream in self._entered]

    def output_of(self, choice: int) -> RequestOutput:
        """The output so far of the prompt of a choice."""
        return self.streams[choice // self._num_choices].result
