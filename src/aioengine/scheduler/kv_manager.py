"""The KV blocks of sequences: what each holds, shares, and leaves behind."""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Collection, Iterable
from itertools import accumulate, chain, groupby, pairwise, zip_longest

import msgspec
import numpy as np

from aioengine.scheduler.block_pool import BlockPool
from aioengine.scheduler.cache_layout import BLOCKS_A_STEP, FULL_ATTENTION, CacheLayout
from aioengine.scheduler.prefix_cache import PrefixCache, hash_block
from aioengine.scheduler.row_table import Rows
from aioengine.scheduler.sequence import Sequence


class PrefixMatch(msgspec.Struct, frozen=True, gc=False):
    """The part of a sequence that the prefix cache has, and how much is missing.

    Attributes:
        block_ids: by group, READY blocks of its first tokens; -1 for what the tokens behind them do not see.
        pending: the hash of the block after them if that is PENDING, else None.
        missing: by group, blocks to allocate for the rest of its known tokens, a copy of a shared last block included.
    """

    block_ids: list[list[int]]
    pending: bytes | None
    missing: list[int]

    @property
    def num_blocks(self) -> int:
        """Whole blocks of tokens that need not be computed."""
        return len(self.block_ids[0])


class KVManager:
    """Allocates blocks to sequences and caches their prefixes.

    A block belongs to the sequences that refer to it, one or several. Without references, a READY block is free and
    cached; any other block is free and blank. A PENDING block belongs to the one sequence that computes it.
    Without prefix caching no block is hashed.

    A sequence has a block table for each group of layers; their n-th blocks are of the same tokens. In a group with a
    window it gives up what no later token sees, and takes no more ahead than it needs in place of that. In a group of
    states it takes the last two blocks of those that a step crosses.

    Args:
        num_blocks: of each pool of the layout.
        max_in_flight: steps that are launched and not applied, each of ``max_step_tokens`` tokens at the most.

    Attributes:
        pools: ids of blocks are unique among all of them.
    """

    def __init__(
        self,
        num_blocks: Iterable[int],
        block_size: int,
        *,
        enable_prefix_caching: bool,
        layout: CacheLayout = FULL_ATTENTION,
        max_in_flight: int = 1,
        max_step_tokens: int = 1,
    ) -> None:
        self.layout = layout
        self.block_size = block_size
        self.is_caching = enable_prefix_caching
        self.has_windows = any(group.reach is not None for group in layout.groups)
        self._groups = layout.groups
        self._has_states = layout.has_states
        self._reaches = {group.reach for group in layout.groups if group.reach is not None}
        self._none_passed = (0,) * len(layout.groups)
        self._most_held = layout.most_held(
            2**31, block_size, max_in_flight=max_in_flight, max_step_tokens=max_step_tokens
        )
        seen = [None if group.reach is None else self.blocks_for(group.reach - 1) for group in layout.groups]
        firsts = [0, *accumulate(num_blocks)]
        self.cache = PrefixCache(firsts[-1], seen)
        self.pools = [BlockPool(range(*span), self.cache.evict_blocks) for span in pairwise(firsts)]
        assert len(self.pools) == len(layout.pools), "each pool has its number of blocks"
        self._has_one_pool = len(self.pools) == 1
        self._longest = self._find_longest()
        self._is_plain = self._has_one_pool and not self._has_states
        self.num_queried_tokens = 0
        self.num_hit_tokens = 0
        self._copies: list[tuple[int, int]] = []
        """(from, to) block ids; the first has a reference for the copy until `take_copies`."""

    @property
    def tightest_pool(self) -> BlockPool:
        """The pool with the smallest share of free blocks."""
        if self._has_one_pool:
            return self.pools[0]
        return min(self.pools, key=lambda pool: pool.num_free / max(pool.num_blocks, 1))

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks of so many tokens in one group."""
        return -(-num_tokens // self.block_size)

    def fits_alone(self, num_tokens: int) -> bool:
        """Whether a sequence can come to so many computed tokens when it has all blocks."""
        return num_tokens <= self._longest

    def _find_longest(self) -> int:
        """Tokens of the longest sequence that fits alone, in whole blocks."""

        def is_too_long(num_blocks: int) -> bool:
            held = self.layout.sum_by_pool(min(num_blocks, most) for most in self._most_held)
            return any(count > pool.num_blocks for count, pool in zip(held, self.pools, strict=True))

        return (bisect_right(range(2**31), False, key=is_too_long) - 1) * self.block_size

    def count_growth(self, growing: list[Rows]) -> list[int] | None:
        """Count the blocks that rows need, by pool; None: so many are not free.

        Args:
            growing: by group, as `out_of_blocks` gives them.
        """
        if self._is_plain:
            count = sum(map(len, growing))
            return [count] if count <= self.pools[0].num_free else None
        counts = list(map(len, growing))
        for number, group in enumerate(self._groups):
            if group.is_state and counts[number]:
                counts[number] = int(np.minimum(np.unique(growing[number], return_counts=True)[1], BLOCKS_A_STEP).sum())
        counts = self.layout.sum_by_pool(counts)
        is_free = all(count <= pool.num_free for count, pool in zip(counts, self.pools, strict=True))
        return counts if is_free else None

    def find_prefix(self, sequence: Sequence) -> PrefixMatch:
        """The cached beginning of a sequence; empty for one that holds blocks, since it has begun already.

        At least its last known token is left to compute, since the next one is sampled from that; all are, if the
        prompt's log-probabilities are wanted.
        """
        num_tokens, held = sequence.num_tokens, sequence.block_ids
        if held:
            block_ids: list[list[int]] = [[] for _ in held]
            pending = None
        elif self.is_caching and not sequence.needs_prompt_logprobs:
            count = (num_tokens - 1) // self.block_size
            hashes = self._hash_blocks(sequence, count)
            block_ids, pending = self.cache.match_prefix(hashes if len(hashes) == count else hashes[:count])
        else:
            block_ids, pending = self.cache.match_prefix(())
        held = held or block_ids
        num_blocks = -(-num_tokens // self.block_size)
        missing = [num_blocks - len(held[0])] * len(held)
        if self.has_windows:  # no more than is ever held at once
            passed = sequence.num_passed_blocks or self._num_passed_blocks(len(held[0]) * self.block_size)
            for number, group in enumerate(self._groups):
                missing[number] = max(min(num_blocks, passed[number] + self._most_held[number]) - len(held[number]), 0)
                if group.is_state:
                    missing[number] = min(missing[number], BLOCKS_A_STEP)
        if sequence.shares_last_block:
            missing = [count + 1 for count in missing]
        return PrefixMatch(block_ids, pending, missing)

    def _num_passed_blocks(self, num_computed_tokens: int) -> tuple[int, ...]:
        """Count the first blocks of each group that no token needs which is computed after so many."""
        if not self.has_windows:
            return self._none_passed
        size = self.block_size
        passed: dict[int | None, int] = {
            reach: max(num_computed_tokens + 1 - reach, 0) // size for reach in self._reaches
        }
        return tuple([passed.get(group.reach, 0) for group in self._groups])

    def can_admit(self, match: PrefixMatch, reserve: list[int] | None, victims: Collection[Sequence] = ()) -> bool:
        """Whether all known tokens fit with ``reserve`` blocks left: a prompt half admitted would only be preempted.

        Args:
            reserve: by pool; None: none.
            victims: count as if they had given up their blocks; those that others hold, too, are not free then.
        """
        if self._has_one_pool and not victims:
            [pool] = self.pools
            num_free = pool.num_free - (reserve[0] if reserve else 0)
            return sum(match.missing) + pool.num_unused(_held(match.block_ids)) <= num_free
        missing = self.layout.sum_by_pool(match.missing)
        for number, (pool, shared) in enumerate(self._held_by_pool(match.block_ids)):
            num_lacking = missing[number] + pool.num_unused(shared) - pool.num_free
            if reserve is not None:
                num_lacking += reserve[number]
            if num_lacking <= 0:
                continue
            if num_lacking > sum(victim.num_blocks for victim in victims):
                return False
            given_up: Counter[int] = Counter()  # 0.1 µs a block
            for victim in victims:
                given_up.update(self._held_by_pool(victim.block_ids)[number][1])
            for block_id in shared:
                given_up.pop(block_id, None)
            if num_lacking > pool.num_freed(given_up):
                return False
        return True

    def admit_sequence(self, sequence: Sequence, match: PrefixMatch, num_left: int) -> None:
        """Give a sequence blocks for all its known tokens, and mark the one that it is going to fill next PENDING.

        In a group with a window it gets no more than it will hold at once; it grows by the others when it gives up as
        many. In a group of states it gets those of its next step.

        Args:
            num_left: the most tokens that it computes in that step.
        """
        if not sequence.block_ids:
            num_blocks = len(match.block_ids[0])
            if num_blocks:
                for pool, shared in self._held_by_pool(match.block_ids):
                    pool.retain(shared)
            sequence.block_ids = match.block_ids
            sequence.num_ready_blocks = num_blocks
            sequence.num_computed_tokens = num_blocks * self.block_size
            sequence.num_passed_blocks = self._num_passed_blocks(sequence.num_computed_tokens)
            self.num_queried_tokens += sequence.num_tokens
            self.num_hit_tokens += sequence.num_computed_tokens
            if not sequence.has_run:
                sequence.num_cached_tokens = sequence.num_computed_tokens
        for number, block_ids in enumerate(sequence.block_ids):
            group = self._groups[number]
            if group.is_state:
                end = min(sequence.num_computed_tokens + num_left, sequence.num_tokens)
                block_ids += self._take_states(self.pools[group.pool], self.blocks_for(end) - len(block_ids))
                continue
            missing = self.pools[group.pool].allocate(match.missing[number])
            if sequence.shares_last_block:
                [copy] = missing  # it knows one token more than its prompt, for which there is room in the last block
                self._copies.append((block_ids.pop(), copy))
            block_ids += missing
        sequence.shares_last_block = False
        if self.is_caching and sequence.is_cacheable:
            hashes = self._hash_blocks(sequence, sequence.num_tokens // self.block_size)
            if len(hashes) > sequence.num_ready_blocks:
                self.cache.mark_pending(hashes[sequence.num_ready_blocks], sequence)

    def fork_sequence(self, parent: Sequence, child: Sequence) -> None:
        """Let ``child`` begin with the blocks of its parent's prompt, which is computed.

        It takes a reference to each, the partial last one included: other sequences may write to its positions behind
        the prompt, and to no others. What the child computes goes to a copy, which it gets when it is admitted.

        Where layers keep states, the parent goes on in its last block. So the child begins at the last block boundary
        of the prompt, and computes the tokens behind that again; it holds nothing if there is no such boundary.
        """
        num_full = len(parent.prompt) // self.block_size
        num_tokens = num_full * self.block_size if self._has_states else len(parent.prompt)
        num_blocks = self.blocks_for(num_tokens)
        if not num_blocks:
            return
        child.block_ids = [block_ids[:num_blocks] for block_ids in parent.block_ids]
        child.num_passed_blocks = parent.num_passed_blocks
        for pool, shared in self._held_by_pool(child.block_ids):
            pool.retain(shared)
        child.shares_last_block = num_blocks > num_full
        child.block_hashes = parent.block_hashes[:num_full]
        child.num_ready_blocks = num_full if self.is_caching else 0
        child.num_computed_tokens = num_tokens
        child.is_cacheable = parent.is_cacheable

    def take_copies(self) -> list[tuple[int, int]]:
        """Blocks to copy, (from, to), before anything else is computed."""
        copies = self._copies
        if copies:
            self._copies = []
            sources = [source for source, _ in copies]
            for pool in self.pools:
                pool.release([block_id for block_id in sources if block_id in pool.block_ids], self.cache.hashes)
        return copies

    def grow_tables(self, number: int, sequences: list[Sequence]) -> list[int]:
        """One more block in a group for each, one may stand there several times in a row; the caller has checked that
        there are as many."""
        group = self._groups[number]
        pool = self.pools[group.pool]
        if group.is_state:
            block_ids = []
            for _, run in groupby(sequences):
                block_ids += self._take_states(pool, len(list(run)))
        else:
            block_ids = pool.allocate(len(sequences))
        for sequence, block_id in zip(sequences, block_ids, strict=True):
            sequence.block_ids[number].append(block_id)
        return block_ids

    def _take_states(self, pool: BlockPool, count: int) -> list[int]:
        """The next ``count`` blocks of a table of states, crossed in one step: -1 where the step writes no state."""
        num_kept = min(max(count, 0), BLOCKS_A_STEP)
        return [-1] * (count - num_kept) + pool.allocate(num_kept)

    def give_up_passed(self, sequence: Sequence, num_computed_tokens: int) -> int:
        """Give up the blocks that its later tokens do not see; returns at how many computed tokens there are more.

        Steps in flight, which may read what a new owner is going to write, come before that on the device.
        """
        size = self.block_size
        if sequence.children and self._has_states:  # they begin at that boundary
            num_computed_tokens = min(num_computed_tokens, len(sequence.prompt) // size * size)
        num_passed = self._num_passed_blocks(num_computed_tokens)
        given_up = []
        for block_ids, before, passed in zip(sequence.block_ids, sequence.num_passed_blocks, num_passed, strict=True):
            given_up.append(block_ids[before:passed])
            block_ids[before:passed] = [-1] * (passed - before)
        self._release(given_up)
        sequence.num_passed_blocks = num_passed
        return min((max(num_computed_tokens + 1 - w, 0) // size + 1) * size + w - 1 for w in self._reaches)

    def mark_ready(self, sequence: Sequence, num_computed_tokens: int) -> None:
        """Hash the full blocks of these tokens, at least one more than before, and let other sequences share them."""
        before, full = sequence.num_ready_blocks, num_computed_tokens // self.block_size
        if not sequence.is_cacheable:
            sequence.num_ready_blocks = full
            return
        hashes = self._hash_blocks(sequence, full)
        filled = hashes[before:full]
        for number, block_ids in enumerate(sequence.block_ids):
            ready = block_ids[before:full]
            if self._groups[number].is_state:  # of a block that the step passed over the state is one in its midst
                num_passed = (num_computed_tokens - 1) // self.block_size - 1 - before
                ready[: max(num_passed, 0)] = [-1] * min(max(num_passed, 0), len(ready))
            self.cache.mark_ready(number, filled, ready)
        sequence.num_ready_blocks = full
        if len(hashes) > full:
            self.cache.mark_pending(hashes[full], sequence)

    def cancel_pending(self, sequence: Sequence) -> None:
        """It will not compute its PENDING block soon, if at all: one of the sequences that wait for it takes over."""
        if len(sequence.block_hashes) > sequence.num_ready_blocks and sequence.is_cacheable:
            self.cache.cancel_pending(sequence.block_hashes[sequence.num_ready_blocks], sequence)

    def release_sequence(self, sequence: Sequence) -> None:
        """Give up all its blocks."""
        self.cancel_pending(sequence)
        if sequence.block_ids:
            self._release(sequence.block_ids)
        sequence.block_ids = []
        sequence.num_passed_blocks = ()
        sequence.num_ready_blocks = 0
        sequence.num_computed_tokens = 0
        sequence.shares_last_block = False
        sequence.is_cacheable = True

    def reset_prefix_cache(self, sequences: Iterable[Sequence]) -> int:
        """Forget all prefixes; returns how many blocks had been kept for one.

        ``sequences``, all that live, go on with the blocks that they hold and share no further ones: what they compute
        depends on blocks from before.
        """
        for sequence in sequences:
            if sequence.block_ids:
                self.cancel_pending(sequence)
                sequence.is_cacheable = False
        num_forgotten = len(self.cache.hashes) - self.cache.hashes.count(None)
        self.cache.forget_prefixes()
        for pool in self.pools:
            pool.forget_cached()
        return num_forgotten

    def _held_by_pool(self, block_ids: list[list[int]]) -> list[tuple[BlockPool, list[int]]]:
        """Each pool, with those of its blocks that are in these tables of all groups."""
        if self._has_one_pool:
            return [(self.pools[0], _held(block_ids))]
        tables: list[list[list[int]]] = [[] for _ in self.pools]
        for group, table in zip(self._groups, block_ids, strict=True):
            tables[group.pool].append(table)
        return [(pool, _held(of_pool)) for pool, of_pool in zip(self.pools, tables, strict=True)]

    def _release(self, block_ids: list[list[int]]) -> None:
        for pool, held in self._held_by_pool(block_ids):
            pool.release(held, self.cache.hashes)

    def _hash_blocks(self, sequence: Sequence, count: int) -> list[bytes]:
        """The hashes of at least its first ``count`` blocks, which are full of known tokens."""
        hashes = sequence.block_hashes
        if len(hashes) < count:
            size, key = self.block_size, sequence.request.prefix_key
            if not hashes:
                hashes += key.hash_blocks(sequence.prompt, size)
            for index in range(len(hashes), count):
                parent = hashes[-1] if hashes else key.root()
                hashes.append(hash_block(parent, sequence.slice_ids(index * size, (index + 1) * size)))
        return hashes


def _held(block_ids: list[list[int]]) -> list[int]:
    """The blocks of some tables in the order of their places, so that all groups lose the end of a prefix first."""
    if len(block_ids) == 1 and -1 not in block_ids[0]:
        return block_ids[0]
    in_order = chain.from_iterable(zip_longest(*block_ids, fillvalue=-1))
    return [block_id for block_id in in_order if block_id >= 0]
