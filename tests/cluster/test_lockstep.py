"""Waves under all that links may do to what is said of them, checked after each event (the harness has the checks)."""

from __future__ import annotations

import random

import pytest
from cluster.lockstep_harness import SimulatedGroup
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule
from nightly import nightly

from aioengine.cluster.lockstep import (
    REDUCE_EVERY,
    TRANSITIONS,
    RankWaves,
    WaveCoordinator,
    WaveDuty,
    WaveEvent,
    WavePhase,
    WaveReport,
)

seeds = st.integers(0, 2**32 - 1)


class GroupMachine(RuleBasedStateMachine):
    """Requests come, are read or not, and leave at any rank; messages are late, lost, doubled and reordered."""

    group: SimulatedGroup

    @initialize(num_ranks=st.integers(2, 5), depth=st.integers(1, 3), every=st.integers(2, 5))
    def start(self, num_ranks: int, depth: int, every: int) -> None:
        self.group = SimulatedGroup(num_ranks, depth, every)

    @rule(rank=st.integers(0, 4), num_tokens=st.integers(1, 12))
    def add(self, rank: int, num_tokens: int) -> None:
        self.group.add(rank % len(self.group.ranks), num_tokens)

    @rule(seed=seeds)
    def block_or_unblock(self, seed: int) -> None:
        works = [work for one in self.group.ranks for work in one.works if not work.is_done]
        if works:
            work = random.Random(seed).choice(works)
            work.is_blocked = not work.is_blocked

    @rule(seed=seeds)
    def abort(self, seed: int) -> None:
        chance = random.Random(seed)
        one = chance.choice(self.group.ranks)
        if one.works:
            work = chance.choice(one.works)
            work.num_tokens = work.scheduled  # what is launched of it still runs

    @rule(rank=st.integers(0, 4))
    def pause_a_rank(self, rank: int) -> None:
        for work in self.group.ranks[rank % len(self.group.ranks)].works:
            work.is_blocked = True

    @rule()
    def forget_at_the_coordinator(self) -> None:
        self.group.coordinator = WaveCoordinator(len(self.group.ranks))
        self.group.is_lossy = True

    @rule(seed=seeds, rank=st.integers(0, 4), is_unlucky=st.sampled_from([False] * 9 + [True]))
    def kill(self, seed: int, rank: int, is_unlucky: bool) -> None:
        if is_unlucky:
            self.group = self.group.kill(rank % len(self.group.ranks), random.Random(seed))

    @rule(
        seed=seeds,
        num_events=st.integers(20, 2000),
        trouble=st.sampled_from([0.0, 0.1, 0.4]),
        load=st.sampled_from([0.005, 0.02, 0.1]),
    )
    def run_on(self, seed: int, num_events: int, trouble: float, load: float) -> None:
        self.group.run(random.Random(seed), num_events, trouble=trouble, load=load)

    @rule(seed=seeds)
    def come_to_rest(self, seed: int) -> None:
        self.group.come_to_rest(random.Random(seed))

    def teardown(self) -> None:
        if not hasattr(self, "group"):
            return
        self.group.come_to_rest(random.Random(0))  # what is blocked holds no wave up
        for one in self.group.ranks:
            for work in one.works:
                work.is_blocked = False
        self.group.come_to_rest(random.Random(1))
        assert all(work.is_done for one in self.group.ranks for work in one.works)


DETERMINISTIC = settings(
    derandomize=True,
    deadline=None,
    stateful_step_count=30,
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much, HealthCheck.data_too_large],
)


class TestGroup(GroupMachine.TestCase):
    settings = settings(DETERMINISTIC, max_examples=10)


@pytest.mark.nightly
class TestGroupAtNight(GroupMachine.TestCase):
    settings = settings(DETERMINISTIC, max_examples=1500)


@pytest.mark.nightly
@pytest.mark.parametrize("seed", [0, *nightly(*range(1, 50))])
def test_long_lives_in_trouble(seed: int) -> None:
    """What the machine above comes to by chance alone: many waves, and most of what can befall their messages."""
    for number in range(40):
        chance = random.Random(f"{seed}-{number}")
        group = SimulatedGroup(chance.randint(2, 5), chance.randint(1, 3), chance.randint(2, 5))
        for _ in range(3):
            trouble, load = chance.choice([0.0, 0.1, 0.4]), chance.choice([0.005, 0.02, 0.05])
            group.run(chance, 800, trouble=trouble, load=load)
            group.come_to_rest(chance)


# One by one


def test_every_phase_knows_what_a_death_does() -> None:
    assert TRANSITIONS.keys() == set(WavePhase)
    assert all(events[WaveEvent.DEATH] is WavePhase.OVER for events in TRANSITIONS.values())


def test_a_wave_of_one_request_has_the_steps_up_to_two_reductions() -> None:
    group = SimulatedGroup(num_ranks=3, depth=2, every=REDUCE_EVERY)
    group.add(1, 5)
    group.come_to_rest(random.Random(0))
    assert group.num_ends == {0: 2 * REDUCE_EVERY}
    assert [one.num_launched for one in group.ranks] == [64] * 3


def test_a_request_that_comes_between_a_reduction_and_its_result_begins_the_next_wave() -> None:
    group = SimulatedGroup(num_ranks=2, depth=1, every=4)
    group.add(0, 1)
    chance = random.Random(0)
    while len(group.steps) < 5:
        chance.choice(group.events())()
    group.add(1, 20)
    group.come_to_rest(chance)
    assert group.num_ends == {0: 8, 1: 24}


def test_a_rank_that_must_not_launch_goes_on_when_the_late_result_comes() -> None:
    rank = RankWaves(1, every=2)
    assert rank.on_launch(True) is WaveDuty.REPORT
    assert rank.on_launch(True) is WaveDuty.REDUCE
    assert [rank.on_launch(True) for _ in range(2)] == [WaveDuty.NOTHING] * 2
    assert (rank.phase, rank.may_launch, rank.is_running) == (WavePhase.HELD, False, True)
    assert rank.on_result(True) is WaveDuty.REDUCE
    assert rank.may_launch


def test_a_wave_that_others_have_begun_follows_at_once() -> None:
    rank = RankWaves(0, every=2)
    rank.on_start(0)
    for _ in range(2):
        rank.on_launch(False)
    rank.on_start(1)
    rank.on_result(False)
    rank.on_launch(False)
    assert rank.on_launch(False) is WaveDuty.REPORT
    assert rank.report == (1, True)
    with pytest.raises(ValueError, match="wave 3 cannot have begun"):
        rank.on_start(3)


def test_a_dead_rank_ends_its_group() -> None:
    ranks = [RankWaves(number, every=2) for number in range(2)]
    ranks[0].on_launch(True)
    for rank in ranks:
        rank.on_death()
        assert not rank.may_launch
        assert not rank.is_running


def test_all_but_the_rank_that_has_begun_a_wave_hear_of_it() -> None:
    coordinator = WaveCoordinator(3)
    assert coordinator.on_report(1, WaveReport(0, True)) == [0, 2]
    assert coordinator.on_report(0, WaveReport(0, True)) == []
    assert coordinator.on_report(2, WaveReport(0, False)) == [2]  # it has missed the START_WAVE
    assert coordinator.on_report(0, WaveReport(1, False)) == []
    assert coordinator.on_report(2, WaveReport(1, True)) == [0, 1]
    assert coordinator.on_report(2, WaveReport(0, True)) == []  # stale
