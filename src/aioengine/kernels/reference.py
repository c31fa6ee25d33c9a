"""A plain torch oracle for each kernel, same signature: slow, and right at a glance."""

from __future__ import annotations

import torch
from torch import Tensor

from aioengine.errors import InternalError
from aioengine.kernels.metadata import AttentionMetadata


def paged_attention(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, meta: AttentionMetadata, *, window: int | None = None
) -> Tensor:
    """Attend each query token to its sequence's cached keys (Kwon et al., 2023, arXiv:2309.06180).

    ``softmax(q · kᵀ / sqrt(head_dim)) · v`` in float64, over the positions up to the query's own; a window keeps the
    last ``window`` of them. Query head ``h`` reads KV head ``h // (heads // kv_heads)`` (Ainslie et al., 2023,
    arXiv:2305.13245).

    Args:
        q: [tokens, heads, head_dim], any float dtype.
        k_cache, v_cache: [blocks, block_size, kv_heads, head_dim]; already hold this step's tokens.
        window: the most positions that a query sees, itself included; None: all.
    Returns:
        [tokens, heads, head_dim], same dtype as ``q``.
    Raises:
        InternalError: ``heads`` is not a multiple of ``kv_heads``.
    """
    heads, kv_heads, head_dim = q.shape[1], k_cache.shape[2], q.shape[2]
    if heads % kv_heads:
        raise InternalError(f"{heads} query heads cannot share {kv_heads} KV heads")
    keys = k_cache.double().view(-1, kv_heads, head_dim)
    values = v_cache.double().view(-1, kv_heads, head_dim)
    out = torch.empty_like(q)
    for row, start in enumerate(meta.starts.tolist()):
        first_token, end_token = meta.query_offsets[row : row + 2].tolist()
        for token in range(first_token, end_token):
            position = start + token - first_token
            first_seen = 0 if window is None else max(0, position + 1 - window)
            seen = torch.arange(first_seen, position + 1)
            slots = meta.slots(torch.tensor([row]), seen[None])[0]
            k = keys[slots].repeat_interleave(heads // kv_heads, dim=1)
            v = values[slots].repeat_interleave(heads // kv_heads, dim=1)
            weights = torch.softmax(torch.einsum("hd,shd->hs", q[token].double(), k) * head_dim**-0.5, dim=-1)
            out[token] = torch.einsum("hs,shd->hd", weights, v).to(q.dtype)
    return out


def write_kv(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, meta: AttentionMetadata) -> None:
    """Put this step's k and v, each [tokens, kv_heads, head_dim], into their slots of the caches."""
    for token, slot in enumerate(meta.slot_mapping.tolist()):
        block, offset = divmod(slot, meta.block_size)
        k_cache[block, offset] = k[token]
        v_cache[block, offset] = v[token]
