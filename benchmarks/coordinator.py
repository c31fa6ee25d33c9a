"""What telling front ends the counts costs a coordinator and each of them, by the number of replicas.

    python -m benchmarks.coordinator

A coordinator and front ends on one loop, with real sockets. Counts change all the time, as under load, and are told as
often as they may be (every 100 ms). CPU time, this thread's, in µs a publication:

- **look**: the counts of all replicas gathered and compared;
- **send**: encoded and handed to the socket, for one front end;
- **read**: received and decoded, by one front end.
"""

from __future__ import annotations

import asyncio
import statistics
import tempfile
import time
from typing import Any

import msgspec

from aioengine.cluster import coordinator_messages as m
from aioengine.cluster.coordinator import PUBLISH_INTERVAL_S, Coordinator
from aioengine.config import EngineConfig, ReplicaOptions
from aioengine.errors import AioEngineError, EngineClosed
from aioengine.processes.worker_threads import TextWorker
from aioengine.scheduler.scheduler import SchedulerStats
from aioengine.transport import wire
from aioengine.transport.link import Link

NUM_REPLICAS = (2, 8, 64, 512)
NUM_FRONT_ENDS = 4
REPEATS = 300


class Loaded:
    """A cluster whose load is another one at each look."""

    config = EngineConfig()
    options = ReplicaOptions()
    pair_path = ""

    def __init__(self, num_replicas: int) -> None:
        stats = SchedulerStats(
            running=100, waiting=20, blocked=3, free_blocks=9_000, num_blocks=10_000, preemptions=0,
            prefix_cache_queries=0, prefix_cache_hits=0, steps=1,
        )  # fmt: skip
        self._stats = [stats] * num_replicas
        self._looks = 0

    def members(self) -> list[m.Member]:
        return [m.Member(rank, "serving", 0, f"ipc:///run/aioengine/{rank}") for rank in range(len(self._stats))]

    def counts(self) -> m.Counts:
        self._looks += 1
        every = self._stats
        return m.Counts(
            ranks=list(range(len(every))),
            running=[stats.running + self._looks % 50 for stats in every],
            waiting=[stats.waiting for stats in every],
            blocked=[stats.blocked for stats in every],
            free_blocks=[stats.free_blocks for stats in every],
        )

    async def scale(self, replicas: int) -> None: ...

    async def restart(self) -> None: ...

    def lend(self, rank: int, is_lent: bool) -> None: ...

    def final_error(self) -> AioEngineError:
        return EngineClosed("the benchmark is over")


async def measure(num_replicas: int, address: str) -> dict[str, Any]:
    worker = TextWorker()
    coordinator = Coordinator(Loaded(num_replicas), address, worker=worker)
    await coordinator.open()
    receiving = asyncio.ensure_future(coordinator.receive())  # noqa: TID251 - of a benchmark
    links = [Link(worker, m.FromCoordinator) for _ in range(NUM_FRONT_ENDS)]
    for link in links:
        await link.attach(coordinator.address, None, m.AttachedToCluster, name="benchmark", timeout_s=10.0)
    looks, sends, reads = [], [], []
    num_bytes = 0
    for _ in range(REPEATS):
        began = time.thread_time()
        coordinator._look()
        looks.append(time.thread_time() - began)
        began = time.thread_time()
        for session in coordinator.attached:
            session.send(coordinator._counts)
        sends.append((time.thread_time() - began) / NUM_FRONT_ENDS)
        for link in links:
            (frames,) = await link.channel.receive()
            began = time.thread_time()
            body = link.reader.read(frames)
            reads.append(time.thread_time() - began)
            assert body == coordinator._counts
            num_bytes = sum(map(len, frames))
            link.send(wire.Acknowledge(link.reader.due - 1))
    for link in links:
        await link.aclose()
    receiving.cancel()
    await asyncio.wait({receiving})
    await coordinator.aclose()
    await worker.aclose()
    members = len(msgspec.msgpack.encode(m.Membership(Loaded(num_replicas).members())))
    return {
        "bytes": num_bytes,
        "members_bytes": members,
        **{
            name: 1e6 * statistics.median(values)
            for name, values in (("look", looks), ("send", sends), ("read", reads))
        },
    }


async def main() -> None:
    print("| replicas | a message | a front end's share, at most | look | send | read | members' message |")
    print("|---|---|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as folder:
        for number in NUM_REPLICAS:
            each = await measure(number, f"ipc://{folder}/{number}")
            print(
                f"| {number} | {each['bytes']:,} B | {each['bytes'] / PUBLISH_INTERVAL_S / 1000:,.1f} kB/s "
                f"| {each['look']:.0f} | {each['send']:.0f} | {each['read']:.0f} | {each['members_bytes']:,} B |"
            )


if __name__ == "__main__":
    asyncio.run(main())
