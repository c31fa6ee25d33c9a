"""The one loop: finish(N) → apply → schedule → launch → publish.

`EngineCore` puts a pure scheduler and an executor together; what its callers do to it is in `CoreState`. The next step
is launched before the last one's tokens are handed out: 256 woken readers can hold a loop for milliseconds, and the
device must not wait for them.
"""

from __future__ import annotations

import asyncio
import json
import logging
import math
from collections.abc import Callable, Iterator, Mapping

import msgspec

from aioengine.core.core_state import CoreState, InFlight
from aioengine.core.executor_protocol import DeviceLost
from aioengine.core.listener import Listener, SampledLogprobs
from aioengine.core.observers import make_record
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
from aioengine.scheduler.plan import Float32, NothingAllowed, PromptLogprobs, StepPlan
from aioengine.scheduler.sequence import Sequence
from aioengine.scheduler.steps import StepOutput
from aioengine.validation import shorten

logger = logging.getLogger("aioengine")

PUBLISH_SLICE = 32
"""Tokens that are handed out before the loop gets its turn, below a millisecond; one with many log-probabilities counts
for several."""

LOGPROBS_A_TOKEN = 8
"""Log-probabilities that cost as much to hand out as a token does."""

MAX_DESCRIBED_SEQUENCES = 64
"""In the log, of a scheduler that makes no step."""

PROMPT_SLICE = 32
"""Prompt tokens whose log-probabilities are handed out between the loop's turns: with 20 each, below a millisecond."""


class EngineCore(CoreState):
    """A `Core` over one executor: requests in, tokens out; lives on the loop that calls `run`."""

    publish_slice = PUBLISH_SLICE
    """Tokens handed out between the loop's turns."""
    is_publishing = False
    on_published: Callable[[], None] | None = None
    """Called when a step's tokens have all been handed out."""
    _unpublished: Iterator[tuple[int, tuple[Sequence, int]]] = iter(())
    """(index, (sequence, token)) of the last step's output: the tokens that were not handed out yet."""
    _unpublished_prompts: Iterator[tuple[Sequence, int, list[SampledLogprobs]]] = iter(())
    _unpublished_vectors: Iterator[tuple[Sequence, Float32]] = iter(())
    _forced: Mapping[int, list[int]] = {}
    """By index, the tokens that a grammar put behind those in `_unpublished`."""
    _logprobs: OutputLogprobs | None = None
    """Of the tokens in `_unpublished`; None where no request asked for any."""

    _has_logged_idle = False
    _broken: Exception | None = None
    """What ends the loop before its next step."""

    # The loop

    def break_down(self, cause: Exception) -> None:
        """What serves this core broke, or the scheduler in its hands: `run` ends as if it had broken itself."""
        self._broken = cause
        self._has_news.set()

    async def run(self) -> None:
        """Run steps until cancelled, or until the device or this code breaks.

        On the way out every sequence that has not ended hears `EngineClosed`, or `EngineDead` with the cause.
        Cancelling stops the loop; the launched steps still complete on the device.
        """
        await self._endings.after(self._run(), lambda: self._end_all(closed_early), self._die_of)

    def _die_of(self, cause: BaseException) -> None:
        self.death = self._make_death(cause)
        self._end_all(self.copy_death)
        self._write_dump(self.death.dump)

    async def _run(self) -> None:
        while True:
            self._has_news.clear()
            if self._broken is not None:
                raise self._broken
            self._launch()
            self._check_idle()
            await self._publish()
            self._conditions.check()
            if self._in_flight:
                await self._finish_oldest()
            else:
                await self._has_news.wait()  # nothing is in flight, so nothing else can change

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
            plan = None if is_frozen else self.scheduler.schedule(now)
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
                sequences = "\n".join(map(repr, self.scheduler.sequences()[:MAX_DESCRIBED_SEQUENCES]))
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
        output = self.scheduler.apply(step.plan, result, now)
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
                    weight += len(logprobs.others) // LOGPROBS_A_TOKEN
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

    # When it breaks

    def _fail(self, plan: StepPlan, cause: Exception) -> None:
        """A step failed, and all sequences in it with it."""
        failed = self.scheduler.fail(plan)
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
            self._endings.add(sequence.order, self._release(sequence), failure)
        self._endings.tell_some()
        self._on_capacity()
        if not is_callers:
            self._write_dump(dump)

    def _make_death(self, cause: BaseException) -> EngineDead:
        dump = self._describe(cause, self._in_flight[0].plan if self._in_flight else None)
        reason = cause.__cause__ if isinstance(cause, DeviceLost) and cause.__cause__ is not None else cause
        death = EngineDead(f"the engine cannot go on: {describe(reason)}; start a new one", dump=dump)
        death.__cause__ = cause
        self._log_failure(logging.CRITICAL, str(death), dump)
        return death

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
        except Exception:  # what broke may be what is described; the requests must hear of it all the same
            logger.exception("the failure cannot be described")
            return ""

    def _end_all(self, error: Callable[[], AioEngineError]) -> None:
        """Let each listener hear an end. A scheduler or a listener that is broken keeps it from no other listener."""
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
            self._endings.add(sequence.order, self._release(sequence), error())
        with self.user_code.called("while ending what was running"):
            for sequence in self.scheduler.sequences():
                self.scheduler.finish(sequence, "error")
            self._on_capacity()
        self._conditions.end_all()


def closed_early() -> EngineClosed:
    """What a request hears that had not ended when the engine was closed."""
    return EngineClosed("the engine was closed before this request had ended")


class OutputLogprobs:
    """The log-probabilities of a step's tokens, each made when it is asked for: all at once would hold the loop."""

    def __init__(self, output: StepOutput) -> None:
        self._output = output
        self._row_of: dict[int, int] = {}
        """By the index of a token in the output, its row in the arrays of ``output.logprobs``."""
        if output.logprobs is not None:
            index_of = {result_index: index for index, result_index in enumerate(output.result_indices.tolist())}
            for row, result_index in enumerate(output.logprobs.index.tolist()):
                index = index_of.get(result_index)
                if index is not None:  # its sequence lives
                    self._row_of[index] = row

    def get(self, index: int) -> SampledLogprobs | None:
        """About token ``index`` of the output, as wide as its request asked for; None if it did not ask."""
        row = self._row_of.get(index)
        logprobs = self._output.logprobs
        if row is None or logprobs is None:
            return None
        width = self._output.sequences[index].sampling.logprobs
        others = _likeliest(logprobs.top_ids[row].tolist(), logprobs.top_logprobs[row].tolist(), width)
        if len(logprobs.extra_offsets):
            extra = slice(*logprobs.extra_offsets[row : row + 2].tolist())
            named = (c[extra].tolist() for c in (logprobs.extra_ids, logprobs.extra_logprobs, logprobs.extra_ranks))
            others += zip(*named, strict=True)
        return SampledLogprobs(float(logprobs.logprobs[row]), int(logprobs.ranks[row]), others)


def slice_prompt_logprobs(
    pieces: list[tuple[Sequence, PromptLogprobs]],
) -> Iterator[tuple[Sequence, int, list[SampledLogprobs]]]:
    """What a step has brought about prompts, `PROMPT_SLICE` tokens at once.

    Yields:
        the sequence, the position of the first token in its prompt, and the log-probabilities of each token.
    """
    for sequence, piece in pieces:
        width = sequence.sampling.prompt_logprobs
        columns = (piece.logprobs, piece.ranks, piece.top_ids, piece.top_logprobs)
        for start in range(0, len(piece.positions), PROMPT_SLICE):
            of_slice = (column[start : start + PROMPT_SLICE].tolist() for column in columns)
            yield (
                sequence,
                int(piece.positions[start]),
                [
                    SampledLogprobs(logprob, rank, _likeliest(ids, values, width))
                    for logprob, rank, ids, values in zip(*of_slice, strict=True)
                ],
            )


def _likeliest(ids: list[int], logprobs: list[float], width: int) -> list[tuple[int, float, int]]:
    """The first ``width`` of the likeliest tokens with their ranks, from 1 on."""
    return list(zip(ids[:width], logprobs[:width], range(1, width + 1), strict=False))
