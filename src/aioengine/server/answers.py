"""The OpenAI API's bodies and stream events, made of the engine's outputs.

A stream has an event for each delta. The parts that all events share are made once, so that a token costs the JSON of
its text and two joins: 0.5 µs of the 20 that its way to the client takes.
"""

from __future__ import annotations

import asyncio
import bisect
import itertools
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from typing import Any, ClassVar, Literal, NamedTuple, TypeVar

import msgspec

import aioengine
from aioengine.outputs import CompletionDelta, CompletionOutput, FinishReason, RequestOutput, TokenLogprobs
from aioengine.server.decoding import IDS_A_TURN
from aioengine.server.errors import ApiError
from aioengine.server.token_logprobs import (
    Columns,
    PositionWriter,
    TokenBytes,
    encode,
    plain_position,
    positions_a_slice,
)
from aioengine.tool_calls.calls import ToolCallDelta

DONE = b"data: [DONE]\n\n"
FINGERPRINT = f"aioengine-{aioengine.__version__}"


MAX_COUNTED = 8192
"""Longest output, in tokens, whose reasoning tokens are counted exactly: half a microsecond each."""

P = TypeVar("P")
Q = TypeVar("Q")


Usage = dict[str, Any]
"""Numbers of a request's tokens, by the API's names."""


def usage_of(outputs: Sequence[RequestOutput], *, is_prompt_alone: bool = False) -> Usage:
    """Tokens of all prompts, and of all choices unless only the prompts were asked for."""
    num_prompt_tokens = sum(len(output.prompt_token_ids) for output in outputs)
    num_tokens = 0 if is_prompt_alone else sum(len(part.token_ids) for output in outputs for part in output.outputs)
    return {
        "prompt_tokens": num_prompt_tokens,
        "completion_tokens": num_tokens,
        "total_tokens": num_prompt_tokens + num_tokens,
        "prompt_tokens_details": {"cached_tokens": sum(output.num_cached_tokens for output in outputs)},
    }


LINE_ENDS = tuple((end.encode(), b"\\u%04x" % ord(end)) for end in "\x85\u2028\u2029")


def in_one_line(data: bytes) -> bytes:
    """JSON with `LINE_ENDS` escaped, at which clients that use Python's ``splitlines`` would split it."""
    for end, escaped in LINE_ENDS:
        data = data.replace(end, escaped)
    return data


async def encode_ids(ids: Sequence[int]) -> bytes:
    """JSON of a list that may be very long; other tasks run between its parts."""
    parts = []
    for first in range(0, len(ids), IDS_A_TURN):
        parts.append(encode(ids[first : first + IDS_A_TURN])[1:-1])
        await asyncio.sleep(0)
    return b"[%b]" % b",".join(parts)


class Extras(NamedTuple):
    """The contents of an answer beside its text.

    Attributes:
        top_logprobs: likeliest tokens to report at each position; None: no log-probabilities.
        has_usage: a stream's last event has the usage, and the others a null in its place.
        has_reasoning: the answer has the reasoning.
        has_token_ids: the answer has the token ids of prompt and output.
        is_by_ids: log-probabilities name tokens by their ids instead of their texts.
        num_prompt_top: likeliest tokens to report at each position of the prompt; None: nothing.
        num_named: tokens that the request names, which are reported at each position instead of the likeliest ones.
    """

    top_logprobs: int | None = None
    has_usage: bool = False
    has_reasoning: bool = True
    has_token_ids: bool = False
    is_by_ids: bool = False
    num_prompt_top: int | None = None
    num_named: int = 0

    @property
    def max_rank(self) -> int:
        """The last rank that is reported at a position."""
        return sys.maxsize if self.num_named else self.top_logprobs or 0


class Answer(ABC):
    """One request's answer, whole or as a stream's events.

    Attributes:
        max_positions: tokens whose log-probabilities take about a millisecond to encode, see `split_delta`.
        has_echo: choices begin with their prompt.
        is_echo_alone: choices have only their prompt.
    """

    KEEPALIVE: ClassVar[bytes] = b": still here\n\n"
    """Sent while a stream has no events: a comment, which clients of server-sent events ignore."""

    max_positions: int
    has_echo = is_echo_alone = False

    @abstractmethod
    async def whole(self, outputs: Sequence[RequestOutput]) -> bytes:
        """The body of an answer that is not streamed, made when all has ended; other tasks run between its parts.

        Args:
            outputs: one for each prompt.
        """

    @abstractmethod
    def opening(self, outputs: Sequence[RequestOutput], usage: Usage | None, prompt_ids: Sequence[bytes]) -> bytes:
        """Events before the first token.

        Args:
            usage: for each event; None: they have none.
            prompt_ids: each prompt's token ids as JSON, if they were asked for.
        """

    async def echo(self, choice: int, output: RequestOutput, usage: Usage | None) -> bytes:
        """A choice's first event, which has its prompt, once the choice has a token; only with `has_echo`."""
        return b""

    @abstractmethod
    def event(self, choice: int, delta: CompletionDelta, usage: Usage | None = None) -> bytes:
        """The events of a delta; empty if they would have no contents.

        Args:
            choice: its number, through all prompts.
            usage: for the event; None: it has none.
        """

    @abstractmethod
    def closing(self, outputs: Sequence[RequestOutput]) -> bytes:
        """Events after the last token."""

    @abstractmethod
    def failing(self, error: ApiError) -> bytes:
        """Events that report an error, in place of all later ones."""

    async def _in_turns(self, positions: Sequence[P], make: Callable[[P], Q]) -> list[Q]:
        """Call ``make`` with each position; other tasks run after every `max_positions` of them."""
        made: list[Q] = []
        for first in range(0, len(positions), self.max_positions):
            made += map(make, positions[first : first + self.max_positions])
            await asyncio.sleep(0)
        return made


Part = Literal["reasoning", "text"] | int
"""The part of an answer that a piece belongs to; an int is a tool call's index."""


def parts_in_order(delta: CompletionDelta, open_part: Part | None) -> Iterator[tuple[Part, str | ToolCallDelta]]:
    """The pieces of a delta, one part after the other, for APIs whose streams have one part at a time.

    A merged delta has lost the order of its pieces: the open part goes on first, then come reasoning, text and calls.
    """
    calls = [(call.index, call) for call in delta.tool_calls]
    yield from (part for part in calls if part[0] == open_part)
    texts: list[tuple[Part, str]] = [("reasoning", delta.reasoning), ("text", delta.text)]
    yield from (part for part in (reversed(texts) if open_part == "text" else texts) if part[1])
    yield from (part for part in calls if part[0] != open_part)


class PartsAnswer(Answer):
    """An answer that is a list of parts; a stream sends one after the other."""

    _part: Part | None = None
    """The open part."""

    def event(self, choice: int, delta: CompletionDelta, usage: Usage | None = None) -> bytes:
        if not delta.tool_calls:  # nearly always, and at a quarter of the cost
            if self._part == "text" and not delta.reasoning:
                return self._delta(delta.text) if delta.text else b""
            if self._part == "reasoning" and not delta.text:
                return self._delta(delta.reasoning) if delta.reasoning else b""
        events = []
        for part, piece in parts_in_order(delta, self._part):
            if self._part != part:
                events.append(self._close())
                self._part = part
                events.append(self._begin(part, piece if isinstance(piece, ToolCallDelta) else None))
            if text := piece if isinstance(piece, str) else piece.arguments:
                events.append(self._delta(text))
        return b"".join(events)

    @abstractmethod
    def _begin(self, part: Part, call: ToolCallDelta | None) -> bytes:
        """Events that open the next part."""

    @abstractmethod
    def _delta(self, text: str) -> bytes:
        """An event for the next piece of the open part."""

    @abstractmethod
    def _close(self) -> bytes:
        """Events that end the open part, if there is one."""


class ChoicesAnswer(Answer):
    """An answer of chats or completions, which have choices.

    An event is ``data: <head, "choices":[{"index":0,> … <}]>`` and an empty line.

    Args:
        head: the answer's "id", "created" and "model".
    """

    WHOLE: ClassVar[str]
    """The "object" of a body."""
    PART: ClassVar[str]
    """The "object" of an event."""
    TEXT: ClassVar[bytes]
    """The field of an event that holds its text."""
    NO_TEXT: ClassVar[bytes]

    def __init__(self, head: dict[str, object], token_bytes: TokenBytes, extras: Extras) -> None:
        self._head = head
        self._token_bytes = token_bytes
        self._top_logprobs = top_logprobs = extras.top_logprobs
        self._extras = extras
        self._tells_of_each_token = top_logprobs is not None or extras.has_token_ids
        """Tokens that add no text have events, too."""
        self.max_positions = positions_a_slice(max(top_logprobs or 0, extras.num_prompt_top or 0, extras.num_named))
        self._event_head = self._head_of(self.PART)
        self._event_end = b'}],"usage":null}\n\n' if extras.has_usage else b"}]}\n\n"
        self._prefixes: dict[int, bytes] = {}
        """The beginning of each choice's events."""
        self._calling: set[int] = set()
        """Choices that have begun a tool call."""

    async def whole(self, outputs: Sequence[RequestOutput]) -> bytes:
        choices = [
            await self._choice(place * len(output.outputs) + choice.index, output, choice)
            for place, output in enumerate(outputs)
            for choice in output.outputs
        ]
        ends = b'"usage":%b%b' % (encode(self.usage(outputs)), await self._beside_choices(outputs))
        return b'%b,"choices":[%b],%b}' % (self._head_of(self.WHOLE), b",".join(choices), ends)

    async def _beside_choices(self, outputs: Sequence[RequestOutput]) -> bytes:
        """Further fields of a body."""
        return b""

    async def _of_prompt(self, output: RequestOutput) -> bytes:
        """Fields about a prompt, each with a comma before it; null if not asked for, as vLLM's are."""
        ids = await encode_ids(output.prompt_token_ids) if self._extras.has_token_ids else b"null"
        fields = b',"prompt_token_ids":' + ids
        if (num_top := self._extras.num_prompt_top) is None:
            fields += b',"prompt_logprobs":null'
        else:
            positions = await self._in_turns(
                output.prompt_logprobs or (), lambda each: encode(each and plain_position(each, num_top))
            )
            fields += b',"prompt_logprobs":[%b]' % b",".join(positions)
        return fields

    @abstractmethod
    async def _choice(self, number: int, output: RequestOutput, choice: CompletionOutput) -> bytes:
        """A choice of a body; ``number`` counts through all prompts."""

    def usage(self, outputs: Sequence[RequestOutput]) -> Usage:
        """The usage that the client gets."""
        return usage_of(outputs, is_prompt_alone=self.is_echo_alone)

    def event(self, choice: int, delta: CompletionDelta, usage: Usage | None = None) -> bytes:
        text = self.TEXT % encode(delta.text) if delta.text else self.NO_TEXT
        if delta.finish_reason is None and not self._tells_of_each_token:
            if not delta.text:
                return b""
            return self._event(choice, text + b',"logprobs":null,"finish_reason":null', usage)
        ending = _ending(delta.finish_reason, delta.stop_reason)
        return self._event(choice, b"%b,%b,%b" % (text, self._of_tokens(choice, delta), ending), usage)

    def _of_tokens(self, choice: int, delta: CompletionDelta) -> bytes:
        """An event's fields about its tokens."""
        logprobs = b"null" if self._top_logprobs is None else self._logprobs(choice, delta.logprobs or ())
        return b'"logprobs":%b%b' % (logprobs, self._ids_of(delta))

    def _ids_of(self, part: CompletionDelta | CompletionOutput) -> bytes:
        """A field with its token ids and a comma before it, if they were asked for."""
        return b',"token_ids":' + encode(part.token_ids) if self._extras.has_token_ids else b""

    @abstractmethod
    def _logprobs(self, choice: int, positions: Sequence[TokenLogprobs]) -> bytes:
        """The log-probabilities of a choice's next tokens."""

    def closing(self, outputs: Sequence[RequestOutput]) -> bytes:
        if not self._extras.has_usage:
            return DONE
        return b'data: %b,"choices":[],"usage":%b}\n\n%b' % (self._event_head, encode(self.usage(outputs)), DONE)

    def failing(self, error: ApiError) -> bytes:
        return b"data: %b\n\n%b" % (error.body(), DONE)

    def _head_of(self, kind: str) -> bytes:
        """The beginning of all bodies or events of the answer."""
        return in_one_line(encode({**self._head, "object": kind, "system_fingerprint": FINGERPRINT})[:-1])

    def _event(self, choice: int, content: bytes, usage: Usage | None) -> bytes:
        """An event with one choice; ``content`` has the choice's fields after its index."""
        if not content.isascii():
            content = in_one_line(content)
        prefix = self._prefixes.get(choice)
        if prefix is None:
            prefix = b'data: %b,"choices":[{"index":%d,' % (self._event_head, choice)
            self._prefixes[choice] = prefix
        if usage is not None:
            return b'%b%b}],"usage":%b}\n\n' % (prefix, content, encode(usage))
        return prefix + content + self._event_end


class ChatAnswer(ChoicesAnswer):
    """The answer to ``/v1/chat/completions``.

    Args:
        has_text: the answer may have text; it has none where a call is forced.
    """

    WHOLE = "chat.completion"
    PART = "chat.completion.chunk"
    TEXT = b'"delta":{"content":%b}'
    NO_TEXT = b'"delta":{}'

    def __init__(
        self, head: dict[str, object], token_bytes: TokenBytes, extras: Extras, *, has_text: bool = True
    ) -> None:
        super().__init__(head, token_bytes, extras)
        self._has_text = has_text
        self._writer = PositionWriter(token_bytes, extras.max_rank, is_by_ids=extras.is_by_ids)

    async def _choice(self, number: int, output: RequestOutput, choice: CompletionOutput) -> bytes:
        logprobs = b"null"
        if self._top_logprobs is not None:
            logprobs = _content(
                await self._in_turns(choice.logprobs or (), lambda position: self._writer.encode(number, position))
            )
        message = encode(message_of(choice, has_reasoning=self._extras.has_reasoning))
        ending = _ending(finish_reason_of(choice, bool(choice.tool_calls)), choice.stop_reason)
        ending += self._ids_of(choice) or b',"token_ids":null'
        return b'{"index":%d,"message":%b,"logprobs":%b,%b}' % (number, message, logprobs, ending)

    def usage(self, outputs: Sequence[RequestOutput]) -> Usage:
        choices = [choice for output in outputs for choice in output.outputs]
        num_reasoning = sum(num_reasoning_tokens(choice, self._token_bytes) for choice in choices)
        return {**super().usage(outputs), "completion_tokens_details": {"reasoning_tokens": num_reasoning}}

    async def _beside_choices(self, outputs: Sequence[RequestOutput]) -> bytes:
        return await self._of_prompt(outputs[0])

    def event(self, choice: int, delta: CompletionDelta, usage: Usage | None = None) -> bytes:
        reasoning = delta.reasoning if self._extras.has_reasoning else ""
        if not (reasoning or delta.tool_calls or choice in self._calling):
            return super().event(choice, delta, usage)
        if delta.tool_calls:
            self._calling.add(choice)
        told: dict[str, Any] = {"content": delta.text} if delta.text else {}
        if reasoning:
            told |= _reasoning_fields(reasoning)
        if delta.tool_calls:
            told["tool_calls"] = [_call_delta(call) for call in delta.tool_calls]
        if not told and delta.finish_reason is None and not self._tells_of_each_token:
            return b""
        ending = _ending(finish_reason_of(delta, choice in self._calling), delta.stop_reason)
        return self._event(choice, b'"delta":%b,%b,%b' % (encode(told), self._of_tokens(choice, delta), ending), usage)

    def opening(self, outputs: Sequence[RequestOutput], usage: Usage | None, prompt_ids: Sequence[bytes]) -> bytes:
        delta = {"role": "assistant", "content": "" if self._has_text else None, "refusal": None}
        content = b'"delta":%b,"logprobs":null,"finish_reason":null' % encode(delta)
        num_choices = sum(len(output.outputs) for output in outputs)
        events = [self._event(choice, content, usage) for choice in range(num_choices)]
        if prompt_ids:  # beside the choices of the first event, as it is one prompt's
            events[0] = b'%b,"prompt_token_ids":%b}\n\n' % (events[0].removesuffix(b"}\n\n"), prompt_ids[0])
        return b"".join(events)

    def _logprobs(self, choice: int, positions: Sequence[TokenLogprobs]) -> bytes:
        return _content([self._writer.encode(choice, position) for position in positions])


class CompletionAnswer(ChoicesAnswer):
    """The answer to ``/v1/completions``.

    Args:
        num_choices: choices of each prompt.
        prompt_texts: the texts that each prompt's choices begin with; empty without an echo.
        is_echo_alone: choices have only their prompt.
    """

    WHOLE = PART = "text_completion"
    TEXT = b'"text":%b'
    NO_TEXT = b'"text":""'

    def __init__(
        self,
        head: dict[str, object],
        token_bytes: TokenBytes,
        extras: Extras,
        *,
        num_choices: int,
        prompt_texts: Sequence[str] = (),
        is_echo_alone: bool = False,
    ) -> None:
        super().__init__(head, token_bytes, extras)
        self._num_choices = num_choices
        self._prompt_texts = prompt_texts
        self.has_echo = bool(prompt_texts)
        self.is_echo_alone = is_echo_alone
        self._offsets: dict[int, int] = {}
        """Where each choice's next token begins in its text."""

    async def _choice(self, number: int, output: RequestOutput, choice: CompletionOutput) -> bytes:
        if self.is_echo_alone:
            choice = _without_tokens(choice)
        prompt = self._prompt_texts[number // self._num_choices] if self.has_echo else ""
        text = prompt + choice.text
        columns = self._columns(0)
        if self.has_echo:
            await self._add_prompt(columns, output)
        columns.offset = len(prompt)
        await self._in_turns(choice.logprobs or (), columns.add)
        logprobs = b"null" if self._top_logprobs is None else columns.encoded()
        ending = _ending(choice.finish_reason, choice.stop_reason) + (self._ids_of(choice) or b',"token_ids":null')
        ending += await self._of_prompt(output)
        return b'{"index":%d,"text":%b,"logprobs":%b,%b}' % (number, encode(text), logprobs, ending)

    def opening(self, outputs: Sequence[RequestOutput], usage: Usage | None, prompt_ids: Sequence[bytes]) -> bytes:
        content = b'"text":"","logprobs":null,"finish_reason":null,"token_ids":[],"prompt_token_ids":'
        places = range(sum(len(output.outputs) for output in outputs) if prompt_ids else 0)
        events = [self._event(place, content + prompt_ids[place // self._num_choices], usage) for place in places]
        return b"".join(events)

    def _columns(self, offset: int) -> Columns:
        return Columns(offset, self._extras.max_rank, is_by_ids=self._extras.is_by_ids)

    async def echo(self, choice: int, output: RequestOutput, usage: Usage | None) -> bytes:
        prompt = self._prompt_texts[choice // self._num_choices]
        columns = self._columns(0)
        await self._add_prompt(columns, output)
        self._offsets[choice] = len(prompt)
        logprobs = b"null" if self._top_logprobs is None else columns.encoded()
        content = b'"text":%b,"logprobs":%b,"finish_reason":null' % (encode(prompt), logprobs)
        return self._event(choice, content, usage)

    def event(self, choice: int, delta: CompletionDelta, usage: Usage | None = None) -> bytes:
        if not self.is_echo_alone:
            return super().event(choice, delta, usage)
        if delta.finish_reason is None:
            return b""
        return super().event(choice, _without_tokens(delta), usage)

    def _logprobs(self, choice: int, positions: Sequence[TokenLogprobs]) -> bytes:
        columns = self._columns(self._offsets.get(choice, 0))
        for position in positions:
            columns.add(position)
        self._offsets[choice] = columns.offset
        return columns.encoded()

    async def _add_prompt(self, columns: Columns, output: RequestOutput) -> None:
        if self._top_logprobs is None or output.prompt_logprobs is None:
            return
        first_id = output.prompt_token_ids[0]
        (first,) = self._token_bytes([first_id], is_start=True, skip_special_tokens=False)
        columns.add_token(first_id, first.decode(errors="replace"), None, None)  # it follows nothing
        await self._in_turns([position for position in output.prompt_logprobs if position is not None], columns.add)


C = TypeVar("C", CompletionOutput, CompletionDelta)


def _without_tokens(choice: C) -> C:
    """A choice without its tokens, for a request that wants only the prompt: the engine always generates one token."""
    reason: FinishReason = "length"
    return msgspec.structs.replace(choice, text="", token_ids=[], logprobs=None, finish_reason=reason, stop_reason=None)


def num_reasoning_tokens(choice: CompletionOutput, token_bytes: TokenBytes) -> int:
    """Tokens up to the end of a choice's reasoning.

    Estimated by its share of the characters if there are over `MAX_COUNTED` tokens, or their texts do not contain it.
    """
    if not choice.reasoning:
        return 0
    num_tokens, reasoning = len(choice.token_ids), choice.reasoning.encode()
    is_short = num_tokens <= MAX_COUNTED
    parts = token_bytes(choice.token_ids, is_start=True, skip_special_tokens=False) if is_short else []
    place = b"".join(parts).find(reasoning)
    if place < 0:
        others = len(choice.text) + sum(len(call.arguments) for call in choice.tool_calls)
        return num_tokens * len(choice.reasoning) // (len(choice.reasoning) + others)
    ends = list(itertools.accumulate(map(len, parts)))
    return bisect.bisect_left(ends, place + len(reasoning)) + 1


def line_of(value: Any) -> bytes:
    """JSON for an event."""
    data = encode(value)
    return data if data.isascii() else in_one_line(data)


def message_of(choice: CompletionOutput, *, has_reasoning: bool = True) -> dict[str, Any]:
    """A chat's answer as a message, with or without its reasoning."""
    message: dict[str, Any] = {"role": "assistant", "content": choice.text, "refusal": None}
    if choice.reasoning is not None and has_reasoning:
        message |= _reasoning_fields(choice.reasoning)
    if choice.tool_calls:
        message["content"] = choice.text or None
        message["tool_calls"] = [call.as_openai() for call in choice.tool_calls]
    return message


def _reasoning_fields(text: str) -> dict[str, str]:
    """Reasoning by both names that clients read: DeepSeek's, and the one of vLLM and OpenRouter."""
    return {"reasoning_content": text, "reasoning": text}


def finish_reason_of(choice: CompletionOutput | CompletionDelta, has_calls: bool) -> str | None:
    """The API's name of a finish reason; "tool_calls" only if each call is complete."""
    is_calling = choice.finish_reason == "stop" and has_calls and not choice.has_cut_call
    return "tool_calls" if is_calling else choice.finish_reason


def _call_delta(call: ToolCallDelta) -> dict[str, Any]:
    """A piece of a tool call; only the first piece has the call's id and name."""
    function = {"arguments": call.arguments}
    if call.id is None:
        return {"index": call.index, "function": function}
    return {"index": call.index, "id": call.id, "type": "function", "function": {"name": call.name, **function}}


def _content(positions: Sequence[bytes]) -> bytes:
    return b'{"content":[%b],"refusal":null}' % b",".join(positions)


def _ending(finish_reason: str | None, stop_reason: int | str | None) -> bytes:
    return b'"finish_reason":%b,"stop_reason":%b' % (encode(finish_reason), encode(stop_reason))
