"""The bound on requests that are accepted and do not run yet."""

from __future__ import annotations

import asyncio
from collections import OrderedDict, deque
from collections.abc import Callable, Hashable
from typing import Literal

from aioengine.errors import AioEngineError, EngineOverloaded

OnFull = Literal["wait", "raise"]

MIN_RETRY_S, MAX_RETRY_S = 0.1, 60.0


class Intake:
    """Places for requests on their way to a row; taken before any costly work, such as tokenization, is done.

    Args:
        limit: requests that are being prepared or wait in the scheduler.
        num_unstarted: how many wait in the scheduler now.
    """

    def __init__(self, limit: int, num_unstarted: Callable[[], int]) -> None:
        self.limit = limit
        self.num_preparing = 0
        self._num_unstarted = num_unstarted
        self._queue: OrderedDict[Hashable, asyncio.Future[None]] = OrderedDict()
        self._refusal: Callable[[], AioEngineError] | None = None
        self._on_quiet: Callable[[], None] | None = None
        self._taken_at: deque[float] = deque(maxlen=32)

    @property
    def num_free(self) -> int:
        return self.limit - self.num_preparing - self._num_unstarted()

    async def enter(self, who: Hashable, on_full: OnFull) -> None:
        """Take a place, waiting for one in order of arrival; `leave` gives it back.

        Cancelling gives up the place in the queue, or the place itself if it has just been won.

        Raises:
            EngineOverloaded: there is none, and ``on_full`` is "raise".
            AioEngineError: what `close` was given.
        """
        if self._refusal is not None:
            raise self._refusal()
        if self.num_free > 0 and not self._queue:
            self._take()
            return
        if on_full == "raise":
            raise EngineOverloaded(
                f"{self.limit} requests wait already (max_waiting); try again later, or wait with on_full='wait'",
                retry_after_s=self._time_to_next_place(),
            )
        place: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._queue[who] = place
        try:
            await place
        except asyncio.CancelledError:
            if self._queue.pop(who, None) is None and not place.cancelled() and place.exception() is None:
                self.leave()
            raise

    def leave(self) -> None:
        """The request has gone on to the scheduler, or has failed on its way."""
        self.num_preparing -= 1
        self.admit()
        if self._on_quiet is not None:
            self.when_quiet(self._on_quiet)

    def admit(self) -> None:
        """Let in as many as there are places for now."""
        while self._queue and self.num_free > 0:
            self.let_in(next(iter(self._queue)))

    def let_in(self, who: Hashable) -> None:
        """Let this one in, place or no place, if it waits here: it was aborted, and will take no room for long."""
        place = self._queue.pop(who, None)
        if place is not None and not place.done():
            self._take()
            place.set_result(None)

    def close(self, error: Callable[[], AioEngineError]) -> None:
        """Refuse all who wait, and all who come later, each with an ``error`` of its own."""
        self._refusal = error
        while self._queue:
            _, place = self._queue.popitem(last=False)
            if not place.done():
                place.set_exception(error())

    def when_quiet(self, callback: Callable[[], None]) -> None:
        """Call back once nobody is between the queue and the scheduler; now, if so. To be closed first."""
        self._on_quiet = callback if self.num_preparing else None
        if not self.num_preparing:
            callback()

    def _take(self) -> None:
        self.num_preparing += 1
        self._taken_at.append(asyncio.get_running_loop().time())

    def _time_to_next_place(self) -> float:
        """How long the last places were apart, in seconds: a guess at when the next one is free."""
        if len(self._taken_at) < 2:
            return 1.0
        span = asyncio.get_running_loop().time() - self._taken_at[0]
        return min(max(span / len(self._taken_at), MIN_RETRY_S), MAX_RETRY_S)
