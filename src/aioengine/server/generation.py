"""The engine's streams behind one HTTP request, read together, and the way of their events to the client."""

from __future__ import annotations

import asyncio
import functools
import time
from collections.abc import Callable
from types import TracebackType
from typing import Self

import msgspec

from aioengine.engine import Stream
from aioengine.errors import AioEngineError
from aioengine.outputs import CompletionDelta, RequestOutput
from aioengine.server.answers import Answer, Usage, error_event, in_parts
from aioengine.server.config import ServerConfig
from aioengine.server.errors import api_error_of
from aioengine.server.exchange import EventWriter, Exchange
from aioengine.server.record import RequestRecord
from aioengine.server.schema import StreamOptions

EVENT_HEADERS = {
    "content-type": "text/event-stream; charset=utf-8",
    "cache-control": "no-cache",
    "x-accel-buffering": "no",  # else nginx collects events before it passes them on
}
KEEPALIVE = b": still here\n\n"
"""A comment, which clients of server-sent events pass over."""


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


class Relay:
    """Passes a batch's deltas on to the client as events."""

    def __init__(
        self,
        exchange: Exchange,
        record: RequestRecord,
        batch: StreamGroup,
        answer: Answer,
        options: StreamOptions | None,
    ) -> None:
        self._exchange = exchange
        self._record = record
        self._batch = batch
        self._answer = answer
        self._has_usage = has_usage(options)
        self._is_usage_continuous = options is not None and bool(options.continuous_usage_stats)
        self._so_far: Usage | None = None

    async def run(self, config: ServerConfig, cut: Callable[[], None]) -> None:
        """Relay to the end, or to the error that ends it: that is an event, too."""
        self._batch.watch()
        self._record.status = 200
        writer = EventWriter(
            self._exchange,
            timeout_s=config.write_timeout_s,
            on_stuck=cut,
            idle_s=config.keepalive_s,
            on_idle=self._batch.wake,
        )
        try:
            await writer.start(200, {**EVENT_HEADERS, "x-request-id": self._record.request_id})
            last = await self._relay(writer)
            await writer.write(last)
            await writer.end()
        finally:
            writer.close()

    async def _relay(self, writer: EventWriter) -> bytes:
        """Write all events but the last ones, which are returned."""
        batch, answer, echo = self._batch, self._answer, self._answer.echo
        num_choices = self._record.num_prompts * (self._record.n or 1)
        if opening := answer.opening(num_choices, self._count(0)):
            await writer.write(opening)
        echoed: set[int] = set()
        while not batch.is_ended:
            if not await batch.wait():
                await writer.write(KEEPALIVE)
                continue
            try:
                taken = batch.take()
            except AioEngineError as error:
                self._record.outcome, self._record.error = "error", error
                return error_event(api_error_of(error).body()) + answer.closing(None)
            events: list[bytes] = []
            for choice, delta in taken:
                if echo is not None and choice not in echoed:
                    echoed.add(choice)
                    output = batch.output(choice // (self._record.n or 1))
                    events.append(await echo(choice, output, self._count(0)))
                if delta.logprobs is not None and len(delta.logprobs) > answer.max_lines:
                    for part in in_parts(delta, answer.max_lines):
                        events.append(answer.event(choice, part, self._count(len(part.token_ids))))
                        await self._write(writer, events)
                        await asyncio.sleep(0)
                else:
                    events.append(answer.event(choice, delta, self._count(len(delta.token_ids))))
            await self._write(writer, events)
        return answer.closing(answer.usage(batch.outputs()) if self._has_usage else None)

    async def _write(self, writer: EventWriter, events: list[bytes]) -> None:
        """Write the events, and forget them."""
        data = b"".join(events)
        events.clear()
        if data:
            if self._record.time_to_first_token_s is None:
                self._record.time_to_first_token_s = time.monotonic() - self._record.started_at
            await writer.write(data)

    def _count(self, num_tokens: int) -> Usage | None:
        """The usage so far, with so many new tokens; None where it is told at the end alone."""
        if not self._is_usage_continuous:
            return None
        if self._so_far is None:
            self._so_far = msgspec.structs.replace(Usage.of(self._batch.outputs()), completion_tokens=0)
        self._so_far.completion_tokens += num_tokens
        return self._so_far


def note_outputs(record: RequestRecord, batch: StreamGroup) -> None:
    """What the requests have brought, for the log."""
    outputs = batch.outputs()
    if not outputs:
        return
    usage = Usage.of(outputs)
    choices = [choice for output in outputs for choice in output.outputs]
    record.prompt_tokens, record.completion_tokens = usage.prompt_tokens, usage.completion_tokens
    record.max_choice_tokens = max(len(choice.token_ids) for choice in choices)
    record.finish_reasons = tuple(choice.finish_reason for choice in choices if choice.finish_reason is not None)
    record.metrics = outputs[0].metrics


def has_usage(options: StreamOptions | None) -> bool:
    return options is not None and bool(options.include_usage)
