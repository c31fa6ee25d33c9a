"""JSON schemas that llguidance takes and gets wrong: found, so that they are refused, or put right.

It refuses most keywords that it does not know. A test has the smallest schema for each that it takes and gets wrong,
with a text that it admits; when it has learnt one the test says so.
"""

from __future__ import annotations

import bisect
import itertools
import math
import re
from collections.abc import Container, Iterator
from fractions import Fraction
from typing import Any

_MAPS = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
_BRANCHES = ("allOf", "anyOf", "oneOf")
_LISTS = (*_BRANCHES, "prefixItems")
_ONES = ("items", "additionalItems", "additionalProperties", "not", "if", "then", "else", "contains", "propertyNames")
_NESTING = frozenset((*_MAPS, *_LISTS, *_ONES))
_IN_PLACE = (*_BRANCHES, "$ref", "const", "enum")
_BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")
_NUMERIC = frozenset((*_BOUNDS, "multipleOf"))
_COUNTED = frozenset((*_BRANCHES, "$ref", "pattern"))
_CHECKED = frozenset((*_BOUNDS, "minProperties", "additionalItems", "const", "enum", "pattern", "patternProperties"))

# Doubles hold each integer up to this one.
_MAX_EXACT_INTEGER = 2**53
# The library reckons multiples in 32 bits, and goes on with what is left of a larger product.
_MAX_MULTIPLE = 2**32
# The product of so many different whole numbers is larger.
_MAX_MULTIPLES = 13

_YEAR = r"(?:[0-9]{3}[1-9]|[0-9]{2}[1-9]0|[0-9][1-9]00|[1-9]000)"
_LEAP_YEAR = r"(?:[0-9]{2}(?:0[48]|[2468][048]|[13579][26])|(?:0[48]|[2468][048]|[13579][26])00)"
_DAY_OF_ANY_YEAR = (
    r"(?:(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])|(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)"
    r"|02-(?:0[1-9]|1[0-9]|2[0-8]))"
)
_DATE = rf"(?:{_YEAR}-{_DAY_OF_ANY_YEAR}|{_LEAP_YEAR}-02-29)"
# No leap seconds, and capital letters: what parsers of times commonly read.
_TIME = r"(?:[01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](?:\.[0-9]{1,6})?(?:Z|[+-](?:[01][0-9]|2[0-3]):[0-5][0-9])"
_BASE64 = r"^(?:[A-Za-z0-9+/]{4})*(?:[A-Za-z0-9+/]{2}==|[A-Za-z0-9+/]{3}=)?$"
_UNWRITABLE = re.compile(r"[\x00-\x07\x0b\x0e-\x1f\x7f]")
MAX_PATTERNS = 4
MAX_SCHEMAS_DEEP = 100
"""That a text must fit by ``allOf``, ``anyOf``, ``oneOf`` and ``$ref`` within each other."""
_LABEL = r"[A-Za-z0-9](?:[A-Za-z0-9-]{0,61}[A-Za-z0-9])?"
_MAX_HOSTNAME_CHARS = 253
EXACT_FORMATS = {
    "date": f"^{_DATE}$",
    "time": f"^{_TIME}$",
    "date-time": f"^{_DATE}T{_TIME}$",
    "hostname": rf"^{_LABEL}(?:\.{_LABEL})*$",
}


def subschemas(schema: Any, keywords: Container[str] = _NESTING) -> Iterator[dict[str, Any]]:
    """The schema and all in it, under these keywords, that are mappings. Constants and defaults are no schemas."""
    pending = [schema]
    while pending:
        node = pending.pop()
        if not isinstance(node, dict):
            continue
        yield node
        for keyword, value in node.items():
            if keyword not in keywords:
                continue
            if keyword in _MAPS:
                pending.extend(value.values() if isinstance(value, dict) else ())
            else:
                pending.extend(value if isinstance(value, list) else [value])


def unsound_keywords(schema: Any) -> list[str]:
    """What in the schema would make the library admit wrong answers, as ``keyword: reason``; empty if nothing would."""
    found: list[str] = []
    if isinstance(schema, dict) and "x-guidance" in schema:
        found.append("x-guidance: it changes how the grammar is made")
    nodes = list(subschemas(schema))
    for node in nodes:
        if _CHECKED.isdisjoint(node):
            continue
        found.extend(_unsound_counts(node))
        found.extend(_unsound_lists(node))
        found.extend(_unsound_numbers(node))
        found.extend(_unwritable_texts(node))
        found.extend(_unsound_patterns(node))
    found.extend(_endless_patterns(nodes))
    for together in filter(None, _applied_together(nodes)):
        found.extend(_unsound_multiples(together))
        found.extend(_unsound_ranges(together))
    return list(dict.fromkeys(found))


def _unsound_counts(node: dict[str, Any]) -> Iterator[str]:
    least, required = (
        node.get("minProperties", 0),
        {name for name in _listed(node, "required") if isinstance(name, str)},
    )
    # One key beside the required ones cannot be one of them; of two, the second may repeat the first.
    if _is_number(least) and least > len(required) + 1:
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
    for keyword in _BOUNDS:
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
    return _is_number(value) and abs(value) > _MAX_EXACT_INTEGER


def _scalars(value: Any) -> Iterator[Any]:
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list):
        for item in value:
            yield from _scalars(item)
    else:
        yield value


def _applied_together(nodes: list[dict[str, Any]]) -> Iterator[list[dict[str, Any]]]:
    """The nodes that may be held against one value: each with its branches; all of them where there are references."""
    if any("$ref" in node for node in nodes):
        yield [node for node in nodes if not _NUMERIC.isdisjoint(node)]
        return
    branches = {id(part) for node in nodes for keyword in _BRANCHES for part in _listed(node, keyword)}
    for node in nodes:
        if id(node) not in branches:  # what is unsound of a branch is so of the whole
            yield [part for part in subschemas(node, _BRANCHES) if not _NUMERIC.isdisjoint(part)]


def _unsound_multiples(together: list[dict[str, Any]]) -> Iterator[str]:
    multiples = {part["multipleOf"] for part in together if _is_number(part.get("multipleOf"))}
    exact = [Fraction(str(multiple)) for multiple in itertools.islice(multiples, _MAX_MULTIPLES)]
    scale = math.lcm(*(multiple.denominator for multiple in exact))
    if len(exact) > 1 and math.prod(multiple * scale for multiple in exact) >= _MAX_MULTIPLE:
        yield "multipleOf: several of one number whose product is not below 2**32"


def _unsound_ranges(together: list[dict[str, Any]]) -> Iterator[str]:
    """Of a whole number that is excluded, where the other bound comes before the next whole number."""
    numbers = [part for part in together if part.get("type") != "integer"]
    bounds = {keyword: {part[keyword] for part in numbers if _is_number(part.get(keyword))} for keyword in _BOUNDS}
    for excluded, other in _next_above(bounds["exclusiveMinimum"], bounds["maximum"] | bounds["exclusiveMaximum"]):
        if excluded == int(excluded) and other < excluded + 1:
            yield "exclusiveMinimum: it is admitted where the maximum is less than one away"
    below = {-bound for bound in bounds["minimum"] | bounds["exclusiveMinimum"]}
    for excluded, other in _next_above({-bound for bound in bounds["exclusiveMaximum"]}, below):
        if excluded == int(excluded) and other < excluded + 1:
            yield "exclusiveMaximum: it is admitted where the minimum is less than one away"


def _next_above(numbers: set[Any], others: set[Any]) -> Iterator[tuple[Any, Any]]:
    """Of each number the next of the others that is above it, if there is one."""
    ranked = sorted(others)
    for number in numbers:
        if (index := bisect.bisect_right(ranked, number)) < len(ranked):
            yield number, ranked[index]


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _unsound_patterns(node: dict[str, Any]) -> Iterator[str]:
    named = node.get("patternProperties")
    for pattern in (node.get("pattern"), *(named if isinstance(named, dict) else ())):
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


def _endless_patterns(nodes: list[dict[str, Any]]) -> Iterator[str]:
    """Of texts that fit several patterns at once the library looks for one through all that their states can be."""
    root = nodes[0] if nodes else {}
    counted: dict[int, tuple[int, int]] = {}
    """By the id of a schema."""

    def count(node: Any, depth: int = 0) -> tuple[int, int]:
        """How many patterns one text of the schema must fit, and how deep its schemas are; 0 within itself."""
        if not isinstance(node, dict) or _COUNTED.isdisjoint(node):
            return 0, 0
        if id(node) in counted:
            return counted[id(node)]
        if depth > MAX_SCHEMAS_DEEP:
            return 0, MAX_SCHEMAS_DEEP
        counted[id(node)] = 0, 0
        parts = [count(part, depth + 1) for part in _listed(node, "allOf")]
        for keyword in ("anyOf", "oneOf"):
            options = [count(option, depth + 1) for option in _listed(node, keyword)]
            parts.append((max((number for number, _ in options), default=0), max((h for _, h in options), default=0)))
        if isinstance(reference := node.get("$ref"), str):
            parts.append(count(_referred(root, reference), depth + 1))
        number = sum(number for number, _ in parts) + isinstance(node.get("pattern"), str)
        counted[id(node)] = number, 1 + max(height for _, height in parts)
        return counted[id(node)]

    counts = (count(node) for node in nodes if "allOf" in node or "$ref" in node)
    if any(number > MAX_PATTERNS or height > MAX_SCHEMAS_DEEP for number, height in counts):
        yield f"allOf: more than {MAX_PATTERNS} patterns of one text, or {MAX_SCHEMAS_DEEP} schemas for one another"


def _listed(node: dict[str, Any], keyword: str) -> list[Any]:
    value = node.get(keyword)
    return value if isinstance(value, list) else []


def _referred(root: Any, reference: str) -> Any:
    """What a ``#/…`` leads to; None where there is nothing."""
    found = root
    for part in reference.removeprefix("#").split("/")[1:]:
        found = found.get(part.replace("~1", "/").replace("~0", "~")) if isinstance(found, dict) else None
    return found


def normalized(schema: Any) -> dict[str, Any]:
    """The schema as the library reads it best: the same texts fit it, but for dates and hostnames that cannot be.

    The formats ``date``, ``time``, ``date-time`` and ``hostname`` become patterns, as does ``contentEncoding``
    "base64". A ``oneOf`` of references gets a sibling that says nothing: the library then looks into the definitions,
    and may find that no two of them have a text in common.
    """
    if isinstance(schema, bool):
        return {} if schema else {"enum": []}
    better: dict[str, Any] = _normalized(schema)
    return better


def _normalized(schema: Any) -> Any:
    if not isinstance(schema, dict):
        return schema
    better: dict[str, Any] = {}
    for keyword, value in schema.items():
        if keyword == "uniqueItems" and value is False:
            continue
        if keyword in _MAPS and isinstance(value, dict):
            better[keyword] = {name: _normalized(inner) for name, inner in value.items()}
        elif keyword in (*_LISTS, *_ONES):
            better[keyword] = [_normalized(inner) for inner in value] if isinstance(value, list) else _normalized(value)
        else:
            better[keyword] = value
    pattern = EXACT_FORMATS.get(str(better.get("format")))
    if pattern is not None:
        longest = better.get("maxLength", _MAX_HOSTNAME_CHARS)
        if better.pop("format") == "hostname" and _is_number(longest):
            better["maxLength"] = min(longest, _MAX_HOSTNAME_CHARS)
    elif better.get("contentEncoding") == "base64":
        pattern = _BASE64
    if pattern is not None:
        if "pattern" not in better:
            better["pattern"] = pattern
        elif isinstance(patterns := better.get("allOf", []), list):
            better["allOf"] = [*patterns, {"pattern": pattern}]
    if any("$ref" in option for option in _listed(better, "oneOf") if isinstance(option, dict)):
        better["discriminator"] = {}
    return better
