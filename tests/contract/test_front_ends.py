"""Several engines beside each other, and several front ends on one: each has its own, and no other's."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from contract.ways import BOTH_LOOPS, Opener, has_load, reasons_of, told
from waiting import until

from aioengine import ConfigError, Engine, EngineClosed, EngineDead, EngineOverloaded, InternalError, InvalidRequest

pytestmark = pytest.mark.asyncio(loop_scope="module")
SERVED = pytest.mark.parametrize("way", ["served", "tcp"], indirect=True)

PROMPT = list(range(100, 140))
LONG: dict[str, Any] = {"max_tokens": 4000}


@pytest.fixture(scope="module")
def device() -> str:
    return "make_slow"


@pytest_asyncio.fixture(loop_scope="module")
async def pair(opener: Opener, device: str) -> AsyncIterator[tuple[Engine, Engine]]:
    """Two front ends of one engine."""
    serving = await opener.serve(device)
    yield await opener.connect(serving), await opener.connect(serving)


async def test_engines_beside_each_other_share_nothing(make_engine: Any, make_local: Any, tasks: Any) -> None:
    engines = [await make_engine("make_slow"), await make_engine("make_slow"), await make_local("make_slow")]
    running = [tasks.start(engine.generate(PROMPT, seed=1, request_id="same", **LONG)) for engine in engines]
    for engine in engines:
        await until(has_load(engine, running=1))
    engines[0].abort("same")
    assert reasons_of(await running[0]) == ["abort"]
    await engines[1].aclose()
    assert [type(outcome) for outcome in await tasks.end(running[1])] == [EngineClosed]
    assert not running[2].done()
    outputs = [await engine.generate(PROMPT, seed=2, max_tokens=5) for engine in (engines[0], engines[2])]
    assert told(outputs[0]) == told(outputs[1])
    assert [engine.stats().finished["abort"] for engine in (engines[0], engines[2])] == [1, 0]
    engines[2].abort_all()


@BOTH_LOOPS
@SERVED
async def test_equal_names_of_two_front_ends_do_not_collide(pair: tuple[Engine, Engine], tasks: Any) -> None:
    first, second = pair
    running = [tasks.start(each.generate(PROMPT, seed=3, request_id="same", **LONG)) for each in pair]
    for each in pair:
        await until(has_load(each, running=2))
    first.abort("same")
    assert reasons_of(await running[0]) == ["abort"]
    await until(has_load(second, running=1))
    assert not running[1].done()
    first.abort_all()
    first.abort("same")
    assert reasons_of(await second.generate(PROMPT, max_tokens=3)) == ["length"]
    assert not running[1].done()
    second.abort("same")
    assert reasons_of(await running[1]) == ["abort"]


@SERVED
async def test_a_broken_connection_ends_calls_and_requests_though_the_log_raises(
    opener: Opener, tasks: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = await opener.connect(await opener.serve("make_slow"))
    opener.forget(engine)
    running = tasks.start(engine.generate(PROMPT, **LONG))
    await until(has_load(engine, running=1))
    pausing = tasks.start(engine.pause("wait"))
    await asyncio.sleep(0)
    assert engine._runtime is not None
    monkeypatch.setattr(engine._runtime.core, "_take_outputs", lambda body: body.no_such_attribute)
    monkeypatch.setattr(logging.getLogger("aioengine"), "filters", [lambda record: record.no_such_attribute])
    assert [type(outcome) for outcome in await tasks.end(running, pausing)] == [EngineDead, EngineDead]
    with pytest.raises(InternalError, match="no_such_attribute"):
        await engine.aclose()


@SERVED
async def test_each_front_end_has_its_own_outputs(pair: tuple[Engine, Engine], reference: Engine) -> None:
    async def ask(each: Engine, seed: int) -> Any:
        return told(await each.generate(PROMPT[: 1 + seed % 30], seed=seed, n=1 + seed % 2, max_tokens=5, logprobs=1))

    here = await asyncio.gather(*(ask(pair[seed % 2], seed) for seed in range(40)))
    assert here == await asyncio.gather(*(ask(reference, seed) for seed in range(40)))


@SERVED
async def test_a_front_end_that_leaves_takes_its_own_requests_along_and_no_others(
    pair: tuple[Engine, Engine], tasks: Any
) -> None:
    first, second = pair
    whole = await second.generate(PROMPT, seed=4, max_tokens=60)
    ours = tasks.start(second.generate(PROMPT, seed=4, max_tokens=60))
    theirs = tasks.start(first.generate(PROMPT, seed=5, **LONG))
    await until(has_load(second, running=2))
    await first.aclose()
    assert [type(outcome) for outcome in await tasks.end(theirs)] == [EngineClosed]
    assert told(await ours) == told(whole)
    await until(has_load(second, running=0))
    assert second.health().status == "ALIVE"


@SERVED
async def test_numbers_of_requests_are_each_front_ends_own_and_those_of_the_device_everyones(
    pair: tuple[Engine, Engine],
) -> None:
    first, second = pair
    for seed in range(3):
        await first.generate(PROMPT, seed=seed, max_tokens=10)
    await second.generate(PROMPT, seed=9, max_tokens=10)
    await until(lambda: first.stats().generation_tokens == second.stats().generation_tokens == 40)
    assert first.stats().finished["length"] == 3
    assert second.stats().finished["length"] == 1


@SERVED
async def test_a_pause_of_one_front_end_holds_for_all(pair: tuple[Engine, Engine], tasks: Any) -> None:
    first, second = pair
    await first.pause()
    waiting = tasks.start(second.generate(PROMPT, seed=6, max_tokens=3))
    await until(has_load(first, waiting=1))
    await second.sleep(1, mode="keep")
    assert await first.is_sleeping()
    await first.wake_up()
    assert not waiting.done()
    await second.resume()
    assert reasons_of(await waiting) == ["length"]
    running = tasks.start(second.generate(PROMPT, seed=7, **LONG))
    await until(has_load(first, running=1))
    await first.pause("abort")
    assert reasons_of(await running) == ["abort"]
    await first.resume()


@BOTH_LOOPS
@SERVED
async def test_front_ends_come_and_go_and_nothing_of_them_is_left(opener: Opener, tasks: Any) -> None:
    serving = await opener.serve()
    stays = await opener.connect(serving)
    num_tasks = len(asyncio.all_tasks())
    for seed in range(12):
        async with asyncio.timeout(20):
            passing = await Engine.connect(serving.address)
            assert reasons_of(await passing.generate(PROMPT, seed=seed, max_tokens=3)) == ["length"]
            await passing.aclose()
    await until(lambda: len(asyncio.all_tasks()) == num_tasks)
    assert reasons_of(await stays.generate(PROMPT, max_tokens=3)) == ["length"]


@BOTH_LOOPS
@SERVED
async def test_the_end_of_a_served_engine_is_everyones(
    opener: Opener, tasks: Any, device: str, quiet_log: None
) -> None:
    serving = await opener.serve(device)
    pair = [await opener.connect(serving), await opener.connect(serving)]
    running = [tasks.start(each.generate(PROMPT, seed=7, **LONG)) for each in pair]
    await until(has_load(pair[0], running=2))
    await pair[0].collective_rpc("contract.lose_device", ["it is gone"])
    errors = await tasks.end(*running)
    assert [type(error) for error in errors] == [EngineDead] * 2
    assert str(errors[0]) == str(errors[1])
    assert [each.health().status for each in pair] == ["DEAD"] * 2


@SERVED
async def test_a_served_engine_that_is_closed_is_dead_for_those_who_did_not_close_it(
    opener: Opener, tasks: Any, device: str, quiet_log: None
) -> None:
    serving = await opener.serve(device)
    engine = await opener.connect(serving)
    running = tasks.start(engine.generate(PROMPT, **LONG))
    await until(has_load(engine, running=1))
    await serving.aclose()
    opener.forget(serving)
    [error] = await tasks.end(running)
    assert isinstance(error, EngineDead)
    assert "closed" in str(error)


@pytest.mark.parametrize("scheme", ["ipc", "tcp"])
async def test_who_connects_where_nobody_serves_is_told_so(scheme: str, tmp_path: Path) -> None:
    address = f"ipc://{tmp_path}/none.sock" if scheme == "ipc" else "tcp://127.0.0.1:9"
    with pytest.raises((ConfigError, EngineDead), match=r"none\.sock|127\.0\.0\.1"):
        await Engine.connect(address, timeout_s=5.0)


async def test_what_names_files_is_not_taken_from_an_address_that_any_user_can_reach(tmp_path: Path) -> None:
    opener = Opener("tcp")
    try:
        engine = await opener.open()
        for work in (
            engine.save_sharded_state(tmp_path / "saved"),
            engine.update_weights(tmp_path),
            engine.stop_profile(tmp_path / "trace.json"),
        ):
            with pytest.raises(InvalidRequest, match="any user of the machine"):
                await work
        assert os.listdir(tmp_path) == []
        assert (await engine.generate([5, 6], max_tokens=3)).finished
    finally:
        await opener.aclose()


async def test_what_a_front_end_holds_is_bounded_also_where_its_readers_stall() -> None:
    opener = Opener("served")
    async with contextlib.AsyncExitStack() as streams:
        streams.push_async_callback(opener.aclose)
        engine = await opener.open(max_waiting=2, max_num_seqs=2)

        async def stall() -> None:
            stream = engine.stream([5, 6], max_tokens=100, ignore_eos=True, max_unread_tokens=1)
            await streams.enter_async_context(stream)
            await stream.__anext__()

        for _ in range(32):
            await stall()
        with pytest.raises(EngineOverloaded, match="have not ended"):
            await stall()
