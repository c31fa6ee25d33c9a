"""Chat messages to one prompt text, by the model's own template, as transformers renders it.

A template is a program that came with the weights: it runs in `aioengine.text.sandbox`, within `TemplateLimits`.
"""

from __future__ import annotations

from typing import Any

from aioengine.errors import AioEngineError, InvalidRequest
from aioengine.text.chat_input import REASONING_FIELDS
from aioengine.text.template_limits import TemplateLimits

MAX_SHOWN_CHARS = 500
"""Length of a template's error message: some repeat all that they were given."""

END_MARK = "CONTINUE_FINAL_MESSAGE_TAG "
"""Put behind a message that is to be continued, as in transformers; a template that trims drops its space."""


def render_template(
    template: str,
    messages: list[dict[str, Any]],
    limits: TemplateLimits,
    /,
    *,
    add_generation_prompt: bool,
    continue_final_message: bool | str = False,
    **variables: Any,
) -> str:
    """Render checked messages as transformers does; the first call with a template compiles it: not on the loop.

    Args:
        messages: of plain data, as are ``variables``; see `copy_messages`.
        limits: of its time and sizes.
        add_generation_prompt: end with what begins an answer.
        continue_final_message: end within the last message's content, for an answer that goes on with it; or within
            the field of that name.
        variables: ``bos_token``, ``eos_token`` and so on, and further ones for the template.
    Raises:
        InvalidRequest: the template does not parse (``param`` is "chat_template" then), failed, refused these messages
            by its ``raise_exception``, or was stopped, since it took too long or made something too large.
        EngineClosed: the limits are closed.
    """
    from jinja2 import TemplateError

    from aioengine.text.template_forms import forms_of

    try:
        named = {name: text for name, text in variables.items() if name.endswith("_token") and isinstance(text, str)}
        chat = [_with_reasoning(message) for message in messages]
        field = "content" if continue_final_message is True else continue_final_message
        ending = _mark_end(chat[-1], field, template) if field else ""
        given = {"tools": None, "documents": None, **variables}
        with limits.run((chat, given)):
            try:
                forms = forms_of(template, tuple(sorted(named.items())))
            except TemplateError as error:
                raise InvalidRequest(f"chat template does not parse: {error}", param="chat_template") from error
            chat = forms.fit(chat, has_tools=bool(given["tools"]))
            given["tools"] = forms.fit_tools(given["tools"])
            text = forms.template.render(messages=chat, add_generation_prompt=add_generation_prompt, **given)
        return _until_mark(text, ending) if field else text
    except AioEngineError:
        raise
    except Exception as error:  # whatever a template raises, it cannot take this input
        problem = (str(error) or type(error).__name__)[:MAX_SHOWN_CHARS]
        if any("tool_calls" in message or message["role"] == "tool" for message in messages):
            problem += " (few templates take tool calls in every form: leave tool_calls and tool messages out)"
        raise InvalidRequest(
            f"the model's chat template does not take these messages: {problem}", param="prompt"
        ) from error


def _with_reasoning(message: dict[str, Any]) -> dict[str, Any]:
    """A copy in which the reasoning has the names that templates read, whichever name it has."""
    reasoning = next((message[name] for name in REASONING_FIELDS if message.get(name) is not None), None)
    return {**message} if reasoning is None else {"thinking": reasoning, **message, "reasoning_content": reasoning}


def _mark_end(message: dict[str, Any], field: str, template: str) -> str:
    """Append `END_MARK` to a message's field, reasoning under each of its names; return the field's own text."""
    said = message.get(field)
    if field == "content" and isinstance(said, list) and said:
        *before, last = said
        message["content"] = [*before, {**last, "text": last["text"] + END_MARK}]
        return str(last["text"])
    if not isinstance(said, str):
        raise ValueError(f'continue_final_message is set but the final message has no "{field}" to continue!')
    fields = [name for name in REASONING_FIELDS if message.get(name) == said] if field in REASONING_FIELDS else [field]
    if not any(name in template for name in fields):
        raise ValueError(
            f'continue_final_message is set to "{field}" but this is not an accepted field in the chat_template'
        )
    message.update(dict.fromkeys(fields, said + END_MARK))
    return said


def _until_mark(text: str, said: str) -> str:
    """Return the text before `END_MARK`."""
    end = text.rfind(END_MARK.strip())
    if said.strip() not in text or end < 0:
        raise ValueError(
            "continue_final_message is set but the final message does not appear in the chat after applying the chat "
            "template! This can happen if the chat template deletes portions of the final message"
        )
    # A template that has trimmed the mark's space would have trimmed the message's own, too.
    return text[:end] if text[end : end + len(END_MARK)] == END_MARK else text[:end].rstrip()
