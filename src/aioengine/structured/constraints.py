"""Constraints on an answer's text: a JSON schema, a regular expression, a choice, a grammar, or text with tagged spans.

They are plain data, so that they travel with a request. `aioengine.structured.guidance` compiles them.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
from msgspec import Meta

from aioengine.errors import InvalidRequest
from aioengine.schemas.type_schema import describe, is_type, no_schema
from aioengine.validation import check_fields, shorten, typed

MAX_CONSTRAINT_BYTES = 256 * 1024
"""The largest constraint as JSON, so that queues and caches of them are bounded; compiling has bounds of its own."""

MAX_LEVELS = 120
"""Levels of lists and dicts in a schema; recursion is written with ``$ref``."""

MAX_CHOICES = 4096
MAX_TAGS = 256

Text = Annotated[str, Meta(min_length=1, max_length=MAX_CONSTRAINT_BYTES)]


def _check_length(text: str) -> None:
    """Refuse JSON that is too large in any layout, before it is parsed, which takes long."""
    if len(text) > 2 * MAX_CONSTRAINT_BYTES:
        raise _refuse("", f"it has {len(text):,} characters of JSON; at most {MAX_CONSTRAINT_BYTES:,} bytes are taken")


def _refuse(_: str, message: str) -> InvalidRequest:
    return InvalidRequest(f"structured: {message}", param="structured")


class _ConstraintMeta(msgspec.StructMeta):
    """Raises `InvalidRequest` for unknown or missing arguments of a constraint, as for wrong values."""

    def __call__(self, *args: Any, **given: Any) -> Any:
        try:
            return super().__call__(*args, **given)
        except TypeError as error:
            takes = '["a", "b"]' if self is Choice else ", ".join(self.__struct_fields__)
            raise _refuse("", f"write {self.__name__}({takes}): {error}") from None


class _Constraint(msgspec.Struct, metaclass=_ConstraintMeta, frozen=True, omit_defaults=True, tag_field="kind"):
    """Base of all constraints, which are checked when they are made.

    Raises:
        InvalidRequest: a field has a wrong value, or all of it is too large or too deep.
    """

    def __post_init__(self) -> None:
        check_fields(self, _refuse)
        try:
            content = self.content
        except UnicodeEncodeError:
            raise _refuse("", "it is no valid Unicode: it holds half of a surrogate pair") from None
        except (TypeError, ValueError, OverflowError, RecursionError) as error:
            raise _refuse("", f"it is not JSON: {error}") from None
        if len(content) > MAX_CONSTRAINT_BYTES:
            raise _refuse("", f"it has {len(content):,} bytes of JSON; at most {MAX_CONSTRAINT_BYTES:,} are taken")

    @property
    def content(self) -> bytes:
        """The constraint as JSON, equal for equal constraints; the order of a schema's properties counts."""
        return _encoder.encode(self)


class Json(_Constraint, frozen=True, tag="json"):
    """JSON that a schema admits; without one, any JSON object.

    A schema with a keyword that cannot be enforced is refused, unless it is ``lenient``.

    Attributes:
        schema: a JSON schema (draft 7 to 2020-12).
        whitespace: admit a space, or a line break and indentation, between the tokens of JSON. Else ``, `` and ``: ``
            separate them on one line, as Python and most models write it. That takes fewer tokens, and more of them
            follow from the schema alone and are not computed.
        lenient: ignore keywords that cannot be enforced; the output may break them.
    """

    schema: dict[str, Any] | bool = msgspec.field(default_factory=lambda: {"type": "object"})
    whitespace: bool = False
    lenient: bool = False

    def __post_init__(self) -> None:
        if is_type(self.schema):
            raise _refuse("", f"Json takes a schema: give {shorten(self.schema)} itself, or its schema")
        try:
            text = json.dumps(self.schema, allow_nan=False)
        except (TypeError, ValueError) as error:
            raise _refuse("", f"the schema is no JSON: {error}") from None
        except RecursionError:
            text = ""
        _check_length(text)
        if not text or _depth(self.schema) > MAX_LEVELS:
            raise _refuse("", f"the schema is deeper than {MAX_LEVELS} levels; write recursion with $ref")
        schema = json.loads(text)  # a copy, which does not change with what the caller has
        msgspec.structs.force_setattr(self, "schema", schema)
        super().__post_init__()


class Regex(_Constraint, frozen=True, tag="regex"):
    """Text that a regular expression matches as a whole, in the syntax of Rust's regex: no look-around, no
    back-references."""

    pattern: Text


class Choice(_Constraint, frozen=True, tag="choice"):
    """One of some texts."""

    options: Annotated[tuple[Text, ...], Meta(min_length=1, max_length=MAX_CHOICES)]

    if TYPE_CHECKING:

        def __init__(self, options: Sequence[str]) -> None: ...


class Grammar(_Constraint, frozen=True, tag="grammar"):
    """Text that a context-free grammar admits: Lark's syntax, beginning at ``start``, with llguidance's extensions; or
    GBNF (``root ::= ...``).

    Attributes:
        is_forcing: look for tokens that follow without a choice, to compute them together. With a grammar that forces
            text for ever (``start: /a+/ "a"``) this search never ends and stops the process. Set it only for grammars
            that you have written and tried.
    """

    text: Text
    is_forcing: bool = False


class Tag(msgspec.Struct, frozen=True, omit_defaults=True):
    """A constrained span.

    Attributes:
        begin, end: the texts around it; ``begin`` may hold special tokens.
        schema: the schema of the span's JSON; or
        pattern: a regular expression for the span.
    """

    begin: Text
    end: str = ""
    schema: dict[str, Any] | bool | None = None
    pattern: Text | None = None

    def __post_init__(self) -> None:
        check_fields(self, _refuse)


class StructuralTags(_Constraint, frozen=True, tag="tags"):
    """Free text with constrained spans: where the text comes to a trigger, a tag that begins with it must follow.

    Attributes:
        triggers: each tag begins with one of them, or with several.
    """

    tags: Annotated[tuple[Tag, ...], Meta(min_length=1, max_length=MAX_TAGS)]
    triggers: Annotated[tuple[Text, ...], Meta(min_length=1, max_length=MAX_TAGS)]

    def __post_init__(self) -> None:
        super().__post_init__()
        for tag in self.tags:
            if not any(tag.begin.startswith(trigger) for trigger in self.triggers):
                raise _refuse("", f"no trigger begins the tag {shorten(tag.begin)}; give one in triggers")
            if (tag.schema is None) == (tag.pattern is None):
                raise _refuse("", f"the tag {shorten(tag.begin)} needs either a schema or a pattern")
        for trigger in self.triggers:
            if not any(tag.begin.startswith(trigger) for tag in self.tags):
                raise _refuse("", f"the trigger {shorten(trigger)} begins no tag; leave it out, or add a tag")


class Either(_Constraint, frozen=True, tag="either"):
    """Text that one of some constraints admits: made by the engine, of tool calls and of an answer with a schema."""

    options: Annotated[
        tuple[Json | Regex | Choice | Grammar | StructuralTags, ...], Meta(min_length=1, max_length=MAX_TAGS)
    ]


Constraint = Json | Regex | Choice | Grammar | StructuralTags | Either
"""Any constraint, as a request holds it."""

_encoder = msgspec.json.Encoder()


def unforced(constraint: Constraint) -> Constraint:
    """The constraint with grammars that force nothing, since only a trusted sender may ask for that."""
    options = constraint.options if isinstance(constraint, Either) else (constraint,)
    trusted = tuple(Grammar(one.text) if isinstance(one, Grammar) else one for one in options)
    return Either(trusted) if isinstance(constraint, Either) else trusted[0]


def _depth(value: Any) -> int:
    """Number of levels of lists and dicts, at most `MAX_LEVELS` + 1: deeper or cyclic values end there."""
    level, values = 0, [value]
    while values and level <= MAX_LEVELS:
        values = [
            item
            for outer in values
            if isinstance(outer, dict | list | tuple)
            for item in (outer.values() if isinstance(outer, dict) else outer)
            if isinstance(item, dict | list | tuple)
        ]
        level += 1
    return level


# Constraints from callers' values


def as_constraint(given: Any) -> Constraint:
    """The constraint of a constraint, a JSON schema as a dict, or a type: pydantic's models, dataclasses, msgspec's
    structs, TypedDicts, and types made of them, such as ``list[Item]``.

    Raises:
        InvalidRequest: it is none of these, or has no schema.
    """
    if isinstance(given, Constraint):
        return given
    if isinstance(given, dict | bool):
        return Json(given)
    if is_type(given):
        return Json(schema_of(given))
    raise _refuse("", f"it is {typed(given)}; give a JSON schema as a dict, a type, or Json, Regex, Choice, ...")


def schema_of(kind: Any) -> dict[str, Any]:
    """The JSON schema of a type, as `describe` returns it.

    Raises:
        InvalidRequest: there is none.
    """
    try:
        return describe(kind).schema
    except Exception as error:  # a class of the caller's own may raise anything while its schema is made
        raise _refuse("", no_schema(kind, error)) from None


SETTINGS_OF_VLLM = (
    *("backend", "_backend", "_backend_was_auto", "backend_was_auto", "disable_fallback", "disable_any_whitespace"),
    *("disable_additional_properties", "whitespace_pattern"),
)


def from_vllm(given: Any) -> Constraint | None:
    """The constraint of vLLM's ``StructuredOutputsParams`` or ``GuidedDecodingParams``, or of a dict of their fields.

    Returns:
        None where it holds no constraint.
    Raises:
        InvalidRequest: it holds several constraints, an unknown one, or an invalid one.
    """
    if given is None:
        return None
    if isinstance(given, Constraint):
        return given
    fields = given if isinstance(given, Mapping) else _fields_of(given)
    has_whitespace = fields.get("disable_any_whitespace") is False
    readers: dict[str, Callable[[Any], Constraint]] = {
        "json": lambda value: Json(
            read_schema(value) if isinstance(value, str | dict | bool) else schema_of(value), whitespace=has_whitespace
        ),
        "regex": Regex,
        "choice": Choice,
        "grammar": Grammar,
        "json_object": lambda _: Json(whitespace=has_whitespace),
        "structural_tag": read_structural_tag,
    }
    if isinstance(given, Mapping) and (unknown := set(given) - {*readers, *SETTINGS_OF_VLLM}):
        raise _refuse("", f"{', '.join(sorted(map(str, unknown)))} is no constraint; known: {', '.join(readers)}")
    asked = {name: fields[name] for name in readers if fields.get(name) is not None}
    if asked.get("json_object") is False:
        del asked["json_object"]
    if len(asked) > 1:
        raise _refuse("", f"{', '.join(asked)} are several constraints; give one")
    return next((readers[name](value) for name, value in asked.items()), None)


def _fields_of(given: Any) -> dict[str, Any]:
    if dataclasses.is_dataclass(given) and not isinstance(given, type):
        return {field.name: getattr(given, field.name) for field in dataclasses.fields(given)}
    try:
        return dict(vars(given))
    except TypeError:
        raise _refuse("", f"structured_outputs is {typed(given)}; give a dict such as {{'json': schema}}") from None


def read_schema(given: str | dict[str, Any] | bool) -> Any:
    """Decode a JSON schema that may be text.

    Raises:
        InvalidRequest: the text is no JSON object.
    """
    if not isinstance(given, str):
        return given
    _check_length(given)
    try:
        return msgspec.json.decode(given, type=dict[str, Any] | bool)
    except (msgspec.DecodeError, UnicodeEncodeError, RecursionError) as error:
        raise _refuse("", f"the schema is no JSON object: {error}; it begins {shorten(given)}") from None


def read_structural_tag(given: Any) -> StructuralTags:
    """Read ``{"structures": [{"begin", "schema", "end"}], "triggers": [...]}``, a dict or text, in vLLM's and SGLang's
    form.

    Raises:
        InvalidRequest: it has another form.
    """
    value = read_schema(given) if isinstance(given, str) else given
    try:
        tags = tuple(
            Tag(begin=one["begin"], end=one.get("end", ""), schema=read_schema(one["schema"]))
            for one in value["structures"]
        )
        return StructuralTags(tags, tuple(value["triggers"]))
    except (KeyError, TypeError, AttributeError):
        raise _refuse("", 'a structural tag needs {"structures": [{"begin", "schema", "end"}], "triggers"}') from None
