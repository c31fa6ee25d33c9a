"""Quantised weights and products with them in plain torch: the oracle of native ones, which take the values from here.

"int8" (Dettmers et al., 2022, arXiv:2208.07339, without its outliers): weights by outputs, activations by tokens, both
symmetric and rounded to nearest, so that a product is a sum of integers and a factor. "int4": weights alone, in groups
of inputs, each with the scale, of a few, that has the least squared error. Symmetric groups of 64 with bfloat16 scales
are 4.25 bits a weight; with offsets and groups of 128, as many bits, the error of normal weights is 4 % more, and 2 to
14 % less where tails are heavy.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from aioengine.kernels.packed_weight import BLOCK_NUMBERS, PackedWeight, Quantization, UnpackedRows, row_blocks

INT4_GROUP = 64
"""Inputs that share a scale; the last group of a row may be shorter."""

SCALE_BYTES = 4
"""Behind each head's key or value in an int8 KV cache: its scale."""

_STEPS = (8.0, 7.0, 7.5, 8.5, 9.0, 10.0)
"""How many steps the largest magnitude of a group may be, in the order of preference; beyond 8 it is cut off. The whole
numbers among them make `quantize` give what `dequantize` was given."""


def quantize(weight: Tensor, quantization: Quantization) -> tuple[Tensor, Tensor]:
    """Round to steps of a scale a group; an "int8" group is a row.

    Args:
        weight: [out_features, in_features].
    Returns:
        values: int8 [out_features, in_features], from -127 to 127, or -8 to 7 for "int4"; scales: float32
        [out_features, 1], or bfloat16 [out_features, ⌈in_features / INT4_GROUP⌉].
    """
    rows, columns = weight.shape
    values = torch.empty((rows, columns), dtype=torch.int8, device=weight.device)
    scales = _room_for_scales(weight, quantization)
    for block in torch.arange(rows).split(max(1, BLOCK_NUMBERS // columns)):  # what is made of it stays in the cache
        part = slice(int(block[0]), int(block[-1]) + 1)
        if quantization == "int8":
            values[part], scales[part] = _round_rows(weight[part].float())
        else:
            groups = F.pad(weight[part].float(), (0, -columns % INT4_GROUP)).view(-1, INT4_GROUP)
            best, scale = _round_groups(groups)
            values[part] = best.view(len(block), -1)[:, :columns]
            scales[part] = scale.view(len(block), -1)
    return values, scales


def _room_for_scales(weight: Tensor | UnpackedRows, quantization: Quantization) -> Tensor:
    rows, columns = weight.shape
    if quantization == "int8":
        return torch.empty((rows, 1), dtype=torch.float32, device=weight.device)
    return torch.empty((rows, -(-columns // INT4_GROUP)), dtype=torch.bfloat16, device=weight.device)


def dequantize(values: Tensor, scales: Tensor) -> Tensor:
    """What `quantize` rounded to.

    Returns:
        float32 [out_features, in_features], exact.
    """
    dense, scales = values.float(), scales.float()
    if scales.shape[1] == 1:
        return dense.mul_(scales)
    num_whole = dense.shape[1] // INT4_GROUP
    columns = num_whole * INT4_GROUP
    dense[:, :columns].unflatten(1, (num_whole, INT4_GROUP)).mul_(scales[:, :num_whole, None])
    dense[:, columns:].mul_(scales[:, num_whole:])
    return dense


def quantize_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """Round each row to 255 steps.

    Args:
        x: [rows, columns].
    Returns:
        int8 [rows, columns], from -127 to 127; float32 [rows, 1], what a step is; of a row of zeros 0.
    """
    x = x.float()
    highest = x.abs().amax(1, keepdim=True)
    steps = (127.0 / highest).nan_to_num_(posinf=0.0)
    return (x * steps).round_().to(torch.int8), highest / 127.0


def quantize_lines(x: Tensor) -> Tensor:
    """What an int8 KV cache keeps of keys or values: each head's, as `quantize_rows` rounds it, before its scale.

    Args:
        x: [any, head_dim].
    Returns:
        int8 [any, head_dim + SCALE_BYTES], the last of them a float32.
    """
    values, scales = quantize_rows(x)
    return torch.cat((values, scales.view(torch.int8)), dim=1)


def read_lines(cached: Tensor, dtype: torch.dtype) -> Tensor:
    """Of whatever a KV cache keeps the numbers.

    Args:
        cached: [..., head_dim], or int8 [..., head_dim + SCALE_BYTES].
    Returns:
        [..., head_dim], of ``dtype``.
    """
    if cached.dtype != torch.int8:
        return cached.to(dtype)
    values, last = cached[..., :-SCALE_BYTES], cached[..., -SCALE_BYTES:]
    scales = last.clone(memory_format=torch.contiguous_format).view(torch.float32)  # a view's would begin anywhere
    return values.to(dtype) * scales.to(dtype)


def head_dim_of(cache: Tensor) -> int:
    """Numbers of a head in a KV cache, [..., head_dim], or int8 [..., head_dim + SCALE_BYTES]."""
    return cache.shape[-1] - (SCALE_BYTES if cache.dtype == torch.int8 else 0)


def pack_quantized(weight: Tensor | UnpackedRows, quantization: Quantization, dtype: torch.dtype) -> PackedWeight:
    """Layout "int8": as `quantize` makes them. "int4": two values a byte, each plus 8, the first in the lower half."""
    rows, columns = weight.shape
    width, kept = (columns, torch.int8) if quantization == "int8" else (-(-columns // 2), torch.uint8)
    values = torch.empty((rows, width), dtype=kept, device=weight.device)
    scales = _room_for_scales(weight, quantization)
    for part in row_blocks(weight.shape):
        some, scales[part] = quantize(weight[part], quantization)
        if quantization == "int4":
            nibbles = F.pad(some + 8, (0, columns % 2)).view(torch.uint8)
            some = nibbles[:, ::2] | nibbles[:, 1::2] << 4
        values[part] = some
    return PackedWeight(values, scales, (rows, columns), dtype, quantization)


def unpack_quantized(packed: PackedWeight, rows: slice) -> Tensor:
    """float32 [rows, in_features]."""
    assert packed.scales is not None
    values, scales = packed.values[rows], packed.scales[rows]
    if packed.layout == "int4":
        halves = torch.stack((values & 15, values >> 4), dim=2).view(len(values), -1)
        values = halves.view(torch.int8)[:, : packed.shape[1]] - 8
    return dequantize(values, scales)


def _round_rows(rows: Tensor) -> tuple[Tensor, Tensor]:
    """The values of rows, float32 [rows, columns], and their scales, float32 [rows, 1]."""
    scales = rows.abs().amax(1, keepdim=True) / 127.0
    # Less seven bits, 127 times a scale is exact, and is quantised to that scale again.
    scales = scales.view(torch.int32).bitwise_and_(~127).view(torch.float32)
    return (rows / scales).nan_to_num_(0.0).round_().clamp_(-127, 127).to(torch.int8), scales


def _round_groups(groups: Tensor) -> tuple[Tensor, Tensor]:
    """The values of groups, float32 [groups, INT4_GROUP], and the best scale of each, bfloat16 [groups, 1]."""
    extreme = groups.gather(1, groups.abs().argmax(1, keepdim=True))
    best, best_scale, least = torch.zeros_like(groups), torch.zeros_like(extreme), torch.full_like(extreme, torch.inf)
    for steps in _STEPS:
        # Negative, so that the extreme value takes the step that only one side has.
        scale = (extreme / -steps).bfloat16().float()
        values = (groups / scale).nan_to_num_(0.0).round_().clamp_(-8, 7)
        error = (values * scale).sub_(groups).square_().sum(1, keepdim=True)
        is_better = error < least
        best = torch.where(is_better, values, best)
        best_scale, least = torch.where(is_better, scale, best_scale), torch.where(is_better, error, least)
    return best.to(torch.int8), best_scale.bfloat16()
