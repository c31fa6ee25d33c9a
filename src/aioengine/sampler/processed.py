"""The logits that tokens are drawn by, for processed log-probabilities: masked, over temperature, filtered.

Plain torch on every device, whose launches depend on sizes alone, and nothing waits for the device, so that a GPU's
graph can capture it. Only steps that have such rows run it.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from aioengine.kernels.sample_rows import SampleRow, param_of
from aioengine.kernels.torch.draws import MAX_FLOAT, chunks, is_allowed, kept_mass

CHUNK_ELEMENTS = 2**21
"""Logits that are sorted together: temporaries of some 0.1 GB."""


def process_logits(
    logits: Tensor,
    samples: Tensor,
    processed_samples: Tensor,
    masks: Tensor | None,
    token_ids: Tensor,
    into: Tensor,
    *,
    has_filters: bool,
) -> None:
    """Write rows of logits as `Operations.draw` has drawn by them: less their highest, over temperature, -inf where a
    mask or a filter admits no token.

    Greedy rows have no temperature and no filters. Filters keep what was drawn, though they may sum in another order
    than the draw.

    Args:
        logits: float32 [n, V], after all rules; samples: int32 [s, SAMPLE_WORDS].
        processed_samples: int32 [any], the samples whose rows of logits are written; several may be one.
        masks, token_ids, has_filters: as `Operations.draw` had them, and what it wrote.
        into: float32 [n or more, V], written in the places of those rows.
    """
    vocab = logits.shape[1]
    drawn = _lowest_drawn(logits, samples, token_ids) if has_filters else None
    for chunk in chunks(len(processed_samples), vocab, CHUNK_ELEMENTS):
        words = samples.index_select(0, processed_samples[chunk])
        logits_rows = words[:, SampleRow.LOGITS_ROW].clamp(min=0).long()
        x = logits.index_select(0, logits_rows)
        if masks is not None:
            mask = words[:, SampleRow.MASK]
            allowed = is_allowed(masks.index_select(0, mask.clamp(min=0)), vocab)
            x.masked_fill_((mask >= 0)[:, None] & ~allowed, -torch.inf)
        top = x.amax(dim=1, keepdim=True).clamp(-MAX_FLOAT, MAX_FLOAT)
        temperature = param_of(words, "temperature")[:, None]
        is_greedy = temperature == 0
        temperature = temperature.masked_fill(is_greedy, 1.0)
        if drawn is not None:
            lowest = _lowest_kept(x, top, temperature, words).minimum(drawn.index_select(0, logits_rows)[:, None])
            x.masked_fill_((x < lowest) & ~is_greedy, -torch.inf)
        into.index_copy_(0, logits_rows, x.sub_(top).div_(temperature))


def _lowest_drawn(logits: Tensor, samples: Tensor, token_ids: Tensor) -> Tensor:
    """float32 [n]: the lowest logit of those that were drawn from each row, inf where none was."""
    logits_rows = samples[:, SampleRow.LOGITS_ROW].long()
    is_padding, logits_rows = logits_rows < 0, logits_rows.clamp(min=0)
    drawn = logits.take(logits_rows * logits.shape[1] + token_ids).masked_fill_(is_padding, torch.inf)
    return logits.new_full((len(logits),), math.inf).scatter_reduce_(0, logits_rows, drawn, "amin")


def _lowest_kept(x: Tensor, top: Tensor, temperature: Tensor, samples: Tensor) -> Tensor:
    """float32 [m, 1], as `aioengine.kernels.torch.draws.threshold`, by one sort of float32 [m, V].

    Args:
        top, temperature: float32 [m, 1].
    """
    top_k, top_p, min_p = (param_of(samples, name)[:, None] for name in ("top_k", "top_p", "min_p"))
    values = x.sort(dim=1, descending=True).values
    lowest = top + temperature * min_p.log()
    kth = values.gather(1, top_k.clamp(1, x.shape[1]).long() - 1)
    lowest = lowest.maximum(kth.masked_fill_(top_k <= 0, -torch.inf))
    mass = kept_mass(values, lowest, top, temperature)
    up_to = mass.cumsum(dim=1)
    is_within = up_to - mass < up_to[:, -1:] * top_p
    last_kept = values.gather(1, is_within.sum(dim=1, keepdim=True).clamp(min=1) - 1)
    return lowest.maximum(last_kept.masked_fill_(top_p >= 1, -torch.inf))
