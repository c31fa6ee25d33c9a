"""Log-probabilities of tokens, their ranks, and the likeliest tokens: of sampled tokens and of prompt tokens.

All are of the logits as the model gave them. A rank is 1 plus the number of tokens with a higher logit, so that tokens
of equal logits have equal ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import msgspec
import numpy as np
import torch
from torch import Tensor

from aioengine.sampler.blocks import BLOCK, CHUNK_ELEMENTS, BlockedLogits, block, distinct, largest, row_index
from aioengine.sampler.rows import Int64, PromptTokens, SamplingRows, spans
from aioengine.scheduler.plan import Float32, Int32, PromptLogprobs, StepLogprobs, int32

PROMPT_CHUNK_ELEMENTS = 2**22
"""Logits of a prompt that are computed together: 16 MB, and temporaries of the same size; 27 tokens of 150,000."""

FEW_BLOCKS = 64
"""So few are all looked into for a rank: that is faster than to find those that matter."""

MANY_TOKENS = 20
"""To rank so many tokens of a row, it is sorted: 5 ms for 150,000, where looking for one may take 0.25."""


class Likeliest(NamedTuple):
    """The likeliest tokens of some rows.

    Attributes:
        log_mass: float32 [n], what a row's logits have to be lowered by to be log-probabilities.
        ids, logprobs: int32 and float32 [n, k].
    """

    log_mass: Float32
    ids: Int32
    logprobs: Float32

    def entries(self, index: Tensor | None) -> Likeliest:
        """Those of the rows ``index``, int64 [m]; None: all."""
        return self if index is None else Likeliest(*(column[index.numpy()] for column in self))


def likeliest_tokens(logits: BlockedLogits, rows: Int64, vocab: int, num_top: int) -> Likeliest:
    """Of the rows ``rows``, int64 [n], ascending; ``num_top`` of them or as many as there are."""
    rows_a_chunk = max(1, CHUNK_ELEMENTS // vocab)
    parts = []
    for start in range(0, len(rows), rows_a_chunk):
        of_rows = logits.rows(row_index(rows[start : start + rows_a_chunk]))
        log_mass = torch.logsumexp(of_rows.values.flatten(1), dim=-1)
        values, ids = largest(of_rows, min(num_top, vocab))
        # The padding behind the vocabulary may tie with tokens that are -inf.
        parts.append((log_mass, ids.clamp(max=vocab - 1).int(), values.sub_(log_mass[:, None])))
    columns = parts[0] if len(parts) == 1 else map(torch.cat, zip(*parts, strict=True))
    return Likeliest(*(column.numpy() for column in columns))


def look_up(logits: BlockedLogits, rows: Int64, token_ids: Tensor) -> tuple[Float32, Int32]:
    """The logit of ``token_ids[i]`` in row ``rows[i]``, and its rank: [m] each.

    For the rank, only the blocks are looked into that have a higher logit in them: a few, for a likely token.
    """
    num_blocks = logits.maxima.shape[1]
    blocks = logits.values.flatten(0, 1)
    of_pairs = torch.from_numpy(rows)
    values = logits.values.flatten(1)[of_pairs, token_ids]
    ranks = torch.ones(len(rows), dtype=torch.int32)
    pairs_a_chunk = max(1, CHUNK_ELEMENTS // (BLOCK * num_blocks))
    for start in range(0, len(rows), pairs_a_chunk):
        chunk = slice(start, start + pairs_a_chunk)
        of_rows, of_values = of_pairs[chunk], values[chunk]
        if num_blocks <= FEW_BLOCKS:
            is_above = logits.values.flatten(1)[of_rows] > of_values[:, None]
            ranks[chunk] += is_above.sum(dim=-1, dtype=torch.int32)
            continue
        pair, in_block = (logits.maxima[of_rows] > of_values[:, None]).nonzero(as_tuple=True)
        is_above = blocks.index_select(0, of_rows[pair] * num_blocks + in_block) > of_values[pair, None]
        ranks[chunk].index_add_(0, pair, is_above.sum(dim=-1, dtype=torch.int32))
    return values.numpy(), ranks.numpy()


def look_up_many(logits: BlockedLogits, rows: Int64, token_ids: list[Int64]) -> tuple[Float32, Int32]:
    """As `look_up`, for tokens ``token_ids[i]`` of row ``rows[i]``, one row after the other."""
    if max(map(len, token_ids)) < MANY_TOKENS:
        pairs = np.repeat(rows, [len(ids) for ids in token_ids])
        return look_up(logits, pairs, torch.from_numpy(np.concatenate(token_ids)))
    values, ranks = [], []
    for row, ids in zip(rows.tolist(), token_ids, strict=True):
        of_row = logits.values[row].flatten().numpy()
        ranked = np.sort(of_row)
        values.append(of_row[ids])
        ranks.append(1 + len(ranked) - np.searchsorted(ranked, values[-1], side="right"))
    return np.concatenate(values), np.concatenate(ranks).astype(np.int32)


def step_logprobs(
    logits: BlockedLogits, vocab: int, rows: SamplingRows, row_of_token: Int64, token_ids: Tensor
) -> StepLogprobs | None:
    """Log-probabilities of the sampled tokens whose rows asked.

    Args:
        logits: of all rows, as the model gave them.
        row_of_token: int64 [t], ascending.
        token_ids: int64 [t].
    """
    index = (rows.logprobs[row_of_token] >= 0).nonzero()[0]
    if not len(index):
        return None
    row_of_entry = row_of_token[index]
    asked, member = distinct(row_of_entry)
    of_rows = likeliest_tokens(logits, asked, vocab, int(rows.logprobs[asked].max()))
    of_entries = of_rows.entries(member)
    values, ranks = look_up(logits, row_of_entry, token_ids[torch.from_numpy(index)])
    result = StepLogprobs(
        index=index.astype(np.int32),
        logprobs=values - of_entries.log_mass,
        ranks=ranks,
        top_ids=of_entries.ids,
        top_logprobs=of_entries.logprobs,
    )
    return add_extra(result, logits, vocab, rows, asked, member, of_rows.log_mass)


def add_extra(
    result: StepLogprobs,
    logits: BlockedLogits,
    vocab: int,
    rows: SamplingRows,
    asked: Int64,
    member: Tensor | None,
    log_mass: Float32,
) -> StepLogprobs:
    """With the tokens that rows report always.

    Args:
        asked: int64 [n], the rows that want log-probabilities; log_mass: float32 [n], of those.
        member: int64 [m], which of those rows each entry of ``result`` is of; None: one entry each, in order.
    """
    if rows.logprob_token_ids is None:
        return result
    of_rows = [rows.logprob_token_ids[row] for row in asked.tolist()]
    of_rows = [ids[ids < vocab] for ids in of_rows]
    counts = np.array([len(ids) for ids in of_rows])
    ids = np.concatenate(of_rows)
    values, ranks = look_up_many(logits, asked, of_rows)
    logprobs = values - np.repeat(log_mass, counts)
    starts = np.cumsum(counts) - counts
    if member is not None:
        starts, counts = starts[member.numpy()], counts[member.numpy()]
    entries = spans(starts, counts)
    return msgspec.structs.replace(
        result,
        extra_offsets=int32(np.concatenate(([0], np.cumsum(counts)))),
        extra_ids=int32(ids[entries]),
        extra_logprobs=logprobs[entries],
        extra_ranks=ranks[entries],
    )


def prompt_logprobs(
    logits_of: Callable[[Tensor], Tensor], hidden: Tensor, wanted: PromptTokens, vocab: int
) -> PromptLogprobs:
    """Log-probabilities of prompt tokens, a bounded number at once.

    Args:
        logits_of: [m, hidden_size] → float32 [m, vocab].
        hidden: [tokens, hidden_size], of the step's tokens.
    """
    tokens_a_chunk = max(1, PROMPT_CHUNK_ELEMENTS // vocab)
    parts = []
    for start in range(0, len(wanted.token_ids), tokens_a_chunk):
        chunk = slice(start, start + tokens_a_chunk)
        logits = block(logits_of(hidden[torch.from_numpy(wanted.predicted_at[chunk])]))
        each = np.arange(len(logits.maxima))
        top = likeliest_tokens(logits, each, vocab, wanted.num_top)
        values, ranks = look_up(logits, each, torch.from_numpy(wanted.token_ids[chunk]))
        parts.append((values - top.log_mass, ranks, top.ids, top.logprobs))
    logprobs, ranks, top_ids, top_logprobs = (np.concatenate(columns) for columns in zip(*parts, strict=True))
    return PromptLogprobs(
        index=wanted.index,
        positions=wanted.positions,
        logprobs=logprobs,
        ranks=ranks,
        top_ids=top_ids,
        top_logprobs=top_logprobs,
    )
