"""Messages in the form that a chat template reads, which small test chats find out once for each template.

Clients and templates know several forms of one message. A content is a text, or a list of parts. A call's arguments
are an object, or its JSON text; the content beside calls is an empty text, or None. A template that gets another form
than it reads fails, or silently leaves the message out. So the template renders test chats for each form, and their
texts are searched in the prompt. A form that the template reads stays as the client has given it, so that the prompt
is the same as transformers'.
"""

from __future__ import annotations

import functools
import itertools
import json
import re
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

from aioengine.errors import AioEngineError
from aioengine.text.chat_input import REASONING_FIELDS, Message, parse_arguments, text_of
from aioengine.text.sandbox import compile_template
from aioengine.text.template_limits import TemplateStopped
from aioengine.tool_calls.calls import short_id

_ROLES = ("system", "user", "assistant", "tool", "developer")
"""Roles that are tested; other roles, of a client's choice, count as the user's."""

# Words of the test chats. No template contains or changes them.
MARKS = ("Qmarka", "Qmarkb")
NAME, KEY = "qname", "qkey"
CALL_ID, LONG_ID = "qcall0001", f"call_{'q1' * 12}"
_USER: Message = {"role": "user", "content": "hi"}
_TOOL: dict[str, Any] = {"name": "qtool", "description": "q", "parameters": {"type": "object", "properties": {}}}
_TOOL_FIELDS: dict[str, Any] = {"description": "", "parameters": _TOOL["parameters"]}
"""Fields that a tool may lack, with default values for templates that cannot do without them."""

_AS_DATA = re.compile(rf"""text\\?['"]:\s*\\?['"]({"|".join(MARKS)})|'{KEY}'|\\"{KEY}""")
"""Matches a part written as data, in Python's form or JSON's, and arguments in Python's form or as JSON in JSON."""


_Form = Literal["text", "part", "parts"]
"""A content as a text, a list of one part, or a list of several parts; some templates read only the first part."""


class CallForm(NamedTuple):
    """How a template reads the calls of a history; the defaults are those of most templates.

    Attributes:
        takes_objects, takes_texts: the forms of a call's arguments that it reads.
        empty: the content field of a message that has only calls.
        is_alone: it reads one call a message.
        is_apart: it reads calls or a content, not both in one message.
        is_merged: beside calls it reads reasoning or a content, not both.
        ids: ids of calls: any; nine letters and digits alone (Mistral's); or the function's name and the call's number,
            where the template writes the id in place of the name (Kimi's).
    """

    takes_objects: bool = True
    takes_texts: bool = False
    empty: Mapping[str, str | None] = {"content": ""}
    is_alone: bool = False
    is_apart: bool = False
    is_merged: bool = False
    ids: Literal["any", "short", "named"] = "any"


class TemplateForms:
    """The forms that one template reads; each is tested when it is first needed, within `TemplateLimits.run`.

    Args:
        named_tokens: ``bos_token`` and so on.
    """

    def __init__(self, template: str, named_tokens: Mapping[str, str]) -> None:
        self.template = compile_template(template)
        self._named_tokens = named_tokens
        self._names_developer = "'developer'" in template or '"developer"' in template
        self._known: dict[tuple[str, _Form, bool], bool] = {}

    def fit(self, messages: list[Message], *, has_tools: bool) -> list[Message]:
        """Bring checked messages into the forms that the template reads.

        Raises:
            TemplateStopped, AioEngineError: as `TemplateLimits.run`.
        """
        if any("tool_calls" in message for message in messages):
            messages = fit_calls(messages, self.call_form)
        return [self._fit_content(message, has_tools) for message in messages]

    def fit_tools(self, tools: list[dict[str, Any]] | None) -> list[dict[str, Any]] | None:
        """The tools with the fields that the template cannot do without; raises as `fit`."""
        fitted = []
        for tool in tools or ():
            given = tool.get("function")
            function = given if isinstance(given, dict) else _TOOL
            lacking = [name for name in _TOOL_FIELDS if function.get(name) is None]
            added = {name: _TOOL_FIELDS[name] for name in lacking if name in self._needed_fields}
            fitted.append({**tool, "function": {**function, **added}} if added else tool)
        return tools and fitted

    @functools.cached_property
    def _needed_fields(self) -> list[str]:
        """The fields of a tool without which the template leaves it out."""
        chat, mark = [self._fit_content(_USER, True)], (_TOOL["name"],)
        bare = {name: {field: value for field, value in _TOOL.items() if field != name} for name in _TOOL_FIELDS}
        return [name for name in bare if self._written(chat, mark, _TOOL) and not self._written(chat, mark, bare[name])]

    def _fit_content(self, message: Message, has_tools: bool) -> Message:
        role, content = message["role"], message.get("content")
        if role == "developer" and not (self._names_developer and self._reads(role, "text", has_tools)):
            role = "system"
        if isinstance(content, list):
            form: _Form = "parts" if len(content) > 1 else "part"
            content = content if content and self._reads(role, form, has_tools) else text_of(content)
        if isinstance(content, str) and not self._reads(role, "text", has_tools):
            content = [{"type": "text", "text": content}] if self._reads(role, "part", has_tools) else content
        return {**message, "role": role, **({"content": content} if "content" in message else {})}

    def _reads(self, role: str, form: _Form, has_tools: bool) -> bool:
        """Whether the template writes the contents of a role in a form."""
        role = role if role in _ROLES else "user"
        if (role, form, has_tools) not in self._known:
            marks = MARKS if form == "parts" else MARKS[:1]
            content = marks[0] if form == "text" else [{"type": "text", "text": mark} for mark in marks]
            chat: list[Message] = [{"role": role, "content": content, "tool_call_id": CALL_ID}]
            if role in ("system", "assistant", "tool"):
                user = self._fit_content(_USER, has_tools)
                asked = fit_calls([_asking({})], self.call_form) if role == "tool" else []
                before = [] if role == "system" else [user, *(self._fit_content(one, has_tools) for one in asked)]
                chat = [*before, *chat, *([] if role == "tool" else [user])]
            self._known[role, form, has_tools] = bool(self._written(chat, marks, _TOOL if has_tools else None))
        return self._known[role, form, has_tools]

    @functools.cached_property
    def call_form(self) -> CallForm:
        """The form in which the template reads calls."""
        arguments = {KEY: MARKS[0]}
        call, one, both = _asking(arguments), MARKS[:1], MARKS
        for empty in CallForm().empty, {"content": None}, {}:
            form = CallForm(takes_texts=True, empty=empty)
            objects, texts = (
                self._written_call(_asking(given), form, one) for given in (arguments, json.dumps(arguments))
            )
            if objects or texts:
                break
        else:
            return CallForm()
        # A template that writes the two differently writes texts as they are, and objects as its model does.
        form = form._replace(takes_objects=bool(objects), takes_texts=bool(texts) and objects in ("", texts))
        two = {**call, "tool_calls": [*call["tool_calls"], *_asking({KEY: MARKS[1]}, LONG_ID[:9])["tool_calls"]]}
        thought = {**call, "content": "hi", **dict.fromkeys(REASONING_FIELDS, "hi")}
        changes: list[tuple[Message, Sequence[str], dict[str, Any], Sequence[str]]] = [
            (two, both, {"is_alone": True}, both),
            ({**call, "content": MARKS[1]}, one, {"is_apart": True}, both),
            (thought, one, {"is_merged": True}, one),
            (_asking(arguments, LONG_ID), one, {"ids": "short"}, one),
        ]
        for message, marks, change, marks_changed in changes:
            changed = form._replace(**change)
            if not self._written_call(message, form, marks) and self._written_call(message, changed, marks_changed):
                form = changed
        writes_name, writes_id = (self._written_call(call, form, (mark,)) for mark in (NAME, CALL_ID))
        return form._replace(ids="named") if form.ids == "any" and writes_id and not writes_name else form

    def _written_call(self, message: Message, form: CallForm, marks: Sequence[str]) -> str:
        """A prompt in which the template writes a message's calls; "" if it writes them in no chat."""
        results = [{"role": "tool", "tool_call_id": call["id"], "content": "hi"} for call in message["tool_calls"]]
        for told, has_tools in itertools.product((results, []), (True, False)):
            chat = fit_calls([_USER, message, *told], form)
            chat = [one if one["role"] == "tool" else self._fit_content(one, has_tools) for one in chat]
            if text := self._written(chat, marks, _TOOL if has_tools else None):
                return text
        return ""

    def _written(self, chat: list[Message], marks: Sequence[str], tool: dict[str, Any] | None) -> str:
        """The prompt that the template makes of a chat; "" if it fails, lacks one of the marks, or has them as data."""
        tools = tool and [{"type": "function", "function": tool}]
        try:
            text = self.template.render(
                messages=chat, tools=tools, documents=None, add_generation_prompt=True, **self._named_tokens
            )
        except (AioEngineError, TemplateStopped):
            raise
        except Exception:  # any exception of a template means that it does not read this
            return ""
        return text if all(mark in text for mark in marks) and _AS_DATA.search(text) is None else ""


@functools.lru_cache(maxsize=32)
def forms_of(template: str, named_tokens: tuple[tuple[str, str], ...]) -> TemplateForms:
    """The forms that a template reads; the first call with it compiles it.

    Raises:
        TemplateError: its syntax is wrong.
    """
    return TemplateForms(template, dict(named_tokens))


def _asking(arguments: Any, call_id: str = CALL_ID) -> Message:
    call = {"id": call_id, "type": "function", "function": {"name": NAME, "arguments": arguments}}
    return {"role": "assistant", "content": "", "tool_calls": [call]}


# Calls in a form


def fit_calls(messages: list[Message], form: CallForm) -> list[Message]:
    """Put the calls of a history, and the ids of their results, into a template's form."""
    new_ids: dict[str, str] = {}
    number = itertools.count()
    fitted: list[Message] = []
    for message in messages:
        calls = message.get("tool_calls")
        if isinstance(calls, list | tuple) and all(_is_call(call) for call in calls):
            fitted += _fit_asking(message, [_fit_call(call, form, new_ids, next(number)) for call in calls], form)
        elif (call_id := message.get("tool_call_id")) and isinstance(call_id, str):
            fitted.append({**message, "tool_call_id": new_ids.get(call_id, call_id)})
        else:
            fitted.append(message)
    return _one_call_each(fitted, form) if form.is_alone else fitted


def _is_call(call: Any) -> bool:
    return isinstance(call, dict) and isinstance(call.get("function"), dict)


def _fit_call(call: Message, form: CallForm, new_ids: dict[str, str], number: int) -> Message:
    function, call_id, arguments = call["function"], call.get("id"), call["function"].get("arguments")
    if isinstance(arguments, str) and (not form.takes_texts or arguments.strip()[:1] in ('"', "")):
        parsed = parse_arguments(arguments)
        # Models write broken JSON, too: the template reads that text, or fails.
        arguments = arguments if parsed is None else parsed
    if isinstance(arguments, dict) and not form.takes_objects:
        arguments = json.dumps(arguments, ensure_ascii=False)
    if isinstance(call_id, str) and form.ids != "any":
        named = f"functions.{function.get('name')}:"
        numbered = call_id if call_id.startswith(named) else f"{named}{number}"
        new_ids[call_id] = call_id = numbered if form.ids == "named" else short_id(call_id)
    told = {"arguments": arguments} if "arguments" in function else {}
    return {**call, **({"id": call_id} if "id" in call else {}), "function": {**function, **told}}


def _fit_asking(message: Message, calls: list[Message], form: CallForm) -> list[Message]:
    """A message with calls, as one message or two."""
    content = message["content"]
    said = {name: value for name, value in message.items() if name not in ("content", "tool_calls")}
    asked = {"role": message["role"], **form.empty, "tool_calls": calls}
    reasoning = said.get(REASONING_FIELDS[0])
    if content and reasoning and form.is_merged:
        names = [name for name in REASONING_FIELDS if said.get(name) == reasoning]
        return [{**said, **asked, **dict.fromkeys(names, f"{reasoning}\n\n{text_of(content)}")}]
    if content and form.is_apart:
        return [{**said, "content": content}, asked]
    return [{**said, **asked, **({"content": content} if content else {})}]


def _one_call_each(messages: list[Message], form: CallForm) -> list[Message]:
    """Each call as a message of its own, followed by its results: those of its id, else one in order."""
    fitted: list[Message] = []
    waiting = deque(messages)
    while waiting:
        message = waiting.popleft()
        calls = message.get("tool_calls")
        if not isinstance(calls, list) or len(calls) < 2:
            fitted.append(message)
            continue
        results: list[list[Message]] = [[] for _ in calls]
        places = {call.get("id"): place for place, call in enumerate(calls)}
        for order in itertools.count():
            if not waiting or waiting[0]["role"] != "tool":
                break
            result = waiting.popleft()
            results[places.get(result.get("tool_call_id", ""), min(order, len(calls) - 1))].append(result)
        for call, told in zip(calls, results, strict=True):
            fitted += [{**message, "tool_calls": [call]}, *told]
            message = {"role": message["role"], **form.empty}
    return fitted
