"""What every `Executor` must do. Subclass `ExecutorContract` in a test module and say how to open one.

Only the protocol is relied on, and `Opened.make_step_fail`. What is sampled is not known here; tests compare what
different ways through the same sequence bring.
"""

import abc
import asyncio
import json
import os
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import anyio
import numpy as np
import pytest
from executor.plan_storm import Line, prompt_lines
from executor.plans import PlanWriter, choices_by_row, tokens_by_row
from nightly import nightly

from aioengine.core.control import StartProfile, StopProfile
from aioengine.core.executor_protocol import DeviceLost, Executor, PendingStep
from aioengine.errors import InvalidRequest
from aioengine.scheduler.plan import LogitsRow, StepPlan, StepResult


@dataclass
class Opened:
    """A started executor.

    Attributes:
        make_step_fail: lets the step of that number raise an error that is not `DeviceLost`; called before its launch.
    """

    executor: Executor
    make_step_fail: Callable[[int], None]

    def writer(self, seed: int = 0) -> PlanWriter:
        return PlanWriter.of(self.executor.info, seed, handles=self.executor.handles)

    async def run(self, plan: StepPlan) -> StepResult:
        return await self.executor.launch(plan).finish()

    async def step(self, writer: PlanWriter, num_tokens: dict[int, int | None] | None = None) -> dict[int, int]:
        """Plan a step as `PlanWriter.plan` does, run and read it: {row: sampled token}, one each."""
        plan = writer.plan(num_tokens)
        result = await self.run(plan)
        writer.read(plan, result)
        return tokens_by_row(plan, result)

    async def fail(self, plan: StepPlan) -> None:
        """Run a plan whose step fails by an error that is not `DeviceLost`."""
        self.make_step_fail(plan.step)
        with pytest.raises(Exception) as failure:
            await self.run(plan)
        assert not isinstance(failure.value, DeviceLost)


DRAWN: dict[str, Any] = {"temperature": 1.0, "seed": 5}
"""A way to sample in which choices differ."""

NO_TOKEN_LEFT: dict[str, Any] = {"allowed_token_ids": (3, 4), "bad_words": ((3,), (4,))}
"""Rules under which a row cannot sample."""


def prompt_tokens(plan: StepPlan, result: StepResult, *, row: int, num_top: int) -> dict[int, Line]:
    """{position: line} of one row's prompt tokens, in the order of the result; its form is checked."""
    lines = result.prompt_logprobs
    if lines is None:
        return {}
    assert (np.diff(lines.index) >= 0).all()
    assert lines.index.dtype == lines.positions.dtype == lines.ranks.dtype == lines.top_ids.dtype == np.int32
    assert lines.logprobs.dtype == lines.top_logprobs.dtype == np.float32
    of_row = np.flatnonzero(plan.rows == row).tolist()
    found = {position: line for (_, _, position), line in prompt_lines(lines, of_row).items()}
    assert all(len(line.top) >= num_top for line in found.values())
    return found


def step_names(path: Path) -> list[str]:
    """What a written trace calls its steps, in their order."""
    return [event["name"] for event in sorted(spans(path, "user_annotation"), key=lambda event: event["ts"])]


def spans(path: Path, category: str) -> list[dict[str, Any]]:
    """The spans of a written trace that are of one category; each has a time."""
    events = json.loads(path.read_text())["traceEvents"]
    assert all(event["dur"] >= 0 for event in events if event["ph"] == "X")
    return [event for event in events if event.get("cat") == category]


class ExecutorContract(abc.ABC):
    """The suite. An executor of 64 blocks or more, a ``max_model_len`` of 64 or more and 4 rows or more will do."""

    max_rows: ClassVar[int] = 4
    has_logits: ClassVar[bool] = True
    """Whether there are logits that a processor could change."""

    @abc.abstractmethod
    async def start(self, max_in_flight: int) -> Opened:
        """A fresh executor; always the same model, so that equal sequences bring equal tokens."""

    @pytest.fixture(params=[*nightly(1, 2), 4])
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
        self, opened: Opened, writer: PlanWriter, row: int, prompt: list[int], num_tokens: int, **sampling: Any
    ) -> list[int]:
        """One sequence alone, a step at a time, each finished before the next."""
        writer.add(row, prompt, **sampling)
        tokens = [(await opened.step(writer, {row: None}))[row] for _ in range(num_tokens)]
        writer.remove(row)
        return tokens

    # What there is to know

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
        for min_tokens, num_prompt_tokens in ((3, 9), (3, 7), (0, 9), (2, 7)):  # some are output from before
            writer.add(1, prompt, min_tokens=min_tokens, stop_ids=(free[0],), num_prompt_tokens=num_prompt_tokens)
            token = (await opened.step(writer, {1: None}))[1]
            assert (token != free[0]) == (min_tokens == 3)
            writer.remove(1)

    async def test_rows_bring_a_token_where_they_want_one_and_none_elsewhere(self, opened: Opened) -> None:
        writer = opened.writer()
        for row, length in enumerate([5, 40, 1, 33]):
            writer.add(row, self.prompt(opened, length, salt=row))
        tokens = await opened.step(writer, {3: 10, 0: None, 1: 39, 2: None})
        assert tokens.keys() == {0, 2}
        assert all(0 <= token < opened.executor.info.vocab_size for token in tokens.values())

    async def test_a_prompt_in_chunks_brings_what_it_brings_in_one_piece(self, opened: Opened) -> None:
        writer, prompt = opened.writer(), self.prompt(opened, 45)
        expected = await self.generate(opened, writer, 0, prompt, 1)
        writer.add(1, prompt)
        for count in (1, 17, 3, 23):
            assert await opened.step(writer, {1: count}) == {}
        assert await opened.step(writer) == {1: expected[0]}

    async def test_a_pooled_row_brings_a_vector_and_no_token_in_whatever_pieces_it_is_computed(
        self, opened: Opened
    ) -> None:
        async def vectors(writer: PlanWriter, pooled: tuple[int, ...]) -> list[np.ndarray]:
            plan = writer.plan(pooled=pooled)
            result = await opened.run(plan)
            assert choices_by_row(plan, result).keys() == writer.rows.keys() - set(pooled)
            return [result.vectors[plan.rows.tolist().index(row)] for row in pooled]

        writer, prompts = opened.writer(), [self.prompt(opened, 21, salt) for salt in range(3)]
        for row, prompt in enumerate(prompts):
            writer.add(row, prompt)
        expected = await vectors(writer, (0, 1, 2))
        assert {vector.dtype for vector in expected} == {np.dtype(np.float32)}
        assert not np.array_equal(expected[0], expected[1])
        for row in range(3):
            writer.remove(row)
        writer.add(2, prompts[2])
        writer.add(1, prompts[1])
        writer.add(3, prompts[0])
        await opened.run(writer.plan({2: 3, 3: 20}))
        found = await vectors(writer, (3, 2))  # beside one that samples
        for vector, wanted in zip(found, (expected[0], expected[2]), strict=True):
            np.testing.assert_allclose(vector, wanted, atol=1e-4)

    async def test_a_sequence_does_not_notice_its_company(self, opened: Opened) -> None:
        writer = opened.writer()
        prompts = {row: self.prompt(opened, length, salt=row) for row, length in enumerate([3, 30, 16, 9])}
        expected = {row: await self.generate(opened, writer, row, prompt, 10) for row, prompt in prompts.items()}
        brought: dict[int, list[int]] = {row: [] for row in prompts}
        for row, prompt in prompts.items():  # a new one with each step, while the others go on
            writer.add(row, prompt)
            for _ in range(2):
                for of_row, token in (await opened.step(writer)).items():
                    brought[of_row].append(token)
        for row, tokens in brought.items():
            assert tokens == expected[row][: len(tokens)]
            assert tokens

    async def test_a_sequence_that_is_added_again_with_its_output_goes_on_as_before(self, opened: Opened) -> None:
        writer, prompt = opened.writer(), self.prompt(opened, 14)
        tokens = await self.generate(opened, writer, 0, prompt, 8, **DRAWN)
        writer.add(2, prompt + tokens[:3], num_prompt_tokens=len(prompt), **DRAWN)
        for expected in tokens[3:]:
            assert await opened.step(writer) == {2: expected}
        assert await self.generate(opened, writer, 0, prompt, 8, **{**DRAWN, "seed": 6}) != tokens

    async def test_a_sequence_may_grow_to_the_longest(self, opened: Opened) -> None:
        writer, limit = opened.writer(), opened.executor.info.max_model_len
        writer.add(0, self.prompt(opened, limit - 3))
        for _ in range(3):
            await opened.step(writer)
        assert writer.rows[0].num_known == limit

    async def test_rows_and_blocks_are_used_again(self, opened: Opened) -> None:
        writer = opened.writer()
        prompts = [self.prompt(opened, 10 + salt, salt) for salt in range(12)]
        outputs = [await self.generate(opened, writer, salt % 2, prompt, 4) for salt, prompt in enumerate(prompts)]
        again = [await self.generate(opened, writer, 3, prompt, 4) for prompt in prompts]
        assert outputs == again
        assert len({tuple(tokens) for tokens in outputs}) > 6

    @pytest.mark.parametrize("num_blocks", [2, 9])
    async def test_rows_may_grow_by_several_blocks_in_one_plan(self, opened: Opened, num_blocks: int) -> None:
        writer = opened.writer()
        longest = min(num_blocks * writer.block_size + 1, opened.executor.info.max_model_len - 3)
        prompts = {row: self.prompt(opened, length, salt=row) for row, length in enumerate([longest, 3, longest])}
        expected = {row: await self.generate(opened, writer, 3, prompt, 3) for row, prompt in prompts.items()}
        for row, prompt in prompts.items():
            writer.add(row, prompt, max_blocks=1)
        for nth in range(3):
            assert await opened.step(writer) == {row: tokens[nth] for row, tokens in expected.items()}

    async def test_a_row_may_leave_and_be_taken_in_one_plan(self, opened: Opened) -> None:
        writer = opened.writer()
        expected = await self.generate(opened, writer, 0, self.prompt(opened, 6, salt=2), 1)
        writer.add(0, self.prompt(opened, 50, salt=1))
        await opened.run(writer.plan())
        writer.remove(0)
        writer.add(0, self.prompt(opened, 6, salt=2))
        assert await opened.step(writer) == {0: expected[0]}

    async def test_a_plan_may_have_deltas_and_no_rows(self, opened: Opened) -> None:
        writer = opened.writer()
        writer.add(0, self.prompt(opened, 6))
        await opened.run(writer.plan())
        writer.remove(0)
        assert await opened.step(writer, {}) == {}

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

    async def test_named_tokens_have_log_probabilities_beside_each_token_of_their_rows(self, opened: Opened) -> None:
        writer, prompt = opened.writer(), self.prompt(opened, 8)
        writer.add(0, prompt, logprobs=5)
        free = (await opened.run(writer.plan())).logprobs
        assert free is not None
        assert len(free.extra_offsets) == 0
        writer.remove(0)
        named = (int(free.top_ids[0, 4]), int(free.top_ids[0, 0]))
        wanted: list[tuple[int, tuple[int, ...]]] = [(2, ()), (0, named), (-1, ()), (1, (3,))]
        for row, (num_top, ids) in enumerate(wanted):
            writer.add(row, prompt if ids else prompt[1:], logprobs=num_top, logprob_token_ids=ids)
        logprobs = (await opened.run(writer.plan())).logprobs
        assert logprobs is not None
        assert logprobs.index.tolist() == [0, 1, 3]
        assert logprobs.extra_offsets.tolist() == [0, 0, 2, 3]
        assert logprobs.extra_ids.tolist() == [*named, 3]
        np.testing.assert_allclose(logprobs.extra_logprobs[:2], free.top_logprobs[0, [4, 0]], atol=1e-4)
        assert logprobs.extra_ranks[:2].tolist() == [5, 1]
        assert logprobs.extra_ranks[2] >= 1

    async def test_prompt_tokens_have_log_probabilities_in_whatever_pieces_they_come(self, opened: Opened) -> None:
        writer, prompt = opened.writer(), self.prompt(opened, 45)
        company = {1: self.prompt(opened, 30, salt=1), 2: self.prompt(opened, 12, salt=2)}
        found = []
        for counts in ([45], [1, 17, 3, 23, 1], [20, 25], [44, 1]):
            writer.add(0, prompt, prompt_logprobs=3)
            writer.add(1, company[1])
            writer.add(2, company[2], prompt_logprobs=5)
            lines: dict[int, Line] = {}
            for count in counts:
                plan = writer.plan({1: None, 2: 1, 0: count})
                lines |= prompt_tokens(plan, await opened.run(plan), row=0, num_top=3)
            assert list(lines) == list(range(1, 45))
            plan = writer.plan({0: None, 2: None})
            result = await opened.run(plan)
            assert prompt_tokens(plan, result, row=0, num_top=3) == {}, "the prompt is over"
            assert list(prompt_tokens(plan, result, row=2, num_top=5)) == list(range(len(counts) + 1, 12))
            assert (await opened.run(writer.plan({1: None}))).prompt_logprobs is None
            found.append(lines)
            for row in range(3):
                writer.remove(row)
        for lines in found[1:]:
            for position, line in lines.items():
                expected = found[0][position]
                assert line.rank == expected.rank
                assert line.logprob == pytest.approx(expected.logprob, abs=1e-4)
                for (token, logprob), (wanted, of_wanted) in zip(line.top[:3], expected.top[:3], strict=True):
                    assert (token, logprob) == (wanted, pytest.approx(of_wanted, abs=1e-4))
        for position, line in found[0].items():
            assert all(logprob <= 0 for logprob in (line.logprob, *(logprob for _, logprob in line.top)))
            assert (prompt[position] in [token for token, _ in line.top[:3]]) == (line.rank <= 3)

    async def test_output_tokens_are_no_prompt_tokens(self, opened: Opened) -> None:
        writer = opened.writer()
        writer.add(0, self.prompt(opened, 12), num_prompt_tokens=9, prompt_logprobs=0)
        plan = writer.plan()
        assert list(prompt_tokens(plan, await opened.run(plan), row=0, num_top=0)) == list(range(1, 9))

    async def test_a_step_says_when_it_ended(self, opened: Opened) -> None:
        writer, times = opened.writer(), [time.monotonic()]
        writer.add(0, self.prompt(opened, 12))
        for _ in range(3):
            result = await opened.run(writer.plan())
            times += [result.ended_at_s - result.device_time_s, result.ended_at_s]
        times.append(time.monotonic())
        assert times == sorted(times)

    # Rules

    async def test_only_allowed_tokens_are_sampled(self, opened: Opened) -> None:
        writer, prompt = opened.writer(), self.prompt(opened, 9)
        allowed = (5, 17, 31, 60)
        tokens = await self.generate(opened, writer, 0, prompt, 8, temperature=1.0, allowed_token_ids=allowed)
        assert set(tokens) <= set(allowed)
        assert await self.generate(opened, writer, 0, prompt, 3, allowed_token_ids=(17,)) == [17] * 3

    async def test_bad_words_are_not_completed_in_the_output(self, opened: Opened) -> None:
        writer, prompt = opened.writer(), self.prompt(opened, 9)
        free = await self.generate(opened, writer, 0, prompt, 4)
        for bad_words, num_kept in [
            (((free[0],),), 0),
            (((free[0], free[1]),), 1),
            (((free[0], free[1], free[2]), (free[1], free[0])), 2),
        ]:
            tokens = await self.generate(opened, writer, 0, prompt, 4, bad_words=bad_words)
            assert tokens[:num_kept] == free[:num_kept]
            assert tokens[num_kept] != free[num_kept]
        of_prompt = (*prompt[-2:], free[0])
        assert await self.generate(opened, writer, 0, prompt, 4, bad_words=(of_prompt,)) == free

    async def test_a_processor_changes_the_logits_of_the_rows_that_have_it(self, opened: Opened) -> None:
        if not self.has_logits:
            pytest.skip("it has no logits")
        writer, prompt = opened.writer(), self.prompt(opened, 9)
        free = await self.generate(opened, writer, 0, prompt, 3)
        other = (free[1] + 1) % opened.executor.info.vocab_size
        seen: list[list[tuple[list[int], list[int], int]]] = []

        def force_second_token(logits: Any, rows: list[LogitsRow]) -> None:
            seen.append([(r.prompt_token_ids.tolist(), r.output_token_ids.tolist(), r.choice) for r in rows])
            for line, row in zip(logits, rows, strict=True):
                if len(row.output_token_ids) == 1:
                    line[other] = line.max() + 100

        for row, processors in enumerate([(), (force_second_token,), (), (force_second_token,)]):
            writer.add(row, prompt, logits_processors=processors)
        for _ in range(2):
            tokens = await opened.step(writer)
        assert tokens == {0: free[1], 1: other, 2: free[1], 3: other}
        assert seen == [[(prompt, [], 0)] * 2, [(prompt, free[:1], 0)] * 2]

    async def test_a_processor_that_raises_fails_its_rows_alone(self, opened: Opened) -> None:
        if not self.has_logits:
            pytest.skip("it has no logits")
        writer, prompt = opened.writer(), self.prompt(opened, 9)
        free = await self.generate(opened, writer, 0, prompt, 1)

        def fail(logits: Any, rows: list[LogitsRow]) -> None:
            raise ArithmeticError("on purpose")

        for row, processors in enumerate([(fail,), (), (fail,)]):
            writer.add(row, prompt, logits_processors=processors)
        plan = writer.plan()
        result = await opened.run(plan)
        assert [failure.index for failure in result.failures] == [0, 2]
        assert all("on purpose" in str(failure.error) for failure in result.failures)
        assert choices_by_row(plan, result) == {0: [], 1: free, 2: []}

    # Choices

    async def choices_alone(
        self, opened: Opened, writer: PlanWriter, prompt: list[int], num_choices: int, num_tokens: int
    ) -> list[list[int]]:
        """What each choice brings when it is computed as a sequence of its own."""
        return [
            await self.generate(opened, writer, 0, prompt, num_tokens, **DRAWN, choice=choice)
            for choice in range(num_choices)
        ]

    async def test_the_first_tokens_of_all_choices_come_from_one_row(self, opened: Opened) -> None:
        writer, prompt = opened.writer(), self.prompt(opened, 21)
        expected = await self.choices_alone(opened, writer, prompt, 5, 3)
        assert len({tokens[0] for tokens in expected}) > 1
        lone = await self.generate(opened, writer, 0, self.prompt(opened, 6, salt=1), 1)
        num_sampled = opened.executor.stats.num_sampled_tokens
        writer.add(0, self.prompt(opened, 6, salt=1))
        writer.add(1, prompt, **DRAWN, num_choices=5, logprobs=2)
        writer.add(2, prompt, **DRAWN, choice=2, num_choices=2)
        plan = writer.plan({0: None, 1: 20, 2: None})
        result = await opened.run(plan)
        firsts = [tokens[0] for tokens in expected]
        assert choices_by_row(plan, result) == {0: lone, 2: firsts[2:4]}
        writer.read(plan, result)
        plan = writer.plan({2: None, 1: None})
        result = await opened.run(plan)
        assert choices_by_row(plan, result) == {2: [expected[2][1]], 1: firsts}
        writer.read(plan, result)
        assert result.logprobs is not None
        assert result.logprobs.index.tolist() == [1, 2, 3, 4, 5], "a line for each choice"
        assert await opened.step(writer, {1: None}) == {1: expected[0][1]}, "it goes on with the first"
        assert opened.executor.stats.num_sampled_tokens == num_sampled + 3 + 6 + 1

    @pytest.mark.parametrize("length", [3, 16, *nightly(17, 31, 40)])
    async def test_choices_that_share_the_prompts_blocks_go_on_as_if_alone(self, opened: Opened, length: int) -> None:
        """The first has written behind the prompt by then, as many tokens as there are steps in flight."""
        num_choices, num_tokens = self.max_rows, 12
        writer, prompt = opened.writer(), self.prompt(opened, length)
        expected = await self.choices_alone(opened, writer, prompt, num_choices, num_tokens)
        assert len({tuple(tokens) for tokens in expected}) > 1
        writer.add(0, prompt, **DRAWN, num_choices=num_choices)
        brought: list[list[int]] = [[] for _ in range(num_choices)]
        in_flight: list[tuple[StepPlan, PendingStep[StepResult]]] = []
        while min(map(len, brought)) < num_tokens:
            plan = writer.plan()
            in_flight.append((plan, opened.executor.launch(plan)))
            if len(in_flight) < opened.executor.info.max_in_flight:
                continue
            plan, step = in_flight.pop(0)
            result = await step.finish()
            for row, tokens in choices_by_row(plan, result).items():
                brought[row].append(tokens[0])
            writer.read(plan, result)
            for choice, token in enumerate(choices_by_row(plan, result)[0]):
                if choice > 0:
                    writer.fork(0, choice, token, **DRAWN, choice=choice)
                    brought[choice].append(token)
        for _, step in in_flight:
            await step.finish()
        for choice, tokens in enumerate(brought):
            assert tokens[:num_tokens] == expected[choice]

    async def second_choice(self, opened: Opened, writer: PlanWriter, prompt: list[int]) -> int:
        """Begin two choices of a prompt in row 0, in its first step; returns the first token of the second."""
        writer.add(0, prompt, **DRAWN, num_choices=2)
        plan = writer.plan()
        result = await opened.run(plan)
        writer.read(plan, result)
        return choices_by_row(plan, result)[0][1]

    async def test_a_block_is_copied_before_another_row_that_has_got_it_writes(self, opened: Opened) -> None:
        writer, prompt = opened.writer(), self.prompt(opened, 22)
        expected = await self.choices_alone(opened, writer, prompt, 2, 6)
        other = self.prompt(opened, 30, salt=4)
        of_other = await self.generate(opened, writer, 0, other, 1)
        writer.fork(0, 1, await self.second_choice(opened, writer, prompt), **DRAWN, choice=1)
        writer.remove(0, is_reused_next=True)
        writer.add(0, other)
        plan = writer.plan()
        assert set(plan.copied_from.tolist()) & set(np.concatenate(plan.added[1].block_ids).tolist()), (
            "the copied block has a new row"
        )
        tokens = tokens_by_row(plan, await opened.run(plan))
        assert tokens == {0: of_other[0], 1: expected[1][1]}

    async def test_a_block_is_copied_behind_the_steps_in_flight_that_write_where_it_goes(self, opened: Opened) -> None:
        writer, prompt = opened.writer(), self.prompt(opened, 22)
        expected = await self.choices_alone(opened, writer, prompt, 2, 3)
        second = await self.second_choice(opened, writer, prompt)
        writer.add(1, self.prompt(opened, 1, salt=1))
        plans = [writer.plan()]
        state = writer.remove(1, is_reused_next=True)
        writer.fork(0, 1, second, **DRAWN, choice=1)
        plans += [writer.plan({1: None}), writer.plan({1: None})]
        assert {*plans[1].copied_to.tolist()} == {b for (b,) in state.block_ids}, "the copy goes where the row was"
        results = await self.run_all(opened, plans)
        tokens = [tokens_by_row(plan, result)[1] for plan, result in zip(plans[1:], results[1:], strict=True)]
        assert tokens == expected[1][1:]

    async def test_the_copies_of_a_failed_step_hold(self, opened: Opened) -> None:
        writer, prompt = opened.writer(), self.prompt(opened, 22)
        expected = await self.choices_alone(opened, writer, prompt, 2, 3)
        writer.fork(0, 1, await self.second_choice(opened, writer, prompt), **DRAWN, choice=1)
        await opened.fail(writer.plan({0: None}))
        for token in expected[1][1:]:
            assert await opened.step(writer, {1: None}) == {1: token}

    # Several steps in flight

    async def test_steps_in_flight_read_the_tokens_that_are_on_the_device(self, opened: Opened) -> None:
        writer, prompt = opened.writer(), self.prompt(opened, 9)
        expected = await self.generate(opened, writer, 0, prompt, 12)
        writer.add(0, prompt)
        plans = [writer.plan() for _ in range(12)]
        results = await self.run_all(opened, plans)
        assert [tokens_by_row(*pair)[0] for pair in zip(plans, results, strict=True)] == expected

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
        steps: list[PendingStep[StepResult]] = []
        results = []
        for plan in plans:
            if len(steps) - len(results) == opened.executor.info.max_in_flight:
                results.append(await steps[len(results)].finish())
                assert steps[len(results) - 1].is_done
            steps.append(opened.executor.launch(plan))
        for step in steps[len(results) :]:
            results.append(await step.finish())
        return results

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
        await opened.fail(writer.plan())
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
        await opened.fail(writer.plan({1: None}))
        writer.remove(1)
        assert await opened.step(writer, {0: None}) == {0: expected[0]}
        assert await opened.step(writer) == {0: expected[1]}

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

    async def test_a_row_that_fails_harms_nobody_else(self, opened: Opened) -> None:
        writer = opened.writer()
        prompts = {row: self.prompt(opened, 9 + row, salt=row) for row in range(3)}
        expected = {row: await self.generate(opened, writer, row, prompts[row], 4) for row in (0, 2)}
        writer.add(0, prompts[0], logprobs=0)
        writer.add(1, prompts[1], **NO_TOKEN_LEFT, num_choices=3, logprobs=0)
        writer.add(2, prompts[2], logprobs=0)
        plans = [writer.plan(), writer.plan()]  # the second goes on from a meaningless token
        writer.remove(1)
        plans += [writer.plan(), writer.plan()]
        results = await self.run_all(opened, plans)
        assert [(failure.index, str(failure.error) != "") for failure in results[0].failures] == [(1, True)]
        assert choices_by_row(plans[0], results[0])[1] == []
        assert results[0].logprobs is not None
        assert results[0].logprobs.index.tolist() == [0, 1], "of the tokens, not of the rows"
        for result in results[2:]:
            assert result.failures == ()
        tokens = [choices_by_row(*pair) for pair in zip(plans, results, strict=True)]
        for row in (0, 2):
            assert [of_step[row] for of_step in tokens] == [[token] for token in expected[row]]
        again = await self.generate(opened, writer, 1, prompts[0], 4)
        assert again == expected[0], "in a row and in blocks where one failed"

    async def test_a_row_whose_first_step_brings_nothing_may_fail_later(self, opened: Opened) -> None:
        writer = opened.writer()
        writer.add(0, self.prompt(opened, 9), **NO_TOKEN_LEFT)
        assert (await opened.run(writer.plan({0: 5}))).failures == ()
        result = await opened.run(writer.plan())
        assert [failure.index for failure in result.failures] == [0]
        assert len(result.token_ids) == 0

    # Profiles

    async def test_a_profile_shows_the_steps_launched_while_it_was_recorded(
        self, opened: Opened, tmp_path: Path
    ) -> None:
        writer, prompt, path = opened.writer(), self.prompt(opened, 9), tmp_path / "trace.json"
        expected = await self.generate(opened, writer, 0, prompt, 5)
        writer.add(0, prompt)
        plans = [writer.plan()]
        await opened.run(plans[0])
        await opened.executor.perform(StartProfile(max_steps=100))
        plans += [writer.plan() for _ in range(3)]
        results = await self.run_all(opened, plans[1:])
        await opened.executor.perform(StopProfile(path))
        assert step_names(path) == [f"step {plan.step} (1 rows, 1 tokens)" for plan in plans[1:]]
        assert os.listdir(tmp_path) == [path.name]
        plan = writer.plan()
        results.append(await opened.run(plan))
        tokens = [tokens_by_row(*pair)[0] for pair in zip([*plans[1:], plan], results, strict=True)]
        assert tokens == expected[1:], "recording changes no token"

    async def test_a_profile_has_a_start_an_end_and_no_more_steps_than_it_may(
        self, opened: Opened, tmp_path: Path
    ) -> None:
        executor, writer, path = opened.executor, opened.writer(), tmp_path / "trace.json"
        writer.add(0, self.prompt(opened, 9))
        for names in (["step 1 (1 rows, 9 tokens)", "step 2 (1 rows, 1 tokens)"], ["step 5 (1 rows, 1 tokens)"], []):
            with pytest.raises(InvalidRequest, match="start one first"):
                await executor.perform(StopProfile(path))
            await executor.perform(StartProfile(max_steps=2))
            await self.run_all(opened, [writer.plan() for _ in range(2 * len(names) if len(names) > 1 else len(names))])
            with pytest.raises(InvalidRequest, match="already"):  # also when it has ended, and waits to be written
                await executor.perform(StartProfile(max_steps=2))
            await executor.perform(StopProfile(path))
            assert step_names(path) == names, "in the place of the one before"

    async def test_a_profile_that_cannot_be_written_says_so_and_leaves_all_as_it_was(
        self, opened: Opened, tmp_path: Path
    ) -> None:
        writer, prompt = opened.writer(), self.prompt(opened, 9)
        expected = await self.generate(opened, writer, 0, prompt, 1)
        (tmp_path / "folder").mkdir()
        (tmp_path / "file").write_text("a file")
        paths = [tmp_path / "missing" / "trace.json", tmp_path / "folder", tmp_path / "file" / "trace.json"]
        for path in paths:
            await opened.executor.perform(StartProfile(max_steps=100))
            with pytest.raises(OSError, match=path.name):
                await opened.executor.perform(StopProfile(path))
        assert sorted(os.listdir(tmp_path)) == ["file", "folder"]
        assert await self.generate(opened, writer, 0, prompt, 1) == expected
        await opened.executor.perform(StartProfile(max_steps=100))
        await opened.executor.perform(StopProfile(tmp_path / "trace.json"))
        assert step_names(tmp_path / "trace.json") == []

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

    async def test_closing_at_once_is_closing_and_a_later_step_says_that_the_device_is_lost(
        self, opened: Opened
    ) -> None:
        writer = opened.writer()
        writer.add(0, self.prompt(opened, 9))
        async with anyio.create_task_group() as tasks:
            for _ in range(3):
                tasks.start_soon(opened.executor.aclose)
        await opened.executor.aclose()
        with pytest.raises(DeviceLost):
            await opened.run(writer.plan())
