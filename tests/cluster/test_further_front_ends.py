"""Further front ends of a cluster whose replicas are real processes: what they see, do, and go on with."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterable
from pathlib import Path
from typing import Any, cast

import anyio
import psutil
import pytest
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
from transport.life_scripts.serving import served

from aioengine import ConfigError, Engine, EngineClosed, EngineDead, InvalidRequest, StepFailed
from aioengine.cluster.cluster_core import ClusterCore
from aioengine.cluster.further_front_end import ConnectedCluster
from aioengine.testing import FakeExecutor
from aioengine.transport.addresses import PrivateFolder, remove_stale

pytestmark = pytest.mark.usefixtures("quiet_log", "faults")


OWNER = Path(__file__).with_name("owner.py")


def start_owner(address: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, OWNER, address], stdout=subprocess.PIPE)


class Further(Cluster):
    """A further front end."""

    @property
    def backend(self) -> ConnectedCluster:
        assert self.engine._runtime is not None
        assert isinstance(self.engine._runtime.backend, ConnectedCluster)
        return self.engine._runtime.backend

    @property
    def core(self) -> ClusterCore:
        return self.backend.core


def loads_of(engine: Engine) -> list[tuple[int, int]]:
    """Of each replica, how many run and wait there, for all front ends."""
    return [(status.running, status.waiting) for status in engine.replicas()]


@contextlib.asynccontextmanager
async def connected(folder: Path, count: int, num_replicas: int = 2, **given: Any) -> AsyncIterator[list[Any]]:
    """A cluster, and so many front ends beside the one of its owner: [the owner's, further ones...]."""
    address = f"ipc://{folder}/cluster"
    async with cluster(num_replicas, cluster_address=address, **given) as owner, contextlib.AsyncExitStack() as stack:
        front_ends: list[Cluster] = [owner]
        for _ in range(count):
            engine = await stack.enter_async_context(await Engine.connect(f"cluster+{address}"))
            front_ends.append(Further(engine))
        yield front_ends


async def agree(front_ends: Iterable[Cluster], is_so: Callable[[Any], bool]) -> None:
    """Wait until it is so for each of them."""
    for front_end in front_ends:
        await front_end.until(lambda front_end=front_end: is_so(front_end))  # type: ignore[misc]


class TestCounts:
    async def test_are_those_of_all_front_ends_and_the_same_for_all(self, runtime: Path) -> None:
        async with connected(runtime, 2) as front_ends:
            counts = {front_end: 1 + place for place, front_end in enumerate(front_ends)}
            readers = {each: [Reader([20 + place], max_tokens=900) for place in range(n)] for each, n in counts.items()}
            async with contextlib.AsyncExitStack() as stack:
                for front_end in front_ends:
                    await stack.enter_async_context(reading(front_end.engine, readers[front_end]))
                await agree(front_ends, lambda each: sum(map(sum, loads_of(each.engine))) == 6)
                with pytest.raises(InvalidRequest, match="by the program that owns the replicas"):
                    await front_ends[1].engine.update_weights(runtime)
                for front_end in front_ends:
                    front_end.engine.abort_all()
            await agree(front_ends, lambda each: loads_of(each.engine) == [(0, 0)] * 2)

    @pytest.mark.nightly
    async def test_of_another_front_end_keep_requests_away(self, runtime: Path) -> None:
        async with connected(runtime, 2, balance="load") as (owner, one, other):
            at_one = [Reader([10 + place], max_tokens=900, session="the same") for place in range(4)]
            async with reading(one.engine, at_one):
                await until_read(at_one, 1)
                await agree([owner, other], lambda each: (4, 0) in loads_of(each.engine))
                free = loads_of(other.engine).index((0, 0))
                at_other = [Reader([20 + place], max_tokens=900) for place in range(3)]
                async with reading(other.engine, at_other):
                    await agree([owner, one], lambda each: loads_of(each.engine)[free] == (3, 0))
                    for front_end in (one, other):
                        front_end.engine.abort_all()


class TestMembers:
    async def test_one_that_is_killed_loses_no_front_end_s_request(self, runtime: Path) -> None:
        rng = random.Random(1)
        at_one, at_other = unaffected(rng, 6, max_tokens=200), unaffected(rng, 6, max_tokens=200)
        async with connected(runtime, 2) as (owner, one, other):
            async with reading(one.engine, at_one), reading(other.engine, at_other):
                await until_read([*at_one, *at_other], 5)
                await owner.kill_and_wait(1)
                await agree([one, other], lambda each: 1 not in each.ranks())
                await agree([owner, one, other], lambda each: each.num_restarts() == 1 and len(each.ranks()) == 2)
            await agree([one, other], lambda each: each.core.replicas[1].is_serving)
            moved = [[status.num_moved for status in each.engine.replicas()] for each in (owner, one, other)]
            assert moved[0] == [0, 0]  # each counts its own
            assert sum(map(sum, moved)) > 0
            more = [Reader([10 + place], max_tokens=20) for place in range(4)]
            async with reading(one.engine, more):  # and it is used again
                await until_read(more, 1)
                assert sorted(each.num_sent for each in one.core.replicas.values()) != [0, 4]
                await other.engine.scale(1)  # which all see, and whose requests end first
                await agree([owner, one, other], lambda each: each.ranks() == [0])
                await agree([one, other], lambda each: list(each.core.replicas) == [0])
        assert outputs_of([*at_one, *at_other]) == await undisturbed([*at_one, *at_other])

    @pytest.mark.nightly
    async def test_are_scaled_and_restarted_by_any_front_end_and_no_request_is_lost(self, runtime: Path) -> None:
        rng = random.Random(2)
        async with connected(runtime, 2, drain_timeout_s=0.2) as front_ends:
            _, one, other = front_ends
            readers = unaffected(rng, 8, max_tokens=900)
            async with reading(one.engine, readers[:4]), reading(other.engine, readers[4:]):
                await until_read(readers, 1)
                await one.engine.scale(3)
                await agree(front_ends, lambda each: each.ranks() == [0, 1, 2])
                await agree([one, other], lambda each: each.core.replicas[2].is_serving)
                await other.engine.scale(1)
                await agree(front_ends, lambda each: each.ranks() == [0])
                await agree([one, other], lambda each: list(each.core.replicas) == [0])
                await one.engine.scale(2)
                await other.engine.restart_replicas()
                await agree(front_ends, lambda each: each.ranks() == [0, 1] and each.num_restarts() == 2)
            for bad in (0, "x", 1.5):
                with pytest.raises(InvalidRequest, match="an int from 1 to 1024 is needed"):
                    await one.engine.scale(cast(int, bad))
        assert outputs_of(readers) == await undisturbed(readers)

    @pytest.mark.nightly
    async def test_one_that_drains_ends_when_no_front_end_has_a_request_there(self, runtime: Path) -> None:
        """None is moved, though the owner itself has none, and would end it at once."""
        async with connected(runtime, 1, drain_timeout_s=60.0) as (owner, one):
            readers = [Reader([10 + place], max_tokens=300) for place in range(4)]
            async with reading(one.engine, readers):
                await until_read(readers, 1)
                leaving = one.core.replicas[1]
                await owner.engine.scale(1)
                assert leaving.num_moved == 0
            await agree([one], lambda each: list(each.core.replicas) == [0])
        assert outputs_of(readers) == await undisturbed(readers)


class TestPoisons:
    """Each front end knows its own requests alone; a poison of another one does not fail them."""

    @pytest.mark.nightly
    @pytest.mark.parametrize("num_replicas", [2, *nightly(1, 3)])
    async def test_of_one_front_end_do_not_cost_another_one_its_request(self, runtime: Path, num_replicas: int) -> None:
        async with connected(runtime, 2, num_replicas=num_replicas) as (_, one, other):
            for _ in range(3 if num_replicas == 3 else 1):  # with each death a replica is started later
                unaffected_one = Reader([10, 11], max_tokens=100)
                killer = Reader([Poison.EXIT, 3], max_tokens=20)
                async with reading(other.engine, [unaffected_one]), reading(one.engine, [killer]):
                    pass
                assert isinstance(killer.error, StepFailed)
                assert "brings down what computes it" in str(killer.error)
                assert outputs_of([unaffected_one]) == await undisturbed([unaffected_one])

    @pytest.mark.nightly
    async def test_of_the_owner_and_of_others_are_found_each(self, runtime: Path) -> None:
        rng = random.Random(3)
        async with connected(runtime, 2) as front_ends:
            unaffected_of = [unaffected(rng, 5, max_tokens=100) for _ in front_ends]
            killers = [Reader([Poison.EXIT, 3 + place], max_tokens=20) for place in range(3)]
            async with contextlib.AsyncExitStack() as stack:
                for place, front_end in enumerate(front_ends):
                    readers = [*unaffected_of[place], killers[place]]
                    await stack.enter_async_context(reading(front_end.engine, readers))
        assert [type(killer.error) for killer in killers] == [StepFailed] * 3
        everyone = [reader for readers in unaffected_of for reader in readers]
        assert outputs_of(everyone) == await undisturbed(everyone)


class TestEnds:
    @pytest.mark.nightly
    async def test_of_a_front_end_end_its_requests_alone(self, runtime: Path) -> None:
        async with connected(runtime, 2) as (owner, one, other):
            at_one, at_other = Reader([10], max_tokens=900), Reader([11], max_tokens=100)
            async with reading(one.engine, [at_one]), reading(other.engine, [at_other]):
                await until_read([at_one, at_other], 1)
                await one.engine.aclose()
            assert isinstance(at_one.error, EngineClosed)
            assert outputs_of([at_other]) == await undisturbed([at_other])
            await agree([owner], lambda each: loads_of(each.engine) == [(0, 0)] * 2)

    async def test_of_the_owner_is_heard_by_all(self, runtime: Path) -> None:
        async with connected(runtime, 2) as (owner, one, other):
            readers = [Reader([10], max_tokens=900), Reader([11], max_tokens=900)]
            async with reading(one.engine, readers[:1]), reading(other.engine, readers[1:]):
                await until_read(readers, 1)
                await owner.engine.aclose()
            assert [str(each.error) for each in readers] == ["the engine has ended: its owner has closed it"] * 2
            with pytest.raises(EngineDead, match="its owner has closed it"):
                await one.engine.generate([1])
            with pytest.raises(EngineDead, match="its owner has closed it"):
                await one.engine.scale(1)
            with pytest.raises(EngineDead, match="no engine serves"):
                await Engine.connect(f"cluster+ipc://{runtime}/cluster")

    async def test_of_the_owner_is_heard_by_one_that_waits_for_a_replica(
        self, runtime: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        waits, hear = asyncio.Event(), ConnectedCluster._hear

        async def note_and_hear(self: ConnectedCluster) -> None:
            waits.set()
            await hear(self)

        monkeypatch.setattr(ConnectedCluster, "_hear", note_and_hear)
        address = f"ipc://{runtime}/cluster"

        async def connect() -> None:
            with pytest.raises(EngineDead, match="its owner has closed it"):
                await Engine.connect(f"cluster+{address}", timeout_s=DEADLINE_S)

        async with cluster(1, cluster_address=address, restart_backoff_s=DEADLINE_S) as owner:
            await owner.kill_and_wait(0)
            with anyio.fail_after(DEADLINE_S / 2):
                async with anyio.create_task_group() as tasks:
                    tasks.start_soon(connect)
                    await waits.wait()
                    await owner.engine.aclose()

    @pytest.mark.nightly
    async def test_of_an_owner_that_is_killed_leave_nothing(self, runtime: Path) -> None:
        """Neither a process nor, after the next start, a file; front ends hear it."""
        address = f"ipc://{runtime}/cluster"
        owner = start_owner(address)
        try:
            assert owner.stdout is not None
            assert await asyncio.to_thread(owner.stdout.readline) == b"serving\n"
            async with await Engine.connect(f"cluster+{address}") as engine:
                children = psutil.Process(owner.pid).children(recursive=True)
                reader = Reader([10], max_tokens=900)
                async with reading(engine, [reader]):
                    await until_read([reader], 1)
                    owner.kill()
                assert isinstance(reader.error, EngineDead)
                assert "is gone" in str(reader.error)
            assert len(children) == 2
            await asyncio.to_thread(psutil.wait_procs, children, DEADLINE_S)
            assert not any(child.is_running() for child in children)
        finally:
            owner.kill()
            owner.communicate()
        assert any(name.startswith("aioengine_") for name in await asyncio.to_thread(os.listdir, runtime))
        await asyncio.to_thread(lambda: PrivateFolder().remove())
        await asyncio.to_thread(remove_stale, f"{runtime}/cluster")


class TestAddresses:
    async def test_of_no_cluster(self, runtime: Path) -> None:
        address = f"ipc://{runtime}/engine"
        async with served(address, FakeExecutor(vocab_size=2048, num_blocks=64, max_model_len=512)):
            with pytest.raises(EngineDead, match="no engine of this version"):
                await Engine.connect(f"cluster+{address}")

    @pytest.mark.nightly
    async def test_of_a_cluster_that_is_connected_to_as_an_engine(self, runtime: Path) -> None:
        async with connected(runtime, 0, num_replicas=1):
            with pytest.raises(EngineDead, match="no engine of this version"):
                await Engine.connect(f"ipc://{runtime}/cluster")

    async def test_that_cannot_be_had_are_refused_before_anything_is_loaded(self, runtime: Path) -> None:
        with pytest.raises(ConfigError, match="the absolute path of a socket is needed"):
            async with cluster(2, cluster_address="ipc://relative"):
                pass
