"""Tools as callers give them, and the parts of a model's answer: content, reasoning and calls."""

from __future__ import annotations

import hashlib
import inspect
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Annotated, Any, Literal, NamedTuple, Protocol, get_type_hints

import msgspec

from aioengine.errors import InvalidRequest
from aioengine.schemas.plain_struct import PlainStruct
from aioengine.schemas.type_schema import schema_by_pydantic, uses_pydantic
from aioengine.validation import invalid, nearest, shorten, typed

MAX_TOOLS = 128
MAX_TOOLS_BYTES = 1_000_000
"""Most bytes of all tools together, as JSON."""
MAX_NAME_CHARS = 128
"""As Anthropic's API: clients put the names of plugins and servers before those of tools."""

NO_TOKENS: Mapping[str, int] = {}

NAME_PATTERN = rf"^[A-Za-z0-9_.-]{{1,{MAX_NAME_CHARS}}}\Z"
ToolName = Annotated[str, msgspec.Meta(pattern=NAME_PATTERN)]


def _no_arguments() -> dict[str, Any]:
    return {"type": "object", "properties": {}, "additionalProperties": False}


class Tool(PlainStruct, frozen=True):
    """A function that the model may ask for.

    Attributes:
        parameters: a JSON schema of its arguments, which are an object; absent: it takes none.
        strict: the model cannot write arguments that the schema does not admit.
    """

    name: ToolName
    parameters: dict[str, Any] = msgspec.field(default_factory=_no_arguments)
    description: str = ""
    strict: bool = False

    def as_openai(self) -> dict[str, Any]:
        """The dict that chat templates expect; without an empty description or a false ``strict``."""
        given = {"description": self.description, "parameters": self.parameters, "strict": self.strict}
        return _as_function(
            {"name": self.name, **{key: value for key, value in given.items() if value not in ("", False)}}
        )


class ToolChoice(PlainStruct, frozen=True):
    """The calls that the model may, or must, make.

    Attributes:
        mode: "auto": calls or none; "none": no call; "required": one call or more; "tool": one call, of the one name.
        names: names of the tools that may be called; None: all.
    """

    mode: Literal["auto", "none", "required", "tool"] = "auto"
    names: tuple[str, ...] | None = None

    def pick(self, tools: Iterable[Tool]) -> tuple[Tool, ...]:
        """The tools that may be called."""
        if self.mode == "none":
            return ()
        return tuple(tool for tool in tools if self.names is None or tool.name in self.names)


class ToolCall(PlainStruct, frozen=True):
    """A complete call; ``arguments`` is the text of a JSON object."""

    id: str
    name: str
    arguments: str

    def as_openai(self) -> dict[str, Any]:
        """The call as a dict in a message of OpenAI's API."""
        return {"id": self.id, **_as_function({"name": self.name, "arguments": self.arguments})}


def short_id(call_id: str) -> str:
    """An id of nine letters and digits, the only form that Mistral's templates accept; the same for the same id."""
    return call_id if re.fullmatch("[A-Za-z0-9]{9}", call_id) else hashlib.sha256(call_id.encode()).hexdigest()[:9]


class ToolCallDelta(PlainStruct, frozen=True):
    """A piece of a call.

    Attributes:
        index: number of the call in the answer, in the order in which they began.
        id, name: only in the first piece of a call.
        arguments: a piece of JSON text; the pieces of a complete call, joined, are `ToolCall.arguments`.
    """

    index: int
    id: str | None
    name: str | None
    arguments: str


class Piece(NamedTuple):
    """A piece of an answer's text, split into content, reasoning and calls."""

    content: str = ""
    reasoning: str = ""
    calls: tuple[ToolCallDelta, ...] = ()


class AnswerParser(Protocol):
    """Splits a text that arrives in pieces into content, reasoning and calls.

    The result depends on the text, never on where it was cut, and no text makes a parser raise. Each character is
    exactly one of these:

    - content or reasoning;
    - a call's, from its marker on. A call is *begun*, and its first delta returned, when the text has named one of the
      tools in the format's way and its arguments begin. It is *complete* when the format's JSON (or list of
      arguments) is closed; the closing marker may be missing, since a model may stop before it.
    - markup between the parts: reasoning's markers with the newlines beside them, harmony's with the white space
      beside them, white space before a call, and white space alone after the last call.

    Text that looks like a call, and is none, is content, its marker included. If the call was begun its deltas stay,
    and it never gets into ``calls``. Where the text ends after a whole marker and before the call is complete, all
    from the marker on is that call's, and no content. Calls that need no marker, and have none, are text until they
    are begun.

    Attributes:
        calls: the complete calls, in order.
        is_cut: a call was not completed: the text ended in it, or became invalid inside a begun one.
    """

    @property
    def calls(self) -> list[ToolCall]: ...

    @property
    def is_cut(self) -> bool: ...

    def feed(self, text: str) -> Piece:
        """Read more of the text, and return the parts that are certain now."""
        ...

    def finish(self) -> Piece:
        """End the text, and return the parts held back."""
        ...


# Tools and choices from callers' values


def read_tools(given: Any) -> tuple[Tool, ...]:
    """Read the tools that a caller gives.

    Args:
        given: a list of `Tool`, of dicts in the form of OpenAI's chat API (``{"type": "function", "function": {…}}``),
            of its responses API (the same without the inner dict) or of Anthropic's (``input_schema``), and of Python
            functions, of which the name, the docstring and the annotations are read. None: no tools.
    Raises:
        InvalidRequest: one is none of these, two have one name, or they are too many or too large.
    """
    if given is None:
        return ()
    if not isinstance(given, list | tuple):
        raise invalid("tools", f"tools must be a list of functions, not {typed(given)}")
    if len(given) > MAX_TOOLS:
        raise invalid("tools", f"there are {len(given)} tools, and at most {MAX_TOOLS} are allowed; give fewer")
    tools: dict[str, Tool] = {}
    num_bytes = 0
    for number, one in enumerate(given):
        try:
            fields = _fields_of(one)
            name = fields.name if isinstance(fields, Tool) else fields.get("name")
            if isinstance(name, str) and not re.match(NAME_PATTERN, name):
                raise ValueError(f"{shorten(name)} is no name: 1 to {MAX_NAME_CHARS} of A-Z a-z 0-9 _ . - are needed")
            encoded = msgspec.json.encode(fields)
            tool = msgspec.json.decode(encoded, type=Tool)
        except (msgspec.MsgspecError, TypeError, ValueError, RecursionError, OverflowError) as exc:
            raise invalid("tools", f"tools[{number}]={shorten(one)}: {exc}") from None
        if tool.parameters.get("type", "object") != "object":
            raise invalid("tools", f"tools[{number}]: the schema of its arguments must have type 'object'")
        if tool.name in tools:
            raise invalid("tools", f"tools[{number}]: another tool is called {tool.name!r}, too; rename one")
        tools[tool.name] = tool
        num_bytes += len(encoded)
    if num_bytes > MAX_TOOLS_BYTES:
        message = f"the tools have {num_bytes:,} bytes, and at most {MAX_TOOLS_BYTES:,} are allowed; shorten them"
        raise invalid("tools", message)
    return tuple(tools.values())


def told_tools(given: Any, tools: Iterable[Tool]) -> tuple[dict[str, Any], ...]:
    """Tools in the form that chat templates expect, otherwise unchanged, with all their keys in their order.

    Args:
        tools: the result of `read_tools` for ``given``.
    """
    told = [
        (_as_chats(one) if isinstance(one, Mapping) else tool.as_openai())
        for one, tool in zip(given or (), tools, strict=True)
    ]
    copied = msgspec.json.encode(told, enc_hook=lambda value: f"<{type(value).__name__}>")
    return tuple(msgspec.json.decode(copied))


def _as_chats(given: Mapping[str, Any]) -> dict[str, Any]:
    """A tool in the form of OpenAI's chat API; Anthropic's keys that do not describe the tool are left out."""
    if isinstance(given.get("function"), Mapping):
        return dict(given) if "type" in given else {"type": "function", **given}
    if "input_schema" not in given:
        return _as_function({key: value for key, value in given.items() if key != "type"})
    names = {"name": "name", "description": "description", "input_schema": "parameters", "strict": "strict"}
    return _as_function({names[key]: value for key, value in given.items() if key in names})


def _as_function(fields: dict[str, Any]) -> dict[str, Any]:
    return {"type": "function", "function": fields}


def read_tool_choice(given: Any, tools: Iterable[Tool]) -> ToolChoice:
    """Read a ``tool_choice`` in OpenAI's spellings or Anthropic's; a tool's plain name stands for that tool.

    Raises:
        InvalidRequest: it is none of these, or asks for an unknown tool, or for a call without tools.
    """
    known = [tool.name for tool in tools]
    mode, names = (given.mode, given.names) if isinstance(given, ToolChoice) else _mode_and_names(given, known)
    if mode not in ("auto", "none", "required", "tool"):
        raise _wrong_choice(given)
    for name in names or ():
        if name not in known:
            hint = (nearest(name, known) if isinstance(name, str) else "") or f"; tools: {', '.join(known)}"[:200]
            raise invalid("tool_choice", f"tool_choice asks for {shorten(name)}, which is no tool{hint}")
    if known and names != ():
        return ToolChoice(mode, names)
    if mode in ("required", "tool"):
        raise invalid("tool_choice", "tool_choice asks for a call, but there are no tools; give tools")
    return ToolChoice("none")


def forces_call(given: Any) -> bool:
    """Whether a ``tool_choice`` that `read_tool_choice` has accepted asks for a call."""
    return _mode_and_names(given, [])[0] in ("required", "tool")


def _wrong_choice(given: Any) -> InvalidRequest:
    choices = "'auto', 'none', 'required' or {'type': 'function', 'function': {'name': …}}"
    return invalid("tool_choice", f"tool_choice={shorten(given)} is not understood; give {choices}")


def _mode_and_names(given: Any, known: list[str]) -> tuple[Any, tuple[str, ...] | None]:
    try:
        if given is None:
            return "auto", None
        if isinstance(given, str):
            mode = "required" if given == "any" else given
            is_mode = mode in ("auto", "none", "required") or not known
            return (mode, None) if is_mode else ("tool", (given,))
        kind = given["type"]
        if kind in ("function", "tool"):
            return "tool", ((given.get("function") or given)["name"],)
        if kind == "allowed_tools":
            body = given.get("allowed_tools") or given
            return body.get("mode", "auto"), tuple((one.get("function") or one)["name"] for one in body["tools"])
        return _mode_and_names(kind if isinstance(kind, str) else 0, [])
    except (KeyError, TypeError, AttributeError):
        raise _wrong_choice(given) from None


def _fields_of(given: Any) -> Any:
    if isinstance(given, Tool):
        return given
    if not isinstance(given, Mapping):
        if callable(given):
            return _fields_of_function(given)
        raise TypeError("give a function, a Tool, or a dict with a name and a schema")
    # "custom" is Anthropic's word for a function, which has a schema, and OpenAI's for a tool that has none.
    if given.get("type", "function") not in ("function", "custom" if "input_schema" in given else ""):
        raise TypeError(f"tools of type {shorten(given['type'])} are not supported; give functions")
    inner = given.get("function")
    inner = inner if isinstance(inner, Mapping) else given
    fields = {name: inner.get(name) for name in ("name", "description", "strict", "parameters")}
    if fields["parameters"] is None:
        fields["parameters"] = inner.get("input_schema")
    return {name: value for name, value in fields.items() if value is not None}


def _fields_of_function(function: Callable[..., Any]) -> dict[str, Any]:
    if not hasattr(function, "__name__"):
        raise TypeError("its name and arguments are read from a function: give one, or a dict in OpenAI's form")
    try:
        name = function.__name__
        hints = get_type_hints(function, include_extras=True)
        arguments = {}
        for parameter in inspect.signature(function).parameters.values():
            if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
                raise TypeError(f"its parameter {parameter.name} cannot be given by name")
            default = msgspec.NODEFAULT if parameter.default is parameter.empty else parameter.default
            arguments[parameter.name] = (hints.get(parameter.name, Any), default)
        schema = _schema_of(name, arguments)
    except Exception as exc:  # annotations and defaults are the caller's, and so is what evaluating them raises
        raise TypeError(f"no schema can be made of this function: {exc}; give a Tool") from None
    return {"name": name, "description": inspect.cleandoc(function.__doc__ or ""), "parameters": schema}


def _schema_of(name: str, arguments: dict[str, tuple[Any, Any]]) -> dict[str, Any]:
    """The JSON schema of an object with these fields: name -> (type, default, or NODEFAULT for a required one)."""
    fields = [(key, kind, default) for key, (kind, default) in arguments.items()]
    schema = None if any(uses_pydantic(kind) for _, kind, _ in fields) else _schema_by_msgspec(name, fields)
    if schema is None:
        import pydantic

        given: Any = {key: (kind, ... if default is msgspec.NODEFAULT else default) for key, kind, default in fields}
        schema = schema_by_pydantic(pydantic.create_model(name, **given))
    del schema["title"]
    return schema | {"additionalProperties": False}


def _schema_by_msgspec(name: str, fields: list[tuple[str, Any, Any]]) -> dict[str, Any] | None:
    """The JSON schema by msgspec; None if it has none for a type, which pydantic may know."""
    try:
        made = msgspec.json.schema(msgspec.defstruct(name, fields, kw_only=True))
    except TypeError:
        return None
    definitions = made["$defs"]
    schema: dict[str, Any] = definitions.pop(made["$ref"].rpartition("/")[2])
    return schema | ({"$defs": definitions} if definitions else {})
