"""The rules of rows that are lists, as tables for the device: they change when such a row comes or goes, and are
uploaded then; a steady step brings nothing. Token ids that the model does not have are passed over.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from aioengine.scheduler.plan import Int32, RowSampling

ALWAYS = 2**31 - 1


class RuleSizes(NamedTuple):
    """How many entries the tables have, padding included: powers of two, so that few graphs are needed.

    Attributes:
        num_edits: the bad words' come first.
        num_words: bad words of several tokens.
        num_word_ids: their tokens, but the last of each.
    """

    num_edits: int = 0
    num_words: int = 0
    num_word_ids: int = 0

    @property
    def sections(self) -> list[int]:
        """Words of each of `RuleTensors`."""
        e, w, p = self
        return [4 * e, w, w + 1, p]

    @property
    def total(self) -> int:
        return sum(self.sections)


class RuleTensors(NamedTuple):
    """The tables on the device, as `Operations.edit_logits` and `Operations.ends_of_bad_words` take them."""

    edits: Tensor
    word_rows: Tensor
    word_offsets: Tensor
    word_ids: Tensor

    @classmethod
    def of(cls, words: Tensor, sizes: RuleSizes) -> RuleTensors:
        """Views of int32 words that `RuleTable.words` has made."""
        edits, *of_words = torch.split_with_sizes(words[: sizes.total], sizes.sections)
        return cls(edits.view(4, sizes.num_edits), *of_words)


class RowRules(NamedTuple):
    """One row's.

    Attributes:
        edits: int32 [3, m]: tokens; what is added to their logits, a float32's bits, of which -inf masks; the output
            position from which on it is not.
        words: int32 [2, w], of bad words of several tokens: the last token of each, and the number of those before it.
        word_ids: int32 [sum of those numbers].
    """

    edits: Int32
    words: Int32
    word_ids: Int32

    @classmethod
    def of(cls, sampling: RowSampling, vocab_size: int) -> RowRules:
        edits = [(word[0], -np.inf, ALWAYS) for word in sampling.bad_words if len(word) == 1]
        if sampling.grammar is None:  # else its mask leaves one of these only if no other token is left
            edits += [(token, -np.inf, sampling.min_tokens) for token in sampling.stop_ids if sampling.min_tokens > 0]
        edits += [(token, bias, ALWAYS) for token, bias in sampling.logit_bias]
        edits = [edit for edit in edits if edit[0] < vocab_size]
        tokens, values, until = zip(*edits, strict=True) if edits else ((), (), ())
        words = [word for word in sampling.bad_words if len(word) > 1 and word[-1] < vocab_size]
        return cls(
            np.array((tokens, np.array(values, np.float32).view(np.int32), until), np.int32),
            np.array(([word[-1] for word in words], [len(word) - 1 for word in words]), np.int32),
            np.array([token for word in words for token in word[:-1]], np.int32),
        )

    @property
    def is_always(self) -> bool:
        """Whether there are rules that hold at any output position."""
        return self.words.size > 0 or bool((self.edits[2] == ALWAYS).any())


class RuleTable:
    """The edits and bad words of all rows.

    Args:
        vocab_size: token ids from here on are not the model's.

    Attributes:
        sizes: of what `words` made last.
        is_changed: since `words` was called.
    """

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._rows: dict[int, RowRules] = {}
        self.sizes = RuleSizes()
        self.is_changed = False

    def remove(self, row: int) -> None:
        if self._rows.pop(row, None) is not None:
            self.is_changed = True

    def add(self, row: int, sampling: RowSampling) -> bool:
        """Take in a row; returns whether it has rules that hold at any output position."""
        rules = RowRules.of(sampling, self._vocab_size)
        if rules.edits.size or rules.words.size:
            self._rows[row] = rules
            self.is_changed = True
        return rules.is_always

    def words(self) -> Int32:
        """The tables, for `RuleTensors.of` with `sizes`."""
        self.is_changed = False
        rows, of_rows = np.array(list(self._rows), np.int32), list(self._rows.values())
        word_rows, (last_ids, lengths) = _joined(rows, [rules.words for rules in of_rows], 2)
        edit_rows, edits = _joined(rows, [rules.edits for rules in of_rows], 3)
        num_words, num_ids = len(word_rows), int(lengths.sum())
        self.sizes = sizes = RuleSizes(
            _bucket(_bucket(num_words) + len(edit_rows)), _bucket(num_words), _bucket(num_ids)
        )
        words = np.zeros(sizes.total, np.int32)
        edits_of_rows, rows_of_words, offsets, word_ids = np.split(words, np.cumsum(sizes.sections)[:-1])
        columns = edits_of_rows.reshape(4, -1)
        columns[0], columns[3], rows_of_words[:], offsets[:] = -1, ALWAYS, -1, num_ids
        columns[0, :num_words], columns[1, :num_words] = word_rows, last_ids
        others = slice(sizes.num_words, sizes.num_words + len(edit_rows))
        columns[0, others], columns[1:, others] = edit_rows, edits
        rows_of_words[:num_words], offsets[:num_words] = word_rows, np.cumsum(lengths) - lengths
        if num_ids:
            word_ids[:num_ids] = np.concatenate([rules.word_ids for rules in of_rows])
        return words


def _joined(rows: Int32, columns: Sequence[Int32], num_columns: int) -> tuple[Int32, Int32]:
    """Columns int32 [num_columns, any] of each row behind each other; and before them which row each entry is of."""
    joined = np.concatenate([np.zeros((num_columns, 0), np.int32), *columns], axis=1)
    return np.repeat(rows, [of_row.shape[1] for of_row in columns]), joined


def pack_bits(token_ids: NDArray[np.int64], vocab_size: int) -> Int32:
    """int32 [⌈vocab_size / 32⌉]: bit ``t % 32`` of word ``t // 32`` is set for each of ``token_ids``."""
    bits = np.zeros(-(-vocab_size // 32) * 32, np.uint8)
    bits[token_ids[token_ids < vocab_size]] = 1
    return np.packbits(bits, bitorder="little").view(np.int32)


def _bucket(size: int) -> int:
    return 0 if size == 0 else max(64, 1 << (size - 1).bit_length())
