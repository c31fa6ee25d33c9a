"""What a caller gives of a chat, its messages and the variables for the template: copied, checked, bounded."""

from __future__ import annotations

import dataclasses
import itertools
import json
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np

from aioengine.errors import InvalidRequest
from aioengine.tool_calls.calls import ToolCall
from aioengine.validation import shorten, typed

Message = dict[str, Any]

REASONING_FIELDS = ("reasoning_content", "thinking", "reasoning")
"""Names under which clients give a message's reasoning; templates read the first or the second."""

TEXT_PARTS = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal", "thinking": "thinking"}
"""Types of parts that are texts, in all APIs, and the field of each that has it."""

MAX_LEVELS = 32
"""Levels of lists and dicts, in a message and in the variables."""

MAX_ARGUMENT_VALUES = 4096
"""Values of a tool call's arguments; a text of more is not decoded, and the template gets the text."""

MAX_BYTES = 64 * 1024
"""Size of the variables: bytes of all texts and names, every other value counted as `VALUE_BYTES`."""

VALUE_BYTES = 8

RESERVED = frozenset({
    "chat_template", "conversation", "conversations", "documents", "max_length", "messages", "padding",
    "return_assistant_tokens_mask", "return_dict", "return_tensors", "sanitize_control_tokens", "self", "tokenize",
    "tokenizer_kwargs", "tools", "truncation",
})  # fmt: skip
"""Arguments of transformers' ``apply_chat_template`` that are no variables: given otherwise, or not for a template."""


def copy_messages(messages: Any) -> Any:
    """The messages as they are now, of plain data: another object is a dict of its fields, or a text with its type.

    Raises:
        InvalidRequest: one is deeper than `MAX_LEVELS`.
    """
    if not isinstance(messages, list | tuple):
        return messages
    return [_plain(message, MAX_LEVELS, "prompt", _opened) for message in messages]


def _plain(value: Any, levels: int, param: str, opened: Callable[[Any], Any]) -> Any:
    """A copy made of JSON's types: a template must find no methods of other objects to call.

    Args:
        levels: what is deeper, such as what holds itself, is refused.
        param: of that error.
        opened: makes a dict or a text of what is no plain data.
    """
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, np.generic):
        value = value.item()
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, int):
        return int.__int__(value)
    if isinstance(value, float):
        return float.__float__(value)
    if not isinstance(value, dict | list | tuple):
        return _plain(opened(value), levels, param, opened)
    if not levels:
        raise InvalidRequest(f"{param} is deeper than {MAX_LEVELS} levels; give it flatter", param=param)
    if isinstance(value, dict):  # by dict's own method: a subclass of the caller's may have another
        items = dict.items(value)
        return {_plain(key, 0, param, opened): _plain(item, levels - 1, param, opened) for key, item in items}
    copied = [_plain(item, levels - 1, param, opened) for item in value]
    return copied if isinstance(value, list) else tuple(copied)


def _opened(value: Any) -> Any:
    if isinstance(value, Mapping):
        return dict(value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    if isinstance(value, ToolCall):
        return value.as_openai()
    langchain = sys.modules.get("langchain_core.messages")
    if langchain is not None and isinstance(value, langchain.BaseMessage):
        return langchain.convert_to_openai_messages(value)
    if callable(getattr(value, "model_dump", None)):  # pydantic's
        return value.model_dump()
    return f"<{type(value).__name__}>"


def open_messages(prompt: Any) -> Any:
    """A list of message objects, such as pydantic models, as the dicts that they are; anything else as it is."""
    first = prompt[0] if isinstance(prompt, list | tuple) and prompt else None
    is_object = isinstance(first, Mapping) or dataclasses.is_dataclass(first) or hasattr(first, "model_dump")
    return copy_messages(prompt) if is_object and not isinstance(first, dict | type) else prompt


def check_messages(messages: object) -> list[Message]:
    """Return the messages in one form: dicts with a role and a content, no keys that are None.

    A content is a text, or a list of ``{"type": "text", "text": ...}``: parts of other APIs become such, and an
    assistant's parts of type "thinking" its ``reasoning_content``. A content that is null is the empty text, and so is
    one that an assistant's message or a result has not; the text of a refusal is a content. Other keys of a message
    (``name``, …) pass.

    Raises:
        InvalidRequest: not a non-empty list of messages; it says which message is wrong and how.
    """
    if not isinstance(messages, (list, tuple)) or not messages:
        raise InvalidRequest("chat messages must be a non-empty list of dicts with role and content", param="prompt")
    return [_check_message(index, message) for index, message in enumerate(messages)]


def _check_message(index: int, message: object) -> Message:
    if not isinstance(message, Mapping):
        raise _bad_message(index, f"is {typed(message)}; it must be a dict with role and content")
    if not isinstance(role := message.get("role"), str):
        raise _bad_message(index, 'has no role; it must be a string like "user"')
    if "content" not in message and role not in ("assistant", "tool") and not message.get("tool_calls"):
        raise _bad_message(index, "has no content; it must be a string or a list of text parts")
    checked = {str(key): value for key, value in message.items() if value is not None}
    if not checked.get("tool_calls", True):  # templates ask whether the key is there
        del checked["tool_calls"]
    content, thought = _read_content(index, checked.get("content", checked.get("refusal", "")), role)
    checked["content"] = content
    if thought and not any(name in checked for name in REASONING_FIELDS):
        checked[REASONING_FIELDS[0]] = thought
    return checked


def _read_content(index: int, content: object, role: str) -> tuple[str | list[dict[str, str]], str]:
    """The text, or the parts that are texts, and the reasoning among the parts."""
    if isinstance(content, str):
        return content, ""
    if not isinstance(content, (list, tuple)):
        raise _bad_message(index, f"has {typed(content)} as content; it must be a string or text parts")
    texts, thoughts = [], []
    for part in content:
        part = {"text": part} if isinstance(part, str) else part
        kind = part.get("type", "text") if isinstance(part, Mapping) else None
        value = part.get(TEXT_PARTS[kind]) if isinstance(kind, str) and kind in TEXT_PARTS else None
        if kind == "thinking" and role == "assistant" and value is not None:
            thoughts.append(text_of(_read_content(index, value, "")[0]))  # Mistral's are lists of parts
        elif kind != "thinking" and isinstance(value, str):
            texts.append({"type": "text", "text": value})
        else:
            named = f"of type {shorten(kind)}" if isinstance(kind, str) else f"that is {typed(part)}"
            raise _bad_message(index, f'has a content part {named}; give texts: {{"type": "text", "text": "..."}}')
    return texts, "\n".join(thoughts)


def text_of(content: str | list[dict[str, str]]) -> str:
    """A content as one text: parts are joined by newlines, as vLLM joins them."""
    return content if isinstance(content, str) else "\n".join([part["text"] for part in content])


def content_chars(content: Any) -> int:
    """Characters of a content, whether it has been checked or not."""
    if isinstance(content, list | tuple):
        return sum(content_chars(part.get("text") if isinstance(part, dict) else part) for part in content)
    return len(content) if isinstance(content, str) else 0


def parse_arguments(text: str) -> dict[str, Any] | None:
    """The object that a call's arguments are as JSON text, or as a JSON text in a JSON text; "" is an empty one.

    None: they are no object, or a large one.
    """
    value: Any = text
    for _ in range(2):
        if not isinstance(value, str) or not _has_few_values(value):
            break
        try:
            value = json.loads(value.strip() or "{}")
        except (ValueError, RecursionError):
            return None
    return value if isinstance(value, dict) else None


def _has_few_values(text: str) -> bool:
    """Whether decoding a JSON text, and encoding it again, holds the GIL for less than 1 ms."""
    bare = text.replace("\\\\", "").replace('\\"', "")  # each quote that is left begins or ends a string
    if bare.count('"') > 4 * MAX_ARGUMENT_VALUES:
        return False
    structure = "".join(bare.split('"')[::2])
    return sum(map(structure.count, ",[{")) <= MAX_ARGUMENT_VALUES


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
        raise _refused(f"must be a mapping of names to values, not {shorten(given)}")
    try:  # before it is copied: what occurs twice counts twice, and may be much
        is_too_large = any(size > MAX_BYTES for size in itertools.accumulate(_sizes(dict(given), MAX_LEVELS)))
    except UnicodeEncodeError:
        raise _refused("has a lone surrogate, which has no UTF-8 form; remove it") from None
    if is_too_large:
        raise _refused(f"has more than {MAX_BYTES} bytes; give less")
    kwargs: dict[str, Any] = _plain(dict(given), MAX_LEVELS, "chat_template_kwargs", _refuse_object)
    for name in kwargs:
        if name in RESERVED:
            raise _refused(f"holds {name}, which is not for the template: leave it out")
    if not kwargs:
        return {}
    if not is_chat:
        raise _refused("are for the messages of a chat, and this prompt is none")
    continues = kwargs.get("continue_final_message", False)
    begins = kwargs.setdefault("add_generation_prompt", not continues)
    if not isinstance(continues, bool | str):
        needed = "True, False or the name of a message's field is needed"
        raise _refused(f"holds continue_final_message={shorten(continues)}: {needed}")
    if not isinstance(begins, bool):
        raise _refused(f"holds add_generation_prompt={shorten(begins)}: True or False is needed")
    if continues and begins:
        both = "begins an answer (add_generation_prompt) and goes on with one (continue_final_message)"
        raise _refused(f"{both}: give one of them")
    return kwargs


def _refuse_object(value: Any) -> Any:
    raise _refused(f"holds a {type(value).__name__}; plain data is needed, as in JSON")


def _sizes(value: Any, levels: int) -> Iterator[int]:
    """Of all that variables hold, by which they are bounded; raises UnicodeEncodeError for a lone surrogate."""
    if isinstance(value, str):
        yield len(value.encode())
    else:
        yield VALUE_BYTES + (value.bit_length() // 8 if isinstance(value, int) else 0)
    if isinstance(value, dict) and levels:
        for name, item in dict.items(value):
            if not isinstance(name, str):
                raise _refused(f"has {shorten(name)} for a name; names are str")
            yield len(name.encode())
            yield from _sizes(item, levels - 1)
    elif isinstance(value, list | tuple) and levels:
        for item in value:
            yield from _sizes(item, levels - 1)


def _refused(problem: str) -> InvalidRequest:
    return InvalidRequest(f"chat_template_kwargs {problem}", param="chat_template_kwargs")
