"""Replicas of this process, on a virtual clock: real clusters of engines that compute nothing and die as they are told.

`SimulatedCore` stands where `RemoteCore` is; all above it (`ClusterCore`, `Placing`, `recovery`, `Replica`) is real.
"""

from __future__ import annotations

import asyncio
import random
import zlib
from collections.abc import Callable, Iterable
from typing import Any

import anyio
import numpy as np
from cluster.test_totals import record

from aioengine.cluster.launchers import Launcher
from aioengine.config import EngineConfig
from aioengine.core.executor_protocol import ExecutorInfo
from aioengine.core.health import Beat, Health, dead, judge
from aioengine.core.listener import UNLIMITED, Listener
from aioengine.core.observers import UserCode
from aioengine.core.protocol import CoreHooks, InFlightSequence
from aioengine.errors import AioEngineError, EngineClosed, EngineDead, ModelLoadError
from aioengine.outputs import FinishReason
from aioengine.sampling_params import SamplingParams
from aioengine.scheduler.scheduler import SchedulerStats
from aioengine.scheduler.sequence import Request, Sequence, make_choices

CONFIG = EngineConfig(heartbeat_interval_s=0.05, heartbeat_timeout_s=1.0, log_stats_interval_s=0.0)
INFO = ExecutorInfo(num_blocks=100, block_size=16, max_model_len=1000, vocab_size=1000)
STEP_S = 0.01
MAX_ROWS = 8
KILLS_AT = 900
"""A prompt [KILLS_AT + k, …] kills what computes its token number k."""


def token_of(request: Request, choice: int, position: int) -> int:
    """What comes at a position, wherever it is computed."""
    return zlib.crc32(np.array([request.seed, choice, position, *request.prompt_token_ids], np.int64).tobytes()) % 800


def make_request(rng: random.Random, number: int, kills_at: int | None = None) -> Request:
    """One of 1 to 30 tokens and 1 to 3 choices."""
    head = rng.randrange(800) if kills_at is None else KILLS_AT + kills_at
    prompt = np.array([head, *(rng.randrange(800) for _ in range(rng.randint(1, 40)))], np.int32)
    num_tokens = rng.randint(1, 30) if kills_at is None else kills_at + 5
    params = SamplingParams(n=1 if kills_at is not None else rng.choice([1, 1, 3]), max_tokens=num_tokens)
    return Request(
        request_id=str(number),
        prompt_token_ids=prompt,
        params=params,
        seed=number,
        max_total_tokens=len(prompt) + num_tokens,
    )


class Heard:
    """The listener of a choice: what it was told."""

    num_allowed = UNLIMITED

    def __init__(self, request: Request, choice: int) -> None:
        self.request = request
        self.choice = choice
        self.tokens: list[int] = []
        self.ends: list[AioEngineError | None] = []

    def on_started(self) -> None:
        assert not self.ends

    def on_token(self, token_id: int, logprobs: object) -> None:
        assert not self.ends, "a token after the end"
        self.tokens.append(token_id)

    def on_prompt_logprobs(self, position: int, logprobs: object) -> None:
        raise AssertionError("none were asked for")

    def on_end(self) -> None:
        self.ends.append(None)

    def on_error(self, error: AioEngineError) -> None:
        self.ends.append(error)

    @property
    def is_right_so_far(self) -> bool:
        return self.tokens == [token_of(self.request, self.choice, at) for at in range(len(self.tokens))]

    @property
    def has_ended_well(self) -> bool:
        num_tokens = self.request.max_total_tokens - len(self.request.prompt_token_ids)
        return self.ends == [None] and len(self.tokens) == num_tokens


class SimulatedCore:
    """An engine of a cluster: each `STEP_S` it brings a token to each of up to `MAX_ROWS` sequences.

    What it has told comes a step later, as from another process; so that a death loses the news of the last step.
    """

    def __init__(self, hooks: CoreHooks, clock: Callable[[], float], rng: random.Random) -> None:
        assert hooks.cluster is not None
        self.config, self.info, self.eos_token_ids = CONFIG, INFO, ()
        self.clock = clock
        self.death: EngineDead | None = None
        self.is_stopped = self.is_sleeping = self.is_far = False
        self.user_code = UserCode()
        self.heard_at = clock()
        self.is_silent = False
        """It is stopped: nothing is computed, and nothing heard."""
        self._cluster = hooks.cluster
        self.capacity = self.config.max_waiting
        self._on_capacity = hooks.on_capacity
        self._rng = rng
        self._live: dict[int, Sequence] = {}
        self._started: set[int] = set()
        self._known: set[int] = set()
        self._next_number = 0
        self._num_steps = 0
        self._over = asyncio.Event()

    num_unstarted = property(lambda self: len(self._live) - len(self._known))
    is_drained = property(lambda self: not self._live)

    def make_sequence(self, request: Request) -> Sequence:
        return make_choices(request, eos_token_ids=())

    def check_accepting(self) -> None:
        if self.death is not None or self.is_stopped:
            raise EngineClosed("it has ended")

    def add(self, sequence: Sequence, listeners: Iterable[Listener], *, arrived_at: float | None = None) -> None:
        self.check_accepting()
        for member, listener in zip((sequence, *sequence.children), listeners, strict=True):
            member.order, self._next_number = self._next_number, self._next_number + 1
            member.listener = listener
            self._live[member.order] = member

    def finish(self, sequence: Sequence, reason: FinishReason, stop_reason: int | str | None = None) -> None:
        if self._live.get(sequence.order) is sequence:
            sequence.finish_reason = reason
            self._release(sequence).on_end()
            self._cluster.conditions.check()

    def abort_all(self) -> None:
        for sequence in list(self._live.values()):
            self.finish(sequence, "abort")

    def take_back(self) -> list[InFlightSequence]:
        in_flight: list[InFlightSequence] = []
        in_families: set[int] = set()
        for order, sequence in self._live.items():
            members = (sequence, *sequence.children)
            if not all(member.order in self._live and not member.output_ids for member in members):
                sequence.children = ()
            in_families.update(child.order for child in sequence.children)
            if order not in in_families:
                in_flight.append(InFlightSequence(sequence, order in self._known))
        self._live.clear()
        self._known.clear()
        self._started.clear()
        return in_flight

    def die(self, death: EngineDead) -> None:
        if not self.is_stopped:
            self.death, self.is_stopped = death, True
            self._over.set()
            self._cluster.on_death(self.take_back())
            self._cluster.conditions.check()

    async def run(self) -> None:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self._step_on)
            await self._over.wait()
            tasks.cancel_scope.cancel()

    async def _step_on(self) -> None:
        while True:
            await anyio.sleep(STEP_S)
            if self.is_silent:
                continue
            self.heard_at = self.clock()
            waiting = [order for order in self._live if order not in self._started]
            self._started.update(waiting[: max(MAX_ROWS - len(self._started), 0)])
            running = [sequence for order, sequence in self._live.items() if order in self._started]
            for sequence in running:
                if sequence.prompt[0] - KILLS_AT == len(sequence.output_ids):
                    self.die(EngineDead(f"killed by request {sequence.request.request_id}"))
                    return
            self._known.update(self._started)
            for sequence in running:
                self._bring_token(sequence)
            self._num_steps += 1
            stats = self.stats()
            told = record(self._num_steps, running=stats.running, preemptions=0)
            self._cluster.on_record(told)
            self._on_capacity()
            self._cluster.conditions.check()

    def _bring_token(self, sequence: Sequence) -> None:
        sequence.children, sequence.has_run = (), True
        token = token_of(sequence.request, sequence.sampling.choice, len(sequence.output_ids))
        sequence.output_ids.append(token)
        sequence.listener.on_token(token, None)
        if sequence.num_tokens >= sequence.limit:
            sequence.finish_reason = "length"
            self._release(sequence).on_end()

    def _release(self, sequence: Sequence) -> Listener:
        del self._live[sequence.order]
        self._started.discard(sequence.order)
        self._known.discard(sequence.order)
        listener: Listener = sequence.listener
        sequence.listener = None
        return listener

    def stats(self) -> SchedulerStats:
        running = len(self._known)
        waiting = len(self._live) - running
        zeros = dict.fromkeys(("preemptions", "prefix_cache_queries", "prefix_cache_hits", "steps"), 0)
        return SchedulerStats(running=running, waiting=waiting, blocked=0, free_blocks=50, num_blocks=100, **zeros)

    def health(self) -> Health:
        if self.death is not None:
            return dead(str(self.death), Beat())
        return judge(Beat(), stall_after_s=30.0, beat_age_s=self.clock() - self.heard_at)

    def when(self, is_so: Callable[[], bool]) -> asyncio.Future[None]:
        future = self._cluster.conditions.add(is_so)
        asyncio.get_running_loop().call_soon(self._cluster.conditions.check)
        return future

    async def call(self, control: Any) -> Any:
        return None

    def resume(self) -> None: ...

    def unblock(self, sequence: Sequence) -> None: ...


class SimulatedLauncher(Launcher):
    """Makes replicas that take up to 0.5 s to start, of which a share fails to.

    Attributes:
        cores: of those that were opened last, by rank.
    """

    def __init__(self, rng: random.Random, clock: Callable[[], float], share_failing: float = 0.0) -> None:
        self.rng = rng
        self.clock = clock
        self.share_failing = share_failing
        self.cores: dict[int, SimulatedCore] = {}

    def __call__(self, rank: int, hooks: CoreHooks) -> Any:
        return SimulatedBackend(self, rank, hooks)


class SimulatedBackend:
    where = shared_address = server_key = ""

    def __init__(self, launcher: SimulatedLauncher, rank: int, hooks: CoreHooks) -> None:
        self._launcher = launcher
        self._rank = rank
        self._hooks = hooks
        self.core: SimulatedCore

    async def find_model(self) -> Any:
        return None

    async def open(self, on_progress: Any = None) -> None:
        launcher = self._launcher
        await anyio.sleep(launcher.rng.uniform(0.0, 0.5))
        if launcher.rng.random() < launcher.share_failing:
            raise ModelLoadError("a shard is damaged")
        self.core = launcher.cores[self._rank] = SimulatedCore(self._hooks, launcher.clock, launcher.rng)

    def kill(self) -> None: ...

    async def aclose(self) -> None:
        if hasattr(self, "core"):
            self.core.is_stopped = True
            self.core._over.set()

    def abandon(self) -> None: ...
