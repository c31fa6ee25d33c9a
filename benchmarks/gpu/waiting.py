"""How a step's end reaches the event loop: ways of waiting, side by side.

    python -m benchmarks.gpu.waiting [--device auto|cuda|stand-in] [--seconds 108] [--repeats 3] [--json FILE]

Steps of a known length follow each other; for each, a coroutine waits for its end. The ways:

- **thread**: the product's: `CompletionThread`, in a blocking call without the GIL, then `Waker`, an eventfd
- **thread, soon**: the same, but then ``call_soon_threadsafe``
- **reader**: a file descriptor that the step's end makes readable, kept by the loop's selector from step to step. On
  CUDA a host function on the stream does that: libc's ``fflush`` on a stdio stream with one write buffered, whose file
  is an eventfd, so that no thread of the driver ever asks for the GIL
- **relayed**, without CUDA only: the same, where another process sleeps until the step's end, then makes it readable.
  Fairer: what calls a host function is a thread of the driver, which has to wake up, too
- **pipe**: like reader, with a new descriptor a step. On CUDA the host function is ``close`` of a pipe's write end
- **query**: the loop asks again and again, with ``sleep(0)`` between
- **query, thread**: it asks for 0.5 ms, then leaves it to the thread
- **timer**, for comparison: ``sleep`` for the step's length, as if one knew it

Measured: µs from the step's end to the coroutine's next line; CPU time of the loop's thread and of the process, in
percent of a core; how late a 1 ms ticker on the same loop runs. Each on a loop that is *idle* but for that ticker, on a
*busy* one (a task burns 100 µs every ms), and beside a *launching* thread as well (1 ms of pure Python a step).

Without CUDA a timer of the kernel (timerfd) stands in for the step: its end is known exactly, and all that the host
does after it is really measured. The GPU's half, from the event to the first byte on the host, is not.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import os
import platform
import queue
import statistics
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import uvloop

from aioengine.executor.completion_thread import CompletionThread, DeferredResult, Pending, Waker
from benchmarks.gpu import command
from benchmarks.gpu.waiting_steps import CudaSteps, Fd, Steps, TimerSteps

LOOPS: dict[str, Callable[[], asyncio.AbstractEventLoop]] = {
    "asyncio": asyncio.SelectorEventLoop,
    "uvloop": uvloop.new_event_loop,
}
LOADS = ("idle", "busy", "launching")
STEPS_MS = (0.3, 2.0, 10.0)
TICK_S = 0.001
BURN_S = 0.0001
LAUNCH_S = 0.001
QUERY_BOUND_S = 0.0005
MIN_STEPS = 2


# Ways


class Thread:
    """The product's completion thread."""

    fd: Fd = "none"

    def __init__(self, steps: Steps, *, is_soon: bool = False) -> None:
        loop = asyncio.get_running_loop()
        self._waker = Waker(loop)
        wake = loop.call_soon_threadsafe if is_soon else self._waker.call
        self._waiter = CompletionThread(lambda pending: wake(pending.wake))
        self._step = _Step(steps)

    async def wait(self) -> None:
        pending: Pending[None] = Pending(lambda: self._step)
        pending.run()
        self._waiter.add(pending)
        await pending.finish()

    def close(self) -> None:
        assert self._waiter.end(5)
        self._waker.release()


class _Step(DeferredResult[None]):
    def __init__(self, steps: Steps) -> None:
        self._steps = steps

    def wait(self) -> None:
        self._steps.wait()


class Reader:
    """A descriptor that the loop's selector keeps."""

    def __init__(self, steps: Steps, fd: Fd = "kept") -> None:
        self.fd = fd
        self._loop = asyncio.get_running_loop()
        self._fd = steps.fds[fd]
        self._over: asyncio.Future[None] = self._loop.create_future()
        self._loop.add_reader(self._fd, self._on_readable)

    def _on_readable(self) -> None:
        os.read(self._fd, 8)
        self._over.set_result(None)

    async def wait(self) -> None:
        await self._over
        self._over = self._loop.create_future()

    def close(self) -> None:
        self._loop.remove_reader(self._fd)


class Pipe:
    """A descriptor of its own for each step."""

    fd: Fd = "new"

    def __init__(self, steps: Steps) -> None:
        self._loop = asyncio.get_running_loop()
        self._steps = steps

    async def wait(self) -> None:
        fd, over = self._steps.fds["new"], self._loop.create_future()
        self._loop.add_reader(fd, over.set_result, None)
        await over
        self._loop.remove_reader(fd)
        os.close(fd)

    def close(self) -> None:
        pass


class Query:
    """Asking again and again, for so long; then the thread."""

    fd: Fd = "none"

    def __init__(self, steps: Steps, bound_s: float = 1e9) -> None:
        self._steps = steps
        self._bound_s = bound_s
        self._thread = Thread(steps)

    async def wait(self) -> None:
        until = time.perf_counter() + self._bound_s
        while not self._steps.is_over():
            if time.perf_counter() > until:
                return await self._thread.wait()
            await asyncio.sleep(0)
        return None

    def close(self) -> None:
        self._thread.close()


class Timer:
    """A timer of the loop, as if the step's length were known."""

    fd: Fd = "none"

    def __init__(self, steps: Steps) -> None:
        self._steps = steps
        self.step_s = 0.0

    async def wait(self) -> None:
        await asyncio.sleep(self.step_s)
        self._steps.wait()

    def close(self) -> None:
        pass


WAYS: dict[str, Callable[[Steps], Any]] = {
    "thread": Thread,
    "thread, soon": lambda steps: Thread(steps, is_soon=True),
    "reader": Reader,
    "relayed": lambda steps: Reader(steps, "relayed"),
    "pipe": Pipe,
    "query": Query,
    "query, thread": lambda steps: Query(steps, QUERY_BOUND_S),
    "timer": Timer,
}


# What else goes on


async def tick(lags: list[float]) -> None:
    """Sleep 1 ms again and again; note by how much, in seconds, each sleep was longer."""
    while True:
        begin = time.perf_counter()
        await asyncio.sleep(TICK_S)
        lags.append(time.perf_counter() - begin - TICK_S)


def burn(seconds: float) -> None:
    """Pure Python for this much CPU time of the thread."""
    end = time.thread_time() + seconds
    while time.thread_time() < end:
        pass


async def burn_on_the_loop() -> None:
    while True:
        burn(BURN_S)
        await asyncio.sleep(TICK_S)


class Launcher:
    """A thread that does 1 ms of pure Python when a step begins; a step that comes meanwhile is let pass."""

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[bool] = queue.SimpleQueue()
        self._is_idle = True
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def begin(self) -> None:
        if self._is_idle:
            self._is_idle = False
            self._queue.put(True)

    def close(self) -> None:
        self._queue.put(False)
        self._thread.join()

    def _run(self) -> None:
        while self._queue.get():
            burn(LAUNCH_S)
            self._is_idle = True


# Measuring


def percentile(values: list[float], share: float) -> float:
    return math.nan if not values else sorted(values)[min(int(len(values) * share), len(values) - 1)]


async def measure(way_name: str, load: str, step_s: float, seconds: float, steps: Steps) -> dict[str, float]:
    """One cell: steps one after the other for so long."""
    way = WAYS[way_name](steps)
    if isinstance(way, Timer):
        way.step_s = step_s
    launcher = Launcher() if load == "launching" else None
    lags: list[float] = []
    latencies: list[float] = []
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(tick(lags))]
        if load != "idle":
            tasks.append(group.create_task(burn_on_the_loop()))
        await asyncio.sleep(0)
        began, began_loop, began_process = time.perf_counter(), time.thread_time(), time.process_time()
        num_steps = 0
        while num_steps <= MIN_STEPS or time.perf_counter() < began + seconds:
            steps.launch(step_s, way.fd)
            if launcher is not None:
                launcher.begin()
            await way.wait()
            now = time.perf_counter()
            num_steps += 1
            if num_steps > 1 and not math.isnan(steps.ended_at):  # the first one started threads
                latencies.append(now - steps.ended_at)
        wall = time.perf_counter() - began
        loop_share = (time.thread_time() - began_loop) / wall
        process_share = (time.process_time() - began_process) / wall
        for task in tasks:
            task.cancel()
    way.close()
    if launcher is not None:
        launcher.close()
    return {
        "steps": len(latencies),
        "p50_us": percentile(latencies, 0.5) * 1e6,
        "p90_us": percentile(latencies, 0.9) * 1e6,
        "p99_us": percentile(latencies, 0.99) * 1e6,
        "loop_cpu_percent": loop_share * 100,
        "process_cpu_percent": process_share * 100,
        "lag_p50_us": percentile(lags, 0.5) * 1e6,
        "lag_p99_us": percentile(lags, 0.99) * 1e6,
    }


def run(args: argparse.Namespace, steps: Steps) -> list[dict[str, Any]]:
    """All cells, the ways of each next to each other, so often; each figure as a list of its repeats."""
    ways = [way for way in WAYS if way != "relayed" or "relayed" in steps.fds]
    cells = [(loop, load, ms, way) for loop in LOOPS for load in LOADS for ms in STEPS_MS for way in ways]
    rows: dict[tuple[str, str, float, str], dict[str, list[float]]] = {cell: {} for cell in cells}
    for _ in range(args.repeats):
        for cell, row in rows.items():
            loop, load, step_ms, way = cell
            with asyncio.Runner(loop_factory=LOOPS[loop]) as runner:
                figures = runner.run(measure(way, load, step_ms / 1e3, args.seconds / len(cells), steps))
            for name, figure in figures.items():
                row.setdefault(name, []).append(round(figure, 2))
    return [
        {"loop": loop, "load": load, "step_ms": step_ms, "way": way, **row}
        for (loop, load, step_ms, way), row in rows.items()
    ]


# Tables

TABLES: dict[str, tuple[str, ...]] = {
    "µs from the step's end to the coroutine: p50 (range of the repeats) / p90": ("p50_us", "p90_us"),
    "percent of a core: the loop's thread / the process": ("loop_cpu_percent", "process_cpu_percent"),
    "µs by which a 1 ms ticker is late: p50 / p99, both medians of the repeats": ("lag_p50_us", "lag_p99_us"),
}


def print_tables(rows: list[dict[str, Any]]) -> None:
    """As Markdown: medians over the repeats."""
    ways = list(dict.fromkeys(row["way"] for row in rows))
    for title, names in TABLES.items():
        print(f"\n**{title}**\n\n| loop, load, step | {' | '.join(ways)} |\n|{'---|' * (len(ways) + 1)}")
        for start in range(0, len(rows), len(ways)):
            cells = rows[start : start + len(ways)]
            texts = [" / ".join(_text(row, name) for name in names) for row in cells]
            print(f"| {cells[0]['loop']}, {cells[0]['load']}, {cells[0]['step_ms']:g} ms | {' | '.join(texts)} |")


def _text(row: dict[str, Any], name: str) -> str:
    values = row[name]
    spread = f" ({min(values):.0f}–{max(values):.0f})" if name == "p50_us" and len(values) > 1 else ""
    return f"{statistics.median(values):,.0f}{spread}"


def make_steps(device: str) -> Steps:
    """Raises:
    SystemExit: torch finds no GPU, and it must be one.
    """
    if device == "cuda" or (device == "auto" and os.path.exists("/dev/nvidiactl")):
        import torch

        if torch.cuda.is_available():
            return CudaSteps()
    if device == "cuda":
        command.refuse("torch finds no GPU here; without one: --device stand-in")
    return TimerSteps()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=["auto", "cuda", "stand-in"], default="auto")
    parser.add_argument(
        "--seconds", type=command.positive(float), default=108.0, help="of one repeat of all cells together"
    )
    parser.add_argument("--repeats", type=command.positive(int), default=3, help="medians are over these")
    parser.add_argument("--json", type=Path, help="write the figures here too")
    args = parser.parse_args()
    if args.json:
        command.check_file(args.json)
    steps = make_steps(args.device)
    versions = {"python": platform.python_version(), "uvloop": uvloop.__version__, "cores": os.cpu_count()}
    print(f"{steps.device}; {versions}; {args.repeats} × {args.seconds:g} s")
    try:
        rows = run(args, steps)
    finally:
        steps.close()
    print_tables(rows)
    if args.json:
        report = {"device": steps.device, **versions, "seconds": args.seconds, "repeats": args.repeats, "rows": rows}
        args.json.write_text(json.dumps(report, indent=1))
    return 0


if __name__ == "__main__":
    command.run(main)
