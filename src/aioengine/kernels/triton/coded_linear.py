"""Products with weights of codes, which are read as they are and become numbers in registers (as in Frantar et al.,
2024, arXiv:2408.11743).

A program does some outputs of some rows. What codes stand for is multiplied in the dtype of the activations, in which
integers of 8 bits, FP8 and FP4 are exact, and NF4 is rounded; the float32 sums of a *step*, a group of inputs or a part
of one, are multiplied by the group's scale, and those of the activations by its offset. So scales are not rounded, and
a row is the same in any company: each output is summed in the order of its inputs, in steps of the same size.

Bound: with few rows the bytes of codes and scales, at the memory's speed.

Stays if, with 1 row of 4,096 and 14,336 outputs, codes of 4 bits in groups of 128, it beats cuBLAS with bfloat16
weights by 2; not measured.
"""

from __future__ import annotations

import math
from dataclasses import replace

import torch
import triton
import triton.language as tl
from torch import Tensor

from aioengine.kernels.launch_checks import check_tensor
from aioengine.kernels.operations import Operations, plain_torch
from aioengine.kernels.packed_weight import CodedRows, CodedWeight, PackedWeight, Quantization, UnpackedRows, row_blocks
from aioengine.kernels.triton import replaces

FEW_ROWS = 16
"""Up to so many rows a program has few outputs, so that there are programs for all multiprocessors."""
MOST_STEP, MOST_STEP_FLOAT32, LEAST_STEP = 128, 32, 16
"""Inputs of a step. Products of float32 are not the tensor cores': all of a step's are in registers."""
LINEAR, TABLE, FLOAT8 = (tl.constexpr(kind) for kind in range(3))
"""Values of codes: themselves, less half of their number; a table's entries; the number with those bits."""


@triton.jit
def decode(codes, table_ptr, dtype: tl.constexpr, BITS: tl.constexpr, KIND: tl.constexpr):
    """The values of codes, before scales."""
    if KIND == LINEAR:
        return (codes.to(tl.int32) - (1 << (BITS - 1))).to(tl.float32).to(dtype)
    if KIND == TABLE:
        return tl.load(table_ptr + codes).to(dtype)
    # By the bits of a float32 2 ** 120 times as small, so that all GPUs can and subnormal numbers are right.
    bits = ((codes.to(tl.int32) & 0x7F) << 20) | ((codes.to(tl.int32) & 0x80) << 24)
    numbers = bits.to(tl.float32, bitcast=True) * 1.329227995784916e36
    return tl.where((codes & 0x7F) == 0x7F, float("nan"), numbers).to(dtype)


@triton.jit
def load_codes(rows_ptr, first, NUM_INPUTS: tl.constexpr, BITS: tl.constexpr, STEP: tl.constexpr, is_row):
    """Some rows' codes, [rows, STEP] from input ``first`` on; 0 behind the last."""
    if BITS == 8:
        inputs = first + tl.arange(0, STEP)
        return tl.load(rows_ptr[:, None] + inputs[None, :], is_row[:, None] & (inputs < NUM_INPUTS)[None, :], 0)
    places = first // 2 + tl.arange(0, STEP // 2)
    is_inside = is_row[:, None] & (2 * places < NUM_INPUTS)[None, :]
    pairs = tl.load(rows_ptr[:, None] + places[None, :], is_inside, 0)
    return tl.join(pairs & 15, pairs >> 4).reshape(rows_ptr.shape[0], STEP)


@triton.jit
def multiply_step(
    x,
    values_ptr,
    scales_ptr,
    table_ptr,
    outputs,
    is_output,
    first,
    NUM_INPUTS: tl.constexpr,
    OFFSETS_AT: tl.constexpr,
    NUM_GROUPS: tl.constexpr,
    GROUP: tl.constexpr,
    BITS: tl.constexpr,
    KIND: tl.constexpr,
    STEP: tl.constexpr,
):
    """x · Wᵀ, float32 [rows, outputs], of the step that begins at input ``first``.

    Args:
        x: [rows, STEP], 0 behind the last input.
        outputs: int64, of the whole weight.
        OFFSETS_AT: how far behind the scales offsets are; 0: there are none.
    """
    rows_ptr = values_ptr + outputs * ((NUM_INPUTS * BITS + 7) // 8)
    weight = decode(load_codes(rows_ptr, first, NUM_INPUTS, BITS, STEP, is_output), table_ptr, x.dtype, BITS, KIND)
    groups = scales_ptr + outputs * NUM_GROUPS + first // GROUP
    scales = tl.load(groups, is_output, 0.0).to(tl.float32)
    product = tl.dot(x, tl.trans(weight), input_precision="ieee") * scales[None, :]
    if OFFSETS_AT:
        offsets = tl.load(groups + OFFSETS_AT, is_output, 0.0).to(tl.float32)
        product += tl.sum(x.to(tl.float32), 1)[:, None] * offsets[None, :]
    return product


@triton.jit(do_not_specialize=["num_rows"])
def _linear_coded_kernel(
    x_ptr,
    values_ptr,
    scales_ptr,
    table_ptr,
    bias_ptr,
    out_ptr,
    num_rows,
    NUM_INPUTS: tl.constexpr,
    NUM_OUTPUTS: tl.constexpr,
    OFFSETS_AT: tl.constexpr,
    NUM_GROUPS: tl.constexpr,
    GROUP: tl.constexpr,
    BITS: tl.constexpr,
    KIND: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    TILE_OUTPUTS: tl.constexpr,
    STEP: tl.constexpr,
):
    outputs = tl.program_id(0).to(tl.int64) * TILE_OUTPUTS + tl.arange(0, TILE_OUTPUTS)
    rows = tl.program_id(1).to(tl.int64) * TILE_ROWS + tl.arange(0, TILE_ROWS)
    is_output, is_row = outputs < NUM_OUTPUTS, rows < num_rows
    sums = tl.zeros((TILE_ROWS, TILE_OUTPUTS), tl.float32)
    for first in range(0, NUM_INPUTS, STEP):
        inputs = first + tl.arange(0, STEP)
        is_inside = is_row[:, None] & (inputs < NUM_INPUTS)[None, :]
        x = tl.load(x_ptr + rows[:, None] * NUM_INPUTS + inputs[None, :], is_inside, 0.0)
        sums += multiply_step(
            x, values_ptr, scales_ptr, table_ptr, outputs, is_output, first,
            NUM_INPUTS, OFFSETS_AT, NUM_GROUPS, GROUP, BITS, KIND, STEP,
        )  # fmt: skip
    if HAS_BIAS:
        sums += tl.load(bias_ptr + outputs, is_output, 0.0).to(tl.float32)[None, :]
    places = rows[:, None] * NUM_OUTPUTS + outputs[None, :]
    tl.store(out_ptr + places, sums.to(out_ptr.dtype.element_ty), is_row[:, None] & is_output[None, :])


@replaces(Operations.pack)
def pack(
    weight: Tensor | UnpackedRows | CodedWeight | CodedRows,
    quantization: Quantization | None = None,
    dtype: torch.dtype | None = None,
) -> PackedWeight:
    """Pack as plain torch does; of codes that are the bits of float8_e4m3fn the table is known to be.

    Codes of a checkpoint that kernels do not multiply become dense, block by block: plain torch would decode them in
    each step, and wait for the device to see which experts' these are.
    """
    packed = plain_torch.pack(weight, quantization, dtype)
    if isinstance(weight, CodedWeight | CodedRows) and step_of(packed) is None:
        dense = torch.empty(packed.shape, dtype=packed.dtype, device=weight.device)
        for rows in row_blocks(packed.shape):
            dense[rows] = weight[rows].dense()
        return plain_torch.pack(dense)
    if packed.coding is None or packed.coding.bits == 4 or packed.coding.table is None:
        return packed
    of_bits = torch.arange(256, dtype=torch.uint8, device=packed.values.device).view(torch.float8_e4m3fn)
    if not torch.equal(of_bits.float().nan_to_num(), packed.coding.table.nan_to_num()):
        return packed
    return replace(packed, coding=replace(packed.coding, lookup=of_bits))


def step_of(packed: PackedWeight) -> int | None:
    """Inputs of a step of a weight of codes; None: kernels do not multiply these."""
    if packed.coding is None:
        return None
    most = MOST_STEP_FLOAT32 if packed.dtype == torch.float32 else MOST_STEP
    step = most if packed.coding.group >= packed.shape[1] else math.gcd(packed.coding.group, most)
    return step if step >= LEAST_STEP else None


def step_constants(packed: PackedWeight, step: int) -> dict[str, int]:
    """The last arguments of `multiply_step`."""
    assert packed.coding is not None
    assert packed.scales is not None
    coding, scales = packed.coding, packed.scales
    return {
        "OFFSETS_AT": scales[0].numel() if len(scales) == 2 else 0,
        "NUM_GROUPS": scales.shape[2],
        "GROUP": max(coding.group, step),
        "BITS": coding.bits,
        "KIND": (LINEAR if coding.table is None else TABLE if coding.lookup is None else FLOAT8).value,
    }


def table_of(packed: PackedWeight) -> Tensor:
    """The table that `decode` reads."""
    assert packed.coding is not None
    return packed.values if packed.coding.table is None else packed.coding.table


@replaces(Operations.linear)
def linear(x: Tensor, packed: PackedWeight, bias: Tensor | None, out_dtype: torch.dtype | None = None) -> Tensor:
    """See `Operations.linear`; all but weights of codes are cuBLAS's."""
    step, (num_outputs, num_inputs) = step_of(packed), packed.shape
    if step is None:
        return plain_torch.linear(x, packed, bias, out_dtype)
    check_tensor("linear: x", x, (None, num_inputs), packed.dtype, packed.values.device)
    if bias is not None:
        check_tensor("linear: bias", bias, (num_outputs,), x.dtype, x.device)
    num_rows, out = len(x), x.new_empty((len(x), num_outputs), dtype=out_dtype or x.dtype)
    if not num_rows:
        return out
    tile_rows, tile_outputs = (16, 32) if num_rows <= FEW_ROWS or x.dtype == torch.float32 else (64, 64)
    _linear_coded_kernel[(triton.cdiv(num_outputs, tile_outputs), triton.cdiv(num_rows, tile_rows))](
        x, packed.values, packed.scales, table_of(packed), x if bias is None else bias, out, num_rows,
        NUM_INPUTS=num_inputs, NUM_OUTPUTS=num_outputs, HAS_BIAS=bias is not None, TILE_ROWS=tile_rows,
        TILE_OUTPUTS=tile_outputs, STEP=step, **step_constants(packed, step), num_warps=4, num_stages=3,
        enable_fp_fusion=True,
    )  # fmt: skip
    return out
