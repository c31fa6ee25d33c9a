"""Plain torch oracles of paged attention. Sums are of twice the width of the queries' dtype."""

from __future__ import annotations

import torch
from torch import Tensor

from aioengine.kernels.operations import PagedKV
from aioengine.kernels.torch.quantized import read_lines

GATHERED_VALUES = 2**22
"""Keys of single queries that are gathered at once, in values, and as many values."""


def attend_decode(q: Tensor, kv: PagedKV, decodes: Tensor, out: Tensor, *, num_splits: int, max_context: int) -> None:
    """As `Operations.attend_decode`; waits for the device. Rows of about one length are attended at once."""
    k_cache, v_cache, block_tables, scale, window, soft_cap = kv
    is_padding = decodes[:, 0] < 0
    out[decodes[is_padding, 1].long()] = 0
    by_length = decodes[~is_padding].long()
    assert ((by_length[:, 2] > 0) & (by_length[:, 2] <= max_context)).all()
    by_length = by_length[by_length[:, 2].argsort()]
    num_rows = max(1, GATHERED_VALUES // (k_cache[0, 0].numel() * min(max_context, window or max_context)))
    for start in range(0, len(by_length), num_rows):
        rows, tokens, contexts = by_length[start : start + num_rows].unbind(1)
        first_seen = torch.zeros_like(contexts) if window is None else (contexts - window).clamp(min=0)
        seen = first_seen[:, None] + torch.arange(int((contexts - first_seen).max()), device=q.device)
        is_seen = seen < contexts[:, None]
        # Lanes behind a row's end read its first key, which is finite where the row is: 0 · NaN would be NaN.
        seen = torch.where(is_seen, seen, first_seen[:, None])
        blocks = block_tables[rows].gather(1, seen // k_cache.shape[1]).long()
        k, v = (read_lines(cache[blocks, seen % cache.shape[1]], _sum_dtype(q)) for cache in (k_cache, v_cache))
        queries = q[tokens].view(len(rows), k.shape[2], -1, q.shape[2]).to(k.dtype)
        scores = _capped(queries @ k.permute(0, 2, 3, 1) * scale, soft_cap)
        weights = scores.masked_fill(~is_seen[:, None, None], float("-inf")).softmax(-1)
        out[tokens] = (weights @ v.transpose(1, 2)).flatten(1, 2).to(out.dtype)


def attend_prefill(q: Tensor, kv: PagedKV, tiles: Tensor, out: Tensor) -> None:
    """As `Operations.attend_prefill`; waits for the device."""
    k_cache, v_cache, block_tables, scale, window, soft_cap = kv
    for row, first_token, num_tokens, position in tiles.tolist():
        if row < 0:
            continue
        here = slice(first_token, first_token + num_tokens)
        first_seen = 0 if window is None else max(position + 1 - window, 0)
        seen = torch.arange(first_seen, position + num_tokens, device=q.device)
        blocks, offsets = block_tables[row][seen // k_cache.shape[1]].long(), seen % k_cache.shape[1]
        k, v = (read_lines(cache[blocks, offsets], _sum_dtype(q)) for cache in (k_cache, v_cache))
        out[here] = attend(q[here], k, v, scale, window, soft_cap).to(out.dtype)


def prefill_tile(num_heads: int, num_kv_heads: int, head_dim: int) -> int:
    """As `Operations.prefill_tile`: large, as each tile is a turn of a Python loop."""
    return 256


def attend(q: Tensor, k: Tensor, v: Tensor, scale: float, window: int | None, soft_cap: float | None = None) -> Tensor:
    """softmax(cap(q · kᵀ · scale)) · v of one sequence, causal; query head i reads KV head i // (h // g).

    Args:
        q: [n, h, d], the queries at the last n of the keys' positions.
        k, v: [m, g, d], at consecutive positions, in the dtype of the sums.
    Returns:
        [n, h, d], in the dtype of the sums.
    """
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for x in (k, v))
    scores = _capped(torch.einsum("nhd,shd->hns", q.to(k.dtype), k) * scale, soft_cap)
    key_positions = torch.arange(len(k), device=q.device)
    query_positions = key_positions[len(k) - len(q) :, None]
    is_seen = key_positions <= query_positions
    if window is not None:
        is_seen &= key_positions > query_positions - window
    weights = scores.masked_fill(~is_seen, float("-inf")).softmax(-1)
    return torch.einsum("hns,shd->nhd", weights, v)


def _capped(scores: Tensor, soft_cap: float | None) -> Tensor:
    return scores if soft_cap is None else soft_cap * torch.tanh(scores / soft_cap)


def _sum_dtype(q: Tensor) -> torch.dtype:
    return torch.float64 if q.dtype == torch.float32 else torch.float32
