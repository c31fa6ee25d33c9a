"""`Sharing`: the replicas of this process for further front ends, too."""

from __future__ import annotations

from collections.abc import Mapping

import anyio

from aioengine.cluster.cluster_core import ClusterCore
from aioengine.cluster.coordinator import OWNER, Coordinator
from aioengine.cluster.coordinator_messages import MAX_REASON_CHARS, Counts, Member
from aioengine.cluster.replica import Replica
from aioengine.cluster.reservation import Reservation
from aioengine.config import EngineConfig, ReplicaOptions
from aioengine.core.protocol import Cluster
from aioengine.errors import AioEngineError, EngineClosed
from aioengine.processes.worker_threads import TextWorker
from aioengine.transport.addresses import PrivateFolder, pair_in
from aioengine.transport.wire_errors import cut

OTHERS_GRACE_S = 5.0
"""Beyond their own time to drain: for further front ends to say that they have no requests at a replica."""


class Sharing:
    """A folder for the replicas' sockets, and the coordinator that tells where they are.

    Args:
        address: of the coordinator.
        core: of this process's own front end.
        replicas: all, by rank.
        cluster: what is asked to scale and restart.
        pair_path: as `Launcher.pair_path`.
    """

    def __init__(
        self,
        address: str,
        *,
        config: EngineConfig,
        options: ReplicaOptions,
        core: ClusterCore,
        replicas: Mapping[int, Replica],
        cluster: Cluster,
        worker: TextWorker,
        pair_path: str = "",
    ) -> None:
        self.config = config
        self.options = options
        self._core = core
        self._replicas = replicas
        self._cluster = cluster
        self._worker = worker
        self._pair_path = pair_path
        self._folder: PrivateFolder | None = None
        self._coordinator = coordinator = Coordinator(self, address, worker=worker)

        async def release(rank: int) -> None:
            coordinator.release(rank, OWNER)

        self._solitude = Reservation(
            core, lambda: coordinator.reserve(OWNER), release, is_single=lambda: not coordinator.attached
        )

    @property
    def folder(self) -> str:
        """Where replicas are to serve, once it is open."""
        assert self._folder is not None
        return self._folder.path

    @property
    def pair_path(self) -> str:
        """As `AttachedToCluster.pair_path`."""
        return self._pair_path or pair_in(self.folder)

    async def open(self) -> None:
        """Bind, before anything is loaded, since the address may be in use; front ends are served with the core.

        Raises:
            ConfigError: the address, or a folder, cannot be had.
        """
        await self._coordinator.open()
        # Noted where it is made, so that a start that is cancelled here removes it.
        await self._worker.run(self._make_folder, None)
        self._core.on_change = self._coordinator.announce
        self._core.placing.reservation = self._solitude
        self._core.beside += [self._coordinator.serve, self._solitude.run]

    async def aclose(self) -> None:
        """Close and remove all; the replicas have ended. Idempotent."""
        await self._coordinator.close_sockets()
        await self._worker.run(self._remove_folder, None)

    def abandon(self) -> None:
        """As `Backend.abandon`."""
        self._coordinator.abandon()
        self._remove_folder()

    async def wait_drained(self, rank: int, timeout_s: float) -> None:
        """Wait until no further front end has requests at a replica that drains, and a little longer than they may."""
        with anyio.move_on_after(timeout_s + OTHERS_GRACE_S):
            await self._coordinator.wait_drained(rank)

    def _make_folder(self) -> None:
        self._folder = PrivateFolder()

    def _remove_folder(self) -> None:
        if self._folder is not None:
            self._folder.remove()

    # As the coordinator asks

    async def scale(self, replicas: int) -> None:
        await self._cluster.scale(replicas)

    async def restart(self) -> None:
        await self._cluster.restart()

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
            for status in self._cluster.statuses()
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
                self._core.move(replica, replica.core.take_back())
            self._core.placing.dispatch()

    def last_words(self) -> AioEngineError:
        """As `Coordinated.last_words`."""
        return self._core.copy_death() if self._core.death is not None else EngineClosed("its owner has closed it")
