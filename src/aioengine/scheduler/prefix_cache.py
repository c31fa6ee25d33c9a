"""Which blocks hold which prefix.

The hash of a full block is chained over its parent's hash and its token ids, so that equal hashes mean equal prefixes
(Kwon et al., 2023; vLLM's automatic prefix caching). The next block that a sequence is going to fill is PENDING if its
hash is known: a second request with the same prefix waits for it instead of computing it again, and takes over if the
owner leaves. One PENDING block per owner is enough: a request that shares a later block shares this one, too.
"""

from __future__ import annotations

import functools
import struct
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Items
from hashlib import blake2b
from typing import Any

from aioengine.scheduler.plan import Int32

HASH_BYTES = 16
ROOT = blake2b(b"aioengine prefix cache v1", digest_size=HASH_BYTES).digest()
_EMPTY = blake2b(digest_size=HASH_BYTES)


def root_of(cache_salt: str) -> bytes:
    """The parent hash of a prompt's first block, by the request's ``cache_salt``; `ROOT` if that is empty.

    Requests of different salts share no block, so that none learns from its speed what another has asked.
    """
    return blake2b(ROOT + cache_salt.encode(), digest_size=HASH_BYTES).digest() if cache_salt else ROOT


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


def hash_prompt(token_ids: Int32, block_size: int, root: bytes = ROOT) -> list[bytes]:
    """The hashes of a prompt's full blocks, about 0.3 µs each: long prompts are hashed off the loop.

    Only full blocks: a partial block's hash would change with the next token.
    """
    raw = token_ids.astype("<i4", copy=False).tobytes()
    size = 4 * block_size
    hashes = []
    parent = root
    for end in range(size, len(raw) + 1, size):
        parent = _chain(parent, raw[end - size : end])
        hashes.append(parent)
    return hashes


class PrefixCache:
    """Blocks by the hashes of the prefixes that they hold. It holds no references: blocks in use and free ones alike.

    Attributes:
        ready: {hash: block id} of the blocks that are computed.
        hashes: [num_blocks], the hash of each READY block, None for the others.
        pending: {hash: owner} of the blocks that are being computed; no hash is in ``ready``, too.
        on_wake: called with each waiter whose hash became READY or is PENDING no more.
    """

    def __init__(self, num_blocks: int) -> None:
        self.ready: dict[bytes, int] = {}
        self.hashes: list[bytes | None] = [None] * num_blocks
        self.pending: dict[bytes, object] = {}
        self.on_wake: Callable[[Any], None] = lambda waiter: None
        self.waiters: dict[bytes, list[object]] = {}
        """By the PENDING hash that they wait for."""

    def match(self, hashes: Items[bytes]) -> tuple[list[int], bytes | None]:
        """The READY blocks of the first ``hashes``, and the hash after theirs if that is PENDING."""
        blocks: list[int] = []
        for block_hash in hashes:
            block_id = self.ready.get(block_hash)
            if block_id is None:
                return blocks, block_hash if block_hash in self.pending else None
            blocks.append(block_id)
        return blocks, None

    def wait(self, block_hash: bytes, waiter: object) -> None:
        """Wake ``waiter`` when this PENDING hash becomes READY or is PENDING no more."""
        assert block_hash in self.pending, "only a PENDING hash can be waited for"
        self.waiters.setdefault(block_hash, []).append(waiter)

    def mark_pending(self, block_hash: bytes, owner: object) -> None:
        """``owner`` is going to compute the block of this hash; no change if the hash is READY or PENDING already."""
        if block_hash not in self.ready:
            self.pending.setdefault(block_hash, owner)

    def mark_ready(self, hashes: Items[bytes], block_ids: Items[int]) -> None:
        """These blocks are computed: READY, but for those whose hash another READY block has."""
        ready = self.ready
        for block_hash, block_id in zip(hashes, block_ids, strict=True):
            if block_hash not in ready:
                ready[block_hash] = block_id
                self.hashes[block_id] = block_hash
                if self.pending.pop(block_hash, None) is not None:
                    self._wake(block_hash)

    def cancel_pending(self, block_hash: bytes, owner: object) -> None:
        """``owner`` will not compute the block of this hash after all; wakes its waiters, so that one of them does."""
        if self.pending.get(block_hash) is owner:
            del self.pending[block_hash]
            self._wake(block_hash)

    def evict(self, block_ids: Iterable[int]) -> None:
        """Forget the hashes of these READY blocks, which are about to hold something else."""
        ready, hashes = self.ready, self.hashes
        for block_id in block_ids:
            block_hash = hashes[block_id]
            assert block_hash is not None, "a block without a hash was kept like a cached one"
            del ready[block_hash]
            hashes[block_id] = None

    def forget(self) -> None:
        """Forget the hashes of all blocks. PENDING hashes stay until their owners cancel them."""
        self.ready.clear()
        self.hashes = [None] * len(self.hashes)

    def _wake(self, block_hash: bytes) -> None:
        for waiter in self.waiters.pop(block_hash, ()):
            self.on_wake(waiter)
