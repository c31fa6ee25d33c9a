"""Replicas that are engines at addresses: processes of the real command, over tcp, that die and come back."""

from __future__ import annotations

import contextlib
import random
import re
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import anyio
import pytest
from cluster.harness import Cluster, Reader, outputs_of, prompts, reading, undisturbed, until_read

from aioengine import ConfigError, Engine, EngineDead, InvalidRequest, ProcessOptions, ReplicaOptions
from aioengine.transport.security import make_keys

pytestmark = pytest.mark.usefixtures("faults", "quiet_log")

FLAGS = ("--plugin", "cluster.mortal_plugin", "--heartbeat-interval-s", "0.05", "--heartbeat-timeout-s", "1")


class Served:
    """``aioengine engine ADDRESS``, a process, which is started again at the same address."""

    def __init__(self, *flags: str) -> None:
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.address = f"tcp://127.0.0.1:{free.getsockname()[1]}"
        self.flags = flags
        self.process: subprocess.Popen[str] | None = None

    def start(self, *flags: str) -> None:
        """Returns once it serves."""
        command = [sys.executable, "-m", "aioengine", "engine", self.address, *FLAGS, *self.flags, *flags]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
        assert self.process.stdout is not None
        assert self.process.stdout.readline() == f"serving at {self.address}\n"

    def end(self, number: int = signal.SIGKILL) -> None:
        if self.process is not None:
            self.process.send_signal(number)
            self.process.communicate()
            self.process = None


@pytest.fixture
def serve() -> Iterator[Callable[..., Served]]:
    """Makes one that is started."""
    served: list[Served] = []

    def make(*flags: str) -> Served:
        served.append(Served(*flags))
        served[-1].start()
        return served[-1]

    yield make
    for each in served:
        each.end()


@contextlib.asynccontextmanager
async def front_end(*served: Served, **options: object) -> AsyncIterator[Cluster]:
    replicas = ReplicaOptions(replicas=tuple(each.address for each in served), restart_backoff_s=0.02, **options)  # type: ignore[arg-type]
    async with Engine(replicas=replicas) as engine:
        yield Cluster(engine)


async def test_no_request_is_lost_when_an_engine_dies_and_it_is_taken_back_when_it_is_there_again(
    serve: Callable[..., Served],
) -> None:
    engines = serve(), serve()
    readers = [Reader(prompt) for prompt in prompts(random.Random(1), 6)]
    async with front_end(*engines) as here:
        assert here.ranks() == [0, 1]
        assert [status.where for status in here.engine.replicas()] == [each.address for each in engines]
        async with reading(here.engine, readers):
            await until_read(readers, 5)
            await anyio.to_thread.run_sync(engines[1].end)
            await here.until(lambda: here.ranks() == [0])
        assert outputs_of(readers) == await undisturbed(readers)
        assert here.engine.replicas()[1].num_moved > 0
        await anyio.to_thread.run_sync(engines[1].start)
        await here.until_serving(2)
        assert here.engine.replicas()[1].num_restarts > 0
        more = [Reader(prompt) for prompt in prompts(random.Random(2), 4)]
        async with reading(here.engine, more):
            await until_read(more, 3)
            assert [status.running > 0 for status in here.engine.replicas()] == [True, True]
        assert outputs_of(more) == await undisturbed(more)
        for call in (here.engine.scale(3), here.engine.restart_replicas()):
            with pytest.raises(InvalidRequest, match="are not started here: start, end and restart them where they"):
                await call
        # An engine with another config in its place is refused until it is the right one again.
        await anyio.to_thread.run_sync(engines[1].end)
        await anyio.to_thread.run_sync(engines[1].start, "--max-logprobs", "5")
        refusal = "replica 1 cannot stand in for the others: max_logprobs is 5 there, and 20 at the others"
        await here.until(lambda: refusal in here.engine.replicas()[1].reason)
        await here.engine.generate([11, 12, 13], max_tokens=3)
        await anyio.to_thread.run_sync(engines[1].end)
        await anyio.to_thread.run_sync(engines[1].start)
        await here.until_serving(2)


async def test_a_front_end_starts_with_the_engines_that_are_there(serve: Callable[..., Served]) -> None:
    first, late = serve(), Served()
    try:
        async with front_end(late, first) as here:
            assert here.ranks() == [1]
            assert re.search("no engine serves", here.engine.replicas()[0].reason or "no engine serves")
            await here.engine.generate([11, 12, 13], max_tokens=3)
            await anyio.to_thread.run_sync(late.start)
            await here.until_serving(2)
    finally:
        late.end()


async def test_an_engine_of_other_settings_is_refused_by_name_at_the_start(serve: Callable[..., Served]) -> None:
    with pytest.raises(ConfigError, match="replica 1 cannot stand in for the others: max_logprobs is 5 there"):
        async with front_end(serve(), serve("--max-logprobs", "5")):
            pass


async def test_a_start_without_any_engine_ends_with_the_reasons() -> None:
    replicas = [Served().address, Served().address]
    with pytest.raises(
        EngineDead, match=r"no engine answers within 0.2 s \(start_timeout_s\): no engine serves at tcp"
    ):
        async with Engine(replicas=replicas, process=ProcessOptions(start_timeout_s=0.2)):
            pass


@pytest.mark.nightly
async def test_further_front_ends_reach_engines_by_the_keys_of_the_first(
    serve: Callable[..., Served], runtime: Path, tmp_path: Path
) -> None:
    keys = tmp_path / "keys"
    await anyio.to_thread.run_sync(make_keys, keys, ["head"])
    address = f"ipc://{runtime}/shared/cluster"
    engines = [serve("--keys", str(keys)) for _ in range(2)]
    async with front_end(*engines, keys=str(keys), cluster_address=address) as here:
        assert here.ranks() == [0, 1]
        async with await Engine.connect(f"cluster+{address}") as other:
            readers = [Reader(prompt) for prompt in prompts(random.Random(3), 6)]
            await Cluster(other).until_serving(2)
            async with reading(other, readers):
                await until_read(readers, 3)
        assert outputs_of(readers) == await undisturbed(readers)
    (runtime / "shared").rmdir()
