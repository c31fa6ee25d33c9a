"""A pool of blocks: the free ones, and how often the others are referred to.

A block is free when it has no references. A free block may still hold a cached prefix: such blocks are allocated last,
the least recently used first. A block freed while a launched step still writes to it may be allocated at once: the
device runs its steps in order, so the new owner's writes come after.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence


class BlockPool:
    """Reference counts of the blocks with these ids.

    Args:
        on_evict: called with cached blocks before they are allocated.

    Attributes:
        references: by block id.
    """

    def __init__(self, block_ids: range, on_evict: Callable[[list[int]], None]) -> None:
        self.block_ids = block_ids
        self.num_blocks = len(block_ids)
        self.references = [0] * block_ids.stop
        self._on_evict = on_evict
        self._blank = list(reversed(block_ids))
        self._num_untouched = self.num_blocks
        self._cached: OrderedDict[int, None] = OrderedDict()

    @property
    def num_free(self) -> int:
        return len(self._blank) + len(self._cached)

    @property
    def num_cached(self) -> int:
        """Free blocks that hold a cached prefix."""
        return len(self._cached)

    @property
    def num_touched(self) -> int:
        """Blocks that have been allocated at least once: those in which memory has been written."""
        return self.num_blocks - self._num_untouched

    def allocate(self, count: int) -> list[int]:
        """Take ``count`` blocks with one reference each; the caller has checked `num_free`."""
        blank = self._blank
        if count <= len(blank):
            taken = blank[len(blank) - count :][::-1]
            del blank[len(blank) - count :]
        else:
            evicted = [self._cached.popitem(last=False)[0] for _ in range(count - len(blank))]
            self._on_evict(evicted)
            taken = blank[::-1] + evicted
            blank.clear()
        self._num_untouched = min(self._num_untouched, len(blank))  # they lie below all that came back
        for block_id in taken:
            self.references[block_id] = 1
        return taken

    def retain(self, block_ids: Iterable[int]) -> None:
        """Add a reference to each block; a free one, which holds a cached prefix, is free no more."""
        references = self.references
        for block_id in block_ids:
            if not references[block_id]:
                del self._cached[block_id]
            references[block_id] += 1

    def release(self, block_ids: Sequence[int], hashes: Sequence[object]) -> None:
        """Drop a reference of each block; one that is free then and has a hash stays cached until it is evicted.

        Later ids are freed first, so that the tail of a prefix is evicted before its head.

        Args:
            hashes: by block id, the hash of the prefix that each block holds; None for no prefix.
        """
        references = self.references
        for block_id in reversed(block_ids):
            references[block_id] -= 1
            if not references[block_id]:
                if hashes[block_id] is None:
                    self._blank.append(block_id)
                else:
                    self._cached[block_id] = None

    def num_unused(self, block_ids: Iterable[int]) -> int:
        """How many of these blocks are free: retaining them takes that many from `num_free`."""
        references = self.references
        return [references[block_id] for block_id in block_ids].count(0)

    def num_freed(self, given_up: Mapping[int, int]) -> int:
        """How many blocks become free if so many references to each of these are dropped."""
        references = self.references
        return sum(references[block_id] == count for block_id, count in given_up.items())

    def forget_cached(self) -> None:
        """Make all free cached blocks blank."""
        self._blank.extend(self._cached)
        self._cached.clear()
