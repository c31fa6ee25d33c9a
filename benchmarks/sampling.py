"""What sampling costs per step, feature by feature, and what one row's feature costs the rows beside it.

    python benchmarks/sampling.py [--plain] [--quick] [--json FILE] [--batch 1 16 64 256] [--vocab 2048 151936]

Each line is a step whose rows have 200 prompt and 300 output tokens and all use one feature, the others being greedy:

- **step**: µs for what the step's logits need to become tokens: writing the step's words (`Batch`), then
  `Sampler.sample` by native kernels, or with ``--plain`` by torch. The forward pass is not in it.
- **row**: the same, divided by the number of rows.
- **others**: µs by which a greedy batch gets slower when one of its rows uses the feature; the step of that row alone
  is in it, so the lines of batch 1 say how much of it is that row's own.

For ``prompt_logprobs=5`` a step is as many prompt tokens as there are rows, their logits given.

Logits are normal with a deviation of 2.5 and a head of likely tokens, so that filters keep tens of tokens and a draw
looks at most of the vocabulary. Medians of CPU time of this thread, torch on one thread, so that a busy neighbour
counts by the caches and the memory that it takes and no more. Steps to compare are measured in turns.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from aioengine.executor.batch import Batch
from aioengine.executor.step_words import ExtraWords, FixedWords, num_fixed_words
from aioengine.kernels.native.compilation import compile_library
from aioengine.kernels.native.native_operations import NativeOperations
from aioengine.kernels.native.parts import COMMON
from aioengine.kernels.native.team import Team
from aioengine.kernels.operations import Operations
from aioengine.kernels.operations import plain_torch as plain
from aioengine.sampler.outputs import DeviceOutputs, OutputSizes
from aioengine.sampler.processors import run_processors
from aioengine.sampler.sampler import Sampler, SampleTensors
from aioengine.scheduler.plan import EMPTY, LogitsRow, Purpose, RowAdded, RowSampling, StepPlan, int32

NUM_PROMPT, NUM_OUTPUT = 200, 300
HEAD = 40
GREEDY = RowSampling(temperature=0.0)
PROMPT_LOGPROBS = "prompt_logprobs=5"
MAX_STEPS = 200


def change_one_logit(logits: torch.Tensor, rows: list[LogitsRow]) -> None:
    logits[:, 7] += 1.0


FEATURES: dict[str, dict[str, Any]] = {
    "greedy": {},
    "temperature": {"temperature": 1.0},
    "top_k=50": {"temperature": 1.0, "top_k": 50},
    "top_p=0.9": {"temperature": 1.0, "top_p": 0.9},
    "min_p=0.05": {"temperature": 1.0, "min_p": 0.05},
    "repetition_penalty": {"repetition_penalty": 1.1},
    "frequency_penalty": {"frequency_penalty": 0.1},
    "presence_penalty": {"presence_penalty": 0.1},
    "logit_bias of 50": {"logit_bias": tuple((token, 1.0) for token in range(0, 1000, 20))},
    "bad_words, 50 of 3": {"bad_words": tuple((token, token + 1, token + 2) for token in range(50))},
    "allowed_token_ids, 50": {"allowed_token_ids": tuple(range(0, 1000, 20))},
    "min_tokens": {"min_tokens": 10_000, "stop_ids": (1, 2)},
    "logprobs=5": {"logprobs": 5},
    "logprobs=5 and a penalty": {"logprobs": 5, "frequency_penalty": 0.1},
    "a logits processor": {"logits_processors": (change_one_logit,)},
}


class Steps:
    """One step again and again: ``num_rows`` rows, of which the first ones use a feature.

    Attributes:
        raw: float32 [num_rows, vocab], what each step begins with.
    """

    def __init__(
        self, operations: Operations, raw: torch.Tensor, feature: RowSampling, num_using: int, seed: int = 0
    ) -> None:
        num_rows, vocab = raw.shape
        random = np.random.default_rng(seed)
        length = NUM_PROMPT + NUM_OUTPUT
        self._raw = raw
        self._num_touched = num_using
        self._batch = Batch(max_num_seqs=num_rows, vocab_size=vocab, max_tokens=4096, tile=1)
        history = torch.from_numpy(random.integers(0, vocab, (num_rows, length + 1), np.int32))
        self._sampler = Sampler(operations, history, vocab)
        self._words = np.zeros(num_fixed_words(num_rows), np.int32)
        self._fixed = FixedWords.of(self._words, num_rows)
        self._on_device = FixedWords.of(torch.from_numpy(self._words), num_rows)
        blocks = int32(np.arange(-(-length // 16)))
        added = tuple(
            RowAdded(
                row=row,
                token_ids=history[row, :length].numpy(),
                num_prompt_tokens=NUM_PROMPT,
                block_ids=(blocks,),
                sampling=feature if row < num_using else GREEDY,
            )
            for row in range(num_rows)
        )
        self._plan = StepPlan(
            step=1,
            removed=EMPTY,
            added=added,
            rows=int32(np.arange(num_rows)),
            epochs=int32(np.zeros(num_rows)),
            starts=int32(np.full(num_rows, length - 1)),
            num_tokens=int32(np.ones(num_rows)),
            purposes=np.full(num_rows, Purpose.SAMPLE, np.int8),
        )
        extra = ExtraWords()
        deltas = self._batch.apply(self._plan, self._fixed, extra)
        words = torch.zeros(extra.num_words, dtype=torch.int32)
        extra.write(words.numpy())
        self._sampler.make_room(self._batch.rules.sizes, self._batch.num_masks)
        if deltas.masks is not None:
            operations.put_spans(self._sampler.masks, deltas.masks.of(words).view(-1, 4), words)
        if deltas.rules is not None:
            self._sampler.put_tables(deltas.rules.of(words))

    def run(self, logits: torch.Tensor) -> float:
        """Seconds for one step; ``logits``, [num_rows, vocab], are the raw ones before and after."""
        start = time.thread_time()
        step, _ = self._batch.step(self._plan, self._fixed, ExtraWords(), {})
        on_device = self._on_device
        samples = SampleTensors(
            on_device.samples,
            on_device.sample_of_row,
            on_device.scored_rows,
            on_device.kept,
            on_device.processed_samples,
        )
        out = DeviceOutputs(torch.empty(step.sizes.num_words, dtype=torch.int32), step.sizes)
        process = (lambda given: run_processors(given, self._batch.processed_rows(step))) if step.processed else None
        self._sampler.sample(logits, samples, step.features, out, process)
        seconds = time.thread_time() - start
        assert not out.status.any()
        logits[: self._num_touched] = self._raw[: self._num_touched]
        return seconds


class PromptSteps:
    """Prompt tokens, as many as there are rows of logits."""

    def __init__(self, operations: Operations, num_tokens: int, vocab: int, seed: int = 0) -> None:
        random = np.random.default_rng(seed)
        self._sampler = Sampler(operations, torch.zeros(1, 1, dtype=torch.int32), vocab)
        self._wanted = torch.from_numpy(
            np.stack((np.arange(num_tokens), random.integers(0, vocab, num_tokens))).astype(np.int32)
        )

    def run(self, logits: torch.Tensor) -> float:
        start = time.thread_time()
        sizes = OutputSizes(0, num_prompt=self._wanted.shape[1], num_prompt_top=5)
        out = DeviceOutputs(torch.empty(sizes.num_words, dtype=torch.int32), sizes).prompt
        self._sampler.score_prompt(lambda rows: logits[int(rows[0]) : int(rows[-1]) + 1], self._wanted, out)
        return time.thread_time() - start


def make_logits(num_rows: int, vocab: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(vocab)
    logits = 2.5 * torch.randn(num_rows, vocab, generator=generator)
    head = torch.randint(0, vocab, (num_rows, HEAD), generator=generator)
    return logits.scatter_(1, head, torch.linspace(18, 10, HEAD).expand(num_rows, -1))


def median_us(runs: list[Callable[[], float]], budget_s: float) -> list[float]:
    """The median of each, in µs; they take turns until ``budget_s`` is spent, the first turn not counted."""
    seconds: list[list[float]] = [[] for _ in runs]
    for run in runs:
        run()
    end = time.perf_counter() + budget_s
    while not seconds[0] or (time.perf_counter() < end and len(seconds[0]) < MAX_STEPS):
        for times, run in zip(seconds, runs, strict=True):
            times.append(run())
    return [statistics.median(times) * 1e6 for times in seconds]


def measure(
    operations: Operations, name: str, raw: torch.Tensor, logits: torch.Tensor, budget_s: float
) -> dict[str, Any]:
    """A line of the table."""
    num_rows, vocab = raw.shape
    greedy = Steps(operations, raw, GREEDY, 0)
    alone: Steps | PromptSteps
    beside: list[Steps | PromptSteps]
    if name == PROMPT_LOGPROBS:
        alone, beside = PromptSteps(operations, num_rows, vocab), [greedy, PromptSteps(operations, 1, vocab)]
    else:
        feature = RowSampling(**{"temperature": 0.0, "seed": 1, **FEATURES[name]})
        alone, beside = Steps(operations, raw, feature, num_rows), [Steps(operations, raw, feature, 1)]

    def with_one() -> float:
        return sum(steps.run(logits) for steps in beside)

    (step,) = median_us([lambda: alone.run(logits)], budget_s)
    without, beside_one = median_us([lambda: greedy.run(logits), with_one], budget_s)
    return {
        "vocab": vocab,
        "batch": num_rows,
        "feature": name,
        "step_us": round(step, 1),
        "row_us": round(step / num_rows, 2),
        "others_us": round(beside_one - without, 1),
        "greedy_us": round(without, 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 16, 64, 256])
    parser.add_argument("--vocab", type=int, nargs="+", default=[2048, 151_936])
    parser.add_argument("--plain", action="store_true", help="by plain torch, as until native kernels are compiled")
    parser.add_argument("--quick", action="store_true", help="batches of 1 and 16, and a tenth of the time a line")
    parser.add_argument("--json", type=Path, help="also write the figures here")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    team = None if arguments.plain else Team(compile_library([COMMON]), 1)
    operations = plain if team is None else NativeOperations(team)
    budget_s = 0.03 if arguments.quick else 0.3
    batches = [1, 16] if arguments.quick else arguments.batch

    lines = []
    print("µs, CPU time of the thread")
    print(f"{'vocab':>7} {'batch':>6} {'feature':24} {'step':>11} {'row':>9} {'others':>10}")
    with torch.inference_mode():
        for vocab in arguments.vocab:
            for num_rows in batches:
                raw = make_logits(num_rows, vocab)
                logits = raw.clone()
                for name in (*FEATURES, PROMPT_LOGPROBS):
                    line = measure(operations, name, raw, logits, budget_s)
                    lines.append(line)
                    print(
                        f"{vocab:7d} {num_rows:6d} {name:24} {line['step_us']:11,.1f} {line['row_us']:9,.2f} "
                        f"{line['others_us']:10,.1f}",
                        flush=True,
                    )
    if arguments.json:
        about = {"python": platform.python_version(), "torch": torch.__version__, "machine": platform.machine()}
        arguments.json.write_text(json.dumps({**about, "lines": lines}, indent=1) + "\n")


if __name__ == "__main__":
    main()
