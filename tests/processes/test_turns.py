"""`Turns`: pieces of work that come together are spread over turns of the loop, in order, and nothing is lost."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from aioengine.processes.turns import Turns, sleep_on_time, turns_here
from aioengine.testing import VirtualClockLoop

BUDGET_S = 3.0


class Work:
    """Pieces of work by a clock that they alone move: who did one, and in which turn of the loop."""

    def __init__(self) -> None:
        self.now = 0.0
        self.turns = Turns(budget_s=BUDGET_S, clock=lambda: self.now)
        self.done: list[Any] = []
        self.spent: dict[int, float] = {}
        """By turns of the loop."""
        self.num_turns = 0
        loop: Any = asyncio.get_running_loop()
        run_turn = loop._run_once

        def count_turn() -> None:
            self.num_turns += 1
            run_turn()

        loop._run_once = count_turn

    async def do(self, who: Any, cost_s: float = 1.0) -> None:
        await self.turns.take()
        self.now += cost_s
        self.spent[self.num_turns] = self.spent.get(self.num_turns, 0.0) + cost_s
        self.done.append(who)

    async def until(self, is_so: Callable[[], bool]) -> None:
        for _ in range(10_000):
            if is_so():
                return
            await asyncio.sleep(0)
        raise AssertionError("it never came to be so")

    async def finish(self, tasks: list[asyncio.Task[None]]) -> None:
        await self.until(lambda: all(task.done() for task in tasks))
        assert not self.turns._waiting
        await self.until(lambda: not self.turns._is_begun)  # nothing goes on when there is nothing to do


def started(*work: Coroutine[Any, Any, None]) -> list[asyncio.Task[None]]:
    loop = asyncio.get_running_loop()
    return [loop.create_task(each) for each in work]


@pytest.fixture
async def work() -> Work:
    return Work()


async def test_who_comes_alone_is_not_suspended(work: Work) -> None:
    with pytest.raises(StopIteration):
        work.do("alone").send(None)
    assert work.done == ["alone"]


@pytest.mark.parametrize(("cost_s", "a_turn"), [(1.0, 3), (0.1, 31), (5.0, 1)])
async def test_a_turn_has_its_budget_and_the_piece_that_passes_it(work: Work, cost_s: float, a_turn: int) -> None:
    await work.finish(started(*[work.do(i, cost_s) for i in range(100)]))
    assert work.done == list(range(100)), "in order of arrival"
    assert max(work.spent.values()) == pytest.approx(a_turn * cost_s, abs=cost_s)
    assert max(work.spent.values()) < BUDGET_S + cost_s + 1e-9


async def test_what_comes_later_passes_nothing_that_waits(work: Work) -> None:
    tasks = started(*[work.do(i) for i in range(10)])
    for late in range(10, 40):
        await asyncio.sleep(0)
        tasks += started(work.do(late))
    await work.finish(tasks)
    assert work.done == list(range(40))


async def test_all_that_were_woken_are_cancelled_and_the_others_go_on(work: Work) -> None:
    tasks = started(*[work.do(i) for i in range(100)])
    await work.until(lambda: any(woken.done() for woken in work.turns._waiting.values()))
    num_woken = sum(woken.done() for woken in work.turns._waiting.values())
    assert 0 < num_woken < 90
    for task in tasks[3 : 3 + num_woken]:
        task.cancel()
    await work.finish(tasks)
    assert work.done == [0, 1, 2, *range(3 + num_woken, 100)]


async def test_work_that_asks_whether_the_turn_is_spent_shares_its_budget(work: Work) -> None:
    async def hand_out() -> None:
        while not work.turns.is_spent:
            work.now += 1.0

    tasks = started(hand_out(), work.do("later"))
    await asyncio.sleep(0)
    assert (work.now, work.done) == (BUDGET_S, [])
    await work.finish(tasks)
    assert work.done == ["later"]


@pytest.mark.virtual_clock
@pytest.mark.parametrize("seed", range(10))
async def test_whatever_is_cancelled_each_of_the_others_runs_once(seed: int) -> None:
    rng, work = random.Random(seed), Work()
    costs = [rng.choice([0.01, 0.5, 1.0, 4.0]) for _ in range(200)]
    tasks: list[asyncio.Task[None]] = []
    cancelled: set[int] = set()
    while len(tasks) < len(costs):
        for i in range(len(tasks), min(len(costs), len(tasks) + rng.randint(1, 40))):
            tasks += started(work.do(i, costs[i]))
        for i, task in enumerate(tasks):
            if not task.done() and rng.random() < 0.05 and task.cancel():
                cancelled.add(i)
        for _ in range(rng.randint(0, 5)):
            await asyncio.sleep(0)
    await work.finish(tasks)
    ran = {i for i, task in enumerate(tasks) if not task.cancelled()}
    assert sorted(work.done) == sorted(ran), seed
    assert ran >= set(range(len(costs))) - cancelled, seed
    assert max(work.spent.values()) < BUDGET_S + max(costs), seed


@pytest.mark.virtual_clock(seeds=1)
async def test_on_a_virtual_clock_no_turn_is_ever_spent() -> None:
    assert isinstance(asyncio.get_running_loop(), VirtualClockLoop)
    turns = turns_here()
    assert turns is turns_here(), "a loop has one budget"
    assert not any(turns.is_spent for _ in range(1_000))


@pytest.mark.virtual_clock(seeds=1)
@pytest.mark.parametrize(("stood_still_s", "is_on_time"), [(0.0, True), (0.2, True), (0.3, False)])
async def test_a_sleep_is_late_where_the_loop_stood_still(stood_still_s: float, is_on_time: bool) -> None:
    now = asyncio.get_running_loop().time
    readings = iter([now(), now() + 1.0 + stood_still_s])
    assert await sleep_on_time(1.0, 0.25, lambda: next(readings)) is is_on_time
