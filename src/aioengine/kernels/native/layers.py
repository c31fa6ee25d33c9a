"""The decoder's layers by native kernels: as in `aioengine.kernels.operations.Operations`, into tensors that are given.

All tensors are contiguous.
"""

from __future__ import annotations

import torch
from torch import Tensor

from aioengine.errors import InternalError
from aioengine.kernels.launch_checks import FLOATS, check_tensor
from aioengine.kernels.native.kernels.attention_sizes import MAX_HEAD_DIM
from aioengine.kernels.native.team import Team, float_bits

SUFFIXES = {torch.float32: "float32", torch.bfloat16: "bfloat16", torch.float16: "float16"}
"""Of kernels' names, by dtype."""

CHUNK = 8192
"""Numbers in a chunk, about: some microseconds."""


def rms_norm(team: Team, x: Tensor, weight: Tensor, eps: float, out: Tensor) -> None:
    _rms_norm(team, "rms_norm", x, x, weight, eps, out)


def add_rms_norm(team: Team, x: Tensor, residual: Tensor, weight: Tensor, eps: float, out: Tensor) -> None:
    _rms_norm(team, "add_rms_norm", x, residual, weight, eps, out)


def _rms_norm(team: Team, kernel: str, x: Tensor, residual: Tensor, weight: Tensor, eps: float, out: Tensor) -> None:
    check_tensor("rms_norm: x", x, (None, None), FLOATS, x.device)
    num_rows, width = x.shape
    check_tensor("rms_norm: weight", weight, (width,), x.dtype, x.device)
    check_tensor("rms_norm: residual", residual, (num_rows, width), x.dtype, x.device)
    rows_a_chunk = max(1, CHUNK // max(width, 1))
    team.launch(
        f"{kernel}_{SUFFIXES[x.dtype]}", -(-num_rows // rows_a_chunk),
        x, residual, weight, out,
        num_rows, width, float_bits(eps), rows_a_chunk,
    )  # fmt: skip


def gated_activation(team: Team, gate_up: Tensor, out: Tensor) -> None:
    num_rows, width = out.shape
    check_tensor("gated_activation: gate_up", gate_up, (num_rows, 2 * width), FLOATS, out.device)
    if not width:
        return
    columns_a_chunk = min(width, CHUNK // 2)
    rows_a_chunk = max(1, CHUNK // 2 // width)
    team.launch(
        f"gated_activation_{SUFFIXES[out.dtype]}", -(-num_rows // rows_a_chunk) * -(-width // columns_a_chunk),
        gate_up, out, num_rows, width, rows_a_chunk, columns_a_chunk,
    )  # fmt: skip


def rotate_and_write(
    team: Team,
    qkv: Tensor,
    positions: Tensor,
    slots: Tensor,
    rope_table: Tensor,
    qk_weight: Tensor | None,
    eps: float,
    k_cache: Tensor,
    v_cache: Tensor,
    q: Tensor,
) -> None:
    """
    Raises:
        InternalError: a cache that is neither of the dtype of ``qkv`` nor int8, or an int8 one of too large heads.
    """
    num_tokens, num_heads, head_dim = q.shape
    is_int8 = k_cache.dtype == torch.int8
    if k_cache.dtype not in (qkv.dtype, torch.int8) or (is_int8 and head_dim > MAX_HEAD_DIM):
        raise InternalError(f"native kernels write no cache of {k_cache.dtype} from {qkv.dtype} heads of {head_dim}")
    name, device, num_kv_heads = "rotate_and_write", q.device, k_cache.shape[2]
    if head_dim % 2:
        raise InternalError(f"{name}: heads of {head_dim} values; an even number can be done")
    check_tensor(f"{name}: qkv", qkv, (num_tokens, (num_heads + 2 * num_kv_heads) * head_dim), FLOATS, device)
    check_tensor(f"{name}: positions", positions, (num_tokens,), torch.int32, device)
    check_tensor(f"{name}: slots", slots, (num_tokens,), torch.int32, device)
    check_tensor(f"{name}: rope_table", rope_table, (None, 2 * head_dim), (q.dtype, torch.float32), device)
    check_tensor(f"{name}: v_cache", v_cache, tuple(k_cache.shape), k_cache.dtype, device)
    if qk_weight is not None:
        check_tensor(f"{name}: qk_weight", qk_weight, (num_heads + num_kv_heads, head_dim), q.dtype, device)
    tokens_a_chunk = max(1, CHUNK // qkv.shape[1])
    team.launch(
        f"rotate_and_write_{SUFFIXES[qkv.dtype]}", -(-num_tokens // tokens_a_chunk),
        qkv, positions, slots,
        rope_table, rope_table.dtype == torch.float32,
        0 if qk_weight is None else qk_weight, float_bits(eps),
        k_cache, v_cache, q,
        num_tokens, num_heads, k_cache.shape[2], head_dim, tokens_a_chunk,
        is_int8, k_cache.shape[3] * k_cache.element_size(),
    )  # fmt: skip
