"""Penalties on tokens that were there already: repetition (Keskar et al., 2019, arXiv:1909.05858), frequency, presence.

Only the logits of a row's own tokens are read and written, never its whole vocabulary. A token that is there several
times is read and written as often, with the same value.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from aioengine.sampler.blocks import BLOCK, CHUNK_ELEMENTS, Scratch
from aioengine.sampler.rows import Int64, RuledRows, spans


def apply_penalties(logits: Tensor, ruled: RuledRows, scratch: Scratch) -> None:
    """Change the logits of the tokens in each penalised row's history, in place.

    Args:
        logits: float32 [n, vocab], contiguous.
    """
    counts_output = (ruled.frequency_penalty != 0) | (ruled.presence_penalty != 0)
    penalised = np.flatnonzero(counts_output | (ruled.repetition_penalty != 1))
    if not len(penalised):
        return
    longest = max(logits.shape[1], int(ruled.num_tokens[penalised].max()))
    rows_a_chunk = max(1, CHUNK_ELEMENTS // longest)
    for start in range(0, len(penalised), rows_a_chunk):
        penalise(logits, ruled, penalised[start : start + rows_a_chunk], scratch)


def penalise(logits: Tensor, ruled: RuledRows, chunk: Int64, scratch: Scratch) -> None:
    """As `apply_penalties`, for the rows ``chunk`` of ``ruled``."""
    vocab = logits.shape[1]
    num_prompt = ruled.num_prompt_tokens[chunk]
    starts = np.where(ruled.repetition_penalty[chunk] != 1, 0, num_prompt)
    lengths = ruled.num_tokens[chunk] - starts
    line = np.repeat(np.arange(len(chunk)), lengths)
    positions = spans(starts, lengths)
    token_ids = ruled.history[ruled.history_rows[chunk][line], positions].astype(np.int64)
    is_output = positions >= num_prompt[line]
    is_known = token_ids < vocab
    if not is_known.all():
        line, token_ids, is_output = line[is_known], token_ids[is_known], is_output[is_known]

    index = torch.from_numpy(ruled.places[chunk][line] * vocab + token_ids)
    flat = logits.view(-1)
    changed = flat[index]
    repetition = torch.from_numpy(ruled.repetition_penalty[chunk][line])
    changed = torch.where(changed > 0, changed / repetition, changed * repetition)
    if is_output.any():
        counts = output_counts(line * vocab + token_ids, is_output, len(chunk) * vocab, scratch)
        changed -= torch.from_numpy(ruled.frequency_penalty[chunk][line]) * counts
        changed -= torch.from_numpy(ruled.presence_penalty[chunk][line]) * (counts > 0)
    flat[index] = changed


def output_counts(
    index: Int64, is_output: np.ndarray[tuple[int], np.dtype[np.bool_]], size: int, scratch: Scratch
) -> Tensor:
    """float32 [t]: how often each of ``index``, below ``size``, is there among those that are output."""
    counts = scratch.blocks("counts", -(-size // BLOCK), torch.float32).view(-1)
    places = torch.from_numpy(index)
    counts.index_fill_(0, places, 0.0)  # only what is read below: the rest may be anything
    output = torch.from_numpy(index[is_output])
    counts.index_add_(0, output, torch.ones(len(output)))
    return counts[places]
