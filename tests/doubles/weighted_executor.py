"""A fake executor with weights: a version that says which contents were taken, on which its tokens depend."""

from __future__ import annotations

import asyncio
import errno
import json
import zlib
from pathlib import Path
from typing import Any

from aioengine.core.control import (
    CommitWeights,
    Control,
    DropWeights,
    SaveShardedState,
    Sleep,
    StageWeights,
    UpdateWeights,
    WakeUp,
)
from aioengine.core.executor_protocol import weights_asleep, weights_came_as_tensors
from aioengine.errors import ModelLoadError
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

    async def perform(self, call: Control) -> Any:
        before = self.model
        if isinstance(call, Sleep) and call.level == 2 and self._tensors:
            self._note("sleep", call.level)
            raise weights_came_as_tensors()
        result = await super().perform(call)
        match call:
            case WakeUp() if "weights" in call.tags and before is None and self._folder is not None:
                self._version_of_folder = await asyncio.to_thread(_read, self._folder)
            case UpdateWeights():
                self._version_of_folder = await asyncio.to_thread(_read, Path(call.folder))
                self._folder, self._tensors = Path(call.folder), {}
            case StageWeights():
                self._staging.add(call)
            case CommitWeights():
                tensors = self._staging.whole(call.transfer)
                if self.model is None:
                    raise weights_asleep("commit_weights")
                self._staging.drop(call.transfer)
                self._tensors.update({name: _checksum(tensor.data.tobytes()) for name, tensor in tensors.items()})
            case DropWeights():
                self._staging.drop(call.transfer)
            case SaveShardedState():
                if self.model is None:
                    raise weights_asleep("save_sharded_state")
                await asyncio.to_thread(_write, Path(call.folder), self.weights_version)
                return [STATE_FILE]
        return result


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
