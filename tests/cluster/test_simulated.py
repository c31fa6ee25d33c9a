"""Clusters on a virtual clock, with deaths by the hundred: every request ends once, with the right tokens."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator
from typing import Any, cast

import anyio
import pytest
from cluster.simulated import CONFIG, Heard, SimulatedLauncher, make_request
from nightly import seeds

from aioengine.cluster.backend import Replicated
from aioengine.config import ReplicaOptions
from aioengine.core.protocol import CoreHooks
from aioengine.errors import EngineDead, ModelLoadError, StepFailed
from aioengine.processes.worker_threads import TextWorker

MAX_BLAMED = 6
"""Of about 900 requests, at a hundred kills, two a second; one in 4,000 on average."""

pytestmark = pytest.mark.usefixtures("quiet_log")


class Simulation:
    """A cluster that serves, and what its requests have heard."""

    def __init__(self, backend: Replicated, launcher: SimulatedLauncher, rng: random.Random) -> None:
        self.backend = backend
        self.core = backend.core
        self.launcher = launcher
        self.rng = rng
        self.heard: list[Heard] = []

    def ask(self, kills_at: int | None = None) -> None:
        request = make_request(self.rng, len(self.heard), kills_at)
        sequence = self.core.make_sequence(request)
        listeners = [Heard(request, choice) for choice in range(1 + len(sequence.children))]
        self.heard += listeners
        self.core.add(sequence, cast(Any, listeners))

    def kill_one(self) -> None:
        """It ends, or stops."""
        serving = [rank for rank, replica in self.core.replicas.items() if replica.is_serving]
        if serving:
            core = self.launcher.cores[self.rng.choice(serving)]
            if self.rng.random() < 0.3:
                core.is_silent = True
            else:
                core.die(EngineDead("killed"))

    async def end(self) -> None:
        """Wait until all have ended; they have, once each, and none has heard a wrong token."""
        with anyio.fail_after(3600.0):
            await self.core.when(lambda: self.core.is_drained)
        assert [len(each.ends) for each in self.heard] == [1] * len(self.heard)
        assert all(each.is_right_so_far for each in self.heard)


@contextlib.asynccontextmanager
async def simulated(
    seed: int, num_replicas: int, share_failing: float = 0.0, **given: Any
) -> AsyncIterator[Simulation]:
    rng, clock = random.Random(seed), asyncio.get_running_loop().time
    worker = TextWorker()
    launcher = SimulatedLauncher(rng, clock)
    options = ReplicaOptions(replicas=num_replicas, **{"stall_timeout_s": 1.0, "restart_backoff_s": 0.05, **given})
    backend = Replicated(CONFIG, options, launcher, CoreHooks(worker, worker, lambda: None))
    await backend.find_model()
    await backend.open()
    launcher.share_failing = share_failing
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(backend.core.run)
        yield Simulation(backend, launcher, rng)
        tasks.cancel_scope.cancel()
    await backend.aclose()
    await worker.aclose()


@pytest.mark.virtual_clock(seeds=1)
@pytest.mark.parametrize("seed", seeds(200))
async def test_poisons_fail_and_all_others_end_well(seed: int) -> None:
    async with simulated(seed, num_replicas=4, max_attempts=1000) as simulation:
        rng = simulation.rng
        poisons = []
        for _ in range(60):
            simulation.ask()
            if rng.random() < 0.08:
                poisons.append(len(simulation.heard))
                simulation.ask(kills_at=rng.choice([0, 0, 1, 7]))
            await anyio.sleep(rng.uniform(0.0, 0.03))
        await simulation.end()
        for number, heard in enumerate(simulation.heard):
            if number in poisons:
                assert isinstance(heard.ends[0], StepFailed)
            else:
                assert heard.has_ended_well, heard.ends


@pytest.mark.virtual_clock(seeds=1)
@pytest.mark.parametrize("seed", seeds(200))
async def test_a_hundred_kills_lose_none_that_did_not_run_at_three_in_a_row(seed: int) -> None:
    """While replicas are scaled and restarted, and some cannot start."""
    async with simulated(seed, num_replicas=4, share_failing=0.1, max_restarts=100, drain_timeout_s=0.1) as simulation:
        rng = simulation.rng

        async def ask() -> None:
            while True:
                simulation.ask()
                await anyio.sleep(rng.uniform(0.0, 0.2))

        async def scale() -> None:
            while True:
                await anyio.sleep(rng.uniform(0.0, 5.0))
                with contextlib.suppress(EngineDead, ModelLoadError):  # one that was killed, or has not started
                    await (
                        simulation.backend.scale(rng.randint(3, 5))
                        if rng.random() < 0.7
                        else simulation.backend.restart()
                    )

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(ask)
            tasks.start_soon(scale)
            for _ in range(100):
                await anyio.sleep(rng.uniform(0.1, 1.0))
                simulation.kill_one()
            tasks.cancel_scope.cancel()
        await simulation.end()
        failed = [heard for heard in simulation.heard if not heard.has_ended_well]
        # A sequence that is isolated where a third replica is killed cannot be told from what kills it.
        assert all("brings down what computes it" in str(heard.ends[0]) for heard in failed), [
            heard.ends for heard in failed
        ]
        assert len({heard.request.request_id for heard in failed}) <= MAX_BLAMED
