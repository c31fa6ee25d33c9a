"""What every `Executor` must do. Subclass `ExecutorContract` in a test module and say how to open one.

Only the protocol is relied on, and `Opened.make_step_fail`. What is sampled is not known here; tests compare what
different ways through the same sequence bring.
"""

import abc
import asyncio
import json
import os
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import anyio
import numpy as np
import pytest
from executor.plans import PlanWriter, tokens_by_row

from aioengine.core.plan import StepPlan, StepResult
from aioengine.errors import InvalidRequest
from aioengine.executor.protocol import DeviceLost, Executor, PendingStep

DEPTHS = [1, 2, 4]


@dataclass
class Opened:
    """A started executor.

    Attributes:
        make_step_fail: lets the step of that number raise an error that is not `DeviceLost`; called before its launch.
    """

    executor: Executor
    make_step_fail: Callable[[int], None]

    def writer(self, seed: int = 0) -> PlanWriter:
        return PlanWriter(self.executor.info.num_blocks, self.executor.info.block_size, seed)

    async def run(self, plan: StepPlan) -> StepResult:
        return await self.executor.launch(plan).finish()


def spans(path: Path, category: str) -> list[dict[str, Any]]:
    """The spans of a written trace that are of one category; each has a time."""
    events = json.loads(path.read_text())["traceEvents"]
    assert all(event["dur"] >= 0 for event in events if event["ph"] == "X")
    return [event for event in events if event.get("cat") == category]


class ExecutorContract(abc.ABC):
    """The suite. An executor of 64 blocks or more, a ``max_model_len`` of 64 or more and 4 rows or more will do."""

    max_rows: ClassVar[int] = 4

    @abc.abstractmethod
    async def start(self, max_in_flight: int) -> Opened:
        """A fresh executor; always the same model, so that equal sequences bring equal tokens."""

    @pytest.fixture(params=DEPTHS)
    async def opened(self, request: pytest.FixtureRequest) -> AsyncIterator[Opened]:
        async with self.open(request.param) as opened:
            yield opened

    @asynccontextmanager
    async def open(self, max_in_flight: int) -> AsyncIterator[Opened]:
        opened = await self.start(max_in_flight)
        try:
            yield opened
        finally:
            await opened.executor.aclose()

    def prompt(self, opened: Opened, length: int, salt: int = 0) -> list[int]:
        return [(7 * i + 13 * salt) % min(opened.executor.info.vocab_size, 90) for i in range(length)]

    async def generate(
        self, opened: Opened, writer: PlanWriter, row: int, prompt: list[int], num_tokens: int
    ) -> list[int]:
        """One sequence alone, a step at a time, each finished before the next."""
        writer.add(row, prompt)
        tokens = []
        for _ in range(num_tokens):
            plan = writer.plan({row: None})
            tokens.append(writer.read(plan, await opened.run(plan))[row])
        writer.remove(row)
        return tokens

    # What there is to know

    async def test_it_says_what_it_offers(self, opened: Opened) -> None:
        info = opened.executor.info
        assert info.max_in_flight in DEPTHS
        assert info.num_blocks >= 64
        assert info.block_size >= 1
        assert info.max_model_len >= 64
        assert info.vocab_size >= 1

    async def test_it_counts_steps_computed_and_sampled_tokens(self, opened: Opened) -> None:
        writer = opened.writer()
        stats = opened.executor.stats
        assert (stats.num_steps, stats.num_computed_tokens, stats.num_sampled_tokens) == (0, 0, 0)
        writer.add(0, self.prompt(opened, 7))
        writer.add(1, self.prompt(opened, 20))
        for plan in (writer.plan({0: None, 1: 9}), writer.plan()):
            await opened.run(plan)
        stats = opened.executor.stats
        assert stats.num_steps == 2
        assert stats.num_computed_tokens == 7 + 9 + 1 + 11
        assert stats.num_sampled_tokens == 1 + 2

    # Results

    async def test_stop_ids_are_not_sampled_before_min_tokens(self, opened: Opened) -> None:
        prompt = self.prompt(opened, 9)
        writer = opened.writer()
        free = await self.generate(opened, writer, 0, prompt, 4)
        writer.add(1, prompt, min_tokens=3, stop_ids=(free[0],))
        plan = writer.plan({1: None})
        held = writer.read(plan, await opened.run(plan))[1]
        assert held != free[0]
        writer.remove(1)
        writer.add(2, prompt, min_tokens=0, stop_ids=(free[0],))
        plan = writer.plan({2: None})
        assert writer.read(plan, await opened.run(plan))[2] == free[0]

    async def test_rows_bring_a_token_where_they_want_one_and_none_elsewhere(self, opened: Opened) -> None:
        writer = opened.writer()
        for row, length in enumerate([5, 40, 1, 33]):
            writer.add(row, self.prompt(opened, length, salt=row))
        plan = writer.plan({3: 10, 0: None, 1: 39, 2: None})
        tokens = tokens_by_row(plan, await opened.run(plan))
        assert tokens.keys() == {0, 2}
        assert all(0 <= token < opened.executor.info.vocab_size for token in tokens.values())

    async def test_a_prompt_in_chunks_brings_what_it_brings_in_one_piece(self, opened: Opened) -> None:
        writer, prompt = opened.writer(), self.prompt(opened, 45)
        expected = await self.generate(opened, writer, 0, prompt, 1)
        writer.add(1, prompt)
        for count in (1, 17, 3, 23):
            plan = writer.plan({1: count})
            assert tokens_by_row(plan, await opened.run(plan)) == {}
        plan = writer.plan()
        assert tokens_by_row(plan, await opened.run(plan)) == {1: expected[0]}

    async def test_a_sequence_does_not_notice_its_company(self, opened: Opened) -> None:
        writer = opened.writer()
        prompts = {row: self.prompt(opened, length, salt=row) for row, length in enumerate([3, 30, 16, 9])}
        expected = {row: await self.generate(opened, writer, row, prompt, 10) for row, prompt in prompts.items()}
        brought: dict[int, list[int]] = {row: [] for row in prompts}
        for row, prompt in prompts.items():  # a new one with each step, while the others go on
            writer.add(row, prompt)
            for _ in range(2):
                plan = writer.plan()
                for of_row, token in writer.read(plan, await opened.run(plan)).items():
                    brought[of_row].append(token)
        for row, tokens in brought.items():
            assert tokens == expected[row][: len(tokens)]
            assert tokens

    async def test_a_sequence_that_is_added_again_with_its_output_goes_on_as_before(self, opened: Opened) -> None:
        writer, prompt = opened.writer(), self.prompt(opened, 14)
        tokens = await self.generate(opened, writer, 0, prompt, 8)
        writer.add(2, prompt + tokens[:3], num_prompt_tokens=len(prompt))
        for expected in tokens[3:]:
            plan = writer.plan()
            assert writer.read(plan, await opened.run(plan)) == {2: expected}

    async def test_a_sequence_may_grow_to_the_longest(self, opened: Opened) -> None:
        writer, limit = opened.writer(), opened.executor.info.max_model_len
        writer.add(0, self.prompt(opened, limit - 3))
        for _ in range(3):
            plan = writer.plan()
            writer.read(plan, await opened.run(plan))
        assert writer.rows[0].num_known == limit

    async def test_rows_and_blocks_are_used_again(self, opened: Opened) -> None:
        writer = opened.writer()
        prompts = [self.prompt(opened, 10 + salt, salt) for salt in range(12)]
        outputs = [await self.generate(opened, writer, salt % 2, prompt, 4) for salt, prompt in enumerate(prompts)]
        again = [await self.generate(opened, writer, 3, prompt, 4) for prompt in prompts]
        assert outputs == again
        assert len({tuple(tokens) for tokens in outputs}) > 6

    async def test_a_row_may_leave_and_be_taken_in_one_plan(self, opened: Opened) -> None:
        writer = opened.writer()
        expected = await self.generate(opened, writer, 0, self.prompt(opened, 6, salt=2), 1)
        writer.add(0, self.prompt(opened, 50, salt=1))
        await opened.run(writer.plan())
        writer.remove(0)
        writer.add(0, self.prompt(opened, 6, salt=2))
        plan = writer.plan()
        assert tokens_by_row(plan, await opened.run(plan)) == {0: expected[0]}

    async def test_a_plan_may_have_deltas_and_no_rows(self, opened: Opened) -> None:
        writer = opened.writer()
        writer.add(0, self.prompt(opened, 6))
        await opened.run(writer.plan())
        writer.remove(0)
        plan = writer.plan({})
        assert tokens_by_row(plan, await opened.run(plan)) == {}

    async def test_logprobs_come_for_the_rows_that_ask(self, opened: Opened) -> None:
        writer = opened.writer()
        for row, wanted in enumerate([-1, 2, 0, 5]):
            writer.add(row, self.prompt(opened, 8, salt=row), logprobs=wanted)
        plan = writer.plan({0: None, 1: None, 2: 3, 3: None})
        result = await opened.run(plan)
        assert result.logprobs is not None
        assert result.logprobs.index.tolist() == [1, 2]  # of the tokens sampled: rows 0, 1 and 3
        assert result.logprobs.top_ids.shape == result.logprobs.top_logprobs.shape == (2, 5)
        assert (result.logprobs.logprobs <= 0).all()
        assert (result.logprobs.ranks >= 1).all()
        assert (np.diff(result.logprobs.top_logprobs, axis=1) <= 0).all()
        writer.remove(1)
        writer.remove(3)
        assert (await opened.run(writer.plan({0: None}))).logprobs is None

    # Several steps in flight

    async def test_steps_in_flight_read_the_tokens_that_are_on_the_device(self, opened: Opened) -> None:
        writer, prompt = opened.writer(), self.prompt(opened, 9)
        expected = await self.generate(opened, writer, 0, prompt, 12)
        writer.add(0, prompt)
        in_flight: list[tuple[StepPlan, PendingStep]] = []
        tokens = []
        for _ in range(12):
            plan = writer.plan()
            in_flight.append((plan, opened.executor.launch(plan)))
            if len(in_flight) == opened.executor.info.max_in_flight:
                plan, step = in_flight.pop(0)
                tokens.append(writer.read(plan, await step.finish())[0])
        for plan, step in in_flight:
            tokens.append(writer.read(plan, await step.finish())[0])
        assert tokens == expected

    async def test_a_row_that_leaves_while_its_step_is_in_flight_harms_nobody(self, opened: Opened) -> None:
        writer = opened.writer()
        expected = await self.generate(opened, writer, 0, self.prompt(opened, 21, salt=5), 2)
        writer.add(0, self.prompt(opened, 30, salt=1))
        plans = [writer.plan()]
        writer.remove(0)
        writer.add(0, self.prompt(opened, 21, salt=5))  # into blocks that may be those just freed
        plans += [writer.plan(), writer.plan()]
        results = await self.run_all(opened, plans)
        assert [tokens_by_row(plan, result)[0] for plan, result in zip(plans[1:], results[1:], strict=True)] == expected

    async def run_all(self, opened: Opened, plans: list[StepPlan]) -> list[StepResult]:
        """Run plans with as many in flight as may be."""
        steps: list[PendingStep] = []
        results = []
        for plan in plans:
            if len(steps) - len(results) == opened.executor.info.max_in_flight:
                results.append(await steps[len(results)].finish())
            steps.append(opened.executor.launch(plan))
        for step in steps[len(results) :]:
            results.append(await step.finish())
        return results

    async def test_a_step_is_done_once_a_later_one_has_finished(self, opened: Opened) -> None:
        writer = opened.writer()
        writer.add(0, self.prompt(opened, 3))
        steps = [opened.executor.launch(writer.plan()) for _ in range(opened.executor.info.max_in_flight)]
        for step in steps:
            await step.finish()
            assert step.is_done

    async def test_cancelling_a_wait_does_not_stop_the_device(self, opened: Opened) -> None:
        if opened.executor.info.max_in_flight == 1:
            pytest.skip("the step that is left unfinished is the only one that may be")
        writer, prompt = opened.writer(), self.prompt(opened, 9)
        expected = await self.generate(opened, writer, 0, prompt, 2)
        writer.add(0, prompt)
        abandoned = opened.executor.launch(writer.plan())
        plan = writer.plan()
        step = opened.executor.launch(plan)
        with anyio.CancelScope() as scope:
            scope.cancel()
            await abandoned.finish()
        assert tokens_by_row(plan, await step.finish()) == {0: expected[1]}

    # Failures

    async def test_a_step_that_fails_raises_and_later_ones_work(self, opened: Opened) -> None:
        writer, prompt = opened.writer(), self.prompt(opened, 11)
        expected = await self.generate(opened, writer, 0, prompt, 3)
        writer.add(0, prompt)
        plan = writer.plan()
        opened.make_step_fail(plan.step)
        with pytest.raises(Exception) as failure:
            await opened.run(plan)
        assert not isinstance(failure.value, DeviceLost)
        writer.remove(0)
        assert await self.generate(opened, writer, 0, prompt, 3) == expected

    async def test_the_deltas_of_a_failed_step_hold(self, opened: Opened) -> None:
        writer, prompt = opened.writer(), self.prompt(opened, 31)
        expected = await self.generate(opened, writer, 0, prompt, 2)
        writer.add(0, self.prompt(opened, 5, salt=3))
        await opened.run(writer.plan())
        writer.remove(0)
        writer.add(0, prompt)
        writer.add(1, self.prompt(opened, 4))
        plan = writer.plan({1: None})
        opened.make_step_fail(plan.step)
        with pytest.raises(Exception):  # noqa: B017 - the executor's own
            await opened.run(plan)
        writer.remove(1)
        plan = writer.plan({0: None})
        assert writer.read(plan, await opened.run(plan)) == {0: expected[0]}
        plan = writer.plan()
        assert writer.read(plan, await opened.run(plan)) == {0: expected[1]}

    async def test_a_failed_step_leaves_other_rows_of_steps_in_flight_alone(self, opened: Opened) -> None:
        if opened.executor.info.max_in_flight == 1:
            pytest.skip("nothing is in flight beside it")
        writer, prompt = opened.writer(), self.prompt(opened, 11)
        expected = await self.generate(opened, writer, 0, prompt, 1)
        writer.add(1, self.prompt(opened, 5, salt=1))
        failing = writer.plan()
        opened.make_step_fail(failing.step)
        failed = opened.executor.launch(failing)
        writer.add(0, prompt)
        plan = writer.plan({0: None})
        step = opened.executor.launch(plan)
        with pytest.raises(Exception):  # noqa: B017 - the executor's own
            await failed.finish()
        assert tokens_by_row(plan, await step.finish()) == {0: expected[0]}

    # Profiles

    async def test_a_profile_shows_the_steps_launched_while_it_was_recorded(
        self, opened: Opened, tmp_path: Path
    ) -> None:
        writer, prompt, path = opened.writer(), self.prompt(opened, 9), tmp_path / "trace.json"
        expected = await self.generate(opened, writer, 0, prompt, 5)
        writer.add(0, prompt)
        plans = [writer.plan()]
        await opened.run(plans[0])
        await opened.executor.start_profile()
        plans += [writer.plan() for _ in range(3)]
        results = await self.run_all(opened, plans[1:])
        await opened.executor.stop_profile(path)
        assert [event["name"] for event in spans(path, "step")] == [f"step {plan.step}" for plan in plans[1:]]
        assert os.listdir(tmp_path) == [path.name]
        plan = writer.plan()
        results.append(await opened.run(plan))
        tokens = [tokens_by_row(*pair)[0] for pair in zip([*plans[1:], plan], results, strict=True)]
        assert tokens == expected[1:], "recording changes no token"

    async def test_each_profile_has_its_own_steps(self, opened: Opened, tmp_path: Path) -> None:
        writer, path = opened.writer(), tmp_path / "trace.json"
        for step in (1, 2):
            await opened.executor.start_profile()
            await opened.run(writer.plan({}))
            await opened.executor.stop_profile(path)
            assert [event["name"] for event in spans(path, "step")] == [f"step {step}"]

    async def test_a_profile_has_a_start_and_an_end(self, opened: Opened, tmp_path: Path) -> None:
        with pytest.raises(InvalidRequest, match="start one first"):
            await opened.executor.stop_profile(tmp_path / "trace.json")
        await opened.executor.start_profile()
        with pytest.raises(InvalidRequest, match="already"):
            await opened.executor.start_profile()
        await opened.executor.stop_profile(tmp_path / "trace.json")
        assert spans(tmp_path / "trace.json", "step") == []

    async def test_a_profile_that_cannot_be_written_says_so_and_leaves_all_as_it_was(
        self, opened: Opened, tmp_path: Path
    ) -> None:
        writer, prompt = opened.writer(), self.prompt(opened, 9)
        expected = await self.generate(opened, writer, 0, prompt, 1)
        (tmp_path / "folder").mkdir()
        for path in (tmp_path / "missing" / "trace.json", tmp_path / "folder"):
            await opened.executor.start_profile()
            with pytest.raises(OSError, match=path.name):
                await opened.executor.stop_profile(path)
        assert os.listdir(tmp_path) == ["folder"]
        assert await self.generate(opened, writer, 0, prompt, 1) == expected
        await opened.executor.start_profile()
        await opened.executor.stop_profile(tmp_path / "trace.json")
        assert (tmp_path / "trace.json").exists()

    async def test_a_profile_ends_with_the_executor(self, opened: Opened, tmp_path: Path) -> None:
        await opened.executor.start_profile()
        await opened.executor.aclose()
        with pytest.raises(DeviceLost):
            await opened.executor.stop_profile(tmp_path / "trace.json")
        with pytest.raises(DeviceLost):
            await opened.executor.start_profile()
        assert os.listdir(tmp_path) == []

    # The end

    async def test_after_closing_a_step_brings_its_result_or_says_that_the_device_is_lost(self, opened: Opened) -> None:
        writer, prompt = opened.writer(), self.prompt(opened, 9)
        expected = await self.generate(opened, writer, 0, prompt, opened.executor.info.max_in_flight)
        writer.add(0, prompt)
        plans = [writer.plan() for _ in range(opened.executor.info.max_in_flight)]
        steps = [opened.executor.launch(plan) for plan in plans]
        await opened.executor.aclose()
        assert all(step.is_done for step in steps)
        is_lost = False
        for plan, step, token in zip(plans, steps, expected, strict=True):
            try:
                result = await step.finish()
            except DeviceLost:
                is_lost = True
            else:
                assert not is_lost, "a step cannot run on top of one that did not"
                assert tokens_by_row(plan, result) == {0: token}

    async def test_who_waits_for_a_step_hears_of_the_closing(self, opened: Opened) -> None:
        writer = opened.writer()
        writer.add(0, self.prompt(opened, 9))
        steps = [opened.executor.launch(writer.plan()) for _ in range(opened.executor.info.max_in_flight)]
        heard: list[object] = []

        async def wait_for_all() -> None:
            for step in steps:
                try:
                    heard.append(await step.finish())
                except DeviceLost as lost:
                    heard.append(lost)

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(wait_for_all)
            await asyncio.sleep(0)
            await opened.executor.aclose()
        assert len(heard) == len(steps)

    async def test_a_step_launched_after_closing_says_that_the_device_is_lost(self, opened: Opened) -> None:
        writer = opened.writer()
        writer.add(0, self.prompt(opened, 9))
        await opened.executor.aclose()
        with pytest.raises(DeviceLost):
            await opened.run(writer.plan())

    async def test_closing_twice_or_at_once_is_closing(self, opened: Opened) -> None:
        closes: list[Callable[[], Awaitable[None]]] = [opened.executor.aclose] * 3
        async with anyio.create_task_group() as tasks:
            for close in closes:
                tasks.start_soon(close)
        await opened.executor.aclose()
