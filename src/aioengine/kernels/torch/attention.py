"""Plain torch oracles of paged attention. Sums are of twice the width of the queries' dtype."""

from __future__ import annotations

import torch
from torch import Tensor

from aioengine.kernels.operations import PagedKV
from aioengine.kernels.torch.quantized import read_lines


def attention_output(q: Tensor) -> Tensor:
    """As `Operations.attention_output`, in memory of its own."""
    return torch.empty_like(q)


def attend_decode(q: Tensor, kv: PagedKV, decodes: Tensor, out: Tensor, *, num_splits: int, max_context: int) -> None:
    """As `Operations.attend_decode`; waits for the device. A tile of one query token for each entry."""
    rows, tokens, contexts = decodes.unbind(1)
    is_padding = rows < 0
    out[tokens[is_padding].long()] = 0
    assert (is_padding | ((contexts > 0) & (contexts <= max_context))).all()
    attend_prefill(q, kv, torch.stack((rows, tokens, torch.ones_like(rows), contexts - 1), dim=1), out)


def attend_prefill(q: Tensor, kv: PagedKV, tiles: Tensor, out: Tensor) -> None:
    """As `Operations.attend_prefill`; waits for the device."""
    k_cache, v_cache, block_tables, scale, window, soft_cap, sinks, slopes = kv
    for row, first_token, num_tokens, position in tiles.tolist():
        if row < 0:
            continue
        here = slice(first_token, first_token + num_tokens)
        first_seen = 0 if window is None else max(position + 1 - window, 0)
        seen = torch.arange(first_seen, position + num_tokens, device=q.device)
        blocks, offsets = block_tables[row][seen // k_cache.shape[1]].long(), seen % k_cache.shape[1]
        k, v = (read_lines(cache[blocks, offsets], _sum_dtype(q)) for cache in (k_cache, v_cache))
        out[here] = attend(q[here], k, v, scale, window, soft_cap, sinks, slopes).to(out.dtype)


def prefill_tile(num_heads: int, num_kv_heads: int, head_dim: int) -> int:
    """As `Operations.prefill_tile`: large, as each tile is a turn of a Python loop."""
    return 256


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float,
    window: int | None,
    soft_cap: float | None = None,
    sinks: Tensor | None = None,
    slopes: Tensor | None = None,
) -> Tensor:
    """softmax(cap(q · kᵀ · scale) + bias) · v of one sequence, causal; query head i reads KV head i // (h // g).

    Args:
        q: [n, h, d], the queries at the last n of the keys' positions.
        k, v: [m, g, d], at consecutive positions, in the dtype of the sums.
        scale, window, soft_cap, sinks, slopes: as in `PagedKV`.
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
    if slopes is not None:
        scores = scores + slopes.to(k.dtype).view(k.shape[1], -1, 1, 1) * (key_positions - query_positions)
    scores = scores.masked_fill(~is_seen, float("-inf"))
    if sinks is not None:
        sink = sinks.to(k.dtype).view(k.shape[1], -1, 1, 1).expand(-1, -1, len(q), 1)
        scores = torch.cat((scores, sink), dim=-1)
    weights = scores.softmax(-1)[..., : len(k)]
    return torch.einsum("ginm,mgd->ngid", weights, v).flatten(1, 2)


def _capped(scores: Tensor, soft_cap: float | None) -> Tensor:
    return scores if soft_cap is None else soft_cap * torch.tanh(scores / soft_cap)


def _sum_dtype(q: Tensor) -> torch.dtype:
    return torch.float64 if q.dtype == torch.float32 else torch.float32
