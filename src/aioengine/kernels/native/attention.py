"""Paged attention by native kernels: as in `aioengine.kernels.operations.Operations`."""

from __future__ import annotations

import torch
from torch import Tensor

from aioengine.errors import InternalError
from aioengine.kernels.launch_checks import check_tensor
from aioengine.kernels.native.kernels.attention_sizes import MAX_GROUP, MAX_HEAD_DIM, MAX_ROWS, MAX_STATES, PART
from aioengine.kernels.native.layers import SUFFIXES
from aioengine.kernels.native.team import Team, float_bits
from aioengine.kernels.operations import PagedKV
from aioengine.kernels.torch.quantized import head_dim_of

CHUNKS_A_THREAD = 4
HEADS_A_CHUNK = 8
NO_WINDOW = 1 << 40


def attend_decode(
    team: Team,
    q: Tensor,
    kv: PagedKV,
    decodes: Tensor,
    out: Tensor,
    *,
    num_splits: int,
    max_context: int,
    states: Tensor | None,
) -> None:
    """As `Operations.attend_decode`.

    Args:
        states: float32, `num_states` numbers, for more than one split; None: there is one, whatever ``num_splits`` is.
    """
    k_cache, v_cache, block_tables, scale, window, soft_cap = kv
    _check("attend_decode", q, k_cache, v_cache, block_tables, out)
    check_tensor("attend_decode: decodes", decodes, (None, 3), torch.int32, q.device)
    num_heads, head_dim = q.shape[1:]
    num_kv_heads, group = k_cache.shape[2], num_heads // k_cache.shape[2]
    num_parts, state_size = -(-max_context // PART), _state_size(head_dim)
    if group > MAX_GROUP or group * state_size > MAX_STATES:
        raise InternalError(f"attend_decode: {group} query heads of {head_dim} a KV head are too many")
    num_splits = 1 if states is None else num_splits
    # A few heads whose keys lie side by side, as long as there are chunks for all threads.
    num_slices = -(-CHUNKS_A_THREAD * team.num_threads // max(1, len(decodes) * num_splits))
    kv_heads_a_chunk = max(1, min(HEADS_A_CHUNK, num_kv_heads // num_slices, MAX_STATES // (group * state_size)))
    num_slices = -(-num_kv_heads // kv_heads_a_chunk)
    of_states: tuple[Tensor | int, ...] = (states, num_parts) if states is not None else (0, 0)
    team.launch(
        f"attend_decode_{SUFFIXES[q.dtype]}", len(decodes) * num_slices * num_splits,
        q, k_cache, v_cache, block_tables, block_tables.shape[1], decodes, out,
        num_heads, num_kv_heads, head_dim, k_cache.shape[1],
        float_bits(scale), window or NO_WINDOW, float_bits(soft_cap or 0.0), kv_heads_a_chunk, num_splits,
        *of_states, k_cache.dtype == torch.int8, k_cache.shape[3] * k_cache.element_size(),
    )  # fmt: skip
    if states is not None:
        team.launch(
            f"combine_{SUFFIXES[q.dtype]}", len(decodes),
            states, num_parts, decodes, out, num_heads, head_dim, window or NO_WINDOW,
        )  # fmt: skip


def num_states(num_decodes: int, num_heads: int, head_dim: int, max_context: int) -> int:
    """The size of `attend_decode`'s ``states``, in float32 numbers."""
    return num_decodes * -(-max_context // PART) * num_heads * _state_size(head_dim)


def _check(name: str, q: Tensor, k_cache: Tensor, v_cache: Tensor, block_tables: Tensor, out: Tensor) -> None:
    head_dim = q.shape[2]
    is_odd = q.dtype == torch.bfloat16 and head_dim % 2
    if k_cache.dtype not in (q.dtype, torch.int8) or head_dim_of(k_cache) != head_dim or is_odd:
        raise InternalError(f"native attention of {q.dtype} reads no {k_cache.dtype} cache of heads of {head_dim}")
    if head_dim > MAX_HEAD_DIM:
        raise InternalError(f"{name}: heads of {head_dim} are too large")
    check_tensor(f"{name}: k_cache", k_cache, (None,) * 4, k_cache.dtype, q.device)
    check_tensor(f"{name}: v_cache", v_cache, tuple(k_cache.shape), k_cache.dtype, q.device)
    check_tensor(f"{name}: block_tables", block_tables, (None, None), torch.int32, q.device)
    check_tensor(f"{name}: out", out, tuple(q.shape), q.dtype, q.device)
    if q.shape[1] % k_cache.shape[2]:
        raise InternalError(f"{name}: {q.shape[1]} query heads cannot share {k_cache.shape[2]} KV heads")


def _state_size(head_dim: int) -> int:
    """float32 numbers of a head's state: sums, padded to whole vectors, and two vectors."""
    return -(-head_dim // 16) * 16 + 32


def attend_prefill(team: Team, q: Tensor, kv: PagedKV, tiles: Tensor, out: Tensor) -> None:
    """As `Operations.attend_prefill`."""
    k_cache, v_cache, block_tables, scale, window, soft_cap = kv
    _check("attend_prefill", q, k_cache, v_cache, block_tables, out)
    check_tensor("attend_prefill: tiles", tiles, (None, 4), torch.int32, q.device)
    num_heads, head_dim = q.shape[1:]
    num_kv_heads = k_cache.shape[2]
    team.launch(
        f"attend_prefill_{SUFFIXES[q.dtype]}", len(tiles) * num_kv_heads,
        q, k_cache, v_cache, block_tables, block_tables.shape[1], tiles, out,
        num_heads, num_kv_heads, head_dim, k_cache.shape[1],
        float_bits(scale), window or NO_WINDOW, float_bits(soft_cap or 0.0),
        k_cache.dtype == torch.int8, k_cache.shape[3] * k_cache.element_size(),
    )  # fmt: skip


def has_kernels(num_heads: int, num_kv_heads: int, head_dim: int) -> bool:
    """Whether there are kernels for heads of these numbers and this size."""
    group = num_heads // num_kv_heads
    return head_dim <= MAX_HEAD_DIM and group <= MAX_GROUP and group * _state_size(head_dim) <= MAX_STATES


def prefill_tile(num_heads: int, num_kv_heads: int, head_dim: int) -> int:
    """As `Operations.prefill_tile`: as many tokens as share each segment of keys that is packed."""
    return max(1, MAX_ROWS * num_kv_heads // num_heads)
