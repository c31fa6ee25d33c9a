"""Requests that were made and not left yet, and the bound on those of them that do not run."""

from __future__ import annotations

import asyncio
import bisect
from collections import deque
from collections.abc import Callable
from typing import Literal, NamedTuple

from aioengine.errors import AioEngineError, EngineOverloaded, InvalidRequest
from aioengine.frontend.request_state import RequestState
from aioengine.turns import turns_here
from aioengine.validation import shorten

OnFull = Literal["wait", "raise"]

MIN_RETRY_S, MAX_RETRY_S = 0.1, 60.0


class _Waiting(NamedTuple):
    """A request in the queue; it is told how many sequences it has capacity for, 0 if it was dismissed."""

    priority: int
    turn: int
    """How many of its tenant's were in the queue before it, counted from the turn of the last that was admitted."""
    arrival: int
    num_sequences: int
    request: RequestState
    admitted: asyncio.Future[int]


class Admission:
    """The open requests, and capacity for those on their way to a row.

    A request enters before anything else is done for it, and leaves when its reader does. Before any costly work, such
    as tokenization, it acquires capacity for each sequence that it will be. Waiting requests are admitted by priority,
    tenants in turn, then first come first served ("fcfs": by that alone; "fair": without regard to priorities); none
    passes the one before it, however few sequences it has.

    Args:
        capacity: sequences that are being prepared or wait in the scheduler, at most.
        num_unstarted: how many wait in the scheduler now.
        on_left: called when a request has gone on to the scheduler, or away.
    """

    def __init__(self, capacity: int, num_unstarted: Callable[[], int], on_left: Callable[[], None]) -> None:
        self.capacity = capacity
        self.scheduler = "priority"
        """The name of the core's policy."""
        self.requests: dict[RequestState, None] = {}
        """Those that have entered and not left, in order."""
        self.num_preparing = 0
        """Sequences that have capacity and are not in the scheduler yet."""
        self.num_waiting = 0
        """Sequences of requests that wait to be admitted."""
        self.refusal: Callable[[], AioEngineError] | None = None
        """Makes the error of requests that enter from now on, if they are refused; others are admitted in turn."""
        self._num_unstarted = num_unstarted
        self._on_left = on_left
        self._queue: list[_Waiting] = []
        """Sorted: the next one first."""
        self._waiting: dict[RequestState, _Waiting] = {}
        self._num_arrivals = 0
        self._turn = 0
        """Of the request that was admitted last from the queue."""
        self._turns: dict[str, int] = {}
        """Of the last one of each tenant, where that is a later turn."""
        self._acquired_at: deque[float] = deque(maxlen=32)

    @property
    def num_free(self) -> int:
        return self.capacity - self.num_preparing - self._num_unstarted()

    @property
    def is_quiet(self) -> bool:
        """Whether no open request is still on its way to the scheduler."""
        return all(request.is_begun for request in self.requests)

    def enter(self, request: RequestState) -> None:
        """A request was made; raises its `refusal` if there is one, and no later one refuses it."""
        self._check_refusal()
        self.requests[request] = None

    def leave(self, request: RequestState) -> None:
        """Its reader has gone. Idempotent."""
        self.requests.pop(request, None)
        self._on_left()

    async def acquire(
        self, request: RequestState, on_full: OnFull, *, priority: int, num_sequences: int, tenant: str = ""
    ) -> int:
        """Acquire capacity, waiting for it in turn; `release` gives it back.

        Cancelling leaves the queue, or gives the capacity back if it has just been acquired.

        Args:
            priority: smaller goes first.
            num_sequences: at most ``capacity``.
        Returns:
            ``num_sequences``; 0 for a request that was aborted, which has no capacity.
        Raises:
            EngineOverloaded: there is too little, and ``on_full`` is "raise".
            AioEngineError: what `close` was given meanwhile.
        """
        if request.is_aborted:
            return 0
        if on_full == "raise":
            self._check_capacity(num_sequences)
        if self._has_capacity(num_sequences):
            self._take(num_sequences)
            return num_sequences
        admitted: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        priority = 0 if self.scheduler in ("fcfs", "fair") else priority
        turn = 0
        if self.scheduler not in ("fcfs", "priority"):
            turn = self._turns[tenant] = max(self._turns.get(tenant, 0), self._turn) + 1
            if len(self._turns) > 2 * len(self._queue) + 16:
                self._turns = {name: last for name, last in self._turns.items() if last > self._turn}
        waiting = _Waiting(priority, turn, self._num_arrivals, num_sequences, request, admitted)
        self._waiting[request] = waiting
        self._num_arrivals += 1
        self.num_waiting += num_sequences
        bisect.insort(self._queue, waiting)
        self.admit()  # the first in the queue now may need less than the one before it
        try:
            return await admitted
        except asyncio.CancelledError:
            if request in self._waiting:
                self._drop(waiting)
                self.admit()  # the next one may need less
            elif not admitted.cancelled() and admitted.exception() is None:
                self.release(admitted.result())
            raise

    def check(self, num_sequences: int) -> None:
        """Raise what a request of so many sequences would hear with ``on_full`` "raise"; acquires nothing."""
        if isinstance(num_sequences, bool) or not isinstance(num_sequences, int) or num_sequences < 1:
            raise InvalidRequest(
                f"num_sequences={shorten(num_sequences)}: an int of at least 1 is needed", param="num_sequences"
            )
        if num_sequences > self.capacity:
            raise InvalidRequest(
                f"{num_sequences} sequences never find room where max_waiting={self.capacity} may wait",
                param="num_sequences",
            )
        self._check_refusal()
        self._check_capacity(num_sequences)

    def release(self, num_sequences: int) -> None:
        """The request has gone on to the scheduler, or has ended on its way."""
        self.num_preparing -= num_sequences
        self.admit()
        self._on_left()

    def admit(self) -> None:
        """Admit as many requests as there is capacity for now."""
        while self._queue and self._queue[0].num_sequences <= self.num_free:
            first = self._queue[0]
            self._turn = max(self._turn, first.turn)
            if self._drop(first):
                self._take(first.num_sequences)
                first.admitted.set_result(first.num_sequences)

    def dismiss(self, request: RequestState) -> None:
        """Let a request wait no longer, if it does: it was aborted, and needs no capacity."""
        waiting = self._waiting.get(request)
        if waiting is not None and self._drop(waiting):
            waiting.admitted.set_result(0)

    async def close(self, error: Callable[[], AioEngineError]) -> None:
        """Refuse all that come and all that wait, in order. If cancelled, the rest stay for a second call."""
        self.refusal = error
        while self._queue:
            await turns_here().take()
            if self._queue and self._drop(first := self._queue[0]):
                first.admitted.set_exception(error())

    def _check_refusal(self) -> None:
        if self.refusal is not None:
            raise self.refusal()

    def _check_capacity(self, num_sequences: int) -> None:
        if not self._has_capacity(num_sequences):
            raise EngineOverloaded(
                f"{self.capacity} sequences wait already (max_waiting), or too many for {num_sequences} more; try "
                "again later, or wait with on_full='wait'",
                retry_after_s=self._estimate_wait(),
            )

    def _has_capacity(self, num_sequences: int) -> bool:
        """For a request that comes now, and passes none that waits."""
        return not self._queue and self.num_free >= num_sequences

    def _take(self, num_sequences: int) -> None:
        self.num_preparing += num_sequences
        self._acquired_at.append(asyncio.get_running_loop().time())

    def _drop(self, waiting: _Waiting) -> bool:
        """Take it out of the queue; False if it was cancelled and needs to hear nothing."""
        del self._waiting[waiting.request]
        del self._queue[bisect.bisect_left(self._queue, waiting)]
        self.num_waiting -= waiting.num_sequences
        return not waiting.admitted.done()

    def _estimate_wait(self) -> float:
        """The mean time between the last acquisitions, in seconds: a guess at when the next one succeeds."""
        if len(self._acquired_at) < 2:
            return 1.0
        span = asyncio.get_running_loop().time() - self._acquired_at[0]
        return min(max(span / len(self._acquired_at), MIN_RETRY_S), MAX_RETRY_S)
