"""Chat messages to one prompt text, by the model's own template.

A template is a program that came with the weights: `aioengine.text.sandbox` runs it.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from aioengine.errors import AioEngineError, InvalidRequest
from aioengine.text.lanes import Lanes

MAX_COPIED_LEVELS = 32
"""Of lists and dicts in a message; what lies deeper is shared with the caller."""

MAX_ARGUMENT_VALUES = 4096
"""Of a tool call's arguments that are decoded for the template; with more they stay a text."""

MAX_SHOWN_CHARS = 500
"""Of what a template says when it fails: some say all that they were given."""

REASONING_FIELDS = ("reasoning_content", "thinking", "reasoning")
"""The names under which clients give a message's reasoning; templates read the first, or the second."""

END_MARK = "CONTINUE_FINAL_MESSAGE_TAG "
"""As in transformers: a template shows by what becomes of the space whether it trims."""


def copy_messages(messages: Iterable[Any]) -> list[Any]:
    """Messages as they are now, with the lists, tuples and dicts in them; whether they are good ones is seen later."""
    copies: dict[int, Any] = {}
    return [_copy(message, copies, MAX_COPIED_LEVELS) for message in messages]


def _copy(value: Any, copies: dict[int, Any], levels: int) -> Any:
    """Lists, tuples and dicts copied, ``levels`` deep; what else is in a message stays the object that it is.

    Args:
        copies: by the ids of what was copied, so that what occurs twice, or in itself, is copied once.
    """
    if not isinstance(value, list | dict) and type(value) is not tuple:
        return value
    if id(value) in copies or not levels:
        return copies.get(id(value), value)
    # By the methods of the types themselves: a subclass may have made others of them.
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

    A content of text parts becomes their texts, joined by newlines: most templates know only texts. Other keys of a
    message (``name``, ``tool_calls``, …) are the template's business. A message with ``tool_calls`` needs no content:
    it is then the empty text, which templates can add to others. A call's ``arguments`` that are a JSON object as text,
    as in the OpenAI API, become that object, as transformers' templates expect them.

    Raises:
        InvalidRequest: not a non-empty list of messages; it says which message is wrong and how.
    """
    if not isinstance(messages, (list, tuple)) or not messages:
        raise InvalidRequest("chat messages must be a non-empty list of dicts with role and content", param="prompt")
    return [_check_message(index, message) for index, message in enumerate(messages)]


def _check_message(index: int, message: object) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise _bad_message(index, f"is a {type(message).__name__}; it must be a dict with role and content")
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
    except (ValueError, RecursionError):  # models write such ones, too: the template takes the text, or fails
        return call
    return {**call, "function": {**function, "arguments": arguments}} if isinstance(arguments, dict) else call


def _has_few_values(text: str) -> bool:
    """Whether JSON has so few values that decoding it, and encoding it again, holds the GIL for less than 1 ms."""
    bare = text.replace("\\\\", "").replace('\\"', "")  # each quote then begins or ends a text
    if bare.count('"') > 4 * MAX_ARGUMENT_VALUES:
        return False
    structure = "".join(bare.split('"')[::2])
    return sum(map(structure.count, ",[{")) <= MAX_ARGUMENT_VALUES


def _text_of(index: int, content: object) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, (list, tuple)):
        raise _bad_message(index, f"has a {type(content).__name__} as content; it must be a string or text parts")
    texts = []
    for part in content:
        if not (isinstance(part, Mapping) and part.get("type") == "text" and isinstance(part.get("text"), str)):
            raise _bad_message(index, 'has a content part that is not {"type": "text", "text": "..."}')
        texts.append(part["text"])
    return "\n".join(texts)


def _bad_message(index: int, problem: str) -> InvalidRequest:
    return InvalidRequest(f"chat message {index} {problem}", param="prompt")


def render_template(
    template: str,
    messages: list[dict[str, Any]],
    *,
    add_generation_prompt: bool,
    continue_final_message: bool | str = False,
    variables: Mapping[str, Any] | None = None,
    named_tokens: dict[str, str],
    lanes: Lanes | None = None,
) -> str:
    """Render checked messages as transformers does; the first call with a template compiles it: not on the loop.

    Args:
        add_generation_prompt: end with what begins an answer.
        continue_final_message: end within the last message, so that an answer goes on with it; or the name of its field
            to go on with.
        variables: for the template beside these; one may take the place of a named token.
        named_tokens: what the template sees as ``bos_token``, ``eos_token`` and so on.
        lanes: shared with the other renderings of the template; its deadline holds.
    Raises:
        InvalidRequest: the template failed, refused these messages by its ``raise_exception``, or was stopped, since it
            took too long or made something too large.
        EngineOverloaded: it takes long, and too many others do at this moment.
    """
    from aioengine.text.sandbox import compile_template

    try:
        compiled = compile_template(template)
        chat = _with_reasoning(_plain(messages))
        field = "content" if continue_final_message is True else continue_final_message
        ending = _mark_end(chat[-1], field, template) if field else ""
        given = {"tools": None, "documents": None, **named_tokens, **_plain(variables or {})}
        num_chars = sum(len(value) for message in chat for value in message.values() if isinstance(value, str))
        with (lanes or Lanes()).run(num_chars):
            text = compiled.render(messages=chat, add_generation_prompt=add_generation_prompt, **given)
        return _until_mark(text, ending) if field else text
    except AioEngineError:
        raise
    except Exception as error:  # a template is a program, and any of its errors says that it cannot take this input
        problem = str(error) or type(error).__name__
        if len(problem) > MAX_SHOWN_CHARS:
            problem = problem[:MAX_SHOWN_CHARS] + "..."
        if any("tool_calls" in message or message["role"] == "tool" for message in messages):
            problem += " (few templates take tool calls in every form: leave tool_calls and tool messages out)"
        raise InvalidRequest(
            f"the model's chat template does not take these messages: {problem}", param="prompt"
        ) from error


def _plain(value: Any) -> Any:
    """A value made of what JSON has: other objects' methods are nothing for a stranger's program to call."""
    if isinstance(value, np.generic):
        value = value.item()
    if value is None or type(value) in (str, int, float, bool):
        return value
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, int):
        return int.__int__(value)
    if isinstance(value, float):
        return float.__float__(value)
    if isinstance(value, Mapping):
        return {_plain(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        items = [_plain(item) for item in value]
        return items if isinstance(value, list) else tuple(items)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: _plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if callable(getattr(value, "model_dump", None)):  # pydantic's
        return _plain(value.model_dump())
    return f"<{type(value).__name__}>"


def _with_reasoning(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Messages whose reasoning, under whichever name it is given, has the names that templates read it by."""
    chat = []
    for message in messages:
        reasoning = next((message[name] for name in REASONING_FIELDS if message.get(name) is not None), None)
        if reasoning is not None:
            message = {"thinking": reasoning, **message, "reasoning_content": reasoning}
        chat.append(message)
    return chat


def _mark_end(message: dict[str, Any], field: str, template: str) -> str:
    """Put a mark behind a message's field, in each name that it has; returns what the field says."""
    said = message.get(field)
    if not isinstance(said, str):
        raise ValueError(
            f'continue_final_message is set but the final message has no "{field}" to continue!'
            if said is None
            else f"continue_final_message is set but the final message's {field} is no text"
        )
    fields = [name for name in REASONING_FIELDS if message.get(name) == said] if field in REASONING_FIELDS else [field]
    if not any(name in template for name in fields):
        raise ValueError(
            f'continue_final_message is set to "{field}" but this is not an accepted field in the chat_template'
        )
    message.update(dict.fromkeys(fields, said + END_MARK))
    return said


def _until_mark(text: str, said: str) -> str:
    """The text up to the mark, and without it."""
    mark = END_MARK.strip()
    if said.strip() not in text or mark not in text:
        raise ValueError(
            "continue_final_message is set but the final message does not appear in the chat after applying the chat "
            "template! This can happen if the chat template deletes portions of the final message"
        )
    end = text.rindex(mark)
    # A template that trims has trimmed what is behind the mark; then it would have trimmed what is before it, too.
    return text[:end] if text[end : end + len(END_MARK)] == END_MARK else text[:end].rstrip()
