"""The opposites of JSON schemas: what does not fit them, said without ``not``."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Callable, Iterable
from typing import Any

from aioengine.structured.json_schema import MAX_EXACT_INTEGER, is_number, listed
from aioengine.structured.schema_facts import (
    ALL_KINDS,
    ANNOTATIONS,
    KINDS,
    Applied,
    Node,
    Schema,
    all_of,
    any_of,
    kind_of,
    of_kinds,
    properties_of,
    spelled,
)

MAX_NEGATED = 16
"""Options of what does not fit a schema."""
MAX_NEGATED_CHARS = 100
"""Of a text that is excluded by a pattern."""


def negated(schema: Any, within: Applied) -> Schema | None:
    """What is no instance of the schema, of all that fits ``within``; None: it is not said here."""
    if not isinstance(schema, dict):
        return schema is False
    options = list[Schema]()
    for keyword, value in schema.items():
        if keyword in ANNOTATIONS:
            continue
        found = _NEGATIONS[keyword](value, schema, within) if keyword in _NEGATIONS else None
        if found is None:
            return None
        options += found
    return any_of(options) if len(options) <= MAX_NEGATED else None


_Negated = list[Schema] | None


def _not_of_type(value: Any, schema: Node, within: Applied) -> _Negated:
    names = value if isinstance(value, list) else [value]
    rest = of_kinds(within.kinds - {kind for name in names for kind in KINDS.get(str(name), ALL_KINDS)})
    return None if rest is None else [rest]


def _not_these(values: Any, schema: Node, within: Applied) -> _Negated:
    if not isinstance(values, list):
        return None
    excluded = {spelled(value) for value in values}
    if within.values is not None:
        return [these([value for value in within.values if value not in excluded])]
    found = {kind_of(value) for value in values}
    numbers = {value for value in values if kind_of(value) in KINDS["number"]}
    texts = {value for value in values if isinstance(value, str)}
    is_large = any(abs(number) > MAX_EXACT_INTEGER for number in numbers)
    if found & {"array", "object"} or is_large or any(len(text) > MAX_NEGATED_CHARS for text in texts):
        return None
    options = [of_kinds(within.kinds - found - (KINDS["number"] if numbers else set()))]
    if texts and "string" in within.kinds:
        options.append({"type": "string", "pattern": f"^{_other_texts(texts)}$"})
    if "boolean" in found & within.kinds:
        options += [{"const": flag} for flag in (True, False) if spelled(flag) not in excluded]
    if numbers and within.kinds & KINDS["number"]:
        name = "number" if "fraction" in within.kinds else "integer"
        ends = [None, *sorted(numbers), None]
        options += [_between(name, low, high) for low, high in itertools.pairwise(ends)]
    return None if options[0] is None else [option for option in options if option is not None]


def these(values: list[str]) -> Schema:
    return {"enum": [json.loads(value) for value in values]} if values else False


def _between(name: str, low: float | None, high: float | None) -> Node:
    limits = {"exclusiveMinimum": low, "exclusiveMaximum": high}
    return {"type": name, **{keyword: limit for keyword, limit in limits.items() if limit is not None}}


def _other_texts(texts: Iterable[str]) -> str:
    """A pattern of all texts but these."""
    tails: dict[str, list[str]] = {}
    for text in texts:
        tails.setdefault(text[:1], []).append(text[1:])
    is_ended = tails.pop("", None) is not None
    if not tails:
        return r"[\s\S]+"
    heads = {head: re.sub(r"[\\^$.|?*+()\[\]{}/&~-]", r"\\\g<0>", head) for head in sorted(tails)}
    options = [rf"[^{''.join(heads.values())}][\s\S]*", *(heads[head] + _other_texts(tails[head]) for head in heads)]
    return f"(?:{'|'.join(options)})" + ("" if is_ended else "?")


def _not_required(names: Any, schema: Node, within: Applied) -> _Negated:
    # Of a name with a schema beside it there is an option without it already.
    return [_lacking(name) for name in listed(schema, "required") if name not in properties_of(schema)]


def _lacking(name: str) -> Node:
    return {"type": "object", "properties": {name: False}}


def _not_of_properties(named: Any, schema: Node, within: Applied) -> _Negated:
    options = list[Schema]()
    for name, inner in properties_of(schema).items():
        other = negated(inner, within.of_property(name))
        if other is None:
            return None
        option = {"type": "object", "properties": {name: other}}
        if name in listed(schema, "required"):
            options.append(option)
        elif other is not False:
            options.append({**option, "required": [name]})
    return options


def _not_of_any(schemas: Any, schema: Node, within: Applied) -> _Negated:
    others = _not_of_all(schemas, schema, within)
    return None if others is None else [all_of(others)]


def _not_of_all(schemas: Any, schema: Node, within: Applied) -> _Negated:
    others = [negated(inner, within) for inner in schemas] if isinstance(schemas, list) else [None]
    return None if None in others else [other for other in others if other is not None]


def _not_limited(opposite: str, name: str, step: int) -> Callable[[Any, Node, Applied], _Negated]:
    """Of a limit, whose opposite is another one, so far away."""

    def opposite_of(value: Any, schema: Node, within: Applied) -> _Negated:
        if not is_number(value) or abs(value) > MAX_EXACT_INTEGER or (step and int(value) != value):
            return None
        return [] if step and value + step < 0 else [{"type": name, opposite: value + step}]

    return opposite_of


_NEGATIONS: dict[str, Callable[[Any, Node, Applied], _Negated]] = {
    "type": _not_of_type,
    "const": lambda value, schema, within: _not_these([value], schema, within),
    "enum": _not_these,
    "required": _not_required,
    "properties": _not_of_properties,
    "anyOf": _not_of_any,
    "allOf": _not_of_all,
    "not": lambda value, schema, within: None if negated(value, within) is None else [value],
    "minimum": _not_limited("exclusiveMaximum", "number", 0),
    "maximum": _not_limited("exclusiveMinimum", "number", 0),
    "exclusiveMinimum": _not_limited("maximum", "number", 0),
    "exclusiveMaximum": _not_limited("minimum", "number", 0),
    "minLength": _not_limited("maxLength", "string", -1),
    "maxLength": _not_limited("minLength", "string", 1),
    "minItems": _not_limited("maxItems", "array", -1),
    "maxItems": _not_limited("minItems", "array", 1),
}
