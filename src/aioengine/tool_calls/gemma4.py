"""The calls of Gemma 4 and of FunctionGemma: like JSON, with bare keys and marked strings.

    <|tool_call>call:get_weather{city:<|"|>Paris<|"|>,days:[1,2],place:{at:<|"|>home<|"|>}}<tool_call|>
    <start_function_call>call:get_weather{city:<escape>Paris<escape>}<end_function_call>

JSON's own strings and keys are read, too: a grammar has them inside lists and objects, and for strings whose schema
has a pattern, a format or a length.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

from aioengine.tool_calls.calls import Tool
from aioengine.tool_calls.grammars import GrammarWriter, StepFormat, properties_of, quoted, types_of
from aioengine.tool_calls.reading import MAX_KEYWORD_CHARS, Markers, Reading, Steps
from aioengine.tool_calls.values import as_json, in_string, is_plain, write_arguments

MAX_DEPTH = 64
"""Levels of lists and objects inside each other; a call with more is none."""

NO_TYPES: Mapping[str, frozenset[str]] = {}
_NAME_ENDS, _KEY_ENDS, _VALUE_ENDS = Markers("{"), Markers(":"), Markers(",", "}", "]")


class _MarkedReader:
    def __init__(self, begin: str, quote: str, *ends: str) -> None:
        self._begins, self._quote, self._quotes, self._ends = Markers(begin), quote, Markers(quote), ends

    def read(self, reading: Reading) -> Steps[None]:
        while (yield from reading.show_until(self._begins)):
            yield from reading.attempt(self._read_call(reading))

    def _read_call(self, reading: Reading) -> Steps[None]:
        yield from reading.skip_space()
        yield from reading.literal("call")
        yield from reading.expect(":")
        name = yield from reading.read_until(_NAME_ENDS, longest=MAX_KEYWORD_CHARS)
        reading.begin_call(name.strip())
        reading.put_back()
        tool = reading.tools[name.strip()]
        types = {key: types_of(schema, tool.parameters) for key, schema in properties_of(tool).items()}
        yield from self._read_value(reading, MAX_DEPTH, types_in=types)
        reading.end_call()
        yield from reading.close(*self._ends)

    def _read_value(
        self,
        reading: Reading,
        depth: int,
        types: frozenset[str] = frozenset(),
        types_in: Mapping[str, frozenset[str]] = NO_TYPES,
    ) -> Steps[None]:
        """Take a value; its JSON becomes part of the arguments as it comes.

        Args:
            types: those that its schema admits; empty: any.
            types_in: the same of an object's members.
        """
        first = yield from reading.skip_space()
        is_marked = yield from reading.literal(self._quote)
        if first == '"':
            yield from reading.json_value(reading.add_arguments)
        elif is_marked and (not types or "string" in types):
            reading.add_arguments('"')
            yield from reading.read_until(self._quotes, give=lambda text: reading.add_arguments(in_string(text)))
            reading.add_arguments('"')
        elif not is_marked and first and first in "{[" and depth:
            closer = "}" if first == "{" else "]"
            reading.add_arguments(reading.take(reading.at + 1))
            separator = ""
            while (yield from reading.skip_space()) != closer:
                reading.add_arguments(separator)
                key = (yield from self._read_key(reading)) if first == "{" else ""
                yield from self._read_value(reading, depth - 1, types_in.get(key, frozenset()))
                separator = ", "
                if (yield from reading.skip_space()) != closer:
                    yield from reading.expect(",")
            reading.add_arguments(reading.take(reading.at + 1))
        else:
            text = yield from reading.read_until(self._quotes if is_marked else _VALUE_ENDS)
            if not is_marked:
                reading.put_back()
            reading.add_arguments(as_json(text.strip(), types))

    def _read_key(self, reading: Reading) -> Steps[str]:
        if (yield from reading.skip_space()) == '"':
            key = str(json.loads((yield from reading.json_value())))
            yield from reading.skip_space()
            yield from reading.expect(":")
        else:
            key = yield from reading.read_until(_KEY_ENDS, longest=MAX_KEYWORD_CHARS)
            key = key.strip().removeprefix(self._quote).removesuffix(self._quote)
        reading.add_arguments(f'"{in_string(key)}": ')
        return key


def _writer(begin: str, quote: str, end: str) -> Callable[[GrammarWriter], str]:
    def write_member(writer: GrammarWriter, name: str, schema: Mapping[str, Any], tool: Tool) -> str:
        if not is_plain(schema, types_of(schema, tool.parameters)):
            return f'{name} ":" {writer.json(schema, tool)}'
        return f'{name} ":" {writer.marker(quote)} {writer.plain_value(schema, quote)}'

    def write(writer: GrammarWriter) -> str:
        call = writer.one_of(
            f"{quoted(f'call:{tool.name}{{')} {write_arguments(writer, tool, write_member, ',')} {quoted('}')}"
            for tool in writer.tools
        )
        return writer.finish_marked(begin, f"{call} {writer.marker(end)}", between="")

    return write


GEMMA4, FUNCTION_GEMMA = (
    StepFormat(name, _MarkedReader(begin, quote, *ends).read, _writer(begin, quote, ends[0]), keeps_special_tokens=True)
    for name, begin, quote, *ends in (
        ("gemma4", "<|tool_call>", '<|"|>', "<tool_call|>", "<|tool_response>"),
        ("function_gemma", "<start_function_call>", "<escape>", "<end_function_call>", "<start_function_response>"),
    )
)
