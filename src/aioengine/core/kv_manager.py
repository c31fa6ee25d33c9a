"""The KV blocks of sequences: what each holds, shares, and leaves behind."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

import msgspec

from aioengine.core.block_pool import BlockPool
from aioengine.core.prefix_cache import ROOT, PrefixCache, hash_block, hash_prompt
from aioengine.core.sequence import Reason, Sequence


class Hit(msgspec.Struct, frozen=True):
    """What the prefix cache has for a sequence, and what is missing.

    Attributes:
        block_ids: READY blocks that it begins with.
        pending: the name of the block after them, if somebody is computing it.
        num_missing: blocks to allocate for the rest of its known tokens.
    """

    block_ids: list[int]
    pending: bytes | None
    num_missing: int


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
        self.cache = PrefixCache(num_blocks)
        self.pool = BlockPool(num_blocks, self.cache.evict)
        self.num_queried_tokens = 0
        self.num_hit_tokens = 0

    def blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def lookup(self, sequence: Sequence) -> Hit:
        """The cached beginning of a sequence; nothing for one that holds blocks, since it has begun already.

        At least its last known token is left to compute, since the next one is sampled from that.
        """
        num_tokens = sequence.num_tokens
        num_blocks = self.blocks_for(num_tokens)
        if not self.is_caching or sequence.block_ids:
            return Hit([], None, num_blocks - len(sequence.block_ids))
        count = (num_tokens - 1) // self.block_size
        names = self._name_blocks(sequence, count)
        block_ids, pending = self.cache.match(names if len(names) == count else names[:count])
        return Hit(block_ids, pending, num_blocks - len(block_ids))

    def can_admit(self, hit: Hit, reserve: int) -> bool:
        """Whether all known tokens fit with ``reserve`` blocks left: a prompt half admitted would only be preempted."""
        return hit.num_missing + self.pool.num_unused(hit.block_ids) + reserve <= self.pool.num_free

    def admit(self, sequence: Sequence, hit: Hit) -> None:
        """Give a sequence blocks for all its known tokens, and announce the one that it is going to fill next."""
        if not sequence.block_ids:
            self.pool.retain(hit.block_ids)
            sequence.block_ids = hit.block_ids.copy()
            sequence.num_settled_blocks = len(hit.block_ids)
            sequence.num_computed_tokens = len(hit.block_ids) * self.block_size
            self._count(sequence)
        sequence.block_ids += self.pool.allocate(hit.num_missing)
        if self.is_caching:
            names = self._name_blocks(sequence, sequence.num_tokens // self.block_size)
            if len(names) > sequence.num_settled_blocks:
                self.cache.announce(names[sequence.num_settled_blocks], sequence)

    def grow(self, sequences: list[Sequence]) -> list[int]:
        """One more block for each; the caller has checked that there are as many."""
        block_ids = self.pool.allocate(len(sequences))
        for sequence, block_id in zip(sequences, block_ids, strict=True):
            sequence.block_ids.append(block_id)
        return block_ids

    def settle(self, sequence: Sequence, num_computed_tokens: int) -> None:
        """Full blocks up to here are computed, one more than before at least: name them, and let others use them."""
        settled, full = sequence.num_settled_blocks, num_computed_tokens // self.block_size
        names = self._name_blocks(sequence, full)
        self.cache.settle(names[settled:full], sequence.block_ids[settled:full])
        sequence.num_settled_blocks = full
        if len(names) > full:
            self.cache.announce(names[full], sequence)

    def withdraw(self, sequence: Sequence) -> None:
        """It is not going to compute what it announced, or not soon: whoever waits for that may."""
        if len(sequence.block_hashes) > sequence.num_settled_blocks:
            self.cache.withdraw(sequence.block_hashes[sequence.num_settled_blocks], sequence)

    def release(self, sequence: Sequence) -> None:
        """Give up all its blocks."""
        self.withdraw(sequence)
        self.pool.release(sequence.block_ids, self.cache.names)
        sequence.block_ids = []
        sequence.num_settled_blocks = 0
        sequence.num_computed_tokens = 0

    def reset_prefix_cache(self) -> None:
        """Forget the prefixes that no sequence uses; their blocks are blank again."""
        self.cache.evict(self.pool.forget_cached())

    def check_integrity(self, sequences: Iterable[Sequence]) -> None:
        """Every block is owned exactly as often as it is counted, or free; no prefix is lost, and nobody who waits.

        Raises:
            AssertionError: it is not so.
        """
        live = list(sequences)
        owned = Counter(block_id for sequence in live for block_id in sequence.block_ids)
        self.pool.check_integrity(owned, self.cache.names)
        self.cache.check_integrity()
        owners = {id(sequence): sequence for sequence in live}
        for name, owner_object in self.cache.pending.items():
            owner = owners.get(id(owner_object))
            assert owner is not None, "a PENDING block has no live owner"
            index = owner.num_settled_blocks
            assert owner.block_hashes[index] == name, "a PENDING block is not the next of its owner"
            assert index < len(owner.block_ids), "a PENDING block is not held by its owner"
        waiting = [sequence for sequence in live if sequence.reasons & Reason.PENDING_PREFIX]
        listed = [id(waiter) for waiter in self.cache.waiters()]
        assert len(set(listed)) == len(listed), "somebody waits for two prefixes"
        assert {id(sequence) for sequence in waiting} <= set(listed), (
            "somebody waits for a prefix, and will not be woken"
        )

    def _name_blocks(self, sequence: Sequence, count: int) -> list[bytes]:
        """The names of at least its first ``count`` blocks, which are full of known tokens."""
        names = sequence.block_hashes
        if len(names) < count:
            size = self.block_size
            if not names:
                names += hash_prompt(sequence.prompt, size)
            for index in range(len(names), count):
                parent = names[-1] if names else ROOT
                names.append(hash_block(parent, sequence.slice_ids(index * size, (index + 1) * size)))
        return names

    def _count(self, sequence: Sequence) -> None:
        self.num_queried_tokens += sequence.num_tokens
        self.num_hit_tokens += sequence.num_computed_tokens
        if not sequence.has_run:
            sequence.num_cached_tokens = sequence.num_computed_tokens
