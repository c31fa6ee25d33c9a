"""Tensors that a checkpoint's files hold, in whatever format: known by their headers, read a layer at a time."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import torch
from torch import Tensor

from aioengine.kernels.packed_weight import CodedWeight
from aioengine.models.checkpoint import FILE_DTYPES

Opened = TypeVar("Opened")

CODE_DTYPES = {
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
    "BOOL": torch.bool,
    "I8": torch.int8,
    "U8": torch.uint8,
    "I16": torch.int16,
    "U16": torch.uint16,
    "I32": torch.int32,
    "U32": torch.uint32,
    "I64": torch.int64,
    "U64": torch.uint64,
    "F64": torch.float64,
    "C64": torch.complex64,
    "C128": torch.complex128,
}
"""Further dtypes: of the parts of quantised tensors, and of buffers that a model may pass over."""


class Files(ExitStack):
    """The files of a checkpoint while some of its tensors are read: each opened once, all closed at the end.

    To be kept for a layer, not longer: while a file is mapped, the pages that were read count as this process's memory.
    """

    def __init__(self) -> None:
        super().__init__()
        self._opened: dict[Path, Any] = {}

    def get(self, path: Path, opening: Callable[[Path], AbstractContextManager[Opened]]) -> Opened:
        """The file, opened by ``opening``, of which there is one for each path."""
        if path not in self._opened:
            self._opened[path] = self.enter_context(opening(path))
        opened: Opened = self._opened[path]
        return opened


class Stored(msgspec.Struct, frozen=True):
    """A tensor of a checkpoint. Nothing of its values is read before ``read``.

    Attributes:
        name: as transformers saves the dense tensor.
        path: of the file that it is in, the first one if it is in several; for messages.
        format: a key of `FILE_DTYPES`, or the name of a quantised format ("GPTQ 4-bit").
        shape: of the dense tensor.
        num_bytes: in the files.
        read: reads the values. A dense tensor may be a view of the file, which ends with the `Files`: to be copied
            before. Raises ModelLoadError if they cannot be read, or are none that the format allows.
    """

    name: str
    path: Path
    format: str
    shape: tuple[int, ...]
    num_bytes: int
    read: Callable[[Files], Tensor | CodedWeight]


class FileTensor(Stored, frozen=True):
    """A tensor that lies in a file as it is; its format may be one that is not supported."""

    read: Callable[[Files], Tensor]


def file_tensor(
    name: str,
    path: Path,
    kind: str,
    shape: tuple[int, ...],
    opening: Callable[[Path], AbstractContextManager[Callable[[str], Tensor]]],
) -> FileTensor:
    """
    Args:
        kind: its ``format``.
        opening: opens the file, and gives a function that reads a tensor by its name.
    """
    dtype = FILE_DTYPES.get(kind) or CODE_DTYPES[kind]
    num_bytes = torch.Size(shape).numel() * dtype.itemsize
    return FileTensor(name, path, kind, shape, num_bytes, lambda files: files.get(path, opening)(name))
