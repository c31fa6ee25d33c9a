"""Tensors as they lie in files: in safetensors files, and in files that torch saved (pytorch_model.bin).

Of the latter nothing is run that a pickle may hold: only ``weights_only`` loading is used, in which a pickle can make
tensors and plain containers and call nothing else, and torch's zip layout (since torch 1.6), whose tensors are mapped.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from aioengine.errors import ModelLoadError
from aioengine.models.checkpoint import FILE_DTYPES
from aioengine.models.formats.stored import CODE_DTYPES, FileTensor, file_tensor

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
