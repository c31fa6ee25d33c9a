"""What follows a sequence, what a step's numbers look like to it, and the user's own code that hears of it."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import sys
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Protocol

import msgspec

from aioengine.errors import AioEngineError
from aioengine.scheduler.plan import PromptLogprobs
from aioengine.scheduler.sequence import Sequence
from aioengine.scheduler.steps import StepOutput
from aioengine.turns import turns_here

logger = logging.getLogger("aioengine")

PROMPT_SLICE = 32
"""Prompt tokens whose log-probabilities are handed out between the loop's turns: with 20 each, below a millisecond."""


UNLIMITED = sys.maxsize
"""Of tokens that a reader lets be computed."""


class SampledLogprobs(msgspec.Struct, frozen=True, gc=False):
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
    """Follows one sequence. It hears of each token once, in order, and then of the end, or of an error, once.

    It is called on the loop, between device steps, and must return soon.
    """

    @property
    def num_allowed(self) -> int:
        """Output tokens that its reader lets be computed for now, all told; `UNLIMITED` where it does not care."""
        ...

    def on_started(self) -> None:
        """It has taken its first row. Not told of what ends without one."""
        ...

    def on_token(self, token_id: int, logprobs: SampledLogprobs | None) -> None:
        """A token was sampled; if it is the last one, the sequence's ``finish_reason`` is set."""
        ...

    def on_prompt_logprobs(self, position: int, lines: list[SampledLogprobs]) -> None:
        """About the prompt's tokens from ``position`` on; after a preemption some may come again, and alike."""
        ...

    def on_end(self) -> None:
        """The sequence has ended: see its ``finish_reason`` and ``stop_reason``."""
        ...

    def on_error(self, error: AioEngineError) -> None:
        """The sequence has ended by an error, which is this listener's alone."""
        ...


class SampledLogprobRows:
    """The log-probabilities of a step's tokens, each made when it is asked for: all at once would hold the loop."""

    def __init__(self, output: StepOutput) -> None:
        self._output = output
        self._line_of: dict[int, int] = {}
        """By the index of a token in the output, its line."""
        if output.logprobs is not None:
            index_at = {place: index for index, place in enumerate(output.places.tolist())}
            for line, place in enumerate(output.logprobs.index.tolist()):
                index = index_at.get(place)
                if index is not None:  # its sequence lives
                    self._line_of[index] = line

    def get(self, index: int) -> SampledLogprobs | None:
        """About token ``index`` of the output, as wide as its row asked for; None if it did not ask."""
        line = self._line_of.get(index)
        logprobs = self._output.logprobs
        if line is None or logprobs is None:
            return None
        width = self._output.sequences[index].sampling.logprobs
        ids, values = logprobs.top_ids[line, :width].tolist(), logprobs.top_logprobs[line, :width].tolist()
        others = list(zip(ids, values, range(1, width + 1), strict=False))
        if len(logprobs.extra_offsets):
            extra = slice(*logprobs.extra_offsets[line : line + 2].tolist())
            named = (c[extra].tolist() for c in (logprobs.extra_ids, logprobs.extra_logprobs, logprobs.extra_ranks))
            others += zip(*named, strict=True)
        return SampledLogprobs(float(logprobs.logprobs[line]), int(logprobs.ranks[line]), others)


def prompt_lines(
    pieces: list[tuple[Sequence, PromptLogprobs]],
) -> Iterator[tuple[Sequence, int, list[SampledLogprobs]]]:
    """The lines about prompts in slices of `PROMPT_SLICE`: (sequence, the first one's position, lines)."""
    for sequence, piece in pieces:
        width = sequence.sampling.prompt_logprobs
        for start in range(0, len(piece.positions), PROMPT_SLICE):
            part = slice(start, start + PROMPT_SLICE)
            columns = (piece.logprobs, piece.ranks, piece.top_ids, piece.top_logprobs)
            lines = [
                SampledLogprobs(
                    logprob, rank, list(zip(ids[:width], values[:width], range(1, width + 1), strict=False))
                )
                for logprob, rank, ids, values in zip(*(column[part].tolist() for column in columns), strict=True)
            ]
            yield sequence, int(piece.positions[start]), lines


class UserCode:
    """Code of the user's that an engine calls, and that awaits nothing.

    What it raises is logged, and the engine goes on. KeyboardInterrupt and SystemExit go on, too, as from any callback
    of asyncio's: out of the loop, at its next turn. While the engine ends they are kept until it has closed everything.
    """

    def __init__(self) -> None:
        self._is_keeping = False
        self._kept: BaseException | None = None

    @contextlib.contextmanager
    def called(self, failure: str) -> Iterator[None]:
        """Call it in this block; ``failure`` is logged of what it raises."""
        try:
            yield
        except BaseException as error:
            self.raised(error, failure)

    def raised(self, error: BaseException, failure: str) -> None:
        """It has raised; to be called in the handler. For calls that each token makes: `called` costs 0.7 µs."""
        if not isinstance(error, KeyboardInterrupt | SystemExit):
            logger.error("%s", failure, exc_info=error)  # a CancelledError, too: nothing is awaited in such code
        elif self._is_keeping:
            self._kept = self._kept or error
        else:
            asyncio.get_running_loop().call_soon(_let_go, error)

    def keep(self) -> None:
        """The engine ends: keep from now on what would end the loop."""
        self._is_keeping = True

    def let_go(self) -> None:
        """Everything is closed: raise what was kept, if anything."""
        self._is_keeping = False
        kept, self._kept = self._kept, None
        if kept is not None:
            raise kept


def _let_go(error: BaseException) -> None:
    raise error


class Endings:
    """Ends of many sequences at once, told to their listeners in order, in as many turns of the loop as that takes.

    Args:
        user_code: what listeners call is in the end the user's.
        on_told: called when all have been told.
    """

    def __init__(self, user_code: UserCode, on_told: Callable[[], None]) -> None:
        self._user_code = user_code
        self._on_told = on_told
        self._untold: OrderedDict[int, tuple[Listener, AioEngineError | None]] = OrderedDict()
        """By the sequence's order."""
        self._is_scheduled = False

    def __bool__(self) -> bool:
        return bool(self._untold)

    def add(self, order: int, listener: Listener, error: AioEngineError | None = None) -> None:
        """The sequence has ended, by the error if there is one; `tell_some` or `tell_all` is to follow."""
        self._untold[order] = listener, error

    def tell(self, order: int) -> None:
        """Tell of this one now, if it has ended and was not told."""
        if order in self._untold:
            self._tell(*self._untold.pop(order))

    def tell_some(self) -> None:
        """Tell of as many as this turn of the loop has time for, and of the others in later ones."""
        turns = turns_here()
        while self._untold and not turns.is_spent:
            self._tell_first()
        if not self._untold:
            self._on_told()
        elif not self._is_scheduled:
            self._is_scheduled = True
            asyncio.get_running_loop().call_soon(self._go_on)

    def _go_on(self) -> None:
        self._is_scheduled = False
        self.tell_some()

    async def tell_all(self) -> None:
        """Tell of all. Cancelling tells of those that are left at once."""
        try:
            while self._untold:
                await turns_here().take()
                self.tell_some()
        finally:
            while self._untold:
                self._tell_first()

    def _tell_first(self) -> None:
        self._tell(*self._untold.popitem(last=False)[1])

    def _tell(self, listener: Listener, error: AioEngineError | None) -> None:
        with self._user_code.called("while telling of a sequence's end"):
            if error is None:
                listener.on_end()
            else:
                listener.on_error(error)
