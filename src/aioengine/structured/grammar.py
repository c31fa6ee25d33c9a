"""Interfaces of a compiled constraint of any library, and the grammar around it for reasoning before the answer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, Self

import msgspec
import numpy as np
from numpy.typing import NDArray

Mask = NDArray[np.int32]
"""int32 [⌈vocab / 32⌉]: bit ``t % 32`` of word ``t // 32`` is set where token ``t`` may come next."""


STACK_BYTES = 256 * 2**20
"""Stack of a thread that compiles: llguidance follows references and rules by recursion, 10 kB a level, and an overflow
ends the process. A constraint of the largest size has 7,000 levels of references, or 30,000 rules of 2 kB."""

TOO_LARGE = "the constraint is too large"
"""The beginning of a matcher's ``problem`` where a limit of the library is reached."""


class Matcher(Protocol):
    """The position of one sequence in its grammar. For one thread at a time."""

    @property
    def ending_ids(self) -> Sequence[int]:
        """The tokens that end the output."""

    @property
    def problem(self) -> str:
        """Why it cannot go on: a token that the grammar does not admit, or a bound of the library; empty if it can."""

    def consume(self, token_ids: Sequence[int]) -> None:
        """Advance by these tokens; errors are in ``problem``."""

    def consume_all(self, matchers: Sequence[Self], token_ids: Sequence[int]) -> None:
        """Advance each matcher by one token, in parallel and without the GIL where the library can."""

    def renew(self) -> bool:
        """Replace state that several matchers share if it is full, and replay the tokens; return whether that helped.

        `fill` does not renew: call this while it leaves a ``problem``, until it returns False. After a renewal call
        `forced` and `fill` again.
        """

    def forced(self) -> list[int]:
        """The only tokens that can come next, as the tokenizer splits their text, including the end of the output."""

    def fill(self, mask: Mask) -> None:
        """Write the mask of the tokens that may come next, including those that end the text where it may end."""

    def fill_all(self, matchers: Sequence[Self], indices: Sequence[int], masks: Mask) -> None:
        """Write the mask of each matcher into ``masks[index]``, in parallel and without the GIL where the library can.

        Args:
            masks: int32 [any, ⌈vocab / 32⌉], contiguous.
        """


class CompiledGrammar(Protocol):
    """A constraint over one vocabulary. Any thread may use it."""

    def matcher(self) -> Matcher:
        """A new matcher, at the beginning of the text."""


class Thinking(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """Reasoning that comes before an answer, as tokens.

    Attributes:
        begin_ids: tokens that begin it, where the prompt does not; empty if it cannot begin any more.
        end_ids: tokens that end it.
        forced_end_ids: tokens that are forced after ``max_tokens`` to end it; the last of them are ``end_ids``.
        is_begun: the prompt begins it.
        max_tokens: the most tokens of reasoning; -1: any number.
        gap_ids: tokens of line breaks; up to `MAX_GAP_TOKENS` of them may stand between it and the answer.
    """

    begin_ids: tuple[int, ...] = ()
    end_ids: tuple[int, ...] = ()
    forced_end_ids: tuple[int, ...] = ()
    is_begun: bool = False
    max_tokens: int = -1
    gap_ids: tuple[int, ...] = ()


MAX_GAP_TOKENS = 2


class ThinkingGrammar(msgspec.Struct, frozen=True, eq=False):
    """Free reasoning of bounded length, then text that ``inner`` admits; any text if ``inner`` is None.

    Attributes:
        ending_ids: tokens that end the output; they must not come before the text of ``inner``.
    """

    thinking: Thinking
    inner: CompiledGrammar | None
    ending_ids: Sequence[int]

    def matcher(self) -> Matcher:
        return ThinkingMatcher(self)


class ThinkingMatcher:
    """See `ThinkingGrammar`."""

    def __init__(self, grammar: ThinkingGrammar) -> None:
        self._grammar = grammar
        self._thinking = thinking = grammar.thinking
        self._inner = grammar.inner.matcher() if grammar.inner is not None else None
        self.ending_ids = grammar.ending_ids
        self._may_begin = bool(thinking.begin_ids) and not thinking.is_begun
        self._num_begun = 0
        """Tokens of ``begin_ids`` so far, while reasoning may begin. ``_inner`` has them, too: it may be the answer."""
        self._is_thinking = thinking.is_begun
        self._num_gaps_left = 0
        """Tokens of ``gap_ids`` that may come before the answer."""
        self._num_tokens = 0
        """Number of tokens of reasoning."""
        self._num_forced = 0
        """Tokens of ``forced_end_ids`` so far."""
        self._last: list[int] = []
        """The last tokens of reasoning, as many as ``end_ids``."""

    @property
    def problem(self) -> str:
        return self._inner.problem if self._inner is not None and not (self._is_thinking or self._may_begin) else ""

    @property
    def _answer(self) -> Matcher | None:
        """The inner matcher, once it alone decides which tokens come next."""
        return None if self._is_thinking or self._may_begin or self._num_gaps_left else self._inner

    def consume(self, token_ids: Sequence[int]) -> None:
        for token_id in token_ids:
            if self._is_thinking:
                self._think(token_id)
                continue
            if self._num_gaps_left and token_id in self._thinking.gap_ids:
                self._num_gaps_left -= 1
                continue
            self._num_gaps_left = 0
            self._may_begin = self._may_begin and token_id == self._thinking.begin_ids[self._num_begun]
            self._num_begun += self._may_begin
            if self._may_begin and self._num_begun == len(self._thinking.begin_ids):
                self._is_thinking, self._may_begin = True, False
                self._inner = self._grammar.inner.matcher() if self._grammar.inner is not None else None
            elif self._inner is not None:
                self._inner.consume((token_id,))

    def consume_all(self, matchers: Sequence[ThinkingMatcher], token_ids: Sequence[int]) -> None:
        answers: list[tuple[Matcher, int]] = []
        for matcher, token_id in zip(matchers, token_ids, strict=True):
            if (answer := matcher._answer) is not None:
                answers.append((answer, token_id))
            else:
                matcher.consume((token_id,))
        if answers:
            inner, inner_ids = zip(*answers, strict=True)
            inner[0].consume_all(inner, inner_ids)

    def renew(self) -> bool:
        return self._inner is not None and self._inner.renew()

    def _think(self, token_id: int) -> None:
        ends = self._thinking.end_ids
        self._num_forced += self._is_to_end
        self._num_tokens += 1
        self._last = [*self._last, token_id][-len(ends) :]
        self._is_thinking = tuple(self._last) != ends
        if not self._is_thinking and self._thinking.gap_ids and self._inner is not None:
            self._num_gaps_left = MAX_GAP_TOKENS

    @property
    def _is_to_end(self) -> bool:
        """Whether the reasoning has reached ``max_tokens``."""
        return self._is_thinking and 0 <= self._thinking.max_tokens <= self._num_tokens

    def forced(self) -> list[int]:
        if self._is_to_end:
            return list(self._thinking.forced_end_ids[self._num_forced :])
        return self._answer.forced() if self._answer is not None else []

    def fill(self, mask: Mask) -> None:
        if self._is_to_end:
            mask.fill(0)
            _set(mask, self._thinking.forced_end_ids[self._num_forced])
        elif self._is_thinking or self._inner is None:
            mask.fill(-1)
            if self._inner is not None:
                _clear(mask, self.ending_ids)
        else:
            self._inner.fill(mask)
            if self._may_begin:
                if self._inner.problem:  # its tokens so far can only be the marker's
                    mask.fill(0)
                _set(mask, self._thinking.begin_ids[self._num_begun])
            if self._num_gaps_left:
                for token_id in self._thinking.gap_ids:
                    _set(mask, token_id)

    def fill_all(self, matchers: Sequence[ThinkingMatcher], indices: Sequence[int], masks: Mask) -> None:
        answers: list[tuple[Matcher, int]] = []
        for matcher, index in zip(matchers, indices, strict=True):
            if (answer := matcher._answer) is not None:
                answers.append((answer, index))
            else:
                matcher.fill(masks[index])
        if answers:
            inner, rows = zip(*answers, strict=True)
            inner[0].fill_all(inner, rows, masks)


def set_only(masks: Mask, tokens: Sequence[tuple[int, int]]) -> None:
    """Admit one token in each of these masks: for each (row, token) ``masks[row]`` admits the token alone."""
    rows, token_ids = np.array(tokens).T
    masks[rows] = 0
    masks.view(np.uint32)[rows, token_ids // 32] = np.uint32(1) << (token_ids % 32).astype(np.uint32)


def keep_going(mask: Mask, ending_ids: Sequence[int]) -> None:
    """Remove the tokens that end the output from a mask, if others are left."""
    others = mask.copy()
    _clear(others, ending_ids)
    if others.any():
        mask[:] = others


def _set(mask: Mask, token_id: int) -> None:
    mask.view(np.uint32)[token_id // 32] |= np.uint32(1 << token_id % 32)


def _clear(mask: Mask, token_ids: Sequence[int]) -> None:
    for token_id in token_ids:
        mask.view(np.uint32)[token_id // 32] &= np.uint32(~(1 << token_id % 32) & 0xFFFFFFFF)
