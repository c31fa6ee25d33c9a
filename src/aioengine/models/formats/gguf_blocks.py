"""The block formats of GGUF tensors, unpacked to codes, scales and offsets (ggml-quants.c of llama.cpp).

Each function here takes some blocks as they lie in the file, uint8 [blocks, bytes], and gives

    codes: uint8 [blocks, values], as `CodedWeight` has them;
    scales, offsets: float32 [blocks, groups]; no offsets: None.

In the names of the formats K means a block of 256 values whose groups' scales are small numbers beside one in float16.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import torch
from torch import Tensor

from aioengine.models.formats.coded_tensor import E2M1

Unpacked = tuple[Tensor, Tensor, Tensor | None]

NL = torch.tensor([-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], dtype=torch.float32)
"""The values of the codes of IQ4_NL and IQ4_XS."""


class BlockFormat(msgspec.Struct, frozen=True):
    """How a type's blocks become parts of a `CodedWeight`: its bits, group and table, and the rest by ``unpack``."""

    bits: int
    group: int
    unpack: Callable[[Tensor], Unpacked]
    table: Tensor | None = None
    has_offsets: bool = False


def _half(blocks: Tensor, at: int) -> Tensor:
    """float32 [blocks, 1], of the float16 that begins at a byte."""
    return blocks[:, at : at + 2].contiguous().view(torch.float16).float()


def _nibbles(packed: Tensor, group: int) -> Tensor:
    """The lower halves of each ``group`` bytes, then the upper ones: [blocks, bytes] → [blocks, 2 · bytes]."""
    packed = packed.reshape(len(packed), -1, 1, group)
    return torch.cat((packed & 15, packed >> 4), dim=2).flatten(1)


def _bits(packed: Tensor, step: int, group: int) -> Tensor:
    """The lowest ``step`` bits of each ``group`` bytes, then the next: [blocks, bytes] → [blocks, 8 / step · bytes]."""
    packed, mask = packed.reshape(len(packed), -1, 1, group), (1 << step) - 1
    return torch.cat([packed >> shift & mask for shift in range(0, 8, step)], dim=2).flatten(1)


def _q4_0(blocks: Tensor) -> Unpacked:
    return _nibbles(blocks[:, 2:], 16), _half(blocks, 0), None


def _q4_1(blocks: Tensor) -> Unpacked:
    scale = _half(blocks, 0)
    return _nibbles(blocks[:, 4:], 16), scale, _half(blocks, 2) + 8 * scale


def _fifth_bits(packed: Tensor) -> Tensor:
    """[blocks, 4 bytes] → [blocks, 32], each 0 or 16."""
    return (packed[:, :, None] >> torch.arange(8, dtype=torch.uint8) & 1).flatten(1) << 4


def _q5_0(blocks: Tensor) -> Unpacked:
    return (_nibbles(blocks[:, 6:], 16) | _fifth_bits(blocks[:, 2:6])) + (128 - 16), _half(blocks, 0), None


def _q5_1(blocks: Tensor) -> Unpacked:
    return (_nibbles(blocks[:, 8:], 16) | _fifth_bits(blocks[:, 4:8])) + 128, _half(blocks, 0), _half(blocks, 2)


def _q8_0(blocks: Tensor) -> Unpacked:
    return blocks[:, 2:] ^ 128, _half(blocks, 0), None


def _scales_and_offsets(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Q4_K's and Q5_K's: [blocks, 8] each, from two numbers in float16 and 16 of 6 bits, whose upper 2 lie apart."""
    low, high, rest = torch.chunk(blocks[:, 4:16], 3, dim=1)
    scales = torch.cat((low & 63, rest & 15 | low >> 2 & 48), dim=1)
    offsets = torch.cat((high & 63, rest >> 4 | high >> 2 & 48), dim=1)
    return _half(blocks, 0) * scales, -_half(blocks, 2) * offsets


def _q4_k(blocks: Tensor) -> Unpacked:
    scales, offsets = _scales_and_offsets(blocks)
    return _nibbles(blocks[:, 16:], 32), scales, offsets + 8 * scales


def _q5_k(blocks: Tensor) -> Unpacked:
    scales, offsets = _scales_and_offsets(blocks)
    return (_nibbles(blocks[:, 48:], 32) | _bits(blocks[:, 16:48], 1, 32) << 4) + 128, scales, offsets


def _q6_k(blocks: Tensor) -> Unpacked:
    codes = _nibbles(blocks[:, :128], 64) | _bits(blocks[:, 128:192], 2, 32) << 4
    return codes + (128 - 32), _half(blocks, 208) * blocks[:, 192:208].view(torch.int8), None


def _iq4_xs(blocks: Tensor) -> Unpacked:
    low = _nibbles(blocks[:, 4:8], 1)
    high = (blocks[:, 2:4, None] >> torch.arange(0, 8, 2, dtype=torch.uint8) & 3).flatten(1)
    scales = (low | high << 4).view(torch.int8) - 32
    return _nibbles(blocks[:, 8:], 16), _half(blocks, 0) * scales, None


def _mxfp4(blocks: Tensor) -> Unpacked:
    return (
        _nibbles(blocks[:, 1:], 16),
        torch.ldexp(torch.ones(len(blocks), 1, dtype=torch.float32), blocks[:, :1].int() - 127),
        None,
    )


BLOCK_FORMATS = {
    "Q4_0": BlockFormat(4, 32, _q4_0),
    "Q4_1": BlockFormat(4, 32, _q4_1, has_offsets=True),
    "Q5_0": BlockFormat(8, 32, _q5_0),
    "Q5_1": BlockFormat(8, 32, _q5_1, has_offsets=True),
    "Q8_0": BlockFormat(8, 32, _q8_0),
    "Q4_K": BlockFormat(4, 32, _q4_k, has_offsets=True),
    "Q5_K": BlockFormat(8, 32, _q5_k, has_offsets=True),
    "Q6_K": BlockFormat(8, 16, _q6_k),
    "IQ4_NL": BlockFormat(4, 32, _q4_0, NL),
    "IQ4_XS": BlockFormat(4, 32, _iq4_xs, NL),
    "MXFP4": BlockFormat(4, 32, _mxfp4, E2M1),
}
