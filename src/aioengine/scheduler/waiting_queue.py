"""The queue of sequences that could run if there were room."""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator
from typing import Any

from aioengine.scheduler.sequence import Sequence


class WaitingQueue:
    """Sequences by their precedence; any of them can leave at any time.

    The precedence of a removed sequence stays in the heap until it comes up, or until such ones are the larger half:
    with the head waiting for memory, thousands may come and be aborted behind it.
    """

    def __init__(self) -> None:
        self._members: dict[int, Sequence] = {}
        self._heap: list[tuple[float, float, int]] = []

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

    def eviction_key(self, sequence: Sequence) -> Any:
        """Of sequences that may give way, the one with the largest does."""
        return sequence.precedence


PROMPT_COST = 1.0
"""Of a prompt's token that no cached prefix has."""
OUTPUT_COST = 2.0
"""Of an output's token, which is computed alone."""

MAX_REMEMBERED = 10_000
"""Tenants whose counts are kept while nothing of theirs waits; with more, those begin anew."""


class TenantQueues:
    """As `WaitingQueue`, with a queue for each tenant: the first of the tenant with the smallest count is next.

    Virtual token counters (Sheng et al., "Fairness in Serving Large Language Models", OSDI 2024): what is computed for
    a tenant is counted. One that begins to wait is raised to the least count of those that wait, or else to that of
    the last one that did, so that idle time earns no credit.

    Attributes:
        served: by tenant, the tokens that it was charged, over its weight. Only differences mean anything.
    """

    def __init__(self) -> None:
        self.served: dict[str, float] = {}
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
        tenant = sequence.tenant
        queue = self._queues.get(tenant)
        if queue is None:
            first = self._first()
            least = self.served.get(self._last if first is None else first, 0.0)
            self.served[tenant] = count = max(self.served.get(tenant, 0.0), least)
            queue = self._queues[tenant] = WaitingQueue()
            heapq.heappush(self._heap, (count, tenant))
            if len(self.served) > MAX_REMEMBERED + len(self._queues):
                for idle in self.served.keys() - self._queues.keys():
                    del self.served[idle]
        queue.add(sequence)
        self._num_waiting += 1

    def discard(self, sequence: Sequence) -> None:
        tenant = sequence.tenant
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

    def eviction_key(self, sequence: Sequence) -> Any:
        """Of sequences that may give way, the one with the largest does: one of the tenant that has had the most."""
        return self.served.get(sequence.tenant, 0.0), sequence.precedence

    def charge_prompt(self, sequence: Sequence) -> None:
        """It has taken a row for the first time; ``num_computed_tokens`` is what it need not compute of its prompt."""
        self._charge(sequence, PROMPT_COST * (len(sequence.prompt) - sequence.num_computed_tokens))

    def charge_outputs(self, sequences: Iterable[Sequence]) -> None:
        """Each of these has been given a token."""
        for sequence in sequences:
            self._charge(sequence, OUTPUT_COST)

    def _charge(self, sequence: Sequence, cost: float) -> None:
        tenant = sequence.tenant
        self.served[tenant] = self.served.get(tenant, 0.0) + cost / sequence.weight

    def _drop_empty(self, tenant: str) -> None:
        if not self._queues[tenant]:
            del self._queues[tenant]
            self._last = tenant
            if len(self._heap) > 2 * len(self._queues) + 16:
                self._heap = sorted((self.served[waiting], waiting) for waiting in self._queues)

    def _first(self) -> str | None:
        """The tenant that is next. Counts grow, so that an old one is no larger than the tenant's own."""
        heap, served = self._heap, self.served
        while heap:
            count, tenant = heap[0]
            if tenant not in self._queues:
                heapq.heappop(heap)
            elif served[tenant] > count:
                heapq.heapreplace(heap, (served[tenant], tenant))
            else:
                return tenant
        return None
