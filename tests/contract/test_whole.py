"""Pausing, draining, forgetting: what is asked of the whole engine, whoever's process it is in."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from contract.ways import BOTH_LOOPS, has_load, ids_of, reasons_of, same_error, told
from nightly import nightly
from waiting import until

from aioengine import Engine, EngineClosed

pytestmark = pytest.mark.asyncio(loop_scope="module")

PROMPT = list(range(100, 149))


@pytest.fixture(scope="module")
def device() -> str:
    return "make_slow"


# Pause


@BOTH_LOOPS
async def test_a_kept_request_stops_where_it_is_and_goes_on_from_there(engine: Engine, tasks: Any) -> None:
    running = tasks.start(engine.generate(PROMPT, seed=1, max_tokens=60))
    await until(has_load(engine, running=1))
    await engine.pause()
    [num_sampled] = await engine.collective_rpc("contract.sampled", [1])
    later = tasks.start(engine.generate(PROMPT, seed=2, max_tokens=3))
    await until(has_load(engine, running=1, waiting=1))
    await engine.pause("keep")
    assert await engine.collective_rpc("contract.sampled", [1]) == [num_sampled]
    assert await engine.collective_rpc("contract.sampled", [2]) == [0]
    assert not running.done()
    await engine.resume()
    first, second = await running, await later
    assert reasons_of(first) == reasons_of(second) == ["length"]
    assert told(first) == told(await engine.generate(PROMPT, seed=1, max_tokens=60))


async def test_a_paused_engine_answers_and_does_what_it_is_told(engine: Engine) -> None:
    await engine.pause()
    assert engine.health().status == "ALIVE"
    assert not await engine.is_sleeping()
    assert await engine.supported_tasks() == ("generate",)
    await engine.execute_dummy_batch()
    await engine.reset_prefix_cache()
    await engine.resume()


# Drain


@BOTH_LOOPS
async def test_a_drain_serves_all_that_came_before_and_refuses_what_comes_after(engine: Engine, tasks: Any) -> None:
    started = [tasks.start(engine.generate(PROMPT, seed=seed, max_tokens=20)) for seed in (11, 12)]
    await until(has_load(engine, running=2))
    draining = tasks.start(engine.drain())
    await asyncio.sleep(0)
    with pytest.raises(EngineClosed, match="draining"):
        await engine.generate(PROMPT)
    await draining
    assert all(task.done() for task in started)
    assert [reasons_of(await task) for task in started] == [["length"]] * 2
    await engine.drain()
    with pytest.raises(EngineClosed, match="draining"):
        await engine.generate(PROMPT)
    await engine.resume()
    assert reasons_of(await engine.generate(PROMPT, max_tokens=2)) == ["length"]


async def test_a_drain_sets_a_paused_engine_going(engine: Engine, tasks: Any) -> None:
    held = [tasks.start(engine.generate(PROMPT, seed=13, max_tokens=30))]
    await until(has_load(engine, running=1))
    await engine.pause()
    held.append(tasks.start(engine.generate(PROMPT, seed=13, max_tokens=3)))
    await until(has_load(engine, waiting=1))
    await engine.drain()
    assert all(task.done() for task in held)
    assert [reasons_of(await task) for task in held] == [["length"]] * 2
    await engine.resume()


# Forgetting


async def test_a_forgotten_prefix_is_computed_anew(engine: Engine) -> None:
    async def ask() -> Any:
        return await engine.generate(PROMPT, seed=15, max_tokens=2, cache_salt="forget me")

    await engine.reset_prefix_cache()
    assert [(await ask()).num_cached_tokens for _ in range(2)] == [0, 48]
    before = await ask()
    assert await engine.reset_prefix_cache() == 3
    assert await engine.reset_prefix_cache() == 0
    again = await ask()
    assert (again.num_cached_tokens, told(again)) == (0, told(before))


@pytest.mark.parametrize("times", [1, 4])
async def test_a_running_request_that_computes_its_cache_anew_brings_the_same(
    engine: Engine, tasks: Any, times: int
) -> None:
    sampling: dict[str, Any] = {"seed": 14, "max_tokens": 40, "logprobs": 1, "prompt_logprobs": 1}
    whole = told(await engine.generate(PROMPT, **sampling))
    before = engine.stats().preemptions
    async with engine.stream(PROMPT, max_unread_tokens=3, **sampling) as stream:
        for _ in range(times):
            await anext(stream)
            assert isinstance(await engine.reset_prefix_cache(reset_running=True), int)
        output = await stream.finish()
    assert told(output) == whole
    assert output.metrics is not None
    assert output.metrics.num_preemptions >= 1
    assert engine.stats().preemptions > before


# Sleep


@pytest.mark.parametrize("mode", ["abort", "wait", "keep"])
@pytest.mark.parametrize("level", [*nightly(0), 1, *nightly(2)])
async def test_after_sleep_equal_requests_bring_equal_outputs(
    engine: Engine, tasks: Any, level: Any, mode: Any
) -> None:
    whole = await engine.generate(PROMPT, seed=21, max_tokens=40)
    running = tasks.start(engine.generate(PROMPT, seed=21, max_tokens=40))
    await until(has_load(engine, running=1))
    await engine.sleep(level, mode=mode)
    assert await engine.is_sleeping()
    assert running.done() is (mode != "keep")
    later = tasks.start(engine.generate(PROMPT, seed=22, max_tokens=4))
    await until(has_load(engine, waiting=2 if mode == "keep" else 1))
    assert await engine.is_sleeping()
    await engine.wake_up()
    assert not await engine.is_sleeping()
    output, after = await running, await later
    assert reasons_of(output) == (["abort"] if mode == "abort" else ["length"])
    assert ids_of(output)[0] == ids_of(whole)[0][: len(ids_of(output)[0])]
    assert (after.num_cached_tokens, reasons_of(after)) == (
        0 if mode != "keep" else after.num_cached_tokens,
        ["length"],
    )
    assert told(await engine.generate(PROMPT, seed=21, max_tokens=40)) == told(whole)


@pytest.mark.parametrize("level", [1, 2])
async def test_it_wakes_up_part_by_part(engine: Engine, tasks: Any, level: Any) -> None:
    await engine.sleep(level)
    waiting = tasks.start(engine.generate(PROMPT, seed=23, max_tokens=4))
    for tags in ("weights", [], ["scheduling"], ["weights"]):
        await engine.wake_up(tags)
        assert await engine.is_sleeping()
    assert not waiting.done()
    await engine.wake_up(["kv_cache"])
    assert not await engine.is_sleeping()
    assert reasons_of(await waiting) == ["length"]


async def test_at_level_0_scheduling_alone_is_to_be_woken(engine: Engine) -> None:
    await engine.sleep(0)
    await engine.wake_up(["weights", "kv_cache"])
    assert await engine.is_sleeping()
    await engine.wake_up(["scheduling"])
    assert not await engine.is_sleeping()


@BOTH_LOOPS
async def test_sleeping_and_waking_twice_is_as_good_as_once(engine: Engine) -> None:
    whole = told(await engine.generate(PROMPT, seed=24, max_tokens=10))
    await engine.wake_up()
    for _ in range(2):
        await engine.sleep(1)
        await engine.sleep(1)
        await engine.sleep(2)
        await engine.wake_up()
        await engine.wake_up()
        assert told(await engine.generate(PROMPT, seed=24, max_tokens=10)) == whole


async def test_only_waking_up_lets_waiting_requests_go_on_and_they_can_be_aborted(engine: Engine, tasks: Any) -> None:
    await engine.sleep(1)
    await engine.resume()
    assert await engine.is_sleeping()
    waiting = tasks.start(engine.generate(PROMPT, seed=25, max_tokens=2))
    aborted = tasks.start(engine.generate(PROMPT, seed=26, request_id="asleep"))
    await until(has_load(engine, waiting=2))
    engine.abort("asleep")
    assert reasons_of(await aborted) == ["abort"]
    assert await engine.collective_rpc("contract.sampled", [25]) == [0]
    await engine.wake_up()
    assert reasons_of(await waiting) == ["length"]


async def test_what_a_sleeping_engine_cannot_do_it_says(engine: Engine, reference: Engine) -> None:
    for each in (engine, reference):
        await each.sleep(2)
    await same_error(engine, reference, lambda each: each.execute_dummy_batch())
    for each in (engine, reference):
        await each.wake_up()
        await each.execute_dummy_batch()


@BOTH_LOOPS
@pytest.mark.parametrize("is_drained", [*nightly(False), True], ids=["closed", "drained"])
async def test_a_sleeping_engine_can_be_closed(make_engine: Any, tasks: Any, is_drained: bool) -> None:
    engine = await make_engine()
    await engine.sleep(1)
    waiting = tasks.start(engine.generate(PROMPT))
    await until(has_load(engine, waiting=1))
    await engine.aclose(drain=is_drained)
    [outcome] = await tasks.end(waiting)
    if is_drained:  # it is woken: what was accepted is served
        assert outcome.finished
    else:
        assert isinstance(outcome, EngineClosed)
