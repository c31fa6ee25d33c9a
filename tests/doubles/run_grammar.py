"""A grammar of runs, for schedulers: now and then some tokens follow without a choice; anything else is admitted."""

from __future__ import annotations

from collections.abc import Sequence

from aioengine.structured.grammar import Mask, set_only

RUN = (4, 5, 4, 5, 6, 4)
BEGINS_RUN, BEGINS_END = 3, 2


class RunGrammar:
    """A `CompiledGrammar`: behind token 3 comes the beginning of `RUN`, behind token 2 now and then the end.

    Both depend on how many tokens there are.
    """

    def __init__(self, eos: int) -> None:
        self.eos = eos

    def matcher(self) -> RunMatcher:
        return RunMatcher(self.eos)


class RunMatcher:
    """Its `Matcher`."""

    problem = ""

    def __init__(self, eos: int) -> None:
        self.ending_ids = (eos,)
        self._num_tokens = 0
        self._due: list[int] = []

    def consume(self, token_ids: Sequence[int]) -> None:
        for token_id in token_ids:
            self._num_tokens += 1
            if self._due:
                assert token_id == self._due.pop(0), "a token that was forced is another one"
            elif token_id == BEGINS_RUN:
                self._due = list(RUN[: self._num_tokens % (len(RUN) + 1)])
            elif token_id == BEGINS_END and self._num_tokens % 3 == 0:
                self._due = [self.ending_ids[0]]

    def consume_all(self, matchers: Sequence[RunMatcher], token_ids: Sequence[int]) -> None:
        for matcher, token_id in zip(matchers, token_ids, strict=True):
            matcher.consume((token_id,))

    def renew(self) -> bool:
        return False

    def forced(self) -> list[int]:
        return list(self._due)

    def fill(self, mask: Mask) -> None:
        if self._due:
            set_only(mask[None], [(0, self._due[0])])
        else:
            mask.fill(-1)

    def fill_all(self, matchers: Sequence[RunMatcher], indices: Sequence[int], masks: Mask) -> None:
        for matcher, index in zip(matchers, indices, strict=True):
            matcher.fill(masks[index])
