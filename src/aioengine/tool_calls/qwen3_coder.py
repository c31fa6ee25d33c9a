"""The calls of Qwen3-Coder, whose values are plain text that the tool's schema makes JSON of.

    <tool_call>
    <function=write_file>
    <parameter=path>
    notes.txt
    </parameter>
    <parameter=lines>
    ["one", "two"]
    </parameter>
    </function>
    </tool_call>

A model may leave ``<tool_call>`` away, and ``</parameter>`` and ``</function>``.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping
from typing import Any

from aioengine.tool_calls.calls import Tool
from aioengine.tool_calls.grammars import (
    GrammarWriter,
    StepFormat,
    choices_of,
    properties_of,
    quoted,
    required_of,
    types_of,
)
from aioengine.tool_calls.json_scanner import is_json
from aioengine.tool_calls.pythonic import json_of_literal
from aioengine.tool_calls.reading import MAX_KEYWORD_CHARS, Markers, NotACall, Reading, Steps

BEGIN, FUNCTION, PARAMETER = "<tool_call>", "<function=", "<parameter="
END_PARAMETER, END_FUNCTION, END = "</parameter>", "</function>", "</tool_call>"
NEXT_LINES = (f"\n{PARAMETER}", f"\n{END_FUNCTION}")
"""What ends a value whose own end is missing."""
_BEGINS, _NAME_ENDS = Markers(BEGIN, FUNCTION), Markers(">")
_VALUE_ENDS = Markers(f"\n{END_PARAMETER}", END_PARAMETER, *NEXT_LINES)

_KIND_OF = {"{": "object", "[": "array", '"': "string", "t": "boolean", "f": "boolean", "n": "null"}
_WORDS = {"true": "true", "false": "false", "none": "null"}
_SHAPED = ("pattern", "format", "minLength", "maxLength")
"""What a schema may ask of a string; there the grammar has JSON strings, since llguidance knows how to hold those."""


def _read(reading: Reading) -> Steps[None]:
    while marker := (yield from reading.show_until(_BEGINS)):
        yield from reading.attempt(_read_call(reading, marker))


def _read_call(reading: Reading, marker: str) -> Steps[None]:
    if marker == BEGIN:
        yield from reading.skip_space()
        yield from reading.expect(FUNCTION)
    name = yield from reading.read_until(_NAME_ENDS, longest=MAX_KEYWORD_CHARS)
    reading.begin_call(name, "{")
    tool = reading.tools[name]
    properties = properties_of(tool)
    separator = ""
    while True:
        yield from reading.skip_space()
        if (yield from reading.literal(END_FUNCTION)) or (yield from reading.literal(END)):
            break
        yield from reading.expect(PARAMETER)
        key = yield from reading.read_until(_NAME_ENDS, longest=MAX_KEYWORD_CHARS)
        yield from reading.literal("\n")
        head = f"{separator}{json.dumps(key, ensure_ascii=False)}: "
        yield from _read_value(reading, head, properties.get(key, {}), tool)
        separator = ", "
    reading.add_arguments("}")
    reading.end_call()
    yield from reading.close(END)


def _read_value(reading: Reading, head: str, schema: Mapping[str, Any], tool: Tool) -> Steps[None]:
    types = types_of(schema, tool.parameters)
    if types == {"string"} and not any(key in schema for key in _SHAPED):
        reading.add_arguments(f'{head}"')
        yield from reading.read_until(_VALUE_ENDS, give=lambda text: reading.add_arguments(_in_string(text)))
        reading.add_arguments('"')
    else:
        text = yield from reading.read_until(_VALUE_ENDS)
        reading.add_arguments(head + _as_json(text, types))
    if reading.marker in NEXT_LINES:
        reading.put_back()


def _in_string(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)[1:-1]


def _as_json(text: str, types: frozenset[str]) -> str:
    """JSON of a value that may be no string; what fits none of the types is a string, since JSON it must be."""
    stripped = text.strip()
    stripped = _WORDS.get(stripped.lower(), stripped)
    if stripped[:1] in ("[", "{"):
        with contextlib.suppress(NotACall):
            stripped = json_of_literal(stripped)
    if is_json(stripped):
        kind = _KIND_OF.get(stripped[0], "number")
        if not types or kind in types or (kind == "number" and "integer" in types):
            return stripped
    return f'"{_in_string(text)}"'


def _write(writer: GrammarWriter) -> str:
    newline = quoted("\n")
    call = writer.one_of(
        f"{quoted(f'{FUNCTION}{tool.name}>')} {newline} {_parameters(writer, tool)} {quoted(END_FUNCTION)} {newline}"
        for tool in writer.tools
    )
    return writer.finish_marked(BEGIN, f"{newline} {call} {writer.marker(END)}", FUNCTION, between=newline)


def _parameters(writer: GrammarWriter, tool: Tool) -> str:
    """All that are declared, in their order; any, of any value, where none is."""
    required = required_of(tool)
    properties = properties_of(tool)
    end = quoted(f"\n{END_PARAMETER}\n")
    if not properties:
        is_open = tool.parameters.get("additionalProperties", True) is not False
        any_value = f'{quoted(PARAMETER)} /[A-Za-z0-9_]+/ ">\\n" {writer.json({}, tool)} {end}'
        return f"({any_value})*" if is_open else ""
    parameters = []
    for name, schema in properties.items():
        value = writer.rule(f"{quoted(f'{PARAMETER}{name}>')} {quoted(chr(10))} {_value(writer, schema, tool, end)}")
        parameters.append(value if name in required else f"{value}?")
    return " ".join(parameters)


def _value(writer: GrammarWriter, schema: Mapping[str, Any], tool: Tool, end: str) -> str:
    if types_of(schema, tool.parameters) != {"string"} or any(key in schema for key in _SHAPED):
        return f"{writer.json(schema, tool)} {end}"
    if (choices := choices_of(schema)) is not None:
        return f"({' | '.join(quoted(choice) for choice in choices)}) {end}"
    return writer.rule(f"{writer.text_without(END_PARAMETER, *NEXT_LINES)} {end}", "[lazy]")


QWEN3_CODER = StepFormat("qwen3_coder", _read, _write, keeps_special_tokens=(BEGIN, END))
