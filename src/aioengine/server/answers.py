"""What clients get: the OpenAI API's bodies and stream events, made of the engine's outputs.

A stream has an event for each delta. What is the same in all of them is made once, so that a token costs the JSON of
its text and two joins: 0.5 µs of the 20 that its way to the client takes.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from typing import Any, Protocol

import msgspec

import aioengine
from aioengine.outputs import CompletionDelta, Logprob, RequestOutput, TokenLogprobs

DONE = b"data: [DONE]\n\n"
FINGERPRINT = f"aioengine-{aioengine.__version__}"


class TokenBytes(Protocol):
    """`Engine.token_bytes`."""

    def __call__(self, token_ids: list[int], *, is_start: bool, skip_special_tokens: bool) -> list[bytes]: ...


ENTRIES_A_SLICE = 500
"""Log-probabilities that are encoded between two turns for others."""

encode = msgspec.json.Encoder().encode


class Usage(msgspec.Struct):
    """Tokens of a request: of all its prompts, and of all its choices."""

    prompt_tokens: int
    completion_tokens: int
    num_cached_tokens: int = 0

    def plain(self) -> dict[str, Any]:
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self.num_cached_tokens},
        }

    @classmethod
    def of(cls, outputs: Sequence[RequestOutput]) -> Usage:
        return cls(
            prompt_tokens=sum(len(output.prompt_token_ids) for output in outputs),
            completion_tokens=sum(len(choice.token_ids) for output in outputs for choice in output.outputs),
            num_cached_tokens=sum(output.num_cached_tokens for output in outputs),
        )


class AnswerHead(msgspec.Struct, frozen=True):
    """What all bodies and events of one answer begin with."""

    id: str
    created: int
    model: str

    def fields(self, kind: str) -> dict[str, Any]:
        return {
            "id": self.id,
            "object": kind,
            "created": self.created,
            "model": self.model,
            "system_fingerprint": FINGERPRINT,
        }


MakeEcho = Callable[[int, RequestOutput, Usage | None], Awaitable[bytes]]


class Answer(Protocol):
    """One request's answer, whole or as events.

    Attributes:
        max_lines: log-probabilities of so many tokens are encoded in a turn, see `in_parts`.
    """

    max_lines: int

    @property
    def echo(self) -> MakeEcho | None:
        """Makes a choice's first event, of its prompt, once that has a token; None where choices begin with no prompt.

        It takes the number of the choice, the output of its prompt, and the usage to tell of.
        """
        ...

    async def whole(self, outputs: Sequence[RequestOutput]) -> bytes:
        """The body of an answer that is given at once, when all has ended; with turns for others between its parts."""
        ...

    def opening(self, num_choices: int, usage: Usage | None = None) -> bytes:
        """Events before the first token."""
        ...

    def event(self, choice: int, delta: CompletionDelta, usage: Usage | None = None) -> bytes:
        """The event of a delta; empty where it would say nothing."""
        ...

    def usage(self, outputs: Sequence[RequestOutput]) -> Usage:
        """What the client is told that it has used."""
        ...

    def closing(self, usage: Usage | None) -> bytes:
        """Events after the last token."""
        ...


class _Events:
    """Makes one answer's events: ``data: <head, "choices":[{"index":0,> … <}]>`` and an empty line."""

    def __init__(self, head: AnswerHead, kind: str, *, has_usage: bool) -> None:
        self._head = _in_one_line(encode(head.fields(kind))[:-1])
        self._prefixes: dict[int, bytes] = {}
        self._end = b'}],"usage":null}\n\n' if has_usage else b"}]}\n\n"

    def make(self, choice: int, content: bytes, usage: Usage | None) -> bytes:
        """An event with one choice, of which ``content`` is what follows its index."""
        if not content.isascii():
            content = _in_one_line(content)
        prefix = self._prefixes.get(choice)
        if prefix is None:
            prefix = b'data: %b,"choices":[{"index":%d,' % (self._head, choice)
            self._prefixes[choice] = prefix
        if usage is not None:
            return b'%b%b}],"usage":%b}\n\n' % (prefix, content, encode(usage.plain()))
        return prefix + content + self._end

    def usage(self, usage: Usage) -> bytes:
        """The event that tells of the usage alone."""
        return b'data: %b,"choices":[],"usage":%b}\n\n' % (self._head, encode(usage.plain()))


LINE_ENDS = tuple((end.encode(), b"\\u%04x" % ord(end)) for end in "\x85\u2028\u2029")


def _in_one_line(data: bytes) -> bytes:
    """JSON without what is the end of a line for clients that read by Python's ``splitlines``, and for nobody else."""
    for end, escaped in LINE_ENDS:
        data = data.replace(end, escaped)
    return data


def error_event(body: bytes) -> bytes:
    """An error in the middle of a stream; ``body`` is that of an error response."""
    return b"data: %b\n\n" % body


class ChatAnswer:
    """The answer to ``/v1/chat/completions``.

    Args:
        top_logprobs: how many likeliest tokens to tell of at each position; None without log-probabilities.
        has_usage: each event says that the usage comes later.
    """

    echo = None

    def __init__(self, head: AnswerHead, token_bytes: TokenBytes, *, top_logprobs: int | None, has_usage: bool) -> None:
        self._head = head
        self._token_bytes = token_bytes
        self._top_logprobs = top_logprobs
        self.max_lines = lines_a_turn(top_logprobs)
        self._begun: set[int] = set()
        self._events = _Events(head, "chat.completion.chunk", has_usage=has_usage)

    async def whole(self, outputs: Sequence[RequestOutput]) -> bytes:
        choices = []
        for choice in outputs[0].outputs:
            logprobs = b"null"
            if self._top_logprobs is not None and choice.logprobs is not None:
                positions = []
                for part in slices(choice.logprobs, self._top_logprobs):
                    positions += self._positions(choice.index, part)
                    await asyncio.sleep(0)
                logprobs = b'{"content":[%b],"refusal":null}' % b",".join(positions)
            message = encode({"role": "assistant", "content": choice.text, "refusal": None})
            ending = _ending(choice.finish_reason, choice.stop_reason)
            choices.append(b'{"index":%d,"message":%b,"logprobs":%b,%b}' % (choice.index, message, logprobs, ending))
        return _body(self._head.fields("chat.completion"), choices, self.usage(outputs))

    def usage(self, outputs: Sequence[RequestOutput]) -> Usage:
        return Usage.of(outputs)

    def opening(self, num_choices: int, usage: Usage | None = None) -> bytes:
        content = b'"delta":{"role":"assistant","content":"","refusal":null},"logprobs":null,"finish_reason":null'
        return b"".join(self._events.make(choice, content, usage) for choice in range(num_choices))

    def event(self, choice: int, delta: CompletionDelta, usage: Usage | None = None) -> bytes:
        text = b'"delta":{"content":%b}' % encode(delta.text) if delta.text else b'"delta":{}'
        if delta.finish_reason is None and self._top_logprobs is None:
            if not delta.text:
                return b""
            return self._events.make(choice, text + b',"logprobs":null,"finish_reason":null', usage)
        logprobs = b"null"
        if self._top_logprobs is not None and delta.logprobs is not None:
            logprobs = b'{"content":[%b],"refusal":null}' % b",".join(self._positions(choice, delta.logprobs))
        content = b'%b,"logprobs":%b,%b' % (text, logprobs, _ending(delta.finish_reason, delta.stop_reason))
        return self._events.make(choice, content, usage)

    def closing(self, usage: Usage | None) -> bytes:
        return (self._events.usage(usage) if usage is not None else b"") + DONE

    def _positions(self, choice: int, lines: Iterable[TokenLogprobs]) -> list[bytes]:
        positions = []
        for line in lines:
            positions.append(encode(self._position(line, is_start=choice not in self._begun)))
            self._begun.add(choice)
        return positions

    def _position(self, line: TokenLogprobs, *, is_start: bool) -> dict[str, Any]:
        """The sampled token, and of the likeliest ones as many as were asked for, by rank."""
        entries = {}
        for token_id, entry in line.items():
            # One at a time: they stand in for each other, and do not follow each other.
            (data,) = self._token_bytes([token_id], is_start=is_start, skip_special_tokens=False)
            entries[token_id] = {
                "token": _text_of(entry),
                "logprob": _finite(entry.logprob),
                "bytes": list(data),
            }
        ranked = sorted((entry.rank, token_id) for token_id, entry in line.items())
        top = [entries[token_id] for rank, token_id in ranked if rank <= (self._top_logprobs or 0)]
        return {**entries[next(iter(line))], "top_logprobs": top}


class CompletionAnswer:
    """The answer to ``/v1/completions``.

    Args:
        top_logprobs: how many likeliest tokens to tell of at each position; None without log-probabilities.
        has_usage: each event says that the usage comes later.
        num_choices: of each prompt.
        prompt_texts: with which each prompt's choices begin; None where they do not.
        is_echo_alone: nothing but the prompts is wanted.
    """

    def __init__(
        self,
        head: AnswerHead,
        token_bytes: TokenBytes,
        *,
        top_logprobs: int | None,
        has_usage: bool,
        num_choices: int,
        prompt_texts: Sequence[str] | None = None,
        is_echo_alone: bool = False,
    ) -> None:
        self._head = head
        self._token_bytes = token_bytes
        self._top_logprobs = top_logprobs
        self._num_choices = num_choices
        self._prompt_texts = prompt_texts
        self._is_echo_alone = is_echo_alone
        self.max_lines = lines_a_turn(top_logprobs)
        self._events = _Events(head, "text_completion", has_usage=has_usage)
        self._offsets: dict[int, int] = {}
        """Characters of a choice so far, as its tokens have them."""

    async def whole(self, outputs: Sequence[RequestOutput]) -> bytes:
        choices = []
        for place, output in enumerate(outputs):
            for index, part in enumerate(output.outputs, place * self._num_choices):
                text = "" if self._is_echo_alone else part.text
                columns = _Columns(0)
                if self._prompt_texts is not None:
                    text = self._prompt_texts[place] + text
                    await self._add_prompt(columns, output)
                if not self._is_echo_alone:
                    await self._add_lines(columns, part.logprobs or ())
                logprobs = b"null" if self._top_logprobs is None else columns.encoded()
                ending = self._ending(part.finish_reason, part.stop_reason)
                choices.append(b'{"index":%d,"text":%b,"logprobs":%b,%b}' % (index, encode(text), logprobs, ending))
        return _body(self._head.fields("text_completion"), choices, self.usage(outputs))

    def usage(self, outputs: Sequence[RequestOutput]) -> Usage:
        usage = Usage.of(outputs)
        return msgspec.structs.replace(usage, completion_tokens=0) if self._is_echo_alone else usage

    def opening(self, num_choices: int, usage: Usage | None = None) -> bytes:
        return b""

    @property
    def echo(self) -> MakeEcho | None:
        return None if self._prompt_texts is None else self._echo

    async def _echo(self, choice: int, output: RequestOutput, usage: Usage | None) -> bytes:
        assert self._prompt_texts is not None
        columns = _Columns(0)
        await self._add_prompt(columns, output)
        self._offsets[choice] = columns.offset
        logprobs = b"null" if self._top_logprobs is None else columns.encoded()
        text = encode(self._prompt_texts[choice // self._num_choices])
        return self._events.make(choice, b'"text":%b,"logprobs":%b,"finish_reason":null' % (text, logprobs), usage)

    def event(self, choice: int, delta: CompletionDelta, usage: Usage | None = None) -> bytes:
        if usage is not None and self._is_echo_alone:
            usage = msgspec.structs.replace(usage, completion_tokens=0)
        text = b'"text":' + (b'""' if self._is_echo_alone else encode(delta.text))
        if delta.finish_reason is None and (self._top_logprobs is None or self._is_echo_alone):
            if not delta.text or self._is_echo_alone:
                return b""
            return self._events.make(choice, text + b',"logprobs":null,"finish_reason":null', usage)
        logprobs = b"null"
        if self._top_logprobs is not None and not self._is_echo_alone:
            columns = _Columns(self._offsets.get(choice, 0))
            for line in delta.logprobs or ():
                columns.add(line)
            self._offsets[choice] = columns.offset
            logprobs = columns.encoded()
        ending = self._ending(delta.finish_reason, delta.stop_reason)
        return self._events.make(choice, b'%b,"logprobs":%b,%b' % (text, logprobs, ending), usage)

    def closing(self, usage: Usage | None) -> bytes:
        return (self._events.usage(usage) if usage is not None else b"") + DONE

    async def _add_prompt(self, columns: _Columns, output: RequestOutput) -> None:
        if self._top_logprobs is None or output.prompt_logprobs is None:
            return
        (first,) = self._token_bytes(output.prompt_token_ids[:1], is_start=True, skip_special_tokens=False)
        columns.add_first(first.decode(errors="replace"))
        await self._add_lines(columns, [line for line in output.prompt_logprobs if line is not None])

    async def _add_lines(self, columns: _Columns, lines: Sequence[TokenLogprobs]) -> None:
        for part in slices(lines, self._top_logprobs or 0):
            for line in part:
                columns.add(line)
            await asyncio.sleep(0)

    def _ending(self, finish_reason: str | None, stop_reason: int | str | None) -> bytes:
        if self._is_echo_alone and finish_reason is not None:
            return _ending("length", None)
        return _ending(finish_reason, stop_reason)


class _Columns:
    """Tokens with their log-probabilities in the completions' layout, as JSON: four lists of the same length.

    Args:
        offset: characters before the first token.
    """

    def __init__(self, offset: int) -> None:
        self.offset = offset
        self._tokens: list[bytes] = []
        self._logprobs: list[bytes] = []
        self._tops: list[bytes] = []
        self._offsets: list[int] = []

    def add_first(self, text: str) -> None:
        """A prompt's first token, which follows nothing."""
        self._add(text, b"null", b"null")

    def add(self, line: TokenLogprobs) -> None:
        """A sampled token, and by their texts the likeliest ones, itself among them."""
        top: dict[str, float] = {}
        for entry in line.values():
            top.setdefault(_text_of(entry), _finite(entry.logprob))  # several half characters have the same text
        sampled = next(iter(line.values()))
        self._add(_text_of(sampled), encode(_finite(sampled.logprob)), encode(top))

    def _add(self, text: str, logprob: bytes, top: bytes) -> None:
        self._tokens.append(encode(text))
        self._logprobs.append(logprob)
        self._tops.append(top)
        self._offsets.append(self.offset)
        self.offset += len(text)

    def encoded(self) -> bytes:
        lists = (b",".join(column) for column in (self._tokens, self._logprobs, self._tops))
        head = b'{"tokens":[%b],"token_logprobs":[%b],"top_logprobs":[%b]' % tuple(lists)
        return b'%b,"text_offset":%b}' % (head, encode(self._offsets))


def lines_a_turn(top_logprobs: int | None) -> int:
    """Log-probabilities of how many tokens take about a millisecond to encode."""
    return max(1, ENTRIES_A_SLICE // ((top_logprobs or 0) + 1))


def slices(lines: Sequence[TokenLogprobs], top_logprobs: int) -> Iterator[Sequence[TokenLogprobs]]:
    """Parts that each take about a millisecond to encode."""
    size = lines_a_turn(top_logprobs)
    for first in range(0, len(lines), size):
        yield lines[first : first + size]


def in_parts(delta: CompletionDelta, max_lines: int) -> Iterator[CompletionDelta]:
    """A delta that was merged for long, as several with few log-probabilities each; its text is in the last."""
    lines = delta.logprobs or []
    last = max(0, len(lines) - 1) // max_lines * max_lines
    for first in range(0, last, max_lines):
        ids, part = delta.token_ids[first : first + max_lines], lines[first : first + max_lines]
        yield CompletionDelta(index=delta.index, text="", token_ids=ids, logprobs=part)
    yield msgspec.structs.replace(delta, token_ids=delta.token_ids[last:], logprobs=lines[last:])


def _body(fields: dict[str, Any], choices: list[bytes], usage: Usage) -> bytes:
    return b'%b,"choices":[%b],"usage":%b}' % (encode(fields)[:-1], b",".join(choices), encode(usage.plain()))


def _ending(finish_reason: str | None, stop_reason: int | str | None) -> bytes:
    return b'"finish_reason":%b,"stop_reason":%b' % (encode(finish_reason), encode(stop_reason))


def _text_of(entry: Logprob) -> str:
    return entry.decoded_token or ""


def _finite(logprob: float) -> float:
    """JSON has no infinities; vLLM's floor."""
    return max(logprob, -9999.0)
