"""The JSON schema of a type, and what reads JSON as its values: by pydantic or msgspec, whichever knows all of it."""

from __future__ import annotations

import dataclasses
import enum
import functools
import importlib.util
import json
import typing
from collections.abc import Callable, Iterator
from typing import Annotated, Any, NamedTuple

import msgspec
from msgspec import inspect

INTEGER_KEY = "^(?:0|-?[1-9][0-9]{0,17})$"
UUID_KEY = "^[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}$"
MAX_DECIMAL_DIGITS = 18
"""Before and behind the point of a Decimal that has no bounds of its own."""

_SECONDS = "[0-9]{1,5}(?:[.][0-9]{1,6})?S"
_TIME = f"T(?:[0-9]{{1,5}}H(?:[0-9]{{1,5}}M)?(?:{_SECONDS})?|[0-9]{{1,5}}M(?:{_SECONDS})?|{_SECONDS})"
DURATION = f"^-?P(?:[0-9]{{1,6}}D(?:{_TIME})?|{_TIME})$"
"""Of days, hours, minutes and seconds, such as P1DT2H: what both libraries read."""

_HOST = "(?:[a-z0-9]{1,30}(?:-[a-z0-9]{1,30}){0,3}[.]){0,5}[a-z]{2,30}"
_URL_CHARS = "(?:[A-Za-z0-9._~!$&'()*+,;=:@/-]|%[0-9A-F]{2})*"
_URL = rf"{_HOST}(?::[1-9][0-9]{{0,3}})?(?:/{_URL_CHARS}(?:[?]{_URL_CHARS})?(?:#{_URL_CHARS})?)?"
"""Behind ``https://``: of hosts with names."""
_PATTERNS = {r"^\s*(\d*\.?\d+)\s*(\w+)?": "^[0-9]{1,15}(?:[.][0-9]{1,3})? ?(?:[kKMGTPE]i?)?B$"}
"""Of pydantic, which match more than it reads: of sizes in bytes."""
_UNREAD_FORMATS = frozenset({"fraction", "multi-host-uri", "regex", "uri-template"}) | {
    *("ipv4network", "ipv6network", "ipvanynetwork", "ipv4interface", "ipv6interface", "ipvanyinterface")
}
"""Formats of types whose texts no schema here says."""

MAX_MESSAGE_CHARS = 500

_NO_LIMITS = {"type", "title", "description", "examples"}
"""Keywords of a key that do not say which texts it may be, or no more than that it is one."""


class TypeSchema(NamedTuple):
    """What an answer of a type is, and how its text is read as a value.

    Attributes:
        schema: its JSON schema.
        read: what makes a value of JSON text; it raises what the library raises for a text that is none.
    """

    schema: dict[str, Any]
    read: Callable[[str], Any]


def is_type(given: Any) -> bool:
    """Whether it is a type, or made of types, such as ``int | None``; or a name for one."""
    is_name = isinstance(given, typing.NewType) or type(given).__name__ == "TypeAliasType"
    return isinstance(given, type) or typing.get_origin(given) is not None or is_name


def describe(kind: Any) -> TypeSchema:
    """Its schema admits no JSON that it cannot read, but for numbers beyond a double's, and what validators refuse.

    Objects of the schema have no other properties than the type's, where that does not say.

    Raises:
        TypeError: it is no type, or says nothing, or something in it cannot be asked for exactly.
        Exception: what a class of the caller's own raises while its schema is made.
    """
    if not is_type(kind):
        raise TypeError("it is no type")
    if kind in (object, Any):
        raise TypeError("it says nothing of the answer; give a type that does, or a JSON schema")
    if not uses_pydantic(kind):
        try:
            return TypeSchema(_finished(_by_msgspec(kind)), functools.partial(msgspec.json.decode, type=kind))
        except _NotOfMsgspec as error:
            if any(map(_is_of_msgspec, _parts(kind))) or not _has_pydantic():
                raise error.problem from None
    import pydantic

    if any(isinstance(part, pydantic.EncodedStr) for part in _parts(kind)):
        raise TypeError("a text within base64 may be no UTF-8; take Base64Bytes, or str")
    exact = _generators()[1]
    if callable(getattr(kind, "model_json_schema", None)):
        return TypeSchema(_finished(kind.model_json_schema(schema_generator=exact)), kind.model_validate_json)
    adapter: pydantic.TypeAdapter[Any] = pydantic.TypeAdapter(kind)
    return TypeSchema(_finished(adapter.json_schema(schema_generator=exact)), adapter.validate_json)


def schema_by_pydantic(kind: Any) -> dict[str, Any]:
    """As pydantic makes it, without a word on stderr of defaults that have no JSON form."""
    import pydantic

    return pydantic.TypeAdapter(kind).json_schema(schema_generator=_generators()[0])


def no_schema(kind: Any, error: Exception) -> str:
    """What to tell a caller of an error of `describe`."""
    what = str(error) if type(error) is TypeError else f"{type(error).__name__}: {error}"
    return f"{_named(kind)} has no JSON schema: {' '.join(what.split())}"[:MAX_MESSAGE_CHARS]


def _has_pydantic() -> bool:
    return importlib.util.find_spec("pydantic") is not None


def _finished(schema: dict[str, Any]) -> dict[str, Any]:
    """
    Raises:
        TypeError: the texts of something in it are not said by it.
    """
    for name, node in _nodes(schema):
        if node.get("format") in _UNREAD_FORMATS:
            where = f"field {name!r}: " if name else ""
            raise TypeError(f"{where}the texts of {node['format']} cannot be asked for; take str, with a pattern")
        _require_tag(node, schema.get("$defs", {}))
    closed: dict[str, Any] = _closed(schema)
    return closed


def _nodes(schema: Any, name: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    """The schema and all in it, with the properties or definitions that they are of."""
    if isinstance(schema, list):
        for item in schema:
            yield from _nodes(item, name)
    elif isinstance(schema, dict):
        yield name, schema
        for key in sorted(_OF_SCHEMAS & schema.keys()):
            yield from _nodes(schema[key], name)
        for key in _OF_NAMES:
            for inner_name, value in schema.get(key, {}).items():
                yield from _nodes(value, inner_name)


def _require_tag(node: dict[str, Any], definitions: dict[str, Any]) -> None:
    """Let the objects of a union have the property by which they are told apart, though it has a default."""
    name = node.get("discriminator", {}).get("propertyName")
    for option in node.get("oneOf", ()) if name else ():
        described = definitions[option["$ref"].rsplit("/", 1)[1]] if "$ref" in option else option
        if name in described.get("properties", {}) and name not in described.get("required", ()):
            described["required"] = [*described.get("required", ()), name]


def _closed(schema: Any) -> Any:
    """A copy in which objects with properties have no others, and tuples no more items, unless they say so: a model
    would go on adding some. Defaults that are no JSON are left out."""
    if isinstance(schema, list):
        return [_closed(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    closed = {key: _closed(value) for key, value in schema.items() if key in _OF_SCHEMAS}
    closed |= {key: {name: _closed(value) for name, value in schema[key].items()} for key in _OF_NAMES if key in schema}
    if "properties" in schema:
        closed.setdefault("additionalProperties", False)
    if "prefixItems" in schema:
        closed.setdefault("items", False)
    if schema.get("pattern") in _PATTERNS:
        closed["pattern"] = _PATTERNS[schema["pattern"]]
    return {key: value for key, value in {**schema, **closed}.items() if key != "default" or _is_json(value)}


def _is_json(value: Any) -> bool:
    try:
        json.dumps(value, allow_nan=False)
    except (TypeError, ValueError):
        return False
    return True


_OF_SCHEMAS = frozenset({"additionalProperties", "anyOf", "items", "oneOf", "prefixItems"})
"""Keywords whose values are schemas, or lists of them."""
_OF_NAMES = ("$defs", "definitions", "patternProperties", "properties")
"""Keywords whose values are schemas by name."""


# Whose a type is


def uses_pydantic(kind: Any) -> bool:
    """Whether anything of pydantic's, or a constraint of annotated_types, is in it: msgspec passes over those.

    Raises:
        TypeError: something of msgspec's is, too, which pydantic does not know; or pydantic is not installed.
    """
    parts = list(_parts(kind))
    foreign = [part for part in parts if _is_of_pydantic(part)]
    if foreign and (own := [part for part in parts if _is_of_msgspec(part)]):
        raise TypeError(
            f"it holds {_named(foreign[0])}, which pydantic reads, and {_named(own[0])}, which msgspec reads; "
            "write all of it for one of them"
        )
    if foreign and not _has_pydantic():
        raise TypeError(f"it holds {_named(foreign[0])}, which pydantic reads, and that is not installed")
    return bool(foreign)


def _named(part: Any) -> str:
    return part.__qualname__ if isinstance(part, type) else repr(part)[:100]


def _is_of_msgspec(part: Any) -> bool:
    if isinstance(part, type) and issubclass(part, msgspec.Struct):
        return not hasattr(part, "__get_pydantic_core_schema__")
    return isinstance(part, msgspec.Meta) or part in (msgspec.Raw, msgspec.UnsetType)


def _is_of_pydantic(part: Any) -> bool:
    """A type, or what stands in an ``Annotated``; also one whose fields have pydantic's defaults or validators."""
    if isinstance(part, type) and issubclass(part, msgspec.Struct):
        return False
    kinds = part.__mro__ if isinstance(part, type) else type(part).__mro__
    if any(kind.__module__.split(".")[0] in ("pydantic", "pydantic_core", "annotated_types") for kind in kinds):
        return True
    if any(hasattr(part, name) for name in ("__get_pydantic_core_schema__", "__get_pydantic_json_schema__")):
        return True
    if not isinstance(part, type):
        return False
    members = [type(value).__module__ for kind in kinds for value in vars(kind).values()]
    return hasattr(part, "__pydantic_config__") or any(name.split(".")[0] == "pydantic" for name in members)


def _parts(kind: Any) -> Iterator[Any]:
    """The types that a type is made of, itself among them, and what stands in its ``Annotated``."""
    pending, seen = [kind], list[Any]()
    while pending:
        part = pending.pop()
        if any(part is other for other in seen):
            continue
        seen.append(part)
        origin = typing.get_origin(part)
        if origin is Annotated:
            yield from part.__metadata__
            pending.append(part.__origin__)
        elif origin is not None and origin is not typing.Literal:
            pending += [origin, *typing.get_args(part)]
        elif name := next((name for name in ("__supertype__", "__value__", "__bound__") if hasattr(part, name)), ""):
            pending.append(getattr(part, name))
        elif isinstance(part, list):  # the arguments of a Callable
            pending += part
        elif isinstance(part, type):
            yield part
            pending += _fields_of(part)


def _fields_of(kind: type) -> list[Any]:
    """The annotations of a class whose values are made of fields."""
    if isinstance(fields := getattr(kind, "model_fields", None), dict):
        return [Annotated[(field.annotation, *field.metadata, None)] for field in fields.values()]
    is_plain = typing.is_typeddict(kind) or hasattr(kind, "_fields") or hasattr(kind, "__attrs_attrs__")
    if not (is_plain or dataclasses.is_dataclass(kind) or issubclass(kind, msgspec.Struct)):
        return []
    try:
        return list(typing.get_type_hints(kind, include_extras=True).values())
    except Exception:  # of a name that is not known there; the library that makes the schema says so
        return [hint for hint in getattr(kind, "__annotations__", {}).values() if not isinstance(hint, str)]


# Keys


def _keyed(keys: dict[str, Any], values: Any) -> dict[str, Any]:
    """Keywords of an object whose keys are texts of a schema.

    Raises:
        TypeError: there are none for these keys.
    """
    names = keys.get("enum", [keys["const"]] if "const" in keys else None)
    if names is not None and all(isinstance(name, str) for name in names):
        return {"properties": dict.fromkeys(names, values), "additionalProperties": False}
    limits = {key: value for key, value in keys.items() if key not in _NO_LIMITS}
    match keys.get("type", "string"), limits:
        case "string", {"pattern": pattern} if len(limits) == 1:
            return {"patternProperties": {pattern: values}, "additionalProperties": False}
        case "string", {"format": "uuid"} if len(limits) == 1:
            return {"patternProperties": {UUID_KEY: values}, "additionalProperties": False}
        case "integer", {} if not limits:
            return {"patternProperties": {INTEGER_KEY: values}, "additionalProperties": False}
        case "string", {} if not limits:
            return {"additionalProperties": values}
    raise TypeError(
        f"a dict cannot be kept to keys of {keys}; take str, int, uuid.UUID, a Literal or an Enum of texts, "
        "or a list of objects"
    )


# By msgspec


class _NotOfMsgspec(Exception):
    """msgspec has no schema for a type.

    Attributes:
        problem: what it raised.
    """

    def __init__(self, problem: Exception) -> None:
        self.problem = problem


def _by_msgspec(kind: Any) -> dict[str, Any]:
    """
    Raises:
        _NotOfMsgspec, TypeError
    """
    try:
        schema = msgspec.json.schema(kind)
        info = inspect.type_info(kind)
    except Exception as error:
        raise _NotOfMsgspec(error) from None
    _tighten(info, schema, schema.get("$defs", {}), set())
    return schema


def _tighten(info: inspect.Type, node: dict[str, Any], definitions: dict[str, Any], seen: set[str]) -> None:
    """Say in a schema of msgspec's what it leaves open: the texts of times and of keys."""
    while isinstance(info, inspect.Metadata):
        info = info.type
    if reference := node.get("$ref"):
        if reference in seen:
            return
        seen.add(reference)
        node = definitions[reference.rsplit("/", 1)[1]]
    for inner, of_inner in _within(info, node):
        _tighten(inner, of_inner, definitions, seen)
    match info:
        case inspect.DateTimeType(tz) | inspect.TimeType(tz):
            name = "date-time" if isinstance(info, inspect.DateTimeType) else "time"
            if tz is False:
                raise TypeError(f"a {name} is asked for with its zone: leave out tz=False, or take str with a pattern")
            node["format"] = name
        case inspect.TimeDeltaType():
            del node["format"]
            node["pattern"] = DURATION
        case inspect.DecimalType():
            del node["format"]
            node["pattern"] = _decimal_pattern(None, None)
        case inspect.UnionType():
            for option in (node, *node["anyOf"]):
                option.pop("discriminator", None)  # says nothing more, and llguidance refuses recursion beside it
        case inspect.SetType() | inspect.FrozenSetType():
            node.pop("uniqueItems", None)  # what is written twice is read as one
        case inspect.DictType(key_type):
            node.pop("propertyNames", None)
            node |= _keyed(_key_schema(key_type), node.get("additionalProperties", {}))


def _within(info: inspect.Type, node: dict[str, Any]) -> Iterator[tuple[inspect.Type, dict[str, Any]]]:
    """The types that values of a type hold, with their schemas in its own."""
    fields = (inspect.StructType, inspect.DataclassType, inspect.TypedDictType, inspect.NamedTupleType)
    match info:
        case _ if isinstance(info, fields):
            named, listed = node.get("properties"), node.get("prefixItems", ())
            if named is None:
                of_fields = listed[len(listed) - len(info.fields) :]  # before them there may be a tag
                yield from zip((field.type for field in info.fields), of_fields, strict=True)
            else:
                yield from ((field.type, named[field.encode_name]) for field in info.fields)
        case inspect.CollectionType():
            yield info.item_type, node.get("items", {})
        case inspect.TupleType():
            yield from zip(info.item_types, node.get("prefixItems", ()), strict=True)
        case inspect.DictType():
            yield info.value_type, node.get("additionalProperties", {})
        case inspect.UnionType():
            # msgspec writes structs behind what else there is, several of them as one, and null at last.
            options = [one for option in node["anyOf"] for one in _structs_of(option)]
            yield from zip(sorted(info.types, key=_place_in_union), options, strict=True)


def _structs_of(option: dict[str, Any]) -> list[dict[str, Any]]:
    return list(option["anyOf"]) if "discriminator" in option else [option]


def _place_in_union(info: inspect.Type) -> int:
    while isinstance(info, inspect.Metadata):
        info = info.type
    if isinstance(info, inspect.NoneType):
        return 2
    return int(isinstance(info, inspect.StructType) and not info.array_like)


def _key_schema(info: inspect.Type) -> dict[str, Any]:
    while isinstance(info, inspect.Metadata):
        info = info.type
    match info:
        case inspect.AnyType():
            return {}
        case inspect.LiteralType(values):
            return {"enum": list(values)}
        case inspect.EnumType(cls):
            return {"enum": [member.value for member in cls]}
        case inspect.UUIDType():
            return {"type": "string", "format": "uuid"}
        case inspect.IntType() | inspect.StrType():
            kind = "integer" if isinstance(info, inspect.IntType) else "string"
            limits = {name: getattr(info, name) for name in info.__struct_fields__}
            return {"type": kind, **{name: value for name, value in limits.items() if value is not None}}
    return {"type": type(info).__name__.removesuffix("Type").lower()}


# By pydantic


@functools.cache
def _generators() -> tuple[Any, Any]:
    """pydantic's maker of schemas, but silent; and one whose schemas admit nothing that pydantic does not read."""
    from pydantic.json_schema import GenerateJsonSchema

    class Silent(GenerateJsonSchema):
        ignored_warning_kinds: Any = frozenset({"skipped-choice", "non-serializable-default"})

    class Exact(Silent):
        def complex_schema(self, schema: Any) -> Any:
            raise TypeError("complex has no JSON that a schema can say; take two floats")

        def json_schema(self, schema: Any) -> Any:
            raise TypeError("pydantic.Json is JSON within a text, which no schema can say; take the type that is in it")

        def datetime_schema(self, schema: Any) -> Any:
            return self._zoned(schema, super().datetime_schema(schema))

        def time_schema(self, schema: Any) -> Any:
            return self._zoned(schema, super().time_schema(schema))

        def _zoned(self, schema: Any, described: Any) -> Any:
            if schema.get("tz_constraint") == "naive":
                raise TypeError(f"a {described['format']} is asked for with its zone; take one that admits it")
            return described

        def timedelta_schema(self, schema: Any) -> Any:
            return {"type": "string", "pattern": DURATION}

        def decimal_schema(self, schema: Any) -> Any:
            return _decimal_schema(schema)

        def url_schema(self, schema: Any) -> Any:
            described = super().url_schema(schema)
            if schemes := schema.get("allowed_schemes"):
                del described["format"]
                described["pattern"] = f"^(?:{'|'.join(schemes)})://{_URL}$"
            return described

        def literal_schema(self, schema: Any) -> Any:
            if found := [one for one in schema["expected"] if isinstance(one, enum.Enum)]:
                raise TypeError(f"Literal[{found[0]}] is not read from JSON; take the enum, or its value in a Literal")
            return super().literal_schema(schema)

        def model_field_schema(self, schema: Any) -> Any:
            alias = schema.get("validation_alias")
            paths = alias if isinstance(alias, list) and isinstance(alias[0], list) else [alias]
            if isinstance(alias, list) and not any(len(path) == 1 for path in paths):
                path = ", ".join(map(repr, paths[0]))
                raise TypeError(f"a field is read from AliasPath({path}), which no schema says; take an alias")
            return super().model_field_schema(schema)

        def set_schema(self, schema: Any) -> Any:
            return {**super().set_schema(schema), "uniqueItems": False}  # what is written twice is read as one

        def frozenset_schema(self, schema: Any) -> Any:
            return {**super().frozenset_schema(schema), "uniqueItems": False}

        def dict_schema(self, schema: Any) -> Any:
            keys = self.resolve_ref_schema(self.generate_inner(schema.get("keys_schema", {"type": "any"})))
            values = self.generate_inner(schema.get("values_schema", {"type": "any"}))
            described = {"type": "object", **_keyed(keys, values)}
            self.update_with_validations(described, schema, self.ValidationsMapping.object)
            return described

    return Silent, Exact


def _decimal_schema(schema: dict[str, Any]) -> dict[str, Any]:
    """Of pydantic's Decimal: a text, or a number where it is bounded; its own pattern admits texts that are none."""
    names = {"ge": "minimum", "gt": "exclusiveMinimum", "le": "maximum", "lt": "exclusiveMaximum"}
    bounds = {keyword: float(schema[name]) for name, keyword in names.items() if schema.get(name) is not None}
    digits, places = schema.get("max_digits"), schema.get("decimal_places")
    if schema.get("multiple_of") is not None or (bounds and (digits, places) != (None, None)):
        raise TypeError("a Decimal is kept to bounds, or to a number of digits, and to no multiples; take one of them")
    if bounds:
        return {"type": "number", **bounds}
    return {"type": "string", "pattern": _decimal_pattern(digits, places)}


def _decimal_pattern(digits: int | None, places: int | None) -> str:
    """Of so many digits in all, and behind the point, at most."""
    if digits is None:
        splits = [(MAX_DECIMAL_DIGITS, MAX_DECIMAL_DIGITS if places is None else places)]
    else:
        splits = [(whole, digits - whole) for whole in (range(digits + 1) if places is None else [digits - places])]
    return f"^-?(?:{'|'.join(_decimal_of(whole, fraction) for whole, fraction in splits)})$"


def _decimal_of(whole: int, places: int) -> str:
    point = f"[.][0-9]{{1,{places}}}"
    if whole <= 0:
        return f"0{point}"
    return f"(?:0|[1-9][0-9]{{0,{whole - 1}}})" + (f"(?:{point})?" if places else "")
