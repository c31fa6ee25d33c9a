"""Control calls that meet: falling asleep, waking up, giving up and waiting, in any order, leave a sound engine."""

from __future__ import annotations

import asyncio
from typing import Any

import anyio
import numpy as np
import pytest
from contract.ways import error_of, ids_of
from nightly import nightly
from waiting import until

from aioengine import Engine, InvalidRequest

PROMPT = [5, 6, 7, 8]

pytestmark = pytest.mark.asyncio(loop_scope="module")


async def say(engine: Engine) -> Any:
    with anyio.fail_after(30):
        return ids_of(await engine.generate(PROMPT, seed=1, max_tokens=12))


@pytest.mark.parametrize("level", [1, *nightly(0, 2)])
@pytest.mark.parametrize("mode", [*nightly("abort"), "wait", "keep"])
async def test_waking_up_at_any_moment_of_falling_asleep_wakes(
    engine: Engine, tasks: Any, level: Any, mode: Any
) -> None:
    before = await say(engine)
    for turns in range(25):
        falling = tasks.start(engine.sleep(level, mode=mode))
        for _ in range(turns):
            await asyncio.sleep(0)
        await engine.wake_up()
        await tasks.end(falling)
        await engine.wake_up()  # should the sleep have come behind the first one
        assert not await engine.is_sleeping()
        assert await say(engine) == before


@pytest.mark.parametrize("level", [*nightly(0), 1, *nightly(2)])
async def test_a_sleep_that_is_cancelled_at_any_moment_is_undone_by_waking_up(
    engine: Engine, tasks: Any, level: Any
) -> None:
    before = await say(engine)
    for turns in range(25):
        falling = tasks.start(engine.sleep(level))
        for _ in range(turns):
            await asyncio.sleep(0)
        falling.cancel()
        await tasks.end(falling)
        await engine.wake_up()
        assert not await engine.is_sleeping()
        assert await say(engine) == before


async def test_a_sleep_that_is_cancelled_while_it_waits_gives_nothing_back_and_holds(
    make_engine: Any, tasks: Any
) -> None:
    engine = await make_engine("make_slow")
    long = tasks.start(engine.generate(PROMPT, seed=2, max_tokens=3000, ignore_eos=True))
    await until(lambda: engine.stats().running == 1)
    falling = tasks.start(engine.sleep(1, mode="wait"))
    for _ in range(50):
        await asyncio.sleep(0)
    falling.cancel()
    await tasks.end(falling)
    assert await engine.is_sleeping()
    held = tasks.start(say(engine))
    engine.abort_all()
    await tasks.end(long)
    assert await engine.collective_rpc("contract.calls") == [[]], "the device was not told to sleep"
    await engine.wake_up()
    await tasks.end(held)
    assert not await engine.is_sleeping()


async def test_a_deeper_sleep_that_is_refused_leaves_it_as_deep_as_it_was(make_engine: Any) -> None:
    engine = await make_engine()
    await engine.update_weights(tensors={"model.norm.weight": np.ones(4, np.float32)})
    before = await say(engine)
    await engine.sleep(1)
    assert isinstance(await error_of(engine.sleep(2)), InvalidRequest)
    assert await engine.is_sleeping()
    await engine.wake_up()
    assert not await engine.is_sleeping()
    assert await say(engine) == before


async def test_resuming_and_waking_up_pass_all_who_wait_for_them(make_engine: Any, tasks: Any) -> None:
    engine = await make_engine("make_slow")
    async with engine.stream(PROMPT, max_tokens=500, ignore_eos=True, max_unread_tokens=1):  # nobody reads
        await until(lambda: engine.stats().waiting + engine.stats().running == 1)
        sleepers = [tasks.start(engine.sleep(0, mode="wait")) for _ in range(100)]
        pauses = [tasks.start(engine.pause("wait")) for _ in range(100)]
        for _ in range(50):
            await asyncio.sleep(0)
        for given_up in (*sleepers[:50], *pauses[:50]):
            given_up.cancel()
        with anyio.fail_after(30):
            while not all(each.done() for each in (*sleepers, *pauses)):  # some waited for their turn to be sent
                await engine.wake_up()
                await engine.resume()
                await asyncio.sleep(0)
            await engine.wake_up()
            await engine.resume()
    assert not await engine.is_sleeping()
    await say(engine)


async def test_a_result_that_is_too_large_fails_its_caller_alone(engine: Engine, way: str, tasks: Any) -> None:
    beside = tasks.start(say(engine))
    if way != "in_process":
        for name, arguments in (("contract.repeat", ("x", 17 * 2**20)), ("contract.echo", ("x" * 17 * 2**20,))):
            error = await error_of(engine.collective_rpc(name, arguments))
            assert isinstance(error, InvalidRequest)
            assert "cannot be sent" in str(error)
    assert await tasks.end(beside) == [await say(engine)]


@pytest.mark.parametrize("value", ["\ud800", "a\udfffb"])
async def test_a_name_that_has_no_utf8_form_is_refused_and_leaves_nothing(engine: Engine, value: str) -> None:
    error = await error_of(engine.generate(PROMPT, max_tokens=2, request_id=value))
    assert isinstance(error, InvalidRequest)
    assert error.param == "request_id"
    with anyio.fail_after(30):
        await engine.drain()
        await engine.resume()
    await say(engine)
