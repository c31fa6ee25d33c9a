"""The cost of an engine in a process of its own, beside the same engine in this one.

    python benchmarks/transport.py [--only latency rate] [--loop uvloop] [--json FILE]

The device is a stand-in (`stand_in.py`), so that nothing is measured but the host. An engine of each kind is there all
the time, and they take turns, so that a drifting machine hurts both alike. Tokens become text, on the caller's side.

- **latency**: steps of `--step-ms`; for each token of each stream the time from the end of its step on the device to
  the moment when its reader has the delta. What the token gains by crossing is the difference of the two engines' p50,
  or p99.
- **rate**: steps that take no time. *core*: the sequences' listeners only count, so that the wire is alone with what
  both engines do in any case; *generate*: read at the end; *streams*: a task reads each stream. *busy* is
  CPU time of a loop's thread by wall time: the side near 1 is the limit.
- **CPU** per token, in both of these: each side's whole process, ZMQ's threads included, by the CPU clock.

Requests are laid before a paused engine and begin together; the clock runs from `resume` to the last one's end.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import platform
import random
import statistics
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from rich.console import Console
from rich.table import Table
from stand_in import BOARD, FIRST_ID, MAX_MODEL_LEN, Board, StandIn

from aioengine import Engine, ProcessOptions
from aioengine.core.listener import UNLIMITED
from aioengine.sampling_params import SamplingParams
from aioengine.scheduler.plan import int32
from aioengine.scheduler.sequence import Request

PARTS = ("latency", "rate")
PROMPT_TOKENS = 16
NUM_SKIPPED = 20
"""First tokens of each stream, whose latency does not count: the requests begin together."""
SETTLE_S = 0.2
"""For what was done before to end, such as the engine's reading of new requests."""


KINDS = ("in process", "a process")


class Run(msgspec.Struct, frozen=True, kw_only=True):
    """One measurement of one engine.

    Attributes:
        seconds: from `resume` to the last token.
        cpu_us: per token: of the caller's process, of the engine's.
        busy: shares of the time: the caller's loop, the engine's.
        latency_us: p50, p99.
    """

    num_tokens: int
    seconds: float
    cpu_us: tuple[float, float]
    busy: tuple[float, float]
    latency_us: tuple[float, float] | None = None

    @property
    def tokens_per_s(self) -> float:
        return self.num_tokens / self.seconds


class Point(msgspec.Struct, frozen=True, kw_only=True):
    """The runs of both kinds under one load; those at the same place were made one after the other."""

    load: str
    num_streams: int
    runs: dict[str, list[Run]]


class Figures(msgspec.Struct, kw_only=True):
    about: dict[str, Any]
    latency: list[Point] = []
    rate: list[Point] = []


class Side(msgspec.Struct):
    """An engine, and the board of its device."""

    kind: str
    engine: Engine
    board: Board

    @property
    def is_child(self) -> bool:
        return self.board.pid != os.getpid()

    async def cpu_s(self) -> tuple[float, float, float, float]:
        """So far: of this process, of its loop's thread; of the engine's process, of its loop's thread."""
        await self.engine.execute_dummy_batch()
        engine_s = time.clock_gettime(_cpu_clock(self.board.pid)) if self.is_child else 0.0
        return time.process_time(), time.thread_time(), engine_s, self.board.loop_cpu_s if self.is_child else 0.0


# Engines


@contextlib.asynccontextmanager
async def open_side(kind: str, folder: Path, **config: Any) -> AsyncIterator[Side]:
    """An engine with a stand-in for its device."""
    board = Board(folder / f"{random.getrandbits(64):x}.board")
    os.environ[BOARD] = str(board.path)
    where: dict[str, Any] = {"process": ProcessOptions(executor="stand_in:make")}
    if kind == "in process":
        where = {"executor": StandIn(board)}
    async with Engine(
        max_num_seqs=1024,
        max_num_batched_tokens=32_768,
        max_waiting=4096,
        log_stats_interval_s=0.0,
        show_progress=False,
        **where,
        **config,
    ) as engine:
        yield Side(kind, engine, board)


async def take_turns(
    sides: list[Side], repeats: int, measure: Callable[[Side], Awaitable[Run]]
) -> dict[str, list[Run]]:
    """Measure each side so often, in alternating order; a first round is for warming up."""
    runs: dict[str, list[Run]] = {side.kind: [] for side in sides}
    for repeat in range(-1, repeats):
        for side in sides if repeat % 2 else reversed(sides):
            run = await measure(side)
            if repeat >= 0:
                runs[side.kind].append(run)
    return runs


# Loads: each begins so many requests before a paused engine, and ends when they have ended


class Crowd:
    """Requests that are laid before an engine, and begin together.

    Args:
        latencies: seconds, one a token, are put here; None: nobody cares.
    """

    def __init__(self, side: Side, num_streams: int, num_tokens: int, latencies: list[float] | None = None) -> None:
        self.side = side
        self.num_streams = num_streams
        self.num_tokens = num_tokens
        self.latencies = latencies
        self.num_entered = 0

    async def run(self, read: Callable[[Crowd, int], Coroutine[Any, Any, None]]) -> Run:
        await self.side.engine.pause()
        async with asyncio.TaskGroup() as group:
            readers = [group.create_task(read(self, number)) for number in range(self.num_streams)]
            while self.num_entered < self.num_streams:  # noqa: ASYNC110 - they all get there by themselves
                await asyncio.sleep(0.01)
            await asyncio.sleep(SETTLE_S)
            cpu_before, begin = await self.side.cpu_s(), time.monotonic()
            await self.side.engine.resume()
            await asyncio.wait(readers)
            seconds = time.monotonic() - begin
            cpu_after = await self.side.cpu_s()
        here, my_loop, there, its_loop = (after - before for after, before in zip(cpu_after, cpu_before, strict=True))
        num_tokens = self.num_streams * self.num_tokens
        return Run(
            num_tokens=num_tokens,
            seconds=seconds,
            cpu_us=(1e6 * here / num_tokens, 1e6 * there / num_tokens),
            busy=(my_loop / seconds, its_loop / seconds),
            latency_us=_p50_p99_us(self.latencies) if self.latencies else None,
        )

    def prompt(self, number: int) -> list[int]:
        return [10 + number // 1000, 10 + number % 1000] + [20] * (PROMPT_TOKENS - 2)

    @property
    def params(self) -> SamplingParams:
        return SamplingParams(max_tokens=self.num_tokens, ignore_eos=True, temperature=0.0)


async def read_stream(crowd: Crowd, number: int) -> None:
    """Read a stream as it comes."""
    ended_at, latencies = crowd.side.board.ended_at, crowd.latencies
    num_read = 0
    async with crowd.side.engine.stream(crowd.prompt(number), crowd.params) as stream:
        crowd.num_entered += 1
        async for delta in stream:
            now = time.monotonic()
            if latencies is not None and num_read >= NUM_SKIPPED:
                for token_id in delta.token_ids:
                    latencies.append(now - ended_at[token_id - FIRST_ID])
            num_read += len(delta.token_ids)
    assert num_read == crowd.num_tokens, f"{num_read} tokens of {crowd.num_tokens}"


async def generate(crowd: Crowd, number: int) -> None:
    """`Engine.generate`, which enters a stream and waits for its end."""
    async with crowd.side.engine.stream(crowd.prompt(number), crowd.params) as stream:
        crowd.num_entered += 1
        output = await stream.finish()
    assert len(output.outputs[0].token_ids) == crowd.num_tokens


async def count(crowd: Crowd, number: int) -> None:
    """A sequence of the core's own, whose listener counts."""
    core = crowd.side.engine._here().core  # what `Engine` puts on top of it is not to be measured
    prompt = crowd.prompt(number)
    request = Request(
        request_id=str(number),
        prompt_token_ids=int32(prompt),
        params=crowd.params,
        seed=number,
        max_total_tokens=len(prompt) + crowd.num_tokens,
    )
    counter = Counter()
    core.add(core.make_sequence(request), [counter])
    crowd.num_entered += 1
    await counter.ended
    assert counter.num_tokens == crowd.num_tokens


class Counter:
    """A `Listener` that counts tokens."""

    num_allowed = UNLIMITED

    def __init__(self) -> None:
        self.num_tokens = 0
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def on_started(self) -> None:
        pass

    def on_token(self, token_id: int, logprobs: object) -> None:
        self.num_tokens += 1

    def on_prompt_logprobs(self, position: int, lines: object) -> None:
        pass

    def on_end(self) -> None:
        self.ended.set_result(None)

    def on_error(self, error: Exception) -> None:
        self.ended.set_exception(error)


LOADS = {"core": count, "generate": generate, "streams": read_stream}


async def measure_latency(sides: list[Side], args: argparse.Namespace) -> list[Point]:
    points = []
    for num_streams in args.streams:

        async def measure(side: Side, num_streams: int = num_streams) -> Run:
            side.board.step_time_s = args.step_ms / 1e3
            # uvloop's timers and asyncio's are late by up to a millisecond: a step takes longer than it should.
            num_tokens = NUM_SKIPPED + round(args.seconds / (args.step_ms / 1e3 + 1e-3))
            return await Crowd(side, num_streams, num_tokens, []).run(read_stream)

        points.append(
            Point(load="streams", num_streams=num_streams, runs=await take_turns(sides, args.repeats, measure))
        )
    return points


async def measure_rate(sides: list[Side], args: argparse.Namespace) -> list[Point]:
    points = []
    for num_streams in args.rate_streams:
        for load, read in LOADS.items():
            num_tokens = min(args.rate_tokens // num_streams, MAX_MODEL_LEN - PROMPT_TOKENS)
            if load == "streams":
                num_tokens //= 4  # a reader's turn costs more than all else

            async def measure(side: Side, num: int = num_streams, each: int = num_tokens, read: Any = read) -> Run:
                side.board.step_time_s = 0.0
                return await Crowd(side, num, each).run(read)

            points.append(
                Point(load=load, num_streams=num_streams, runs=await take_turns(sides, args.repeats, measure))
            )
    return points


def _p50_p99_us(seconds: list[float]) -> tuple[float, float]:
    p50, p99 = np.percentile(seconds, (50, 99)) * 1e6
    return float(p50), float(p99)


def _cpu_clock(pid: int) -> int:
    """The CPU clock of another process (Linux's MAKE_PROCESS_CPUCLOCK, which clock_getcpuclockid(3) gives)."""
    return (~pid << 3) | 2


# All of it


async def measure_all(args: argparse.Namespace) -> Figures:
    figures = Figures(
        about={
            "python": platform.python_version(),
            "loop": args.loop,
            "cpus": os.cpu_count(),
            "load_before": os.getloadavg(),
            "step_ms": args.step_ms,
        }
    )
    with tempfile.TemporaryDirectory(prefix="aio-bench-") as name:
        folder = Path(name)
        async with open_side(KINDS[0], folder) as here, open_side(KINDS[1], folder) as child:
            if "latency" in args.only:
                figures.latency = await measure_latency([here, child], args)
            if "rate" in args.only:
                figures.rate = await measure_rate([here, child], args)
    return figures


# The tables


def spread(values: list[float], form: str = ",.0f", factor: float = 1.0) -> str:
    """The median, and the least and the most."""
    median, least, most = (format(factor * f(values), form) for f in (statistics.median, min, max))
    return f"{median} ({least}–{most})"


def print_figures(figures: Figures) -> None:
    console = Console(width=150)
    if figures.latency:
        title = "µs from the step's end to its reader; medians of the runs (least–most)"
        table = Table(
            "streams", "what", *KINDS, "gained by crossing", "CPU µs a token: here", "engine", "busy", title=title
        )
        for point in figures.latency:
            here, child = (point.runs[kind] for kind in KINDS)
            for place, what in enumerate(("p50", "p99")):
                columns = [[run.latency_us[place] for run in runs if run.latency_us] for runs in (here, child)]
                gained = [b - a for a, b in zip(*columns, strict=True)]
                table.add_row(
                    f"{point.num_streams}",
                    what,
                    *map(spread, columns),
                    spread(gained),
                    *(_cpu(point) if not place else []),
                )
        console.print(table)
    if figures.rate:
        title = "tokens/s, steps at once; medians of the runs (least–most)"
        table = Table("streams", "load", *KINDS, "CPU µs a token: here", "engine", "busy", title=title)
        for point in figures.rate:
            rates = [spread([run.tokens_per_s for run in point.runs[kind]]) for kind in KINDS]
            table.add_row(f"{point.num_streams}", point.load, *rates, *_cpu(point))
        console.print(table)


def _cpu(point: Point) -> list[str]:
    """In process / in a process of its own; and how busy the loops of that one are."""
    here, child = (point.runs[kind] for kind in KINDS)
    median = statistics.median
    return [
        f"{median(r.cpu_us[0] for r in here):.2f} / {median(r.cpu_us[0] for r in child):.2f}",
        f"{median(r.cpu_us[1] for r in child):.2f}",
        f"{median(r.busy[0] for r in child):.2f}, {median(r.busy[1] for r in child):.2f}",
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=PARTS, nargs="+", default=list(PARTS))
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 64, 256], help="of the latency")
    parser.add_argument("--rate-streams", type=int, nargs="+", default=[256, 1024])
    parser.add_argument("--rate-tokens", type=int, default=512_000, help="of all streams of one run")
    parser.add_argument("--step-ms", type=float, default=5.0)
    parser.add_argument("--seconds", type=float, default=2.0, help="of one run of the latency")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--loop", choices=["asyncio", "uvloop"], default="asyncio", help="of the caller")
    parser.add_argument("--json", type=Path, help="write the figures here too")
    args = parser.parse_args()
    os.environ["PYTHONPATH"] = os.pathsep.join(
        filter(None, (str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")))
    )
    if args.loop == "uvloop":
        import uvloop

        figures = uvloop.run(measure_all(args))
    else:
        figures = asyncio.run(measure_all(args))
    print_figures(figures)
    if args.json is not None:
        args.json.write_bytes(msgspec.json.format(msgspec.json.encode(figures)) + b"\n")


if __name__ == "__main__":
    main()
