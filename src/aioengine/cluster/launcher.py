"""What starts the replicas of a cluster: what all launchers have in common."""

from __future__ import annotations

from collections.abc import Callable

from aioengine.cluster.replica import ReplicaBackend
from aioengine.core.protocol import CoreHooks
from aioengine.processes.worker_threads import TextWorker


class Launcher:
    """Makes the backend of each rank: a `MakeBackend` that may hold something for all of them."""

    def __call__(self, rank: int, hooks: CoreHooks) -> ReplicaBackend:
        """The backend of the replica of a rank, unopened; called again for each start.

        Raises:
            ConfigError: there is no room for it.
        """
        raise NotImplementedError

    async def open(
        self, worker: TextWorker, *, find_rank: Callable[[int], int | None], on_join: Callable[[int], None]
    ) -> None:
        """Called first, once.

        Args:
            find_rank: called with the rank that an engine asks for by itself (-1: any): that of a replica that may be
                added for it, or None.
            on_join: called with the rank of an engine that has come by itself.
        """

    async def run(self) -> None:
        """Do what must be done while replicas start and serve, until cancelled."""

    def leave(self, rank: int) -> None:
        """The replica of this rank is about to be stopped for good."""

    def refuse(self, rank: int, reason: str) -> None:
        """The replica of this rank serves, and cannot stand in for the others."""

    def say_goodbye(self, reason: str) -> None:
        """All replicas are about to be closed for good."""

    async def aclose(self) -> None:
        """Called when all backends are closed. Idempotent."""

    def abandon(self) -> None:
        """As `Backend.abandon`."""
