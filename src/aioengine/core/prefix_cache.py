"""Which blocks hold which prefix.

A full block is named by a hash chained over its parent's hash and its token ids, so that equal names mean equal
prefixes (Kwon et al., 2023; vLLM's automatic prefix caching). An entry is PENDING while its owner computes it: a second
request with the same prefix waits instead of computing it again, and takes over if the owner leaves.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence as Items

from aioengine.core.plan import Int32

HASH_BYTES = 16
ROOT = hashlib.blake2b(b"aioengine prefix cache v1", digest_size=HASH_BYTES).digest()


def hash_block(parent: bytes, token_ids: Items[int]) -> bytes:
    """The name of a full block: blake2b over the parent's name and the ids as little-endian int32.

    The same in every process and on every machine, so that replicas can share what they know.
    """
    data = parent + struct.pack(f"<{len(token_ids)}i", *token_ids)
    return hashlib.blake2b(data, digest_size=HASH_BYTES).digest()


def hash_prompt(token_ids: Int32, block_size: int) -> list[bytes]:
    """The names of a prompt's full blocks, about 1 µs each: long prompts are hashed off the loop.

    Only full blocks: a partial block's name would change with the next token.
    """
    raw = memoryview(token_ids.astype("<i4", copy=False).tobytes())
    size = 4 * block_size
    names = []
    parent = ROOT
    for end in range(size, len(raw) + 1, size):
        parent = hashlib.blake2b(parent + raw[end - size : end], digest_size=HASH_BYTES).digest()
        names.append(parent)
    return names


class Entry:
    """A cached block: PENDING while ``owner`` computes it, READY when ``owner`` is None."""

    __slots__ = ("block_id", "owner", "waiters")

    def __init__(self, block_id: int, owner: object | None) -> None:
        self.block_id = block_id
        self.owner = owner
        self.waiters: list[object] = []
        """Who waits for it to be READY or gone; only PENDING entries have any."""


class PrefixCache:
    """Names to blocks. It holds no references: a block in use elsewhere, or free, may be cached alike."""

    def __init__(self) -> None:
        self.entries: dict[bytes, Entry] = {}
        self._names: dict[int, bytes] = {}
        self.woken: list[object] = []
        """Waiters whose entry became READY or went away, for the scheduler to take."""

    def match(self, names: Items[bytes]) -> tuple[list[int], Entry | None]:
        """The READY blocks that begin ``names``, and the PENDING entry that ends them, if one does."""
        blocks: list[int] = []
        entries = self.entries
        for name in names:
            entry = entries.get(name)
            if entry is None:
                break
            if entry.owner is not None:
                return blocks, entry
            blocks.append(entry.block_id)
        return blocks, None

    def announce(self, name: bytes, block_id: int, owner: object) -> None:
        """``owner`` is going to compute this block; a name that is known already keeps its first block."""
        if name not in self.entries:
            self.entries[name] = Entry(block_id, owner)
            self._names[block_id] = name

    def settle(self, name: bytes, block_id: int) -> None:
        """This block is computed: READY from now on, unless another block has the name already."""
        entry = self.entries.get(name)
        if entry is None:
            self.entries[name] = Entry(block_id, None)
            self._names[block_id] = name
        elif entry.block_id == block_id and entry.owner is not None:
            entry.owner = None
            self._wake(entry)

    def withdraw(self, names: Items[bytes], owner: object) -> None:
        """``owner`` will not compute these after all; whoever waited may."""
        for name in names:
            entry = self.entries.get(name)
            if entry is not None and entry.owner is owner:
                self._drop(name, entry)

    def evict(self, block_id: int) -> None:
        """The block is about to hold something else."""
        name = self._names[block_id]
        self._drop(name, self.entries[name])

    def is_cached(self, block_id: int) -> bool:
        return block_id in self._names

    def _drop(self, name: bytes, entry: Entry) -> None:
        del self.entries[name]
        del self._names[entry.block_id]
        self._wake(entry)

    def _wake(self, entry: Entry) -> None:
        if entry.waiters:
            self.woken += entry.waiters
            entry.waiters = []
