"""Calls in Python's syntax: those of Llama 3.2 and 4, of LFM2, and of Olmo 3, which writes each on its own line.

    [get_weather(city="Paris", days=[1, 2]), get_time()]
    <|tool_call_start|>[get_weather(city="Paris")]<|tool_call_end|>
    <function_calls>get_weather(city="Paris")
    get_time()</function_calls>

Llama's calls are the whole answer, or follow ``<|python_start|>``. Arguments are given by name; values are literals of
Python or JSON. A prompt may ask LFM2 for a list of JSON objects, which is read, too.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from aioengine.tool_calls.calls import Tool
from aioengine.tool_calls.grammars import GrammarWriter, StepFormat, quoted, types_of
from aioengine.tool_calls.json_scanner import MAX_DEPTH
from aioengine.tool_calls.reading import MAX_KEYWORD_CHARS, Markers, NotACall, Reading, Steps
from aioengine.tool_calls.values import json_of_literal, write_arguments

_NAME_ENDS, _KEY_ENDS = Markers("(", " ", "\n"), Markers(*"=,()[]{}\"'")

_PLAIN, _PLAIN_IN_STRING = re.compile(r"[^\"'()\[\]{},\\]+"), re.compile(r"[^\"'\\]+")
_CLOSER_OF = {"(": ")", "[": "]", "{": "}"}


class _Style(NamedTuple):
    """A model's variant of this format.

    Attributes:
        tag, end: the markers around all calls.
        needs_tag: a grammar has calls only after the tag.
        is_listed: calls are a list; else each has a line.
    """

    tag: str
    end: str
    needs_tag: bool = True
    is_listed: bool = True

    def read(self, reading: Reading) -> Steps[None]:
        tags = Markers(self.tag) if reading.is_strict else Markers(self.tag, "\n[")
        if (yield from reading.skip_space()) == "[" and not (self.needs_tag and reading.is_strict):
            yield from reading.attempt(_read_calls(reading, self.end), is_marked=False)
        while marker := (yield from reading.show_until(tags)):
            if marker != self.tag:
                reading.put_back()
            yield from reading.attempt(_read_calls(reading, self.end), is_marked=marker == self.tag)

    def write(self, writer: GrammarWriter) -> str:
        call = writer.one_of(
            f"{quoted(tool.name + '(')} {write_arguments(writer, tool, self._write_argument, ', ')} {quoted(')')}"
            for tool in writer.tools
        )
        calls = writer.several(call, quoted(", " if self.is_listed else "\n"))
        calls = f"{quoted('[')} {calls} {quoted(']')}" if self.is_listed else calls
        if self.needs_tag:
            return writer.finish_marked(self.tag, f"{calls} {writer.marker(self.end)}", between=None)
        return writer.finish_unmarked(self.tag, calls, beginning="[")

    def _write_argument(self, writer: GrammarWriter, name: str, schema: Mapping[str, Any], tool: Tool) -> str:
        is_bool = self.is_listed and types_of(schema, tool.parameters) == {"boolean"}
        return f'{name} "=" ' + ('("True" | "False")' if is_bool else writer.json(schema, tool))


def _read_calls(reading: Reading, end: str) -> Steps[None]:
    yield from reading.skip_space()
    is_listed = yield from reading.literal("[")
    is_more = True
    while is_more:
        if (yield from reading.skip_space()) == "{":
            yield from reading.json_call()
        else:
            name = yield from reading.read_until(_NAME_ENDS, longest=MAX_KEYWORD_CHARS)
            if reading.marker != "(":
                raise NotACall
            reading.begin_call(name, "{")
            yield from _read_arguments(reading)
            reading.end_call()
        yield from reading.close()
        is_more = (yield from reading.literal(",")) if is_listed else (yield from reading.peek()) not in ("", "<")
    yield from reading.close(*(["]"] if is_listed else []), end)


def _read_arguments(reading: Reading) -> Steps[None]:
    head, end = "", ","
    while end == "," and (yield from reading.skip_space()) != ")":
        key = (yield from reading.read_until(_KEY_ENDS, longest=MAX_KEYWORD_CHARS)).strip()
        if reading.marker != "=":
            raise NotACall
        text, end = yield from _read_value(reading)
        reading.add_arguments(f"{head}{json.dumps(key, ensure_ascii=False)}: {json_of_literal(text)}")
        head = ", "
    if end == ",":
        yield from reading.expect(")")
    reading.add_arguments("}")


def _read_value(reading: Reading) -> Steps[tuple[str, str]]:
    """Read a value and the comma or parenthesis after it, and return both."""
    parts: list[str] = []
    closers = [")"]
    quote = ""
    while char := (yield from reading.peek()):
        # Most of a text is plain, and read at once.
        plain = (_PLAIN_IN_STRING if quote else _PLAIN).match(reading.text, reading.at)
        if plain:
            taken = reading.take(plain.end())
            parts.append(taken.replace("\n", "\\n") if quote else taken)  # LFM2's template writes strings as they are
            continue
        if quote:
            quote = "" if char == quote else quote
        elif char in "\"'":
            quote = char
        elif char in _CLOSER_OF and len(closers) <= MAX_DEPTH:
            closers.append(_CLOSER_OF[char])
        elif char != "," and char != closers.pop():
            break
        reading.take(reading.at + 1)
        if not closers or (char == "," and len(closers) == 1 and not quote):
            return "".join(parts), char
        parts.append(char)
        if char == "\\" and (yield from reading.peek()):
            parts.append(reading.take(reading.at + 1))
    raise NotACall


PYTHONIC, LFM2, OLMO3 = (
    StepFormat(name, style.read, style.write)
    for name, style in (
        ("pythonic", _Style("<|python_start|>", "<|python_end|>", needs_tag=False)),
        ("lfm2", _Style("<|tool_call_start|>", "<|tool_call_end|>")),
        ("olmo3", _Style("<function_calls>", "</function_calls>", is_listed=False)),
    )
)
