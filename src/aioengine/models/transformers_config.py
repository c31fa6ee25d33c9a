"""Whether transformers' own code for an architecture can run here, and in which way: found without its weights.

The code runs once on a few tokens of the meta device, which have no values. What its layers hand to attention there,
or to their cache, is what they will hand to it in every step.
"""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch

from aioengine.config import EngineConfig
from aioengine.errors import ConfigError, ModelLoadError
from aioengine.models.checkpoint import FILE_DTYPES
from aioengine.models.decoder_config import DTYPES, MAX_POSITIONS, MAX_SHOWN_CHARS
from aioengine.models.folder import ModelFolder
from aioengine.models.formats.catalogue import read_catalogue
from aioengine.models.model import ModelConfig
from aioengine.models.silence import silent_transformers
from aioengine.models.transformers_attention import (
    PROBED,
    LayersCache,
    LayerShape,
    Probe,
    ProbedCacheLayer,
    SeesLater,
    Unusable,
)
from aioengine.validation import shorten

Way = Literal["attention", "cache"]
"""As in `aioengine.models.transformers_attention`."""

WAYS: dict[Way, str] = {
    "attention": "its attention is ours, behind transformers' interface",
    "cache": "its own attention runs over our KV cache, since it does not go through transformers' interface",
}

PROBED_TOKENS = 3
LENGTH_NAMES = ("max_position_embeddings", "max_seq_len", "seq_length")
DEFAULT_LENGTH = 2048
"""Of models whose config states none, which those with ALiBi need not."""

CACHE_NAMES = ("cache", "past_key_values")
"""What a model's code calls the cache that it is given: now, and up to transformers 5.20."""


class TransformersConfig(ModelConfig, frozen=True, kw_only=True):
    """Of a model that transformers' code, or that of its folder, computes.

    Attributes:
        body: name of the module beneath the head, which makes hidden states of token ids.
        folder: with its config.json, and its code if that is not in transformers.
        way: in which it attends.
        attention: names of the modules that do, in order; none in the way of the cache.
        trust_remote_code: whether code of the folder may run.
    """

    folder: Path
    way: Way
    body: str
    attention: tuple[str, ...]
    trust_remote_code: bool


def read_transformers_config(folder: ModelFolder, config: EngineConfig) -> TransformersConfig:
    """The model that a folder's config.json describes, by transformers.

    Raises:
        ModelLoadError: it cannot run here; says why, and what to do.
        ConfigError: ``config.max_model_len`` is more than the model allows, or ``config.quantization`` is asked for.
    """
    if config.quantization is not None:
        raise ConfigError(
            f"quantization={config.quantization!r} needs a native model, and this one runs by transformers' code: "
            "leave it out"
        )
    try:
        return _read(folder, config)
    except Unusable as error:
        raise ModelLoadError(f"{folder.path / 'config.json'}: {error}") from error


def _read(folder: ModelFolder, config: EngineConfig) -> TransformersConfig:
    theirs = their_config(folder.path, config.trust_remote_code)
    text = theirs.get_text_config()
    max_model_len = _length(text, config.max_model_len)
    _check_rope(text, max_model_len)
    if getattr(text, "use_bidirectional_attention", None) in (True, "all"):
        raise Unusable("use_bidirectional_attention makes an encoder of it, which generates no text")
    problems: dict[Way, str] = {}
    for way in WAYS:
        try:
            found = _probe(folder.path, config.trust_remote_code, way, max_model_len)
        except SeesLater:
            raise
        except Unusable as error:
            problems[way] = str(error)
            continue
        first = found.layers[0]
        return TransformersConfig(
            architecture=folder.config["architectures"][0],
            vocab_size=found.vocab_size,
            hidden_size=found.hidden_size,
            num_layers=len(found.layers),
            num_heads=first.num_heads or first.num_kv_heads,
            num_kv_heads=first.num_kv_heads,
            head_dim=max(first.key_dim, first.value_dim),
            max_model_len=max_model_len,
            dtype=_dtype(theirs, folder, config),
            windows=tuple(layer.window for layer in found.layers),
            folder=folder.path,
            way=way,
            body=found.body,
            attention=found.attention,
            trust_remote_code=config.trust_remote_code,
        )
    raise Unusable(
        f"transformers' code for it cannot run over a paged KV cache: {problems['cache']}"
        + (
            f" (by transformers' attention interface: {problems['attention']})"
            if len(set(problems.values())) > 1
            else ""
        )
    )


@silent_transformers()
def their_config(folder: Path, trust_remote_code: bool) -> Any:
    """transformers' own config of a model folder, made anew, without its quantisation.

    Raises:
        Unusable: there is none, or no causal language model for it, or it is one with an encoder.
    """
    import transformers
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

    try:
        config = transformers.AutoConfig.from_pretrained(
            folder, local_files_only=True, trust_remote_code=trust_remote_code
        )
    except Exception as error:  # whatever its validation, or the folder's code, raises
        raise Unusable(f"transformers does not understand it: {str(error)[:MAX_SHOWN_CHARS]}") from error
    if config.is_encoder_decoder:
        raise Unusable(f"{config.model_type} has an encoder and a decoder; only decoders run here")
    has_code = "AutoModelForCausalLM" in (getattr(config, "auto_map", None) or {})
    if not (trust_remote_code and has_code) and type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise Unusable(f"transformers has no causal language model for {config.model_type}")
    # The files' values are read as what they stand for.
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    return config


@silent_transformers()
def make_on_meta(config: Any, way: Way, trust_remote_code: bool, attention: str) -> Any:
    """transformers' causal language model of a config, with parameters that have no values.

    Args:
        attention: what it calls for attention, in the way that goes through the interface.
    """
    import transformers

    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(
            config,
            attn_implementation=attention if way == "attention" else None,
            dtype=None,  # any other would be torch's default dtype meanwhile, in all threads
            trust_remote_code=trust_remote_code,
        )
    return model.to(torch.bfloat16).eval()  # which all operations of mixtures of experts know


def parameter_shapes(config: TransformersConfig) -> dict[str, tuple[int, ...]]:
    """Of a model without its files: names as transformers has them in memory, a tied one once."""
    theirs = their_config(config.folder, config.trust_remote_code)
    model = make_on_meta(theirs, config.way, config.trust_remote_code, PROBED)
    return {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}


def arguments_of(module: Any) -> set[str]:
    """What a module's forward pass takes by name."""
    return set(inspect.signature(module.forward).parameters)


class _Found(NamedTuple):
    """What a probe found; fields as in `TransformersConfig`."""

    layers: list[LayerShape]
    body: str
    attention: tuple[str, ...]
    hidden_size: int
    vocab_size: int


def _probe(folder: Path, trust_remote_code: bool, way: Way, num_positions: int) -> _Found:
    config = their_config(folder, trust_remote_code)
    probe = Probe(num_positions)
    num_layers = config.get_text_config().num_hidden_layers
    calls = _Calls()
    try:
        model = make_on_meta(config, way, trust_remote_code, PROBED)
        for name, module in model.named_modules():
            module.aioengine_layer = probe
            calls.listen(name, module)
        model.config.pad_token_id = None  # or it would look for padding
        cache = LayersCache([ProbedCacheLayer(probe, index) for index in range(num_layers)])
        given = dict.fromkeys(arguments_of(model).intersection(CACHE_NAMES), cache)
        ids = torch.zeros(1, PROBED_TOKENS, dtype=torch.long, device="meta")
        with torch.inference_mode():
            logits = model(input_ids=ids, use_cache=True, **given).logits
    except Unusable:
        raise
    except NotImplementedError as error:
        raise Unusable(
            "how it computes depends on the values of its tokens, as where it asks which of them each expert has: that "
            "cannot be found without its weights"
        ) from error
    except ImportError as error:  # of both ways, so that the other is not tried
        missing = f"{error}: pip install {error.name}" if error.name else str(error)
        raise ModelLoadError(f"{folder}: the model's code needs a package that is not installed: {missing}") from error
    except Exception as error:  # of code that is not made for this
        raise Unusable(f"it fails: {type(error).__name__}: {str(error)[:MAX_SHOWN_CHARS]}") from error
    layers = list(probe.attention.values()) if way == "attention" else [probe.cache[at] for at in sorted(probe.cache)]
    _check_layers(layers, num_layers, way)
    name_of = {module: name for name, module in model.named_modules()}
    attention = tuple(name_of[module] for module in probe.attention) if way == "attention" else ()
    return _Found(layers, calls.outer[0], attention, calls.hidden_size, logits.shape[-1])


class _Calls:
    """Listens to which modules a model calls itself, and not by others.

    Attributes:
        outer: their names, in order.
        hidden_size: of what the first of them gave.
    """

    def __init__(self) -> None:
        self._depth = 0
        self.outer: list[str] = []
        self.hidden_size = 0

    def listen(self, name: str, module: Any) -> None:
        module.register_forward_pre_hook(lambda *_: self._enter(name))
        module.register_forward_hook(self._leave)

    def _enter(self, name: str) -> None:
        if self._depth == 1:
            self.outer.append(name)
        self._depth += 1

    def _leave(self, module: Any, given: Any, output: Any) -> None:
        self._depth -= 1
        if self._depth == 1 and len(self.outer) == 1:
            self.hidden_size = output[0].shape[-1]


def _check_layers(layers: list[LayerShape], num_layers: int, way: Way) -> None:
    if len(layers) != num_layers:
        does = "call their attention" if way == "attention" else "have keys and values of their own"
        raise Unusable(f"{len(layers)} of its {num_layers} layers {does}; all are needed")
    shapes = {layer[:-1] for layer in layers}
    if len(shapes) > 1:
        raise Unusable("its layers have heads of several numbers or sizes")
    if layers[0].num_heads is not None and layers[0].num_heads % layers[0].num_kv_heads:
        raise Unusable(f"{layers[0].num_heads} query heads cannot share {layers[0].num_kv_heads} of keys and values")


def _length(text: Any, max_model_len: int | None) -> int:
    stated = next((getattr(text, name) for name in LENGTH_NAMES if getattr(text, name, None)), None)
    length = stated if stated is not None else max(max_model_len or 0, DEFAULT_LENGTH)
    if not (type(length) is int and 2 <= length <= MAX_POSITIONS):
        raise Unusable(f"it states a length of {shorten(length)} tokens; 2 to {MAX_POSITIONS} is needed")
    if max_model_len is not None and max_model_len > length:
        raise ConfigError(f"max_model_len={max_model_len} is more than the {length} tokens that this model allows")
    return max_model_len or length


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
