"""The bytes of tokens, also where one is half a character; `test_token_table` joins those of any ids to their text."""

from __future__ import annotations

from typing import Any

import pytest
from text.conftest import byte_fallback, byte_level, end_of_word, unigram
from tokenizers import Tokenizer as Backend
from tokenizers import decoders

from aioengine.errors import InvalidRequest
from aioengine.text.calls import token_bytes
from aioengine.text.loading import LoadedTokenizer
from aioengine.text.tokenizer import Tokenizer


def parts_of(tokenizer: Tokenizer, ids: Any, **options: Any) -> list[bytes]:
    options = {"vocab_size": 10_000, "is_start": True, "skip_special_tokens": True, **options}
    return token_bytes(tokenizer, ids, **options)


def made(backend: Backend) -> Tokenizer:
    return Tokenizer(LoadedTokenizer(backend=backend))


@pytest.mark.parametrize("make", [byte_level, byte_fallback, unigram])
def test_parts_join_to_the_text_and_half_a_character_is_its_own_bytes(make: Any) -> None:
    tokenizer = made(make())
    text = "The quick brown fox jumps over 日本茶" + ("" if make is unigram else "🦊")
    ids = tokenizer.encode(text, add_special_tokens=False)
    parts = parts_of(tokenizer, ids[:1])
    for token_id in ids[1:]:
        parts += parts_of(tokenizer, [token_id], is_start=False)
    assert parts == parts_of(tokenizer, ids)
    assert b"".join(parts).decode() == tokenizer.decode(ids) == text
    if make is not unigram:
        assert parts[-1] == "🦊".encode()[-1:]
    assert parts_of(tokenizer, [9_999]) == [b""], "of what only pads the vocabulary"


def test_a_strip_at_the_beginning_may_take_more_than_a_token() -> None:
    strip = decoders.Strip(" ", 3, 0)
    backend = byte_fallback(decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), strip)
    tokenizer = made(backend)
    space, letter = backend.token_to_id("▁"), backend.token_to_id("a")
    for num_spaces in range(6):
        ids = [space] * num_spaces + [letter, space]
        assert b"".join(parts_of(tokenizer, ids)).decode() == tokenizer.decode(ids)
    assert parts_of(tokenizer, [space] * 5) == [b"", b"", b"", b" ", b" "]


def test_special_tokens_have_bytes_if_they_are_asked_for_and_no_space_before_the_first_word() -> None:
    tokenizer = made(byte_level())
    ids = tokenizer.encode("fox")
    assert parts_of(tokenizer, ids)[0] == b""
    assert parts_of(tokenizer, ids, skip_special_tokens=False)[0] == b"<s>"
    tokenizer = made(unigram())
    ids = tokenizer.encode("the", add_special_tokens=False)
    assert b"".join(parts_of(tokenizer, ids)) == b"the"
    assert b"".join(parts_of(tokenizer, ids, is_start=False)) == b" the"


def test_where_only_a_function_is_known_each_token_is_decoded_alone() -> None:
    tokenizer = made(end_of_word())
    ids = tokenizer.encode("The quick fox")
    assert parts_of(tokenizer, ids) == [tokenizer.decode([token_id]).encode() for token_id in ids]


@pytest.mark.parametrize(
    ("ids", "problem"),
    [
        (5, "a list of token ids"),
        ("5", "a list of token ids"),
        ({5}, "a list of token ids"),
        ([5, "six"], "holds 'six', which is no token id"),
        ([True], "holds True, which is no token id"),
        ([1.0], "holds 1.0, which is no token id"),
        ([-1], "holds -1; the model has 0 to 9999"),
        ([5, 10_000], "holds 10000; the model has 0 to 9999"),
        ([2**70], "holds 1180591620717411303424"),
    ],
)
def test_what_is_no_id_is_the_callers_fault(ids: Any, problem: str) -> None:
    with pytest.raises(InvalidRequest, match=problem) as refused:
        parts_of(made(byte_level()), ids)
    assert refused.value.param == "token_ids"
