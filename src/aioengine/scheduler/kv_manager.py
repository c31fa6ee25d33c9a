"""The KV blocks of sequences: what each holds, shares, and leaves behind."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable
from itertools import chain, zip_longest

import msgspec

from aioengine.scheduler.block_pool import BlockPool
from aioengine.scheduler.kv_groups import most_blocks
from aioengine.scheduler.prefix_cache import PrefixCache, hash_block
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
    window it gives up what no later token sees, and takes no more ahead than it needs in place of that.

    Args:
        windows: of each group, how many of the last tokens its layers see; None: all (`aioengine.scheduler.kv_groups`).
        max_tokens_in_flight: of a sequence, in all steps that are launched and not applied.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        *,
        enable_prefix_caching: bool,
        windows: tuple[int | None, ...] = (None,),
        max_tokens_in_flight: int = 1,
    ) -> None:
        self.block_size = block_size
        self.is_caching = enable_prefix_caching
        self.windows = windows
        self.max_tokens_in_flight = max_tokens_in_flight
        self._distinct = {window for window in windows if window is not None}
        self.has_windows = bool(self._distinct)
        self._none_passed = (0,) * len(windows)
        self._most_held = most_blocks(windows, 2**31, block_size, max_tokens_in_flight)
        seen = [None if window is None else self.blocks_for(window - 1) for window in windows]
        self.cache = PrefixCache(num_blocks, seen)
        self.pool = BlockPool(num_blocks, self.cache.evict)
        self.num_queried_tokens = 0
        self.num_hit_tokens = 0
        self._copies: list[tuple[int, int]] = []
        """(from, to) block ids; the first has a reference for the copy until `take_copies`."""

    def blocks_for(self, num_tokens: int) -> int:
        """In one group."""
        return -(-num_tokens // self.block_size)

    def most_blocks(self, num_tokens: int) -> int:
        """In all groups, of a sequence that comes to have KV of so many tokens."""
        num_blocks = -(-num_tokens // self.block_size)
        if not self.has_windows:
            return num_blocks * len(self.windows)
        return sum(min(num_blocks, most) for most in self._most_held)

    def lookup(self, sequence: Sequence) -> PrefixMatch:
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
            block_ids, pending = self.cache.match(hashes if len(hashes) == count else hashes[:count])
        else:
            block_ids, pending = self.cache.match(())
        held = held or block_ids
        num_blocks = -(-num_tokens // self.block_size)
        missing = [num_blocks - len(held[0])] * len(held)
        if self.has_windows:  # no more than is ever held at once
            passed = sequence.num_passed_blocks or self._num_passed_blocks(len(held[0]) * self.block_size)
            for group, most in enumerate(self._most_held):
                missing[group] = max(min(num_blocks, passed[group] + most) - len(held[group]), 0)
        if sequence.shares_last_block:
            missing = [count + 1 for count in missing]
        return PrefixMatch(block_ids, pending, missing)

    def _num_passed_blocks(self, num_computed_tokens: int) -> tuple[int, ...]:
        """Of each group, the first blocks that no token sees which is computed after so many."""
        if not self.has_windows:
            return self._none_passed
        passed: dict[int | None, int] = {
            window: max(num_computed_tokens + 1 - window, 0) // self.block_size for window in self._distinct
        }
        return tuple([passed.get(window, 0) for window in self.windows])

    def can_admit(self, match: PrefixMatch, reserve: int, victims: Collection[Sequence] = ()) -> bool:
        """Whether all known tokens fit with ``reserve`` blocks left: a prompt half admitted would only be preempted.

        Args:
            victims: count as if they had given up their blocks; those that others hold, too, are not free then.
        """
        shared = _held(match.block_ids)
        num_lacking = sum(match.missing) + reserve + self.pool.num_unused(shared) - self.pool.num_free
        if num_lacking <= 0 or num_lacking > sum(victim.num_blocks for victim in victims):
            return num_lacking <= 0
        given_up = Counter(chain.from_iterable(_held(victim.block_ids) for victim in victims))  # 0.1 µs a block
        for block_id in shared:
            given_up.pop(block_id, None)
        return num_lacking <= self.pool.num_freed(given_up)

    def admit(self, sequence: Sequence, match: PrefixMatch) -> None:
        """Give a sequence blocks for all its known tokens, and mark the one that it is going to fill next PENDING.

        In a group with a window it gets no more than it will hold at once; it grows by the others when it gives up as
        many.
        """
        if not sequence.block_ids:
            num_blocks = len(match.block_ids[0])
            if num_blocks:
                self.pool.retain(_held(match.block_ids))
            sequence.block_ids = match.block_ids
            sequence.num_ready_blocks = num_blocks
            sequence.num_computed_tokens = num_blocks * self.block_size
            sequence.num_passed_blocks = self._num_passed_blocks(sequence.num_computed_tokens)
            self.num_queried_tokens += sequence.num_tokens
            self.num_hit_tokens += sequence.num_computed_tokens
            if not sequence.has_run:
                sequence.num_cached_tokens = sequence.num_computed_tokens
        for group, block_ids in enumerate(sequence.block_ids):
            missing = self.pool.allocate(match.missing[group])
            if sequence.shares_last_block:
                [copy] = missing  # it knows one token more than its prompt, for which there is room in the last block
                self._copies.append((block_ids.pop(), copy))
            block_ids += missing
        sequence.shares_last_block = False
        if self.is_caching and sequence.is_cacheable:
            hashes = self._hash_blocks(sequence, sequence.num_tokens // self.block_size)
            if len(hashes) > sequence.num_ready_blocks:
                self.cache.mark_pending(hashes[sequence.num_ready_blocks], sequence)

    def fork(self, parent: Sequence, child: Sequence) -> None:
        """Let ``child`` begin with the blocks of its parent's prompt, which is computed.

        It takes a reference to each, the partial last one included: other sequences may write to its positions behind
        the prompt, and to no others. What the child computes goes to a copy, which it gets when it is admitted.
        """
        num_tokens = len(parent.prompt)
        num_full = num_tokens // self.block_size
        num_blocks = self.blocks_for(num_tokens)
        child.block_ids = [block_ids[:num_blocks] for block_ids in parent.block_ids]
        child.num_passed_blocks = parent.num_passed_blocks
        self.pool.retain(_held(child.block_ids))
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
            self.pool.release([source for source, _ in copies], self.cache.hashes)
        return copies

    def grow(self, group: int, sequences: list[Sequence]) -> list[int]:
        """One more block in a group for each; the caller has checked that there are as many."""
        block_ids = self.pool.allocate(len(sequences))
        for sequence, block_id in zip(sequences, block_ids, strict=True):
            sequence.block_ids[group].append(block_id)
        return block_ids

    def give_up_passed(self, sequence: Sequence, num_computed_tokens: int) -> int:
        """Give up the blocks that its later tokens do not see; returns at how many computed tokens there are more.

        Steps in flight, which may read what a new owner is going to write, come before that on the device.
        """
        num_passed = self._num_passed_blocks(num_computed_tokens)
        given_up = []
        for block_ids, before, passed in zip(sequence.block_ids, sequence.num_passed_blocks, num_passed, strict=True):
            for place in range(before, passed):
                given_up.append(block_ids[place])
                block_ids[place] = -1
        self.pool.release(given_up, self.cache.hashes)
        sequence.num_passed_blocks = num_passed
        size = self.block_size
        return min((max(num_computed_tokens + 1 - w, 0) // size + 1) * size + w - 1 for w in self._distinct)

    def mark_ready(self, sequence: Sequence, num_computed_tokens: int) -> None:
        """Hash the full blocks of these tokens, at least one more than before, and let other sequences share them."""
        before, full = sequence.num_ready_blocks, num_computed_tokens // self.block_size
        if not sequence.is_cacheable:
            sequence.num_ready_blocks = full
            return
        hashes = self._hash_blocks(sequence, full)
        filled = hashes[before:full]
        for group, block_ids in enumerate(sequence.block_ids):
            self.cache.mark_ready(group, filled, block_ids[before:full])
        sequence.num_ready_blocks = full
        if len(hashes) > full:
            self.cache.mark_pending(hashes[full], sequence)

    def cancel_pending(self, sequence: Sequence) -> None:
        """It will not compute its PENDING block soon, if at all: one of the sequences that wait for it takes over."""
        if len(sequence.block_hashes) > sequence.num_ready_blocks and sequence.is_cacheable:
            self.cache.cancel_pending(sequence.block_hashes[sequence.num_ready_blocks], sequence)

    def release(self, sequence: Sequence) -> None:
        """Give up all its blocks."""
        self.cancel_pending(sequence)
        self.pool.release(_held(sequence.block_ids), self.cache.hashes)
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
        self.cache.forget()
        self.pool.forget_cached()
        return num_forgotten

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
    if len(block_ids) == 1 and (not block_ids[0] or block_ids[0][0] >= 0):
        return block_ids[0]
    in_order = chain.from_iterable(zip_longest(*block_ids, fillvalue=-1))
    return [block_id for block_id in in_order if block_id >= 0]
