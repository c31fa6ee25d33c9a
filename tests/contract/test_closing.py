"""Closing is the same of all: from whatever state, drained or not, again and again and at once, it closes."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Awaitable, Callable
from typing import Any

import anyio
import pytest
from contract.ways import DEADLINE_S, error_of
from nightly import few, nightly
from waiting import until

from aioengine import Engine, EngineClosed, EngineDead

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
