"""Matrices of floats of 8 and 4 bits: FP8 ("fp8", "fbgemm_fp8") and MXFP4.

FP8: ``weight`` is float8_e4m3fn [out, in], and the value of an entry is itself times its scale. The scales are
``weight_scale_inv`` (Qwen, DeepSeek, in spite of the name) or ``weight_scale``: one; or [out] or [out, 1]; or
[⌈out / b0⌉, ⌈in / b1⌉], where the config's ``weight_block_size`` is [b0, b1]. Scales of activations are not read:
products are of activations as they are.

MXFP4 (OCP Microscaling Formats, version 1.0): groups of 32 share a power of 2. gpt-oss's experts are stacked:
``…_blocks`` is uint8 [experts, out, groups, 16], two codes a byte, the first in its low half, and ``…_scales`` uint8
[experts, out, groups], exponents plus 127. transformers' dense tensor is the transposed one, [experts, in, out]; a
`CodedWeight` has the experts' outputs one below the other, [experts · out, in].
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from aioengine.errors import ModelLoadError
from aioengine.kernels.packed_weight import CodedWeight
from aioengine.kernels.torch.quantized import split_codes
from aioengine.models.formats.coded_tensor import (
    E2M1,
    E4M3,
    FLOATS,
    BadConfig,
    Format,
    Parts,
    Tensors,
    check,
    check_matrix,
    coded_tensor,
    need,
)
from aioengine.models.formats.stored import Files, Stored
from aioengine.validation import shorten

SCALES = (".weight_scale_inv", ".weight_scale")
UNREAD = (".input_scale", ".activation_scale", ".input_scale_ub", ".k_scale", ".v_scale", ".q_scale")
MXFP4_SUFFIXES = ("_blocks", "_scales")
MXFP4_GROUP = 32


def read_fp8_config(config: dict[str, Any]) -> Format:
    block = read_block(config.get("weight_block_size"))
    return Format(suffixes=(*SCALES, ".weight"), unread=UNREAD, find=partial(find_fp8, block))


def read_block(value: object) -> tuple[int, int] | None:
    """Outputs and inputs of a block, from a list of both; None: there are none."""
    if value is None:
        return None
    if not isinstance(value, list) or len(value) != 2 or not all(type(size) is int and size > 0 for size in value):
        raise BadConfig(f"blocks of {shorten(value)}; two integers are needed")
    return value[0], value[1]


def find_fp8(block: tuple[int, int] | None, module: str, parts: Parts, _: Files) -> Stored | None:
    """The matrix of ``.weight`` and its scales, as `Format.find`.

    Args:
        block: outputs and inputs of a block; None: there are none.
    """
    scale = next((parts[suffix] for suffix in SCALES if suffix in parts), None)
    if scale is None or ".weight" not in parts or parts[".weight"].format != "F8_E4M3":
        return None
    rows, columns = check_matrix(parts[".weight"], ("F8_E4M3",))
    shapes: list[tuple[int, ...]] = [(), (1,), (1, 1), (rows,), (rows, 1)]
    num_rows, num_columns = rows, columns
    if block is not None:
        num_rows, num_columns = min(block[0], rows), min(block[1], columns)
        shapes.append((-(-rows // num_rows), -(-columns // num_columns)))
    check(scale, FLOATS, *shapes)
    is_by_block = block is not None and scale.shape == shapes[-1]

    def decode(tensors: Tensors) -> CodedWeight:
        codes, scales = tensors[".weight"].view(torch.uint8), tensors[".scale"].float()
        if is_by_block:
            return CodedWeight(codes, 8, E4M3, scales.repeat_interleave(num_rows, 0)[:rows], None, num_columns)
        return CodedWeight(codes, 8, E4M3, scales.reshape(-1, 1).expand(rows, 1).contiguous(), None, columns)

    return coded_tensor(
        f"{module}.weight", "FP8", (rows, columns), {".weight": parts[".weight"], ".scale": scale}, decode
    )


def read_mxfp4_config(_: dict[str, Any]) -> Format:
    return Format(suffixes=MXFP4_SUFFIXES, find=_find_mxfp4)


def _find_mxfp4(module: str, parts: Parts, _: Files) -> Stored | None:
    need(module, parts, MXFP4_SUFFIXES)
    blocks, scales = parts["_blocks"], parts["_scales"]
    if len(blocks.shape) != 4 or not all(blocks.shape):
        raise ModelLoadError(f"tensor {blocks.name} in {blocks.path} has shape {list(blocks.shape)}; four are needed")
    experts, rows, num_groups, _bytes = blocks.shape
    check(blocks, ("U8",), (experts, rows, num_groups, MXFP4_GROUP // 2))
    check(scales, ("U8",), (experts, rows, num_groups))

    def decode(tensors: Tensors) -> CodedWeight:
        return decode_mxfp4(tensors["_blocks"].flatten(2).flatten(0, 1), tensors["_scales"].flatten(0, 1))

    return coded_tensor(module, "MXFP4", (experts, num_groups * MXFP4_GROUP, rows), parts, decode)


def decode_mxfp4(pairs: Tensor, exponents: Tensor) -> CodedWeight:
    """The weight of uint8 [out, in / 2] and uint8 [out, in / 32]."""
    scales = torch.ldexp(torch.ones(exponents.shape, dtype=torch.float32), exponents.int() - 127)
    return CodedWeight(split_codes(pairs), 4, E2M1, scales, None, MXFP4_GROUP)
