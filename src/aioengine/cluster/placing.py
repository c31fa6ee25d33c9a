"""Gives sequences to replicas, and keeps the *pending* ones, which were accepted and are at no replica."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Mapping
from typing import NamedTuple
from weakref import WeakKeyDictionary

import anyio

from aioengine.cluster.balancer import Balancer, Candidate
from aioengine.cluster.recovery import Recovery
from aioengine.cluster.replica import Replica, ReplicaCore
from aioengine.config import EngineConfig, ReplicaOptions
from aioengine.core.control import ExecuteDummyBatch
from aioengine.core.listener import Conditions
from aioengine.errors import AioEngineError, EngineClosed, EngineDead
from aioengine.scheduler.sequence import Sequence

logger = logging.getLogger("aioengine")

MAX_SILENT_BEATS = 3
"""A replica that was not heard of for longer gets nothing while there are others."""

LOOK_S = 0.1
"""Between two looks at the pending sequences, where no step of a replica makes room for them."""


CONNECT_S = 10.0
"""For a front end to have a connection to the replica that it has reserved."""


class Reservation(NamedTuple):
    """How this front end has a replica for itself, of several front ends that use the same replicas.

    A front end knows its own sequences alone: for an isolated one it asks the cluster's owner for a replica that the
    other front ends leave.
    """

    reserve: Callable[[], Awaitable[int]]
    """Has a replica that no other front end uses, and returns its rank; raises AioEngineError where none can be had."""
    release: Callable[[int], Awaitable[None]]
    """Lets them use it again."""
    is_single: Callable[[], bool]
    """Whether this front end is the only one now."""


class Placing:
    """Gives sequences to replicas, and keeps those pending that none takes now.

    Args:
        replicas: by rank, as they are at any time.
        config: of each replica.
        end: ends a sequence that no replica has, by the error.
    Attributes:
        pending: sequences at no replica, with the time since when each waits. They leave by the requests' priorities,
            unless the scheduler is ``fcfs``, and of equal ones the first that arrived goes first.
        recovery: which of them must be isolated.
        core_of: the core that has a sequence, or had it last.
        start_soon: starts a task beside the replicas'.
        balancer: which of several replicas is the best one.
        reservation: None: there are no other front ends.
    """

    def __init__(
        self,
        replicas: Mapping[int, Replica],
        options: ReplicaOptions,
        clock: Callable[[], float],
        end: Callable[[Sequence, AioEngineError], None],
        *,
        config: EngineConfig,
        offset: int,
    ) -> None:
        self.pending: dict[Sequence, float] = {}
        self.balancer = Balancer(options.balance, block_size=config.block_size, offset=offset)
        self.reservation: Reservation | None = None
        self.recovery = Recovery(options.max_attempts)
        self.core_of: WeakKeyDictionary[Sequence, ReplicaCore] = WeakKeyDictionary()
        self._replicas = replicas
        self._options = options
        self._clock = clock
        self._end = end
        self._has_priorities = config.scheduler != "fcfs"
        self._max_silence_s = MAX_SILENT_BEATS * config.heartbeat_interval_s
        self._queue: deque[Sequence] = deque()
        """All that are pending, and some that have left it, in the order in which they are to leave."""
        self._is_sorted = True
        self._implicated: list[Sequence] = []
        """Pending sequences that may have to be isolated."""
        self._isolated_at: dict[int, tuple[Sequence, ReplicaCore]] = {}
        """By rank, the sequence that runs, or is to run, isolated there, and the core."""
        self._emptying: set[int] = set()
        """Ranks whose steps in flight are waited for, before an isolated sequence runs there."""
        self.start_soon: Callable[..., object] = lambda *_: None
        self._has_pending = asyncio.Event()
        self._reserved: int | None = None
        """The rank of the replica that this front end has for itself."""
        self._lacks_replica = asyncio.Event()
        """An isolated sequence waits for a replica that is to be reserved."""
        self._is_held = False
        self._is_full = False
        """Whether, at the last look, no replica took what may be anywhere."""
        self._served_at = -math.inf
        """When a replica served last, while there was something pending."""

    @property
    def num_never_run(self) -> int:
        """Sequences pending that never had a row."""
        return sum(1 + len(sequence.children) for sequence in self.pending if not sequence.has_run)

    @property
    def has_isolated(self) -> bool:
        """Whether there are sequences that must be isolated."""
        return bool(self._isolated()) or any(self._runs_isolated(each) for each in self._replicas.values())

    def add(self, sequence: Sequence) -> None:
        """Give a new sequence to a replica; where none takes it now, it waits for one."""
        if self.pending or not self._place(sequence):
            self.put([sequence])
            if not self._is_full or len(self.pending) == 1:  # else it waits behind others, however many come
                self.dispatch()

    def add_again(self, sequences: Iterable[Sequence]) -> None:
        """Sequences of a replica that is lost wait for another one."""
        self.put(sequences)
        self.dispatch()

    def put(self, sequences: Iterable[Sequence], since: float | None = None) -> None:
        """Have these wait pending, since now or that time; `dispatch` is to follow."""
        since = self._clock() if since is None else since
        for sequence in sequences:
            self.pending[sequence] = since
            self._is_sorted &= not self._queue or self._turn_of(self._queue[-1]) <= self._turn_of(sequence)
            self._queue.append(sequence)
            if self.recovery.is_implicated(sequence):
                self._implicated.append(sequence)

    def clear(self) -> None:
        """All that is pending has ended."""
        self.pending.clear()
        self._queue.clear()
        self._implicated.clear()

    def dispatch(self) -> None:
        """Give what is pending to replicas, as far as they take it."""
        self._is_full = False
        for sequence in self._isolated():  # first: what they drive out comes behind
            if sequence in self.pending:
                self._take_out(sequence)
        if not self._is_sorted:
            self._queue, self._is_sorted = deque(sorted(self.pending, key=self._turn_of)), True
        isolated: list[Sequence] = []
        while self._queue:
            sequence = self._queue.popleft()
            if sequence not in self.pending:  # it has left meanwhile
                continue
            if self.recovery.must_be_isolated(sequence):
                isolated.append(sequence)
            elif not self._take_out(sequence):
                self._is_full = True  # none takes what comes after it, either
                self._queue.appendleft(sequence)
                break
        self._queue.extendleft(reversed(isolated))
        if self.pending:
            self._has_pending.set()

    def _take_out(self, sequence: Sequence) -> bool:
        """Give it to a replica, or end what none can be sent; False if it stays pending."""
        try:
            if not self._place(sequence):
                return False
        except AioEngineError as error:
            del self.pending[sequence]
            self._end(sequence, error)
        else:
            del self.pending[sequence]
        return True

    def _isolated(self) -> list[Sequence]:
        """Pending sequences that must be isolated now, by their turn."""
        self._implicated = [sequence for sequence in self._implicated if sequence in self.pending]
        return sorted(filter(self.recovery.must_be_isolated, self._implicated), key=self._turn_of)

    def _turn_of(self, sequence: Sequence) -> tuple[int, float]:
        """Its place among all pending; the smaller goes first."""
        return sequence.request.priority if self._has_priorities else 0, sequence.arrived_at

    def hold(self) -> None:
        """Give nothing to a replica until what is sent to all in this turn of the loop and the next is on its way."""
        loop = asyncio.get_running_loop()

        def release() -> None:
            self._is_held = False
            self.dispatch()

        self._is_held = True
        loop.call_soon(loop.call_soon, release)

    async def watch(self) -> None:
        """End sequences that have waited too long while no replica serves; now and then place the others."""
        timeout_s = self._options.recover_timeout_s
        while True:
            await self._has_pending.wait()
            self._has_pending.clear()
            while self.pending:
                now = self._clock()
                if any(each.is_serving for each in self._replicas.values()):
                    self._served_at = now
                waiting = [(sequence, now - max(since, self._served_at)) for sequence, since in self.pending.items()]
                for sequence in [sequence for sequence, waited_s in waiting if waited_s >= timeout_s]:
                    del self.pending[sequence]
                    reasons = "; ".join(sorted({each.reason for each in self._replicas.values() if each.reason}))
                    told = f"no replica has served for {timeout_s:g} s (recover_timeout_s): {reasons}"
                    self._end(sequence, EngineDead(told))
                self.dispatch()
                await anyio.sleep(LOOK_S)

    async def keep_reserving(self, conditions: Conditions) -> None:
        """Reserve a replica whenever an isolated sequence lacks one, until no sequence is isolated, or it has died."""
        while True:
            await self._lacks_replica.wait()
            self._lacks_replica.clear()
            if self.has_isolated:
                try:
                    await self._use_reserved(conditions)
                except AioEngineError as error:  # the isolated sequences wait, and ask again
                    logger.warning("no replica can be had for an isolated request: %s", error)

    async def _use_reserved(self, conditions: Conditions) -> None:
        assert self.reservation is not None
        rank = await self.reservation.reserve()

        def serves() -> bool:
            return rank in self._replicas and self._replicas[rank].is_serving

        with anyio.move_on_after(CONNECT_S):  # this side may be just about to connect to it
            await conditions.add_soon(lambda: serves() or not self.has_isolated)
        try:
            self._reserved = rank
            self.dispatch()
            await conditions.add_soon(lambda: not self.has_isolated or not serves())
        finally:
            self._reserved = None
        await self.reservation.release(rank)

    def _place(self, sequence: Sequence) -> bool:
        """Add a sequence to a replica; False if there is none that takes it now."""
        if self.recovery.must_be_isolated(sequence):
            return self._place_isolated(sequence)
        num_sequences, oldest_heard_at = 1 + len(sequence.children), self._clock() - self._max_silence_s
        fitting: list[Candidate] = []
        heard: list[Candidate] = []
        for replica in self._open_replicas():  # one pass: it costs each request some µs a replica
            core = replica.core
            if core is not None and core.num_unstarted + num_sequences <= core.capacity:
                fitting.append(replica.candidate())
                if core.heard_at >= oldest_heard_at:
                    heard.append(fitting[-1])
        if not fitting:
            return False
        rank = self.balancer.choose(heard or fitting, sequence.block_hashes, sequence.request.session)
        return self._send(sequence, self._replicas[rank])

    def _place_isolated(self, sequence: Sequence) -> bool:
        """Send an implicated sequence to a replica that has nothing else, and gets nothing else while it is one.

        The sequences of that replica become pending first, and its steps in flight end. Of several replicas one is left
        to all others.
        """
        for replica in self._replicas.values():
            if self._runs_isolated(replica) and self._isolated_at[replica.rank][0] is sequence:
                if replica.is_serving and not replica.is_lent:
                    return replica.rank not in self._emptying and self._send(sequence, replica)
                del self._isolated_at[replica.rank]  # it was moved away, since the replica is to end, or was lent
        replicas = self._open_replicas()
        if len(replicas) < 2 and any(map(self._is_reserved, self._replicas.values())):
            return False
        if self.reservation is not None:
            if not self.reservation.is_single():
                replicas = [each for each in replicas if each.rank == self._reserved]
            if not replicas:
                self._lacks_replica.set()
        if not replicas:
            return False
        replica = min(replicas, key=self._unfitness)
        core = replica.core
        assert core is not None
        moved = core.take_back()
        self._isolated_at[replica.rank] = sequence, core
        if not moved:
            return self._send(sequence, replica)
        logger.info("replica %d runs %s isolated: it may have brought down others", replica.rank, sequence)
        self.put(each.sequence for each in moved)
        asyncio.get_running_loop().call_soon(self.dispatch)
        if self._options.lockstep:  # a call of one rank alone would break the group's order of steps
            return self._send(sequence, replica)
        self._emptying.add(replica.rank)
        self.start_soon(self._empty, replica.rank, core)
        return False

    async def _empty(self, rank: int, core: ReplicaCore) -> None:
        """Wait until the steps in flight at a replica have ended: a moved sequence may still bring it down there."""
        with contextlib.suppress(AioEngineError):
            await core.call(ExecuteDummyBatch())
        self._emptying.discard(rank)
        self.dispatch()

    def _unfitness(self, replica: Replica) -> tuple[bool, int]:
        """How little a replica suits an isolated sequence: whether it may have stopped, and how much it has to do."""
        assert replica.core is not None
        candidate = replica.candidate()
        is_silent = self._clock() - replica.core.heard_at > self._max_silence_s
        return is_silent, candidate.running + candidate.waiting + replica.num_sent

    def _open_replicas(self) -> list[Replica]:
        """Replicas that take sequences now."""
        if self._is_held:
            return []
        return [
            each for each in self._replicas.values() if each.is_serving and each.core and not self._is_reserved(each)
        ]

    def _is_reserved(self, replica: Replica) -> bool:
        """Whether a replica gets no sequences for now: another front end has it alone, or an isolated sequence."""
        return replica.is_lent or self._runs_isolated(replica)

    def _runs_isolated(self, replica: Replica) -> bool:
        """Whether a replica has a sequence that must still be isolated."""
        if replica.rank not in self._isolated_at:
            return False
        sequence, core = self._isolated_at[replica.rank]
        is_there = core is replica.core and core.death is None
        is_its = sequence in self.pending or self.core_of.get(sequence) is core
        if is_there and is_its and self.recovery.must_be_isolated(sequence):
            return True
        del self._isolated_at[replica.rank]
        return False

    def _send(self, sequence: Sequence, replica: Replica) -> bool:
        """False if it ends just now."""
        assert replica.core is not None
        members = (sequence, *sequence.children)
        listeners = [member.listener for member in members]
        try:
            replica.core.add(sequence, listeners, arrived_at=sequence.arrived_at)
        except (EngineDead, EngineClosed):  # its state is to follow
            return False
        for member in members:
            self.core_of[member] = replica.core
        replica.num_sent += len(listeners)
        return True
