"""One completion on the caller's side: tokens become text when they arrive, and wait for their reader."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from aioengine.core.listener import UNLIMITED, SampledLogprobs
from aioengine.core.protocol import Core
from aioengine.errors import AioEngineError, InvalidRequest
from aioengine.outputs import CompletionDelta, CompletionOutput, FinishReason, Logprob, TokenLogprobs
from aioengine.scheduler.sequence import Sequence
from aioengine.text.detokenizer import Detokenizer

Decode = Callable[[int], str]
"""One token's text."""


class Mailbox(Protocol):
    """Where a completion says what is new of it."""

    def on_news(self, completion: Completion) -> None:
        """There is something to `Completion.take`."""
        ...

    def on_ended(self, completion: Completion) -> None:
        """Nothing more will come, and this may have been the last to take."""
        ...

    def on_prompt_logprobs(self, position: int, lines: list[TokenLogprobs]) -> None: ...


class Completion:
    """The `Listener` of a sequence.

    Text is made and stop strings are searched as tokens arrive, never when they are read, so that an unread stream
    stops where it should. What is not read is merged; the sequence's length bounds it, and so may ``max_unread``.

    Args:
        sequence: what to follow.
        mailbox: told when there is something to take.
        core: ends the sequence at a stop string, and blocks it while its reader is behind.
        detokenizer: None: there is no text then.
        decode: for log-probabilities; None without text.
        stream_interval: tokens to collect before the mailbox is told; the first token and the end are told at once.
        max_unread: tokens that may lie unread before the sequence is blocked; those in flight come nevertheless.
    """

    __slots__ = (
        "_allow_at",
        "_core",
        "_cumulative_logprob",
        "_decode",
        "_detokenizer",
        "_has_stop_text",
        "_mailbox",
        "_max_unread",
        "_num_read_ids",
        "_num_read_texts",
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
        mailbox: Mailbox,
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
        """The mailbox knows already; it puts this back."""
        self._mailbox = mailbox
        self._core = core
        self._detokenizer = detokenizer
        self._decode = decode
        self._has_stop_text = sequence.request.params.include_stop_str_in_output
        self._stream_interval = stream_interval
        self._max_unread = max_unread
        self._allow_at = max_unread if max_unread == UNLIMITED else 0
        """Tokens read at which the core hears that more may come."""
        self._tell_at = 1
        """Tokens at which the mailbox, or the core, must hear of it: one comparison for all others."""
        self._cumulative_logprob = 0.0
        self._texts: list[str] = []
        self._num_read_ids = 0
        self._num_read_texts = 0

    # What the core says

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
            self.logprobs.append(_line(token_id, logprobs, self._decode))
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

    def on_prompt_logprobs(self, position: int, lines: list[SampledLogprobs]) -> None:
        ids = self.sequence.slice_ids(position, position + len(lines))
        try:
            decoded = [_line(token_id, line, self._decode) for token_id, line in zip(ids, lines, strict=True)]
        except InvalidRequest as error:
            self.on_error(error)
        else:
            self._mailbox.on_prompt_logprobs(position, decoded)

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

    # What the reader asks

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
        """Nobody will read, but for the end: let it come."""
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
        self._mailbox.on_news(self)  # last, since whoever hears of it may read at once

    def _end(self, reason: FinishReason, stop_reason: int | str | None) -> None:
        self.is_ended = True
        self.finish_reason = reason
        self.stop_reason = stop_reason
        self._mailbox.on_news(self)
        self._mailbox.on_ended(self)


def _line(token_id: int, sampled: SampledLogprobs, decode: Decode | None) -> TokenLogprobs:
    line = {token_id: Logprob(sampled.logprob, sampled.rank, decode(token_id) if decode else None)}
    for other_id, logprob, rank in sampled.others:
        if other_id not in line:
            line[other_id] = Logprob(logprob, rank, decode(other_id) if decode else None)
    return line
