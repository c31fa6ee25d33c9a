"""What a decode step costs the host on the GPU path, without a GPU: ``python -m benchmarks.gpu.host_cost``.

The device takes all work and does none, so that what is left is the host's own: the plan into words, and the words that
come back into a result. Not in it: the driver's calls, of which a step makes about ten (two copies, one graph, some
events). Beside them stand scheduler and publishing, see ``benchmarks/step_overhead.py``.
"""

from __future__ import annotations

import argparse
import statistics
import time
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from aioengine.core.executor_protocol import ExecutorStats
from aioengine.executor.accelerator import HostWords
from aioengine.executor.graphs import default_sizes
from aioengine.executor.runner import Runner
from aioengine.scheduler.plan import EMPTY, RowAdded, RowSampling, StepPlan, int32
from benchmarks.gpu.command import positive, run

ROWS = (1, 16, 64, 256, 1024)
PROMPT_TOKENS = 100
BLOCK_SIZE = 16

SAMPLINGS = {
    "temperature": RowSampling(temperature=0.8, seed=3),
    "penalties, stops, logprobs": RowSampling(
        temperature=0.8, seed=3, frequency_penalty=0.1, stop_ids=(3,), min_tokens=10_000, logprobs=2
    ),
}


class NoEvent:
    def is_done(self) -> bool:
        return True

    def wait(self) -> None:
        pass

    def seconds_since(self, earlier: Any) -> float:
        return 0.0


class NoDevice:
    """An `Accelerator` that takes work and does none of it."""

    operations: Any = SimpleNamespace(prefill_tile=lambda *_: 64)
    is_host = False
    can_capture = True
    device = torch.device("cpu")
    name = "none"
    num_multiprocessors = 132
    capability = 90

    def __init__(self) -> None:
        self._event = NoEvent()

    def enqueue(self, work: Any, *args: Any) -> None:
        pass

    def enqueue_after(self, event: Any) -> None:
        pass

    def record(self) -> NoEvent:
        return self._event

    def copy_out(self, source: Any, target: Any, num_words: int) -> NoEvent:
        return self._event

    def host_words(self, num_words: int) -> HostWords:
        return HostWords(torch.zeros(num_words, dtype=torch.int32))

    def capture(self, work: Any) -> Any:
        return SimpleNamespace(replay=lambda: None)

    def synchronize(self) -> None:
        pass


def make_runner(max_num_seqs: int) -> Runner:
    attention: Any = SimpleNamespace(num_splits=lambda *_: 1)
    config = SimpleNamespace(max_model_len=4096, vocab_size=2048, num_heads=16, num_kv_heads=8, head_dim=128)
    decoder: Any = SimpleNamespace(config=config, use=lambda operations: None)
    runner = Runner(
        NoDevice(),
        decoder,
        lambda _: attention,
        ExecutorStats(),
        max_num_seqs=max_num_seqs,
        block_size=BLOCK_SIZE,
        max_in_flight=2,
        num_groups=1,
        graph_sizes=default_sizes(max_num_seqs),
    )
    runner.make_cache()
    return runner


def decode_plan(step: int, num_rows: int, added: tuple[RowAdded, ...] = ()) -> StepPlan:
    """Each row one token; one in sixteen gets a block."""
    rows = int32(np.arange(num_rows))
    grown = EMPTY if added else int32(rows[(rows + step) % BLOCK_SIZE == 0])
    return StepPlan(
        step=step, removed=EMPTY, added=added, grown_rows=grown,
        grown_groups=int32(np.zeros(len(grown))), grown_blocks=grown, rows=rows, epochs=rows,
        starts=int32(np.full(num_rows, PROMPT_TOKENS - 1 + step)), num_tokens=int32(np.ones(num_rows)),
        purposes=np.ones(num_rows, np.int8),
    )  # fmt: skip


def measure(num_rows: int, sampling: RowSampling, num_steps: int) -> tuple[float, float]:
    """Median µs to launch a step, and to read what it brought."""
    runner = make_runner(max(num_rows, 8))
    blocks = int32(np.arange(-(-PROMPT_TOKENS // BLOCK_SIZE)))
    added = tuple(
        RowAdded(row=row, token_ids=int32(np.arange(PROMPT_TOKENS)), num_prompt_tokens=PROMPT_TOKENS,
                 block_ids=(blocks,), sampling=sampling)
        for row in range(num_rows)
    )  # fmt: skip
    runner.step(decode_plan(0, num_rows, added)).wait()
    launches, results = [], []
    for step in range(1, num_steps + 1):
        plan = decode_plan(step, num_rows)
        began = time.perf_counter()
        launched = runner.step(plan)
        middle = time.perf_counter()
        launched.wait()
        ended = time.perf_counter()
        launches.append(middle - began)
        results.append(ended - middle)
    return statistics.median(launches) * 1e6, statistics.median(results) * 1e6


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=positive(int), default=400)
    steps = parser.parse_args().steps
    print("| rows | " + " | ".join(f"{name}: launch, µs | result, µs" for name in SAMPLINGS) + " |")
    print("|---|" + "---|---|" * len(SAMPLINGS))
    with torch.inference_mode():
        for num_rows in ROWS:
            figures = [figure for sampling in SAMPLINGS.values() for figure in measure(num_rows, sampling, steps)]
            print(f"| {num_rows} | " + " | ".join(f"{figure:.0f}" for figure in figures) + " |", flush=True)
    return 0


if __name__ == "__main__":
    run(main)
