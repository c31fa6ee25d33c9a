"""`Coordinator`: what the process that owns a cluster's replicas tells and does for further front ends.

It tells where the replicas serve and how much they have to do, and takes calls that concern all of them. Requests and
tokens do not pass here: each front end has a link to each replica.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Any, Protocol

import anyio
import msgspec

from aioengine.cluster.messages import (
    ClusterCall,
    Counts,
    Drained,
    FromMember,
    Joined,
    Member,
    Membership,
    RestartReplicas,
    Scale,
    unpack_call,
)
from aioengine.config import EngineConfig, ReplicaOptions
from aioengine.errors import AioEngineError, WireError
from aioengine.text.worker import TextWorker
from aioengine.transport import wire
from aioengine.transport.calls import ServedCalls
from aioengine.transport.entrance import LINGER_S
from aioengine.transport.peers import Arrival, PeerServer, PeerSession
from aioengine.transport.security import ServerKeys

logger = logging.getLogger("aioengine")

PUBLISH_INTERVAL_S = 0.1
"""Least time between two messages of counts to a front end."""

MAX_UNREAD_MESSAGES = 256
MAX_UNREAD_BYTES = 64 * 2**20
"""A front end that leaves more than either unread is cut off."""

BEHIND_MESSAGES = 64
"""With so many unread it is told no more counts: what is left are changes of members and answers to its own calls, so
that one that is stopped for minutes is not cut off."""


class Coordinated(Protocol):
    """What a coordinator asks of the cluster, on its loop."""

    @property
    def config(self) -> EngineConfig:
        """Of each replica."""

    @property
    def options(self) -> ReplicaOptions: ...

    def members(self) -> list[Member]:
        """The replicas, by rank."""

    def counts(self) -> Counts:
        """What they have to do, as far as it is known."""

    async def scale(self, replicas: int) -> None:
        """As `Engine.scale`."""

    async def restart(self) -> None:
        """As `Engine.restart_replicas`."""

    def last_words(self) -> AioEngineError:
        """Why it has ended."""


class MemberSession(PeerSession):
    """A front end that is attached to a coordinator."""

    def __init__(self, arrival: Arrival, counts: Counts) -> None:
        super().__init__(arrival, max_unread_messages=MAX_UNREAD_MESSAGES, max_unread_bytes=MAX_UNREAD_BYTES)
        self.counts = counts
        """The last that it was told."""
        self.draining: set[int] = set()
        """Ranks that drain, and that it may still have requests at."""

    @property
    def is_behind(self) -> bool:
        return self.num_unread >= BEHIND_MESSAGES


class Coordinator:
    """Serves the front ends of a cluster.

    Args:
        cluster: whose members are told; it calls `announce` when they change.
        address: where front ends may join: ``ipc:///path`` or ``tcp://host:port``; port 0 is any.
        keys: of the clients that may connect, for addresses that other machines can reach.
    Attributes:
        peers: its front ends; its ``address`` is as it is reached, once `open` has returned.
    """

    def __init__(
        self, cluster: Coordinated, address: str, *, worker: TextWorker, keys: ServerKeys | None = None
    ) -> None:
        self._cluster = cluster
        self.peers: PeerServer[MemberSession] = PeerServer(
            address,
            what="coordinator",
            keys=keys,
            worker=worker,
            kinds=FromMember,
            begin=self._begin,
            act=self._act,
            on_left=self._on_left,
            max_unsent=3 * MAX_UNREAD_MESSAGES,
        )
        self._calls: ServedCalls[MemberSession, ClusterCall] = ServedCalls(unpack_call, self._perform)
        self._members = Membership([])
        self._counts = Counts([], [], [], [], [])
        self._has_front_ends = asyncio.Event()
        self._has_drained = asyncio.Event()
        """Set when a front end has nothing at a replica any more."""

    async def open(self) -> None:
        """Bind to the address. Front ends that come now are answered by `serve`.

        Raises:
            ConfigError: it cannot be had.
        """
        await self.peers.open()

    async def serve(self) -> None:
        """Serve front ends until cancelled; then all of them hear the end, and everything is closed."""
        try:
            async with anyio.create_task_group() as self._tasks:
                self._tasks.start_soon(self.peers.receive)
                self._tasks.start_soon(self.peers.watch)
                self._tasks.start_soon(self._publish)
        finally:
            self.peers.end_all(self._cluster.last_words())
            with anyio.CancelScope(shield=True), anyio.move_on_after(2 * LINGER_S):
                await self.peers.aclose()

    async def aclose(self) -> None:
        """Close the sockets; idempotent. `serve` does it by itself."""
        await self.peers.aclose()

    def abandon(self) -> None:
        """Close without a word or a wait; from any thread once the loop is gone."""
        self.peers.abandon()

    def announce(self) -> None:
        """Tell all front ends the members, if they have changed."""
        members = Membership(self._cluster.members())
        if members == self._members:
            return
        draining = _draining(members) - _draining(self._members)
        self._members = members
        for session in self.peers.attached:
            session.draining = (session.draining & _draining(members)) | draining
            session.send(members)
        self._note_drained()

    async def wait_drained(self, rank: int) -> None:
        """Wait until no front end has requests at a replica that was announced to drain; each has its own deadline."""
        while any(rank in session.draining for session in self.peers.attached):
            await self._has_drained.wait()

    def _note_drained(self) -> None:
        has_drained, self._has_drained = self._has_drained, asyncio.Event()
        has_drained.set()

    async def _publish(self) -> None:
        """Tell front ends the counts where they have changed, while there are front ends."""
        while True:
            if not self.peers.attached:
                self._has_front_ends.clear()
                await self._has_front_ends.wait()
            self._look()
            for session in self.peers.attached:
                if session.counts is not self._counts and not session.is_behind:
                    session.counts = self._counts
                    session.send(self._counts)
            await anyio.sleep(PUBLISH_INTERVAL_S)

    def _look(self) -> None:
        counts = self._cluster.counts()
        if counts != self._counts:
            self._counts = counts

    # Front ends

    def _begin(self, arrival: Arrival) -> tuple[MemberSession, Joined]:
        self.announce()
        self._look()
        self._has_front_ends.set()
        cluster, asdict = self._cluster, msgspec.structs.asdict
        joined = Joined(
            version=wire.PROTOCOL_VERSION,
            index=arrival.number,
            config=asdict(cluster.config),
            options=asdict(cluster.options),
            members=self._members,
            counts=self._counts,
        )
        return MemberSession(arrival, self._counts), joined

    async def _act(self, session: MemberSession, body: Any) -> None:
        match body:
            case wire.CallControl():
                self._calls.begin(self._tasks, session, body)
            case wire.CancelCall():
                self._calls.cancel(session, body.call_id)
            case Drained():
                session.draining.discard(body.rank)
                self._note_drained()
            case _:
                raise WireError(f"a {type(body).__name__} in the middle of a session")

    def _on_left(self, session: MemberSession) -> None:
        self._note_drained()

    async def _perform(self, session: MemberSession, call: ClusterCall) -> Any:
        match call:
            case Scale():
                await self._cluster.scale(call.replicas)
            case RestartReplicas():
                await self._cluster.restart()
        return None


def _draining(members: Membership) -> set[int]:
    return {member.rank for member in members.members if member.state == "draining"}
