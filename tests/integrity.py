"""Whether a scheduler's books add up: its rows, columns, queues, blocks and prefix cache against its sequences."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from collections.abc import Sequence as Items

from aioengine.scheduler.block_pool import BlockPool
from aioengine.scheduler.kv_manager import KVManager
from aioengine.scheduler.prefix_cache import PrefixCache
from aioengine.scheduler.row_table import RowTable
from aioengine.scheduler.scheduler import Scheduler
from aioengine.scheduler.sequence import Reason, Sequence
from aioengine.scheduler.steps import StepsInFlight


def check_integrity(scheduler: Scheduler) -> None:
    """Each row has one occupant, each sequence is in one place, each block is owned as often as it is counted.

    Raises:
        AssertionError: says what does not add up.
    """
    table, preemption = scheduler.table, scheduler.preemption
    live = scheduler.sequences()
    assert len({sequence.order for sequence in live}) == len(live), "a sequence is in two places"
    with_row = [*table.running, *preemption.leaving]
    assert {s.order for s in with_row} == {s.order for s in table.occupants if s is not None}
    assert all(sequence.reasons for sequence in [*preemption.leaving, *scheduler.blocked.values()])
    assert not any(sequence.reasons for sequence in [*table.running, *scheduler.waiting])
    assert sum(not sequence.has_run for sequence in live) == scheduler.num_unstarted
    idle = [*scheduler.waiting, *scheduler.blocked.values()]
    assert all(not sequence.has_ended and sequence.row == -1 for sequence in idle)
    assert {s.order for s in idle if s.block_ids} == preemption.parked.keys()
    assert scheduler._num_forks == sum(bool(sequence.children) for sequence in live)
    unborn = {c.order for sequence in live for c in sequence.children if not c.has_ended}
    assert unborn == {s.order for s in live if s.reasons & Reason.FORK}, "a child waits for a parent that it has not"
    check_table(table, is_caching=scheduler.kv.is_caching)
    for sequence in with_row:
        check_steps(scheduler._steps, table, sequence)
    check_kv(scheduler.kv, live)


def check_table(table: RowTable, *, is_caching: bool) -> None:
    """The columns say what the sequences say."""
    occupants = [sequence for sequence in table.occupants if sequence is not None]
    assert all(table.occupants[sequence.row] is sequence for sequence in occupants)
    assert sorted(table.free_rows + [sequence.row for sequence in occupants]) == list(range(len(table.occupants)))
    assert [sequence.row for sequence in table.running] == table.running_rows.tolist()
    assert [s.precedence for s in table.running] == sorted(s.precedence for s in table.running)
    block_size = table.block_size
    for sequence in occupants:
        row = sequence.row
        assert table.computed[row] <= table.scheduled[row] <= table.expected[row] <= table.last[row] + 1
        assert table.scheduled[row] <= table.last[row] == sequence.limit - 1
        assert [capacity[row] for capacity in table.capacity] == [
            len(block_ids) * block_size for block_ids in sequence.block_ids
        ]
        assert all(table.scheduled[row] <= capacity[row] for capacity in table.capacity)
        if is_caching:
            assert sequence.num_ready_blocks == table.computed[row] // block_size
            assert table.next_block_boundary[row] == (sequence.num_ready_blocks + 1) * block_size


def check_steps(steps: StepsInFlight, table: RowTable, sequence: Sequence) -> None:
    """The columns of a sequence with a row count just what the steps in flight compute for it."""
    row = sequence.row
    plans = [step.plan for step in steps._steps]
    of_row = [(plan, plan.rows.tolist().index(row)) for plan in plans if row in plan.rows]
    mine = [(plan, index) for plan, index in of_row if plan.epochs[index] == table.epoch[row]]
    assert table.scheduled[row] - table.computed[row] == sum(int(plan.num_tokens[index]) for plan, index in mine)
    # The token behind a step's last position may have been forced meanwhile, and is known then.
    news = [(p, i) for p, i in mine if p.starts[i] + p.num_tokens[i] >= sequence.num_tokens]
    assert table.expected[row] - sequence.num_tokens == sum(bool(plan.purposes[index]) for plan, index in news)


def check_kv(kv: KVManager, live: Iterable[Sequence]) -> None:
    """Compare the blocks, the PENDING ones and those that are waited for with all live sequences."""
    live = list(live)
    assert not kv._copies, "copies are waiting that no plan has"
    for sequence in live:
        check_tables(kv, sequence)
    owned = Counter(b for sequence in live for block_ids in sequence.block_ids for b in block_ids if b >= 0)
    for pool in kv.pools:
        check_pool(pool, owned, kv.cache.hashes)
    check_cache(kv.cache)
    owners = {id(sequence): sequence for sequence in live}
    for block_hash, owner_object in kv.cache.pending.items():
        owner = owners.get(id(owner_object))
        assert owner is not None, "a PENDING block has no live owner"
        index = owner.num_ready_blocks
        assert owner.block_hashes[index] == block_hash, "a PENDING block is not the next of its owner"
        for block_ids, group in zip(owner.block_ids, kv.layout.groups, strict=True):
            assert index < len(block_ids) or group.reach is not None, "a PENDING block is not held by its owner"
    waiting = [sequence for sequence in live if sequence.reasons & Reason.PENDING_PREFIX]
    listed = [id(waiter) for waiters in kv.cache.waiters.values() for waiter in waiters]
    assert len(set(listed)) == len(listed), "a sequence waits for two prefixes"
    assert {id(sequence) for sequence in waiting} <= set(listed), "a sequence waits for a prefix, and will not be woken"


def check_tables(kv: KVManager, sequence: Sequence) -> None:
    """A sequence holds blocks in all groups or in none, and in each of them those that its window has not passed."""
    groups = kv.layout.groups
    assert len(sequence.block_ids) == len(sequence.num_passed_blocks) == (len(groups) if sequence.block_ids else 0)
    num_blocks = kv.blocks_for(sequence.limit - 1)
    for group, block_ids, passed, most in zip(
        groups, sequence.block_ids, sequence.num_passed_blocks, kv._most_held, strict=False
    ):
        held = [block_id for block_id in block_ids if block_id >= 0]
        assert all(block_id == -1 for block_id in block_ids[:passed])
        assert len(held) == len(block_ids) - passed or group.is_state
        assert len(held) <= min(num_blocks, most), "a sequence holds more than it may ever need"
        assert all(block_id in kv.pools[group.pool].block_ids for block_id in held)
        assert not group.is_state or not block_ids or block_ids[-1] >= 0, "the newest state has a block"


def check_pool(pool: BlockPool, owned: dict[int, int], hashes: Items[object]) -> None:
    """Compare the counts with ``owned``, {block id: references}, and the free blocks with their hashes."""
    free = [*pool._blank, *pool._cached]
    assert len(free) == len(set(free)), f"blocks free twice: {sorted(free)}"
    for block_id in pool.block_ids:
        count = pool.references[block_id]
        assert count == owned.get(block_id, 0), (
            f"block {block_id} is counted {count} times and owned {owned.get(block_id, 0)} times"
        )
    lost = set(pool.block_ids) ^ set(free) ^ {b for b in pool.block_ids if pool.references[b]}
    assert not lost, f"blocks neither free nor owned, or both: {sorted(lost)}"
    assert all(hashes[b] is not None for b in pool._cached), "a block without a hash is kept like a cached one"
    assert all(hashes[b] is None for b in pool._blank), "a cached block is allocated like a blank one"


def check_cache(cache: PrefixCache) -> None:
    """Compare ``ready`` with ``hashes``, and the hashes that are waited for with ``pending``."""
    by_block = {block_id: block_hash for of_group in cache.ready for block_hash, block_id in of_group.items()}
    assert by_block == {b: h for b, h in enumerate(cache.hashes) if h is not None}, "hashes and blocks differ"
    assert len(by_block) == sum(map(len, cache.ready)), "a block is in two groups"
    in_all = set.intersection(*map(set, cache.ready))
    assert not in_all & cache.pending.keys(), "a hash is READY and PENDING"
    assert cache.waiters.keys() <= cache.pending.keys(), "a prefix is waited for and not computed"
