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


class _Waiting(NamedTuple):
    num_sequences: int
    admitted: asyncio.Future[bool]


class Admission:
    """Capacity for requests on their way to a row; acquired before any costly work, such as tokenization, is done.

    A request acquires capacity for each sequence that it will be. Waiting requests are admitted by priority, then first
    come first served; none passes the one before it, however few sequences it has.

    Args:
        capacity: sequences that are being prepared or wait in the scheduler, at most.
        num_unstarted: how many wait in the scheduler now.
        on_left: called when a request has gone on to the scheduler, or away.
    """

    def __init__(
        self, capacity: int, num_unstarted: Callable[[], int], on_left: Callable[[], None] = lambda: None
    ) -> None:
        self.capacity = capacity
        self.num_preparing = 0
        """Sequences that have capacity and are not in the scheduler yet."""
        self.num_waiting = 0
        """Sequences of requests that wait to be admitted."""
        self._num_unstarted = num_unstarted
        self._on_left = on_left
        self._waiting: dict[Hashable, _Waiting] = {}
        self._queue: list[tuple[int, int, Hashable]] = []
        """(priority, arrival, request) as a heap; requests that wait no longer stay in it until they come up."""
        self._num_arrivals = 0
        self._refusal: Callable[[], AioEngineError] | None = None
        self._is_closed = False
        self._num_expected = 0
        self._acquired_at: deque[float] = deque(maxlen=32)

    @property
    def num_free(self) -> int:
        return self.capacity - self.num_preparing - self._num_unstarted()

    @property
    def is_quiet(self) -> bool:
        """Whether no request is expected, waits to be admitted, or is on its way to the scheduler."""
        return not (self._num_expected or self._waiting or self.num_preparing)

    @property
    def is_refusing(self) -> bool:
        return self._refusal is not None

    @contextlib.contextmanager
    def expecting(self) -> Iterator[None]:
        """A request was made, and acquires after this block with ``is_expected``: no `refuse` meanwhile refuses it.

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

    async def acquire(
        self,
        request: Hashable,
        on_full: OnFull,
        *,
        priority: int = 0,
        num_sequences: int = 1,
        is_expected: bool = False,
    ) -> bool:
        """Acquire capacity, waiting for it in turn; `release` gives it back. False: it was dismissed, and has none.

        Cancelling leaves the queue, or gives the capacity back if it has just been acquired.

        Args:
            priority: smaller goes first.
            num_sequences: at most ``capacity``.
            is_expected: it was made before a `refuse` that came since; see `expecting`.
        Raises:
            EngineOverloaded: there is too little, and ``on_full`` is "raise".
            AioEngineError: what `close` or `refuse` was given.
        """
        if not is_expected or self._is_closed:
            self._check_refusal()
        if on_full == "raise":
            self._check_capacity(num_sequences)
        if self._has_capacity(num_sequences):
            self._take(num_sequences)
            return True
        admitted = asyncio.get_running_loop().create_future()
        self._waiting[request] = _Waiting(num_sequences, admitted)
        self.num_waiting += num_sequences
        heapq.heappush(self._queue, (priority, self._num_arrivals, request))
        self._num_arrivals += 1
        self.admit()  # the first in the queue now may need less than the one before it
        try:
            has_capacity: bool = await admitted
            return has_capacity
        except asyncio.CancelledError:
            if self._drop(request) is not None:
                self._after_drop()
            elif not admitted.cancelled() and admitted.exception() is None and admitted.result():
                self.release(num_sequences)
            raise

    def check(self, num_sequences: int = 1) -> None:
        """What `acquire` does first with ``on_full`` "raise"; acquires nothing.

        Raises:
            EngineOverloaded: there is too little capacity.
            AioEngineError: what `close` or `refuse` was given.
        """
        self._check_refusal()
        self._check_capacity(num_sequences)

    def _check_refusal(self) -> None:
        if self._refusal is not None:
            raise self._refusal()

    def _check_capacity(self, num_sequences: int) -> None:
        if not self._has_capacity(num_sequences):
            raise EngineOverloaded(
                f"{self.capacity} sequences wait already (max_waiting), or too many for {num_sequences} more; try "
                "again later, or wait with on_full='wait'",
                retry_after_s=self._estimate_wait(),
            )

    def release(self, num_sequences: int = 1) -> None:
        """The request has gone on to the scheduler, or has failed on its way."""
        self.num_preparing -= num_sequences
        self.admit()
        self._on_left()

    def admit(self) -> None:
        """Admit as many requests as there is capacity for now."""
        while (first := self._first()) is not None and self._waiting[first].num_sequences <= self.num_free:
            waiting = self._drop(first)
            if waiting is not None and not waiting.admitted.done():
                self._take(waiting.num_sequences)
                waiting.admitted.set_result(True)

    def dismiss(self, request: Hashable) -> None:
        """Let a request wait no longer, if it does: it was aborted, and needs no capacity."""
        waiting = self._drop(request)
        if waiting is not None and not waiting.admitted.done():
            waiting.admitted.set_result(False)
            self._after_drop()

    def refuse(self, error: Callable[[], AioEngineError]) -> None:
        """Refuse requests from now on, each with an ``error`` of its own; those that wait are admitted in turn."""
        self._refusal = error

    def reopen(self) -> None:
        """Refuse no request any more."""
        self._refusal = None

    async def close(self, error: Callable[[], AioEngineError]) -> None:
        """Refuse all waiting requests in order. If cancelled, the rest stay for a second call."""
        self._refusal, self._is_closed = error, True
        while (first := self._first()) is not None:
            await turns_here().take()
            waiting = self._drop(first)
            if waiting is not None and not waiting.admitted.done():
                waiting.admitted.set_exception(error())

    def _drop(self, request: Hashable) -> _Waiting | None:
        """Let it wait no longer; None if it did not."""
        waiting = self._waiting.pop(request, None)
        if waiting is not None:
            self.num_waiting -= waiting.num_sequences
        return waiting

    def _after_drop(self) -> None:
        """A request has left the queue without capacity: the next one may need less."""
        # What has left is never the larger half: behind a first one that waits long, thousands may come and go.
        if len(self._queue) > 2 * len(self._waiting) + 16:
            self._queue = sorted(entry for entry in self._queue if entry[2] in self._waiting)
        self.admit()
        self._on_left()

    def _first(self) -> Hashable | None:
        """The request that is admitted next."""
        while self._queue and self._queue[0][2] not in self._waiting:
            heapq.heappop(self._queue)
        return self._queue[0][2] if self._queue else None

    def _has_capacity(self, num_sequences: int) -> bool:
        """For a request that comes now, and passes none that waits."""
        return not self._waiting and self.num_free >= num_sequences

    def _take(self, num_sequences: int) -> None:
        self.num_preparing += num_sequences
        self._acquired_at.append(asyncio.get_running_loop().time())

    def _estimate_wait(self) -> float:
        """The mean time between the last acquisitions, in seconds: a guess at when the next one succeeds."""
        if len(self._acquired_at) < 2:
            return 1.0
        span = asyncio.get_running_loop().time() - self._acquired_at[0]
        return min(max(span / len(self._acquired_at), MIN_RETRY_S), MAX_RETRY_S)
