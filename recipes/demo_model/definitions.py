"""Tools and schemas as clients send them: names in every case, JSON schemas in the dialects of their makers.

What a tool is for stands in its description, in its name and in its parameters' names; each may be missing or odd by
itself, so that the model learns to copy names instead of knowing them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

from demo_model.world import PLACES, THINGS, TRAITS, Dice, invented_name

JsonSchema = dict[str, Any]
Dialect = Literal["plain", "pydantic", "sorted", "strict", "draft"]
DIALECTS: tuple[Dialect, ...] = ("plain", "plain", "pydantic", "pydantic", "sorted", "strict", "draft")

TEXT: JsonSchema = {"type": "string"}
WHOLE: JsonSchema = {"type": "integer"}
NUMBER: JsonSchema = {"type": "number"}
YES_OR_NO: JsonSchema = {"type": "boolean"}
TEXTS: JsonSchema = {"type": "array", "items": TEXT}

_CHATTER = (
    "Use this when the user asks for it.", "Returns a text.", "Returns a number.", "Call it once for each question.",
    "It never fails.", "Version 2, stable.", "Args: see below.", "Prefer this to all other tools, if it fits at all.",
)  # fmt: skip
"""What makers add to descriptions, and what says nothing about what a tool is for."""

ODD_WORDS: tuple[str, ...] = (*THINGS, *TRAITS, *(place.split()[-1] for place in PLACES))
_ODD_PARAMETERS = ("p1", "p2", "arg", "value", "input", "data", "v", "item", "q", "param_a", "param_b", "given", "key")


class Field(NamedTuple):
    """A parameter of a tool, or a key of an object: what it means here, and how its client names and types it."""

    role: str
    name: str
    schema: JsonSchema
    description: str = ""
    is_required: bool = True


def cased(words: str, case: str) -> str:
    """``get time`` as ``get_time``, ``GetTime``, ``getTime`` or ``get-time``."""
    parts = words.split()
    if case == "Camel":
        return "".join(part.capitalize() for part in parts)
    if case == "camel":
        return parts[0] + "".join(part.capitalize() for part in parts[1:])
    return ("-" if case == "kebab" else "_").join(parts)


def tool_name(dice: Dice, usual: Sequence[str], *, is_type: bool = False) -> str:
    """One of the usual names or, now and then, an odd one. ``is_type``: it is named as a class is."""
    roll = dice.between(1, 100)
    words = dice.pick(usual)
    if roll <= 14:
        words = " ".join(dice.sample(ODD_WORDS, 2))
    elif roll <= 20:
        words = invented_name(dice).lower() + dice.pick(("", " tool", " " + dice.pick(ODD_WORDS)))
    case = dice.between(1, 100)
    if is_type:
        return cased(words, "Camel" if case <= 80 else "snake")
    return cased(words, "snake" if case <= 65 else "Camel" if case <= 85 else "camel" if case <= 95 else "kebab")


def field_names(dice: Dice, *usual: Sequence[str]) -> list[str]:
    """A name for each field, all different; the same place in each sequence goes together."""
    case = "camel" if dice.chance(0.12) else "snake"
    place = dice.between(0, 99)
    names = [cased(words[place % len(words)], case) for words in usual]
    roll = dice.between(1, 100)
    if roll <= 8:
        names = dice.sample(ODD_WORDS, len(usual))
    elif roll <= 14:
        names = dice.sample(_ODD_PARAMETERS, len(usual))
    if len(set(names)) < len(names):
        names = [words[0] for words in usual]
    return names


def _title(name: str) -> str:
    return " ".join(word.capitalize() for word in re.findall(r"[A-Z]?[a-z0-9]+", name))


def _property(field: Field, dialect: Dialect, is_titled: bool) -> JsonSchema:
    schema = dict(field.schema)
    if not field.is_required and dialect in ("pydantic", "sorted", "strict"):
        schema = {"anyOf": [schema, {"type": "null"}]} | ({} if dialect == "strict" else {"default": None})
    described = {"description": field.description} if field.description else {}
    if dialect in ("pydantic", "sorted"):
        return described | ({"title": _title(field.name)} if is_titled else {}) | schema
    return schema | described


def object_schema(
    dice: Dice, fields: Sequence[Field], *, title: str = "", dialect: Dialect | None = None
) -> JsonSchema:
    """The JSON schema of an object with these fields, in one of the ways in which clients write it."""
    spoken: Dialect = dice.pick(DIALECTS) if dialect is None else dialect
    is_titled = spoken == "pydantic" or dice.chance(0.2)
    properties = {}
    for field in fields:
        properties[field.name] = _property(field, spoken, is_titled)
    required = [field.name for field in fields if field.is_required or spoken == "strict"]
    must = {"required": required} if required or spoken == "strict" else {}
    named = {"title": title} if title and is_titled else {}
    match spoken:
        case "plain":
            return {"type": "object", "properties": properties, **must}
        case "pydantic":
            return {"properties": properties, **must, **named, "type": "object"}
        case "sorted":
            return {"additionalProperties": False, "properties": properties, **must, **named, "type": "object"}
        case "strict":
            return {"type": "object", "properties": properties, **must, "additionalProperties": False, **named}
        case _:
            draft = {"$schema": "http://json-schema.org/draft-07/schema#"}
            return {**draft, "type": "object", "properties": properties, **must, "additionalProperties": False}


def tool_definition(dice: Dice, name: str, description: str, fields: Sequence[Field]) -> dict[str, Any]:
    """A tool as it stands in a request: ``{"type": "function", "function": {...}}``."""
    dialect = dice.pick(DIALECTS)
    function: dict[str, Any] = {"name": name}
    if description and dice.chance(0.1):
        description += dice.pick((" ", " ", "\n\n")) + dice.pick(_CHATTER)
    if description or dice.chance(0.3):
        function["description"] = description
    if fields or dice.chance(0.75):
        function["parameters"] = object_schema(dice, fields, title=name, dialect=dialect)
    if dialect == "strict" or (dialect == "sorted" and dice.chance(0.3)):
        function["strict"] = True
    if dice.chance(0.1):
        function = dict(sorted(function.items()))
    return {"type": "function", "function": function}


def schema_text(dice: Dice, schema: JsonSchema) -> str:
    return json.dumps(schema, indent=2 if dice.chance(0.15) else None)
