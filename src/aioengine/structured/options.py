"""Options of schemas: whether they have a value in common, and how many combinations of them there are."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from typing import Any, NamedTuple

from aioengine.structured.json_schema import listed, referred, subschemas

MAX_LEVELS = 60
"""Schemas within each other, by references and keywords; deeper ones are not looked at."""
MAX_VALUES = 50_000
"""Size of all sets that are made for one document."""

KINDS = {name: frozenset({name}) for name in ("null", "boolean", "integer", "string", "array", "object")}
KINDS["number"] = frozenset({"integer", "fraction"})
"""The types of JSON Schema by kinds; a value is of exactly one kind. A fraction is a number that is not whole."""
ALL_KINDS = frozenset[str]().union(*KINDS.values())


class Facts(NamedTuple):
    """Facts that hold for all values of a schema.

    Attributes:
        kinds: the kinds of the values.
        values: the only ones, as `spelled`; None: any.
        tags: the only values of a property, by its name.
        required: names of properties that objects have.
    """

    kinds: frozenset[str] = ALL_KINDS
    values: frozenset[str] | None = None
    tags: dict[str, frozenset[str]] = {}  # noqa: RUF012
    required: frozenset[str] = frozenset()

    def also(self, other: Facts) -> Facts:
        """The facts of values that fit both schemas."""
        values = self.values if other.values is None else other.values
        return Facts(self.kinds & other.kinds, values, {**self.tags, **other.tags}, self.required | other.required)


ANYTHING = Facts()


def count_combinations(root: Any) -> float:
    """How many combinations of options llguidance intersects: of ``enum``, ``anyOf`` and ``oneOf`` that hold together.

    They do in one schema, and by ``allOf`` and ``$ref``. Each schema of the document is counted once.
    """
    counts: dict[int, float] = {}
    total = 0.0

    def options_of(node: Any, depth: int = 0) -> float:
        nonlocal total
        if not isinstance(node, dict) or depth > MAX_LEVELS:
            return 1
        if id(node) not in counts:
            counts[id(node)] = 1  # within itself
            factors: list[float] = [max(len(listed(node, "enum")), 1)]
            factors += [options_of(part, depth + 1) for part in listed(node, "allOf")]
            factors.append(options_of(referred(root, node.get("$ref")), depth + 1))
            for keyword in ("anyOf", "oneOf"):
                factors.append(sum(options_of(option, depth + 1) for option in listed(node, keyword)) or 1)
            counts[id(node)] = min(math.prod(factors), 1e9)
            total += counts[id(node)] if sum(factor > 1 for factor in factors) > 1 else 0
        return counts[id(node)]

    for node in subschemas(root):
        options_of(node)
    return total


class FactFinder:
    """Finds the facts of the schemas in one document. Each schema is looked at once."""

    def __init__(self, root: Any) -> None:
        self._root = root
        self._found: dict[int, Facts] = {}
        self._num_values_left = MAX_VALUES

    def of(self, schema: Any, depth: int = 0) -> Facts:
        """The facts of a schema in the document."""
        if not isinstance(schema, dict):
            return ANYTHING if schema is not False else Facts(kinds=frozenset())
        if id(schema) not in self._found:
            self._found[id(schema)] = ANYTHING  # within itself, and where no more is looked for
            if depth < MAX_LEVELS and self._num_values_left > 0:
                self._found[id(schema)] = self.look(schema, depth + 1)
        return self._found[id(schema)]

    def look(self, schema: dict[str, Any], depth: int = 0) -> Facts:
        """The facts of a schema that may be none of the document's, but whose parts are."""
        facts = ANYTHING
        if isinstance(schema.get("enum"), list):
            facts = facts.also(_of_values(schema["enum"]))
        if "const" in schema:
            facts = facts.also(_of_values([schema["const"]]))
        names = schema.get("type", list(KINDS))
        kinds = (KINDS.get(str(name), ALL_KINDS) for name in (names if isinstance(names, list) else [names]))
        required = frozenset(name for name in listed(schema, "required") if isinstance(name, str))
        properties = schema.get("properties")
        tags = {name: self.of(inner, depth).values for name, inner in _items(properties)}
        known = {name: values for name, values in tags.items() if values is not None}
        facts = facts.also(Facts(frozenset().union(*kinds), None, known, required))
        for part in (*listed(schema, "allOf"), referred(self._root, schema.get("$ref"))):
            facts = facts.also(self.of(part, depth))
        for keyword in ("anyOf", "oneOf"):
            if options := listed(schema, keyword):
                facts = facts.also(_of_any([self.of(option, depth) for option in options]))
        self._num_values_left -= len(facts.values or ()) + sum(map(len, facts.tags.values()))
        return facts

    def are_apart(self, options: list[Any], around: Facts) -> bool:
        """Whether no value is of two of these options, where ``around`` holds, too; False where that is not seen."""
        found = [around.also(self.of(option)) for option in options]
        return all(_differ_within(kind, found) for kind in around.kinds)


def _differ_within(kind: str, options: list[Facts]) -> bool:
    """Whether the values of one kind are of one of these options at most."""
    options = [facts for facts in options if kind in facts.kinds]
    if len(options) < 2 or _are_disjoint(facts.values for facts in options):
        return True
    if kind != "object":
        return False
    names = frozenset.intersection(*(facts.required.intersection(facts.tags) for facts in options))
    return any(_are_disjoint(facts.tags[name] for facts in options) for name in sorted(names))


def _are_disjoint(sets: Iterable[frozenset[str] | None]) -> bool:
    seen = set[str]()
    for values in sets:
        if values is None or not seen.isdisjoint(values):
            return False
        seen |= values
    return True


def _of_values(values: list[Any]) -> Facts:
    return Facts(frozenset(map(_kind_of, values)), frozenset(map(spelled, values)))


def _of_any(options: list[Facts]) -> Facts:
    """The facts of values that fit at least one of these schemas."""
    values = None
    if all(facts.values is not None for facts in options):
        values = frozenset[str]().union(*(facts.values or () for facts in options))
    objects = [facts for facts in options if "object" in facts.kinds] or [ANYTHING]
    names = frozenset.intersection(*(frozenset(facts.tags) for facts in objects))
    tags = {name: frozenset[str]().union(*(facts.tags[name] for facts in objects)) for name in names}
    required = frozenset.intersection(*(facts.required for facts in objects))
    return Facts(frozenset().union(*(facts.kinds for facts in options)), values, tags, required)


def _kind_of(value: Any) -> str:
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


def spelled(value: Any) -> str:
    """As JSON, in which equal values are alike."""
    return json.dumps(_plain(value), sort_keys=True)


def _plain(value: Any) -> Any:
    if isinstance(value, list):
        return [_plain(item) for item in value]
    if isinstance(value, dict):
        return {name: _plain(item) for name, item in value.items()}
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _items(value: Any) -> list[tuple[str, Any]]:
    return list(value.items()) if isinstance(value, dict) else []
