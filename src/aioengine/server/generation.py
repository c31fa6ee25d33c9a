"""``/v1/chat/completions`` and ``/v1/completions``: from a decoded request to its last event."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable
from typing import Any

import anyio

from aioengine.engine import Engine, Stream
from aioengine.errors import AioEngineError, InvalidRequest
from aioengine.outputs import CompletionDelta, RequestOutput
from aioengine.server.access_log import MAX_ID_CHARS, is_fit_id
from aioengine.server.answers import (
    Answer,
    ChatAnswer,
    CompletionAnswer,
    Extras,
    Usage,
    encode_ids,
    error_event,
    split_delta,
    usage_of,
)
from aioengine.server.config import ServerConfig
from aioengine.server.decoding import read_messages, read_prompts, read_tools
from aioengine.server.errors import JSON_HEADERS, api_error_of, invalid_value, unsupported
from aioengine.server.exchange import Exchange, Response, WriteMonitor, run_while_connected
from aioengine.server.record import RequestRecord
from aioengine.server.schema import ChatRequest, CompletionRequest, Generation, template_kwargs
from aioengine.turns import turns_here

logger = logging.getLogger("aioengine.server")

EVENT_HEADERS = {
    "content-type": "text/event-stream; charset=utf-8",
    "cache-control": "no-cache",
    "x-accel-buffering": "no",  # else nginx collects events before it passes them on
}
BEGIN_WAIT_S = 10.0
"""How long a stream with a grammar waits for its row before it begins to answer."""
KEEPALIVE = b": still here\n\n"
"""A comment, which clients of server-sent events pass over."""
MAX_CUT_IDS = 2**16
"""Token ids of a prompt that is to be cut: decoding them takes 2 ms."""
MAX_TEMPLATE_CHARS = 2**15
"""Of a request's own template: Python's compiler holds the GIL while it is at one, for 0.2 s at the worst."""
CHAT_NAMES = {"prompt": "messages", "logprobs": "top_logprobs", "structured": "response_format"}
"""What chats call the engine's parameters."""


def check_request(exchange: Exchange, record: RequestRecord, request: Generation) -> None:
    """Refuse what contradicts itself, and name the request as its body does where no header has."""
    request.check()
    if request.request_id is not None:
        if not is_fit_id(request.request_id):
            told = f"request_id: 1 to {MAX_ID_CHARS} visible ASCII characters are needed, and no spaces"
            raise invalid_value("request_id", told)
        if "x-request-id" not in exchange.headers:
            record.request_id = request.request_id


class GenerationCall:
    """A request for a generation, from its decoded body to its last event."""

    _has_told = False
    """Whether the log tells of tools that were left out."""

    def __init__(self, engine: Engine, config: ServerConfig, exchange: Exchange, record: RequestRecord) -> None:
        self._engine = engine
        self._config = config
        self._exchange = exchange
        self._record = record

    async def chat(self, request: ChatRequest) -> Response | None:
        """Answer a chat; None when that was a stream, which has been written."""
        messages = read_messages(request.messages, self._config.max_messages)
        try:
            options = {"chat_template_kwargs": template_kwargs(request), **self._answer_options(request)}
            streams = await self._streams(request, [messages], **options)
            answer = ChatAnswer(
                self._head("chatcmpl", streams),
                self._engine.token_bytes,
                top_logprobs=(request.top_logprobs or 0) if request.logprobs else None,
                has_usage=request.has_usage,
                extras=_extras_of(request, has_reasoning=request.include_reasoning is not False),
            )
            return await self._answer(request, streams, answer)
        except InvalidRequest as error:
            names = {**CHAT_NAMES, **request.own_names()}
            if request.max_completion_tokens is not None:
                names["max_tokens"] = "max_completion_tokens"
            if request.chat_template_kwargs is None:
                names["chat_template_kwargs"] = "add_generation_prompt"
            raise api_error_of(error, param_names=names) from error

    def _answer_options(self, request: ChatRequest) -> dict[str, Any]:
        """What a chat asks of its answer; tools that may be called, of a model that cannot, are left out.

        Raises:
            ApiError: it has a template of its own that is too long, or this server takes none.
        """
        if request.chat_template is not None and not self._config.trust_request_chat_template:
            told = "of a request is a program, and this server runs none (--trust-request-chat-template); leave it out"
            raise unsupported("chat_template", told)
        if len(request.chat_template or "") > MAX_TEMPLATE_CHARS:
            told = f"chat_template has more than {MAX_TEMPLATE_CHARS:,} characters, which few have; give a shorter one"
            raise invalid_value("chat_template", told)
        tools = read_tools(request.tools)
        if tools and not self._engine.has_tools and request.tool_choice in (None, "auto", "none", {"type": "auto"}):
            tools = None
            if not GenerationCall._has_told:
                GenerationCall._has_told = True
                logger.warning(
                    "requests have tools, which are left out: the format of this model's calls cannot be told from its "
                    "chat template (said once); --tool-format names one"
                )
        return {
            "tools": tools,
            "tool_choice": request.tool_choice if tools or request.tool_choice not in ("auto", "none") else None,
            "parallel_tool_calls": request.parallel_tool_calls is not False,
            "reasoning_effort": request.reasoning_effort,
            "chat_template": request.chat_template,
        }

    async def complete(self, request: CompletionRequest) -> Response | None:
        """Complete prompts; None when that was a stream, which has been written."""
        try:
            return await self._complete(request)
        except InvalidRequest as error:
            raise api_error_of(error, param_names=request.own_names()) from error

    async def _complete(self, request: CompletionRequest) -> Response | None:
        max_ids = self._engine.info.max_model_len
        if request.truncate_prompt_tokens is not None:
            max_ids = max(max_ids, MAX_CUT_IDS)
        prompts = await read_prompts(request.prompt, max_prompts=self._config.max_prompts, max_ids=max_ids)
        streams = await self._streams(request, prompts)
        answer = CompletionAnswer(
            self._head("cmpl", streams),
            self._engine.token_bytes,
            top_logprobs=request.logprobs,
            has_usage=request.has_usage,
            num_choices=streams[0].params.n,
            prompt_texts=[await self._text_of(prompt) for prompt in prompts] if request.echo else (),
            is_echo_alone=request.is_echo_alone,
            extras=_extras_of(request),
        )
        return await self._answer(request, streams, answer)

    async def _text_of(self, prompt: str | list[int]) -> str:
        if isinstance(prompt, str):
            return prompt
        return await self._engine.detokenize(prompt, skip_special_tokens=False)

    def _head(self, kind: str, streams: list[Stream]) -> dict[str, object]:
        """With the engine's id for it, so that what an answer is called can be aborted."""
        return {"id": f"{kind}-{streams[0].request_id}", "created": int(time.time()), "model": self._record.model}

    async def _streams(self, request: Generation, prompts: list[Any], **options: Any) -> list[Stream]:
        """The engine's streams for the prompts, checked and not entered; with turns for others between long ones."""
        record, sampling = self._record, request.sampling()
        streams: list[Stream] = []
        for prompt in prompts:
            if streams:
                await turns_here().take()
            stream = self._engine.stream(
                prompt,
                request_id=record.request_id if request.request_id is None else request.request_id,
                priority=request.priority or 0,
                cache_salt=request.cache_salt,
                add_special_tokens=request.add_special_tokens,
                on_full="raise",
                max_unread_tokens=self._config.max_unread_tokens if request.stream else None,
                **options,
                **sampling,
            )
            streams.append(stream)
        params = streams[0].params
        self._engine.check_accepting(sum(stream.params.num_sequences for stream in streams))
        record.n, record.max_tokens = params.n, params.max_tokens
        record.temperature, record.top_p, record.top_k = params.temperature, params.top_p, params.top_k
        return streams

    async def _answer(self, request: Generation, streams: list[Stream], answer: Answer) -> Response | None:
        group = StreamGroup(streams)

        async def work(cut: Callable[[], None]) -> Response | None:
            try:
                async with contextlib.AsyncExitStack() as stack:
                    await group.enter(stack)
                    if not request.stream:
                        return Response(200, await answer.whole(await group.finish()), JSON_HEADERS)
                    if streams[0].params.structured is not None:
                        with anyio.move_on_after(BEGIN_WAIT_S):  # a grammar that cannot be enforced is a 400
                            await streams[0].begun()
                    await self._relay(request, group, answer, cut)
                    return None
            finally:
                if outputs := group.outputs():
                    _note_outputs(self._record, outputs)

        return await run_while_connected(self._exchange, work)

    async def _relay(self, request: Generation, group: StreamGroup, answer: Answer, cut: Callable[[], None]) -> None:
        """Pass the deltas on as events, to the end or to the error that ends it: that is an event, too."""
        exchange, record = self._exchange, self._record
        group.watch()
        record.status = 200
        timeout_s, idle_s = self._config.write_timeout_s, self._config.keepalive_s
        with WriteMonitor(exchange, timeout_s=timeout_s, on_stuck=cut, idle_s=idle_s, on_idle=group.wake) as monitor:
            await monitor.write(exchange.start(200, {**EVENT_HEADERS, "x-request-id": record.request_id}))
            try:
                await self._relay_deltas(request, group, answer, monitor)
            except AioEngineError as error:
                record.outcome, record.error = "error", error
                last = error_event(api_error_of(error).body()) + answer.closing(None)
            else:
                last = answer.closing(answer.usage(group.outputs()) if request.has_usage else None)
            await monitor.write(exchange.write(last))
            await monitor.write(exchange.end())

    async def _relay_deltas(
        self, request: Generation, group: StreamGroup, answer: Answer, monitor: WriteMonitor
    ) -> None:
        exchange, record = self._exchange, self._record
        # Counted here: all outputs together are as long as their prompts, and would be made for each event.
        so_far = usage_of(group.outputs(), is_prompt_alone=True) if request.has_usage_all_along else None

        def usage(delta: CompletionDelta | None = None) -> Usage | None:
            if so_far is not None and delta is not None and not answer.is_echo_alone:
                for name in ("completion_tokens", "total_tokens"):
                    so_far[name] += len(delta.token_ids)
            return so_far

        async def write(events: list[bytes]) -> None:
            if data := b"".join(events):
                if record.time_to_first_token_s is None:
                    record.time_to_first_token_s = time.monotonic() - record.started_at
                await monitor.write(exchange.write(data))

        prompt_ids = []
        if request.return_token_ids:
            prompt_ids = [await encode_ids(output.prompt_token_ids) for output in group.outputs()]
        if opening := answer.opening(group.num_choices, usage(), prompt_ids):
            await monitor.write(exchange.write(opening))
        has_echo = answer.has_echo
        echoed: set[int] = set()
        while not group.is_ended:
            if not await group.wait():
                await monitor.write(exchange.write(KEEPALIVE))
                continue
            events: list[bytes] = []
            for choice, delta in group.take():
                if has_echo and choice not in echoed:
                    echoed.add(choice)
                    events.append(await answer.echo(choice, group.output_of(choice), usage()))
                if delta.logprobs is not None and len(delta.logprobs) > answer.max_positions:
                    for part in split_delta(delta, answer.max_positions):
                        await write([*events, answer.event(choice, part, usage(part))])
                        events.clear()
                        await asyncio.sleep(0)
                else:
                    events.append(answer.event(choice, delta, usage(delta)))
            await write(events)


def _extras_of(request: Generation, *, has_reasoning: bool = True) -> Extras:
    return Extras(
        has_reasoning=has_reasoning,
        has_token_ids=bool(request.return_token_ids),
        is_by_ids=bool(request.return_tokens_as_token_ids),
        num_prompt_top=request.prompt_logprobs,
    )


def _note_outputs(record: RequestRecord, outputs: list[RequestOutput]) -> None:
    """What the requests have brought, for the log."""
    usage = usage_of(outputs)
    choices = [choice for output in outputs for choice in output.outputs]
    record.prompt_tokens, record.completion_tokens = usage["prompt_tokens"], usage["completion_tokens"]
    record.max_choice_tokens = max(len(choice.token_ids) for choice in choices)
    record.finish_reasons = tuple(choice.finish_reason for choice in choices if choice.finish_reason is not None)
    record.metrics = outputs[0].metrics


class StreamGroup:
    """Several streams as one: `enter`, `watch`, then `wait` and `take` until it `is_ended`.

    Args:
        streams: one for each prompt, not entered yet, and of as many choices; a choice's number counts through all.
    """

    def __init__(self, streams: list[Stream]) -> None:
        self._streams = streams
        self._num_choices = streams[0].params.n
        self._entered: list[Stream] = []
        self._ready: list[int] = []
        """Numbers of streams that have something to take, once for each choice of theirs, and once for their end."""
        self._num_open = 0
        self._failure: AioEngineError | None = None
        self._waiter: asyncio.Future[None] | None = None

    async def enter(self, stack: contextlib.AsyncExitStack) -> None:
        """Hand the streams to the engine, all or none; leaving the stack, for any reason, aborts what has not ended."""
        for stream in self._streams:
            await stack.enter_async_context(stream)
            self._entered.append(stream)

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
        return [stream.result for stream in self._entered]

    def output_of(self, choice: int) -> RequestOutput:
        """The output of the prompt of the choice of that number, as far as it has come."""
        return self._streams[choice // self._num_choices].result
