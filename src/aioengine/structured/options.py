"""Whether a value may fit two options of a ``oneOf``: judged by types, constants, and a property that is a constant."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from aioengine.schemas.json_pointer import resolved
from aioengine.structured.json_schema import listed, mapped

MAX_STEPS = 5_000
"""Options and constants that are looked at for one document; what is left is not seen to be apart."""
MAX_LEVELS = 4
"""Options of options."""

KINDS: dict[str, tuple[str, ...]] = {"number": ("integer", "fraction")}
KINDS |= {name: (name,) for name in ("null", "boolean", "integer", "string", "array", "object")}
"""The types of JSON Schema by kinds; a value is of exactly one kind. A fraction is a number that is not whole."""

Node = dict[str, Any]


class OptionJudge:
    """Compares the options in one document.

    Args:
        root: the document, to which references lead.
    """

    def __init__(self, root: Node) -> None:
        self._root = root
        self._num_steps_left = MAX_STEPS

    def are_apart(self, options: list[Any], around: Node) -> bool:
        """Whether no value fits two of the options, where ``around`` holds, too; False where that is not seen."""
        leaves = [[_both(around, leaf) for leaf in self.leaves([option])] for option in options]
        objects = (leaf for option in leaves for leaf in option if leaf["properties"])
        first = next(objects, _both({}, {}))
        required = {name for name in first["required"] if isinstance(name, str)}
        tags = [None, *(name for name in first["properties"] if name in required)]
        return any(self._num_steps_left >= 0 and self._are_apart_by(leaves, tag) for tag in tags)

    def leaves(self, options: list[Any], depth: int = MAX_LEVELS) -> list[Node]:
        """Schemas without options; each value that fits one of the options fits one of them, and perhaps others do."""
        return [leaf for option in options for leaf in self._leaves(option, depth)]

    def _are_apart_by(self, leaves: list[list[Node]], tag: str | None) -> bool:
        """``tag``: a property by which objects are told apart; None: none."""
        seen: dict[str, set[str | None]] = {}
        for option in leaves:
            own = {label for leaf in option for label in self._labels(leaf, tag)}
            for kind, value in own:
                others = seen.get(kind)
                if others and (value is None or value in others or None in others):
                    return False
            for kind, value in own:
                seen.setdefault(kind, set()).add(value)
        return True

    def _leaves(self, schema: Any, depth: int) -> list[Node]:
        self._num_steps_left -= 1
        if self._num_steps_left < 0 or depth == 0:
            return [{}]
        if schema is False:
            return []
        node = resolved(schema, self._root)
        for part in listed(node, "allOf"):
            node = _both(node, resolved(part, self._root))
        options = listed(node, "anyOf") or listed(node, "oneOf")
        if not options:
            return [node]
        node = {keyword: value for keyword, value in node.items() if keyword not in ("anyOf", "oneOf")}
        return [_both(node, leaf) for leaf in self.leaves(options, depth - 1)]

    def _labels(self, leaf: Node, tag: str | None) -> Iterator[tuple[str, str | None]]:
        """The values that fit a leaf, as a kind and the spelling of a constant; None: any value of the kind."""
        constants = [leaf["const"]] if "const" in leaf else listed(leaf, "enum")
        self._num_steps_left -= len(constants)
        if constants and self._num_steps_left >= 0:
            yield from map(_label, constants)
            return
        names = leaf.get("type", list(KINDS))
        for name in names if isinstance(names, list) else [names]:
            for kind in KINDS.get(str(name), tuple(KINDS)):
                if kind == "object" and tag is not None and tag in listed(leaf, "required"):
                    for inner in self.leaves([leaf["properties"].get(tag)]):
                        yield from (("object", value) for _, value in self._labels(inner, None))
                else:
                    yield kind, None


def _both(first: Node, second: Node) -> Node:
    """A schema that admits all that fits both."""
    properties, required = {**mapped(first, "properties"), **mapped(second, "properties")}, listed(first, "required")
    return {**first, **second, "properties": properties, "required": [*required, *listed(second, "required")]}


def _label(value: Any) -> tuple[str, str | None]:
    match value:
        case None:
            return "null", None
        case bool():
            return "boolean", str(value)
        case str():
            return "string", json.dumps(value)
        case int() | float() if value == value // 1:
            return "integer", str(int(value))
        case int() | float():
            return "fraction", str(value)
    return ("array" if isinstance(value, list) else "object"), None
