"""A group in lockstep on paper: ranks with their loops and devices, a coordinator, and lossy links."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import TypeVar

from aioengine.cluster.lockstep import RankWaves, WaveCoordinator, WaveDuty, WavePhase, WaveReport

T = TypeVar("T")

ROUNDS = 2000
"""Events a rank in which a group that loses nothing must come to rest, or it never would."""


@dataclass
class Work:
    """A request: so many tokens, one a step, with those scheduled and computed so far."""

    num_tokens: int
    scheduled: int = 0
    computed: int = 0
    is_blocked: bool = False
    """By its reader, or a pause."""

    @property
    def is_done(self) -> bool:
        return self.computed >= self.num_tokens


@dataclass
class SimulatedRank:
    """The loop of `EngineCore` and its device, by hand: at most ``depth`` launched steps are not taken in."""

    waves: RankWaves
    depth: int
    works: list[Work] = field(default_factory=list)
    in_flight: deque[list[Work]] = field(default_factory=deque)
    """What each launched step computes; a dummy: nothing."""
    had_work: bool = False
    """When it launched its last step."""
    num_launched: int = 0
    num_reductions: int = 0
    num_results: int = 0
    is_dead: bool = False

    @property
    def has_work(self) -> bool:
        return any(not (work.is_done or work.is_blocked) for work in self.works)

    def next_step(self) -> list[Work] | None:
        """What the next step would be of; None where none is to be launched."""
        if self.is_dead or not self.waves.may_launch or len(self.in_flight) == self.depth:
            return None
        ready = [work for work in self.works if not work.is_blocked and work.scheduled < work.num_tokens]
        return ready if ready or self.waves.is_running else None


class SimulatedGroup:
    """Everything that can happen in a group, one event at a time.

    Attributes:
        steps: (wave, step) of each collective of the devices, in order: the first rank to launch it says what it is.
        reductions: of each all-reduce, where it was begun, with what by each rank, and which ranks had work then.
        num_ends: steps that each ended wave had.
        is_lossy: whether something was lost, so that it is heartbeats which tell it.
    """

    def __init__(self, num_ranks: int, depth: int, every: int) -> None:
        self.every = every
        self.ranks = [SimulatedRank(RankWaves(rank, every), depth) for rank in range(num_ranks)]
        self.coordinator = WaveCoordinator(num_ranks)
        self.steps: list[tuple[int, int]] = []
        self.reductions: list[tuple[tuple[int, int], dict[int, bool], dict[int, bool]]] = []
        self.num_ends: dict[int, int] = {}
        self.reports: list[tuple[int, WaveReport]] = []
        self.starts: list[tuple[int, int]] = []
        self.is_lossy = False
        self.chance = random.Random(0)
        self.trouble = 0.0

    # The loop and the device of a rank

    def launch(self, rank: int) -> None:
        """One turn of a rank's loop: as many steps as it takes."""
        one = self.ranks[rank]
        while (works := one.next_step()) is not None:
            for work in works:
                work.scheduled += 1
            one.in_flight.append(works)
            before = one.waves.wave
            self._note(self.steps, one.num_launched, (before, one.waves.step + 1))
            one.num_launched += 1
            last = one.waves.step + 1
            one.had_work = one.has_work
            duty = one.waves.on_launch(one.has_work)
            self._act(rank, duty, before, last)

    def can_land(self, rank: int) -> bool:
        """A step ends when it runs at all ranks."""
        one = self.ranks[rank]
        oldest = one.num_launched - len(one.in_flight)
        return not one.is_dead and bool(one.in_flight) and all(oldest < each.num_launched for each in self.ranks)

    def land(self, rank: int) -> None:
        for work in self.ranks[rank].in_flight.popleft():
            work.computed += 1

    def can_reduce(self, rank: int) -> bool:
        """A reduction ends when all ranks have begun it; that is heard at each rank by itself."""
        one = self.ranks[rank]
        return not one.is_dead and one.num_results < min(each.num_reductions for each in self.ranks)

    def reduce(self, rank: int) -> None:
        one = self.ranks[rank]
        result = any(self.reductions[one.num_results][1].values())
        one.num_results += 1
        before, last = one.waves.wave, one.waves.step
        self._act(rank, one.waves.on_result(result), before, last)

    def _act(self, rank: int, duty: WaveDuty, wave: int, step: int) -> None:
        one = self.ranks[rank]
        if one.waves.wave != wave:
            assert self.num_ends.setdefault(wave, step) == step, "ranks end a wave after the same step"
        if duty is WaveDuty.REPORT:
            self.send(self.reports, (rank, one.waves.report))
        elif duty is WaveDuty.REDUCE:
            where = (one.waves.wave, one.waves.step)
            if one.num_reductions == len(self.reductions):
                self.reductions.append((where, {}, {}))
            assert self.reductions[one.num_reductions][0] == where, "ranks reduce at the same step"
            self.reductions[one.num_reductions][1][rank] = one.waves.has_work
            self.reductions[one.num_reductions][2][rank] = one.had_work
            one.num_reductions += 1

    def _note(self, log: list[tuple[int, int]], index: int, entry: tuple[int, int]) -> None:
        if index == len(log):
            log.append(entry)
        assert log[index] == entry, f"a rank runs step {entry} as its {index}-th, others run {log[index]}"

    # Links

    def heartbeat(self, rank: int) -> None:
        if not self.ranks[rank].is_dead:
            self.send(self.reports, (rank, self.ranks[rank].waves.report))

    def deliver_report(self, index: int) -> None:
        rank, report = self.reports.pop(index)
        for other in self.coordinator.on_report(rank, report):
            self.send(self.starts, (other, self.coordinator.known.wave))

    def deliver_start(self, index: int) -> None:
        rank, wave = self.starts.pop(index)
        waves = self.ranks[rank].waves
        before = (waves.report, waves.step, waves.phase)
        waves.on_start(wave)
        if wave < before[0].wave:
            assert (waves.report, waves.step, waves.phase) == before, "a stale START_WAVE changes nothing"

    def send(self, link: list[T], message: T) -> None:
        """It is lost, comes twice, or comes."""
        fate = self.chance.random()
        if fate < self.trouble / 2:
            self.is_lossy = True
        else:
            link += [message] * (2 if fate < self.trouble else 1)

    # From outside

    def add(self, rank: int, num_tokens: int) -> None:
        """A request reaches a rank."""
        self.ranks[rank].works.append(Work(num_tokens))

    def kill(self, rank: int, chance: random.Random) -> SimulatedGroup:
        """A rank dies; the others hear of it one by one. Returns the group that goes on with what they had."""
        self.ranks[rank].is_dead = True
        for other in chance.sample(self.ranks, len(self.ranks)):
            self.run(chance, 10, trouble=0.1)
            other.waves.on_death()
        assert all(one.next_step() is None for one in self.ranks), "a rank goes on alone"
        after = SimulatedGroup(len(self.ranks), self.ranks[0].depth, self.every)
        for one in self.ranks:
            for work in one.works:
                work.scheduled = work.computed
                chance.choice(after.ranks).works.append(work)
        return after

    # Time

    def events(self, *, has_messages: bool = True, but: int = -1) -> list[Callable[[], None]]:
        """What can happen now by itself and is never lost, ``but`` at one rank."""
        ranks = [rank for rank in range(len(self.ranks)) if rank != but]
        events: list[Callable[[], None]] = [
            *(partial(self.launch, rank) for rank in ranks if self.ranks[rank].next_step() is not None),
            *(partial(self.land, rank) for rank in ranks if self.can_land(rank)),
            *(partial(self.reduce, rank) for rank in ranks if self.can_reduce(rank)),
        ]
        if has_messages:
            events += (partial(self.deliver_report, i) for i in range(len(self.reports)))
            events += (partial(self.deliver_start, i) for i in range(len(self.starts)))
        return events

    def run(self, chance: random.Random, num_events: int, *, trouble: float, load: float = 0.0) -> None:
        """Let so many things happen, in an order of chance.

        Args:
            trouble: how often a message is late, is lost or comes twice.
            load: how often a request comes.
        """
        self.chance, self.trouble = chance, trouble
        slow = chance.randrange(len(self.ranks))
        for _ in range(num_events):
            if chance.random() < load:
                self.add(chance.randrange(len(self.ranks)), chance.randint(1, 9))
            if chance.random() < trouble / 4:
                self.heartbeat(chance.randrange(len(self.ranks)))
            but = slow if chance.random() < 0.9 else -1
            if events := self.events(has_messages=chance.random() > 2 * trouble, but=but):
                chance.choice(events)()
        self.check()

    def come_to_rest(self, chance: random.Random) -> None:
        """Lose nothing any more: all that can be computed is, and all ranks pause. Heartbeats tell what was lost."""
        self.trouble = 0.0
        for _ in range(ROUNDS * len(self.ranks)):
            if not self.events() and self.is_lossy:
                for rank in range(len(self.ranks)):
                    self.heartbeat(rank)
                while self.reports or self.starts:
                    self.deliver_report(0) if self.reports else self.deliver_start(0)
            if not (events := self.events()):
                break
            chance.choice(events)()
        self.check()
        assert not self.events(), "the group never comes to rest"
        for one in self.ranks:
            assert not one.has_work, "a request is never computed"
            assert not one.in_flight, "a step never ends: it runs at some ranks alone"
            assert one.waves.phase is WavePhase.PAUSED, f"a rank stays {one.waves.phase.value}"
            assert one.num_launched == len(self.steps)
            assert one.num_results == one.num_reductions == len(self.reductions)
        assert {one.waves.wave for one in self.ranks} == {self.coordinator.known.wave}

    def check(self) -> None:
        """Between any two events."""
        waves = [one.waves.wave for one in self.ranks]
        assert max(waves) - min(waves) <= 1, "a wave ends with all ranks in it"
        assert self.coordinator.known.wave <= max(waves), "no wave is known before it is"
        for (wave, step), _, had_work in self.reductions:
            if wave in self.num_ends and len(had_work) == len(self.ranks):
                is_last = not any(had_work.values())
                assert is_last == (self.num_ends[wave] == step + self.every), "a wave ends by its reduction's result"
