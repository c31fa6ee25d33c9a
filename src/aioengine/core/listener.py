"""Listeners, which follow sequences; what they get of a step, and their ends; conditions that a caller awaits."""

from __future__ import annotations

import asyncio
import sys
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Iterator
from typing import Protocol

import msgspec

from aioengine.core.observers import UserCode
from aioengine.errors import AioEngineError
from aioengine.processes.turns import turns_here
from aioengine.scheduler.plan import Float32, PromptLogprobs
from aioengine.scheduler.sequence import Sequence
from aioengine.scheduler.steps import StepOutput

UNLIMITED = sys.maxsize
"""The number of tokens that may be computed for a reader without a bound."""


class SampledLogprobs(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Raw log-probabilities about one token.

    Attributes:
        logprob, rank: the token's own.
        others: (token id, log-probability, rank): the likeliest tokens, as many as the request asked for, and those
            that it named.
    """

    logprob: float
    rank: int
    others: list[tuple[int, float, int]]


class Listener(Protocol):
    """Follows one sequence. It gets each product once, tokens in order, and then the end, or an error, once.

    It is called on the loop, between device steps, and must return soon.
    """

    @property
    def num_allowed(self) -> int:
        """Output tokens that may be computed for now, from the first on; `UNLIMITED` without a bound on unread ones."""

    def on_started(self) -> None:
        """The sequence has taken its first row. Not called for one that ends without a row."""

    def on_token(self, token_id: int, logprobs: SampledLogprobs | None) -> None:
        """A token was sampled, or forced by a grammar; with the last one the sequence's ``finish_reason`` is set, and
        so it may be with some before that."""

    def on_vector(self, vector: Float32) -> None:
        """The sequence's vector, float32 [hidden_size], was computed; its end is next."""

    def on_prompt_logprobs(self, position: int, logprobs: list[SampledLogprobs]) -> None:
        """About the prompt's tokens from ``position`` on; after a preemption some may come again, and alike."""

    def on_end(self) -> None:
        """The sequence has ended: see its ``finish_reason`` and ``stop_reason``."""

    def on_error(self, error: AioEngineError) -> None:
        """The sequence has ended by an error, which is this listener's alone."""


class Endings:
    """Ends of many sequences at once, reported to their listeners in order, in as many turns of the loop as that takes.

    Listeners call the user's code in the end. ``on_reported`` is called when all ends have been reported.
    """

    def __init__(self, user_code: UserCode, on_reported: Callable[[], None]) -> None:
        self._user_code = user_code
        self._on_reported = on_reported
        self._pending: OrderedDict[int, tuple[Listener, AioEngineError | None]] = OrderedDict()
        """By the sequence's order."""
        self._is_scheduled = False

    def __bool__(self) -> bool:
        return bool(self._pending)

    def add_end(self, order: int, listener: Listener, error: AioEngineError | None = None) -> None:
        """Note that a sequence has ended, by the error if there is one; `report_some` is to follow."""
        self._pending[order] = listener, error

    def report(self, order: int) -> None:
        """Report the end of this sequence now, if it has one that was not reported."""
        if order in self._pending:
            listener, error = self._pending.pop(order)
            with self._user_code.called("while reporting a sequence's end"):
                if error is None:
                    listener.on_end()
                else:
                    listener.on_error(error)

    def report_some(self) -> None:
        """Report as many ends as this turn of the loop has time for, and the others in later ones."""
        turns = turns_here()
        while self._pending and not turns.is_spent:
            self.report(next(iter(self._pending)))
        if not self._pending:
            self._on_reported()
        elif not self._is_scheduled:
            self._is_scheduled = True
            asyncio.get_running_loop().call_soon(self._go_on)

    def _go_on(self) -> None:
        self._is_scheduled = False
        self.report_some()

    async def report_all(self) -> None:
        """Report all ends. Cancelling reports those that are left at once."""
        try:
            while self._pending:
                await turns_here().take()
                self.report_some()
        finally:
            while self._pending:
                self.report(next(iter(self._pending)))

    async def report_after(
        self, run: Awaitable[None], on_close: Callable[[], None], on_failure: Callable[[BaseException], None]
    ) -> None:
        """Run a core's loop, and report all ends when it has ended.

        Args:
            on_close: called when the loop is cancelled: adds the ends of all sequences.
            on_failure: likewise, with the error that the loop raises, which goes no further.
        """
        try:
            await run
        except GeneratorExit:  # the loop is gone
            raise
        except (asyncio.CancelledError, KeyboardInterrupt, SystemExit):
            on_close()
            await self.report_all()
            raise
        except BaseException as error:  # a panic of a library's in Rust is no Exception
            on_failure(error)
        await self.report_all()


class Conditions:
    """Awaitable conditions without an event of their own: rechecked after each step, and when `check` is called."""

    def __init__(self) -> None:
        self._awaited: list[tuple[Callable[[], bool], asyncio.Future[None]]] = []
        self._is_over = False

    def __bool__(self) -> bool:
        return bool(self._awaited)

    def add(self, is_so: Callable[[], bool]) -> asyncio.Future[None]:
        """A future that is done after the first `check` at which ``is_so``, or `end_all`."""
        future = asyncio.get_running_loop().create_future()
        self._awaited.append((is_so, future))
        if self._is_over:
            self.check()
        return future

    def add_soon(self, is_so: Callable[[], bool]) -> asyncio.Future[None]:
        """As `add`; its first check is in the next turn of the loop."""
        future = self.add(is_so)
        self.check_soon()
        return future

    def check(self) -> None:
        """Set the futures whose conditions hold."""
        for is_so, future in self._awaited:
            if not future.done() and (self._is_over or is_so()):  # it is done if its caller was cancelled
                future.set_result(None)
        self._awaited = [(is_so, future) for is_so, future in self._awaited if not future.done()]

    def check_soon(self) -> None:
        """`check` in the next turn of the loop."""
        if self._awaited:
            asyncio.get_running_loop().call_soon(self.check)

    def end_all(self) -> None:
        """Nothing will change any more: set all futures, and later ones, whether their conditions hold or not."""
        self._is_over = True
        self.check()


PROMPT_SLICE = 32
"""Prompt tokens whose log-probabilities are handed out between the loop's turns: with 20 each, below a millisecond."""


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
    """Yield a step's log-probabilities of prompts, `PROMPT_SLICE` tokens at once.

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
