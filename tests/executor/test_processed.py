"""Processed log-probabilities through a runner: with graphs and without, native kernels and plain torch."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from executor.plans import PlanWriter
from executor.test_runner import start
from executor.tiny_decoder import tiny_decoder

from aioengine.config import EngineConfig
from aioengine.core.executor_protocol import ExecutorStats
from aioengine.executor.host import HostAccelerator
from aioengine.executor.make_runner import make_runner
from aioengine.kernels.native.compilation import compile_library
from aioengine.kernels.native.native_operations import NativeOperations
from aioengine.kernels.native.team import Team
from doubles.fake_graph import FakeGraph

NUM_TOP = 20
TOP_K = 4
SHARP: dict[str, Any] = {"temperature": 0.7, "top_k": TOP_K, "seed": 5, "logprobs": NUM_TOP}


@pytest.fixture(params=["torch", "recorded", "native"])
def runner(request: pytest.FixtureRequest) -> Iterator[Any]:
    """On the CPU; "recorded": with graphs of what torch launches, as a GPU's."""
    accelerator: Any = HostAccelerator()
    with torch.inference_mode():
        if request.param != "native":
            if request.param == "recorded":

                def record(work: Any) -> FakeGraph:
                    graph = FakeGraph(lambda replay: replay())
                    graph.record(work)
                    return graph

                accelerator.can_capture, accelerator.capture = True, record
            yield start(tiny_decoder(), accelerator)
            return
        accelerator._team = team = Team(compile_library(), 2)
        accelerator.operations, accelerator.can_capture = NativeOperations(team), True
        config = EngineConfig(max_num_seqs=8, block_size=4, kv_cache_memory_bytes=2**20)
        yield make_runner(accelerator, tiny_decoder(), config, ExecutorStats(), lambda *_: None)[0]
        team.close()


def test_a_row_tells_of_its_mode_at_each_step_whatever_runs_beside_it(runner: Any) -> None:
    writer = PlanWriter(128, 4)
    writer.add(0, [7, 4, 9], **SHARP)
    writer.add(1, [7, 4, 9], **SHARP, logprobs_mode="processed")
    for step in range(16):
        if step == 8:
            writer.add(2, [5, 3], temperature=1.0, top_p=0.5, logprobs=5, logprobs_mode="processed")
            writer.add(3, [5, 3], repetition_penalty=1.5)
        plan = writer.plan()
        result = runner.step(plan)
        tokens = writer.read(plan, result)
        assert tokens[0] == tokens[1], "the mode changes nothing of the draw"
        lines = result.logprobs
        raw, told = (list(plan.rows).index(row) for row in (0, 1))
        assert lines.top_ids[raw, :TOP_K].tolist() == lines.top_ids[told, :TOP_K].tolist()
        sharp = lines.top_logprobs[raw, :TOP_K].astype(np.float64) / 0.7
        expected = sharp - np.logaddexp.reduce(sharp)
        np.testing.assert_allclose(lines.top_logprobs[told, :TOP_K], expected, atol=1e-4)
        assert (lines.top_logprobs[told, TOP_K:] == -np.inf).all()
        assert (lines.top_logprobs[raw] > -np.inf).all()
        place = lines.top_ids[told].tolist().index(tokens[1])
        assert lines.logprobs[told] == pytest.approx(expected[place], abs=1e-4)
        assert lines.ranks[told] == lines.ranks[raw] == place + 1


def test_a_step_with_the_mode_is_a_graph_and_one_without_is_the_graph_that_it_was(runner: Any) -> None:
    writer = PlanWriter(128, 4)
    writer.add(0, [7, 4, 9], **SHARP)
    for _ in range(5):
        runner.step(writer.plan())
    keys = set(runner.graphs._graphs)
    assert all(key.features.num_processed == 0 for key in keys)
    writer.add(1, [7, 4, 9], **SHARP, logprobs_mode="processed")
    for _ in range(5):
        runner.step(writer.plan())
    new = {(key.size, key.features.num_processed) for key in set(runner.graphs._graphs) - keys}
    if isinstance(runner._operations, NativeOperations):
        assert new == set(), "a program of native kernels runs none of torch"
        assert len(keys) == 1
    else:
        assert new == ({(2, 1)} if keys else set())
    writer.remove(1)
    before = len(runner.graphs)
    runner.step(writer.plan())
    assert len(runner.graphs) == before
