"""`Coordinator`: serves the further front ends of a cluster, in the process that owns the replicas.

It announces where the replicas serve and how much they have to do, and takes calls that concern all of them. Requests
and tokens do not pass here: each front end has a link to each replica.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Any, Protocol

import anyio
import msgspec

from aioengine.cluster.coordinator_messages import (
    CALL_DECODER,
    AttachedToCluster,
    ClusterCall,
    Counts,
    Drained,
    Member,
    Membership,
    Release,
    Reserve,
    RestartReplicas,
    Scale,
    ToCoordinator,
)
from aioengine.config import EngineConfig, ReplicaOptions
from aioengine.errors import AioEngineError, WireError
from aioengine.processes.worker_threads import TextWorker
from aioengine.transport import wire
from aioengine.transport.peers import LINGER_S, Arrival, PeerServer, PeerSession

logger = logging.getLogger("aioengine")

PUBLISH_INTERVAL_S = 0.1
"""Least time between two messages of counts to a front end."""

BEHIND_MESSAGES = 64
"""A front end with so many unread messages gets no more counts, only changes of members and answers to its calls: so
one that is stopped for minutes is not cut off."""


LEAVE_TIMEOUT_S = 30.0
"""How long front ends may take to leave a reserved replica; it takes them milliseconds. A front end that takes longer
is taken for stopped."""

OWNER = -1
"""In place of the index of a front end: the owner's own."""


class Coordinated(Protocol):
    """The cluster, as a coordinator uses it on its loop."""

    @property
    def config(self) -> EngineConfig:
        """The config of each replica."""

    @property
    def options(self) -> ReplicaOptions: ...

    @property
    def pair_path(self) -> str:
        """As `AttachedToCluster.pair_path`."""

    def members(self) -> list[Member]:
        """The replicas, by rank."""

    def counts(self) -> Counts:
        """The replicas' load, as far as it is known."""

    async def scale(self, replicas: int) -> None:
        """As `Engine.scale`."""

    async def restart(self) -> None:
        """As `Engine.restart_replicas`."""

    def lend(self, rank: int, is_lent: bool) -> None:
        """Leave a replica to another front end at once; or let the owner's own front end use it again."""

    def final_error(self) -> AioEngineError:
        """Return the error that front ends get at the end."""


class FrontEndSession(PeerSession):
    """A front end that is attached to a coordinator."""

    def __init__(self, arrival: Arrival, members: Membership, counts: Counts) -> None:
        super().__init__(arrival)
        self.members = members
        self.counts = counts
        """The last counts that were sent to it."""
        self.draining: set[int] = set()
        """Ranks that it is to leave, and may still have requests at."""

    @property
    def is_behind(self) -> bool:
        return self.num_unread >= BEHIND_MESSAGES


class Coordinator(PeerServer[FrontEndSession]):
    """Serves the front ends of a cluster.

    Args:
        cluster: has the members; it calls `announce` when they change.
        address: where front ends may connect: ``ipc:///path``, in a folder that only this user can enter. All that can
            connect may do what the cluster's owner may.
    """

    kinds = ToCoordinator
    title = "coordinator"
    max_unread = 256

    def __init__(self, cluster: Coordinated, address: str, *, worker: TextWorker) -> None:
        super().__init__(address, keys=None, worker=worker)
        self._cluster = cluster
        self._members: list[Member] = []
        self._counts = Counts([], [], [], [], [])
        self._has_front_ends = asyncio.Event()
        self._has_changed = asyncio.Event()
        """Set when the members are others, and when a front end has nothing at a replica any more."""
        self._reserved: dict[int, int] = {}
        """By rank, the front end that has it for itself."""

    async def serve(self) -> None:
        """Serve front ends until cancelled; then all of them hear the end, and everything is closed."""
        try:
            async with anyio.create_task_group() as self._tasks:
                self._tasks.start_soon(self.receive)
                self._tasks.start_soon(self.watch)
                self._tasks.start_soon(self._publish)
        finally:
            self.end_sessions(self._cluster.final_error())
            with anyio.CancelScope(shield=True), anyio.move_on_after(2 * LINGER_S):
                await self.close_sockets()

    def announce(self) -> None:
        """Send each front end the members, where they have changed for it."""
        self._members = self._cluster.members()
        serving = {member.rank for member in self._members if member.state == "serving"}
        for rank in self._reserved.keys() - serving:  # it has died, or is to end
            self._cluster.lend(rank, is_lent=False)
            del self._reserved[rank]
        for session in self.attached:
            members = self._members_for(session.index)
            if members != session.members:
                away = _away(members)
                session.draining = (session.draining & away) | (away - _away(session.members))
                session.members = members
                session.send(members)
        self._note_change()

    def _members_for(self, index: int) -> Membership:
        """Return the members as a front end sees them: a replica that another one has reserved is "reserved"."""
        if not self._reserved:
            return Membership(self._members)
        reserved = {rank for rank, holder in self._reserved.items() if holder != index}
        return Membership(
            [
                msgspec.structs.replace(member, state="reserved") if member.rank in reserved else member
                for member in self._members
            ]
        )

    async def wait_drained(self, rank: int) -> None:
        """Wait until no front end has requests at a replica that was announced to drain; each has its own deadline."""
        while any(rank in session.draining for session in self.attached):
            await self._has_changed.wait()

    async def reserve(self, holder: int) -> int:
        """Have a replica that no other front end uses any more; returns its rank.

        Of several replicas one is left to the others. Cancelling gives it back.

        Args:
            holder: the index of the front end; `OWNER`: the owner's own.
        """
        while True:
            rank = self._free_rank()
            if rank is None:
                await self._has_changed.wait()
                continue
            self._reserved[rank] = holder
            try:
                self._cluster.lend(rank, is_lent=holder != OWNER)
                self.announce()
                with anyio.move_on_after(LEAVE_TIMEOUT_S):
                    await self.wait_drained(rank)
            except BaseException:
                self.release(rank, holder)
                raise
            if self._reserved.get(rank) == holder:
                return rank

    def release(self, rank: int, holder: int) -> None:
        """Let all use a replica again. Idempotent."""
        if self._reserved.get(rank) == holder:
            del self._reserved[rank]
            self._cluster.lend(rank, is_lent=False)
            self.announce()

    def _free_rank(self) -> int | None:
        """The one with the least to do, of those that serve and are not reserved, unless it is the last of several."""
        free = [each.rank for each in self._members if each.state == "serving" and each.rank not in self._reserved]
        if not free or (len(free) == 1 and self._reserved):
            return None
        counts = self._cluster.counts()
        loads = dict(zip(counts.ranks, map(sum, zip(counts.running, counts.waiting, strict=True)), strict=True))
        return min(free, key=lambda rank: loads.get(rank, 0))

    def _note_change(self) -> None:
        has_changed, self._has_changed = self._has_changed, asyncio.Event()
        has_changed.set()

    async def _publish(self) -> None:
        """Send front ends the counts where they have changed, while there are front ends."""
        while True:
            if not self.attached:
                self._has_front_ends.clear()
                await self._has_front_ends.wait()
            self._look()
            for session in self.attached:
                if session.counts is not self._counts and not session.is_behind:
                    session.counts = self._counts
                    session.send(self._counts)
            await anyio.sleep(PUBLISH_INTERVAL_S)

    def _look(self) -> None:
        counts = self._cluster.counts()
        if counts != self._counts:
            self._counts = counts

    # Front ends

    def begin_session(self, arrival: Arrival) -> tuple[FrontEndSession, AttachedToCluster]:
        self.announce()
        self._look()
        self._has_front_ends.set()
        members = self._members_for(arrival.number)
        cluster, asdict = self._cluster, msgspec.structs.asdict
        attached = AttachedToCluster(
            version=wire.PROTOCOL_VERSION,
            index=arrival.number,
            config=asdict(cluster.config),
            options=asdict(cluster.options),
            members=members,
            counts=self._counts,
            pair_path=cluster.pair_path,
        )
        return FrontEndSession(arrival, members, self._counts), attached

    async def act_on(self, session: FrontEndSession, body: Any) -> None:
        match body:
            case Drained():
                session.draining.discard(body.rank)
                self._note_change()
            case _:
                raise WireError(f"a {type(body).__name__} in the middle of a session")

    def on_left(self, session: FrontEndSession) -> None:
        for rank in [rank for rank, holder in self._reserved.items() if holder == session.index]:
            self.release(rank, session.index)
        self._note_change()

    def unpack_call(self, raw: msgspec.Raw) -> ClusterCall:
        return wire.unpack(CALL_DECODER, raw, "this coordinator knows no such call")

    async def perform_call(self, session: FrontEndSession, call: ClusterCall) -> Any:
        match call:
            case Scale():
                await self._cluster.scale(call.replicas)
            case RestartReplicas():
                await self._cluster.restart()
            case Reserve():
                rank = await self.reserve(session.index)
                if session.is_over:
                    self.release(rank, session.index)
                return rank
            case Release():
                self.release(call.rank, session.index)
        return None


def _away(members: Membership) -> set[int]:
    """Ranks that a front end is to leave."""
    return {member.rank for member in members.members if member.state in ("draining", "reserved")}
