"""In which order sequences are served: which waiting one is next, and which running one gives way first.

A policy is chosen by name, or is a class of your own: a subclass of `Policy` whose `key` decides what goes first, or of
`Fair` whose `tenant` and `weight` decide between whom service is shared, and how. A class of your own is asked these
three alone, and only when a request comes: what they raise ends that request, and no other. They are called on a loop,
so that they have to be quick and may wait for nothing.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Iterator
from numbers import Real
from typing import Any, NamedTuple

import msgspec

from aioengine.errors import ConfigError, InternalError, describe
from aioengine.sampling_params import SamplingParams
from aioengine.scheduler.sequence import Request, Sequence, make_copier
from aioengine.validation import load_by_path, shorten


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
        """The sequence with the largest key gives way first."""
        return sequence.precedence


PROMPT_COST = 1.0
"""The cost of a prompt's token that no cached prefix has."""
OUTPUT_COST = 2.0
"""The cost of an output's token, which is computed alone."""

MAX_REMEMBERED = 10_000
"""Tenants whose counts are kept while nothing of theirs waits; with more, they begin at zero again."""


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
        """Counts of tenants that wait, each as it was at some time; and of some other tenants."""
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
        """The sequence with the largest key gives way first: one of the tenant that has had the most."""
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


MIN_WEIGHT, MAX_WEIGHT = 1e-6, 1e6
"""Sums of tokens over such weights neither overflow nor lose what is added to them."""


class Incoming(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """A request that comes, as a policy sees it: twice, at the admission and in the core.

    Attributes:
        request_id: the caller's name for it.
        tenant, priority, cache_salt: as given, or "", 0 and "".
        num_prompt_tokens: of its prompt; of a text or a chat, at the admission, a guess by the characters, since only
            what is admitted is tokenized.
        params: how it is sampled.
    """

    request_id: str
    num_prompt_tokens: int
    params: SamplingParams
    tenant: str = ""
    priority: int = 0
    cache_salt: str = ""

    @classmethod
    def of(cls, request: Request) -> Incoming:
        return _copy_request(request, num_prompt_tokens=len(request.prompt_token_ids))


_copy_request: Callable[..., Incoming] = make_copier(Request, Incoming, "num_prompt_tokens")


class Policy:
    """First come, first served.

    Made without arguments, by each engine and by each front end of one in another process.
    """

    def key(self, request: Incoming) -> tuple[float, float]:
        """(level, rank) of a request, two numbers: the smaller goes first, and of equal ones the older.

        A waiting sequence takes the rows of running ones of a larger level, and never those of its own level.
        """
        return 0, 0

    def _make_queue(self) -> WaitingQueue | TenantQueues:
        """Make the queue, which also chooses the sequence that gives up its row or blocks."""
        return WaitingQueue()


class ByPriority(Policy):
    """By the requests' priorities, then first come, first served. A higher priority takes a lower one's row."""

    def key(self, request: Incoming) -> tuple[float, float]:
        return request.priority, 0


class Fair(Policy):
    """Equal service for tenants that have something waiting, in tokens; by `key` (priority) and age within each.

    The counting is `TenantQueues`'. No sequence takes another's row; memory that runs short is taken from the running
    tenant that has had the most. At the admission a tenant has a share of ``max_waiting``, see `Admission`.
    """

    def key(self, request: Incoming) -> tuple[float, float]:
        return 0, request.priority

    def tenant(self, request: Incoming) -> str:
        """Whose it is; always the same. Requests that name no tenant are one tenant's together."""
        return request.tenant

    def weight(self, tenant: str) -> float:
        """The tenant's share beside the others': from `MIN_WEIGHT` to `MAX_WEIGHT`."""
        return 1.0

    def _make_queue(self) -> TenantQueues:
        return TenantQueues()


POLICIES: dict[str, type[Policy]] = {"fcfs": Policy, "priority": ByPriority, "fair": Fair}


class Order(NamedTuple):
    """The place of a request by a policy. Only a `Fair` one has several tenants."""

    level: float
    rank: float
    tenant: str = ""
    weight: float = 1.0


def order_of(policy: Policy, request: Incoming) -> Order:
    """Ask a policy for the place of a request, and check it.

    Raises:
        InternalError: it raises, or returns something else.
    """
    name = f"the scheduler's policy {type(policy).__name__}"
    tenant: Any = ""
    weight: Any = 1.0
    try:
        key: Any = policy.key(request)
        if isinstance(policy, Fair):
            tenant = policy.tenant(request)
            weight = policy.weight(tenant) if isinstance(tenant, str) else weight
    except Exception as error:  # a class of the user's own may raise anything
        raise InternalError(f"{name} cannot order this request: {describe(error)}") from error
    is_pair = isinstance(key, tuple | list) and len(key) == 2
    if not (is_pair and _is_number(key[0]) and _is_number(key[1])):
        raise InternalError(f"{name} has a wrong key: {shorten(key)}; it must be (level, rank), two numbers")
    if not isinstance(tenant, str):
        raise InternalError(f"{name} has a wrong tenant: {shorten(tenant)}; it must be a str")
    if not _is_number(weight) or not MIN_WEIGHT <= weight <= MAX_WEIGHT:
        raise InternalError(
            f"{name} has a wrong weight: {shorten(weight)}; it must be a number from {MIN_WEIGHT:g} to {MAX_WEIGHT:g}"
        )
    return Order(key[0], key[1], tenant, float(weight))


def _is_number(value: Any) -> bool:
    """Whether it has a place in an order, which NaN has not."""
    return (type(value) in (int, float) or isinstance(value, Real)) and value == value  # the first is ten times as fast


def make_policy(scheduler: str) -> Policy:
    """The policy of a name, or of the class at ``module:Class``.

    Raises:
        ConfigError: there is none, or it cannot be made.
    """
    kind = POLICIES.get(scheduler) or load_by_path(scheduler, "scheduler")
    if not (isinstance(kind, type) and issubclass(kind, Policy)):
        raise ConfigError(f"scheduler={scheduler!r}: a subclass of aioengine.scheduler.policy.Policy is needed")
    try:
        return kind()
    except Exception as error:  # a class of the user's own may raise anything
        raise ConfigError(f"scheduler={scheduler!r} cannot be made: {type(error).__name__}: {error}") from error
