"""What goes first: at the admission, in the queue, for rows and for blocks; and what it costs those that give way."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import pytest
from engine.oracle import continuation, tokens_of

PROMPT = list(range(10, 22))
ONE_ROW = {"max_num_seqs": 1}


def num_seats(served: Any, seed: int) -> int:
    """How often a request got a row."""
    return sum(added.sampling.seed == seed for plan in served.executor.plans for added in plan.added)


async def start(served: Any, tasks: Any, priorities: list[int], **sampling: Any) -> list[asyncio.Task[Any]]:
    """Requests that come one after the other and are told apart by their seeds, 0 for the first."""
    started = []
    for seed, priority in enumerate(priorities):
        work = served.engine.generate(PROMPT, seed=seed, priority=priority, **{"max_tokens": 5, **sampling})
        started.append(tasks.start(work))
        for _ in range(2):
            await served.turn()
    return started


async def assert_all_are_whole(started: list[asyncio.Task[Any]], count: int = 5) -> None:
    for seed, task in enumerate(started):
        assert tokens_of(await task) == [continuation(PROMPT, count, seed=seed)]


# Order


# Giving way


@pytest.mark.virtual_clock(seeds=1)
async def test_a_higher_one_takes_the_row_of_a_lower_one_at_once(serve: Any, tasks: Any, depth: int) -> None:
    async with serve(depth=depth, config={"max_num_seqs": 2}) as served:
        started = await start(served, tasks, [0, 5], max_tokens=50)
        await asyncio.sleep(0.1)
        high = await served.engine.generate(PROMPT, seed=9, priority=1, max_tokens=5)
        # It waits for the steps in flight, which may be older than itself, and for nothing else.
        assert high.metrics.e2e_latency_s <= (depth + 5) * 0.01 + 1e-9
        await assert_all_are_whole(started, 50)
        assert [(await task).metrics.num_preemptions for task in started] == [0, 1], "only the lower one gave way"
        assert [num_seats(served, seed) for seed in (0, 1, 9)] == [1, 2, 1]


@pytest.mark.virtual_clock(seeds=1)
async def test_the_lowest_gives_way_and_of_those_the_last_that_came(serve: Any, tasks: Any, depth: int) -> None:
    async with serve(depth=depth, config={"max_num_seqs": 4}) as served:
        started = await start(served, tasks, [2, 3, 3, 1], max_tokens=40)
        await asyncio.sleep(0.1)
        high = tasks.start(served.engine.generate(PROMPT, seed=9, priority=0, max_tokens=5))
        await high
        await assert_all_are_whole(started, 40)
        assert [(await task).metrics.num_preemptions for task in started] == [0, 0, 1, 0]


@pytest.mark.virtual_clock(seeds=1)
async def test_equal_ones_never_give_way_for_rows(serve: Any, tasks: Any, depth: int) -> None:
    async with serve(depth=depth, config={"max_num_seqs": 2}) as served:
        started = await start(served, tasks, [1, 1, 1, 2, 1], max_tokens=20)
        await assert_all_are_whole(started, 20)
        assert served.core.stats().preemptions == 0


@pytest.mark.virtual_clock(seeds=1)
async def test_who_gave_way_comes_back_once_and_not_again_and_again(serve: Any, tasks: Any, depth: int) -> None:
    """A stream of high ones, one after the other, each while the one before still runs."""
    async with serve(depth=depth, config=ONE_ROW) as served:
        low = tasks.start(served.engine.generate(PROMPT, seed=0, priority=9, max_tokens=30))
        await asyncio.sleep(0.1)
        high = []
        for number in range(6):
            high.append(
                tasks.start(served.engine.generate(PROMPT, seed=10 + number, priority=number % 2, max_tokens=9))
            )
            await asyncio.sleep(0.03)
        await tasks.end(*high)
        assert not low.done()
        assert tokens_of(await low) == [continuation(PROMPT, 30, seed=0)]
        assert (await low).metrics.num_preemptions == 1
        assert num_seats(served, 0) == 2
        # Of the high ones those of priority 0 never gave way, and those of 1 did so at most once for each of them.
        assert [(await task).metrics.num_preemptions for task in high[::2]] == [0, 0, 0]
        assert all(task.result().metrics.num_preemptions <= 1 for task in high[1::2])


@pytest.mark.virtual_clock(seeds=1)
async def test_a_high_one_that_is_stalled_does_not_hold_low_ones_up(serve: Any, tasks: Any, depth: int) -> None:
    async with (
        serve(depth=depth, config=ONE_ROW) as served,
        served.engine.stream(PROMPT, seed=0, priority=-5, max_tokens=20, max_unread_tokens=2) as stream,
    ):
        await asyncio.sleep(0.2)
        low = tasks.start(served.engine.generate(PROMPT, seed=1, priority=5, max_tokens=30))
        await asyncio.sleep(0.1)
        ids = [token for delta in [delta async for delta in stream] for token in delta.token_ids]
        assert ids == continuation(PROMPT, 20, seed=0)
        assert not low.done(), "the high one took its row back as soon as it was read"
        assert tokens_of(await low) == [continuation(PROMPT, 30, seed=1)]


@pytest.mark.virtual_clock
async def test_whoever_gives_way_to_whom_all_bring_the_same_tokens(serve: Any, tasks: Any, depth: int) -> None:
    rng = random.Random(f"{asyncio.get_running_loop().seed} {depth}")
    config = {"max_num_seqs": 3, "max_num_batched_tokens": 16, "max_waiting": rng.choice([4, 50])}
    async with serve(depth=depth, num_blocks=20, block_size=4, max_model_len=64, config=config) as served:

        async def one(seed: int) -> None:
            await asyncio.sleep(rng.random())
            n, count, prompt = rng.randrange(1, 4), rng.randrange(1, 25), PROMPT[: rng.randrange(1, 13)]
            priority = rng.randrange(4)
            output = await served.engine.generate(prompt, n=n, seed=seed, priority=priority, max_tokens=count)
            assert tokens_of(output) == [continuation(prompt, count, seed=seed, choice=i) for i in range(n)]

        await asyncio.gather(*(one(seed) for seed in range(20)))
        assert served.core.stats().preemptions
