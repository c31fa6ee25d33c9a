"""Weights in float8_e4m3fn, by blocks, outputs, or as a whole; the quant_methods "fp8" and "fbgemm_fp8".

``weight`` is [out, in], and the value of an entry is itself times its scale. The scales are ``weight_scale_inv`` (Qwen,
DeepSeek, in spite of the name) or ``weight_scale``: one; or [out] or [out, 1]; or [⌈out / b0⌉, ⌈in / b1⌉], where the
config's ``weight_block_size`` is [b0, b1]. Scales of activations are not read: products are of activations as they are.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from aioengine.kernels.packed_weight import CodedWeight
from aioengine.models.formats.coded_tensor import (
    E4M3,
    FLOATS,
    BadConfig,
    CodedTensor,
    Format,
    Parts,
    check,
    check_matrix,
)
from aioengine.models.formats.stored import Files
from aioengine.validation import shorten

SCALES = (".weight_scale_inv", ".weight_scale")
UNREAD = (".input_scale", ".activation_scale", ".input_scale_ub", ".k_scale", ".v_scale", ".q_scale")


def read_config(config: dict[str, Any]) -> Format:
    block = read_block(config.get("weight_block_size"))
    return Format(suffixes=(*SCALES, ".weight"), unread=UNREAD, find=partial(find_fp8, block))


def read_block(value: object) -> tuple[int, int] | None:
    """Outputs and inputs of a block, from a list of both; None: there are none."""
    if value is None:
        return None
    if not isinstance(value, list) or len(value) != 2 or not all(type(size) is int and size > 0 for size in value):
        raise BadConfig(f"blocks of {shorten(value)}; two integers are needed")
    return value[0], value[1]


def find_fp8(block: tuple[int, int] | None, module: str, parts: Parts, _: Files) -> CodedTensor | None:
    """The matrix of ``.weight`` and its scales, as `Format.find`.

    Args:
        block: outputs and inputs of a block; None: there are none.
    """
    scale = next((parts[suffix] for suffix in SCALES if suffix in parts), None)
    if scale is None or ".weight" not in parts or parts[".weight"].format != "F8_E4M3":
        return None
    rows, columns = check_matrix(parts[".weight"], ("F8_E4M3",))
    shapes: list[tuple[int, ...]] = [(), (1,), (1, 1), (rows,), (rows, 1)]
    if block is not None:
        block = min(block[0], rows), min(block[1], columns)
        shapes.append((-(-rows // block[0]), -(-columns // block[1])))
    check(scale, FLOATS, *shapes)
    is_by_block = block is not None and scale.shape == shapes[-1]
    read = {".weight": parts[".weight"], ".scale": scale}
    decode = partial(decode_fp8, block if is_by_block else None)
    return CodedTensor(f"{module}.weight", "FP8", (rows, columns), read, decode)


def decode_fp8(block: tuple[int, int] | None, tensors: dict[str, Tensor]) -> CodedWeight:
    """Of ``.weight`` and ``.scale``."""
    codes, scales = tensors[".weight"].view(torch.uint8), tensors[".scale"].float()
    rows, columns = codes.shape
    if block is None:
        return CodedWeight(codes, 8, E4M3, scales.reshape(-1, 1).expand(rows, 1).contiguous(), None, columns)
    return CodedWeight(codes, 8, E4M3, scales.repeat_interleave(block[0], 0)[:rows], None, block[1])
