"""The forms in which scripts give prompts, brought into those that `Engine` takes."""

from __future__ import annotations

from typing import Any

from aioengine.errors import InvalidRequest

_KNOWN = ("prompt", "prompt_token_ids", "cache_salt")


def read_prompt(prompt: Any, cache_salt: str | None) -> tuple[Any, str | None]:
    """A prompt and its salt; a dict ``{"prompt": text}`` or ``{"prompt_token_ids": ids}`` is opened, others stay.

    Keys whose value is None count as absent. Token ids win over their text. A salt of the call wins over the dict's.

    Raises:
        InvalidRequest: the dict has neither, or has what this engine does not know.
    """
    if not isinstance(prompt, dict):
        return prompt, cache_salt
    given = {key: value for key, value in prompt.items() if value is not None}
    unknown = ", ".join(sorted(str(key) for key in given if key not in _KNOWN))
    if unknown:
        raise InvalidRequest(f"prompt has {unknown}; a prompt dict takes {', '.join(_KNOWN)}", param="prompt")
    salt = cache_salt if cache_salt is not None else given.get("cache_salt")
    for key in ("prompt_token_ids", "prompt"):
        if key in given:
            return given[key], salt
    raise InvalidRequest("a prompt dict needs a prompt (text) or prompt_token_ids (a list of ints)", param="prompt")


def list_prompts(prompts: Any) -> list[Any]:
    """One prompt or several, as several: text, token ids, an array of them, a dict and a chat are one each."""
    if not isinstance(prompts, list | tuple):
        return [prompts]
    if not prompts:
        return []
    first = prompts[0]
    is_message = isinstance(first, dict) and "role" in first
    is_one = is_message or not (isinstance(first, str | list | tuple | dict) or hasattr(first, "__len__"))
    return [prompts] if is_one else list(prompts)


def list_chats(messages: Any) -> list[Any]:
    """One conversation or several, as several.

    Raises:
        InvalidRequest: these are no conversations.
    """
    if isinstance(messages, list | tuple) and messages and isinstance(messages[0], dict):
        messages = [messages]
    is_known = isinstance(messages, list | tuple) and all(
        isinstance(chat, list | tuple) and chat and isinstance(chat[0], dict) for chat in messages
    )
    if not is_known:
        raise InvalidRequest(
            "messages: give a conversation, a list of {'role': ..., 'content': ...}, or a list of conversations",
            param="messages",
        )
    return list(messages)
