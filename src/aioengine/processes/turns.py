"""A budget of loop time: what arrives together is worked off over several turns of the loop, in order; and whether
the loop stood still."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections import OrderedDict
from collections.abc import Callable
from weakref import WeakKeyDictionary

BUDGET_S = 0.006
"""Of a turn of the loop, for bounded pieces of work. The piece that passes it goes on to its end, and those take a
millisecond or two at most."""

MIN_WOKEN = 8


class Turns:
    """Spreads pieces of work, each bounded, over the turns of the running loop.

    A turn is what the loop runs between two looks at its sockets. Its budget begins when it is first asked for, and
    runs by the clock, so that other callbacks' time counts, too. One piece alone never waits; of a thousand that come
    together each begins in order of arrival, in the first turn that has time left.

    Args:
        budget_s: of each turn.
        clock: seconds.
    """

    def __init__(self, *, budget_s: float = BUDGET_S, clock: Callable[[], float] = time.perf_counter) -> None:
        self._budget_s = budget_s
        self._clock = clock
        self._ends_at = 0.0
        self._is_begun = False
        """The turn's budget runs, and `_begin` is scheduled for the next turn."""
        self._waiting: OrderedDict[object, asyncio.Future[None]] = OrderedDict()
        """By arrival. While one waits there is always a next `_begin`."""
        self._num_passed = 0
        """How many of those that were woken for the last turn found time left."""

    @property
    def is_spent(self) -> bool:
        """Whether this turn has no time left: more work should wait for `take`."""
        if not self._is_begun:
            self._begin_budget()
            return False
        return self._clock() >= self._ends_at

    @property
    def is_busy(self) -> bool:
        """Whether `take` would wait now."""
        return bool(self._waiting) or self.is_spent

    async def take(self) -> None:
        """Return in a turn that has time left: without a suspension where it is this one and nothing waits for another.

        What follows, up to the next suspension, is the piece of work. Cancelling leaves the queue.
        """
        if not self.is_busy:
            return
        ticket = object()
        loop = asyncio.get_running_loop()
        try:
            while True:
                woken = self._waiting[ticket] = loop.create_future()
                await woken
                if not self.is_spent:
                    self._num_passed += 1
                    return
        finally:
            del self._waiting[ticket]

    def _begin_budget(self) -> None:
        self._is_begun = True
        self._ends_at = self._clock() + self._budget_s
        asyncio.get_running_loop().call_soon(self._begin)

    def _begin(self) -> None:
        """A new turn. Those that wait are woken by as many as are likely to pass: asking again costs 2 µs each."""
        self._is_begun = False
        if self._waiting:
            self._begin_budget()  # before they are woken: the next turn, in which they run, is to have its own
            if next(iter(self._waiting.values())).done():
                return  # those that were woken run in this turn, and no later one is to pass them
            for woken in itertools.islice(self._waiting.values(), max(MIN_WOKEN, self._num_passed * 5 // 4)):
                if not woken.done():  # else it was cancelled
                    woken.set_result(None)
            self._num_passed = 0


async def sleep_on_time(seconds: float, slack_s: float, clock: Callable[[], float]) -> bool:
    """Sleep; returns whether the loop woke this task within ``slack_s`` seconds.

    Where it did not, the loop stood still, and what has come meanwhile is not read yet: nothing that is judged by how
    long it was silent may be judged now.
    """
    began = clock()
    await asyncio.sleep(seconds)
    return clock() - began <= seconds + slack_s


def running_loop() -> asyncio.AbstractEventLoop | None:
    """The loop that runs in this thread, if one does."""
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None


_turns: WeakKeyDictionary[asyncio.AbstractEventLoop, Turns] = WeakKeyDictionary()


def turns_here() -> Turns:
    """The running loop's: all engines and servers on a loop share its turns."""
    loop = asyncio.get_running_loop()
    turns = _turns.get(loop)
    if turns is None:
        # Within a turn a virtual clock stands still: there a turn is never spent, and no order depends on the machine.
        is_virtual = hasattr(loop, "outside_work")
        turns = _turns[loop] = Turns(clock=(lambda: 0.0)) if is_virtual else Turns()
    return turns
