"""A request on the caller's side: its choices, whose tokens become text as they arrive, and its reader's deltas."""

from __future__ import annotations

import asyncio
import math
import time
from collections import deque
from collections.abc import Callable

import msgspec

from aioengine.core.listener import UNLIMITED, SampledLogprobs
from aioengine.core.observers import log_begin, log_end
from aioengine.core.protocol import Core
from aioengine.core.tracing import begin_span, end_span, gen_ai_attributes
from aioengine.errors import AioEngineError, InvalidRequest
from aioengine.frontend.answer_format import PLAIN, AnswerPlan
from aioengine.outputs import CompletionDelta, CompletionOutput, FinishReason, Logprob, RequestOutput, TokenLogprobs
from aioengine.outputs.metrics import RequestMetrics
from aioengine.sampling_params import SamplingParams
from aioengine.scheduler.plan import Float32
from aioengine.scheduler.sequence import Sequence
from aioengine.text.detokenizer import Detokenizer, make_detokenizer
from aioengine.text.token_table import TokenTable
from aioengine.text.tokenizer import Tokenizer
from aioengine.tool_calls.calls import AnswerParser, Piece


class Completion:
    """The `Listener` of a sequence.

    Text is made and stop strings are searched as tokens arrive, never when they are read, so that an unread stream
    stops where it should. Unread output is merged; the sequence's length bounds it, and so may ``max_unread``.

    Args:
        sequence: the sequence to follow.
        request: the request of this choice; notified when there is something to `take`. Its core ends the sequence at a
            stop string, and blocks it while its reader is behind.
        detokenizer: None: there is no text.
    """

    def __init__(
        self, sequence: Sequence, request: RequestState, detokenizer: Detokenizer | None, plan: AnswerPlan
    ) -> None:
        self.sequence = sequence
        self.token_ids: list[int] = []
        self.logprobs: list[TokenLogprobs] | None = [] if sequence.sampling.logprobs >= 0 else None
        self.finish_reason: FinishReason | None = None
        self.stop_reason: int | str | None = None
        self.vector: Float32 | None = None
        self.error: AioEngineError | None = None
        self.is_ended = False
        self.is_listed = False
        """Whether it is in the request's queue of choices with something to `take`; set and cleared by the request."""
        self._is_queued = True
        self._request = request
        self._detokenizer = detokenizer
        self._plan = plan
        self._has_stop_text = sequence.request.params.include_stop_str_in_output
        self._interval = min(request.stream_interval, request.max_unread)
        self._allow_at = UNLIMITED if request.max_unread == UNLIMITED else 0
        """Number of tokens read at which the core may compute more."""
        self._notify_at = 1
        """Number of tokens at which the request or the core is notified: other tokens cost one comparison."""
        self._cumulative_logprob = 0.0
        self._texts: list[str] = []
        self._num_read_ids = 0
        self._num_read_texts = 0
        self._answer: ParsedAnswer | None = None
        if plan.make_parser is not None and detokenizer is not None:
            self._answer = ParsedAnswer(plan.make_parser(), ends_at_call=plan.ends_at_call)

    # Called by the core

    def on_started(self) -> None:
        if not self.is_ended:
            self._leave_queue()
            self._request.started.set()

    def _leave_queue(self) -> None:
        if self._is_queued:
            self._is_queued = False
            self._request.leave_queue(1)

    def on_token(self, token_id: int, logprobs: SampledLogprobs | None) -> None:
        if self.is_ended:
            return
        try:
            self._take_token(token_id, logprobs)
        except InvalidRequest as error:  # the tokenizer's library has failed: this ends no other request
            self.on_error(error)

    def _take_token(self, token_id: int, logprobs: SampledLogprobs | None) -> None:
        token_ids = self.token_ids
        token_ids.append(token_id)
        if logprobs is not None and self.logprobs is not None:
            self.logprobs.append(self._request.with_texts(token_id, logprobs))
            self._cumulative_logprob += logprobs.logprob
        detokenizer = self._detokenizer
        sequence = self.sequence
        # The stop token that ended the sequence has no text; other tokens may have come with it.
        if detokenizer is not None and (
            sequence.finish_reason != "stop" or self._has_stop_text or len(token_ids) != len(sequence.output_ids)
        ):
            text = detokenizer.feed_one(token_id)
            if text:
                self._texts.append(text)
            if detokenizer.stop_string is not None or (self._plan.ends_at_call and self._read_answer().has_its_call):
                core = self._request.core
                self._end("stop", detokenizer.stop_string)
                core.finish(sequence, "stop", detokenizer.stop_string)
                return
        if len(token_ids) >= self._notify_at:
            self._notify()

    def on_vector(self, vector: Float32) -> None:
        self.vector = vector

    def on_prompt_logprobs(self, position: int, logprobs: list[SampledLogprobs]) -> None:
        if self.is_ended:
            return
        ids = self.sequence.slice_ids(position, position + len(logprobs))
        try:
            decoded = [self._request.with_texts(*of_token) for of_token in zip(ids, logprobs, strict=True)]
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
        self.error = self._plan.rename_param(error)
        self._end("error", None)

    # Called by the request

    @property
    def num_allowed(self) -> int:
        """Total number of tokens that may be computed, given the number that was read."""
        max_unread = self._request.max_unread
        return UNLIMITED if max_unread == UNLIMITED else self._num_read_ids + max_unread

    @property
    def has_unread(self) -> bool:
        return len(self.token_ids) > self._num_read_ids or len(self._texts) > self._num_read_texts

    def take(self, index: int) -> CompletionDelta:
        """The output since the last `take`, merged; a sequence that was blocked until this read goes on."""
        first = self._num_read_ids
        text = "".join(self._texts[self._num_read_texts :])
        piece = self._read_answer().take() if self._answer is not None else Piece(text)
        self._num_read_ids = len(self.token_ids)
        self._num_read_texts = len(self._texts)
        self._notify_at = self._num_read_ids + self._interval
        if self._num_read_ids >= self._allow_at and not self.is_ended:
            # Not for each token that is read: to a core in another process it is a message.
            self._allow_at = self._num_read_ids + (self._request.max_unread + 1) // 2
            self._request.core.unblock(self.sequence)
        return CompletionDelta(
            index=index,
            text=piece.content,
            reasoning=piece.reasoning,
            tool_calls=list(piece.calls),
            has_cut_call=self.is_ended and self._has_cut_call,
            token_ids=self.token_ids[first:],
            logprobs=self.logprobs[first:] if self.logprobs is not None else None,
            finish_reason=self.finish_reason if self.error is None else None,  # the error itself comes next
            stop_reason=self.stop_reason,
        )

    def output(self, index: int) -> CompletionOutput:
        """The completion as far as it has come."""
        whole = self._read_answer().whole() if self._answer is not None else Piece("".join(self._texts))
        return CompletionOutput(
            index=index,
            text=whole.content,
            reasoning=whole.reasoning or None,
            tool_calls=self._answer.parser.calls.copy() if self._answer is not None else [],
            has_cut_call=self._has_cut_call,
            token_ids=list(self.token_ids),
            cumulative_logprob=self._cumulative_logprob if self.logprobs is not None else None,
            logprobs=list(self.logprobs) if self.logprobs is not None else None,
            finish_reason=self.finish_reason,
            stop_reason=self.stop_reason,
        )

    @property
    def _has_cut_call(self) -> bool:
        return self._answer is not None and self._answer.parser.is_cut

    def _read_answer(self) -> ParsedAnswer:
        """The parts of the answer, read from all its text so far."""
        assert self._answer is not None
        self._answer.read(self._texts, is_over=self.is_ended)
        return self._answer

    def _notify(self) -> None:
        self._notify_at = self._num_read_ids + self._request.max_unread
        if len(self.token_ids) >= self._notify_at:
            self._request.core.block(self.sequence)
        self._request.on_output(self)  # last, since the reader may read at once

    def _end(self, reason: FinishReason, stop_reason: int | str | None) -> None:
        self.is_ended = True
        self.finish_reason = reason
        self.stop_reason = stop_reason
        self._leave_queue()
        self._request.on_output(self)
        self._request.on_ended(self)
        del self._request  # a reference cycle, which would be left to the garbage collector


class ParsedAnswer:
    """A choice's text, split as it is read into content, reasoning and tool calls.

    Args:
        ends_at_call: whether reading stops at the first complete call.

    Attributes:
        parser: has the complete calls.
    """

    def __init__(self, parser: AnswerParser, *, ends_at_call: bool = False) -> None:
        self.parser = parser
        self._ends_at_call = ends_at_call
        self._num_fed = 0
        self._is_over = False
        self._pieces: list[Piece] = []
        self._num_taken = 0

    @property
    def has_its_call(self) -> bool:
        """Whether the answer has ended at a complete call."""
        return self._ends_at_call and bool(self.parser.calls)

    def read(self, texts: list[str], *, is_over: bool) -> None:
        """Read the items that were added to ``texts`` since the last call."""
        text = "".join(texts[self._num_fed :])
        self._num_fed = len(texts)
        if text:
            self._pieces.append(self.parser.feed(text))
        if is_over and not self._is_over:
            self._is_over = True
            if not self.has_its_call:  # text after the call, of the call's last token, is dropped
                self._pieces.append(self.parser.finish())

    def take(self) -> Piece:
        """The parts that were read since the last call."""
        first, self._num_taken = self._num_taken, len(self._pieces)
        return self.whole(first)

    def whole(self, first: int = 0) -> Piece:
        """The parts that were read, from piece ``first`` on."""
        pieces = self._pieces[first:]
        content, reasoning = ("".join(getattr(piece, name) for piece in pieces) for name in ("content", "reasoning"))
        return Piece(content, reasoning, tuple(call for piece in pieces for call in piece.calls))


class RequestState:
    """A request, whose choices one reader takes piece by piece.

    A choice with something to take is in the queue once, however much there is, behind the others. When one choice
    fails, the request fails: the others are ended, and the reader gets the error once all else is read.

    Made with its stream. It arrives when the engine runs, and begins when its prompt is prepared.

    Attributes:
        request_id: the caller's name for it.
        stream_interval: tokens of a choice to collect before the reader is notified; not for the first token and the
            end.
        max_unread: most unread tokens of a choice before its sequence is blocked; tokens in flight still come.
        is_aborted: whether it is to end with the output that it has, as soon as it has begun.
        core: where its sequences run.
        leave_queue: called with a number of its sequences that need no capacity any more: they have had a row, or
            never will.
    """

    core: Core

    def __init__(self, request_id: str) -> None:
        self.request_id = request_id
        self.stream_interval = 1
        self.max_unread = UNLIMITED
        self.is_aborted = False
        self.leave_queue: Callable[[int], None] = lambda _: None
        self.error: AioEngineError | None = None
        self.completions: list[Completion] = []
        self.prompt_logprobs: list[TokenLogprobs | None] | None = None
        self._ready: deque[Completion] = deque()
        self._repeats: deque[CompletionDelta] = deque()
        self._ended_at = math.nan
        self._waiter: asyncio.Future[None] | None = None
        self._waits_for_end = False
        self.started = asyncio.Event()
        """Set when a choice has taken a row, or all have ended."""
        self._watcher: Callable[[], None] | None = None
        self._end_span: Callable[[BaseException | None], None] | None = None

    def arrive(self, core: Core, arrival_time: float | None = None) -> None:
        """Begin the request's times, now or at ``arrival_time`` in Unix seconds: it was made, and the engine runs."""
        self.core = core
        now = time.time()
        self._arrival_time = now if arrival_time is None else min(arrival_time, now)
        self._arrived_at = core.clock() - (now - self._arrival_time)

    def begin_span(self, operation: str, params: SamplingParams, headers: dict[str, str] | None) -> dict[str, str]:
        """Begin the span of a request that has arrived; return the headers for spans inside it."""
        model = self.core.config.model or "demo"
        span, inside = begin_span(f"{operation} {model}", headers)
        if span is not None:

            def end(error: BaseException | None) -> None:
                metrics = self._metrics() if self.completions else None
                attributes = gen_ai_attributes(
                    request_id=self.request_id,
                    model=model,
                    operation=operation,
                    asked=params,
                    finish_reasons=self._finish_reasons() if metrics else (),
                    metrics=metrics,
                )
                end_span(span, attributes, error)

            self._end_span = end
        return inside

    def end_span(self, error: BaseException | None) -> None:
        """End the span: the request has ended, or could not begin. Idempotent."""
        if self._end_span is not None:
            end, self._end_span = self._end_span, None
            end(error)

    def begin(self, text: str | None, sequence: Sequence, plan: AnswerPlan, tokenizer: Tokenizer | None) -> None:
        """Hand its sequence, and those of its other choices, to the core, and follow them.

        Args:
            text: of the prompt, if it has one.
            plan: how the text of its choices is read.
        """
        completions = self._follow(text, sequence, tokenizer, plan)
        self.core.add(sequence, completions, arrived_at=self._arrived_at)
        self.completions = completions
        log_begin(self.core.config, sequence.request, text)
        if self.is_aborted:
            self.abort()

    def end_unbegun(self, text: str | None, sequence: Sequence) -> None:
        """End a request that was aborted before the core had it."""
        self.completions = self._follow(text, sequence, None)
        for completion in self.completions:
            completion.sequence.finish_reason = "abort"
            completion.on_end()

    def _follow(
        self, text: str | None, first: Sequence, tokenizer: Tokenizer | None, plan: AnswerPlan = PLAIN
    ) -> list[Completion]:
        """Make a completion for each choice, by index."""
        params = first.request.params
        self._prompt_text = text
        self._sequences = [first, *first.children]
        self._num_open = len(self._sequences)
        self._num_choices = params.n
        self._tokenizer = tokenizer if params.detokenize else None
        if first.sampling.prompt_logprobs >= 0:
            self.prompt_logprobs = [None] * len(first.prompt)
        if plan.keeps_special_tokens:
            params = msgspec.structs.replace(params, skip_special_tokens=False)
        return [Completion(choice, self, _detokenizer_for(self._tokenizer, params), plan) for choice in self._sequences]

    @property
    def is_begun(self) -> bool:
        return bool(self.completions)

    @property
    def is_ended(self) -> bool:
        return not self._num_open

    def abort(self) -> None:
        """End all choices with the output that they have."""
        for sequence in reversed(self._sequences):  # the first one ends those that have not been forked yet
            self.core.finish(sequence, "abort")

    def fail(self, error: Callable[[], AioEngineError]) -> None:
        """End its choices with an error each, if they have not ended."""
        for completion in self.completions:
            completion.on_error(error())

    # Called by the completions

    def on_output(self, completion: Completion) -> None:
        if not completion.is_listed:
            completion.is_listed = True
            self._ready.append(completion)
            self._call_watcher()
        if self._waiter is not None and not self._waits_for_end:
            self._wake()

    def on_ended(self, completion: Completion) -> None:
        self._num_open -= 1
        if completion.error is not None and self.error is None:
            self.error = completion.error
            self.abort()  # calls this for the other choices, so that the last may be counted already
        if not self._num_open and math.isnan(self._ended_at):
            self._ended_at = self.core.clock()
            self.started.set()
            metrics, reasons = self._metrics(), self._finish_reasons()
            self.core.observers.on_request(metrics, reasons)
            log_end(self.core.config, self.request_id, reasons, metrics)
            self.end_span(self.error)
            self._wake()
            self._call_watcher()
            self._watcher = None  # a reference cycle: it refers to the stream, which refers to this

    def on_prompt_logprobs(self, position: int, logprobs: list[TokenLogprobs]) -> None:
        assert self.prompt_logprobs is not None
        self.prompt_logprobs[position : position + len(logprobs)] = logprobs

    def with_texts(self, token_id: int, sampled: SampledLogprobs) -> TokenLogprobs:
        """Log-probabilities with their tokens' texts, which are None in a request without text."""
        decode = self._decode if self._tokenizer is not None else lambda _: None
        logprobs = {token_id: Logprob(sampled.logprob, sampled.rank, decode(token_id))}
        for other_id, logprob, rank in sampled.others:
            if other_id not in logprobs:
                logprobs[other_id] = Logprob(logprob, rank, decode(other_id))
        return logprobs

    def _decode(self, token_id: int) -> str:
        """The text of a single token, special or not; by table, since a request may ask for twenty with each token."""
        assert self._tokenizer is not None
        table = self._tokenizer.token_table(skip_special_tokens=False)
        if isinstance(table, TokenTable) and not table.lead_strip and token_id < len(table.pieces):
            piece = table.first_pieces.get(token_id, table.pieces[token_id])
            if isinstance(piece, str):
                return piece
        return self._tokenizer.decode([token_id], skip_special_tokens=False)

    # Called by the reader

    async def wait(self, *, for_end: bool) -> None:
        """Wait until there is something to take, or for the end; for one reader.

        Cancelling loses nothing: output that has arrived can still be read.
        """
        if self._waiter is not None:
            raise RuntimeError("this stream is being read by another task; a stream has one reader")
        if for_end and self.max_unread != UNLIMITED:
            self.max_unread = UNLIMITED
            for sequence in self._sequences:
                self.core.unblock(sequence)
        while not (self.is_ended or (not for_end and self.has_output)):
            self._waiter = asyncio.get_running_loop().create_future()
            self._waits_for_end = for_end
            try:
                await self._waiter
            finally:
                self._waiter = None

    def watch(self, watcher: Callable[[], None]) -> None:
        """Call ``watcher`` when there is something new to take, and at the end; at once if so now."""
        if not self.is_ended:
            self._watcher = watcher
        if self.has_output or self.is_ended:
            watcher()

    @property
    def has_output(self) -> bool:
        return bool(self._ready or self._repeats)

    def take(self) -> CompletionDelta | None:
        """The new output of the first choice in the queue; None if there is none."""
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

    def output(self) -> RequestOutput:
        """The whole output so far, read or not."""
        first = self._sequences[0]
        is_repeated = len(self.completions) < self._num_choices  # greedy choices are all alike
        return RequestOutput(
            request_id=self.request_id,
            prompt=self._prompt_text,
            prompt_token_ids=first.prompt.tolist(),
            outputs=[self.completions[0 if is_repeated else i].output(i) for i in range(self._num_choices)],
            finished=self.is_ended,
            num_cached_tokens=first.num_cached_tokens,
            prompt_logprobs=list(self.prompt_logprobs) if self.prompt_logprobs is not None else None,
            metrics=self._metrics(),
        )

    def _metrics(self) -> RequestMetrics:
        """The request's times and counts so far."""
        first, arrived_at = self._sequences[0], self._arrived_at
        last_token_at = [self.core.last_token_at(sequence) for sequence in self._sequences]
        ended = [(s.first_token_at, at) for s, at in zip(self._sequences, last_token_at, strict=True) if at == at]
        last_at = max((at for _, at in ended), default=math.nan)
        num_gaps = sum(len(s.output_ids) - 1 for s in self._sequences if s.output_ids)
        decode_s = sum(last - begun for begun, last in ended)
        return RequestMetrics(
            arrival_time=self._arrival_time,
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
        """The finish reason of each choice."""
        if self.error is not None:
            return ("error",) * self._num_choices
        reasons = tuple(completion.finish_reason or "error" for completion in self.completions)
        return reasons if len(reasons) == self._num_choices else reasons * self._num_choices

    def _call_watcher(self) -> None:
        if self._watcher is not None:
            try:
                self._watcher()
            except BaseException as error:
                self.core.user_code.raised(error, "a stream's watcher failed")

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


def _detokenizer_for(tokenizer: Tokenizer | None, params: SamplingParams) -> Detokenizer | None:
    if tokenizer is None:
        return None
    is_joined = not (params.skip_special_tokens or params.spaces_between_special_tokens)
    return make_detokenizer(
        tokenizer.token_table(skip_special_tokens=params.skip_special_tokens),
        stop=tuple(params.stop),
        include_stop=params.include_stop_str_in_output,
        min_tokens=params.min_tokens,
        joined=tokenizer.joined_special_tokens if is_joined else None,
    )


def _known(seconds: float) -> float | None:
    return None if math.isnan(seconds) else seconds
