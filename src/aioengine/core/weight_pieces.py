"""Sending tensors to an engine, piece by piece, and naming folders that the engine's process will look for."""

from __future__ import annotations

import os
import sys
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import anyio
import numpy as np

from aioengine.core.control import AnyControl, CommitWeights, DropWeights, StageWeights, WeightDtype
from aioengine.errors import InvalidRequest
from aioengine.validation import shorten

PIECE_BYTES = 8 * 2**20
"""One message; its receiver holds no more than that beside the tensors themselves."""

_NUMPY_DTYPES: dict[str, WeightDtype] = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}

Call = Callable[[AnyControl], Awaitable[Any]]


async def send_weights(call: Call, tensors: Mapping[str, Any]) -> None:
    """Stage all tensors at an engine core and put them in their places; what fails leaves the weights as they were.

    Args:
        call: `Core.call`.
        tensors: by name; torch tensors on the CPU or numpy arrays, float32, float16 or bfloat16.
    Raises:
        InvalidRequest: a tensor is none, or does not fit the model.
    """
    if not isinstance(tensors, Mapping) or not tensors:
        raise InvalidRequest("tensors: a mapping of names to tensors is needed, with at least one", param="tensors")
    transfer = os.urandom(8).hex()
    try:
        for name, tensor in tensors.items():
            dtype, shape, data = _bytes_of(name, tensor)
            for offset in range(0, max(len(data), 1), PIECE_BYTES):
                piece = data[offset : offset + PIECE_BYTES]
                await call(StageWeights(transfer, name, dtype, shape, offset, piece))
        await call(CommitWeights(transfer))
    except BaseException:
        with anyio.CancelScope(shield=True), anyio.move_on_after(5):
            await _drop(call, transfer)
        raise


def absolute(path: str | os.PathLike[str], param: str) -> str:
    """A path as another process will understand it.

    Raises:
        InvalidRequest: it is no path.
    """
    text = os.fspath(path) if isinstance(path, str | os.PathLike) else None
    if not isinstance(text, str) or not text or "\0" in text:
        raise InvalidRequest(f"{param}={shorten(path)}: a path is needed", param=param)
    return os.path.abspath(os.path.expanduser(text))


async def _drop(call: Call, transfer: str) -> None:
    try:
        await call(DropWeights(transfer))
    except Exception:  # the first error is the news; an engine that has gone has dropped everything
        return


def _bytes_of(name: object, tensor: Any) -> tuple[WeightDtype, tuple[int, ...], memoryview]:
    """A tensor's dtype, shape and bytes, row-major; copied only if they do not lie so already."""
    if not isinstance(name, str):
        raise InvalidRequest(f"tensors: {shorten(name)} is no name", param="tensors")
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(tensor, torch.Tensor):
        dtype = _NUMPY_DTYPES.get(str(tensor.dtype).removeprefix("torch."))
        if dtype is not None and tensor.device.type == "cpu":
            flat = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
            return dtype, tuple(tensor.shape), memoryview(flat.numpy())
    elif isinstance(tensor, np.ndarray) and (dtype := _NUMPY_DTYPES.get(tensor.dtype.name)) is not None:
        flat_array = np.ascontiguousarray(tensor).reshape(-1)
        return dtype, tensor.shape, flat_array.view(np.uint8).data
    kind = f"{type(tensor).__name__} of {getattr(tensor, 'dtype', 'no dtype')}"
    raise InvalidRequest(
        f"tensors[{shorten(name)}] is a {kind}; a torch tensor on the CPU or a numpy array is needed, in float32, "
        "float16 or (torch) bfloat16",
        param="tensors",
    )
