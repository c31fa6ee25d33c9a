"""`ClusterCore`: the cores of several replicas as one `Core`.

A sequence is added to the core of one replica, and followed by its listener directly: nothing here runs for a token.
When a replica dies its core gives back what it had, and that goes on at another one, from the tokens that were handed
out. Until one takes it, a sequence is *pending*: it was accepted, and is at no replica.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection, Coroutine, Iterable
from typing import Any

import anyio
import msgspec

from aioengine.cluster.balancer import MAX_AFFINITY_BLOCKS
from aioengine.cluster.broadcast import WEIGHTS, ClusterControl
from aioengine.cluster.placing import Placing
from aioengine.cluster.replica import Replica, ReplicaCore, ReplicaState
from aioengine.config import EngineConfig, ReplicaOptions
from aioengine.core.control import (
    AnyControl,
    CommitWeights,
    Pause,
    ResetPrefixCache,
    Resume,
    Sleep,
    StageWeights,
    UpdateWeights,
)
from aioengine.core.engine_core import closed_early
from aioengine.core.executor_protocol import ExecutorInfo
from aioengine.core.health import Health, HealthStatus
from aioengine.core.listener import Conditions, Endings, Listener
from aioengine.core.observers import Observers, UserCode
from aioengine.core.protocol import CoreHooks, InFlightSequence
from aioengine.errors import AioEngineError, ConfigError, EngineClosed, EngineDead, InvalidRequest, describe
from aioengine.outputs import FinishReason
from aioengine.outputs.metrics import StepRecord
from aioengine.scheduler.scheduler import SchedulerStats
from aioengine.scheduler.sequence import Request, Sequence, make_choices

logger = logging.getLogger("aioengine")

SERVES = (ReplicaState.SERVING, ReplicaState.DRAINING)
"""States of a replica that has the weights of its siblings."""

CLEAR_CACHES = (ResetPrefixCache, Sleep, UpdateWeights, CommitWeights)
"""Calls after which no replica has a prefix in its cache."""

SAME_OFFER = ("vocab_size", "block_size", "max_model_len", "dtype", "layout")
"""Fields of `ExecutorInfo` without which a request cannot go on at another replica, or would go on otherwise."""

SAME_CONFIG = (
    *("model", "revision", "quantization", "kv_cache_dtype", "logits_processors", "max_logprobs", "max_n"),
    "max_waiting",  # else a request of more choices than that would wait for ever
    "heartbeat_interval_s",  # by which the front end knows what has stopped
)
"""The same fields of `EngineConfig`. Others (memory, batch sizes, threads) change speed and no answer."""

LOADS = ("running", "waiting", "blocked", "free_blocks", "num_blocks", "cached_blocks", "touched_blocks")
"""Fields of `StepRecord` with the load now."""
COUNTERS = ("preemptions", "prefix_cache_queries", "prefix_cache_hits")
"""Fields that count since the engine's start."""
FIELDS = (*LOADS, *COUNTERS)


class ClusterCore:
    """A `Core` over replicas.

    Args:
        config: of each replica.
        hooks: of the caller's side.
        is_owner: whether this side has started the replicas: then it logs the load, and may change their weights.
    Attributes:
        replicas: by rank.
        on_change: called when the state of a replica is another one.
        placing: which replica gets a sequence.
        beside: to be run beside the replicas, until they end.
    """

    def __init__(
        self,
        config: EngineConfig,
        options: ReplicaOptions,
        hooks: CoreHooks,
        clock: Callable[[], float],
        *,
        is_owner: bool = True,
        offset: int = 0,
    ) -> None:
        self.config = config
        self.clock = clock
        self.is_owner = is_owner
        self.user_code = UserCode()
        self.observers = Observers(
            self.user_code, log_interval_s=config.log_stats_interval_s if is_owner else 0.0, now_s=clock()
        )
        self.conditions = Conditions()
        self.eos_token_ids: tuple[int, ...] = ()
        self.death: EngineDead | None = None
        self.is_stopped = False
        self.replicas: dict[int, Replica] = {}
        self.on_change: Callable[[], None] = lambda: None
        self.control = ClusterControl()
        self.placing = Placing(*(self.replicas, options, clock, self._end_soon), config=config, offset=offset)
        self.options = options
        self._hooks = hooks
        self._endings = Endings(self.user_code, self.conditions.check)
        self._offer: tuple[ExecutorInfo, EngineConfig] | None = None
        """Info and config of the first replica that was opened, which all must agree with."""
        self._num_ended = 0
        self._totals = StepTotals()
        self.capacity = config.max_waiting
        self.beside: list[Callable[[], Coroutine[Any, Any, None]]] = []
        self._over = asyncio.Event()
        self._tasks: anyio.abc.TaskGroup | None = None

    # Replicas

    def add_replica(self, replica: Replica) -> None:
        """This replica is one of these from now on; it is started unless it has been opened."""
        self.replicas[replica.rank] = replica
        if self._tasks is not None:
            self._tasks.start_soon(replica.run)
        self.on_state(replica)

    def remove_replica(self, replica: Replica) -> None:
        """It has been stopped."""
        del self.replicas[replica.rank]
        self._totals.forget(replica.rank)
        self.placing.balancer.forget(replica.rank)
        self.on_state(replica)

    def check(self, rank: int, core: ReplicaCore) -> None:
        """As `Members.check`: all replicas are as the first one was."""
        offer = core.info, core.config
        if self._offer is None:
            self._offer = offer
            self.eos_token_ids = core.eos_token_ids
        check_agreement(rank, self._offer, offer)

    def move(self, replica: Replica, in_flight: Iterable[InFlightSequence]) -> None:
        """Sequences that were taken back from a replica that lives go on elsewhere."""
        self._migrate(replica, [each.sequence for each in in_flight])

    # Reports of replicas

    def on_state(self, replica: Replica) -> None:
        """As `Members.on_state`."""
        if replica.state in (ReplicaState.BACKING_OFF, ReplicaState.STARTING):
            self.placing.balancer.forget(replica.rank)
            self._totals.forget(replica.rank)
        infos = [each.core.info for _, each in sorted(self.replicas.items()) if each.core is not None]
        if infos:  # else all are just starting
            self.info: ExecutorInfo = combine(infos)
        self.capacity = self.config.max_waiting * max(1, sum(each.is_coming for each in self.replicas.values()))
        self.placing.dispatch()
        if self.replicas and not any(each.is_coming for each in self.replicas.values()):
            reasons = "; ".join(each.reason for each in self.replicas.values())
            self.die(EngineDead(f"no replica serves, and none will: {reasons}"))
        self.on_change()
        self._hooks.on_capacity()

    def on_record(self, replica: Replica, record: StepRecord) -> None:
        """As `Members.on_record`: observers hear of each step as one of the whole cluster's."""
        self.observers.on_step(self._totals.take(replica.rank, record), self.clock())
        core = replica.core
        if self.placing.pending and core is not None and core.num_unstarted < core.capacity:
            self.placing.dispatch()

    def on_death(self, replica: Replica, in_flight: list[InFlightSequence], reason: str) -> None:
        """As `Members.on_death`."""
        verdicts = self.placing.recovery.on_death(in_flight, reason)
        for sequence, error in verdicts:
            if error is not None:
                self._end(sequence, error)
        going_on = [sequence for sequence, error in verdicts if error is None]
        if verdicts or replica.state is ReplicaState.BACKING_OFF:
            logger.warning("%s; %d of its sequences go on elsewhere", reason, len(going_on))
        self._migrate(replica, going_on)
        self._endings.report_some()

    async def restore(self, core: ReplicaCore) -> None:
        """As `Members.restore`."""
        await self.control.restore(core, lambda: self._cores_of(SERVES))

    def _migrate(self, replica: Replica, sequences: Iterable[Sequence]) -> None:
        """Sequences of a replica that is lost wait for another one, the oldest first."""
        going_on: list[Sequence] = []
        for sequence in sequences:
            reason, stop_reason = None, None
            if sequence.output_ids:
                reason, stop_reason = sequence.check_stop(sequence.output_ids[-1], frozenset(self.eos_token_ids))
            if reason is not None:  # with its last token, whose message was the last that came
                sequence.finish_reason, sequence.stop_reason = reason, stop_reason
                self._end(sequence)
            else:
                replica.num_moved += 1 + len(sequence.children)
                going_on.append(sequence)
        self.placing.add_again(going_on)

    # What callers do

    @property
    def num_unstarted(self) -> int:
        return self.placing.num_never_run + sum(core.num_unstarted for core in self._cores)

    @property
    def is_drained(self) -> bool:
        return not (self.placing.pending or self._endings) and all(core.is_drained for core in self._cores)

    @property
    def is_sleeping(self) -> bool:
        return any(core.is_sleeping for core in self._cores)

    @property
    def _cores(self) -> list[ReplicaCore]:
        """The cores of replicas that live."""
        return self._cores_of(tuple(ReplicaState))

    def _cores_of(self, states: Collection[ReplicaState]) -> list[ReplicaCore]:
        """The cores of replicas that live and are in these states."""
        here = [each.core for each in self.replicas.values() if each.state in states]
        return [core for core in here if core is not None and core.death is None]

    def make_sequence(self, request: Request) -> Sequence:
        prompt = request.prompt_token_ids[: MAX_AFFINITY_BLOCKS * self.info.block_size]
        hashes = request.prefix_key.hash_blocks(prompt, self.info.block_size)
        for core in self._cores:  # which checks what cannot be sent
            core.make_sequence(request)
            break
        return make_choices(request, eos_token_ids=self.eos_token_ids, block_hashes=hashes)

    def check_accepting(self) -> None:
        if self.death is not None:
            raise self.copy_death()
        if self.is_stopped:
            raise EngineClosed("the engine is closed")

    def add(self, sequence: Sequence, listeners: Iterable[Listener], *, arrived_at: float | None = None) -> None:
        """As `EngineCore.add`; where no replica takes it now, it waits here for one."""
        self.check_accepting()
        sequence.arrived_at = self.clock() if arrived_at is None else arrived_at
        for member, listener in zip((sequence, *sequence.children), listeners, strict=True):
            member.listener = listener
        self.placing.add(sequence)

    def finish(self, sequence: Sequence, reason: FinishReason, stop_reason: int | str | None = None) -> None:
        pending = self.placing.pending
        head = sequence if sequence in pending else next((each for each in pending if sequence in each.children), None)
        if head is not None:  # it is pending, or is a child of one that is
            self._finish_pending(head, sequence, reason, stop_reason)
        elif (core := self.placing.core_of.get(sequence)) is not None:
            core.finish(sequence, reason, stop_reason)
        else:
            self._endings.report(sequence.order)

    def _finish_pending(
        self, head: Sequence, sequence: Sequence, reason: FinishReason, stop_reason: int | str | None
    ) -> None:
        since = self.placing.pending.pop(head)
        leaving = (head, *head.children) if sequence is head else (sequence,)
        # Each is on its own from now on.
        self.placing.put((member for member in (head, *head.children) if member not in leaving), since)
        head.children = ()
        for member in leaving:
            self.placing.core_of.pop(member, None)
            member.finish_reason, member.stop_reason = reason, stop_reason
            self._release(member).on_end()
        self._hooks.on_capacity()
        self.conditions.check()

    def abort_all(self) -> None:
        for core in self._cores:
            core.abort_all()
        for sequence in list(self.placing.pending):
            sequence.finish_reason = "abort"
            self._end(sequence)
        self.placing.clear()
        self._endings.report_some()
        self._hooks.on_capacity()

    def block(self, sequence: Sequence) -> None:
        """Each engine counts by itself what it was allowed."""

    def unblock(self, sequence: Sequence) -> None:
        if (core := self.placing.core_of.get(sequence)) is not None:
            core.unblock(sequence)

    async def call(self, control: AnyControl) -> Any:
        """Have all replicas perform a control call, once there is one: see `ClusterControl`."""
        self.check_accepting()
        if not self.is_owner and (control.state == WEIGHTS or isinstance(control, StageWeights)):
            raise InvalidRequest(
                "weights are changed by the program that owns the replicas, which gives them to those that it starts "
                "anew, too: call update_weights there"
            )
        if isinstance(control, Pause | Sleep) and control.mode == "abort":
            self.placing.hold()  # what comes from now on is behind this call, and not aborted
        if self.options.lockstep and isinstance(control, Sleep) and control.level:
            # First none may begin a wave any more: one that has given its memory back could not compute in it.
            await self.control.perform(Sleep(0, control.mode), lambda: self._cores, self._until_some)
            control = Sleep(control.level, "keep")
        result = await self.control.perform(control, lambda: self._cores, self._until_some)
        if isinstance(control, CLEAR_CACHES):
            for rank in self.replicas:
                self.placing.balancer.forget(rank)
        return result

    async def _until_some(self) -> bool:
        """Wait until a replica serves; return whether we waited."""
        has_waited = False
        while not self._cores_of(SERVES):
            has_waited = True
            await self.when(lambda: bool(self._cores_of(SERVES)))
            self.check_accepting()
        return has_waited

    def resume(self) -> None:
        self.control.note(Resume())
        for core in self._cores:
            core.resume()

    def when(self, is_so: Callable[[], bool]) -> asyncio.Future[None]:
        return self.conditions.add_soon(is_so)

    def recheck(self) -> None:
        self.conditions.check_soon()

    def last_token_at(self, sequence: Sequence) -> float:
        return sequence.last_token_at

    def stats(self) -> SchedulerStats:
        """Sums over the replicas; counters include those of engines that have ended."""
        every = [core.stats() for core in self._cores]
        return SchedulerStats(
            running=sum(stats.running for stats in every),
            waiting=sum(stats.waiting for stats in every) + len(self.placing.pending),
            blocked=sum(stats.blocked for stats in every),
            free_blocks=sum(stats.free_blocks for stats in every),
            num_blocks=sum(stats.num_blocks for stats in every),
            steps=sum(stats.steps for stats in every),
            **self._totals.counters,
        )

    def health(self) -> Health:
        """ALIVE if a replica is; the reason names those that are not."""
        of_rank = {rank: each.core.health() for rank, each in self.replicas.items() if each.core and each.is_serving}
        alive = [health for health in of_rank.values() if health.status == "ALIVE"]
        status: HealthStatus = "DEAD" if self.death or self.is_stopped else "ALIVE" if alive else "STALLED"
        missing = [
            f"replica {each.rank} is {each.state.value}" + (f" ({each.reason})" if each.reason else "")
            for each in self.replicas.values()
            if each.rank not in of_rank
        ]
        missing += [f"replica {rank}: {health.reason}" for rank, health in of_rank.items() if health.reason]
        stats, steps = self.stats(), [health.step for health in of_rank.values()]
        call_age_s, call = max(((each.call_age_s, each.call) for each in of_rank.values()), default=(0.0, ""))
        return Health(
            status=status,
            reason=str(self.death) if self.death else "; ".join(missing),
            step=sum(steps),
            call=call,
            call_age_s=call_age_s,
            step_age_s=max((health.step_age_s for health in of_rank.values()), default=0.0),
            running=stats.running,
            waiting=stats.waiting + stats.blocked,
            beat_age_s=max((health.beat_age_s for health in of_rank.values()), default=0.0),
            num_refused=sum(health.num_refused for health in of_rank.values()),
            is_paused=any(health.is_paused for health in of_rank.values()),
            is_sleeping=any(health.is_sleeping for health in of_rank.values()),
        )

    def copy_death(self) -> EngineDead:
        assert self.death is not None
        return self.death.anew()

    def die(self, death: EngineDead) -> None:
        """End every sequence by an error: no replica is left that this side may use."""
        if not self.is_stopped:
            self.death = death
            for core in self._cores:
                for each in core.take_back():
                    self._end(each.sequence, self.copy_death())
            self._end_all(self.copy_death)
            self._over.set()
            logger.error("%s", death)

    # The loop

    async def run(self) -> None:
        """Serve with all replicas, until cancelled or until none is left."""
        await self._endings.report_after(self._run(), lambda: self._end_all(closed_early), self._die_of)

    def _die_of(self, bug: BaseException) -> None:
        death = EngineDead(f"what looks after the replicas broke: {describe(bug)}")
        death.__cause__ = bug
        self.die(death)
        logger.error("a bug in the cluster", exc_info=bug)

    async def _run(self) -> None:
        async with anyio.create_task_group() as self._tasks:
            for replica in self.replicas.values():
                self._tasks.start_soon(replica.run)
            self.placing.start_soon = self._tasks.start_soon
            self._tasks.start_soon(self.placing.watch)
            self._tasks.start_soon(self.placing.keep_reserving, self.conditions)
            for task in self.beside:
                self._tasks.start_soon(task)
            await self._over.wait()
            self._tasks.cancel_scope.cancel()

    # Ends

    def _release(self, sequence: Sequence) -> Listener:
        listener: Listener = sequence.listener
        sequence.listener = None
        return listener

    def _end(self, sequence: Sequence, error: AioEngineError | None = None) -> None:
        """A sequence that is at no replica has ended, and its children; `Endings.report_some` is to follow."""
        for member in (sequence, *sequence.children):
            self._num_ended += 1
            member.order = -1 - self._num_ended  # of no replica's
            self.placing.core_of.pop(member, None)
            if error is None:
                member.finish_reason, member.stop_reason = sequence.finish_reason, sequence.stop_reason
            else:
                member.finish_reason = "error"
            self._endings.add_end(member.order, self._release(member), error)

    def _end_soon(self, sequence: Sequence, error: AioEngineError) -> None:
        self._end(sequence, error)
        self._endings.report_some()

    def _end_all(self, error: Callable[[], AioEngineError]) -> None:
        self.is_stopped = True
        self.user_code.keep()
        for sequence in self.placing.pending:
            self._end(sequence, error())
        self.placing.clear()
        self._endings.report_some()
        self.conditions.end_all()


class StepTotals:
    """Sums over replicas, kept up to date by difference: a record costs the same however many replicas there are."""

    def __init__(self) -> None:
        self._of_rank: dict[int, list[int]] = {}
        """Each engine's `FIELDS`, by its last record."""
        self._sums = [0] * len(FIELDS)

    @property
    def counters(self) -> dict[str, int]:
        """`COUNTERS` of all engines, those that have ended included."""
        return dict(zip(COUNTERS, self._sums[len(LOADS) :], strict=True))

    def take(self, rank: int, record: StepRecord) -> StepRecord:
        """The record of a replica's step, with the loads and counters of all replicas."""
        mine = [getattr(record, name) for name in FIELDS]
        before, sums = self._of_rank.get(rank), self._sums
        self._of_rank[rank] = mine
        for place, value in enumerate(mine):
            sums[place] += value - (before[place] if before is not None else 0)
        return msgspec.structs.replace(record, **dict(zip(FIELDS, sums, strict=True)))

    def forget(self, rank: int) -> None:
        """An engine has ended: take its loads off; its counters stay. Idempotent."""
        for place, value in enumerate(self._of_rank.pop(rank, ())[: len(LOADS)]):
            self._sums[place] -= value


def check_agreement(
    rank: int, ours: tuple[ExecutorInfo, EngineConfig], theirs: tuple[ExecutorInfo, EngineConfig]
) -> None:
    """Compare the engine of a rank with what its siblings have in common.

    Args:
        ours, theirs: of a sibling, and of this engine.
    Raises:
        ConfigError: they differ; the error names each field and both values.
    """
    found = []
    for own, other, names in zip(ours, theirs, (SAME_OFFER, SAME_CONFIG), strict=True):
        for name in names:
            here, there = getattr(own, name), getattr(other, name)
            if not (is_same_model(here, there) if name == "model" else here == there):
                found.append(f"{name} is {there!r} there, and {here!r} at the others")
    if found:
        raise ConfigError(
            f"replica {rank} cannot stand in for the others: {'; '.join(found)}: start all replicas with the same "
            "model and config"
        )


def combine(infos: list[ExecutorInfo]) -> ExecutorInfo:
    """Add up the offers of replicas: blocks and bytes are summed, the rest is the first one's."""
    return msgspec.structs.replace(
        infos[0],
        num_blocks=sum(info.num_blocks for info in infos),
        more_blocks=tuple(map(sum, zip(*(info.more_blocks for info in infos), strict=True))),
        kv_cache_bytes=sum(info.kv_cache_bytes for info in infos),
        weight_bytes=sum(info.weight_bytes for info in infos),
        device=", ".join(dict.fromkeys(info.device for info in infos)),
    )


def is_same_model(ours: str | None, theirs: str | None) -> bool:
    """Whether two values of `EngineConfig.model` may name one model.

    Hosts may keep it in different folders, so that of a path only the last part counts. Whether the files
    are the same is not checked beyond `SAME_OFFER`.
    """
    if ours is None or theirs is None or not any(each.startswith(("/", "./", "../", "~")) for each in (ours, theirs)):
        return ours == theirs
    return ours.rstrip("/").rpartition("/")[2] == theirs.rstrip("/").rpartition("/")[2]
