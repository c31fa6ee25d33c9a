"""What a caller gives of a chat, its messages and the variables for the template: copied, checked, bounded."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from aioengine.errors import InvalidRequest
from aioengine.validation import is_utf8, shorten, typed

MAX_LEVELS = 32
"""Levels of lists and dicts: below them messages share what they hold with the caller, and variables are refused."""

MAX_ARGUMENT_VALUES = 4096
"""Values of a tool call's arguments; a text of more is not decoded, and the template gets the text."""

MAX_BYTES = 64 * 1024
"""Size of the variables: bytes of all texts and names, every other value counted as `VALUE_BYTES`."""

VALUE_BYTES = 8

RESERVED = frozenset(
    {
        "chat_template",
        "conversation",
        "conversations",
        "documents",
        "max_length",
        "messages",
        "padding",
        "return_assistant_tokens_mask",
        "return_dict",
        "return_tensors",
        "sanitize_control_tokens",
        "self",
        "tokenize",
        "tokenizer_kwargs",
        "tools",
        "truncation",
    }
)
"""Arguments of transformers' ``apply_chat_template`` that are no variables: given otherwise, or not for a template."""


def copy_messages(messages: Iterable[Any]) -> list[Any]:
    """Return the messages as they are now, with copies of the lists, tuples and dicts in them.

    Objects of other types in a message are the caller's own.
    """
    copies: dict[int, Any] = {}
    return [_copy(message, copies, MAX_LEVELS) for message in messages]


def _copy(value: Any, copies: dict[int, Any], levels: int) -> Any:
    """Copy lists, tuples and dicts, ``levels`` deep.

    Args:
        copies: by the id of the original; an original that occurs twice, or in itself, is copied once.
    """
    if not isinstance(value, list | dict) and type(value) is not tuple:
        return value
    if id(value) in copies or not levels:
        return copies.get(id(value), value)
    # By the methods of dict and list themselves: a subclass of a caller's may have others.
    if isinstance(value, dict):
        of_dict: dict[Any, Any] = {}
        copies[id(value)] = of_dict
        of_dict.update((key, _copy(item, copies, levels - 1)) for key, item in dict.items(value))
    elif isinstance(value, list):
        of_list: list[Any] = []
        copies[id(value)] = of_list
        of_list.extend(_copy(item, copies, levels - 1) for item in list.__iter__(value))
    else:
        copies[id(value)] = tuple(_copy(item, copies, levels - 1) for item in value)
    return copies[id(value)]


def check_messages(messages: object) -> list[dict[str, Any]]:
    """Return the messages as templates read them: dicts with a role, the content as one text, no keys that are None.

    A content of text parts becomes their texts, joined by newlines: most templates know only texts. A message with
    ``tool_calls`` needs no content, which is then the empty text. A call's ``arguments`` that are a JSON object as
    text, as in the OpenAI API, become that object, as templates expect it. Other keys of a message (``name``, …) pass.

    Raises:
        InvalidRequest: not a non-empty list of messages; it says which message is wrong and how.
    """
    if not isinstance(messages, (list, tuple)) or not messages:
        raise InvalidRequest("chat messages must be a non-empty list of dicts with role and content", param="prompt")
    return [_check_message(index, message) for index, message in enumerate(messages)]


def _check_message(index: int, message: object) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise _bad_message(index, f"is {typed(message)}; it must be a dict with role and content")
    if not isinstance(message.get("role"), str):
        raise _bad_message(index, 'has no role; it must be a string like "user"')
    checked = {str(key): value for key, value in message.items() if value is not None}
    if "content" in checked:
        checked["content"] = _text_of(index, checked["content"])
    elif checked.get("tool_calls"):
        checked["content"] = ""
    else:
        raise _bad_message(index, "has no content; it must be a string or a list of text parts")
    if isinstance(calls := checked.get("tool_calls"), list | tuple):
        checked["tool_calls"] = [_with_parsed_arguments(call) for call in calls]
    return checked


def _with_parsed_arguments(call: Any) -> Any:
    function = call.get("function") if isinstance(call, Mapping) else None
    text = function.get("arguments") if isinstance(function, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(text, str) or not _has_few_values(text):
        return call
    try:
        arguments = json.loads(text or "{}")
    except (ValueError, RecursionError):  # models write broken JSON, too: the template takes the text, or fails
        return call
    return {**call, "function": {**function, "arguments": arguments}} if isinstance(arguments, dict) else call


def _has_few_values(text: str) -> bool:
    """Whether decoding a JSON text, and encoding it again, holds the GIL for less than 1 ms: a bound on its values."""
    bare = text.replace("\\\\", "").replace('\\"', "")  # each quote that is left begins or ends a string
    if bare.count('"') > 4 * MAX_ARGUMENT_VALUES:
        return False
    structure = "".join(bare.split('"')[::2])
    return sum(map(structure.count, ",[{")) <= MAX_ARGUMENT_VALUES


def _text_of(index: int, content: object) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, (list, tuple)):
        raise _bad_message(index, f"has {typed(content)} as content; it must be a string or text parts")
    texts = []
    for part in content:
        if not (isinstance(part, Mapping) and part.get("type") == "text" and isinstance(part.get("text"), str)):
            raise _bad_message(index, 'has a content part that is not {"type": "text", "text": "..."}')
        texts.append(part["text"])
    return "\n".join(texts)


def _bad_message(index: int, problem: str) -> InvalidRequest:
    return InvalidRequest(f"chat message {index} {problem}", param="prompt")


def take_template_kwargs(given: Any, *, is_chat: bool) -> dict[str, Any]:
    """Return a copy of the template's variables as they are now, for `Tokenizer.render_chat`.

    ``add_generation_prompt`` is in it: as given, else whether no message is to be continued.

    Raises:
        InvalidRequest: ``given`` is no mapping of names to plain data (None, bool, int, float, str, lists and dicts of
            them), is too large or too deep, holds a reserved name, or both begins an answer and continues one; or it is
            not empty, and the prompt is no chat.
    """
    if given is None:
        return {}
    if not isinstance(given, Mapping):
        raise _refused(f"chat_template_kwargs={shorten(given)}: a mapping of names to values is needed")
    kwargs: dict[str, Any] = _PlainCopy().copy(dict(given), MAX_LEVELS)
    for name in kwargs:
        if name in RESERVED:
            raise _refused(f"chat_template_kwargs holds {name}, which is not for the template: leave it out")
    if not kwargs:
        return {}
    if not is_chat:
        raise _refused("chat_template_kwargs are for the messages of a chat, and this prompt is none")
    continues = kwargs.get("continue_final_message", False)
    begins = kwargs.setdefault("add_generation_prompt", not continues)
    if not isinstance(continues, bool | str):
        raise _refused(
            f"continue_final_message={shorten(continues)}: True, False or the name of a message's field is needed"
        )
    if not isinstance(begins, bool):
        raise _refused(f"add_generation_prompt={shorten(begins)}: True or False is needed")
    if continues and begins:
        raise _refused(
            "add_generation_prompt begins a new answer and continue_final_message goes on with the last message: "
            "give one of them"
        )
    return kwargs


class _PlainCopy:
    """Copies plain data and bounds it: what occurs twice counts twice, and what holds itself is too deep."""

    def __init__(self) -> None:
        self._num_bytes = 0

    def copy(self, value: Any, levels: int) -> Any:
        if isinstance(value, np.generic):
            value = value.item()
        if value is None or isinstance(value, bool | float | int):
            self._count(VALUE_BYTES + (value.bit_length() // 8 if isinstance(value, int) else 0))
            return value
        if isinstance(value, str):
            return self._copy_text(value)
        if not isinstance(value, dict | list | tuple):
            raise _refused(f"chat_template_kwargs holds a {type(value).__name__}; plain data is needed, as in JSON")
        if not levels:
            raise _refused(f"chat_template_kwargs is deeper than {MAX_LEVELS} levels; give it flatter")
        self._count(VALUE_BYTES)
        if isinstance(value, dict):
            return {self._copy_name(name): self.copy(item, levels - 1) for name, item in dict.items(value)}
        items = [self.copy(item, levels - 1) for item in value]
        return items if isinstance(value, list) else tuple(items)

    def _copy_name(self, name: Any) -> str:
        if not isinstance(name, str):
            raise _refused(f"chat_template_kwargs has {shorten(name)} for a name; names are str")
        return self._copy_text(name)

    def _copy_text(self, text: str) -> str:
        self._count(len(text))
        if not is_utf8(text):
            raise _refused("chat_template_kwargs has a lone surrogate, which has no UTF-8 form; remove it")
        self._count(len(text.encode()) - len(text))
        return str.__str__(text)

    def _count(self, num_bytes: int) -> None:
        self._num_bytes += num_bytes
        if self._num_bytes > MAX_BYTES:
            raise _refused(f"chat_template_kwargs has more than {MAX_BYTES} bytes; give less")


def _refused(message: str) -> InvalidRequest:
    return InvalidRequest(message, param="chat_template_kwargs")
