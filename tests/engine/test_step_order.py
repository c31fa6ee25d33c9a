"""finish(N) → apply → schedule → launch → publish, in slices, and the loop gets its turns."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import numpy as np
import pytest
from waiting import Ticker

from aioengine import EngineConfig, SamplingParams
from aioengine.core.engine_core import PUBLISH_SLICE, EngineCore
from aioengine.scheduler.sequence import Request
from doubles.fake_executor import FakeExecutor, FakeStep


class Recorder:
    """A listener that notes what the device had been told at each call."""

    def __init__(self, executor: FakeExecutor) -> None:
        self.executor = executor
        self.num_launched: list[int] = []
        self.num_finished: list[int] = []
        self.token_ids: list[int] = []
        self.ends: list[Any] = []

    def on_started(self) -> None:
        pass

    def on_token(self, token_id: int, logprobs: Any) -> None:
        kinds = [kind for kind, _ in self.executor.events]
        self.num_launched.append(kinds.count("launch"))
        self.num_finished.append(kinds.count("finish"))
        self.token_ids.append(token_id)

    def on_end(self) -> None:
        self.ends.append("end")

    def on_error(self, error: Exception) -> None:
        self.ends.append(error)


@asynccontextmanager
async def running(executor: FakeExecutor, tasks: Any, **config: Any) -> AsyncIterator[EngineCore]:
    """An engine core without an engine around it."""
    core = EngineCore(executor, EngineConfig(**config))
    task = tasks.start(core.run())
    yield core
    await core.when(lambda: core.is_drained)
    task.cancel()
    await tasks.end(task)


def add(core: EngineCore, *, seed: int = 0, num_tokens: int = 8, num_prompt_tokens: int = 5) -> Recorder:
    params = SamplingParams(max_tokens=num_tokens)
    prompt = np.arange(seed, seed + num_prompt_tokens, dtype=np.int32)
    request = Request(
        request_id="it",
        prompt_token_ids=prompt,
        params=params,
        seed=seed,
        max_total_tokens=num_prompt_tokens + num_tokens,
    )
    recorder = Recorder(core.executor)
    core.add(core.make_sequence(request), [recorder])
    return recorder


@pytest.fixture(params=[0, 1], ids=["fast device", "slow device"])
def step_time_s(request: pytest.FixtureRequest) -> float:
    return request.param


@pytest.mark.virtual_clock
async def test_the_next_steps_are_launched_before_a_steps_tokens_are_handed_out(
    make_executor: Any, tasks: Any, depth: int, step_time_s: float
) -> None:
    executor = make_executor(depth=depth, step_time_s=step_time_s)
    async with running(executor, tasks) as core:
        recorder = add(core, num_tokens=12)
        await asyncio.sleep(100)

    assert recorder.ends == ["end"]
    assert recorder.num_finished == list(range(1, 13))
    # When the tokens of step N are heard, as many later steps as the depth allows are launched: the device never
    # waits for a reader. There are 12 steps in all.
    assert recorder.num_launched == [min(step + depth, 12) for step in range(1, 13)]


@pytest.mark.virtual_clock
async def test_a_later_step_is_launched_before_an_earlier_one_is_finished(
    make_executor: Any, tasks: Any, depth: int, step_time_s: float
) -> None:
    executor = make_executor(depth=depth, step_time_s=step_time_s)
    async with running(executor, tasks) as core:
        add(core, num_tokens=12)
        await asyncio.sleep(100)

    events = executor.events
    assert len(events) == 24
    for step in range(12 - depth):
        last_in_flight = events.index(("launch", step + depth - 1))
        assert last_in_flight < events.index(("finish", step)) < events.index(("launch", step + depth))


@pytest.mark.virtual_clock
async def test_nothing_is_computed_past_the_length_and_one_step_less_than_depth_past_a_stop(
    make_executor: Any, tasks: Any, depth: int
) -> None:
    executor = make_executor(depth=depth)
    async with running(executor, tasks) as core:
        long = add(core, num_tokens=6)
        await asyncio.sleep(100)
        assert executor.stats.num_sampled_tokens == len(long.token_ids) == 6

        aborted = add(core, seed=1, num_tokens=100)
        await asyncio.sleep(0.065)
        [sequence] = core.scheduler.sequences()
        core.finish(sequence, "abort")
        await asyncio.sleep(100)
        assert executor.stats.num_sampled_tokens - 6 == len(aborted.token_ids) + depth


@pytest.mark.virtual_clock
async def test_publishing_lets_others_run_between_its_slices(make_executor: Any, tasks: Any, depth: int) -> None:
    """200 sequences in each step; a ticker moves between the slices in which their listeners hear of it."""
    ticks_by_token: list[int] = []
    executor = make_executor(depth=depth, num_blocks=256, is_manual=True)
    async with running(executor, tasks) as core, Ticker() as ticker:
        recorders = [add(core, seed=seed, num_tokens=2) for seed in range(200)]
        for recorder in recorders:
            recorder.on_token = lambda *_: ticks_by_token.append(ticker.count)
        while len(ticks_by_token) < 400:
            for step in executor.unfinished:
                step.complete()
            await asyncio.sleep(0)

    for tokens_of_step in (ticks_by_token[:200], ticks_by_token[200:]):
        slices = [tokens_of_step[start : start + PUBLISH_SLICE] for start in range(0, 200, PUBLISH_SLICE)]
        assert all(len(set(of_slice)) == 1 for of_slice in slices), "a slice is handed out in one go"
        # Of two tasks that are ready together either may be first, so that it takes two slices to be sure of a tick.
        assert all(before[0] < after[0] for before, after in zip(slices, slices[2:], strict=False))


class DoneAtOnce(FakeExecutor):
    """Its steps are done when they have been launched, and `finish` returns without a pause, as a device thread's
    may that is faster than the loop."""

    def launch(self, plan: Any) -> FakeStep:
        step = super().launch(plan)
        step.complete()
        return step


@pytest.mark.asyncio(loop_factories=["asyncio", "uvloop"])
async def test_a_device_that_is_always_done_does_not_hold_the_loop(tasks: Any, depth: int) -> None:
    executor = DoneAtOnce(max_in_flight=depth, is_manual=True)
    async with Ticker() as ticker, running(executor, tasks) as core:
        recorder = add(core, num_tokens=200)
    assert len(recorder.token_ids) == 200
    assert ticker.count >= 200, "a turn each step"


@pytest.mark.virtual_clock
async def test_what_a_step_brought_is_told_before_the_core_stops(make_executor: Any, tasks: Any, depth: int) -> None:
    """It is cancelled by a listener in the first slice; those in the others end with the same step."""
    executor = make_executor(depth=depth, num_blocks=256)
    core = EngineCore(executor, EngineConfig())
    task = tasks.start(core.run())
    recorders = [add(core, seed=seed, num_tokens=2 if seed % 2 else 9) for seed in range(100)]

    def on_end() -> None:
        recorders[1].ends.append("end")
        task.cancel()

    recorders[1].on_end = on_end
    await tasks.end(task)

    for seed, recorder in enumerate(recorders):
        assert len(recorder.token_ids) == 2
        assert len(recorder.ends) == 1
        assert (recorder.ends == ["end"]) == (seed % 2 == 1)
    assert core._live == {}


@pytest.mark.virtual_clock
async def test_a_listener_hears_nothing_after_its_end(make_executor: Any, tasks: Any, depth: int) -> None:
    executor = make_executor(depth=depth, num_blocks=256)
    async with running(executor, tasks) as core:
        recorders = [add(core, seed=seed, num_tokens=9) for seed in range(100)]
        sequences = core.scheduler.sequences()
        heard_at_end: dict[int, int] = {}

        def on_token(*args: Any) -> None:
            Recorder.on_token(recorders[0], *args)
            if len(recorders[0].token_ids) == 3:  # in the middle of publishing: the others have not heard theirs
                for seed in range(1, 100):
                    core.finish(sequences[seed], "abort")
                    heard_at_end[seed] = len(recorders[seed].token_ids)

        recorders[0].on_token = on_token
        await asyncio.sleep(100)

    assert len(recorders[0].token_ids) == 9
    for seed in range(1, 100):
        assert recorders[seed].ends == ["end"]
        assert len(recorders[seed].token_ids) == heard_at_end[seed] == 2


@pytest.mark.virtual_clock
async def test_a_request_that_comes_between_the_slices_of_the_last_step_is_served(
    make_executor: Any, tasks: Any, depth: int
) -> None:
    """All others end with that step, so that nothing is in flight, and the core is about to sleep."""
    executor = make_executor(depth=depth, num_blocks=256)
    async with running(executor, tasks) as core:
        recorders = [add(core, seed=seed, num_tokens=2) for seed in range(100)]
        late: list[Recorder] = []

        def on_end() -> None:
            asyncio.get_running_loop().call_soon(come)

        def come() -> None:
            assert not recorders[99].ends
            late.append(add(core, seed=300, num_tokens=2))

        recorders[0].on_end = on_end
        await asyncio.sleep(100)
        assert late[0].ends == ["end"]


@pytest.mark.parametrize("logprobs", [None, 20])
async def test_log_probabilities_are_handed_out_in_smaller_slices(serve: Any, tasks: Any, logprobs: int | None) -> None:
    async with serve(num_blocks=256, is_manual=True, config={"max_num_seqs": 64}) as served:
        await served.engine.pause()  # so that all are in one step: they may take several turns to come
        started = [
            tasks.start(served.engine.generate([1 + i] * 3, max_tokens=2, seed=1, ignore_eos=True, logprobs=logprobs))
            for i in range(64)
        ]
        await served.until(lambda: len(served.core._live) == 64)
        await served.engine.resume()
        await served.until(lambda: served.core.stats().running == 64)
        served.complete_all()
        slices: list[int] = []
        publish = served.core._publish_slice
        heard = 0

        def counted() -> bool:
            nonlocal heard
            is_more = publish()
            total = sum(len(s.listener.token_ids) for s in served.core._live.values() if s.listener is not None)
            slices.append(total - heard)
            heard = total
            return bool(is_more)

        served.core._publish_slice = counted
        await served.until(lambda: heard == 64)
        assert max(slices) == (32 if logprobs is None else 11), "a token with 20 counts for three"
        while not all(task.done() for task in started):
            served.complete_all()
            await asyncio.sleep(0)
        await tasks.end(*started)
