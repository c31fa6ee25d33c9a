"""The JSON schema of a type, and what reads JSON as its values: by pydantic or msgspec, whichever knows all of it."""

from __future__ import annotations

import functools
import importlib.util
import typing
from collections.abc import Callable, Iterator
from types import UnionType
from typing import Annotated, Any, NamedTuple

import msgspec
from msgspec import inspect

INTEGER_KEY = "^(?:0|-?[1-9][0-9]{0,17})$"
MAX_DECIMAL_DIGITS = 18
"""Before and behind the point of a Decimal that does not give its digits."""

_SECONDS = "[0-9]{1,5}(?:[.][0-9]{1,6})?S"
_TIME = f"T(?:[0-9]{{1,5}}H(?:[0-9]{{1,5}}M)?(?:{_SECONDS})?|[0-9]{{1,5}}M(?:{_SECONDS})?|{_SECONDS})"
_FORMATS = {
    "duration": f"^-?P(?:[0-9]{{1,6}}D(?:{_TIME})?|{_TIME})$",
    "decimal": rf"^-?(?:0|[1-9][0-9]{{0,17}})(?:[.][0-9]{{1,{MAX_DECIMAL_DIGITS}}})?$",
}
"""Formats as patterns of what both libraries read: P1DT2H, and 99.90."""

_URL = "(?:[a-z0-9-]{1,30}[.]){1,5}[a-z]{2,30}(?:/[A-Za-z0-9._~!$&'()*+,;=:@/?-]*)?"
"""The text of a URL behind ``https://``, whose host has a name."""

_UNREAD_FORMATS = frozenset({"fraction", "multi-host-uri"}) | {
    f"{name}{kind}" for name in ("ipv4", "ipv6", "ipvany") for kind in ("network", "interface")
}
"""Formats of types whose texts no schema here describes."""

MAX_MESSAGE_CHARS = 500


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
    """The type's JSON schema, as its library makes it, and what reads the answer.

    The types that people write for answers are read whenever the schema admits the text, but for numbers beyond a
    double's and what bounds and validators refuse. For rare types (naive times, complex numbers, sizes in bytes, bounds
    of a Decimal) the library's schema may admit texts that it does not read; ``read`` then raises.
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
            schema, info = msgspec.json.schema(kind), inspect.type_info(kind)
        except Exception:
            if any(map(_is_of_msgspec, _parts(kind))) or not _has_pydantic():
                raise
        else:
            _tighten(info, schema, schema.get("$defs", {}), set())
            return TypeSchema(_finished(schema), functools.partial(msgspec.json.decode, type=kind))
    import pydantic

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
    """The message for a caller of an error of `describe`."""
    what = str(error) if type(error) is TypeError else f"{type(error).__name__}: {error}"
    return f"{_named(kind)} has no JSON schema: {' '.join(what.split())}"[:MAX_MESSAGE_CHARS]


def _has_pydantic() -> bool:
    return importlib.util.find_spec("pydantic") is not None


def _finished(schema: dict[str, Any]) -> dict[str, Any]:
    """The schema as `_closed` gives it. An object of a union must have the union's discriminator, default or not."""
    tagged: list[tuple[str, dict[str, Any]]] = []
    closed: dict[str, Any] = _closed(schema, tagged)
    for name, option in tagged:
        described = closed["$defs"][option["$ref"].rsplit("/", 1)[1]] if "$ref" in option else option
        required = described.setdefault("required", [])
        if name in described.get("properties", {}) and name not in required:
            required.append(name)
    return closed


def _closed(schema: Any, tagged: list[tuple[str, dict[str, Any]]]) -> Any:
    """A copy in which objects with properties have no others, and tuples no more items, unless they say so: a model
    would go on adding some. It has no defaults, which may be no JSON; and a set may list a value twice."""
    if isinstance(schema, list):
        return [_closed(item, tagged) for item in schema]
    if not isinstance(schema, dict):
        return schema
    closed = {key: value for key, value in schema.items() if key not in ("default", "uniqueItems")}
    for key in _OF_SCHEMAS & closed.keys():
        closed[key] = _closed(closed[key], tagged)
    for key in _OF_NAMES & closed.keys():
        closed[key] = {name: _closed(value, tagged) for name, value in closed[key].items()}
    if name := closed.get("discriminator", {}).get("propertyName"):
        tagged += [(name, option) for option in closed.get("oneOf", ())]
    if "properties" in closed:
        closed.setdefault("additionalProperties", False)
    if "prefixItems" in closed:
        closed.setdefault("items", False)
    if closed.get("format") in _UNREAD_FORMATS:
        raise TypeError(f"the texts of {closed['format']} cannot be asked for; take str, with a pattern")
    if pattern := _FORMATS.get(closed.get("format", "")):
        closed.setdefault("pattern", pattern)
        del closed["format"]
    return closed


_OF_SCHEMAS = frozenset({"additionalProperties", "anyOf", "items", "oneOf", "prefixItems"})
"""Keywords whose values are schemas, or lists of them."""
_OF_NAMES = frozenset({"$defs", "definitions", "patternProperties", "properties"})
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
            if origin in (set, frozenset) and any(map(_is_unhashable, typing.get_args(part))):
                raise TypeError(f"{_named(part)} cannot hold such items; take a list, or items that are frozen")
            pending += [origin, *typing.get_args(part)]
        elif name := next((name for name in ("__supertype__", "__value__", "__bound__") if hasattr(part, name)), ""):
            pending.append(getattr(part, name))
        elif isinstance(part, list):  # the arguments of a Callable
            pending += part
        elif isinstance(part, type):
            yield part
            pending += _fields_of(part)


def _is_unhashable(kind: Any) -> bool:
    """Whether values of the type may have no hash; of `Any`, a JSON object would have none."""
    origin = typing.get_origin(kind) or kind
    if origin in (typing.Union, UnionType):
        return any(map(_is_unhashable, typing.get_args(kind)))
    if origin is Annotated:
        return _is_unhashable(kind.__origin__)
    if isinstance(origin, type) and issubclass(origin, msgspec.Struct):
        return not origin.__struct_config__.frozen
    return origin in (Any, object) or getattr(origin, "__hash__", None) is None


_FIELDS = ("_fields", "__attrs_attrs__", "__dataclass_fields__", "__struct_fields__", "__total__", "model_fields")
"""Attributes of classes whose values are made of fields; the last but one is a TypedDict's."""


def _fields_of(kind: type) -> list[Any]:
    """The annotations of a class whose values are made of fields."""
    if not any(hasattr(kind, name) for name in _FIELDS):
        return []
    try:
        return list(typing.get_type_hints(kind, include_extras=True).values())
    except Exception:  # of a name that is not known there; the library that makes the schema says so
        return [hint for hint in getattr(kind, "__annotations__", {}).values() if not isinstance(hint, str)]


# By msgspec


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
        case inspect.DateTimeType():
            node["format"] = "date-time"
        case inspect.TimeType():
            node["format"] = "time"
        case inspect.UnionType():
            for option in (node, *node["anyOf"]):
                option.pop("discriminator", None)  # says nothing more, and llguidance refuses recursion beside it
        case inspect.DictType(inspect.IntType()):
            node["patternProperties"] = {INTEGER_KEY: node.get("additionalProperties", {})}
            node["additionalProperties"] = False
        case inspect.DictType(inspect.LiteralType() | inspect.EnumType() as key):
            names = key.values if isinstance(key, inspect.LiteralType) else [member.value for member in key.cls]
            node["propertyNames"] = {"enum": list(names)}


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
            options = [one for each in node["anyOf"] for one in (each["anyOf"] if "discriminator" in each else [each])]

            def place(kind: inspect.Type) -> int:
                while isinstance(kind, inspect.Metadata):
                    kind = kind.type
                is_object = isinstance(kind, inspect.StructType) and not kind.array_like
                return 2 if isinstance(kind, inspect.NoneType) else int(is_object)

            yield from zip(sorted(info.types, key=place), options, strict=True)


# By pydantic


@functools.cache
def _generators() -> tuple[Any, Any]:
    """pydantic's maker of schemas, but silent; and one whose schemas admit nothing that pydantic does not read."""
    from pydantic.json_schema import GenerateJsonSchema

    class Silent(GenerateJsonSchema):
        ignored_warning_kinds: Any = frozenset({"skipped-choice", "non-serializable-default"})

    class Exact(Silent):
        def decimal_schema(self, schema: Any) -> Any:  # pydantic's own pattern admits texts that it does not read
            return {"type": "string", "format": "decimal"}

        def url_schema(self, schema: Any) -> Any:
            schemes = schema.get("allowed_schemes")
            pattern = f"^(?:{'|'.join(schemes or ())})://{_URL}$"
            return {"type": "string", "pattern": pattern} if schemes else super().url_schema(schema)

        def dict_schema(self, schema: Any) -> Any:
            described = super().dict_schema(schema)
            keys = self.resolve_ref_schema(self.generate_inner(schema.get("keys_schema", {"type": "any"})))
            if keys.get("type") == "integer" and "enum" not in keys:
                described["patternProperties"] = {INTEGER_KEY: described.get("additionalProperties", {})}
                described["additionalProperties"] = False
            elif "patternProperties" in described:
                described["additionalProperties"] = False
            return described

    return Silent, Exact
