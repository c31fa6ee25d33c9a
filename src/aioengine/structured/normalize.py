"""JSON schemas in the keywords that llguidance enforces, for what pydantic, zod and OpenAI's strict mode write.

Each schema of a document is rewritten once, into one of about the same size. What a rewriting cannot put exactly stays
as it is, and is refused by the name of its keyword.
"""

from __future__ import annotations

from typing import Any
from urllib.parse import quote

from aioengine.schemas.json_pointer import resolved
from aioengine.structured.json_schema import (
    BOUNDS,
    LISTS,
    MAPS,
    MAX_EXACT_INTEGER,
    NESTING,
    ONES,
    is_number,
    listed,
    mapped,
)
from aioengine.structured.options import OptionJudge

MAX_NAMES = 256
"""In a ``propertyNames``: each becomes a property."""

NO_LIMITS = frozenset(
    {"$comment", "$schema", "default", "deprecated", "description", "examples", "readOnly", "title", "writeOnly"}
)
"""Keywords that do not change which values fit."""

_YEAR = r"(?:[0-9]{3}[1-9]|[0-9]{2}[1-9]0|[0-9][1-9]00|[1-9]000)"
_LEAP_YEAR = r"(?:[0-9]{2}(?:0[48]|[2468][048]|[13579][26])|(?:0[48]|[2468][048]|[13579][26])00)"
_DAY_OF_ANY_YEAR = (
    r"(?:(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])|(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)"
    r"|02-(?:0[1-9]|1[0-9]|2[0-8]))"
)
_DATE = rf"(?:{_YEAR}-{_DAY_OF_ANY_YEAR}|{_LEAP_YEAR}-02-29)"
# No leap seconds, and capital letters: what parsers of times commonly read.
_TIME = r"(?:[01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](?:\.[0-9]{1,6})?(?:Z|[+-](?:[01][0-9]|2[0-3]):[0-5][0-9])"
BASE64 = r"^(?:[A-Za-z0-9+/]{4})*(?:[A-Za-z0-9+/]{2}==|[A-Za-z0-9+/]{3}=)?$"
_LABEL = r"[A-Za-z0-9](?:[A-Za-z0-9-]{0,61}[A-Za-z0-9])?"
MAX_HOSTNAME_CHARS = 253
_UUID = "^[0-9A-Fa-f]{{8}}-[0-9A-Fa-f]{{4}}-{}[0-9A-Fa-f]{{3}}-[89ABab][0-9A-Fa-f]{{3}}-[0-9A-Fa-f]{{12}}$"

FORMATS = {
    "date": f"^{_DATE}$",
    "time": f"^{_TIME}$",
    "date-time": f"^{_DATE}T{_TIME}$",
    "hostname": rf"^{_LABEL}(?:\.{_LABEL})*$",
    "base64": BASE64,
    "byte": BASE64,
    "base64url": BASE64.replace("+/", "_-"),
    **{f"uuid{version}": _UUID.format(version) for version in range(1, 9)},
}
"""Formats as patterns."""
FORMATS_LEFT = frozenset(
    {"duration", "email", "ipv4", "ipv6", "uri", "uuid"}
    | {"host-name", "idn-email", "idn-hostname", "ip-address", "iri", "iri-reference", "json-pointer", "regex"}
    | {"relative-json-pointer", "uri-reference", "uri-template"}
)
"""The first six are the library's; it refuses the others by name. Formats in neither table are annotations."""

Node = dict[str, Any]


def normalized(schema: Any) -> Node:
    """The schema as the library reads it best: the same instances fit it, but for these, of which fewer do.

    Dates, times and hostnames that cannot be; numbers beyond 2**53 where there is a bound beyond that; objects without
    the property that a ``discriminator`` names; texts that are no base64, UUID or address, where ``format`` or
    ``contentEncoding`` say so by a name that is not JSON Schema's. Of a draft before 2019-09, in which what stands
    beside a ``$ref`` says nothing, fewer fit, or within ``oneOf`` others.
    """
    if not isinstance(schema, dict):
        return {} if schema is True else {"enum": []}
    rewriting = _Rewriting(schema)
    better = rewriting.of(schema)
    if not isinstance(better, dict):
        return {"enum": []}
    if rewriting.definitions:
        better["$defs"] = {**better.get("$defs", {}), **rewriting.definitions}
    return better


class _Rewriting:
    """Rewrites the schemas of one document.

    Attributes:
        definitions: that are added to it.
    """

    def __init__(self, root: Node) -> None:
        self.definitions: Node = {}
        self._root = root
        self._judge = OptionJudge(root)

    def of(self, schema: Any) -> Any:
        if not isinstance(schema, dict) or not _is_well_formed(schema):
            return schema
        node = {keyword: value for keyword, value in schema.items() if keyword not in NO_LIMITS}
        if node.get("not", False) in ({}, True):  # zod's "never"
            return False
        if isinstance(reference := node.get("$ref"), str):
            place, sign, fragment = reference.partition("#")
            node["$ref"] = place + sign + quote(fragment, safe="%/?:@!$&'()*+,;=~-._")
        if node.get("uniqueItems") is False:
            del node["uniqueItems"]
        self._discriminate(node)
        self._choose(node)
        _bound(node)
        _use_patterns(node)
        for keyword, value in node.items():
            if keyword in MAPS and isinstance(value, dict):
                node[keyword] = {name: self.of(inner) for name, inner in value.items()}
            elif keyword in (*LISTS, *ONES):
                node[keyword] = [self.of(inner) for inner in value] if isinstance(value, list) else self.of(value)
        self._name_properties(node)
        return False if any(part is False for part in listed(node, "allOf")) else node

    def _discriminate(self, node: Node) -> None:
        """The property that OpenAPI's ``discriminator`` names is required; the options list its values."""
        given = node.pop("discriminator", None)
        name = given.get("propertyName") if isinstance(given, dict) else None
        options = [leaf for keyword in ("anyOf", "oneOf") for leaf in self._judge.leaves(listed(node, keyword))]
        is_said = all(name in listed(leaf, "required") for leaf in options if leaf.get("type", "object") == "object")
        if isinstance(name, str) and not is_said and name not in listed(node, "required"):
            node["required"] = [*listed(node, "required"), name]

    def _choose(self, node: Node) -> None:
        """``oneOf`` as ``anyOf``, where no two options have a value in common."""
        if not (options := listed(node, "oneOf")):
            return
        around = {keyword: value for keyword, value in node.items() if keyword != "oneOf"}
        if "anyOf" not in node and self._judge.are_apart(options, around):
            node["anyOf"] = node.pop("oneOf")
        elif any("$ref" in option for option in options if isinstance(option, dict)):
            node["discriminator"] = {}  # a sibling without meaning: with one the library looks into the definitions

    def _name_properties(self, node: Node) -> None:
        """``propertyNames`` as the properties themselves, or as a pattern of theirs; of rewritten parts."""
        if "propertyNames" not in node or "patternProperties" in node:
            return
        names, named = node["propertyNames"], mapped(node, "properties")
        if isinstance(names, dict) and "$ref" in names and NESTING.isdisjoint(target := resolved(names, self._root)):
            names = self.of(target)
        limits = dict(names) if isinstance(names, dict) else {}
        if limits.pop("type", "string") != "string":
            return
        if names is not False and not limits:
            del node["propertyNames"]
            return
        values = [limits["const"]] if "const" in limits else listed(limits, "enum")
        if names is False or (limits.keys() <= {"const", "enum"} and len(values) <= MAX_NAMES):
            texts = dict.fromkeys(text for text in values if isinstance(text, str))
            order = [*(name for name in named if name in texts), *(text for text in texts if text not in named)]
            others = self._defined(node.get("additionalProperties", True))
            node["properties"] = {name: named.get(name, others) for name in order}
        elif not named and (pattern := _pattern_of(limits)):
            node["patternProperties"] = {pattern: node.get("additionalProperties", True)}
        else:
            return
        node["additionalProperties"] = False
        del node["propertyNames"]

    def _defined(self, schema: Any) -> Any:
        """A rewritten schema as one that may be repeated: a reference to a definition."""
        if not isinstance(schema, dict):
            return schema
        name = f"properties {len(self.definitions)}"
        while name in mapped(self._root, "$defs"):
            name += "+"
        self.definitions[name] = schema
        return {"$ref": f"#/$defs/{quote(name)}"}


def _is_well_formed(schema: Node) -> bool:
    """Whether it lists and names schemas; the library says what is wrong with one that does not."""
    return all(isinstance(schema.get(keyword, {}), dict) for keyword in MAPS) and all(
        isinstance(schema.get(keyword, []), list) for keyword in LISTS
    )


def _bound(node: Node) -> None:
    """Bounds that doubles hold, where what is admitted lies within them."""
    for keyword, sign in zip(BOUNDS, (-1, 1, -1, 1), strict=True):
        if (value := node.get(keyword)) is not None and is_number(value) and value * sign > MAX_EXACT_INTEGER:
            del node[keyword]
            node.setdefault(keyword.replace("exclusiveM", "m"), sign * MAX_EXACT_INTEGER)


def _use_patterns(node: Node) -> None:
    """Formats as patterns, and without those that are annotations."""
    name = node.get("format")
    if name == "url":
        node["format"] = "uri"
    elif isinstance(name, str) and name not in FORMATS_LEFT:
        del node["format"]
    pattern = FORMATS.get(str(name))
    if name == "ipvanyaddress":
        node["allOf"] = [*listed(node, "allOf"), {"anyOf": [{"format": "ipv4"}, {"format": "ipv6"}]}]
    elif name == "hostname" and is_number(longest := node.get("maxLength", MAX_HOSTNAME_CHARS)):
        node["maxLength"] = min(longest, MAX_HOSTNAME_CHARS)
    if pattern is None and node.get("contentEncoding") == "base64":
        pattern = BASE64
    if pattern is not None and "pattern" in node:
        node["allOf"] = [*listed(node, "allOf"), {"pattern": pattern}]
    elif pattern is not None:
        node["pattern"] = pattern


def _pattern_of(limits: Node) -> str | None:
    """A pattern of just the texts within these limits; None where there is none."""
    if limits.keys() == {"pattern"}:
        return str(limits["pattern"])
    if limits and limits.keys() <= {"minLength", "maxLength"}:
        return rf"^[\s\S]{{{limits.get('minLength', 0)},{limits.get('maxLength', '')}}}$"
    return None
