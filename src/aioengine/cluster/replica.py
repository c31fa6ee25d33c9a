"""One replica of a cluster: an engine that is started, serves, dies, and is started again."""

from __future__ import annotations

import enum
import logging
import math
from collections.abc import Awaitable, Callable, Iterable
from typing import Protocol, TypeVar, cast

import anyio

from aioengine.cluster.balancer import Candidate
from aioengine.config import ReplicaOptions
from aioengine.core.health import Health
from aioengine.core.listener import Conditions
from aioengine.core.observers import UserCode
from aioengine.core.protocol import Backend, ClusterHooks, Core, CoreHooks, InFlightSequence, ReplicaStatus
from aioengine.errors import AioEngineError, EngineDead, describe
from aioengine.models.folder import ModelFolder
from aioengine.outputs.metrics import StepRecord
from aioengine.processes.backoff import Backoff
from aioengine.processes.progress import OnProgress
from aioengine.processes.turns import sleep_on_time
from aioengine.scheduler.scheduler import SchedulerStats

A = TypeVar("A")
T = TypeVar("T")

logger = logging.getLogger("aioengine")

MAX_BACKOFF_S = 30.0
CALL_FACTOR = 10
"""A control call may hold the device for so many times ``stall_timeout_s``."""


class ReplicaBackend(Backend, Protocol):
    """Where the engine of a replica comes from."""

    @property
    def where(self) -> str:
        """Its process or address, for a person; empty: not known yet."""

    @property
    def shared_address(self) -> str:
        """Where further front ends can connect; empty: nowhere."""

    @property
    def server_key(self) -> str:
        """The public key that it serves by there; empty: none."""


MakeBackend = Callable[[int, CoreHooks], ReplicaBackend]
"""Makes the backend of the replica of a rank, which is not opened yet: what a launcher is."""


class ReplicaState(enum.Enum):
    STARTING = "starting"
    SERVING = "serving"
    DRAINING = "draining"
    """It gets no new requests; those that it has end, or are moved."""
    BACKING_OFF = "backing off"
    """It has died, and is to be started again."""
    FAILED = "failed"
    """Too many starts in a row have failed; it is given up until `Replica.restart`."""
    STOPPED = "stopped"


S = ReplicaState
TRANSITIONS: dict[ReplicaState, set[ReplicaState]] = {
    S.STARTING: {S.STARTING, S.SERVING, S.BACKING_OFF, S.FAILED, S.STOPPED},
    S.SERVING: {S.DRAINING, S.BACKING_OFF, S.STOPPED},
    S.DRAINING: {S.SERVING, S.STARTING, S.BACKING_OFF, S.STOPPED},
    S.BACKING_OFF: {S.STARTING, S.STOPPED},
    S.FAILED: {S.STARTING, S.STOPPED},
    S.STOPPED: set(),
}


class ReplicaCore(Core, Protocol):
    """The core of a replica: `RemoteCore`."""

    heard_at: float
    is_far: bool
    """Whether it may be another machine's."""

    def die(self, death: EngineDead) -> None:
        """It is gone, or to be taken for that; what it had goes to `ClusterHooks.on_death`."""

    def take_back(self) -> list[InFlightSequence]:
        """Let go of all that it has: it ends there, and its listeners hear nothing."""


def stall_of(health: Health, timeout_s: float) -> str:
    """Why a replica is taken to have stalled; empty: it is not.

    A call, such as saving weights, may rightly be long, and is given ten times as long as a step.
    """
    if health.status == "DEAD":
        return ""
    if health.beat_age_s > timeout_s:
        return f"it has not beaten for {health.beat_age_s:.1f} s"
    if health.step_age_s > timeout_s:
        return f"its device has been at one step for {health.step_age_s:.1f} s"
    if health.idle_age_s > timeout_s:
        return f"sequences could run there, and it has launched no step for {health.idle_age_s:.1f} s"
    if health.call_age_s > CALL_FACTOR * timeout_s:
        return f"its device has been at {health.call} for {health.call_age_s:.1f} s"
    return ""


class Members(Protocol):
    """The cluster, as its replicas use it: `ClusterCore`."""

    clock: Callable[[], float]
    conditions: Conditions
    options: ReplicaOptions
    user_code: UserCode

    def check(self, rank: int, core: ReplicaCore) -> None:
        """Raise ConfigError if an engine cannot stand in for the others."""

    def on_state(self, replica: Replica) -> None:
        """Its state is another one."""

    def on_record(self, replica: Replica, record: StepRecord) -> None:
        """A step of its has been applied."""

    def on_death(self, replica: Replica, in_flight: list[InFlightSequence], reason: str) -> None:
        """It has died, and had these."""

    def move(self, replica: Replica, in_flight: list[InFlightSequence]) -> None:
        """It lives, and these are to go on elsewhere."""

    async def restore(self, core: ReplicaCore) -> None:
        """Bring a replica that was started again to the state of the others: pauses, weights.

        Raises:
            AioEngineError: it cannot be.
        """


class Replica:
    """A member of a cluster.

    Args:
        rank: its place among all.
        make_backend: called for each start.
        hooks: of the cluster's own backend.
        folder: as `ClusterHooks.folder`.
        max_restarts: as `ReplicaOptions.max_restarts`.
    Attributes:
        state, reason: the reason is that of its last death or failure to start.
        core: of the engine that serves now; None before the first start.
        num_restarts: starts after the first one.
        num_sent: sequences that were sent to it since its last report.
        num_moved: sequences that went on at another replica.
        is_lent: whether another front end has it alone, or its owner is to end it: it gets no sequences from here.
    """

    def __init__(
        self,
        rank: int,
        make_backend: MakeBackend,
        members: Members,
        hooks: CoreHooks,
        *,
        folder: str | None = None,
        max_restarts: float = math.inf,
    ) -> None:
        self.rank = rank
        self.state = ReplicaState.STARTING
        self.reason = ""
        self.core: ReplicaCore | None = None
        self.num_restarts = 0
        self.num_sent = 0
        self.num_moved = 0
        self.is_lent = False
        self._make_backend = make_backend
        self._members = members
        self._max_restarts = max_restarts
        self._hooks = hooks._replace(
            cluster=ClusterHooks(
                conditions=members.conditions,
                user_code=members.user_code,
                on_record=self._on_record,
                on_death=self._on_core_death,
                folder=folder,
                stall_timeout_s=members.options.stall_timeout_s,
            )
        )
        self._candidate: Candidate | None = None
        self._last_stats: SchedulerStats | None = None
        self._counts = (0, 0)
        """Inputs of the candidate: sequences sent since the last report, and those without a row."""
        self._backend: ReplicaBackend | None = None
        self._is_open = False
        """Whether an engine is there that `_serve` can serve."""
        self._has_been_open = False
        self._next_state: ReplicaState | None = None
        """The state that a call asks for."""
        self._scope = anyio.CancelScope()
        self._serving_since = math.nan
        self._num_failures = 0
        self._backoff = Backoff(members.options.restart_backoff_s, MAX_BACKOFF_S)
        self._pause_s = 0.0
        """Before its next start."""

    def __repr__(self) -> str:
        return f"<Replica {self.rank} {self.state.value}>"

    # What it has

    @property
    def is_serving(self) -> bool:
        return self.state is ReplicaState.SERVING

    @property
    def is_coming(self) -> bool:
        """Whether it serves, or will again."""
        return self.state not in (ReplicaState.FAILED, ReplicaState.STOPPED)

    def candidate(self) -> Candidate:
        """Its load, for the choice of a replica: made once for each report and each sequence that is sent there."""
        assert self.core is not None
        stats, num_unstarted = self.core.stats(), self.core.num_unstarted
        counts = (self.num_sent, num_unstarted)
        if self._candidate is None or stats is not self._last_stats or counts != self._counts:
            waiting = stats.waiting + stats.blocked
            self._last_stats, self._counts = stats, counts
            self._candidate = Candidate(
                rank=self.rank,
                running=stats.running,
                waiting=waiting,
                free_blocks=stats.free_blocks,
                num_blocks=stats.num_blocks,
                max_num_seqs=self.core.config.max_num_seqs,
                # What was on its way when the last report was made is not in that.
                num_sent=max(self.num_sent, num_unstarted - waiting),
            )
        return self._candidate

    @property
    def shared_address(self) -> str:
        """Where further front ends can connect; empty: nowhere, or not now."""
        serves = self.state in (ReplicaState.SERVING, ReplicaState.DRAINING)
        return self._backend.shared_address if serves and self._backend is not None else ""

    @property
    def server_key(self) -> str:
        """As `ReplicaBackend.server_key`."""
        return self._backend.server_key if self._backend is not None else ""

    def status(self) -> ReplicaStatus:
        stats = self.core.stats() if self.core is not None and self.core.death is None else None
        return ReplicaStatus(
            rank=self.rank,
            state=self.state.value,
            reason="" if self.is_serving else self.reason,
            num_restarts=self.num_restarts,
            where=self._backend.where if self._backend is not None else "",
            running=stats.running if stats else 0,
            waiting=stats.waiting + stats.blocked if stats else 0,
            free_blocks=stats.free_blocks if stats else 0,
            num_blocks=stats.num_blocks if stats else 0,
            num_moved=self.num_moved,
        )

    # Its life

    async def find_model(self) -> ModelFolder:
        """Begin the first start; as `Backend.find_model`."""
        self._backend = self._make_backend(self.rank, self._hooks)
        return await self._backend.find_model()

    async def open(self, on_progress: OnProgress | None = None) -> None:
        """Load the model, or reach an engine that has; `run` brings it to the state of the others then, and serves.

        Raises:
            ModelLoadError, ConfigError, EngineDead: it cannot be, or it cannot stand in for the others.
        """
        assert self._backend is not None
        await self._backend.open(on_progress)
        core = cast(ReplicaCore, self._backend.core)
        self._members.check(self.rank, core)
        self.core = core
        self._is_open = self._has_been_open = True

    def begin_serving(self) -> None:
        """One of the first, whose state is that of all: take requests at once, which `run` will serve."""
        assert self.core is not None
        # Nothing was read while others were still starting, which is no silence of its own.
        self.core.heard_at = self._members.clock()
        self._become(ReplicaState.SERVING)

    async def wait_until_serving(self) -> None:
        """Wait until it serves.

        Raises:
            EngineDead: it does not, for the time being or for good.
        """
        is_over = (ReplicaState.SERVING, ReplicaState.BACKING_OFF, ReplicaState.FAILED, ReplicaState.STOPPED)
        await self._members.conditions.add(lambda: self._next_state is None and self.state in is_over)
        if not self.is_serving:
            raise EngineDead(f"replica {self.rank} does not serve: {self.reason or 'the engine has ended'}")

    async def run(self) -> None:
        """Serve, and start again after each death, until it is stopped."""
        while self.state is not ReplicaState.STOPPED:
            with anyio.CancelScope() as self._scope:
                if self._next_state is None:
                    await self._go_on()
            if self._next_state is not None:
                await self._end(is_dead=False)
                next_state, self._next_state = self._next_state, None
                self._become(next_state)

    async def drain(self, timeout_s: float) -> list[InFlightSequence]:
        """Take no more requests, and wait until those that it has are over.

        Returns:
            what is left after ``timeout_s`` seconds, for other replicas.
        """
        core = self.core
        if core is None or not self.is_serving:
            return []
        self._become(ReplicaState.DRAINING)
        with anyio.move_on_after(timeout_s):
            await core.when(lambda: core.is_drained)
        return core.take_back() if self.state is ReplicaState.DRAINING else []

    def serve_again(self) -> None:
        """After `drain`, or after that was cancelled."""
        if self.state is ReplicaState.DRAINING:
            self._become(ReplicaState.SERVING)

    async def stop(self) -> None:
        """End for good; wait until it is closed. What it still has is moved."""
        self._ask_to_become(ReplicaState.STOPPED)
        await self._members.conditions.add(lambda: self.state is ReplicaState.STOPPED)

    async def restart(self) -> None:
        """End, and start again; wait until it serves. What it still has is moved.

        Raises:
            EngineDead: it could not be started again, for the time being or for good; or it was stopped.
        """
        if self.state is ReplicaState.STOPPED:
            raise EngineDead(f"replica {self.rank} was stopped")
        self._ask_to_become(ReplicaState.STARTING)
        self.core = None
        await self.wait_until_serving()

    async def aclose(self) -> None:
        """Close all that it has opened, in any state. Idempotent."""
        if self._backend is not None:
            await self._backend.aclose()

    def kill(self) -> None:
        """As `Backend.kill`."""
        if self._backend is not None:
            self._backend.kill()

    def abandon(self) -> None:
        """As `Backend.abandon`."""
        if self._backend is not None:
            self._backend.abandon()

    def _ask_to_become(self, state: ReplicaState) -> None:
        if self.is_serving:  # it died while it was drained, and is back
            assert self.core is not None
            self._become(ReplicaState.DRAINING)
            self._members.move(self, self.core.take_back())
        self._next_state = state
        self._scope.cancel()

    def _become(self, state: ReplicaState, in_flight: list[InFlightSequence] | None = None) -> None:
        assert state in TRANSITIONS[self.state], f"{self} cannot become {state.value}"
        self.state = state
        if in_flight is not None:  # before conditions are checked: else it seems that nothing is left to do
            self._members.on_death(self, in_flight, self.reason)
        self._members.on_state(self)
        self._members.conditions.check()

    async def _go_on(self) -> None:
        """Do what its state asks for, up to the next state."""
        if self.state is ReplicaState.BACKING_OFF:
            await anyio.sleep(self._pause_s)
            self._become(ReplicaState.STARTING)
        elif self.state is ReplicaState.STARTING:
            await (self._serve() if self._is_open else self._start())
        elif self.state is ReplicaState.FAILED:
            await anyio.sleep_forever()  # until `restart`
        else:
            await self._serve()

    async def _start(self) -> None:
        """Start it again, or for the first time where it was not there."""
        self.num_restarts += self._has_been_open
        try:
            await self.find_model()
            await self.open()
        except Exception as error:
            await self._on_failed(error)

    async def _on_failed(self, error: Exception) -> None:
        """It did not start. Of files and plugins the error may be any; it is this replica's alone."""
        self.reason = describe(error)
        self._pause_s = self._backoff.failed(0.0)
        self._num_failures += 1
        is_last = self._num_failures > self._max_restarts
        # A replica that stays away is logged less and less often.
        log = logger.error if is_last or self._num_failures.bit_count() == 1 else logger.debug
        log(
            "replica %d did not start (%d in a row%s): %s",
            self.rank,
            self._num_failures,
            ", given up" if is_last else "",
            self.reason,
            exc_info=None if isinstance(error, AioEngineError) else error,
        )
        await self._end(is_dead=True)
        self._become(ReplicaState.FAILED if is_last else ReplicaState.BACKING_OFF)

    async def _serve(self) -> None:
        """Serve until it dies."""
        core = self.core
        assert core is not None
        self._serving_since = self._members.clock()
        failure: Exception | None = None

        async def enter() -> None:
            nonlocal failure
            try:
                await self._members.restore(core)
            except Exception as error:
                failure = error
                tasks.cancel_scope.cancel()
            else:
                if core.death is None and self._next_state is None:  # else it is to end
                    self._num_failures = 0
                    self._become(ReplicaState.SERVING)

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self._watch, core)
            if self.state is ReplicaState.STARTING:
                tasks.start_soon(enter)
            await core.run()
            tasks.cancel_scope.cancel()
        if failure is None and self.state is ReplicaState.STARTING:
            failure = core.death or EngineDead("it ended while it was starting")
        if failure is not None:
            await self._on_failed(failure)
            return
        self._pause_s = self._backoff.failed(self._members.clock() - self._serving_since)
        await self._end(is_dead=True)

    async def _watch(self, core: ReplicaCore) -> None:
        """Kill it when it stalls."""
        timeout_s = self._members.options.stall_timeout_s
        while True:
            is_on_time = await sleep_on_time(timeout_s / 4, timeout_s / 4, self._members.clock)
            if is_on_time and (reason := stall_of(core.health(), timeout_s)):
                core.die(EngineDead(f"replica {self.rank} is killed (stall_timeout_s): {reason}"))
                return

    async def _end(self, *, is_dead: bool) -> None:
        """Kill what it has started, if anything is left of that, and close it."""
        backend, self._backend, self._is_open = self._backend, None, False
        if backend is not None:
            if is_dead:  # it may not answer, and is not asked to end
                backend.kill()
            try:
                with anyio.CancelScope(shield=True):  # which has deadlines of its own
                    await backend.aclose()
            except Exception:
                logger.exception("replica %d could not be closed in order", self.rank)

    def _on_record(self, record: StepRecord) -> None:
        if self.core is None or self.core.death is not None:
            return  # it came with the end, and what it had is counted no more
        self.num_sent = 0
        self._members.on_record(self, record)

    def _on_core_death(self, in_flight: list[InFlightSequence]) -> None:
        assert self.core is not None
        self.reason = f"replica {self.rank}: {self.core.death}"
        if self.state in (ReplicaState.SERVING, ReplicaState.DRAINING):
            self._become(ReplicaState.BACKING_OFF, in_flight)  # at once: nothing more is sent to it
        else:
            self._members.on_death(self, in_flight, self.reason)


async def for_each(items: Iterable[A], function: Callable[[A], Awaitable[T]]) -> list[T]:
    """Await ``function`` of all items at once; returns the results in order. The first error ends the others."""
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
