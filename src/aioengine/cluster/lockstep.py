"""Lockstep: engines whose n-th steps are one collective operation, as with experts spread over them. Pure.

The ranks of a group compute in *waves*. In a wave every rank launches the same steps, numbered from 1; one that has no
work launches dummies. A wave begins at the rank that first has work, and ends after a step that all ranks know: every
`REDUCE_EVERY` steps they begin an all-reduce of "is anything unfinished here?", and act upon its result that many steps
later, so that none waits for it. Between waves all are idle.

Messages about waves may be lost, come late, twice or in any order, since both sides keep the greatest report and send
it again. A rank sends its `RankWaves.report` when it starts a wave by itself, when it is rank 0 and ends one, and with
each heartbeat; the coordinator answers each report of a rank that has missed a START_WAVE. A step or reduction that
fails ends the group.

After vLLM's DPEngineCoreProc and DPCoordinator (vllm/v1/engine), which reduce on the loop and send each wave's start
once.
"""

from __future__ import annotations

import enum
from typing import NamedTuple

REDUCE_EVERY = 32
"""Steps from one reduction to the next, and from one's begin to when its result is acted upon."""


class WaveReport(NamedTuple):
    """How far a rank, or all that is known of a group, has come; the later of two is the greater."""

    wave: int
    """The one that runs, or that would be the next."""
    is_running: bool


class WavePhase(enum.Enum):
    PAUSED = "paused"
    """No wave runs here."""
    RUNNING = "running"
    """Each launch is a step of the wave: of what there is to compute, or a dummy."""
    HELD = "held"
    """All steps were launched up to one that may be the wave's last: it is not known yet whether it is."""
    OVER = "over"
    """The group has ended."""


class WaveEvent(enum.Enum):
    WORK = "work"
    """A step was launched here, the wave's first one."""
    START = "start"
    """The wave has begun, at another rank."""
    NO_RESULT = "no result"
    """A reduction's result is to be acted upon, and is not there."""
    UNFINISHED = "unfinished"
    """It is there: the wave goes on."""
    FINISHED = "finished"
    """It is there: the wave has ended."""
    DEATH = "death"
    """A rank of the group, which may be this one, computes no more."""


TRANSITIONS: dict[WavePhase, dict[WaveEvent, WavePhase]] = {
    WavePhase.PAUSED: {
        WaveEvent.WORK: WavePhase.RUNNING,
        WaveEvent.START: WavePhase.RUNNING,
        WaveEvent.DEATH: WavePhase.OVER,
    },
    WavePhase.RUNNING: {
        WaveEvent.NO_RESULT: WavePhase.HELD,
        WaveEvent.UNFINISHED: WavePhase.RUNNING,
        WaveEvent.FINISHED: WavePhase.PAUSED,
        WaveEvent.DEATH: WavePhase.OVER,
    },
    WavePhase.HELD: {
        WaveEvent.UNFINISHED: WavePhase.RUNNING,
        WaveEvent.FINISHED: WavePhase.PAUSED,
        WaveEvent.DEATH: WavePhase.OVER,
    },
    WavePhase.OVER: {WaveEvent.DEATH: WavePhase.OVER},
}


class WaveDuty(enum.Enum):
    """An action that a rank owes now, beside its steps."""

    NOTHING = "nothing"
    REPORT = "report"
    """Send the coordinator `RankWaves.report`, which no other rank has sent."""
    REDUCE = "reduce"
    """Begin the all-reduce (max) of `RankWaves.has_work`; its result goes to `RankWaves.on_result`."""


class RankWaves:
    """The waves at one rank.

    Args:
        rank: rank 0 tells of the ends of waves.
        every: steps between reductions, at least 2; the same at all ranks.
    Attributes:
        wave: the one that runs, or that would be the next.
        step: steps launched in it.
        has_work: what the reduction that was begun last is of.
    """

    def __init__(self, rank: int, every: int = REDUCE_EVERY) -> None:
        assert every > 1, "a wave's first step begins no reduction"
        self.rank = rank
        self.wave = 0
        self.step = 0
        self.phase = WavePhase.PAUSED
        self.has_work = False
        self._every = every
        self._started = -1
        """The newest wave of which it is known that it has begun somewhere."""
        self._is_reducing = False
        """A reduction was begun and not acted upon."""
        self._result: bool | None = None
        """Whether a rank had work, once the reduction has its result."""

    @property
    def report(self) -> WaveReport:
        return WaveReport(self.wave, self.is_running)

    @property
    def is_running(self) -> bool:
        """Whether a wave runs here: where there is nothing to compute, dummies are."""
        return self.phase in (WavePhase.RUNNING, WavePhase.HELD)

    @property
    def may_launch(self) -> bool:
        return self.phase in (WavePhase.PAUSED, WavePhase.RUNNING)

    def on_launch(self, has_work: bool) -> WaveDuty:
        """A step was launched, which `may_launch` allowed: a dummy only while `is_running`.

        Args:
            has_work: whether this rank has sequences that it could go on with; what waits for its reader has none.
        """
        self.step += 1
        if self.phase is not WavePhase.RUNNING:
            self._take(WaveEvent.WORK)
            self._started = self.wave
            return WaveDuty.REPORT
        return self._on_boundary(has_work) if self.step % self._every == 0 else WaveDuty.NOTHING

    def on_result(self, has_work: bool) -> WaveDuty:
        """The reduction has ended: whether any rank had work when it was begun."""
        assert self._is_reducing, "no reduction was begun"
        assert self._result is None, "a reduction ends once"
        self._result = has_work
        return self._act_upon_result() if self.phase is WavePhase.HELD else WaveDuty.NOTHING

    def on_start(self, wave: int) -> None:
        """START_WAVE: the wave has begun at another rank. Of one that has ended here it is stale, and changes nothing.

        Raises:
            ValueError: without this rank the group cannot have come so far.
        """
        if wave > self.wave + 1:
            raise ValueError(f"wave {wave} cannot have begun: this rank has not ended wave {self.wave}")
        self._started = max(self._started, wave)
        if self.phase is WavePhase.PAUSED and self._started == self.wave:
            self._take(WaveEvent.START)

    def on_death(self) -> None:
        """A rank of the group has died, or cannot be reached: nothing more is launched."""
        self._take(WaveEvent.DEATH)

    def _on_boundary(self, has_work: bool) -> WaveDuty:
        """All ranks come by here after the same step: act upon the last reduction, and begin the next."""
        self.has_work = has_work
        if not self._is_reducing:
            return self._reduce()
        if self._result is None:
            self._take(WaveEvent.NO_RESULT)
            return WaveDuty.NOTHING
        return self._act_upon_result()

    def _act_upon_result(self) -> WaveDuty:
        result, self._result, self._is_reducing = self._result, None, False
        if result:
            self._take(WaveEvent.UNFINISHED)
            return self._reduce()
        self._take(WaveEvent.FINISHED)
        self.wave += 1
        self.step = 0
        if self._started == self.wave:  # another rank was here before, and has begun the next
            self._take(WaveEvent.START)
        return WaveDuty.REPORT if self.rank == 0 else WaveDuty.NOTHING

    def _reduce(self) -> WaveDuty:
        self._is_reducing = True
        return WaveDuty.REDUCE

    def _take(self, event: WaveEvent) -> None:
        self.phase = TRANSITIONS[self.phase][event]


class WaveCoordinator:
    """Knows the newest wave of a group, and which ranks must hear of it.

    It needs no history: the next reports have all.

    Attributes:
        known: the greatest report.
    """

    def __init__(self, num_ranks: int) -> None:
        self.known = WaveReport(0, False)
        self._ranks = range(num_ranks)

    def on_report(self, rank: int, report: WaveReport) -> list[int]:
        """A rank has reported how far it is; returns the ranks that must hear START_WAVE of the wave in `known`."""
        if report > self.known:
            self.known = report
            return [other for other in self._ranks if other != rank] if report.is_running else []
        # It has ended each wave that any rank has ended: it lacks the start of this one, and nothing more.
        return [rank] if report < self.known and report.wave == self.known.wave else []
