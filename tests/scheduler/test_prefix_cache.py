"""Names of blocks, and who waits for whom."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aioengine.scheduler.plan import int32
from aioengine.scheduler.prefix_cache import HASH_BYTES, ROOT, PrefixCache, hash_block, hash_prompt

A, B, C = b"a" * 16, b"b" * 16, b"c" * 16


@settings(derandomize=True, deadline=None)
@given(st.lists(st.integers(0, 2**31 - 1), max_size=40), st.integers(1, 9))
def test_a_prompt_is_named_block_by_block_and_its_rest_is_not(token_ids: list[int], block_size: int) -> None:
    names = hash_prompt(int32(token_ids), block_size)
    assert len(names) == len(token_ids) // block_size
    parent = ROOT
    for index, name in enumerate(names):
        assert name == hash_block(parent, token_ids[index * block_size : (index + 1) * block_size])
        assert len(name) == HASH_BYTES
        parent = name


def test_a_name_tells_what_came_before() -> None:
    block = [1, 2, 3, 4]
    names = {
        hash_block(ROOT, block),
        hash_block(hash_block(ROOT, block), block),
        hash_block(hash_block(ROOT, [5]), block),
    }
    assert len(names) == 3


@pytest.mark.parametrize("other", [[1, 2, 4, 3], [1, 2, 3, 5], [1, 2, 3], [1, 2, 3, 4, 0], [513, 0, 3, 4]])
def test_blocks_with_other_tokens_have_other_names(other: list[int]) -> None:
    assert hash_block(ROOT, other) != hash_block(ROOT, [1, 2, 3, 4])


def test_names_are_the_same_in_every_process_and_release() -> None:
    """Replicas share what they know, so that a change of these values is a change of the format."""
    assert ROOT.hex() == "3df1cf27546c8914a36f39060af39dd4"
    assert [name.hex() for name in hash_prompt(int32(range(7)), 3)] == [
        "05b9b63cb36c337b7de787498c1ed08d",
        "277f5415b9676be7680be5c238443824",
    ]
    program = (
        "from aioengine.scheduler.plan import int32; from aioengine.scheduler.prefix_cache import hash_prompt;"
        "print(*(name.hex() for name in hash_prompt(int32([5, 2**31 - 1, 0, 9, 8]), 2)))"
    )
    run = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, env={"PYTHONHASHSEED": "1"}
    )
    assert run.stdout.split() == [name.hex() for name in hash_prompt(int32([5, 2**31 - 1, 0, 9, 8]), 2)]


def test_a_prompt_may_be_a_view_with_strides() -> None:
    token_ids = np.arange(20, dtype=np.int32)[::2]
    assert hash_prompt(token_ids, 3) == hash_prompt(int32(token_ids), 3)


def test_a_match_ends_at_the_first_name_that_nobody_knows() -> None:
    cache = PrefixCache(8)
    cache.settle([A, C], [3, 5])
    assert cache.match([A, B, C]) == ([3], None)
    assert cache.match([B, C]) == ([], None)
    assert cache.match([A, C]) == ([3, 5], None)
    assert cache.match([]) == ([], None)


def test_a_pending_name_ends_a_match_and_is_told() -> None:
    cache = PrefixCache(8)
    cache.settle([A], [3])
    cache.announce(B, owner := object())
    assert cache.match([A, B, C]) == ([3], B)
    cache.settle([B], [4])
    assert cache.match([A, B, C]) == ([3, 4], None)
    cache.withdraw(B, owner)
    assert cache.match([A, B, C]) == ([3, 4], None), "what is computed stays, whoever leaves"


def test_the_first_block_with_a_name_keeps_it() -> None:
    cache = PrefixCache(8)
    cache.settle([A], [3])
    cache.settle([A], [4])
    assert cache.match([A]) == ([3], None)
    assert cache.names[4] is None


def test_the_first_to_announce_is_the_owner() -> None:
    cache = PrefixCache(8)
    first, second = object(), object()
    cache.announce(A, first)
    cache.announce(A, second)
    cache.withdraw(A, second)
    assert cache.match([A]) == ([], A)
    cache.withdraw(A, first)
    assert cache.match([A]) == ([], None)


def test_a_name_that_is_ready_cannot_be_pending() -> None:
    cache = PrefixCache(8)
    cache.settle([A], [3])
    cache.announce(A, object())
    assert cache.pending == {}
    cache.check_integrity()


@pytest.mark.parametrize("is_computed", [True, False])
def test_waiters_are_woken_once_when_the_name_is_ready_or_gone(is_computed: bool) -> None:
    cache = PrefixCache(8)
    cache.announce(A, owner := object())
    cache.announce(B, owner)
    cache.wait(A, "first")
    cache.wait(A, "second")
    cache.wait(B, "third")
    if is_computed:
        cache.settle([A], [3])
    else:
        cache.withdraw(A, owner)
    assert cache.woken == ["first", "second"]
    assert cache.waiters() == ["first", "second", "third"]
    cache.check_integrity()
    cache.woken.clear()
    cache.settle([A], [3])
    assert cache.woken == []


def test_an_evicted_name_is_unknown() -> None:
    cache = PrefixCache(8)
    cache.settle([A, B], [3, 5])
    cache.evict([3])
    assert cache.match([A]) == ([], None)
    assert cache.names[3] is None
    cache.settle([A], [6])
    assert cache.match([A, B]) == ([6, 5], None)
    cache.check_integrity()


def test_the_check_sees_names_that_do_not_fit_their_blocks() -> None:
    cache = PrefixCache(8)
    cache.settle([A], [3])
    cache.names[4] = B
    with pytest.raises(AssertionError, match="names and blocks differ"):
        cache.check_integrity()
