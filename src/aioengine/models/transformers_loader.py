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
from aioengine.errors import ConfigError, ModelLoadError
from aioengine.kernels.packed_weight import CodedWeight
from aioengine.models.decoder_config import MAX_SHOWN_CHARS
from aioengine.models.folder import ModelFolder
from aioengine.models.formats.catalogue import read_catalogue
from aioengine.models.formats.stored import Files, Stored
from aioengine.models.loader import DUMMY_RANGE, DUMMY_SEED, HARMLESS, ON_CPU, Placement, stop_if
from aioengine.models.model import AttendToNothing
from aioengine.models.silence import silent_transformers
from aioengine.models.transformers_attention import PAGED
from aioengine.models.transformers_config import (
    TransformersConfig,
    make_on_meta,
    read_transformers_config,
    their_config,
)
from aioengine.models.transformers_model import TransformersModel

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


def load_transformers_weights(
    folder: Path,
    config: TransformersConfig,
    *,
    placement: Placement = ON_CPU,
    should_stop: Callable[[], bool] = lambda: False,
) -> TransformersModel:
    """As `aioengine.models.loader.load_weights`."""
    check_transformers_config(folder, config)
    return _load(config, _stored(folder), placement, None, should_stop)


def check_transformers_config(folder: Path, config: TransformersConfig) -> None:
    """As `aioengine.models.loader.check_config`."""
    if not folder.is_dir():
        raise ModelLoadError(f"there is no folder {folder}")
    if not (folder / "config.json").is_file():
        return
    engine = EngineConfig(
        dtype=str(config.dtype).removeprefix("torch."),  # type: ignore[arg-type]
        max_model_len=config.max_model_len,
        trust_remote_code=config.trust_remote_code,
    )
    try:
        found = read_transformers_config(ModelFolder.read(folder), engine)
    except ConfigError as error:
        raise ModelLoadError(f"{folder / 'config.json'}: {error}") from error
    for field in config.__struct_fields__:
        theirs, ours = getattr(found, field), getattr(config, field)
        if field != "folder" and theirs != ours:
            raise ModelLoadError(
                f"{folder / 'config.json'} describes another model than the one that runs: {field} {theirs!r} instead "
                f"of {ours!r}"
            )


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

    theirs = their_config(config.folder, config.trust_remote_code)
    tensors = make_on_meta(theirs, config.way, config.trust_remote_code, PAGED).state_dict()
    return {
        name: _Tensor(tensor.numel() * config.dtype.itemsize, partial(make, tensor.shape, DUMMY_SEED + index))
        for index, (name, tensor) in enumerate(tensors.items())
    }


class _Reading:
    """Values of tensors as they are asked for, by transformers' own threads.

    Attributes:
        error: what ended it, if something did. transformers may make something else of it.
    """

    def __init__(
        self,
        tensors: dict[str, _Tensor],
        on_progress: Callable[[int, int], None] | None,
        should_stop: Callable[[], bool],
    ) -> None:
        self.error: Exception | None = None
        self._done, self._total = 0, sum(tensor.num_bytes for tensor in tensors.values())
        self._on_progress = on_progress
        self._should_stop = should_stop
        self._lock = Lock()
        self._add(0)

    def read(self, tensor: _Tensor) -> Tensor:
        try:
            stop_if(self._should_stop)
            values = tensor.read()
        except Exception as error:
            self.error = self.error or error
            raise
        self._add(tensor.num_bytes)
        return values

    def _add(self, num_bytes: int) -> None:
        with self._lock:
            self._done += num_bytes
            if self._on_progress is not None:
                self._on_progress(self._done, self._total)


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
    theirs = their_config(config.folder, config.trust_remote_code)
    meta = make_on_meta(theirs, config.way, config.trust_remote_code, PAGED)
    reading = _Reading(tensors, on_progress, should_stop)
    with _building_alone(should_stop), silent_transformers():
        try:
            model, report = type(meta).from_pretrained(
                None,
                config=meta.config,
                state_dict={name: _Lazy(reading, tensor) for name, tensor in tensors.items()},
                dtype=config.dtype,
                attn_implementation=PAGED if config.way == "attention" else None,
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
    report["unexpected_keys"] = [name for name in report["unexpected_keys"] if not _is_zero_bias(name, tensors)]
    for problem, what in (
        ("missing_keys", "lacks"),
        ("unexpected_keys", "has unexpected"),
        ("mismatched_keys", "has another shape for"),
    ):
        if found := sorted(map(str, report[problem])):
            more = f" and {len(found) - 1} more" if len(found) > 1 else ""
            raise ModelLoadError(f"the checkpoint {what} tensor {found[0]}{more}, by what config.json says")
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
    attend = AttendToNothing(model.config, ids)
    model.begin(attend)
    whole = model.model(input_ids=ids[None].long(), use_cache=False).logits[0].float()
    split = model.logits(model(ids, attend))
    if whole.shape != split.shape or (whole - split).abs().max() > SAME * whole.abs().max():
        raise ModelLoadError(
            f"{model.config.architecture}: its code makes logits of more than the hidden states beneath its head"
        )
