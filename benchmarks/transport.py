"""What it costs to have the engine in a process of its own, beside the same engine in this one.

    python benchmarks/transport.py [--quick] [--only latency rate start death] [--loop uvloop] [--json FILE]

The device is a stand-in (`stand_in.py`), so that nothing is measured but the host. An engine of each kind is there all
the time, and they take turns, so that a drifting machine hurts both alike. Tokens become text, on the caller's side.

- **latency**: steps of `--step-ms`; for each token of each stream the time from the end of its step on the device to
  the moment when its reader has the delta. What the token gains by crossing is the difference of the two engines' p50,
  or p99.
- **rate**: steps that take no time. *core*: the sequences' listeners only count, so that the wire is alone with what
  both engines do in any case; *generate*: nobody reads before the end; *streams*: a task reads each stream. *busy* is
  CPU time of a loop's thread by wall time: the side near 1 is the limit.
- **CPU** per token, in both of these: each side's whole process, ZMQ's threads included, by the CPU clock.
- **start**: from the call to the engine that serves, step by step; and the end. With the bundled model both kinds have
  to import torch: here in an interpreter of its own.
- **death**: from SIGKILL to the engine's process, or from a device that is lost, to the error that each of 256 callers
  gets.

Requests are laid before a paused engine and begin together; the clock runs from `resume` to the last one's end.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import logging
import os
import platform
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from pathlib import Path
from typing import Any
from unittest import mock

import msgspec
import numpy as np
from stand_in import BOARD, FIRST_ID, MAX_MODEL_LEN, Board, StandIn
from transport_report import KINDS, NUM_CALLERS, Death, Figures, Point, Run, Started, print_figures

from aioengine import Engine, EngineDead, ProcessOptions
from aioengine.core.listener import UNLIMITED
from aioengine.sampling_params import SamplingParams
from aioengine.scheduler.plan import int32
from aioengine.scheduler.sequence import Request
from aioengine.transport import backends, process
from aioengine.transport.handshake import HandshakeState, Welcome

PARTS = ("latency", "rate", "start", "death")
PROMPT_TOKENS = 16
NUM_SKIPPED = 20
"""First tokens of each stream, whose latency does not count: the requests begin together."""
SETTLE_S = 0.2
"""For what was done before to end, such as the engine's reading of new requests."""

IN_PROCESS_START = """
import asyncio, time
from aioengine import Engine
async def main():
    begin = time.monotonic()
    engine = await Engine.start(show_progress=False)
    print(time.monotonic() - begin)
    await engine.aclose()
asyncio.run(main())
"""


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


# Beginning and end


class NotedWelcome(Welcome):
    """Notes when the engine has said what."""

    noted: dict[HandshakeState, float]

    def on_message(self, peer: bytes, frames: list[Any]) -> Any:
        answer = super().on_message(peer, frames)
        self.noted.setdefault(self.state, time.monotonic())
        return answer


async def start_child(folder: Path, executor: str | None) -> Started:
    board = Board(folder / f"{random.getrandbits(64):x}.board")
    os.environ[BOARD] = str(board.path)
    noted: dict[HandshakeState, float] = {}
    spawned_at: list[float] = []

    def note_start(*args: Any, **options: Any) -> Any:
        child = process.Child(*args, **options)
        spawned_at.append(time.monotonic())
        return child

    kind = type("", (NotedWelcome,), {"noted": noted})
    with mock.patch.object(backends, "Welcome", kind), mock.patch.object(backends, "Child", note_start):
        begin = time.monotonic()
        engine = await Engine.start(process=ProcessOptions(executor=executor), show_progress=False)
        serving_at = time.monotonic()
    phases = {
        "spawned": spawned_at[0],
        "HELLO": noted[HandshakeState.CONNECTED],
        **({"device made": board.made_at} if executor is not None else {}),
        "READY": noted[HandshakeState.READY],
        "serving": serving_at,
    }
    await engine.aclose()
    return Started(phases={name: at - begin for name, at in phases.items()}, close_s=time.monotonic() - serving_at)


async def start_here(folder: Path) -> Started:
    board = Board(folder / f"{random.getrandbits(64):x}.board")
    begin = time.monotonic()
    engine = await Engine.start(executor=StandIn(board), show_progress=False)
    serving_at = time.monotonic()
    await engine.aclose()
    return Started(phases={"serving": serving_at - begin}, close_s=time.monotonic() - serving_at)


def start_model_here() -> Started:
    run = subprocess.run([sys.executable, "-c", IN_PROCESS_START], capture_output=True, check=True, text=True)
    return Started(phases={"serving": float(run.stdout)}, close_s=None)


async def measure_starts(folder: Path, args: argparse.Namespace) -> dict[str, list[Started]]:
    starts: dict[str, list[Started]] = {
        name: []
        for name in ("stand-in, here", "stand-in, a process", "bundled model, here", "bundled model, a process")
    }
    for _ in range(args.repeats):
        starts["stand-in, here"].append(await start_here(folder))
        starts["stand-in, a process"].append(await start_child(folder, "stand_in:make"))
        starts["bundled model, here"].append(start_model_here())
        starts["bundled model, a process"].append(await start_child(folder, None))
    return starts


async def die(folder: Path, kind: str, kill: Callable[[Board], float | None], step_ms: float) -> Death:
    """Let an engine die under its callers."""
    heard_at: list[float] = []

    async def call(engine: Engine, number: int) -> None:
        try:
            await engine.generate([10 + number % 1000] * PROMPT_TOKENS, max_tokens=4000, ignore_eos=True)
        except EngineDead:
            heard_at.append(time.monotonic())

    async with open_side(kind, folder) as side:
        side.board.step_time_s = step_ms / 1e3
        async with asyncio.TaskGroup() as group:
            for number in range(NUM_CALLERS):
                group.create_task(call(side.engine, number))
            await asyncio.sleep(0.3 + random.random() * 0.1)  # they all run then; at any moment of a step
            died_at = kill(side.board)
        died_at = died_at or side.board.died_at
    assert len(heard_at) == NUM_CALLERS, f"{len(heard_at)} callers heard of it"
    return Death(first_s=min(heard_at) - died_at, last_s=max(heard_at) - died_at)


def kill_process(board: Board) -> float:
    now = time.monotonic()
    os.kill(board.pid, signal.SIGKILL)
    return now


def lose_device(board: Board) -> None:
    board.will_die = True


async def measure_deaths(folder: Path, args: argparse.Namespace) -> dict[str, list[Death]]:
    deaths: dict[str, list[Death]] = {"SIGKILL": [], "device lost, a process": [], "device lost, in process": []}
    for _ in range(args.deaths):
        deaths["SIGKILL"].append(await die(folder, "a process", kill_process, args.step_ms))
        deaths["device lost, a process"].append(await die(folder, "a process", lose_device, args.step_ms))
        deaths["device lost, in process"].append(await die(folder, "in process", lose_device, args.step_ms))
    return deaths


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
        async with contextlib.AsyncExitStack() as stack:
            if {"latency", "rate"} & set(args.only):
                sides = [await stack.enter_async_context(open_side(kind, folder)) for kind in KINDS]
            if "latency" in args.only:
                figures.latency = await measure_latency(sides, args)
            if "rate" in args.only:
                figures.rate = await measure_rate(sides, args)
        if "start" in args.only:
            figures.starts = await measure_starts(folder, args)
        if "death" in args.only:
            figures.deaths = await measure_deaths(folder, args)
    figures.about["load_after"] = os.getloadavg()
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=PARTS, nargs="+", default=list(PARTS))
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 64, 256], help="of the latency")
    parser.add_argument("--rate-streams", type=int, nargs="+", default=[256, 1024])
    parser.add_argument("--rate-tokens", type=int, default=512_000, help="of all streams of one run")
    parser.add_argument("--step-ms", type=float, default=5.0)
    parser.add_argument("--seconds", type=float, default=2.0, help="of one run of the latency")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--deaths", type=int, default=12, help="of each kind")
    parser.add_argument("--loop", choices=["asyncio", "uvloop"], default="asyncio", help="of the caller")
    parser.add_argument("--quick", action="store_true", help="two short repeats of everything, to see that it works")
    parser.add_argument("--json", type=Path, help="write the figures here too")
    args = parser.parse_args()
    if args.quick:
        args.repeats, args.deaths, args.seconds, args.rate_tokens = 2, 3, 0.5, 64_000
    os.environ["PYTHONPATH"] = os.pathsep.join(
        filter(None, (str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")))
    )
    logging.getLogger("aioengine").setLevel(logging.CRITICAL + 1)  # it is told of each death, at length
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
