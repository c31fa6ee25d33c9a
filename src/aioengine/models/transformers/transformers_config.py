"""The config of a model that transformers' own code computes: from config.json by transformers, and by a probe."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from aioengine.config import EngineConfig
from aioengine.errors import ConfigError, ModelLoadError
from aioengine.models.checkpoint import FILE_DTYPES
from aioengine.models.decoder_config import DTYPES, MAX_POSITIONS
from aioengine.models.folder import ModelFolder
from aioengine.models.formats.catalogue import read_catalogue
from aioengine.models.model import ModelConfig, limit_length
from aioengine.models.transformers.probe import PROBED, Unusable, make_on_meta, probe_model, read_their_config
from aioengine.validation import shorten

LENGTH_NAMES = ("max_position_embeddings", "max_seq_len", "seq_length")
DEFAULT_LENGTH = 2048
"""The length of models whose config states none."""


class TransformersConfig(ModelConfig, frozen=True, kw_only=True):
    """Config of a model that transformers' code, or that of its folder, computes.

    Attributes:
        folder: with its config.json, and its code if that is not in transformers.
        body: name of the module beneath the head, which makes hidden states of token ids.
        attention: names of the modules that attend, in order.
        trust_remote_code: whether code of the folder may run.
    """

    folder: Path
    body: str
    attention: tuple[str, ...]
    trust_remote_code: bool


def read_transformers_config(folder: ModelFolder, config: EngineConfig) -> TransformersConfig:
    """The model that a folder's config.json describes, by transformers.

    Raises:
        ModelLoadError: it cannot run here; the message gives the reason.
        ConfigError: ``config.max_model_len`` is more than the model allows, or ``config.quantization`` is set.
    """
    if config.quantization is not None:
        raise ConfigError(
            f"quantization={config.quantization!r} needs a native model, and this one runs by transformers' code: "
            "leave it out"
        )
    try:
        return _read(folder, config)
    except Unusable as error:
        raise ModelLoadError(
            f"{folder.path / 'config.json'}: transformers' code for it cannot run over a paged KV cache: {error}"
        ) from error


def _read(folder: ModelFolder, config: EngineConfig) -> TransformersConfig:
    theirs = read_their_config(folder.path, config.trust_remote_code)
    text = theirs.get_text_config()
    max_model_len = _length(text, config.max_model_len)
    _check_rope(text, max_model_len)
    if getattr(text, "use_bidirectional_attention", None) in (True, "all"):
        raise Unusable("use_bidirectional_attention makes an encoder of it, which generates no text")
    probed = probe_model(folder.path, config.trust_remote_code, max_model_len)
    return TransformersConfig(
        architecture=folder.config["architectures"][0],
        max_model_len=max_model_len,
        dtype=_dtype(theirs, folder, config),
        folder=folder.path,
        trust_remote_code=config.trust_remote_code,
        **probed._asdict(),
    )


def parameter_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Shapes of a model's parameters without its files: names as transformers has them in memory, a tied one once."""
    assert isinstance(config, TransformersConfig)
    theirs = read_their_config(config.folder, config.trust_remote_code)
    model = make_on_meta(theirs, config.trust_remote_code, PROBED)
    return {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}


def _length(text: Any, max_model_len: int | None) -> int:
    stated = next((getattr(text, name) for name in LENGTH_NAMES if getattr(text, name, None)), None)
    length = stated if stated is not None else max(max_model_len or 0, DEFAULT_LENGTH)
    if not (type(length) is int and 2 <= length <= MAX_POSITIONS):
        raise Unusable(f"it states a length of {shorten(length)} tokens; 2 to {MAX_POSITIONS} is needed")
    return limit_length(length, max_model_len)


def _check_rope(text: Any, max_model_len: int) -> None:
    """Refuse rotations that depend on how long a sequence has become: those of its first keys would change with it."""
    rope = getattr(text, "rope_parameters", None) or {}
    for part in [rope, *(value for value in rope.values() if isinstance(value, dict))]:
        kind, original = part.get("rope_type"), part.get("original_max_position_embeddings")
        if kind == "dynamic":
            raise Unusable("its rotations change with the length of the sequence (rope_type dynamic)")
        if kind == "longrope" and original and max_model_len > original:
            raise Unusable(
                f"beyond {original} tokens its rotations change with the length of the sequence (rope_type longrope): "
                f"set max_model_len to {original} at most"
            )


def _dtype(theirs: Any, folder: ModelFolder, config: EngineConfig) -> torch.dtype:
    if config.dtype != "auto":
        return DTYPES[config.dtype]
    stated = theirs.dtype or theirs.get_text_config().dtype
    if stated is None and config.load_format != "dummy":
        kinds = (FILE_DTYPES.get(stored.format) for stored in read_catalogue(folder.path).values())
        stated = next(filter(None, kinds), None)
    dtype = stated or torch.float32
    if dtype not in DTYPES.values():
        raise Unusable(f"dtype {dtype} is not supported; set dtype to one of {', '.join(DTYPES)}")
    return dtype
