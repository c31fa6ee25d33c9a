"""Attention of one sequence in plain torch. Sums are of twice the width of the queries' dtype."""

from __future__ import annotations

import torch
from torch import Tensor


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float,
    window: int | None,
    soft_cap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """softmax(cap(q · kᵀ · scale)) · v of one sequence, causal; query head i reads KV head i // (h // g).

    Args:
        q: [n, h, d], the queries at the last n of the keys' positions.
        k, v: [m, g, d], at consecutive positions, in the dtype of the sums.
        scale, window, soft_cap, sinks: as in `PagedKV`.
    Returns:
        [n, h, d], in the dtype of the sums.
    """
    queries = q.to(k.dtype).unflatten(1, (k.shape[1], -1))
    scores = _capped(torch.einsum("ngid,mgd->ginm", queries, k) * scale, soft_cap)
    key_positions = torch.arange(len(k), device=q.device)
    query_positions = key_positions[len(k) - len(q) :, None]
    is_seen = key_positions <= query_positions
    if window is not None:
        is_seen &= key_positions > query_positions - window
    scores = scores.masked_fill(~is_seen, float("-inf"))
    if sinks is not None:
        sink = sinks.to(k.dtype).view(k.shape[1], -1, 1, 1).expand(-1, -1, len(q), 1)
        scores = torch.cat((scores, sink), dim=-1)
    weights = scores.softmax(-1)[..., : len(k)]
    return torch.einsum("ginm,mgd->ngid", weights, v).flatten(1, 2)


def _capped(scores: Tensor, soft_cap: float | None) -> Tensor:
    return scores if soft_cap is None else soft_cap * torch.tanh(scores / soft_cap)


def sum_dtype(q: Tensor) -> torch.dtype:
    return torch.float64 if q.dtype == torch.float32 else torch.float32
