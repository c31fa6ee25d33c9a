"""The rows of a device that have grammars: which tokens each may sample next, and which follow without a choice."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from aioengine.structured.grammar import CompiledGrammar, Mask, keep_going, set_only

MAX_FORCED = 4096
"""Tokens that one token may bring along."""


class GrammarRow:
    """A sequence's way through its grammar, in step with a device that may be some tokens ahead of the host.

    Tokens that the grammar forces are known before the device samples them. A row that *jumps* takes them over at once:
    `learn` gives them, the scheduler appends them, and they are computed together. Steps that were launched before that
    sample them, too, under a mask of that one token, so that nothing else can come of it. A row that does not jump,
    since it wants log-probabilities of each token, samples all of them so. Both have the same tokens.

    Args:
        num_prompt_tokens: the position of the first output token.
        output_ids: those that are known already.
        jumps: as above.
        is_forcing: no rule of the request forbids tokens; with such rules it samples what mask and rules leave.
        ignores_end: what ends the output comes only where nothing else can.
        allowed: the only tokens that may come, besides what the grammar says; None: any.

    Attributes:
        num_tokens: of prompt and output, forced ones that the device has not sampled included.
        unsent: (position, tokens) that are to be put into the device's history.
        problem: why no further token can come; empty if one can.
    """

    def __init__(
        self,
        grammar: CompiledGrammar,
        num_prompt_tokens: int,
        output_ids: Sequence[int],
        *,
        jumps: bool = True,
        is_forcing: bool = True,
        ignores_end: bool = False,
        allowed: Mask | None = None,
    ) -> None:
        self.grammar = grammar
        self.matcher = grammar.matcher()
        self.num_tokens = num_prompt_tokens
        self.unsent: deque[tuple[int, list[int]]] = deque()
        self.problem = ""
        self._jumps = jumps and is_forcing
        self._is_forcing = is_forcing
        self._ignores_end = ignores_end
        self._allowed = allowed
        self._forced: list[int] = []
        """The last tokens up to ``num_tokens``, if they were forced."""
        self._num_told = num_prompt_tokens
        """Tokens that `learn` has been given or has given."""
        self._force()
        for position, token_id in enumerate(output_ids, num_prompt_tokens):  # in the same pieces as at first
            self._take(position, token_id)
        self._num_told = num_prompt_tokens + len(output_ids)

    def learn(self, position: int, token_id: int) -> list[int]:
        """The device has sampled this token; returns those that follow without a choice, if it jumps."""
        self._take(position, token_id)
        self._num_told = max(self._num_told, position + 1)
        if not self._jumps or self._num_told >= self.num_tokens:
            return []
        forced = self._forced[self._num_told - self.num_tokens :]
        self.unsent.append((self._num_told, forced))
        self._num_told = self.num_tokens
        return forced

    def fill(self, position: int, mask: Mask) -> bool:
        """Write which tokens may stand at this position; False where the matcher must do it (`fill_masks`)."""
        if self.problem:
            mask.fill(0)
        elif position < self.num_tokens:
            set_only(mask, self._forced[position - self.num_tokens])
        elif position > self.num_tokens:  # a step before has failed, and the row with it
            mask.fill(-1)
        elif self.matcher.is_free:
            mask.fill(-1)
            self.restrict(mask)
        else:
            return False
        return True

    def restrict(self, mask: Mask) -> None:
        """Take out what the request's own rules forbid; the matcher has written the mask."""
        self.problem = self.matcher.problem
        if self._ignores_end:
            keep_going(mask, self.matcher.ending_ids)
        if self._allowed is not None:
            mask &= self._allowed

    def _take(self, position: int, token_id: int) -> None:
        if position >= self.num_tokens:  # else it was forced
            self.num_tokens = position + 1
            self._forced = []
            self._consume([token_id])
            self._force()

    def _force(self) -> None:
        """Take over the tokens that follow without a choice."""
        while self._is_forcing and not self.problem and len(self._forced) < MAX_FORCED:
            forced = self.matcher.forced()
            if not forced:
                return
            self._forced += forced
            self.num_tokens += len(forced)
            self._consume(forced)

    def _consume(self, token_ids: list[int]) -> None:
        self.matcher.consume(token_ids)
        self.problem = self.matcher.problem


def fill_masks(rows: Sequence[tuple[GrammarRow, int]], masks: Mask) -> None:
    """Write which tokens each row may sample at its position, ``rows[i]`` into ``masks[i]``.

    Args:
        masks: int32 [rows, ⌈vocab / 32⌉], contiguous.
    """
    waiting: dict[type, list[int]] = {}
    for index, (row, position) in enumerate(rows):
        if not row.fill(position, masks[index]):
            waiting.setdefault(type(row.matcher), []).append(index)
    for indices in waiting.values():
        matchers = [rows[index][0].matcher for index in indices]
        rows[indices[0]][0].grammar.fill_all(matchers, indices, masks)
        for index in indices:
            rows[index][0].restrict(masks[index])
