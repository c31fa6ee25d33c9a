"""The bound on requests that are accepted and do not run yet."""

from __future__ import annotations

import asyncio
import contextlib
import heapq
from collections import deque
from collections.abc import Callable, Hashable, Iterator
from typing import Literal, NamedTuple

from aioengine.errors import AioEngineError, EngineOverloaded
from aioengine.turns import turns_here

OnFull = Literal["wait", "raise"]

MIN_RETRY_S, MAX_RETRY_S = 0.1, 60.0


class _Waiter(NamedTuple):
    num_places: int
    let_in: asyncio.Future[bool]


class Admission:
    """Places for requests on their way to a row; taken before any costly work, such as tokenization, is done.

    A request takes a place for each sequence that it will be. Who waits for places is let in by priority, then in order
    of arrival, and nobody passes one who stands before them, however few places they need.

    Args:
        limit: sequences that are being prepared or wait in the scheduler.
        num_unstarted: how many wait in the scheduler now.
        on_left: called when a request has gone on to the scheduler, or away.
    """

    def __init__(
        self, limit: int, num_unstarted: Callable[[], int], on_left: Callable[[], None] = lambda: None
    ) -> None:
        self.limit = limit
        self.num_preparing = 0
        self._num_unstarted = num_unstarted
        self._on_left = on_left
        self._waiters: dict[Hashable, _Waiter] = {}
        self._queue: list[tuple[int, int, Hashable]] = []
        """(priority, arrival, who) as a heap; those who have left stay in it until they come up."""
        self._num_arrivals = 0
        self._num_waiting = 0
        self._refusal: Callable[[], AioEngineError] | None = None
        self._is_closed = False
        self._num_expected = 0
        self._taken_at: deque[float] = deque(maxlen=32)

    @property
    def num_free(self) -> int:
        return self.limit - self.num_preparing - self._num_unstarted()

    @property
    def num_waiting(self) -> int:
        """Sequences that wait for a place."""
        return self._num_waiting

    @property
    def is_quiet(self) -> bool:
        """Whether no request is expected, waits for a place, or is on the way to the scheduler."""
        return not (self._num_expected or self._waiters or self.num_preparing)

    @property
    def is_refusing(self) -> bool:
        return self._refusal is not None

    @contextlib.contextmanager
    def expecting(self) -> Iterator[None]:
        """A request was made, and enters after this block with ``is_expected``: no `refuse` meanwhile refuses it.

        Raises:
            AioEngineError: what `close` or `refuse` was given before.
        """
        self._check_refusal()
        self._num_expected += 1
        try:
            yield
        finally:
            self._num_expected -= 1
            self._on_left()

    async def enter(
        self,
        who: Hashable,
        on_full: OnFull,
        *,
        priority: int = 0,
        num_places: int = 1,
        is_expected: bool = False,
    ) -> bool:
        """Take places, waiting for them in turn; `leave` gives them back. False if it was dismissed, and has none.

        Cancelling gives up the place in the queue, or the places themselves if they have just been won.

        Args:
            priority: smaller goes first.
            num_places: at most ``limit``.
            is_expected: it was made before a `refuse` that came since; see `expecting`.
        Raises:
            EngineOverloaded: there are too few, and ``on_full`` is "raise".
            AioEngineError: what `close` or `refuse` was given.
        """
        if not is_expected or self._is_closed:
            self._check_refusal()
        if on_full == "raise":
            self._check_room(num_places)
        if self._has_room(num_places):
            self._take(num_places)
            return True
        let_in = asyncio.get_running_loop().create_future()
        self._waiters[who] = _Waiter(num_places, let_in)
        self._num_waiting += num_places
        heapq.heappush(self._queue, (priority, self._num_arrivals, who))
        self._num_arrivals += 1
        self.admit()  # who outranks all that wait may have room where they have none
        try:
            has_place: bool = await let_in
            return has_place
        except asyncio.CancelledError:
            if self._drop(who) is not None:
                self._forget_gone()
                self.admit()  # who stood behind may need less
                self._on_left()
            elif not let_in.cancelled() and let_in.exception() is None and let_in.result():
                self.leave(num_places)
            raise

    def check(self, num_places: int = 1) -> None:
        """Refuse who would not wait, and take nothing: what `enter` does first with ``on_full`` "raise".

        Raises:
            EngineOverloaded: there are too few places.
            AioEngineError: what `close` or `refuse` was given.
        """
        self._check_refusal()
        self._check_room(num_places)

    def _check_refusal(self) -> None:
        if self._refusal is not None:
            raise self._refusal()

    def _check_room(self, num_places: int) -> None:
        if not self._has_room(num_places):
            raise EngineOverloaded(
                f"{self.limit} requests wait already (max_waiting), or too many for {num_places} more; try again "
                "later, or wait with on_full='wait'",
                retry_after_s=self._time_to_next_place(),
            )

    def leave(self, num_places: int = 1) -> None:
        """The request has gone on to the scheduler, or has failed on its way."""
        self.num_preparing -= num_places
        self.admit()
        self._on_left()

    def admit(self) -> None:
        """Let in as many as there are places for now."""
        while (first := self._first()) is not None and self._waiters[first].num_places <= self.num_free:
            waiter = self._drop(first)
            if waiter is not None and not waiter.let_in.done():
                self._take(waiter.num_places)
                waiter.let_in.set_result(True)

    def dismiss(self, who: Hashable) -> None:
        """Let this one wait no longer, if it does: it was aborted, and needs no place."""
        waiter = self._drop(who)
        if waiter is not None and not waiter.let_in.done():
            self._forget_gone()
            waiter.let_in.set_result(False)
            self.admit()  # who stood behind may need less
            self._on_left()

    def refuse(self, error: Callable[[], AioEngineError]) -> None:
        """Refuse all who come from now on, each with an ``error`` of its own; who waits already is let in in turn."""
        self._refusal = error

    def reopen(self) -> None:
        """Refuse nobody any more."""
        self._refusal = None

    async def close(self, error: Callable[[], AioEngineError]) -> None:
        """Refuse all waiting requests in order. If cancelled, the rest stay for a second call."""
        self._refusal, self._is_closed = error, True
        while (first := self._first()) is not None:
            await turns_here().take()
            waiter = self._drop(first)
            if waiter is not None and not waiter.let_in.done():
                waiter.let_in.set_exception(error())

    def _drop(self, who: Hashable) -> _Waiter | None:
        """Let it wait no longer; None if it did not."""
        waiter = self._waiters.pop(who, None)
        if waiter is not None:
            self._num_waiting -= waiter.num_places
        return waiter

    def _forget_gone(self) -> None:
        """Those who have left are never the larger half: behind a head that waits long, thousands may come and go."""
        if len(self._queue) > 2 * len(self._waiters) + 16:
            self._queue = sorted(entry for entry in self._queue if entry[2] in self._waiters)

    def _first(self) -> Hashable | None:
        """Who is to be let in next."""
        while self._queue and self._queue[0][2] not in self._waiters:
            heapq.heappop(self._queue)
        return self._queue[0][2] if self._queue else None

    def _has_room(self, num_places: int) -> bool:
        """For one who comes now: nobody is passed."""
        return not self._waiters and self.num_free >= num_places

    def _take(self, num_places: int) -> None:
        self.num_preparing += num_places
        self._taken_at.append(asyncio.get_running_loop().time())

    def _time_to_next_place(self) -> float:
        """How long the last places were apart, in seconds: a guess at when the next one is free."""
        if len(self._taken_at) < 2:
            return 1.0
        span = asyncio.get_running_loop().time() - self._taken_at[0]
        return min(max(span / len(self._taken_at), MIN_RETRY_S), MAX_RETRY_S)
