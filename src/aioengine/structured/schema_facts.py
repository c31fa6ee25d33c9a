"""What is known of the values that fit a JSON schema: of which types they are, which values, which properties."""

from __future__ import annotations

import functools
import itertools
import json
from collections.abc import Iterable
from typing import Any

from aioengine.structured.json_schema import LISTS, MAPS, ONES, is_number, listed, referred, subschemas

Schema = dict[str, Any] | bool
Node = dict[str, Any]

MAX_OPTIONS = 400
"""That the rewritings of one schema write."""
MAX_COMPARISONS = 20_000
"""Of options of one schema with each other."""
MAX_PARTS = 32
"""That are looked through of those that apply to one value, by ``allOf`` and ``$ref``."""
MAX_DEEP = 3
"""Levels within options to which they are compared."""

ANNOTATIONS = frozenset(
    {"$comment", "default", "deprecated", "description", "examples", "readOnly", "title", "writeOnly"}
)


class Document:
    """The whole of a schema, and what is left of the limits of rewriting it.

    Attributes:
        is_draft_4: ``id`` is what ``$id`` is now.
        moved: references to places that are none of schemas, such as OpenAPI's, which become definitions.
    """

    def __init__(self, root: Node) -> None:
        self.is_draft_4 = "draft-04" in str(root.get("$schema"))
        self.moved: dict[str, None] = {}
        self._root = root
        identity = "id" if self.is_draft_4 else "$id"
        self._has_resources = any(isinstance(one.get(identity), str) for one in subschemas(root) if one is not root)
        self._num_options = MAX_OPTIONS
        self._num_comparisons = MAX_COMPARISONS

    def affords(self, num_options: int) -> bool:
        """Whether so many options may be written; they are counted."""
        if num_options > self._num_options:
            return False
        self._num_options -= num_options
        return True

    def compares(self) -> bool:
        """Whether one more comparison may be made; it is counted."""
        self._num_comparisons -= 1
        return self._num_comparisons >= 0

    def referred(self, reference: Any) -> Any:
        """What a reference leads to; None where that is not seen."""
        return referred(self._root, reference) if isinstance(reference, str) and not self._has_resources else None

    def moved_to(self, reference: str) -> str:
        """The same reference, or one to a definition, if it leads to where no schemas stand."""
        known = (*MAPS, *LISTS, *ONES)
        if not reference.startswith("#/") or reference.split("/")[1] in known or self.referred(reference) is None:
            return reference
        self.moved.setdefault(reference)
        return "#/$defs/" + reference.replace("~", "~0").replace("/", "~1")

    def applied(self, *schemas: Any) -> Applied:
        """The schemas with all that applies wherever they do: what they refer to, and their ``allOf``."""
        parts, pending = list[Node](), list(reversed(schemas))
        while pending and len(parts) < MAX_PARTS:
            part = pending.pop()
            if isinstance(part, dict) and not any(part is other for other in parts):
                parts.append(part)
                pending += [*reversed(listed(part, "allOf")), self.referred(part.get("$ref"))]
        return Applied(self, parts)


class Applied:
    """Schemas that apply to one value, and what is known of it by them."""

    def __init__(self, document: Document, parts: list[Node]) -> None:
        self.parts = parts
        self._document = document

    @functools.cached_property
    def values(self) -> list[str] | None:
        """The only ones that it can be, as `spelled`, each once; None: any."""
        given = [[spelled(part["const"])] for part in self.parts if "const" in part]
        given += [list(map(spelled, part["enum"])) for part in self.parts if isinstance(part.get("enum"), list)]
        common = set.intersection(*map(set, given)) if given else set()
        return [value for value in dict.fromkeys(given[0]) if value in common] if given else None

    @functools.cached_property
    def kinds(self) -> set[str]:
        """That it can be of."""
        kinds = set(ALL_KINDS)
        for part in self.parts:
            given = part.get("type", list(KINDS))
            names = given if isinstance(given, list) else [given]
            kinds &= {kind for name in names for kind in KINDS.get(str(name), ALL_KINDS)}
        return kinds if self.values is None else kinds & {kind_of(json.loads(value)) for value in self.values}

    @functools.cached_property
    def required(self) -> set[str]:
        """Properties that it has, if it is an object."""
        return {name for part in self.parts for name in listed(part, "required") if isinstance(name, str)}

    def of_property(self, name: str) -> Applied:
        """What applies to a property of it."""
        return self._document.applied(
            *(properties_of(part)[name] for part in self.parts if name in properties_of(part))
        )

    def forbids(self, name: str) -> bool:
        """Whether it is an object without the property, if it is one."""
        return any(
            properties_of(part).get(name) is False
            or (
                part.get("additionalProperties") is False and name not in properties_of(part) and not has_patterns(part)
            )
            for part in self.parts
        )

    def is_apart(self, other: Applied, depth: int = 0) -> bool:
        """Whether no value is of both; False where that is not seen."""
        if depth > MAX_DEEP or not self._document.compares():
            return False
        if self.values is not None and other.values is not None:
            return set(self.values).isdisjoint(other.values)
        if all(self._is_apart_as(kind, other, depth) for kind in self.kinds & other.kinds):
            return True
        return self._has_apart(other, depth) or other._has_apart(self, depth)

    def _has_apart(self, other: Applied, depth: int) -> bool:
        """Whether it is of one of several options, and each of them is apart."""
        choices = (listed(part, keyword) for part in self.parts for keyword in ("anyOf", "oneOf"))
        return any(
            all(self._document.applied(option).is_apart(other, depth + 1) for option in options)
            for options in choices
            if options
        )

    def _is_apart_as(self, kind: str, other: Applied, depth: int) -> bool:
        if kind == "object":
            if any(map(self.forbids, other.required)) or any(map(other.forbids, self.required)):
                return True
            shared = sorted(self.required & other.required)
            return any(self.of_property(name).is_apart(other.of_property(name), depth + 1) for name in shared)
        lows, highs = _LIMITS.get(kind, ((), ()))
        return self._is_beyond(other, lows, highs) or other._is_beyond(self, lows, highs)

    def _is_beyond(self, other: Applied, lows: Iterable[str], highs: Iterable[str]) -> bool:
        """Whether it begins where the other one has ended."""
        pairs = itertools.product(self._limits(lows), other._limits(highs))
        return any(low > high or (low == high and (outside or beyond)) for (low, outside), (high, beyond) in pairs)

    def _limits(self, keywords: Iterable[str]) -> list[tuple[float, bool]]:
        """With whether each excludes itself."""
        found = ((part.get(keyword), keyword.startswith("ex")) for part in self.parts for keyword in keywords)
        return [(float(limit), is_excluded) for limit, is_excluded in found if limit is not None and is_number(limit)]


_OF_NUMBERS = (("minimum", "exclusiveMinimum"), ("maximum", "exclusiveMaximum"))
_LIMITS = {
    "integer": _OF_NUMBERS,
    "fraction": _OF_NUMBERS,
    "string": (("minLength",), ("maxLength",)),
    "array": (("minItems",), ("maxItems",)),
}
"""Keywords that are lower and upper limits."""
KINDS = {name: {name} for name in ("null", "boolean", "integer", "string", "array", "object")}
KINDS["number"] = {"integer", "fraction"}
"""The types of JSON Schema by kinds, of which a value is of one: a fraction is a number that is not whole."""
ALL_KINDS = frozenset().union(*KINDS.values())


def kind_of(value: Any) -> str:
    match value:
        case None:
            return "null"
        case bool():
            return "boolean"
        case str():
            return "string"
        case list():
            return "array"
        case dict():
            return "object"
    return "integer" if isinstance(value, int) or value.is_integer() else "fraction"


def of_kinds(kinds: set[str]) -> Schema | None:
    """The schema of all values of these kinds; None: JSON Schema has no name for fractions alone."""
    if "fraction" in kinds and "integer" not in kinds:
        return None
    names = [name for name, of_name in KINDS.items() if of_name <= kinds]
    return {"type": [name for name in names if name != "integer" or "number" not in names]} if names else False


def all_but(kind: str) -> Schema:
    """The schema of all values that are not of a kind."""
    return of_kinds(set(ALL_KINDS) - {kind}) or False


def spelled(value: Any) -> str:
    """As JSON, in which equal values are alike."""
    return json.dumps(_plain(value), sort_keys=True)


def _plain(value: Any) -> Any:
    if isinstance(value, list):
        return [_plain(item) for item in value]
    if isinstance(value, dict):
        return {name: _plain(item) for name, item in value.items()}
    return int(value) if isinstance(value, float) and value.is_integer() else value


def mapped(part: Node, keyword: str) -> Node:
    named = part.get(keyword)
    return named if isinstance(named, dict) else {}


def properties_of(part: Node) -> Node:
    return mapped(part, "properties")


def has_patterns(part: Node) -> bool:
    return bool(part.get("patternProperties"))


def all_of(schemas: Iterable[Any]) -> Schema:
    parts = [schema for schema in schemas if schema is not True and schema != {}]
    if any(part is False for part in parts):
        return False
    return {"allOf": parts} if len(parts) > 1 else next(iter(parts), True)


def any_of(schemas: Iterable[Any]) -> Schema:
    options = [schema for schema in schemas if schema is not False]
    if any(option is True or option == {} for option in options):
        return True
    return {"anyOf": options} if len(options) > 1 else next(iter(options), False)
