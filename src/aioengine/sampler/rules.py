"""What a request forbids or favours: logits are changed in place, in the rows that have rules and in no other.

In the order of `RowSampling`: the only ids allowed, bad words, stop ids before ``min_tokens``, biases, the request's
own processors, penalties. Everything is computed from the row's tokens at each step, so that it does not matter how
they came about. Token ids that the model does not have are passed over.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from aioengine.sampler.blocks import Scratch
from aioengine.sampler.penalties import apply_penalties
from aioengine.sampler.processors import run_processors
from aioengine.sampler.rows import Int64, RuledRows


def apply_rules(logits: Tensor, ruled: RuledRows, scratch: Scratch) -> dict[int, Exception]:
    """Change the logits of ``ruled``.

    Args:
        logits: float32 [n, vocab], contiguous.
    Returns:
        By row of logits, what a row's own processor raised, or what was wrong with its answer. The logits of those rows
        are meaningless; no other row's are.
    """
    keep_allowed(logits, ruled)
    mask(logits, ruled)
    add_biases(logits, ruled)
    failures = run_processors(logits, ruled)
    apply_penalties(logits, ruled, scratch)
    return failures


def keep_allowed(logits: Tensor, ruled: RuledRows) -> None:
    """Put all tokens but the allowed ones at -inf."""
    limited = [
        (logits_row, rules.allowed_ids)
        for logits_row, rules in zip(ruled.logits_rows.tolist(), ruled.rules, strict=True)
        if rules.allowed_ids is not None
    ]
    if not limited:
        return
    logits_rows, ids = zip(*limited, strict=True)
    index, _ = flat_index(logits_rows, ids, logits.shape[1])
    flat, index = logits.view(-1), index.to(logits.device)
    kept = flat.index_select(0, index)
    for logits_row in logits_rows:  # in a sixth of the time of `index_fill_`
        logits[logits_row].fill_(-torch.inf)
    flat[index] = kept


def mask(logits: Tensor, ruled: RuledRows) -> None:
    """Put bad words, and ``stop_ids`` where it is too early for them, at -inf."""
    logits_rows, ids = [], []
    for logits_row, rules, is_early in zip(
        ruled.logits_rows.tolist(), ruled.rules, ruled.is_before_min.tolist(), strict=True
    ):
        if len(rules.bad_ids):
            logits_rows.append(logits_row)
            ids.append(rules.bad_ids)
        if is_early:
            logits_rows.append(logits_row)
            ids.append(rules.stop_ids)
    for logits_row, last_ids in ends_of_bad_words(ruled):
        logits_rows.append(logits_row)
        ids.append(last_ids)
    if logits_rows:
        index, _ = flat_index(logits_rows, ids, logits.shape[1])
        logits.view(-1).index_fill_(0, index, -torch.inf)


def ends_of_bad_words(ruled: RuledRows) -> list[tuple[int, Int64]]:
    """(row of logits, last ids) of the bad words of which the row's output ends with all other tokens."""
    having = [i for i, rules in enumerate(ruled.rules) if rules.bad_sequences is not None]
    if not having:
        return []
    words = [sequences for i in having if (sequences := ruled.rules[i].bad_sequences) is not None]
    num_ids = [len(sequences.ids) for sequences in words]
    row_of_id = np.repeat(having, num_ids)
    positions = ruled.num_tokens[row_of_id] - np.concatenate([sequences.distances for sequences in words])
    is_output = positions >= ruled.num_prompt_tokens[row_of_id]
    tokens = ruled.history[ruled.history_rows[row_of_id], np.where(is_output, positions, 0)]
    is_there = is_output & (tokens == np.concatenate([sequences.ids for sequences in words]))
    first_id = np.cumsum(num_ids) - num_ids
    starts = np.concatenate([sequences.starts + first for sequences, first in zip(words, first_id, strict=True)])
    is_begun = np.logical_and.reduceat(is_there, starts)
    num_words = [len(sequences.last_ids) for sequences in words]
    of_row = np.split(is_begun, np.cumsum(num_words)[:-1])
    return [
        (int(ruled.logits_rows[i]), sequences.last_ids[begun])
        for i, sequences, begun in zip(having, words, of_row, strict=True)
        if begun.any()
    ]


def add_biases(logits: Tensor, ruled: RuledRows) -> None:
    biased = [
        (logits_row, rules)
        for logits_row, rules in zip(ruled.logits_rows.tolist(), ruled.rules, strict=True)
        if len(rules.bias_ids)
    ]
    if not biased:
        return
    index, is_known = flat_index(
        [logits_row for logits_row, _ in biased], [rules.bias_ids for _, rules in biased], logits.shape[1]
    )
    biases = np.concatenate([rules.biases for _, rules in biased])
    logits.view(-1).index_add_(0, index, torch.from_numpy(biases if is_known is None else biases[is_known]))


def flat_index(
    logits_rows: Sequence[int], ids: Sequence[Int64], vocab: int
) -> tuple[Tensor, np.ndarray[tuple[int], np.dtype[np.bool_]] | None]:
    """Where ``ids[i]`` of row ``logits_rows[i]`` lie in logits [n, vocab] seen flat.

    Returns:
        int64 [all of them that the model has]; and which those are, bool [all]: None if it has all.
    """
    joined = np.concatenate(ids)
    index = np.repeat(np.array(logits_rows, np.int64) * vocab, [len(of_row) for of_row in ids]) + joined
    is_known = joined < vocab
    if is_known.all():
        return torch.from_numpy(index), None
    return torch.from_numpy(index[is_known]), is_known
