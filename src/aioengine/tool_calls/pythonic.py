"""The calls of Llama 3.2 and 4 where they are written like Python's.

    [get_weather(city="Paris", days=[1, 2]), get_time()]

They are the whole answer, or follow ``<|python_start|>``. Arguments are given by name; values are Python's literals,
or JSON's.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Mapping
from typing import Any

from aioengine.tool_calls.calls import Tool
from aioengine.tool_calls.grammars import GrammarWriter, StepFormat, properties_of, quoted, required_of, types_of
from aioengine.tool_calls.json_scanner import MAX_DEPTH, is_json
from aioengine.tool_calls.reading import MAX_KEYWORD_CHARS, Markers, NotACall, Reading, Steps

TAG, END_TAG = "<|python_start|>", "<|python_end|>"
_TAGS, _OPENING, _KEY_ENDS = Markers(TAG), Markers("("), Markers(*"=,()[]{}\"'")

_STRING = re.compile(r'"(?:[^"\\\n]|\\.)*"' + r"|'(?:[^'\\\n]|\\.)*'", re.DOTALL)
_WORD = re.compile(r"[^\W\d]+")
_WORDS = frozenset(("True", "False", "None", "e", "E"))
_ESCAPE = re.compile(r"(\\[\\'\"abfnrtvuUx0-3\n])|\\")
"""A backslash that begins no escape stands for itself, and Python warns of it."""

_PLAIN, _PLAIN_IN_STRING = re.compile(r"[^\"'()\[\]{},\\]+"), re.compile(r"[^\"'\\]+")
_CLOSER_OF = {"(": ")", "[": "]", "{": "}"}


def _read(reading: Reading) -> Steps[None]:
    if (yield from reading.skip_space()) == "[":
        yield from reading.attempt(_read_calls(reading), is_marked=False)
    while (yield from reading.show_until(_TAGS)):
        yield from reading.attempt(_read_calls(reading))


def _read_calls(reading: Reading) -> Steps[None]:
    yield from reading.skip_space()
    separator = "["
    while (yield from reading.literal(separator)):
        yield from reading.skip_space()
        name = yield from reading.read_until(_OPENING, longest=MAX_KEYWORD_CHARS)
        reading.begin_call(name.strip(), "{")
        yield from _read_arguments(reading)
        reading.end_call()
        yield from reading.close()
        separator = ","
    if separator == "[":
        raise NotACall
    yield from reading.close("]", END_TAG)


def _read_arguments(reading: Reading) -> Steps[None]:
    head = ""
    if (yield from reading.skip_space()) == ")":
        reading.take(reading.at + 1)
    else:
        end = ","
        while end == ",":
            key = (yield from reading.read_until(_KEY_ENDS, longest=MAX_KEYWORD_CHARS)).strip()
            if reading.marker != "=":
                raise NotACall
            text, end = yield from _read_value(reading)
            reading.add_arguments(f"{head}{json.dumps(key, ensure_ascii=False)}: {json_of_literal(text)}")
            head = ", "
    reading.add_arguments("}")


def _read_value(reading: Reading) -> Steps[tuple[str, str]]:
    """Take a value, and the comma or parenthesis after it; returns both."""
    parts: list[str] = []
    closers = [")"]
    quote = ""
    while char := (yield from reading.peek()):
        # Most of a text is plain, and taken at once.
        plain = (_PLAIN_IN_STRING if quote else _PLAIN).match(reading.text, reading.at)
        if plain:
            parts.append(reading.take(plain.end()))
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


def json_of_literal(text: str) -> str:
    """JSON of a literal, in Python's spelling or JSON's.

    Raises:
        NotACall: it is neither, or has no form in JSON.
    """
    text = text.strip()
    if is_json(text):
        return text
    # Other words would be names, and next to a number Python warns of some.
    if not _WORDS.issuperset(_WORD.findall(_STRING.sub("''", text))):
        raise NotACall
    try:
        value = ast.literal_eval(_ESCAPE.sub(lambda found: found[1] or r"\\", text))
        made = json.dumps(value, ensure_ascii=False, allow_nan=False)
        made.encode()  # half of a surrogate pair is no text
        return made
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        raise NotACall from None


def _write(writer: GrammarWriter) -> str:
    call = writer.one_of(f"{quoted(tool.name + '(')} {_arguments(writer, tool)} {quoted(')')}" for tool in writer.tools)
    calls = f"{quoted('[')} {writer.several(call, quoted(', '))} {quoted(']')}"
    return writer.finish_unmarked(TAG, calls, beginning="[")


def _arguments(writer: GrammarWriter, tool: Tool) -> str:
    """All that are declared, in their order; any, of any value, where none is."""
    required, properties = required_of(tool), properties_of(tool)
    if not properties:
        if tool.parameters.get("additionalProperties", True) is False:
            return ""
        one = writer.rule(f'/[A-Za-z_][A-Za-z0-9_]*/ "=" {writer.json({}, tool)}')
        return writer.rule(f'({one} (", " {one})*)?')
    # What may follow another argument, from the last one to the first; beginnings are what may come first.
    following, beginnings = '""', ['""']
    for name, schema in reversed(properties.items()):
        one = writer.rule(f"{quoted(f'{name}=')} {_value(writer, schema, tool)} {following}")
        beginnings = [one, *([] if name in required else beginnings)]
        following = writer.rule(f'", " {one}' if name in required else f'(", " {one}) | {following}')
    return writer.one_of(beginnings)


def _value(writer: GrammarWriter, schema: Mapping[str, Any], tool: Tool) -> str:
    return '("True" | "False")' if types_of(schema, tool.parameters) == {"boolean"} else writer.json(schema, tool)


PYTHONIC = StepFormat("pythonic", _read, _write, keeps_special_tokens=True)
