"""The numbers of several engines as those of one: each step's record in the cluster's terms. Pure."""

from __future__ import annotations

import msgspec

from aioengine.outputs.metrics import StepRecord

LOADS = ("running", "waiting", "blocked", "free_blocks", "num_blocks", "cached_blocks", "touched_blocks")
"""Fields of `StepRecord` with the load now."""
COUNTERS = ("preemptions", "prefix_cache_queries", "prefix_cache_hits")
"""Fields that count since the engine's start."""
FIELDS = (*LOADS, *COUNTERS)


class StepTotals:
    """Sums over replicas, kept up to date by difference: a record costs the same however many replicas there are."""

    def __init__(self) -> None:
        self._of_rank: dict[int, list[int]] = {}
        """Each engine's `FIELDS`, by its last record."""
        self._sums = [0] * len(FIELDS)

    @property
    def counters(self) -> dict[str, int]:
        """`COUNTERS` of all engines, those that have ended included."""
        return dict(zip(COUNTERS, self._sums[len(LOADS) :], strict=True))

    def take(self, rank: int, record: StepRecord) -> StepRecord:
        """The record of a replica's step, with the loads and counters of all replicas."""
        mine = [getattr(record, name) for name in FIELDS]
        before, sums = self._of_rank.get(rank), self._sums
        self._of_rank[rank] = mine
        for place, value in enumerate(mine):
            sums[place] += value - (before[place] if before is not None else 0)
        return msgspec.structs.replace(record, **dict(zip(FIELDS, sums, strict=True)))

    def forget(self, rank: int) -> None:
        """An engine has ended: take its loads off; its counters stay. Idempotent."""
        for place, value in enumerate(self._of_rank.pop(rank, ())[: len(LOADS)]):
            self._sums[place] -= value
