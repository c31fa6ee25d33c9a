"""The tensors of GGUF files, as a checkpoint's catalogue: under transformers' names, quantised ones as they are.

Block formats are those of llama.cpp (its ggml-quants.c). A function of `BLOCK_FORMATS` unpacks some blocks as they lie
in the file, uint8 [blocks, bytes], to

    codes: uint8 [blocks, values], as `CodedWeight` has them;
    scales, offsets: float32 [blocks, groups]; no offsets: None.

In the names of the formats K means a block of 256 values whose groups' scales are small numbers beside one in float16.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from io import BufferedReader
from pathlib import Path

import msgspec
import torch
from torch import Tensor

from aioengine.errors import ModelLoadError
from aioengine.kernels.packed_weight import CodedWeight, row_blocks
from aioengine.models.checkpoint import FILE_DTYPES
from aioengine.models.formats.gguf_families import Rows, named_tensors, stacked_tensors
from aioengine.models.formats.gguf_file import BLOCKS, GgufFile, GgufTensor
from aioengine.models.formats.quantised import E2M1
from aioengine.models.formats.stored import Files, Stored

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


def _plain(name: str, tensor: GgufTensor, rows: Rows | None = None, has_one_added: bool = False) -> Stored:
    """A tensor of a model that is one of a file.

    Its values are a copy: dense in the file's dtype, or codes, whose offsets are rounded to float32 where they are not
    exact. Of matrices that are stacked the codes are one below the other.

    Args:
        tensor: all of a tensor of the file, or one of those that are stacked in it.
        rows: which of its rows come in which order; None: all as they are.
        has_one_added: to each value.
    """

    def read(files: Files) -> Tensor | CodedWeight:
        values: Tensor | CodedWeight
        try:
            file = files.get(tensor.path, lambda path: path.open("rb"))
            file.seek(tensor.offset)
            if tensor.type in BLOCK_FORMATS:
                values = _read_codes(tensor, file)
            else:
                dense = _take(tensor, file, tensor.num_bytes).view(FILE_DTYPES[tensor.type]).view(tensor.shape)
                values = dense - 1.0 if has_one_added else dense
        except OSError as error:
            raise ModelLoadError(f"{tensor.path} cannot be read: {error.strerror or error}") from error
        return values if rows is None else values[torch.from_numpy(rows)]

    kind = tensor.type if tensor.type in FILE_DTYPES else f"GGUF {tensor.type}"
    return Stored(name, tensor.path, kind, tensor.shape, tensor.num_bytes, read)


def _stacks(name: str, tensors: list[GgufTensor]) -> Stored:
    """A tensor of all experts of a layer, in the file as one tensor or several: their outputs in turn.

    It is [experts, in, out], as transformers has matrices, or [experts, out]; codes are [experts · out, in].

    Args:
        tensors: matrices [experts, out, in] or biases [experts, out], alike.
    """
    parts = [_plain(name, tensor) for tensor in tensors]
    num_experts, num_rows, *num_columns = tensors[0].shape

    def read(files: Files) -> Tensor | CodedWeight:
        values = [part.read(files) for part in parts]
        coded = [each for each in values if isinstance(each, CodedWeight)]
        if coded:
            stack = CodedWeight.cat(coded)
            return stack[torch.arange(len(stack.codes)).view(len(coded), -1).T.flatten()]
        dense = torch.stack([each for each in values if isinstance(each, Tensor)], dim=2).flatten(1, 2)
        return dense if dense.dim() == 2 else dense.mT

    shape, num_bytes = (num_experts, *num_columns, num_rows * len(parts)), sum(part.num_bytes for part in parts)
    return Stored(name, parts[0].path, parts[0].format, shape, num_bytes, read)


def _read_codes(tensor: GgufTensor, file: BufferedReader) -> CodedWeight:
    layout = BLOCK_FORMATS[tensor.type]
    num_values, num_bytes = BLOCKS[tensor.type]
    num_columns = tensor.shape[-1]
    num_rows = math.prod(tensor.shape) // num_columns
    codes = torch.empty((num_rows, num_columns), dtype=torch.uint8)
    scales = torch.empty((num_rows, num_columns // layout.group), dtype=torch.float32)
    offsets = torch.empty_like(scales) if layout.has_offsets else None
    for rows in row_blocks((num_rows, num_columns)):
        count = rows.stop - rows.start
        blocks = _take(tensor, file, count * num_columns // num_values * num_bytes).view(-1, num_bytes)
        for whole, part in zip((codes, scales, offsets), layout.unpack(blocks), strict=True):
            if whole is not None and part is not None:
                whole[rows] = part.view(count, -1)
    return CodedWeight(codes, layout.bits, layout.table, scales, offsets, layout.group)


def _take(tensor: GgufTensor, file: BufferedReader, count: int) -> Tensor:
    data = torch.empty(count, dtype=torch.uint8)
    if file.readinto(data.numpy().data) != count:
        raise ModelLoadError(f"{tensor.path} is cut short: tensor {tensor.name} ends beyond it")
    return data


def read_gguf(path: Path) -> dict[str, Stored]:
    """All tensors of a GGUF file, by name; of a model in several files, those of all of them.

    Raises:
        ModelLoadError: as `GgufFile.read`, or the architecture is not supported.
    """
    file = GgufFile.read(path)
    found = {name: _plain(name, *where) for name, where in named_tensors(file)}
    for name, tensors in stacked_tensors(file):
        if len({(tensor.type, tensor.shape) for tensor in tensors}) > 1 or len(tensors[0].shape) not in (2, 3):
            raise ModelLoadError(
                f"{path}: {' and '.join(tensor.name for tensor in tensors)} are no stacks of one type and shape"
            )
        found[name] = _stacks(name, tensors)
    for name, stored in found.items():
        if stored.format not in FILE_DTYPES and (len(stored.shape) < 2 or name.endswith("bias")):
            raise ModelLoadError(f"{path}: {name} is {stored.format}, in which no vectors can be; F32 is needed")
    return found
