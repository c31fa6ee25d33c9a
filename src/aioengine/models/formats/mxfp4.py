"""MXFP4 (OCP Microscaling Formats, version 1.0): 4-bit floats in groups of 32 that share a power of 2.

gpt-oss's experts are stacked: ``…_blocks`` is uint8 [experts, out, groups, 16], two codes a byte, the first in its low
half, and ``…_scales`` uint8 [experts, out, groups], exponents plus 127. transformers' dense tensor is the transposed
one, [experts, in, out]; a `CodedWeight` has the experts' outputs one below the other, [experts · out, in].
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from aioengine.errors import ModelLoadError
from aioengine.kernels.packed_weight import CodedWeight
from aioengine.kernels.torch.quantized import split_codes
from aioengine.models.formats.coded_tensor import E2M1, CodedTensor, Format, Parts, check, need
from aioengine.models.formats.stored import Files

SUFFIXES = ("_blocks", "_scales")
GROUP = 32


def read_config(_: dict[str, Any]) -> Format:
    return Format(suffixes=SUFFIXES, find=_find)


def _find(module: str, parts: Parts, _: Files) -> CodedTensor | None:
    need(module, parts, SUFFIXES)
    blocks, scales = parts["_blocks"], parts["_scales"]
    if len(blocks.shape) != 4 or not all(blocks.shape):
        raise ModelLoadError(f"tensor {blocks.name} in {blocks.path} has shape {list(blocks.shape)}; four are needed")
    experts, rows, num_groups, _bytes = blocks.shape
    check(blocks, ("U8",), (experts, rows, num_groups, GROUP // 2))
    check(scales, ("U8",), (experts, rows, num_groups))
    return CodedTensor(module, "MXFP4", (experts, num_groups * GROUP, rows), parts, _decode)


def _decode(tensors: dict[str, Tensor]) -> CodedWeight:
    return decode_mxfp4(tensors["_blocks"].flatten(2).flatten(0, 1), tensors["_scales"].flatten(0, 1))


def decode_mxfp4(pairs: Tensor, exponents: Tensor) -> CodedWeight:
    """Of uint8 [out, in / 2] and uint8 [out, in / 32]."""
    scales = torch.ldexp(torch.ones(exponents.shape, dtype=torch.float32), exponents.int() - 127)
    return CodedWeight(split_codes(pairs), 4, E2M1, scales, None, GROUP)
