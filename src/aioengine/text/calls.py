"""Token ids of any number to text or bytes, for `Engine`'s calls: checked, and in slices.

One call of a library's for all of them would hold the GIL, and with it the event loop.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import numpy as np

from aioengine.errors import InvalidRequest
from aioengine.text.detokenizer import make_detokenizer
from aioengine.text.token_table import TokenTable
from aioengine.text.tokenizer import Tokenizer
from aioengine.validation import shorten

SLICE_IDS = 10_000
"""Ids that a thread works on at a time: it may hold the GIL for about a millisecond."""

PAUSE_S = 5e-5
"""Pause between two slices; in a shorter one the loop's thread, still waking up, would not get the GIL."""


def detokenize(tokenizer: Tokenizer, given: list[Any], vocab_size: int, skip_special_tokens: bool) -> str:
    """As `Engine.detokenize`, in the thread that calls it."""
    ids = [token_id for some in _slices(given) for token_id in _checked(some, vocab_size)]
    table = tokenizer.token_table(skip_special_tokens=skip_special_tokens)
    if not isinstance(table, TokenTable):
        return tokenizer.decode(ids, skip_special_tokens=skip_special_tokens)
    # The same text as by the library's decode, which holds the GIL for as long as it takes.
    detokenizer = make_detokenizer(table)
    texts = [detokenizer.feed_one(token_id) for some in _slices(ids) for token_id in some]
    return "".join([*texts, detokenizer.flush()])


def token_bytes(
    tokenizer: Tokenizer, token_ids: Any, vocab_size: int, *, is_start: bool, skip_special_tokens: bool
) -> list[bytes]:
    """As `Engine.token_bytes`."""
    ids = _checked(listed_ids(token_ids), vocab_size)
    table = tokenizer.token_table(skip_special_tokens=skip_special_tokens)
    if isinstance(table, TokenTable):
        return table.to_bytes(ids, is_start=is_start)
    return [tokenizer.decode([i], skip_special_tokens=skip_special_tokens).encode() for i in ids]


def check_flag(name: str, value: Any) -> None:
    if not isinstance(value, bool):
        raise InvalidRequest(f"{name}={shorten(value)}: True or False is needed", param=name)


def listed_ids(token_ids: Any) -> list[Any]:
    """What was given as token ids, which are not looked at, as a list of its own."""
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
