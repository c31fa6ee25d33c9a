"""How a checkpoint's weights are kept, by format, and what that costs."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from aioengine.models.checkpoint import FILE_DTYPES
from aioengine.models.formats.stored import Stored


class FormatUse(msgspec.Struct, frozen=True):
    """The tensors of one format that are kept in one way.

    Attributes:
        format: as `Stored.format`.
        is_dequantised: kept dense, though the files have codes.
        num_tensors: of the checkpoint.
        file_bytes, kept_bytes: of them all.
    """

    format: str
    is_dequantised: bool
    num_tensors: int
    file_bytes: int
    kept_bytes: int

    @property
    def is_quantised(self) -> bool:
        return self.format not in FILE_DTYPES


def summarise(kept: Iterable[tuple[Stored, int, bool]]) -> list[FormatUse]:
    """Of (tensor, bytes that it is kept in, whether it was dequantised), by format."""
    uses: dict[tuple[str, bool], FormatUse] = {}
    for stored, num_bytes, is_dequantised in kept:
        key = stored.format, is_dequantised
        so_far = uses.get(key, FormatUse(*key, 0, 0, 0))
        uses[key] = FormatUse(
            *key, so_far.num_tensors + 1, so_far.file_bytes + stored.num_bytes, so_far.kept_bytes + num_bytes
        )
    return list(uses.values())


def describe(uses: Iterable[FormatUse]) -> str:
    """In a line."""
    return "; ".join(
        f"{use.num_tensors} tensors of {use.format} {'dequantised' if use.is_dequantised else 'as they are'}: "
        f"{use.file_bytes:,} bytes in the files, {use.kept_bytes:,} kept"
        for use in uses
    )
