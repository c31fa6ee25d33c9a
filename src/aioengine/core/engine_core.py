"""The one loop: finish(N) → apply → schedule → launch → publish; and what its callers do between two steps.

`EngineCore` puts a pure scheduler and an executor together. The next step is launched before the last one's tokens are
handed out: 256 woken readers can hold a loop for milliseconds, and the device must not wait for them.
"""

from __future__ import annotations

import asyncio
import json
import logging
import math
import time
from collections import deque
from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping
from typing import Any, NamedTuple, TypeVar

import anyio
import msgspec

from aioengine.config import EngineConfig
from aioengine.core import control as c
from aioengine.core.executor_protocol import DeviceLost, Executor, ExecutorInfo, Lockstep, PendingStep
from aioengine.core.grammars import Grammars
from aioengine.core.health import Beat, Health, dead, judge
from aioengine.core.listener import (
    Conditions,
    Endings,
    Listener,
    OutputLogprobs,
    SampledLogprobs,
    slice_prompt_logprobs,
)
from aioengine.core.named_functions import MakeProcessor, load_processors, make_processors
from aioengine.core.observers import Observers, UserCode, make_record
from aioengine.errors import (
    AioEngineError,
    EngineClosed,
    EngineDead,
    InternalError,
    InvalidRequest,
    NoTokenLeft,
    StepFailed,
    describe,
    traceback_of,
)
from aioengine.outputs import FinishReason
from aioengine.scheduler.kv_manager import KVManager
from aioengine.scheduler.plan import Float32, GrammarHandle, Int32, NothingAllowed, StepPlan, StepResult
from aioengine.scheduler.policy import Incoming, Policy, make_policy, order_of
from aioengine.scheduler.scheduler import Scheduler, SchedulerStats
from aioengine.scheduler.sequence import Reason, Request, Sequence, make_choices, resume_choice
from aioengine.scheduler.steps import Budget
from aioengine.structured.grammar import CompiledGrammar
from aioengine.validation import shorten

T = TypeVar("T")

logger = logging.getLogger("aioengine")

PUBLISH_SLICE = 32
"""Tokens that are handed out before the loop gets its turn, below a millisecond; one with many log-probabilities counts
for several."""


PARTS: tuple[c.WakeTag, ...] = ("weights", "kv_cache")
"""Parts of the device's memory that `Sleep` takes at levels 1 and 2."""


class InFlight(NamedTuple):
    """A step that was launched and is not applied."""

    plan: StepPlan | None
    """None: of a dummy."""
    pending: PendingStep[StepResult] | PendingStep[None]
    launched_at: float


class EngineCore:
    """A `Core` over one executor: requests in, products out; lives on the loop that calls `run`.

    Args:
        executor: started; the caller closes it after `EngineCore.run` has ended.
        config: the engine's.
        policy, processors: absent: the config's.
        grammars: compiles what requests ask for; None: requests with grammars are refused.
        eos_token_ids: the model's.
        on_capacity: called when a waiting sequence has begun to run or has ended.
        write_dump: begins to keep the report of a failed step, and returns at once.
        clock: seconds; the executor's, for the ends of steps.
    Attributes:
        lockstep: the group that it is in; None: it steps alone.
        publish_slice: tokens that are handed out before the loop gets its turn.
        on_published: called when a step's products have all been handed out.
    """

    lockstep: Lockstep | None = None
    publish_slice = PUBLISH_SLICE
    on_published: Callable[[], None] | None = None

    def __init__(
        self,
        executor: Executor,
        config: EngineConfig,
        *,
        policy: Policy | None = None,
        processors: Mapping[str, MakeProcessor] | None = None,
        grammars: Grammars | None = None,
        eos_token_ids: tuple[int, ...] = (),
        on_capacity: Callable[[], None] = lambda: None,
        write_dump: Callable[[str], None] = lambda _: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        info = executor.info
        self.executor = executor
        self.config = config
        self.eos_token_ids = eos_token_ids
        self.kv = KVManager(
            info.pool_blocks,
            info.block_size,
            enable_prefix_caching=config.enable_prefix_caching,
            layout=info.layout,
            max_in_flight=info.max_in_flight,
            max_step_tokens=config.max_num_batched_tokens,
        )
        self.scheduler = Scheduler(
            self.kv,
            max_num_seqs=config.max_num_seqs,
            budget=Budget(
                config.max_num_batched_tokens,
                config.max_mixed_prefill_tokens or info.max_mixed_prefill_tokens or config.max_num_batched_tokens,
            ),
            eos_token_ids=eos_token_ids,
            policy=policy or make_policy(config.scheduler),
        )
        self.death: EngineDead | None = None
        self.is_stopped = False
        self.asleep: set[c.WakeTag] = set()
        """Parts that `Sleep` has taken and `WakeUp` has not brought back."""
        self.clock = clock
        self.user_code = UserCode()
        self.observers = Observers(self.user_code, log_interval_s=config.log_stats_interval_s, now_s=clock())
        self.grammars = grammars
        self._processors = load_processors(config.logits_processors) if processors is None else processors
        self._on_capacity = on_capacity
        self._write_dump = write_dump
        self._live: dict[int, Sequence] = {}
        """Sequences not yet reported finished, by order; the scheduler may have finished them already."""
        self._in_flight: deque[InFlight] = deque()
        self._is_changed = asyncio.Event()
        """A sequence or a hold was added, ended or changed since the loop last asked the scheduler."""
        self._endings = Endings(self.user_code, self._is_changed.set)
        self._holds: dict[str, bool] = {}
        """Holders that keep new sequences back, and whether each keeps steps from being launched, too."""
        self._is_changing_weights = False
        """No hold: what is accepted meanwhile is older than a pause that comes then, and may be let end by it."""
        self._conditions = Conditions()
        self._num_steps = 0
        """Steps that have ended."""
        self._step_began_at = math.nan
        """When the device got to the oldest step in flight."""
        self._idle_since = math.nan
        """Since when sequences could run and no step is in flight; NaN: that is not so."""
        self._device_calls: dict[object, tuple[str, float]] = {}
        """(name, time) of calls that the executor has not answered, the oldest first."""
        self._device_turn = anyio.Lock(fast_acquire=True)
        """Held by calls that change the device's memory: they go one after the other."""
        self._has_logged_idle = False
        self._broken: Exception | None = None
        """Ends the loop before its next step."""
        # The last step's products that were not handed out yet
        self.is_publishing = False
        self._unpublished: Iterator[tuple[int, tuple[Sequence, int]]] = iter(())
        """(index, (sequence, token)) of the step's output."""
        self._unpublished_prompts: Iterator[tuple[Sequence, int, list[SampledLogprobs]]] = iter(())
        self._unpublished_vectors: Iterator[tuple[Sequence, Float32]] = iter(())
        self._forced: Mapping[int, list[int]] = {}
        """By index, the tokens that a grammar put behind those in `_unpublished`."""
        self._logprobs: OutputLogprobs | None = None
        """Log-probabilities of the tokens in `_unpublished`; None where no request asked for any."""

    def enter_group(self, lockstep: Lockstep) -> None:
        """Step together with a group from now on; before `run`."""
        self.lockstep = lockstep
        lockstep.on_change = self._is_changed.set

    # The loop

    def break_down(self, cause: Exception) -> None:
        """Make `run` fail with ``cause``."""
        self._broken = cause
        self._is_changed.set()

    async def run(self) -> None:
        """Run steps until cancelled, or until the device or this code breaks.

        On the way out every sequence that has not ended gets `EngineClosed`, or `EngineDead` with the cause.
        Cancelling stops the loop; the launched steps still complete on the device.
        """
        await self._endings.report_after(self._run(), lambda: self._end_all(closed_early), self._die_of)

    def _die_of(self, cause: BaseException) -> None:
        dump = self._describe(cause, self._in_flight[0].plan if self._in_flight else None)
        reason = cause.__cause__ if isinstance(cause, DeviceLost) and cause.__cause__ is not None else cause
        self.death = EngineDead(f"the engine cannot go on: {describe(reason)}; start a new one", dump=dump)
        self.death.__cause__ = cause
        self._log_failure(logging.CRITICAL, str(self.death), dump)
        self._end_all(self.copy_death)
        self._write_dump(self.death.dump)

    async def _run(self) -> None:
        while True:
            self._is_changed.clear()
            if self._broken is not None:
                raise self._broken
            self._launch()
            self._check_idle()
            await self._publish()
            self._conditions.check()
            if self._in_flight:
                await self._finish_oldest()
            else:
                await self._is_changed.wait()  # nothing is in flight, so nothing else can change

    def _launch(self) -> None:
        """Schedule and launch as many steps as the executor takes."""
        is_frozen, lockstep = self._is_frozen, self.lockstep
        if is_frozen and lockstep is None:
            return
        num_unstarted = self.scheduler.num_unstarted
        while len(self._in_flight) < self.executor.info.max_in_flight:
            if lockstep is not None and not lockstep.may_launch:
                break
            now = self.clock()
            plan = None if is_frozen else self.scheduler.schedule_step(now)
            if plan is None and not (lockstep is not None and self._may_launch_dummy):
                break
            if not self._in_flight:
                self._step_began_at = now
            pending = self.executor.launch_dummy() if plan is None else self.executor.launch(plan)
            self._in_flight.append(InFlight(plan, pending, now))
            if lockstep is not None:
                lockstep.on_launch(self._has_work)
        for sequence in self.scheduler.take_started():
            if sequence.listener is not None:
                sequence.listener.on_started()
        if self.scheduler.num_unstarted != num_unstarted:
            self._on_capacity()

    def _check_idle(self) -> None:
        """Note whether sequences could run and no step was launched, which is a bug of the scheduler; log it once."""
        may_launch = not self._is_frozen and (self.lockstep is None or self.lockstep.may_launch)
        if self._in_flight or not (may_launch and self._has_work):
            self._idle_since = math.nan
        elif math.isnan(self._idle_since):
            self._idle_since = self.clock()
            if not self._has_logged_idle:
                self._has_logged_idle = True
                bug = InternalError("sequences can run, and the scheduler makes no step of them")
                dump = self._describe(bug, None)
                sequences = "\n".join(map(repr, self.scheduler.sequences()[:64]))
                logger.error("%s; please report this\n%s\n%s", bug, sequences, dump)
                self._write_dump(dump)

    async def _finish_oldest(self) -> None:
        """Wait for the oldest step and apply it; a step that failed takes its sequences with it."""
        step = self._in_flight[0]
        if step.pending.is_done:
            await asyncio.sleep(0)  # `finish` may then return without a pause, and a fast device would hold the loop
        try:
            result = await step.pending.finish()
        except Exception as exc:
            if self.lockstep is not None:
                # The others wait in this step, or have gone past it; or one of them is gone, and this one ends with it.
                await asyncio.sleep(self.lockstep.grace_s)
                raise
            if step.plan is None or isinstance(exc, DeviceLost):
                raise
            self._fail(step.plan, exc)
            return
        if step.plan is None or result is None:
            self._in_flight.popleft()
            self._step_began_at = self.clock()
            return
        self._num_steps = step.plan.step + 1
        self._step_began_at = now = self.clock()
        num_unstarted = self.scheduler.num_unstarted
        output = self.scheduler.apply_result(step.plan, result, now)
        self._in_flight.popleft()
        record = make_record(self.scheduler, step.plan, result, output, launched_at=step.launched_at, now=now)
        self.observers.on_step(record, now)
        if output.failed:
            message = f"this request's part of step {step.plan.step} failed"
            self._end_failed(step.plan, message, output.failed[0][1], output.failed)
        self._logprobs = OutputLogprobs(output) if output.logprobs is not None else None
        self._unpublished_prompts = slice_prompt_logprobs(output.prompt_logprobs)
        self._unpublished_vectors = iter(output.vectors)
        self._unpublished = enumerate(zip(output.sequences, output.token_ids, strict=True))
        self._forced = output.forced
        if self.scheduler.num_unstarted != num_unstarted:  # children may end with their first token, without a row
            self._on_capacity()

    async def _publish(self) -> None:
        """Hand out the last step's tokens, yielding between slices."""
        self.is_publishing = True
        is_more = self._publish_slice()
        while is_more:
            await asyncio.sleep(0)
            is_more = self._publish_slice()
        self.is_publishing = False
        if self.on_published is not None:
            self.on_published()

    def _publish_slice(self) -> bool:
        """Hand out one slice of a prompt's log-probabilities, or of tokens; returns False after the last one."""
        for sequence, position, prompt_logprobs in self._unpublished_prompts:
            if sequence.listener is not None:
                sequence.listener.on_prompt_logprobs(position, prompt_logprobs)
            return True
        weight = 0
        for sequence, vector in self._unpublished_vectors:
            weight += 1
            if (pooling := sequence.listener) is not None:
                pooling.on_vector(vector)
                if sequence.listener is pooling:
                    self._release(sequence).on_end()
            if weight >= self.publish_slice:
                return True
        for index, (sequence, token_id) in self._unpublished:
            weight += 1
            listener: Listener | None = sequence.listener
            if listener is not None:  # else it was aborted since the step was applied
                logprobs = None
                if self._logprobs is not None and (logprobs := self._logprobs.get(index)) is not None:
                    weight += len(logprobs.others) // 8  # eight cost as much as a token
                listener.on_token(token_id, logprobs)
                if self._forced:
                    for forced_id in self._forced.get(index, ()):
                        weight += 1
                        listener.on_token(forced_id, None)
                if sequence.finish_reason is not None and sequence.listener is listener:
                    self._release(sequence).on_end()
            if weight >= self.publish_slice:
                return True
        return False

    # Sequences

    @property
    def capacity(self) -> int:
        return self.config.max_waiting

    def make_sequence(self, request: Request) -> Sequence:
        hashes = None
        if self.config.enable_prefix_caching:
            hashes = request.prefix_key.hash_blocks(request.prompt_token_ids, self.kv.block_size)
        extra_args = request.params.extra_args
        processors = request.params.logits_processors
        if extra_args:
            processors += make_processors(self._processors, extra_args)
        handles = self.executor.handles.add_processors(processors)
        return make_choices(request, eos_token_ids=self.eos_token_ids, block_hashes=hashes, processors=handles)

    def make_resumed(self, request: Request, choice: int, output_ids: Int32) -> Sequence:
        """As `make_sequence`: one choice, to go on behind tokens that another engine has sampled."""
        sequence = resume_choice(self.make_sequence(request), choice, output_ids.tolist())
        if self.config.enable_prefix_caching:
            sequence.block_hashes = request.prefix_key.hash_blocks(sequence.token_ids(), self.kv.block_size)
        return sequence

    def add(self, sequence: Sequence, listeners: Iterable[Listener], *, arrived_at: float | None = None) -> None:
        self.check_accepting()
        now = self.clock()
        sequence.arrived_at = now if arrived_at is None else arrived_at
        if sequence.output_ids:  # sampled by another engine: its next token here is not its first
            sequence.first_token_at = sequence.last_token_at = now
        choices = (sequence, *sequence.children)
        # Before its grammar is begun: one that the policy fails waits for none.
        order = order_of(self.scheduler.policy, Incoming.of(sequence.request))
        reason = Reason.PAUSED if self._holds else Reason.NONE
        if sequence.sampling.grammar is not None:
            reason |= self._find_grammar(sequence, sequence.sampling.grammar, order.tenant or sequence.request.tenant)
        self.scheduler.add_sequence(sequence, reason, order=order)
        for member, listener in zip(choices, listeners, strict=True):
            member.listener = listener
            self._live[member.order] = member
        self._is_changed.set()

    def _find_grammar(self, sequence: Sequence, handle: GrammarHandle, tenant: str) -> Reason:
        """Have its grammar in the executor's table; or begin to compile that, which it waits for."""
        if self.grammars is None:
            raise InvalidRequest("structured: this engine has no model folder to compile it for", param="structured")
        grammar = self.grammars.get(handle)
        if grammar is not None:
            self.executor.handles.put_grammar(handle, grammar)
            return Reason.NONE
        self.grammars.begin(
            handle,
            lambda outcome: self._on_grammar(sequence, handle, outcome),
            lambda: not sequence.has_ended,
            tenant=tenant,
        )
        return Reason.GRAMMAR

    def _on_grammar(self, sequence: Sequence, handle: GrammarHandle, outcome: CompiledGrammar | AioEngineError) -> None:
        if sequence.has_ended or self.is_stopped:
            return
        choices = (sequence, *sequence.children)
        if not isinstance(outcome, AioEngineError):
            self.executor.handles.put_grammar(handle, outcome)
            for member in choices:
                self.scheduler.unblock_sequence(member, Reason.GRAMMAR)
        else:
            self.scheduler.finish_sequence(sequence, "error")
            for member in choices:
                self._endings.add_end(member.order, self._release(member), outcome.anew())
            self._endings.report_some()
            self._on_capacity()
        self._is_changed.set()

    def check_accepting(self) -> None:
        if self.death is not None:
            raise self.copy_death()
        if self.is_stopped:
            raise EngineClosed("the engine is closed")

    def finish(self, sequence: Sequence, reason: FinishReason, stop_reason: int | str | None = None) -> None:
        choices = (sequence, *sequence.children)
        if not self.is_stopped and self.scheduler.finish_sequence(sequence, reason, stop_reason):
            for member in choices:
                if member.order in self._live:
                    self._release(member).on_end()
            self._on_capacity()
            self._is_changed.set()
        elif self._endings:
            self._endings.report(sequence.order)

    def abort_all(self) -> None:
        for sequence in list(self._live.values()):
            choices = (sequence, *sequence.children)
            if not self.is_stopped and self.scheduler.finish_sequence(sequence, "abort"):
                for member in choices:
                    if member.order in self._live:
                        self._endings.add_end(member.order, self._release(member))
        self._endings.report_some()
        self._on_capacity()
        self._is_changed.set()

    def block(self, sequence: Sequence) -> None:
        self.scheduler.block_sequence(sequence, Reason.BACKPRESSURE)

    def unblock(self, sequence: Sequence) -> None:
        if sequence.reasons & Reason.BACKPRESSURE:
            self.scheduler.unblock_sequence(sequence, Reason.BACKPRESSURE)
            self._is_changed.set()

    def _release(self, sequence: Sequence) -> Listener:
        """Forget a sequence that has ended; returns its listener, which is to get the end and nothing else."""
        del self._live[sequence.order]
        listener: Listener = sequence.listener
        sequence.listener = None  # launched steps hold the sequence, and must not hold the caller's side of it
        return listener

    # Holding back

    def _hold(self, holder: str, mode: c.PauseMode) -> None:
        """Hold back new sequences until ``holder`` lets go. Idempotent; a later mode adds to an earlier one.

        Args:
            mode: for older sequences. "keep": they stop where they are, since nothing is launched; "wait": they go on
                to their ends; "abort": they end with what they have.
        """
        self._holds[holder] = mode == "keep" or self._holds.get(holder, False)
        if mode == "abort":
            self.abort_all()

    def _let_go(self, holder: str) -> None:
        """``holder`` does not hold back any more; idempotent."""
        self._holds.pop(holder, None)
        if not self._holds:
            for sequence in self._live.values():
                self.scheduler.unblock_sequence(sequence, Reason.PAUSED)
        self._is_changed.set()

    def resume(self) -> None:
        self._let_go("pause")

    @property
    def _is_frozen(self) -> bool:
        """Whether no step of a plan is launched."""
        return self._is_changing_weights or any(self._holds.values())

    @property
    def _may_launch_dummy(self) -> bool:
        """Whether a wave runs whose steps the device can compute. Paused, it still does: the others compute.

        Work that waits for a launched step is not put behind dummies.
        """
        if self.lockstep is None or not self.lockstep.is_running or (self._in_flight and self._has_work):
            return False
        return not self._is_changing_weights and not self.asleep - {"scheduling"}

    @property
    def _has_work(self) -> bool:
        """Whether a wave must go on for what is here. What waits for its reader, or is paused, begins another one."""
        return self.scheduler.has_work and not any(self._holds.values())

    @property
    def _is_quiet(self) -> bool:
        """Whether the holds have brought the device to rest: no step is in flight, and none can be launched.

        True as well when no hold is left: what awaits the rest that a pause brings ends with the pause.
        """
        if not self._holds:
            return True
        if self.lockstep is not None and self.lockstep.is_running:
            return False  # up to the end of the wave
        is_still = any(self._holds.values()) or all(
            sequence.reasons & Reason.PAUSED for sequence in self._live.values()
        )
        return is_still and not self._in_flight

    def when(self, is_so: Callable[[], bool]) -> asyncio.Future[None]:
        self._is_changed.set()
        return self._conditions.add(is_so)

    def recheck(self) -> None:
        if self._conditions:
            self._is_changed.set()

    # Control calls

    async def call(self, control: c.AnyControl) -> Any:
        try:
            return await self._perform(control)
        except DeviceLost as lost:
            if self.death is not None:
                raise self.copy_death() from lost
            raise EngineClosed("the engine is closed") from lost

    async def _perform(self, call: c.AnyControl) -> Any:
        match call:
            case c.ResetPrefixCache():
                if call.reset_running:
                    self.scheduler.preempt_all()
                return self.scheduler.reset_prefix_cache()
            case c.Pause():
                self._hold("pause", call.mode)
                await self.when(lambda: self._is_quiet)
            case c.Resume():
                self.resume()
            case c.Sleep():
                await self._sleep(call)
            case c.WakeUp():
                await self._wake_up(call)
            case c.IsSleeping():
                return self.is_sleeping
            case c.SupportedTasks():
                return c.TASKS
            case c.StartWave():
                if self.lockstep is None:
                    raise InvalidRequest("this engine is in no lockstep group", param="wave")
                self.lockstep.on_start(call.wave)
            case c.UpdateWeights() | c.CommitWeights():
                await self._change_weights(call)
            case c.SaveShardedState() | c.ExecuteDummyBatch():
                async with self._device_turn:
                    if isinstance(call, c.ExecuteDummyBatch) and self.asleep - {"scheduling"}:
                        raise InvalidRequest("a sleeping engine computes nothing: wake it up first")
                    return await self._ask(call)
            case _:
                return await self._ask(call)
        return None

    async def _ask(self, call: c.Control) -> Any:
        return await self.at_device(c.name_of(call), self.executor.perform(call))

    async def at_device(self, what: str, call: Coroutine[Any, Any, T]) -> T:
        """Await a call of the executor's beside steps; until it answers, `beat` has its name and age."""
        self._device_calls[call] = what, self.clock()
        try:
            return await call
        finally:
            del self._device_calls[call]
            if self._in_flight:  # the device gets to it now, or has been at it before this call
                self._step_began_at = self.clock()

    async def _sleep(self, call: c.Sleep) -> None:
        self.asleep.add("scheduling")
        self._hold("sleep", call.mode)
        await self.when(lambda: not self.asleep or self._is_quiet)
        async with self._device_turn:
            if self.asleep:  # else it was woken meanwhile
                self.check_accepting()
                self._hold("sleep", "keep")
                await self.when(lambda: self._is_quiet)
                self.check_accepting()
                self._forget_kv()
                if call.level:
                    await self._give_memory_back(call)

    async def _give_memory_back(self, call: c.Sleep) -> None:
        before = set(self.asleep)
        self.asleep.update(PARTS)
        try:
            await self._ask(call)
        except Exception:
            self.asleep = before  # as deep as it was
            if before == {"scheduling"}:
                self._wake_scheduling()
            raise

    async def _wake_up(self, call: c.WakeUp) -> None:
        if self.asleep == {"scheduling"} and "scheduling" in call.tags and not self._device_turn.locked():
            self._wake_scheduling()  # it only waits for others to end
            return
        async with self._device_turn:  # behind a `Sleep` that is under way
            parts = [part for part in PARTS if part in call.tags and part in self.asleep]
            if parts:
                await self._ask(c.WakeUp(parts))
                self.asleep.difference_update(parts)
            if self.asleep <= {"scheduling"} and (parts or "scheduling" in call.tags):
                self._wake_scheduling()

    def _wake_scheduling(self) -> None:
        self.asleep.clear()
        self._let_go("sleep")

    async def _change_weights(self, call: c.UpdateWeights | c.CommitWeights) -> None:
        """Change the weights while nothing runs. No KV of the old weights is used again: running
        sequences compute theirs again."""
        async with self._device_turn:
            self._is_changing_weights = True
            try:
                await self.when(lambda: not self._in_flight)
                self.check_accepting()
                await self._ask(call)
            finally:  # also when cancelled: the device may do it all the same
                self._forget_kv()
                self._is_changing_weights = False
                self._is_changed.set()

    def _forget_kv(self) -> None:
        self.scheduler.preempt_all()
        self.scheduler.reset_prefix_cache()

    # What callers ask

    @property
    def info(self) -> ExecutorInfo:
        return self.executor.info

    @property
    def num_unstarted(self) -> int:
        return self.scheduler.num_unstarted

    @property
    def is_drained(self) -> bool:
        return not (self._live or self._endings)

    @property
    def is_sleeping(self) -> bool:
        return bool(self.asleep)

    def last_token_at(self, sequence: Sequence) -> float:
        has_row = sequence.row >= 0
        return float(self.scheduler.table.token_at[sequence.row]) if has_row else sequence.last_token_at

    def stats(self) -> SchedulerStats:
        return self.scheduler.stats()

    def beat(self) -> Beat:
        """How far this core has come."""
        now = self.clock()
        call, asked_at = next(iter(self._device_calls.values()), ("", now))
        # The device works in order: a step that was launched behind a call has not begun.
        is_at_step = bool(self._in_flight) and not (call and asked_at <= self._in_flight[0].launched_at)
        return Beat(
            step=self._num_steps,
            step_age_s=now - self._step_began_at if is_at_step else 0.0,
            call=call,
            call_age_s=now - asked_at,
            running=self.scheduler.num_running,
            waiting=self.scheduler.num_without_row,
            is_sleeping=self.is_sleeping,
            is_paused="pause" in self._holds,
            free_blocks=self.kv.tightest_pool.num_free,
            blocked=len(self.scheduler.blocked),
            wave=self.lockstep.wave if self.lockstep is not None else -1,
            is_wave_running=self.lockstep is not None and self.lockstep.is_running,
            idle_age_s=0.0 if math.isnan(self._idle_since) else now - self._idle_since,
        )

    def health(self) -> Health:
        if self.is_stopped:
            return dead(str(self.death or "it was closed"), self.beat())
        return judge(self.beat(), stall_after_s=self.config.stall_after_s)

    def copy_death(self) -> EngineDead:
        assert self.death is not None
        return self.death.anew()

    # When it breaks

    def _fail(self, plan: StepPlan, cause: Exception) -> None:
        """A step failed, and all sequences in it with it."""
        failed = self.scheduler.fail_step(plan)
        self._in_flight.popleft()
        self._num_steps = plan.step + 1
        self._step_began_at = self.clock()
        message = f"step {plan.step} failed; sequences in it: {len(failed)}"
        self._end_failed(plan, message, cause, [(sequence, cause) for sequence in failed])

    def _end_failed(
        self, plan: StepPlan, message: str, cause: Exception, failed: list[tuple[Sequence, Exception]]
    ) -> None:
        """End sequences by a `StepFailed` each, of its own cause; the report is about ``cause``."""
        requests = dict.fromkeys(sequence.request.request_id for sequence, own_cause in failed if own_cause is cause)
        is_callers = bool(failed) and all(isinstance(own, NothingAllowed | InvalidRequest) for _, own in failed)
        dump = "" if is_callers else self._describe(cause, plan)
        line = f"{message}: {describe(cause)}; requests: {shorten([*requests])}"
        self._log_failure(logging.INFO if is_callers else logging.ERROR, line, dump)
        for sequence, own_cause in failed:
            if own_cause is not cause and not is_callers:
                logger.error("%s: %s", sequence.request.request_id, " ".join(describe(own_cause).split()))
                logger.debug("%s", "\n".join(traceback_of(own_cause)))
            kind = NoTokenLeft if isinstance(own_cause, NothingAllowed) else StepFailed
            failure: AioEngineError = kind(f"{message}: {describe(own_cause)}", dump=dump)
            if isinstance(own_cause, InvalidRequest):  # its constraint is too large, which shows only now
                failure = own_cause.anew()
            failure.__cause__ = own_cause
            self._endings.add_end(sequence.order, self._release(sequence), failure)
        self._endings.report_some()
        self._on_capacity()
        if not is_callers:
            self._write_dump(dump)

    def _log_failure(self, level: int, line: str, dump: str) -> None:
        """Log one line, and the report at DEBUG alone: it has a hundred lines, and logging prints them unasked."""
        if dump and self.config.dump_dir is None:
            line += "; the report is in the error's .dump, and in a file where dump_dir names a folder"
        logger.log(level, "%s", " ".join(line.split()))
        if dump:
            logger.debug("%s", dump)

    def _describe(self, cause: BaseException, plan: StepPlan | None) -> str:
        """The report of a failure: the error, the plan, the scheduler's counters and the config, as indented JSON.

        It holds lengths, rows and sampling parameters, and no token id of any prompt or output.
        """
        try:
            report = {
                "error": traceback_of(cause),
                "plan": plan.describe() if plan is not None else None,
                "stats": msgspec.structs.asdict(self.stats()),
                "config": msgspec.structs.asdict(self.config),
            }
            return json.dumps(report, indent=2, default=str)
        except Exception:  # the broken part may be what is described; requests must get their ends
            logger.exception("the failure cannot be described")
            return ""

    def _end_all(self, error: Callable[[], AioEngineError]) -> None:
        """Report an end to each listener. A broken scheduler or listener keeps it from no other listener."""
        self.is_stopped = True
        self.user_code.keep()
        is_more = True
        num_failures, max_failures = 0, len(self._live)  # one each; with more, publishing itself is what broke
        while is_more and num_failures <= max_failures:
            num_failures += 1
            with self.user_code.called("while ending what was running"):
                is_more = self._publish_slice()
                num_failures -= 1
        for sequence in list(self._live.values()):
            self._endings.add_end(sequence.order, self._release(sequence), error())
        with self.user_code.called("while ending what was running"):
            for sequence in self.scheduler.sequences():
                self.scheduler.finish_sequence(sequence, "error")
            self._on_capacity()
        self._conditions.end_all()


def closed_early() -> EngineClosed:
    """Make the error of a request that had not ended when the engine was closed."""
    return EngineClosed("the engine was closed before this request had ended")
