"""The tensors of GGUF files, as a checkpoint's catalogue: under transformers' names, quantised ones as they are."""

from __future__ import annotations

import math
from io import BufferedReader
from pathlib import Path

import msgspec
import torch
from torch import Tensor

from aioengine.errors import ModelLoadError
from aioengine.kernels.packed_weight import CodedWeight, row_blocks
from aioengine.models.checkpoint import FILE_DTYPES
from aioengine.models.formats.gguf_blocks import BLOCK_FORMATS
from aioengine.models.formats.gguf_families import Rows, named_tensors, stacked_tensors
from aioengine.models.formats.gguf_file import BLOCKS, GgufFile, GgufTensor
from aioengine.models.formats.stored import Files, Stored


class GgufStored(msgspec.Struct, frozen=True):
    """A tensor of a model, `Stored` in a GGUF file.

    Attributes:
        tensor: all of a tensor of the file, or one of those that are stacked in it.
        rows: which of its rows come in which order; None: all as they are.
        has_one_added: to each value.
    """

    name: str
    tensor: GgufTensor
    rows: Rows | None
    has_one_added: bool

    @property
    def path(self) -> Path:
        return self.tensor.path

    @property
    def shape(self) -> tuple[int, ...]:
        return self.tensor.shape

    @property
    def num_bytes(self) -> int:
        return self.tensor.num_bytes

    @property
    def format(self) -> str:
        return self.tensor.type if self.tensor.type in FILE_DTYPES else f"GGUF {self.tensor.type}"

    def read(self, files: Files) -> Tensor | CodedWeight:
        """A copy: dense in the file's dtype, or codes, whose offsets are rounded to float32 where they are not exact.

        Of matrices that are stacked the codes are one below the other.

        Raises:
            ModelLoadError: the file cannot be read.
        """
        file = files.get(self.path, _opened)
        try:
            file.seek(self.tensor.offset)
            values = self._coded(file) if self.tensor.type in BLOCK_FORMATS else self._dense(file)
        except OSError as error:
            raise ModelLoadError(f"{self.path} cannot be read: {error.strerror or error}") from error
        return values if self.rows is None else values[torch.from_numpy(self.rows)]

    def _dense(self, file: BufferedReader) -> Tensor:
        values = self._take(file, self.num_bytes).view(FILE_DTYPES[self.tensor.type]).view(self.shape)
        return values - 1.0 if self.has_one_added else values

    def _coded(self, file: BufferedReader) -> CodedWeight:
        layout = BLOCK_FORMATS[self.tensor.type]
        num_values, num_bytes = BLOCKS[self.tensor.type]
        num_columns = self.shape[-1]
        num_rows = math.prod(self.shape) // num_columns
        codes = torch.empty((num_rows, num_columns), dtype=torch.uint8)
        scales = torch.empty((num_rows, num_columns // layout.group), dtype=torch.float32)
        offsets = torch.empty_like(scales) if layout.has_offsets else None
        for rows in row_blocks((num_rows, num_columns)):
            count = rows.stop - rows.start
            blocks = self._take(file, count * num_columns // num_values * num_bytes).view(-1, num_bytes)
            for whole, part in zip((codes, scales, offsets), layout.unpack(blocks), strict=True):
                if whole is not None and part is not None:
                    whole[rows] = part.view(count, -1)
        return CodedWeight(codes, layout.bits, layout.table, scales, offsets, layout.group)

    def _take(self, file: BufferedReader, count: int) -> Tensor:
        data = torch.empty(count, dtype=torch.uint8)
        if file.readinto(data.numpy().data) != count:
            raise ModelLoadError(f"{self.path} is cut short: tensor {self.name} ends beyond it")
        return data


class GgufStacks(msgspec.Struct, frozen=True):
    """A tensor of all experts of a layer, `Stored` in a GGUF file as one tensor or several: their outputs in turn.

    Attributes:
        parts: matrices [experts, out, in] or biases [experts, out], alike.
    """

    name: str
    parts: tuple[GgufStored, ...]

    @property
    def path(self) -> Path:
        return self.parts[0].path

    @property
    def shape(self) -> tuple[int, ...]:
        """[experts, in, out], as transformers has matrices, or [experts, out]."""
        num_experts, num_rows, *num_columns = self.parts[0].shape
        return num_experts, *num_columns, num_rows * len(self.parts)

    @property
    def num_bytes(self) -> int:
        return sum(part.num_bytes for part in self.parts)

    @property
    def format(self) -> str:
        return self.parts[0].format

    def read(self, files: Files) -> Tensor | CodedWeight:
        """As `GgufStored.read`. Codes are [experts · out, in]."""
        values = [part.read(files) for part in self.parts]
        coded = [each for each in values if isinstance(each, CodedWeight)]
        if coded:
            stack = CodedWeight.cat(coded)
            return stack[torch.arange(len(stack.codes)).view(len(coded), -1).T.flatten()]
        dense = torch.stack([each for each in values if isinstance(each, Tensor)], dim=2).flatten(1, 2)
        return dense if dense.dim() == 2 else dense.mT


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
    found: dict[str, Stored] = {name: GgufStored(name, *where) for name, where in named_tensors(file)}
    for name, tensors in stacked_tensors(file):
        if len({(tensor.type, tensor.shape) for tensor in tensors}) > 1 or len(tensors[0].shape) not in (2, 3):
            raise ModelLoadError(
                f"{path}: {' and '.join(tensor.name for tensor in tensors)} are no stacks of one type and shape"
            )
        found[name] = GgufStacks(name, tuple(GgufStored(name, tensor, None, False) for tensor in tensors))
    for name, stored in found.items():
        if stored.format not in FILE_DTYPES and (len(stored.shape) < 2 or name.endswith("bias")):
            raise ModelLoadError(f"{path}: {name} is {stored.format}, in which no vectors can be; F32 is needed")
    return found
