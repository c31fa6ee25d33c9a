"""How free is the loop? A 1 ms ticker beside an engine that serves 64 streams while prefills arrive.

    python benchmarks/loop_lag.py [--loop uvloop] [--json FILE]

The bundled model runs in this process. Each stream is read token by token, and one that ends is replaced by another
with a new prompt of 32 to 512 tokens, so that prefills arrive all the time. The ticker asks for 1 ms and measures how
much later than that it runs: what any other coroutine of the program would feel. An idle loop comes first.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import time
from pathlib import Path
from typing import Any

from aioengine import Engine

TICK_S = 0.001


async def tick(lags: list[float], stop: asyncio.Event) -> None:
    """Sleep 1 ms again and again; note by how much, in seconds, each sleep was longer."""
    while not stop.is_set():
        begin = time.perf_counter()
        await asyncio.sleep(TICK_S)
        lags.append(time.perf_counter() - begin - TICK_S)


async def read_streams(engine: Engine, rng: random.Random, until: float, counts: dict[str, int]) -> None:
    """One of the clients: a stream after the other, each with a prompt of its own."""
    while time.perf_counter() < until:
        prompt = [rng.randrange(10, 1000) for _ in range(rng.randint(32, 512))]
        params: dict[str, Any] = {"max_tokens": rng.randint(32, 128), "ignore_eos": True, "seed": rng.randrange(2**31)}
        async with engine.stream(prompt, **params) as stream:
            async for delta in stream:
                counts["tokens"] += len(delta.token_ids)
                counts["deltas"] += 1
        counts["requests"] += 1


def percentiles(lags: list[float]) -> dict[str, float]:
    cuts = statistics.quantiles(lags, n=1000)
    return {
        "p50_ms": cuts[499] * 1e3,
        "p99_ms": cuts[989] * 1e3,
        "p99.9_ms": cuts[998] * 1e3,
        "max_ms": max(lags) * 1e3,
    }


async def idle_lag(seconds: float) -> dict[str, float]:
    lags: list[float] = []
    stop = asyncio.Event()
    async with asyncio.TaskGroup() as group:
        group.create_task(tick(lags, stop))
        await asyncio.sleep(seconds)
        stop.set()
    return percentiles(lags)


async def measure(num_streams: int, seconds: float, seed: int, engine_options: dict[str, Any]) -> dict[str, Any]:
    idle = await idle_lag(min(seconds, 3.0))
    counts = {"tokens": 0, "deltas": 0, "requests": 0}
    lags: list[float] = []
    stop = asyncio.Event()
    async with Engine(**engine_options) as engine:
        await engine.generate("Once upon a time", max_tokens=8)
        until = time.perf_counter() + seconds
        async with asyncio.TaskGroup() as group:
            ticker = group.create_task(tick(lags, stop))
            clients = [
                group.create_task(read_streams(engine, random.Random(f"{seed}-{i}"), until, counts))
                for i in range(num_streams)
            ]
            await asyncio.wait(clients)
            stop.set()
            await ticker
    return {"streams": num_streams, "seconds": seconds, **counts, "idle": idle, "serving": percentiles(lags)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--loop", choices=["asyncio", "uvloop"], default="asyncio")
    parser.add_argument("--num-threads", type=int, help="threads of one torch operation")
    parser.add_argument("--max-in-flight", type=int, help="depth; the executor's own by default")
    parser.add_argument("--json", type=Path, help="write the figures here too")
    args = parser.parse_args()
    options = {"num_threads": args.num_threads, "max_in_flight": args.max_in_flight}
    main_coroutine = measure(args.streams, args.seconds, args.seed, options)
    if args.loop == "uvloop":
        import uvloop

        figures = uvloop.run(main_coroutine)
    else:
        figures = asyncio.run(main_coroutine)
    rate = figures["tokens"] / args.seconds
    print(f"{args.loop}, {args.streams} streams for {args.seconds:.0f} s, seed {args.seed}")
    print(f"{figures['requests']} requests, {figures['tokens']} tokens, {rate:.0f} tokens/s")
    print(f"{'lag, ms':10s}{'p50':>8s}{'p99':>8s}{'p99.9':>8s}{'max':>8s}")
    for name in ("idle", "serving"):
        print(
            f"{name:10s}" + "".join(f"{figures[name][key]:8.2f}" for key in ("p50_ms", "p99_ms", "p99.9_ms", "max_ms"))
        )
    if args.json:
        args.json.write_text(json.dumps({"loop": args.loop, **figures}, indent=2))


if __name__ == "__main__":
    main()
