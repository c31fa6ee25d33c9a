"""What a turn of an asyncio loop costs, and a budget of turns that no machine's speed changes."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import itertools
import time
from collections.abc import Iterator
from typing import Any

from aioengine.processes.turns import Turns, turns_here

REFERENCE_S = 0.004


def _reference_s() -> float:
    """What 50,000 short strings take of this processor: `REFERENCE_S` of one on which the bound below was chosen."""
    began = time.thread_time()
    for number in range(50_000):
        str(number)
    return time.thread_time() - began


LONGEST_S = 0.06 * max(1.0, min(_reference_s() for _ in range(3)) / REFERENCE_S)
"""Of a turn, on a busy machine: the budget, a piece of work, and what else there is take 5 to 10 ms on an idle one. On
a slower processor it is longer, since the same work is."""


class TurnProbe:
    """The turns of the running loop, between two looks at its selector: ``with TurnProbe() as probe: ...``.

    For asyncio's own loops, and virtual ones.

    Attributes:
        wall_s, cpu_s: seconds of each turn, by the wall's clock, and of CPU time of the loop's thread, which does not
            count what else the machine does meanwhile.
    """

    def __init__(self) -> None:
        self.wall_s: list[float] = []
        self.cpu_s: list[float] = []
        self._loop: Any = asyncio.get_running_loop()

    def __enter__(self) -> TurnProbe:
        gc.collect()
        gc.freeze()  # a full collection of all that the tests hold is no turn of what is measured
        gc.disable()
        self._select = self._loop._selector.select
        self._loop._selector.select = self._look
        self._began = time.perf_counter(), time.thread_time()
        return self

    def __exit__(self, *_: object) -> None:
        self._note()
        self._loop._selector.select = self._select
        gc.enable()
        gc.unfreeze()

    def _look(self, timeout: float | None = None) -> Any:
        self._note()
        events = self._select(timeout)
        self._began = time.perf_counter(), time.thread_time()
        return events

    def _note(self) -> None:
        self.wall_s.append(time.perf_counter() - self._began[0])
        self.cpu_s.append(time.thread_time() - self._began[1])


PIECES_A_TURN = 3


@contextlib.contextmanager
def few_a_turn() -> Iterator[Turns]:
    """Each turn of the running loop has time for `PIECES_A_TURN` pieces of work, however long they take."""
    turns = turns_here()
    clock, budget_s = turns._clock, turns._budget_s
    turns._clock, turns._budget_s = itertools.count().__next__, PIECES_A_TURN
    turns._ends_at = PIECES_A_TURN  # of the turn that runs, if its budget does
    try:
        yield turns
    finally:
        turns._clock, turns._budget_s, turns._ends_at = clock, budget_s, 0.0
