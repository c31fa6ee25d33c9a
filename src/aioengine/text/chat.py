"""Chat messages to one prompt text, by the model's own template.

A template is a program that came with the weights, so it runs in Jinja's immutable sandbox. The environment around it
(its filters and globals, what of Python it may see) is transformers', because templates are written against that one.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

from aioengine.errors import InvalidRequest

MAX_COPIED_LEVELS = 32
"""Of lists and dicts in a message; what lies deeper is shared with the caller."""

MAX_ARGUMENT_VALUES = 4096
"""Of a tool call's arguments that are decoded for the template; with more they stay a text."""

MAX_SHOWN_CHARS = 500
"""Of what a template says when it fails: some say all that they were given."""


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
) -> str:
    """Render checked messages; the first call of a process imports transformers (up to a second): not on the loop.

    Args:
        add_generation_prompt: end with what begins an answer.
        continue_final_message: end within the last message, so that an answer goes on with it; or the name of its field
            to go on with.
        variables: for the template beside these; one may take the place of a named token.
        named_tokens: what the template sees as ``bos_token``, ``eos_token`` and so on.
    Raises:
        InvalidRequest: the template failed, or refused these messages by its ``raise_exception``.
    """
    from transformers.utils.chat_template_utils import render_jinja_template

    try:
        rendered, _ = render_jinja_template(
            conversations=[messages],
            chat_template=template,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            **{**named_tokens, **(variables or {})},
        )
    except Exception as error:  # a template is a program, and any of its errors says that it cannot take this input
        problem = str(error) or type(error).__name__
        if len(problem) > MAX_SHOWN_CHARS:
            problem = problem[:MAX_SHOWN_CHARS] + "..."
        if any("tool_calls" in message or message["role"] == "tool" for message in messages):
            problem += " (few templates take tool calls in every form: leave tool_calls and tool messages out)"
        raise InvalidRequest(
            f"the model's chat template does not take these messages: {problem}", param="prompt"
        ) from error
    return str(rendered[0])
