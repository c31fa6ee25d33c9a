"""The runner over random plans against the model's forward pass over each whole sequence."""

import random
import time
import weakref
from typing import Any

import numpy as np
import pytest
import torch
from executor.plans import PlannedRow, PlanWriter, tokens_by_row
from executor.tiny_decoder import VOCAB_SIZE, TinyConfig, TinyDecoder

from aioengine.core.executor_protocol import DeviceLost, ExecutorStats
from aioengine.executor.input_batch import InputBatch
from aioengine.executor.runner import Runner
from aioengine.kernels.attention.kv_cache import KVCache, KVCacheShape
from aioengine.kernels.attention.torch_paged import TorchPagedAttention
from aioengine.scheduler.plan import EMPTY, RowAdded, RowSampling, StepPlan, StepResult, Want, int32

MAX_MODEL_LEN = 64


def make_runner(
    decoder: TinyDecoder, *, max_num_seqs: int = 8, num_blocks: int = 128, block_size: int = 4
) -> tuple[Runner, ExecutorStats]:
    c = decoder.config
    shape = KVCacheShape(
        num_layers=c.num_layers,
        block_size=block_size,
        num_kv_heads=c.num_kv_heads,
        head_dim=c.head_dim,
        dtype=torch.float32,
    )
    cache = KVCache.allocate(shape, num_blocks)
    for tensor in cache.k + cache.v:
        tensor.fill_(torch.nan)  # what was never written must not be read
    batch = InputBatch(max_num_seqs=max_num_seqs, max_model_len=c.max_model_len, block_size=block_size)
    stats = ExecutorStats()
    return Runner(decoder, TorchPagedAttention(cache), batch, stats), stats  # type: ignore[arg-type]


class Sequences:
    """Random sequences over a runner, each token checked against the whole-sequence forward pass."""

    def __init__(self, seed: int, *, block_size: int, max_rows: int = 8) -> None:
        self.random = random.Random(seed)
        self.decoder = TinyDecoder(seed=seed)
        num_blocks = max_rows * -(-MAX_MODEL_LEN // block_size) + 4
        self.runner, self.stats = make_runner(
            self.decoder, max_num_seqs=max_rows, num_blocks=num_blocks, block_size=block_size
        )
        self.writer = PlanWriter(num_blocks, block_size, seed)
        self.free_rows = list(range(max_rows))
        self.num_checked = 0

    def step(self) -> None:
        """Change some rows, then compute a random part of what is known for some of them."""
        draw = self.random
        for row in [row for row in self.writer.rows if draw.random() < 0.1 or self.is_full(row)]:
            self.writer.remove(row)
            self.free_rows.append(row)
        while self.free_rows and draw.random() < 0.5:
            length = draw.choice([1, 2, draw.randrange(1, MAX_MODEL_LEN - 1)])
            ids = [draw.randrange(VOCAB_SIZE) for _ in range(length)]
            row = self.free_rows.pop(draw.randrange(len(self.free_rows)))
            self.writer.add(
                row, ids, num_prompt_tokens=draw.randint(1, length), logprobs=draw.choice([0, 3, VOCAB_SIZE])
            )
        rows = [row for row in self.writer.rows if draw.random() < 0.8]
        draw.shuffle(rows)
        counts: dict[int, int | None] = {}
        for row in rows:
            left = self.left(row)
            counts[row] = draw.choice([left, left, draw.randint(1, left)])
        plan = self.writer.plan(counts)
        self.check(plan, self.runner.step(plan))

    def left(self, row: int) -> int:
        state = self.writer.rows[row]
        return state.num_known - state.num_computed

    def is_full(self, row: int) -> bool:
        return self.writer.rows[row].num_known >= MAX_MODEL_LEN

    def check(self, plan: StepPlan, result: StepResult) -> None:
        rows = {row: self.writer.rows[row] for row in plan.rows.tolist()}
        tokens = self.writer.read(plan, result)
        for place, (row, token) in enumerate(tokens.items()):
            expected = expected_logprobs(self.decoder, rows[row])
            assert result.logprobs is not None
            assert result.logprobs.index[place] == place
            assert result.logprobs.logprobs[place] == pytest.approx(float(expected[token]), abs=1e-4)
            assert float(expected[token]) >= float(expected.max()) - 1e-4
            of_top = expected[torch.from_numpy(result.logprobs.top_ids[place].astype(np.int64))]
            np.testing.assert_allclose(result.logprobs.top_logprobs[place], of_top, atol=1e-4)
            self.num_checked += 1


def expected_logprobs(decoder: TinyDecoder, row: PlannedRow) -> torch.Tensor:
    known: Any = row.token_ids[:-1]
    return torch.log_softmax(decoder.logits_of(known)[-1], dim=-1)


@pytest.mark.parametrize("block_size", [1, 4, 16])
@pytest.mark.parametrize("seed", range(5))
def test_any_way_through_a_sequence_brings_what_one_forward_pass_brings(seed: int, block_size: int) -> None:
    sequences = Sequences(seed, block_size=block_size)
    for _ in range(60):
        sequences.step()
    assert sequences.num_checked > 60
    assert sequences.stats.num_sampled_tokens == sequences.num_checked
    assert sequences.stats.num_steps == 60


def test_logits_are_computed_for_the_rows_that_want_them_only() -> None:
    decoder = TinyDecoder()
    runner, _ = make_runner(decoder)
    num_rows: list[int] = []
    logits = decoder.logits
    decoder.logits = lambda hidden: num_rows.append(len(hidden)) or logits(hidden)  # type: ignore[method-assign]
    writer = PlanWriter(128, 4)
    writer.add(0, [1] * 20)
    writer.add(1, [2] * 9)
    runner.step(writer.plan({0: 7, 1: None}))
    runner.step(writer.plan({0: 5}))
    assert num_rows == [1]


def test_a_draw_depends_on_seed_choice_and_position_and_not_on_the_way_there() -> None:
    decoder = TinyDecoder(seed=3)
    prompt = [5, 6, 7]

    def generate(row: int, num_tokens: int, resumed: list[int], **sampling: Any) -> list[int]:
        runner, _ = make_runner(decoder)
        writer = PlanWriter(128, 4)
        writer.add(row, prompt + resumed, num_prompt_tokens=len(prompt), temperature=1.0, **sampling)
        tokens = []
        for _ in range(num_tokens):
            plan = writer.plan()
            tokens.append(writer.read(plan, runner.step(plan))[row])
        return tokens

    whole = generate(0, 12, [], seed=11)
    assert generate(5, 7, whole[:5], seed=11) == whole[5:]
    assert generate(0, 12, [], seed=12) != whole
    assert generate(0, 12, [], seed=11, choice=1) != whole


def test_min_tokens_counts_from_the_end_of_the_prompt() -> None:
    decoder = TinyDecoder()
    likeliest = int(decoder.logits_of([4, 5, 6])[-1].argmax())
    for num_prompt_tokens, is_masked in ((3, True), (2, True), (1, False)):
        runner, _ = make_runner(decoder)
        writer = PlanWriter(128, 4)
        writer.add(0, [4, 5, 6], num_prompt_tokens=num_prompt_tokens, min_tokens=2, stop_ids=(likeliest,))
        plan = writer.plan()
        assert (tokens_by_row(plan, runner.step(plan))[0] != likeliest) == is_masked


def test_a_plan_that_cannot_be_applied_ends_it_all() -> None:
    runner, stats = make_runner(TinyDecoder())
    writer = PlanWriter(128, 4)
    writer.add(0, [1, 2, 3])
    good = writer.plan()
    writer.add(8, [1])
    bad = writer.plan({8: None})
    runner.step(good)
    for plan in (bad, writer.plan({0: None})):
        with pytest.raises(DeviceLost, match="could not be applied"):
            runner.step(plan)
    assert stats.num_steps == 3


@pytest.mark.parametrize("stage", ["forward", "logits"])
def test_a_step_that_fails_leaves_the_rows_in_order(stage: str, monkeypatch: pytest.MonkeyPatch) -> None:
    decoder = TinyDecoder()
    runner, _ = make_runner(decoder)
    writer = PlanWriter(128, 4)
    writer.add(0, [1, 2, 3])
    writer.add(1, [4] * 9)

    def fail(*_: Any) -> Any:
        raise RuntimeError("out of memory")

    with monkeypatch.context() as patch:
        patch.setattr(decoder, "before_forward" if stage == "forward" else "logits", fail)
        with pytest.raises(RuntimeError, match="out of memory"):
            runner.step(writer.plan({0: None}))
    writer.remove(0)
    plan = writer.plan({1: None})
    expected = int(decoder.logits_of([4] * 9)[-1].argmax())
    assert tokens_by_row(plan, runner.step(plan)) == {1: expected}


def test_a_model_that_breaks_into_nan_fails_its_own_row_only() -> None:
    decoder = TinyDecoder()
    decoder.embedding[90] = torch.nan
    runner, _ = make_runner(decoder)
    writer = PlanWriter(128, 4)
    expected = int(decoder.logits_of([4] * 9)[-1].argmax())
    for poisoned_row in (0, 1):
        writer.add(poisoned_row, [90] * 9, temperature=1.0)
        writer.add(1 - poisoned_row, [4] * 9)
        plan = writer.plan()
        result = runner.step(plan)
        (failure,) = result.failures
        assert plan.rows[failure.index] == poisoned_row
        assert "not numbers" in str(failure.error)
        assert result.token_ids.tolist() == [expected]
        assert np.diff(result.offsets)[failure.index] == 0
        runner.step(writer.plan())  # one launched meanwhile runs on a meaningless token
        writer.remove(0)
        writer.remove(1)
    for _ in range(10):  # in the poisoned blocks
        writer.add(0, [4] * 9)
        plan = writer.plan()
        assert writer.read(plan, runner.step(plan)) == {0: expected}
        writer.remove(0)


def test_a_row_may_grow_by_several_blocks_in_any_order_among_others() -> None:
    batch = InputBatch(max_num_seqs=3, max_model_len=40, block_size=4)
    added = tuple(
        RowAdded(
            row=row,
            token_ids=int32(range(40)),
            num_prompt_tokens=1,
            block_ids=int32(blocks),
            sampling=RowSampling(),
        )
        for row, blocks in ((0, [9]), (2, [8, 7]))
    )
    batch.apply(make_plan(added=added, grown_rows=int32([2, 0, 2, 0, 0]), grown_blocks=int32(range(20, 25))))
    batch.apply(make_plan(grown_rows=int32([0]), grown_blocks=int32([25])))
    plan = make_plan(
        rows=int32([0, 2]),
        epochs=int32([1, 2]),
        starts=int32([0, 0]),
        num_tokens=int32([20, 16]),
        wants=np.array([Want.LOGITS, Want.NOTHING], np.int8),
    )
    inputs = batch.inputs(plan)
    assert inputs.attention.slot_mapping[::4].tolist() == [4 * block for block in (9, 21, 23, 24, 25, 8, 7, 20, 22)]
    assert inputs.attention.slot_mapping[1::4].tolist() == [4 * b + 1 for b in (9, 21, 23, 24, 25, 8, 7, 20, 22)]
    assert inputs.positions.tolist() == [*range(20), *range(16)]
    assert inputs.last_tokens.tolist() == [19]
    with pytest.raises(IndexError):
        batch.apply(make_plan(grown_rows=int32([0] * 6), grown_blocks=int32(range(30, 36))))


def make_plan(**fields: Any) -> StepPlan:
    arrays = dict.fromkeys(
        ("removed", "grown_rows", "grown_blocks", "rows", "epochs", "starts", "num_tokens", "wants"), EMPTY
    )
    return StepPlan(**{"step": 1, "added": (), **arrays, **fields})


def added_row(row: int, token_ids: list[int], num_prompt_tokens: int, blocks: list[int], **sampling: Any) -> RowAdded:
    return RowAdded(
        row=row,
        token_ids=int32(token_ids),
        num_prompt_tokens=num_prompt_tokens,
        block_ids=int32(blocks),
        sampling=RowSampling(**{"temperature": 0.0, **sampling}),
    )


def computing(*lines: tuple[int, int, int, Want]) -> dict[str, Any]:
    """Fields of a plan that computes (row, start, num_tokens, want) each."""
    rows, starts, counts, wants = zip(*lines, strict=True)
    return {
        "rows": int32(rows),
        "epochs": int32(rows),
        "starts": int32(starts),
        "num_tokens": int32(counts),
        "wants": np.array(wants, np.int8),
    }


def test_a_family_samples_its_first_tokens_together_and_parts_by_copied_blocks() -> None:
    decoder = TinyDecoder(seed=2)
    runner, stats = make_runner(decoder)
    prompt = [5, 6, 7, 8, 9, 10]
    sampling: dict[str, Any] = {"temperature": 1.5, "seed": 3}
    first = runner.step(
        make_plan(
            added=(added_row(2, prompt, 6, [10, 11], num_choices=3, **sampling), added_row(4, [1], 1, [20])),
            **computing((4, 0, 1, Want.LOGITS), (2, 0, 6, Want.LOGITS)),
        )
    )
    assert first.offsets.tolist() == [0, 1, 4]
    assert first.offsets.dtype == "int32"
    assert stats.num_sampled_tokens == 4
    family = first.token_ids[1:].tolist()
    assert len(set(family)) > 1
    # The first child goes on in its row; the others share the full block and have a copy of the other one.
    second = runner.step(
        make_plan(
            step=2,
            copied_from=int32([11, 11]),
            copied_to=int32([12, 13]),
            added=tuple(
                added_row(row, [*prompt, family[choice]], 6, [10, 11 + choice], choice=choice, **sampling)
                for row, choice in ((3, 2), (5, 1))
            ),
            **computing((2, 6, 1, Want.LOGITS), (3, 6, 1, Want.LOGITS), (5, 6, 1, Want.LOGITS)),
        )
    )
    of_choice = {0: second.token_ids[0], 2: second.token_ids[1], 1: second.token_ids[2]}
    for choice, token in of_choice.items():
        alone, _ = make_runner(decoder)
        expected = []
        for known in (prompt, [*prompt, family[choice]]):
            plan = make_plan(
                removed=int32([0] if expected else []),
                added=(added_row(0, known, 6, [0, 1], choice=choice, **sampling),),
                **computing((0, 0, len(known), Want.LOGITS)),
            )
            expected.append(int(alone.step(plan).token_ids[0]))
        assert [family[choice], token] == expected, f"choice {choice}"


def test_a_copy_that_fails_ends_it_all() -> None:
    runner, _ = make_runner(TinyDecoder())
    with pytest.raises(DeviceLost, match="could not be applied"):
        runner.step(make_plan(copied_from=int32([0]), copied_to=int32([10**6])))


RULED: tuple[dict[str, Any], ...] = (
    {"repetition_penalty": 1.8},
    {"frequency_penalty": 1.5, "presence_penalty": 0.5},
    {"logit_bias": tuple((token, 4.0) for token in range(8)), "bad_words": ((3,), (1, 2), (5, 6, 7))},
    {"allowed_token_ids": tuple(range(20, 40)), "min_tokens": 6, "stop_ids": (22, 25, 30)},
    {},
)


def generate(runner: Runner, writer: PlanWriter, num_tokens: int, chunk: int | None = None) -> dict[int, list[int]]:
    """The next tokens of all rows, prompts computed in chunks."""
    tokens: dict[int, list[int]] = {row: [] for row in writer.rows}
    while any(len(of_row) < num_tokens for of_row in tokens.values()):
        counts: dict[int, int | None] = {}
        for row, state in writer.rows.items():
            left = state.num_known - state.num_computed
            counts[row] = left if chunk is None else min(left, chunk)
        plan = writer.plan({row: count for row, count in counts.items() if len(tokens[row]) < num_tokens})
        for row, token in writer.read(plan, runner.step(plan)).items():
            tokens[row].append(token)
    return tokens


def test_rules_see_the_same_tokens_in_any_batch_in_any_chunks_and_after_a_preemption() -> None:
    decoder = TinyDecoder(seed=4)
    prompt, num_tokens = [3, 1, 2, 5, 6, 9, 9], 24
    alone = []
    for seed, rules in enumerate(RULED):
        runner, _ = make_runner(decoder)
        writer = PlanWriter(128, 4)
        writer.add(0, prompt, temperature=1.0, seed=seed, **rules)
        alone.append(generate(runner, writer, num_tokens)[0])
    assert all(of_row != alone[-1] for of_row in alone[:-1])
    for chunk, num_before in ((None, 0), (2, 5), (3, 11)):
        runner, _ = make_runner(decoder)
        writer = PlanWriter(128, 4)
        for turn in range(2):  # the second time in rows that others have left
            for row, (seed, rules) in enumerate(enumerate(RULED)):
                place = (row + turn) % len(RULED)
                resumed = alone[row][:num_before]
                writer.add(place, prompt + resumed, num_prompt_tokens=7, temperature=1.0, seed=seed, **rules)
            together = generate(runner, writer, num_tokens - num_before, chunk)
            for row, expected in enumerate(alone):
                assert together[(row + turn) % len(RULED)] == expected[num_before:], f"row {row}, chunk {chunk}"
            for place in range(len(RULED)):
                writer.remove(place)


def test_a_row_forgets_the_request_that_left_it() -> None:
    runner, _ = make_runner(TinyDecoder())
    writer = PlanWriter(128, 4)

    class Processor:
        def __call__(self, logits: torch.Tensor, rows: object) -> None:
            logits[:, 3] = 1000.0

    processor: Any = Processor()
    is_alive = weakref.ref(processor)
    writer.add(0, [4] * 9, logits_processors=(processor,), logprobs=2, logprob_token_ids=(3,), prompt_logprobs=2)
    plan = writer.plan()
    result = runner.step(plan)
    assert result.token_ids.tolist() == [3]
    assert result.prompt_logprobs is not None
    writer.remove(0)
    runner.step(writer.plan({}))
    del processor, plan
    assert is_alive() is None
    writer.add(0, [4] * 9)
    result = runner.step(writer.plan())
    assert result.token_ids.tolist() == [int(TinyDecoder().logits_of([4] * 9)[-1].argmax())]
    assert result.logprobs is None
    assert result.prompt_logprobs is None


@pytest.mark.parametrize("seed", range(6))
def test_prompts_bring_the_logprobs_of_each_token_that_follows_a_computed_one(seed: int) -> None:
    draw = random.Random(seed)
    decoder = TinyDecoder(seed=seed)
    runner, _ = make_runner(decoder)
    writer = PlanWriter(128, 4, seed)
    wanted = {0: 3, 1: 0, 2: -1, 3: 5, 4: 2}
    for row, num_top in wanted.items():
        ids = [draw.randrange(VOCAB_SIZE) for _ in range(draw.choice([1, 2, 17, 40]))]
        num_prompt = draw.randint(1, len(ids))  # the rest is output from before a preemption
        writer.add(row, ids, num_prompt_tokens=num_prompt, prompt_logprobs=num_top)
    expected = {
        row: torch.log_softmax(decoder.logits_of(state.token_ids), dim=-1)  # type: ignore[arg-type]
        for row, state in writer.rows.items()
    }
    seen: dict[int, list[int]] = {row: [] for row in wanted}
    for _ in range(60):
        counts = {
            row: draw.randint(1, min(9, state.num_known - state.num_computed))
            for row, state in writer.rows.items()
            if draw.random() < 0.7 and state.num_known < 60
        }
        if not counts:
            continue
        plan = writer.plan(counts)  # type: ignore[arg-type]
        result = runner.step(plan)
        writer.read(plan, result)
        lines = result.prompt_logprobs
        computed_prompt = [
            row
            for row, start in zip(plan.rows.tolist(), plan.starts.tolist(), strict=True)
            if wanted[row] >= 0 and start < writer.rows[row].num_prompt_tokens - 1
        ]
        assert (lines is not None) == bool(computed_prompt)
        if lines is None:
            continue
        assert (np.diff(lines.index) >= 0).all()
        assert lines.top_ids.shape[1] == max(wanted[row] for row in plan.rows.tolist())
        for line, (index, position) in enumerate(zip(lines.index.tolist(), lines.positions.tolist(), strict=True)):
            row = int(plan.rows[index])
            seen[row].append(position)
            of_position = expected[row][position - 1]
            token = writer.rows[row].token_ids[position]
            assert lines.logprobs[line] == pytest.approx(float(of_position[token]), abs=1e-4)
            num_top = wanted[row]
            top = of_position[torch.from_numpy(lines.top_ids[line][:num_top].astype(np.int64))]
            np.testing.assert_allclose(lines.top_logprobs[line][:num_top], top, atol=1e-4)
            np.testing.assert_allclose(top, of_position.topk(num_top).values, atol=1e-4)
    for row, state in writer.rows.items():
        num_lines = 0 if wanted[row] < 0 else state.num_prompt_tokens
        assert seen[row] == list(range(1, num_lines)), f"row {row}"


def test_prompt_logprobs_come_from_steps_that_sample_nothing() -> None:
    runner, _ = make_runner(TinyDecoder())
    writer = PlanWriter(128, 4)
    writer.add(0, [4] * 9, prompt_logprobs=1)
    result = runner.step(writer.plan({0: 5}))
    assert result.token_ids.tolist() == []
    assert result.prompt_logprobs is not None
    assert result.prompt_logprobs.positions.tolist() == [1, 2, 3, 4, 5]


def test_a_result_says_when_its_step_ended() -> None:
    runner, _ = make_runner(TinyDecoder())
    writer = PlanWriter(128, 4)
    writer.add(0, [4] * 9)
    before = time.monotonic()
    result = runner.step(writer.plan())
    assert before <= result.ended_at_s - result.device_time_s <= result.ended_at_s <= time.monotonic()


def test_the_config_of_the_stand_in_has_windows_that_matter() -> None:
    ids = list(range(20))
    windowed = TinyDecoder().logits_of(ids)
    unlimited = TinyDecoder(TinyConfig(windows=(None, None, None))).logits_of(ids)
    assert torch.allclose(windowed[:5], unlimited[:5], atol=1e-5)
    assert not torch.allclose(windowed[5:], unlimited[5:], atol=1e-2)
