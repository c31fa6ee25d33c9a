"""Chats of all APIs, and completions: from a decoded request to its last event."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import logging
import time
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import anyio
import msgspec

from aioengine.engine import Engine, Stream
from aioengine.errors import AioEngineError, InvalidRequest
from aioengine.frontend.answer_format import AnswerOptions, template_variables
from aioengine.frontend.call_options import CallOptions
from aioengine.outputs import CompletionDelta, CompletionOutput, RequestOutput
from aioengine.processes.turns import turns_here
from aioengine.scheduler.sequence import MAX_SESSION_CHARS
from aioengine.server.access_log import MAX_ID_CHARS, is_fit_id
from aioengine.server.answers import (
    Answer,
    ChatAnswer,
    CompletionAnswer,
    Extras,
    Usage,
    encode_ids,
    split_delta,
    usage_of,
)
from aioengine.server.anthropic_messages import MessageAnswer, MessageRequest, read_chat
from aioengine.server.config import ServerConfig
from aioengine.server.decoding import read_messages, read_prompts, read_tools, too_many
from aioengine.server.errors import JSON_HEADERS, api_error_of, invalid_value, unsupported
from aioengine.server.exchange import Exchange, Response, WriteMonitor, run_while_connected
from aioengine.server.record import RequestRecord
from aioengine.server.responses import (
    ResponseAnswer,
    ResponseRequest,
    ResponseTools,
    read_input,
    read_response_tools,
    with_instructions,
)
from aioengine.server.schema import ChatGeneration, ChatRequest, CompletionRequest, Generation, template_kwargs
from aioengine.server.stored_responses import OwnedId, StoredResponses
from aioengine.tool_calls.calls import forces_call
from aioengine.validation import check_field, invalid


class StreamGroup:
    """Several streams as one: `enter`, `watch`, then `wait` and `take` while there are choices open.

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
        self.num_open = 0
        self._failures: list[AioEngineError] = []
        """A failure that came after deltas, to be raised by the next `take`."""
        self._waiter: asyncio.Future[None] | None = None

    async def enter(self, stack: contextlib.AsyncExitStack) -> None:
        """Hand the streams to the engine, all or none; leaving the stack, for any reason, aborts what has not ended."""
        for stream in self.streams:
            await stack.enter_async_context(stream)
            self._entered.append(stream)

    def watch(self) -> None:
        """Follow the streams from now on, for `wait` and `take`."""
        self.num_open = len(self.streams) * self._num_choices

        def mark_ready(number: int) -> None:
            self._ready.append(number)
            self.wake()

        for number, stream in enumerate(self.streams):
            stream.watch(functools.partial(mark_ready, number))

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
                        self.num_open -= 1
                    if self._num_choices == 1:
                        break
            except AioEngineError as error:
                if not taken:
                    raise
                self._failures.append(error.anew())
                self._ready.append(number)  # to be asked again
                break
        return taken

    def outputs(self) -> list[RequestOutput]:
        """All entered prompts' outputs so far."""
        return [stream.result for stream in self._entered]


logger = logging.getLogger("aioengine.server")

EVENT_HEADERS = {
    "content-type": "text/event-stream; charset=utf-8",
    "cache-control": "no-cache",
    "x-accel-buffering": "no",  # else nginx collects events before it passes them on
}
MAX_CUT_IDS = 2**16
"""Most token ids of a prompt that is to be cut: decoding them takes 2 ms."""
MAX_TEMPLATE_CHARS = 2**15
"""Most characters of a request's own template: Python's compiler holds the GIL for one, 0.2 s at worst."""


def check_request(exchange: Exchange, record: RequestRecord, request: Generation) -> None:
    """Refuse contradictory fields, and take the request's id from its body if no header has one."""
    request.check()
    if request.request_id is not None:
        if not is_fit_id(request.request_id):
            message = f"request_id: 1 to {MAX_ID_CHARS} visible ASCII characters are needed, and no spaces"
            raise invalid_value("request_id", message)
        if "x-request-id" not in exchange.headers:
            record.request_id = request.request_id


@contextlib.contextmanager
def _in_names_of(request: Generation) -> Iterator[None]:
    """Make errors name parameters as the request does."""
    try:
        yield
    except InvalidRequest as error:
        raise api_error_of(error, param_names=request.own_names()) from error


@functools.cache
def warn_once(tools: str, why: str) -> None:
    """Log that such tools of requests are left out; once a process for each reason."""
    logger.warning("requests have %s, which are left out: %s (logged once)", tools, why)


@dataclasses.dataclass(frozen=True, eq=False)
class GenerationCall:
    """A request for a generation, from its decoded body to its last event."""

    _engine: Engine
    _config: ServerConfig
    _stored: StoredResponses
    _exchange: Exchange
    _record: RequestRecord

    async def answer(self, request: Generation) -> Response | None:
        """Answer a request; returns None after a stream, which has been written."""
        with _in_names_of(request):
            match request:
                case ChatRequest():
                    return await self._chat(request)
                case MessageRequest():
                    return await self._message(request)
                case ResponseRequest():
                    return await self._respond(request)
            assert isinstance(request, CompletionRequest)
            return await self._complete(request)

    async def count(self, request: MessageRequest | ResponseRequest) -> int:
        """Number of tokens of the prompt that `answer` would make."""
        with _in_names_of(request):
            if isinstance(request, MessageRequest):
                messages, variables = self._read_chat(request)
            else:
                messages = with_instructions(request, await self._conversation(request))
                variables = request.chat_template_kwargs
            options = self._answer_options(request, self._tools(request), variables)
            asked = AnswerOptions.of(options["tools"], options["tool_choice"], None)
            effort = check_field(CallOptions, "reasoning_effort", options["reasoning_effort"], invalid)
            kwargs = {**template_variables(effort), **(variables or {})}
            token_ids = await run_while_connected(
                self._exchange,
                lambda _: self._engine.tokenize(
                    messages,
                    chat_template=options["chat_template"],
                    chat_template_kwargs=kwargs,
                    tools=options["tools"] if asked.tools else None,
                ),
            )
            return len(token_ids)

    async def _chat(self, request: ChatRequest) -> Response | None:
        messages = read_messages(request.messages, self._config.max_messages)
        options = self._answer_options(request, self._tools(request), template_kwargs(request))
        streams = await self._streams(request, [messages], **options)
        top_logprobs = (request.top_logprobs or 0) if request.logprobs else None
        extras = self._extras_of(request, top_logprobs, has_reasoning=request.include_reasoning is not False)
        has_text = not forces_call(options["tool_choice"])
        answer = ChatAnswer(self._head("chatcmpl", streams), self._engine.token_bytes, extras, has_text=has_text)
        return await self._answer(request, streams, answer)

    def _answer_options(
        self, request: ChatGeneration, asked: ResponseTools, variables: dict[str, Any] | None
    ) -> dict[str, Any]:
        """A chat's options for `Engine.stream`; optional tools are left out for a model without a format of calls.

        Args:
            asked: see `_tools`.
            variables: for the template.
        Raises:
            ApiError: the request has a template of its own, and it is too long or this server runs none.
        """
        is_program = "{" in (request.chat_template or "")  # else it is the name of one of the model's own
        if is_program and not self._config.trust_request_chat_template:
            why = "of a request is a program, and this server runs none (--trust-request-chat-template); leave it out"
            raise unsupported("chat_template", why)
        if len(request.chat_template or "") > MAX_TEMPLATE_CHARS:
            why = f"chat_template has more than {MAX_TEMPLATE_CHARS:,} characters, which few have; give a shorter one"
            raise invalid_value("chat_template", why)
        tools, choice = asked.functions, asked.choice
        mode = choice.get("type") if isinstance(choice, dict) else choice
        if tools and not self._engine.has_tools and mode in (None, "auto", "none"):
            tools = None
            why = "the format of this model's calls is not known from its chat template (--tool-format names one)"
            warn_once("tools", why)
        return {
            "tools": tools,
            "tool_choice": choice if tools or mode not in ("auto", "none") else None,
            "parallel_tool_calls": request.parallel_tool_calls is not False,
            "reasoning_effort": request.reasoning_effort,
            "chat_template": request.chat_template,
            "chat_template_kwargs": variables,
        }

    def _tools(self, request: ChatGeneration) -> ResponseTools:
        """The tools of a request, for the engine."""

        tools = read_tools(request.tools)
        if not isinstance(request, ResponseRequest):
            return ResponseTools(tools, request.tool_choice)
        why = "a server would have to run them, and this one runs none"
        return read_response_tools(tools, request.tool_choice, lambda kind: warn_once(f"tools of type {kind}", why))

    async def _respond(self, request: ResponseRequest) -> Response | None:
        stored, conversation = self._stored, await self._conversation(request)
        owned = OwnedId(stored.make_id(), self._record.owner)

        def keep(body: bytes, choice: CompletionOutput | None) -> None:
            if request.store is not False:
                stored.keep(owned, body, conversation, choice)

        tools = self._tools(request)
        options = self._answer_options(request, tools, request.chat_template_kwargs)
        streams = await self._streams(request, [with_instructions(request, conversation)], **options)
        answer = ResponseAnswer(
            request.head(owned.id, self._record.model, streams[0].params, read_tools(request.tools)),
            self._engine.token_bytes,
            top_logprobs=request.num_top_logprobs,
            tools=tools.by_function,
            keep=keep,
        )
        return await self._answer(request, streams, answer)

    async def _conversation(self, request: ResponseRequest) -> list[dict[str, Any]]:
        """The messages that a response answers, without its own instructions."""
        previous_id, max_messages = request.previous_response_id, self._config.max_messages
        owner, stored = self._record.owner, self._stored
        conversation: list[dict[str, Any]] = []
        if previous_id is not None:
            conversation = msgspec.json.decode(stored.find(OwnedId(previous_id, owner), is_previous=True).messages)
        conversation += await read_input(request, max_messages, stored.item_finder(owner))
        if len(conversation) > max_messages:
            raise too_many("messages", max_messages)
        return conversation

    async def _message(self, request: MessageRequest) -> Response | None:
        messages, variables = self._read_chat(request)
        options = self._answer_options(request, self._tools(request), variables)
        streams = await self._streams(request, [messages], **options)
        answer = MessageAnswer(self._head("msg", streams), self._engine.token_bytes)
        return await self._answer(request, streams, answer)

    def _read_chat(self, request: MessageRequest) -> tuple[list[dict[str, Any]], dict[str, Any] | None]:
        """The messages, and the template's variables."""
        messages, variables = read_chat(request, self._config.max_messages), request.variables()
        if messages[-1]["role"] == "assistant":  # it is to be continued
            if messages[-1].get("tool_calls"):
                message = "the last message asks for tools: add a message with their results"
                raise invalid_value("messages", message)
            variables = {"continue_final_message": True, **(variables or {})}
        return messages, variables

    async def _complete(self, request: CompletionRequest) -> Response | None:
        max_ids = self._engine.info.max_model_len
        if request.truncate_prompt_tokens is not None:
            max_ids = max(max_ids, MAX_CUT_IDS)
        prompts = await read_prompts(request.prompt, max_prompts=self._config.max_prompts, max_ids=max_ids)
        streams = await self._streams(request, prompts)
        texts: list[str] = []
        for prompt in prompts if request.echo else ():
            if not isinstance(prompt, str):
                prompt = await self._engine.detokenize(prompt, skip_special_tokens=False)
            texts.append(prompt)
        answer = CompletionAnswer(
            self._head("cmpl", streams),
            self._engine.token_bytes,
            self._extras_of(request, request.logprobs),
            num_choices=streams[0].params.n,
            prompt_texts=texts,
            is_echo_alone=request.is_echo_alone,
            skips_special=streams[0].params.skip_special_tokens,
        )
        return await self._answer(request, streams, answer)

    def _head(self, kind: str, streams: list[Stream]) -> dict[str, object]:
        """An answer's id, time and model. The id contains the engine's, so that a client can abort by it."""
        return {"id": f"{kind}-{streams[0].request_id}", "created": int(time.time()), "model": self._record.model}

    async def _streams(self, request: Generation, prompts: list[Any], **options: Any) -> list[Stream]:
        """The engine's streams for the prompts, checked and not entered; other requests have turns between prompts."""
        record, headers, tenant_header = self._record, self._exchange.headers, self._config.tenant_header
        # A hint: OpenAI's key of requests that share a cache, else a header's.
        session = request.prompt_cache_key or headers.get("x-session-id", "")
        given = {
            "request_id": record.request_id,
            **request.options(),
            # A header alone decides if there is one, since clients cannot choose it.
            "tenant": request.tenant if tenant_header is None else headers.get(tenant_header.lower()) or None,
            "session": session[:MAX_SESSION_CHARS] or None,
            "trace_headers": record.trace_headers or None,
            "max_unread_tokens": self._config.max_unread_tokens if request.stream else None,
            **options,
            **request.sampling(),
        }
        streams: list[Stream] = []
        for prompt in prompts:
            if streams:
                await turns_here().take()
            streams.append(self._engine.stream(prompt, on_full="raise", **given))
        params = streams[0].params
        streams[0].check_accepting(sum(stream.params.num_sequences for stream in streams))
        record.n, record.max_tokens = params.n, params.max_tokens
        return streams

    def _extras_of(self, request: Generation, top_logprobs: int | None, *, has_reasoning: bool = True) -> Extras:
        asked = request.return_tokens_as_token_ids
        return Extras(
            top_logprobs=top_logprobs,
            has_usage=request.has_usage(by_default=self._config.enable_force_include_usage),
            has_reasoning=has_reasoning,
            has_token_ids=bool(request.return_token_ids),
            is_by_ids=self._config.return_tokens_as_token_ids if asked is None else asked,
            num_prompt_top=request.prompt_logprobs,
            num_named=len(request.logprob_token_ids or ()),
        )

    async def _answer(self, request: Generation, streams: list[Stream], answer: Answer) -> Response | None:
        group = StreamGroup(streams)

        async def work(cut: Callable[[], None]) -> Response | None:
            try:
                async with contextlib.AsyncExitStack() as stack:
                    await group.enter(stack)
                    if not request.stream:
                        return Response(
                            200, await answer.whole([await stream.finish() for stream in streams]), JSON_HEADERS
                        )
                    if streams[0].params.structured is not None:
                        # Longest wait of a stream with a grammar for its row, before its answer begins.
                        with anyio.move_on_after(10.0):  # a grammar that cannot be enforced is a 400
                            await streams[0].begun()
                    await self._relay(request, group, answer, cut)
                    return None
            finally:
                if outputs := group.outputs():
                    record, usage = self._record, usage_of(outputs)
                    choices = [choice for output in outputs for choice in output.outputs]
                    record.prompt_tokens, record.completion_tokens = usage["prompt_tokens"], usage["completion_tokens"]
                    record.max_choice_tokens = max(len(choice.token_ids) for choice in choices)
                    reasons = (choice.finish_reason for choice in choices)
                    record.finish_reasons = tuple(reason for reason in reasons if reason is not None)
                    record.metrics = outputs[0].metrics

        return await run_while_connected(self._exchange, work)

    async def _relay(self, request: Generation, group: StreamGroup, answer: Answer, cut: Callable[[], None]) -> None:
        """Send the deltas as events, to the end or to an error, which is an event, too."""
        exchange, record = self._exchange, self._record
        group.watch()
        record.status = 200
        timeout_s, idle_s = self._config.write_timeout_s, self._config.keepalive_s
        with WriteMonitor(exchange, timeout_s=timeout_s, on_stuck=cut, idle_s=idle_s, on_idle=group.wake) as monitor:
            await monitor.write(exchange.start(200, {**EVENT_HEADERS, **record.id_headers}))
            try:
                await self._relay_deltas(request, group, answer, lambda data: monitor.write(exchange.write(data)))
            except AioEngineError as error:
                answered = api_error_of(error)
                record.error, record.error_code, record.error_param = error, answered.code, answered.param
                record.outcome = "refused" if answered.status < 500 else "error"
                last = answer.failing(answered)
            else:
                last = answer.closing(group.outputs())
            await monitor.write_pieces(last)
            await monitor.write(exchange.end())

    async def _relay_deltas(
        self, request: Generation, group: StreamGroup, answer: Answer, write: Callable[[bytes], Awaitable[None]]
    ) -> None:
        record, outputs = self._record, group.outputs()
        # Counted here: else each event would make all outputs, which are as long as their prompts.
        so_far = usage_of(outputs, is_prompt_alone=True) if request.has_usage_all_along else None

        def usage(delta: CompletionDelta | None = None) -> Usage | None:
            if so_far is not None and delta is not None and not answer.is_echo_alone:
                for name in ("completion_tokens", "total_tokens"):
                    so_far[name] += len(delta.token_ids)
            return so_far

        async def write_all(events: list[bytes]) -> None:
            if data := b"".join(events):
                if record.time_to_first_token_s is None:
                    record.time_to_first_token_s = time.monotonic() - record.started_at
                await write(data)

        prompt_ids = []
        if request.return_token_ids:
            prompt_ids = [await encode_ids(output.prompt_token_ids) for output in outputs]
        if opening := answer.opening(outputs, usage(), prompt_ids):
            await write(opening)
        has_echo = answer.has_echo
        echoed: set[int] = set()
        while group.num_open:
            if not await group.wait():
                await write(answer.KEEPALIVE)
                continue
            events: list[bytes] = []
            for choice, delta in group.take():
                if has_echo and choice not in echoed:
                    echoed.add(choice)
                    output = group.streams[choice // group.streams[0].params.n].result
                    events.append(await answer.echo(choice, output, usage()))
                if delta.logprobs is not None and len(delta.logprobs) > answer.max_positions:
                    for part in split_delta(delta, answer.max_positions):
                        await write_all([*events, answer.event(choice, part, usage(part))])
                        events.clear()
                        await asyncio.sleep(0)
                else:
                    events.append(answer.event(choice, delta, usage(delta)))
            await write_all(events)
