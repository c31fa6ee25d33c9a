"""The rules of rows that are lists, as tables for the device: they change when such a row comes or goes, and are
uploaded then; a steady step brings nothing.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from aioengine.sampler.rows import NO_RULES, RowRules
from aioengine.scheduler.plan import Int32

ALWAYS = np.int32(2**31 - 1)
MIN_SIZE = 64


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
    def total(self) -> int:
        return 4 * self.num_edits + 2 * self.num_words + 1 + self.num_word_ids


class RuleTensors(NamedTuple):
    """The tables on the device, as `Operations.edit_logits` and `Operations.ends_of_bad_words` take them."""

    edit_rows: Tensor
    edit_tokens: Tensor
    edit_values: Tensor
    edit_until: Tensor
    word_rows: Tensor
    word_offsets: Tensor
    word_ids: Tensor

    @classmethod
    def of(cls, words: Tensor, sizes: RuleSizes) -> RuleTensors:
        """Views of int32 words that `RuleTable.words` has made."""
        e, w, p = sizes
        parts = torch.split_with_sizes(words[: sizes.total], [e, e, e, e, w, w + 1, p])
        rows, tokens, values, until, word_rows, offsets, ids = parts
        return cls(rows, tokens, values.view(torch.float32), until, word_rows, offsets, ids)


class RowEdits(NamedTuple):
    """What is added to the logits of one row.

    Attributes:
        tokens: int32 [m]. values: float32 [m], -inf masks. until: int32 [m], output positions below this.
    """

    tokens: Int32
    values: NDArray[np.float32]
    until: Int32

    @classmethod
    def of(cls, rules: RowRules, min_tokens: int) -> RowEdits:
        num_bad, num_stops = len(rules.bad_ids), len(rules.stop_ids)
        return cls(
            tokens=np.concatenate((rules.bad_ids, rules.stop_ids, rules.bias_ids)).astype(np.int32),
            values=np.concatenate((np.full(num_bad + num_stops, -np.inf, np.float32), rules.biases)),
            until=np.concatenate(
                (
                    np.full(num_bad, ALWAYS, np.int32),
                    np.full(num_stops, min_tokens, np.int32),
                    np.full(len(rules.bias_ids), ALWAYS, np.int32),
                )
            ),
        )


class RuleTable:
    """The edits and bad words of all rows.

    Args:
        vocab_size: token ids from here on are not the model's, and passed over.

    Attributes:
        is_changed: since `words` was called.
    """

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._rows: dict[int, tuple[RowRules, int]] = {}
        self.sizes = RuleSizes()
        self.is_changed = False

    def remove(self, row: int) -> None:
        if self._rows.pop(row, None) is not None:
            self.is_changed = True

    def add(self, row: int, rules: RowRules, min_tokens: int) -> bool:
        """Take in a row; returns whether it has edits that are always made."""
        sequences = rules.bad_sequences
        is_always = bool(len(rules.bad_ids) or len(rules.bias_ids) or sequences is not None)
        if is_always or (min_tokens > 0 and len(rules.stop_ids)):
            self._rows[row] = (rules, min_tokens)
            self.is_changed = True
        return is_always

    def words(self) -> Int32:
        """The tables, for `RuleTensors.of` with `sizes`, which are those of this call from now on."""
        self.is_changed = False
        word_rows, last_ids, lengths, ids = self._bad_words()
        rows, edits = self._edits()
        num_words = _bucket(len(word_rows))
        self.sizes = RuleSizes(_bucket(num_words + len(rows)), num_words, _bucket(len(ids)))
        columns = np.empty((4, self.sizes.num_edits), np.int32)
        columns[:] = np.array([[-1], [0], [0], [ALWAYS]])
        columns[0, : len(word_rows)], columns[1, : len(word_rows)] = word_rows, last_ids
        others = slice(num_words, num_words + len(rows))
        columns[0, others], columns[1, others] = rows, edits.tokens
        columns[2, others], columns[3, others] = edits.values.view(np.int32), edits.until
        offsets = np.full(num_words + 1, len(ids), np.int32)
        offsets[: len(lengths) + 1] = np.concatenate(([0], np.cumsum(lengths)))
        return np.concatenate(
            (
                columns.reshape(-1),
                word_rows,
                np.full(num_words - len(word_rows), -1, np.int32),
                offsets,
                ids,
                np.zeros(self.sizes.num_word_ids - len(ids), np.int32),
            )
        )

    def _bad_words(self) -> tuple[Int32, Int32, Int32, Int32]:
        """Rows, last tokens, numbers of the other tokens, and those: int32, of the words that the model can make."""
        rows, lasts, lengths, ids = [], [], [], [np.zeros(0, np.int32)]
        for row, (rules, _) in self._rows.items():
            sequences = rules.bad_sequences
            if sequences is None:
                continue
            ends = [*sequences.starts[1:].tolist(), len(sequences.ids)]
            for last, start, end in zip(sequences.last_ids.tolist(), sequences.starts.tolist(), ends, strict=True):
                if last < self._vocab_size:
                    rows.append(row)
                    lasts.append(last)
                    lengths.append(end - start)
                    ids.append(sequences.ids[start:end])
        return np.array(rows, np.int32), np.array(lasts, np.int32), np.array(lengths, np.int32), np.concatenate(ids)

    def _edits(self) -> tuple[Int32, RowEdits]:
        rows = [np.zeros(0, np.int32)]
        edits = [RowEdits.of(NO_RULES, 0)]
        for row, (rules, min_tokens) in self._rows.items():
            of_row = RowEdits.of(rules, min_tokens)
            is_known = of_row.tokens < self._vocab_size
            edits.append(RowEdits(of_row.tokens[is_known], of_row.values[is_known], of_row.until[is_known]))
            rows.append(np.full(np.count_nonzero(is_known), row, np.int32))
        tokens, values, until = zip(*edits, strict=True)
        return np.concatenate(rows), RowEdits(np.concatenate(tokens), np.concatenate(values), np.concatenate(until))


def pack_bits(token_ids: NDArray[np.int64], vocab_size: int) -> Int32:
    """int32 [⌈vocab_size / 32⌉]: bit ``t % 32`` of word ``t // 32`` is set for each of ``token_ids``."""
    bits = np.zeros(-(-vocab_size // 32) * 32, np.uint8)
    bits[token_ids[token_ids < vocab_size]] = 1
    return np.packbits(bits, bitorder="little").view(np.int32)


def _bucket(size: int) -> int:
    return 0 if size == 0 else max(MIN_SIZE, 1 << (size - 1).bit_length())
