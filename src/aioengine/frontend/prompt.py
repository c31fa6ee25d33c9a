"""Prompts: the forms in which callers give them, checked and copied, and their way to text and token ids."""

from __future__ import annotations

import contextlib
import functools
from collections import abc
from collections.abc import Callable, Mapping
from typing import Annotated, Any, Protocol, TypeVar

import msgspec
import numpy as np
from msgspec import Meta

from aioengine.errors import PromptTooLong
from aioengine.frontend.call_options import CallOptions
from aioengine.frontend.runtime import Runtime
from aioengine.sampling_params import SamplingParams
from aioengine.text.chat_input import (
    REASONING_FIELDS,
    content_chars,
    copy_messages,
    open_messages,
)
from aioengine.validation import invalid, shorten, typed


class MessageObject(Protocol):
    """A message as an object: a dataclass, or a pydantic model such as those of OpenAI's client."""

    @property
    def role(self) -> Any: ...
    @property
    def content(self) -> Any: ...


ChatMessage = Mapping[str, Any] | MessageObject
Prompt = str | list[int] | abc.Sequence[ChatMessage]
"""Text, token ids, or the messages of a chat: ``{"role": ..., "content": ...}`` each, or objects with these."""

PromptDict = Mapping[str, Any]
"""``{"prompt": text}`` or ``{"prompt_token_ids": ids}``, vLLM's `TextPrompt` and `TokensPrompt`; see `open_prompt`."""

PROMPT_KEYS = ("prompt", "prompt_token_ids", "cache_salt")

CHARS_A_TOKEN = 4
"""Roughly, of usual text."""

F = TypeVar("F", bound=Callable[..., Any])

MAX_NORMALIZED_CHARS = 4
"""Most characters that a normalizer merges into one: no composition of Unicode takes more."""


def open_prompt(prompt: Any, cache_salt: str | None) -> tuple[Any, str | None]:
    """The prompt and the salt in a `PromptDict`; other prompts are unchanged, but message objects become dicts.

    Keys with the value None count as absent, and so do unknown keys with an empty value (``multi_modal_data``). Token
    ids win over their text. A salt of the call wins over the dict's.

    Raises:
        InvalidRequest: the dict has neither text nor token ids, or has unknown keys.
    """
    if not isinstance(prompt, dict):
        return open_messages(prompt), cache_salt
    given = {key: value for key, value in prompt.items() if value is not None}
    unknown = [
        key
        for key, value in given.items()
        if key not in PROMPT_KEYS and (value or not isinstance(value, dict | list | tuple))
    ]
    if "role" in unknown:
        raise invalid("prompt", "prompt is one message; a chat is a list of messages, also of a single one")
    if unknown:
        names = ", ".join(sorted(map(shorten, unknown)))
        raise invalid("prompt", f"prompt has {names}; a prompt dict takes {', '.join(PROMPT_KEYS)}")
    salt = cache_salt if cache_salt is not None else given.get("cache_salt")
    for key in ("prompt_token_ids", "prompt"):
        if key in given:
            return given[key], salt
    raise invalid("prompt", "a prompt dict needs a prompt (text) or prompt_token_ids (a list of ints)")


def take_prompt(runtime: Runtime, prompt: Any, params: SamplingParams) -> Prompt:
    """A prompt as a text, a list of token ids or a list of messages, copied: the caller may change its own later.

    Raises:
        InvalidRequest, PromptTooLong: it is none of these, or nothing for this model.
    """
    max_ids = runtime.info.max_model_len - 1
    prompt = _as_list(prompt, max_ids, params.num_prompt_tokens(runtime.info.max_model_len))
    if not isinstance(prompt, str | list):
        raise invalid("prompt", f"prompt is {typed(prompt)}; give a str, a list of token ids, or a list of messages")
    if not prompt:
        raise invalid("prompt", "the prompt is empty; give at least one character, token id or message")
    if isinstance(prompt, list) and not is_chat(prompt):
        return _check_ids(prompt, max_ids, runtime.info.vocab_size)
    runtime.require_tokenizer()
    taken: Prompt = prompt if isinstance(prompt, str) else copy_messages(prompt)
    return taken


def keep_prompt(prompt: Any) -> Any:
    """A copy of a prompt that is checked later, if it is a list, messages, an array or a tensor."""
    if isinstance(prompt, list | tuple) and prompt and isinstance(prompt[0], dict):
        return copy_messages(prompt)
    copy = getattr(prompt, "clone", None) or getattr(prompt, "copy", None)
    try:
        return copy() if callable(copy) else prompt
    except Exception:  # an object that cannot be copied cannot be read, either: its check will raise
        return prompt


def guess_num_tokens(prompt: Prompt) -> int:
    """About how many tokens a prompt has, without a tokenizer."""
    if isinstance(prompt, str):
        return 1 + len(prompt) // CHARS_A_TOKEN
    if not is_chat(prompt):
        return len(prompt)
    contents = (message.get("content") for message in prompt if isinstance(message, dict))
    return 1 + sum(map(content_chars, contents)) // CHARS_A_TOKEN


def continued_text(message: Any, field: bool | str | None) -> str | None:
    """The text that an answer continues: a message's content, or its field of this name; None: the answer is new."""
    if not field:
        return None
    names = REASONING_FIELDS if field in REASONING_FIELDS else ("content",)
    return next((message[name] for name in names if isinstance(message.get(name), str)), None)


def tokenize_prompt(
    runtime: Runtime, prompt: Prompt, params: SamplingParams, options: CallOptions, variables: dict[str, Any]
) -> tuple[str | None, list[int]]:
    """The text of a prompt, rendered if it is a chat, and its token ids; for token ids there is no text.

    Args:
        variables: for the chat template, with the tools.
    Raises:
        InvalidRequest, PromptTooLong: it has no tokens, or more than the model takes.
    """
    if isinstance(prompt, list) and not isinstance(prompt[0], dict):
        return None, prompt  # checked at the call
    limit = runtime.info.max_model_len - 1
    tokenizer = runtime.require_tokenizer()
    if isinstance(prompt, str):
        text = prompt
    else:
        text = tokenizer.render_chat(prompt, chat_template=options.chat_template, **variables)
    num_kept = params.num_prompt_tokens(runtime.info.max_model_len)
    if runtime.longest_token_chars is not None and num_kept is None:
        at_least = len(text) // (MAX_NORMALIZED_CHARS * runtime.longest_token_chars)
        if at_least > limit:  # megabytes that cannot fit are refused before they are tokenized
            raise PromptTooLong(at_least, limit, is_lower_bound=True)
    if isinstance(prompt, str):
        ids = tokenizer.encode(text, add_special_tokens=options.add_special_tokens is not False)
    else:
        ids = tokenizer.encode_chat(text, add_special_tokens=options.add_special_tokens)
    if num_kept is not None:
        ids = ids[-num_kept:]
    if not ids:
        raise invalid("prompt", "the prompt has no tokens; give at least one character or id")
    return text, _check_ids(ids, limit, runtime.info.vocab_size)


def is_chat(prompt: Prompt) -> bool:
    """Whether a prompt that was taken is a list of messages."""
    return isinstance(prompt, list) and isinstance(prompt[0], dict)


def _check_ids(prompt: list[Any], limit: int, vocab_size: int) -> list[int]:
    """The token ids, checked, as a new list."""
    if len(prompt) > limit:
        raise PromptTooLong(len(prompt), limit)
    with contextlib.suppress(msgspec.ValidationError):  # the usual case, ten times as fast
        checked: list[int] = msgspec.convert(prompt, _ids_below(vocab_size), strict=True)
        return checked
    try:
        plain = [token_id.item() if isinstance(token_id, np.integer) else token_id for token_id in prompt]
        ids = msgspec.convert(plain, list[int], strict=True)
    except msgspec.ValidationError as exc:
        is_several = isinstance(prompt[0], str | list)
        why = "a call has one: asyncio.gather several, or give them to LLM.generate" if is_several else str(exc)
        raise invalid("prompt", f"prompt: a list holds token ids (int) or messages (dict): {why}") from None
    worst = min(ids) if min(ids) < 0 else max(ids)
    if not 0 <= worst < vocab_size:
        raise invalid("prompt", f"prompt holds token id {shorten(worst)}; the model has 0 to {vocab_size - 1}")
    return ids


@functools.cache
def _ids_below(vocab_size: int) -> Any:
    """The type of a list of a model's token ids."""
    return list[Annotated[int, Meta(ge=0, lt=vocab_size)]]


def _as_list(prompt: Any, max_ids: int, num_kept: int | None) -> Any:
    """A tuple, or an array or tensor of one dimension, as a list; of token ids the last ``num_kept``.

    Raises:
        InvalidRequest, PromptTooLong: the prompt cannot be read, or is too long for the model.
    """
    if num_kept is not None and isinstance(prompt, list | tuple) and prompt and not isinstance(prompt[0], dict):
        prompt = prompt[-num_kept:]
    if isinstance(prompt, tuple):
        if len(prompt) > max_ids and not isinstance(prompt[0], dict):
            raise PromptTooLong(len(prompt), max_ids)
        return list(prompt)
    if getattr(prompt, "ndim", None) != 1 or not hasattr(prompt, "tolist"):
        return prompt
    try:
        if num_kept is not None:
            prompt = prompt[-num_kept:]
        length = len(prompt)
        items = prompt.tolist() if length <= max_ids else None
    except Exception as exc:  # an array of the caller's own may raise anything, and so may a tensor without data
        raise invalid("prompt", f"prompt is {typed(prompt)} that cannot be read: {type(exc).__name__}") from None
    if length > max_ids:
        raise PromptTooLong(length, max_ids)
    return items
