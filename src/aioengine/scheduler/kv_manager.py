"""The KV blocks of sequences: what each holds, shares, and leaves behind."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

import msgspec

from aioengine.scheduler.block_pool import BlockPool
from aioengine.scheduler.prefix_cache import PrefixCache, hash_block, hash_prompt, root_of
from aioengine.scheduler.sequence import Reason, Sequence


class Hit(msgspec.Struct, frozen=True):
    """What the prefix cache has for a sequence, and what is missing.

    Attributes:
        block_ids: READY blocks that it begins with.
        pending: the name of the block after them, if somebody is computing it.
        num_missing: blocks to allocate for the rest of its known tokens, a copy of a shared tail included.
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
        self._copies: list[tuple[int, int]] = []
        """(from, to): the first has a reference for it until `take_copies`."""

    def blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def lookup(self, sequence: Sequence) -> Hit:
        """The cached beginning of a sequence; nothing for one that holds blocks, since it has begun already.

        At least its last known token is left to compute, since the next one is sampled from that; all are, if the
        prompt's log-probabilities are wanted.
        """
        num_tokens = sequence.num_tokens
        num_blocks = self.blocks_for(num_tokens)
        if not self.is_caching or sequence.block_ids or sequence.needs_prompt_logprobs:
            return Hit([], None, num_blocks - len(sequence.block_ids) + sequence.shares_last_block)
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
        missing = self.pool.allocate(hit.num_missing)
        if sequence.shares_last_block:
            self._copies.append((sequence.block_ids[-1], missing[0]))
            sequence.block_ids.pop()
            sequence.shares_last_block = False
        sequence.block_ids += missing
        if self.is_caching and sequence.is_named:
            names = self._name_blocks(sequence, sequence.num_tokens // self.block_size)
            if len(names) > sequence.num_settled_blocks:
                self.cache.announce(names[sequence.num_settled_blocks], sequence)

    def fork(self, parent: Sequence, child: Sequence) -> None:
        """Let ``child`` begin with the blocks of its parent's prompt, which is computed.

        It takes a reference to each, the partial last one included: others may write behind the prompt there, but
        nobody into it. What it computes itself goes to a copy, which it gets when it is admitted.
        """
        num_tokens = len(parent.prompt)
        num_full = num_tokens // self.block_size
        child.block_ids = parent.block_ids[: self.blocks_for(num_tokens)]
        self.pool.retain(child.block_ids)
        child.shares_last_block = len(child.block_ids) > num_full
        child.block_hashes = parent.block_hashes[:num_full]
        child.num_settled_blocks = num_full if self.is_caching else 0
        child.num_computed_tokens = num_tokens
        child.is_named = parent.is_named

    def take_copies(self) -> list[tuple[int, int]]:
        """Blocks to copy, (from, to), before anything else is computed."""
        copies = self._copies
        if copies:
            self._copies = []
            self.pool.release([source for source, _ in copies], self.cache.names)
        return copies

    def grow(self, sequences: list[Sequence]) -> list[int]:
        """One more block for each; the caller has checked that there are as many."""
        block_ids = self.pool.allocate(len(sequences))
        for sequence, block_id in zip(sequences, block_ids, strict=True):
            sequence.block_ids.append(block_id)
        return block_ids

    def settle(self, sequence: Sequence, num_computed_tokens: int) -> None:
        """Full blocks up to here are computed, one more than before at least: name them, and let others use them."""
        settled, full = sequence.num_settled_blocks, num_computed_tokens // self.block_size
        if not sequence.is_named:
            sequence.num_settled_blocks = full
            return
        names = self._name_blocks(sequence, full)
        self.cache.settle(names[settled:full], sequence.block_ids[settled:full])
        sequence.num_settled_blocks = full
        if len(names) > full:
            self.cache.announce(names[full], sequence)

    def withdraw(self, sequence: Sequence) -> None:
        """It is not going to compute what it announced, or not soon: whoever waits for that may."""
        if len(sequence.block_hashes) > sequence.num_settled_blocks and sequence.is_named:
            self.cache.withdraw(sequence.block_hashes[sequence.num_settled_blocks], sequence)

    def release(self, sequence: Sequence) -> None:
        """Give up all its blocks."""
        self.withdraw(sequence)
        self.pool.release(sequence.block_ids, self.cache.names)
        sequence.block_ids = []
        sequence.num_settled_blocks = 0
        sequence.num_computed_tokens = 0
        sequence.shares_last_block = False
        sequence.is_named = True

    def reset_prefix_cache(self, sequences: Iterable[Sequence]) -> int:
        """Forget all prefixes; returns how many blocks had been kept for one.

        What ``sequences`` (all that live) have begun, they go on with, and nobody else will: what they compute rests on
        blocks from before.
        """
        for sequence in sequences:
            if sequence.block_ids:
                self.withdraw(sequence)
                sequence.is_named = False
        num_forgotten = len(self.cache.ready)
        self.cache.forget()
        self.pool.forget_cached()
        return num_forgotten

    def check_integrity(self, sequences: Iterable[Sequence]) -> None:
        """Every block is owned exactly as often as it is counted, or free; no prefix is lost, and nobody who waits.

        Raises:
            AssertionError: it is not so.
        """
        live = list(sequences)
        assert not self._copies, "copies are waiting that no plan has"
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
                names += hash_prompt(sequence.prompt, size, root_of(sequence.request.cache_salt))
            for index in range(len(names), count):
                parent = names[-1] if names else root_of(sequence.request.cache_salt)
                names.append(hash_block(parent, sequence.slice_ids(index * size, (index + 1) * size)))
        return names

    def _count(self, sequence: Sequence) -> None:
        self.num_queried_tokens += sequence.num_tokens
        self.num_hit_tokens += sequence.num_computed_tokens
        if not sequence.has_run:
            sequence.num_cached_tokens = sequence.num_computed_tokens
