"""Calls of `Engine` for its tokenizer alone, their arguments checked: texts and chats to ids, ids to text or bytes.

A worker does long ones, in slices where one call would hold the GIL, and with it the event loop.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from aioengine.errors import InvalidRequest
from aioengine.text.chat_input import copy_messages, take_template_kwargs
from aioengine.text.detokenizer import make_detokenizer
from aioengine.text.token_table import TokenTable
from aioengine.text.tokenizer import Tokenizer
from aioengine.text.worker import TextWorker
from aioengine.validation import shorten

SLICE_IDS = 10_000
"""Ids that a thread works on at a time: it may hold the GIL for about a millisecond."""

PAUSE_S = 5e-5
"""Pause between two slices; in a shorter one the loop's thread, still waking up, would not get the GIL."""

WorkerFor = Callable[[int | None], TextWorker]
"""The worker for so many characters, or for a chat (None). Raises `EngineClosed` once the engine is closed."""


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
    if is_chat:
        # Apart from the encoding: a long chat is encoded by the worker for its size.
        render = functools.partial(tokenizer.render_chat, copy_messages(prompt), **kwargs)
        prompt = await worker_for(None).run(render, None)
    encode = functools.partial(tokenizer.encode, prompt, add_special_tokens=add)
    return await worker_for(len(prompt)).run(encode, len(prompt))


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
        texts = [detokenizer.feed_one(token_id) for some in _slices(ids) for token_id in some]
        return "".join([*texts, detokenizer.flush()])

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
    return list(token_ids)


def _slices(items: list[Any]) -> Iterator[list[Any]]:
    """The items a slice at a time, with a pause between two, for other threads to get the GIL."""
    for start in range(0, len(items), SLICE_IDS):
        if start:
            time.sleep(PAUSE_S)
        yield items[start : start + SLICE_IDS]


def _checked(token_ids: list[Any], vocab_size: int) -> list[int]:
    has_numpy = False
    for token_id in token_ids:
        if type(token_id) is int and 0 <= token_id < vocab_size:
            continue
        if isinstance(token_id, bool) or not isinstance(token_id, int | np.integer):
            raise InvalidRequest(f"token_ids holds {shorten(token_id)}, which is no token id", param="token_ids")
        if not 0 <= token_id < vocab_size:
            told = f"token_ids holds {shorten(token_id)}; the model has 0 to {vocab_size - 1}"
            raise InvalidRequest(told, param="token_ids")
        has_numpy = True
    return [int(token_id) for token_id in token_ids] if has_numpy else token_ids
