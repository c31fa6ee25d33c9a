"""The runner over random plans against the model's forward pass over each whole sequence."""

import itertools
import random
import weakref
from typing import Any

import numpy as np
import pytest
import torch
from executor.plan_storm import RandomPlans
from executor.plans import PlannedRow, PlanWriter
from executor.tiny_decoder import VOCAB_SIZE, TinyConfig, TinyDecoder
from nightly import few

from aioengine.core.executor_protocol import DeviceLost, ExecutorStats
from aioengine.executor.input_batch import InputBatch
from aioengine.executor.runner import Runner
from aioengine.kernels.attention.kv_cache import KVCache, KVCacheShape
from aioengine.kernels.attention.torch_paged import TorchPagedAttention
from aioengine.scheduler.plan import EMPTY, StepPlan, StepResult, int32

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


def with_logprobs(rng: random.Random, vocab: int) -> dict[str, Any]:
    return {"logprobs": rng.choice([0, 3, vocab]), "prompt_logprobs": rng.choice([-1, 0, 5])}


class Sequences:
    """Random sequences over a runner, each token checked against the whole-sequence forward pass."""

    def __init__(self, seed: int, *, block_size: int, max_rows: int = 8) -> None:
        self.decoder = TinyDecoder(seed=seed)
        num_blocks = max_rows * -(-MAX_MODEL_LEN // block_size) + 4
        self.runner, self.stats = make_runner(
            self.decoder, max_num_seqs=max_rows, num_blocks=num_blocks, block_size=block_size
        )
        self.writer = PlanWriter(num_blocks, block_size, seed)
        self.plans = RandomPlans(
            random.Random(seed), self.writer, VOCAB_SIZE, max_rows, MAX_MODEL_LEN, make_sampling=with_logprobs
        )
        self.num_checked = 0

    def step(self) -> None:
        """Change some rows, then compute a random part of what is known for some of them."""
        plan = self.plans.next()
        self.check(plan, self.runner.step(plan))

    def check(self, plan: StepPlan, result: StepResult) -> None:
        rows = {row: self.writer.rows[row] for row in plan.rows.tolist()}
        tokens = self.writer.read(plan, result)
        for place, (row, token) in enumerate(tokens.items()):
            expected = torch.log_softmax(self.decoder.logits_of(rows[row].token_ids[:-1])[-1], dim=-1)  # type: ignore[arg-type]
            assert result.logprobs is not None
            assert result.logprobs.index[place] == place
            assert result.logprobs.logprobs[place] == pytest.approx(float(expected[token]), abs=1e-4)
            assert float(expected[token]) >= float(expected.max()) - 1e-4
            of_top = expected[torch.from_numpy(result.logprobs.top_ids[place].astype(np.int64))]
            np.testing.assert_allclose(result.logprobs.top_logprobs[place], of_top, atol=1e-4)
            self.num_checked += 1
        self.check_prompts(plan, result, rows)

    def check_prompts(self, plan: StepPlan, result: StepResult, rows: dict[int, PlannedRow]) -> None:
        """Each prompt token that follows a computed one has its line, and no other has."""
        wanted = [
            (index, position)
            for index, (row, start, count) in enumerate(zip(plan.rows, plan.starts, plan.num_tokens, strict=True))
            if self.plans.sampling[row]["prompt_logprobs"] >= 0
            for position in range(start + 1, min(start + count + 1, rows[row].num_prompt_tokens))
        ]
        lines = result.prompt_logprobs
        assert (lines is not None) == bool(wanted)
        if lines is None:
            return
        assert list(zip(lines.index.tolist(), lines.positions.tolist(), strict=True)) == wanted
        for line, (index, position) in enumerate(wanted):
            row = int(plan.rows[index])
            expected = self.expected_of(rows[row])[position - 1]
            num_top = self.plans.sampling[row]["prompt_logprobs"]
            assert lines.logprobs[line] == pytest.approx(float(expected[rows[row].token_ids[position]]), abs=1e-4)
            np.testing.assert_allclose(lines.top_logprobs[line][:num_top], expected.topk(num_top).values, atol=1e-4)
            top = expected[torch.from_numpy(lines.top_ids[line][:num_top].astype(np.int64))]
            np.testing.assert_allclose(lines.top_logprobs[line][:num_top], top, atol=1e-4)

    def expected_of(self, row: PlannedRow) -> torch.Tensor:
        known: Any = [token for token in row.token_ids if token is not None]
        return torch.log_softmax(self.decoder.logits_of(known), dim=-1)


def expected_logprobs(decoder: TinyDecoder, row: PlannedRow) -> torch.Tensor:
    known: Any = row.token_ids[:-1]
    return torch.log_softmax(decoder.logits_of(known)[-1], dim=-1)


@pytest.mark.parametrize(
    ("seed", "block_size"), few([(0, 1), (1, 4), (2, 16)], of=itertools.product(range(5), (1, 4, 16)))
)
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


def make_plan(**fields: Any) -> StepPlan:
    arrays = dict.fromkeys(
        ("removed", "grown_rows", "grown_blocks", "rows", "epochs", "starts", "num_tokens", "wants"), EMPTY
    )
    return StepPlan(**{"step": 1, "added": (), **arrays, **fields})


def test_a_copy_that_fails_ends_it_all() -> None:
    runner, _ = make_runner(TinyDecoder())
    with pytest.raises(DeviceLost, match="could not be applied"):
        runner.step(make_plan(copied_from=int32([0]), copied_to=int32([10**6])))


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


def test_the_config_of_the_stand_in_has_windows_that_matter() -> None:
    ids = list(range(20))
    windowed = TinyDecoder().logits_of(ids)
    unlimited = TinyDecoder(TinyConfig(windows=(None, None, None))).logits_of(ids)
    assert torch.allclose(windowed[:5], unlimited[:5], atol=1e-5)
    assert not torch.allclose(windowed[5:], unlimited[5:], atol=1e-2)
