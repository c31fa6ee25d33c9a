"""`Replicated`: the backend of an engine that is several engines."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable
from typing import Any, TypeVar

import anyio

from aioengine.cluster.cluster_core import ClusterCore
from aioengine.cluster.host_launcher import HostLauncher
from aioengine.cluster.launcher import Launcher
from aioengine.cluster.lockstep_launcher import LockstepLauncher
from aioengine.cluster.messages import MAX_REPLICAS, check_count
from aioengine.cluster.replica import Replica, ReplicaState, Shared
from aioengine.cluster.sharing import Sharing
from aioengine.cluster.side_by_side import for_each
from aioengine.config import EngineConfig, ProcessOptions, ReplicaOptions
from aioengine.core.protocol import Cluster, CoreHooks, ReplicaStatus
from aioengine.errors import AioEngineError, ConfigError, EngineDead, InvalidRequest, describe
from aioengine.executor.in_process import clock_of
from aioengine.models.folder import ModelFolder
from aioengine.processes.progress import OnProgress
from aioengine.transport.backends import refuse_function

T = TypeVar("T")

logger = logging.getLogger("aioengine")


def launcher_of(config: EngineConfig, process: ProcessOptions, options: ReplicaOptions) -> Launcher:
    """What makes the backend of each rank.

    Raises:
        ConfigError: an option does not go with it.
    """
    if options.stall_timeout_s < 2 * config.heartbeat_interval_s:
        raise ConfigError(
            f"stall_timeout_s={options.stall_timeout_s:g} is less than two beats, "
            f"heartbeat_interval_s={config.heartbeat_interval_s:g} each, and would kill replicas that have nothing to "
            f"do: give a stall_timeout_s of {2 * config.heartbeat_interval_s:g} or more, or a lower "
            "heartbeat_interval_s"
        )
    if options.lockstep:
        if options.launcher != "process" or options.join_address is not None:
            raise ConfigError(
                "lockstep=True is for replicas that this machine starts: leave out launcher and join_address"
            )
        return LockstepLauncher(config, process, options.replicas)
    if options.launcher == "ray":
        from aioengine.cluster.ray_launcher import RayLauncher

        return RayLauncher(config, process, options)
    return HostLauncher(config, process, options)


class Replicated:
    """A `Backend` whose core is that of several replicas, and the `Cluster` that looks after them.

    Args:
        config: of each replica.
        launcher: makes the backend of each replica.
    """

    core: ClusterCore

    def __init__(self, config: EngineConfig, options: ReplicaOptions, launcher: Launcher, hooks: CoreHooks) -> None:
        self._config = config
        self._options = options
        self._launcher = launcher
        self._hooks = hooks
        self._replicas: dict[int, Replica] = {}
        """All that are not closed yet, by rank."""
        self._turn = anyio.Lock()
        """Of calls that change which replicas there are."""
        self._sharing: Sharing | None = None
        self._come: set[int] = set()
        """Ranks of engines that have come by themselves, to be looked at."""
        self._has_come = anyio.Event()
        self._takes_in = False
        self._reason = "its front end has ended"

    @property
    def cluster(self) -> Cluster:
        return self

    # As a backend

    async def find_model(self) -> ModelFolder:
        self._clock = clock_of(asyncio.get_running_loop())
        self.core = ClusterCore(self._config, self._options, self._hooks, self._clock)
        if self._options.cluster_address is not None:
            self._sharing = Sharing(
                self._options.cluster_address,
                config=self._config,
                options=self._options,
                core=self.core,
                replicas=self._replicas,
                cluster=self,
                worker=self._hooks.worker,
            )
            await self._sharing.open()
        await self._launcher.open(self._hooks.worker, find_rank=self._find_rank, on_join=self._on_join)
        self.core.beside += [self._launcher.run, self._take_in]
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

        failure: Exception | None = None
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self._launcher.run)
            try:
                await for_each(self._replicas.values(), open_one)
                for replica in self._replicas.values():
                    replica.begin_serving()
                    self._add(replica)
            except Exception as error:  # as it is: the group would wrap it
                failure = error
                self._reason = f"its front end cannot start: {describe(error)}"
            tasks.cancel_scope.cancel()
        if failure is not None:
            raise failure

    async def apply_model(self, function: Callable[[Any], T]) -> list[T]:
        return await refuse_function(self, function)

    async def aclose(self) -> None:
        self._launcher.say_goodbye(self._reason)
        try:
            await for_each(self._replicas.values(), _close)
        except BaseException:  # as the loop ends: a task of these may have been cancelled before its first step
            for replica in self._replicas.values():
                replica.abandon()
            raise
        finally:
            self._replicas.clear()
            if self._sharing is not None:
                await self._sharing.aclose()
            await self._launcher.aclose()

    def kill(self) -> None:
        for replica in list(self._replicas.values()):
            replica.kill()

    def abandon(self) -> None:
        for replica in list(self._replicas.values()):
            replica.abandon()
        self._launcher.abandon()
        if self._sharing is not None:
            self._sharing.abandon()

    # As a cluster

    def statuses(self) -> list[ReplicaStatus]:
        # Closed, a cluster that has died still says why.
        return [replica.status() for _, replica in sorted((self._replicas or self.core.replicas).items())]

    async def scale(self, replicas: int) -> None:
        """Have so many replicas: start further ones, or drain and end those of the highest ranks.

        Those of the ranks that stay are started again where they were given up.
        """
        check_count(replicas)
        if self._options.lockstep and replicas != self._options.replicas:
            raise InvalidRequest(
                "replicas in lockstep stay as many as they are: start another engine", param="replicas"
            )
        async with self._change():
            await for_each(range(replicas), self._have)
            leaving = [replica for rank, replica in self._replicas.items() if rank >= replicas]
            await for_each(leaving, self._remove)

    async def restart(self) -> None:
        """Start all replicas again, one after the other; those in lockstep at once."""
        async with self._change():
            if self._options.lockstep:
                replicas = list(self._replicas.values())
                await for_each(replicas, self._drain)
                await for_each(replicas, Replica.restart)
                return
            for replica in list(self._replicas.values()):
                await self._drain(replica)
                await replica.restart()

    @contextlib.asynccontextmanager
    async def _change(self) -> AsyncIterator[None]:
        """The turn of a call that changes which replicas there are; closing the engine ends it as `EngineClosed`."""
        async with self._turn:
            self.core.check_accepting()
            self._forget_stopped()
            try:
                yield
            except EngineDead:
                if self.core.is_stopped and self.core.death is None:
                    self.core.check_accepting()
                raise

    async def _have(self, rank: int) -> None:
        """Have this replica serve, or on its way to that."""
        replica = self._replicas.get(rank)
        if replica is None:
            await self._start(rank)
        elif replica.state is ReplicaState.DRAINING or not replica.is_coming:
            await replica.restart()

    async def _start(self, rank: int) -> None:
        replica = self._make(rank)
        try:
            await replica.find_model()
            await replica.open()
            self.core.check_accepting()
            self._add(replica)
        except BaseException:
            self._replicas.pop(rank, None)  # closing has forgotten all
            self._launcher.leave(rank)
            with anyio.CancelScope(shield=True):
                await replica.aclose()
            raise
        await replica.wait_until_serving()

    async def _remove(self, replica: Replica) -> None:
        await self._drain(replica)
        self._launcher.leave(replica.rank)
        await replica.stop()
        self._forget_stopped()

    def _forget_stopped(self) -> None:
        """Also one that ended behind a call that was cancelled."""
        for replica in [each for each in self._replicas.values() if each.state is ReplicaState.STOPPED]:
            del self._replicas[replica.rank]
            self.core.remove_replica(replica)

    async def _drain(self, replica: Replica) -> None:
        """Have no request at a replica any more, of this front end and all others."""
        timeout_s = self._options.drain_timeout_s
        try:
            async with anyio.create_task_group() as tasks:
                if self._sharing is not None:
                    tasks.start_soon(self._sharing.wait_drained, replica.rank, timeout_s)
                self.core.move(replica, await replica.drain(timeout_s))
        except BaseException:  # a change of mind
            replica.serve_again()
            raise

    def _add(self, replica: Replica) -> None:
        try:
            self.core.add_replica(replica)
        except ConfigError as error:
            self._launcher.refuse(replica.rank, str(error))
            raise

    # Engines that come by themselves

    def _find_rank(self, asked_for: int) -> int | None:
        """As `Launcher.open`: the rank that an engine asks for, or any, unless there is a replica."""
        # While this starts the first ranks are its own; what comes by itself then is taken in behind them.
        taken = self._replicas.keys() | set(() if self._takes_in else range(self._options.replicas))
        rank = next((rank for rank in range(MAX_REPLICAS) if rank not in taken), None) if asked_for < 0 else asked_for
        return None if rank is None or rank >= MAX_REPLICAS or rank in taken else rank

    def _on_join(self, rank: int) -> None:
        if rank not in self._replicas or not self._replicas[rank].is_coming:
            self._come.add(rank)
            self._has_come.set()

    async def _take_in(self) -> None:
        """Make replicas of engines that come by themselves, until cancelled."""
        self._takes_in = True
        while True:
            await self._has_come.wait()
            self._has_come = anyio.Event()
            while self._come:
                rank = self._come.pop()
                async with self._turn:
                    self._forget_stopped()
                    try:
                        if rank not in self._replicas:
                            await self._start(rank)
                        elif not self._replicas[rank].is_coming:
                            await self._replicas[rank].restart()
                    except AioEngineError as error:
                        logger.warning("the engine that came to be replica %d does not serve: %s", rank, error)

    def _make(self, rank: int) -> Replica:
        folder = None if self._sharing is None else self._sharing.folder
        shared = Shared(self.core.conditions, self.core.user_code, folder)
        replica = Replica(rank, self._launcher, self._options, self._hooks, shared, self.core, self._clock)
        self._replicas[rank] = replica
        return replica


async def _close(replica: Replica) -> None:
    """Close a replica; what it raises keeps no other one from being closed."""
    try:
        await replica.aclose()
    except Exception:
        logger.exception("replica %d could not be closed in order", replica.rank)
