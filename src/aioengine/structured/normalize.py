"""JSON schemas said in the keywords that llguidance enforces, so that the same instances fit.

`normalized` goes from the root down: each of `REWRITINGS` in turn changes a schema in place, then its parts follow. One
that cannot be exact leaves its keyword where it is, which is refused by its name then. What a rewriting looks up
(`_Document`) and how many options all of them write together is bounded, so that a schema does not grow beyond that.
"""

from __future__ import annotations

import functools
import itertools
import json
import math
import re
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple
from urllib.parse import quote

from aioengine.structured.json_schema import (
    BOUNDS,
    LISTS,
    MAPS,
    MAX_EXACT_INTEGER,
    ONES,
    is_number,
    listed,
    referred,
    subschemas,
)

Schema = dict[str, Any] | bool
Node = dict[str, Any]

MAX_OPTIONS = 400
"""That the rewritings of one schema write."""
MAX_COMPARISONS = 20_000
"""Of options of one schema with each other."""
MAX_PARTS = 32
"""That are looked through of those that apply to one value, by ``allOf`` and ``$ref``."""
MAX_COMPARED = 16
"""Options of which each is compared with each other one; of more only a property by which all differ is looked for."""
MAX_DEEP = 3
"""Levels within options to which they are compared."""
MAX_NEGATED = 16
"""Options of what does not fit a schema."""
MAX_OVERLAPPING = 4
"""Options of a ``oneOf`` that have values in common."""
MAX_CHOICES = 20
"""Of the properties of an object, or of orders of items."""
MAX_NEGATED_CHARS = 100
"""Of a text that is excluded by a pattern."""
MAX_DEPENDENCIES = 6
"""Of one object: the library multiplies them out."""
MAX_UNIQUE_VALUES = 3

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
_BASE64_OF_URLS = _BASE64.replace("+/", "_-")
_LABEL = r"[A-Za-z0-9](?:[A-Za-z0-9-]{0,61}[A-Za-z0-9])?"
_MAX_HOSTNAME_CHARS = 253
_POINTER = r"(?:/(?:[^/~]|~[01])*)*"
_SCHEME = "[A-Za-z][A-Za-z0-9+.-]*:"
_OF_HOST = "(?:[A-Za-z0-9._~!$&'()*+,;=-]|%[0-9A-Fa-f]{2})"
_OF_PATH = "(?:[A-Za-z0-9._~!$&'()*+,;=:@-]|%[0-9A-Fa-f]{2})"
_SEGMENTS = f"(?:/{_OF_PATH}*)*"
_PLACE = (
    f"(?:(?:{_SCHEME})?//(?:(?:{_OF_HOST}|:)*@)?{_OF_HOST}*(?::[0-9]*)?{_SEGMENTS}"
    f"|(?:{_SCHEME})?/(?:{_OF_PATH}+{_SEGMENTS})?|{_SCHEME}(?:{_OF_PATH}+{_SEGMENTS})?"
    f"|(?:(?:{_OF_HOST}|@)+{_SEGMENTS})?)"
)
_BEHIND_PATH = f"(?:{_OF_PATH}|[/?])*"
_UUID = "^[0-9A-Fa-f]{{8}}-[0-9A-Fa-f]{{4}}-{}[0-9A-Fa-f]{{3}}-[89ABab][0-9A-Fa-f]{{3}}-[0-9A-Fa-f]{{12}}$"

FORMATS = {
    "date": f"^{_DATE}$",
    "time": f"^{_TIME}$",
    "date-time": f"^{_DATE}T{_TIME}$",
    "hostname": rf"^{_LABEL}(?:\.{_LABEL})*$",
    "json-pointer": f"^{_POINTER}$",
    "uri-reference": rf"^{_PLACE}(?:\?{_BEHIND_PATH})?(?:#{_BEHIND_PATH})?$",
    "base64": _BASE64,
    "byte": _BASE64,
    "base64url": _BASE64.replace("+/", "_-"),
    **{f"uuid{version}": _UUID.format(version) for version in range(1, 9)},
}
"""Formats as patterns."""
FORMATS_BY_OTHER_NAMES = {"host-name": "hostname", "ip-address": "ipv4", "url": "uri"}
FORMATS_LEFT = frozenset(
    {"duration", "email", "ipv4", "ipv6", "uri", "uuid"}
    | {"idn-email", "idn-hostname", "iri", "iri-reference", "regex", "relative-json-pointer", "uri-template"}
)
"""Of JSON Schema: the first ones are the library's, the others it refuses. Those that are not named are annotations."""

_ANNOTATIONS = frozenset(
    {"$comment", "default", "deprecated", "description", "examples", "readOnly", "title", "writeOnly"}
)
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
    ``contentEncoding`` say so by a name that is not JSON Schema's.
    """
    if not isinstance(schema, dict):
        return {} if schema is True else {"enum": []}
    document = _Document(schema)
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


def _normalized(schema: Any, document: _Document) -> Any:
    if not isinstance(schema, dict):
        return schema
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


# What applies to a value


class _Document:
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

    def applied(self, *schemas: Any) -> _Applied:
        """The schemas with all that applies wherever they do: what they refer to, and their ``allOf``."""
        parts, pending = list[Node](), list(reversed(schemas))
        while pending and len(parts) < MAX_PARTS:
            part = pending.pop()
            if isinstance(part, dict) and not any(part is other for other in parts):
                parts.append(part)
                pending += [*reversed(listed(part, "allOf")), self.referred(part.get("$ref"))]
        return _Applied(self, parts)


class _Applied:
    """Schemas that apply to one value, and what is known of it by them."""

    def __init__(self, document: _Document, parts: list[Node]) -> None:
        self.parts = parts
        self._document = document

    @functools.cached_property
    def values(self) -> list[str] | None:
        """The only ones that it can be, as `_spelled`, each once; None: any."""
        given = [[_spelled(part["const"])] for part in self.parts if "const" in part]
        given += [list(map(_spelled, part["enum"])) for part in self.parts if isinstance(part.get("enum"), list)]
        common = set.intersection(*map(set, given)) if given else set()
        return [value for value in dict.fromkeys(given[0]) if value in common] if given else None

    @functools.cached_property
    def kinds(self) -> set[str]:
        """That it can be of."""
        kinds = set(_ALL_KINDS)
        for part in self.parts:
            given = part.get("type", list(_KINDS))
            names = given if isinstance(given, list) else [given]
            kinds &= {kind for name in names for kind in _KINDS.get(str(name), _ALL_KINDS)}
        return kinds if self.values is None else kinds & {_kind(json.loads(value)) for value in self.values}

    @functools.cached_property
    def required(self) -> set[str]:
        """Properties that it has, if it is an object."""
        return {name for part in self.parts for name in listed(part, "required") if isinstance(name, str)}

    def of_property(self, name: str) -> _Applied:
        """What applies to a property of it."""
        return self._document.applied(*(_properties(part)[name] for part in self.parts if name in _properties(part)))

    def forbids(self, name: str) -> bool:
        """Whether it is an object without the property, if it is one."""
        return any(
            _properties(part).get(name) is False
            or (part.get("additionalProperties") is False and name not in _properties(part) and not _has_patterns(part))
            for part in self.parts
        )

    def is_apart(self, other: _Applied, depth: int = 0) -> bool:
        """Whether no value is of both; False where that is not seen."""
        if depth > MAX_DEEP or not self._document.compares():
            return False
        if self.values is not None and other.values is not None:
            return set(self.values).isdisjoint(other.values)
        if all(self._is_apart_as(kind, other, depth) for kind in self.kinds & other.kinds):
            return True
        return self._has_apart(other, depth) or other._has_apart(self, depth)

    def _has_apart(self, other: _Applied, depth: int) -> bool:
        """Whether it is of one of several options, and each of them is apart."""
        choices = (listed(part, keyword) for part in self.parts for keyword in ("anyOf", "oneOf"))
        return any(
            all(self._document.applied(option).is_apart(other, depth + 1) for option in options)
            for options in choices
            if options
        )

    def _is_apart_as(self, kind: str, other: _Applied, depth: int) -> bool:
        if kind == "object":
            if any(map(self.forbids, other.required)) or any(map(other.forbids, self.required)):
                return True
            shared = sorted(self.required & other.required)
            return any(self.of_property(name).is_apart(other.of_property(name), depth + 1) for name in shared)
        lows, highs = _LIMITS.get(kind, ((), ()))
        return self._is_beyond(other, lows, highs) or other._is_beyond(self, lows, highs)

    def _is_beyond(self, other: _Applied, lows: Iterable[str], highs: Iterable[str]) -> bool:
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
_KINDS = {name: {name} for name in ("null", "boolean", "integer", "string", "array", "object")}
_KINDS["number"] = {"integer", "fraction"}
"""The types of JSON Schema by kinds, of which a value is of one: a fraction is a number that is not whole."""
_ALL_KINDS = frozenset().union(*_KINDS.values())


def _kind(value: Any) -> str:
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


def _named(kinds: set[str]) -> Schema | None:
    """The schema of all values of these kinds; None: JSON Schema has no name for fractions alone."""
    if "fraction" in kinds and "integer" not in kinds:
        return None
    names = [name for name, of_name in _KINDS.items() if of_name <= kinds]
    return {"type": [name for name in names if name != "integer" or "number" not in names]} if names else False


def _but(kind: str) -> Schema:
    """The schema of all values that are not of a kind."""
    return _named(set(_ALL_KINDS) - {kind}) or False


def _spelled(value: Any) -> str:
    """As JSON, in which equal values are alike."""
    return json.dumps(_plain(value), sort_keys=True)


def _plain(value: Any) -> Any:
    if isinstance(value, list):
        return [_plain(item) for item in value]
    if isinstance(value, dict):
        return {name: _plain(item) for name, item in value.items()}
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _mapped(part: Node, keyword: str) -> Node:
    named = part.get(keyword)
    return named if isinstance(named, dict) else {}


def _properties(part: Node) -> Node:
    return _mapped(part, "properties")


def _has_patterns(part: Node) -> bool:
    return bool(part.get("patternProperties"))


# What does not fit


def _negated(schema: Any, within: _Applied) -> Schema | None:
    """What is no instance of the schema, of all that fits ``within``; None: it is not said here."""
    if not isinstance(schema, dict):
        return schema is False
    options = list[Schema]()
    for keyword, value in schema.items():
        if keyword in _ANNOTATIONS:
            continue
        found = _NEGATIONS[keyword](value, schema, within) if keyword in _NEGATIONS else None
        if found is None:
            return None
        options += found
    return _any(options) if len(options) <= MAX_NEGATED else None


_Negated = list[Schema] | None


def _not_of_type(value: Any, schema: Node, within: _Applied) -> _Negated:
    names = value if isinstance(value, list) else [value]
    rest = _named(within.kinds - {kind for name in names for kind in _KINDS.get(str(name), _ALL_KINDS)})
    return None if rest is None else [rest]


def _not_these(values: Any, schema: Node, within: _Applied) -> _Negated:
    if not isinstance(values, list):
        return None
    excluded = {_spelled(value) for value in values}
    if within.values is not None:
        return [_these([value for value in within.values if value not in excluded])]
    found = {_kind(value) for value in values}
    numbers = {value for value in values if _kind(value) in _KINDS["number"]}
    texts = {value for value in values if isinstance(value, str)}
    is_large = any(abs(number) > MAX_EXACT_INTEGER for number in numbers)
    if found & {"array", "object"} or is_large or any(len(text) > MAX_NEGATED_CHARS for text in texts):
        return None
    options = [_named(within.kinds - found - (_KINDS["number"] if numbers else set()))]
    if texts and "string" in within.kinds:
        options.append({"type": "string", "pattern": f"^{_other_texts(texts)}$"})
    if "boolean" in found & within.kinds:
        options += [{"const": flag} for flag in (True, False) if _spelled(flag) not in excluded]
    if numbers and within.kinds & _KINDS["number"]:
        name = "number" if "fraction" in within.kinds else "integer"
        ends = [None, *sorted(numbers), None]
        options += [_between(name, low, high) for low, high in itertools.pairwise(ends)]
    return None if options[0] is None else [option for option in options if option is not None]


def _these(values: list[str]) -> Schema:
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


def _not_required(names: Any, schema: Node, within: _Applied) -> _Negated:
    # Of a name with a schema beside it there is an option without it already.
    return [_lacking(name) for name in listed(schema, "required") if name not in _properties(schema)]


def _lacking(name: str) -> Node:
    return {"type": "object", "properties": {name: False}}


def _not_of_properties(named: Any, schema: Node, within: _Applied) -> _Negated:
    options = list[Schema]()
    for name, inner in _properties(schema).items():
        other = _negated(inner, within.of_property(name))
        if other is None:
            return None
        option = {"type": "object", "properties": {name: other}}
        if name in listed(schema, "required"):
            options.append(option)
        elif other is not False:
            options.append({**option, "required": [name]})
    return options


def _not_of_any(schemas: Any, schema: Node, within: _Applied) -> _Negated:
    others = _not_of_all(schemas, schema, within)
    return None if others is None else [_all(others)]


def _not_of_all(schemas: Any, schema: Node, within: _Applied) -> _Negated:
    others = [_negated(inner, within) for inner in schemas] if isinstance(schemas, list) else [None]
    return None if None in others else [other for other in others if other is not None]


def _not_limited(opposite: str, name: str, step: int) -> Callable[[Any, Node, _Applied], _Negated]:
    """Of a limit, whose opposite is another one, so far away."""

    def negated(value: Any, schema: Node, within: _Applied) -> _Negated:
        if not is_number(value) or abs(value) > MAX_EXACT_INTEGER or (step and int(value) != value):
            return None
        return [] if step and value + step < 0 else [{"type": name, opposite: value + step}]

    return negated


_NEGATIONS: dict[str, Callable[[Any, Node, _Applied], _Negated]] = {
    "type": _not_of_type,
    "const": lambda value, schema, within: _not_these([value], schema, within),
    "enum": _not_these,
    "required": _not_required,
    "properties": _not_of_properties,
    "anyOf": _not_of_any,
    "allOf": _not_of_all,
    "not": lambda value, schema, within: None if _negated(value, within) is None else [value],
    "minimum": _not_limited("exclusiveMaximum", "number", 0),
    "maximum": _not_limited("exclusiveMinimum", "number", 0),
    "exclusiveMinimum": _not_limited("maximum", "number", 0),
    "exclusiveMaximum": _not_limited("minimum", "number", 0),
    "minLength": _not_limited("maxLength", "string", -1),
    "maxLength": _not_limited("minLength", "string", 1),
    "minItems": _not_limited("maxItems", "array", -1),
    "maxItems": _not_limited("minItems", "array", 1),
}


def _all(schemas: Iterable[Any]) -> Schema:
    parts = [schema for schema in schemas if schema is not True and schema != {}]
    if any(part is False for part in parts):
        return False
    return {"allOf": parts} if len(parts) > 1 else next(iter(parts), True)


def _any(schemas: Iterable[Any]) -> Schema:
    options = [schema for schema in schemas if schema is not False]
    if any(option is True or option == {} for option in options):
        return True
    return {"anyOf": options} if len(options) > 1 else next(iter(options), False)


def _add(node: Node, schema: Schema) -> None:
    """Let a node say another schema beside its own."""
    if isinstance(schema, dict) and schema.keys() == {"anyOf"} and "anyOf" not in node:
        node["anyOf"] = schema["anyOf"]
    elif schema is not True:
        node["allOf"] = [*listed(node, "allOf"), schema]


# The rewritings


def _older_spellings(node: Node, document: _Document) -> None:
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


def _unevaluated(node: Node, document: _Document) -> None:
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
                named = {name: True for part in others for name in _mapped(part, keyword)}
                node |= {keyword: {**_mapped(node, keyword), **named, **_mapped(node, keyword)}} if named else {}
            node["additionalProperties"] = node.pop("unevaluatedProperties")
    if "unevaluatedItems" in node and not any(_OF_ITEMS & part.keys() for part in others):
        is_tuple = isinstance(node.get("items"), list)
        node.setdefault("additionalItems" if is_tuple else "items", node.pop("unevaluatedItems"))


_EVALUATE_ALL = frozenset({"additionalProperties", "unevaluatedProperties"})


def _without_meaning(node: Node, document: _Document) -> None:
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


def _numbers(node: Node, document: _Document) -> None:
    """Bounds that doubles hold, where what is admitted lies within them; sizes without a point."""
    for keyword, sign in zip(BOUNDS, (-1, 1, -1, 1), strict=True):
        if (value := node.get(keyword)) is not None and is_number(value) and value * sign > MAX_EXACT_INTEGER:
            del node[keyword]
            node.setdefault(keyword.replace("exclusiveM", "m"), sign * MAX_EXACT_INTEGER)
    for keyword in _SIZES:
        if isinstance(size := node.get(keyword), float) and size.is_integer():
            node[keyword] = int(size)


def _formats(node: Node, document: _Document) -> None:
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
    elif name == "hostname" and is_number(longest := node.get("maxLength", _MAX_HOSTNAME_CHARS)):
        node["maxLength"] = min(longest, _MAX_HOSTNAME_CHARS)
    if pattern is None and node.get("contentEncoding") == "base64":
        pattern = _BASE64
    if pattern is not None and "pattern" in node:
        _add(node, {"pattern": pattern})
    elif pattern is not None:
        node["pattern"] = pattern


def _property_names(node: Node, document: _Document) -> None:
    """``propertyNames``, as the properties themselves, or as a pattern of theirs."""
    if "propertyNames" not in node or "patternProperties" in node:
        return
    named, others = _properties(node), node.get("additionalProperties", True)
    names = document.applied(node["propertyNames"])
    is_listed = all(part.keys() <= {"const", "enum", "type", "$ref"} | _ANNOTATIONS for part in names.parts)
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


def _pattern_of(schema: Any, document: _Document) -> str | None:
    """A pattern of just the texts that the schema admits."""
    better = _normalized(schema, document)
    limits = (
        {key: value for key, value in better.items() if key not in _ANNOTATIONS} if isinstance(better, dict) else {}
    )
    if limits.pop("type", "string") != "string":
        return None
    if limits.keys() == {"pattern"}:
        return str(limits["pattern"])
    if limits and limits.keys() <= {"minLength", "maxLength"}:
        return rf"^[\s\S]{{{limits.get('minLength', 0)},{limits.get('maxLength', '')}}}$"
    return None


def _number_of_properties(node: Node, document: _Document) -> None:
    """``minProperties`` of an object that has few optional ones: each choice of so many."""
    least = node.get("minProperties")
    if node.get("additionalProperties") is not False or _has_patterns(node) or not isinstance(least, int):
        return
    required = set(listed(node, "required"))
    optional = [name for name in _properties(node) if name not in required]
    missing = least - len(required)
    if missing > 1 and (number := math.comb(len(optional), missing)) <= MAX_CHOICES and document.affords(number):
        del node["minProperties"]
        _add(
            node,
            _any({"required": list(names)} for names in itertools.combinations(optional, missing)) or _but("object"),
        )


def _unique_items(node: Node, document: _Document) -> None:
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
        _add(node, _any(map(_in_order, orders)) or _but("array"))


def _in_order(values: tuple[str, ...]) -> Node:
    items = [{"const": json.loads(value)} for value in values]
    return {"prefixItems": items, "items": False, "minItems": len(items)} if items else {"maxItems": 0}


def _are_apart(options: Iterable[_Applied]) -> bool:
    return all(first.is_apart(second) for first, second in itertools.combinations(options, 2))


def _dependencies(node: Node, document: _Document) -> None:
    """``dependentRequired`` and ``dependentSchemas``: without the one key, or with what it needs."""
    required, schemas = node.get("dependentRequired", {}), node.get("dependentSchemas", {})
    if not isinstance(required, dict) or not isinstance(schemas, dict):
        return
    needs = [(name, {"required": names} if names else True) for name, names in required.items()] + list(schemas.items())
    if len(needs) <= MAX_DEPENDENCIES and document.affords(2 * len(needs)):
        _remove(node, ("dependentRequired", "dependentSchemas"))
        for name, schema in needs:
            # It is named before what it needs: keys come in the order in which schemas name them.
            named = {} if name in _properties(node) else {"properties": {name: True}}
            needed = schema if schema is True else _all([named, schema])
            _add(node, _any([{"properties": {name: False}}, needed]))


def _negation(node: Node, document: _Document) -> None:
    if "not" in node:
        rest = _negated(node["not"], document.applied({key: value for key, value in node.items() if key != "not"}))
        if rest is not None and document.affords(1):
            del node["not"]
            _add(node, rest)


class _Case(NamedTuple):
    """A condition that holds for some values of a property.

    Attributes:
        node: has the ``if``.
        values: as `_spelled`.
        is_strict: it holds for no object without the property.
    """

    node: Node
    name: str
    values: list[str]
    is_strict: bool

    @classmethod
    def of(cls, node: Any, document: _Document) -> _Case | None:
        """None: it has no such condition."""
        asked = node.get("if") if isinstance(node, dict) else None
        if not isinstance(asked, dict) or not asked.keys() <= {"properties", "required", "type"} | _ANNOTATIONS:
            return None
        [name, *others] = _properties(asked) or [""]
        inner = _properties(asked).get(name)
        is_plain = isinstance(inner, dict) and inner.keys() <= {"const", "enum", "type"} | _ANNOTATIONS
        is_plain = is_plain and asked.get("type", "object") == "object" and asked.get("required", [name]) == [name]
        of_property = document.applied(inner)
        if others or not is_plain or of_property.values is None:
            return None
        values = [value for value in of_property.values if _kind(json.loads(value)) in of_property.kinds]
        return cls(node, name, values, "required" in asked)


def _cases(node: Node, document: _Document) -> None:
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
            _add(node, _any(options))


def _options(name: str, cases: list[_Case], within: _Applied) -> list[Schema] | None:
    """Of values of a property by which of the conditions hold; None: the values that none asks for are not said."""
    of_property = within.of_property(name)
    mentioned = list(dict.fromkeys(value for case in cases for value in case.values))
    values: dict[tuple[bool, ...], list[str]] = {}
    for value in mentioned if of_property.values is None else of_property.values:
        values.setdefault(tuple(value in case.values for case in cases), []).append(value)
    schemas: dict[tuple[bool, ...], Schema | None] = {holding: _these(found) for holding, found in values.items()}
    if of_property.values is None:
        schemas[(False,) * len(cases)] = _negated({"enum": list(map(json.loads, mentioned))}, of_property)
    options = {holding: {"properties": {name: schema}, "required": [name]} for holding, schema in schemas.items()}
    if name not in within.required:
        holding = tuple(not case.is_strict for case in cases)
        options[holding] = {"properties": {name: schemas.get(holding, False)}}
    if None in schemas.values():
        return None
    return [
        _all(
            [
                option,
                *(case.node.get("then" if holds else "else", True) for case, holds in zip(cases, holding, strict=True)),
            ]
        )
        for holding, option in options.items()
    ]


def _unconditional(part: Node) -> Node:
    return {keyword: value for keyword, value in part.items() if keyword not in _CONDITION}


def _condition(node: Node, document: _Document) -> None:
    if "if" not in node:
        return
    asked, then, otherwise = node["if"], node.get("then", True), node.get("else", True)
    others = _negated(asked, document.applied(_unconditional(node)))
    if others is not None and document.affords(2):
        _remove(node, _CONDITION)
        _add(node, _any([_all([asked, then]), _all([others, otherwise])]))


def _discriminator(node: Node, document: _Document) -> None:
    """The property that OpenAPI's ``discriminator`` names is required by it; the options say the rest."""
    given = node.pop("discriminator", None)
    name = given.get("propertyName") if isinstance(given, dict) else None
    options = [document.applied(option) for keyword in ("anyOf", "oneOf") for option in listed(node, keyword)]
    is_said = all(name in option.required for option in options if "object" in option.kinds)
    if isinstance(name, str) and not is_said and name not in listed(node, "required"):
        node["required"] = [*listed(node, "required"), name]


def _one_of(node: Node, document: _Document) -> None:
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
        _add(node, _any(exact))
    elif any("$ref" in option for option in options if isinstance(option, dict)):
        node["discriminator"] = {}  # a sibling that says nothing: the library then looks into the definitions


def _alone(options: list[Any], at: int, others: Node, document: _Document) -> Schema | None:
    """One of the options, without what is of another one."""
    within = document.applied(options[at], others)
    negated = [_negated(option, within) for option in (*options[:at], *options[at + 1 :])]
    return None if None in negated else _all([options[at], *negated])


def _is_one_at_most(options: list[_Applied]) -> bool:
    if len(options) <= MAX_COMPARED:
        return _are_apart(options)
    return _differ(options) or (
        all(option.kinds <= {"object"} for option in options)
        and any(
            _differ([option.of_property(name) for option in options])
            for name in sorted(set.intersection(*(option.required for option in options)))
        )
    )


def _differ(options: list[_Applied]) -> bool:
    values = [option.values for option in options if option.values is not None]
    return len(values) == len(options) and sum(map(len, values)) == len(set[str]().union(*values))


REWRITINGS: tuple[Callable[[Node, _Document], None], ...] = (
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
