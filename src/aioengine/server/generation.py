"""The engine's streams behind one HTTP request, read together, and the way of their events to the client."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable
from typing import Any, Self

import msgspec

from aioengine.engine import Stream
from aioengine.errors import AioEngineError
from aioengine.outputs import CompletionDelta, RequestOutput
from aioengine.server.answers import Answer, Usage, error_event, split_delta
from aioengine.server.config import ServerConfig
from aioengine.server.errors import api_error_of
from aioengine.server.exchange import EventWriter, Exchange
from aioengine.server.record import RequestRecord
from aioengine.server.schema import Generation

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
        self._ready: list[int] = []
        """Numbers of streams that have something to take, once for each choice of theirs, and once for their end."""
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

    async def __aexit__(self, *raised: Any) -> None:
        for stream in self._streams[: self._num_entered]:
            await stream.__aexit__(*raised)

    @property
    def num_choices(self) -> int:
        """Of all prompts."""
        return len(self._streams) * self._num_choices

    @property
    def is_ended(self) -> bool:
        """All has been taken."""
        return not self._num_open

    def watch(self) -> None:
        """Follow the streams from now on, for `wait` and `take`."""
        self._num_open = self.num_choices
        for number, stream in enumerate(self._streams):
            stream.watch(self._marker_of(number))

    def _marker_of(self, number: int) -> Callable[[], None]:
        def mark_ready() -> None:
            self._ready.append(number)
            self.wake()

        return mark_ready

    async def wait(self) -> bool:
        """Wait for something to `take`, or for the end; False where it was `wake` that ended the wait."""
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
            StepFailed, EngineDead, EngineClosed: a request has failed, and all that had arrived of it was taken.
        """
        if self._failure is not None:
            raise self._failure
        numbers, self._ready = self._ready, []
        taken: list[tuple[int, CompletionDelta]] = []
        for number in numbers:
            stream = self._streams[number]
            try:
                # A single choice has one delta for each time that it was ready: asking again costs half of it.
                while (delta := stream.take()) is not None:
                    taken.append((number * self._num_choices + delta.index, delta))
                    if delta.finish_reason is not None:
                        self._num_open -= 1
                    if self._num_choices == 1:
                        break
            except AioEngineError as error:
                if not taken:
                    raise
                self._failure = error
                self._ready.append(number)  # to be asked again
                break
        return taken

    async def finish(self) -> list[RequestOutput]:
        """Wait for the end of all; one output for each prompt."""
        return [await stream.finish() for stream in self._streams]

    def outputs(self) -> list[RequestOutput]:
        """All prompts' outputs as far as they have come."""
        return [stream.result for stream in self._streams[: self._num_entered]]

    def output_of(self, choice: int) -> RequestOutput:
        """The output of the prompt of the choice of that number, as far as it has come."""
        return self._streams[choice // self._num_choices].result


class Relay:
    """Passes the deltas of a group of streams on to the client as events."""

    def __init__(
        self, exchange: Exchange, record: RequestRecord, request: Generation, group: StreamGroup, answer: Answer
    ) -> None:
        self._exchange = exchange
        self._record = record
        self._group = group
        self._answer = answer
        self._has_usage = request.has_usage
        options = request.stream_options
        self._is_usage_continuous = options is not None and bool(options.continuous_usage_stats)
        self._so_far: Usage | None = None

    async def run(self, config: ServerConfig, cut: Callable[[], None]) -> None:
        """Relay to the end, or to the error that ends it: that is an event, too."""
        group = self._group
        group.watch()
        self._record.status = 200
        timeout_s, idle_s = config.write_timeout_s, config.keepalive_s
        writer = EventWriter(self._exchange, timeout_s=timeout_s, on_stuck=cut, idle_s=idle_s, on_idle=group.wake)
        with contextlib.closing(writer):
            await writer.start(200, {**EVENT_HEADERS, "x-request-id": self._record.request_id})
            last = await self._relay(writer)
            await writer.write(last)
            await writer.end()

    async def _relay(self, writer: EventWriter) -> bytes:
        """Write all events but the last ones, which are returned."""
        group, answer, echo = self._group, self._answer, self._answer.echo
        if opening := answer.opening(group.num_choices, self._count(0)):
            await writer.write(opening)
        echoed: set[int] = set()
        while not group.is_ended:
            if not await group.wait():
                await writer.write(KEEPALIVE)
                continue
            try:
                taken = group.take()
            except AioEngineError as error:
                self._record.outcome, self._record.error = "error", error
                return error_event(api_error_of(error).body()) + answer.closing(None)
            events: list[bytes] = []
            for choice, delta in taken:
                if echo is not None and choice not in echoed:
                    echoed.add(choice)
                    events.append(await echo(choice, group.output_of(choice), self._count(0)))
                if delta.logprobs is not None and len(delta.logprobs) > answer.max_positions:
                    for part in split_delta(delta, answer.max_positions):
                        events.append(answer.event(choice, part, self._count(len(part.token_ids))))
                        await self._write(writer, events)
                        await asyncio.sleep(0)
                else:
                    events.append(answer.event(choice, delta, self._count(len(delta.token_ids))))
            await self._write(writer, events)
        return answer.closing(answer.usage(group.outputs()) if self._has_usage else None)

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
            self._so_far = msgspec.structs.replace(Usage.of(self._group.outputs()), completion_tokens=0)
        self._so_far.completion_tokens += num_tokens
        return self._so_far


def note_outputs(record: RequestRecord, group: StreamGroup) -> None:
    """What the requests have brought, for the log."""
    outputs = group.outputs()
    if not outputs:
        return
    usage = Usage.of(outputs)
    choices = [choice for output in outputs for choice in output.outputs]
    record.prompt_tokens, record.completion_tokens = usage.prompt_tokens, usage.completion_tokens
    record.max_choice_tokens = max(len(choice.token_ids) for choice in choices)
    record.finish_reasons = tuple(choice.finish_reason for choice in choices if choice.finish_reason is not None)
    record.metrics = outputs[0].metrics
