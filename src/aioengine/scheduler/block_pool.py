"""Which KV blocks are free, and how often the others are used.

A block is free when nobody refers to it. A free block may still hold a cached prefix: such blocks are handed out last,
the least recently used first. A block freed while a launched step still writes to it may be handed out at once: the
device runs its steps in order, so the new owner's writes come after.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence


class BlockPool:
    """Reference counts of ``num_blocks`` blocks.

    Args:
        num_blocks: ids are 0 up to this.
        on_evict: told of the cached blocks that are about to be handed out for something else.
    """

    def __init__(self, num_blocks: int, on_evict: Callable[[list[int]], None]) -> None:
        self.num_blocks = num_blocks
        self.references = [0] * num_blocks
        self._on_evict = on_evict
        self._blank = list(range(num_blocks - 1, -1, -1))
        self._cached: OrderedDict[int, None] = OrderedDict()

    @property
    def num_free(self) -> int:
        return len(self._blank) + len(self._cached)

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
        for block_id in taken:
            self.references[block_id] = 1
        return taken

    def retain(self, block_ids: Iterable[int]) -> None:
        """Add a reference to each, taking it from the free ones if it was there."""
        references = self.references
        for block_id in block_ids:
            if not references[block_id]:
                del self._cached[block_id]
            references[block_id] += 1

    def release(self, block_ids: Sequence[int], names: Sequence[object]) -> None:
        """Drop a reference of each; one that has a name (not None in ``names``) stays useful until it is evicted.

        DeferredResult ids are given up first: the tail of a prefix is of less use than its head.
        """
        references = self.references
        for block_id in reversed(block_ids):
            references[block_id] -= 1
            if not references[block_id]:
                if names[block_id] is None:
                    self._blank.append(block_id)
                else:
                    self._cached[block_id] = None

    def num_unused(self, block_ids: Iterable[int]) -> int:
        """How many of these are free now: retaining them takes that many from `num_free`."""
        references = self.references
        return [references[block_id] for block_id in block_ids].count(0)

    def forget_cached(self) -> list[int]:
        """Turn all free cached blocks into blank ones; returns them."""
        freed = list(self._cached)
        self._cached.clear()
        self._blank.extend(freed)
        return freed

    def check_integrity(self, owned: dict[int, int], names: Sequence[object]) -> None:
        """Compare with the references that the owners say they hold, {block id: how often}, and with who has a name.

        Raises:
            AssertionError: a block is counted otherwise than it is owned, or is free and owned, or is lost, or is
                handed out in the wrong order.
        """
        free = [*self._blank, *self._cached]
        assert len(free) == len(set(free)), f"blocks free twice: {sorted(free)}"
        for block_id, count in enumerate(self.references):
            assert count == owned.get(block_id, 0), (
                f"block {block_id} is counted {count} times and owned {owned.get(block_id, 0)} times"
            )
        lost = set(range(self.num_blocks)) ^ set(free) ^ {b for b, count in enumerate(self.references) if count}
        assert not lost, f"blocks neither free nor owned, or both: {sorted(lost)}"
        assert all(names[b] is not None for b in self._cached), "a block without a name is kept like a cached one"
        assert all(names[b] is None for b in self._blank), "a cached block is handed out like a blank one"
