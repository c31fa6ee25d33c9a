"""The one loop: finish(N) → apply → schedule → launch → publish.

`EngineCore` puts a pure scheduler and an executor together. Everything but `run` is synchronous, so that a cancelled
caller needs no await to clean up. The next step is launched before the last one's tokens are handed out: 256 woken
readers can hold a loop for milliseconds, and the device must not wait for them.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections import deque
from collections.abc import Callable, Coroutine, Iterable, Iterator
from typing import Any, NamedTuple, TypeVar

from aioengine.config import EngineConfig
from aioengine.core.conditions import Conditions
from aioengine.core.control import AnyControl, PauseMode
from aioengine.core.controls import Controls
from aioengine.core.executor_protocol import DeviceLost, Executor, ExecutorInfo, PendingStep
from aioengine.core.failure_report import describe_failure
from aioengine.core.health import Beat, Health, dead, judge
from aioengine.core.listener import Endings, Listener, SampledLogprobRows, SampledLogprobs, UserCode, prompt_lines
from aioengine.errors import AioEngineError, EngineClosed, EngineDead, StepFailed, describe, traceback_of
from aioengine.metrics import EngineMetrics, Observer, RequestMetrics, StatsLog, StepRecord
from aioengine.outputs import FinishReason
from aioengine.scheduler.kv_manager import KVManager
from aioengine.scheduler.plan import StepPlan, StepResult
from aioengine.scheduler.prefix_cache import hash_prompt, root_of
from aioengine.scheduler.scheduler import Scheduler, SchedulerStats
from aioengine.scheduler.sequence import Reason, Request, Sequence, make_choices
from aioengine.scheduler.steps import StepOutput

logger = logging.getLogger("aioengine")

T = TypeVar("T")

PUBLISH_SLICE = 32
"""Tokens that are handed out before the loop gets its turn, below a millisecond; one with many log-probabilities counts
for several."""

LOGPROBS_A_TOKEN = 8
"""Log-probabilities that cost as much to hand out as a token does."""


class _InFlight(NamedTuple):
    plan: StepPlan
    pending: PendingStep
    launched_at: float


class EngineCore:
    """Requests in, tokens out, over one executor; lives on the loop that calls `run`.

    Args:
        executor: started; the caller closes it after `run` has ended.
        config: the engine's.
        eos_token_ids: the model's.
        on_capacity: called when a waiting sequence has begun to run or has ended.
        num_waiting_for_admission: how many sequences wait to be added, for the record.
        write_dump: begins to keep the report of a failed step, and returns at once.
        clock: seconds; the one by which the executor tells when a step has ended.
    """

    def __init__(
        self,
        executor: Executor,
        config: EngineConfig,
        *,
        eos_token_ids: tuple[int, ...] = (),
        on_capacity: Callable[[], None] = lambda: None,
        num_waiting_for_admission: Callable[[], int] = lambda: 0,
        write_dump: Callable[[str], None] = lambda _: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        info = executor.info
        self.executor = executor
        self.config = config
        self.eos_token_ids = eos_token_ids
        self.kv = KVManager(info.num_blocks, info.block_size, enable_prefix_caching=config.enable_prefix_caching)
        self.scheduler = Scheduler(
            self.kv,
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=config.max_num_batched_tokens,
            eos_token_ids=eos_token_ids,
        )
        self.death: EngineDead | None = None
        self.clock = clock
        self.metrics = EngineMetrics()
        self.observers: list[Observer] = [self.metrics]
        self.user_code = UserCode()
        self._stats_log = StatsLog(self.metrics, interval_s=config.log_stats_interval_s or math.inf, now_s=clock())
        self._on_room = on_capacity
        self.num_waiting_for_admission = num_waiting_for_admission
        self._write_dump = write_dump
        self._live: dict[int, Sequence] = {}
        """By order, those whose listeners have heard no end yet, whatever the scheduler makes of them."""
        self._held: dict[int, Sequence] = {}
        """Of those, the ones that came after a pause, and run after it."""
        self._in_flight: deque[_InFlight] = deque()
        self._unpublished: Iterator[tuple[int, tuple[Sequence, int]]] = iter(())
        """(index, (sequence, token)) of the last step's output, as far as they were not handed out."""
        self._unpublished_prompts: Iterator[tuple[Sequence, int, list[SampledLogprobs]]] = iter(())
        self._lines: SampledLogprobRows | None = None
        """Log-probabilities of those; None where nobody asked."""
        self._has_news = asyncio.Event()
        """Somebody has added, ended, blocked or paused something since the last look at the scheduler."""
        self._endings = Endings(self.user_code, self._has_news.set)
        self._holders: set[str] = set()
        """For what new sequences are held back."""
        self._freezers: set[str] = set()
        """For what nothing is launched."""
        self._waits = Conditions()
        self._num_steps = 0
        """Steps that have ended."""
        self._step_began_at = math.nan
        """When the device got to the oldest step in flight."""
        self._device_calls: dict[object, tuple[str, float]] = {}
        """What the executor was asked beside steps and has not answered, oldest first: (what, when)."""
        self._controls = Controls(self)
        self.is_publishing = False
        self.on_published: Callable[[], None] = lambda: None
        """Called when a step's tokens have all been handed out."""
        self.is_stopped = False

    # What callers do

    def make_sequence(self, request: Request) -> Sequence:
        """Turn a request into a sequence, its prompt hashed; pure, so that a long one may be made in a thread.

        Its other choices are its children, but for greedy ones: those are all alike, and are computed once.
        """
        hashes = None
        if self.config.enable_prefix_caching:
            hashes = hash_prompt(request.prompt_token_ids, self.kv.block_size, root_of(request.cache_salt))
        num_choices = request.params.num_sequences
        return make_choices(request, num_choices, eos_token_ids=self.eos_token_ids, block_hashes=hashes)

    def add(self, sequence: Sequence, listeners: Iterable[Listener], *, arrived_at: float | None = None) -> None:
        """Accept a sequence and its children: from now on each one's listener hears of one end or one error.

        Args:
            listeners: the sequence's, then those of its children.
            arrived_at: when the request was made, by ``clock``; absent: now.
        Raises:
            EngineDead, EngineClosed: it is not accepted.
        """
        self.check_accepting()
        sequence.arrived_at = self.clock() if arrived_at is None else arrived_at
        family = (sequence, *sequence.children)
        is_held = bool(self._holders)
        self.scheduler.add(sequence, Reason.PAUSED if is_held else Reason.NONE)
        for member, listener in zip(family, listeners, strict=True):
            member.listener = listener
            self._live[member.order] = member
            if is_held:
                self._held[member.order] = member
        self._has_news.set()

    def check_accepting(self) -> None:
        """Raise what `add` would: EngineDead or EngineClosed."""
        if self.death is not None:
            raise self.copy_death()
        if self.is_stopped:
            raise EngineClosed("the engine is closed")

    def finish(self, sequence: Sequence, reason: FinishReason, stop_reason: int | str | None = None) -> None:
        """End a sequence now (abort, stop string); idempotent. It is in no later plan.

        Its blocks are free at once for plans launched from now on, which the device runs after those in flight.
        Children that were to begin with what it computes end with it.
        """
        family = (sequence, *sequence.children)
        if not self.is_stopped and self.scheduler.finish(sequence, reason, stop_reason):
            for member in family:
                if member.order in self._live:
                    self._release(member).on_end()
            self._on_room()
            self._has_news.set()
        elif self._endings:
            self._endings.tell(sequence.order)

    def block(self, sequence: Sequence) -> None:
        """Its reader is behind: schedule no more of it until `unblock`. What is in flight still comes."""
        self.scheduler.block(sequence, Reason.BACKPRESSURE)

    def unblock(self, sequence: Sequence) -> None:
        """Its reader has caught up; idempotent."""
        if sequence.reasons & Reason.BACKPRESSURE:
            self.scheduler.unblock(sequence, Reason.BACKPRESSURE)
            self._has_news.set()

    async def call(self, control: AnyControl) -> Any:
        """Perform a control call and return what its class says; up to its first wait it is performed at once.

        Cancelling stops it where it is: a pause or sleep holds back what comes until `resume` or `WakeUp`; what the
        device has begun it carries out; what waits for the device is not done.

        Raises:
            InvalidRequest: it cannot be done now, or was asked for badly.
            EngineClosed, EngineDead: the engine came to an end.
        """
        return await self._controls.perform(control)

    async def at_device(self, call: Coroutine[Any, Any, T], name: str = "") -> T:
        """Wait for what the executor was asked beside steps; until it answers, `beat` tells what and how long ago."""
        place = object()
        self._device_calls[place] = name or getattr(call, "__name__", "a control call"), self.clock()
        try:
            return await call
        finally:
            del self._device_calls[place]

    def hold(self, holder: str, mode: PauseMode) -> None:
        """Hold back what comes from now on, until ``holder`` lets go. Idempotent; a later mode adds to an earlier one.

        Args:
            mode: what becomes of the sequences that are here. "keep": they stop where they are; "wait": they go on to
                their ends; "abort": they end with what they have.
        """
        self._holders.add(holder)
        if mode == "keep":
            self.freeze(holder)
        elif mode == "abort":
            self.abort_all()

    def freeze(self, holder: str) -> None:
        """Launch nothing until ``holder`` lets go."""
        self._freezers.add(holder)

    def let_go(self, holder: str) -> None:
        """``holder`` does not hold back any more; idempotent."""
        self._holders.discard(holder)
        self._freezers.discard(holder)
        if not self._holders:
            held, self._held = self._held, {}
            for sequence in held.values():
                self.scheduler.unblock(sequence, Reason.PAUSED)
        self._has_news.set()

    def resume(self) -> None:
        """Go on after a pause; idempotent. A sleeping engine sleeps on."""
        self.let_go("pause")

    def abort_all(self) -> None:
        """End all sequences that are here, with what they have: they are in no later plan.

        Their listeners hear of it in this turn of the loop and the next ones; before that from `finish`.
        """
        for sequence in list(self._live.values()):
            family = (sequence, *sequence.children)
            if not self.is_stopped and self.scheduler.finish(sequence, "abort"):
                for member in family:
                    if member.order in self._live:
                        self._endings.add(member.order, self._release(member))
        self._endings.tell_some()
        self._on_room()
        self._has_news.set()

    @property
    def is_sleeping(self) -> bool:
        return self._controls.is_sleeping

    @property
    def is_quiet(self) -> bool:
        """Whether the device is idle and stays so, as nothing may be launched; or nothing is held back any more."""
        is_still = bool(self._freezers) or len(self._held) == len(self._live)
        return not (self._holders or self._freezers) or (is_still and not self._in_flight)

    def reset_prefix_cache(self) -> int:
        """Forget all cached prefixes, also those in use; returns how many blocks had been kept for one."""
        return self.scheduler.reset_prefix_cache()

    def when(self, is_so: Callable[[], bool]) -> asyncio.Future[None]:
        """A future that is done once ``is_so``, seen between two steps; or when this core stops, be it so or not."""
        future = self._waits.add(is_so)
        if self.is_stopped:
            self._waits.end_all()
        self._has_news.set()
        return future

    def recheck(self) -> None:
        """Look again at what others wait for."""
        if self._waits:
            self._has_news.set()

    @property
    def info(self) -> ExecutorInfo:
        return self.executor.info

    @property
    def num_unstarted(self) -> int:
        """Sequences that were added and never had a row."""
        return self.scheduler.num_unstarted

    @property
    def is_idle(self) -> bool:
        """Whether all that was accepted has ended."""
        return not (self._live or self._endings)

    def last_token_at(self, sequence: Sequence) -> float:
        """When its newest token was applied, by ``clock``; NaN before the first."""
        is_seated = sequence.row >= 0
        return float(self.scheduler.table.token_at[sequence.row]) if is_seated else sequence.last_token_at

    def stats(self) -> SchedulerStats:
        return self.scheduler.stats()

    def beat(self) -> Beat:
        """How far this core has come."""
        now = self.clock()
        call, asked_at = next(iter(self._device_calls.values()), ("", now))
        return Beat(
            step=self._num_steps,
            step_age_s=now - self._step_began_at if self._in_flight else 0.0,
            call=call,
            call_age_s=now - asked_at,
            running=self.scheduler.num_running,
            waiting=self.scheduler.num_idle + self.num_waiting_for_admission(),
            is_sleeping=self.is_sleeping,
            is_paused="pause" in self._holders,
            free_blocks=self.kv.pool.num_free,
            blocked=len(self.scheduler.blocked),
        )

    def health(self) -> Health:
        """Whether the loop and the device get on."""
        if self.death is not None:
            return dead(str(self.death), self.beat())
        if self.is_stopped:
            return dead("it was closed", self.beat())
        return judge(self.beat(), stall_after_s=self.config.stall_after_s)

    def note_request(self, metrics: RequestMetrics, finish_reasons: tuple[str, ...]) -> None:
        """Tell the observers that a request has ended."""
        for observer in self.observers:
            with self.user_code.called("an observer failed"):
                observer.on_request(metrics, finish_reasons)

    def copy_death(self) -> EngineDead:
        """The error of a dead engine, made anew for each who hears it: a shared one would collect their tracebacks."""
        assert self.death is not None
        return self.death.anew()

    # The loop

    async def run(self) -> None:
        """Run steps until cancelled, or until the device or this code breaks.

        On the way out every sequence that has not ended hears `EngineClosed`, or `EngineDead` with the cause.
        Cancelling stops the loop; the launched steps still complete on the device.
        """
        try:
            await self._run()
        except GeneratorExit:  # the loop is gone
            raise
        except (asyncio.CancelledError, KeyboardInterrupt, SystemExit):
            self._end_all(_closed)
            await self._endings.tell_all()
            raise
        except BaseException as exc:  # a panic of a library's in Rust is no Exception
            self.death = self._make_death(exc)
            self._end_all(self.copy_death)
            self._write_dump(self.death.dump)
            await self._endings.tell_all()

    async def _run(self) -> None:
        while True:
            self._has_news.clear()
            self._launch()
            await self._publish()
            if self._waits:
                self._waits.look()
            if self._in_flight:
                await self._finish_oldest()
            else:
                await self._has_news.wait()  # nothing is in flight, so nothing else can change

    def _launch(self) -> None:
        """Schedule and launch as many steps as the executor takes."""
        if self._freezers:
            return
        num_unstarted = self.scheduler.num_unstarted
        while len(self._in_flight) < self.executor.info.max_in_flight:
            now = self.clock()
            plan = self.scheduler.schedule(now)
            if plan is None:
                break
            if not self._in_flight:
                self._step_began_at = now
            self._in_flight.append(_InFlight(plan, self.executor.launch(plan), now))
        for sequence in self.scheduler.take_started():
            if sequence.listener is not None:
                sequence.listener.on_started()
        if self.scheduler.num_unstarted != num_unstarted:
            self._on_room()

    async def _finish_oldest(self) -> None:
        """Wait for the oldest step and apply it; a step that failed takes its sequences with it."""
        step = self._in_flight[0]
        if step.pending.is_done:
            await asyncio.sleep(0)  # `finish` may then return without a pause, and a fast device would hold the loop
        try:
            result = await step.pending.finish()
        except DeviceLost:
            raise
        except Exception as exc:
            self._fail(step.plan, exc)
            return
        self._num_steps = step.plan.step + 1
        self._step_began_at = now = self.clock()
        num_unstarted = self.scheduler.num_unstarted
        output = self.scheduler.apply(step.plan, result, now)
        self._in_flight.popleft()
        self._observe(step, result, output, now)
        if output.failed:
            self._fail_rows(step.plan, output.failed)
        self._lines = SampledLogprobRows(output) if output.logprobs is not None else None
        self._unpublished_prompts = prompt_lines(output.prompt_logprobs)
        self._unpublished = enumerate(zip(output.sequences, output.token_ids, strict=True))
        if self.scheduler.num_unstarted != num_unstarted:  # children may end with their first token, without a row
            self._on_room()

    async def _publish(self) -> None:
        """Hand out the last step's tokens, yielding between slices."""
        self.is_publishing = True
        is_more = self._publish_slice()
        while is_more:
            await asyncio.sleep(0)
            is_more = self._publish_slice()
        self.is_publishing = False
        self.on_published()

    def _publish_slice(self) -> bool:
        """Hand out what `PUBLISH_SLICE` and `PROMPT_SLICE` say; returns False if there was not as much."""
        for sequence, position, lines in self._unpublished_prompts:
            if sequence.listener is not None:
                sequence.listener.on_prompt_logprobs(position, lines)
            return True
        weight = 0
        for index, (sequence, token_id) in self._unpublished:
            weight += 1
            listener: Listener | None = sequence.listener
            if listener is not None:  # else it was aborted since the step was applied
                line = None
                if self._lines is not None and (line := self._lines.get(index)) is not None:
                    weight += len(line.others) // LOGPROBS_A_TOKEN
                listener.on_token(token_id, line)
                if sequence.finish_reason is not None and sequence.listener is listener:
                    self._release(sequence).on_end()
            if weight >= PUBLISH_SLICE:
                return True
        return False

    # What observers see

    def _observe(self, step: _InFlight, result: StepResult, output: StepOutput, now: float) -> None:
        record = make_record(
            self.scheduler,
            step.plan,
            result,
            output,
            launched_at=step.launched_at,
            now=now,
            num_waiting_for_admission=self.num_waiting_for_admission(),
        )
        for observer in self.observers:
            with self.user_code.called("an observer failed"):
                observer.on_step(record)
        line = self._stats_log.poll(now)
        if line is not None:
            logger.info("%s", line)

    # When it breaks

    def _fail(self, plan: StepPlan, cause: Exception) -> None:
        failed = self.scheduler.fail(plan)
        self._in_flight.popleft()
        self._num_steps = plan.step + 1
        self._step_began_at = self.clock()
        dump = self._describe(cause, plan)
        message = f"step {plan.step} failed with {len(failed)} sequences in it: {describe(cause)}"
        logger.error("%s\n%s", message, dump)
        for sequence in failed:
            failure = StepFailed(message, dump=dump)
            failure.__cause__ = cause
            self._endings.add(sequence.order, self._release(sequence), failure)
        self._endings.tell_some()
        self._on_room()
        self._write_dump(dump)

    def _fail_rows(self, plan: StepPlan, failed: list[tuple[Sequence, Exception]]) -> None:
        """Single rows of a step failed, each for a reason of its own, and the others did not."""
        dump = self._describe(failed[0][1], plan)
        for sequence, cause in failed:
            message = f"this request's part of step {plan.step} failed: {describe(cause)}"
            if sequence.sampling.choice == 0 or cause is not failed[0][1]:  # not again for each child
                lines = "\n".join(traceback_of(cause))
                logger.error("%s: %s\n%s", sequence.request.request_id, message, lines)
            failure = StepFailed(message, dump=dump)
            failure.__cause__ = cause
            self._endings.add(sequence.order, self._release(sequence), failure)
        self._endings.tell_some()
        self._on_room()
        self._write_dump(dump)

    def _make_death(self, cause: BaseException) -> EngineDead:
        dump = self._describe(cause, self._in_flight[0].plan if self._in_flight else None)
        reason = cause.__cause__ if isinstance(cause, DeviceLost) and cause.__cause__ is not None else cause
        death = EngineDead(f"the engine cannot go on: {describe(reason)}; start a new one", dump=dump)
        death.__cause__ = cause
        logger.critical("%s\n%s", death, dump)
        return death

    def _describe(self, cause: BaseException, plan: StepPlan | None) -> str:
        try:
            return describe_failure(cause, plan=plan, stats=self.stats(), config=self.config)
        except Exception:  # what broke may be what is described; those who wait must hear of it all the same
            logger.exception("the failure cannot be described")
            return ""

    def _end_all(self, error: Callable[[], AioEngineError]) -> None:
        """Let everyone hear an end. The scheduler or a listener may be what broke: neither keeps it from the others."""
        self.is_stopped = True
        self.user_code.keep()
        is_more = True
        num_failures, max_failures = 0, len(self._live)  # a token each; more, and publishing itself is what broke
        while is_more and num_failures <= max_failures:
            num_failures += 1
            with self.user_code.called("while ending what was running"):
                is_more = self._publish_slice()
                num_failures -= 1
        for sequence in list(self._live.values()):
            self._endings.add(sequence.order, self._release(sequence), error())
        with self.user_code.called("while ending what was running"):
            for sequence in self.scheduler.sequences():
                self.scheduler.finish(sequence, "error")
            self._on_room()
        self._waits.end_all()

    def _release(self, sequence: Sequence) -> Listener:
        """Its listener, which hears its end now and nothing more."""
        del self._live[sequence.order]
        self._held.pop(sequence.order, None)
        listener: Listener = sequence.listener
        sequence.listener = None  # launched steps hold the sequence, and must not hold the caller's side of it
        return listener


def make_record(
    scheduler: Scheduler,
    plan: StepPlan,
    result: StepResult,
    output: StepOutput,
    *,
    launched_at: float,
    now: float,
    num_waiting_for_admission: int = 0,
) -> StepRecord:
    """What observers hear of a step that has just been applied."""
    kv = scheduler.kv
    return StepRecord(
        step=plan.step,
        num_tokens=int(plan.num_tokens.sum()),
        num_sampled=len(output.token_ids),
        num_prompt_tokens=sum(len(sequence.prompt) for sequence in output.first),
        device_time_s=result.device_time_s,
        step_time_s=now - launched_at,
        loop_lag_s=max(now - result.ended_at_s, 0.0) if result.ended_at_s else None,
        inter_token_latencies_s=output.gaps_s,
        times_to_first_token_s=[now - sequence.arrived_at for sequence in output.first],
        running=scheduler.num_running,
        waiting=scheduler.num_idle + num_waiting_for_admission,
        free_blocks=kv.pool.num_free,
        num_blocks=kv.pool.num_blocks,
        preemptions=scheduler.preemption.num_preemptions,
        prefix_cache_queries=kv.num_queried_tokens,
        prefix_cache_hits=kv.num_hit_tokens,
        blocked=len(scheduler.blocked),
    )


def _closed() -> EngineClosed:
    return EngineClosed("the engine was closed before this request had ended")
