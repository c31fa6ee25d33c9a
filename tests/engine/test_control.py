"""Drain, abort, pause, resume, forget: alone, twice, in any order, from many tasks, and in a storm of all at once."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Coroutine
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from engine.oracle import Witness, continuation, tokens_of
from integrity import check_integrity
from nightly import few

from aioengine import (
    Engine,
    EngineClosed,
    EngineDead,
    EngineOverloaded,
    PromptTooLong,
    RequestOutput,
    StepFailed,
)
from aioengine.core.executor_protocol import DeviceLost
from aioengine.testing import run

PROMPT = list(range(10, 30))
STEP_TIME_S = 0.01
LONG_S = 1000 * STEP_TIME_S


def start(served: Any, tasks: Any, count: int, *, first: int = 0, **sampling: Any) -> list[asyncio.Task[Any]]:
    """Requests told apart by their seeds."""
    return [
        tasks.start(served.engine.generate(PROMPT, seed=seed, request_id=f"{seed}", **{"max_tokens": 20, **sampling}))
        for seed in range(first, first + count)
    ]


def reasons(outcomes: list[Any]) -> list[str]:
    return [outcome.outputs[0].finish_reason for outcome in outcomes]


async def is_still(served: Any) -> bool:
    """Whether nothing is launched for a long time."""
    num_plans = len(served.executor.plans)
    await asyncio.sleep(LONG_S)
    return len(served.executor.plans) == num_plans and not served.executor.unfinished


# Drain


@pytest.mark.virtual_clock(seeds=1)
async def test_a_drain_that_is_given_up_goes_on_without_its_caller(serve: Any, tasks: Any, depth: int) -> None:
    async with serve(depth=depth) as served:
        started = start(served, tasks, 2)
        await served.turn()
        draining = tasks.start(served.engine.drain())
        await served.turn()
        draining.cancel()
        await served.turn()
        with pytest.raises(EngineClosed, match="draining"):
            await served.engine.generate(PROMPT)
        assert reasons(await tasks.end(*started)) == ["length"] * 2


@pytest.mark.virtual_clock
@pytest.mark.parametrize("goes", ["bad", "cancelled"])
async def test_a_drain_ends_with_a_last_request_that_never_runs(serve: Any, tasks: Any, depth: int, goes: str) -> None:
    """Its text is being tokenized meanwhile, and the engine has nothing to do."""
    async with serve(depth=depth, max_model_len=256) as served:
        gate = served.hold_tokenizing()
        last = tasks.start(served.engine.generate("happily " * (400 if goes == "bad" else 130), max_tokens=2))
        for _ in range(5):
            await asyncio.sleep(0)
        draining = tasks.start(served.engine.drain())
        for _ in range(5):
            await asyncio.sleep(0)
        assert not draining.done()
        if goes == "cancelled":
            last.cancel()
        gate.set()
        await draining
        [outcome] = await tasks.end(last)
        assert isinstance(outcome, PromptTooLong if goes == "bad" else asyncio.CancelledError)


@pytest.mark.virtual_clock
async def test_a_drain_waits_for_no_reader_of_what_was_aborted(serve: Any, tasks: Any) -> None:
    """One runs, one waits in the scheduler and one at the door; all streams stay open."""
    async with serve(config={"max_waiting": 1, "max_num_seqs": 1}) as served:
        is_over = asyncio.Event()

        async def ask() -> None:
            async with served.engine.stream(PROMPT):
                await is_over.wait()

        for _ in range(3):
            tasks.start(ask())
            await served.turn()
        draining = tasks.start(served.engine.drain())
        await served.turn()
        served.engine.abort_all()
        await served.until(draining.done)
        is_over.set()
        await tasks.end()


async def test_a_drain_ends_when_a_request_that_waits_for_its_turn_is_cancelled(serve: Any, tasks: Any) -> None:
    async with serve() as served:
        served.runtime.turns = SimpleNamespace(is_busy=True, take=asyncio.Event().wait)
        late = tasks.start(served.engine.generate(PROMPT))
        await asyncio.sleep(0)
        draining = tasks.start(served.engine.drain())
        await served.turn()
        assert not draining.done()
        late.cancel()
        await served.until(draining.done)


@pytest.mark.usefixtures("quiet_log")
@pytest.mark.virtual_clock
@pytest.mark.parametrize(("how", "error"), [("lost", EngineDead), ("closed", EngineClosed)])
@pytest.mark.parametrize("is_waiting", [False, True])
async def test_a_drain_that_the_engines_end_cuts_short_says_so(
    serve: Any, tasks: Any, depth: int, how: str, error: type[Exception], is_waiting: bool
) -> None:
    config = {"max_waiting": 1, "max_num_seqs": 1} if is_waiting else {}
    async with serve(depth=depth, config=config) as served:
        started = start(served, tasks, 3)
        await asyncio.sleep(0.035)
        drains = [tasks.start(served.engine.drain()) for _ in range(2)]
        await served.turn()
        if how == "lost":
            served.executor.make_step_fail(len(served.executor.plans), DeviceLost("lost"))
        else:
            await served.engine.aclose()
        assert {type(outcome) for outcome in await tasks.end(*drains, *started)} == {error}


# Abort


@pytest.mark.virtual_clock(seeds=1)
@pytest.mark.parametrize("how", ["abort_all", "pause"])
async def test_abort_all_ends_everyone_wherever_they_are(serve: Any, tasks: Any, depth: int, how: str) -> None:
    witness = Witness()
    async with serve(depth=depth, block_size=4, config={"max_waiting": 2, "max_num_seqs": 2}) as served:
        served.engine.add_observer(witness)
        started = start(served, tasks, 7)
        await asyncio.sleep(0.055)
        stats = served.core.stats()
        assert stats.running
        assert stats.waiting + stats.blocked
        assert served.runtime.admission._waiting
        for _ in range(2):
            if how == "pause":
                await served.engine.pause("abort")
            else:
                served.engine.abort_all()
        outcomes = await tasks.end(*started)
        assert reasons(outcomes) == ["abort"] * 7
        for seed, outcome in enumerate(outcomes):
            [ids] = tokens_of(outcome)
            assert ids == continuation(PROMPT, len(ids), seed=seed)
        assert any(outcome.outputs[0].token_ids for outcome in outcomes)
        assert witness.reasons == [("abort",)] * 7
        await served.engine.resume()
        assert (await served.engine.generate(PROMPT, max_tokens=3)).outputs[0].finish_reason == "length"


# Pause and resume


@pytest.mark.virtual_clock(seeds=1)
@pytest.mark.parametrize("mode", ["keep", "wait", "abort"])
async def test_a_pause_deals_with_what_is_there_holds_what_comes_and_resume_lets_all_go_on(
    serve: Any, tasks: Any, depth: int, mode: str
) -> None:
    async with serve(depth=depth, block_size=4, config={"max_num_seqs": 2, "max_waiting": 4}) as served:
        early = start(served, tasks, 4)
        await asyncio.sleep(0.055)
        await served.engine.pause(mode)
        assert not served.executor.unfinished
        late = start(served, tasks, 6, first=4)  # two more than there are places
        assert await is_still(served)
        await served.engine.pause("keep" if mode == "keep" else "wait")
        assert await is_still(served)
        assert [task.done() for task in early] == [mode != "keep"] * 4
        assert not any(task.done() for task in late)
        await served.engine.resume()
        outcomes = await tasks.end(*early, *late)
        assert reasons(outcomes) == ["abort" if mode == "abort" else "length"] * 4 + ["length"] * 6
        for seed, outcome in enumerate(outcomes):
            [ids] = tokens_of(outcome)
            assert ids == continuation(PROMPT, len(ids), seed=seed)


@pytest.mark.virtual_clock(seeds=1)
async def test_what_is_paused_keeps_its_memory_and_is_computed_once(serve: Any, tasks: Any, depth: int) -> None:
    async with serve(depth=depth) as served:
        [task] = start(served, tasks, 1)
        await asyncio.sleep(0.055)
        await served.engine.pause()
        assert served.core.stats().free_blocks < served.core.stats().num_blocks
        await asyncio.sleep(LONG_S)
        await served.engine.resume()
        await task
        assert served.executor.stats.num_computed_tokens == len(PROMPT) + 20 - 1


@pytest.mark.virtual_clock(seeds=1)
@pytest.mark.parametrize("mode", ["keep", "wait"])
async def test_a_pause_that_is_given_up_pauses_all_the_same(serve: Any, tasks: Any, depth: int, mode: str) -> None:
    async with serve(depth=depth) as served:
        start(served, tasks, 2)
        await asyncio.sleep(0.035)
        pausing = tasks.start(served.engine.pause(mode))
        await served.turn()
        pausing.cancel()
        await asyncio.sleep(LONG_S)
        start(served, tasks, 2, first=2)
        assert await is_still(served)
        await served.engine.resume()
        assert reasons([o for o in await tasks.end() if isinstance(o, RequestOutput)]) == ["length"] * 4


@pytest.mark.virtual_clock(seeds=1)
async def test_a_pause_that_lets_end_waits_for_what_came_while_weights_were_changed(serve: Any, tasks: Any) -> None:
    async with serve(depth=1) as served:
        early = start(served, tasks, 1)
        await asyncio.sleep(1.5 * STEP_TIME_S)
        changing = tasks.start(served.engine.update_weights("elsewhere"))  # waits for the step in flight
        await served.until(lambda: served.core._is_frozen)
        late = start(served, tasks, 1, first=1)
        await served.until(lambda: served.core._live and len(served.core._live) == 2)
        assert not changing.done()
        await served.engine.pause("wait")
        assert await is_still(served)
        assert all(task.done() for task in (*early, changing, *late))
        assert reasons(await tasks.end(*early, *late)) == ["length"] * 2


# In any order, and from many tasks

CALLS: dict[str, Callable[[Engine], Any]] = {
    "drain": lambda engine: engine.drain(),
    "pause keep": lambda engine: engine.pause("keep"),
    "pause wait": lambda engine: engine.pause("wait"),
    "pause abort": lambda engine: engine.pause("abort"),
    "resume": lambda engine: engine.resume(),
    "forget": lambda engine: engine.reset_prefix_cache(),
    "abort all": lambda engine: engine.abort_all(),
}
STOPPING = {"pause keep", "pause wait", "pause abort"}


async def call(engine: Engine, name: str) -> None:
    waiting = CALLS[name](engine)
    if isinstance(waiting, Coroutine):
        await waiting


@pytest.mark.virtual_clock(seeds=1)
@pytest.mark.parametrize("other", CALLS)
@pytest.mark.parametrize("one", few(["drain", "pause wait", "abort all"], of=CALLS))
async def test_any_two_calls_in_a_row_and_at_once_return_and_leave_a_working_engine(
    serve: Any, tasks: Any, one: str, other: str
) -> None:
    async with serve(depth=2, block_size=4, config={"max_num_seqs": 2, "max_waiting": 2}) as served:
        for is_at_once in (False, True):
            started = start(served, tasks, 6)
            await asyncio.sleep(0.035)
            calls = [tasks.start(call(served.engine, one))]
            if not is_at_once:
                await asyncio.sleep(0.015)
            calls.append(tasks.start(call(served.engine, other)))
            await asyncio.sleep(LONG_S)
            for name, task in zip((one, other), calls, strict=True):
                waits_for_what_is_held = name == "drain" and {one, other} & {"pause keep", "pause wait"}
                assert task.done() or waits_for_what_is_held
            if other in STOPPING and not is_at_once:
                assert await is_still(served)
            await served.engine.resume()
            outcomes = await tasks.end(*started)
            assert set(reasons(outcomes)) <= {"length", "abort"}
            assert await tasks.end(*calls) == [None, None]
            assert (await served.engine.generate(PROMPT, max_tokens=2)).outputs[0].finish_reason == "length"


@pytest.mark.usefixtures("quiet_log")
@pytest.mark.virtual_clock(seeds=1)
@pytest.mark.parametrize("end", ["closed", "drained", "lost"])
@pytest.mark.parametrize("name", CALLS)
async def test_each_call_returns_or_fails_while_the_engine_ends(serve: Any, tasks: Any, name: str, end: str) -> None:
    async with serve(depth=2, config={"max_num_seqs": 2, "max_waiting": 2}) as served:
        started = start(served, tasks, 6)
        await asyncio.sleep(0.035)
        calls = [tasks.start(call(served.engine, name))]
        if end == "lost":
            served.executor.make_step_fail(len(served.executor.plans), DeviceLost("lost"))
        else:
            tasks.start(served.engine.aclose(drain=end == "drained"))
        for _ in range(5):
            calls.append(tasks.start(call(served.engine, name)))
            await served.turn()
        await asyncio.sleep(LONG_S)
        if name == "pause keep" and end == "lost":
            await served.engine.resume()  # the device is lost when somebody uses it
        for outcome in await tasks.end(*calls):
            assert outcome is None or isinstance(outcome, EngineClosed | EngineDead)
        for outcome in await tasks.end(*started):
            assert isinstance(outcome, RequestOutput | EngineClosed | EngineDead)


# A storm

NUM_STORMS = 1000
NUM_CHUNKS = 40
CHUNKS = [0, *(pytest.param(chunk, marks=pytest.mark.nightly) for chunk in range(1, NUM_CHUNKS))]


class Storm:
    """Requests and control calls, all drawn by a seed, over a small and crowded engine; `main` checks what came of it.

    Whoever waits has somebody to wait for: in the end a resume comes after every other call.
    """

    def __init__(self, serve: Any, folder: Path, seed: int) -> None:
        self.serve = serve
        self.folder = folder
        self.rng = random.Random(seed)
        self.depth = self.rng.choice([1, 2, 4])
        self.prompts = [self.rng.choices(range(3, 99), k=24) for _ in range(2)]
        self.witness = Witness()
        self.num_resumes = 0
        self.paused_since: int | None = None
        """How many resumes there had been when a pause returned; nothing is launched while it stands."""
        self.num_accepted = 0
        self.end = self.rng.choice([None] * 5 + ["closed", "drained", "lost", "step fails", "row fails"])

    async def main(self) -> None:
        rng = self.rng
        config = {
            "max_num_seqs": rng.choice([1, 2, 5]),
            "max_num_batched_tokens": rng.choice([8, 64]),
            "max_waiting": rng.choice([3, 30]),
            "enable_prefix_caching": rng.random() < 0.7,
        }
        sizes = {"block_size": 4, "num_blocks": rng.choice([12, 40]), "max_model_len": 48}
        async with self.serve(depth=self.depth, config=config, model=str(self.folder), **sizes) as served:
            self.served = served
            self.engine = served.engine
            self.engine.add_observer(self.witness)
            self._guard_launches()
            self._break_something()
            async with asyncio.TaskGroup() as group:
                for number in range(rng.randrange(3, 9)):
                    group.create_task(self._live(number))
                calls = [group.create_task(self._control()) for _ in range(rng.randrange(1, 6))]
                group.create_task(self._resume_after(calls))
                if self.end in ("closed", "drained"):
                    group.create_task(self._close())
            assert sum(map(len, self.witness.reasons)) == self.num_accepted, "each choice is told of once"
            if served.core.death is None:
                check_integrity(served.core.scheduler)
            if served.core.death is None and self.end not in ("closed", "drained"):
                await self.engine.resume()

    def _guard_launches(self) -> None:
        launch = self.served.executor.launch

        def guarded(plan: Any) -> Any:
            assert self.paused_since != self.num_resumes, "launched while paused"
            return launch(plan)

        self.served.executor.launch = guarded

    def _break_something(self) -> None:
        step = self.rng.randrange(20)
        if self.end == "row fails":
            for number in range(3):
                self.served.executor.make_row_fail(step + number, 0, ArithmeticError("not a number"))
        elif self.end == "step fails":
            self.served.executor.make_step_fail(step, ArithmeticError("upside down"))
        elif self.end == "lost":
            self.served.executor.make_step_fail(step, DeviceLost("lost"))

    # Requests

    async def _live(self, number: int) -> None:
        """One request, whatever becomes of it; its tokens are those that its seed decides."""
        rng = self.rng
        await asyncio.sleep(rng.random() * rng.choice([0.02, 0.5]))
        prompt = rng.choice(self.prompts)[: rng.randrange(1, 25)]
        n, count = rng.choice([1, 1, 2, 3]), rng.randrange(1, 20)
        is_greedy = rng.random() < 0.2
        options = {
            "n": n,
            "seed": number,
            "max_tokens": count,
            "temperature": 0.0 if is_greedy else 1.0,
            "priority": rng.choice([0, 0, 1, 2]),
            "cache_salt": rng.choice([None, None, "a"]),
            "on_full": rng.choice(["wait", "wait", "raise"]),
            "request_id": f"{number % 4}",
            "max_unread_tokens": rng.choice([None, None, 1, 3]),
            "stream_interval": rng.choice([1, 1, 4]),
        }
        fate = rng.choice(["lives"] * 4 + ["is cancelled", "is aborted", "is left", "stalls"])
        try:
            with_timeout = asyncio.timeout(rng.random() * 0.3 if fate == "is cancelled" else None)
            async with with_timeout, self.engine.stream(prompt, **options) as stream:
                self.num_accepted += n
                output = await self._read(stream, fate)
        except TimeoutError:
            assert fate == "is cancelled"
            return
        except EngineOverloaded:
            assert options["on_full"] == "raise"
            return
        except EngineClosed:  # draining, too
            return
        except (EngineDead, StepFailed):
            assert self.end in ("lost", "step fails", "row fails")
            return
        if output is None:
            return
        assert output.finished
        for choice, completion in enumerate(output.outputs):
            whole = continuation(prompt, count, seed=number, choice=0 if is_greedy else choice)
            assert completion.finish_reason in ("length", "abort")
            assert completion.token_ids == whole[: len(completion.token_ids)]
            assert (len(completion.token_ids) == count) or completion.finish_reason == "abort"

    async def _read(self, stream: Any, fate: str) -> Any:
        rng = self.rng
        if rng.random() < 0.3:
            return await stream.finish()
        pause_s = rng.choice([0.0, 0.01, 0.05])
        ids: dict[int, list[int]] = {}
        ends: dict[int, str] = {}
        async for delta in stream:
            assert delta.index not in ends, "a choice goes on after its end"
            ids.setdefault(delta.index, []).extend(delta.token_ids)
            if delta.finish_reason is not None:
                ends[delta.index] = delta.finish_reason
            if rng.random() < 0.1:
                if fate == "is left":
                    return None
                if fate == "is aborted":
                    self.engine.abort(stream.request_id)
                if fate == "stalls":
                    await asyncio.sleep(0.5)
            await asyncio.sleep(rng.random() * pause_s)
        output = stream.result
        assert ends == {completion.index: completion.finish_reason for completion in output.outputs}
        assert all(ids[completion.index] == completion.token_ids for completion in output.outputs)
        return output

    # Control

    async def _control(self) -> None:
        rng = self.rng
        for _ in range(rng.randrange(1, 4)):
            await asyncio.sleep(rng.random() * 0.2)
            name = rng.choice(list(CALLS))
            if name in ("resume", "drain"):
                self.num_resumes += 1
            before = self.num_resumes
            is_given_up = rng.random() < 0.2
            began_at = asyncio.get_running_loop().time()
            try:
                async with asyncio.timeout(rng.random() * 0.05 if is_given_up else None):
                    await call(self.engine, name)
            except TimeoutError:
                assert is_given_up
                continue
            except (EngineClosed, EngineDead):
                assert self.end in ("closed", "drained", "lost")
                continue
            is_on = self.served.core.death is None and not self.served.runtime.is_closing
            if name in STOPPING and before == self.num_resumes and is_on:
                assert not self.served.executor.unfinished
                self.paused_since = before
                if name == "pause keep":
                    took_s = asyncio.get_running_loop().time() - began_at
                    assert took_s <= self.depth * STEP_TIME_S + 1e-9, "it waits for what is in flight alone"

    async def _resume_after(self, calls: list[asyncio.Task[None]]) -> None:
        """Now and then, so that nobody who holds others up is held up by them."""
        rng = self.rng
        is_last = False
        while not is_last:
            is_last = all(task.done() for task in calls)
            await asyncio.sleep(0.3 + rng.random())
            self.num_resumes += 1
            try:
                await self.engine.resume()
            except (EngineClosed, EngineDead):
                return

    async def _close(self) -> None:
        await asyncio.sleep(self.rng.random() * 0.5)
        self.num_resumes += 1
        await self.engine.aclose(drain=self.end == "drained")


@pytest.mark.usefixtures("quiet_log")
@pytest.mark.parametrize("chunk", CHUNKS)
def test_a_storm_of_requests_and_control_calls_hangs_nobody(serve: Any, tmp_path: Path, chunk: int) -> None:
    (tmp_path / "config.json").write_text("{}")
    for seed in range(chunk, NUM_STORMS, NUM_CHUNKS):
        run(Storm(serve, tmp_path, seed).main(), seed=seed)
