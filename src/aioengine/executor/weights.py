"""The weights of an engine's model: loaded, replaced, discarded and read again."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import cached_property
from pathlib import Path

import torch
from torch import Tensor

from aioengine.core.executor_protocol import weights_asleep, weights_came_as_tensors
from aioengine.errors import InvalidRequest, ModelLoadError
from aioengine.executor.weight_transfer import StagedTensor, WeightTransfer
from aioengine.kernels.operations import Operations, plain_torch
from aioengine.models.checkpoint import FILE_DTYPES
from aioengine.models.decoder import Decoder
from aioengine.models.folder import ModelFolder, is_gguf
from aioengine.models.implementations import loader_of
from aioengine.models.loader import CPU, LoadOptions, check_kept_alike
from aioengine.models.model import Model
from aioengine.models.saver import save_checkpoint
from aioengine.processes.progress import OnProgress

Load = Callable[..., Model]
"""Makes a decoder by the options of `LoadOptions`, as `load_model` takes them; blocks."""


class Weights:
    """The decoder of a device, or the means to make it again. For the device thread.

    Args:
        load: makes the decoder, now and after `discard`.
        folder: holds the model's config and tokenizer, for `save`.
        is_in_folder: whether the weights are in ``folder``, too, to be read from there after `discard`.
        device, operations: the decoder's.
        is_elsewhere: whether that device's memory is not the host's.
        should_stop: polled by long operations, which then raise LoadStopped.

    Attributes:
        decoder: None while the weights are discarded. Replacing weights changes neither the object nor the addresses
            of its weights.
        config: the decoder's.
        is_elsewhere: as given.
        is_torn: whether the device failed during a replacement, so that weights are mixed: no step may use them.
    """

    def __init__(
        self,
        load: Load,
        folder: ModelFolder | None,
        *,
        is_in_folder: bool,
        on_progress: OnProgress,
        should_stop: Callable[[], bool],
        device: torch.device = CPU,
        operations: Operations = plain_torch,
        is_elsewhere: bool = False,
    ) -> None:
        self._folder = folder
        self._device, self._operations = device, operations
        self.is_elsewhere = is_elsewhere
        self._is_away = False
        self._should_stop = should_stop
        self._came_as_tensors = False
        self.is_torn = False
        decoder = load(device=device, operations=operations, on_progress=on_progress, should_stop=should_stop)
        self.config = decoder.config
        self._shapes, self._ties = decoder.shapes(), decoder.ties()
        self._quantization = decoder.quantization
        self.decoder: Model | None = decoder
        self._load = load
        self._source = folder.path.absolute() if folder is not None and is_in_folder else None
        """The folder from which the weights were last read; None: ``load`` made them."""

    @cached_property
    def staging(self) -> WeightTransfer:
        """Tensors that were staged for `commit`."""
        return WeightTransfer(self._shapes | {name: self._shapes[other] for name, other in self._ties.items()})

    def discard(self) -> None:
        """Discard the weights. Idempotent.

        Raises:
            InvalidRequest: the weights came as tensors, and could not be read again.
        """
        if self._came_as_tensors:
            raise weights_came_as_tensors()
        if self.decoder is not None:
            # Not the operations of the start, if native kernels were compiled since.
            self._operations = self.decoder.operations
        self.decoder = None

    def move_away(self) -> None:
        """Move the weights to the host's memory, page-locked, if they are on another device. Idempotent.

        Raises:
            InvalidRequest: the host has no memory for them; they stay on the device.
        """
        if self.decoder is None or not self.is_elsewhere or self._is_away:
            return
        try:
            self.decoder.move(torch.device("cpu"), is_pinned=self._device.type == "cuda")
        except MemoryError as error:
            raise InvalidRequest(
                f"sleep at level 1 keeps the weights in the host's memory, which has no room: {error}. Free some of "
                "it, or sleep at level 2, which reads them again from where they came",
                param="level",
            ) from error
        self._is_away = True

    def restore(self) -> None:
        """Move the weights back, or read them again, if they were moved or discarded.

        Raises:
            ModelLoadError: the weights cannot be read, are those of another model now, or there is no memory for them;
                nothing has changed.
        """
        if self.decoder is not None:
            if self._is_away:
                try:
                    self.decoder.move(self._device)
                except MemoryError as error:
                    raise ModelLoadError(
                        f"the weights stay in the host's memory, since there is no room: {error}. Free some of the "
                        "device's, and wake up again"
                    ) from error
                self._is_away = False
            return
        self._is_away = False
        self.decoder = self._read(self._source, self._device, self._operations)
        self.is_torn = False

    def update(self, folder: Path) -> None:
        """Take the weights of a folder, now or with `restore`. Needs host memory of the weights' size, temporarily.

        Raises:
            ModelLoadError: as `aioengine.models.loader.load_weights`; the old weights stay.
        """
        source = folder.absolute()
        if self.decoder is None:
            loader_of(self.config).check_weights(source, self.config)
        else:
            # Read and checked in full before the first is replaced: a GPU has no room for both beside its KV cache.
            read = self._read(source, CPU, self.decoder.operations)
            if isinstance(self.decoder, Decoder) and isinstance(read, Decoder):
                check_kept_alike(self.decoder, read)
            self._fill(zip(self.decoder.weights(), read.weights(), strict=True))
        self._source = source
        self._came_as_tensors = self.is_torn = False

    def _read(self, source: Path | None, device: torch.device, operations: Operations) -> Model:
        options: LoadOptions = {"device": device, "operations": operations, "should_stop": self._should_stop}
        if source is None:
            return self._load(**options, on_progress=lambda *_: None)
        made: Model = loader_of(self.config).load_weights(source, self.config, self._quantization, **options)
        return made

    def commit(self, transfer: str) -> None:
        """Replace weights by the staged tensors of a transfer, which is dropped once its tensors have been checked.

        Raises:
            InvalidRequest: as `WeightTransfer.whole`; or the weights are discarded, or two tied tensors differ.
        """
        staged = self.staging.whole(transfer)
        if self.decoder is None:
            raise weights_asleep("commit_weights")
        self._resolve_ties(staged)
        self.staging.drop(transfer)
        changes = self.decoder.changes({name: _tensor(staged.pop(name)) for name in list(staged)})
        self._came_as_tensors = True
        self._fill(changes)

    def _fill(self, changes: Iterable[tuple[Tensor, Tensor]]) -> None:
        """Copy values from the host into weights of the same shape and dtype, without further memory of the device.

        The device must be idle. Only its loss can end this midway.
        """
        try:
            for target, values in changes:
                target.copy_(values)
        except BaseException:
            self.is_torn = True
            raise

    def _resolve_ties(self, staged: dict[str, StagedTensor]) -> None:
        """Remove tied tensors: each replaces the tensor that it is tied to if that is missing, and must equal it."""
        for name, other in self._ties.items():
            if name not in staged:
                continue
            tied, dtype = staged.pop(name), self.config.dtype
            kept = staged.setdefault(other, tied)
            if not torch.equal(_tensor(tied).to(dtype), _tensor(kept).to(dtype)):
                raise InvalidRequest(
                    f"{name} is not {other}, though the model ties them: send one of them, or equal ones",
                    param="transfer",
                )

    def save(self, folder: Path, max_shard_bytes: int) -> list[str]:
        """Save the weights; see `save_checkpoint`.

        Raises:
            InvalidRequest: the weights are discarded, or the model came from no folder with a config and tokenizer.
        """
        if self.decoder is None:
            raise weights_asleep("save_sharded_state")
        if self._folder is None:
            raise InvalidRequest("this model came from no folder, so that there is no config to save with its weights")
        if is_gguf(self._folder.path):
            raise InvalidRequest(f"{self._folder.path} has no files of a tokenizer to save with the model's weights")
        return save_checkpoint(
            self.decoder, self._folder, folder, max_shard_bytes=max_shard_bytes, should_stop=self._should_stop
        )


def _tensor(staged: StagedTensor) -> Tensor:
    return torch.from_numpy(staged.data).view(FILE_DTYPES[staged.dtype]).view(staged.shape)
