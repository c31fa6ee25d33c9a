"""Tensors that a checkpoint's files hold: known by their headers, read a layer at a time.

In safetensors files, and in files that torch saved (pytorch_model.bin). Of the latter nothing is run that a pickle may
hold: only ``weights_only`` loading is used, in which a pickle can make tensors and plain containers and call nothing
else, and torch's zip layout (since torch 1.6), whose tensors are mapped.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from aioengine.errors import ModelLoadError
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


NAMES = {dtype: name for name, dtype in (FILE_DTYPES | CODE_DTYPES).items()}


def read_safetensors(path: Path) -> Iterator[FileTensor]:
    """The tensors of one safetensors file.

    Raises:
        ModelLoadError: it is missing or damaged.
    """
    with _opened(path) as file:
        for name in file.keys():  # noqa: SIM118 (not a dict)
            part = file.get_slice(name)
            yield file_tensor(name, path, part.get_dtype(), tuple(part.get_shape()), _reading)


@contextmanager
def _reading(path: Path) -> Iterator[Callable[[str], Tensor]]:
    with _opened(path) as file:
        yield file.get_tensor


@contextmanager
def _opened(path: Path) -> Iterator[Any]:
    try:
        with safe_open(path, framework="pt", device="cpu") as file:
            yield file
    except FileNotFoundError as error:
        raise ModelLoadError(f"{path} is missing: the model is not complete, download it again") from error
    except (SafetensorError, OSError, MemoryError) as error:  # the last: there is no room to map it
        raise ModelLoadError(
            f"{path} is damaged or cut short, or cannot be read: {error}. If it was downloaded, do that again"
        ) from error


def read_pickled(path: Path) -> Iterator[FileTensor]:
    """The tensors of one file that torch saved.

    Raises:
        ModelLoadError: it is missing, damaged, of the old layout, or holds anything else.
    """
    for name, tensor in _load(path).items():
        yield file_tensor(name, path, NAMES.get(tensor.dtype, str(tensor.dtype)), tuple(tensor.shape), _reading_pickled)


@contextmanager
def _reading_pickled(path: Path) -> Iterator[Callable[[str], Tensor]]:
    yield _load(path).__getitem__


def _load(path: Path) -> dict[str, Tensor]:
    try:
        held = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except FileNotFoundError as error:
        raise ModelLoadError(f"{path} is missing") from error
    # Of what is no zip, of a pickle that wants to call something, of offsets beyond the file: each another error.
    except Exception as error:
        raise ModelLoadError(
            f"{path} cannot be read as tensors alone, and nothing else in such a file is run: save the model as "
            f"safetensors ({(str(error).strip() or type(error).__name__).splitlines()[0][:300]})"
        ) from error
    if not isinstance(held, dict) or not all(
        isinstance(name, str) and isinstance(tensor, Tensor) and tensor.layout == torch.strided
        for name, tensor in held.items()
    ):
        raise ModelLoadError(f"{path} holds something other than dense tensors by name")
    return {name: tensor.detach() for name, tensor in held.items()}  # some are parameters, which want gradients
