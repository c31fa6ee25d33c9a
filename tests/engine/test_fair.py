"""Tenants that share an engine: what each gets while all wait, at the admission and in the queue."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from aioengine import ConfigError, Engine, EngineConfig
from aioengine.scheduler.policy import Policy
from doubles.fake_executor import FakeExecutor

FEW_ROWS = {"max_num_seqs": 4, "enable_prefix_caching": False}


class Mine(Policy):
    """A policy of one's own."""


async def service_under_load(serve: Any, tasks: Any, config: dict[str, Any], num_s: float) -> Counter[str]:
    """Output tokens of two tenants, "loud" with ten requests for each one of "quiet", while both wait."""
    served_to: Counter[str] = Counter()
    async with serve(config={**FEW_ROWS, **config}) as served:

        async def ask(number: int, tenant: str) -> None:
            prompt = [10 + number % 1000, *range(20, 30)]
            async with served.engine.stream(prompt, seed=number, tenant=tenant, max_tokens=8) as stream:
                async for delta in stream:
                    served_to[tenant] += len(delta.token_ids)

        started = []
        for number in range(330):
            started.append(tasks.start(ask(number, "loud" if number % 11 < 10 else "quiet")))
        await served.until(lambda: served.executor.stats.num_steps * 0.01 >= num_s)
        counted = served_to.copy()
        served.engine.abort_all()
        for task in started:
            await task
    return counted


@pytest.mark.virtual_clock(seeds=2)
@pytest.mark.parametrize("max_waiting", [8, 1000], ids=["at the admission", "in the queue"])
async def test_ten_times_the_requests_get_no_more_tokens(serve: Any, tasks: Any, max_waiting: int) -> None:
    served_to = await service_under_load(serve, tasks, {"scheduler": "fair", "max_waiting": max_waiting}, 0.8)
    assert served_to.total() > 200
    assert 0.75 < served_to["loud"] / served_to["quiet"] < 1.35


@pytest.mark.virtual_clock(seeds=1)
@pytest.mark.parametrize("scheduler", ["fcfs", "priority"])
async def test_by_age_they_get_ten_times_as_many(serve: Any, tasks: Any, scheduler: str) -> None:
    served_to = await service_under_load(serve, tasks, {"scheduler": scheduler, "max_waiting": 1000}, 0.8)
    assert served_to["loud"] > 4 * served_to["quiet"]


@pytest.mark.virtual_clock(seeds=1)
@pytest.mark.parametrize("max_waiting", [1, 100], ids=["at the admission", "in the queue"])
async def test_by_age_alone_no_priority_counts(serve: Any, tasks: Any, max_waiting: int) -> None:
    config = {"max_num_seqs": 1, "scheduler": "fcfs", "max_waiting": max_waiting}
    async with serve(config=config) as served:
        started = []
        for seed in range(6):
            work = served.engine.generate(list(range(10, 22)), seed=seed, priority=-seed, max_tokens=5)
            started.append(tasks.start(work))
            for _ in range(2):
                await served.turn()
        for task in started:
            await task
        assert served.first_runs() == list(range(6))


async def test_a_class_of_ones_own_is_given_in_process() -> None:
    async with Engine(executor=FakeExecutor(), scheduler=Mine) as engine:
        assert engine.config.scheduler == f"{__name__}:Mine"
        assert type(engine._runtime.core.scheduler.policy) is Mine  # type: ignore[union-attr]
        assert (await engine.generate([1, 2, 3], max_tokens=2)).finished


async def test_a_class_that_cannot_be_found_is_refused() -> None:
    class Local(Policy):
        pass

    with pytest.raises(ConfigError, match="top of a module"):
        EngineConfig(scheduler=Local)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="scheduler"):
        EngineConfig(scheduler="fastest")
    with pytest.raises(ConfigError, match="no_such_module"):
        await Engine.start(executor=FakeExecutor(), scheduler="no_such_module:Policy")
