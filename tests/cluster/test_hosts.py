"""Machines whose engines join a front end: processes of the real command, over tcp with keys, on one machine."""

from __future__ import annotations

import contextlib
import logging
import os
import random
import re
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any, cast

import anyio
import psutil
import pytest
from cluster.harness import DEADLINE_S, Cluster, Reader, cluster, outputs_of, prompts, reading, undisturbed, until_read
from transport.life_scripts.watching import Ear

from aioengine import ConfigError, Engine
from aioengine.cluster.backend import Replicated
from aioengine.cluster.launcher import Launcher
from aioengine.config import EngineConfig, ReplicaOptions
from aioengine.core.protocol import CoreHooks
from aioengine.transport.security import make_keys

pytestmark = pytest.mark.usefixtures("faults", "quiet_log")

FLAGS = ("--plugin", "cluster.mortal_plugin", "--join-timeout-s", "60")


class Host:
    """``aioengine engine --join``, a process."""

    def __init__(self, address: str, keys: Path | None, *flags: str) -> None:
        of_keys = ["--join-keys", str(keys)] if keys is not None else []
        command = [sys.executable, "-m", "aioengine", "engine", "--join", address, *of_keys]
        self.process = subprocess.Popen([*command, *FLAGS, *flags], stderr=subprocess.PIPE, text=True)
        self.said = ""
        """What it has logged, once it has ended."""

    def engine_pid(self) -> int:
        """Of the engine that it has in a process of its own."""
        (child,) = psutil.Process(self.process.pid).children()
        return child.pid

    async def ends(self) -> tuple[int, str]:
        """Wait for its end; returns its exit code, and what it has logged."""
        with anyio.fail_after(DEADLINE_S):
            await anyio.to_thread.run_sync(self._wait, abandon_on_cancel=True)
        return self.process.returncode, self.said

    def close(self) -> None:
        self.process.terminate()
        self._wait()

    def _wait(self) -> None:
        if not self.said:
            _, self.said = self.process.communicate()


Spread = Callable[..., contextlib.AbstractAsyncContextManager[tuple[Cluster, list[Host]]]]


@pytest.fixture
def ear() -> Iterator[Ear]:
    ear = Ear()
    logging.getLogger("aioengine").addHandler(ear)
    yield ear
    logging.getLogger("aioengine").removeHandler(ear)


@pytest.fixture
def spread(tmp_path_factory: pytest.TempPathFactory, ear: Ear) -> Spread:
    """A cluster of two, one of which joins from a host with these flags."""
    folder = tmp_path_factory.mktemp("keys")
    head, keys = folder / "head", folder / "hostb"
    make_keys(head, ["hostb"])
    (keys / "clients").mkdir(parents=True, mode=0o700)
    for name in ("server.key", "clients/hostb.key_secret"):
        (head / name).rename(keys / name) if "secret" in name else (keys / name).write_bytes((head / name).read_bytes())

    @contextlib.asynccontextmanager
    async def start(
        *flags: str, num_hosts: int = 1, ended: list[tuple[int, str]] | None = None, **options: Any
    ) -> AsyncIterator[tuple[Cluster, list[Host]]]:
        """``ended``: gets what hosts end with by themselves."""
        hosts: list[Host] = []

        async def start_hosts() -> None:
            ((address,),) = [match.groups() for match in await ear.hears(r"engines may join at (.*)")]
            for _ in range(num_hosts):
                hosts.append(await anyio.to_thread.run_sync(Host, address, keys, *flags))

        options = {"join_address": "tcp://127.0.0.1:*", "join_keys": str(head), "replicas_local": 1, **options}
        try:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(start_hosts)
                async with cluster(options.pop("replicas", 2), start_timeout_s=DEADLINE_S, **options) as here:
                    yield here, hosts
        finally:
            for host in hosts if ended is not None else ():
                ended.append(await host.ends())
            for host in hosts:
                await anyio.to_thread.run_sync(host.close)

    return start


async def test_a_host_s_engine_serves_dies_comes_back_and_ends_with_the_front_end(spread: Spread) -> None:
    readers = [Reader(prompt) for prompt in prompts(random.Random(1), 6)]
    ended: list[tuple[int, str]] = []
    async with spread("--replicas-local", "1", "--start-rank", "1", ended=ended) as (here, (host,)):
        assert here.ranks() == [0, 1]
        async with reading(here.engine, readers):
            await until_read(readers, 5)
            killed = host.engine_pid()
            os.kill(killed, signal.SIGKILL)
            await here.until_in_state("serving", 1)
        assert outputs_of(readers) == await undisturbed(readers)
        await here.until_serving(2)
        assert host.engine_pid() != killed
        (status,) = [each for each in here.engine.replicas() if each.rank == 1]
        assert status.where.startswith("hostb tcp://127.0.0.1:")
    ((code, said),) = ended
    assert (code, "all engines have ended as the front end has" in said) == (0, True), said


@pytest.mark.nightly
async def test_a_host_joins_by_hand_and_leaves_when_it_is_not_needed(spread: Spread, ear: Ear) -> None:
    """Without ``--replicas-local`` the command is the engine."""
    async with spread(replicas=1, replicas_local=1, num_hosts=2) as (here, hosts):
        await here.until_serving(3)
        assert here.ranks() == [0, 1, 2]
        await here.engine.scale(1)
        assert {(await host.ends())[0] for host in hosts} == {0}
        await here.engine.generate([11, 12, 13], max_tokens=3)


@pytest.mark.nightly
async def test_further_front_ends_reach_an_engine_of_another_host_by_its_key(spread: Spread, runtime: Path) -> None:
    address = f"ipc://{runtime}/shared/cluster"
    async with spread("--replicas-local", "1", "--start-rank", "1", cluster_address=address) as (here, _):
        assert here.ranks() == [0, 1]
        async with await Engine.connect(f"cluster+{address}") as other:
            readers = [Reader(prompt) for prompt in prompts(random.Random(3), 6)]
            there = Cluster(other)
            await there.until_serving(2)
            async with reading(other, readers):
                await until_read(readers, 3)
            assert {status.where.split(" ")[0] for status in other.replicas()} >= {"hostb"}
        assert outputs_of(readers) == await undisturbed(readers)
    (runtime / "shared").rmdir()


@pytest.mark.nightly
async def test_a_rolling_restart_and_a_smaller_cluster_reach_hosts(spread: Spread) -> None:
    readers = [Reader(prompt) for prompt in prompts(random.Random(2), 6)]
    async with spread("--replicas-local", "2", "--start-rank", "1", replicas=3) as (here, (host,)):
        before = {child.pid for child in psutil.Process(host.process.pid).children()}
        async with reading(here.engine, readers):
            await until_read(readers, 2)
            await here.engine.restart_replicas()
        assert outputs_of(readers) == await undisturbed(readers)
        after = {child.pid for child in psutil.Process(host.process.pid).children()}
        assert (len(after), before & after) == (2, set())
        await here.engine.scale(2)
        assert here.ranks() == [0, 1]
        await here.engine.scale(1)
        code, said = await host.ends()
        assert (code, "all engines have ended as the front end has" in said) == (0, True), said
        await here.engine.generate([11, 12, 13], max_tokens=3)


@pytest.mark.nightly
@pytest.mark.parametrize("flags", [(), ("--replicas-local", "1")], ids=["engine", "headless"])
async def test_an_engine_with_another_config_is_refused_at_both_ends(spread: Spread, flags: tuple[str, ...]) -> None:
    said = "replica 1 cannot stand in for replica 0: max_logprobs is 5 there and 20 here"
    ended: list[tuple[int, str]] = []
    with pytest.raises(ExceptionGroup) as caught:
        async with spread("--max-logprobs", "5", *flags, ended=ended):
            pass
    assert re.search(said, str(caught.value.exceptions[0]))
    assert isinstance(caught.value.exceptions[0], ConfigError)
    ((code, on_host),) = ended
    assert (code, f"turned away: {said}" in on_host) == (2, True), on_host


HEAD = """
import asyncio, sys
from aioengine import Engine, ReplicaOptions

async def main():
    replicas = ReplicaOptions(replicas=1, replicas_local=0, join_address=sys.argv[1])
    async with Engine(replicas=replicas) as engine:
        output = await engine.generate([11, 12, 13], max_tokens=3, ignore_eos=True)
        print("served by", engine.replicas()[0].where, flush=True)
        await asyncio.sleep(600)

asyncio.run(main())
"""


def serve_once(address: str) -> str:
    """A front end that is killed when it has served; returns what it has said."""
    head = subprocess.Popen([sys.executable, "-c", HEAD, address], stdout=subprocess.PIPE, text=True)
    assert head.stdout is not None
    said = head.stdout.readline()
    head.kill()
    head.communicate()
    return said


@pytest.mark.nightly
async def test_a_host_outlives_a_front_end_that_was_killed_and_ends_when_none_comes(tmp_path: Path) -> None:
    address = f"ipc://{tmp_path}/join"
    host = await anyio.to_thread.run_sync(Host, address, None, "--replicas-local", "1", "--join-timeout-s", "3")
    try:
        places = []
        for _ in range(2):
            places.append(await anyio.to_thread.run_sync(serve_once, address))
        assert places[0] == places[1], "the same engine, with its model loaded"
        assert places[0].startswith("served by ")
        code, said = await host.ends()
        assert code == 1
        assert re.search(r"the front end at ipc://.* has been gone for 3 s: no ", said), said
    finally:
        await anyio.to_thread.run_sync(host.close)


def test_one_that_comes_while_the_front_end_starts_is_taken_in_behind_its_first_ranks() -> None:
    starting = Replicated(EngineConfig(), ReplicaOptions(replicas=2), Launcher(), CoreHooks(*[cast(Any, None)] * 3))
    assert [starting._find_rank(asked_for) for asked_for in (-1, 0, 1, 2, 7, 1024)] == [2, None, None, 2, 7, None]
