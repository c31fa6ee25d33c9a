"""What is asked of a tokenizer beside requests: texts and chats to ids, ids to a text, ids to bytes.

Arguments are a caller's, and are checked here. What is long is done by a worker, in slices where one call would hold
the GIL, and with it the event loop.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import numpy as np

from aioengine.core.detokenizer import TokenTable, make_detokenizer
from aioengine.errors import InvalidRequest
from aioengine.text.chat import copy_messages
from aioengine.text.template_kwargs import take_template_kwargs
from aioengine.text.tokenizer import Tokenizer
from aioengine.text.worker import TextWorker
from aioengine.validation import shorten

SLICE_IDS = 10_000
"""Ids that a thread works on at a time: about a millisecond in which it may hold the GIL."""

PAUSE_S = 5e-5
"""Between two slices; with a shorter one the loop's thread, still waking up, comes too late to get the GIL."""

WorkerFor = Callable[[int | None], TextWorker]
"""The worker for so many characters; None where their number says nothing."""


async def tokenize(
    tokenizer: Tokenizer | None,
    worker_for: WorkerFor,
    prompt: Any,
    *,
    add_special_tokens: Any,
    chat_template_kwargs: Any,
) -> list[int]:
    """As `Engine.tokenize`."""
    is_chat = isinstance(prompt, list | tuple) and bool(prompt) and isinstance(prompt[0], dict)
    if not isinstance(prompt, str) and not is_chat:
        raise InvalidRequest(
            f"prompt={shorten(prompt)}: a text or a list of chat messages is needed, with one message at least",
            param="prompt",
        )
    add = not is_chat if add_special_tokens is None else add_special_tokens
    _check_flag("add_special_tokens", add)
    tokenizer = _needed(tokenizer, "prompt")
    kwargs = take_template_kwargs(chat_template_kwargs, is_chat=is_chat)
    messages = copy_messages(prompt) if is_chat else None

    def work() -> list[int]:
        text = str(prompt) if messages is None else tokenizer.render_chat(messages, **kwargs)
        return tokenizer.encode(text, add_special_tokens=add)

    size = None if is_chat else len(prompt)
    return await worker_for(size).run(work, size)


async def detokenize(
    tokenizer: Tokenizer | None, worker_for: WorkerFor, token_ids: Any, *, vocab_size: int, skip_special_tokens: Any
) -> str:
    """As `Engine.detokenize`."""
    _check_flag("skip_special_tokens", skip_special_tokens)
    tokenizer = _needed(tokenizer, "token_ids")
    given = _listed(token_ids)

    def work() -> str:
        ids = [token_id for some in _slices(given) for token_id in _checked(some, vocab_size)]
        table = tokenizer.token_table(skip_special_tokens=skip_special_tokens)
        if not isinstance(table, TokenTable):
            return tokenizer.decode(ids, skip_special_tokens=skip_special_tokens)
        # The same text as by the library's decode, which holds the GIL for as long as it takes.
        detokenizer = make_detokenizer(table)
        return "".join([*map(detokenizer.feed, _slices(ids)), detokenizer.flush()])

    return await worker_for(len(given)).run(work, len(given))


def token_bytes(
    tokenizer: Tokenizer | None, token_ids: Any, *, vocab_size: int, is_start: Any, skip_special_tokens: Any
) -> list[bytes]:
    """As `Engine.token_bytes`."""
    _check_flag("is_start", is_start)
    _check_flag("skip_special_tokens", skip_special_tokens)
    tokenizer = _needed(tokenizer, "token_ids")
    ids = _checked(_listed(token_ids), vocab_size)
    table = tokenizer.token_table(skip_special_tokens=skip_special_tokens)
    if isinstance(table, TokenTable):
        return table.to_bytes(ids, is_start=is_start)
    return [tokenizer.decode([i], skip_special_tokens=skip_special_tokens).encode() for i in ids]


def _needed(tokenizer: Tokenizer | None, param: str) -> Tokenizer:
    if tokenizer is None:
        raise InvalidRequest("this model has no tokenizer: it takes and gives token ids alone", param=param)
    return tokenizer


def _check_flag(name: str, value: Any) -> None:
    if not isinstance(value, bool):
        raise InvalidRequest(f"{name}={shorten(value)}: True or False is needed", param=name)


def _listed(token_ids: Any) -> list[Any]:
    if getattr(token_ids, "ndim", None) == 1 and hasattr(token_ids, "tolist"):
        token_ids = token_ids.tolist()
    if not isinstance(token_ids, list | tuple):
        raise InvalidRequest(f"token_ids={shorten(token_ids)}: a list of token ids is needed", param="token_ids")
    return token_ids if isinstance(token_ids, list) else list(token_ids)


def _slices(items: list[Any]) -> Iterator[list[Any]]:
    """The items a slice at a time, with the GIL given away between two."""
    for start in range(0, len(items), SLICE_IDS):
        if start:
            time.sleep(PAUSE_S)
        yield items[start : start + SLICE_IDS]


def _checked(token_ids: list[Any], vocab_size: int) -> list[int]:
    plain = [token_id.item() if isinstance(token_id, np.integer) else token_id for token_id in token_ids]
    try:
        ids = msgspec.convert(plain, list[int], strict=True)
    except msgspec.ValidationError:
        other = next(item for item in plain if isinstance(item, bool) or not isinstance(item, int))
        raise InvalidRequest(f"token_ids holds {shorten(other)}, which is no token id", param="token_ids") from None
    for worst in (min(ids, default=0), max(ids, default=0)):
        if not 0 <= worst < vocab_size:
            raise InvalidRequest(
                f"token_ids holds {shorten(worst)}; the model has 0 to {vocab_size - 1}", param="token_ids"
            )
    return ids
