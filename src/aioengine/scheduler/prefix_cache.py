"""Which blocks hold which prefix.

The hash of a full block is chained over its parent's hash and its token ids, so that equal hashes mean equal prefixes
(Kwon et al., 2023; vLLM's automatic prefix caching). The next block that a sequence is going to fill is PENDING if its
hash is known: a second request with the same prefix waits for it instead of computing it again, and takes over if the
owner leaves. One PENDING block per owner is enough: a request that shares a later block shares this one, too.

Each group of layers has a block of its own for the same tokens, and loses it apart from the others. A prefix can be
used if the next token finds all that it needs: all blocks of groups that attend to all tokens, and the last ones of
the others, which is one block of a state.
"""

from __future__ import annotations

import functools
import struct
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Items
from hashlib import blake2b
from typing import Any

import msgspec

from aioengine.scheduler.plan import Int32

HASH_BYTES = 16
ROOT = blake2b(b"aioengine prefix cache v1", digest_size=HASH_BYTES).digest()
_EMPTY = blake2b(digest_size=HASH_BYTES)


def hash_block(parent: bytes, token_ids: Items[int]) -> bytes:
    """The hash of a full block: blake2b over the parent's hash and the ids as little-endian int32, `HASH_BYTES` long.

    The same in every process and on every machine, so that replicas can share what they know.
    """
    return _chain(parent, _little_endian(len(token_ids)).pack(*token_ids))


def _chain(parent: bytes, ids: bytes) -> bytes:
    state = _EMPTY.copy()  # two thirds of the time of a new one with a digest size
    state.update(parent)
    state.update(ids)
    return state.digest()


@functools.cache
def _little_endian(count: int) -> struct.Struct:
    return struct.Struct(f"<{count}i")


class PrefixKey(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """What the KV of a prompt depends on beside its tokens: requests share cached blocks if their keys are equal.

    Attributes:
        salt: the request's ``cache_salt``; by another one no request learns from its speed what this one has asked.
        adapter: name of the adapter that computes the KV; empty: the model alone.
        images: digests of the images in the prompt, in order.
    """

    salt: str = ""
    adapter: str = ""
    images: tuple[bytes, ...] = ()

    def root(self) -> bytes:
        """The parent hash of the first block, `HASH_BYTES` long; `ROOT` for a key without anything."""
        if self == _PLAIN:
            return ROOT
        return blake2b(ROOT + msgspec.msgpack.encode(self), digest_size=HASH_BYTES).digest()

    def hash_blocks(self, token_ids: Int32, block_size: int) -> list[bytes]:
        """The hashes of all full blocks of a prompt, about 0.3 µs each: long prompts are hashed off the loop.

        Only full blocks: a partial block's hash would change with the next token.
        """
        raw = token_ids.astype("<i4", copy=False).tobytes()
        size = 4 * block_size
        hashes, parent = [], self.root()
        for end in range(size, len(raw) + 1, size):
            parent = _chain(parent, raw[end - size : end])
            hashes.append(parent)
        return hashes


_PLAIN = PrefixKey()


class PrefixCache:
    """Blocks by the hashes of the prefixes that they hold. It holds no references: blocks in use and free ones alike.

    Args:
        num_seen: for each group, how many blocks before the end of a prefix of whole blocks the next token needs;
            None: all. Those groups come first.

    Attributes:
        ready: by group, {hash: block id} of the blocks that are computed.
        hashes: [num_blocks], the hash of each READY block, None for the others.
        pending: {hash: owner} of the blocks that are being computed; none of these hashes is READY in all groups.
        on_wake: called with each waiter whose hash became READY or is PENDING no more.
    """

    def __init__(self, num_blocks: int, num_seen: Items[int | None] = (None,)) -> None:
        self.ready: list[dict[bytes, int]] = [{} for _ in num_seen]
        groups = list(zip(self.ready, num_seen, strict=True))
        self._full = [of_group for of_group, seen in groups if seen is None]
        self._sliding = [(of_group, seen) for of_group, seen in groups if seen is not None]
        assert None not in num_seen[len(self._full) :], "groups that see all come first"
        seeing = [one for one in self._sliding if one[1]]
        self._limiting = seeing or ([] if self._full else self._sliding[:1])
        """The groups with windows that limit a match: with a window of one token, nothing is needed before the next."""
        self.hashes: list[bytes | None] = [None] * num_blocks
        self._ready_in = [self.ready[0]] * num_blocks
        """Of each READY block, the one of `ready` that has it."""
        self.pending: dict[bytes, object] = {}
        self.on_wake: Callable[[Any], None] = lambda waiter: None
        self.waiters: dict[bytes, list[object]] = {}
        """By the PENDING hash that they wait for."""

    def match_prefix(self, hashes: Items[bytes]) -> tuple[list[list[int]], bytes | None]:
        """The longest prefix of ``hashes`` that can be used, and the hash after it if that is PENDING.

        Returns:
            READY blocks by group, -1 for those that no token behind the prefix sees; a hash or None.
        """
        end = len(hashes)
        matched: list[list[int]] = []
        for of_group in self._full:
            block_ids: list[int] = []
            for block_hash in hashes:
                block_id = of_group.get(block_hash)
                if block_id is None:
                    end = min(end, len(block_ids))
                    break
                block_ids.append(block_id)
            matched.append(block_ids)
        if self._sliding or len(matched) > 1:
            end = self._seen_by_windows(hashes, end)
            for block_ids in matched:
                del block_ids[end:]
            for of_group, seen in self._sliding:
                num_passed = max(end - seen, 0)
                matched.append([-1] * num_passed + [of_group[block_hash] for block_hash in hashes[num_passed:end]])
        return matched, hashes[end] if end < len(hashes) and hashes[end] in self.pending else None

    def _seen_by_windows(self, hashes: Items[bytes], end: int) -> int:
        """The longest prefix up to ``end`` of which the groups with windows have what the next token sees.

        From the right, as most hits are whole: a prefix that is longer than a lost block sees it or has passed it.
        """
        before = -1
        while end != before:
            before = end
            for of_group, seen in self._limiting:
                end = next((place + 1 for place in range(end - 1, -1, -1) if hashes[place] in of_group), 0)
                places = range(end - 2, max(end - seen, 0) - 1, -1)
                end = next((place for place in places if hashes[place] not in of_group), end)
        return end

    def wait_for(self, block_hash: bytes, waiter: object) -> None:
        """Wake ``waiter`` when this PENDING hash becomes READY or is PENDING no more."""
        assert block_hash in self.pending, "only a PENDING hash can be waited for"
        self.waiters.setdefault(block_hash, []).append(waiter)

    def mark_pending(self, block_hash: bytes, owner: object) -> None:
        """``owner`` is going to compute the block of this hash; no change if the hash is READY or PENDING already."""
        for of_group in self.ready:
            if block_hash not in of_group:
                self.pending.setdefault(block_hash, owner)
                return

    def mark_ready(self, group: int, hashes: Items[bytes], block_ids: Items[int]) -> None:
        """These blocks are computed: READY, but for those whose hash another READY block of the group has.

        To be called for all groups before the next `match_prefix`: a hash that is READY in one is PENDING no more.

        Args:
            block_ids: -1 where the group keeps nothing of the block.
        """
        ready = self.ready[group]
        for place, block_hash in enumerate(hashes):
            if block_hash not in ready:
                block_id = block_ids[place]
                if block_id >= 0:
                    ready[block_hash] = block_id
                    self.hashes[block_id] = block_hash
                    self._ready_in[block_id] = ready
                if self.pending.pop(block_hash, None) is not None:
                    self._wake(block_hash)

    def cancel_pending(self, block_hash: bytes, owner: object) -> None:
        """``owner`` will not compute the block of this hash after all; wakes its waiters, so that one of them does."""
        if self.pending.get(block_hash) is owner:
            del self.pending[block_hash]
            self._wake(block_hash)

    def evict_blocks(self, block_ids: Iterable[int]) -> None:
        """Forget the hashes of these READY blocks, which are about to hold something else."""
        hashes, ready_in = self.hashes, self._ready_in
        for block_id in block_ids:
            block_hash = hashes[block_id]
            assert block_hash is not None, "a block without a hash was kept like a cached one"
            del ready_in[block_id][block_hash]
            hashes[block_id] = None

    def forget_prefixes(self) -> None:
        """Forget the hashes of all blocks. PENDING hashes stay until their owners cancel them."""
        for of_group in self.ready:
            of_group.clear()
        self.hashes = [None] * len(self.hashes)

    def _wake(self, block_hash: bytes) -> None:
        for waiter in self.waiters.pop(block_hash, ()):
            self.on_wake(waiter)
