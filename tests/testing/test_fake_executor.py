"""The fake device passes the contract of real ones; here is what it would hide otherwise, and what it refuses."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import anyio
import numpy as np
import pytest
from executor.contract import ExecutorContract, Opened, spans
from executor.control_contract import ControlContract, Controlled

from aioengine.core.control import Sleep, StartProfile, StopProfile, UpdateWeights
from aioengine.core.executor_protocol import DeviceLost
from aioengine.scheduler.plan import Purpose, RowAdded, RowSampling, StepPlan, StepResult, int32
from aioengine.testing.fake_executor import sample_hash
from doubles.fake_executor import FakeExecutor
from doubles.weighted_executor import WeightedExecutor

SAMPLING = RowSampling(seed=1)


class InjectedFailure(Exception):
    pass


class TestContract(ExecutorContract):
    """What the torch executor passes, the fake one passes."""

    has_logits = False

    async def start(self, max_in_flight: int) -> Opened:
        executor = FakeExecutor(num_blocks=128, max_in_flight=max_in_flight)
        return Opened(executor, lambda step: executor.make_step_fail(step, InjectedFailure(f"step {step}")))


class TestControlContract(ControlContract):
    async def start(self, tmp_path: Path, max_in_flight: int) -> Controlled:
        executor = WeightedExecutor(max_in_flight=max_in_flight)
        other = tmp_path / "other"
        other.mkdir(exist_ok=True)
        return Controlled(executor, other, executor.weight_shapes)


def make_row(
    row: int, token_ids: list[int], block_ids: list[int], *, num_prompt_tokens: int | None = None, **sampling: Any
) -> RowAdded:
    return RowAdded(
        row=row,
        token_ids=int32(token_ids),
        num_prompt_tokens=len(token_ids) if num_prompt_tokens is None else num_prompt_tokens,
        block_ids=(int32(block_ids),),
        sampling=RowSampling(**{"seed": 1, **sampling}),
    )


def make_plan(
    step: int, *work: tuple[int, int, int, Purpose], added: tuple[RowAdded, ...] = (), **deltas: Any
) -> StepPlan:
    """A plan whose ``work`` is (row, start, num_tokens, want) a row."""
    rows, starts, num_tokens, purposes = (
        (list(column) for column in zip(*work, strict=True)) if work else ([], [], [], [])
    )
    return StepPlan(
        step=step,
        removed=int32(deltas.get("removed", [])),
        added=added,
        grown_rows=int32([row for row, _ in deltas.get("grown", [])]),
        grown_groups=int32([0 for _ in deltas.get("grown", [])]),
        grown_blocks=int32([block_id for _, block_id in deltas.get("grown", [])]),
        rows=int32(rows),
        epochs=int32([0] * len(rows)),
        starts=int32(starts),
        num_tokens=int32(num_tokens),
        purposes=np.array(purposes, np.int8),
        copied_from=int32([source for source, _ in deltas.get("copied", [])]),
        copied_to=int32([target for _, target in deltas.get("copied", [])]),
    )


def make_executor(**options: Any) -> FakeExecutor:
    return FakeExecutor(num_blocks=8, block_size=4, max_model_len=16, is_manual=True, **options)


def compute(executor: FakeExecutor, plan: StepPlan) -> StepResult:
    """The result of a plan, at once."""
    step = executor.launch(plan)
    step.complete()
    waiting = step.finish()
    with pytest.raises(StopIteration) as stop:
        waiting.send(None)
    result: StepResult = stop.value.value
    return result


def expected(*token_ids: int) -> int:
    return sample_hash(list(token_ids), SAMPLING, vocab_size=1000)


# What it computes


def test_a_token_depends_on_the_seed_the_choice_and_every_token_before_it() -> None:
    tokens = {sample_hash(ids, SAMPLING, vocab_size=10**6) for ids in ([1, 2, 3], [2, 1, 3], [1, 2], [9, 2, 3])}
    others = {sample_hash([1, 2, 3], other, vocab_size=10**6) for other in (RowSampling(seed=2), RowSampling(choice=1))}
    assert len(tokens | others) == 6


def test_what_another_row_writes_into_a_block_is_read() -> None:
    executor = make_executor()
    compute(executor, make_plan(0, (0, 0, 4, Purpose.NOTHING), added=(make_row(0, [5, 6, 7, 8, 9], [2, 3]),)))
    sharing = make_row(1, [5, 6, 7, 8, 1], [2, 4])
    result = compute(executor, make_plan(1, (1, 4, 1, Purpose.SAMPLE), added=(sharing,)))
    assert (result.token_ids.tolist(), result.logprobs) == ([expected(5, 6, 7, 8, 1)], None)
    thief = make_row(2, [0, 0], [2])
    compute(executor, make_plan(2, (2, 0, 1, Purpose.NOTHING), added=(thief,)))
    result = compute(executor, make_plan(3, (1, 5, 1, Purpose.SAMPLE)))
    assert result.token_ids.tolist() == [expected(0, 6, 7, 8, 1, expected(5, 6, 7, 8, 1))], "the stolen block shows"


@pytest.mark.parametrize(
    ("child", "read"),
    [
        (make_row(1, [5, 6, 7, 8, 9], [4, 5]), [-1, -1, -1, -1, 9]),  # a prefix that was not computed
        (make_row(1, [1, 2, 3, 4, 5, 6, 9], [2, 7], num_prompt_tokens=6), [1, 2, 3, 4, -1, -1, 9]),  # and not copied
    ],
)
def test_what_was_not_written_shows(child: RowAdded, read: list[int]) -> None:
    executor = make_executor()
    compute(executor, make_plan(0, (0, 0, 6, Purpose.SAMPLE), added=(make_row(0, [1, 2, 3, 4, 5, 6], [2, 3]),)))
    last = len(child.token_ids) - 1
    result = compute(executor, make_plan(1, (1, last, 1, Purpose.SAMPLE), added=(child,)))
    assert result.token_ids.tolist() == [expected(*read)]


def test_rows_are_removed_before_others_take_them_and_grow_before_they_compute() -> None:
    executor = make_executor()
    compute(executor, make_plan(0, (0, 0, 4, Purpose.NOTHING), added=(make_row(0, [5, 6, 7, 8, 9], [2]),)))
    row = make_row(1, [1, 2], [5])
    plan = make_plan(1, (0, 4, 1, Purpose.SAMPLE), (1, 0, 2, Purpose.SAMPLE), added=(row,), grown=[(0, 3)])
    compute(executor, plan)
    tokens = [5, 6, 7, 8, 9, expected(5, 6, 7, 8, 9)]
    assert executor.rows() == {0: (tokens, [[2, 3]]), 1: ([1, 2, expected(1, 2)], [[5]])}
    compute(executor, make_plan(2, (0, 0, 1, Purpose.SAMPLE), added=(make_row(0, [4], [2]),), removed=[0, 1]))
    assert executor.rows() == {0: ([4, expected(4)], [[2]])}


def test_likely_tokens_are_in_the_vocabulary() -> None:
    row = make_row(0, [5], [0], logprobs=20, prompt_logprobs=20)
    executor = make_executor(vocab_size=3, sampler=lambda *_: 2)
    result = compute(executor, make_plan(0, (0, 0, 1, Purpose.SAMPLE), added=(row,)))
    assert result.logprobs is not None
    assert result.logprobs.top_ids.tolist() == [[2, 0, 1]]


# What it refuses

ROW = make_row(0, [5, 6, 7], [2])


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        (make_plan(1, added=(ROW,)), "row 0 is taken"),
        (make_plan(1, (0, 2, 1, Purpose.NOTHING), (0, 2, 1, Purpose.NOTHING)), "stands twice"),
        (make_plan(1, (0, 2, 0, Purpose.NOTHING)), "at least one token"),
        (make_plan(1, (0, 2, 2, Purpose.NOTHING)), "before it is known"),
        (make_plan(1, (0, 1, 1, Purpose.SAMPLE)), "sampled after the last known one"),
        (make_plan(1, (1, 0, 5, Purpose.NOTHING), added=(make_row(1, [1] * 5, [3]),)), "no block to go to"),
        (
            make_plan(1, (1, 0, 16, Purpose.SAMPLE), added=(make_row(1, [1] * 16, [3, 4, 5, 6]),)),
            "as long as the model",
        ),
        (make_plan(1, copied=[(0, 1), (2, 1)]), "copied to twice"),
        (make_plan(1, copied=[(0, 1), (1, 2)]), "copied from and to"),
        (make_plan(1, copied=[(3, 3)]), "copied from and to"),
        (make_plan(1, (1, 0, 1, Purpose.NOTHING)), "1"),
    ],
)
def test_it_refuses_what_a_device_could_not_run(plan: StepPlan, message: str) -> None:
    executor = make_executor()
    compute(executor, make_plan(0, (0, 0, 2, Purpose.NOTHING), added=(ROW,)))
    with pytest.raises((AssertionError, KeyError), match=message):
        executor.launch(plan)


def test_it_takes_no_more_steps_at_once_than_it_says() -> None:
    executor = make_executor(max_in_flight=2)
    executor.launch(make_plan(0, added=(ROW,)))
    executor.launch(make_plan(1))
    with pytest.raises(AssertionError, match="more steps in flight"):
        executor.launch(make_plan(2))


# When steps end


@pytest.mark.virtual_clock
async def test_steps_run_one_after_the_other_for_their_time_each(tmp_path: Path) -> None:
    executor = FakeExecutor(step_time_s=0.5, max_in_flight=3)
    loop = asyncio.get_running_loop()
    await executor.perform(StartProfile(max_steps=2))
    steps = [executor.launch(make_plan(0, added=(ROW,))), executor.launch(make_plan(1))]
    assert not steps[0].is_done
    times = []
    for step in steps:
        result = await step.finish()
        assert result.device_time_s == 0.5
        assert result.ended_at_s == loop.time()
        times.append(loop.time())
    idle = executor.launch(make_plan(2))
    await asyncio.sleep(2)
    assert (await idle.finish()).ended_at_s == 1.5, "when it has ended, and not when that was read"
    assert times == [0.5, 1.0]
    assert executor.events == [
        ("launch", 0), ("launch", 1), ("finish", 0), ("finish", 1), ("launch", 2), ("finish", 2)
    ]  # fmt: skip
    await executor.perform(StopProfile(tmp_path / "trace.json"))
    traced = [(span["ts"], span["dur"]) for span in spans(tmp_path / "trace.json", "user_annotation")]
    assert traced == [(0, 500_000), (0, 1_000_000)], "from the launch on"


async def test_steps_without_a_time_end_with_the_loops_next_turn_and_those_by_hand_one_at_a_time() -> None:
    step = FakeExecutor().launch(make_plan(0, added=(ROW,)))
    executor = make_executor(max_in_flight=2)
    steps = [executor.launch(make_plan(0, added=(ROW,))), executor.launch(make_plan(1))]
    assert not step.is_done
    await asyncio.sleep(0)
    assert step.is_done
    for is_done in ([True, False], [True, True]):
        executor.complete()
        assert [step.is_done for step in steps] == is_done
    with pytest.raises(StopIteration):
        executor.complete()


# When it breaks


async def test_a_row_made_to_fail_brings_no_token_and_the_others_theirs() -> None:
    executor = make_executor(max_in_flight=2)
    executor.make_row_fail(0, 1, ValueError("broken"))
    rows = ROW, make_row(1, [4, 5], [3], logprobs=0), make_row(2, [6], [4], logprobs=0)
    works = [(row, 0, len(added.token_ids), Purpose.SAMPLE) for row, added in enumerate(rows)]
    result = compute(executor, make_plan(0, *works, added=rows))
    assert [(failure.index, str(failure.error)) for failure in result.failures] == [(1, "broken")]
    assert result.offsets.tolist() == [0, 1, 1, 2]
    assert result.token_ids.tolist() == [expected(5, 6, 7), expected(6)]
    assert result.logprobs is not None
    assert result.logprobs.index.tolist() == [1]
    assert executor.stats.num_computed_tokens == 6
    assert executor.stats.num_sampled_tokens == 2
    result = compute(executor, make_plan(1, (1, 2, 1, Purpose.SAMPLE), (2, 1, 1, Purpose.SAMPLE)))
    assert result.failures == ()
    assert result.token_ids.tolist()[1] == expected(6, expected(6))


async def test_a_lost_device_stays_lost() -> None:
    executor = make_executor(max_in_flight=2)
    executor.make_step_fail(0, DeviceLost("gone"))
    steps = [executor.launch(make_plan(0, added=(ROW,))), executor.launch(make_plan(1))]
    for step in steps:
        executor.complete()
        with pytest.raises(DeviceLost, match="gone"):
            await step.finish()


@pytest.mark.virtual_clock
async def test_a_control_call_waits_for_the_launched_steps_and_is_recorded(tmp_path: Path) -> None:
    executor = FakeExecutor(step_time_s=1.0)
    step = executor.launch(make_plan(1, (0, 0, 3, Purpose.SAMPLE), added=(ROW,)))
    assert await executor.apply_model(lambda model: model is executor) == [True]
    assert asyncio.get_running_loop().time() == 1.0
    await step.finish()
    await executor.perform(UpdateWeights(tmp_path))
    await executor.perform(Sleep(1))
    kinds = [kind for kind, _ in executor.events]
    assert kinds == ["launch", "apply_model", "finish", "update_weights", "sleep"]
    assert executor.events[-2:] == [("update_weights", tmp_path), ("sleep", 1)]


async def test_a_control_call_that_waits_hears_of_the_closing() -> None:
    executor = make_executor()
    executor.launch(make_plan(1, added=(ROW,)))
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(executor.aclose)
        with pytest.raises(DeviceLost):
            await executor.perform(Sleep(1))
