"""Checkpoints in safetensors files, one or several with an index."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from aioengine.errors import ModelLoadError
from aioengine.models.formats.stored import FileTensor, ReadTensor


def read_header(path: Path) -> Iterator[FileTensor]:
    """The tensors of one file.

    Raises:
        ModelLoadError: it is missing or damaged.
    """
    with _opened(path) as file:
        for name in file.keys():  # noqa: SIM118 (not a dict)
            part = file.get_slice(name)
            yield FileTensor(name, path, part.get_dtype(), tuple(part.get_shape()), _reading)


@contextmanager
def _reading(path: Path) -> Iterator[ReadTensor]:
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
