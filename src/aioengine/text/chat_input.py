"""Variables of a caller's for the model's chat template: plain data, bounded, and none that has a meaning already."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from aioengine.errors import InvalidRequest
from aioengine.validation import is_utf8, shorten

MAX_BYTES = 64 * 1024
"""Of all texts and names together, every other value counted as `VALUE_BYTES`."""

VALUE_BYTES = 8
MAX_LEVELS = 32

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
"""What is given otherwise, or is no business of a template: the arguments of transformers' ``apply_chat_template``."""


def take_template_kwargs(given: Any, *, is_chat: bool) -> dict[str, Any]:
    """The variables as they are now, for `Tokenizer.render_chat`; what is in them may be changed afterwards.

    ``add_generation_prompt`` is in it: as given, else whether no message is to be continued.

    Raises:
        InvalidRequest: it is no mapping of names to plain data (None, bool, int, float, str, lists and dicts of them),
            is too large or too deep, holds a reserved name, or both begins an answer and continues one; or it holds
            something, and the prompt is no chat.
    """
    if given is None:
        return {}
    if not isinstance(given, Mapping):
        raise _refused(f"chat_template_kwargs={shorten(given)}: a mapping of names to values is needed")
    kwargs: dict[str, Any] = _Copying().copy(dict(given), MAX_LEVELS)
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


class _Copying:
    """Copies plain data, and counts what it comes to: what occurs twice counts twice, and what holds itself is deep."""

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
