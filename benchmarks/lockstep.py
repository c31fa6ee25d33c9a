"""What stepping together costs: a step's part in it, a reduction, and the start of a wave.

    python -m benchmarks.lockstep

- **seam**: CPU time of this thread, in µs a step, of what a core asks and tells its group, the reductions' beginnings
  included; and of asking whether there is one.
- **reduction**: gloo on the loopback between so many processes, in µs: of the loop of one of them (CPU time of its
  thread, begin and result), and from the begin until the result is there, off the loop.
- **wave**: seconds from a request's arrival at engines in processes of their own, which are idle, until its first
  token, over a device whose steps take 2 ms; as replicas that step alone, and in lockstep.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import statistics
import tempfile
import time
import timeit
from typing import Any

from aioengine import Engine, EngineConfig, ProcessOptions
from aioengine.cluster.lockstep_group import GlooReducer, LockstepGroup
from aioengine.config import ReplicaOptions
from aioengine.core.engine_core import EngineCore
from aioengine.core.executor_protocol import LockstepPlace
from aioengine.executor.gloo import Gloo
from aioengine.testing import FakeExecutor

NUM_STEPS = 100_000
NUM_REDUCTIONS = 1_000
NUM_WAVES = 30
REPEATS = 7


def cost_of_seam() -> float:
    """µs a step, as `EngineCore` asks and tells it."""
    core = EngineCore(FakeExecutor(), EngineConfig())
    lockstep = LockstepGroup(LockstepPlace(0, 2, ""), core.break_down)
    # There at once, as a reduction is that others have begun long ago.
    lockstep.begin_reduction = lambda value, wave, step: lockstep.on_result(True)
    core.enter_group(lockstep)

    def step() -> None:
        if lockstep.may_launch:
            lockstep.on_launch(core._has_work)

    return min(timeit.repeat(step, number=NUM_STEPS, repeat=REPEATS, timer=time.thread_time)) / NUM_STEPS * 1e6


def cost_of_no_seam() -> float:
    """µs a step of an engine in no group, which asks whether it is in one."""
    lockstep = None

    def step() -> None:
        if lockstep is not None and not lockstep:
            return
        if lockstep is not None:
            return

    with_it, without = (
        min(timeit.repeat(each, number=NUM_STEPS, repeat=REPEATS, timer=time.thread_time))
        for each in (step, lambda: None)
    )
    return (with_it - without) / NUM_STEPS * 1e6


def reduce_in_process(place: LockstepPlace, results: Any) -> None:
    """One rank's reductions, one after the other."""

    async def reduce() -> tuple[list[float], float]:
        done = asyncio.Event()
        reducer = GlooReducer(Gloo(place), lambda _: done.set())
        took: list[float] = []
        cpu_began = time.thread_time()
        for number in range(NUM_REDUCTIONS):
            began = time.perf_counter()
            done.clear()
            reducer.begin(True, 0, number)
            await done.wait()
            took.append(time.perf_counter() - began)
        return took, time.thread_time() - cpu_began

    took, cpu = asyncio.run(reduce())
    if place.rank == 0:
        median, p99 = statistics.median(took), sorted(took)[len(took) * 99 // 100]
        results.put((cpu / NUM_REDUCTIONS * 1e6, median * 1e6, p99 * 1e6))


def reductions(num_ranks: int) -> tuple[float, float, float]:
    """µs of the loop, median and p99 until the result."""
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    folder = tempfile.mkdtemp()
    places = [LockstepPlace(rank, num_ranks, f"{folder}/store", 120.0) for rank in range(num_ranks)]
    ranks = [context.Process(target=reduce_in_process, args=(place, results)) for place in places]
    for rank in ranks:
        rank.start()
    found: tuple[float, float, float] = results.get(timeout=240)
    for rank in ranks:
        rank.join()
    return found


def make_device(_: EngineConfig, place: LockstepPlace | None = None) -> FakeExecutor:
    return FakeExecutor(step_time_s=0.002, max_in_flight=2)


async def first_tokens(*, is_lockstep: bool) -> list[float]:
    """Seconds from a request to its first token, of engines that are idle."""
    process = ProcessOptions(executor="benchmarks.lockstep:make_device")
    options = ReplicaOptions(replicas=2, lockstep=is_lockstep, balance="round_robin")
    found = []
    async with Engine(replicas=options, process=process, show_progress=False) as engine:
        for _ in range(NUM_WAVES):
            began = time.perf_counter()
            await engine.generate([7, 8, 9], max_tokens=1)
            found.append(time.perf_counter() - began)
            await asyncio.sleep(0.3)  # until the wave has ended
    return found


def main() -> None:
    print(f"seam: {cost_of_seam():.2f} µs a step in a group, {cost_of_no_seam():.3f} µs in none", flush=True)
    for num_ranks in (2, 3):
        cpu, median, p99 = reductions(num_ranks)
        print(
            f"reduction of {num_ranks}: {cpu:.0f} µs of a loop; after {median:.0f} µs, p99 {p99:.0f} µs",
            flush=True,
        )
    for name, is_lockstep in (("alone", False), ("lockstep", True)):
        took = asyncio.run(first_tokens(is_lockstep=is_lockstep))
        print(f"first token, {name:8} median {statistics.median(took) * 1e3:.2f} ms, least {min(took) * 1e3:.2f} ms")


if __name__ == "__main__":
    main()
