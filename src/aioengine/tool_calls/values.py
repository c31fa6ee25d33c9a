"""Values of arguments that are written as plain text, and what a schema makes of them."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping
from typing import Any

from aioengine.tool_calls.json_scanner import is_json
from aioengine.tool_calls.pythonic import json_of_literal
from aioengine.tool_calls.reading import NotACall

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
