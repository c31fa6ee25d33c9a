"""In which order sequences are served: which waiting one is next, and which running one gives way first.

A policy is chosen by name, or is a class of your own: a subclass of `Policy` whose `key` says what goes first, or of
`Fair` whose `tenant` and `weight` say between whom service is shared, and how. It is called on the engine's loop,
between two steps, so that it has to be quick and may wait for nothing.
"""

from __future__ import annotations

from collections.abc import Iterable
from numbers import Real
from typing import Any

from aioengine.errors import ConfigError, InternalError, describe
from aioengine.import_path import load
from aioengine.scheduler.sequence import Sequence
from aioengine.scheduler.waiting_queue import TenantQueues, WaitingQueue
from aioengine.validation import shorten


class Policy:
    """First come, first served; and all that a policy can say. Each engine makes one of its own, without arguments.

    What a policy raises ends the engine, but for `key` and `Fair.tenant` of a request that comes, which end that alone.
    """

    counts_service = False
    """Whether `on_admitted` and `on_sampled` are called."""

    def key(self, sequence: Sequence) -> tuple[int, float]:
        """(level, rank) of a sequence, asked once, when it comes: the smaller goes first, and of equal ones the older.

        A waiting sequence takes the rows of running ones of a larger level, and never those of its own level.
        """
        return 0, 0

    def make_queue(self) -> WaitingQueue | TenantQueues:
        """What sequences wait in; called once."""
        return WaitingQueue()

    def standing(self, sequence: Sequence) -> Any:
        """Where it stands now: of those that may give way, the one with the largest does."""
        return sequence.precedence

    def last(self, running: list[Sequence]) -> Sequence:
        """The one of these, sorted by `key` and at least one, that gives way first."""
        return running[-1]

    def on_admitted(self, sequence: Sequence) -> None:
        """It has taken a row for the first time; ``num_computed_tokens`` is what it need not compute of its prompt."""

    def on_sampled(self, sequences: Iterable[Sequence]) -> None:
        """Each of these has been given a token."""


class ByPriority(Policy):
    """By the requests' priorities, then first come, first served. A higher priority takes a lower one's row."""

    def key(self, sequence: Sequence) -> tuple[int, float]:
        return sequence.request.priority, 0


class Fair(Policy):
    """Equal service for tenants that have something waiting, in tokens; by priority and age within each.

    Virtual token counters (Sheng et al., "Fairness in Serving Large Language Models", OSDI 2024): what is computed for
    a tenant is counted, and the waiting tenant with the smallest count is next. One that had nothing waiting is raised
    to the least count of those that have, so that idle time earns no credit. No sequence takes another's row; memory
    that runs short is taken from the running tenant that has had the most.

    Attributes:
        served: by tenant, the tokens that it was charged, over its weight. Only differences mean anything.
    """

    counts_service = True
    prompt_cost = 1.0
    """Of a prompt's token that no cached prefix has."""
    output_cost = 2.0
    """Of an output's token, which is computed alone."""

    def __init__(self) -> None:
        self.served: dict[str, float] = {}

    def tenant(self, sequence: Sequence) -> str:
        """Whose it is; always the same. Requests that name no tenant are one tenant's together."""
        return sequence.request.tenant

    def weight(self, tenant: str) -> float:
        """The tenant's share beside the others'; above 0."""
        return 1.0

    def key(self, sequence: Sequence) -> tuple[int, float]:
        return 0, sequence.request.priority

    def make_queue(self) -> TenantQueues:
        return TenantQueues(self.tenant, self.served)

    def standing(self, sequence: Sequence) -> Any:
        return self.served.get(self.tenant(sequence), 0.0), sequence.precedence

    def last(self, running: list[Sequence]) -> Sequence:
        return max(running, key=self.standing)

    def on_admitted(self, sequence: Sequence) -> None:
        self._charge(sequence, self.prompt_cost * (len(sequence.prompt) - sequence.num_computed_tokens))

    def on_sampled(self, sequences: Iterable[Sequence]) -> None:
        for sequence in sequences:
            self._charge(sequence, self.output_cost)

    def _charge(self, sequence: Sequence, cost: float) -> None:
        tenant = self.tenant(sequence)
        self.served[tenant] = self.served.get(tenant, 0.0) + cost / self.weight(tenant)


POLICIES: dict[str, type[Policy]] = {"fcfs": Policy, "priority": ByPriority, "fair": Fair}


def key_of(policy: Policy, sequence: Sequence) -> tuple[int, float]:
    """A sequence's level and rank.

    Raises:
        InternalError: the policy cannot order it, or gives what is no order.
    """
    name = f"the scheduler's policy {type(policy).__name__}"
    try:
        key: Any = policy.key(sequence)
        tenant: Any = policy.tenant(sequence) if isinstance(policy, Fair) else ""
    except Exception as error:  # a class of the user's own may raise anything
        raise InternalError(f"{name} cannot order this request: {describe(error)}") from error
    is_pair = isinstance(key, tuple | list) and len(key) == 2
    if not is_pair or not all(isinstance(part, Real) and part == part for part in key):  # NaN has no order
        raise InternalError(f"{name} has a wrong key: {shorten(key)}; it must be (level, rank), two numbers")
    if not isinstance(tenant, str):
        raise InternalError(f"{name} has a wrong tenant: {shorten(tenant)}; it must be a str")
    return key[0], key[1]


def make_policy(scheduler: str) -> Policy:
    """The policy of a name, or of the class at ``module:Class``.

    Raises:
        ConfigError: there is none, or it cannot be made.
    """
    kind = POLICIES.get(scheduler) or load(scheduler, "scheduler")
    if not (isinstance(kind, type) and issubclass(kind, Policy)):
        raise ConfigError(f"scheduler={scheduler!r}: a subclass of aioengine.scheduler.policy.Policy is needed")
    try:
        return kind()
    except Exception as error:  # a class of the user's own may raise anything
        raise ConfigError(f"scheduler={scheduler!r} cannot be made: {type(error).__name__}: {error}") from error
