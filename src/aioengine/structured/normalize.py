"""JSON schemas said in the keywords that llguidance enforces, so that the same instances fit.

`normalized` goes from the root down: each of `REWRITINGS` in turn changes a schema in place, then its parts follow. One
that cannot be exact leaves its keyword where it is, which is refused by its name then. What a rewriting looks up
(`Document`) and how many options all of them write together is bounded, so that a schema does not grow beyond that.
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple
from urllib.parse import quote

from aioengine.structured.formats import BASE64, FORMATS, FORMATS_BY_OTHER_NAMES, FORMATS_LEFT, MAX_HOSTNAME_CHARS
from aioengine.structured.json_schema import (
    BOUNDS,
    LISTS,
    MAPS,
    MAX_EXACT_INTEGER,
    ONES,
    is_number,
    listed,
    referred,
)
from aioengine.structured.negation import negated, these
from aioengine.structured.schema_facts import (
    ANNOTATIONS,
    MAX_PARTS,
    Applied,
    Document,
    Node,
    Schema,
    all_but,
    all_of,
    any_of,
    has_patterns,
    kind_of,
    mapped,
    properties_of,
)

MAX_COMPARED = 16
"""Options of which each is compared with each other one; of more only a property by which all differ is looked for."""
MAX_OVERLAPPING = 4
"""Options of a ``oneOf`` that have values in common."""
MAX_CHOICES = 20
"""Of the properties of an object, or of orders of items."""
MAX_DEPENDENCIES = 6
"""Of one object: the library multiplies them out."""
MAX_UNIQUE_VALUES = 3

_SIZES = ("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties")
_CONDITION = frozenset({"if", "then", "else"})
_UNFORESEEN = frozenset(
    {"anyOf", "oneOf", "if", "contains", "dependentSchemas", "dependencies", "$dynamicRef", "$recursiveRef"}
)
"""Keywords that evaluate a property or an item only where they hold."""
_OF_ITEMS = frozenset({"items", "prefixItems", "additionalItems", "unevaluatedItems"})


def normalized(schema: Any) -> Node:
    """The schema as the library reads it best: the same instances fit it, but for these, of which fewer do.

    Dates, times and hostnames that cannot be; numbers beyond 2**53 where there is a bound beyond that; objects without
    the property that a ``discriminator`` names; texts that are no base64, UUID or address, where ``format`` or
    ``contentEncoding`` say so by a name that is not JSON Schema's. Of a draft before 2019-09, in which what stands
    beside a ``$ref`` says nothing, fewer fit, or within ``oneOf``, ``not`` and ``if`` others.
    """
    if not isinstance(schema, dict):
        return {} if schema is True else {"enum": []}
    document = Document(schema)
    better = _normalized(schema, document)
    if not isinstance(better, dict):
        return {"enum": []}
    definitions: Node = {}
    while len(definitions) < len(document.moved):  # each of them may refer to more
        for reference in [one for one in document.moved if one not in definitions]:
            definitions[reference] = _normalized(referred(schema, reference), document)
    if definitions:
        better["$defs"] = {**better.get("$defs", {}), **definitions}
    return better


def _normalized(schema: Any, document: Document) -> Any:
    if not isinstance(schema, dict):
        return schema
    if not _is_well_formed(schema):
        return {keyword: value for keyword, value in schema.items() if keyword != "$schema"}
    node = dict(schema)
    for rewrite in REWRITINGS:
        rewrite(node, document)
    if any(part is False for part in listed(node, "allOf")):
        return False
    for keyword, value in node.items():
        if keyword in MAPS and isinstance(value, dict):
            node[keyword] = {name: _normalized(inner, document) for name, inner in value.items()}
        elif keyword in (*LISTS, *ONES) and isinstance(value, list):
            node[keyword] = [_normalized(inner, document) for inner in value]
        elif keyword in (*LISTS, *ONES):
            node[keyword] = _normalized(value, document)
    return node


def _add(node: Node, schema: Schema) -> None:
    """Let a node say another schema beside its own."""
    if isinstance(schema, dict) and schema.keys() == {"anyOf"} and "anyOf" not in node:
        node["anyOf"] = schema["anyOf"]
    elif schema is not True:
        node["allOf"] = [*listed(node, "allOf"), schema]


def _is_well_formed(schema: Node) -> bool:
    """Whether it lists and names schemas; the library says what is wrong with one that does not."""
    return all(isinstance(schema.get(keyword, {}), dict) for keyword in MAPS) and all(
        isinstance(schema.get(keyword, []), list) for keyword in LISTS
    )


# The rewritings


def _older_spellings(node: Node, document: Document) -> None:
    """Those of the drafts 4 to 2019-09, by their names of 2020-12, which all keywords are of."""
    if document.is_draft_4 and isinstance(node.get("id"), str) and "$schema" not in node:
        node["$id"] = node.pop("id")
    node.pop("$schema", None)
    if isinstance(identity := node.get("$id"), str) and identity[:1] == "#" and identity[1:]:
        node["$anchor"] = node.pop("$id")[1:]
    if isinstance(reference := node.get("$ref"), str):
        place, sign, fragment = document.moved_to(reference).partition("#")
        node["$ref"] = place + sign + quote(fragment, safe="%/?:@!$&'()*+,;=~-._")
    for excluding, bound in (("exclusiveMinimum", "minimum"), ("exclusiveMaximum", "maximum")):
        if isinstance(node.get(excluding), bool) and node.pop(excluding) and bound in node:
            node[excluding] = node.pop(bound)
    if node.get("required") is False:
        del node["required"]
    dependencies = node.get("dependencies")
    if isinstance(dependencies, dict) and all(
        isinstance(needed, list | dict | bool) for needed in dependencies.values()
    ):
        del node["dependencies"]
        for name, needed in dependencies.items():
            keyword = "dependentRequired" if isinstance(needed, list) else "dependentSchemas"
            node[keyword] = {name: needed, **node.get(keyword, {})}


def _unevaluated(node: Node, document: Document) -> None:
    """``unevaluatedProperties`` and ``unevaluatedItems``, where what is evaluated is known beforehand."""
    if not node.keys() & {"unevaluatedProperties", "unevaluatedItems"}:
        return
    parts = document.applied(node).parts
    is_lost = any("$ref" in part and document.referred(part["$ref"]) is None for part in parts)
    if is_lost or len(parts) >= MAX_PARTS or any(_UNFORESEEN & part.keys() for part in parts):
        return
    others = parts[1:]
    if "unevaluatedProperties" in node:
        if "additionalProperties" in node or any(_EVALUATE_ALL & part.keys() for part in others):
            del node["unevaluatedProperties"]
        else:
            for keyword in ("properties", "patternProperties"):
                named = {name: True for part in others for name in mapped(part, keyword)}
                node |= {keyword: {**mapped(node, keyword), **named, **mapped(node, keyword)}} if named else {}
            node["additionalProperties"] = node.pop("unevaluatedProperties")
    if "unevaluatedItems" in node and not any(_OF_ITEMS & part.keys() for part in others):
        is_tuple = isinstance(node.get("items"), list)
        node.setdefault("additionalItems" if is_tuple else "items", node.pop("unevaluatedItems"))


_EVALUATE_ALL = frozenset({"additionalProperties", "unevaluatedProperties"})


def _without_meaning(node: Node, document: Document) -> None:
    """What says nothing where it stands."""
    if "if" not in node or not node.keys() & {"then", "else"}:
        _remove(node, _CONDITION)
    if "contains" not in node or (node.get("minContains") == 0 and "maxContains" not in node):
        _remove(node, ("contains", "minContains", "maxContains"))
    if node.get("uniqueItems") is False:
        del node["uniqueItems"]
    if "propertyNames" in node and node["propertyNames"] in (True, {}, {"type": "string"}):
        del node["propertyNames"]


def _remove(node: Node, keywords: Iterable[str]) -> None:
    for keyword in keywords:
        node.pop(keyword, None)


def _numbers(node: Node, document: Document) -> None:
    """Bounds that doubles hold, where what is admitted lies within them; sizes without a point."""
    for keyword, sign in zip(BOUNDS, (-1, 1, -1, 1), strict=True):
        if (value := node.get(keyword)) is not None and is_number(value) and value * sign > MAX_EXACT_INTEGER:
            del node[keyword]
            node.setdefault(keyword.replace("exclusiveM", "m"), sign * MAX_EXACT_INTEGER)
    for keyword in _SIZES:
        if isinstance(size := node.get(keyword), float) and size.is_integer():
            node[keyword] = int(size)


def _formats(node: Node, document: Document) -> None:
    """Formats as patterns, and without those that are annotations."""
    name = node.get("format")
    if isinstance(name, str):
        name = FORMATS_BY_OTHER_NAMES.get(name, name)
        node["format"] = name
        if name not in FORMATS_LEFT:
            del node["format"]
    pattern = FORMATS.get(str(name))
    if name == "ipvanyaddress":
        _add(node, {"anyOf": [{"format": "ipv4"}, {"format": "ipv6"}]})
    elif name == "hostname" and is_number(longest := node.get("maxLength", MAX_HOSTNAME_CHARS)):
        node["maxLength"] = min(longest, MAX_HOSTNAME_CHARS)
    if pattern is None and node.get("contentEncoding") == "base64":
        pattern = BASE64
    if pattern is not None and "pattern" in node:
        _add(node, {"pattern": pattern})
    elif pattern is not None:
        node["pattern"] = pattern


def _property_names(node: Node, document: Document) -> None:
    """``propertyNames``, as the properties themselves, or as a pattern of theirs."""
    if "propertyNames" not in node or "patternProperties" in node:
        return
    named, others = properties_of(node), node.get("additionalProperties", True)
    names = document.applied(node["propertyNames"])
    is_listed = all(part.keys() <= {"const", "enum", "type", "$ref"} | ANNOTATIONS for part in names.parts)
    values = [] if node["propertyNames"] is False else names.values
    if values is not None and is_listed:
        texts = [text for text in map(json.loads, values) if isinstance(text, str)]
        order = [*(name for name in named if name in texts), *(text for text in texts if text not in named)]
        node["properties"] = {name: named.get(name, others) for name in order}
    elif not named and (pattern := _pattern_of(node["propertyNames"], document)):
        node["patternProperties"] = {pattern: others}
    else:
        return
    node["additionalProperties"] = False
    del node["propertyNames"]


def _pattern_of(schema: Any, document: Document) -> str | None:
    """A pattern of just the texts that the schema admits, where it says so without schemas within it."""
    if not isinstance(schema, dict) or not schema.keys().isdisjoint((*MAPS, *LISTS, *ONES, "$ref")):
        return None
    better = _normalized(schema, document)
    limits = {key: value for key, value in better.items() if key not in ANNOTATIONS} if isinstance(better, dict) else {}
    if limits.pop("type", "string") != "string":
        return None
    if limits.keys() == {"pattern"}:
        return str(limits["pattern"])
    if limits and limits.keys() <= {"minLength", "maxLength"}:
        return rf"^[\s\S]{{{limits.get('minLength', 0)},{limits.get('maxLength', '')}}}$"
    return None


def _number_of_properties(node: Node, document: Document) -> None:
    """``minProperties`` of an object that has few optional ones: each choice of so many."""
    least = node.get("minProperties")
    if node.get("additionalProperties") is not False or has_patterns(node) or not isinstance(least, int):
        return
    required = set(listed(node, "required"))
    optional = [name for name in properties_of(node) if name not in required]
    missing = least - len(required)
    if missing > 1 and (number := math.comb(len(optional), missing)) <= MAX_CHOICES and document.affords(number):
        del node["minProperties"]
        choices = [{"required": list(names)} for names in itertools.combinations(optional, missing)]
        _add(node, any_of(choices) or all_but("object"))


def _unique_items(node: Node, document: Document) -> None:
    """``uniqueItems`` of one item, of items that cannot be equal, or of few values: each order of them."""
    if node.get("uniqueItems") is not True:
        return
    items = [document.applied(item) for item in listed(node, "prefixItems")]
    most = node.get("maxItems", math.inf) if node.get("items") is not False else len(items)
    least = node.get("minItems", 0)
    if not is_number(most) or not isinstance(least, int):
        return
    if most <= 1 or (most <= len(items) and _are_apart(items)):
        del node["uniqueItems"]
        return
    of_items = document.applied(node.get("items"))
    values = ["true", "false"] if of_items.kinds == {"boolean"} else of_items.values
    if items or values is None or len(values) > MAX_UNIQUE_VALUES:
        return
    sizes = range(least, min(int(min(most, MAX_UNIQUE_VALUES)), len(values)) + 1)
    orders = [order for size in sizes for order in itertools.permutations(values, size)]
    if document.affords(len(orders)):
        del node["uniqueItems"]
        _add(node, any_of(map(_in_order, orders)) or all_but("array"))


def _in_order(values: tuple[str, ...]) -> Node:
    items = [{"const": json.loads(value)} for value in values]
    return {"prefixItems": items, "items": False, "minItems": len(items)} if items else {"maxItems": 0}


def _are_apart(options: Iterable[Applied]) -> bool:
    return all(first.is_apart(second) for first, second in itertools.combinations(options, 2))


def _dependencies(node: Node, document: Document) -> None:
    """``dependentRequired`` and ``dependentSchemas``: without the one key, or with what it needs."""
    required, schemas = node.get("dependentRequired", {}), node.get("dependentSchemas", {})
    if not isinstance(required, dict) or not isinstance(schemas, dict):
        return
    needs = [(name, {"required": names} if names else True) for name, names in required.items()] + list(schemas.items())
    if len(needs) <= MAX_DEPENDENCIES and document.affords(2 * len(needs)):
        _remove(node, ("dependentRequired", "dependentSchemas"))
        for name, schema in needs:
            # It is named before what it needs: keys come in the order in which schemas name them.
            named = {} if name in properties_of(node) else {"properties": {name: True}}
            needed = schema if schema is True else all_of([named, schema])
            _add(node, any_of([{"properties": {name: False}}, needed]))


def _negation(node: Node, document: Document) -> None:
    if "not" in node:
        rest = negated(node["not"], document.applied({key: value for key, value in node.items() if key != "not"}))
        if rest is not None and document.affords(1):
            del node["not"]
            _add(node, rest)


class _Case(NamedTuple):
    """A condition that holds for some values of a property.

    Attributes:
        node: has the ``if``.
        values: as `spelled`.
        is_strict: it holds for no object without the property.
    """

    node: Node
    name: str
    values: list[str]
    is_strict: bool

    @classmethod
    def of(cls, node: Any, document: Document) -> _Case | None:
        """None: it has no such condition."""
        asked = node.get("if") if isinstance(node, dict) else None
        if not isinstance(asked, dict) or not asked.keys() <= {"properties", "required", "type"} | ANNOTATIONS:
            return None
        [name, *others] = properties_of(asked) or [""]
        inner = properties_of(asked).get(name)
        is_plain = isinstance(inner, dict) and inner.keys() <= {"const", "enum", "type"} | ANNOTATIONS
        is_plain = is_plain and asked.get("type", "object") == "object" and asked.get("required", [name]) == [name]
        of_property = document.applied(inner)
        if others or not is_plain or of_property.values is None:
            return None
        values = [value for value in of_property.values if kind_of(json.loads(value)) in of_property.kinds]
        return cls(node, name, values, "required" in asked)


def _cases(node: Node, document: Document) -> None:
    """Conditions, its own and those of its ``allOf``, that ask for values of one property: an option for all values of
    which the same conditions hold. One after the other they would be multiplied out."""
    within = document.applied(node)
    if within.kinds != {"object"}:
        return
    found = [case for part in (node, *listed(node, "allOf")) if (case := _Case.of(part, document))]
    for name in dict.fromkeys(case.name for case in found):
        cases = [case for case in found if case.name == name]
        options = _options(name, cases, within)
        if options is not None and document.affords(len(options)):
            if any(case.node is node for case in cases):
                _remove(node, _CONDITION)
            if "allOf" in node:
                parts = [case.node for case in cases]
                node["allOf"] = [_unconditional(part) if part in parts else part for part in node["allOf"]]
            _add(node, any_of(options))


def _options(name: str, cases: list[_Case], within: Applied) -> list[Schema] | None:
    """Of values of a property by which of the conditions hold; None: the values that none asks for are not said."""
    of_property = within.of_property(name)
    mentioned = list(dict.fromkeys(value for case in cases for value in case.values))
    values: dict[tuple[bool, ...], list[str]] = {}
    for value in mentioned if of_property.values is None else of_property.values:
        values.setdefault(tuple(value in case.values for case in cases), []).append(value)
    schemas: dict[tuple[bool, ...], Schema | None] = {holding: these(found) for holding, found in values.items()}
    if of_property.values is None:
        schemas[(False,) * len(cases)] = negated({"enum": list(map(json.loads, mentioned))}, of_property)
    options = {holding: {"properties": {name: schema}, "required": [name]} for holding, schema in schemas.items()}
    if name not in within.required:
        holding = tuple(not case.is_strict for case in cases)
        options[holding] = {"properties": {name: schemas.get(holding, False)}}
    if None in schemas.values():
        return None
    return [
        all_of(
            [
                option,
                *(case.node.get("then" if holds else "else", True) for case, holds in zip(cases, holding, strict=True)),
            ]
        )
        for holding, option in options.items()
    ]


def _unconditional(part: Node) -> Node:
    return {keyword: value for keyword, value in part.items() if keyword not in _CONDITION}


def _condition(node: Node, document: Document) -> None:
    if "if" not in node:
        return
    asked, then, otherwise = node["if"], node.get("then", True), node.get("else", True)
    others = negated(asked, document.applied(_unconditional(node)))
    if others is not None and document.affords(2):
        _remove(node, _CONDITION)
        _add(node, any_of([all_of([asked, then]), all_of([others, otherwise])]))


def _discriminator(node: Node, document: Document) -> None:
    """The property that OpenAPI's ``discriminator`` names is required by it; the options say the rest."""
    given = node.pop("discriminator", None)
    name = given.get("propertyName") if isinstance(given, dict) else None
    options = [document.applied(option) for keyword in ("anyOf", "oneOf") for option in listed(node, keyword)]
    is_said = all(name in option.required for option in options if "object" in option.kinds)
    if isinstance(name, str) and not is_said and name not in listed(node, "required"):
        node["required"] = [*listed(node, "required"), name]


def _one_of(node: Node, document: Document) -> None:
    """``oneOf``, of which no two have a value in common; or of which each is said without the others."""
    options = listed(node, "oneOf")
    if not options:
        return
    others = {keyword: value for keyword, value in node.items() if keyword != "oneOf"}
    if _is_one_at_most([document.applied(option, others) for option in options]):
        del node["oneOf"]
        _add(node, {"anyOf": options})
        return
    exact = (
        [_alone(options, at, others, document) for at in range(len(options))]
        if len(options) <= MAX_OVERLAPPING
        else [None]
    )
    if None not in exact and document.affords(len(options)):
        del node["oneOf"]
        _add(node, any_of(exact))
    elif any("$ref" in option for option in options if isinstance(option, dict)):
        node["discriminator"] = {}  # a sibling that says nothing: the library then looks into the definitions


def _alone(options: list[Any], at: int, others: Node, document: Document) -> Schema | None:
    """One of the options, without what is of another one."""
    within = document.applied(options[at], others)
    others_negated = [negated(option, within) for option in (*options[:at], *options[at + 1 :])]
    return None if None in others_negated else all_of([options[at], *others_negated])


def _is_one_at_most(options: list[Applied]) -> bool:
    if len(options) <= MAX_COMPARED:
        return _are_apart(options)
    return _differ(options) or (
        all(option.kinds <= {"object"} for option in options)
        and any(
            _differ([option.of_property(name) for option in options])
            for name in sorted(set.intersection(*(option.required for option in options)))
        )
    )


def _differ(options: list[Applied]) -> bool:
    values = [option.values for option in options if option.values is not None]
    return len(values) == len(options) and sum(map(len, values)) == len(set[str]().union(*values))


REWRITINGS: tuple[Callable[[Node, Document], None], ...] = (
    _older_spellings,
    _unevaluated,
    _without_meaning,
    _numbers,
    _formats,
    _property_names,
    _number_of_properties,
    _unique_items,
    _dependencies,
    _negation,
    _cases,
    _condition,
    _discriminator,
    _one_of,
)
"""In order: the later ones read what the earlier ones have written."""
