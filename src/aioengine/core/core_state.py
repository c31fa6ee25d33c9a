"""What an engine core has accepted and what holds it back: all that its callers do to it between two steps."""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import Callable, Coroutine, Iterable
from typing import Any, NamedTuple, TypeVar

from aioengine.config import EngineConfig
from aioengine.core.control import PauseMode, WakeTag
from aioengine.core.executor_protocol import Executor, ExecutorInfo, PendingStep
from aioengine.core.health import Beat, Health, dead, judge
from aioengine.core.listener import Conditions, Endings, Listener
from aioengine.core.observers import Observers, UserCode
from aioengine.errors import EngineClosed, EngineDead
from aioengine.outputs import FinishReason
from aioengine.scheduler.kv_manager import KVManager
from aioengine.scheduler.plan import StepPlan
from aioengine.scheduler.prefix_cache import hash_prompt, root_of
from aioengine.scheduler.scheduler import Scheduler, SchedulerStats
from aioengine.scheduler.sequence import Reason, Request, Sequence, make_choices

T = TypeVar("T")


class InFlight(NamedTuple):
    """A step that was launched and is not applied."""

    plan: StepPlan
    pending: PendingStep
    launched_at: float


class CoreState:
    """A `Core` but for its loop: the sequences from `add` to their ends, and what holds them back.

    Args:
        as `EngineCore`.
    """

    def __init__(
        self,
        executor: Executor,
        config: EngineConfig,
        *,
        eos_token_ids: tuple[int, ...],
        on_capacity: Callable[[], None],
        num_waiting_for_admission: Callable[[], int],
        clock: Callable[[], float],
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
        self.is_stopped = False
        self.asleep: set[WakeTag] = set()
        """What `Sleep` has taken and `WakeUp` has not brought back."""
        self.clock = clock
        self.user_code = UserCode()
        self.observers = Observers(self.user_code, log_interval_s=config.log_stats_interval_s, now_s=clock())
        self.num_waiting_for_admission = num_waiting_for_admission
        self._on_capacity = on_capacity
        self._live: dict[int, Sequence] = {}
        """Sequences not yet reported finished, by order; the scheduler may have finished them already."""
        self._held: dict[int, Sequence] = {}
        """Those of `_live` that were added while `_holders` held new sequences back, by order."""
        self._in_flight: deque[InFlight] = deque()
        self._has_news = asyncio.Event()
        """A sequence or a hold was added, ended or changed since the loop last asked the scheduler."""
        self._endings = Endings(self.user_code, self._has_news.set)
        self._holders: set[str] = set()
        """Reasons to hold new sequences back."""
        self._freezers: set[str] = set()
        """Reasons not to launch a step."""
        self._conditions = Conditions()
        self._num_steps = 0
        """Steps that have ended."""
        self._step_began_at = math.nan
        """When the device got to the oldest step in flight."""
        self._device_calls: dict[object, tuple[str, float]] = {}
        """What the executor was asked beside steps and has not answered, oldest first: (what, when)."""

    def make_sequence(self, request: Request) -> Sequence:
        hashes = None
        if self.config.enable_prefix_caching:
            hashes = hash_prompt(request.prompt_token_ids, self.kv.block_size, root_of(request.cache_salt))
        return make_choices(request, eos_token_ids=self.eos_token_ids, block_hashes=hashes)

    def add(self, sequence: Sequence, listeners: Iterable[Listener], *, arrived_at: float | None = None) -> None:
        self.check_accepting()
        sequence.arrived_at = self.clock() if arrived_at is None else arrived_at
        choices = (sequence, *sequence.children)
        is_held = bool(self._holders)
        self.scheduler.add(sequence, Reason.PAUSED if is_held else Reason.NONE)
        for member, listener in zip(choices, listeners, strict=True):
            member.listener = listener
            self._live[member.order] = member
            if is_held:
                self._held[member.order] = member
        self._has_news.set()

    def check_accepting(self) -> None:
        if self.death is not None:
            raise self.copy_death()
        if self.is_stopped:
            raise EngineClosed("the engine is closed")

    def finish(self, sequence: Sequence, reason: FinishReason, stop_reason: int | str | None = None) -> None:
        choices = (sequence, *sequence.children)
        if not self.is_stopped and self.scheduler.finish(sequence, reason, stop_reason):
            for member in choices:
                if member.order in self._live:
                    self._release(member).on_end()
            self._on_capacity()
            self._has_news.set()
        elif self._endings:
            self._endings.tell(sequence.order)

    def block(self, sequence: Sequence) -> None:
        self.scheduler.block(sequence, Reason.BACKPRESSURE)

    def unblock(self, sequence: Sequence) -> None:
        if sequence.reasons & Reason.BACKPRESSURE:
            self.scheduler.unblock(sequence, Reason.BACKPRESSURE)
            self._has_news.set()

    async def at_device(self, call: Coroutine[Any, Any, T], name: str = "") -> T:
        """Await a call of the executor's beside steps; until it answers, `beat` tells which it is and how old."""
        self._device_calls[call] = name or getattr(call, "__name__", "a control call"), self.clock()
        try:
            return await call
        finally:
            del self._device_calls[call]

    def hold(self, holder: str, mode: PauseMode) -> None:
        """Hold back new sequences until ``holder`` lets go. Idempotent; a later mode adds to an earlier one.

        Args:
            mode: for older sequences. "keep": they stop where they are; "wait": they go on to their ends; "abort": they
                end with what they have.
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
        self.let_go("pause")

    def abort_all(self) -> None:
        for sequence in list(self._live.values()):
            choices = (sequence, *sequence.children)
            if not self.is_stopped and self.scheduler.finish(sequence, "abort"):
                for member in choices:
                    if member.order in self._live:
                        self._endings.add(member.order, self._release(member))
        self._endings.tell_some()
        self._on_capacity()
        self._has_news.set()

    @property
    def is_sleeping(self) -> bool:
        return bool(self.asleep)

    @property
    def is_quiet(self) -> bool:
        """Whether no step is in flight and none can be launched; or nothing is held back any more."""
        is_still = bool(self._freezers) or len(self._held) == len(self._live)
        return not (self._holders or self._freezers) or (is_still and not self._in_flight)

    def when(self, is_so: Callable[[], bool]) -> asyncio.Future[None]:
        future = self._conditions.add(is_so)
        if self.is_stopped:
            self._conditions.end_all()
        self._has_news.set()
        return future

    def recheck(self) -> None:
        if self._conditions:
            self._has_news.set()

    @property
    def info(self) -> ExecutorInfo:
        return self.executor.info

    @property
    def num_unstarted(self) -> int:
        return self.scheduler.num_unstarted

    @property
    def is_drained(self) -> bool:
        return not (self._live or self._endings)

    def last_token_at(self, sequence: Sequence) -> float:
        has_row = sequence.row >= 0
        return float(self.scheduler.table.token_at[sequence.row]) if has_row else sequence.last_token_at

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
            waiting=self.scheduler.num_without_row + self.num_waiting_for_admission(),
            is_sleeping=self.is_sleeping,
            is_paused="pause" in self._holders,
            free_blocks=self.kv.pool.num_free,
            blocked=len(self.scheduler.blocked),
        )

    def health(self) -> Health:
        if self.death is not None:
            return dead(str(self.death), self.beat())
        if self.is_stopped:
            return dead("it was closed", self.beat())
        return judge(self.beat(), stall_after_s=self.config.stall_after_s)

    def copy_death(self) -> EngineDead:
        assert self.death is not None
        return self.death.anew()

    def _release(self, sequence: Sequence) -> Listener:
        """Forget a sequence that has ended; returns its listener, which is to hear the end and nothing more."""
        del self._live[sequence.order]
        self._held.pop(sequence.order, None)
        listener: Listener = sequence.listener
        sequence.listener = None  # launched steps hold the sequence, and must not hold the caller's side of it
        return listener
