"""Checkpoints in files that torch saved (pytorch_model.bin), read without running what a pickle may hold.

Only ``weights_only`` loading is used, in which a pickle can make tensors and plain containers and call nothing else,
and files of torch's zip layout (since torch 1.6), whose tensors are mapped and not copied.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor

from aioengine.errors import ModelLoadError
from aioengine.models.checkpoint import FILE_DTYPES
from aioengine.models.formats.stored import CODE_DTYPES, FileTensor, ReadTensor

SINGLE_FILE = "pytorch_model.bin"
INDEX_FILE = "pytorch_model.bin.index.json"
NAMES = {dtype: name for name, dtype in (FILE_DTYPES | CODE_DTYPES).items()}


def read_header(path: Path) -> Iterator[FileTensor]:
    """The tensors of one file.

    Raises:
        ModelLoadError: it is missing, damaged, of the old layout, or holds anything else.
    """
    for name, tensor in _load(path).items():
        yield FileTensor(name, path, NAMES.get(tensor.dtype, str(tensor.dtype)), tuple(tensor.shape), _reading)


@contextmanager
def _reading(path: Path) -> Iterator[ReadTensor]:
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
