"""An upper bound on the bytes of an answer that may follow without a choice, from the constraint alone.

llguidance searches such text in one call, under the GIL: 3 µs a byte, and for ever where a terminal takes up the text
that the next one needs (``start: /a+/ "a"``). So the engine asks for it only where it is known to be short.
"""

from __future__ import annotations

import functools
import json
import math
import re
from typing import Any

from aioengine.schemas.json_pointer import referred
from aioengine.structured.constraints import Choice, Constraint, Either, Grammar, Json, Regex, StructuralTags, Tag
from aioengine.structured.json_schema import is_number, listed, mapped

MAX_FORCED_BYTES = 8 * 1024
"""All tokens of a constraint that may force more are sampled."""

MAX_SCHEMAS_DEEP = 100
"""The deepest nesting of schemas, by references and keywords."""

_OTHER_BYTES = 64
"""Bytes of a schema's text beside its keys, constants and patterns: numbers, formats, braces."""

_REPEAT = re.compile(r"(?<!\\)(?:\\\\)*([)}]?)\{\s*([0-9]+)\s*(?:,\s*[0-9]*\s*)?\}")
_OF_NUMBERS = frozenset("0123456789+-.eE")


def longest_forced(constraint: Constraint) -> float:
    """The most bytes that may follow without a choice; infinity where that is not known."""
    match constraint:
        case Json(schema):
            return longest_text(schema)
        case Regex(pattern):
            return longest_match(pattern)
        case Choice(options):
            return max(map(len, options))
        case StructuralTags(tags):
            return max(map(_longest_of_tag, tags))
        case Either(options):
            return max(map(longest_forced, options))
        case Grammar(is_forcing=True):
            return 0
    return math.inf


def _longest_of_tag(tag: Tag) -> float:
    # A number takes up digits that the tag's end begins with, and a pattern any text that it matches.
    if tag.pattern is not None or tag.end[:1] in _OF_NUMBERS:
        return math.inf
    return len(tag.begin) + longest_text(tag.schema) + len(tag.end)


def longest_match(pattern: str) -> float:
    """An upper bound on the shortest text of a regular expression. Each repetition of a group, or of a repetition,
    counts as if all were within each other."""
    found = [(kind, int(times[:9])) for kind, times in _REPEAT.findall(pattern)]
    single = max((times for kind, times in found if not kind), default=1)
    nested = math.prod(float(times) for kind, times in found if kind and times)
    return len(pattern) * max(single, 1) * nested


def longest_text(root: Any) -> float:
    """The bytes of all keys, constants and patterns in JSON of a schema, each as often as it must be repeated; infinity
    for a schema that refers to itself."""
    longest_minimum = 1.0
    pending = [root]
    while pending:  # of any nesting: a pattern and the length of its text may stand apart
        value = pending.pop()
        if isinstance(value, dict) and is_number(value.get("minLength")):
            longest_minimum = max(longest_minimum, value["minLength"])
        pending.extend(value.values() if isinstance(value, dict) else value if isinstance(value, list) else ())
    return _longest_of(root, root, {}, longest_minimum)


def _longest_of(node: Any, root: Any, known: dict[int, float], longest_minimum: float, depth: int = 0) -> float:
    if not isinstance(node, dict):
        return 0
    if id(node) in known:
        return known[id(node)]
    if depth > MAX_SCHEMAS_DEEP:
        return math.inf
    inside = functools.partial(_longest_of, root=root, known=known, longest_minimum=longest_minimum, depth=depth + 1)
    known[id(node)] = math.inf  # within itself
    others = inside(node.get("additionalProperties"))
    found = [_OTHER_BYTES, others, _longest_value(node), inside(node.get("propertyNames"))]
    found += [len(name) + inside(inner) for name, inner in mapped(node, "properties").items()]
    found += [longest_match(name) + inside(inner) for name, inner in mapped(node, "patternProperties").items()]
    found += [len(name) + others for name in listed(node, "required") if isinstance(name, str)]
    if isinstance(pattern := node.get("pattern"), str):
        found.append(longest_match(pattern) * longest_minimum)
    least: Any = node.get("minItems")
    found.append(inside(node.get("items")) * (max(least, 1) if is_number(least) else 1))
    found += map(inside, (*listed(node, "items"), *listed(node, "prefixItems"), node.get("additionalItems")))
    found += map(inside, (*listed(node, "allOf"), referred(root, node.get("$ref"))))
    for keyword in ("anyOf", "oneOf"):
        found.append(max(map(inside, listed(node, keyword)), default=0))
    known[id(node)] = sum(found)
    return known[id(node)]


def _longest_value(node: dict[str, Any]) -> int:
    values = [*listed(node, "enum"), *([node["const"]] if "const" in node else [])]
    return max((len(json.dumps(value, ensure_ascii=False)) for value in values), default=0)
