"""Quantised weights and products with them in plain torch: the oracle of native ones, which take the values from here.

"int8" (Dettmers et al., 2022, arXiv:2208.07339, without its outliers): weights by outputs, activations by tokens, both
symmetric and rounded to nearest, so that a product is a sum of integers and a factor. "int4": weights alone, in groups
of inputs, each with the scale, of a few, that has the least squared error. Symmetric groups of 64 with bfloat16 scales
are 4.25 bits a weight; with offsets and groups of 128, as many bits, the error of normal weights is 4 % more, and 2 to
14 % less where tails are heavy.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor
from torch.nn import functional as F

from aioengine.kernels.packed_weight import (
    BLOCK_NUMBERS,
    CodedRows,
    CodedWeight,
    Coding,
    PackedWeight,
    Quantization,
    UnpackedRows,
    row_blocks,
    scale_groups,
)

INT4_GROUP = 64
"""Inputs that share a scale; the last group of a row may be shorter."""

SCALE_BYTES = 4
"""Size of the scale behind each head's key or value in an int8 KV cache."""

HAS_PRODUCTS = {
    torch.bfloat16: torch.ops.mkldnn._is_mkldnn_bf16_supported(),
    torch.float16: torch.ops.mkldnn._is_mkldnn_fp16_supported(),
    torch.int8: torch.cpu._is_vnni_supported(),
}
"""Whether oneDNN multiplies a dtype on this processor; a loop of torch's own takes the others, row by row."""
WIDENED_OUTPUTS = 512
"""Outputs of a weight that are float32 at once: 2 MiB at 1,024 inputs, which stays in a core's caches."""
ROWS_TO_WIDEN = 8
"""From so many rows on a product of widened weights is faster than torch's loop for 16 bits: 1.4 times at 8 rows, 4
times at 64 and more (AVX2, 1024 × 3072). Its loop for int8 is slower for any number of rows, 26 times at 64."""

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
    """The values that `quantize` rounded to.

    Returns:
        float32 [out_features, in_features], exact.
    """
    group = values.shape[1] if scales.shape[1] == 1 else INT4_GROUP
    return scale_groups(values.float(), scales.float(), None, group)


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
    """Lines of an int8 KV cache for keys or values: each head's, as `quantize_rows` rounds it, before its scale.

    Args:
        x: [any, head_dim].
    Returns:
        int8 [any, head_dim + SCALE_BYTES], the last of them a float32.
    """
    values, scales = quantize_rows(x)
    return torch.cat((values, scales.view(torch.int8)), dim=1)


def read_lines(cached: Tensor, dtype: torch.dtype) -> Tensor:
    """Read the numbers of a KV cache of any dtype.

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


def pack_int8(weight: Tensor | UnpackedRows, dtype: torch.dtype) -> PackedWeight:
    """Layout "int8": as `quantize` makes it."""
    rows, columns = weight.shape
    values = torch.empty((rows, columns), dtype=torch.int8, device=weight.device)
    scales = _room_for_scales(weight, "int8")
    for part in row_blocks(weight.shape):
        values[part], scales[part] = quantize(weight[part], "int8")
    return PackedWeight(values, scales, (rows, columns), dtype, "int8")


def int4_rows(weight: Tensor | UnpackedRows) -> CodedRows:
    """A dense matrix, to be quantised to "int4" block by block."""

    def make(rows: slice) -> CodedWeight:
        values, scales = quantize(weight[rows], "int4")
        return CodedWeight((values + 8).view(torch.uint8), 4, None, scales.float(), None, INT4_GROUP)

    shape = weight.shape[0], weight.shape[1]
    return CodedRows(shape, Coding(4, None, INT4_GROUP), torch.bfloat16, False, weight.device, make)


def pack_coded(coded: CodedRows, dtype: torch.dtype) -> PackedWeight:
    """Layout "coded": codes of 8 bits as they are, of 4 bits two a byte, the first in the lower half; scales, and
    offsets behind them, [1 or 2, out_features, groups].
    """
    (rows, columns), bits = coded.shape, coded.coding.bits
    num_groups = -(-columns // coded.coding.group)
    values = torch.empty((rows, -(-columns * bits // 8)), dtype=torch.uint8, device=coded.device)
    scales = torch.empty((1 + coded.has_offsets, rows, num_groups), dtype=coded.scales_dtype, device=coded.device)
    for part in row_blocks(coded.shape):
        some = coded[part]
        values[part] = some.codes if bits == 8 else pair_codes(some.codes)
        scales[0, part] = some.scales.to(scales.dtype)
        if coded.has_offsets:
            scales[1, part] = 0 if some.offsets is None else some.offsets.to(scales.dtype)
    return PackedWeight(values, scales, coded.shape, dtype, "coded", coded.coding)


def coded_rows(packed: PackedWeight, rows: slice | Tensor) -> CodedWeight:
    """Any rows of layout "coded"."""
    assert packed.scales is not None
    assert packed.coding is not None
    coding, codes = packed.coding, packed.values[rows]
    codes = codes if coding.bits == 8 else split_codes(codes)[:, : packed.shape[1]]
    scales, *offsets = packed.scales[:, rows].float()
    return CodedWeight(codes, coding.bits, coding.table, scales, offsets[0] if offsets else None, coding.group)


def pair_codes(codes: Tensor) -> Tensor:
    """[rows, columns] codes of 4 bits → [rows, ⌈columns / 2⌉]."""
    codes = F.pad(codes, (0, codes.shape[1] % 2))
    return codes[:, ::2] | codes[:, 1::2] << 4


def split_codes(pairs: Tensor) -> Tensor:
    """The codes that `pair_codes` was given, with one more column if they were odd."""
    return torch.stack((pairs & 15, pairs >> 4), dim=2).view(len(pairs), -1)


def unpack_quantized(packed: PackedWeight, rows: slice) -> Tensor:
    """float32 [rows, in_features]."""
    assert packed.scales is not None
    if packed.coding is not None:
        return coded_rows(packed, rows).dense()
    return dequantize(packed.values[rows], packed.scales[rows])


def embed_quantized(token_ids: Tensor, packed: PackedWeight) -> Tensor:
    """See `Operations.embed`."""
    assert packed.scales is not None
    if packed.coding is not None:
        return coded_rows(packed, token_ids).dense().to(packed.dtype)
    return (F.embedding(token_ids, packed.values) * packed.scales[token_ids]).to(packed.dtype)


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


# Products


def multiply(x: Tensor, packed: PackedWeight, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    """See `Operations.linear`, with a result of ``dtype``: by cuBLAS on a GPU, by oneDNN and MKL on a CPU.

    On a GPU wider outputs are the product's own float32 sums, where torch gives them: rounding to 16 bits would make
    ties of logits that are none, and a second tensor as large as the vocabulary.
    """
    weight = packed.values
    if packed.coding is not None:
        x, blocks = x.float(), row_blocks(packed.shape)
        product = torch.cat([F.linear(x, unpack_quantized(packed, rows)) for rows in blocks], dim=-1)
    elif packed.scales is not None:
        values, steps = quantize_rows(x)
        if x.is_cuda or HAS_PRODUCTS[torch.int8]:
            product = torch._int_mm(values, weight.t()).float()
        else:
            product = _multiply_widened(values, weight)
        product *= steps * packed.scales.view(1, -1)
    elif x.is_cuda and bias is None and dtype != x.dtype and hasattr(torch.ops.aten.mm, "dtype"):
        return torch.mm(x, weight.t(), out_dtype=dtype)
    elif x.is_cuda or len(x) < ROWS_TO_WIDEN or HAS_PRODUCTS.get(x.dtype, True):
        return F.linear(x, weight, bias).to(dtype)
    else:
        product = _multiply_widened(x, weight)
    return (product if bias is None else product + bias.float()).to(dtype)


def some_rows(packed: PackedWeight, rows: slice) -> PackedWeight:
    """Some outputs of a weight that `pack` packed, as a view."""
    scales = packed.scales
    if scales is not None:
        scales = scales[rows] if packed.coding is None else scales[:, rows]
    return replace(packed, values=packed.values[rows], scales=scales, shape=(rows.stop - rows.start, packed.shape[1]))


def _multiply_widened(x: Tensor, weight: Tensor) -> Tensor:
    """A product in float32 [rows, outputs], some outputs' weights after the other."""
    x = x.float()
    return torch.cat([F.linear(x, some.float()) for some in weight.split(WIDENED_OUTPUTS)], dim=-1)
