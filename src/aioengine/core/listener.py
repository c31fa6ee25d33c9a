"""Listeners, which follow sequences, and how they get ends; conditions that a caller awaits."""

from __future__ import annotations

import asyncio
import sys
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from typing import Protocol

import msgspec

from aioengine.core.observers import UserCode
from aioengine.errors import AioEngineError
from aioengine.processes.turns import turns_here
from aioengine.scheduler.plan import Float32

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
