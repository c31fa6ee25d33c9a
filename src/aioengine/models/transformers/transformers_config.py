"""The config of a model that transformers' own code computes: from config.json by transformers, and by a probe.

The probe finds how the code attends, without weights: it runs once on a few tokens of the meta device, which have no
values. The calls of attention that its layers make there are those that they make in every step.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.cache_utils import Cache, DynamicLayer

from aioengine.config import EngineConfig
from aioengine.errors import ConfigError, ModelLoadError
from aioengine.models.checkpoint import FILE_DTYPES
from aioengine.models.decoder_config import DTYPES, MAX_POSITIONS, MAX_SHOWN_CHARS, quiet_transformers
from aioengine.models.folder import ModelFolder
from aioengine.models.formats.catalogue import read_catalogue
from aioengine.models.model import ModelConfig, limit_length
from aioengine.scheduler.cache_layout import attention_specs
from aioengine.validation import shorten

PROBED = "aioengine_probed"
"""The name of an implementation of attention that calls a module's `_Probe`, for which transformers makes masks."""


class Unusable(Exception):
    """The reason why modelling code cannot compute over paged keys and values."""


class LayerShape(NamedTuple):
    """Sizes of the heads that a layer hands to attention.

    Attributes:
        window: how many of the last keys a token sees, itself included; None for all.
    """

    num_heads: int
    num_kv_heads: int
    key_dim: int
    value_dim: int
    window: int | None


def probe_model(folder: Path, config: Any, trust_remote_code: bool, num_positions: int) -> dict[str, Any]:
    """Run a model's code once, without values.

    Args:
        config: transformers' own.
        num_positions: tokens of the longest sequence.
    Returns:
        fields of `TransformersConfig`: sizes, caches, ``attention`` and ``body``.
    Raises:
        Unusable: paged attention cannot replace its own; the message gives the reason.
        ModelLoadError: its code needs a package that is not installed.
    """
    (architecture,), num_layers = config.architectures, config.get_text_config().num_hidden_layers
    probe = _Probe(num_positions)
    try:
        model = make_on_meta(config, trust_remote_code, PROBED)
        for name, module in model.named_modules():
            module.aioengine_layer = probe
            probe.listen(name, module)
        model.config.pad_token_id = None  # or it would look for padding
        cache = _KeysAndValues(layers=[DynamicLayer() for _ in range(num_layers)])
        given = dict.fromkeys({"cache", "past_key_values"} & arguments_of(model), cache)  # the latter up to 5.20
        ids = torch.zeros(1, 3, dtype=torch.long, device="meta")
        with torch.inference_mode():
            logits = model(input_ids=ids, use_cache=True, **given).logits
    except Unusable:
        raise
    except NotImplementedError as error:
        raise Unusable(
            "how it computes depends on the values of its tokens, as where it asks which of them each expert has: that "
            "cannot be found without its weights"
        ) from error
    except ImportError as error:
        missing = f"{error}: pip install {error.name}" if error.name else str(error)
        raise ModelLoadError(f"{folder}: the model's code needs a package that is not installed: {missing}") from error
    except Exception as error:  # of code that is not made for this
        raise Unusable(
            f"the code of {architecture} does not compute attention through transformers' attention interface, behind "
            f"which paged attention stands: {type(error).__name__}: {str(error)[:MAX_SHOWN_CHARS]}"
        ) from error
    layers = list(probe.attention.values())
    if len(layers) != num_layers:
        raise Unusable(
            f"{len(layers)} of the {num_layers} layers of {architecture} compute attention through transformers' "
            "attention interface, behind which paged attention stands; all are needed"
        )
    first = layers[0]
    if any(layer[:-1] != first[:-1] for layer in layers):
        raise Unusable("its layers have heads of several numbers or sizes")
    if first.num_heads % first.num_kv_heads:
        raise Unusable(f"{first.num_heads} query heads cannot share {first.num_kv_heads} of keys and values")
    name_of, head_dim = {module: name for name, module in model.named_modules()}, max(first.key_dim, first.value_dim)
    return {
        "vocab_size": logits.shape[-1],
        "hidden_size": probe.hidden_size,
        "num_layers": num_layers,
        "num_heads": first.num_heads,
        "num_kv_heads": first.num_kv_heads,
        "head_dim": head_dim,
        "caches": attention_specs((layer.window for layer in layers), first.num_kv_heads, head_dim),
        "attention": tuple(name_of[module] for module in probe.attention),
        "body": probe.outer[0],
    }


@quiet_transformers()
def read_their_config(folder: Path, trust_remote_code: bool) -> Any:
    """Read transformers' own config of a model folder, without its quantisation.

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


@quiet_transformers()
def make_on_meta(config: Any, trust_remote_code: bool, attention: str) -> Any:
    """Make transformers' causal language model of a config, with parameters that have no values.

    Args:
        attention: name of the implementation that it calls for attention.
    """
    import transformers

    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(
            config,
            attn_implementation=attention,
            dtype=None,  # any other would be torch's default dtype meanwhile, in all threads
            trust_remote_code=trust_remote_code,
        )
    return model.to(torch.bfloat16).eval()  # which all operations of mixtures of experts know


def arguments_of(module: Any) -> set[str]:
    """The names of the arguments of a module's forward pass."""
    return set(inspect.signature(module.forward).parameters)


class _Mask(NamedTuple):
    """Stands for the mask that a layer would be given.

    Attributes:
        is_seen: of (sequence, head, query position, key position), positions as tensors.
    """

    is_seen: Callable[..., Any]

    def window(self, num_positions: int) -> int | None:
        """The window as in `LayerShape`, of a sequence of so many tokens.

        Raises:
            Unusable: a token sees those behind it, or others than the last ones.
        """
        keys = torch.arange(num_positions)
        windows = set()
        for query in (num_positions - 1, num_positions // 2, 0):
            seen = self.is_seen(0, 0, torch.tensor(query, dtype=torch.long), keys)
            seen = torch.as_tensor(seen, dtype=torch.bool).expand(num_positions)
            if seen[query + 1 :].any():
                raise Unusable("its tokens see those behind them: it is an encoder, which generates no text")
            count = int(seen.sum())
            if not seen[max(0, query + 1 - count) : query + 1].all():
                raise Unusable("a token sees others than the last ones before it")
            if count <= query:
                windows.add(count)
        if len(windows) > 1:
            raise Unusable("how many of the last tokens one sees depends on its position")
        return windows.pop() if windows else None


class _Probe:
    """Listens to a forward pass: to its calls of attention, as the ``aioengine_layer`` of all modules, and of modules.

    The first module that the model calls itself is the body beneath its head. transformers' names for it
    (``base_model_prefix``, `get_decoder`) are not that module in each model.

    Attributes:
        attention: of each module that called its attention, in order.
        outer: names of the modules that the model calls itself, and not by others, in order.
        hidden_size: of the output of the first of them.
    """

    def __init__(self, num_positions: int) -> None:
        self._num_positions = num_positions
        self._depth = 0
        self.attention: dict[nn.Module, LayerShape] = {}
        self.outer: list[str] = []
        self.hidden_size = 0

    def listen(self, name: str, module: Any) -> None:
        """Note when the module is called, and by which."""

        def enter(*_: Any) -> None:
            if self._depth == 1:
                self.outer.append(name)
            self._depth += 1

        module.register_forward_pre_hook(enter)
        module.register_forward_hook(self._leave)

    def _leave(self, module: Any, given: Any, output: Any) -> None:
        self._depth -= 1
        if self._depth == 1 and len(self.outer) == 1:
            self.hidden_size = output[0].shape[-1]

    def attend(self, module: nn.Module, q: Tensor, k: Tensor, v: Tensor, mask: Any, options: dict[str, Any]) -> Tensor:
        """Note a call of attention; tensors as transformers gives them, [1, heads, tokens, size]."""
        if module in self.attention:
            raise Unusable("a layer attends twice in a step")
        if k.shape[2] != q.shape[2]:
            raise Unusable("a layer attends to other tokens than those of the sequence")
        # Options that change its result, and that paged attention does not have.
        for name in ("position_bias", "head_mask", "block_sequence_ids"):
            if options.get(name) is not None:
                raise Unusable(f"its attention takes a {name}")
        if not isinstance(mask, _Mask | None):
            raise Unusable("its attention takes a mask of the model's own")
        window = None if mask is None else mask.window(self._num_positions)
        self.attention[module] = LayerShape(q.shape[1], k.shape[1], k.shape[3], v.shape[3], window)
        return q.new_zeros(1, q.shape[2], q.shape[1], v.shape[3])


class _KeysAndValues(Cache):  # type: ignore[misc]
    """A cache of transformers' whose layers have keys and values, and nothing else."""

    def _refuse(self, *_: Any, **__: Any) -> Any:
        raise Unusable("its layers keep a state that is not keys and values: a convolution's, or a recurrence's")

    get_conv_state = update_conv_state = get_recurrent_state = update_recurrent_state = has_previous_state = _refuse


def _attend_probed(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, *_: Any, **options: Any
) -> tuple[Tensor, None]:
    return module.aioengine_layer.attend(module, query, key, value, attention_mask, options), None


AttentionInterface.register(PROBED, _attend_probed)
AttentionMaskInterface.register(PROBED, lambda mask_function, **_: _Mask(mask_function))


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
    trust = config.trust_remote_code
    try:
        theirs = read_their_config(folder.path, trust)
        text = theirs.get_text_config()
        names = ("max_position_embeddings", "max_seq_len", "seq_length")
        stated = next((getattr(text, name) for name in names if getattr(text, name, None)), None)
        length = stated if stated is not None else max(config.max_model_len or 0, 2048)
        if not (type(length) is int and 2 <= length <= MAX_POSITIONS):
            raise Unusable(f"it states a length of {shorten(length)} tokens; 2 to {MAX_POSITIONS} is needed")
        length = limit_length(length, config.max_model_len)
        _check_rope(text, length)
        if getattr(text, "use_bidirectional_attention", None) in (True, "all"):
            raise Unusable("use_bidirectional_attention makes an encoder of it, which generates no text")
        probed = probe_model(folder.path, read_their_config(folder.path, trust), trust, length)
        return TransformersConfig(
            architecture=folder.config["architectures"][0],
            max_model_len=length,
            dtype=_dtype(theirs, folder, config),
            folder=folder.path,
            trust_remote_code=trust,
            **probed,
        )
    except Unusable as error:
        raise ModelLoadError(
            f"{folder.path / 'config.json'}: transformers' code for it cannot run over a paged KV cache: {error}"
        ) from error


def parameter_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Shapes of a model's parameters without its files: names as transformers has them in memory, a tied one once."""
    assert isinstance(config, TransformersConfig)
    theirs = read_their_config(config.folder, config.trust_remote_code)
    model = make_on_meta(theirs, config.trust_remote_code, PROBED)
    return {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}


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
