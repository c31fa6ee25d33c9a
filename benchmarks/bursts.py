"""How long do many requests at once hold the loop? The longest turn of the loop, by what they ask for.

    python benchmarks/bursts.py [--only NAME ...] [--way in_process process] [--repeats 3]

A turn is what a loop runs between two looks at its selector; no other coroutine runs before its end. Each is measured
by the wall's clock and by the CPU time of the loop's thread, which does not count what other processes of a busy
machine take, nor waits for the GIL. The device is a stand-in (`stand_in.py`) whose steps take 2 ms and cost nothing, so
that what is measured is the host's side. The collector is switched off: a full collection takes longer than any of this
(see `loop_lag.py`).

Over a process the turns are those of the caller's loop.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from pathlib import Path
from typing import Any, NamedTuple

from stand_in import BOARD, Board, StandIn

from aioengine import AioEngineError, Engine, ProcessOptions

sys.path.append(str(Path(__file__).parents[1] / "tests"))

from turn_probe import TurnProbe

JAPANESE = "昔々あるところに小さな狐と賢い兎が住んでいて毎朝川のほとりで話をしました。"
ENGLISH = "Once upon a time there was a little fox and a clever hare who met at the river. "
NUM_CHARS = 1000
LIMITS: dict[str, Any] = {
    "max_num_seqs": 1024,
    "max_num_batched_tokens": 32_768,
    "max_waiting": 4096,
    "log_stats_interval_s": 0.0,
    "show_progress": False,
    "enable_prefix_caching": True,
}


class Burst(NamedTuple):
    """Many requests, all alike.

    Attributes:
        arguments: of `Engine.generate`, for request number i.
    """

    count: int
    arguments: Callable[[int], tuple[Any, dict[str, Any]]]


def text_of(piece: str, number: int, num_chars: int = NUM_CHARS) -> str:
    """So many characters that no other number's begin with."""
    return (f"{number} " + piece * (num_chars // len(piece) + 1))[:num_chars]


def completion(count: int, prompt: Callable[[int], Any], **params: Any) -> Burst:
    return Burst(count, lambda i: (prompt(i), {"max_tokens": 2, "ignore_eos": True, **params}))


NESTED = [[[["a"] * 4] * 4] * 16] * 16
"""Template arguments of as many values as fit 64 KB."""
ONE_WORD = [{"role": "user", "content": "Hi"}]
MANY_IDS = list(range(2048)) * 512
WORDS = [f"{i:03d} " + ENGLISH[:20] for i in range(256)]

BURSTS: dict[str, Burst] = {
    "short": completion(1000, lambda i: f"Once upon a time {i}"),
    "English": completion(1000, lambda i: text_of(ENGLISH, i)),
    "Japanese": completion(1000, lambda i: text_of(JAPANESE, i)),
    "stop strings": completion(1000, lambda i: f"Once {i}", stop=WORDS[:200]),
    "bad words": completion(1000, lambda i: f"Once {i}", bad_words=[w + ENGLISH[20:60] for w in WORDS[:8]]),
    "allowed ids": completion(64, lambda i: f"Once {i}", allowed_token_ids=MANY_IDS),
    "token ids": completion(1000, lambda i: [5 + i % 1000] + [7] * 4000),
    "chats": completion(1000, lambda i: [{"role": "user", "content": text_of(ENGLISH, i)}]),
    "template arguments": completion(100, lambda i: ONE_WORD, chat_template_kwargs={"a": NESTED}),
    "bad values": Burst(1000, lambda i: ("Once", {"top_p": 7.0})),
}


STREAMED = [f"{name}, streamed" for name in ("short", "Japanese", "stop strings", "token ids")]
"""The same by `Engine.stream`, which checks at the call."""


class Measured(NamedTuple):
    """The longest turn, in ms by each clock, and how long all of it took, in seconds."""

    wall_ms: float
    cpu_ms: float
    took_s: float
    outcomes: dict[str, int]


async def generate_all(engine: Engine, burst: Burst, *, is_streamed: bool = False) -> Measured:
    async def generate(prompt: Any, params: dict[str, Any]) -> str:
        try:
            if is_streamed:
                async with engine.stream(prompt, **params) as stream:
                    output = await stream.finish()
            else:
                output = await engine.generate(prompt, **params)
        except AioEngineError as error:
            return type(error).__name__
        return str(output.outputs[0].finish_reason)

    calls = [burst.arguments(number) for number in range(burst.count)]

    async def work() -> dict[str, int]:
        return counted(await asyncio.gather(*[generate(*call) for call in calls]))

    return await measured(work)


def counted(outcomes: list[str]) -> dict[str, int]:
    return {outcome: outcomes.count(outcome) for outcome in sorted(set(outcomes))}


async def measured(work: Callable[[], Coroutine[Any, Any, dict[str, int]]]) -> Measured:
    with TurnProbe() as probe:
        began = time.perf_counter()
        outcomes = await work()
        await asyncio.sleep(0)
        took_s = time.perf_counter() - began
    return Measured(max(probe.wall_s) * 1e3, max(probe.cpu_s) * 1e3, took_s, outcomes)


# Ends


async def begin_streams(engine: Engine, count: int) -> list[asyncio.Task[str]]:
    """So many streams that are being read, each some tokens on its way."""

    async def read(number: int, begun: Callable[[], None]) -> str:
        try:
            async with engine.stream(f"Once {number}", max_tokens=8000, ignore_eos=True) as stream:
                async for delta in stream:
                    begun()
                    begun = lambda: None  # noqa: E731
                    if delta.finish_reason is not None:
                        return delta.finish_reason
        except AioEngineError as error:
            return type(error).__name__
        return "none"

    num_begun = 0

    def note() -> None:
        nonlocal num_begun
        num_begun += 1

    tasks = [asyncio.get_running_loop().create_task(read(i, note)) for i in range(count)]
    while num_begun < min(count, 1024):  # noqa: ASYNC110 - readers count, and set no event
        await asyncio.sleep(0.001)
    return tasks


async def end_all(engine: Engine, end: Callable[[], Awaitable[None] | None]) -> Measured:
    tasks = await begin_streams(engine, 1200)

    async def work() -> dict[str, int]:
        ended = end()
        if ended is not None:
            await ended
        return counted(list(await asyncio.gather(*tasks)))

    return await measured(work)


# Engines


@contextlib.asynccontextmanager
async def opened(way: str, folder: Path) -> AsyncIterator[Engine]:
    board = Board(folder / f"{random.getrandbits(64):x}.board")
    board.step_time_s = 0.002
    os.environ[BOARD] = str(board.path)
    where: dict[str, Any] = {"process": ProcessOptions(executor="stand_in:make")}
    if way != "process":
        where = {"executor": StandIn(board)}
    async with Engine(**where, **LIMITS) as engine:
        await engine.generate("Once upon a time", max_tokens=2, stop=["xyz"])
        await engine.generate(ONE_WORD, max_tokens=2)
        yield engine


async def in_engine(way: str, names: list[str], repeats: int, folder: Path) -> dict[str, list[Measured]]:
    figures: dict[str, list[Measured]] = {}
    for name in names:
        for _ in range(repeats):
            async with opened(way, folder) as engine:
                burst, _, streamed = name.partition(", ")
                if burst in BURSTS:
                    run = await generate_all(engine, BURSTS[burst], is_streamed=bool(streamed))
                elif name == "abort_all":
                    run = await end_all(engine, engine.abort_all)
                elif name == "aclose":
                    run = await end_all(engine, engine.aclose)
                else:
                    continue
            figures.setdefault(name, []).append(run)
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", default=[*BURSTS, *STREAMED, "abort_all", "aclose"])
    parser.add_argument("--way", nargs="+", default=["in_process", "process"])
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args()
    print(f"longest turn, ms (median of {args.repeats}){'wall':>10s}{'CPU':>8s}{'all, s':>8s}")
    with tempfile.TemporaryDirectory() as folder:
        for way in args.way:
            figures = asyncio.run(in_engine(way, args.only, args.repeats, Path(folder)))
            for name, runs in figures.items():
                wall, cpu, took = (statistics.median(run[k] for run in runs) for k in range(3))
                print(f"{way:12s}{name:20s}{wall:13.1f}{cpu:8.1f}{took:8.2f}  {runs[-1].outcomes}", flush=True)


if __name__ == "__main__":
    main()
