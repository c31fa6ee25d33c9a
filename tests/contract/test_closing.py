"""Closing is the same of all: from whatever state, drained or not, again and again and at once, it closes."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Awaitable, Callable
from typing import Any

import anyio
import pytest
from contract.fakes import MAX_IN_FLIGHT
from contract.ways import BOTH_LOOPS, DEADLINE_S, error_of, has_load, reasons_of, told, until_async
from nightly import few, nightly
from waiting import until

from aioengine import Engine, EngineClosed, EngineDead, EngineOverloaded

pytestmark = pytest.mark.asyncio(loop_scope="module")

PROMPT = list(range(100, 140))


async def serving(engine: Engine) -> None:
    await engine.generate(PROMPT, max_tokens=2)


async def paused(engine: Engine) -> None:
    await engine.pause()


async def asleep(engine: Engine) -> None:
    await engine.sleep(2)


async def draining(engine: Engine) -> None:
    await engine.drain()


async def dead(engine: Engine) -> None:
    await engine.collective_rpc("contract.lose_device", ["the device is gone"])
    assert isinstance(await error_of(engine.generate(PROMPT)), EngineDead)


async def closed(engine: Engine) -> None:
    await engine.aclose()


async def closed_asleep(engine: Engine) -> None:
    await engine.sleep(1)
    await engine.aclose()


async def killed(engine: Engine) -> None:
    os.kill(engine._runtime.backend._child.pid, signal.SIGKILL)  # type: ignore[union-attr]


async def killed_asleep(engine: Engine) -> None:
    await engine.sleep(1)
    await killed(engine)


async def dead_asleep(engine: Engine) -> None:
    await killed_asleep(engine)
    await until(lambda: engine.health().status == "DEAD")


STATES: list[Callable[[Engine], Awaitable[None]]] = [serving, paused, asleep, draining, dead, closed, closed_asleep]
KILLED: list[Callable[[Engine], Awaitable[None]]] = [killed, killed_asleep, dead_asleep]


@pytest.mark.parametrize("drain", [*nightly(False), True])
@pytest.mark.parametrize(
    ("way", "bring"),
    few(
        [*(("in_process", bring) for bring in STATES), ("served", draining), ("served", dead), ("child", killed)],
        of=[*(("served", bring) for bring in STATES), *(("child", bring) for bring in KILLED)],
    ),
    scope="module",
)
async def test_it_closes_from_every_state(
    make_engine: Any, way: str, bring: Callable[[Engine], Awaitable[None]], drain: bool, quiet_log: None
) -> None:
    engine = await make_engine()
    with anyio.fail_after(DEADLINE_S):
        await bring(engine)
        await asyncio.gather(*(engine.aclose(drain=each) for each in (drain, drain, not drain)))
        await engine.aclose(drain=drain)
        await engine._runtime.core.when(lambda: False)  # what is awaited of one that has ended is over
    assert not engine._runtime.is_open
    assert isinstance(await error_of(engine.generate(PROMPT)), EngineClosed | EngineDead)
    with pytest.raises((EngineClosed, EngineDead)):
        async with engine:
            pytest.fail("it was entered")


@pytest.mark.parametrize("drain", [*nightly(False), True])
async def test_one_that_is_stalled_closes_once_its_drain_is_given_up(make_engine: Any, tasks: Any, drain: bool) -> None:
    engine = await make_engine("make_slow")
    async with engine.stream(PROMPT, max_tokens=3000, max_unread_tokens=1) as stream:
        await anext(stream)
        if drain:
            with anyio.move_on_after(0.02) as scope:
                await engine.aclose(drain=True)
            assert scope.cancelled_caught
        with anyio.fail_after(DEADLINE_S):
            await engine.aclose()
    assert not engine._runtime.is_open


@pytest.mark.parametrize("drain", [False, True])
async def test_one_that_was_never_started_is_closed(drain: bool) -> None:
    engine = Engine()
    await engine.aclose(drain=drain)
    await engine.aclose(drain=drain)


# Aborts


LONG: dict[str, Any] = {"max_tokens": 4000}


@pytest.fixture(scope="module")
def device() -> str:
    """Requests last for seconds unless they are ended."""
    return "make_slow"


async def is_at_rest(engine: Engine) -> bool:
    """Whether nothing has been computed for some turns."""
    counts = []
    for _ in range(3):
        counts.append(await engine.collective_rpc("contract.num_steps"))
        await asyncio.sleep(0)
    return counts[0] == counts[-1]


@BOTH_LOOPS
async def test_a_request_is_aborted_by_its_name_with_what_it_has(engine: Engine, tasks: Any) -> None:
    other = tasks.start(engine.generate(PROMPT, seed=1, max_tokens=30, request_id="other"))
    async with engine.stream(PROMPT, seed=2, request_id="mine", **LONG) as stream:
        first = await anext(stream)
        engine.abort("mine")
        rest = [delta async for delta in stream]
        assert stream.result.finished
        engine.abort("mine")
        engine.abort("nobody's")
    assert rest[-1].finish_reason == "abort"
    ids = [token for delta in [first, *rest] for token in delta.token_ids]
    assert ids == stream.result.outputs[0].token_ids
    assert told(await other)[3]
    assert reasons_of(other.result()) == ["length"]
    whole = await engine.generate(PROMPT, seed=2, max_tokens=len(ids))
    assert whole.outputs[0].token_ids == ids


async def test_all_of_a_name_end_and_all_choices_of_each(engine: Engine, tasks: Any) -> None:
    same = [tasks.start(engine.generate(PROMPT, seed=seed, n=2, request_id="same", **LONG)) for seed in range(3)]
    other = tasks.start(engine.generate(PROMPT, seed=9, max_tokens=40, request_id="another"))
    await until(has_load(engine, running=7))
    engine.abort("same")
    assert [reasons_of(output) for output in await tasks.end(*same)] == [["abort"] * 2] * 3
    assert reasons_of(await other) == ["length"]
    assert reasons_of(await engine.generate(PROMPT, max_tokens=2, request_id="same")) == ["length"]


async def test_a_request_is_aborted_before_it_has_run(engine: Engine, tasks: Any) -> None:
    await engine.pause()
    waiting = tasks.start(engine.generate(PROMPT, seed=3, n=2, request_id="waiting"))
    await until(has_load(engine, running=0, waiting=2))
    engine.abort("waiting")
    output = await waiting
    assert reasons_of(output) == ["abort"] * 2
    assert [completion.token_ids for completion in output.outputs] == [[], []]
    await engine.resume()


@BOTH_LOOPS
async def test_a_cancelled_generate_is_computed_no_further(engine: Engine, tasks: Any) -> None:
    started = tasks.start(engine.generate(PROMPT, seed=4, **LONG))
    await until(has_load(engine, running=1))
    started.cancel()
    [outcome] = await tasks.end(started)
    assert isinstance(outcome, asyncio.CancelledError)
    await until_async(lambda: is_at_rest(engine))


@BOTH_LOOPS
async def test_a_stream_that_is_left_early_is_computed_no_further(engine: Engine) -> None:
    async with engine.stream(PROMPT, seed=5, **LONG) as stream:
        await anext(stream)
    assert stream.result.outputs[0].finish_reason == "abort"
    await until_async(lambda: is_at_rest(engine))
    await until(lambda: engine.stats().kv_cache_usage == 0.0)


# At the door


@BOTH_LOOPS
async def test_a_full_engine_says_so_or_makes_wait_as_it_is_asked(make_engine: Any, tasks: Any) -> None:
    engine = await make_engine(max_waiting=2)
    await engine.pause()
    waiting = [tasks.start(engine.generate(PROMPT, seed=seed, max_tokens=3)) for seed in range(2)]
    await until(has_load(engine, waiting=2))
    with pytest.raises(EngineOverloaded, match="max_waiting") as refused:
        await engine.generate(PROMPT, on_full="raise")
    assert refused.value.retry_after_s > 0
    patient = tasks.start(engine.generate(PROMPT, seed=2, max_tokens=3))
    impatient = tasks.start(engine.generate(PROMPT, seed=3, request_id="impatient"))
    cancelled = tasks.start(engine.generate(PROMPT, seed=4))
    await until(has_load(engine, waiting=5))
    engine.abort("impatient")
    cancelled.cancel()
    assert reasons_of(await impatient) == ["abort"]
    await engine.resume()
    assert [reasons_of(await task) for task in (*waiting, patient)] == [["length"]] * 3
    assert (await engine.collective_rpc("contract.order"))[0] == [0, 1, 2]


async def test_there_is_room_again_when_those_that_waited_have_gone(make_engine: Any, tasks: Any) -> None:
    engine = await make_engine(max_waiting=1)
    await engine.pause()
    for seed in range(3):
        waiting = tasks.start(engine.generate(PROMPT, seed=seed, on_full="raise"))
        await until(has_load(engine, waiting=1))
        waiting.cancel()
        await tasks.end(waiting)
        await until(has_load(engine, waiting=0))
    await engine.resume()
    assert reasons_of(await engine.generate(PROMPT, max_tokens=2, on_full="raise")) == ["length"]


async def test_the_more_urgent_go_first_whatever_their_age(make_engine: Any, tasks: Any) -> None:
    engine = await make_engine(max_num_seqs=1)
    await engine.pause()
    ranks = [0, 5, -3, 0, -3, 2**31 - 1, -(2**31 - 1)]
    started = []
    for seed, priority in enumerate(ranks):
        started.append(tasks.start(engine.generate(PROMPT, seed=seed, priority=priority, max_tokens=3)))
        await until(has_load(engine, waiting=seed + 1))
    await engine.resume()
    await tasks.end(*started)
    [order] = await engine.collective_rpc("contract.order")
    assert order == sorted(range(len(ranks)), key=lambda seed: (ranks[seed], seed))


# Readers


@pytest.mark.parametrize("limit", [1, 5])
async def test_what_is_not_read_is_not_computed(engine: Engine, limit: int) -> None:
    async with engine.stream(PROMPT, seed=70 + limit, max_unread_tokens=limit, max_tokens=60) as stream:
        num_read = 0
        for _ in range(4):
            num_read += len((await anext(stream)).token_ids)
            await engine.generate(PROMPT, seed=7, max_tokens=3 * limit + 10)  # so many steps go by
            [num_sampled] = await engine.collective_rpc("contract.sampled", [70 + limit])
            assert num_read + limit <= num_sampled <= num_read + limit + MAX_IN_FLIGHT
        async for delta in stream:
            num_read += len(delta.token_ids)
    assert num_read == 60
    assert reasons_of(stream.result) == ["length"]


@BOTH_LOOPS
async def test_each_choice_is_held_back_by_its_own_reader_alone(engine: Engine) -> None:
    async with engine.stream(PROMPT, seed=80, n=2, max_unread_tokens=3, max_tokens=40) as stream:
        await engine.generate(PROMPT, seed=8, max_tokens=20)
        [num_sampled] = await engine.collective_rpc("contract.sampled", [80])
        assert 2 * 3 <= num_sampled <= 2 * (3 + MAX_IN_FLIGHT)
        output = await stream.finish()
    whole = await engine.generate(PROMPT, seed=80, n=2, max_tokens=40)
    assert told(output) == told(whole)


async def test_what_a_stalled_reader_held_is_free_when_it_leaves_though_no_step_follows(engine: Engine) -> None:
    async with engine.stream(PROMPT, seed=84, max_unread_tokens=1, max_tokens=40) as stalled:
        await engine.generate(PROMPT, seed=8, max_tokens=20)
        await until(has_load(engine, running=0))
        assert engine.stats().kv_cache_usage > 0
    assert reasons_of(stalled.result) == ["abort"]
    await until(lambda: engine.stats().kv_cache_usage == 0.0)
