"""The KV blocks of sequences: what each holds, shares, and leaves behind."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from aioengine.scheduler.block_pool import BlockPool
from aioengine.scheduler.prefix_cache import PrefixCache, hash_block, hash_prompt, root_of
from aioengine.scheduler.sequence import Sequence


class PrefixMatch(msgspec.Struct, frozen=True):
    """The part of a sequence that the prefix cache has, and how much is missing.

    Attributes:
        block_ids: READY blocks of its first tokens.
        pending: the hash of the block after them if that is PENDING, else None.
        num_missing: blocks to allocate for the rest of its known tokens, a copy of a shared last block included.
    """

    block_ids: list[int]
    pending: bytes | None
    num_missing: int


class KVManager:
    """Allocates blocks to sequences and caches their prefixes.

    A block belongs to the sequences that refer to it, one or several. Without references, a READY block is free and
    cached; any other block is free and blank. A PENDING block belongs to the one sequence that computes it.
    Without prefix caching no block is hashed.
    """

    def __init__(self, num_blocks: int, block_size: int, *, enable_prefix_caching: bool) -> None:
        self.block_size = block_size
        self.is_caching = enable_prefix_caching
        self.cache = PrefixCache(num_blocks)
        self.pool = BlockPool(num_blocks, self.cache.evict)
        self.num_queried_tokens = 0
        self.num_hit_tokens = 0
        self._copies: list[tuple[int, int]] = []
        """(from, to) block ids; the first has a reference for the copy until `take_copies`."""

    def blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def lookup(self, sequence: Sequence) -> PrefixMatch:
        """The cached beginning of a sequence; empty for one that holds blocks, since it has begun already.

        At least its last known token is left to compute, since the next one is sampled from that; all are, if the
        prompt's log-probabilities are wanted.
        """
        num_tokens = sequence.num_tokens
        num_blocks = self.blocks_for(num_tokens)
        if not self.is_caching or sequence.block_ids or sequence.needs_prompt_logprobs:
            return PrefixMatch([], None, num_blocks - len(sequence.block_ids) + sequence.shares_last_block)
        count = (num_tokens - 1) // self.block_size
        hashes = self._hash_blocks(sequence, count)
        block_ids, pending = self.cache.match(hashes if len(hashes) == count else hashes[:count])
        return PrefixMatch(block_ids, pending, num_blocks - len(block_ids))

    def can_admit(self, match: PrefixMatch, reserve: int) -> bool:
        """Whether all known tokens fit with ``reserve`` blocks left: a prompt half admitted would only be preempted."""
        return match.num_missing + self.pool.num_unused(match.block_ids) + reserve <= self.pool.num_free

    def admit(self, sequence: Sequence, match: PrefixMatch) -> None:
        """Give a sequence blocks for all its known tokens, and mark the one that it is going to fill next PENDING."""
        if not sequence.block_ids:
            self.pool.retain(match.block_ids)
            sequence.block_ids = match.block_ids.copy()
            sequence.num_ready_blocks = len(match.block_ids)
            sequence.num_computed_tokens = len(match.block_ids) * self.block_size
            self.num_queried_tokens += sequence.num_tokens
            self.num_hit_tokens += sequence.num_computed_tokens
            if not sequence.has_run:
                sequence.num_cached_tokens = sequence.num_computed_tokens
        missing = self.pool.allocate(match.num_missing)
        if sequence.shares_last_block:
            self._copies.append((sequence.block_ids[-1], missing[0]))
            sequence.block_ids.pop()
            sequence.shares_last_block = False
        sequence.block_ids += missing
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
        child.block_ids = parent.block_ids[: self.blocks_for(num_tokens)]
        self.pool.retain(child.block_ids)
        child.shares_last_block = len(child.block_ids) > num_full
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

    def grow(self, sequences: list[Sequence]) -> list[int]:
        """One more block for each; the caller has checked that there are as many."""
        block_ids = self.pool.allocate(len(sequences))
        for sequence, block_id in zip(sequences, block_ids, strict=True):
            sequence.block_ids.append(block_id)
        return block_ids

    def mark_ready(self, sequence: Sequence, num_computed_tokens: int) -> None:
        """Hash the full blocks of these tokens, at least one more than before, and let other sequences share them."""
        before, full = sequence.num_ready_blocks, num_computed_tokens // self.block_size
        if not sequence.is_cacheable:
            sequence.num_ready_blocks = full
            return
        hashes = self._hash_blocks(sequence, full)
        self.cache.mark_ready(hashes[before:full], sequence.block_ids[before:full])
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
        self.pool.release(sequence.block_ids, self.cache.hashes)
        sequence.block_ids = []
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
        num_forgotten = len(self.cache.ready)
        self.cache.forget()
        self.pool.forget_cached()
        return num_forgotten

    def _hash_blocks(self, sequence: Sequence, count: int) -> list[bytes]:
        """The hashes of at least its first ``count`` blocks, which are full of known tokens."""
        hashes = sequence.block_hashes
        if len(hashes) < count:
            size = self.block_size
            if not hashes:
                hashes += hash_prompt(sequence.prompt, size, root_of(sequence.request.cache_salt))
            for index in range(len(hashes), count):
                parent = hashes[-1] if hashes else root_of(sequence.request.cache_salt)
                hashes.append(hash_block(parent, sequence.slice_ids(index * size, (index + 1) * size)))
        return hashes
