"""Hashes of blocks, and the sequences that wait for them."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from integrity import check_cache

from aioengine.scheduler.plan import int32
from aioengine.scheduler.prefix_cache import HASH_BYTES, ROOT, PrefixCache, hash_block, hash_prompt

A, B, C = b"a" * 16, b"b" * 16, b"c" * 16


@settings(derandomize=True, deadline=None)
@given(st.lists(st.integers(0, 2**31 - 1), max_size=40), st.integers(1, 9))
def test_a_prompt_is_hashed_block_by_block_and_its_rest_is_not(token_ids: list[int], block_size: int) -> None:
    hashes = hash_prompt(int32(token_ids), block_size)
    assert len(hashes) == len(token_ids) // block_size
    parent = ROOT
    for index, block_hash in enumerate(hashes):
        assert block_hash == hash_block(parent, token_ids[index * block_size : (index + 1) * block_size])
        assert len(block_hash) == HASH_BYTES
        parent = block_hash


@pytest.mark.parametrize("other", [[1, 2, 4, 3], [1, 2, 3, 5], [1, 2, 3], [1, 2, 3, 4, 0], [513, 0, 3, 4]])
def test_blocks_with_other_tokens_have_other_hashes(other: list[int]) -> None:
    assert hash_block(ROOT, other) != hash_block(ROOT, [1, 2, 3, 4])


def test_hashes_are_the_same_in_every_process_and_release() -> None:
    """Replicas share what they know, so that a change of these values is a change of the format."""
    assert ROOT.hex() == "3df1cf27546c8914a36f39060af39dd4"
    assert [block_hash.hex() for block_hash in hash_prompt(int32(range(7)), 3)] == [
        "05b9b63cb36c337b7de787498c1ed08d",
        "277f5415b9676be7680be5c238443824",
    ]


def test_a_prompt_may_be_a_view_with_strides() -> None:
    token_ids = np.arange(20, dtype=np.int32)[::2]
    assert hash_prompt(token_ids, 3) == hash_prompt(int32(token_ids), 3)


def test_a_match_ends_at_the_first_hash_that_is_unknown() -> None:
    cache = PrefixCache(8)
    cache.mark_ready([A, C], [3, 5])
    assert cache.match([A, B, C]) == ([3], None)
    assert cache.match([B, C]) == ([], None)
    assert cache.match([A, C]) == ([3, 5], None)
    assert cache.match([]) == ([], None)


def test_a_pending_hash_ends_a_match_and_is_returned() -> None:
    cache = PrefixCache(8)
    cache.mark_ready([A], [3])
    cache.mark_pending(B, owner := object())
    assert cache.match([A, B, C]) == ([3], B)
    cache.mark_ready([B], [4])
    assert cache.match([A, B, C]) == ([3, 4], None)
    cache.cancel_pending(B, owner)
    assert cache.match([A, B, C]) == ([3, 4], None), "what is computed stays, whichever owner leaves"


def test_the_first_block_with_a_hash_keeps_it() -> None:
    cache = PrefixCache(8)
    cache.mark_ready([A], [3])
    cache.mark_ready([A], [4])
    assert cache.match([A]) == ([3], None)
    assert cache.hashes[4] is None


def test_the_first_to_mark_a_hash_pending_is_the_owner() -> None:
    cache = PrefixCache(8)
    first, second = object(), object()
    cache.mark_pending(A, first)
    cache.mark_pending(A, second)
    cache.cancel_pending(A, second)
    assert cache.match([A]) == ([], A)
    cache.cancel_pending(A, first)
    assert cache.match([A]) == ([], None)


@pytest.mark.parametrize("is_computed", [True, False])
def test_waiters_are_woken_once_when_the_hash_is_ready_or_gone(is_computed: bool) -> None:
    cache, woken = PrefixCache(8), list[str]()
    cache.on_wake = woken.append
    cache.mark_pending(A, owner := object())
    cache.mark_pending(B, owner)
    cache.wait(A, "first")
    cache.wait(A, "second")
    cache.wait(B, "third")
    if is_computed:
        cache.mark_ready([A], [3])
    else:
        cache.cancel_pending(A, owner)
    assert woken == ["first", "second"]
    assert cache.waiters == {B: ["third"]}
    check_cache(cache)
    cache.mark_ready([A], [3])
    assert woken == ["first", "second"]


def test_the_check_sees_hashes_that_do_not_fit_their_blocks() -> None:
    cache = PrefixCache(8)
    cache.mark_ready([A], [3])
    cache.hashes[4] = B
    with pytest.raises(AssertionError, match="hashes and blocks differ"):
        check_cache(cache)
