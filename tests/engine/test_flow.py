"""Readers that are slow, stall, or vanish: what is computed for them, what it costs the others, and what they get."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from engine.oracle import as_ids, continuation, tokens_of
from nightly import nightly

from aioengine import CompletionDelta, Stream

PROMPT = list(range(10, 17))
LONG_S = 10.0
"""A thousand steps."""


async def read_all(stream: Stream) -> list[CompletionDelta]:
    async with stream:
        return [delta async for delta in stream]


def num_computed(stream: Stream) -> list[int]:
    """Tokens that each choice has brought, read or not."""
    return [len(ids) for ids in tokens_of(stream.result)]


@contextmanager
def watch(served: Any, look: Callable[[], None]) -> Iterator[None]:
    """Look at each launch; whatever is wrong then is raised at the end."""
    launch, errors = served.executor.launch, []

    def watched(plan: Any) -> Any:
        try:
            look()
        except AssertionError as error:
            errors.append(error)
        return launch(plan)

    served.executor.launch = watched
    yield
    served.executor.launch = launch
    if errors:
        raise errors[0]


# One slow reader


@pytest.mark.virtual_clock(seeds=1)
async def test_a_reader_that_keeps_up_does_not_notice_a_limit(serve: Any, depth: int) -> None:
    async with serve(depth=depth) as served:
        started_at = asyncio.get_running_loop().time()
        deltas = await read_all(served.engine.stream(PROMPT, seed=3, max_tokens=20, max_unread_tokens=2))
        assert [len(delta.token_ids) for delta in deltas] == [1] * 20
        assert asyncio.get_running_loop().time() - started_at == pytest.approx(20 * 0.01)


@pytest.mark.virtual_clock(seeds=1)
async def test_a_stalled_request_holds_no_row(serve: Any, depth: int) -> None:
    async with (
        serve(depth=depth, config={"max_num_seqs": 1}) as served,
        served.engine.stream(PROMPT, seed=3, max_tokens=40, max_unread_tokens=3) as stream,
    ):
        await asyncio.sleep(LONG_S)
        assert served.core.stats().running == 0
        assert served.core.stats().blocked == 1
        others = await asyncio.gather(*(served.engine.generate(PROMPT, seed=seed, max_tokens=20) for seed in range(4)))
        assert [tokens_of(other) for other in others] == [[continuation(PROMPT, 20, seed=seed)] for seed in range(4)]
        assert as_ids([delta async for delta in stream]) == continuation(PROMPT, 40, seed=3)


@pytest.mark.virtual_clock(seeds=1)
@pytest.mark.parametrize("is_given_up", [False, True])
@pytest.mark.parametrize("num_read", [0, 1, 3])
async def test_finish_lifts_the_limit(serve: Any, tasks: Any, depth: int, num_read: int, is_given_up: bool) -> None:
    async with (
        serve(depth=depth) as served,
        served.engine.stream(PROMPT, seed=3, max_tokens=40, max_unread_tokens=2) as stream,
    ):
        for _ in range(num_read):
            await anext(stream)
        await asyncio.sleep(LONG_S)
        finishing = tasks.start(stream.finish())
        await served.turn()
        if is_given_up:
            finishing.cancel()
        await tasks.end()
        await asyncio.sleep(LONG_S if is_given_up else 0)
        assert tokens_of(stream.result) == [continuation(PROMPT, 40, seed=3)]
        assert stream.result.finished


@pytest.mark.virtual_clock(seeds=1)
@pytest.mark.parametrize("moment", ["stalled", "just stalled", "just read"])
@pytest.mark.parametrize("how", ["abort", "abort_all", "cancel", "leave"])
async def test_a_stalled_request_that_is_ended_has_what_it_brought_and_holds_nothing(
    serve: Any, tasks: Any, depth: int, how: str, moment: str
) -> None:
    async with serve(depth=depth, block_size=4) as served:
        streams = []

        async def ask() -> None:
            async with served.engine.stream(
                PROMPT, seed=3, max_tokens=40, max_unread_tokens=4, request_id="it"
            ) as stream:
                streams.append(stream)
                await served.until(lambda: num_computed(stream)[0] >= 4)
                if moment != "just stalled":
                    await asyncio.sleep(LONG_S)
                if moment == "just read":
                    await anext(stream)
                if how == "abort":
                    served.engine.abort("it")
                elif how == "abort_all":
                    served.engine.abort_all()
                elif how == "cancel":
                    await asyncio.sleep(LONG_S * 10)

        task = tasks.start(ask())
        if how == "cancel":
            await served.until(lambda: streams and num_computed(streams[0])[0] >= 4)
            await asyncio.sleep({"stalled": LONG_S, "just stalled": 0, "just read": LONG_S + 0.001}[moment])
            task.cancel()
        await tasks.end()
        [output] = streams[0].result.outputs
        assert output.finish_reason == "abort"
        assert 4 <= len(output.token_ids) <= (8 if moment == "just read" else 4) + depth
        assert output.token_ids == continuation(PROMPT, len(output.token_ids), seed=3)
        served.assert_nothing_is_held()


@pytest.mark.virtual_clock(seeds=1)
async def test_a_reader_that_comes_back_in_the_moment_in_which_another_request_is_aborted_goes_on(
    serve: Any, tasks: Any, depth: int
) -> None:
    """What was computed for it when it was blocked is still in flight: it has kept its row."""
    async with serve(depth=depth) as served:
        async with served.engine.stream(PROMPT, seed=3, max_tokens=20, max_unread_tokens=2) as stream:
            other = tasks.start(served.engine.generate(PROMPT, seed=4, max_tokens=100, request_id="other"))
            await served.until(lambda: served.core.scheduler.preemption.leaving)
            served.engine.abort("other")
            deltas = [await anext(stream)]
            deltas += [delta async for delta in stream]
        assert as_ids(deltas) == continuation(PROMPT, 20, seed=3)
        assert (await other).outputs[0].finish_reason == "abort"


@pytest.mark.virtual_clock(seeds=1)
async def test_a_pause_waits_for_a_slow_reader_in_the_mode_that_says_so(serve: Any, tasks: Any, depth: int) -> None:
    async with (
        serve(depth=depth) as served,
        served.engine.stream(PROMPT, seed=3, max_tokens=20, max_unread_tokens=4) as stream,
    ):
        await asyncio.sleep(LONG_S)
        waiting = tasks.start(served.engine.pause("wait"))
        await asyncio.sleep(LONG_S)
        assert not waiting.done()
        await served.engine.pause("keep")
        await waiting
        await anext(stream)
        num_plans = len(served.executor.plans)
        await asyncio.sleep(LONG_S)
        assert len(served.executor.plans) == num_plans, "reading does not set a paused engine going"
        await served.engine.resume()
        await stream.finish()
        assert tokens_of(stream.result) == [continuation(PROMPT, 20, seed=3)]


# Several choices


@pytest.mark.virtual_clock(seeds=1)
async def test_greedy_choices_have_one_limit(serve: Any, depth: int) -> None:
    async with (
        serve(depth=depth) as served,
        served.engine.stream(PROMPT, n=3, temperature=0.0, seed=3, max_tokens=20, max_unread_tokens=3) as stream,
    ):
        await asyncio.sleep(LONG_S)
        assert all(3 <= computed <= 3 + depth for computed in num_computed(stream))
        deltas = []
        async for delta in stream:
            deltas.append(delta)
            await asyncio.sleep(0.05)
        for index in range(3):
            assert as_ids([delta for delta in deltas if delta.index == index]) == continuation(PROMPT, 20, seed=3)
        assert [delta.finish_reason for delta in deltas].count("length") == 3


# Intervals


@pytest.mark.virtual_clock(seeds=1)
@pytest.mark.parametrize(
    ("interval", "sizes"), [(1, [1] * 10), (3, [1, 3, 3, 3]), (4, [1, 4, 4, 1]), (9, [1, 9]), (50, [1, 9])]
)
@pytest.mark.parametrize("said_by", ["engine", "call"])
async def test_a_stream_interval_collects_tokens_but_for_the_first_and_the_last(
    serve: Any, depth: int, interval: int, sizes: list[int], said_by: str
) -> None:
    config = {"stream_interval": interval if said_by == "engine" else 7}
    more = {} if said_by == "engine" else {"stream_interval": interval}
    async with serve(depth=depth, config=config) as served:
        deltas = await read_all(served.engine.stream(PROMPT, seed=3, max_tokens=10, **more))
        assert [len(delta.token_ids) for delta in deltas] == sizes
        assert as_ids(deltas) == continuation(PROMPT, 10, seed=3)
        assert deltas[-1].finish_reason == "length"


@pytest.mark.virtual_clock(seeds=1)
@pytest.mark.parametrize("limit", [1, 2, 4])
async def test_an_interval_above_the_limit_keeps_no_reader_waiting_for_ever(serve: Any, depth: int, limit: int) -> None:
    async with serve(depth=depth) as served:
        deltas = await read_all(
            served.engine.stream(PROMPT, seed=3, max_tokens=30, max_unread_tokens=limit, stream_interval=20)
        )
        assert as_ids(deltas) == continuation(PROMPT, 30, seed=3)
        assert all(len(delta.token_ids) <= limit + depth for delta in deltas)


# Many readers

NUM_FAST, NUM_FAST_TOKENS = 200, 24
NUM_SLOW, LIMIT = 40, 4


async def run_fast_ones(served: Any) -> tuple[list[float], list[set[int]]]:
    """When each of the fast readers is done, and whose tokens each plan of theirs computes."""
    loop = asyncio.get_running_loop()
    started_at, num_plans = loop.time(), len(served.executor.plans)

    async def read(seed: int) -> float:
        stream = served.engine.stream([10 + seed % 7] * 5, seed=seed, max_tokens=NUM_FAST_TOKENS)
        assert len(as_ids(await read_all(stream))) == NUM_FAST_TOKENS
        return loop.time() - started_at

    times = await asyncio.gather(*(read(seed) for seed in range(NUM_FAST)))
    fast = set(range(NUM_FAST))
    return times, [seeds & fast for seeds in served.seeds_of_plans(num_plans) if seeds & fast]


@pytest.mark.virtual_clock(seeds=1)
@pytest.mark.parametrize("kind", [*nightly("slow"), "stalled", *nightly("vanished")])
async def test_fast_readers_lose_nothing_to_others(serve: Any, tasks: Any, depth: int, kind: str) -> None:
    """There are rows for the fast ones alone. The others come first and hold some of them until they are blocked: the
    fast ones are at most as many steps later as it takes to compute what one of them may leave unread, what was read,
    and what is in flight then and when the rows are taken again."""
    config = {"max_num_seqs": NUM_FAST, "enable_prefix_caching": False}
    sizes = {"num_blocks": 1000, "block_size": 8}
    async with serve(depth=depth, config=config, **sizes) as served:
        times_alone, plans_alone = await run_fast_ones(served)

    async with serve(depth=depth, config=config, **sizes) as served:
        is_over = asyncio.Event()
        streams: list[Stream] = []

        async def read_badly(seed: int) -> None:
            async with served.engine.stream(
                [90] * 5, seed=1000 + seed, max_tokens=100, max_unread_tokens=LIMIT
            ) as stream:
                streams.append(stream)
                await anext(stream)
                if kind == "stalled":
                    await is_over.wait()
                while kind == "slow" and not is_over.is_set():
                    await asyncio.sleep(2.0)
                    await anext(stream)

        bad = [tasks.start(read_badly(seed)) for seed in range(NUM_SLOW)]
        await served.until(lambda: len(streams) == NUM_SLOW)
        times, plans = await run_fast_ones(served)
        num_unread = sum(sum(num_computed(stream)) for stream in streams)
        is_over.set()
        assert not [outcome for outcome in await tasks.end(*bad) if outcome is not None]

    late_s = max(now - alone for now, alone in zip(times, times_alone, strict=True))
    assert late_s <= (1 + LIMIT + 2 * depth) * 0.01 + 1e-9
    assert len(plans) <= len(plans_alone) + (1 + LIMIT + 2 * depth)
    # One token was read of each. Seconds apart, the slow ones read nothing more in that time.
    assert num_unread <= NUM_SLOW * (1 + LIMIT + depth)


@pytest.mark.virtual_clock
async def test_readers_at_any_pace_get_every_token_and_stay_within_their_limits(serve: Any, depth: int) -> None:
    """Few blocks and few rows: those that are blocked are preempted, and come back to their place."""
    rng = random.Random(f"{asyncio.get_running_loop().seed} {depth}")
    async with serve(depth=depth, num_blocks=16, block_size=4, max_model_len=60, config={"max_num_seqs": 3}) as served:
        open_streams: dict[Stream, tuple[list[int], int]] = {}

        def are_within_bounds() -> None:
            for stream, (num_read, limit) in open_streams.items():
                for read, computed in zip(num_read, num_computed(stream), strict=True):
                    assert computed <= read + limit + depth

        async def read(seed: int) -> None:
            n, limit, count = rng.randrange(1, 4), rng.randrange(1, 6), rng.randrange(1, 45)
            prompt = PROMPT[: rng.randrange(1, 8)]
            pause_s = rng.choice([0.0, 0.001, 0.02, 0.1])
            num_read = [0] * n
            stream = served.engine.stream(
                prompt, n=n, seed=seed, max_tokens=count, max_unread_tokens=limit, stream_interval=rng.choice([1, 3])
            )
            async with stream:
                open_streams[stream] = num_read, limit
                async for delta in stream:
                    num_read[delta.index] += len(delta.token_ids)
                    await asyncio.sleep(rng.random() * pause_s)
                del open_streams[stream]
            assert num_read == [count] * n
            assert tokens_of(stream.result) == [continuation(prompt, count, seed=seed, choice=i) for i in range(n)]

        with watch(served, are_within_bounds):
            await asyncio.gather(*(read(seed) for seed in range(12)))
        assert served.core.stats().preemptions
