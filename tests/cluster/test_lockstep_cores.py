"""Engine cores in lockstep on one virtual clock: real loops and schedulers, and devices whose steps run together.

Reductions and messages take their time, and messages are lost.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import numpy as np
import pytest
from waiting import Tasks

from aioengine import EngineConfig, EngineDead, InvalidRequest, SamplingParams
from aioengine.cluster.lockstep import REDUCE_EVERY, WaveCoordinator, WaveReport
from aioengine.cluster.lockstep_group import GRACE_S, LockstepGroup
from aioengine.core.control import Pause, StartWave
from aioengine.core.engine_core import EngineCore
from aioengine.core.executor_protocol import LockstepPlace
from aioengine.core.listener import UNLIMITED
from aioengine.scheduler.sequence import Request, Sequence
from aioengine.testing.fake_executor import FakeLaunch
from doubles.fake_executor import FakeExecutor

HEARTBEAT_S = 1.0
LATE_S = 0.3
"""Of messages and reductions, at most: thirty steps."""


class Together:
    """What the ranks of a group share: the devices' operation, the reductions and the coordinator."""

    def __init__(self, num_ranks: int, seed: int, loss: float) -> None:
        self.loop = asyncio.get_running_loop()
        self.chance = random.Random(seed)
        self.loss = loss
        self.cores: list[EngineCore] = []
        self.coordinator = WaveCoordinator(num_ranks)
        self.launched: list[list[FakeLaunch]] = [[] for _ in range(num_ranks)]
        self.reductions: list[list[tuple[bool, int, int]]] = [[] for _ in range(num_ranks)]
        self.on_result: list[Callable[[bool], None]] = []

    def later(self, callback: Callable[[], Any], *, can_be_lost: bool = False) -> None:
        if not (can_be_lost and self.chance.random() < self.loss):
            self.loop.call_later(self.chance.uniform(0.0, LATE_S), callback)

    def launch(self, rank: int, step: FakeLaunch) -> None:
        self.launched[rank].append(step)
        index = len(self.launched[rank]) - 1
        if all(len(steps) > index for steps in self.launched):
            for steps in self.launched:
                self.loop.call_later(0.01, steps[index].complete)

    def reduce(self, rank: int, value: bool, wave: int, step: int) -> None:
        self.reductions[rank].append((value, wave, step))
        index = len(self.reductions[rank]) - 1
        if all(len(begun) > index for begun in self.reductions):
            of_all = [begun[index] for begun in self.reductions]
            assert len({(wave, step) for _, wave, step in of_all}) == 1, "ranks reduce at the same step"
            for on_result in self.on_result:
                self.later(partial(on_result, any(value for value, _, _ in of_all)))

    def report(self, rank: int) -> None:
        beat = self.cores[rank].beat()
        self.later(partial(self.take, rank, WaveReport(beat.wave, beat.is_wave_running)), can_be_lost=True)

    def take(self, rank: int, report: WaveReport) -> None:
        for other in self.coordinator.on_report(rank, report):
            start = StartWave(self.coordinator.known.wave)
            self.later(partial(self.start, other, start), can_be_lost=True)

    def start(self, rank: int, start: StartWave) -> None:
        with pytest.raises(StopIteration):  # it ends without a wait
            self.cores[rank].call(start).send(None)

    async def beat(self) -> None:
        while True:
            await asyncio.sleep(HEARTBEAT_S)
            for rank in range(len(self.cores)):
                self.report(rank)

    def check(self) -> None:
        """All have launched the same, in whole waves, and are idle."""
        assert len({len(steps) for steps in self.launched}) == 1
        assert len(self.launched[0]) % REDUCE_EVERY == 0
        assert len({len(begun) for begun in self.reductions}) == 1
        assert len({core.beat().wave for core in self.cores}) == 1
        assert not any(core.beat().is_wave_running for core in self.cores)


class Device(FakeExecutor):
    """A rank's device, whose steps end when they run at all ranks."""

    def __init__(self, together: Together, rank: int, depth: int) -> None:
        super().__init__(max_in_flight=depth)
        self.together = together
        self.rank = rank

    def _complete_later(self, step: FakeLaunch) -> None:
        self.together.launch(self.rank, step)


class Reader:
    """A listener."""

    def __init__(self, num_allowed: int = UNLIMITED) -> None:
        self.num_allowed = num_allowed
        self.num_tokens = 0
        self.end: Any = None
        self.core: EngineCore | None = None
        self.sequence: Sequence | None = None

    def on_started(self) -> None:
        pass

    def on_token(self, token_id: int, logprobs: Any) -> None:
        self.num_tokens += 1
        if self.num_tokens >= self.num_allowed:
            assert self.core is not None
            self.core.block(self.sequence)  # type: ignore[arg-type]

    def on_end(self) -> None:
        self.end = "end"

    def on_error(self, error: Exception) -> None:
        self.end = error


def add(core: EngineCore, num_tokens: int, reader: Reader | None = None) -> Reader:
    reader = reader or Reader()
    params = SamplingParams(max_tokens=num_tokens, ignore_eos=True)
    prompt = np.arange(5, dtype=np.int32)
    request = Request(request_id="it", prompt_token_ids=prompt, params=params, seed=1, max_total_tokens=5 + num_tokens)
    reader.core, reader.sequence = core, core.make_sequence(request)
    core.add(reader.sequence, [reader])
    return reader


@asynccontextmanager
async def stepping(num_ranks: int, *, seed: int = 0, depth: int = 2, loss: float = 0.0) -> AsyncIterator[Together]:
    together = Together(num_ranks, seed, loss)
    for rank in range(num_ranks):
        core = EngineCore(Device(together, rank, depth), EngineConfig(), clock=together.loop.time)
        lockstep = LockstepGroup(LockstepPlace(rank, num_ranks, ""), core.break_down)
        lockstep.begin_reduction = partial(together.reduce, rank)
        together.on_result.append(lockstep.on_result)
        core.enter_group(lockstep)
        lockstep.on_report = partial(together.report, rank)
        together.cores.append(core)
    async with Tasks() as tasks:
        for core in together.cores:
            tasks.start(core.run())
        tasks.start(together.beat())
        yield together


@pytest.mark.virtual_clock
@pytest.mark.parametrize("loss", [0.0, 0.5])
@pytest.mark.parametrize(("num_ranks", "depth"), [(2, 1), (3, 2)])
async def test_every_request_is_computed_and_every_step_is_run_by_all(num_ranks: int, depth: int, loss: float) -> None:
    seed = asyncio.get_running_loop().seed  # type: ignore[attr-defined]
    async with stepping(num_ranks, seed=seed, depth=depth, loss=loss) as together:
        readers = []
        for _ in range(12):
            core = together.chance.choice(together.cores)
            readers.append(add(core, together.chance.randint(1, 80)))
            await asyncio.sleep(together.chance.choice([0.0, 0.2, 1.0, 5.0]))
        await asyncio.sleep(60.0)
        assert [reader.end for reader in readers] == ["end"] * 12
        together.check()


@pytest.mark.virtual_clock(seeds=1)
async def test_a_wave_ends_beside_a_reader_that_is_behind_and_another_one_begins_when_it_has_caught_up() -> None:
    async with stepping(2) as together:
        behind = add(together.cores[0], 50, Reader(num_allowed=3))
        await asyncio.sleep(10.0)
        together.check()
        assert behind.num_tokens < 10
        assert together.cores[1].beat().wave == 1
        behind.num_allowed = UNLIMITED
        together.cores[0].unblock(behind.sequence)  # type: ignore[arg-type]
        await asyncio.sleep(10.0)
        assert behind.end == "end"
        assert together.cores[1].beat().wave == 2


@pytest.mark.virtual_clock(seeds=1)
async def test_a_pause_is_answered_at_the_end_of_the_wave_and_a_paused_rank_computes_with_the_others() -> None:
    async with stepping(2) as together:
        first, second = together.cores
        held, other = add(first, 200), add(second, 40)
        await asyncio.sleep(0.1)
        await first.call(Pause())
        assert other.end == "end"
        assert held.end is None
        await asyncio.sleep(LATE_S)
        together.check()
        later = add(second, 40)
        await asyncio.sleep(10.0)
        assert later.end == "end"
        first.resume()
        await asyncio.sleep(20.0)
        assert held.end == "end"
        together.check()


@pytest.mark.virtual_clock(seeds=1)
async def test_a_failed_step_ends_its_rank_since_the_others_wait_in_it() -> None:
    async with stepping(2) as together:
        together.cores[0].executor.make_step_fail(3, ValueError("no such expert"))  # type: ignore[attr-defined]
        reader = add(together.cores[0], 50)
        await asyncio.sleep(5.0)
        assert isinstance(reader.end, EngineDead)
        assert "no such expert" in str(reader.end)


@pytest.mark.virtual_clock(seeds=1)
async def test_a_rank_that_has_lost_its_group_launches_nothing_and_ends_after_a_while() -> None:
    async with stepping(2) as together:
        core = together.cores[0]
        core.lockstep.on_result(RuntimeError("Connection closed by peer"))  # type: ignore[union-attr]
        reader = add(core, 5)
        await asyncio.sleep(GRACE_S - 0.1)
        assert reader.end is None
        assert not together.launched[0]
        await asyncio.sleep(0.2)
        assert "Connection closed by peer" in str(reader.end)


@pytest.mark.virtual_clock(seeds=1)
async def test_a_wave_is_started_in_a_group_alone_and_none_that_cannot_have_begun() -> None:
    async with stepping(2) as together:
        with pytest.raises(InvalidRequest, match="wave 2 cannot have begun"):
            await together.cores[0].call(StartWave(2))
    with pytest.raises(InvalidRequest, match="no lockstep group"):
        await EngineCore(FakeExecutor(), EngineConfig()).call(StartWave(0))
