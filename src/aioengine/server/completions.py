"""``/v1/chat/completions`` and ``/v1/completions``: from a decoded request to its last event."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import anyio
import msgspec

from aioengine.engine import Engine, Stream
from aioengine.errors import AioEngineError, InvalidRequest
from aioengine.server.access_log import MAX_ID_CHARS, is_fit_id
from aioengine.server.answers import Answer, AnswerHead, ChatAnswer, CompletionAnswer, Usage, error_event, in_parts
from aioengine.server.config import ServerConfig
from aioengine.server.decoding import read_messages, read_prompts
from aioengine.server.errors import JSON_HEADERS, api_error_of, invalid_value
from aioengine.server.exchange import ClientGone, Exchange, Response
from aioengine.server.generation import EventWriter, StreamGroup
from aioengine.server.record import RequestRecord
from aioengine.server.schema import (
    ChatRequest,
    CompletionRequest,
    Generation,
    StreamOptions,
    template_kwargs,
)
from aioengine.turns import turns_here

T = TypeVar("T")

EVENT_HEADERS = {
    "content-type": "text/event-stream; charset=utf-8",
    "cache-control": "no-cache",
    "x-accel-buffering": "no",  # else nginx collects events before it passes them on
}
KEEPALIVE = b": still here\n\n"
"""A comment, which clients of server-sent events pass over."""
CHAT_NAMES = {"prompt": "messages", "logprobs": "top_logprobs"}
"""What chats call the engine's parameters."""


class ClientCut(ClientGone):
    """The client has not read for so long that it was cut off."""


async def run_while_connected(exchange: Exchange, work: Callable[[Callable[[], None]], Awaitable[T]]) -> T:
    """Do the work as long as the client is there to hear of it.

    Args:
        work: is given a function that cuts the client off, as one that does not read.
    Raises:
        ClientGone, ClientCut: it left, or was cut off; the work was cancelled.
        Exception: what the work raised.
    """
    results: list[T] = []
    errors: list[Exception] = []
    gone: list[ClientGone] = []
    async with anyio.create_task_group() as group:

        def leave(reason: ClientGone) -> None:
            gone.append(reason)
            group.cancel_scope.cancel()

        async def do() -> None:
            try:
                results.append(await work(lambda: leave(ClientCut())))
            except Exception as error:  # a group would wrap it
                errors.append(error)
            group.cancel_scope.cancel()

        # The work is the child: each token resumes what it is awaited by, and a server's layers are many (1 µs).
        group.start_soon(do)
        await exchange.gone()
        await turns_here().take()  # a thousand that leave together end one after the other
        leave(ClientGone())
    if results:
        return results[0]
    raise (errors or gone)[0]


class Completions:
    """Answers both kinds of generation.

    Args:
        find_engine: where the engine is.
        config: of the server.
        model_name: the name to answer with for the one that was asked for.
    """

    def __init__(
        self, find_engine: Callable[[], Engine], config: ServerConfig, model_name: Callable[[str | None], str]
    ) -> None:
        self._find_engine = find_engine
        self._config = config
        self._model_name = model_name

    @property
    def _engine(self) -> Engine:
        return self._find_engine()

    async def chat(self, exchange: Exchange, record: RequestRecord, request: ChatRequest) -> Response | None:
        """Answer a chat; None when that was a stream, which has been written."""
        self._note(exchange, record, request)
        messages = read_messages(request.messages, self._config.max_messages)
        try:
            streams = await self._streams(record, request, [messages], chat_template_kwargs=template_kwargs(request))
            answer = ChatAnswer(
                self._head("chatcmpl", record, streams),
                self._engine.token_bytes,
                top_logprobs=(request.top_logprobs or 0) if request.logprobs else None,
                has_usage=_has_usage(request.stream_options),
            )
            return await self._answer(exchange, record, request, streams, answer)
        except InvalidRequest as error:
            names = dict(CHAT_NAMES)
            if request.max_completion_tokens is not None:
                names["max_tokens"] = "max_completion_tokens"
            if request.chat_template_kwargs is None:
                names["chat_template_kwargs"] = "add_generation_prompt"
            raise api_error_of(error, param_names=names) from error

    async def complete(self, exchange: Exchange, record: RequestRecord, request: CompletionRequest) -> Response | None:
        """Complete prompts; None when that was a stream, which has been written."""
        self._note(exchange, record, request)
        prompts = await read_prompts(
            request.prompt, max_prompts=self._config.max_prompts, max_ids=self._engine.info.max_model_len
        )
        streams = await self._streams(record, request, prompts)
        answer = CompletionAnswer(
            self._head("cmpl", record, streams),
            self._engine.token_bytes,
            top_logprobs=request.logprobs,
            has_usage=_has_usage(request.stream_options),
            num_choices=streams[0].params.n,
            prompt_texts=[await self._text_of(prompt) for prompt in prompts] if request.echo else None,
            is_echo_alone=request.is_echo_alone,
        )
        return await self._answer(exchange, record, request, streams, answer)

    async def _text_of(self, prompt: str | list[int]) -> str:
        if isinstance(prompt, str):
            return prompt
        return await self._engine.detokenize(prompt, skip_special_tokens=False)

    def _note(self, exchange: Exchange, record: RequestRecord, request: Generation) -> None:
        request.check()
        if request.request_id is not None:
            if not is_fit_id(request.request_id):
                raise invalid_value(
                    "request_id", f"request_id: 1 to {MAX_ID_CHARS} visible ASCII characters are needed, and no spaces"
                )
            if "x-request-id" not in exchange.headers:
                record.request_id = request.request_id
        record.model = self._model_name(request.model)
        record.is_stream = bool(request.stream)

    def _head(self, kind: str, record: RequestRecord, streams: list[Stream]) -> AnswerHead:
        """With the engine's id for it, so that what an answer is called can be aborted."""
        assert record.model is not None
        return AnswerHead(id=f"{kind}-{streams[0].request_id}", created=int(time.time()), model=record.model)

    async def _streams(
        self, record: RequestRecord, request: Generation, prompts: list[Any], **options: Any
    ) -> list[Stream]:
        """The engine's streams for the prompts, checked and not entered; with turns for others between long ones.

        Raises:
            InvalidRequest, EngineOverloaded: one is bad, or there is no room for them all.
        """
        sampling = request.sampling()
        streams: list[Stream] = []
        for prompt in prompts:
            if streams:
                await turns_here().take()
            stream = self._engine.stream(
                prompt,
                request_id=record.request_id if request.request_id is None else request.request_id,
                priority=request.priority or 0,
                cache_salt=request.cache_salt,
                on_full="raise",
                max_unread_tokens=self._config.max_unread_tokens if request.stream else None,
                **options,
                **sampling,
            )
            streams.append(stream)
        params = streams[0].params
        self._engine.check_accepting(sum(stream.params.num_sequences for stream in streams))
        record.num_prompts = len(streams)
        record.n, record.max_tokens = params.n, params.max_tokens
        record.temperature, record.top_p, record.top_k = params.temperature, params.top_p, params.top_k
        return streams

    async def _answer(
        self,
        exchange: Exchange,
        record: RequestRecord,
        request: Generation,
        streams: list[Stream],
        answer: Answer,
    ) -> Response | None:
        batch = StreamGroup(streams, record.n or 1)

        async def work(cut: Callable[[], None]) -> Response | None:
            try:
                async with batch:
                    if not request.stream:
                        return Response(200, await answer.whole(await batch.finish()), JSON_HEADERS)
                    relay = _Relay(exchange, record, batch, answer, request.stream_options)
                    await relay.run(self._config, cut)
                    return None
            finally:
                note_outputs(record, batch)

        return await run_while_connected(exchange, work)


class _Relay:
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
        self._has_usage = _has_usage(options)
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


def _has_usage(options: StreamOptions | None) -> bool:
    return options is not None and bool(options.include_usage)
