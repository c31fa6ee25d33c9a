"""The queue of sequences that could run if there were room."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator

from aioengine.scheduler.sequence import Sequence


class WaitingQueue:
    """Sequences by their precedence; any of them can leave at any time.

    The precedence of a removed sequence stays in the heap until it comes up, or until such ones are the larger half:
    with the head waiting for memory, thousands may come and be aborted behind it.
    """

    def __init__(self) -> None:
        self._members: dict[int, Sequence] = {}
        self._heap: list[tuple[int, float, int]] = []

    def __len__(self) -> int:
        return len(self._members)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._members.values())

    def add(self, sequence: Sequence) -> None:
        assert sequence.order not in self._members, f"{sequence} waits twice"
        self._members[sequence.order] = sequence
        heapq.heappush(self._heap, sequence.precedence)

    def discard(self, sequence: Sequence) -> None:
        if self._members.pop(sequence.order, None) is not None and len(self._heap) > 2 * len(self._members) + 16:
            self._heap = sorted(sequence.precedence for sequence in self._members.values())

    def peek(self) -> Sequence | None:
        """The first, or None."""
        heap, members = self._heap, self._members
        while heap:
            sequence = members.get(heap[0][2])
            if sequence is not None:
                return sequence
            heapq.heappop(heap)
        return None

    def pop(self) -> Sequence:
        """Take the first; there is one."""
        sequence = self.peek()
        assert sequence is not None
        heapq.heappop(self._heap)
        del self._members[sequence.order]
        return sequence


MAX_REMEMBERED = 10_000
"""Tenants whose counts are kept while nothing of theirs waits; with more, those begin anew."""


class TenantQueues:
    """As `WaitingQueue`, with a queue for each tenant: the first of the tenant with the smallest count is next.

    Args:
        tenant_of: whose a sequence is.
        served: by tenant, a count that only grows. A tenant that begins to wait is raised to the least count of those
            that wait, or else to that of the last tenant that did.
    """

    def __init__(self, tenant_of: Callable[[Sequence], str], served: dict[str, float]) -> None:
        self._tenant_of = tenant_of
        self._served = served
        self._queues: dict[str, WaitingQueue] = {}
        """None is empty."""
        self._heap: list[tuple[float, str]] = []
        """Of each tenant that waits what its count was at some time, and of some others."""
        self._last = ""
        """The tenant whose last waiting sequence left last."""
        self._num_waiting = 0

    def __len__(self) -> int:
        return self._num_waiting

    def __iter__(self) -> Iterator[Sequence]:
        return (sequence for queue in self._queues.values() for sequence in queue)

    def add(self, sequence: Sequence) -> None:
        tenant = self._tenant_of(sequence)
        queue = self._queues.get(tenant)
        if queue is None:
            first = self._first()
            least = self._served.get(self._last if first is None else first, 0.0)
            self._served[tenant] = count = max(self._served.get(tenant, 0.0), least)
            queue = self._queues[tenant] = WaitingQueue()
            heapq.heappush(self._heap, (count, tenant))
            if len(self._served) > MAX_REMEMBERED + len(self._queues):
                for idle in self._served.keys() - self._queues.keys():
                    del self._served[idle]
        queue.add(sequence)
        self._num_waiting += 1

    def discard(self, sequence: Sequence) -> None:
        tenant = self._tenant_of(sequence)
        queue = self._queues.get(tenant)
        if queue is not None:
            self._num_waiting -= len(queue)
            queue.discard(sequence)
            self._num_waiting += len(queue)
            self._drop_empty(tenant)

    def peek(self) -> Sequence | None:
        first = self._first()
        return None if first is None else self._queues[first].peek()

    def pop(self) -> Sequence:
        first = self._first()
        assert first is not None
        sequence = self._queues[first].pop()
        self._num_waiting -= 1
        self._drop_empty(first)
        return sequence

    def _drop_empty(self, tenant: str) -> None:
        if not self._queues[tenant]:
            del self._queues[tenant]
            self._last = tenant
            if len(self._heap) > 2 * len(self._queues) + 16:
                self._heap = sorted((self._served[waiting], waiting) for waiting in self._queues)

    def _first(self) -> str | None:
        """The tenant that is next. Counts grow, so that an old one is no larger than the tenant's own."""
        heap, served = self._heap, self._served
        while heap:
            count, tenant = heap[0]
            if tenant not in self._queues:
                heapq.heappop(heap)
            elif served[tenant] > count:
                heapq.heapreplace(heap, (served[tenant], tenant))
            else:
                return tenant
        return None
