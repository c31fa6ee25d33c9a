"""Which sequences are isolated and fail after deaths: any order of deaths and progress, over a model of a cluster."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aioengine.cluster.recovery import Recovery
from aioengine.core.listener import UNLIMITED
from aioengine.core.protocol import InFlightSequence
from aioengine.errors import AioEngineError
from aioengine.scheduler.sequence import Sequence

REASON = "replica 0 was killed"
NUM_TOKENS = 6
"""Tokens of each sequence that kills nothing."""


@dataclass(eq=False)
class Modelled:
    """What `Recovery` looks at of a sequence, and what it does in this model.

    ``kills_at``: a poison kills when it has so many tokens; None: it kills nothing.
    ``is_sudden``: it kills before the cluster hears that it runs.
    """

    kills_at: int | None = None
    is_sudden: bool = False
    is_running: bool = False
    output_ids: list[int] = field(default_factory=list)
    has_ended: bool = False
    error: AioEngineError | None = None
    num_deaths: int = 0
    listener: object = field(default_factory=lambda: SimpleNamespace(num_allowed=UNLIMITED))


class ModelledCluster:
    """Replicas that compute what they hold in an order that is drawn; one that died is back at once."""

    def __init__(self, num_replicas: int, draw: Any, max_attempts: int) -> None:
        self.draw = draw
        self.recovery = Recovery(max_attempts)
        self.replicas: list[list[Modelled]] = [[] for _ in range(num_replicas)]
        self.pending: list[Modelled] = []
        self.num_deaths = 0

    def is_isolated(self, sequence: Modelled) -> bool:
        return self.recovery.must_be_isolated(_of(sequence))

    def place_all(self) -> None:
        """As `Placing`: an isolated sequence is alone where it is, and nothing joins it."""
        pending, self.pending = self.pending, []
        for sequence in pending:
            free = [held for held in self.replicas if not any(map(self.is_isolated, held))]
            if not free:
                self.pending.append(sequence)
                continue
            held = free[self.draw(st.integers(0, len(free) - 1))]
            if self.is_isolated(sequence):
                for other in held:
                    other.is_running = False
                self.pending += held
                held.clear()
            held.append(sequence)

    def step(self, number: int) -> None:
        """Some of what a replica holds gets a row; all that has one gets a token, or the replica dies."""
        held = self.replicas[number]
        waiting = [each for each in held if not each.is_running]
        num_admitted = self.draw(st.integers(0 if len(waiting) < len(held) else min(1, len(held)), len(waiting)))
        admitted = waiting[:num_admitted]
        running = [each for each in held if each.is_running or each in admitted]
        killers = [each for each in running if each.kills_at is not None and len(each.output_ids) >= each.kills_at]
        is_known = not any(each.is_sudden for each in killers if each in admitted)
        for each in admitted:
            each.is_running = is_known
        if killers:
            self.die(number)
            return
        for each in running:
            each.is_running = True
            each.output_ids.append(7)
            each.has_ended = len(each.output_ids) >= NUM_TOKENS
        held[:] = [each for each in held if not each.has_ended]

    def die(self, number: int) -> None:
        held, self.replicas[number] = self.replicas[number], []
        self.num_deaths += 1
        verdicts = self.recovery.on_death([InFlightSequence(_of(each), each.is_running) for each in held], REASON)
        assert [sequence for sequence, _ in verdicts] == held
        for each, (_, error) in zip(held, verdicts, strict=True):
            each.num_deaths += 1
            each.is_running = False
            each.error = error
            each.has_ended = error is not None
            if error is None:
                self.pending.append(each)

    def run(self, sequences: list[Modelled]) -> None:
        self.pending += sequences
        for _ in range(1000):
            self.place_all()
            if not (self.pending or any(self.replicas)):
                return
            busy = [number for number, held in enumerate(self.replicas) if held]
            self.step(busy[self.draw(st.integers(0, len(busy) - 1))])
        raise AssertionError("it does not end")


def _of(modelled: Modelled) -> Sequence:
    return cast(Sequence, modelled)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_poisons_fail_and_no_other_sequence_does(data: st.DataObject) -> None:
    poisons = [
        Modelled(kills_at=data.draw(st.integers(0, NUM_TOKENS - 1)), is_sudden=data.draw(st.booleans()))
        for _ in range(data.draw(st.integers(0, 4), "poisons"))
    ]
    others = [Modelled() for _ in range(data.draw(st.integers(0, 12), "others"))]
    everything = data.draw(st.permutations([*poisons, *others]))
    cluster = ModelledCluster(data.draw(st.integers(1, 4), "replicas"), data.draw, max_attempts=10**6)
    cluster.run(everything)
    assert [each.error for each in others] == [None] * len(others)
    assert all(len(each.output_ids) == NUM_TOKENS for each in others)
    for each in poisons:
        assert each.error is not None
        assert str(each.error).count(REASON) == 3
    # Each death is some poison's: four in company where it is not known to run, and two isolated; or two, and one.
    assert cluster.num_deaths <= 6 * len(poisons)


@pytest.mark.parametrize("is_sudden", [False, True])
@pytest.mark.parametrize("kills_at", [0, 3])
def test_a_poison_that_is_alone_fails_with_its_third_death(kills_at: int, is_sudden: bool) -> None:
    poison = Modelled(kills_at=kills_at, is_sudden=is_sudden)
    cluster = ModelledCluster(2, lambda strategy: 1, max_attempts=8)
    cluster.pending.append(poison)
    while poison.error is None:
        cluster.place_all()
        cluster.step(1)
    assert cluster.num_deaths == 3


def test_sequences_that_ran_at_two_deaths_are_isolated_until_their_next_token() -> None:
    """A third death beside others, as where its reader was behind, fails none; one in isolation does."""
    crowd, recovery = [Modelled() for _ in range(3)], Recovery(8)
    for is_isolated in (False, True, True):
        verdicts = recovery.on_death([InFlightSequence(_of(each), True) for each in crowd], REASON)
        assert [error for _, error in verdicts] == [None] * 3
        assert [recovery.must_be_isolated(_of(each)) for each in crowd] == [is_isolated] * 3
    crowd[0].output_ids.append(7)
    assert not recovery.must_be_isolated(_of(crowd[0]))
    assert recovery.on_death([InFlightSequence(_of(crowd[0]), True)], REASON) == [(crowd[0], None)]
    ((_, error),) = recovery.on_death([InFlightSequence(_of(crowd[1]), True)], REASON)
    assert "brings down what computes it" in str(error)


def test_a_sequence_that_only_waited_survives_a_death_in_isolation() -> None:
    runner, waiter, recovery = Modelled(), Modelled(), Recovery(8)
    for _ in range(4):
        recovery.on_death([InFlightSequence(_of(runner), True), InFlightSequence(_of(waiter), False)], REASON)
    assert recovery.must_be_isolated(_of(waiter))
    errors = [recovery.on_death([InFlightSequence(_of(waiter), False)], REASON)[0][1] for _ in range(2)]
    assert errors[0] is None
    assert "brings down what computes it" in str(errors[1])


@pytest.mark.parametrize("why", ["it ran in a sibling of the one at fault", "its reader is behind"])
def test_a_sequence_that_is_not_at_fault_is_not_isolated(why: str) -> None:
    recovery, is_sibling = Recovery(5), "sibling" in why
    num_allowed = UNLIMITED if is_sibling else 2
    sequence = Modelled(output_ids=[7, 7], listener=SimpleNamespace(num_allowed=num_allowed))
    entry = InFlightSequence(_of(sequence), was_running=is_sibling, is_unaffected=is_sibling)
    for _ in range(5):
        assert recovery.on_death([entry], REASON) == [(sequence, None)]
        assert not recovery.must_be_isolated(_of(sequence))
    if is_sibling:
        ((_, error),) = recovery.on_death([entry], REASON)
        assert "max_attempts" in str(error)


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_attempts_are_bounded_whatever_kills(data: st.DataObject) -> None:
    """Replicas that die by themselves, with progress between or without."""
    max_attempts = data.draw(st.integers(1, 5))
    sequences = [Modelled() for _ in range(data.draw(st.integers(1, 5)))]
    cluster = ModelledCluster(2, data.draw, max_attempts)
    cluster.pending += sequences
    for _ in range(60):
        cluster.place_all()
        number = data.draw(st.integers(0, 1))
        if data.draw(st.booleans()):
            for each in cluster.replicas[number]:
                each.is_running = True
            cluster.die(number)
        elif cluster.replicas[number]:
            cluster.step(number)
    assert all(each.num_deaths <= max_attempts + 1 for each in sequences)
    assert all(each.num_deaths >= 2 for each in sequences if each.error is not None and max_attempts > 1)
