"""What follows a sequence, and how it hears of tokens and ends; conditions that a caller awaits."""

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
"""Of tokens that a reader lets be computed."""


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
    """Ends of many sequences at once, told to their listeners in order, in as many turns of the loop as that takes.

    What listeners call is in the end the user's code. ``on_told`` is called when all have been told.
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

    async def after(
        self, run: Awaitable[None], on_close: Callable[[], None], on_failure: Callable[[BaseException], None]
    ) -> None:
        """Run a core's loop, and tell of all ends however that ends.

        Args:
            on_close: called when it is cancelled: adds the ends of all sequences.
            on_failure: likewise with what it raises, which goes no further.
        """
        try:
            await run
        except GeneratorExit:  # the loop is gone
            raise
        except (asyncio.CancelledError, KeyboardInterrupt, SystemExit):
            on_close()
            await self.tell_all()
            raise
        except BaseException as error:  # a panic of a library's in Rust is no Exception
            on_failure(error)
        await self.tell_all()

    def _tell_first(self) -> None:
        self._tell(*self._untold.popitem(last=False)[1])

    def _tell(self, listener: Listener, error: AioEngineError | None) -> None:
        with self._user_code.called("while telling of a sequence's end"):
            if error is None:
                listener.on_end()
            else:
                listener.on_error(error)


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
