"""The tensors of GGUF files, as a checkpoint's catalogue: under transformers' names, quantised ones as they are."""

from __future__ import annotations

import math
from io import BufferedReader
from pathlib import Path

import torch
from torch import Tensor

from aioengine.errors import ModelLoadError
from aioengine.kernels.packed_weight import CodedWeight, row_blocks
from aioengine.models.checkpoint import FILE_DTYPES
from aioengine.models.formats.gguf_blocks import BLOCK_FORMATS
from aioengine.models.formats.gguf_families import Rows, named_tensors, stacked_tensors
from aioengine.models.formats.gguf_file import BLOCKS, GgufFile, GgufTensor
from aioengine.models.formats.stored import Files, Stored


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
        file = files.get(tensor.path, _opened)
        values: Tensor | CodedWeight
        try:
            file.seek(tensor.offset)
            if tensor.type in BLOCK_FORMATS:
                values = _read_codes(tensor, file)
            else:
                dense = _take(tensor, file, tensor.num_bytes).view(FILE_DTYPES[tensor.type]).view(tensor.shape)
                values = dense - 1.0 if has_one_added else dense
        except OSError as error:
            raise ModelLoadError(f"{tensor.path} cannot be read: {error.strerror or error}") from error
        return values if rows is None else values[torch.from_numpy(rows)]

    return Stored(name, tensor.path, _format_of(tensor), tensor.shape, tensor.num_bytes, read)


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


def _format_of(tensor: GgufTensor) -> str:
    return tensor.type if tensor.type in FILE_DTYPES else f"GGUF {tensor.type}"


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


def _opened(path: Path) -> BufferedReader:
    try:
        return path.open("rb")
    except OSError as error:
        raise ModelLoadError(f"{path} cannot be read: {error.strerror or error}") from error


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
