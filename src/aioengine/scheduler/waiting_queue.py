"""The queue of sequences that could run if there were room."""

from __future__ import annotations

import heapq
from collections.abc import Iterator

from aioengine.scheduler.sequence import Sequence


class WaitingQueue:
    """Sequences by their precedence; any of them can leave at any time.

    The precedence of a removed sequence stays in the heap until it comes up, or until such ones are the larger half:
    with the head waiting for memory, thousands may come and be aborted behind it.
    """

    def __init__(self) -> None:
        self._members: dict[int, Sequence] = {}
        self._heap: list[tuple[int, int]] = []

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
            sequence = members.get(heap[0][1])
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
