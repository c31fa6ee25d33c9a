"""Which block is allocated next is seen by the scheduler's tests; here is what the pool's check sees."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st
from integrity import check_pool

from aioengine.scheduler.block_pool import BlockPool


def test_the_check_sees_what_does_not_add_up() -> None:
    pool = BlockPool(range(8), on_evict=lambda block_ids: None)
    hashes: list[object] = [None] * 8

    def check(*owned: int) -> None:
        check_pool(pool, Counter(owned), hashes)

    taken = pool.allocate(2)
    with pytest.raises(AssertionError, match="counted 1 times and owned 0 times"):
        check()
    with pytest.raises(AssertionError, match="counted 1 times and owned 2 times"):
        check(*taken, taken[0])
    pool.references[taken[0]] = 0
    with pytest.raises(AssertionError, match="neither free nor owned"):
        check(taken[1])
    pool._blank += [taken[0], taken[0]]
    with pytest.raises(AssertionError, match="free twice"):
        check(taken[1])
    pool._blank.pop()
    check(taken[1])
    hashes[taken[0]] = "prefix"
    with pytest.raises(AssertionError, match="allocated like a blank one"):
        check(taken[1])


@given(st.integers(1, 30), st.lists(st.tuples(st.booleans(), st.integers(1, 8), st.booleans()), max_size=60))
def test_blocks_that_were_never_allocated_are_counted(num_blocks: int, steps: list[tuple[bool, int, bool]]) -> None:
    pool = BlockPool(range(num_blocks), lambda evicted: None)
    held: list[list[int]] = []
    touched: set[int] = set()
    for allocates, count, is_cached in steps:
        if allocates and count <= pool.num_free:
            held.append(pool.allocate(count))
            touched.update(held[-1])
        elif held and not allocates:
            pool.release(held.pop(count % len(held)), [object() if is_cached else None] * num_blocks)
        assert pool.num_touched == len(touched)
        assert pool.num_cached <= pool.num_free
