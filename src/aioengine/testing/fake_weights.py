"""Weights that are a number: a version that says which contents were taken."""

from __future__ import annotations

import asyncio
import errno
import json
import secrets
import zlib
from pathlib import Path

from aioengine.core.executor_protocol import weights_asleep, weights_came_as_tensors
from aioengine.errors import ModelLoadError
from aioengine.executor.weight_transfer import WeightTransfer

STATE_FILE = "fake-weights.json"


class FakeWeights:
    """The weights of a `FakeExecutor`: a version that tells contents apart.

    It is 0 at the start, that of the folder that was last taken, or a checksum of the tensors that have come since. A
    folder's is the one that was saved there, or a checksum of its name.

    Attributes:
        shapes: of the tensors that there are, by name.
        staging: of tensors.
        are_discarded: whether they are asleep at level 2.
    """

    def __init__(self, vocab_size: int) -> None:
        self.shapes: dict[str, tuple[int, ...]] = {
            "model.embed_tokens.weight": (vocab_size, 4),
            "model.norm.weight": (4,),
        }
        self.staging = WeightTransfer(self.shapes)
        self.are_discarded = False
        self._folder: Path | None = None
        self._version_of_folder = 0
        self._tensors: dict[str, int] = {}

    @property
    def version(self) -> int:
        if not self._tensors:
            return self._version_of_folder
        return _checksum(repr((self._version_of_folder, sorted(self._tensors.items()))).encode())

    def discard(self) -> None:
        if self._tensors:
            raise weights_came_as_tensors()
        self.are_discarded = True

    async def restore(self) -> None:
        if self.are_discarded and self._folder is not None:
            self._version_of_folder = await asyncio.to_thread(_read, self._folder)
        self.are_discarded = False

    async def update(self, folder: Path) -> None:
        self._version_of_folder = await asyncio.to_thread(_read, folder)
        self._folder = folder
        self._tensors = {}

    def commit(self, transfer: str) -> None:
        tensors = self.staging.whole(transfer)
        if self.are_discarded:
            raise weights_asleep("commit_weights")
        self.staging.drop(transfer)
        self._tensors.update({name: _checksum(tensor.data.tobytes()) for name, tensor in tensors.items()})

    async def save(self, folder: Path) -> list[str]:
        if self.are_discarded:
            raise weights_asleep("save_sharded_state")
        await asyncio.to_thread(_write, folder, self.version)
        return [STATE_FILE]


def _checksum(content: bytes) -> int:
    return zlib.crc32(content) or 1


def _read(folder: Path) -> int:
    if not folder.is_dir():
        raise ModelLoadError(f"there is no folder {folder}")
    if not (folder / STATE_FILE).is_file():
        return _checksum(folder.name.encode())
    try:
        return int(json.loads((folder / STATE_FILE).read_bytes())["version"])
    except (KeyError, TypeError, ValueError) as error:
        raise ModelLoadError(f"{folder / STATE_FILE} is no good: {error!r}") from error


def _write(folder: Path, version: int) -> None:
    if not folder.parent.is_dir():
        raise FileNotFoundError(errno.ENOENT, "there is no folder for it", str(folder))
    folder.mkdir(exist_ok=True)
    part = folder / f"{STATE_FILE}-{secrets.token_hex(4)}.part"
    part.write_text(json.dumps({"version": version}))
    part.replace(folder / STATE_FILE)
