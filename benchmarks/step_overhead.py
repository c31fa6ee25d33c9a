"""What the core costs per step: the host's share of a step while the device is not the question.

    python benchmarks/step_overhead.py [--json FILE] [--steps 300] [--running 1 16 64 256 1024] [--depth 1]

Phases of a step, each timed apart:

- **intake**: make a `Sequence` for each new request and `Scheduler.add` it (churn only)
- **schedule**: `Scheduler.schedule`, the plan with its deltas; prompts of new sequences are hashed here
- **apply**: `Scheduler.apply`: append tokens, check stops, hash the blocks that were filled

The device is a stand-in that draws tokens outside the timed parts. Two workloads, prefix caching on:

- **steady**: all sequences decode. They arrived over 16 steps, so that each step a sixteenth fills a block.
- **churn**: 5 % of the sequences end by EOS each step, and as many new ones with prompts of their own take their place.
  The pool holds twice what runs, so that every new block evicts a cached one.

Times are CPU time of this thread (``time.thread_time``), so that a busy neighbour does not count, and wall time beside
it. Medians over the steps; the mean and the 90th percentile show what the median hides.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from aioengine.core.kv_manager import KVManager
from aioengine.core.plan import StepPlan, StepResult, Want, int32
from aioengine.core.scheduler import Scheduler, StepOutput
from aioengine.core.sequence import Sequence
from aioengine.request import Request
from aioengine.sampling_params import SamplingParams

BLOCK_SIZE = 16
PROMPT_TOKENS = 100
MAX_NEW_TOKENS = 1500
MAX_BATCHED_TOKENS = 8192
CHURN = 0.05
VOCAB = 32_000
EOS = (2, 3)
PHASES = ("intake", "schedule", "apply")
WARM_UP_STEPS = 60


class Times(msgspec.Struct):
    """Seconds by phase, one number a step, on one clock."""

    clock: Callable[[], float]
    phases: dict[str, list[float]] = msgspec.field(default_factory=lambda: {phase: [] for phase in PHASES})

    def totals(self) -> list[float]:
        return [sum(step) for step in zip(*self.phases.values(), strict=True)]


class Stopwatch:
    """Times the phases of each step on two clocks at once."""

    def __init__(self) -> None:
        self.cpu = Times(time.thread_time)
        self.wall = Times(time.perf_counter)

    def run(self, phase: str, function: Callable[[], Any]) -> Any:
        # Innermost is the CPU clock: reading it is a system call, which the other then counts.
        wall, cpu = time.perf_counter(), time.thread_time()
        value = function()
        cpu, wall = time.thread_time() - cpu, time.perf_counter() - wall
        self.cpu.phases[phase].append(cpu)
        self.wall.phases[phase].append(wall)
        return value


class Device:
    """Brings a token for each row that wants one; rows picked by ``num_ending`` get an EOS."""

    def __init__(self, seed: int) -> None:
        self._random = np.random.default_rng(seed)

    def compute(self, plan: StepPlan, num_ending: int) -> StepResult:
        samples = plan.wants == Want.LOGITS
        token_ids = self._random.integers(100, VOCAB, int(samples.sum()), dtype=np.int32)
        token_ids[self._random.permutation(len(token_ids))[:num_ending]] = EOS[0]
        return StepResult(step=plan.step, offsets=int32(np.cumsum([0, *samples.tolist()])), token_ids=int32(token_ids))


class Requests:
    """Makes requests with prompts of their own."""

    def __init__(self, seed: int) -> None:
        self._random = np.random.default_rng(seed)
        self._params = SamplingParams(max_tokens=MAX_NEW_TOKENS, temperature=0.0)
        self._count = 0

    def make(self, count: int) -> list[Request]:
        prompts = self._random.integers(100, VOCAB, (count, PROMPT_TOKENS), dtype=np.int32)
        self._count += count
        return [
            Request(
                request_id=str(self._count - i),
                prompt_token_ids=int32(prompt),
                params=self._params,
                seed=i,
                max_total_tokens=PROMPT_TOKENS + MAX_NEW_TOKENS,
            )
            for i, prompt in enumerate(prompts)
        ]


def take_in(scheduler: Scheduler, requests: list[Request]) -> None:
    for request in requests:
        scheduler.add(Sequence(request, eos_token_ids=EOS))


def make_scheduler(num_running: int, num_blocks: int) -> Scheduler:
    return Scheduler(
        KVManager(num_blocks, BLOCK_SIZE, enable_prefix_caching=True),
        max_num_seqs=num_running,
        max_num_batched_tokens=MAX_BATCHED_TOKENS,
        eos_token_ids=EOS,
    )


def measure(num_running: int, num_steps: int, depth: int, churn: float) -> Stopwatch:
    """Run a workload at ``depth`` steps in flight, and time ``num_steps`` steps of it."""
    tokens_each = PROMPT_TOKENS + 32 if churn else PROMPT_TOKENS + num_steps + WARM_UP_STEPS
    num_blocks = 2 * num_running * (tokens_each // BLOCK_SIZE + 1)
    longest = (PROMPT_TOKENS + MAX_NEW_TOKENS) // BLOCK_SIZE + 1
    scheduler = make_scheduler(num_running, max(num_blocks, longest))
    device, requests = Device(seed=1), Requests(seed=2)
    launched: deque[StepPlan] = deque()
    arrivals = [len(part) for part in np.array_split(np.arange(num_running), BLOCK_SIZE)]
    ending, replacing = 0.0, 0
    for step in range(WARM_UP_STEPS + num_steps):
        if step == WARM_UP_STEPS:
            watch = Stopwatch()
        elif step == 0:
            watch = Stopwatch()  # thrown away with the warm-up
        arriving = requests.make(arrivals[step] if step < len(arrivals) else replacing)
        watch.run("intake", lambda: take_in(scheduler, arriving))  # noqa: B023 - runs at once
        plan = watch.run("schedule", scheduler.schedule)
        if plan is not None:
            launched.append(plan)
        if len(launched) < depth:
            watch.run("apply", lambda: None)
            continue
        plan = launched.popleft()
        ending += churn * num_running if step >= len(arrivals) else 0.0
        result = device.compute(plan, int(ending))
        ending -= int(ending)
        output: StepOutput = watch.run("apply", lambda: scheduler.apply(plan, result))  # noqa: B023 - runs at once
        replacing = sum(sequence.finish_reason is not None for sequence in output.sequences)
    assert len(scheduler.running) >= num_running * (1 - 2 * churn * depth) - 1, "the workload is not what it says"
    return watch


def summarize(times: Times) -> dict[str, float]:
    """µs: median by phase, and median, mean and 90th percentile of their sum."""
    totals = times.totals()
    return {
        **{phase: round(statistics.median(values) * 1e6, 1) for phase, values in times.phases.items()},
        "median": round(statistics.median(totals) * 1e6, 1),
        "mean": round(statistics.fmean(totals) * 1e6, 1),
        "p90": round(statistics.quantiles(totals, n=10)[-1] * 1e6, 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--running", type=int, nargs="+", default=[1, 16, 64, 256, 1024])
    parser.add_argument("--steps", type=int, default=300, help="timed steps per line")
    parser.add_argument("--depth", type=int, default=1, help="steps in flight")
    parser.add_argument("--json", type=Path, help="also write the figures here")
    arguments = parser.parse_args()

    lines = []
    columns = [*PHASES, "median", "mean", "p90", "wall median", "wall p90"]
    print("µs a step, CPU time of the thread; the last two are wall time")
    print(f"{'workload':8} {'running':>8} " + " ".join(f"{column:>11}" for column in columns))
    for workload, churn in (("steady", 0.0), ("churn", CHURN)):
        for num_running in arguments.running:
            watch = measure(num_running, arguments.steps, arguments.depth, churn)
            cpu, wall = summarize(watch.cpu), summarize(watch.wall)
            lines.append({"workload": workload, "running": num_running, "cpu_us": cpu, "wall_us": wall})
            figures = [*(cpu[column] for column in columns[:-2]), wall["median"], wall["p90"]]
            print(f"{workload:8} {num_running:8d} " + " ".join(f"{figure:11.1f}" for figure in figures), flush=True)
    if arguments.json:
        about = {"python": platform.python_version(), "numpy": np.__version__, "machine": platform.machine()}
        arguments.json.write_text(
            json.dumps({"steps": arguments.steps, "depth": arguments.depth, **about, "lines": lines}, indent=1) + "\n"
        )


if __name__ == "__main__":
    main()
