"""`Replicated`: the backend of an engine that is several engines."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
from collections.abc import AsyncIterator, Callable
from typing import Any, TypeVar, cast

import anyio

from aioengine.cluster.cluster_core import ClusterCore
from aioengine.cluster.coordinator import OWNER, Coordinator
from aioengine.cluster.coordinator_messages import MAX_REASON_CHARS, Counts, Member, check_count
from aioengine.cluster.launchers import AddressLauncher, Launcher, ProcessLauncher
from aioengine.cluster.lockstep_launcher import LockstepLauncher
from aioengine.cluster.placing import Reservation
from aioengine.cluster.replica import Replica, ReplicaState, for_each
from aioengine.config import EngineConfig, ProcessOptions, ReplicaOptions
from aioengine.core.in_process import clock_of
from aioengine.core.protocol import Cluster, CoreHooks, ReplicaStatus
from aioengine.errors import AioEngineError, ConfigError, EngineClosed, EngineDead, InvalidRequest
from aioengine.models.folder import ModelFolder
from aioengine.processes.progress import OnProgress
from aioengine.transport.addresses import PrivateFolder, pair_in
from aioengine.transport.backends import refuse_function
from aioengine.transport.wire import cut

T = TypeVar("T")

logger = logging.getLogger("aioengine")

OTHERS_GRACE_S = 5.0
"""Beyond their own time to drain: for further front ends to report that they have no requests at a replica."""


def launcher_of(config: EngineConfig, process: ProcessOptions, options: ReplicaOptions) -> Launcher:
    """Make the launcher that these options ask for.

    Raises:
        ConfigError: an option does not go with it.
    """
    if options.addresses:
        return AddressLauncher(config, process, options)
    check_stall_timeout(config, options)
    if options.lockstep:
        if options.launcher != "process":
            raise ConfigError("lockstep=True is for replicas that this machine starts: leave out launcher")
        return LockstepLauncher(config, process, options.num_replicas)
    if options.launcher == "ray":
        from aioengine.cluster.ray_launcher import RayLauncher

        return RayLauncher(config, process, options)
    return ProcessLauncher(config, process, options.num_replicas)


def check_stall_timeout(config: EngineConfig, options: ReplicaOptions) -> None:
    """Raise ConfigError if replicas that have nothing to do would be taken for stalled."""
    if options.stall_timeout_s < 2 * config.heartbeat_interval_s:
        raise ConfigError(
            f"stall_timeout_s={options.stall_timeout_s:g} is less than two beats, "
            f"heartbeat_interval_s={config.heartbeat_interval_s:g} each, and would kill replicas that have nothing to "
            f"do: give a stall_timeout_s of {2 * config.heartbeat_interval_s:g} or more, or a lower "
            "heartbeat_interval_s"
        )


class Replicated:
    """A `Backend` whose core is that of several replicas, and the `Cluster` that looks after them.

    Args:
        config: of each replica.
        launcher: makes the backend of each replica.
    """

    core: ClusterCore

    def __init__(self, config: EngineConfig, options: ReplicaOptions, launcher: Launcher, hooks: CoreHooks) -> None:
        self.config = config
        self.options = options
        self._launcher = launcher
        self._hooks = hooks
        self._replicas: dict[int, Replica] = {}
        """All that are not closed yet, by rank."""
        self._late: dict[int, str] = {}
        """Ranks whose engines did not answer at the start, and why."""
        self._turn = anyio.Lock()
        """Held by calls that change which replicas there are."""
        self._coordinator: Coordinator | None = None
        """Serves further front ends; None: there are none."""
        self._folder: PrivateFolder | None = None
        """Where replicas serve, so that further front ends can connect."""

    @property
    def cluster(self) -> Cluster:
        return self

    # As a backend

    async def find_model(self) -> ModelFolder:
        self.config = await self._launcher.open(self._hooks.worker, self.config)
        check_stall_timeout(self.config, self.options)
        self.core = ClusterCore(self.config, self.options, self._hooks, clock_of(asyncio.get_running_loop()))
        if self.options.cluster_address is not None:
            await self._share(self.options.cluster_address)
        replicas = [self._make(rank) for rank in range(self.options.num_replicas)]
        folders = await for_each(replicas, self._find)
        found = [folder for rank, folder in enumerate(folders) if rank not in self._late]
        if not found:
            raise EngineDead("; ".join(self._late.values()))
        return cast(ModelFolder, found[0])

    async def _find(self, replica: Replica) -> ModelFolder | None:
        """Begin the first start of a replica; None if its engine is another's, and does not answer."""
        try:
            return await replica.find_model()
        except EngineDead as error:
            if self._launcher.owns_engines:
                raise
            logger.warning("replica %d is not there yet: %s", replica.rank, error)
            self._late[replica.rank] = str(error)
            await replica.aclose()
            return None

    async def open(self, on_progress: OnProgress | None = None) -> None:
        progress: dict[int, tuple[int, int]] = {}

        async def open_one(replica: Replica) -> None:
            def note(done: int, total: int, *of_what: str) -> None:
                progress[replica.rank] = (done, total)
                if on_progress is not None:
                    on_progress(sum(done for done, _ in progress.values()), sum(t for _, t in progress.values()))

            await replica.open(note)

        opening = [replica for rank, replica in self._replicas.items() if rank not in self._late]
        await for_each(opening, open_one)
        for replica in opening:
            replica.begin_serving()
        for replica in self._replicas.values():
            self.core.add_replica(replica)

    async def apply_model(self, function: Callable[[Any], T]) -> list[T]:
        return await refuse_function(self, function)

    async def aclose(self) -> None:
        try:
            await for_each(self._replicas.values(), _close)
        except BaseException:  # as the loop ends: a task of these may have been cancelled before its first step
            for replica in self._replicas.values():
                replica.abandon()
            raise
        finally:
            self._replicas.clear()
            if self._coordinator is not None:
                await self._coordinator.close_sockets()
                await self._hooks.worker.run(self._remove_folder, None)
            await self._launcher.aclose()

    def kill(self) -> None:
        for replica in list(self._replicas.values()):
            replica.kill()

    def abandon(self) -> None:
        for replica in list(self._replicas.values()):
            replica.abandon()
        if self._coordinator is not None:
            self._coordinator.abandon()
        self._remove_folder()

    # As a cluster

    def statuses(self) -> list[ReplicaStatus]:
        # Closed, a cluster that has died still has its reason.
        return [replica.status() for _, replica in sorted((self._replicas or self.core.replicas).items())]

    async def scale(self, replicas: int) -> None:
        """Have so many replicas: start further ones, or drain and end those of the highest ranks.

        Those of the ranks that stay are started again where they were given up.
        """
        check_count(replicas)
        self._check_owned()
        if self.options.lockstep and replicas != self.options.num_replicas:
            raise InvalidRequest(
                "replicas in lockstep stay as many as they are: start another engine", param="replicas"
            )
        async with self._change():
            await for_each(range(replicas), self._have)
            leaving = [replica for rank, replica in self._replicas.items() if rank >= replicas]
            await for_each(leaving, self._remove)

    async def restart(self) -> None:
        """Start all replicas again, one after the other; those in lockstep at once."""
        self._check_owned()
        async with self._change():
            if self.options.lockstep:
                replicas = list(self._replicas.values())
                await for_each(replicas, self._drain)
                await for_each(replicas, Replica.restart)
                return
            for replica in list(self._replicas.values()):
                await self._drain(replica)
                await replica.restart()

    def _check_owned(self) -> None:
        if not self._launcher.owns_engines:
            raise InvalidRequest(
                f"the engines at {', '.join(self.options.addresses)} are not started here: start, end and restart "
                "them where they run; a front end of other addresses is another engine",
                param="replicas",
            )

    @contextlib.asynccontextmanager
    async def _change(self) -> AsyncIterator[None]:
        """Hold the turn of a call that changes the replicas; closing the engine ends it as `EngineClosed`."""
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
        """Start or restart the replica of a rank unless it serves or will."""
        if (present := self._replicas.get(rank)) is not None:
            if present.state is ReplicaState.DRAINING or not present.is_coming:
                await present.restart()
            return
        replica = self._make(rank)
        try:
            await replica.find_model()
            await replica.open()
            self.core.check_accepting()
            self.core.add_replica(replica)
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
        """Forget replicas that have stopped, also behind a call that was cancelled."""
        for replica in [each for each in self._replicas.values() if each.state is ReplicaState.STOPPED]:
            del self._replicas[replica.rank]
            self.core.remove_replica(replica)

    async def _drain(self, replica: Replica) -> None:
        """Wait until a replica has no request of any front end; move what is left of this one's."""
        coordinator, timeout_s = self._coordinator, self.options.drain_timeout_s

        async def wait_others() -> None:
            with anyio.move_on_after(timeout_s + OTHERS_GRACE_S):
                if coordinator is not None:
                    await coordinator.wait_drained(replica.rank)

        try:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(wait_others)
                self.core.move(replica, await replica.drain(timeout_s))
        except BaseException:  # a change of mind
            replica.serve_again()
            raise

    def _make(self, rank: int) -> Replica:
        folder = None if self._folder is None else self._folder.path
        max_restarts = self.options.max_restarts if self._launcher.owns_engines else math.inf
        replica = self._replicas[rank] = Replica(
            rank, self._launcher, self.core, self._hooks, folder=folder, max_restarts=max_restarts
        )
        return replica

    # As a coordinator asks, for further front ends

    @property
    def pair_path(self) -> str:
        """As `AttachedToCluster.pair_path`."""
        assert self._folder is not None
        return self._launcher.pair_path or pair_in(self._folder.path)

    def members(self) -> list[Member]:
        """As `Coordinated.members`."""
        return [
            Member(
                rank=status.rank,
                state=status.state,
                num_restarts=status.num_restarts,
                address=self._replicas[status.rank].shared_address,
                reason=cut(status.reason, MAX_REASON_CHARS),
                where=status.where,
                num_blocks=status.num_blocks,
                server_key=self._replicas[status.rank].server_key,
            )
            for status in self.statuses()
            if status.rank in self._replicas
        ]

    def counts(self) -> Counts:
        """As `Coordinated.counts`."""
        every = [
            (rank, replica.core.stats())
            for rank, replica in sorted(self._replicas.items())
            if replica.core is not None and replica.core.death is None
        ]
        return Counts(
            ranks=[rank for rank, _ in every],
            running=[stats.running for _, stats in every],
            waiting=[stats.waiting for _, stats in every],
            blocked=[stats.blocked for _, stats in every],
            free_blocks=[stats.free_blocks for _, stats in every],
        )

    def lend(self, rank: int, is_lent: bool) -> None:
        """As `Coordinated.lend`."""
        replica = self._replicas.get(rank)
        if replica is not None:
            replica.is_lent = is_lent
            if is_lent and replica.core is not None:
                self.core.move(replica, replica.core.take_back())
            self.core.placing.dispatch()

    def final_error(self) -> AioEngineError:
        """As `Coordinated.final_error`."""
        return self.core.copy_death() if self.core.death is not None else EngineClosed("its owner has closed it")

    async def _share(self, address: str) -> None:
        """Bind for further front ends, before anything is loaded, since the address may be in use.

        Raises:
            ConfigError: the address, or a folder, cannot be had.
        """
        self._coordinator = coordinator = Coordinator(self, address, worker=self._hooks.worker)
        await coordinator.open()
        # Noted where it is made, so that a start that is cancelled here removes it.
        await self._hooks.worker.run(self._make_folder, None)

        async def release(rank: int) -> None:
            coordinator.release(rank, OWNER)

        self.core.placing.reservation = Reservation(
            lambda: coordinator.reserve(OWNER), release, lambda: not coordinator.attached
        )
        self.core.on_change = coordinator.announce
        self.core.beside.append(coordinator.serve)

    def _make_folder(self) -> None:
        self._folder = PrivateFolder()

    def _remove_folder(self) -> None:
        if self._folder is not None:
            self._folder.remove()


async def _close(replica: Replica) -> None:
    """Close a replica; what it raises keeps no other one from being closed."""
    try:
        await replica.aclose()
    except Exception:
        logger.exception("replica %d could not be closed in order", replica.rank)
