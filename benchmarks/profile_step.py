"""Where a step's time goes: python -m benchmarks.profile_step [--model 0.6b|30m|demo|FOLDER] [--only W1,W2]

For each workload of `benchmarks.cpu`, the device thread's time by part: linear (products with weights), attention,
the rest of the forward pass, sampling (logits to tokens, log-probabilities included), the rest of the step (its inputs
and results), and idle, between two steps. Then the loop's: scheduling, publishing, and the rest that it computes
(reading the streams among it). Operations are timed from outside, whatever implements them. A program of native kernels
is run kernel by kernel, each counted to the operation that launched it when the program was made. Timing costs some
3 µs an operation, which shows in a small model's steps.
"""

from __future__ import annotations

import argparse
import asyncio
import functools
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

from aioengine import Engine
from aioengine.core.engine_core import EngineCore
from aioengine.executor.torch_executor import Device
from aioengine.kernels.native.native_operations import NativeOperations
from aioengine.kernels.native.team import Program, Team
from aioengine.kernels.native.team_words import RECORD_BYTES
from aioengine.kernels.operations import Operations
from aioengine.models.decoder import Decoder
from aioengine.scheduler.scheduler import Scheduler
from benchmarks.cpu.runner import WARM_UP, engine_options, run
from benchmarks.cpu.workloads import MODEL_HELP, find_model, make_jobs, read_shape

LINEAR, ATTENTION, FORWARD, SAMPLING, STEP = "linear", "attention", "rest of forward", "sampling", "rest of step"
SCHEDULING, PUBLISHING = "scheduling", "publishing"
ON_DEVICE = (LINEAR, ATTENTION, FORWARD, SAMPLING, STEP)
ON_LOOP = (SCHEDULING, PUBLISHING)

IMPLEMENTATIONS = Operations, NativeOperations
PARTS = {
    LINEAR: ("linear", "experts"),
    ATTENTION: ("attend_decode", "attend_prefill"),
    FORWARD: (
        "embed",
        "rms_norm",
        "add_rms_norm",
        "rms_norm_add",
        "gated_activation",
        "scale",
        "route",
        "rotate_and_write",
    ),
    SAMPLING: ("draw", "edit_logits", "ends_of_bad_words", "penalise", "top_logprobs", "look_up"),
    STEP: ("put_spans", "gather_tokens", "append_tokens", "copy_blocks"),
}


class Clock(threading.local):
    """Of one thread.

    Attributes:
        open: parts that have begun, the innermost last, and the seconds that other parts within each have taken.
        launched: the part of each kernel of the program that is being made.
    """

    def __init__(self) -> None:
        self.open: list[tuple[str, list[float]]] = []
        self.launched: list[str] = []


class Profile:
    """Seconds by part, and calls by the function's name, since the last `clear`."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        self.calls: dict[str, int] = defaultdict(int)
        self._clock = Clock()

    def clear(self) -> None:
        self.seconds.clear()
        self.calls.clear()

    def call(self, part: str, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call a function; what it spends in another part is that one's alone."""
        others_s: list[float] = []
        still_open = self._clock.open
        still_open.append((part, others_s))
        began_at = time.perf_counter()
        try:
            return function(*args, **kwargs)
        finally:
            took_s = time.perf_counter() - began_at
            still_open.pop()
            self.seconds[part] += took_s - sum(others_s)
            if still_open:
                still_open[-1][1].append(took_s)

    def timed(self, part: str, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def run(*args: Any, **kwargs: Any) -> Any:
            self.calls[function.__name__] += 1
            return self.call(part, function, *args, **kwargs)

        return run

    def watch(self, owner: Any, name: str, part: str) -> None:
        """Replace a function of a module or class by one that is timed."""
        timed = self.timed(part, getattr(owner, name))
        setattr(owner, name, staticmethod(timed) if isinstance(vars(owner)[name], staticmethod) else timed)

    def watch_all(self) -> None:
        """What an engine that is made from now on calls."""
        for owner in IMPLEMENTATIONS:
            for part, names in PARTS.items():
                for name in filter(vars(owner).__contains__, names):
                    self.watch(owner, name, part)
        self.watch_programs()
        self.watch(Decoder, "forward", FORWARD)
        self.watch(Decoder, "logits", FORWARD)
        self.watch(Device, "step", STEP)
        self.watch(EngineCore, "_launch", SCHEDULING)
        self.watch(Scheduler, "apply", SCHEDULING)
        self.watch(EngineCore, "_publish_slice", PUBLISHING)

    def watch_programs(self) -> None:
        clock, launch, capture = self._clock, Team.launch, Team.capture

        def noted_launch(team: Team, kernel: str, num_chunks: int, *arguments: Any) -> None:
            launch(team, kernel, num_chunks, *arguments)
            if num_chunks:
                clock.launched.append(clock.open[-1][0] if clock.open else STEP)

        def noted_capture(team: Team, work: Callable[[], None]) -> Program:
            clock.launched.clear()
            program = capture(team, work)
            parts_of[id(program)] = list(clock.launched)
            programs.append(program)  # lest its id become another's
            return program

        def replay(program: Program) -> None:
            for index, part in enumerate(parts_of[id(program)]):
                self.call(part, program._team.run, program._address + index * RECORD_BYTES, 1)

        parts_of: dict[int, list[str]] = {}
        programs: list[Program] = []
        Team.launch, Team.capture, Program.replay = noted_launch, noted_capture, replay  # type: ignore[method-assign]

    def lines(self, wall_s: float, loop_s: float) -> list[str]:
        """Markdown rows: part, ms a step, share of the time.

        Args:
            loop_s: CPU time of the loop's thread.
        """
        num_steps = self.calls["step"]

        def line(name: str, seconds: float) -> str:
            return f"| {name} | {1e3 * seconds / num_steps:.3f} | {seconds / wall_s:.1%} |"

        on_device_s, on_loop_s = (sum(self.seconds[part] for part in parts) for parts in (ON_DEVICE, ON_LOOP))
        return [
            *(line(part, self.seconds[part]) for part in ON_DEVICE),
            line("idle", wall_s - on_device_s),
            *(line(f"loop: {part}", self.seconds[part]) for part in ON_LOOP),
            line("loop: rest", loop_s - on_loop_s),
        ]


async def measure(args: argparse.Namespace, profile: Profile) -> None:
    vocab_size = read_shape(Path(args.model)).vocab
    async with Engine(args.model, **engine_options(args)) as engine:
        await run(engine, WARM_UP)
        for workload in args.only.split(","):
            jobs = make_jobs(workload, 0, vocab_size=vocab_size, is_tiny=args.tiny)
            profile.clear()
            began_at, loop_began_at = time.perf_counter(), time.thread_time()
            figures = await run(engine, jobs)
            wall_s, loop_s = time.perf_counter() - began_at, time.thread_time() - loop_began_at
            num_steps = profile.calls["step"]
            print(f"\n| {workload}: {num_steps} steps, {figures['out_tok_s']:,.1f} tokens/s | ms a step | share |")
            print("\n".join(("|---|---|---|", *profile.lines(wall_s, loop_s))), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="0.6b", help=MODEL_HELP)
    parser.add_argument("--only", default="W1,W2,W4", help="workloads")
    parser.add_argument("--quantization", choices=["int8", "int4"])
    parser.add_argument("--set", action="append", default=[], metavar="NAME=VALUE", help="a field of EngineConfig")
    parser.add_argument("--tiny", action="store_true", help="short requests, to try the command")
    args = parser.parse_args()
    profile = Profile()
    profile.watch_all()
    with tempfile.TemporaryDirectory(prefix="aioengine-profile-") as scratch:
        args.model = str(find_model(args.model, Path(scratch)))
        asyncio.run(measure(args, profile))


if __name__ == "__main__":
    main()
