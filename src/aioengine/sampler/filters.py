"""Min-p, top-k and top-p: the lowest logit that a row keeps.

A filter keeps the tokens whose logit is at or above a threshold of its row; tokens of equal logits are kept or dropped
together. Min-p is applied first, then top-k, then top-p on what is left, renormalised.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from aioengine.sampler.blocks import BLOCK, BlockedLogits, largest, row_index
from aioengine.sampler.rows import SamplingRows
from aioengine.sampling_params import FILTERS
from aioengine.scheduler.plan import Int32

TOP_P_TIERS = (128, 2048)
"""How many likeliest tokens are looked at for the mass of top-p, until the whole row is sorted: 13 ms for 150,000."""


def filter_threshold(
    logits: BlockedLogits, rows: SamplingRows, chunk: NDArray[np.int64], temperature: Tensor, top: Tensor
) -> Tensor | None:
    """float32 [n]: the lowest logit that each row's filters keep; None where no row has one."""
    if not any((rows.params[name][chunk] != off).any() for name, off in FILTERS.items()):
        return None
    min_p, top_k, top_p = (rows.params[name][chunk] for name in ("min_p", "top_k", "top_p"))
    threshold = top + temperature * torch.from_numpy(min_p).log()
    threshold = apply_top_k(logits, top_k, threshold)
    return apply_top_p(logits, top_p, temperature, top, threshold)


def apply_top_k(logits: BlockedLogits, top_k: Int32, threshold: Tensor) -> Tensor:
    """Raise the threshold to the ``top_k``-th highest logit of each row that has one."""
    vocab = logits.values.shape[1] * BLOCK
    limited = np.flatnonzero((top_k > 0) & (top_k < vocab))
    if not len(limited):
        return threshold
    index = row_index(limited)
    values, _ = largest(logits.rows(index), int(top_k[limited].max()))
    kth = values.gather(1, torch.from_numpy(top_k[limited].astype(np.int64) - 1)[:, None])[:, 0]
    raised = threshold.clone()
    raised[index] = torch.maximum(threshold[index], kth)
    return raised


def apply_top_p(
    logits: BlockedLogits, top_p: NDArray[np.float32], temperature: Tensor, top: Tensor, threshold: Tensor
) -> Tensor:
    """Raise the threshold to the logit at which the likeliest tokens hold ``top_p`` of what the threshold keeps."""
    threshold = threshold.clone()
    vocab = logits.values.shape[1] * BLOCK
    open_rows = np.flatnonzero(top_p < 1)
    for k in (*(tier for tier in TOP_P_TIERS if tier < vocab), vocab):
        if not len(open_rows):
            break
        index = row_index(open_rows)
        of_rows, lowest = logits.rows(index), threshold[index, None]
        values, _ = largest(of_rows, k)
        mass = kept_mass(values, lowest, top[index, None], temperature[index, None])
        # Where the last of these is dropped already, they hold all that is kept; else the whole row must be summed.
        has_more = values[:, -1:] >= lowest
        total = mass.sum(dim=-1, keepdim=True)
        if k < vocab and has_more.any():
            whole_mass = kept_mass(of_rows.values.flatten(1), lowest, top[index, None], temperature[index, None])
            total = torch.where(has_more, whole_mass.sum(dim=-1, keepdim=True), total)
        mass_before = mass.cumsum(dim=-1) - mass
        num_kept = (mass_before < total * torch.from_numpy(top_p[open_rows])[:, None]).sum(dim=-1, keepdim=True)
        is_found = (num_kept < k) | (k == vocab) | ~has_more
        last_kept = values.gather(1, num_kept.clamp(min=1) - 1)
        threshold[index] = torch.where(is_found, torch.maximum(lowest, last_kept), lowest)[:, 0]
        open_rows = open_rows[~is_found[:, 0].numpy()]
    return threshold


def kept_mass(values: Tensor, threshold: Tensor, top: Tensor, temperature: Tensor) -> Tensor:
    """Unnormalised probabilities of logits, 0 below the threshold: [n, m] from [n, m] and three times [n, 1]."""
    mass = (values - top).div_(temperature).exp_()
    return mass.masked_fill_(values < threshold, 0.0)
