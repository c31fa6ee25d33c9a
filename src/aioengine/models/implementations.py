"""The two implementations of models: our decoder, and transformers' own code; which of them a model takes."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Literal, Unpack

import msgspec

from aioengine.config import EngineConfig
from aioengine.errors import ModelLoadError
from aioengine.models import loader
from aioengine.models.decoder_config import DecoderConfig, lacking
from aioengine.models.families import ARCHITECTURES, native_architecture
from aioengine.models.folder import ModelFolder, is_gguf
from aioengine.models.loader import LoadOptions
from aioengine.models.model import Model, ModelConfig
from aioengine.validation import shorten

logger = logging.getLogger("aioengine")


WITHOUT_TEXT = {
    r"Classification|RewardModel|QuestionAnswering|MultipleChoice|NextSentencePrediction": "it classifies",
    r"MaskedLM|ForPreTraining": "it is an encoder that fills in what is masked",
    r"Detection|Segmentation|DepthEstimation|(CLIP|Siglip|Siglip2|ViT|Dinov2)Model": "it sees images",
    r"(?<!LMHead)(?<!Decoder)Model": "it is a model without a head, which gives embeddings",
}
"""Endings of the names of architectures whose models generate no text, though their config may have one that does."""


class PathChoice(msgspec.Struct, frozen=True):
    """The implementation that a model takes, and why."""

    path: Literal["native", "transformers"]
    why: str


def choose_path(folder: ModelFolder, config: EngineConfig) -> PathChoice:
    """Choose by config.json and ``config.model_path``, without weights; "auto": native if the decoder lacks nothing.

    Raises:
        ModelLoadError: there is no such path for this architecture, it generates no text, or it needs code that may
            not run.
    """
    native, architecture = native_architecture(folder.config), _architecture(folder)
    has_code = "AutoModelForCausalLM" in (folder.config.get("auto_map") or ())
    for ending, what in WITHOUT_TEXT.items():
        if re.search(rf"({ending})$", architecture) and not has_code:
            raise ModelLoadError(
                f"{folder.source_of('config.json')}: architecture {architecture}: {what}, and generates no text"
            )
    if (folder.path / "config_sentence_transformers.json").is_file():
        raise ModelLoadError(f"{folder.path} is a model of sentence-transformers, which gives embeddings and no text")
    is_native = native is not None
    if config.model_path == "native" and not is_native:
        raise ModelLoadError(
            f"model_path='native', and {architecture} has no native path; those are {', '.join(ARCHITECTURES)}. With "
            "'auto' it runs by transformers' code"
        )
    lacks = lacking(folder) if is_native and config.model_path == "auto" and not is_gguf(folder.path) else None
    if is_native and config.model_path != "transformers" and lacks is None:
        return PathChoice("native", f"{native} is a family of the native decoder")
    if folder.path.is_file():
        raise ModelLoadError(f"{folder.path}: {architecture} has no native path, by which alone GGUF files run")
    if lacks is not None:
        why = f"the native decoder lacks what its config.json describes: {lacks}"
    else:
        why = "model_path is set to it" if is_native else f"{architecture} has no native path"
    _check_code(folder, config.trust_remote_code)
    return PathChoice("transformers", why)


def _architecture(folder: ModelFolder) -> str:
    names, model_type = folder.config.get("architectures"), folder.config.get("model_type")
    if isinstance(names, list) and len(names) == 1 and isinstance(names[0], str):
        return names[0][:100]
    hint = "; this is a part of a pipeline of diffusers, which makes images" if "_class_name" in folder.config else ""
    known = next((name for name, family in ARCHITECTURES.items() if family.model_type == model_type), None)
    if known is not None:
        hint = f', as "architectures": ["{known}"] for its model_type'
    raise ModelLoadError(
        f"{folder.source_of('config.json')}: architectures={shorten(names)}; a list of one is needed{hint}"
    )


def _check_code(folder: ModelFolder, trust_remote_code: bool) -> None:
    """Refuse code that may not run, and code that is not in the folder, whose revision is the one that was pinned."""
    modules = folder.config.get("auto_map")
    if not isinstance(modules, dict):
        return
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

    where = folder.path / "config.json"
    if not trust_remote_code and folder.config.get("model_type") not in CONFIG_MAPPING_NAMES:
        raise ModelLoadError(
            f"{where}: this model needs code of its own ({shorten(modules)}), which runs with all that this process "
            "may do. Read it, pin a revision of it, and set trust_remote_code=True"
        )
    elsewhere = [name for name in modules.values() if "--" in str(name)]
    if trust_remote_code and elsewhere:
        raise ModelLoadError(
            f"{where}: its code is in another repository, at no revision that is pinned ({shorten(elsewhere)}): put it "
            "into the model's folder, and its name without what is before -- into auto_map"
        )


def load_model(folder: ModelFolder, config: EngineConfig, **options: Unpack[LoadOptions]) -> Model:
    """Load a model by the implementation that `choose_path` gives; as `aioengine.models.loader.load_decoder`.

    Raises:
        ModelLoadError, ConfigError, LoadStopped: as there, and as `choose_path`.
    """
    choice = choose_path(folder, config)
    load: Callable[..., Model] = loader.load_decoder
    if choice.path == "transformers":
        from aioengine.models.transformers.transformers_loader import load_transformers as load
    with _naming_path(choice):
        model = load(folder, config, **options)
    if choice.path == "transformers":
        logger.info("transformers' code computes this model, since %s", choice.why)
    return model


def read_model_config(folder: ModelFolder, config: EngineConfig) -> ModelConfig:
    """The config of the model that `load_model` makes.

    Raises:
        ModelLoadError, ConfigError: as there.
    """
    choice = choose_path(folder, config)
    if choice.path == "native":
        return loader.read_config(folder, config)
    from aioengine.models.transformers.transformers_config import read_transformers_config

    with _naming_path(choice):
        return read_transformers_config(folder, config)


@contextmanager
def _naming_path(choice: PathChoice) -> Iterator[None]:
    """Add to an error on transformers' path why that path was taken."""
    try:
        yield
    except ModelLoadError as error:
        if choice.path == "native":
            raise
        raise ModelLoadError(f"{error}. It goes by transformers' code, since {choice.why}") from error


def loader_of(config: ModelConfig) -> Any:
    """The module that loads weights for models of a config: `load_weights` and `check_weights`."""
    if isinstance(config, DecoderConfig):
        return loader
    from aioengine.models.transformers import transformers_loader

    return transformers_loader
