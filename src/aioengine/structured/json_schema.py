"""Finds JSON schemas that llguidance accepts but enforces wrongly, so that they are refused.

The library refuses most keywords that it does not know. For each keyword that it accepts and enforces wrongly, a test
has the smallest schema and a wrong text that it admits. The test fails when a new version enforces one.
"""

from __future__ import annotations

import bisect
import itertools
import math
import re
from collections.abc import Container, Iterator
from fractions import Fraction
from typing import Any

from aioengine.schemas.json_pointer import referred

MAPS = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
_BRANCHES = ("allOf", "anyOf", "oneOf")
LISTS = (*_BRANCHES, "prefixItems")
ONES = ("items", "additionalItems", "additionalProperties", "not", "if", "then", "else", "contains", "propertyNames")
NESTING = frozenset((*MAPS, *LISTS, *ONES))
_IN_PLACE = (*_BRANCHES, "$ref", "const", "enum")
BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")
_NUMERIC = frozenset((*BOUNDS, "multipleOf"))
_DRAFT_3 = {"divisibleBy": int | float, "disallow": str | list, "extends": dict | list, "required": bool}
_CHECKED = frozenset((
    *BOUNDS, *_DRAFT_3, "minProperties", "additionalItems", "const", "enum", "pattern", "patternProperties",
))  # fmt: skip

# Doubles hold each integer up to this one.
MAX_EXACT_INTEGER = 2**53
# The library computes products of multiples in 32 bits, and goes on with the low bits of a larger one.
_MAX_MULTIPLE = 2**32
# The product of so many different whole numbers is larger.
_MAX_MULTIPLES = 13

_UNWRITABLE = re.compile(r"[\x00-\x07\x0b\x0e-\x1f\x7f]")


def subschemas(schema: Any, keywords: Container[str] = NESTING) -> Iterator[dict[str, Any]]:
    """The schema and all that are mappings under these keywords in it. Constants and defaults are no schemas."""
    pending = [schema]
    while pending:
        node = pending.pop()
        if not isinstance(node, dict):
            continue
        yield node
        for keyword, value in node.items():
            if keyword not in keywords:
                continue
            if keyword in MAPS:
                pending.extend(value.values() if isinstance(value, dict) else ())
            else:
                pending.extend(value if isinstance(value, list) else [value])


def unsound_keywords(schema: Any) -> list[str]:
    """The keywords by which the library would admit wrong answers, as ``keyword: reason``; empty if there are none."""
    found: list[str] = []
    if isinstance(schema, dict) and "x-guidance" in schema:
        found.append("x-guidance: it changes how the grammar is made")
    nodes = list(subschemas(schema))
    checks = (_of_draft_3, _unsound_counts, _unsound_lists, _unsound_numbers, _unwritable_texts, _unsound_patterns)
    for node in nodes:
        if not _CHECKED.isdisjoint(node):
            found.extend(itertools.chain.from_iterable(check(node) for check in checks))
    found.extend(_unsound_places(nodes))
    for together in filter(None, _applied_together(nodes)):
        found.extend(_unsound_multiples(together))
        found.extend(_unsound_ranges(together))
    return list(dict.fromkeys(found))


def _of_draft_3(node: dict[str, Any]) -> Iterator[str]:
    for keyword, kind in _DRAFT_3.items():
        if isinstance(node.get(keyword), kind):
            yield f"{keyword}: it is draft 3's"


def _unsound_places(nodes: list[dict[str, Any]]) -> Iterator[str]:
    """Problems of references that lead to places which the other checks do not visit."""
    root, known = nodes[0] if nodes else {}, set(map(id, nodes))
    if any(isinstance(node.get(keyword), str) for node in nodes[1:] for keyword in ("$id", "id")):
        yield "$id: within a schema it changes what references mean"
    places = {node["$ref"]: referred(root, node["$ref"]) for node in nodes if isinstance(node.get("$ref"), str)}
    if any(isinstance(place, dict) and id(place) not in known for place in places.values()):
        yield "$ref: it leads to where no schema stands; put that under $defs"


def _unsound_counts(node: dict[str, Any]) -> Iterator[str]:
    least, required = node.get("minProperties", 0), {name for name in listed(node, "required") if isinstance(name, str)}
    # One further key cannot repeat a required one, but the second of two may repeat the first.
    if is_number(least) and least > len(required) + 1:
        yield "minProperties: a key that is written twice counts twice"


def _unsound_lists(node: dict[str, Any]) -> Iterator[str]:
    if "additionalItems" not in node:
        return
    if "prefixItems" in node:
        yield "additionalItems: prefixItems are dropped beside it"
    if isinstance(node.get("items"), list):
        keys = list(node)
        first, last = sorted((keys.index("items"), keys.index("additionalItems")))
        if any(key in _IN_PLACE for key in keys[first:last]):
            yield "additionalItems: it is dropped where allOf, anyOf, oneOf, $ref, const or enum part it from items"


def _unsound_numbers(node: dict[str, Any]) -> Iterator[str]:
    for keyword in BOUNDS:
        if isinstance(node.get(keyword), bool):
            yield f"{keyword}: true and false are of draft 4"
        elif _is_rounded(node.get(keyword)):
            yield f"{keyword}: numbers beyond 2**53 are rounded"
    for keyword in ("const", "enum"):
        if any(map(_is_rounded, _scalars(node.get(keyword)))):
            yield f"{keyword}: numbers beyond 2**53 are rounded"


def _unwritable_texts(node: dict[str, Any]) -> Iterator[str]:
    for keyword in ("const", "enum"):
        if any(isinstance(text, str) and _UNWRITABLE.search(text) for text in _scalars(node.get(keyword))):
            yield f"{keyword}: a control character is written with \\u, and texts here are not"


def _is_rounded(value: Any) -> bool:
    return is_number(value) and abs(value) > MAX_EXACT_INTEGER


def _scalars(value: Any) -> Iterator[Any]:
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list):
        for item in value:
            yield from _scalars(item)
    else:
        yield value


def _applied_together(nodes: list[dict[str, Any]]) -> Iterator[list[dict[str, Any]]]:
    """Groups of nodes that may apply to one value: each node with its branches; all nodes if there are references."""
    if any("$ref" in node for node in nodes):
        yield [node for node in nodes if not _NUMERIC.isdisjoint(node)]
        return
    branches = {id(part) for node in nodes for keyword in _BRANCHES for part in listed(node, keyword)}
    for node in nodes:
        if id(node) not in branches:  # a branch's problems are found with the whole
            yield [part for part in subschemas(node, _BRANCHES) if not _NUMERIC.isdisjoint(part)]


def _unsound_multiples(together: list[dict[str, Any]]) -> Iterator[str]:
    multiples = {part["multipleOf"] for part in together if is_number(part.get("multipleOf"))}
    exact = [Fraction(str(multiple)) for multiple in itertools.islice(multiples, _MAX_MULTIPLES)]
    scale = math.lcm(*(multiple.denominator for multiple in exact))
    if len(exact) > 1 and math.prod(multiple * scale for multiple in exact) >= _MAX_MULTIPLE:
        yield "multipleOf: several of one number whose product is not below 2**32"


def _unsound_ranges(together: list[dict[str, Any]]) -> Iterator[str]:
    """Problems of an excluded whole number whose opposite bound comes before the next whole number."""
    numbers = [part for part in together if part.get("type") != "integer"]
    bounds = {keyword: {part[keyword] for part in numbers if is_number(part.get(keyword))} for keyword in BOUNDS}
    for excluded, other in _next_above(bounds["exclusiveMinimum"], bounds["maximum"] | bounds["exclusiveMaximum"]):
        if excluded == int(excluded) and other < excluded + 1:
            yield "exclusiveMinimum: it is admitted where the maximum is less than one away"
    below = {-bound for bound in bounds["minimum"] | bounds["exclusiveMinimum"]}
    for excluded, other in _next_above({-bound for bound in bounds["exclusiveMaximum"]}, below):
        if excluded == int(excluded) and other < excluded + 1:
            yield "exclusiveMaximum: it is admitted where the minimum is less than one away"


def _next_above(numbers: set[Any], others: set[Any]) -> Iterator[tuple[Any, Any]]:
    """Each number with the smallest of the others above it, if there is one."""
    ranked = sorted(others)
    for number in numbers:
        if (index := bisect.bisect_right(ranked, number)) < len(ranked):
            yield number, ranked[index]


def is_number(value: Any) -> bool:
    """Whether it is a number of JSON."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def _unsound_patterns(node: dict[str, Any]) -> Iterator[str]:
    for pattern in (node.get("pattern"), *mapped(node, "patternProperties")):
        if not isinstance(pattern, str):
            continue
        if ends_in_backslash(pattern):
            yield "pattern: it ends in a backslash"
        for inside in re.findall(r"(?<!\\)(?:\\\\)*\[((?:\\.|[^\]\\])*)", pattern):
            if "[" in re.sub(r"\\.", "", inside):
                yield "pattern: [ within a class is a sign to JSON Schema, and a class of its own to the library"


def ends_in_backslash(pattern: str) -> bool:
    """Whether its last backslash escapes nothing; the library drops it."""
    return (len(pattern) - len(pattern.rstrip("\\"))) % 2 == 1


def mapped(node: dict[str, Any], keyword: str) -> dict[str, Any]:
    """The schemas that a keyword names; none where it is no mapping."""
    value = node.get(keyword)
    return value if isinstance(value, dict) else {}


def listed(node: dict[str, Any], keyword: str) -> list[Any]:
    """The items that a keyword lists; empty where it is no list."""
    value = node.get(keyword)
    return value if isinstance(value, list) else []
