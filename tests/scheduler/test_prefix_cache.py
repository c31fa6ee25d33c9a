"""Hashes of blocks, and the sequences that wait for them."""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Items

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from integrity import check_cache

from aioengine.scheduler.plan import int32
from aioengine.scheduler.prefix_cache import HASH_BYTES, ROOT, PrefixCache, PrefixKey, hash_block

A, B, C = b"a" * 16, b"b" * 16, b"c" * 16


@settings(derandomize=True, deadline=None)
@given(st.lists(st.integers(0, 2**31 - 1), max_size=40), st.integers(1, 9))
def test_a_prompt_is_hashed_block_by_block_and_its_rest_is_not(token_ids: list[int], block_size: int) -> None:
    hashes = PrefixKey().hash_blocks(int32(token_ids), block_size)
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
    assert [block_hash.hex() for block_hash in PrefixKey().hash_blocks(int32(range(7)), 3)] == [
        "05b9b63cb36c337b7de787498c1ed08d",
        "277f5415b9676be7680be5c238443824",
    ]


def test_keys_that_differ_in_any_part_share_no_block() -> None:
    keys = [PrefixKey(), PrefixKey("a"), PrefixKey("ab"), PrefixKey("", "a"), PrefixKey("", "ab"), PrefixKey("a", "b")]
    keys += [PrefixKey(images=images) for images in [(b"",), (b"a",), (b"a", b"b"), (b"b", b"a"), (b"ab",)]]
    hashes = [key.hash_blocks(int32(range(3)), 3)[0] for key in keys]
    assert len(set(hashes)) == len(keys)
    assert {len(key.root()) for key in keys} == {HASH_BYTES}


def test_a_prompt_may_be_a_view_with_strides() -> None:
    token_ids = np.arange(20, dtype=np.int32)[::2]
    assert PrefixKey().hash_blocks(token_ids, 3) == PrefixKey().hash_blocks(int32(token_ids), 3)


def test_a_match_ends_at_the_first_hash_that_is_unknown() -> None:
    cache = PrefixCache(8)
    cache.mark_ready(0, [A, C], [3, 5])
    assert cache.match_prefix([A, B, C]) == ([[3]], None)
    assert cache.match_prefix([B, C]) == ([[]], None)
    assert cache.match_prefix([A, C]) == ([[3, 5]], None)
    assert cache.match_prefix([]) == ([[]], None)


def mark_ready(cache: PrefixCache, hashes: list[bytes], block_ids: Iterable[Items[int]]) -> None:
    """In all groups."""
    for group, of_group in enumerate(block_ids):
        cache.mark_ready(group, hashes, of_group)


HASHES = [bytes([n] * HASH_BYTES) for n in range(12)]


@settings(derandomize=True, deadline=None, max_examples=300)
@given(st.data())
def test_a_match_is_the_longest_prefix_of_which_each_group_has_all_that_is_seen(data: st.DataObject) -> None:
    num_seen = data.draw(st.lists(st.sampled_from([None, 0, 1, 2, 5, 20]), min_size=1, max_size=4))
    num_seen.sort(key=lambda seen: seen is not None)
    cache = PrefixCache(len(HASHES) * len(num_seen), num_seen)
    tables = [range(len(HASHES) * group, len(HASHES) * (group + 1)) for group in range(len(num_seen))]
    mark_ready(cache, HASHES, tables)
    cache.evict_blocks(lost := data.draw(st.sets(st.sampled_from(range(len(HASHES) * len(num_seen))), max_size=12)))
    check_cache(cache)
    firsts = {end: [0 if seen is None else max(end - seen, 0) for seen in num_seen] for end in range(len(HASHES) + 1)}

    def is_usable(end: int) -> bool:
        seen = {block for table, first in zip(tables, firsts[end], strict=True) for block in table[first:end]}
        widest = cache.ready[max(range(len(num_seen)), key=lambda group: num_seen[group] or 0)]
        is_known = None in num_seen or not end or HASHES[end - 1] in widest
        return is_known and not seen & lost

    matched, _ = cache.match_prefix(HASHES)
    end = max(filter(is_usable, firsts))
    for block_ids, table, first in zip(matched, tables, firsts[end], strict=True):
        assert block_ids == [-1] * first + list(table[first:end])
    mark_ready(cache, HASHES, tables)
    assert [block_ids[-1:] for block_ids in cache.match_prefix(HASHES)[0]] == [
        [-1 if seen == 0 else table[-1]] for table, seen in zip(tables, num_seen, strict=True)
    ]


def test_a_hash_that_one_group_has_lost_is_pending_until_all_have_it() -> None:
    cache = PrefixCache(8, [None, 1])
    mark_ready(cache, [A, B], [[0, 1], [2, 3]])
    cache.evict_blocks([3])
    cache.mark_pending(A, owner := object())
    cache.mark_pending(B, owner)
    assert cache.match_prefix([A, B]) == ([[0], [2]], B)
    mark_ready(cache, [B], [[5], [6]])
    assert cache.match_prefix([A, B]) == ([[0, 1], [-1, 6]], None)
    assert cache.hashes[5] is None, "the first block of a group with a hash keeps it"


def test_a_pending_hash_ends_a_match_and_is_returned() -> None:
    cache = PrefixCache(8)
    cache.mark_ready(0, [A], [3])
    cache.mark_pending(B, owner := object())
    assert cache.match_prefix([A, B, C]) == ([[3]], B)
    cache.mark_ready(0, [B], [4])
    assert cache.match_prefix([A, B, C]) == ([[3, 4]], None)
    cache.cancel_pending(B, owner)
    assert cache.match_prefix([A, B, C]) == ([[3, 4]], None), "what is computed stays, whichever owner leaves"


def test_the_first_block_with_a_hash_keeps_it() -> None:
    cache = PrefixCache(8)
    cache.mark_ready(0, [A], [3])
    cache.mark_ready(0, [A], [4])
    assert cache.match_prefix([A]) == ([[3]], None)
    assert cache.hashes[4] is None


def test_the_first_to_mark_a_hash_pending_is_the_owner() -> None:
    cache = PrefixCache(8)
    first, second = object(), object()
    cache.mark_pending(A, first)
    cache.mark_pending(A, second)
    cache.cancel_pending(A, second)
    assert cache.match_prefix([A]) == ([[]], A)
    cache.cancel_pending(A, first)
    assert cache.match_prefix([A]) == ([[]], None)


@pytest.mark.parametrize("is_computed", [True, False])
def test_waiters_are_woken_once_when_the_hash_is_ready_or_gone(is_computed: bool) -> None:
    cache, woken = PrefixCache(8), list[str]()
    cache.on_wake = woken.append
    cache.mark_pending(A, owner := object())
    cache.mark_pending(B, owner)
    cache.wait_for(A, "first")
    cache.wait_for(A, "second")
    cache.wait_for(B, "third")
    if is_computed:
        cache.mark_ready(0, [A], [3])
    else:
        cache.cancel_pending(A, owner)
    assert woken == ["first", "second"]
    assert cache.waiters == {B: ["third"]}
    check_cache(cache)
    cache.mark_ready(0, [A], [3])
    assert woken == ["first", "second"]


def test_the_check_sees_hashes_that_do_not_fit_their_blocks() -> None:
    cache = PrefixCache(8)
    cache.mark_ready(0, [A], [3])
    cache.hashes[4] = B
    with pytest.raises(AssertionError, match="hashes and blocks differ"):
        check_cache(cache)
