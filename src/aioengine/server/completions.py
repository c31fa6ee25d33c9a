"""``/v1/chat/completions`` and ``/v1/completions``: from a decoded request to its last event."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from aioengine.engine import Engine, Stream
from aioengine.errors import InvalidRequest
from aioengine.server.access_log import MAX_ID_CHARS, is_fit_id
from aioengine.server.answers import Answer, AnswerHead, ChatAnswer, CompletionAnswer
from aioengine.server.config import ServerConfig
from aioengine.server.decoding import read_messages, read_prompts
from aioengine.server.errors import JSON_HEADERS, api_error_of, invalid_value
from aioengine.server.exchange import Exchange, Response, run_while_connected
from aioengine.server.generation import Relay, StreamGroup, note_outputs
from aioengine.server.record import RequestRecord
from aioengine.server.schema import ChatRequest, CompletionRequest, Generation, template_kwargs
from aioengine.turns import turns_here

CHAT_NAMES = {"prompt": "messages", "logprobs": "top_logprobs"}
"""What chats call the engine's parameters."""


class Completions:
    """Answers both kinds of generation.

    Args:
        model_name: gives the name to answer with for the one that was asked for.
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
                _head("chatcmpl", record, streams),
                self._engine.token_bytes,
                top_logprobs=(request.top_logprobs or 0) if request.logprobs else None,
                has_usage=request.has_usage,
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
            _head("cmpl", record, streams),
            self._engine.token_bytes,
            top_logprobs=request.logprobs,
            has_usage=request.has_usage,
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
                told = f"request_id: 1 to {MAX_ID_CHARS} visible ASCII characters are needed, and no spaces"
                raise invalid_value("request_id", told)
            if "x-request-id" not in exchange.headers:
                record.request_id = request.request_id
        record.model = self._model_name(request.model)

    async def _streams(
        self, record: RequestRecord, request: Generation, prompts: list[Any], **options: Any
    ) -> list[Stream]:
        """The engine's streams for the prompts, checked and not entered; with turns for others between long ones."""
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
        record.n, record.max_tokens = params.n, params.max_tokens
        record.temperature, record.top_p, record.top_k = params.temperature, params.top_p, params.top_k
        return streams

    async def _answer(
        self, exchange: Exchange, record: RequestRecord, request: Generation, streams: list[Stream], answer: Answer
    ) -> Response | None:
        group = StreamGroup(streams, record.n or 1)

        async def work(cut: Callable[[], None]) -> Response | None:
            try:
                async with group:
                    if not request.stream:
                        return Response(200, await answer.whole(await group.finish()), JSON_HEADERS)
                    await Relay(exchange, record, request, group, answer).run(self._config, cut)
                    return None
            finally:
                note_outputs(record, group)

        return await run_while_connected(exchange, work)


def _head(kind: str, record: RequestRecord, streams: list[Stream]) -> AnswerHead:
    """With the engine's id for it, so that what an answer is called can be aborted."""
    return AnswerHead(id=f"{kind}-{streams[0].request_id}", created=int(time.time()), model=record.model or "")
