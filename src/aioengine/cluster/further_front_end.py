"""`ConnectedCluster`: the replicas of a cluster that another process owns, for a further front end."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any, TypeVar

import anyio

from aioengine.cluster import coordinator_messages as m
from aioengine.cluster.cluster_core import ClusterCore
from aioengine.cluster.placing import Reservation
from aioengine.cluster.replica import Replica, ReplicaState, for_each
from aioengine.config import ReplicaOptions
from aioengine.core.in_process import clock_of
from aioengine.core.protocol import Cluster, CoreHooks, ReplicaStatus
from aioengine.errors import AioEngineError, EngineClosed, EngineDead, WireError
from aioengine.models.folder import ModelFolder
from aioengine.processes.progress import OnProgress
from aioengine.transport import wire
from aioengine.transport.backends import Connected, known_fields, read_config, refuse_function
from aioengine.transport.link import ControlCalls, Link, death_of
from aioengine.transport.security import ClientKeys, KeyPair

T = TypeVar("T")

logger = logging.getLogger("aioengine")

ACKNOWLEDGE_EVERY = 16
"""Messages of the coordinator's."""

RECONNECT_S = 0.05
"""Before a replica whose connection has ended is looked for again; doubles to 30."""

AWAY = ("draining", "reserved")
"""States of members that this side is to leave."""

SAME_AGAIN_S = 5.0
"""After so long a replica that serves on, and to which the connection was lost, is connected to again."""


class ConnectedCluster:
    """A `Backend` over replicas that another process owns, and a `Cluster` that asks their owner.

    Args:
        address: of the owner's coordinator.
        model, timeout_s: as for `Engine.connect`.
    """

    core: ClusterCore

    def __init__(self, address: str, hooks: CoreHooks, *, model: str | None, timeout_s: float) -> None:
        self._address = address
        self._hooks = hooks
        self._connect_options: dict[str, Any] = {"model": model, "keys": None, "client": None, "timeout_s": timeout_s}
        self._timeout_s = timeout_s
        self._link = Link(hooks.worker, m.FromCoordinator)
        self._calls = ControlCalls(self._link)
        self._members: dict[int, m.Member] = {}
        self._opened: dict[int, Replica] = {}
        """The replicas that this side has begun with."""
        self._tried: dict[int, tuple[str, int]] = {}
        """Address and number of restarts of each replica, as it was connected to last."""
        self._busy: set[int] = set()
        """Ranks whose replicas are being drained here, or ended."""
        self._drained: set[int] = set()
        """Ranks that drain, and at which we have reported to have nothing."""
        self._tasks: anyio.abc.TaskGroup | None = None

    @property
    def cluster(self) -> Cluster:
        return self

    # As a backend

    async def find_model(self) -> ModelFolder:
        attached = await self._link.attach(
            self._address, None, m.AttachedToCluster, name="a front end of a cluster", timeout_s=self._timeout_s
        )
        known = known_fields(ReplicaOptions, attached.options)
        options = ReplicaOptions(**known | {"restart_backoff_s": RECONNECT_S})
        clock, config = clock_of(asyncio.get_running_loop()), read_config(attached.config)
        self.core = ClusterCore(config, options, self._hooks, clock, is_owner=False, offset=1 + attached.index)
        self._counts = attached.counts
        self._pair_path = attached.pair_path
        self._note_members(attached.members)
        with anyio.move_on_after(self._timeout_s):
            return await self._find_any()
        raise EngineDead(f"no replica of the cluster at {self._address} serves within {self._timeout_s:g} s")

    async def _find_any(self) -> ModelFolder:
        """Connect to all replicas that serve, and wait for one at least."""
        found: list[ModelFolder] = []

        async def find(rank: int) -> None:
            replica = self._opened[rank] = self._make(rank)
            try:
                found.append(await replica.find_model())
            except EngineDead as error:  # just now; it is awaited once this side runs
                logger.warning("replica %d cannot be reached: %s", rank, error)
                del self._opened[rank]
                await replica.aclose()

        while True:
            await for_each([rank for rank in self._members if self._serving(rank)], find)
            if found:
                return found[0]
            await self._hear()
            if self.core.death is not None:
                raise self.core.death.anew()

    async def open(self, on_progress: OnProgress | None = None) -> None:
        for replica in self._opened.values():
            await replica.open()
            self.core.add_replica(replica)
        self.core.on_change = self._follow
        self.core.placing.reservation = Reservation(
            lambda: self._call(m.Reserve()), lambda rank: self._call(m.Release(rank)), lambda: False
        )
        self.core.beside.append(self._run)

    async def apply_model(self, function: Callable[[Any], T]) -> list[T]:
        return await refuse_function(self, function)

    async def aclose(self) -> None:
        try:
            await self._link.aclose()
        finally:
            for replica in self._replicas():
                await replica.aclose()

    def kill(self) -> None:
        for replica in self._replicas():
            replica.kill()

    def abandon(self) -> None:
        self._link.abandon()
        for replica in self._replicas():
            replica.abandon()

    def _replicas(self) -> list[Replica]:
        return list((self._opened | (self.core.replicas if hasattr(self, "core") else {})).values())

    # As a cluster

    def statuses(self) -> list[ReplicaStatus]:
        """The replicas as their owner sees them: loads count all front ends, ``num_moved`` only this one."""
        replicas = self.core.replicas
        return [
            member.status(self._counts, num_moved=replicas[rank].num_moved if rank in replicas else 0)
            for rank, member in sorted(self._members.items())
        ]

    async def scale(self, replicas: int) -> None:
        m.check_count(replicas)
        await self._call(m.Scale(replicas))

    async def restart(self) -> None:
        await self._call(m.RestartReplicas())

    async def _call(self, call: m.ClusterCall) -> Any:
        self.core.check_accepting()
        return await self._calls.call(call)

    # Messages of the coordinator

    async def _run(self) -> None:
        """Follow the members until this side ends, or the coordinator does; all requests hear that."""
        try:
            async with anyio.create_task_group() as self._tasks:
                self._follow()
                while not self.core.is_stopped:
                    await self._hear()
                self._tasks.cancel_scope.cancel()
        finally:
            self._tasks = None
            self._calls.end_all(self._make_end_error)

    async def _hear(self) -> None:
        """Wait for the coordinator's next messages, or its end, and act on them."""
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self._watch_connection)
            messages = await self._link.channel.receive()
            self._take_batch(messages)
            if self._link.monitor.is_gone and not messages:
                self.core.die(EngineDead(f"the process that owns the replicas ({self._address}) is gone"))
            tasks.cancel_scope.cancel()

    async def _watch_connection(self) -> None:
        while not self._link.monitor.is_gone:
            await self._link.monitor.look()
        self._link.channel.wake()  # what came before the end is read first

    def _make_end_error(self) -> AioEngineError:
        return self.core.death.anew() if self.core.death is not None else EngineClosed("the engine is closed")

    def _take_batch(self, messages: list[list[bytes]]) -> None:
        """Act on what has come. At once: what a cancelled task has received and not read would be lost."""
        for frames in messages:
            try:
                body = self._link.reader.read(frames)
            except WireError as error:
                logger.warning("refused a message of the coordinator's: %s", error)
                if isinstance(error, wire.OutOfTurn) and error.is_gap:
                    self.core.die(EngineDead(f"messages of the coordinator were lost: {error}"))
                continue
            if self._link.reader.due % ACKNOWLEDGE_EVERY == 0:
                self._link.send(wire.Acknowledge(self._link.reader.due - 1))
            self._act(body)

    def _act(self, body: wire.WireMessage) -> None:
        match body:
            case m.Membership():
                self._note_members(body)
                self._follow()
                self.core.placing.dispatch()
                self.core.conditions.check()
            case m.Counts():
                self._counts = body
                self.core.conditions.check()
            case wire.Returned():
                self._calls.on_returned(body)
            case wire.Shutdown():
                self.core.die(death_of(body.fault))

    # The members

    def _note_members(self, members: m.Membership) -> None:
        self._members = {member.rank: member for member in members.members}
        self._drained &= {member.rank for member in members.members if member.state in AWAY}
        for rank, replica in self.core.replicas.items():
            replica.is_lent = self._is_away(rank)

    def _follow(self) -> None:
        """Have a replica here for each member, and none that has left; use none that drains. Idempotent."""
        if self._tasks is None or self.core.is_stopped:
            return
        for rank, member in self._members.items():
            if rank not in self.core.replicas:
                self.core.add_replica(self._make(rank))
            elif member.state in AWAY and (rank not in self._drained or self.core.replicas[rank].is_serving):
                self._begin(self._drain, rank)
        for rank in list(self.core.replicas):
            if rank not in self._members:
                self._begin(self._remove, rank)

    def _begin(self, task: Callable[[Replica], Awaitable[None]], rank: int) -> None:
        """Do so with a replica, unless something is done with it already; then look again."""
        assert self._tasks is not None
        replica = self.core.replicas[rank]

        async def run() -> None:
            await task(replica)
            self._busy.discard(rank)
            self._follow()

        if rank not in self._busy:
            self._busy.add(rank)
            self._tasks.start_soon(run)

    def _make(self, rank: int) -> Replica:
        def make_backend(rank: int, hooks: CoreHooks) -> _MemberBackend:
            return _MemberBackend(lambda: self._wait_serving(rank), hooks, self._connect_options, self._pair_path)

        replica = Replica(rank, make_backend, self.core, self._hooks)
        replica.is_lent = self._is_away(rank)
        return replica

    def _is_away(self, rank: int) -> bool:
        """Whether this side is to leave a replica: it sends nothing there, also where a connection is just made."""
        return rank not in self._members or self._members[rank].state in AWAY

    def _serving(self, rank: int) -> m.Member | None:
        member = self._members.get(rank)
        return member if member is not None and member.state == "serving" and member.address else None

    async def _wait_serving(self, rank: int) -> m.Member:
        """Wait until a replica serves, as another one than the connection was lost to; returns it.

        Raises:
            EngineDead: this side ends.
        """

        def is_another() -> bool:
            member = self._serving(rank)
            return member is not None and (member.address, member.num_restarts) != self._tried.get(rank)

        with anyio.move_on_after(SAME_AGAIN_S):
            while not (is_another() or self.core.is_stopped):
                await self.core.when(is_another)
        # What was so when the wait ended may be so no more.
        while (member := self._serving(rank)) is None and not self.core.is_stopped:
            await self.core.when(lambda: self._serving(rank) is not None)
        if member is None:
            raise EngineDead("this front end has ended")
        self._tried[rank] = (member.address, member.num_restarts)
        return member

    async def _drain(self, replica: Replica) -> None:
        member = self._members.get(replica.rank)
        is_reserved = member is not None and member.state == "reserved"
        self.core.move(replica, await replica.drain(0.0 if is_reserved else self.core.options.drain_timeout_s))
        if is_reserved:
            self._tried.pop(replica.rank, None)  # the same one is to be used again
        self._drained.add(replica.rank)
        self._link.send(m.Drained(replica.rank))

        async def reconnect() -> None:
            """Leave a replica that is about to end, and come back when another one serves in its place."""
            if replica.state is ReplicaState.DRAINING:  # else it has ended meanwhile
                with contextlib.suppress(EngineDead):  # it was removed
                    await replica.restart()

        if replica.state is ReplicaState.DRAINING and self._tasks is not None:
            self._tasks.start_soon(reconnect)

    async def _remove(self, replica: Replica) -> None:
        self.core.move(replica, await replica.drain(0.0))
        await replica.stop()
        self.core.remove_replica(replica)


class _MemberBackend(Connected):
    """A `ReplicaBackend` of a replica that its owner starts: it waits until that serves, and connects.

    Args:
        wait_serving: returns it.
        options: of `Connected`.
        pair_path: as `AttachedToCluster.pair_path`.
    """

    where = shared_address = server_key = ""
    """The owner reports these."""

    def __init__(
        self,
        wait_serving: Callable[[], Awaitable[m.Member]],
        hooks: CoreHooks,
        options: dict[str, Any],
        pair_path: str,
    ) -> None:
        super().__init__("", hooks, **options)
        self._wait_serving = wait_serving
        self._pair_path = pair_path

    async def find_model(self) -> ModelFolder:
        member = await self._wait_serving()
        self._address = member.address
        if member.server_key:
            pair = await self._hooks.worker.run(partial(KeyPair.load, self._pair_path), None)
            self._keys = ClientKeys(server=member.server_key.encode(), pair=pair)
        return await super().find_model()
