"""Arguments that are not written as JSON: what a schema makes of their values, and their grammar."""

from __future__ import annotations

import ast
import contextlib
import json
import re
from collections.abc import Callable, Mapping
from typing import Any

from aioengine.tool_calls.calls import Tool
from aioengine.tool_calls.grammars import GrammarWriter, properties_of, quoted, required_of
from aioengine.tool_calls.json_scanner import is_json
from aioengine.tool_calls.reading import NotACall

_STRING = re.compile(r'"(?:[^"\\\n]|\\.)*"?' + r"|'(?:[^'\\\n]|\\.)*'?", re.DOTALL)
"""Also one that is not closed, which is no literal: a search from each quote would take the square of the time."""
MAX_LITERAL_CHARS = 2**16
"""Of a literal in Python's spelling, which is read on the event loop: 1 µs a character."""

_WORD = re.compile(r"[^\W\d]+")
_NAMES = frozenset(("True", "False", "None", "e", "E"))
_ESCAPE = re.compile(r"(\\[\\'\"abfnrtvuUx0-3\n])|\\")
"""A backslash that begins no escape stands for itself, and Python warns of it."""

_KIND_OF = {"{": "object", "[": "array", '"': "string", "t": "boolean", "f": "boolean", "n": "null"}
_WORDS = {"true": "true", "false": "false", "none": "null"}
_SHAPED = ("pattern", "format", "minLength", "maxLength")
"""What a schema may ask of a string; there the grammar has JSON strings, since llguidance knows how to hold those."""


def is_plain(schema: Mapping[str, Any], types: frozenset[str]) -> bool:
    return types == {"string"} and not any(key in schema for key in _SHAPED)


def in_string(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)[1:-1]


def as_json(text: str, types: frozenset[str]) -> str:
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
    return f'"{in_string(text)}"'


def json_of_literal(text: str) -> str:
    """JSON of a literal, in Python's spelling or JSON's.

    Raises:
        NotACall: it is neither, or has no form in JSON.
    """
    text = text.strip()
    if is_json(text):
        return text
    if len(text) > MAX_LITERAL_CHARS:
        raise NotACall
    # Other words would be names, and next to a number Python warns of some.
    if not _NAMES.issuperset(_WORD.findall(_STRING.sub("''", text))):
        raise NotACall
    try:
        value = ast.literal_eval(_ESCAPE.sub(lambda found: found[1] or r"\\", text))
        made = json.dumps(value, ensure_ascii=False, allow_nan=False)
        made.encode()  # half of a surrogate pair is no text
        return made
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        raise NotACall from None


def write_arguments(
    writer: GrammarWriter,
    tool: Tool,
    write_argument: Callable[[GrammarWriter, str, Mapping[str, Any], Tool], str],
    comma: str = "",
) -> str:
    """The grammar of all arguments that are declared, in their order; of any, of any value, where none is.

    Args:
        write_argument: the grammar of one, by its name's in Lark and its schema.
        comma: what parts two of them.
    """
    required, properties = required_of(tool), properties_of(tool)
    if not properties:
        if tool.parameters.get("additionalProperties", True) is False:
            return ""
        one = writer.rule(write_argument(writer, "/[A-Za-z_][A-Za-z0-9_]*/", {}, tool))
        return writer.rule(f"({one} ({quoted(comma)} {one})*)?")
    # What may follow another argument, from the last one to the first; beginnings are what may come first.
    following, beginnings = '""', ['""']
    for name, schema in reversed(properties.items()):
        one = writer.rule(f"{write_argument(writer, quoted(name), schema, tool)} {following}")
        beginnings = [one, *([] if name in required else beginnings)]
        is_required = name in required
        following = writer.rule(f"{quoted(comma)} {one}" + ("" if is_required else f" | {following}"))
    return writer.one_of(beginnings)
