"""Tenants that share an engine: what each gets while all wait, at the admission and in the queue."""

from __future__ import annotations

import asyncio
import random
import sys
from collections import Counter
from typing import Any

import msgspec
import pytest
from engine.oracle import continuation, tokens_of
from nightly import nightly

from aioengine import ConfigError, Engine, EngineConfig, EngineOverloaded, InvalidRequest, RequestOutput
from aioengine.scheduler.policy import ByPriority, Fair, Incoming, Policy
from doubles.fake_executor import FakeExecutor

PROMPT = list(range(10, 22))
FEW_ROWS = {"max_num_seqs": 4, "enable_prefix_caching": False}


class Mine(Policy):
    """A policy of one's own."""


class GoldCountsTwice(Fair):
    """A tenant is the part of the cache salt before the dash."""

    def tenant(self, request: Incoming) -> str:
        return request.cache_salt.partition("-")[0]

    def weight(self, tenant: str) -> float:
        return 2.0 if tenant == "gold" else 1.0


class Clients:
    """Each asks again and again, one request at a time; one that is refused tries again after ``pause_s``.

    Attributes:
        served: output tokens, by tenant; refused: requests; longest_s: that one took, from its call to its end.
    """

    def __init__(self, served: Any, tasks: Any) -> None:
        self.served: Counter[str] = Counter()
        self.refused: Counter[str] = Counter()
        self.longest_s: Counter[str] = Counter()
        self._engine = served.engine
        self._tasks = tasks
        self._started: list[asyncio.Task[None]] = []
        self._is_over = False

    def begin(self, tenant: str, count: int, *, pause_s: float = 0.02, on_full: str = "raise") -> None:
        for _ in range(count):
            self._started.append(self._tasks.start(self._ask(tenant, len(self._started), pause_s, on_full)))

    async def _ask(self, tenant: str, number: int, pause_s: float, on_full: str) -> None:
        loop, seed = asyncio.get_running_loop(), number * 10_000
        while not self._is_over:
            began, seed = loop.time(), seed + 1
            options = {"seed": seed, "max_tokens": 8, "tenant": tenant, "cache_salt": f"{tenant}-{number}"}
            try:
                output = await self._engine.generate([10 + number, *range(20, 30)], on_full=on_full, **options)
            except EngineOverloaded:
                self.refused[tenant] += 1
                await asyncio.sleep(pause_s)
            else:
                self.served[tenant] += len(output.outputs[0].token_ids)
                self.longest_s[tenant] = max(self.longest_s[tenant], loop.time() - began)

    async def run(self, num_s: float) -> None:
        """Let them ask for so long, and await what is under way."""
        await asyncio.sleep(num_s)
        served = self.served.copy()
        self._is_over = True
        await asyncio.gather(*self._started)
        self.served = served


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


@pytest.mark.nightly
@pytest.mark.virtual_clock(seeds=1)
@pytest.mark.parametrize("on_full", [*nightly("raise"), "wait"])
async def test_loud_ones_shut_no_quiet_one_out(serve: Any, tasks: Any, on_full: str) -> None:
    """Three tenants of twenty clients each, and two of one client, on eight places and one row."""
    async with serve(config={**FEW_ROWS, "max_num_seqs": 1, "scheduler": "fair", "max_waiting": 8}) as served:
        clients = Clients(served, tasks)
        for tenant in ("loud 1", "loud 2", "loud 3"):
            clients.begin(tenant, 20, on_full=on_full)
        for tenant in ("quiet 1", "quiet 2"):
            clients.begin(tenant, 1)
        await clients.run(8)
    assert clients.refused["quiet 1"] == clients.refused["quiet 2"] == 0
    assert all(clients.refused[f"loud {number}"] for number in (1, 2, 3)) == (on_full == "raise")
    assert max(clients.served.values()) - min(clients.served.values()) <= 2 * 8
    # Each request holds the row for 0.08 s: one of each other tenant goes before it.
    assert max(clients.longest_s["quiet 1"], clients.longest_s["quiet 2"]) < 5.5 * 0.08


@pytest.mark.virtual_clock(seeds=1)
@pytest.mark.parametrize("on_full", ["raise", *nightly("wait")])
async def test_weights_count_however_many_are_refused(serve: Any, tasks: Any, on_full: str) -> None:
    config = {**FEW_ROWS, "scheduler": f"{__name__}:GoldCountsTwice", "max_waiting": 16}
    async with serve(config=config) as served:
        clients = Clients(served, tasks)
        clients.begin("gold", 40, on_full=on_full)
        clients.begin("iron", 80, on_full=on_full)
        clients.begin("quiet", 1)
        await clients.run(6)
    assert 1.8 < clients.served["gold"] / clients.served["iron"] < 2.2
    assert clients.refused["quiet"] == 0
    assert clients.longest_s["quiet"] < 2.5 * 0.08


@pytest.mark.virtual_clock(seeds=1)
@pytest.mark.parametrize("max_waiting", [2, 1000], ids=["at the admission", "in the queue"])
@pytest.mark.parametrize("scheduler", ["fair", f"{__name__}:GoldCountsTwice"])
async def test_a_subclass_orders_as_fair_does_wherever_they_wait(
    serve: Any, tasks: Any, scheduler: str, max_waiting: int
) -> None:
    """Whatever the loud one's priority, and by whatever the policy tells tenants apart."""
    async with serve(
        config={**FEW_ROWS, "max_num_seqs": 1, "scheduler": scheduler, "max_waiting": max_waiting}
    ) as served:
        ended: list[str] = []

        async def ask(name: str, seed: int, **options: Any) -> None:
            options |= {"tenant": name} if scheduler == "fair" else {"cache_salt": f"{name}-{seed}"}
            await served.engine.generate([10 + seed, 20, 30], seed=seed, max_tokens=8, **options)
            ended.append(name)

        started = [tasks.start(ask("loud", seed, priority=-5)) for seed in range(40)]
        started += [tasks.start(ask("quiet", seed)) for seed in range(40, 46)]
        for task in started:
            await task
    assert max(place for place, name in enumerate(ended) if name == "quiet") <= 14


@pytest.mark.virtual_clock(seeds=1)
async def test_a_tenant_leaves_places_and_holds_up_no_other(serve: Any, tasks: Any) -> None:
    config = {**FEW_ROWS, "max_num_seqs": 1, "scheduler": "fair", "max_waiting": 8}
    async with serve(is_manual=True, config=config) as served:

        def ask(tenant: str, n: int = 1, on_full: Any = "raise") -> asyncio.Task[Any]:
            return tasks.start(served.engine.generate(PROMPT, tenant=tenant, n=n, max_tokens=2, on_full=on_full))

        started = [ask("a")]
        await served.until(lambda: served.core.stats().running)
        started += [ask("a", on_full="wait") for _ in range(6)]
        await served.until(lambda: served.core.num_unstarted == 4)
        [refused] = await tasks.end(ask("a"))
        assert isinstance(refused, EngineOverloaded)
        assert "of this tenant" in str(refused)
        served.engine.check_accepting(4)
        with pytest.raises(InvalidRequest, match="a tenant may have 4"):
            served.engine.stream(PROMPT, tenant="new").check_accepting(5)
        stream = served.engine.stream(PROMPT, tenant="a", max_tokens=2)
        with pytest.raises(EngineOverloaded, match="4 sequences of this tenant"):
            stream.check_accepting()
        started += [ask("b", n=3), ask("c")]
        await served.until(lambda: served.core.num_unstarted == 8)
        with pytest.raises(EngineOverloaded, match="8 sequences wait"):
            served.engine.check_accepting()
        whole = ask("d", n=8, on_full="wait")
        await served.turn()
        assert served.runtime.admission.num_waiting == 2 + 8
        [refused] = await tasks.end(ask("e"))
        assert isinstance(refused, EngineOverloaded)
        await served.rest_until_done([*started, whole])
        assert not served.runtime.admission._tenants


@pytest.mark.virtual_clock
async def test_shares_are_given_back_however_requests_end(serve: Any, tasks: Any) -> None:
    rng = random.Random(asyncio.get_running_loop().seed)  # type: ignore[attr-defined]
    config = {**FEW_ROWS, "max_num_seqs": 2, "scheduler": "fair", "max_waiting": rng.choice([2, 3, 8])}
    async with serve(config=config) as served:
        admission = served.runtime.admission

        async def one(number: int) -> Any:
            await asyncio.sleep(rng.random() * 0.3)
            options = {"n": rng.randint(1, 2), "tenant": rng.choice("abc"), "on_full": rng.choice(["wait", "raise"])}
            prompt = rng.choice([PROMPT, [5, -1], "a word " * 3])
            work = served.engine.generate(prompt, seed=number, max_tokens=4, request_id=f"{number}", **options)
            task = tasks.start(work)
            is_left = rng.random()
            if is_left < 0.4:
                await asyncio.sleep(rng.random() * 0.2)
                task.cancel() if is_left < 0.2 else served.engine.abort(f"{number}")
            [outcome] = await tasks.end(task)
            assert admission.num_preparing + served.core.num_unstarted <= admission.capacity
            return outcome

        outcomes = await asyncio.gather(*(one(number) for number in range(60)))
        ends = (RequestOutput, EngineOverloaded, InvalidRequest, asyncio.CancelledError)
        assert all(isinstance(outcome, ends) for outcome in outcomes)
        await served.rest()
        assert not admission._tenants
        assert not admission._places


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


async def test_a_policy_that_another_process_names_is_not_imported_for_it() -> None:
    async with Engine(executor=FakeExecutor()) as engine:
        runtime = engine._runtime
        assert runtime is not None
        theirs = msgspec.structs.replace(runtime.config, scheduler="antigravity:Policy")
        runtime.core.config = theirs
        assert type(await runtime._policy()) is ByPriority
    assert "antigravity" not in sys.modules


# Priorities


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
