"""What the CPU's runner does of its own, beside what every executor must do."""

import weakref
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from executor.plans import PlanWriter
from executor.tiny_decoder import TinyDecoder

from aioengine.core.executor_protocol import DeviceLost, ExecutorStats
from aioengine.executor.input_batch import InputBatch
from aioengine.executor.runner import Runner
from aioengine.kernels.attention.kv_cache import KVCache, KVCacheShape
from aioengine.kernels.attention.torch_paged import TorchPagedAttention
from aioengine.scheduler.plan import int32


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
    return Runner(decoder, batch, stats, lambda: TorchPagedAttention(cache)), stats  # type: ignore[arg-type]


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


def test_a_copy_that_fails_ends_it_all() -> None:
    runner, _ = make_runner(TinyDecoder())
    with pytest.raises(DeviceLost, match="could not be applied"):
        runner.step(msgspec.structs.replace(PlanWriter(8, 4).plan(), copied_from=int32([0]), copied_to=int32([10**6])))


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
