"""Tensors that arrive in pieces, and wait until they are whole and wanted. Needs no torch."""

from __future__ import annotations

import bisect
import difflib
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from aioengine.core.control import StageWeights, WeightDtype
from aioengine.errors import InvalidRequest

MAX_TRANSFERS = 4
"""Updates that may be staged beside each other: each may take four bytes a weight of the host's memory."""

ITEM_BYTES: dict[WeightDtype, int] = {"F32": 4, "BF16": 2, "F16": 2}


class StagedTensor:
    """A tensor's bytes, as far as they have come.

    Attributes:
        dtype, shape: of the first piece.
        data: uint8, of the whole tensor, row-major and little-endian.
    """

    def __init__(self, dtype: WeightDtype, shape: tuple[int, ...]) -> None:
        self.dtype = dtype
        self.shape = shape
        self.data: NDArray[np.uint8] = np.empty(num_bytes(dtype, shape), np.uint8)
        self._spans: list[tuple[int, int]] = []
        """Begin and end of each piece that is here, in order."""

    @property
    def num_missing(self) -> int:
        """Bytes that have not come."""
        return len(self.data) - sum(end - begin for begin, end in self._spans)

    def overlaps(self, begin: int, end: int) -> bool:
        """Whether a byte of this span is here already."""
        place = bisect.bisect(self._spans, (begin, end))
        return any(first < end and begin < last for first, last in self._spans[max(place - 1, 0) : place + 1])

    def write(self, begin: int, data: memoryview) -> None:
        """Copy a piece that overlaps none."""
        end = begin + len(data)
        self.data[begin:end] = np.frombuffer(data, np.uint8)
        bisect.insort(self._spans, (begin, end))


class WeightTransfer:
    """Tensors that were staged, and neither committed nor dropped.

    Args:
        shapes: of the tensors that the model takes, by name.
    """

    def __init__(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        self._shapes = shapes
        self._transfers: dict[str, dict[str, StagedTensor]] = {}

    def add(self, piece: StageWeights) -> None:
        """Copy a piece; one that is refused changes nothing.

        Raises:
            InvalidRequest: there is no such tensor, the piece does not fit it or overlaps another, or `MAX_TRANSFERS`
                others are staged.
        """
        shape = self._shapes.get(piece.name)
        if shape is None:
            near = difflib.get_close_matches(str(piece.name), self._shapes, n=1)
            hint = f"; {near[0]} comes near" if near else ""
            raise InvalidRequest(f"the model has no tensor {piece.name!r}{hint}", param="name")
        if piece.dtype not in ITEM_BYTES:
            raise InvalidRequest(
                f"{piece.name} comes as {piece.dtype!r}; supported: {', '.join(ITEM_BYTES)}", param="dtype"
            )
        if tuple(piece.shape) != shape:
            raise InvalidRequest(
                f"{piece.name} comes with the shape {list(piece.shape)}; the model's is {list(shape)}", param="shape"
            )
        data = _bytes_of(piece)
        tensors = self._transfers.get(piece.transfer, {})
        if not tensors and len(self._transfers) == MAX_TRANSFERS:
            raise InvalidRequest(
                f"{MAX_TRANSFERS} transfers are staged already: commit or drop one of them first", param="transfer"
            )
        tensor = tensors.get(piece.name)
        if tensor is None:
            tensor = StagedTensor(piece.dtype, shape)
        elif tensor.dtype != piece.dtype:
            raise InvalidRequest(
                f"a piece of {piece.name} is {piece.dtype}, and those before it are {tensor.dtype}", param="dtype"
            )
        if tensor.overlaps(piece.offset, piece.offset + len(data)):
            raise InvalidRequest(
                f"the bytes of {piece.name} from {piece.offset} to {piece.offset + len(data)} overlap a piece that was "
                "staged before",
                param="offset",
            )
        tensor.write(piece.offset, data)
        self._transfers.setdefault(piece.transfer, {})[piece.name] = tensor

    def whole(self, transfer: str) -> dict[str, StagedTensor]:
        """The tensors of a transfer, which stays staged.

        Raises:
            InvalidRequest: nothing was staged for it, or a tensor is not whole.
        """
        tensors = self._transfers.get(transfer)
        if tensors is None:
            raise InvalidRequest(f"nothing is staged for the transfer {transfer!r}", param="transfer")
        for name, tensor in tensors.items():
            if tensor.num_missing:
                raise InvalidRequest(
                    f"{name} is not whole: {tensor.num_missing} of its {len(tensor.data)} bytes were not staged",
                    param="transfer",
                )
        return dict(tensors)

    def drop(self, transfer: str) -> None:
        """Forget a transfer; idempotent."""
        self._transfers.pop(transfer, None)


def num_bytes(dtype: WeightDtype, shape: tuple[int, ...]) -> int:
    return int(np.prod(shape, dtype=np.int64)) * ITEM_BYTES[dtype]


def _bytes_of(piece: StageWeights) -> memoryview:
    """The piece's bytes, which lie inside its tensor."""
    try:
        view: memoryview[Any] = memoryview(piece.data)
        data = view.cast("B")
    except TypeError as error:
        raise InvalidRequest(f"data of {piece.name} must be contiguous bytes: {error}", param="data") from None
    size = num_bytes(piece.dtype, tuple(piece.shape))
    if not len(data):
        raise InvalidRequest(f"a piece of {piece.name} has no bytes", param="data")
    if not isinstance(piece.offset, int) or not 0 <= piece.offset <= size - len(data):
        raise InvalidRequest(
            f"a piece of {len(data)} bytes at {piece.offset} does not lie inside {piece.name}, which has {size}",
            param="offset",
        )
    return data
