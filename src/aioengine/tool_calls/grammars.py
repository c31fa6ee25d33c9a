"""The parts of a format, and the writer of its grammar, in the Lark dialect of llguidance (its docs/syntax.md)."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import msgspec

from aioengine.errors import InternalError, InvalidRequest
from aioengine.schemas.json_pointer import referred, resolved
from aioengine.tool_calls.calls import NO_TOKENS, AnswerParser, Tool, ToolChoice
from aioengine.tool_calls.reading import Reading, StepParser, Steps

ESCAPES = 'nrbtf\\"'
"""Escapes in JSON strings, without ``\\u``: a key written with that would pass for another one."""

TOKENS = re.compile(r"(｜DSML｜|<[^<>\s=｜]+>)")
"""Texts that may be tokens inside a format's markers."""

MAX_GRAMMAR_CHARS = 256 * 1024
"""The largest grammar; a constraint may not be larger."""

_JSON_TYPES = {str: "string", bool: "boolean", int: "integer", float: "number", type(None): "null"}


class GrammarWriter:
    """A grammar that is being written, for the tools that may be called.

    Args:
        parallel: several calls are allowed.
        token_ids: text -> id, of the markers that are tokens of their own. Only that token matches there: models were
            not trained to spell its text with other tokens.

    Attributes:
        tools: the tools that may be called.
        is_many: more than one call is allowed.
        is_free: text is allowed, and no call needed.
    """

    def __init__(
        self, tools: Iterable[Tool], choice: ToolChoice, *, parallel: bool, token_ids: Mapping[str, int]
    ) -> None:
        self.tools = choice.pick(tools)
        if not self.tools:
            raise InternalError("a grammar of calls was asked for where no tool may be called")
        self.is_many = parallel and choice.mode != "tool"
        self.is_free = choice.mode == "auto"
        self._token_ids = token_ids
        self._rules: list[str] = []
        self._names: dict[str, str] = {}
        """Names of rules, by their options and bodies."""
        self._num_chars = 0

    def marker(self, text: str) -> str:
        """A marker, or a text that contains markers, in the grammar's syntax."""
        pieces = [text] if text in self._token_ids else TOKENS.split(text)
        ids = self._token_ids
        return " ".join(f"<[{ids[piece]}]>" if piece in ids else quoted(piece) for piece in pieces if piece)

    def rule(self, body: str, options: str = "") -> str:
        """Add a rule, and return its name; equal rules are one.

        Raises:
            InvalidRequest: the grammar is too large.
        """
        rule = f"{options}: {body}"
        if rule not in self._names:
            self._num_chars += len(rule)
            if self._num_chars > MAX_GRAMMAR_CHARS:
                told = (
                    f"tools: their grammar has more than {MAX_GRAMMAR_CHARS:,} characters; give fewer, or smaller ones"
                )
                raise InvalidRequest(told, param="tools")
            self._names[rule] = f"r{len(self._rules)}"
            self._rules.append(self._names[rule] + rule)
        return self._names[rule]

    def one_of(self, bodies: Iterable[str]) -> str:
        return self.rule(" | ".join(bodies))

    def several(self, one: str, between: str) -> str:
        """One, or any number of them if several calls are allowed."""
        return self.rule(f"{one} ({between} {one})*" if self.is_many else one)

    def json(self, schema: Mapping[str, Any], tool: Tool) -> str:
        """JSON as models are trained to write it: on one line, with a space or none after a separator.

        Keywords that llguidance cannot enforce are an error if the tool is strict, else ignored.

        Args:
            schema: the tool's schema, or a part of it; the references in a part are to places in the tool's schema.
        """
        if schema is not tool.parameters:
            schema = _with_definitions(schema, tool.parameters)
        spacing = {"whitespace_flexible": False, "item_separator": ", ?", "key_separator": ": ?"}
        spacing["json_allowed_escapes"] = ESCAPES
        return self.rule("%json " + json.dumps({**schema, "x-guidance": {**spacing, "lenient": not tool.strict}}))

    def json_call(self, tool: Tool, arguments_key: str) -> str:
        """A call that is a JSON object."""
        head = f'{{"name": "{tool.name}", "{arguments_key}": '
        return f"{quoted(head)} {self.json(tool.parameters, tool)} {quoted('}')}"

    def json_list(self, arguments_key: str) -> str:
        """A list of such calls."""
        call = self.one_of(self.json_call(tool, arguments_key) for tool in self.tools)
        return self.rule(f"{quoted('[')} {self.several(call, quoted(', '))} {quoted(']')}")

    def text_without(self, *markers: str, beginning: str = "", ending: str = "") -> str:
        """Any text without these markers; with a ``beginning``, its first character is neither that nor a space."""
        name = f"T{len(self._rules)}"
        inner = "|".join(map(_escaped, markers))
        body = rf"/([^\s{re.escape(beginning)}](?s:.*))?" if beginning else "/(?s:.*)"
        body += f"{_escaped(ending)}/"
        self._rules.append(f"{name}: {body}" + (f" & ~/(?s:.*)({inner})(?s:.*)/" if markers else ""))
        return name

    def text_until(self, marker: str, *others: str, beginning: str = "") -> str:
        """Any text without ``others``, as `text_without`, and then the first occurrence of the marker."""
        others = tuple(other for other in others if other != marker)
        pieces = [marker] if marker in self._token_ids else TOKENS.split(marker)
        place = next((place for place, piece in enumerate(pieces) if piece in self._token_ids), None)
        if place is not None:  # the marker's part before the token ends the text, since the text is read greedily
            before, rest = "".join(pieces[:place]), "".join(pieces[place:])
            text = self.text_without(marker, *others, beginning=beginning, ending=before)
            return self.rule(f"{text} {self.marker(rest)}")
        return self.rule(f"{self.text_without(*others, beginning=beginning)} {quoted(marker)}", "[lazy]")

    def plain_value(self, schema: Mapping[str, Any], end: str, *others: str) -> str:
        """A text that is not JSON, and its ``end``: one of the choices, or any text without ``end`` and ``others``."""
        if (choices := choices_of(schema)) is None:
            return self.text_until(end, *others)
        return f"{self.one_of(map(quoted, choices))} {self.marker(end)}"

    def finish(self, start: str) -> str:
        return "\n".join((f"start: {start}", *self._rules)) + "\n"

    def finish_marked(self, begin: str, calls: str, *others: str, between: str | None) -> str:
        """The grammar of a format whose calls begin with a marker.

        Args:
            calls: the grammar after the marker.
            others: further markers that the format reads.
            between: the separator of two of these; None: ``calls`` has all calls.
        """
        is_many = self.is_many and between is not None
        if self.is_free:
            times = "*" if is_many else "?"
            return self.finish(
                f"({self.text_until(begin, *others)} {calls}){times} {self.text_without(begin, *others)}"
            )
        one = f"{self.marker(begin)} {calls}"
        return self.finish(self.several(one, between or "") if is_many else one)

    def finish_unmarked(self, tag: str, calls: str, *, beginning: str) -> str:
        """The grammar of a format whose calls are a whole answer, or follow a tag.

        Args:
            beginning: the character that calls begin with and other answers do not.
        """
        tagged = f"{self.marker(tag)}? {calls}"
        if not self.is_free:
            return self.finish(tagged)
        text = self.text_without(tag, beginning=beginning)
        return self.finish(f"{text} | {tagged} | {self.text_until(tag, beginning=beginning)} {calls}")


class StepFormat(msgspec.Struct, eq=False):
    """A `ToolFormat` made of two functions, one that reads calls and one that writes their grammar.

    Attributes:
        read: reads an answer until its text is over.
        write: returns the grammar of the answers whose calls `read` reads.
    """

    name: str
    read: Callable[[Reading], Steps[None]]
    write: Callable[[GrammarWriter], str]
    keeps_special_tokens: bool | tuple[str, ...] = True

    def make_parser(self, tools: Iterable[Tool], make_id: Callable[[], str]) -> AnswerParser:
        return StepParser(self.read, Reading(tools, make_id))

    def make_strict_parser(self, tools: Iterable[Tool], make_id: Callable[[], str]) -> AnswerParser:
        """A parser of an answer that a grammar constrains: without its markers there are no calls."""
        return StepParser(self.read, Reading(tools, make_id, is_strict=True))

    def grammar(
        self, tools: Iterable[Tool], choice: ToolChoice, *, parallel: bool, token_ids: Mapping[str, int] = NO_TOKENS
    ) -> str:
        return self.write(GrammarWriter(tools, choice, parallel=parallel, token_ids=token_ids))


def _escaped(text: str) -> str:
    return re.escape(text).replace("/", r"\/").replace("\\\n", r"\n")


def quoted(text: str) -> str:
    return json.dumps(text) if text else ""


def properties_of(tool: Tool) -> dict[str, dict[str, Any]]:
    """The schema of each declared argument, with its own reference resolved; it may have references inside."""
    properties = resolved(tool.parameters, tool.parameters).get("properties")
    if not isinstance(properties, dict):
        return {}
    return {name: resolved(schema, tool.parameters) for name, schema in properties.items() if name}


def _with_definitions(schema: Mapping[str, Any], root: Mapping[str, Any]) -> Mapping[str, Any]:
    """A part of a schema as a document of its own, with the places in ``root`` that it refers to as definitions."""
    names: dict[str, str] = {}

    def moved(value: Any) -> Any:
        if isinstance(value, list):
            return [moved(one) for one in value]
        if not isinstance(value, dict):
            return value
        inner = {key: moved(one) for key, one in value.items()}
        reference = value.get("$ref")
        if isinstance(reference, str) and referred(root, reference) is not None:
            inner["$ref"] = f"#/$defs/{names.setdefault(reference, str(len(names)))}"
        return inner

    document = moved(schema)
    definitions: dict[str, Any] = {}
    while len(definitions) < len(names):  # each of them may refer to more
        for reference in list(names)[len(definitions) :]:
            definitions[names[reference]] = moved(referred(root, reference))
    return {**document, "$defs": definitions} if definitions else document


def required_of(tool: Tool) -> frozenset[str]:
    names = resolved(tool.parameters, tool.parameters).get("required")
    return frozenset(name for name in names if isinstance(name, str)) if isinstance(names, list) else frozenset()


def types_of(schema: Any, root: Mapping[str, Any]) -> frozenset[str]:
    """The JSON types that a schema admits; empty where it states none. Each schema is visited once."""
    found, seen, pending = set[str](), set[int](), [schema]
    while pending:
        given = pending.pop()
        if id(given) in seen:
            continue
        seen.add(id(given))
        one = resolved(given, root)
        kind, values = one.get("type"), choices_of(one)
        members = [member for key in ("anyOf", "oneOf") if isinstance(one.get(key), list) for member in one[key]]
        if isinstance(kind, str | list):
            found.update((kind,) if isinstance(kind, str) else (name for name in kind if isinstance(name, str)))
        elif values is not None:
            found.update(_JSON_TYPES.get(type(value), "object") for value in values)
        elif members:
            pending += members
        else:
            return frozenset()
    return frozenset(found)


def choices_of(schema: Mapping[str, Any]) -> list[Any] | None:
    """The allowed values; None where the schema lists none."""
    if "const" in schema:
        return [schema["const"]]
    values = schema.get("enum")
    return values if isinstance(values, list) else None
