"""The open requests, and the bound on those of them that do not run."""

from __future__ import annotations

import asyncio
import bisect
from collections import deque
from collections.abc import Callable
from typing import Literal, NamedTuple

from aioengine.errors import WAIT, AioEngineError, EngineOverloaded
from aioengine.frontend.request_state import RequestState
from aioengine.processes.turns import turns_here
from aioengine.scheduler.policy import ByPriority, Fair, Incoming, Order, Policy, order_of
from aioengine.validation import invalid, shorten

OnFull = Literal["wait", "raise"]

MIN_RETRY_S, MAX_RETRY_S = 0.1, 60.0


class _Waiting(NamedTuple):
    """A request in a queue; ``admitted`` gets the number of sequences that it has capacity for, 0 if dismissed."""

    level: float
    rank: float
    arrival: int
    num_sequences: int
    request: RequestState
    tenant: _Tenant
    admitted: asyncio.Future[int]


class _Tenant:
    """A tenant that holds capacity or has a queue; a policy without tenants has a single one.

    Attributes:
        turn: the tenant with the smallest is next; each admission adds the request's sequences over the weight.
        num_held: its sequences that have capacity: they are being prepared, or have not had a row.
        queue: its requests that wait to be admitted, the next one first.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.weight = 1.0
        self.turn = 0.0
        self.num_held = 0
        self.queue: list[_Waiting] = []

    @property
    def place(self) -> tuple[float, str]:
        return self.turn, self.name


class Admission:
    """The open requests, and capacity for those on their way to a row.

    A request enters before anything else is done for it, and leaves when its reader does. Before any costly work, such
    as tokenization, it acquires capacity for each of its sequences. Waiting requests are admitted in the policy's
    order, and none passes the one before it, however few sequences it has.

    The tenants of a `Fair` policy share the capacity: a tenant that holds some may hold as much as is left free (a
    dynamic threshold: Choudhury and Hahne, IEEE/ACM Transactions on Networking 6(2), 1998). A tenant alone thus leaves
    half to newcomers, and n tenants that ask for all of it leave a part in n + 1. Requests beyond a tenant's share wait
    or are refused, and delay no other tenant's. Requests within the shares are admitted in turn, by the weights.

    Args:
        capacity: most sequences that are being prepared or wait in the scheduler.
        num_unstarted: returns the number of sequences that wait in the scheduler now.
        on_left: called when a request has gone on to the scheduler, or away.
    """

    def __init__(self, capacity: int, num_unstarted: Callable[[], int], on_left: Callable[[], None]) -> None:
        self.capacity = capacity
        self.policy: Policy = ByPriority()
        """The order of the requests that wait here; the same as the core's."""
        self.requests: dict[RequestState, None] = {}
        """The requests that have entered and not left, in order."""
        self.num_preparing = 0
        """Sequences that have capacity and are not in the scheduler yet."""
        self.num_waiting = 0
        """Sequences of requests that wait to be admitted."""
        self.refusal: Callable[[], AioEngineError] | None = None
        """Makes the error of requests that enter from now on; None: they are admitted. Earlier ones are not refused."""
        self._num_unstarted = num_unstarted
        self._on_left = on_left
        self._tenants: dict[str, _Tenant] = {}
        """The tenants that hold capacity or have a queue, by name."""
        self._places: list[tuple[float, str]] = []
        """The places of the tenants that have a queue, sorted."""
        self._waiting: dict[RequestState, _Waiting] = {}
        self._num_arrivals = 0
        self._turn = 0.0
        """The turn of the tenant that was admitted last from its queue; a tenant without a queue begins there."""
        self._acquired_at: deque[float] = deque(maxlen=32)

    @property
    def num_free(self) -> int:
        return self.capacity - self.num_preparing - self._num_unstarted()

    @property
    def is_quiet(self) -> bool:
        """Whether no open request is still on its way to the scheduler."""
        return all(request.is_begun for request in self.requests)

    def enter(self, request: RequestState) -> None:
        """Register a request, or raise the current `refusal`; later refusals do not apply to it."""
        self._check_refusal()
        self.requests[request] = None

    def leave(self, request: RequestState) -> None:
        """Unregister a request, since its reader has gone. Idempotent."""
        self.requests.pop(request, None)
        self._on_left()

    async def acquire(self, request: RequestState, on_full: OnFull, incoming: Incoming) -> int:
        """Acquire capacity, waiting for it in turn; `release` returns it.

        Cancelling leaves the queue, or returns the capacity if it has just been acquired.

        Args:
            incoming: the properties by which the policy orders the request; of at most ``capacity`` sequences.
        Returns:
            number of its sequences; 0 for a request that was aborted, which has no capacity.
        Raises:
            EngineOverloaded: there is too little capacity, and ``on_full`` is "raise".
            InternalError: the policy cannot order the request.
            AioEngineError: the error of a `close` meanwhile.
        """
        if request.is_aborted:
            return 0
        order, num_sequences = order_of(self.policy, incoming), incoming.params.num_sequences
        tenant = self._tenant(order)
        if on_full == "raise":
            self._check_capacity(tenant, num_sequences)
        if self._has_capacity(tenant, num_sequences):
            self._take(tenant, request, num_sequences)
            return num_sequences
        admitted: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        waiting = _Waiting(order.level, order.rank, self._num_arrivals, num_sequences, request, tenant, admitted)
        self._waiting[request] = waiting
        self._num_arrivals += 1
        self.num_waiting += num_sequences
        if not tenant.queue:
            self._tenants[tenant.name] = tenant
            tenant.turn = max(tenant.turn, self._turn)
            bisect.insort(self._places, tenant.place)
        bisect.insort(tenant.queue, waiting)
        self.admit()  # the first in the queue now may need less than the one before it
        try:
            return await admitted
        except asyncio.CancelledError:
            if request in self._waiting:
                self._drop(waiting)
                self.admit()  # the next one may need less
            elif not admitted.cancelled() and admitted.exception() is None:
                self.release(request, admitted.result())
            raise

    def check(self, num_sequences: int, incoming: Incoming | None = None) -> None:
        """Raise the error of requests of so many sequences with ``on_full`` "raise", if any; acquires nothing.

        Args:
            incoming: one of the requests; absent: they are of a tenant that holds nothing.
        """
        if isinstance(num_sequences, bool) or not isinstance(num_sequences, int) or num_sequences < 1:
            raise invalid("num_sequences", f"num_sequences={shorten(num_sequences)}: an int of at least 1 is needed")
        if num_sequences > self.capacity:
            problem = f"{num_sequences} sequences never find room where max_waiting={self.capacity} may wait"
            raise invalid("num_sequences", problem)
        if incoming is not None and isinstance(self.policy, Fair):
            most = max(self.capacity // 2, incoming.params.num_sequences)  # of several requests of one tenant
            if num_sequences > most:
                problem = f"{num_sequences} sequences never find room at once where a tenant may have {most} waiting"
                raise invalid("num_sequences", problem)
        self._check_refusal()
        tenant = _Tenant("") if incoming is None else self._tenant(order_of(self.policy, incoming))
        self._check_capacity(tenant, num_sequences)

    def release(self, request: RequestState, num_sequences: int) -> None:
        """Return the capacity of a request that has gone on to the scheduler, or has ended before."""
        self.num_preparing -= num_sequences
        if not request.is_begun:
            request.leave_queue(num_sequences)
        self.admit()
        self._on_left()

    def admit(self) -> None:
        """Admit as many waiting requests as there is capacity for."""
        while (first := self._first()) is not None and first.num_sequences <= self.num_free:
            tenant = first.tenant
            self._turn = max(self._turn, tenant.turn)
            if self._drop(first, num_turns=first.num_sequences):
                self._take(tenant, first.request, first.num_sequences)
                first.admitted.set_result(first.num_sequences)

    def dismiss(self, request: RequestState) -> None:
        """End the wait of a request, if it waits: it was aborted, and needs no capacity."""
        waiting = self._waiting.get(request)
        if waiting is not None and self._drop(waiting):
            waiting.admitted.set_result(0)

    async def close(self, error: Callable[[], AioEngineError]) -> None:
        """Refuse new requests and all that wait, in order. If this is cancelled, a second call refuses the rest."""
        self.refusal = error
        while self._places:
            await turns_here().take()
            if self._places and self._drop(first := self._tenants[self._places[0][1]].queue[0]):
                first.admitted.set_exception(error())

    def _check_refusal(self) -> None:
        if self.refusal is not None:
            raise self.refusal()

    def _check_capacity(self, tenant: _Tenant, num_sequences: int) -> None:
        if not self._has_capacity(tenant, num_sequences):
            if tenant.num_held and self.num_free >= num_sequences:
                why = f"{tenant.num_held} sequences of this tenant wait already, its share of"
            else:
                why = f"{self.capacity} sequences wait already, or too many for {num_sequences} more, with"
            retry_after_s = 1.0
            if len(self._acquired_at) >= 2:  # the mean time between the last acquisitions: a guess at the next one's
                span = asyncio.get_running_loop().time() - self._acquired_at[0]
                retry_after_s = min(max(span / len(self._acquired_at), MIN_RETRY_S), MAX_RETRY_S)
            message = f"{why} max_waiting={self.capacity}; try again later"
            raise EngineOverloaded(message, retry_after_s=retry_after_s).with_hint(WAIT)

    def _has_capacity(self, tenant: _Tenant, num_sequences: int) -> bool:
        """Whether a new request has capacity. It passes only requests that wait for their tenants' shares."""
        is_next = not tenant.queue and self._first() is None
        return is_next and self.num_free >= num_sequences and self._is_within_share(tenant, num_sequences)

    def _is_within_share(self, tenant: _Tenant, num_sequences: int) -> bool:
        if not (tenant.num_held and isinstance(self.policy, Fair)):
            return True
        return tenant.num_held + num_sequences <= self.num_free - num_sequences

    def _first(self) -> _Waiting | None:
        """The request to be admitted next, once there is capacity."""
        for _, name in self._places:  # tenants that are skipped hold capacity, so that there are at most ``capacity``
            tenant = self._tenants[name]
            if self._is_within_share(tenant, tenant.queue[0].num_sequences):
                return tenant.queue[0]
        return None

    def _tenant(self, order: Order) -> _Tenant:
        """A request's tenant, which is kept only while it holds capacity or has a queue."""
        tenant = self._tenants.get(order.tenant) or _Tenant(order.tenant)
        tenant.weight = order.weight
        return tenant

    def _take(self, tenant: _Tenant, request: RequestState, num_sequences: int) -> None:
        self.num_preparing += num_sequences
        self._acquired_at.append(asyncio.get_running_loop().time())
        if not isinstance(self.policy, Fair):
            return  # tenants have no shares
        self._tenants[tenant.name] = tenant
        tenant.num_held += num_sequences

        def leave_queue(num_left: int) -> None:
            tenant.num_held -= num_left
            self._forget_if_idle(tenant)
            if tenant.queue:
                self.admit()

        request.leave_queue = leave_queue

    def _drop(self, waiting: _Waiting, *, num_turns: int = 0) -> bool:
        """Take a request out of its queue; False if it was cancelled, and waits no more."""
        tenant = waiting.tenant
        del self._waiting[waiting.request]
        del tenant.queue[bisect.bisect_left(tenant.queue, waiting)]
        del self._places[bisect.bisect_left(self._places, tenant.place)]
        tenant.turn += num_turns / tenant.weight
        if tenant.queue:
            bisect.insort(self._places, tenant.place)
        self._forget_if_idle(tenant)
        self.num_waiting -= waiting.num_sequences
        return not waiting.admitted.done()

    def _forget_if_idle(self, tenant: _Tenant) -> None:
        if not (tenant.num_held or tenant.queue):
            self._tenants.pop(tenant.name, None)
