"""A fake executor with weights: a version that says which contents were taken, on which its tokens depend."""

from __future__ import annotations

import asyncio
import errno
import json
import zlib
from pathlib import Path
from typing import Any, Literal

from aioengine.core.executor_protocol import Part, WeightPiece, weights_asleep, weights_came_as_tensors
from aioengine.errors import InvalidRequest, ModelLoadError
from aioengine.executor.weight_transfer import WeightTransfer
from aioengine.scheduler.plan import RowSampling
from doubles.fake_executor import FakeExecutor

STATE_FILE = "fake-weights.json"


class WeightedExecutor(FakeExecutor):
    """As `FakeExecutor`, with tokens that other weights change.

    The version is 0 at the start, that of the folder that was last taken, or a checksum of the tensors that have come
    since. A folder's is the one that was saved there, or a checksum of its name.

    Attributes:
        weight_shapes: of the tensors that there are, by name.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._sampler, self._sampler_of_tokens = self._sample_by_weights, self._sampler
        self.weight_shapes = {"model.embed_tokens.weight": (self.info.vocab_size, 4), "model.norm.weight": (4,)}
        self._staging = WeightTransfer(self.weight_shapes)
        self._folder: Path | None = None
        self._version_of_folder = 0
        self._tensors: dict[str, int] = {}

    @property
    def weights_version(self) -> int:
        if not self._tensors:
            return self._version_of_folder
        return _checksum(repr((self._version_of_folder, sorted(self._tensors.items()))).encode())

    def _sample_by_weights(self, token_ids: list[int], sampling: RowSampling) -> int:
        """Other weights are as good as another first token."""
        version = [self.weights_version & 0x7FFFFFFF] if self.weights_version else []
        return self._sampler_of_tokens([*version, *token_ids], sampling)

    async def sleep(self, level: Literal[1, 2]) -> None:
        if level == 2 and self._tensors:
            self._note("sleep", level)
            raise weights_came_as_tensors()
        await super().sleep(level)

    async def wake_up(self, parts: frozenset[Part]) -> None:
        if "weights" in parts and self.model is None and self._folder is not None:
            self._version_of_folder = await asyncio.to_thread(_read, self._folder)
        await super().wake_up(parts)

    async def update_weights(self, folder: Path) -> None:
        self._note("update_weights", folder)
        self._version_of_folder = await asyncio.to_thread(_read, folder)
        self._folder, self._tensors = folder, {}
        await self._launched_steps_end()

    async def stage_weights(self, piece: WeightPiece) -> None:
        self._note("stage_weights", piece.name)
        self._staging.add(piece)
        await self._launched_steps_end()

    async def commit_weights(self, transfer: str) -> None:
        self._note("commit_weights", transfer)
        tensors = self._staging.whole(transfer)
        if self.model is None:
            raise weights_asleep("commit_weights")
        self._staging.drop(transfer)
        self._tensors.update({name: _checksum(tensor.data.tobytes()) for name, tensor in tensors.items()})
        await self._launched_steps_end()

    async def drop_weights(self, transfer: str) -> None:
        self._note("drop_weights", transfer)
        self._staging.drop(transfer)
        await self._launched_steps_end()

    async def save_sharded_state(self, folder: Path, max_shard_bytes: int) -> list[str]:
        self._note("save_sharded_state", folder)
        if max_shard_bytes < 1:
            raise InvalidRequest(f"max_shard_bytes={max_shard_bytes} must be at least 1", param="max_shard_bytes")
        if self.model is None:
            raise weights_asleep("save_sharded_state")
        await asyncio.to_thread(_write, folder, self.weights_version)
        await self._launched_steps_end()
        return [STATE_FILE]


def _checksum(content: bytes) -> int:
    return zlib.crc32(content) or 1


def _read(folder: Path) -> int:
    if not folder.is_dir():
        raise ModelLoadError(f"there is no folder {folder}")
    if not (folder / STATE_FILE).is_file():
        return _checksum(folder.name.encode())
    return int(json.loads((folder / STATE_FILE).read_bytes())["version"])


def _write(folder: Path, version: int) -> None:
    if not folder.parent.is_dir():
        raise FileNotFoundError(errno.ENOENT, "there is no folder for it", str(folder))
    folder.mkdir(exist_ok=True)
    (folder / STATE_FILE).write_text(json.dumps({"version": version}))
