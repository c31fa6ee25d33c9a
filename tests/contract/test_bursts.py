"""Many requests at once, and many ends: none of them holds the loop, and all stay in order.

Over the way "served" both sides are on the test's loop, so that its turns are the engine's, too.
"""

from __future__ import annotations

import asyncio
import itertools
import random
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from contract.conftest import MakeEngine
from contract.ways import error_of, has_load
from nightly import few, nightly
from turn_probe import LONGEST_S, PIECES_A_TURN, TurnProbe, few_a_turn
from waiting import until

from aioengine import Engine, EngineClosed, InvalidRequest
from aioengine.core.engine_core import EngineCore
from aioengine.scheduler.sequence import Sequence

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest.fixture(scope="module", params=[*nightly("in_process"), "served", *nightly("child")])
def way(request: pytest.FixtureRequest) -> str:
    return request.param


JAPANESE = "昔々あるところに小さな狐と賢い兎が住んでいて毎朝川のほとりで話をしました。"
ROOMY = {"max_model_len": 8192, "max_waiting": 4096, "max_num_seqs": 64, "kv_cache_memory_bytes": 1024}
NESTED = [[[["a"] * 4] * 4] * 16] * 16

BURSTS: dict[str, tuple[int, Callable[[int], Any], dict[str, Any]]] = {
    "Japanese": (300, lambda i: f"{i}{JAPANESE * 27}"[:1000], {}),
    "stop strings": (1000, lambda i: f"Once {i}", {"stop": [f"{i} upon a time there was" for i in range(200)]}),
    "bad words": (300, lambda i: f"Once {i}", {"bad_words": [f"{i} upon a time there was a" for i in range(12)]}),
    "chats": (100, lambda i: [{"role": "user", "content": "Hi"}], {"chat_template_kwargs": {"a": NESTED}}),
}
"""How many, their prompts, their parameters: each would hold the loop for 80 to 300 ms if all came in one turn."""


def begun(engine: Engine, calls: list[tuple[Any, dict[str, Any]]]) -> list[asyncio.Task[Any]]:
    loop = asyncio.get_running_loop()
    return [loop.create_task(engine.generate(prompt, **params)) for prompt, params in calls]


@pytest.mark.parametrize("name", few(["stop strings"], of=BURSTS))
async def test_no_turn_is_long_however_many_come_and_end(
    name: str, make_engine: MakeEngine, record_property: Callable[[str, object], None]
) -> None:
    count, prompt, params = BURSTS[name]
    engine = await make_engine(**ROOMY)
    await engine.generate([{"role": "user", "content": "Hi"}], max_tokens=1)  # the first chat imports what renders it
    await engine.pause()
    calls = [(prompt(i), params) for i in range(count)]
    with TurnProbe() as coming:
        tasks = begun(engine, calls)
        await until(lambda: engine._running().core.num_unstarted == count)
        await until(has_load(engine, waiting=count))
    with TurnProbe() as ending:
        engine.abort_all()
        outputs = await asyncio.gather(*tasks)
        await until(has_load(engine, waiting=0))
    assert {output.outputs[0].finish_reason for output in outputs} == {"abort"}
    record_property("longest_ms", [round(max(probe.cpu_s) * 1e3, 1) for probe in (coming, ending)])
    assert max(coming.cpu_s) < LONGEST_S
    assert max(ending.cpu_s) < LONGEST_S


async def test_refusals_are_spread_too(make_engine: MakeEngine) -> None:
    engine = await make_engine(**ROOMY)
    with TurnProbe() as probe:
        many = [("Once", {"allowed_token_ids": list(range(1000)) * 200})] * 64
        errors = await asyncio.gather(*begun(engine, many), return_exceptions=True)
    assert {type(error) for error in errors} == {InvalidRequest}
    assert max(probe.cpu_s) < LONGEST_S


def live_in(core: Any) -> dict[int, Sequence]:
    """The sequences that a core has, in this process or another."""
    live: dict[int, Sequence] = core._live if isinstance(core, EngineCore) else core._mirrors.live
    return live


async def test_they_are_taken_in_order_a_few_a_turn(make_engine: MakeEngine) -> None:
    engine = await make_engine(**ROOMY)
    await engine.pause()
    core = engine._running().core
    with few_a_turn():
        tasks = begun(engine, [(f"Once {i}", {"seed": i}) for i in range(60)])
        counts = [0]
        while core.num_unstarted < 60:
            await asyncio.sleep(0)
            counts.append(core.num_unstarted)
        assert [sequence.request.seed for sequence in live_in(core).values()] == list(range(60))
        assert max(after - before for before, after in itertools.pairwise(counts)) <= PIECES_A_TURN
        engine.abort_all()
        await asyncio.gather(*tasks)


async def test_abort_all_ends_all_at_once_and_tells_them_a_few_a_turn(make_engine: MakeEngine) -> None:
    engine = await make_engine(**ROOMY)
    await engine.pause()
    core: Any = engine._running().core
    tasks = begun(engine, [(f"Once {i}", {"n": 2, "temperature": 1.0}) for i in range(30)])
    async with engine.stream("Once more") as stream:
        await until(lambda: core.num_unstarted == 61)
        with few_a_turn() as turns:
            engine.abort_all()
            engine.abort_all()
            assert core.num_unstarted == 0
            assert not live_in(core)
            assert 0 < len(core._endings._pending) < 61
            stream.abort()
            assert stream.result.finished, "whoever asks for the end of one hears it at once"
            assert stream.result.outputs[0].finish_reason == "abort"
            outputs = await asyncio.gather(*tasks)
            await until(lambda: not turns.is_busy)
    assert {choice.finish_reason for output in outputs for choice in output.outputs} == {"abort"}
    assert core.is_drained
    await engine.resume()
    assert (await engine.generate("Once", max_tokens=2)).finished
    await engine.drain()


async def abort_each(engine: Engine) -> None:
    for request_id in map(str, range(20)):
        engine.abort(request_id)


async def abort_all(engine: Engine) -> None:
    engine.abort_all()


@pytest.mark.parametrize(
    ("end", "reason"),
    [
        (abort_each, "abort"),
        (abort_all, "abort"),
        (lambda engine: engine.pause("abort"), "abort"),
        (lambda engine: engine.drain(), "length"),
        (lambda engine: engine.aclose(drain=True), "length"),
    ],
    ids=["abort", "abort_all", "pause", "drain", "aclose"],
)
async def test_what_ends_or_drains_all_does_so_with_those_that_wait_for_a_turn(
    end: Callable[[Engine], Awaitable[None]], reason: str, make_engine: MakeEngine
) -> None:
    engine = await make_engine(**ROOMY)
    with few_a_turn() as turns:
        tasks = begun(
            engine, [(f"Once {i}", {"request_id": str(i), "max_tokens": 2, "ignore_eos": True}) for i in range(20)]
        )
        await asyncio.sleep(0)
        assert turns._waiting
        await end(engine)
        outputs = await asyncio.gather(*tasks)
    assert [output.outputs[0].finish_reason for output in outputs] == [reason] * 20


async def test_seeds_of_an_engines_seed_do_not_depend_on_turns(make_engine: MakeEngine) -> None:
    drawn = []
    for is_cancelled in (False, True):
        engine = await make_engine(**ROOMY)
        engine._seeds = random.Random(7)
        with few_a_turn():
            tasks = begun(engine, [("Once", {"max_tokens": 4, "temperature": 1.0}) for _ in range(20)])
            await asyncio.sleep(0)
            for task in tasks[:10] if is_cancelled else ():
                task.cancel()
            outputs = await asyncio.gather(*tasks, return_exceptions=True)
        drawn.append([output.outputs[0].token_ids for output in outputs[10:]])
    assert drawn[0] == drawn[1]


async def test_all_hear_of_the_end_where_they_wait_for_a_turn_a_place_or_their_tokens(make_engine: MakeEngine) -> None:
    engine = await make_engine(**{**ROOMY, "max_waiting": 10})
    await engine.pause()
    core = engine._running().core
    with few_a_turn() as turns:
        tasks = begun(engine, [(f"Once {i}", {}) for i in range(40)])
        await until(lambda: core.num_unstarted == 10)
        tasks += begun(engine, [(f"Later {i}", {}) for i in range(40)])
        await asyncio.sleep(0)
        assert turns._waiting
        tasks[20].cancel()
        tasks[60].cancel()
        await engine.aclose()
        await until(lambda: all(task.done() for task in tasks))
    heard = [await error_of(task) for place, task in enumerate(tasks) if place not in (20, 60)]
    assert {type(error) for error in heard} == {EngineClosed}
    assert tasks[20].cancelled()
    assert tasks[60].cancelled()
