"""Reads an answer that arrives in pieces, in steps that wait for more text where they need it.

A format is a generator over a `Reading`: plain code from left to right, which yields where the text has not arrived.
Text that it takes is held until its kind is known: `drop` discards it as markup, `release` shows it.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Callable, Generator, Iterable
from typing import TypeVar

from aioengine.tool_calls.calls import Piece, Tool, ToolCall, ToolCallDelta
from aioengine.tool_calls.json_scanner import JsonScanner, is_json

MAX_KEYWORD_CHARS = 256
"""The most characters of a text between two markers that is no value: a name, a key, a header."""

SPACE, NEWLINES = re.compile(r"\s*"), re.compile(r"\n*")
LOOSE = ("{", "[{", "[ ", "[\n", "```")
"""Beginnings of JSON that may be calls without a marker: an object, a list, and either in a fence."""

_LANGUAGE, _SURROGATES = re.compile("[a-z_]*"), re.compile("[\ud800-\udfff]")
_NAME_KEYS, _ARGUMENT_KEYS, _FUNCTION_KEY = ("name", "function", "tool_name"), ("arguments", "parameters"), "function"
_OTHER_KEYS = ("id", "type", "tool_call_id")

T = TypeVar("T")
Steps = Generator[None, None, T]


class NotACall(Exception):
    """The text taken so far is no call; reading goes on as text at the current character."""


class Markers:
    """Texts to search for in a text: the first occurrence of any, and the longest of those that begin there."""

    def __init__(self, *texts: str) -> None:
        self.texts = texts
        self._pattern = re.compile("|".join(map(re.escape, sorted(texts, key=len, reverse=True))))
        self._first_chars = re.compile("[" + "".join(re.escape(text[0]) for text in texts) + "]")
        self._longest = max(map(len, texts))

    @functools.cached_property
    def loose(self) -> Markers:
        """These markers and `LOOSE`."""
        return Markers(*self.texts, *LOOSE)

    def find(self, text: str, at: int) -> re.Match[str] | None:
        return self._pattern.search(text, at)

    def may_begin(self, text: str, at: int) -> int:
        """The place in ``text``, which has no whole marker, where one may begin; the text's length if nowhere."""
        at = max(at, len(text) - self._longest + 1)
        while found := self._first_chars.search(text, at):
            at = found.start()
            if any(marker.startswith(text[at:]) for marker in self.texts):
                return at
            at += 1
        return len(text)


class Reading:
    """A text that is being read, the text held back, and the results.

    Args:
        make_id: makes an id for each call that begins.
    Attributes:
        text, at: the part that has arrived, and the place up to which it was taken.
        is_over: no more text will arrive.
        marker: the last one that `read_until` has found.
        shown: the list that gets text that is no call: ``content`` or ``reasoning``.
        is_strict: a grammar constrains the text, so that calls are only in the format's own spelling.
        is_loose: JSON calls without a marker are read. An object that is no call ends this: the answer is data.
    """

    def __init__(self, tools: Iterable[Tool], make_id: Callable[[], str], *, is_strict: bool = False) -> None:
        self.is_strict, self.is_loose = is_strict, not is_strict
        self.tools = {tool.name: tool for tool in tools}
        self.text, self.at, self.is_over = "", 0, False
        self.marker = ""
        self.calls: list[ToolCall] = []
        self.is_cut = False
        self.content: list[str] = []
        self.reasoning: list[str] = []
        self.shown = self.content
        self.make_id = make_id
        self._held: list[str] = []
        self._open: ToolCall | None = None
        self._arguments: list[str] = []
        self._num_begun = 0
        self._given_ids: set[str] = set()
        self._is_marked = False
        self._deltas: dict[int, tuple[str | None, str | None, list[str]]] = {}

    def take_piece(self) -> Piece:
        """Return the results since the last call of this method."""
        deltas = (ToolCallDelta(n, call_id, name, "".join(parts)) for n, (call_id, name, parts) in self._deltas.items())
        piece = Piece("".join(self.content), "".join(self.reasoning), tuple(deltas))
        for given in (self.content, self.reasoning, self._deltas):
            given.clear()
        return piece

    # Held text and results

    def take(self, end: int) -> str:
        """Hold the text up to ``end``, and return it."""
        taken = self.text[self.at : end]
        self._held.append(taken)
        self.at = end
        return taken

    def drop(self) -> None:
        """Discard the held text, which is markup or a call's."""
        self._held.clear()

    def release(self) -> None:
        """Show the held text."""
        self.shown += self._held
        self._held.clear()

    def begin_call(self, name: str, arguments: str = "", *, call_id: str | None = None) -> None:
        """Begin a call with the held text, which stays held until the call is complete.

        Args:
            call_id: its id; a new one is made in place of None or an id that another call has.
        Raises:
            NotACall: no tool has this name.
        """
        if name not in self.tools:
            raise NotACall
        if call_id is None or call_id in self._given_ids:
            call_id = self.make_id()
        self._given_ids.add(call_id)
        self._open = ToolCall(call_id, name, "")
        self._arguments.clear()
        self._deltas[self._num_begun] = (call_id, name, [])
        self._num_begun += 1
        self.add_arguments(arguments)

    def add_arguments(self, text: str) -> None:
        self._arguments.append(text)
        if text:
            self._deltas.setdefault(self._num_begun - 1, (None, None, []))[2].append(text)

    def end_call(self) -> None:
        assert self._open is not None
        self.calls.append(ToolCall(self._open.id, self._open.name, "".join(self._arguments)))
        self._open = None
        self.drop()

    @property
    def is_in_call(self) -> bool:
        return self._open is not None

    def attempt(self, steps: Steps[None], *, is_marked: bool = True) -> Steps[None]:
        """Run steps that read one call or several. If they find none, the text that they took is shown.

        Args:
            is_marked: a marker began the call, so that it counts as one even if the text ends before its name. Without
                a marker JSON counts as a call only if it has arguments.
        """
        self._is_marked = is_marked
        try:
            yield from steps
        except NotACall:
            is_begun, self._open = self._open is not None, None
            is_cut_off = self.is_over and (is_begun or is_marked)
            self.is_cut = self.is_cut or is_begun or is_cut_off
            if is_cut_off:
                self.at = len(self.text)
                self.drop()
            # White space at the end may still precede a call.
            held = "".join(self._held)
            self.shown.append(held.rstrip())
            self._held[:] = [held[len(self.shown[-1]) :]]

    # Reading

    def show_until(self, markers: Markers, *, space: str | None = None) -> Steps[str]:
        """Show text up to a marker, and hold the marker with the space before it.

        Args:
            space: the characters that are space; None: all white space.
        Returns:
            the marker; "" when the text is over.
        """
        while True:
            found = markers.find(self.text, self.at)
            stop = found.start() if found else len(self.text) if self.is_over else markers.may_begin(self.text, self.at)
            end_of_shown = self.at + len(self.text[self.at : stop].rstrip(space))
            if end_of_shown > self.at:
                self.release()
                self.shown.append(self.text[self.at : end_of_shown])
                self.at = end_of_shown
            self.take(stop)
            if found:
                self.take(found.end())
                return found[0]
            if self.is_over:
                self.release()
                return ""
            yield

    def read_until(
        self, markers: Markers, *, longest: int | None = None, give: Callable[[str], None] | None = None
    ) -> Steps[str]:
        """Take the text before a marker, and the marker.

        Args:
            longest: the most characters before it.
            give: called with the text as it arrives; None: return the text.
        Returns:
            the text; empty with ``give``.
        Raises:
            NotACall: the text is over, or the marker is further away.
        """
        parts: list[str] = []
        give = parts.append if give is None else give
        room = float("inf") if longest is None else longest
        while True:
            found = markers.find(self.text, self.at)
            stop = found.start() if found else markers.may_begin(self.text, self.at)
            if stop - self.at > room:
                self.take(self.at + int(room))
                raise NotACall
            room -= stop - self.at
            give(self.take(stop))
            if found:
                self.marker = self.take(found.end())
                return "".join(parts)
            if self.is_over:
                raise NotACall
            yield

    def put_back(self) -> None:
        """Put the last piece taken, a marker, back into the text to read it again."""
        self.at -= len(self._held.pop())

    def peek(self) -> Steps[str]:
        """The next character, which is not taken; "" when the text is over."""
        while self.at == len(self.text) and not self.is_over:
            yield
        return self.text[self.at : self.at + 1]

    def skip_space(self, space: re.Pattern[str] = SPACE) -> Steps[str]:
        """Take white space, and return the next character, which is not taken; "" when the text is over."""
        while True:
            found = space.match(self.text, self.at)
            self.take(found.end() if found else self.at)
            if self.at < len(self.text) or self.is_over:
                return self.text[self.at : self.at + 1]
            yield

    def literal(self, expected: str) -> Steps[bool]:
        """Take ``expected`` if the text goes on with it; return whether it does."""
        while True:
            here = self.text[self.at : self.at + len(expected)]
            if here == expected:
                self.take(self.at + len(expected))
                return True
            if self.is_over or not expected.startswith(here):
                return False
            yield

    def expect(self, expected: str) -> Steps[None]:
        if not (yield from self.literal(expected)):
            raise NotACall

    def json_value(self, give: Callable[[str], None] | None = None) -> Steps[str]:
        """Take a JSON value; pass its text to ``give`` as it arrives, or return it."""
        scanner = JsonScanner()
        parts: list[str] = []
        give = parts.append if give is None else give
        while True:
            end = scanner.scan(self.text, self.at)
            give(self.take(end))
            if scanner.is_done:
                return "".join(parts)
            if scanner.is_wrong or self.is_over:
                raise NotACall
            yield

    # Parts of several formats

    def find_call(self, begins: Markers) -> Steps[str]:
        """Show text up to a marker and return that, as `show_until`; read JSON calls without a marker on the way."""
        while (marker := (yield from self.show_until(begins.loose if self.is_loose else begins))) in LOOSE:
            self.put_back()
            yield from self.attempt(self.json_calls(), is_marked=False)
        return marker

    def json_calls(self) -> Steps[None]:
        """Read a call that is a JSON object, or a list of these; models may put either into a fence."""
        yield from self.skip_space()
        if is_fenced := (yield from self.literal("```")):
            yield from self.skip_space(_LANGUAGE)
            yield from self.skip_space()
        separator = "["
        while (yield from self.literal(separator)):
            yield from self.json_call()
            yield from self.close()
            separator = ","
        if separator == "[":
            yield from self.json_call()
        else:
            yield from self.close("]")
        yield from self.close(*(["```"] if is_fenced else []))

    def json_call(self) -> Steps[None]:
        """Read a call that is an object, with a name and arguments in any order, or with these under "function"."""
        yield from self.skip_space()
        name, arguments = yield from self._json_fields()
        if name is None or (arguments is None and not self._is_marked):
            raise NotACall
        if not self.is_in_call:
            self.begin_call(name, arguments or "{}")
        self.end_call()

    def _json_fields(self, *, is_inner: bool = False) -> Steps[tuple[str | None, str | None]]:
        """Take a call's object, and begin the call once both are there; return name and arguments, None if absent."""
        name: str | None = None
        arguments: str | None = None
        yield from self.expect("{")
        is_more = True
        while is_more:
            if (yield from self.skip_space()) != '"':
                raise NotACall
            key = json.loads((yield from self.json_value()))
            yield from self.skip_space()
            yield from self.expect(":")
            first = yield from self.skip_space()
            if key in _NAME_KEYS and name is None and first == '"':
                name = json.loads((yield from self.json_value()))
                if name not in self.tools:
                    self.is_loose = False
                    raise NotACall
                if arguments is not None:
                    self.begin_call(name, arguments)
            elif key == _FUNCTION_KEY and name is None and first == "{" and not is_inner:
                name, arguments = yield from self._json_fields(is_inner=True)
            elif key in _ARGUMENT_KEYS and arguments is None and first in ("{", "n", '"'):
                if first == "{" and name is not None:
                    self.begin_call(name)
                    arguments = ""
                    yield from self.json_value(self.add_arguments)
                else:
                    arguments = _as_object((yield from self.json_value()))
                    if name is not None:
                        self.begin_call(name, arguments)
            elif key in _OTHER_KEYS or self.is_in_call:
                yield from self.json_value()
            else:
                self.is_loose = False
                raise NotACall
            yield from self.skip_space()
            is_more = yield from self.literal(",")
        yield from self.expect("}")
        return name, arguments

    def close(self, *markers: str) -> Steps[None]:
        """Drop these markers after a complete call, where they are present, and white space at the text's end."""
        for marker in markers:
            yield from self.skip_space()
            if (yield from self.literal(marker)):
                self.drop()
            elif self.is_over and marker.startswith(self.text[self.at :]):
                self.at = len(self.text)
        if not (yield from self.skip_space()):
            self.drop()


def _as_object(value: str) -> str:
    """The JSON object of arguments that are written as an object, as a JSON string of one, or as null for none.

    Raises:
        NotACall: the arguments are no object.
    """
    text = str(json.loads(value)).strip() if value[0] == '"' else value
    if text in ("", "null"):
        return "{}"
    if text[0] != "{" or not is_json(text) or _SURROGATES.search(text):
        raise NotACall
    return text


class StepParser:
    """An `AnswerParser` that runs a format's steps.

    Args:
        make_steps: the format, whose steps go on until the text is over.
    """

    def __init__(self, make_steps: Callable[[Reading], Steps[None]], reading: Reading) -> None:
        self._reading = reading
        self._steps = make_steps(reading)
        next(self._steps)

    @property
    def calls(self) -> list[ToolCall]:
        return self._reading.calls

    @property
    def is_cut(self) -> bool:
        return self._reading.is_cut

    def feed(self, text: str) -> Piece:
        reading = self._reading
        assert not reading.is_over, "the text is over"
        # The text not taken is never longer than a marker, so that copying is not quadratic.
        reading.text, reading.at = reading.text[reading.at :] + text, 0
        next(self._steps)
        return reading.take_piece()

    def finish(self) -> Piece:
        self._reading.is_over = True
        next(self._steps, None)
        return self._reading.take_piece()
