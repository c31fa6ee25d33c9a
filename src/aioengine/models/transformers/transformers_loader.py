"""Weights into transformers' code for a model: its own way from a file's names to its modules, our reading of files."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from threading import Lock
from typing import Any, NamedTuple

import torch
from torch import Tensor

from aioengine.config import EngineConfig
from aioengine.errors import ModelLoadError
from aioengine.kernels.packed_weight import CodedWeight, Quantization
from aioengine.models.decoder_config import MAX_SHOWN_CHARS
from aioengine.models.folder import ModelFolder
from aioengine.models.formats.catalogue import read_catalogue
from aioengine.models.formats.stored import Files, Stored
from aioengine.models.loader import (
    DUMMY_RANGE,
    DUMMY_SEED,
    HARMLESS,
    ON_CPU,
    Placement,
    Progress,
    check_no_other,
    check_same_config,
    stop_if,
)
from aioengine.models.model import EmptyStep
from aioengine.models.transformers.paged_interface import PAGED
from aioengine.models.transformers.probe import make_on_meta, read_their_config
from aioengine.models.transformers.quiet import quiet_transformers
from aioengine.models.transformers.transformers_config import TransformersConfig, read_transformers_config
from aioengine.models.transformers.transformers_model import TransformersModel

CHECKED_TOKENS = 4
SAME = 1e-4
"""Of the largest logit, by how much the head may differ from the whole model's: the same products in another shape."""


def load_transformers(
    folder: ModelFolder,
    config: EngineConfig,
    *,
    placement: Placement = ON_CPU,
    on_progress: Callable[[int, int], None] | None = None,
    should_stop: Callable[[], bool] = lambda: False,
) -> TransformersModel:
    """As `aioengine.models.loader.load_decoder`, by transformers' code. Needs the memory of the weights, the host's.

    Raises:
        ModelLoadError, ConfigError, LoadStopped: as there.
    """
    found = read_transformers_config(folder, config)
    tensors = _noise(found) if config.load_format == "dummy" else _stored(folder.path)
    return _load(found, tensors, placement, on_progress, should_stop)


def load_weights(
    folder: Path,
    config: TransformersConfig,
    *,
    quantization: Quantization | None = None,
    placement: Placement = ON_CPU,
    should_stop: Callable[[], bool] = lambda: False,
) -> TransformersModel:
    """As `aioengine.models.loader.load_weights`."""
    check_weights(folder, config)
    return _load(config, _stored(folder), placement, None, should_stop)


def check_weights(folder: Path, config: TransformersConfig) -> None:
    """As `aioengine.models.loader.check_weights`, of config.json alone."""
    if not folder.is_dir():
        raise ModelLoadError(f"there is no folder {folder}")
    if not (folder / "config.json").is_file():
        return
    engine = EngineConfig(
        dtype=str(config.dtype).removeprefix("torch."),  # type: ignore[arg-type]
        max_model_len=config.max_model_len,
        trust_remote_code=config.trust_remote_code,
    )
    model = ModelFolder.read(folder)
    check_same_config(model, config, lambda: read_transformers_config(model, engine), other=("folder",))


class _Tensor(NamedTuple):
    """One of a checkpoint, as transformers takes it: what ``[...]`` gives is its values."""

    num_bytes: int
    read: Callable[[], Tensor]


def _stored(folder: Path) -> dict[str, _Tensor]:
    catalogue = read_catalogue(folder)
    return {
        name: _Tensor(stored.num_bytes, partial(_read, stored))
        for name, stored in catalogue.items()
        if not HARMLESS.search(name)
    }


def _is_zero_bias(name: str, tensors: dict[str, _Tensor]) -> bool:
    """As in `aioengine.models.loader`."""
    return name.endswith(".bias") and name in tensors and not tensors[name].read().any()


def _read(stored: Stored) -> Tensor:
    with Files() as files:
        values = stored.read(files)
        return values.dense() if isinstance(values, CodedWeight) else values.clone()  # a view of the file


def _noise(config: TransformersConfig) -> dict[str, _Tensor]:
    """Values for each tensor of the model, which depend on its name alone."""

    def make(shape: torch.Size, seed: int) -> Tensor:
        if len(shape) < 2:
            return torch.ones(shape, dtype=config.dtype)
        generator = torch.Generator().manual_seed(seed)
        return torch.empty(shape, dtype=config.dtype).uniform_(-DUMMY_RANGE, DUMMY_RANGE, generator=generator)

    theirs = read_their_config(config.folder, config.trust_remote_code)
    tensors = make_on_meta(theirs, config.trust_remote_code, PAGED).state_dict()
    return {
        name: _Tensor(tensor.numel() * config.dtype.itemsize, partial(make, tensor.shape, DUMMY_SEED + index))
        for index, (name, tensor) in enumerate(tensors.items())
    }


class _Reading:
    """Values of tensors as they are asked for, by transformers' own threads.

    Attributes:
        error: the first error, if there was one: transformers may make another error of it.
    """

    def __init__(self, progress: Progress, should_stop: Callable[[], bool]) -> None:
        self.error: Exception | None = None
        self._progress = progress
        self._should_stop = should_stop

    def read(self, tensor: _Tensor) -> Tensor:
        try:
            stop_if(self._should_stop)
            values = tensor.read()
        except Exception as error:
            self.error = self.error or error
            raise
        self._progress.add(tensor.num_bytes)
        return values


class _Lazy:
    """A tensor as transformers asks for one of a safetensors file: ``[...]`` reads it."""

    def __init__(self, reading: _Reading, tensor: _Tensor) -> None:
        self._reading = reading
        self._tensor = tensor

    def __getitem__(self, _: Any) -> Tensor:
        return self._reading.read(self._tensor)


_building = Lock()


@contextmanager
def _building_alone(should_stop: Callable[[], bool]) -> Iterator[None]:
    """While transformers builds a model it changes what is the process's: torch's default dtype, and functions.

    Of two at once the second would take the first one's for what was there before, and leave it so.
    """
    while not _building.acquire(timeout=0.1):
        stop_if(should_stop)
    try:
        yield
    finally:
        _building.release()


def _load(
    config: TransformersConfig,
    tensors: dict[str, _Tensor],
    placement: Placement,
    on_progress: Callable[[int, int], None] | None,
    should_stop: Callable[[], bool],
) -> TransformersModel:
    theirs = read_their_config(config.folder, config.trust_remote_code)
    meta = make_on_meta(theirs, config.trust_remote_code, PAGED)
    num_bytes = sum(tensor.num_bytes for tensor in tensors.values())
    reading = _Reading(Progress(num_bytes, on_progress), should_stop)
    with _building_alone(should_stop), quiet_transformers():
        try:
            model, report = type(meta).from_pretrained(
                None,
                config=meta.config,
                state_dict={name: _Lazy(reading, tensor) for name, tensor in tensors.items()},
                dtype=config.dtype,
                attn_implementation=PAGED,
                output_loading_info=True,
                ignore_mismatched_sizes=True,  # they are in the report
            )
        except Exception as error:
            if reading.error is not None:
                raise reading.error from None
            raise ModelLoadError(
                f"transformers cannot load the weights: {type(error).__name__}: {str(error)[:MAX_SHOWN_CHARS]}"
            ) from error
    if reading.error is not None:
        raise reading.error
    unexpected = [name for name in report["unexpected_keys"] if not _is_zero_bias(name, tensors)]
    check_no_other(
        lacks=sorted(report["missing_keys"]),
        has_unexpected=sorted(unexpected),
        has_another_shape_for=sorted(map(str, report["mismatched_keys"])),
    )
    model.config.pad_token_id = None  # or each step would look for padding
    model.requires_grad_(False)
    made = TransformersModel(config, model)
    if placement.device.type != "cpu":
        made.move(placement.device)
    made.use(placement.operations)
    _check_head(made, placement.device)
    return made


@torch.inference_mode()
def _check_head(model: TransformersModel, device: torch.device) -> None:
    """Compare logits of hidden states with those of the whole model."""
    ids = torch.arange(CHECKED_TOKENS, dtype=torch.int32, device=device) % model.config.vocab_size
    step = EmptyStep(model.config, ids)
    model.begin(step)
    whole = model.model(input_ids=ids[None].long(), use_cache=False).logits[0].float()
    split = model.logits(model(ids, step), step)
    if whole.shape != split.shape or (whole - split).abs().max() > SAME * whole.abs().max():
        raise ModelLoadError(
            f"{model.config.architecture}: its code makes logits of more than the hidden states beneath its head"
        )
