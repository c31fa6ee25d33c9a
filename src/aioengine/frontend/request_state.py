"""A request on the caller's side: its completions, and the mailbox of its one reader."""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

import msgspec

from aioengine.core.protocol import Core
from aioengine.core.request_log import RequestLog
from aioengine.errors import AioEngineError
from aioengine.frontend.completion import Completion
from aioengine.metrics import RequestMetrics
from aioengine.outputs import CompletionDelta, CompletionOutput, TokenLogprobs
from aioengine.scheduler.sequence import Sequence, SequenceEvent

MakeCompletion = Callable[["RequestState", Sequence], Completion]


class Arrival(NamedTuple):
    """When a request was made: in Unix seconds, and by the core's clock."""

    unix_s: float
    clock_s: float


class RequestState:
    """What a request brings, choice by choice, to one reader.

    A choice with news stands in line once, however much is new of it, and waits its turn behind the others. When one
    choice fails the request fails: the others are ended, and the reader hears of that once all else is read.

    Args:
        sequence: the first choice; its children are the others.
        make_completion: for each choice.
        core: where they run.
        arrival: of the request.
        log: hears of its end.
    """

    def __init__(
        self, sequence: Sequence, make_completion: MakeCompletion, core: Core, arrival: Arrival, log: RequestLog
    ) -> None:
        self.error: AioEngineError | None = None
        self.prompt_logprobs: list[TokenLogprobs | None] | None = None
        if sequence.sampling.prompt_logprobs >= 0:
            self.prompt_logprobs = [None] * len(sequence.prompt)
        self._core = core
        self._arrival = arrival
        self._log = log
        self._sequences = (sequence, *sequence.children)
        self.completions = [make_completion(self, member) for member in self._sequences]
        self._num_choices = sequence.request.params.n
        self._num_open = len(self.completions)
        self._ready: deque[Completion] = deque()
        self._repeats: deque[CompletionDelta] = deque()
        self._ended_at = math.nan
        self._waiter: asyncio.Future[None] | None = None
        self._waits_for_end = False
        self._watcher: Callable[[], None] | None = None

    @property
    def prompt_token_ids(self) -> list[int]:
        ids: list[int] = self._sequences[0].prompt.tolist()
        return ids

    @property
    def num_cached_tokens(self) -> int:
        return self._sequences[0].num_cached_tokens

    @property
    def is_ended(self) -> bool:
        return not self._num_open

    def abort(self) -> None:
        """End all choices with what they have."""
        for sequence in reversed(self._sequences):  # the first one takes unborn ones with it
            self._core.finish(sequence, "abort")

    def end_unbegun(self) -> None:
        """It was aborted before the core had it."""
        for sequence, completion in zip(self._sequences, self.completions, strict=True):
            sequence.advance(SequenceEvent.ENDED)
            sequence.finish_reason = "abort"
            completion.on_end()

    # What the completions say

    def on_news(self, completion: Completion) -> None:
        if not completion.is_listed:
            completion.is_listed = True
            self._ready.append(completion)
            self._tell_watcher()
        if self._waiter is not None and not self._waits_for_end:
            self._wake()

    def on_ended(self, completion: Completion) -> None:
        self._num_open -= 1
        if completion.error is not None and self.error is None:
            self.error = completion.error
            self.abort()  # the others come back to here, and the last of them may be the end already
        if not self._num_open and math.isnan(self._ended_at):
            self._ended_at = self._core.clock()
            metrics, reasons = self.metrics(), self._finish_reasons()
            self._core.observers.on_request(metrics, reasons)
            self._log.ended(self._sequences[0].request.request_id, reasons, metrics)
            self._wake()
            self._tell_watcher()

    def on_prompt_logprobs(self, position: int, lines: list[TokenLogprobs]) -> None:
        assert self.prompt_logprobs is not None
        self.prompt_logprobs[position : position + len(lines)] = lines

    # What the reader asks

    async def wait(self, *, for_end: bool) -> None:
        """Wait until there is something to take, or for the end; for one reader.

        Cancelling takes nothing away: what has arrived stays to be read.
        """
        if self._waiter is not None:
            raise RuntimeError("this stream is being read by another task; a stream has one reader")
        if for_end:
            for completion in self.completions:
                completion.lift_limit()
        while not (self.is_ended or (not for_end and self.has_news)):
            self._waiter = asyncio.get_running_loop().create_future()
            self._waits_for_end = for_end
            try:
                await self._waiter
            finally:
                self._waiter = None

    def watch(self, watcher: Callable[[], None]) -> None:
        """Call ``watcher`` when there is something to take that was not there before, and at the end."""
        self._watcher = watcher
        if self.has_news or self.is_ended:
            watcher()

    @property
    def has_news(self) -> bool:
        return bool(self._ready or self._repeats)

    def take(self) -> CompletionDelta | None:
        """What is new of the choice that has waited longest; None if there is nothing."""
        if self._repeats:
            return self._repeats.popleft()
        while self._ready:
            completion = self._ready.popleft()
            completion.is_listed = False
            if completion.error is not None and not completion.has_unread:
                continue
            delta = completion.take(completion.sequence.sampling.choice)
            # Greedy choices are one sequence, read once for each.
            num_repeats = self._num_choices - len(self.completions)
            self._repeats.extend(msgspec.structs.replace(delta, index=1 + i) for i in range(num_repeats))
            return delta
        return None

    def outputs(self) -> list[CompletionOutput]:
        """All choices as far as they have come."""
        if len(self.completions) == self._num_choices:
            return [completion.output(index) for index, completion in enumerate(self.completions)]
        return [self.completions[0].output(index) for index in range(self._num_choices)]

    def metrics(self) -> RequestMetrics:
        """Where the time has gone so far."""
        first, arrived_at = self._sequences[0], self._arrival.clock_s
        last_token_at = [self._core.last_token_at(sequence) for sequence in self._sequences]
        ended = [(s.first_token_at, at) for s, at in zip(self._sequences, last_token_at, strict=True) if at == at]
        last_at = max((at for _, at in ended), default=math.nan)
        num_gaps = sum(len(s.output_ids) - 1 for s in self._sequences if s.output_ids)
        decode_s = sum(last - begun for begun, last in ended)
        return RequestMetrics(
            arrival_time=self._arrival.unix_s,
            queue_time_s=_known(first.admitted_at - arrived_at),
            prefill_time_s=_known(first.first_token_at - first.admitted_at),
            decode_time_s=_known(last_at - first.first_token_at),
            inference_time_s=_known(last_at - first.admitted_at),
            time_to_first_token_s=_known(first.first_token_at - arrived_at),
            mean_inter_token_latency_s=decode_s / num_gaps if num_gaps else None,
            e2e_latency_s=_known(self._ended_at - arrived_at),
            num_prompt_tokens=len(first.prompt),
            num_generation_tokens=sum(len(completion.token_ids) for completion in self.completions),
            num_cached_tokens=first.num_cached_tokens,
            num_preemptions=sum(sequence.num_preemptions for sequence in self._sequences),
        )

    def _finish_reasons(self) -> tuple[str, ...]:
        """One for each choice."""
        if self.error is not None:
            return ("error",) * self._num_choices
        reasons = tuple(completion.finish_reason or "error" for completion in self.completions)
        return reasons if len(reasons) == self._num_choices else reasons * self._num_choices

    def _tell_watcher(self) -> None:
        if self._watcher is not None:
            try:
                self._watcher()
            except BaseException as error:
                self._core.user_code.raised(error, "a stream's watcher failed")

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


def _known(seconds: float) -> float | None:
    return None if math.isnan(seconds) else seconds
