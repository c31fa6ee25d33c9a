"""Checks of tensors that launchers make, since a kernel reads and writes bare addresses."""

from __future__ import annotations

import torch
from torch import Tensor

from aioengine.errors import InternalError
from aioengine.kernels.operations import PagedKV
from aioengine.kernels.sample_rows import SAMPLE_WORDS
from aioengine.kernels.torch.quantized import SCALE_BYTES

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
"""Dtypes that decoders compute in: the ``x`` of `aioengine.kernels.operations`."""


def check_tensor(
    name: str,
    tensor: Tensor,
    shape: tuple[int | None, ...],
    dtype: torch.dtype | tuple[torch.dtype, ...],
    device: torch.device,
) -> None:
    """Refuse what the kernel would misread.

    Args:
        name: of the operation and the argument, for the message.
        shape: None: any size.
        dtype: or those that it may have.
    Raises:
        InternalError: another shape, dtype or device, or not contiguous.
    """
    # A step of eager launches checks hundreds of tensors: the message is made where there is one.
    sizes, found = tensor.shape, tensor.dtype
    has_shape = len(sizes) == len(shape)
    if has_shape:
        for has, want in zip(sizes, shape, strict=True):
            if has != want and want is not None:
                has_shape = False
    if not has_shape:
        wanted = ", ".join("any" if size is None else str(size) for size in shape)
        raise InternalError(f"{name} has shape {list(sizes)}; [{wanted}] is needed")
    if found is not dtype and not (type(dtype) is tuple and found in dtype):
        dtypes = dtype if isinstance(dtype, tuple) else (dtype,)
        raise InternalError(f"{name} is {found}; {' or '.join(map(str, dtypes))} is needed")
    if tensor.device != device:
        raise InternalError(f"{name} is on {tensor.device}, and what goes with it on {device}")
    if not tensor.is_contiguous():
        raise InternalError(f"{name} has strides {list(tensor.stride())}; it must be contiguous")


def check_logits(logits: Tensor) -> torch.device:
    """Float32 [n, V], V at least 1; returns the device, on which all else has to be."""
    check_tensor("logits", logits, (None, None), torch.float32, logits.device)
    if not logits.shape[1]:
        raise InternalError("logits have no vocabulary")
    return logits.device


def check_samples(samples: Tensor, device: torch.device) -> None:
    check_tensor("samples", samples, (None, SAMPLE_WORDS), torch.int32, device)


def check_attention(name: str, q: Tensor, kv: PagedKV, out: Tensor, narrow: torch.dtype) -> None:
    """Check the arguments of attention over a paged cache.

    Args:
        narrow: the dtype that a cache may have beside the queries'.
    """
    device, k_cache = q.device, kv.k_cache
    check_tensor(f"{name}: q", q, (None, None, None), FLOATS, device)
    num_heads, line = q.shape[1], q.shape[2] + (SCALE_BYTES if k_cache.dtype == narrow == torch.int8 else 0)
    check_tensor(f"{name}: k_cache", k_cache, (None, None, None, line), (q.dtype, narrow), device)
    check_tensor(f"{name}: v_cache", kv.v_cache, tuple(k_cache.shape), k_cache.dtype, device)
    if not k_cache.shape[2] or num_heads % k_cache.shape[2]:
        raise InternalError(f"{name}: {num_heads} query heads cannot share {k_cache.shape[2]} KV heads")
    check_tensor(f"{name}: block_tables", kv.block_tables, (None, None), torch.int32, device)
    check_tensor(f"{name}: out", out, tuple(q.shape), q.dtype, device)
    if kv.window is not None and kv.window < 1:
        raise InternalError(f"{name}: window is {kv.window}; a query sees itself at least")
    if kv.sinks is not None:
        check_tensor(f"{name}: sinks", kv.sinks, (num_heads,), torch.float32, device)


def check_rotation(
    qkv: Tensor,
    positions: Tensor,
    slots: Tensor,
    rope_table: Tensor | None,
    qk_weight: Tensor | None,
    k_cache: Tensor,
    v_cache: Tensor,
    narrow: torch.dtype,
) -> tuple[int, int, int]:
    """Check the arguments of `Operations.rotate_and_write`.

    Args:
        narrow: as in `check_attention`.
    Returns:
        heads of queries, and of keys; numbers of a head.
    """
    device = qkv.device
    check_tensor("rotate_and_write: qkv", qkv, (None, None), FLOATS, device)
    check_tensor("rotate_and_write: k_cache", k_cache, (None,) * 4, (qkv.dtype, narrow), device)
    check_tensor("rotate_and_write: v_cache", v_cache, tuple(k_cache.shape), k_cache.dtype, device)
    (num_tokens, width), (_, _, num_kv_heads, head_dim) = qkv.shape, k_cache.shape
    if k_cache.dtype == torch.int8:
        head_dim -= SCALE_BYTES
    if head_dim % 2 or head_dim < 1:
        raise InternalError(f"rotate_and_write: heads of {head_dim} values; an even number can be done")
    num_heads = width // head_dim - 2 * num_kv_heads
    if width % head_dim or num_heads < 1:
        raise InternalError(f"rotate_and_write: qkv is {width} wide, with {num_kv_heads} KV heads of {head_dim}")
    check_tensor("rotate_and_write: positions", positions, (num_tokens,), torch.int32, device)
    check_tensor("rotate_and_write: slots", slots, (num_tokens,), torch.int32, device)
    if rope_table is not None:
        check_tensor(
            "rotate_and_write: rope_table", rope_table, (None, 2 * head_dim), (qkv.dtype, torch.float32), device
        )
    if qk_weight is not None:
        check_tensor("rotate_and_write: qk_weight", qk_weight, (num_heads + num_kv_heads, head_dim), qkv.dtype, device)
    return num_heads, num_kv_heads, head_dim


def check_experts(x: Tensor, ids: Tensor, weights: Tensor, hidden: int, shared: Tensor | None) -> None:
    """Check the arguments of `Operations.experts`, but for weights."""
    name, device = "experts", x.device
    check_tensor(f"{name}: ids", ids, (None, None), torch.int32, device)
    num_tokens, num_chosen = ids.shape
    check_tensor(f"{name}: x", x, (num_tokens, hidden), FLOATS, device)
    check_tensor(f"{name}: weights", weights, (num_tokens, num_chosen + (shared is not None)), torch.float32, device)
    if shared is not None:
        check_tensor(f"{name}: shared", shared, (num_tokens, hidden), x.dtype, device)


def check_norm(x: Tensor, weight: Tensor, residual: Tensor | None) -> None:
    """Check the arguments of `Operations.rms_norm` and those like it."""
    shape, dtype, device = x.shape, x.dtype, x.device
    check_tensor("rms_norm: x", x, (None, None), FLOATS, device)
    check_tensor("rms_norm: weight", weight, (shape[1],), dtype, device)
    if residual is not None:
        check_tensor("rms_norm: residual", residual, tuple(shape), dtype, device)
