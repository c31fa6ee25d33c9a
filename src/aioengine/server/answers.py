"""The OpenAI API's bodies and stream events, made of the engine's outputs.

A stream has an event for each delta. The parts that all events share are made once, so that a token costs the JSON of
its text and two joins: 0.5 µs of the 20 that its way to the client takes.
"""

from __future__ import annotations

import asyncio
import bisect
import codecs
import itertools
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from typing import Any, ClassVar, Literal, NamedTuple, TypeVar

import msgspec

import aioengine
from aioengine.outputs import CompletionDelta, CompletionOutput, FinishReason, Logprob, RequestOutput, TokenLogprobs
from aioengine.server.decoding import IDS_A_TURN
from aioengine.server.errors import ApiError
from aioengine.tool_calls.calls import ToolCallDelta


class TextPlace:
    """A place in a text, in characters, that moves on token by token.

    OpenAI's ``text_offset`` counts characters of the text, where a token may hold a part of a character.

    Args:
        token_bytes: `Engine.token_bytes`.
        prompt: the text, if it is known: special tokens that are not in it, as the first may be, do not move the place.
        offset: the place of the first token.
        skips_special: the text is without special tokens.
    """

    def __init__(
        self,
        token_bytes: Callable[..., list[bytes]],
        prompt: str | None = None,
        *,
        offset: int = 0,
        skips_special: bool = False,
    ) -> None:
        self._token_bytes = token_bytes
        self._prompt = prompt
        self._offset = offset
        self._skips_special = skips_special
        self._is_start = prompt is None
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        """Holds the bytes of a character that is not complete."""

    def move(self, token_id: int, shown: str) -> int:
        """Move past a token, which is shown as ``shown``; returns the token's place in the text.

        A token that continues a character has the place of that character.
        """
        (data,) = self._token_bytes([token_id], is_start=self._is_start, skip_special_tokens=self._skips_special)
        self._is_start = False
        is_open = bool(self._decoder.getstate()[0])
        if is_open and data and data[0] & 0xC0 != 0x80:  # nothing completes it, and the text has U+FFFD
            self._offset += len(self._decoder.decode(b"", True))
            is_open = False
        begin = self._offset
        if self._prompt is not None and not is_open:
            data = self._found(token_id, data, self._prompt)
        self._offset += len(self._decoder.decode(data))
        return begin + (data[:1] == b" " and bool(shown) and shown[0] != " ")  # some vocabularies show no space

    def _found(self, token_id: int, data: bytes, prompt: str) -> bytes:
        """A token's bytes as the prompt has them; none if it is a special token that is not there."""
        text = data.decode(errors="ignore")
        if prompt.startswith(text, self._offset):
            return data
        if text[:1] == " " and prompt.startswith(text[1:], self._offset):  # some tokenizers put it before a text
            return data[1:]
        return data if any(self._token_bytes([token_id], is_start=False, skip_special_tokens=True)) else b""


encode = msgspec.json.Encoder().encode

TokenBytes = Callable[..., list[bytes]]
"""`Engine.token_bytes`."""


class PositionWriter:
    """Writes log-probabilities of tokens in the chats' layout.

    Args:
        top_logprobs: likeliest tokens to report at each position.
        is_by_ids: tokens are named by their ids.
    """

    def __init__(self, token_bytes: TokenBytes, top_logprobs: int, *, is_by_ids: bool = False) -> None:
        self._token_bytes = token_bytes
        self._top_logprobs = top_logprobs
        self._is_by_ids = is_by_ids
        self._begun: set[int] = set()
        """Choices of which some positions have been written."""

    def encode(self, choice: int, position: TokenLogprobs) -> bytes:
        """JSON of a choice's next token, and of the ``top_logprobs`` likeliest ones, by rank."""
        is_start = choice not in self._begun
        self._begun.add(choice)
        entries = {}
        for token_id, entry in position.items():
            # One at a time: they are alternatives, and do not follow each other.
            (data,) = self._token_bytes([token_id], is_start=is_start, skip_special_tokens=False)
            name = _name_of(token_id, entry, is_by_ids=self._is_by_ids)
            entries[token_id] = {"token": name, "logprob": _finite(entry.logprob), "bytes": list(data)}
        ranked = sorted((entry.rank, token_id) for token_id, entry in position.items())
        top = [entries[token_id] for rank, token_id in ranked if rank <= self._top_logprobs]
        return encode({**entries[next(iter(position))], "top_logprobs": top})


def positions_a_slice(top_logprobs: int | None) -> int:
    """`Answer.max_positions` for so many likeliest tokens at each position."""
    # Log-probabilities that are encoded before other tasks run.
    return max(1, 500 // ((top_logprobs or 0) + 1))


class Columns:
    """Tokens with their log-probabilities in the completions' layout, as JSON: four lists of the same length.

    Args:
        place: the first token's.
        num_top: likeliest tokens to report. is_by_ids: tokens are named by their ids.
    """

    def __init__(self, place: TextPlace, num_top: int, *, is_by_ids: bool) -> None:
        self.place = place
        self._num_top = num_top
        self._is_by_ids = is_by_ids
        self._rows: list[tuple[bytes, bytes, bytes, bytes]] = []

    def add(self, position: TokenLogprobs) -> None:
        """Add a sampled token, and the likeliest ones by their names, the sampled one among them."""
        top: dict[str, float] = {}
        for token_id, entry in _likeliest(position, self._num_top).items():
            name = _name_of(token_id, entry, is_by_ids=self._is_by_ids)
            top.setdefault(name, _finite(entry.logprob))  # several half characters have the same text
        sampled_id, sampled = next(iter(position.items()))
        self.add_token(sampled_id, sampled.decoded_token or "", _finite(sampled.logprob), top)

    def add_token(
        self, token_id: int, text: str, logprob: float | None = None, top: dict[str, float] | None = None
    ) -> None:
        """Add a token with its columns; the first token of a prompt follows nothing, and has no log-probability."""
        name = f"token_id:{token_id}" if self._is_by_ids else text
        offset = self.place.move(token_id, text)
        self._rows.append((encode(name), encode(logprob), encode(top), b"%d" % offset))

    def encode(self) -> bytes:
        columns = [b",".join(column) for column in zip(*self._rows, strict=True)] or [b""] * 4
        return b'{"tokens":[%b],"token_logprobs":[%b],"top_logprobs":[%b],"text_offset":[%b]}' % tuple(columns)


def split_delta(delta: CompletionDelta, max_positions: int) -> Iterator[CompletionDelta]:
    """Split a long merged delta into several with at most ``max_positions`` each; the last has its text."""
    positions = delta.logprobs or []
    last = max(0, len(positions) - 1) // max_positions * max_positions
    for first in range(0, last, max_positions):
        end = first + max_positions
        ids, part = delta.token_ids[first:end], positions[first:end]
        yield CompletionDelta(index=delta.index, text="", token_ids=ids, logprobs=part)
    yield msgspec.structs.replace(delta, token_ids=delta.token_ids[last:], logprobs=positions[last:])


def _likeliest(position: TokenLogprobs, num_top: int) -> TokenLogprobs:
    """A position's own token and the likeliest ``num_top``: more may have been computed, for another field."""
    own = next(iter(position))
    return {token_id: entry for token_id, entry in position.items() if token_id == own or entry.rank <= num_top}


def _name_of(token_id: int, entry: Logprob, *, is_by_ids: bool) -> str:
    """A token's name: its text, or ``token_id:`` and its id, as in vLLM."""
    return f"token_id:{token_id}" if is_by_ids else entry.decoded_token or ""


def _finite(logprob: float) -> float:
    """A log-probability of at least -9999, vLLM's floor: JSON has no infinities."""
    return max(logprob, -9999.0)


def _plain_position(position: TokenLogprobs, num_top: int) -> dict[int, dict[str, Any]]:
    """A position of a prompt in vLLM's format."""
    return {
        token_id: {"logprob": _finite(entry.logprob), "rank": entry.rank, "decoded_token": entry.decoded_token}
        for token_id, entry in _likeliest(position, num_top).items()
    }


DONE = b"data: [DONE]\n\n"
FINGERPRINT = f"aioengine-{aioengine.__version__}"


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
    """JSON whose further line ends are escaped: clients that use Python's ``splitlines`` would split it there."""
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
        self._has_each_token = top_logprobs is not None or extras.has_token_ids
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
        ends = b'"usage":%b' % encode(self.usage(outputs))
        if isinstance(self, ChatAnswer):
            ends += await self._of_prompt(outputs[0])
        return b'%b,"choices":[%b],%b}' % (self._head_of(self.WHOLE), b",".join(choices), ends)

    async def _of_prompt(self, output: RequestOutput) -> bytes:
        """Fields about a prompt, each with a comma before it; null if not asked for, as vLLM's are."""
        ids = await encode_ids(output.prompt_token_ids) if self._extras.has_token_ids else b"null"
        fields = b',"prompt_token_ids":' + ids
        if (num_top := self._extras.num_prompt_top) is None:
            fields += b',"prompt_logprobs":null'
        else:
            positions = await self._in_turns(
                output.prompt_logprobs or (), lambda each: encode(each and _plain_position(each, num_top))
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
        if delta.finish_reason is None and not self._has_each_token:
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

    def event(self, choice: int, delta: CompletionDelta, usage: Usage | None = None) -> bytes:
        reasoning = delta.reasoning if self._extras.has_reasoning else ""
        if not (reasoning or delta.tool_calls or choice in self._calling):
            return super().event(choice, delta, usage)
        if delta.tool_calls:
            self._calling.add(choice)
        fields: dict[str, Any] = {"content": delta.text} if delta.text else {}
        if reasoning:
            fields |= _reasoning_fields(reasoning)
        if delta.tool_calls:
            fields["tool_calls"] = calls = []
            for call in delta.tool_calls:  # only the first piece of a call has its id and its name
                piece: dict[str, Any] = {"index": call.index, "function": {"arguments": call.arguments}}
                if call.id is not None:
                    piece |= {"id": call.id, "type": "function"}
                    piece["function"]["name"] = call.name
                calls.append(piece)
        if not fields and delta.finish_reason is None and not self._has_each_token:
            return b""
        ending = _ending(finish_reason_of(delta, choice in self._calling), delta.stop_reason)
        return self._event(
            choice, b'"delta":%b,%b,%b' % (encode(fields), self._of_tokens(choice, delta), ending), usage
        )

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
        skips_special: the choices' texts are without special tokens.
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
        skips_special: bool = True,
    ) -> None:
        super().__init__(head, token_bytes, extras)
        self._num_choices = num_choices
        self._prompt_texts = prompt_texts
        self.has_echo = bool(prompt_texts)
        self.is_echo_alone = is_echo_alone
        self._skips_special = skips_special
        self._places: dict[int, TextPlace] = {}
        """Where each choice's next token begins in its text."""

    async def _choice(self, number: int, output: RequestOutput, choice: CompletionOutput) -> bytes:
        if self.is_echo_alone:
            choice = _without_tokens(choice)
        prompt = self._prompt_texts[number // self._num_choices] if self.has_echo else ""
        text = prompt + choice.text
        columns = self._columns(TextPlace(self._token_bytes, prompt))
        if self.has_echo:
            await self._add_prompt(columns, output)
        columns.place = self._place_behind(prompt)
        await self._in_turns(choice.logprobs or (), columns.add)
        logprobs = b"null" if self._top_logprobs is None else columns.encode()
        ending = _ending(choice.finish_reason, choice.stop_reason) + (self._ids_of(choice) or b',"token_ids":null')
        ending += await self._of_prompt(output)
        return b'{"index":%d,"text":%b,"logprobs":%b,%b}' % (number, encode(text), logprobs, ending)

    def opening(self, outputs: Sequence[RequestOutput], usage: Usage | None, prompt_ids: Sequence[bytes]) -> bytes:
        content = b'"text":"","logprobs":null,"finish_reason":null,"token_ids":[],"prompt_token_ids":'
        places = range(sum(len(output.outputs) for output in outputs) if prompt_ids else 0)
        events = [self._event(place, content + prompt_ids[place // self._num_choices], usage) for place in places]
        return b"".join(events)

    def _columns(self, place: TextPlace) -> Columns:
        return Columns(place, self._extras.max_rank, is_by_ids=self._extras.is_by_ids)

    def _place_behind(self, prompt: str) -> TextPlace:
        """Where a choice's own tokens begin."""
        return TextPlace(self._token_bytes, offset=len(prompt), skips_special=self._skips_special)

    async def echo(self, choice: int, output: RequestOutput, usage: Usage | None) -> bytes:
        prompt = self._prompt_texts[choice // self._num_choices]
        columns = self._columns(TextPlace(self._token_bytes, prompt))
        await self._add_prompt(columns, output)
        self._places[choice] = self._place_behind(prompt)
        logprobs = b"null" if self._top_logprobs is None else columns.encode()
        content = b'"text":%b,"logprobs":%b,"finish_reason":null' % (encode(prompt), logprobs)
        return self._event(choice, content, usage)

    def event(self, choice: int, delta: CompletionDelta, usage: Usage | None = None) -> bytes:
        if not self.is_echo_alone:
            return super().event(choice, delta, usage)
        if delta.finish_reason is None:
            return b""
        return super().event(choice, _without_tokens(delta), usage)

    def _logprobs(self, choice: int, positions: Sequence[TokenLogprobs]) -> bytes:
        if choice not in self._places:
            self._places[choice] = self._place_behind("")
        columns = self._columns(self._places[choice])
        for position in positions:
            columns.add(position)
        return columns.encode()

    async def _add_prompt(self, columns: Columns, output: RequestOutput) -> None:
        if self._top_logprobs is None or output.prompt_logprobs is None:
            return
        first_id = output.prompt_token_ids[0]
        (first,) = self._token_bytes([first_id], is_start=True, skip_special_tokens=False)
        columns.add_token(first_id, first.decode(errors="replace"))
        await self._in_turns([position for position in output.prompt_logprobs if position is not None], columns.add)


C = TypeVar("C", CompletionOutput, CompletionDelta)


def _without_tokens(choice: C) -> C:
    """A choice without its tokens, for a request that wants only the prompt: the engine always generates one token."""
    reason: FinishReason = "length"
    return msgspec.structs.replace(choice, text="", token_ids=[], logprobs=None, finish_reason=reason, stop_reason=None)


def num_reasoning_tokens(choice: CompletionOutput, token_bytes: TokenBytes) -> int:
    """Tokens up to the end of a choice's reasoning.

    Estimated by its share of the characters if there are over 8192 tokens, since counting takes half a microsecond
    each, or if their texts do not contain it.
    """
    if not choice.reasoning:
        return 0
    num_tokens, reasoning = len(choice.token_ids), choice.reasoning.encode()
    counted = choice.token_ids if num_tokens <= 8192 else []
    parts = token_bytes(counted, is_start=True, skip_special_tokens=False)
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


def _content(positions: Sequence[bytes]) -> bytes:
    return b'{"content":[%b],"refusal":null}' % b",".join(positions)


def _ending(finish_reason: str | None, stop_reason: int | str | None) -> bytes:
    return b'"finish_reason":%b,"stop_reason":%b' % (encode(finish_reason), encode(stop_reason))
