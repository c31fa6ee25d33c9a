"""The KV blocks of sequences: what each holds, shares, and leaves behind."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

import msgspec

from aioengine.core.block_pool import BlockPool
from aioengine.core.prefix_cache import ROOT, Entry, PrefixCache, hash_block, hash_prompt
from aioengine.core.sequence import Sequence


class Hit(msgspec.Struct, frozen=True, gc=False):
    """What the prefix cache knows of a sequence's beginning."""

    block_ids: list[int]
    pending: Entry | None = None


NO_HIT = Hit([])


class KVManager:
    """Hands blocks to sequences and remembers prefixes.

    Who owns what: a block referred to by one sequence or several is theirs; a READY prefix block that nobody refers to
    is free and cached; all others are free and blank. A PENDING block belongs to the one sequence that computes it.

    Args:
        num_blocks: blocks on the device.
        block_size: tokens in each.
        enable_prefix_caching: without it no block is ever named.
    """

    def __init__(self, num_blocks: int, block_size: int, *, enable_prefix_caching: bool) -> None:
        self.block_size = block_size
        self.is_caching = enable_prefix_caching
        self.cache = PrefixCache()
        self.pool = BlockPool(num_blocks, self.cache.evict)
        self.num_queried_tokens = 0
        self.num_hit_tokens = 0

    def blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def lookup(self, sequence: Sequence) -> Hit:
        """The cached beginning of a sequence that holds no blocks.

        At least its last known token is left to compute, since the next one is sampled from that.
        """
        if not self.is_caching:
            return NO_HIT
        count = (sequence.num_tokens - 1) // self.block_size
        self._name_blocks(sequence, count)
        names = sequence.block_hashes
        return Hit(*self.cache.match(names if len(names) == count else names[:count]))

    def can_admit(self, sequence: Sequence, hit: Hit, reserve: int) -> bool:
        """Whether all known tokens fit with ``reserve`` blocks left: a prompt half admitted would only be preempted."""
        blocks = sequence.block_ids or hit.block_ids
        taken = 0 if sequence.block_ids else self.pool.num_unused(hit.block_ids)
        missing = self.blocks_for(sequence.num_tokens) - len(blocks)
        return missing + taken + reserve <= self.pool.num_free

    def admit(self, sequence: Sequence, hit: Hit) -> None:
        """Give a sequence blocks for all its known tokens, and announce the full ones that it is going to compute."""
        if not sequence.block_ids:
            self.pool.retain(hit.block_ids)
            sequence.block_ids = list(hit.block_ids)
            sequence.num_settled_blocks = len(hit.block_ids)
            sequence.num_computed_tokens = len(hit.block_ids) * self.block_size
            self._count(sequence)
        missing = self.blocks_for(sequence.num_tokens) - len(sequence.block_ids)
        if missing > 0:
            sequence.block_ids += self.pool.allocate(missing)
        if self.is_caching:
            self._announce(sequence)

    def grow(self, sequences: list[Sequence]) -> list[int]:
        """One more block for each; the caller has checked that there are as many."""
        block_ids = self.pool.allocate(len(sequences))
        for sequence, block_id in zip(sequences, block_ids, strict=True):
            sequence.block_ids.append(block_id)
        return block_ids

    def settle(self, sequence: Sequence, num_computed_tokens: int) -> None:
        """Blocks up to here are computed: name them, and let others use them."""
        full = num_computed_tokens // self.block_size
        self._name_blocks(sequence, full)
        for index in range(sequence.num_settled_blocks, full):
            self.cache.settle(sequence.block_hashes[index], sequence.block_ids[index])
        sequence.num_settled_blocks = max(sequence.num_settled_blocks, full)

    def withdraw(self, sequence: Sequence) -> None:
        """It is not going to compute what it announced, or not soon: whoever waits for that may."""
        if self.is_caching and sequence.block_ids:
            self.cache.withdraw(sequence.block_hashes[sequence.num_settled_blocks :], sequence)

    def release(self, sequence: Sequence) -> None:
        """Give up all its blocks."""
        self.withdraw(sequence)
        self.pool.release(sequence.block_ids, self.cache.is_cached)
        sequence.block_ids = []
        sequence.num_settled_blocks = 0
        sequence.num_computed_tokens = 0

    def check_integrity(self, sequences: Iterable[Sequence]) -> None:
        """Every block is owned exactly as often as it is counted, or free; every PENDING entry has a live owner.

        Raises:
            AssertionError: it is not so.
        """
        live = list(sequences)
        self.pool.check_integrity(Counter(block_id for sequence in live for block_id in sequence.block_ids))
        owners = {id(sequence): sequence for sequence in live}
        for name, entry in self.cache.entries.items():
            if entry.owner is None:
                assert not entry.waiters, "somebody waits for a READY block"
                continue
            owner = owners.get(id(entry.owner))
            assert owner is not None, f"PENDING block {entry.block_id} has no live owner"
            index = owner.block_hashes.index(name)
            assert owner.block_ids[index] == entry.block_id, "a PENDING block is not its owner's"
            assert index >= owner.num_settled_blocks, "a PENDING block is settled"

    def _name_blocks(self, sequence: Sequence, count: int) -> None:
        names = sequence.block_hashes
        if len(names) >= count:
            return
        size = self.block_size
        if not names:
            names += hash_prompt(sequence.prompt, size)[:count]
        for index in range(len(names), count):
            parent = names[-1] if names else ROOT
            names.append(hash_block(parent, sequence.slice_ids(index * size, (index + 1) * size)))

    def _announce(self, sequence: Sequence) -> None:
        count = sequence.num_tokens // self.block_size
        self._name_blocks(sequence, count)
        for index in range(sequence.num_settled_blocks, count):
            self.cache.announce(sequence.block_hashes[index], sequence.block_ids[index], sequence)

    def _count(self, sequence: Sequence) -> None:
        self.num_queried_tokens += sequence.num_tokens
        self.num_hit_tokens += sequence.num_computed_tokens
        if not sequence.has_run:
            sequence.num_cached_tokens = sequence.num_computed_tokens
