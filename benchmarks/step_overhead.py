"""What the core costs per step: the host's share of a step while the device is not the question.

    python benchmarks/step_overhead.py [--json FILE] [--steps 300] [--running 1 16 64 256 1024] [--depth 1]
                                       [--windows 0]

Phases of a step, each timed apart:

- **intake**: make a `Sequence` for each new request and `Scheduler.add_sequence` it (churn only)
- **schedule**: `Scheduler.schedule_step`, the plan with its deltas; prompts of new sequences are hashed here
- **apply**: `Scheduler.apply_result`: append tokens, check stops, hash the blocks that were filled
- **observe**: one `StepRecord` for the metrics that every engine keeps
- **publish**, not part of the sums: each token to its `Completion`, which makes text of it and keeps it for its reader

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
from pathlib import Path

import msgspec
import numpy as np

from aioengine.core.listener import UNLIMITED
from aioengine.core.observers import make_record
from aioengine.frontend.answer_format import PLAIN
from aioengine.frontend.request_state import Completion
from aioengine.models.folder import DEMO_MODEL
from aioengine.outputs import TokenLogprobs
from aioengine.outputs.metrics import EngineMetrics
from aioengine.sampling_params import SamplingParams
from aioengine.scheduler.cache_layout import CacheGroup, CacheLayout
from aioengine.scheduler.kv_manager import KVManager
from aioengine.scheduler.plan import Purpose, StepPlan, StepResult, int32
from aioengine.scheduler.scheduler import Scheduler
from aioengine.scheduler.sequence import Request, make_choices
from aioengine.scheduler.steps import Budget, StepOutput
from aioengine.text.detokenizer import make_detokenizer
from aioengine.text.tokenizer import Tokenizer

BLOCK_SIZE = 16
PROMPT_TOKENS = 100
MAX_NEW_TOKENS = 1500
MAX_BATCHED_TOKENS = 8192
CHURN = 0.05
VOCAB = 2048
EOS = (2, 3)
PHASES = ("intake", "schedule", "apply", "observe", "publish")
WARM_UP_STEPS = 60


class Times(msgspec.Struct):
    """Seconds by phase, one number a step, on one clock."""

    phases: dict[str, list[float]] = msgspec.field(default_factory=lambda: {phase: [] for phase in PHASES})

    def totals(self) -> list[float]:
        core = [times for phase, times in self.phases.items() if phase != "publish"]
        return [sum(step) for step in zip(*core, strict=True)]


class Device:
    """Brings a token for each row that wants one, EOS for some."""

    def __init__(self, seed: int) -> None:
        self._random = np.random.default_rng(seed)

    def compute(self, plan: StepPlan, num_ending: int) -> StepResult:
        samples = plan.purposes == Purpose.SAMPLE
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


class Discarding:
    """Stands in for a `RequestState` whose reader takes everything at once; what a stream adds is in `loop_lag.py`."""

    max_unread = UNLIMITED
    stream_interval = 1

    def leave_queue(self, num_left: int) -> None:
        pass

    def on_output(self, completion: Completion) -> None:
        pass

    def on_ended(self, completion: Completion) -> None:
        pass

    def on_prompt_logprobs(self, position: int, logprobs: list[TokenLogprobs]) -> None:
        pass


class Workload:
    """``num_running`` sequences, of which a share of ``churn`` is replaced each step.

    The methods named in `PHASES` are what is timed; the others prepare what those take in.
    """

    def __init__(
        self, num_running: int, num_steps: int, depth: int, churn: float, windows: tuple[int | None, ...] = (None,)
    ) -> None:
        tokens_each = PROMPT_TOKENS + 32 if churn else PROMPT_TOKENS + num_steps
        layout = CacheLayout(groups=tuple(CacheGroup(layers=(n,), reach=window) for n, window in enumerate(windows)))
        num_blocks = 2 * num_running * (tokens_each // BLOCK_SIZE + 1)
        longest = (PROMPT_TOKENS + MAX_NEW_TOKENS) // BLOCK_SIZE + 1
        self.scheduler = Scheduler(
            KVManager(
                (len(windows) * max(num_blocks, longest),),
                BLOCK_SIZE,
                enable_prefix_caching=True,
                layout=layout,
                max_in_flight=depth,
                max_step_tokens=MAX_BATCHED_TOKENS,
            ),
            max_num_seqs=num_running,
            budget=Budget(MAX_BATCHED_TOKENS, MAX_BATCHED_TOKENS),
            eos_token_ids=EOS,
        )
        self.depth = depth
        self.num_running = num_running
        self.churn = churn
        self.output: StepOutput | None = None
        self._device, self._requests = Device(seed=1), Requests(seed=2)
        self._first_arrivals = [len(part) for part in np.array_split(np.arange(num_running), BLOCK_SIZE)]
        self._arriving: list[Request] = []
        self._launched: deque[StepPlan] = deque()
        self._landing: tuple[StepPlan, StepResult] | None = None
        self._num_ending = 0.0
        self._metrics = EngineMetrics()
        self._reader = Discarding()
        self._table = Tokenizer.load(DEMO_MODEL).token_table()

    def arrive(self, step: int) -> None:
        """Make the requests that come before this step."""
        if step < len(self._first_arrivals):
            count = self._first_arrivals[step]
        else:
            ended = self.output.sequences if self.output is not None else []
            count = sum(sequence.finish_reason is not None for sequence in ended)
            self._num_ending += self.churn * self.num_running
        self._arriving = self._requests.make(count)

    def intake(self) -> None:
        for request in self._arriving:
            sequence = make_choices(request, eos_token_ids=EOS)
            sequence.listener = Completion(sequence, self._reader, make_detokenizer(self._table), PLAIN)  # type: ignore[arg-type]
            self.scheduler.add_sequence(sequence)

    def schedule(self) -> None:
        plan = self.scheduler.schedule_step(time.monotonic())
        if plan is not None:
            self._launched.append(plan)

    def compute(self) -> None:
        """Bring the result of the oldest step, if the device is as far behind as it may be."""
        self._landing = None
        if len(self._launched) >= self.depth:
            plan = self._launched.popleft()
            self._landing = plan, self._device.compute(plan, int(self._num_ending))
            self._num_ending %= 1

    def apply(self) -> None:
        if self._landing is not None:
            self.output = self.scheduler.apply_result(*self._landing, time.monotonic())

    def observe(self) -> None:
        if self._landing is not None and self.output is not None:
            now = time.monotonic()
            self._metrics.on_step(
                make_record(self.scheduler, *self._landing, self.output, launched_at=now - 0.01, now=now)
            )

    def publish(self) -> None:
        if self._landing is None or self.output is None:
            return
        for sequence, token_id in zip(self.output.sequences, self.output.token_ids, strict=True):
            listener: Completion = sequence.listener
            listener.on_token(token_id, None)
            if sequence.finish_reason is not None:
                listener.on_end()


def measure(
    num_running: int, num_steps: int, depth: int, churn: float, windows: tuple[int | None, ...]
) -> tuple[Times, Times]:
    """Time ``num_steps`` steps of a workload after it has settled, in CPU time and in wall time."""
    cpu, wall = Times(), Times()
    workload = Workload(num_running, WARM_UP_STEPS + num_steps, depth, churn, windows)
    for step in range(WARM_UP_STEPS + num_steps):
        workload.arrive(step)
        for phase in PHASES:
            if phase == "apply":
                workload.compute()
            run = getattr(workload, phase)
            # The CPU clock is read innermost: that is a system call, of which each clock then counts its own half.
            wall_start, cpu_start = time.perf_counter(), time.thread_time()
            run()
            cpu_end, wall_end = time.thread_time(), time.perf_counter()
            if step >= WARM_UP_STEPS:
                cpu.phases[phase].append(cpu_end - cpu_start)
                wall.phases[phase].append(wall_end - wall_start)
    fewest = num_running * (1 - 2 * churn * depth) - 1
    assert len(workload.scheduler.table.running) >= fewest, "the workload is not what it says"
    return cpu, wall


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
    parser.add_argument("--windows", type=int, nargs="+", default=[0], help="of each group of layers; 0: none")
    parser.add_argument("--json", type=Path, help="also write the figures here")
    arguments = parser.parse_args()

    lines = []
    windows = tuple(window or None for window in arguments.windows)
    columns = [*PHASES, "median", "mean", "p90", "wall median", "wall p90"]
    print("µs a step, CPU time of the thread; the last two are wall time")
    print(f"{'workload':8} {'running':>8} " + " ".join(f"{column:>11}" for column in columns))
    for workload, churn in (("steady", 0.0), ("churn", CHURN)):
        for num_running in arguments.running:
            cpu, wall = map(summarize, measure(num_running, arguments.steps, arguments.depth, churn, windows))
            lines.append({"workload": workload, "running": num_running, "cpu_us": cpu, "wall_us": wall})
            figures = [*(cpu[column] for column in columns[:-2]), wall["median"], wall["p90"]]
            print(f"{workload:8} {num_running:8d} " + " ".join(f"{figure:11.1f}" for figure in figures), flush=True)
    if arguments.json:
        about = {"python": platform.python_version(), "numpy": np.__version__, "machine": platform.machine()}
        arguments.json.write_text(
            json.dumps(
                {"steps": arguments.steps, "depth": arguments.depth, "windows": windows, **about, "lines": lines},
                indent=1,
            )
            + "\n"
        )


if __name__ == "__main__":
    main()
