"""The forms in which scripts give prompts, brought into those that `Engine` takes."""

from __future__ import annotations

from typing import Any

from aioengine.errors import InvalidRequest


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
