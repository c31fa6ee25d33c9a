"""One completion on the caller's side: tokens become text when they arrive, and wait for their one reader."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from aioengine.core.detokenizer import Detokenizer
from aioengine.core.sequence import FinishReason, Sequence
from aioengine.engine_core import SampledLogprobs
from aioengine.errors import AioEngineError
from aioengine.outputs import CompletionDelta, CompletionOutput, Logprob, TokenLogprobs

Finish = Callable[[Sequence, FinishReason, str], None]


class Completion:
    """The `Listener` of a sequence, and the mailbox of its reader.

    Text is made and stop strings are searched as tokens arrive, never when they are read, so that an unread stream
    stops where it should. What is not read is merged; the sequence's length bounds it.

    Args:
        sequence: what to follow.
        detokenizer: None without a tokenizer: there is no text then.
        decode: one token's text, for log-probabilities.
        finish: called with (sequence, "stop", the stop string) when one is found.
    """

    __slots__ = (
        "_decode",
        "_detokenizer",
        "_finish",
        "_num_read_ids",
        "_num_read_texts",
        "_texts",
        "_waiter",
        "_waits_for_end",
        "error",
        "finish_reason",
        "is_ended",
        "logprobs",
        "sequence",
        "stop_reason",
        "token_ids",
    )

    def __init__(
        self,
        sequence: Sequence,
        *,
        detokenizer: Detokenizer | None,
        decode: Callable[[int], str] | None,
        finish: Finish,
    ) -> None:
        self.sequence = sequence
        self.token_ids: list[int] = []
        self.logprobs: list[TokenLogprobs] | None = [] if sequence.sampling.logprobs >= 0 else None
        self.finish_reason: FinishReason | None = None
        self.stop_reason: int | str | None = None
        self.error: AioEngineError | None = None
        self.is_ended = False
        self._detokenizer = detokenizer
        self._decode = decode
        self._finish = finish
        self._texts: list[str] = []
        self._num_read_ids = 0
        self._num_read_texts = 0
        self._waiter: asyncio.Future[None] | None = None
        self._waits_for_end = False

    # What the core says

    def on_token(self, token_id: int, logprobs: SampledLogprobs | None) -> None:
        if self.is_ended:
            return
        self.token_ids.append(token_id)
        if logprobs is not None:
            self._add_logprobs(token_id, logprobs)
        if self._detokenizer is not None and self.sequence.finish_reason != "stop":  # a stop token has no text
            text = self._detokenizer.feed_one(token_id)
            if text:
                self._texts.append(text)
            if self._detokenizer.stop_string is not None:
                self._end("stop", self._detokenizer.stop_string)
                self._finish(self.sequence, "stop", self._detokenizer.stop_string)
                return
        if self._waiter is not None and not self._waits_for_end:
            self._wake()

    def on_end(self) -> None:
        if self.is_ended:
            return
        reason, stop_reason = self.sequence.finish_reason, self.sequence.stop_reason
        assert reason is not None, f"{self.sequence} has not ended"
        if self._detokenizer is not None:
            text = self._detokenizer.flush()
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

    async def wait(self, *, for_end: bool) -> None:
        """Wait until there is something to take, or for the end; for one reader.

        Cancelling takes nothing away: what has arrived stays to be read.
        """
        if self._waiter is not None:
            raise RuntimeError("this stream is being read by another task; a stream has one reader")
        while not (self.is_ended or (not for_end and self.has_unread)):
            self._waiter = asyncio.get_running_loop().create_future()
            self._waits_for_end = for_end
            try:
                await self._waiter
            finally:
                self._waiter = None

    @property
    def has_unread(self) -> bool:
        return len(self.token_ids) > self._num_read_ids or len(self._texts) > self._num_read_texts

    def take(self) -> CompletionDelta:
        """What has arrived since the last `take`, merged."""
        first = self._num_read_ids
        text = "".join(self._texts[self._num_read_texts :])
        self._num_read_ids = len(self.token_ids)
        self._num_read_texts = len(self._texts)
        return CompletionDelta(
            index=0,
            text=text,
            token_ids=self.token_ids[first:],
            logprobs=self.logprobs[first:] if self.logprobs is not None else None,
            finish_reason=self.finish_reason if self.error is None else None,  # the error itself comes next
            stop_reason=self.stop_reason,
        )

    def output(self) -> CompletionOutput:
        """The completion as far as it has come."""
        cumulative = None
        if self.logprobs is not None:
            lines = zip(self.token_ids, self.logprobs, strict=True)
            cumulative = sum(line[token_id].logprob for token_id, line in lines)
        return CompletionOutput(
            index=0,
            text="".join(self._texts),
            token_ids=list(self.token_ids),
            cumulative_logprob=cumulative,
            logprobs=list(self.logprobs) if self.logprobs is not None else None,
            finish_reason=self.finish_reason,
            stop_reason=self.stop_reason,
        )

    def _add_logprobs(self, token_id: int, sampled: SampledLogprobs) -> None:
        assert self.logprobs is not None
        decode = self._decode
        line = {token_id: Logprob(sampled.logprob, sampled.rank, decode(token_id) if decode else None)}
        for rank, (other_id, logprob) in enumerate(zip(sampled.top_ids, sampled.top_logprobs, strict=True), 1):
            if other_id != token_id:
                line[other_id] = Logprob(logprob, rank, decode(other_id) if decode else None)
        self.logprobs.append(line)

    def _end(self, reason: FinishReason, stop_reason: int | str | None) -> None:
        self.is_ended = True
        self.finish_reason = reason
        self.stop_reason = stop_reason
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
