"""Penalties on tokens that were there already: repetition (Keskar et al., 2019, arXiv:1909.05858), frequency, presence.

Only the logits of a row's own tokens are read and written, never its whole vocabulary. A token that is there several
times is read and written as often, with the same value.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from aioengine.sampler.blocks import BLOCK, CHUNK_ELEMENTS, Scratch
from aioengine.sampler.rows import Int64, RuledRows
from aioengine.scheduler.plan import Float32, Int32


def apply_penalties(logits: Tensor, ruled: RuledRows, scratch: Scratch) -> None:
    """Change the logits of the tokens in each penalised row's history, in place.

    Args:
        logits: float32 [n, vocab], contiguous.
    """
    repeated = np.flatnonzero(ruled.params["repetition_penalty"] != 1)
    counted = np.flatnonzero((ruled.params["frequency_penalty"] != 0) | (ruled.params["presence_penalty"] != 0))
    for chunk in chunks(repeated, ruled, logits.shape[1]):
        penalise_repetition(logits, ruled, chunk)
    for chunk in chunks(counted, ruled, logits.shape[1]):
        penalise_counts(logits, ruled, chunk, scratch)


def chunks(members: Int64, ruled: RuledRows, vocab: int) -> list[Int64]:
    """``members`` of ``ruled`` in parts with a bounded number of tokens and of counters."""
    if not len(members):
        return []
    rows_a_chunk = max(1, CHUNK_ELEMENTS // max(vocab, int(ruled.num_tokens[members].max())))
    return [members[start : start + rows_a_chunk] for start in range(0, len(members), rows_a_chunk)]


class Known(NamedTuple):
    """Tokens of some rows, one row's after the other's.

    Attributes:
        token_ids: int64 [t], below the vocabulary's size.
        lengths: int64 [m], how many of each row.
    """

    token_ids: Int64
    lengths: Int64

    @classmethod
    def of(cls, ruled: RuledRows, members: Int64, starts: Int32, vocab: int) -> Known:
        """The tokens of ``members`` from ``starts`` on; those that the model does not have are passed over."""
        spans = zip(
            ruled.history_rows[members].tolist(), starts.tolist(), ruled.num_tokens[members].tolist(), strict=True
        )
        parts = [ruled.history[row, start:end] for row, start, end in spans]
        token_ids = np.concatenate(parts).astype(np.int64)
        if not len(token_ids) or token_ids.max() < vocab:
            return cls(token_ids, ruled.num_tokens[members] - starts)
        parts = [part[part < vocab] for part in parts]
        return cls(np.concatenate(parts).astype(np.int64), np.array([len(part) for part in parts]))

    def flat_index(self, rows: Int64, vocab: int) -> Tensor:
        """int64 [t]: where the tokens are in [any, vocab] seen flat, if they are of the rows ``rows``, [m]."""
        return torch.from_numpy(self.token_ids + np.repeat(rows * vocab, self.lengths))

    def each(self, of_row: Float32) -> Tensor:
        """float32 [t]: each token's row's, from [m]."""
        return torch.from_numpy(np.repeat(of_row, self.lengths))


def penalise_repetition(logits: Tensor, ruled: RuledRows, members: Int64) -> None:
    """Divide positive logits of the tokens in prompt and output, multiply the others."""
    vocab = logits.shape[1]
    known = Known.of(ruled, members, np.zeros(len(members), np.int32), vocab)
    index = known.flat_index(ruled.logits_rows[members], vocab)
    penalty = known.each(ruled.params["repetition_penalty"][members])
    flat = logits.view(-1)
    before = flat.index_select(0, index)
    flat[index] = torch.where(before > 0, before / penalty, before * penalty)


def penalise_counts(logits: Tensor, ruled: RuledRows, members: Int64, scratch: Scratch) -> None:
    """Lower the logits of the tokens in the output, by the frequency penalty once for each time that it is there."""
    vocab = logits.shape[1]
    known = Known.of(ruled, members, ruled.num_prompt_tokens[members], vocab)
    if not len(known.token_ids):
        return
    counters = scratch.blocks("counts", -(-len(members) * vocab // BLOCK), torch.float32).view(-1)
    counter = known.flat_index(np.arange(len(members)), vocab)
    counters.index_fill_(0, counter, 0.0)  # only those that are used: the others may be anything
    counters.index_add_(0, counter, torch.ones(len(counter)))
    counts = counters.index_select(0, counter)
    index = known.flat_index(ruled.logits_rows[members], vocab)
    flat = logits.view(-1)
    changed = flat.index_select(0, index)
    changed.sub_(known.each(ruled.params["frequency_penalty"][members]).mul_(counts))
    flat[index] = changed.sub_(known.each(ruled.params["presence_penalty"][members]))
