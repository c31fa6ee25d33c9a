"""The one loop: finish(N) → apply → schedule → launch → publish.

`EngineCore` puts a pure scheduler and an executor together. Everything but `run` is synchronous, so that a cancelled
caller needs no await to clean up. The next step is launched before the last one's tokens are handed out: 256 woken
readers can hold a loop for milliseconds, and the device must not wait for them.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
from collections import deque
from collections.abc import Callable, Iterator
from typing import Protocol

import msgspec

from aioengine.config import EngineConfig
from aioengine.core.kv_manager import KVManager
from aioengine.core.plan import StepLogprobs, StepPlan
from aioengine.core.prefix_cache import hash_prompt
from aioengine.core.scheduler import Scheduler, SchedulerStats, StepOutput
from aioengine.core.sequence import FinishReason, Sequence
from aioengine.dump import describe_failure
from aioengine.errors import AioEngineError, EngineClosed, EngineDead, StepFailed
from aioengine.executor.protocol import DeviceLost, Executor, PendingStep
from aioengine.request import Request

logger = logging.getLogger("aioengine")

PUBLISH_SLICE = 32
"""Sequences that are handed their tokens before the loop gets its turn: below a millisecond."""


class SampledLogprobs(msgspec.Struct, frozen=True, gc=False):
    """Raw log-probabilities about one sampled token.

    Attributes:
        logprob, rank: the sampled token's.
        top_ids, top_logprobs: the likeliest tokens, as many as the request asked for.
    """

    logprob: float
    rank: int
    top_ids: list[int]
    top_logprobs: list[float]


class Listener(Protocol):
    """Follows one sequence. It hears of each token once, in order, and then of the end, or of an error, once.

    It is called on the loop, between device steps, and must return soon.
    """

    def on_token(self, token_id: int, logprobs: SampledLogprobs | None) -> None:
        """A token was sampled; if it is the last one, the sequence's ``finish_reason`` is set."""
        ...

    def on_end(self) -> None:
        """The sequence has ended: see its ``finish_reason`` and ``stop_reason``."""
        ...

    def on_error(self, error: AioEngineError) -> None:
        """The sequence has ended by an error, which is this listener's alone."""
        ...


class EngineCore:
    """Requests in, tokens out, over one executor; lives on the loop that calls `run`.

    Args:
        executor: started; the caller closes it after `run` has ended.
        config: the engine's.
        eos_token_ids: the model's.
        on_room: called when a waiting sequence has begun to run or has ended.
        write_dump: begins to keep the report of a failed step, and returns at once.
    """

    def __init__(
        self,
        executor: Executor,
        config: EngineConfig,
        *,
        eos_token_ids: tuple[int, ...] = (),
        on_room: Callable[[], None] = lambda: None,
        write_dump: Callable[[str], None] = lambda _: None,
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
        self._on_room = on_room
        self._write_dump = write_dump
        self._live: dict[int, Sequence] = {}
        """By order, those whose listeners have heard no end yet, whatever the scheduler makes of them."""
        self._in_flight: deque[tuple[StepPlan, PendingStep]] = deque()
        self._unpublished: Iterator[tuple[int, tuple[Sequence, int]]] = iter(())
        """(place in the step, (sequence, token)) of the last step applied, as far as they were not handed out."""
        self._lines: dict[int, SampledLogprobs] = {}
        self._has_news = asyncio.Event()
        """Somebody has added, ended or drained since the last look at the scheduler."""
        self._is_draining = False
        self._is_stopped = False

    # What callers do

    def make_sequence(self, request: Request) -> Sequence:
        """Turn a request into a sequence, its prompt hashed; pure, so that a long one may be made in a thread."""
        hashes = None
        if self.config.enable_prefix_caching:
            hashes = hash_prompt(request.prompt_token_ids, self.kv.block_size)
        return Sequence(request, eos_token_ids=self.eos_token_ids, block_hashes=hashes)

    def add(self, sequence: Sequence, listener: Listener) -> None:
        """Accept a sequence: from now on its listener hears of one end or one error.

        Raises:
            EngineDead, EngineClosed: it is not accepted.
        """
        self.check_accepting()
        sequence.listener = listener
        self.scheduler.add(sequence)
        self._live[sequence.order] = sequence
        self._has_news.set()

    def check_accepting(self) -> None:
        """Raise what `add` would: EngineDead or EngineClosed."""
        if self.death is not None:
            raise self.copy_death()
        if self._is_draining or self._is_stopped:
            raise EngineClosed("the engine is closed")

    def finish(self, sequence: Sequence, reason: FinishReason, stop_reason: int | str | None = None) -> None:
        """End a sequence now (abort, stop string); idempotent. It is in no later plan.

        Its blocks are free at once for plans launched from now on, which the device runs after those in flight.
        """
        if not self._is_stopped and self.scheduler.finish(sequence, reason, stop_reason):
            self._release(sequence).on_end()
            self._on_room()
            self._has_news.set()

    def drain(self) -> None:
        """Accept nothing more, and let `run` return when all that was accepted has ended."""
        self._is_draining = True
        self._has_news.set()

    def stats(self) -> SchedulerStats:
        return self.scheduler.stats()

    def copy_death(self) -> EngineDead:
        """The error of a dead engine, made anew for each who hears it: a shared one would collect their tracebacks."""
        assert self.death is not None
        copy = EngineDead(str(self.death), dump=self.death.dump)
        copy.__cause__ = self.death.__cause__
        return copy

    # The loop

    async def run(self) -> None:
        """Run steps until drained, or until the device or this code breaks.

        On the way out every sequence that has not ended hears `EngineClosed`, or `EngineDead` with the cause.
        Cancelling stops the loop; the launched steps still complete on the device.
        """
        try:
            await self._run()
        except Exception as exc:
            self.death = self._make_death(exc)
            self._end_all(self.copy_death)
            self._write_dump(self.death.dump)
        except asyncio.CancelledError:
            self._end_all(_closed)
            raise
        else:
            self._end_all(_closed)

    async def _run(self) -> None:
        while True:
            self._has_news.clear()
            self._launch()
            await self._publish()
            if self._in_flight:
                await self._finish_oldest()
            elif self.scheduler.has_work or not self._is_draining:
                await self._has_news.wait()  # nothing is in flight, so nothing else can change
            else:
                return

    def _launch(self) -> None:
        """Schedule and launch as many steps as the executor takes."""
        num_unstarted = self.scheduler.num_unstarted
        while len(self._in_flight) < self.executor.info.max_in_flight:
            plan = self.scheduler.schedule()
            if plan is None:
                break
            self._in_flight.append((plan, self.executor.launch(plan)))
        if self.scheduler.num_unstarted != num_unstarted:
            self._on_room()

    async def _finish_oldest(self) -> None:
        """Wait for the oldest step and apply it; a step that failed takes its sequences with it."""
        plan, pending = self._in_flight[0]
        if pending.is_done:
            await asyncio.sleep(0)  # `finish` may then return without a pause, and a fast device would hold the loop
        try:
            result = await pending.finish()
        except DeviceLost:
            raise
        except Exception as exc:
            self._fail(plan, exc)
            return
        output = self.scheduler.apply(plan, result)
        self._in_flight.popleft()
        self._lines = _lines(output)
        self._unpublished = enumerate(zip(output.sequences, output.token_ids, strict=True))

    async def _publish(self) -> None:
        """Hand out the last step's tokens, yielding between slices."""
        is_more = self._publish_slice()
        while is_more:
            await asyncio.sleep(0)
            is_more = self._publish_slice()

    def _publish_slice(self) -> bool:
        """Hand out the next `PUBLISH_SLICE` tokens; returns False if there were not as many."""
        lines = self._lines
        count = 0
        for place, (sequence, token_id) in itertools.islice(self._unpublished, PUBLISH_SLICE):
            count += 1
            listener: Listener | None = sequence.listener  # type: ignore[assignment]
            if listener is None:  # it was aborted since the step was applied
                continue
            listener.on_token(token_id, lines.get(place) if lines else None)
            if sequence.finish_reason is not None and sequence.listener is listener:
                self._release(sequence).on_end()
        return count == PUBLISH_SLICE

    # When it breaks

    def _fail(self, plan: StepPlan, cause: Exception) -> None:
        failed = self.scheduler.fail(plan)
        self._in_flight.popleft()
        dump = self._describe(cause, plan)
        message = f"step {plan.step} failed with {len(failed)} sequences in it: {type(cause).__name__}: {cause}"
        logger.error("%s\n%s", message, dump)
        for sequence in failed:
            failure = StepFailed(message, dump=dump)
            failure.__cause__ = cause
            self._release(sequence).on_error(failure)
        self._on_room()
        self._write_dump(dump)

    def _make_death(self, cause: Exception) -> EngineDead:
        dump = self._describe(cause, self._in_flight[0][0] if self._in_flight else None)
        reason = cause.__cause__ if isinstance(cause, DeviceLost) and cause.__cause__ is not None else cause
        death = EngineDead(f"the engine cannot go on: {type(reason).__name__}: {reason}; start a new one", dump=dump)
        death.__cause__ = cause
        logger.critical("%s\n%s", death, dump)
        return death

    def _describe(self, cause: Exception, plan: StepPlan | None) -> str:
        try:
            return describe_failure(cause, plan=plan, stats=self.stats(), config=self.config)
        except Exception:  # what broke may be what is described; those who wait must hear of it all the same
            logger.exception("the failure cannot be described")
            return ""

    def _end_all(self, error: Callable[[], AioEngineError]) -> None:
        """Let everyone hear an end. The scheduler or a listener may be what broke: neither keeps it from the others."""
        self._is_stopped = True
        is_more = True
        while is_more:
            with _logged():
                is_more = self._publish_slice()
        for sequence in list(self._live.values()):
            with _logged():
                self._release(sequence).on_error(error())
        with _logged():
            for sequence in self.scheduler.sequences():
                self.scheduler.finish(sequence, "error")
            self._on_room()

    def _release(self, sequence: Sequence) -> Listener:
        """Its listener, which hears its end now and nothing more."""
        del self._live[sequence.order]
        listener: Listener = sequence.listener  # type: ignore[assignment]
        sequence.listener = None  # launched steps hold the sequence, and must not hold the caller's side of it
        return listener


def _lines(output: StepOutput) -> dict[int, SampledLogprobs]:
    """Log-probabilities by the index of their token in the output, each as wide as its row asked for."""
    logprobs = output.logprobs
    if logprobs is None:
        return {}
    token_at = {place: index for index, place in enumerate(output.places.tolist())}
    columns = (logprobs.logprobs, logprobs.ranks, logprobs.top_ids, logprobs.top_logprobs)
    extra_ends = logprobs.extra_offsets.tolist() or [0] * (len(logprobs.index) + 1)
    lines = {}
    for line, (place, logprob, rank, ids, values) in enumerate(
        zip(logprobs.index.tolist(), *(column.tolist() for column in columns), strict=True)
    ):
        index = token_at.get(place)
        if index is not None:  # its sequence lives
            width = output.sequences[index].sampling.logprobs
            extra = slice(extra_ends[line], extra_ends[line + 1])
            lines[index] = SampledLogprobs(
                logprob,
                rank,
                [
                    *zip(ids[:width], values[:width], range(1, width + 1), strict=True),
                    *zip(
                        *(
                            c[extra].tolist()
                            for c in (logprobs.extra_ids, logprobs.extra_logprobs, logprobs.extra_ranks)
                        ),
                        strict=True,
                    ),
                ],
            )
    return lines


@contextlib.contextmanager
def _logged() -> Iterator[None]:
    """Log what goes wrong, and go on."""
    try:
        yield
    except Exception:
        logger.exception("while ending what was running")


def _closed() -> EngineClosed:
    return EngineClosed("the engine was closed before this request had ended")
