"""A request on the caller's side: its choices, whose tokens become text as they arrive, and what its reader takes."""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

import msgspec

from aioengine.core.listener import UNLIMITED, SampledLogprobs
from aioengine.core.protocol import Core
from aioengine.core.request_log import RequestLog
from aioengine.errors import AioEngineError, InvalidRequest
from aioengine.metrics import RequestMetrics
from aioengine.outputs import CompletionDelta, CompletionOutput, FinishReason, Logprob, TokenLogprobs
from aioengine.scheduler.sequence import Sequence, SequenceEvent
from aioengine.text.detokenizer import Detokenizer

Decode = Callable[[int], str]
"""One token's text."""


class Completion:
    """The `Listener` of a sequence.

    Text is made and stop strings are searched as tokens arrive, never when they are read, so that an unread stream
    stops where it should. What is not read is merged; the sequence's length bounds it, and so may ``max_unread``.

    Args:
        sequence: what to follow.
        request: the request that this is a choice of; told when there is something to `take`.
        core: ends the sequence at a stop string, and blocks it while its reader is behind.
        detokenizer: None: there is no text then.
        decode: for log-probabilities; None without text.
        stream_interval: tokens to collect before the request is told; the first token and the end are told at once.
        max_unread: tokens that may lie unread before the sequence is blocked; those in flight come nevertheless.
    """

    __slots__ = (
        "_allow_at",
        "_core",
        "_cumulative_logprob",
        "_decode",
        "_detokenizer",
        "_has_stop_text",
        "_max_unread",
        "_num_read_ids",
        "_num_read_texts",
        "_request",
        "_stream_interval",
        "_tell_at",
        "_texts",
        "error",
        "finish_reason",
        "is_ended",
        "is_listed",
        "logprobs",
        "sequence",
        "stop_reason",
        "token_ids",
    )

    def __init__(
        self,
        sequence: Sequence,
        *,
        request: RequestState,
        core: Core,
        detokenizer: Detokenizer | None,
        decode: Decode | None,
        stream_interval: int = 1,
        max_unread: int = UNLIMITED,
    ) -> None:
        self.sequence = sequence
        self.token_ids: list[int] = []
        self.logprobs: list[TokenLogprobs] | None = [] if sequence.sampling.logprobs >= 0 else None
        self.finish_reason: FinishReason | None = None
        self.stop_reason: int | str | None = None
        self.error: AioEngineError | None = None
        self.is_ended = False
        self.is_listed = False
        """It is in the request's queue of choices with something to `take`; the request sets and clears this."""
        self._request = request
        self._core = core
        self._detokenizer = detokenizer
        self._decode = decode
        self._has_stop_text = sequence.request.params.include_stop_str_in_output
        self._stream_interval = stream_interval
        self._max_unread = max_unread
        self._allow_at = max_unread if max_unread == UNLIMITED else 0
        """Number of tokens read at which the core is allowed more."""
        self._tell_at = 1
        """Number of tokens at which the request or the core is told: other tokens cost one comparison."""
        self._cumulative_logprob = 0.0
        self._texts: list[str] = []
        self._num_read_ids = 0
        self._num_read_texts = 0

    # Called by the core

    def on_started(self) -> None:
        pass

    def on_token(self, token_id: int, logprobs: SampledLogprobs | None) -> None:
        if self.is_ended:
            return
        try:
            self._take_token(token_id, logprobs)
        except InvalidRequest as error:  # the tokenizer's library has failed: this request's end, and no other's
            self.on_error(error)

    def _take_token(self, token_id: int, logprobs: SampledLogprobs | None) -> None:
        token_ids = self.token_ids
        token_ids.append(token_id)
        if logprobs is not None and self.logprobs is not None:
            self.logprobs.append(_with_text(token_id, logprobs, self._decode))
            self._cumulative_logprob += logprobs.logprob
        detokenizer = self._detokenizer
        if detokenizer is not None and (self.sequence.finish_reason != "stop" or self._has_stop_text):
            text = detokenizer.feed_one(token_id)
            if text:
                self._texts.append(text)
            if detokenizer.stop_string is not None:
                self._end("stop", detokenizer.stop_string)
                self._core.finish(self.sequence, "stop", detokenizer.stop_string)
                return
        if len(token_ids) >= self._tell_at:
            self._tell()

    def on_prompt_logprobs(self, position: int, logprobs: list[SampledLogprobs]) -> None:
        ids = self.sequence.slice_ids(position, position + len(logprobs))
        try:
            decoded = [
                _with_text(token_id, of_token, self._decode) for token_id, of_token in zip(ids, logprobs, strict=True)
            ]
        except InvalidRequest as error:
            self.on_error(error)
        else:
            self._request.on_prompt_logprobs(position, decoded)

    def on_end(self) -> None:
        if self.is_ended:
            return
        reason, stop_reason = self.sequence.finish_reason, self.sequence.stop_reason
        assert reason is not None, f"{self.sequence} has not ended"
        if self._detokenizer is not None:
            try:
                text = self._detokenizer.flush()
            except InvalidRequest as error:
                self.on_error(error)
                return
            if text:
                self._texts.append(text)
            if self._detokenizer.stop_string is not None:
                reason, stop_reason = "stop", self._detokenizer.stop_string
        self._end(reason, stop_reason)

    def on_error(self, error: AioEngineError) -> None:
        if self.is_ended:
            return
        self.error = error
        self._end("error", None)

    # Called by the request

    @property
    def num_allowed(self) -> int:
        """Tokens that may be computed, all told, with what has been read."""
        return UNLIMITED if self._max_unread == UNLIMITED else self._num_read_ids + self._max_unread

    @property
    def has_unread(self) -> bool:
        return len(self.token_ids) > self._num_read_ids or len(self._texts) > self._num_read_texts

    def take(self, index: int) -> CompletionDelta:
        """What has arrived since the last `take`, merged; a sequence that was blocked for it goes on."""
        first = self._num_read_ids
        text = "".join(self._texts[self._num_read_texts :])
        self._num_read_ids = len(self.token_ids)
        self._num_read_texts = len(self._texts)
        self._tell_at = self._num_read_ids + min(self._stream_interval, self._max_unread)
        if self._num_read_ids >= self._allow_at:
            self._allow()
        return CompletionDelta(
            index=index,
            text=text,
            token_ids=self.token_ids[first:],
            logprobs=self.logprobs[first:] if self.logprobs is not None else None,
            finish_reason=self.finish_reason if self.error is None else None,  # the error itself comes next
            stop_reason=self.stop_reason,
        )

    def lift_limit(self) -> None:
        """Only the end will be read: compute up to there."""
        if self._max_unread != UNLIMITED:
            self._max_unread = self._allow_at = UNLIMITED
            self._core.unblock(self.sequence)

    def output(self, index: int) -> CompletionOutput:
        """The completion as far as it has come."""
        return CompletionOutput(
            index=index,
            text="".join(self._texts),
            token_ids=list(self.token_ids),
            cumulative_logprob=self._cumulative_logprob if self.logprobs is not None else None,
            logprobs=list(self.logprobs) if self.logprobs is not None else None,
            finish_reason=self.finish_reason,
            stop_reason=self.stop_reason,
        )

    def _allow(self) -> None:
        """Let so many more be computed. Not for each token that is read: from another process that takes a message."""
        self._allow_at = self._num_read_ids + (self._max_unread + 1) // 2
        self._core.unblock(self.sequence)

    def _tell(self) -> None:
        self._tell_at = self._num_read_ids + self._max_unread
        if len(self.token_ids) >= self._tell_at:
            self._core.block(self.sequence)
        self._request.on_news(self)  # last, since what hears of it may read at once

    def _end(self, reason: FinishReason, stop_reason: int | str | None) -> None:
        self.is_ended = True
        self.finish_reason = reason
        self.stop_reason = stop_reason
        self._request.on_news(self)
        self._request.on_ended(self)


class Arrival(NamedTuple):
    """When a request was made: in Unix seconds, and by the core's clock."""

    unix_s: float
    clock_s: float


class RequestState:
    """A request, whose choices one reader takes piece by piece.

    A choice with something to take is in the queue once, however much there is, behind the others. When one choice
    fails the request fails: the others are ended, and the reader hears of it once all else is read.

    Made with its stream; `begin` gives it its sequences, once the core has them.

    Attributes:
        request_id: the caller's name for it.
        is_aborted: whether it is to end with what it has, as soon as it has begun.
    """

    def __init__(self, request_id: str) -> None:
        self.request_id = request_id
        self.is_aborted = False
        self.error: AioEngineError | None = None
        self.completions: list[Completion] = []
        self.prompt_logprobs: list[TokenLogprobs | None] | None = None
        self._ready: deque[Completion] = deque()
        self._repeats: deque[CompletionDelta] = deque()
        self._ended_at = math.nan
        self._waiter: asyncio.Future[None] | None = None
        self._waits_for_end = False
        self._watcher: Callable[[], None] | None = None

    def begin(self, completions: list[Completion], core: Core, arrival: Arrival, log: RequestLog) -> None:
        """The core has accepted its sequences.

        Args:
            completions: of its choices, by index.
            core: where they run.
            log: hears of the request's end.
        """
        self._core = core
        self._arrival = arrival
        self._log = log
        self._sequences = [completion.sequence for completion in completions]
        first = self._sequences[0]
        if first.sampling.prompt_logprobs >= 0:
            self.prompt_logprobs = [None] * len(first.prompt)
        self._num_choices = first.request.params.n
        self._num_open = len(completions)
        self.completions = completions

    @property
    def is_begun(self) -> bool:
        return bool(self.completions)

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

    def fail(self, error: Callable[[], AioEngineError]) -> None:
        """End its choices by an error each, if they have not ended."""
        for completion in self.completions:
            if not completion.is_ended:
                completion.on_error(error())

    def end_unbegun(self) -> None:
        """It was aborted before the core had it."""
        for sequence, completion in zip(self._sequences, self.completions, strict=True):
            sequence.advance(SequenceEvent.ENDED)
            sequence.finish_reason = "abort"
            completion.on_end()

    # Called by the completions

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
            self.abort()  # the others end in here, too, and the last of them may have been counted already
        if not self._num_open and math.isnan(self._ended_at):
            self._ended_at = self._core.clock()
            metrics, reasons = self.metrics(), self._finish_reasons()
            self._core.observers.on_request(metrics, reasons)
            self._log.ended(self.request_id, reasons, metrics)
            self._wake()
            self._tell_watcher()

    def on_prompt_logprobs(self, position: int, logprobs: list[TokenLogprobs]) -> None:
        assert self.prompt_logprobs is not None
        self.prompt_logprobs[position : position + len(logprobs)] = logprobs

    # Called by the reader

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
        """What is new of the first choice in the queue; None if there is nothing."""
        if self._repeats:
            return self._repeats.popleft()
        while self._ready:
            completion = self._ready.popleft()
            completion.is_listed = False
            if completion.error is not None and not completion.has_unread:
                continue
            delta = completion.take(completion.sequence.sampling.choice)
            # Greedy choices are one sequence, whose delta is repeated for each.
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
        """Its times and counts so far."""
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


def _with_text(token_id: int, sampled: SampledLogprobs, decode: Decode | None) -> TokenLogprobs:
    logprobs = {token_id: Logprob(sampled.logprob, sampled.rank, decode(token_id) if decode else None)}
    for other_id, logprob, rank in sampled.others:
        if other_id not in logprobs:
            logprobs[other_id] = Logprob(logprob, rank, decode(other_id) if decode else None)
    return logprobs


def _known(seconds: float) -> float | None:
    return None if math.isnan(seconds) else seconds
