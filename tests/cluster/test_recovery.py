"""Who is to blame for deaths: any order of deaths and progress, by Hypothesis over a model of a cluster."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aioengine.cluster import recovery
from aioengine.core.listener import UNLIMITED
from aioengine.core.protocol import Orphan
from aioengine.errors import AioEngineError
from aioengine.scheduler.sequence import Sequence

REASON = "replica 0 was killed"
NUM_TOKENS = 6
"""That each innocent is to bring."""


@dataclass(eq=False)
class Modelled:
    """What `recovery` looks at of a sequence, and what it does in this model.

    ``lives``: a poison kills when it has brought so many tokens in one replica; None: an innocent.
    ``is_sudden``: it kills before the cluster hears that it has a row.
    """

    kills_at: int | None = None
    is_sudden: bool = False
    has_started: bool = False
    output_ids: list[int] = field(default_factory=list)
    breaks: Any = None
    has_ended: bool = False
    error: AioEngineError | None = None
    num_deaths: int = 0
    listener: object = field(default_factory=lambda: SimpleNamespace(num_allowed=UNLIMITED))
    request: object = field(default_factory=object)


class ModelledCluster:
    """Replicas that compute what they hold in an order that is drawn; one that died is back at once."""

    def __init__(self, num_replicas: int, draw: Any, max_attempts: int) -> None:
        self.draw = draw
        self.max_attempts = max_attempts
        self.replicas: list[list[Modelled]] = [[] for _ in range(num_replicas)]
        self.limbo: list[Modelled] = []
        self.num_deaths = 0

    def place_all(self) -> None:
        """As `ClusterCore` places: a sequence that needs solitude goes alone, and nothing joins it."""
        limbo, self.limbo = self.limbo, []
        for sequence in limbo:
            free = [held for held in self.replicas if not any(recovery.needs_solitude(_of(each)) for each in held)]
            if not free:
                self.limbo.append(sequence)
                continue
            held = free[self.draw(st.integers(0, len(free) - 1))]
            if recovery.needs_solitude(_of(sequence)):
                for other in held:
                    other.has_started = False
                self.limbo += held
                held.clear()
            held.append(sequence)

    def step(self, number: int) -> None:
        """Some of what a replica holds gets a row; all that has one gets a token, or the replica dies."""
        held = self.replicas[number]
        waiting = [each for each in held if not each.has_started]
        num_admitted = self.draw(st.integers(0 if len(waiting) < len(held) else min(1, len(held)), len(waiting)))
        admitted = waiting[:num_admitted]
        running = [each for each in held if each.has_started or each in admitted]
        killers = [each for each in running if each.kills_at is not None and len(each.output_ids) >= each.kills_at]
        is_told = not any(each.is_sudden for each in killers if each in admitted)
        for each in admitted:
            each.has_started = is_told
        if killers:
            self.die(number)
            return
        for each in running:
            each.has_started = True
            each.output_ids.append(7)
            each.has_ended = len(each.output_ids) >= NUM_TOKENS
        held[:] = [each for each in held if not each.has_ended]

    def die(self, number: int) -> None:
        held, self.replicas[number] = self.replicas[number], []
        self.num_deaths += 1
        orphans = [Orphan(_of(each), each.has_started) for each in held]
        death = recovery.Death(REASON, self.num_deaths)
        verdicts = recovery.on_death(orphans, death, max_attempts=self.max_attempts)
        assert [sequence for sequence, _ in verdicts] == held
        for each, (_, error) in zip(held, verdicts, strict=True):
            each.num_deaths += 1
            each.has_started = False
            each.error = error
            each.has_ended = error is not None
            if error is None:
                self.limbo.append(each)

    @property
    def is_over(self) -> bool:
        return not (self.limbo or any(self.replicas))

    def run(self, sequences: list[Modelled]) -> None:
        self.limbo += sequences
        for _ in range(1000):
            self.place_all()
            if self.is_over:
                return
            busy = [number for number, held in enumerate(self.replicas) if held]
            self.step(busy[self.draw(st.integers(0, len(busy) - 1))])
        raise AssertionError("it does not end")


def _of(modelled: Modelled) -> Sequence:
    return cast(Sequence, modelled)


def test_what_ran_in_another_process_than_the_one_that_died_first_is_not_struck() -> None:
    sequence = Modelled(has_started=True)
    for number in range(5):
        orphan = Orphan(_of(sequence), has_started=True, is_innocent=True)
        assert recovery.on_death([orphan], recovery.Death(REASON, number), max_attempts=5) == [(sequence, None)]
        assert not recovery.needs_solitude(_of(sequence))
    [(_, error)] = recovery.on_death([orphan], recovery.Death(REASON, 5), max_attempts=5)
    assert "max_attempts" in str(error)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_innocents_never_fail_and_poisons_always_do(data: st.DataObject) -> None:
    poisons = [
        Modelled(kills_at=data.draw(st.integers(0, NUM_TOKENS - 1)), is_sudden=data.draw(st.booleans()))
        for _ in range(data.draw(st.integers(0, 4), "poisons"))
    ]
    innocents = [Modelled() for _ in range(data.draw(st.integers(0, 12), "innocents"))]
    everything = data.draw(st.permutations([*poisons, *innocents]))
    cluster = ModelledCluster(data.draw(st.integers(1, 4), "replicas"), data.draw, max_attempts=10**6)
    cluster.run(everything)
    assert [each.error for each in innocents] == [None] * len(innocents)
    assert all(len(each.output_ids) == NUM_TOKENS for each in innocents)
    for each in poisons:
        assert each.error is not None
        assert str(each.error).count(REASON) >= 2
    # Each death is some poison's: before it has a row for the cluster, in company, and two or three times alone.
    assert cluster.num_deaths <= 9 * len(poisons)


@pytest.mark.parametrize("is_sudden", [False, True])
@pytest.mark.parametrize("kills_at", [0, 3])
def test_a_poison_alone_fails_with_its_second_death(kills_at: int, is_sudden: bool) -> None:
    poison = Modelled(kills_at=kills_at, is_sudden=is_sudden)
    cluster = ModelledCluster(2, lambda strategy: 1, max_attempts=8)
    cluster.limbo.append(poison)
    while poison.error is None:
        cluster.place_all()
        cluster.step(1)
    assert cluster.num_deaths == 2
    assert str(poison.error).count(REASON) == 2


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_attempts_are_bounded_whatever_kills(data: st.DataObject) -> None:
    """Replicas that die by themselves, with progress between or without."""
    max_attempts = data.draw(st.integers(1, 5))
    sequences = [Modelled() for _ in range(data.draw(st.integers(1, 5)))]
    cluster = ModelledCluster(2, data.draw, max_attempts)
    cluster.limbo += sequences
    for _ in range(60):
        cluster.place_all()
        number = data.draw(st.integers(0, 1))
        if data.draw(st.booleans()):
            for each in cluster.replicas[number]:
                each.has_started = True
            cluster.die(number)
        elif cluster.replicas[number]:
            cluster.step(number)
    assert all(each.num_deaths <= max_attempts + 1 for each in sequences)
    assert all(each.num_deaths >= 2 for each in sequences if each.error is not None and max_attempts > 1)


def test_what_is_not_computed_since_its_reader_is_behind_is_not_to_blame() -> None:
    unread = Modelled(output_ids=[7, 7], listener=SimpleNamespace(num_allowed=2))
    verdicts = [
        recovery.on_death(
            [Orphan(_of(unread), has_started=number == 0)], recovery.Death(REASON, number), max_attempts=8
        )
        for number in range(5)
    ]
    assert verdicts == [[(unread, None)]] * 5
    assert not recovery.needs_solitude(_of(unread))


def test_what_came_when_the_replica_was_silent_is_not_to_blame() -> None:
    late = Modelled()
    for number in range(5):
        verdicts = recovery.on_death(
            [Orphan(_of(late), has_started=False)], recovery.Death(REASON, number, silent_since=10.0), max_attempts=8
        )
        assert verdicts == [(late, None)]
        recovery.note_sent(_of(late), 11.0)
    assert not recovery.needs_solitude(_of(late))


def test_one_in_a_crowd_goes_on_alone_after_two_deaths_on_a_row() -> None:
    """Seen by all the deaths that there were; where replicas die without it, too, after four."""
    for numbers, expected in (([0, 1], 2), ([0, 2, 4, 6], 4)):
        crowd = [Modelled() for _ in range(3)]
        for number in numbers:
            assert not any(recovery.needs_solitude(_of(each)) for each in crowd)
            orphans = [Orphan(_of(each), has_started=True) for each in crowd]
            verdicts = recovery.on_death(orphans, recovery.Death(REASON, number), max_attempts=8)
            assert [error for _, error in verdicts] == [None] * 3
        assert all(recovery.needs_solitude(_of(each)) for each in crowd)
        assert all(each.breaks.strikes == expected for each in crowd)


def test_none_is_blamed_where_others_had_requests_too() -> None:
    one = Modelled()
    for number in range(5):
        death = recovery.Death(REASON, number, is_shared=True)
        assert recovery.on_death([Orphan(_of(one), has_started=True)], death, max_attempts=8) == [(one, None)]
    assert recovery.needs_solitude(_of(one))
