"""`RemoteCore`: an engine core in another process, as the caller's side sees it.

Its sequences are mirrors: the front end's own objects, filled from what the engine sends, with the same listeners as in
process. Ends that the caller asks for are final here at once; the engine hears of them behind. What the engine sends of
sequences that have ended here is ignored. In a cluster a dead engine ends none of them: they go on in another one.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable, Iterator
from typing import Any, TypeVar

import anyio
import msgspec
import numpy as np

from aioengine.config import EngineConfig
from aioengine.core.control import WAKE_TAGS, AnyControl, Resume, Sleep, StartWave, WakeUp
from aioengine.core.engine_core import PUBLISH_SLICE, closed_early
from aioengine.core.health import Beat, Health, dead, judge
from aioengine.core.in_process import clock_of
from aioengine.core.listener import UNLIMITED, Conditions, Endings, Listener, SampledLogprobs
from aioengine.core.observers import Observers, UserCode
from aioengine.core.protocol import CoreHooks, InFlightSequence
from aioengine.errors import AioEngineError, EngineClosed, EngineDead, WireError, describe
from aioengine.outputs import FinishReason
from aioengine.outputs.metrics import StepRecord
from aioengine.processes.turns import sleep_on_time, turns_here
from aioengine.scheduler.scheduler import SchedulerStats
from aioengine.scheduler.sequence import Request, Sequence, make_choices
from aioengine.transport import wire
from aioengine.transport.link import ControlCalls, Link, death_of
from aioengine.transport.wire import to_error

logger = logging.getLogger("aioengine")

ACKNOWLEDGE_EVERY = 32
"""Messages; one acknowledgement costs the engine as much as reading a request."""
ACKNOWLEDGE_BYTES = 2**20

FINISHED_A_MESSAGE = 64
"""Sequences; the engine ends those of a message in one turn of its loop."""

DescribeCut = Callable[[], Awaitable[str]]


class RemoteCore:
    """A `Core` in another process.

    Args:
        link: attached; closed by its owner after `run` has ended.
        attached: what the engine has said of itself.
        config: the engine's.
        hooks: of the caller's side.
        is_far: whether missing beats mean that it is dead, since nothing else would tell.
        describe_cut: says, soon, why the connection has ended.
        logs_stats: whether this side logs the engine's load.
    Attributes:
        num_refused: messages of the engine's that were malformed or came twice.
        heard_at: when it was last heard of, by ``clock``.
        on_beat: called with each beat.
    """

    def __init__(
        self,
        link: Link,
        attached: wire.Attached,
        *,
        config: EngineConfig,
        hooks: CoreHooks,
        is_far: bool,
        describe_cut: DescribeCut,
        logs_stats: bool,
    ) -> None:
        self.config = config
        self.eos_token_ids = attached.eos_token_ids
        self.clock = clock = clock_of(asyncio.get_running_loop())
        self._cluster = cluster = hooks.cluster
        self.user_code = UserCode() if cluster is None else cluster.user_code
        log_interval_s = config.log_stats_interval_s if logs_stats else 0.0
        self.observers = Observers(self.user_code, log_interval_s=log_interval_s, now_s=clock())
        self.death: EngineDead | None = None
        self.is_stopped = False
        self.num_refused = 0
        self.on_beat: Callable[[Beat], None] = lambda _: None
        self.info = attached.info
        self.is_sleeping = attached.first_beat.is_sleeping
        self._link = link
        self._on_capacity = hooks.on_capacity
        self.is_far = is_far
        self._describe_cut = describe_cut
        self._conditions = Conditions() if cluster is None else cluster.conditions
        self._endings = Endings(self.user_code, self._conditions.check)
        self._mirrors = Mirrors(self._endings, hooks.on_capacity)
        self._calls = ControlCalls(link)
        self._stats = attached.stats
        self._beat = attached.first_beat
        self.heard_at = self._listened_until = clock()
        self._num_unacknowledged = self._unacknowledged_bytes = 0
        self._is_cut = False
        self._over = asyncio.Event()

    # What callers do

    @property
    def capacity(self) -> int:
        return self.config.max_waiting

    @property
    def num_unstarted(self) -> int:
        return len(self._mirrors.unstarted)

    @property
    def is_drained(self) -> bool:
        return not (self._mirrors.live or self._endings)

    def make_sequence(self, request: Request) -> Sequence:
        """As `EngineCore.make_sequence`; prefixes are hashed by the engine.

        Raises:
            InvalidRequest: it holds functions.
        """
        wire.check_sendable(request)
        return make_choices(request, eos_token_ids=self.eos_token_ids)

    def check_accepting(self) -> None:
        if self.death is not None:
            raise self.copy_death()
        if self.is_stopped:
            raise EngineClosed("the engine is closed")

    def add(self, sequence: Sequence, listeners: Iterable[Listener], *, arrived_at: float | None = None) -> None:
        """As `Core.add`. What another engine had goes on here; a choice that was alone there is alone here, too."""
        self.check_accepting()
        sequence.arrived_at = self.clock() if arrived_at is None else arrived_at
        request = sequence.request
        is_one = bool(sequence.output_ids) or len(sequence.children) + 1 < request.params.num_sequences
        choices = list(zip((sequence, *sequence.children), listeners, strict=True))
        self._link.send(
            wire.AddRequest(
                number=self._mirrors.next_number,
                request=wire.pack_request(request),
                num_allowed=_allowed(choices[0][1]),
                choice=sequence.sampling.choice if is_one else -1,
                output=np.array(sequence.output_ids, wire.INT32).tobytes() if sequence.output_ids else b"",
                is_moved=sequence.is_moved,
            )
        )
        for member, listener in choices:  # what could not be sent is not waited for
            self._mirrors.add_sequence(member, listener)

    def finish(self, sequence: Sequence, reason: FinishReason, stop_reason: int | str | None = None) -> None:
        live = self._mirrors.live
        if self.is_stopped or sequence.order not in live:
            self._endings.report(sequence.order)
            return
        choices = [member for member in (sequence, *sequence.children) if member.order in live]
        self._link.send(wire.Finish([member.order for member in choices], reason))
        for member in choices:
            self._mirrors.end_sequence(member, reason, stop_reason).on_end()
        self._conditions.check()

    def abort_all(self) -> None:
        """As `EngineCore.abort_all`."""
        if not self.is_stopped:
            self._send_aborts()
            for sequence in list(self._mirrors.live.values()):
                self._endings.add_end(sequence.order, self._mirrors.end_sequence(sequence, "abort"))
            self._endings.report_some()

    def take_back(self) -> list[InFlightSequence]:
        """Take all sequences from an engine that lives: their listeners hear nothing, and they can go on in another."""
        if self.is_stopped:
            return []
        self._send_aborts()
        in_flight = self._mirrors.release_all()
        if self._endings:  # soon: conditions are checked then, and the caller has put the in_flight somewhere
            asyncio.get_running_loop().call_soon(self._endings.report_some)
        return in_flight

    def _send_aborts(self) -> None:
        numbers = list(self._mirrors.live)
        for begin in range(0, len(numbers), FINISHED_A_MESSAGE):
            self._link.send(wire.Finish(numbers[begin : begin + FINISHED_A_MESSAGE], "abort"))

    def block(self, sequence: Sequence) -> None:
        """The engine counts by itself what it was allowed."""

    def unblock(self, sequence: Sequence) -> None:
        if sequence.order in self._mirrors.live and not self.is_stopped:
            self._link.send(wire.Allow(sequence.order, _allowed(sequence.listener)))

    async def call(self, control: AnyControl) -> Any:
        """Have the engine perform a control call; it is on its way before the first wait.

        Cancelling stops it where it is, as in `EngineCore.call`.

        Raises:
            InvalidRequest: it cannot be sent, or cannot be done now.
            EngineDead, EngineClosed: the engine, or this connection, came to an end.
            Exception: what went wrong there.
        """
        self.check_accepting()
        result = await self._calls.call(control)
        if isinstance(control, Sleep):
            self.is_sleeping = True
        elif isinstance(control, WakeUp) and set(control.tags) >= set(WAKE_TAGS):
            self.is_sleeping = False
        return result

    def start_wave(self, wave: int) -> None:
        """Notify an engine in lockstep that its group computes; lost if the engine has ended."""
        if not self.is_stopped:
            self._calls.send(StartWave(wave))

    def resume(self) -> None:
        if not self.is_stopped:
            self._calls.send(Resume())

    def when(self, is_so: Callable[[], bool]) -> asyncio.Future[None]:
        return self._conditions.add_soon(is_so)

    def recheck(self) -> None:
        self._conditions.check_soon()

    def last_token_at(self, sequence: Sequence) -> float:
        return sequence.last_token_at

    def stats(self) -> SchedulerStats:
        return self._stats

    def health(self) -> Health:
        if self.death is not None:
            return dead(str(self.death), self._beat)
        if self.is_stopped:
            return dead("it was closed", self._beat)
        silent_s = self._silent_s
        age_s = self.clock() - self.heard_at
        health = judge(self._beat, stall_after_s=self.config.stall_after_s, beat_age_s=age_s)
        if silent_s <= self.config.heartbeat_timeout_s:
            return health
        reason = f"its process is there, and has not beaten for {silent_s:.1f} s: it is stopped, or its loop is held"
        return msgspec.structs.replace(health, status="STALLED", reason=reason)

    def copy_death(self) -> EngineDead:
        assert self.death is not None
        return self.death.anew()

    def die(self, death: EngineDead) -> None:
        """The engine, or the way to it, is gone: every sequence and call hears it, now and once.

        In a cluster the sequences hear nothing: the cluster does.
        """
        if not self.is_stopped:
            self.death = death
            self.is_stopped = True
            self._over.set()
            if self._cluster is not None:
                # Before conditions are checked: what is without a core has somewhere to be then.
                self._cluster.on_death(self._mirrors.release_all())
                self._on_capacity()
            self._end_all(self.copy_death)
            if self._cluster is None:  # else the cluster logs it, with the fate of the sequences
                logger.error("%s", death)  # last: a filter of the program's may raise, and nothing may wait for that

    # The loop

    async def run(self) -> None:
        """Take in what the engine sends, until cancelled or until it is gone."""
        await self._endings.report_after(self._run(), lambda: self._end_all(closed_early), self._die_of)

    def _die_of(self, bug: BaseException) -> None:
        death = EngineDead(f"the connection to the engine broke: {describe(bug)}")
        death.__cause__ = bug
        self.die(death)
        logger.error("a bug in the connection to the engine", exc_info=bug)

    async def _run(self) -> None:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self._receive)
            tasks.start_soon(self._watch_beats)
            tasks.start_soon(self._watch_connection)
            await self._over.wait()
            tasks.cancel_scope.cancel()

    async def _receive(self) -> None:
        while True:
            messages = await self._link.channel.receive()
            for frames in messages:
                await turns_here().take()
                await self._take(frames)
            self._conditions.check()
            if self._is_cut and not messages:
                reason = await self._describe_cut()
                self.die(EngineDead(f"the engine is gone: {reason}"))

    async def _watch_connection(self) -> None:
        while not self._link.monitor.is_gone:
            await self._link.monitor.look()
        self._is_cut = True
        self._link.channel.wake()  # what came before the end is read first

    async def _watch_beats(self) -> None:
        """Note how far this loop has listened; a far engine is dead when it has sent nothing for long."""
        interval_s, timeout_s = self.config.heartbeat_interval_s, self.config.heartbeat_timeout_s
        while True:
            if not await sleep_on_time(interval_s, timeout_s / 2, self.clock):
                continue
            self._listened_until = self.clock()
            if self.is_far and self._silent_s > timeout_s:
                self.die(EngineDead(f"the engine has not been heard of for {self._silent_s:.1f} s"))

    @property
    def _silent_s(self) -> float:
        """How long this side has listened and heard nothing."""
        return max(self._listened_until - self.heard_at, 0.0)

    async def _take(self, frames: list[bytes]) -> None:
        """Act on a message, or refuse it; a gap is the end, since what was lost cannot be had again."""
        try:
            body = self._link.reader.read(frames)
        except wire.OutOfTurn as error:
            self.num_refused += 1
            if error.is_gap:
                self.die(EngineDead(f"messages of the engine were lost: {error}"))
            return
        except WireError as error:
            self.num_refused += 1
            logger.warning("refused a message of the engine's: %s", error)
            return
        self.heard_at = self.clock()
        self._num_unacknowledged += 1
        self._unacknowledged_bytes += sum(map(len, frames))
        if self._num_unacknowledged >= ACKNOWLEDGE_EVERY or self._unacknowledged_bytes >= ACKNOWLEDGE_BYTES:
            self._num_unacknowledged = self._unacknowledged_bytes = 0
            self._link.send(wire.Acknowledge(self._link.reader.due - 1))
        if isinstance(body, wire.StepOutputsMessage):
            await self._take_outputs(body)
        elif isinstance(body, wire.Returned):
            self._calls.on_returned(body)
        elif isinstance(body, wire.Beating):
            self._beat = body.beat
            self.on_beat(body.beat)
            self.is_sleeping = body.beat.is_sleeping
            self._note_numbers(body.beat)  # what ends between two steps makes no record
        elif isinstance(body, wire.Shutdown):
            self.die(death_of(body.fault))

    async def _take_outputs(self, body: wire.StepOutputsMessage) -> None:
        await self._mirrors.take_outputs(body, self.clock())
        death = self._mirrors.take_ends(body)
        if death is not None:  # its final message follows; a listener that is notified of the end finds the core dead
            self.die(death)
        if self._endings:
            self._endings.report_some()
        if (record := body.record) is None:
            return
        self._note_numbers(record)
        self._beat = msgspec.structs.replace(
            self._beat, step=record.step + 1, step_age_s=0.0, running=record.running, waiting=record.waiting
        )
        if self._cluster is None:
            self.observers.on_step(record, self.clock())
        else:
            self._cluster.on_record(record)

    def _note_numbers(self, latest: Beat | StepRecord) -> None:
        self._stats = msgspec.structs.replace(
            self._stats,
            running=latest.running,
            waiting=latest.waiting - latest.blocked,
            blocked=latest.blocked,
            free_blocks=latest.free_blocks if latest.free_blocks >= 0 else self._stats.free_blocks,
        )

    def _end_all(self, error: Callable[[], AioEngineError]) -> None:
        self.is_stopped = True
        if self._cluster is None:
            self.user_code.keep()
        self._mirrors.fail_all(error)
        self._endings.report_some()
        self._calls.end_all(error)
        if self._cluster is None:
            self._conditions.end_all()
        else:
            self._conditions.check()


def _allowed(listener: Listener) -> int:
    return -1 if listener.num_allowed == UNLIMITED else listener.num_allowed


Update = TypeVar(
    "Update", wire.Started, wire.First, wire.PromptLogprobsMessage, wire.VectorMessage, wire.Ended, wire.Failed
)


class Mirrors:
    """The sequences of one engine that have not ended here.

    Args:
        endings: gets the ends that the engine brings.
        on_capacity: called when a sequence takes of ``max_waiting`` no more.
    Attributes:
        live: by the numbers that the engine knows them by, which are their orders.
        unstarted: numbers of those that take of ``max_waiting``.
        next_number: of the next one.
    """

    def __init__(self, endings: Endings, on_capacity: Callable[[], None]) -> None:
        self.live: dict[int, Sequence] = {}
        self.unstarted: set[int] = set()
        self.next_number = 0
        self._rowless: set[int] = set()
        """Numbers of sequences that never had a row at this engine."""
        self._endings = endings
        self._on_capacity = on_capacity

    def add_sequence(self, sequence: Sequence, listener: Listener) -> None:
        """Add a sequence, which the engine has as ``next_number``."""
        number = sequence.order = self.next_number
        sequence.listener = listener
        self.live[number] = sequence
        self._rowless.add(number)
        if len(sequence.output_ids) < listener.num_allowed:  # else it does not wait for a row, but for its reader
            self.unstarted.add(number)
        self.next_number += 1

    def end_sequence(
        self, sequence: Sequence, finish_reason: FinishReason, stop_reason: int | str | None = None
    ) -> Listener:
        """End a sequence for its caller; returns the listener, which is to get the end."""
        sequence.finish_reason, sequence.stop_reason = finish_reason, stop_reason
        return self._release(sequence)

    def fail_all(self, error: Callable[[], AioEngineError]) -> None:
        """End all sequences by an error each, which `Endings` is to report."""
        for sequence in list(self.live.values()):
            self._endings.add_end(sequence.order, self._release(sequence), error())

    def release_all(self) -> list[InFlightSequence]:
        """Release all sequences, to go on elsewhere. Only the ends of those that have ended are reported."""
        for sequence in list(self.live.values()):
            if sequence.finish_reason is not None:  # its last token is handed out, and its end was next
                self._endings.add_end(sequence.order, self._release(sequence))
        in_flight: list[InFlightSequence] = []
        of_families: set[int] = set()
        for number, sequence in self.live.items():
            sequence.is_moved = True
            choices = (sequence, *sequence.children)
            if not all(choice.order in self.live and not choice.output_ids for choice in choices):
                sequence.children = ()
            of_families.update(child.order for child in sequence.children)
            if number not in of_families:
                in_flight.append(InFlightSequence(sequence, number not in self._rowless))
        self.live.clear()
        self.unstarted.clear()
        self._rowless.clear()
        return in_flight

    # What the engine brings

    async def take_outputs(self, body: wire.StepOutputsMessage, now: float) -> None:
        """Take in all updates but ends, with turns for the loop.

        Outputs of a second engine change none of a sequence's times: to its caller it has begun before.
        """
        for started, sequence in self._with_sequences(body.started):
            if not sequence.has_run:
                sequence.num_cached_tokens = started.num_cached_tokens
                sequence.admitted_at = now
                sequence.has_run = True
            sequence.listener.on_started()
            self._rowless.discard(started.number)
            self._waits_no_more(started.number)
        for first, sequence in self._with_sequences(body.first):
            sequence.children = ()  # its other choices are on their own from now on
            sequence.first_token_at = now
            if not sequence.admitted_at < now - first.prefill_time_s:
                sequence.admitted_at = now - first.prefill_time_s
        # Before its tokens: a sequence with a token is not asked again for these, should the engine die in between.
        for of_prompt, sequence in self._with_sequences(body.prompts):
            sequence.listener.on_prompt_logprobs(of_prompt.position, [of_prompt.logprobs])
        for vector, sequence in self._with_sequences(body.vectors):
            sequence.listener.on_vector(np.frombuffer(vector.values, wire.FLOAT32))
        logprobs = dict(body.logprobs)
        last_of = {ended.number: ended for ended in body.ended}
        for begin in range(0, len(body.numbers), PUBLISH_SLICE):
            if begin:
                await asyncio.sleep(0)
            self._take_tokens(body, begin, logprobs, last_of, now)

    def _take_tokens(
        self,
        body: wire.StepOutputsMessage,
        begin: int,
        logprobs: dict[int, SampledLogprobs],
        last_of: dict[int, wire.Ended],
        now: float,
    ) -> None:
        """Hand out a slice of tokens. An end by a token must be known when that token is handed out."""
        live, numbers = self.live, body.numbers
        for index in range(begin, min(begin + PUBLISH_SLICE, len(numbers))):
            number, token_id = numbers[index], body.token_ids[index]
            sequence = live.get(number)
            if sequence is None:
                continue
            sequence.output_ids.append(token_id)
            sequence.last_token_at = now
            if last_of and number in last_of and number not in numbers[index + 1 :]:
                ended = last_of[number]
                sequence.finish_reason, sequence.stop_reason = ended.finish_reason, ended.stop_reason
            sequence.listener.on_token(token_id, logprobs.get(index) if logprobs else None)

    def take_ends(self, body: wire.StepOutputsMessage) -> EngineDead | None:
        """Take in the ends, which `Endings` is to report.

        Returns:
            what the engine has died of, if that is what ended any: these live, for the caller to end.
        """
        for ended, sequence in self._with_sequences(body.ended):
            sequence.finish_reason, sequence.stop_reason = ended.finish_reason, ended.stop_reason
            sequence.num_preemptions += ended.num_preemptions
            self._endings.add_end(sequence.order, self._release(sequence))
        death: EngineDead | None = None
        for failed, sequence in self._with_sequences(body.failed):
            fault = failed.fault
            if 0 <= failed.dump_of < len(body.failed):
                fault = msgspec.structs.replace(fault, dump=body.failed[failed.dump_of].fault.dump)
            error = to_error(fault)
            if isinstance(error, EngineClosed | EngineDead):
                death = death or death_of(fault)
            else:
                failure = error if isinstance(error, AioEngineError) else death_of(fault)
                self._endings.add_end(sequence.order, self._release(sequence), failure)
        return death

    def _with_sequences(self, updates: Iterable[Update]) -> Iterator[tuple[Update, Sequence]]:
        """Updates with their sequences; without those whose sequence has ended here."""
        return ((each, sequence) for each in updates if (sequence := self.live.get(each.number)) is not None)

    def _release(self, sequence: Sequence) -> Listener:
        """Forget a sequence; returns its listener, which gets the end now and nothing else."""
        del self.live[sequence.order]
        listener: Listener = sequence.listener
        sequence.listener = None
        self._rowless.discard(sequence.order)
        self._waits_no_more(sequence.order)
        return listener

    def _waits_no_more(self, number: int) -> None:
        """A sequence has started, or ended without that."""
        if number in self.unstarted:
            self.unstarted.discard(number)
            self._on_capacity()
