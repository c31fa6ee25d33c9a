"""Calls of Gemma 4 and FunctionGemma, which are like JSON with bare keys and marked strings.

    <|tool_call>call:get_weather{city:<|"|>Paris<|"|>,days:[1,2],place:{at:<|"|>home<|"|>}}<tool_call|>
    <start_function_call>call:get_weather{city:<escape>Paris<escape>}<end_function_call>

JSON strings and keys are read, too: a grammar has them inside lists and objects, and for strings whose schema has a
pattern, a format or a length.
"""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Mapping
from typing import Any

from aioengine.tool_calls.calls import Tool
from aioengine.tool_calls.grammars import GrammarWriter, StepFormat, properties_of, quoted, types_of
from aioengine.tool_calls.reading import MAX_KEYWORD_CHARS, Markers, Reading, Steps
from aioengine.tool_calls.values import as_json, in_string, is_plain, write_arguments

MAX_DEPTH = 64
"""Most levels of nested lists and objects; text with more is no call."""

NO_TYPES: Mapping[str, frozenset[str]] = {}
_NAME_ENDS, _KEY_ENDS, _VALUE_ENDS = Markers("{"), Markers(":"), Markers(",", "}", "]")


@dataclasses.dataclass(frozen=True)
class _BareKeys:
    """The texts of a format: around a call, around a string, and one that may follow a call's end."""

    begin: str
    end: str
    quote: str
    response: str

    @functools.cached_property
    def _quotes(self) -> Markers:
        return Markers(self.quote)

    def read(self, reading: Reading) -> Steps[None]:
        begins = Markers(self.begin)
        while (yield from reading.show_until(begins)):
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
        yield from reading.close(self.end, self.response)

    def _read_value(
        self,
        reading: Reading,
        depth: int,
        types: frozenset[str] = frozenset(),
        types_in: Mapping[str, frozenset[str]] = NO_TYPES,
    ) -> Steps[None]:
        """Read a value; its JSON is added to the arguments as it arrives.

        Args:
            types: the JSON types that its schema admits; empty: any.
            types_in: the same for an object's members, by their keys.
        """
        first = yield from reading.skip_space()
        is_marked = yield from reading.literal(self.quote)
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
            key = key.strip().removeprefix(self.quote).removesuffix(self.quote)
        reading.add_arguments(f'"{in_string(key)}": ')
        return key

    def write(self, writer: GrammarWriter) -> str:
        call = writer.one_of(
            f"{quoted(f'call:{tool.name}{{')} {write_arguments(writer, tool, self._write_member, ',')} {quoted('}')}"
            for tool in writer.tools
        )
        return writer.finish_marked(self.begin, f"{call} {writer.marker(self.end)}", between="")

    def _write_member(self, writer: GrammarWriter, name: str, schema: Mapping[str, Any], tool: Tool) -> str:
        if not is_plain(schema, types_of(schema, tool.parameters)):
            return f'{name} ":" {writer.json(schema, tool)}'
        return f'{name} ":" {writer.marker(self.quote)} {writer.plain_value(schema, self.quote)}'


_GEMMA4 = _BareKeys("<|tool_call>", "<tool_call|>", '<|"|>', "<|tool_response>")
_FUNCTION_GEMMA = _BareKeys("<start_function_call>", "<end_function_call>", "<escape>", "<start_function_response>")
GEMMA4 = StepFormat("gemma4", _GEMMA4.read, _GEMMA4.write)
FUNCTION_GEMMA = StepFormat("function_gemma", _FUNCTION_GEMMA.read, _FUNCTION_GEMMA.write)
