"""Which block is allocated next, and when it is free."""

from __future__ import annotations

from collections import Counter

import pytest

from aioengine.scheduler.block_pool import BlockPool


class Pool:
    """A pool of eight blocks, with the hashes that a prefix cache would keep."""

    def __init__(self) -> None:
        self.hashes: list[object] = [None] * 8
        self.evicted: list[int] = []
        self.pool = BlockPool(8, self._evict)

    def _evict(self, block_ids: list[int]) -> None:
        self.evicted += block_ids
        for block_id in block_ids:
            self.hashes[block_id] = None

    def set_hashes(self, *block_ids: int) -> None:
        for block_id in block_ids:
            self.hashes[block_id] = f"prefix {block_id}"

    def release(self, *block_ids: int) -> None:
        self.pool.release(block_ids, self.hashes)

    def check(self, *owned: int) -> None:
        self.pool.check_integrity(Counter(owned), self.hashes)


@pytest.fixture
def blocks() -> Pool:
    return Pool()


def test_blank_blocks_are_allocated_before_cached_ones(blocks: Pool) -> None:
    cached, blank = blocks.pool.allocate(4), blocks.pool.allocate(4)
    blocks.set_hashes(*cached)
    blocks.release(*cached)
    blocks.release(*blank)
    assert sorted(blocks.pool.allocate(4)) == sorted(blank)
    assert blocks.evicted == []


def test_cached_blocks_go_by_the_time_of_their_release_and_the_tail_before_the_head(blocks: Pool) -> None:
    old, new = blocks.pool.allocate(3), blocks.pool.allocate(5)
    blocks.set_hashes(*old, *new)
    blocks.release(*old)
    blocks.release(*new)
    assert blocks.pool.allocate(4) == [old[2], old[1], old[0], new[4]]
    assert blocks.evicted == [old[2], old[1], old[0], new[4]]
    blocks.check(*old, new[4])


def test_a_cached_block_that_was_used_again_goes_last(blocks: Pool) -> None:
    used = blocks.pool.allocate(8)
    blocks.set_hashes(*used)
    blocks.release(*used)
    oldest = used[7]
    assert blocks.pool.num_unused([oldest]) == 1
    blocks.pool.retain([oldest])
    assert blocks.pool.num_unused([oldest]) == 0
    blocks.release(oldest)
    assert blocks.pool.allocate(8)[-1] == oldest


def test_the_check_sees_what_does_not_add_up(blocks: Pool) -> None:
    taken = blocks.pool.allocate(2)
    with pytest.raises(AssertionError, match="counted 1 times and owned 0 times"):
        blocks.check()
    with pytest.raises(AssertionError, match="counted 1 times and owned 2 times"):
        blocks.check(*taken, taken[0])
    blocks.pool.references[taken[0]] = 0
    with pytest.raises(AssertionError, match="neither free nor owned"):
        blocks.check(taken[1])
    blocks.pool._blank += [taken[0], taken[0]]
    with pytest.raises(AssertionError, match="free twice"):
        blocks.check(taken[1])
    blocks.pool._blank.pop()
    blocks.check(taken[1])
    blocks.set_hashes(taken[0])
    with pytest.raises(AssertionError, match="allocated like a blank one"):
        blocks.check(taken[1])
