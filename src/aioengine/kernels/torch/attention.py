"""Plain torch oracles of paged attention: in float64, row by row, and right at a glance."""

from __future__ import annotations

import torch
from torch import Tensor


def attend_decode(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_tables: Tensor,
    decodes: Tensor,
    out: Tensor,
    *,
    scale: float,
    window: int | None,
    num_splits: int,
    max_context: int,
    soft_cap: float | None = None,
) -> None:
    """As `Operations.attend_decode`; waits for the device."""
    for row, token, context in decodes.tolist():
        assert row < 0 or 0 < context <= max_context
        out[token] = 0  # of padding
    tiles = decodes.new_tensor([(row, token, 1, context - 1) for row, token, context in decodes.tolist()]).view(-1, 4)
    attend_prefill(q, k_cache, v_cache, block_tables, tiles, out, scale=scale, window=window, soft_cap=soft_cap)


def attend_prefill(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_tables: Tensor,
    tiles: Tensor,
    out: Tensor,
    *,
    scale: float,
    window: int | None,
    soft_cap: float | None = None,
) -> None:
    """As `Operations.attend_prefill`; waits for the device."""
    for row, first_token, num_tokens, position in tiles.tolist():
        if row < 0:
            continue
        here = slice(first_token, first_token + num_tokens)
        first_seen = 0 if window is None else max(position + 1 - window, 0)
        seen = torch.arange(first_seen, position + num_tokens, device=q.device)
        blocks, offsets = block_tables[row][seen // k_cache.shape[1]].long(), seen % k_cache.shape[1]
        k, v = (cache[blocks, offsets].double() for cache in (k_cache, v_cache))
        out[here] = attend(q[here], k, v, scale, window, soft_cap).to(out.dtype)


def prefill_tile(num_heads: int, num_kv_heads: int, head_dim: int) -> int:
    """As `Operations.prefill_tile`: large, as each tile is a turn of a Python loop."""
    return 256


def attend(q: Tensor, k: Tensor, v: Tensor, scale: float, window: int | None, soft_cap: float | None = None) -> Tensor:
    """softmax(cap(q · kᵀ · scale)) · v of one sequence, causal; query head i reads KV head i // (h // g).

    Args:
        q: [n, h, d], the queries at the last n of the keys' positions.
        k, v: float64 [m, g, d], at consecutive positions.
    Returns:
        float64 [n, h, d].
    """
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for x in (k, v))
    scores = torch.einsum("nhd,shd->hns", q.double(), k) * scale
    if soft_cap is not None:
        scores = soft_cap * torch.tanh(scores / soft_cap)
    key_positions = torch.arange(len(k), device=q.device)
    query_positions = key_positions[len(k) - len(q) :, None]
    is_seen = key_positions <= query_positions
    if window is not None:
        is_seen &= key_positions > query_positions - window
    weights = scores.masked_fill(~is_seen, float("-inf")).softmax(-1)
    return torch.einsum("hns,shd->nhd", weights, v)
