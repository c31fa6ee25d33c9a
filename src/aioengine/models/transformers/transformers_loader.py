"""Weights into transformers' code for a model: its own way from a file's names to its modules, our reading of files."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from threading import Lock
from typing import Any, Unpack

import torch
from torch import Tensor

from aioengine.config import EngineConfig
from aioengine.errors import ModelLoadError
from aioengine.kernels.packed_weight import CodedWeight, Quantization
from aioengine.models.decoder_config import MAX_SHOWN_CHARS, quiet_transformers
from aioengine.models.folder import ModelFolder
from aioengine.models.formats.catalogue import read_catalogue
from aioengine.models.formats.stored import Files, FileTensor, Stored
from aioengine.models.loader import (
    DUMMY_RANGE,
    DUMMY_SEED,
    HARMLESS,
    Load,
    LoadOptions,
    check_no_other,
    check_same_config,
    is_zero_bias,
)
from aioengine.models.model import EmptyStep
from aioengine.models.transformers.transformers_config import (
    TransformersConfig,
    make_on_meta,
    read_their_config,
    read_transformers_config,
)
from aioengine.models.transformers.transformers_model import PAGED, TransformersModel


def load_transformers(folder: ModelFolder, config: EngineConfig, **options: Unpack[LoadOptions]) -> TransformersModel:
    """See `aioengine.models.loader.load_decoder`, by transformers' code. Needs the memory of the weights, the host's.

    Raises:
        ModelLoadError, ConfigError, LoadStopped: as there.
    """
    found = read_transformers_config(folder, config)
    stored = _noise(found) if config.load_format == "dummy" else read_catalogue(folder.path)
    return _load(found, stored, Load(**options))


def load_weights(
    folder: Path, config: TransformersConfig, quantization: Quantization | None = None, **options: Unpack[LoadOptions]
) -> TransformersModel:
    """See `aioengine.models.loader.load_weights`."""
    check_weights(folder, config)
    return _load(config, read_catalogue(folder), Load(**options))


def check_weights(folder: Path, config: TransformersConfig) -> None:
    """See `aioengine.models.loader.check_weights`, of config.json alone."""
    engine = EngineConfig(
        dtype=str(config.dtype).removeprefix("torch."),  # type: ignore[arg-type]
        max_model_len=config.max_model_len,
        trust_remote_code=config.trust_remote_code,
    )
    check_same_config(folder, config, partial(read_transformers_config, config=engine), other=("folder",))


def _noise(config: TransformersConfig) -> dict[str, Stored]:
    """Values for each tensor of the model, which depend on its number alone."""

    def make(shape: torch.Size, seed: int, _: Files) -> Tensor:
        if len(shape) < 2:
            return torch.ones(shape, dtype=config.dtype)
        generator = torch.Generator().manual_seed(seed)
        return torch.empty(shape, dtype=config.dtype).uniform_(-DUMMY_RANGE, DUMMY_RANGE, generator=generator)

    theirs, size = read_their_config(config.folder, config.trust_remote_code), config.dtype.itemsize
    tensors = make_on_meta(theirs, config.trust_remote_code, PAGED).state_dict()
    return {
        name: FileTensor(
            name, config.folder, "", tensor.shape, tensor.numel() * size, partial(make, tensor.shape, DUMMY_SEED + seed)
        )
        for seed, (name, tensor) in enumerate(tensors.items())
    }


class _Lazy:
    """A tensor as transformers' threads ask for one of a safetensors file: ``[...]`` reads it.

    Args:
        errors: gets the error of a reading that fails: transformers may make another of it.
    """

    def __init__(self, stored: Stored, load: Load, errors: list[Exception]) -> None:
        self._stored, self._load, self._errors = stored, load, errors

    def __getitem__(self, _: Any) -> Tensor:
        try:
            self._load.stop_if_asked()
            with Files() as files:
                values = self._stored.read(files)
                dense = values.dense() if isinstance(values, CodedWeight) else values.clone()  # a view of the file
        except Exception as error:
            self._errors.append(error)
            raise
        self._load.add(self._stored.num_bytes)
        return dense


_building = Lock()


@contextmanager
def _building_alone(load: Load) -> Iterator[None]:
    """While transformers builds a model it changes what is the process's: torch's default dtype, and functions.

    Of two at once the second would take the first one's for what was there before, and leave it so.
    """
    while not _building.acquire(timeout=0.1):
        load.stop_if_asked()
    try:
        yield
    finally:
        _building.release()


def _load(config: TransformersConfig, catalogue: dict[str, Stored], load: Load) -> TransformersModel:
    stored = {name: each for name, each in catalogue.items() if not HARMLESS.search(name)}
    meta = make_on_meta(read_their_config(config.folder, config.trust_remote_code), config.trust_remote_code, PAGED)
    load.begin(sum(each.num_bytes for each in stored.values()))
    errors: list[Exception] = []
    with _building_alone(load), quiet_transformers():
        try:
            model, report = type(meta).from_pretrained(
                None,
                config=meta.config,
                state_dict={name: _Lazy(each, load, errors) for name, each in stored.items()},
                dtype=config.dtype,
                attn_implementation=PAGED,
                output_loading_info=True,
                ignore_mismatched_sizes=True,  # they are in the report
            )
        except Exception as error:
            if errors:
                raise errors[0] from None
            raise ModelLoadError(
                f"transformers cannot load the weights: {type(error).__name__}: {str(error)[:MAX_SHOWN_CHARS]}"
            ) from error
    if errors:
        raise errors[0]
    unexpected = [name for name in report["unexpected_keys"] if name not in stored or not is_zero_bias(stored[name])]
    check_no_other(
        lacks=sorted(report["missing_keys"]),
        has_unexpected=sorted(unexpected),
        has_another_shape_for=sorted(map(str, report["mismatched_keys"])),
    )
    model.config.pad_token_id = None  # or each step would look for padding
    model.requires_grad_(False)
    made = TransformersModel(config, model)
    if load.device.type != "cpu":
        made.move(load.device)
    made.use(load.operations)
    _check_head(made, load.device)
    return made


@torch.inference_mode()
def _check_head(model: TransformersModel, device: torch.device) -> None:
    """Compare logits of hidden states with those of the whole model."""
    ids = torch.arange(4, dtype=torch.int32, device=device) % model.config.vocab_size
    step = EmptyStep(model.config, ids)
    model.begin(step)
    whole = model.model(input_ids=ids[None].long(), use_cache=False).logits[0].float()
    split = model.logits(model(ids, step), step)
    # Other shapes round otherwise.
    if whole.shape != split.shape or (whole - split).abs().max() > 1e-4 * whole.abs().max():
        raise ModelLoadError(
            f"{model.config.architecture}: its code makes logits of more than the hidden states beneath its head"
        )
