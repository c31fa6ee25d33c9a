"""Replicas on Ray against replicas in processes: the start, tokens/s, and what a killed one costs a reader.

    python -m benchmarks.ray_replicas

A Ray cluster of two nodes on this machine, a CPU each, so that one replica is reached by ipc and one by tcp with keys.
The bundled model, a thread a replica, the two launchers by turns.
"""

from __future__ import annotations

import asyncio
import os
import signal
import statistics
import time
from typing import Any

import anyio

from aioengine import Engine
from aioengine.config import ReplicaOptions

NODE: dict[str, Any] = {"num_cpus": 1, "object_store_memory": 80 * 2**20}
REPEATS = 3
NUM_STREAMS, NUM_TOKENS = 32, 200


async def generate(engine: Engine, number: int) -> None:
    await engine.generate(f"Once upon a time {number}", max_tokens=NUM_TOKENS, ignore_eos=True)


async def rate_of(engine: Engine, num_streams: int) -> float:
    """Tokens/s of so many requests at once."""
    began = time.perf_counter()
    async with anyio.create_task_group() as tasks:
        for number in range(num_streams):
            tasks.start_soon(generate, engine, number)
    return num_streams * NUM_TOKENS / (time.perf_counter() - began)


async def pause_of_a_kill(engine: Engine) -> tuple[float, float]:
    """Seconds from a replica's SIGKILL to the next token of its stream, and until it serves again."""
    async with engine.stream("Once upon a time", max_tokens=800, ignore_eos=True) as stream:
        await anext(aiter(stream))
        (replica,) = [each for each in engine.replicas() if each.running] or engine.replicas()[:1]
        began = time.perf_counter()
        os.kill(int(replica.where.split()[1]), signal.SIGKILL)
        pause_s, before = 0.0, began
        async for _ in stream:
            now = time.perf_counter()
            pause_s, before = max(pause_s, now - before), now
    assert engine._runtime is not None
    core = engine._runtime.core
    await core.when(lambda: all(each.state == "serving" for each in engine.replicas()))
    return pause_s, time.perf_counter() - began


async def measure(options: ReplicaOptions) -> dict[str, float]:
    began = time.perf_counter()
    async with Engine(replicas=options) as engine:
        figures = {"start_s": time.perf_counter() - began}
        await rate_of(engine, NUM_STREAMS)
        figures["tokens_per_s"] = max([await rate_of(engine, NUM_STREAMS) for _ in range(3)])
        figures["one_stream"] = max([await rate_of(engine, 1) for _ in range(3)])
        if options.replicas > 1:
            figures["pause_s"], figures["back_s"] = await pause_of_a_kill(engine)
    return figures


async def main(address: str) -> None:
    os.environ["OMP_NUM_THREADS"] = "1"
    ways = {
        (launcher, replicas): ReplicaOptions(replicas=replicas, launcher=launcher, ray_address=address)
        for replicas in (1, 2)
        for launcher in ("process", "ray")
    }
    found: dict[tuple[str, int], list[dict[str, float]]] = {way: [] for way in ways}
    for _ in range(REPEATS):
        for way, options in ways.items():
            found[way].append(await measure(options))
    print("| launcher | replicas | start s | tokens/s, 32 streams | one stream | a kill: pause s | back after s |")
    print("|---|---|---|---|---|---|---|")
    for (launcher, replicas), runs in found.items():
        cells = []
        for name, digits in {"start_s": 1, "tokens_per_s": 0, "one_stream": 0, "pause_s": 2, "back_s": 1}.items():
            values = sorted(run[name] for run in runs if name in run)
            middle = f"{statistics.median(values):,.{digits}f}" if values else ""
            cells.append(f"{middle} ({values[0]:,.{digits}f}–{values[-1]:,.{digits}f})" if values else "")
        print(f"| {launcher} | {replicas} | {' | '.join(cells)} |")


if __name__ == "__main__":
    from ray.cluster_utils import Cluster

    cluster = Cluster(initialize_head=True, head_node_args={**NODE, "include_dashboard": False})
    cluster.add_node(**NODE)
    asyncio.run(main(cluster.address))
    cluster.shutdown()
