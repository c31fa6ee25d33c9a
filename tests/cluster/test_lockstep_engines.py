"""Engines in lockstep, in processes of their own, whose every step is a collective operation that none runs alone."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import anyio
import pytest
from cluster.collective import EXECUTOR
from cluster.harness import (
    DEADLINE_S,
    Cluster,
    Reader,
    cluster,
    outputs_of,
    reading,
    unaffected,
    undisturbed,
    until_read,
)
from cluster.mortal import Poison
from nightly import nightly

from aioengine import ConfigError, Engine, InvalidRequest, StepFailed
from aioengine.cluster.lockstep import REDUCE_EVERY
from aioengine.config import ReplicaOptions

LOCKSTEP = {"executor": EXECUTOR, "lockstep": True, "plugins": ("cluster.collective",)}


async def check_all_stepped_together(group: Cluster) -> list[Any]:
    """At the end of the wave; returns by rank: steps, dummies, collectives."""
    with anyio.fail_after(DEADLINE_S):
        await group.engine.pause()
        found = await group.engine.collective_rpc("lockstep.counts")
        await group.engine.resume()
    num_collectives = {num_steps + num_dummies for num_steps, num_dummies, _ in found}
    assert num_collectives == {collectives for _, _, collectives in found}
    assert len(num_collectives) == 1
    assert num_collectives.pop() % REDUCE_EVERY == 0
    return found


@pytest.mark.parametrize("num_ranks", [2, *nightly(3)])
async def test_waves_of_unequal_loads_and_late_requests(num_ranks: int) -> None:
    async with cluster(num_ranks, balance="round_robin", **LOCKSTEP) as group:
        long, short = Reader([11, 12], max_tokens=300), Reader([13], max_tokens=20)
        readers = [long, short]
        async with reading(group.engine, [long]):
            await until_read([long], 5)
            async with reading(group.engine, [short]):  # while the other one runs, at another rank
                pass
        assert all(num_dummies for _, num_dummies, _ in await check_all_stepped_together(group))

        later = Reader([14, 15], max_tokens=40)
        async with reading(group.engine, [later]):
            pass
        await check_all_stepped_together(group)  # woken by the first request, and paused again
        readers += [later]
    assert outputs_of(readers) == await undisturbed(readers)


@pytest.mark.nightly
@pytest.mark.parametrize("num_ranks", [2, 3])
async def test_a_killed_rank_ends_its_group_which_is_started_anew_and_goes_on(num_ranks: int) -> None:
    async with cluster(num_ranks, balance="round_robin", **LOCKSTEP) as group:
        readers = unaffected(random.Random(7), 3 * num_ranks, max_tokens=400)
        async with reading(group.engine, readers):
            for num_deaths in (1, 2):
                await until_read(readers, 30 * num_deaths)
                group.kill(1 % num_deaths)
                await group.until_restarted(num_ranks * num_deaths, num_ranks)
        await check_all_stepped_together(group)
        assert [status.num_restarts for status in group.engine.replicas()] == [2] * num_ranks
    assert outputs_of(readers) == await undisturbed(readers)


@pytest.mark.nightly
async def test_a_group_is_restarted_as_one_and_stays_as_large_as_it_is() -> None:
    async with cluster(2, drain_timeout_s=0.1, **LOCKSTEP) as group:
        readers = unaffected(random.Random(8), 6, max_tokens=300)
        async with reading(group.engine, readers):
            await until_read(readers, 10)
            with pytest.raises(InvalidRequest, match="lockstep"):
                await group.engine.scale(3)
            await group.engine.restart_replicas()
        assert [status.num_restarts for status in group.engine.replicas()] == [1, 1]
        await check_all_stepped_together(group)
    assert outputs_of(readers) == await undisturbed(readers)


@pytest.mark.nightly
async def test_a_group_falls_asleep_as_one_whatever_its_ranks_are_about_to_compute() -> None:
    async with cluster(2, balance="round_robin", **LOCKSTEP) as group:
        for number in range(10):
            aborted, waiting = Reader([11, 12], max_tokens=200), Reader([13, number], max_tokens=20)
            async with reading(group.engine, [aborted]):
                if number % 2:
                    await until_read([aborted], 1)
                with anyio.fail_after(DEADLINE_S):
                    await group.engine.sleep(1)
                async with reading(group.engine, [waiting]):
                    await group.engine.wake_up()
            assert outputs_of([waiting]) == await undisturbed([waiting])
        await check_all_stepped_together(group)


@pytest.mark.nightly
async def test_what_kills_its_rank_fails_and_what_ran_beside_it_or_at_other_ranks_does_not() -> None:
    async with cluster(2, balance="round_robin", **LOCKSTEP) as group:
        poison = Reader([Poison.EXIT, 12], max_tokens=20)
        readers = unaffected(random.Random(9), 4, max_tokens=200)
        async with reading(group.engine, readers):
            await until_read(readers, 5)
            async with reading(group.engine, [poison]):
                pass
        assert isinstance(poison.error, StepFailed)
    assert outputs_of(readers) == await undisturbed(readers)


@pytest.mark.nightly
async def test_a_request_of_a_further_front_end_wakes_the_group(runtime: Path) -> None:
    address = f"ipc://{runtime}/cluster"
    async with cluster(2, balance="round_robin", cluster_address=address, **LOCKSTEP) as group:
        readers = [Reader([11, 12], max_tokens=40), Reader([13], max_tokens=90)]
        with anyio.fail_after(DEADLINE_S):
            other = await Engine.connect(f"cluster+{address}")
        async with other, reading(other, readers):
            pass
        await check_all_stepped_together(group)
    assert outputs_of(readers) == await undisturbed(readers)


def test_lockstep_is_for_children() -> None:
    with pytest.raises(ConfigError, match="lockstep"):
        Engine(replicas=ReplicaOptions(replicas=2, lockstep=True, launcher="ray"))
