"""Which blocks hold which prefix.

A full block is named by a hash chained over its parent's hash and its token ids, so that equal names mean equal
prefixes (Kwon et al., 2023; vLLM's automatic prefix caching). The next block that a sequence is going to fill is
PENDING where its name is known: a second request with the same prefix waits for it instead of computing it again, and
takes over if the owner leaves. One such block per owner is enough, since who shares a later one shares it, too.
"""

from __future__ import annotations

import functools
import struct
from collections.abc import Iterable
from collections.abc import Sequence as Items
from hashlib import blake2b

from aioengine.scheduler.plan import Int32

HASH_BYTES = 16
ROOT = blake2b(b"aioengine prefix cache v1", digest_size=HASH_BYTES).digest()


def root_of(cache_salt: str) -> bytes:
    """What the names of all prefixes begin with that were computed under this salt; `ROOT` under none.

    Requests of different salts never see by their speed what others have asked.
    """
    return blake2b(ROOT + cache_salt.encode(), digest_size=HASH_BYTES).digest() if cache_salt else ROOT


def hash_block(parent: bytes, token_ids: Items[int]) -> bytes:
    """The name of a full block: blake2b over the parent's name and the ids as little-endian int32.

    The same in every process and on every machine, so that replicas can share what they know.
    """
    data = parent + _little_endian(len(token_ids)).pack(*token_ids)
    return blake2b(data, digest_size=HASH_BYTES).digest()


@functools.cache
def _little_endian(count: int) -> struct.Struct:
    return struct.Struct(f"<{count}i")


def hash_prompt(token_ids: Int32, block_size: int, root: bytes = ROOT) -> list[bytes]:
    """The names of a prompt's full blocks, about 1 µs each: long prompts are hashed off the loop.

    Only full blocks: a partial block's name would change with the next token.
    """
    raw = token_ids.astype("<i4", copy=False).tobytes()
    size = 4 * block_size
    names = []
    parent = root
    for end in range(size, len(raw) + 1, size):
        parent = blake2b(parent + raw[end - size : end], digest_size=HASH_BYTES).digest()
        names.append(parent)
    return names


class PrefixCache:
    """Names to blocks. It holds no references: a block in use elsewhere, or free, may be cached alike.

    Args:
        num_blocks: block ids are below this.

    Attributes:
        ready: computed prefixes, {name: block id}.
        names: the name of each READY block by its id, None for the others.
        pending: names that are being computed, {name: owner}; never a name that is ready.
        woken: waiters whose name became READY or went away, for the scheduler to take.
    """

    def __init__(self, num_blocks: int) -> None:
        self.ready: dict[bytes, int] = {}
        self.names: list[bytes | None] = [None] * num_blocks
        self.pending: dict[bytes, object] = {}
        self.woken: list[object] = []
        self._waiters: dict[bytes, list[object]] = {}

    def match(self, names: Items[bytes]) -> tuple[list[int], bytes | None]:
        """The READY blocks that begin ``names``, and the PENDING name that ends them, if one does."""
        blocks: list[int] = []
        for name in names:
            block_id = self.ready.get(name)
            if block_id is None:
                return blocks, name if name in self.pending else None
            blocks.append(block_id)
        return blocks, None

    def wait(self, name: bytes, waiter: object) -> None:
        """Put ``waiter`` among the `woken` when this PENDING name is READY or gone."""
        assert name in self.pending, "only a PENDING name can be waited for"
        self._waiters.setdefault(name, []).append(waiter)

    def waiters(self) -> list[object]:
        """All who wait, or are woken and not yet taken."""
        return [*self.woken, *(waiter for waiters in self._waiters.values() for waiter in waiters)]

    def announce(self, name: bytes, owner: object) -> None:
        """``owner`` is going to compute this; a name that is known already stays as it is."""
        if name not in self.ready:
            self.pending.setdefault(name, owner)

    def settle(self, names: Items[bytes], block_ids: Items[int]) -> None:
        """These blocks are computed: READY from now on, unless another block has the name already."""
        ready = self.ready
        for name, block_id in zip(names, block_ids, strict=True):
            if name not in ready:
                ready[name] = block_id
                self.names[block_id] = name
                if self.pending.pop(name, None) is not None:
                    self._wake(name)

    def withdraw(self, name: bytes, owner: object) -> None:
        """``owner`` will not compute this after all; whoever waited may."""
        if self.pending.get(name) is owner:
            del self.pending[name]
            self._wake(name)

    def evict(self, block_ids: Iterable[int]) -> None:
        """These READY blocks are about to hold something else."""
        for block_id in block_ids:
            name = self.names[block_id]
            assert name is not None, "a block without a name was kept like a cached one"
            del self.ready[name]
            self.names[block_id] = None

    def forget(self) -> None:
        """No block has a name any more. PENDING names stay until their owners withdraw them."""
        self.ready.clear()
        self.names = [None] * len(self.names)

    def check_integrity(self) -> None:
        """Names and blocks agree, no name is READY and PENDING, and only PENDING names are waited for.

        Raises:
            AssertionError: it is not so.
        """
        named = {name: block_id for block_id, name in enumerate(self.names) if name is not None}
        assert named == self.ready, "names and blocks differ"
        assert not self.ready.keys() & self.pending.keys(), "a name is READY and PENDING"
        assert self._waiters.keys() <= self.pending.keys(), "somebody waits for a prefix that nobody computes"

    def _wake(self, name: bytes) -> None:
        self.woken += self._waiters.pop(name, ())
