"""The bound on requests that do not run yet: who waits for a place, in which order, and who is refused."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import pytest

from aioengine import EngineOverloaded, InvalidRequest

PROMPT = list(range(100, 120))
ONE_AT_A_TIME = {"max_waiting": 1, "max_num_seqs": 1}


async def fill(served: Any, tasks: Any, count: int, **sampling: Any) -> list[asyncio.Task[Any]]:
    """Start requests one after the other, each as far as it gets: the first runs, the second waits, others queue."""
    started = []
    for number in range(count):
        work = served.engine.generate([number + 1] * 20, request_id=f"{number}", seed=number, **sampling)
        started.append(tasks.start(work))
        for _ in range(3):
            await served.turn()
    return started


@pytest.mark.virtual_clock
async def test_beyond_max_waiting_raise_is_refused_and_wait_waits(serve: Any, tasks: Any, depth: int) -> None:
    async with serve(depth=depth, is_manual=True, config=ONE_AT_A_TIME) as served:
        started = await fill(served, tasks, 4, max_tokens=2)
        served.tokenizer.encode = lambda *_, **__: pytest.fail("it is heard before anything is tokenized")
        for prompt in (PROMPT, "a long text " * 1000, [{"role": "user", "content": "hi"}]):
            with pytest.raises(EngineOverloaded, match="max_waiting") as error:
                await served.engine.generate(prompt, on_full="raise")
        with pytest.raises(EngineOverloaded):
            async with served.engine.stream(PROMPT, on_full="raise"):
                raise AssertionError("entered")
        assert error.value.retry_after_s > 0
        assert served.core.stats().waiting == 1
        assert len(served.runtime.admission._waiting) == 2
        await served.rest_until_done(started)
        assert [output.outputs[0].finish_reason for output in await tasks.end()] == ["length"] * 4


@pytest.mark.virtual_clock
async def test_the_bound_holds_whoever_comes_and_goes(serve: Any, tasks: Any, depth: int) -> None:
    rng = random.Random(asyncio.get_running_loop().seed)
    config = {"max_waiting": 3, "max_num_seqs": 2}
    most = 0

    async with serve(depth=depth, config=config) as served:
        scheduler_add = served.core.scheduler.add_sequence

        def add(*args: Any, **options: Any) -> None:
            nonlocal most
            scheduler_add(*args, **options)
            most = max(most, served.core.scheduler.num_unstarted)

        served.core.scheduler.add_sequence = add

        async def one(number: int) -> Any:
            await asyncio.sleep(rng.random() * 0.1)
            on_full = rng.choice(["wait", "raise"])
            is_cancelled = rng.random() < 0.3
            task = tasks.start(served.engine.generate(PROMPT, seed=number, on_full=on_full, max_tokens=2))
            if is_cancelled:
                await asyncio.sleep(rng.random() * 0.2)
                task.cancel()
            [outcome] = await tasks.end(task)
            return outcome

        outcomes = await asyncio.gather(*(one(number) for number in range(40)))
        refused = [outcome for outcome in outcomes if isinstance(outcome, EngineOverloaded)]
        assert refused
        for outcome in outcomes:
            if not isinstance(outcome, EngineOverloaded | asyncio.CancelledError):
                assert outcome.outputs[0].finish_reason == "length"
    assert most == 3


@pytest.mark.virtual_clock
@pytest.mark.parametrize("goes", ["aborted while waiting", "aborted while running", "finished", "cancelled"])
async def test_a_place_that_is_freed_goes_to_the_next_in_line(serve: Any, tasks: Any, depth: int, goes: str) -> None:
    async with serve(depth=depth, is_manual=True, config=ONE_AT_A_TIME) as served:
        started = await fill(served, tasks, 4, max_tokens=1)
        queue = served.runtime.admission._waiting
        assert len(queue) == 2
        if goes == "aborted while waiting":
            served.engine.abort("1")
        elif goes == "aborted while running":
            served.engine.abort("0")
            served.complete_all()
        elif goes == "finished":
            served.complete_all()
        else:
            started[1].cancel()
        await served.until(lambda: len(queue) == 1)
        assert [stream.request_id for stream in queue] == ["3"]
        await served.until(lambda: served.core.stats().waiting == 1)
        await served.rest_until_done(started)


@pytest.mark.virtual_clock
@pytest.mark.parametrize("how", ["more urgent", "aborted", "cancelled"])
async def test_one_that_needs_less_is_admitted_as_soon_as_it_is_the_first(serve: Any, tasks: Any, how: str) -> None:
    async with serve(is_manual=True, config={"max_waiting": 3, "max_num_seqs": 1}) as served:

        def ask(n: int, **more: Any) -> asyncio.Task[Any]:
            return tasks.start(served.engine.generate(PROMPT, n=n, max_tokens=2, **more))

        started = [ask(1)]
        await served.until(lambda: served.executor.plans)
        started += [ask(2), large := ask(2, request_id="large")]
        await served.until(lambda: served.runtime.admission.num_waiting == 2)
        started.append(ask(1, priority=-1 if how == "more urgent" else 0))
        await served.turn()
        if how == "aborted":
            served.engine.abort("large")
        elif how == "cancelled":
            large.cancel()
        await served.until(lambda: served.core.num_unstarted == 3)
        assert served.runtime.admission.num_waiting == (2 if how == "more urgent" else 0)
        await served.rest_until_done(started)


@pytest.mark.virtual_clock(seeds=1)
async def test_what_was_aborted_on_its_way_to_a_full_door_waits_for_no_capacity(serve: Any, tasks: Any) -> None:
    async with serve(is_manual=True, config={"max_waiting": 1, "max_num_seqs": 1}) as served:
        started = [tasks.start(served.engine.generate(PROMPT, max_tokens=2)) for _ in range(2)]
        await served.until(lambda: served.core.num_unstarted == 1 and served.core.stats().running)
        stream = served.engine.stream(PROMPT, max_tokens=2)
        stream.abort()
        async with asyncio.timeout(1), stream:
            assert (await stream.finish()).outputs[0].finish_reason == "abort"
        await served.rest_until_done(started)


@pytest.mark.virtual_clock
async def test_a_waiter_cancelled_as_it_is_let_in_passes_its_place_on(serve: Any, tasks: Any, depth: int) -> None:
    async with serve(depth=depth, is_manual=True, config=ONE_AT_A_TIME) as served:
        started = await fill(served, tasks, 4, max_tokens=1)
        served.engine.abort("1")  # lets the next in, at once
        assert len(served.runtime.admission._waiting) == 1
        started[2].cancel()
        await served.until(lambda: served.core.stats().waiting == 1 and not served.runtime.admission._waiting)
        assert served.runtime.admission.num_preparing == 0
        await served.rest()
        outcomes = await tasks.end()
        assert isinstance(outcomes[2], asyncio.CancelledError)
        assert outcomes[3].outputs[0].finish_reason == "length"


@pytest.mark.virtual_clock
async def test_a_waiter_that_is_aborted_ends_without_waiting_for_a_place(serve: Any, tasks: Any) -> None:
    async with serve(is_manual=True, config=ONE_AT_A_TIME) as served:
        started = await fill(served, tasks, 4, max_tokens=1)
        served.engine.abort("3")
        [output] = await tasks.end(started[3])

        assert output.outputs[0].finish_reason == "abort"
        assert output.outputs[0].token_ids == []
        assert len(served.runtime.admission._waiting) == 1, "nobody else was let in for it"
        await served.rest_until_done(started)
        assert served.first_runs() == [0, 1, 2]


async def test_a_bad_prompt_gives_its_place_back(serve: Any, tasks: Any) -> None:
    async with serve(is_manual=True, config={"max_waiting": 1}) as served:
        for prompt in ([5, -1], "x" * 20_000, [{"role": "user"}]):
            with pytest.raises(InvalidRequest):
                await served.engine.generate(prompt, on_full="raise")
        assert served.runtime.admission.num_free == 1


@pytest.mark.virtual_clock
async def test_who_is_aborted_at_the_door_costs_nothing(serve: Any, tasks: Any, depth: int) -> None:
    async with serve(depth=depth, is_manual=True, config=ONE_AT_A_TIME) as served:
        await fill(served, tasks, 2, max_tokens=2)
        encoded: list[str] = []
        encode = served.tokenizer.encode
        served.tokenizer.encode = lambda text, **options: encoded.append(text) or encode(text, **options)
        late = [
            tasks.start(served.engine.generate("words " * 3_000, request_id="late", n=2, max_tokens=2)),
            tasks.start(served.engine.generate([7] * 20, request_id="late", max_tokens=2)),
        ]
        for _ in range(3):
            await served.turn()
        assert served.engine.stats().waiting == 1 + 1, "a family that asks for more than there ever is, is refused"
        served.engine.abort("late")
        served.engine.abort("late")
        _, by_ids = await tasks.end(*late)
        assert encoded == []
        assert [choice.finish_reason for choice in by_ids.outputs] == ["abort"]
        assert (by_ids.finished, by_ids.prompt_token_ids, by_ids.outputs[0].token_ids) == (True, [7] * 20, [])
        assert by_ids.metrics.num_generation_tokens == 0
        await served.rest()
        while served.engine.stats().running:
            await served.rest()
            await served.turn()
