"""What a runner does on the host, beside what every executor must do."""

import weakref
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from executor.plans import PlanWriter
from executor.tiny_decoder import tiny_decoder

from aioengine.config import EngineConfig
from aioengine.core.executor_protocol import DeviceLost, ExecutorStats
from aioengine.executor.host import HostAccelerator, chunk_tokens, num_usable_threads
from aioengine.executor.make_runner import make_runner
from aioengine.kernels.operations import plain_torch as operations
from aioengine.models.decoder import Decoder
from aioengine.scheduler.plan import int32
from doubles.fake_graph import FakeGraph, as_launches


def start(decoder: Decoder, accelerator: HostAccelerator | None = None) -> Any:
    """A runner whose cache is full of NaN: what was never written must not be read."""
    config = EngineConfig(max_num_seqs=8, block_size=4, kv_cache_memory_bytes=2**20)
    accelerator = accelerator or HostAccelerator()
    accelerator.operations = as_launches(operations)
    runner: Any
    runner, _ = make_runner(accelerator, decoder, config, ExecutorStats(), lambda *_: None)
    runner._attention.caches[0].fill_(torch.nan)
    return runner


def token_of(prompt: list[int]) -> int:
    """The likeliest token behind a prompt, computed alone."""
    runner, writer = start(tiny_decoder()), PlanWriter(128, 4)
    writer.add(0, prompt)
    return int(runner.step(writer.plan()).token_ids[0])


@pytest.fixture(autouse=True)
def _inference_mode() -> Any:
    with torch.inference_mode():
        yield


def test_logits_are_computed_for_the_rows_that_want_them_only() -> None:
    runner = start(tiny_decoder())
    num_rows: list[int] = []
    logits = runner._decoder.logits
    runner._decoder.logits = lambda hidden, step: num_rows.append(len(hidden)) or logits(hidden, step)
    writer = PlanWriter(128, 4)
    writer.add(0, [1] * 20)
    writer.add(1, [2] * 9)
    runner.step(writer.plan({0: 7, 1: None}))
    runner.step(writer.plan({0: 5}))
    assert num_rows == [1]


def test_a_model_that_breaks_into_nan_fails_its_own_row_only() -> None:
    decoder = tiny_decoder()
    decoder.embedding.weight[90] = torch.nan
    runner = start(decoder)
    writer = PlanWriter(128, 4)
    expected = token_of([4] * 9)
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


@pytest.mark.parametrize(
    "values",
    [
        {"seed": 2**63},
        {"choice": 2**31},
        {"top_k": 2**31},
        {"min_tokens": 2**31, "stop_ids": (1,)},
        {"logprobs": 2**31},
        {"logit_bias": ((-(2**40), 1.0),)},
        {"bad_words": ((2**40, 5),)},
        {"allowed_token_ids": (2**70,)},
        {"allowed_token_ids": (5, -1000)},
        {"logprob_token_ids": (2**70,), "logprobs": 1},
        {"temperature": "hot"},
    ],
)
def test_a_row_whose_values_fit_no_column_fails_alone(values: dict[str, Any]) -> None:
    """No check of a request lets such a one come here. If one did, the device's other rows would not hear of it."""
    runner, writer, expected = start(tiny_decoder()), PlanWriter(128, 4), token_of([4] * 9)
    for bad_row in (0, 1):
        writer.add(bad_row, [7] * 9, num_choices=3, **values)
        writer.add(1 - bad_row, [4] * 9, allowed_token_ids=(expected,))
        plan = writer.plan({bad_row: 3, 1 - bad_row: 9})  # a part of a prompt, which samples nothing, fails as well
        result = runner.step(plan)
        (failure,) = result.failures
        assert plan.rows[failure.index] == bad_row
        assert result.token_ids.tolist() == [expected]
        writer.remove(0)
        writer.remove(1)
    writer.add(0, [4] * 9)
    plan = writer.plan()
    assert writer.read(plan, runner.step(plan)) == {0: expected}
    assert runner._batch.num_masks == len(runner._batch._free_masks), "no mask is lost"


def test_a_copy_that_fails_ends_it_all() -> None:
    runner = start(tiny_decoder())
    with pytest.raises(DeviceLost, match="could not be applied"):
        runner.step(msgspec.structs.replace(PlanWriter(8, 4).plan(), copied_from=int32([0]), copied_to=int32([10**6])))


def test_a_row_forgets_the_request_that_left_it() -> None:
    runner = start(tiny_decoder())
    writer = PlanWriter(128, 4, handles=runner.handles)

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
    assert result.token_ids.tolist() == [token_of([4] * 9)]
    assert result.logprobs is None
    assert result.prompt_logprobs is None


def test_decode_steps_are_captured_by_their_numbers_of_rows_and_bring_the_same_tokens() -> None:
    graphs: list[FakeGraph] = []

    def record(work: Any) -> FakeGraph:
        graphs.append(FakeGraph(lambda replay: replay()))
        graphs[-1].record(work)
        return graphs[-1]

    recording: Any = HostAccelerator()
    recording.can_capture, recording.capture = True, record
    runners = [start(tiny_decoder()), start(tiny_decoder(), recording)]
    writers = [PlanWriter(128, 4), PlanWriter(128, 4)]
    for step in range(24):
        results = []
        for runner, writer in zip(runners, writers, strict=True):
            if step in (0, 8):
                writer.add(step // 8, [7 + step, 4, 9], temperature=1.0, seed=step)
            plan = writer.plan()
            results.append(writer.read(plan, runner.step(plan)))
        assert results[0] == results[1]
    assert [len(runner.graphs) for runner in runners] == [0, 2]
    assert [graph.num_replays for graph in graphs] == [5, 13], "all but prompts, and the first two of each size"


@pytest.mark.parametrize(
    ("limits", "expected"),
    [({}, 4), ({"a": "max 100000"}, 4), ({"a": "250000 100000"}, 2), ({"a/b": "max 100000", "a": "50000 100000"}, 1)],
)
def test_threads_are_no_more_than_the_control_groups_allow(
    tmp_path: Path, limits: dict[str, str], expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a" / "b").mkdir(parents=True)
    own = tmp_path / "own"
    own.write_text("0::/a/b\n")
    for group, limit in limits.items():
        (tmp_path / group / "cpu.max").write_text(limit + "\n")
    monkeypatch.setattr(torch, "get_num_threads", lambda: 4)
    assert num_usable_threads(tmp_path, own) == expected


@pytest.mark.parametrize(
    ("features", "dtype", "weight_bytes", "expected"),
    [
        ({}, torch.bfloat16, 1_200_000_000, 64),
        ({"avx512bf16": False}, torch.bfloat16, 8_000_000, 500),
        ({"avx512bf16": True}, torch.bfloat16, 1_200_000_000, 128),
        ({"avx512bf16": True}, torch.bfloat16, 50_000_000, 320),
        ({"avx512bf16": True}, torch.float32, 2_400_000_000, 64),
    ],
)
def test_prompts_beside_decodes_come_in_chunks_that_fit_the_processor_and_the_model(
    features: dict[str, bool], dtype: torch.dtype, weight_bytes: int, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("aioengine.executor.host.binding.get_host_cpu_features", lambda: features)
    assert chunk_tokens(weight_bytes, dtype) == expected
