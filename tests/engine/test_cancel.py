"""Cancel means abort, wherever it strikes: in no later plan, blocks free, nothing left, and everybody else served."""

from __future__ import annotations

import asyncio
import contextlib
import random
import threading
from collections.abc import AsyncIterator
from typing import Any

import pytest
from integrity import check_integrity

from aioengine import RequestOutput

PROMPT = list(range(100, 140))
SEED = 77
NAME = "it"
STAGES = ["waiting for admission", "preparing", "waiting", "prefilling", "decoding", "just finished"]


class Stage:
    """A request, to be started by the test, that has come to a stage, and the neighbours that keep it there.

    Attributes:
        prompt: what brings it there.
        max_tokens: so that it ends where the stage says.
        is_reached: whether it is there.
        release: lets it go on.
    """

    def __init__(self, served: Any, name: str) -> None:
        self.served = served
        self.name = name
        self.prompt: Any = PROMPT
        self.max_tokens = 30
        self.gate = threading.Event()

    async def __aenter__(self) -> Stage:
        served, name = self.served, self.name
        self._neighbours = asyncio.TaskGroup()
        await self._neighbours.__aenter__()
        num_neighbours = {"waiting for admission": 3, "waiting": 2}.get(name, 0)
        for number in range(num_neighbours):
            self._neighbours.create_task(served.engine.generate([number + 1] * 20, seed=number, max_tokens=4))
            await served.until(lambda: served.executor.plans)
        if name == "preparing":
            self.gate = served.hold_tokenizing()
            self.prompt = "fox " * 300
        if name == "just finished":
            self.max_tokens = 1
        return self

    async def reach(self) -> None:
        served, name = self.served, self.name
        if name == "waiting for admission":
            await served.until(lambda: len(served.runtime.admission._waiting) == 1)
        elif name == "preparing":
            for _ in range(5):  # of no time: a virtual clock stands still for the thread
                await asyncio.sleep(0)
            assert served.runtime.admission.num_preparing == 1
        elif name == "waiting":
            await served.until(lambda: served.core.stats().waiting == 2)
        else:
            await served.until(lambda: served.has_run(SEED))
        if name == "decoding":
            [sequence] = served.core.scheduler.sequences()
            for count in range(1, 4):
                served.executor.complete()
                await served.until(lambda: len(sequence.output_ids) == count)  # noqa: B023 - called before the next one
            await served.turn()
        elif name == "just finished":
            served.complete_all()

    async def __aexit__(self, *exc: Any) -> None:
        self.gate.set()
        served = self.served
        while self._neighbours._tasks:
            served.complete_all()
            await served.turn()
        await self._neighbours.__aexit__(None, None, None)


in_each_stage = pytest.mark.parametrize("stage_name", STAGES)


@contextlib.asynccontextmanager
async def staged(serve: Any, depth: int, name: str) -> AsyncIterator[tuple[Any, Stage]]:
    config = {"max_waiting": 2, "max_num_seqs": 1} if name in ("waiting for admission", "waiting") else {}
    async with (
        serve(depth=depth, is_manual=True, max_model_len=512, config=config) as served,
        Stage(served, name) as stage,
    ):
        yield served, stage


def assert_gone(served: Any, num_plans: int) -> None:
    """It is in no plan launched since, and what it held is free already."""
    assert all(SEED not in seeds for seeds in served.seeds_of_plans(num_plans))
    live = served.core.scheduler.sequences()
    assert SEED not in {sequence.sampling.seed for sequence in live}
    check_integrity(served.core.scheduler)
    held = {block_id for sequence in live for block_ids in sequence.block_ids for block_id in block_ids}
    assert served.num_free_blocks == served.executor.info.num_blocks - len(held)
    assert NAME not in {request.request_id for request in served.runtime.admission.requests}


@pytest.mark.virtual_clock
@in_each_stage
async def test_an_abort_ends_it_in_each_stage_with_what_it_has(
    serve: Any, tasks: Any, depth: int, stage_name: str
) -> None:
    async with staged(serve, depth, stage_name) as (served, stage):
        work = served.engine.generate(stage.prompt, seed=SEED, max_tokens=stage.max_tokens, request_id=NAME)
        task = tasks.start(work)
        await stage.reach()
        num_plans = len(served.executor.plans)
        served.engine.abort(NAME)
        served.engine.abort(NAME)
        stage.gate.set()
        [outcome] = await tasks.end(task)

        assert isinstance(outcome, RequestOutput)
        assert outcome.finished
        completion = outcome.outputs[0]
        assert completion.finish_reason == "abort"
        assert len(completion.token_ids) == (3 if stage_name == "decoding" else 0)
        assert completion.text == served.tokenizer.decode(completion.token_ids, skip_special_tokens=True)
        assert len(outcome.prompt_token_ids) >= 40
        assert_gone(served, num_plans)
    assert_gone(served, num_plans)


@pytest.mark.virtual_clock
@pytest.mark.parametrize(
    ("stage_name", "way"),
    [
        *((name, way) for name in STAGES for way in ("cancel", "cancel generate")),
        *((name, way) for name in STAGES[2:] for way in ("break", "exception", "stream.abort")),
    ],
)
async def test_leaving_it_for_any_reason_aborts_it(
    serve: Any, tasks: Any, depth: int, stage_name: str, way: str
) -> None:
    entered = asyncio.Event()
    leave = asyncio.Event()

    async def read() -> None:
        if way == "cancel generate":
            await served.engine.generate(stage.prompt, seed=SEED, max_tokens=stage.max_tokens, request_id=NAME)
        async with served.engine.stream(
            stage.prompt, seed=SEED, max_tokens=stage.max_tokens, request_id=NAME
        ) as stream:
            entered.set()
            if way == "cancel":
                async for _ in stream:
                    pass
                await asyncio.sleep(3600)
            await leave.wait()
            if way == "exception":
                raise LookupError
            if way == "stream.abort":
                stream.abort()
                assert (await stream.finish()).outputs[0].finish_reason in ("abort", "length")

    async with staged(serve, depth, stage_name) as (served, stage):
        task = tasks.start(read())
        await stage.reach()
        if stage_name == "just finished":
            await served.turn()
        num_plans = len(served.executor.plans)
        if way in ("cancel", "cancel generate"):
            task.cancel()
        else:
            assert entered.is_set()
            leave.set()
        [outcome] = await tasks.end(task)

        expected = {"exception": LookupError, "break": type(None), "stream.abort": type(None)}
        assert isinstance(outcome, expected.get(way, asyncio.CancelledError)), outcome
        assert_gone(served, num_plans)
    assert_gone(served, num_plans)


async def test_an_aborted_stream_still_brings_what_had_arrived(serve: Any, depth: int) -> None:
    async with serve(depth=depth, is_manual=True) as served:
        served.say(PROMPT, [5, 300, 301, 302, 303, 304, 305, 306])
        async with served.engine.stream(PROMPT, stop="never seen", max_tokens=8) as stream:
            await served.until(lambda: served.executor.unfinished)
            served.executor.complete()
            await served.until(lambda: stream.result.outputs[0].token_ids)
            served.engine.abort(stream.request_id)
            deltas = [delta async for delta in stream]

        assert [(delta.token_ids, delta.finish_reason) for delta in deltas] == [([5], "abort")]
        assert deltas[0].text == served.tokenizer.decode([5], skip_special_tokens=True)


# Any moment


@pytest.mark.virtual_clock
@pytest.mark.parametrize("way", ["cancel", "abort"])
async def test_a_request_may_be_ended_at_any_moment(serve: Any, tasks: Any, depth: int, way: str) -> None:
    """Each is hit after so many turns of the loop or so much time as the seed says; nobody else notices."""
    rng = random.Random(f"{asyncio.get_running_loop().seed} {depth}")
    config = {"max_waiting": 4, "max_num_seqs": 3, "max_num_batched_tokens": 64}
    async with serve(depth=depth, num_blocks=24, block_size=8, max_model_len=192, config=config) as served:
        num_plans: dict[int, int] = {}

        async def run(number: int, **arguments: Any) -> RequestOutput:
            try:
                return await served.engine.generate(seed=number, request_id=f"{number}", **arguments)
            finally:
                assert f"{number}" not in {request.request_id for request in served.runtime.admission.requests}
                num_plans[number] = len(served.executor.plans)

        async def one(number: int, is_hit: bool) -> Any:
            long = rng.random() < 0.15
            prompt: Any = "fox " * 60 if long else [rng.randrange(3, 500)] * rng.randrange(1, 60)
            await asyncio.sleep(rng.random() * 0.2)
            max_tokens = rng.randrange(1, 12)
            task = tasks.start(run(number, prompt=prompt, max_tokens=max_tokens))
            if is_hit:
                if rng.random() < 0.5:
                    for _ in range(rng.randrange(12)):
                        await asyncio.sleep(0)
                else:
                    await asyncio.sleep(rng.random() * 0.3)
                if way == "cancel":
                    task.cancel()
                else:
                    served.engine.abort(f"{number}")
            [outcome] = await tasks.end(task)
            return outcome

        hit = [number % 2 == 1 for number in range(40)]
        outcomes = await asyncio.gather(*(one(number, is_hit) for number, is_hit in enumerate(hit)))

        allowed = {"cancel": RequestOutput | asyncio.CancelledError, "abort": RequestOutput}[way]
        ended_early = 0
        for outcome, is_hit in zip(outcomes, hit, strict=True):
            assert isinstance(outcome, allowed if is_hit else RequestOutput), outcome
            is_whole = isinstance(outcome, RequestOutput) and outcome.outputs[0].finish_reason == "length"
            assert is_whole or is_hit
            ended_early += not is_whole
        assert ended_early > 0
        for number, count in num_plans.items():
            assert all(number not in seeds for seeds in served.seeds_of_plans(count))
