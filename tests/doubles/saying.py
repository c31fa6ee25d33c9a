"""A device that says what a test wants it to say, in answers to chats of the bundled model."""

from __future__ import annotations

from aioengine.models.folder import DEMO_MODEL
from aioengine.scheduler.plan import RowSampling
from aioengine.text.tokenizer import Tokenizer

IM_END = 2
"""Ends an answer."""


TOKENIZER = Tokenizer.load(DEMO_MODEL)  # not on the loop of a test


class Saying:
    """A sampler for a `FakeExecutor`: choice ``i`` of each chat is ``texts[i]``, and ends; beyond them the last text.

    ``is_in_turn``: answer ``i`` of a chat is ``texts[i]``. Where a grammar lets it say something else only, it goes on
    with what is left of its text, if that still follows.
    """

    def __init__(self, *texts: str, is_in_turn: bool = False) -> None:
        self.texts = texts
        self._is_in_turn = is_in_turn
        self._begins = TOKENIZER.encode("<|im_start|>assistant\n", add_special_tokens=False)

    def __call__(self, token_ids: list[int], sampling: RowSampling) -> int:
        starts = self._starts(token_ids)
        number = len(starts) - 1 if self._is_in_turn else sampling.choice
        wanted = self.texts[min(number, len(self.texts) - 1)]
        said = TOKENIZER.decode(token_ids[starts[-1] :])
        if not wanted.startswith(said) or said == wanted:
            return IM_END
        return TOKENIZER.encode(wanted[len(said) :], add_special_tokens=False)[0]

    def _starts(self, token_ids: list[int]) -> list[int]:
        """Where the chat's answers begin."""
        width = len(self._begins)
        return [at + width for at in range(len(token_ids)) if token_ids[at : at + width] == self._begins]
