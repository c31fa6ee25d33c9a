"""What stepping together costs: a step's part in it, a reduction, and the start of a wave.

    python -m benchmarks.lockstep

- **seam**: CPU time of this thread, in µs a step, of a core with one sequence over a device that takes no time: alone,
  in a group, and of a dummy step in a group.
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
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import numpy as np

from aioengine import Engine, EngineConfig, ProcessOptions, ReplicaOptions, SamplingParams
from aioengine.cluster.lockstep_group import GlooReducer, LockstepGroup
from aioengine.core.control import StartWave
from aioengine.core.engine_core import EngineCore
from aioengine.core.lockstep_protocol import LockstepPlace
from aioengine.executor.gloo import Gloo
from aioengine.scheduler.sequence import Request
from aioengine.testing import FakeExecutor

NUM_STEPS = 6_400
NUM_REDUCTIONS = 1_000
NUM_WAVES = 30
REPEATS = 7
PLACE = LockstepPlace(0, 1, "")


class Alone:
    """A reduction of one rank: there at once, as one is that others have begun long ago."""

    def __init__(self, on_result: Callable[[bool], None]) -> None:
        self._on_result = on_result

    def begin(self, value: bool, wave: int, step: int) -> None:
        asyncio.get_running_loop().call_soon(self._on_result, True)

    def close(self) -> None: ...


class Listener:
    """Ends nothing before `NUM_STEPS` tokens."""

    num_allowed = 2**31

    def __init__(self) -> None:
        self.ended = asyncio.Event()

    def on_started(self) -> None: ...

    def on_token(self, token_id: int, logprobs: Any) -> None: ...

    def on_end(self) -> None:
        self.ended.set()

    def on_error(self, error: Exception) -> None:
        raise error


async def cpu_of_steps(is_grouped: bool, has_work: bool) -> float:
    """µs a step."""
    executor = FakeExecutor(num_blocks=1000, max_model_len=NUM_STEPS + 100, max_in_flight=2, sampler=lambda *_: 5)
    core = EngineCore(executor, EngineConfig(log_stats_interval_s=0.0))
    if is_grouped:
        lockstep = LockstepGroup(PLACE, core.break_down)
        lockstep.open(Alone(lockstep.on_result))
        core.join(lockstep)
    running = asyncio.ensure_future(core.run())  # noqa: TID251 - of a benchmark
    await asyncio.sleep(0)
    began = time.thread_time()
    if has_work:
        listener = Listener()
        request = Request(
            request_id="it",
            prompt_token_ids=np.arange(5, dtype=np.int32),
            params=SamplingParams(max_tokens=NUM_STEPS, ignore_eos=True),
            seed=1,
            max_total_tokens=NUM_STEPS + 5,
        )
        core.add(core.make_sequence(request), [listener])
        await listener.ended.wait()
    else:
        await core.call(StartWave(0))
        while core.lockstep is not None and core.lockstep._waves.step < NUM_STEPS:  # type: ignore[attr-defined]  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    spent = time.thread_time() - began
    running.cancel()
    with suppress(asyncio.CancelledError):
        await running
    return spent / NUM_STEPS * 1e6


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
    places = [LockstepPlace(rank, num_ranks, f"file://{folder}/store", 120.0) for rank in range(num_ranks)]
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
    for name, is_grouped, has_work in (("alone", False, True), ("group", True, True), ("dummies", True, False)):
        each = [asyncio.run(cpu_of_steps(is_grouped, has_work)) for _ in range(REPEATS)]
        print(f"seam, {name:8} {min(each):7.2f} µs a step (the least of {REPEATS})", flush=True)
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
