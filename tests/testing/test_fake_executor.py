"""The fake device passes the contract of real ones; here is what it has beyond that, and what it refuses."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import anyio
import numpy as np
import pytest
from executor.contract import ExecutorContract, Opened, spans
from executor.control_contract import ControlContract, Controlled

from aioengine.core.control import StageWeights
from aioengine.core.executor_protocol import DeviceLost
from aioengine.errors import ModelLoadError
from aioengine.scheduler.plan import RowAdded, RowSampling, StepPlan, StepResult, Want, int32
from aioengine.testing.fake_executor import FakeExecutor, sample_hash

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
        executor = FakeExecutor(max_in_flight=max_in_flight)
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
        block_ids=int32(block_ids),
        sampling=RowSampling(**{"seed": 1, **sampling}),
    )


def make_plan(
    step: int, *work: tuple[int, int, int, Want], added: tuple[RowAdded, ...] = (), **deltas: Any
) -> StepPlan:
    """A plan whose ``work`` is (row, start, num_tokens, want) a row."""
    rows, starts, num_tokens, wants = (list(column) for column in zip(*work, strict=True)) if work else ([], [], [], [])
    return StepPlan(
        step=step,
        removed=int32(deltas.get("removed", [])),
        added=added,
        grown_rows=int32([row for row, _ in deltas.get("grown", [])]),
        grown_blocks=int32([block_id for _, block_id in deltas.get("grown", [])]),
        rows=int32(rows),
        epochs=int32([0] * len(rows)),
        starts=int32(starts),
        num_tokens=int32(num_tokens),
        wants=np.array(wants, np.int8),
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


def expected(*token_ids: int, sampling: RowSampling = SAMPLING) -> int:
    return sample_hash(list(token_ids), sampling, vocab_size=1000)


# What it computes


def test_a_prompt_is_computed_and_the_next_tokens_follow() -> None:
    executor = make_executor()
    result = compute(executor, make_plan(0, (0, 0, 3, Want.LOGITS), added=(make_row(0, [5, 6, 7], [2]),)))
    first = expected(5, 6, 7)
    assert (result.step, result.offsets.tolist(), result.token_ids.tolist()) == (0, [0, 1], [first])
    assert result.logprobs is None
    result = compute(executor, make_plan(1, (0, 3, 1, Want.LOGITS)))
    assert result.token_ids.tolist() == [expected(5, 6, 7, first)]
    assert executor.stats.num_steps == 2
    assert executor.stats.num_computed_tokens == 4
    assert executor.stats.num_sampled_tokens == 2


def test_a_token_depends_on_the_seed_the_choice_and_every_token_before_it() -> None:
    tokens = {sample_hash(ids, SAMPLING, vocab_size=10**6) for ids in ([1, 2, 3], [2, 1, 3], [1, 2], [9, 2, 3])}
    others = {sample_hash([1, 2, 3], other, vocab_size=10**6) for other in (RowSampling(seed=2), RowSampling(choice=1))}
    assert len(tokens | others) == 6


def test_what_another_row_writes_into_a_block_is_read() -> None:
    executor = make_executor()
    compute(executor, make_plan(0, (0, 0, 4, Want.NOTHING), added=(make_row(0, [5, 6, 7, 8, 9], [2, 3]),)))
    sharing = make_row(1, [5, 6, 7, 8, 1], [2, 4])
    result = compute(executor, make_plan(1, (1, 4, 1, Want.LOGITS), added=(sharing,)))
    assert result.token_ids.tolist() == [expected(5, 6, 7, 8, 1)]
    thief = make_row(2, [0, 0], [2])
    compute(executor, make_plan(2, (2, 0, 1, Want.NOTHING), added=(thief,)))
    result = compute(executor, make_plan(3, (1, 5, 1, Want.LOGITS)))
    assert result.token_ids.tolist() == [expected(0, 6, 7, 8, 1, expected(5, 6, 7, 8, 1))], "the stolen block shows"


def test_a_prefix_that_nobody_has_computed_shows() -> None:
    executor = make_executor()
    row = make_row(0, [5, 6, 7, 8, 9], [2, 3])
    result = compute(executor, make_plan(0, (0, 4, 1, Want.LOGITS), added=(row,)))
    assert result.token_ids.tolist() == [expected(-1, -1, -1, -1, 9)]


def test_rows_are_removed_before_others_take_them_and_grow_before_they_compute() -> None:
    executor = make_executor()
    compute(executor, make_plan(0, (0, 0, 4, Want.NOTHING), added=(make_row(0, [5, 6, 7, 8, 9], [2]),)))
    row = make_row(1, [1, 2], [5])
    plan = make_plan(1, (0, 4, 1, Want.LOGITS), (1, 0, 2, Want.LOGITS), added=(row,), grown=[(0, 3)], removed=[6])
    compute(executor, plan)
    tokens = [5, 6, 7, 8, 9, expected(5, 6, 7, 8, 9)]
    assert executor.rows() == {0: (tokens, [2, 3]), 1: ([1, 2, expected(1, 2)], [5])}
    compute(executor, make_plan(2, (0, 0, 1, Want.LOGITS), added=(make_row(0, [4], [2]),), removed=[0, 1]))
    assert executor.rows() == {0: ([4, expected(4)], [2])}


def test_a_sampler_of_ones_own_reads_the_kv_and_the_row() -> None:
    seen: list[tuple[list[int], int]] = []

    def sampler(token_ids: list[int], sampling: RowSampling) -> int:
        seen.append((token_ids, sampling.seed))
        return 42

    executor = make_executor(sampler=sampler)
    result = compute(executor, make_plan(0, (0, 0, 2, Want.LOGITS), added=(make_row(0, [5, 6], [2], seed=9),)))
    assert result.token_ids.tolist() == [42]
    assert seen == [([5, 6], 9)]


# Copies


def test_a_block_that_was_not_copied_shows() -> None:
    executor = make_executor()
    compute(executor, make_plan(0, (0, 0, 6, Want.LOGITS), added=(make_row(0, [1, 2, 3, 4, 5, 6], [2, 3]),)))
    child = make_row(1, [1, 2, 3, 4, 5, 6, 9], [2, 7], num_prompt_tokens=6)
    result = compute(executor, make_plan(1, (1, 6, 1, Want.LOGITS), added=(child,)))
    assert result.token_ids.tolist() == [expected(1, 2, 3, 4, -1, -1, 9)]


@pytest.mark.parametrize(
    ("copied", "message"),
    [([(0, 1), (2, 1)], "copied to twice"), ([(0, 1), (1, 2)], "copied from and to"), ([(3, 3)], "copied from and to")],
)
def test_it_refuses_copies_whose_order_would_matter(copied: list[tuple[int, int]], message: str) -> None:
    with pytest.raises(AssertionError, match=message):
        make_executor().launch(make_plan(0, copied=copied))


# What rows want of their tokens


def test_rules_that_leave_no_token_fail_the_row_alone() -> None:
    executor = make_executor()
    rules = {"allowed_token_ids": (3, 4), "bad_words": ((3,),), "stop_ids": (4,), "min_tokens": 1}
    rows = make_row(0, [5], [2], **rules), make_row(1, [6], [3])
    result = compute(executor, make_plan(0, (0, 0, 1, Want.LOGITS), (1, 0, 1, Want.LOGITS), added=rows))
    assert [failure.index for failure in result.failures] == [0]
    assert "no token may be sampled" in str(result.failures[0].error)
    assert result.offsets.tolist() == [0, 0, 1]
    assert result.token_ids.tolist() == [expected(6)]


def test_named_tokens_have_log_probabilities_with_every_token_of_a_row() -> None:
    executor = make_executor(vocab_size=50)
    rows = (
        make_row(0, [5], [0], logprobs=1),
        make_row(1, [6], [1], logprobs=0, logprob_token_ids=(4, 9), num_choices=2),
        make_row(2, [7], [2], logprob_token_ids=(8,)),
    )
    result = compute(executor, make_plan(0, *((row, 0, 1, Want.LOGITS) for row in range(3)), added=rows))
    logprobs = result.logprobs
    assert logprobs is not None
    assert logprobs.index.tolist() == [0, 1, 2]
    assert logprobs.extra_offsets.tolist() == [0, 0, 2, 4]
    assert logprobs.extra_ids.tolist() == [4, 9, 4, 9]
    behind = [(token - int(chosen)) % 50 for chosen in result.token_ids[1:3] for token in (4, 9)]
    assert logprobs.extra_ranks.tolist() == [1 + distance for distance in behind]
    assert logprobs.extra_logprobs.tolist() == [-0.5 - distance for distance in behind]


def test_likely_tokens_are_in_the_vocabulary() -> None:
    row = make_row(0, [5], [0], logprobs=20, prompt_logprobs=20)
    executor = make_executor(vocab_size=3, sampler=lambda *_: 2)
    result = compute(executor, make_plan(0, (0, 0, 1, Want.LOGITS), added=(row,)))
    assert result.logprobs is not None
    assert result.logprobs.top_ids.tolist() == [[2, 0, 1]]


def test_prompt_tokens_have_log_probabilities_that_the_tokens_before_decide() -> None:
    executor = make_executor()
    rows = make_row(0, [5, 6, 7, 8], [0, 2], prompt_logprobs=2), make_row(1, [4], [1])
    first = compute(executor, make_plan(0, (1, 0, 1, Want.LOGITS), (0, 0, 2, Want.NOTHING), added=rows)).prompt_logprobs
    second = compute(executor, make_plan(1, (0, 2, 2, Want.LOGITS))).prompt_logprobs
    assert first is not None
    assert second is not None
    assert (first.index.tolist(), first.positions.tolist()) == ([1, 1], [1, 2])
    assert (second.index.tolist(), second.positions.tolist()) == ([0], [3])
    for lines, tokens in ((first, [6, 7]), (second, [8])):
        assert lines.top_ids.shape == lines.top_logprobs.shape == (len(tokens), 2)
        assert (lines.top_ids[:, 0] + lines.ranks - 1).tolist() == tokens
        assert lines.logprobs.tolist() == (0.5 - lines.ranks).tolist()
    assert compute(executor, make_plan(2, (0, 4, 1, Want.LOGITS))).prompt_logprobs is None
    ranks = set()
    for token in range(20):
        row = make_row(0, [token, 6], [0], prompt_logprobs=0)
        lines = compute(executor, make_plan(3, (0, 0, 2, Want.LOGITS), added=(row,), removed=[0])).prompt_logprobs
        assert lines is not None
        ranks.add(int(lines.ranks[0]))
    assert len(ranks) > 1


# What it refuses

ROW = make_row(0, [5, 6, 7], [2])


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        (make_plan(1, added=(ROW,)), "row 0 is taken"),
        (make_plan(1, (0, 2, 1, Want.NOTHING), (0, 2, 1, Want.NOTHING)), "stands twice"),
        (make_plan(1, (0, 2, 0, Want.NOTHING)), "at least one token"),
        (make_plan(1, (0, 2, 2, Want.NOTHING)), "before it is known"),
        (make_plan(1, (0, 1, 1, Want.LOGITS)), "sampled after the last known one"),
        (make_plan(1, (1, 0, 5, Want.NOTHING), added=(make_row(1, [1] * 5, [3]),)), "no block to go to"),
        (make_plan(1, (1, 0, 16, Want.LOGITS), added=(make_row(1, [1] * 16, [3, 4, 5, 6]),)), "as long as the model"),
    ],
)
def test_it_refuses_what_a_device_could_not_run(plan: StepPlan, message: str) -> None:
    executor = make_executor()
    compute(executor, make_plan(0, (0, 0, 2, Want.NOTHING), added=(ROW,)))
    with pytest.raises(AssertionError, match=message):
        executor.launch(plan)


def test_it_refuses_rows_that_nobody_added() -> None:
    with pytest.raises(KeyError):
        make_executor().launch(make_plan(0, (0, 0, 1, Want.LOGITS)))


def test_it_takes_no_more_steps_at_once_than_it_says() -> None:
    executor = make_executor(max_in_flight=2)
    executor.launch(make_plan(0, added=(ROW,)))
    executor.launch(make_plan(1))
    with pytest.raises(AssertionError, match="more steps in flight"):
        executor.launch(make_plan(2))


# When steps end


@pytest.mark.virtual_clock
async def test_steps_run_one_after_the_other_for_their_time_each() -> None:
    executor = FakeExecutor(step_time_s=0.5, max_in_flight=3)
    loop = asyncio.get_running_loop()
    steps = [executor.launch(make_plan(0, added=(ROW,))), executor.launch(make_plan(1))]
    assert not steps[0].is_done
    times = []
    for step in steps:
        result = await step.finish()
        assert result.device_time_s == 0.5
        assert result.ended_at_s == loop.time()
        times.append(loop.time())
    await asyncio.sleep(2)
    idle = executor.launch(make_plan(2))
    await idle.finish()
    assert [*times, loop.time()] == [0.5, 1.0, 3.5]
    assert executor.events == [
        ("launch", 0), ("launch", 1), ("finish", 0), ("finish", 1), ("launch", 2), ("finish", 2)
    ]  # fmt: skip


@pytest.mark.virtual_clock
async def test_a_step_has_the_time_at_which_it_ended_and_not_that_of_its_reading() -> None:
    executor = FakeExecutor(step_time_s=0.5)
    step = executor.launch(make_plan(0, added=(ROW,)))
    await asyncio.sleep(3)
    assert (await step.finish()).ended_at_s == 0.5


def test_without_a_loop_nobody_knows_when_a_step_ended() -> None:
    assert compute(make_executor(), make_plan(0)).ended_at_s == 0.0


async def test_a_step_without_a_time_ends_with_the_loops_next_turn() -> None:
    executor = FakeExecutor()
    step = executor.launch(make_plan(0, added=(ROW,)))
    assert not step.is_done
    await asyncio.sleep(0)
    assert step.is_done
    await step.finish()
    assert executor.unfinished == []


async def test_steps_by_hand_end_one_at_a_time_in_order() -> None:
    executor = make_executor(max_in_flight=2)
    steps = [executor.launch(make_plan(0, added=(ROW,))), executor.launch(make_plan(1))]
    await asyncio.sleep(0)
    executor.complete()
    assert [step.is_done for step in steps] == [True, False]
    executor.complete()
    assert [step.is_done for step in steps] == [True, True]
    with pytest.raises(StopIteration):
        executor.complete()


@pytest.mark.virtual_clock(seeds=2)
async def test_a_profile_has_the_loops_time(tmp_path: Path) -> None:
    executor = FakeExecutor(step_time_s=0.5, max_in_flight=2)
    await asyncio.sleep(2)
    await executor.start_profile(max_steps=100)
    steps = [executor.launch(make_plan(number)) for number in range(2)]
    for step in steps:
        await step.finish()
    await executor.stop_profile(tmp_path / "trace.json")
    times = [(span["ts"], span["dur"]) for span in spans(tmp_path / "trace.json", "user_annotation")]
    assert times == [(2_000_000, 500_000), (2_000_000, 1_000_000)], "from the launch on"


# When it breaks


async def test_a_row_made_to_fail_brings_no_token_and_the_others_theirs() -> None:
    executor = make_executor(max_in_flight=2)
    executor.make_row_fail(0, 1, ValueError("broken"))
    rows = ROW, make_row(1, [4, 5], [3], logprobs=0), make_row(2, [6], [4], logprobs=0)
    works = [(row, 0, len(added.token_ids), Want.LOGITS) for row, added in enumerate(rows)]
    result = compute(executor, make_plan(0, *works, added=rows))
    assert [(failure.index, str(failure.error)) for failure in result.failures] == [(1, "broken")]
    assert result.offsets.tolist() == [0, 1, 1, 2]
    assert result.token_ids.tolist() == [expected(5, 6, 7), expected(6)]
    assert result.logprobs is not None
    assert result.logprobs.index.tolist() == [1]
    assert executor.stats.num_computed_tokens == 6
    assert executor.stats.num_sampled_tokens == 2
    result = compute(executor, make_plan(1, (1, 2, 1, Want.LOGITS), (2, 1, 1, Want.LOGITS)))
    assert result.failures == ()
    assert result.token_ids.tolist()[1] == expected(6, expected(6))


def test_a_chunk_of_a_prompt_may_fail() -> None:
    executor = make_executor()
    executor.make_row_fail(0, 0, ValueError("broken"))
    result = compute(executor, make_plan(0, (0, 0, 2, Want.NOTHING), added=(ROW,)))
    assert [failure.index for failure in result.failures] == [0]
    assert executor.rows() == {0: ([5, 6, 7], [2])}


async def test_a_lost_device_stays_lost() -> None:
    executor = make_executor(max_in_flight=2)
    executor.make_step_fail(0, DeviceLost("gone"))
    steps = [executor.launch(make_plan(0, added=(ROW,))), executor.launch(make_plan(1))]
    for step in steps:
        executor.complete()
        with pytest.raises(DeviceLost, match="gone"):
            await step.finish()


# Weights


def a_piece(executor: FakeExecutor, data: bytes) -> StageWeights:
    shape = executor.weight_shapes["model.norm.weight"]
    return StageWeights(transfer="t", name="model.norm.weight", dtype="F32", shape=shape, offset=0, data=data)


def test_the_first_weights_leave_the_hash_as_it_is_and_others_change_it() -> None:
    tokens = [sample_hash([1, 2, 3], SAMPLING, vocab_size=1000, weights_version=version) for version in range(50)]
    assert tokens[0] == sample_hash([1, 2, 3], SAMPLING, vocab_size=1000)
    assert len(set(tokens)) > 40


async def test_a_version_is_made_of_what_was_taken(tmp_path: Path) -> None:
    executor, again = FakeExecutor(), FakeExecutor()
    versions = [executor.weights_version]
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        await executor.update_weights(tmp_path / folder)
        versions.append(executor.weights_version)
    for data in (b"x" * 16, b"y" * 16):
        await executor.stage_weights(a_piece(executor, data))
        await executor.commit_weights("t")
        versions.append(executor.weights_version)
    assert versions[0] == 0
    assert len(set(versions)) == 5
    await again.update_weights(tmp_path / "b")
    assert again.weights_version == versions[2]
    await again.stage_weights(a_piece(again, b"y" * 16))
    await again.commit_weights("t")
    assert again.weights_version == versions[4]


async def test_weights_of_a_folder_that_is_gone_stay_away(tmp_path: Path) -> None:
    executor, folder = FakeExecutor(), tmp_path / "a"
    folder.mkdir()
    await executor.update_weights(folder)
    version = executor.weights_version
    await executor.sleep(2)
    folder.rmdir()
    with pytest.raises(ModelLoadError, match="no folder"):
        await executor.wake_up(frozenset(("weights", "kv_cache")))
    with pytest.raises(AssertionError, match="asleep"):
        executor.launch(make_plan(1))
    folder.mkdir()
    await executor.wake_up(frozenset(("weights", "kv_cache")))
    assert executor.weights_version == version


async def test_a_saved_version_that_is_none_is_refused(tmp_path: Path) -> None:
    executor = FakeExecutor()
    (name,) = await executor.save_sharded_state(tmp_path, 1)
    for content in ("", "{}", '{"version": null}'):
        (tmp_path / name).write_text(content)
        with pytest.raises(ModelLoadError, match="no good"):
            await executor.update_weights(tmp_path)


@pytest.mark.virtual_clock
async def test_a_control_call_waits_for_the_launched_steps_and_is_recorded() -> None:
    executor = FakeExecutor(block_size=4, step_time_s=1.0)
    step = executor.launch(make_plan(1, (0, 0, 2, Want.LOGITS), added=(make_row(0, [5, 6], [0]),)))
    assert await executor.apply_model(lambda model: model.weights_version) == [0]
    assert asyncio.get_running_loop().time() == 1.0
    await step.finish()
    await executor.sleep(1)
    await executor.stage_weights(a_piece(executor, b"x" * 16))
    kinds = [kind for kind, _ in executor.events]
    assert kinds == ["launch", "apply_model", "finish", "sleep", "stage_weights"]
    assert executor.events[-2:] == [("sleep", 1), ("stage_weights", "model.norm.weight")]


async def test_who_waits_in_a_control_call_hears_of_the_closing() -> None:
    executor = make_executor()
    executor.launch(make_plan(1, (0, 0, 2, Want.LOGITS), added=(make_row(0, [5, 6], [0]),)))
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(executor.aclose)
        with pytest.raises(DeviceLost):
            await executor.sleep(1)
