"""`Replicated`: the backend of an engine that is several engines."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from typing import Any, TypeVar

import anyio

from aioengine.cluster.cluster_core import ClusterCore
from aioengine.cluster.replica import MakeBackend, Replica, ReplicaState, Shared
from aioengine.config import EngineConfig, ProcessOptions, ReplicaOptions
from aioengine.core.protocol import Backend, Cluster, CoreHooks, ReplicaStatus
from aioengine.errors import EngineDead, InvalidRequest
from aioengine.executor.in_process import clock_of
from aioengine.models.folder import ModelFolder
from aioengine.progress import OnProgress
from aioengine.transport.backends import InChild, refuse_function

A = TypeVar("A")
T = TypeVar("T")


def launcher_of(config: EngineConfig, process: ProcessOptions, options: ReplicaOptions) -> MakeBackend:
    """What makes the backend of each rank.

    Raises:
        ConfigError: an option does not go with it.
    """
    if options.launcher == "ray":
        from aioengine.cluster.ray_launcher import RayLauncher

        return RayLauncher(config, process, options)

    def in_child(rank: int, hooks: CoreHooks) -> Backend:
        return InChild(config, process, hooks, rank=rank)

    return in_child


class Replicated:
    """A `Backend` whose core is that of several replicas, and the `Cluster` that looks after them.

    Args:
        config: of each replica.
        make_backend: of the replica of a rank.
    """

    core: ClusterCore

    def __init__(
        self, config: EngineConfig, options: ReplicaOptions, make_backend: MakeBackend, hooks: CoreHooks
    ) -> None:
        self._config = config
        self._options = options
        self._make_backend = make_backend
        self._hooks = hooks
        self._replicas: dict[int, Replica] = {}
        """All that are not closed yet, by rank."""
        self._turn = anyio.Lock()
        """Of calls that change which replicas there are."""

    @property
    def cluster(self) -> Cluster:
        return self

    # As a backend

    async def find_model(self) -> ModelFolder:
        self._clock = clock_of(asyncio.get_running_loop())
        self.core = ClusterCore(self._config, self._options, self._hooks, self._clock)
        replicas = [self._make(rank) for rank in range(self._options.replicas)]
        found = await for_each(replicas, Replica.find_model)
        return found[0]

    async def open(self, on_progress: OnProgress | None = None) -> None:
        progress: dict[int, tuple[int, int]] = {}

        async def open_one(replica: Replica) -> None:
            def note(done: int, total: int, *of_what: str) -> None:
                progress[replica.rank] = (done, total)
                if on_progress is not None:
                    on_progress(sum(done for done, _ in progress.values()), sum(t for _, t in progress.values()))

            await replica.open(note)

        await for_each(self._replicas.values(), open_one)
        for replica in self._replicas.values():
            self.core.add_replica(replica)

    async def apply_model(self, function: Callable[[Any], T]) -> list[T]:
        return await refuse_function(self, function)

    async def aclose(self) -> None:
        try:
            await for_each(self._replicas.values(), Replica.aclose)
        finally:
            self._replicas.clear()
            if hasattr(self._make_backend, "aclose"):  # of a launcher that holds something for all
                await self._make_backend.aclose()

    def kill(self) -> None:
        for replica in list(self._replicas.values()):
            replica.kill()

    def abandon(self) -> None:
        for replica in list(self._replicas.values()):
            replica.abandon()

    # As a cluster

    def statuses(self) -> list[ReplicaStatus]:
        return [replica.status() for _, replica in sorted(self._replicas.items())]

    async def scale(self, replicas: int) -> None:
        """Have so many replicas: start further ones, or drain and end those of the highest ranks."""
        if isinstance(replicas, bool) or not isinstance(replicas, int) or not 1 <= replicas <= 1024:
            raise InvalidRequest(f"replicas={replicas!r}: an int from 1 to 1024 is needed", param="replicas")
        async with self._turn:
            new = [rank for rank in range(replicas) if rank not in self._replicas]
            await for_each(new, self._start)
            leaving = [replica for rank, replica in self._replicas.items() if rank >= replicas]
            await for_each(leaving, self._remove)

    async def restart(self) -> None:
        """Start all replicas again, one after the other."""
        async with self._turn:
            for replica in list(self._replicas.values()):
                if replica.is_serving:
                    self.core.move(replica, await replica.drain(self._options.drain_timeout_s))
                await replica.restart()

    async def _start(self, rank: int) -> None:
        replica = self._make(rank)
        try:
            await replica.find_model()
            await replica.open()
            if self.core.is_stopped:
                raise EngineDead("the engine ended while a replica was starting")
            self.core.add_replica(replica)
        except BaseException:
            del self._replicas[rank]
            with anyio.CancelScope(shield=True):
                await replica.aclose()
            raise

    async def _remove(self, replica: Replica) -> None:
        self.core.move(replica, await replica.drain(self._options.drain_timeout_s))
        await replica.stop()
        if replica.state is ReplicaState.STOPPED:
            self._replicas.pop(replica.rank, None)
            self.core.remove_replica(replica)

    def _make(self, rank: int) -> Replica:
        shared = Shared(self.core.conditions, self.core.user_code)
        replica = Replica(rank, self._make_backend, self._options, self._hooks, shared, self.core, self._clock)
        self._replicas[rank] = replica
        return replica


async def for_each(items: Iterable[A], function: Callable[[A], Awaitable[T]]) -> list[T]:
    """Await ``function`` of all side by side; returns the results in order. What one raises ends the others."""
    items = list(items)
    results: dict[int, T] = {}
    error: Exception | None = None

    async def run(place: int) -> None:
        nonlocal error
        try:
            results[place] = await function(items[place])
        except Exception as raised:
            error = error or raised
            tasks.cancel_scope.cancel()

    async with anyio.create_task_group() as tasks:
        for place in range(len(items)):
            tasks.start_soon(run, place)
    if error is not None:
        raise error
    return [results[place] for place in range(len(items))]
