"""Hundreds of requests of all kinds at once, under many task orders: nobody is lost, mixed up, or left behind."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import pytest

from aioengine import EngineClosed, EngineDead, EngineOverloaded, RequestOutput, StepFailed
from aioengine.core.executor_protocol import DeviceLost

NUM_REQUESTS = 150
SHARED = [[base + i for i in range(48)] for base in (100, 300, 500)]
"""Beginnings that many prompts have."""
WORDS = ["fox", " owl", " and", " the", " tree", " lives", " happily", ". ", "日本", "é"]


class Wish:
    """A request drawn by the seed: what is asked, how it is read, and what happens to it."""

    def __init__(self, rng: random.Random, number: int) -> None:
        self.request_id = f"{number if rng.random() < 0.9 else 'shared name'}"
        self.starts_at_s = rng.random() * 2
        kind = rng.choice(["ids", "shared", "shared", "text", "long text", "chat"])
        text = "".join(rng.choices(WORDS, k=rng.randrange(1, 12)))
        self.prompt: Any = {
            "ids": rng.choices(range(3, 2000), k=rng.randrange(1, 70)),
            "shared": rng.choice(SHARED)[: rng.randrange(8, 49)] + rng.choices(range(3, 2000), k=rng.randrange(6)),
            "text": text,
            "long text": "happily " * rng.randrange(126, 130),
            "chat": [{"role": "user", "content": text}],
        }[kind]
        self.sampling: dict[str, Any] = {"seed": rng.randrange(4), "max_tokens": rng.randrange(1, 40)}
        if rng.random() < 0.3:
            self.sampling["stop"] = rng.sample(["a", "e", "th", "zq", "qu"], k=2)
        if rng.random() < 0.2:
            self.sampling["stop_token_ids"] = rng.choices(range(3, 2048), k=200)
        if rng.random() < 0.2:
            self.sampling["logprobs"] = rng.randrange(4)
        self.way = rng.choice(["generate", "stream", "slow stream", "unread stream"])
        self.fate = rng.choice(["lives"] * 5 + ["is aborted", "is cancelled", "is left"])
        self.ends_after_s = rng.random() * rng.choice([0.05, 1.0])
        self.pause_s = rng.random() * 0.05
        self.on_full = rng.choice(["wait", "wait", "raise"])

    @property
    def arguments(self) -> dict[str, Any]:
        return {"prompt": self.prompt, "on_full": self.on_full, "request_id": self.request_id, **self.sampling}


async def live(served: Any, wish: Wish) -> Any:
    """Make the wish; returns the output."""
    await asyncio.sleep(wish.starts_at_s)
    if wish.way == "generate":
        return await served.engine.generate(**wish.arguments)
    async with served.engine.stream(**wish.arguments) as stream:
        if wish.way == "unread stream":
            await asyncio.sleep(wish.pause_s)
            return await stream.finish()
        deltas = []
        async for delta in stream:
            deltas.append(delta)
            if wish.fate == "is left" and len(deltas) > 3:
                return None
            if wish.way == "slow stream":
                await asyncio.sleep(wish.pause_s)
        result = stream.result
    assert "".join(delta.text for delta in deltas) == result.text
    assert [i for delta in deltas for i in delta.token_ids] == result.outputs[0].token_ids
    assert [delta.finish_reason is not None for delta in deltas] == [False] * (len(deltas) - 1) + [True]
    return result


async def strike(served: Any, wish: Wish, task: asyncio.Task[Any]) -> None:
    await asyncio.sleep(wish.starts_at_s + wish.ends_after_s)
    if wish.fate == "is cancelled":
        task.cancel()
    elif wish.fate == "is aborted":
        served.engine.abort(wish.request_id)


async def watch(served: Any) -> None:
    while True:
        served.core.scheduler.check_integrity()
        await asyncio.sleep(0.1)


@pytest.mark.virtual_clock
async def test_a_storm_of_all_kinds_of_requests(serve: Any, tasks: Any, depth: int) -> None:
    rng = random.Random(f"{asyncio.get_running_loop().seed} {depth}")
    wishes = [Wish(rng, number) for number in range(NUM_REQUESTS)]
    config = {
        "max_num_seqs": rng.choice([3, 8, 40]),
        "max_num_batched_tokens": rng.choice([40, 64, 500]),
        "max_waiting": rng.choice([4, 30, 500]),
        "enable_prefix_caching": rng.random() < 0.8,
    }
    block_size = rng.choice([4, 16])
    sizes = {"max_model_len": 224, "block_size": block_size, "num_blocks": rng.choice([224, 400]) // block_size}
    async with serve(depth=depth, config=config, **sizes) as served:
        watcher = tasks.start(watch(served))
        living = [tasks.start(live(served, wish)) for wish in wishes]
        for wish, task in zip(wishes, living, strict=True):
            if wish.fate in ("is cancelled", "is aborted"):
                tasks.start(strike(served, wish, task))
        outcomes = await tasks.end(*living)
        await asyncio.sleep(5)
        served.assert_nothing_is_held()
        watcher.cancel()

        aborted_names = {wish.request_id for wish in wishes if wish.fate == "is aborted"}
        num_compared = 0
        for wish, outcome in zip(wishes, outcomes, strict=True):
            if isinstance(outcome, asyncio.CancelledError):
                assert wish.fate == "is cancelled"
            elif isinstance(outcome, EngineOverloaded):
                assert wish.on_full == "raise"
            elif outcome is None:
                assert wish.fate == "is left"
            else:
                assert isinstance(outcome, RequestOutput), outcome
                assert outcome.finished
                if outcome.outputs[0].finish_reason == "abort":
                    assert wish.request_id in aborted_names
                else:
                    alone = await served.engine.generate(**wish.arguments)
                    assert outcome.outputs == alone.outputs
                    assert outcome.prompt_token_ids == alone.prompt_token_ids
                    num_compared += 1
        assert num_compared > NUM_REQUESTS / 4


@pytest.mark.virtual_clock
@pytest.mark.parametrize("end", ["step fails", "device is lost", "closed", "drained"])
async def test_a_storm_that_is_cut_off_ends_for_everyone(serve: Any, tasks: Any, depth: int, end: str) -> None:
    rng = random.Random(f"{asyncio.get_running_loop().seed} {depth}")
    wishes = [Wish(rng, number) for number in range(60)]
    config = {"max_num_seqs": 8, "max_num_batched_tokens": 64, "max_waiting": 10}
    async with serve(depth=depth, config=config, max_model_len=224, num_blocks=20) as served:
        living = [tasks.start(live(served, wish)) for wish in wishes]
        await asyncio.sleep(rng.random() * 2)
        step = len(served.executor.plans) + rng.randrange(3)
        if end == "step fails":
            for number in range(4):
                served.executor.make_step_fail(step + 3 * number, ArithmeticError("upside down"))
        elif end == "device is lost":
            served.executor.make_step_fail(step, DeviceLost("lost"))
        else:
            await served.engine.aclose(drain=end == "drained")
        outcomes = await tasks.end(*living)

        kinds = {type(outcome) for outcome in outcomes} - {RequestOutput, EngineOverloaded, type(None)}
        allowed = {"step fails": StepFailed, "device is lost": EngineDead}.get(end, EngineClosed)
        assert kinds <= {allowed}
        if end == "step fails":
            served.core.scheduler.check_integrity()
