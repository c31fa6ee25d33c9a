"""What the library would get wrong: each with the smallest schema that shows it, and a text that it admits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from structured.schema_sample.case import DRAFT_7


@dataclass(frozen=True)
class Unsound:
    """A schema that the library takes as it is, and a text that it admits though the schema does not.

    Attributes:
        keyword: the first word of what `unsound_keywords` says of it; empty where the schema is put right instead.
    """

    name: str
    keyword: str
    schema: Any
    wrong_text: str


UNSOUND: tuple[Unsound, ...] = (
    Unsound("keys written twice", "minProperties", {"type": "object", "minProperties": 2}, '{"a":1,"a":2}'),
    Unsound(
        "keys of a pattern written twice",
        "minProperties",
        {
            "type": "object",
            "patternProperties": {"^a": {"type": "null"}},
            "additionalProperties": False,
            "minProperties": 2,
        },
        '{"a":null,"a":null}',
    ),
    Unsound(
        "a key that is escaped",
        "",
        {"type": "object", "properties": {"a": {"type": "integer"}}},
        '{"\\u0061":"x"}',
    ),
    Unsound(
        "a key of a pattern that is escaped",
        "",
        {"type": "object", "patternProperties": {"^a": {"type": "integer"}}},
        '{"\\u0061":"x"}',
    ),
    Unsound(
        "prefixItems beside additionalItems",
        "additionalItems",
        {"type": "array", "prefixItems": [{"type": "integer"}], "additionalItems": False},
        '["x"]',
    ),
    Unsound(
        "items and additionalItems parted",
        "additionalItems",
        {
            "$schema": DRAFT_7,
            "items": [{"type": "integer"}],
            "anyOf": [{"type": "array"}],
            "additionalItems": False,
        },
        "[1,2]",
    ),
    Unsound(
        "a whole number that is excluded",
        "exclusiveMinimum",
        {"type": "number", "exclusiveMinimum": 0, "maximum": 0.5},
        "0",
    ),
    Unsound(
        "a whole number that is excluded from above, by another branch",
        "exclusiveMaximum",
        {"type": "number", "exclusiveMaximum": 0, "allOf": [{"exclusiveMinimum": -0.5}]},
        "-0",
    ),
    Unsound("a large constant", "const", {"const": 2**53 + 1}, str(2**53)),
    Unsound("a large constant in a list", "enum", {"enum": [[2**53 + 1]]}, f"[{2**53}]"),
    Unsound("a large bound", "minimum", {"type": "integer", "minimum": 2**53 + 1}, str(2**53)),
    Unsound(
        "multiples whose product is too large",
        "multipleOf",
        {"type": "integer", "allOf": [{"multipleOf": 65536}, {"multipleOf": 65537}]},
        "65536",
    ),
    Unsound("a day that is not", "", {"type": "string", "format": "date"}, '"2023-02-29"'),
    Unsound("the year zero", "", {"type": "string", "format": "date"}, '"0000-01-01"'),
    Unsound("a time of a day that is not", "", {"type": "string", "format": "date-time"}, '"2100-02-29T00:00:00Z"'),
    Unsound("a class in a class", "pattern", {"type": "string", "pattern": "^[a-c&&[^b]]$"}, '"a"'),
    Unsound("leniency", "x-guidance", {"x-guidance": {"lenient": True}, "not": {"type": "string"}}, '"a"'),
    Unsound(
        "separators", "x-guidance", {"x-guidance": {"item_separator": ";"}, "type": "array", "maxItems": 2}, "[1;2]"
    ),
)
