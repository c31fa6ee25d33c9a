"""The shape of a decoder, read from config.json by the table of families: sizes, windows, rotations, experts.

transformers takes a second to import, so config.json is read here wherever what `transformers.AutoConfig` would make of
it is known. All else goes through AutoConfig.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from threading import Lock
from typing import Any

import msgspec
import torch
from torch import Tensor

from aioengine.errors import ConfigError, ModelLoadError
from aioengine.kernels.operations import Activation
from aioengine.models.families import ARCHITECTURES, ExpertFields, Family, QkNorm, native_architecture, text_config
from aioengine.models.folder import MAX_LABELS, ModelFolder, is_gguf
from aioengine.models.model import ModelConfig, limit_length
from aioengine.scheduler.cache_layout import attention_specs
from aioengine.validation import shorten

RopeParameters = dict[str, Any]


class Rope(msgspec.Struct, frozen=True):
    """A rotation of queries and keys by their positions (Su et al., 2021, arXiv:2104.09864).

    Attributes:
        inv_freq: [head_dim / 2], radians a position, float32 values; at 0 a pair of numbers stays as it is.
        scale: cos and sin of the pairs that turn are multiplied by this (1 but for yarn and longrope).
    """

    inv_freq: tuple[float, ...]
    scale: float = 1.0


def read_rope(parameters: RopeParameters, head_dim: int, positions: int, longest: int) -> Rope:
    """Read the rotation that a config's ``rope_parameters`` describe.

    Args:
        parameters: with a ``rope_type`` of `ROPE_TYPES` and ``rope_theta``; ``partial_rotary_factor``: how much of a
            head turns.
        positions: the config's ``max_position_embeddings``.
        longest: tokens of the longest sequence that there may be.
    Raises:
        ValueError, TypeError, KeyError: they give no frequencies.
    """
    rotary_dim = rotated_size(parameters, head_dim)
    periods = parameters["rope_theta"] ** (torch.arange(0, rotary_dim, 2, dtype=torch.float32) / rotary_dim)
    inv_freq, scale = ROPE_TYPES[parameters["rope_type"]](parameters, periods, positions, longest)
    values, scale = tuple(inv_freq.tolist()), float(scale)
    if len(values) != rotary_dim // 2:
        raise ValueError(f"they give {len(values)} frequencies, not {rotary_dim // 2}")
    if not all(0 < value < math.inf for value in [*values, scale]):
        raise ValueError(f"not all frequencies are between 0 and infinity; rope_theta={parameters['rope_theta']}")
    return Rope(values + (0.0,) * ((head_dim - rotary_dim) // 2), scale)


def rotated_size(parameters: RopeParameters, head_dim: int) -> int:
    """How many of a head's numbers turn.

    Raises:
        ValueError: it is no even number of 2 to ``head_dim``.
    """
    size = int(head_dim * parameters.get("partial_rotary_factor", 1.0))
    if size % 2 or not 2 <= size <= head_dim:
        raise ValueError(f"partial_rotary_factor makes {size} of {head_dim} numbers of a head turn")
    return size


def head_order(head_dim: int, rotary_dim: int, *, is_interleaved: bool) -> tuple[int, ...] | None:
    """Where a checkpoint has each number of a head, for pairs that turn to lie half a head apart, as ours do.

    In a checkpoint the first ``rotary_dim`` turn: neighbours together where it is interleaved, else those that are half
    of ``rotary_dim`` apart. The product of query and key is the same in any order.

    Returns:
        [head_dim]; None: as it is.
    """
    half = rotary_dim // 2
    first = [*range(0, rotary_dim, 2)] if is_interleaved else [*range(half)]
    second = [index + (1 if is_interleaved else half) for index in first]
    middle = (rotary_dim + head_dim) // 2
    order = (*first, *range(rotary_dim, middle), *second, *range(middle, head_dim))
    return None if order == tuple(range(head_dim)) else order


def _llama3_rope(parameters: RopeParameters, periods: Tensor, *_: int) -> tuple[Tensor, float]:
    """Llama 3.1's: slow rotations become ``factor`` times slower, fast ones stay, and a ramp lies between them."""
    inv_freq = 1.0 / periods
    factor, low, high = parameters["factor"], parameters["low_freq_factor"], parameters["high_freq_factor"]
    length = parameters["original_max_position_embeddings"]
    wavelengths = 2 * math.pi / inv_freq
    is_slow, is_fast = wavelengths > length / low, wavelengths < length / high
    ramp = (length / wavelengths - low) / (high - low)
    between = (1 - ramp) * inv_freq / factor + ramp * inv_freq
    return torch.where(is_slow, inv_freq / factor, torch.where(is_fast, inv_freq, between)), 1.0


def _yarn_rope(rope: RopeParameters, periods: Tensor, positions: int, _: int) -> tuple[Tensor, float]:
    """YaRN's (Peng et al., 2023, arXiv:2309.00071): as Llama 3.1's, with the ramp over dims; cos and sin are scaled."""
    rotary_dim, factor, length = 2 * len(periods), rope["factor"], rope["original_max_position_embeddings"]
    if factor is None:
        factor = positions / length

    def magnitude(weight: float) -> float:
        return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0

    def dim_that_turns(times: float) -> float:
        return rotary_dim * math.log(length / (times * 2 * math.pi)) / (2 * math.log(rope["rope_theta"]))

    scale, mscale, mscale_all = rope.get("attention_factor"), rope.get("mscale"), rope.get("mscale_all_dim")
    if scale is None:
        scale = magnitude(mscale) / magnitude(mscale_all) if mscale and mscale_all else magnitude(1.0)
    low, high = dim_that_turns(rope.get("beta_fast") or 32), dim_that_turns(rope.get("beta_slow") or 1)
    if rope.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rotary_dim - 1)
    ramp = (torch.arange(len(periods), dtype=torch.float32) - low) / ((high - low) or 0.001)
    kept = 1 - ramp.clamp(0, 1)
    return 1.0 / (factor * periods) * (1 - kept) + 1.0 / periods * kept, scale


def _longrope(rope: RopeParameters, periods: Tensor, positions: int, longest: int) -> tuple[Tensor, float]:
    """LongRoPE's (Ding et al., 2024, arXiv:2402.13753): a factor for each frequency, of two lists.

    Which list is by the longest sequence that there may be, for all sequences, so that keys that are cached stay right:
    the short one up to the length that the model was first trained for.
    """
    length, scale = rope["original_max_position_embeddings"], rope.get("attention_factor")
    factors = rope["long_factor" if longest > length else "short_factor"]
    stretch = rope.get("factor") or positions / length
    if scale is None:
        scale = math.sqrt(1 + math.log(stretch) / math.log(length)) if stretch > 1 else 1.0
    return 1.0 / (torch.tensor(factors, dtype=torch.float32) * periods), scale


ROPE_TYPES: dict[str, Callable[[RopeParameters, Tensor, int, int], tuple[Tensor, float]]] = {
    "default": lambda _, periods, *__: (1.0 / periods, 1.0),
    # Positions ``factor`` times closer (Chen et al., 2023, arXiv:2306.15595).
    "linear": lambda rope, periods, *_: (1.0 / periods / rope["factor"], 1.0),
    "llama3": _llama3_rope,
    "longrope": _longrope,
    "yarn": _yarn_rope,
}
"""Functions of the parameters, the plain rotation's periods / 2π [pairs that turn], in positions, and the lengths of
`read_rope`; they give the frequencies, in radians a position, and the factor on cos and sin."""


_lock = Lock()
_num_quiet = 0
_before: tuple[bool, int] = (True, 0)
"""Progress bars and the log's level as the first of several blocks found them; the last one restores them."""


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """Run a block without transformers' progress bars, which have a thread, and without its log; also a decorator.

    For calls whose outcome is checked here. Of a config transformers warns with advice for its author, and whatever
    does not fit raises, or fails our own checks. Of loaded weights it reports what the loader makes errors of. It holds
    for all threads, until the last of several blocks has ended.
    """
    global _num_quiet, _before
    from transformers.utils import logging

    with _lock:
        if not _num_quiet:
            _before = logging.is_progress_bar_enabled(), logging.get_verbosity()
            logging.disable_progress_bar()
            logging.set_verbosity(logging.CRITICAL)
        _num_quiet += 1
    try:
        yield
    finally:
        with _lock:
            _num_quiet -= 1
            if not _num_quiet:
                had_bars, verbosity = _before
                logging.set_verbosity(verbosity)
                if had_bars:
                    logging.enable_progress_bar()


MAX_POSITIONS = 2**24
"""Beyond any model; a config that states more is damaged, and its table of rotations would fill the memory."""

NUMBERS = {
    "vocab_size": (1, 2**24),
    "hidden_size": (1, 2**20),
    "intermediate_size": (1, 2**24),
    "num_hidden_layers": (1, 4096),
    "num_attention_heads": (1, 2**16),
    "num_key_value_heads": (1, 2**16),
    "head_dim": (2, 2**16),
    "max_position_embeddings": (2, MAX_POSITIONS),
    "sliding_window": (1, math.inf),
    "max_window_layers": (0, 4096),
    "num_labels": (0, MAX_LABELS),
}
"""config.json's integers: the least and the most of each, far beyond any model. Lists of some of these lengths are
made; all are held against the shapes of the tensors before memory is asked for. A window may be wider than any
sequence, and is none then."""

MAX_SHOWN_CHARS = 500
"""Characters of transformers' errors that are shown: some hold all of a config."""

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
ACTIVATIONS: dict[str, Activation] = {"silu": "silu", "swish": "silu", "gelu_pytorch_tanh": "gelu_tanh"}
LAYER_TYPES = ("full_attention", "sliding_attention")

UNREAD_FIELDS = frozenset(
    {"auto_map", "configuration_files", "original_max_position_embeddings", "partial_rotary_factor", "per_layer_config"}
)
"""With one of these in config.json transformers reads another file or changes what it read; the file is left to it."""


class ConfigFields(msgspec.Struct, frozen=True):
    """The fields of config.json that describe the decoder, as in transformers' configs, absent ones filled in.

    A config.json that lacks a field without a default here is read by transformers.

    Attributes:
        rope_parameters: with ``rope_type``, ``rope_theta`` and ``original_max_position_embeddings``.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    max_position_embeddings: int
    rope_parameters: dict[str, Any]
    num_key_value_heads: int | None = None
    head_dim: int | None = None
    hidden_act: str = "silu"
    rms_norm_eps: float = 1e-6
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    qkv_bias: bool = False
    mlp_bias: bool = False
    use_sliding_window: bool = False
    sliding_window: int | None = 4096
    max_window_layers: int = 28
    layer_types: list[str] | None = None
    num_experts: int | None = None
    num_local_experts: int | None = None
    num_experts_per_tok: int | None = None
    moe_intermediate_size: int | None = None
    shared_expert_intermediate_size: int | None = None
    norm_topk_prob: bool = False
    decoder_sparse_step: int = 1
    mlp_only_layers: list[int] | None = None
    clip_qkv: float | None = None
    swiglu_alpha: float = 1.702
    swiglu_limit: float = 7.0
    dtype: str | None = None
    # Only of families that read them, see `Family.reads`; neutral where they are absent.
    attention_out_bias: bool = False
    hidden_activation: str | None = None
    query_pre_attn_scalar: float | None = None
    attention_multiplier: float | None = None
    attn_logit_softcapping: float | None = None
    final_logit_softcapping: float | None = None
    embedding_multiplier: float = 1.0
    residual_multiplier: float = 1.0
    logits_scaling: float = 1.0
    no_rope_layers: list[int] | None = None
    use_bidirectional_attention: bool | None = None


FACTORS = (
    "query_pre_attn_scalar",
    "attention_multiplier",
    "attn_logit_softcapping",
    "final_logit_softcapping",
    "embedding_multiplier",
    "residual_multiplier",
    "logits_scaling",
)
OF_SOME_FAMILIES = {*FACTORS, "hidden_activation", "no_rope_layers", "use_bidirectional_attention"}
"""Fields that are read of the families whose `Family.reads` has them; their values in other configs are ignored."""

MAY_BE_NULL = {field.name for field in msgspec.structs.fields(ConfigFields) if isinstance(field.default, int)}
"""Flags and numbers that transformers leaves null in a config of a family that does not read them."""


class ExpertsConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The gated MLPs that take the place of a layer's only one.

    Attributes:
        layers: for each layer whether it has experts; the others have a plain MLP.
        count: experts of a layer. num_chosen: experts of a token.
        intermediate_size: of each expert.
        is_normalised: whether the weights of a token's experts sum to 1.
        shared_size: intermediate size of the expert of all tokens, which a sigmoid weighs; 0: there is none.
        bias: whether experts and router have biases.
        activation: as in `Operations.gated_activation`.
    """

    layers: tuple[bool, ...]
    count: int
    num_chosen: int
    intermediate_size: int
    is_normalised: bool
    shared_size: int = 0
    bias: bool = False
    activation: Activation = "silu"


class DecoderConfig(ModelConfig, frozen=True, kw_only=True):
    """All that the decoder has to know of its shape.

    Attributes:
        ropes: for each layer how it rotates; equal ones share a table. None: not at all.
        head_order: where a checkpoint has each number of a query's and a key's head; None: as here.
        attention_scale, soft_cap: of the scores.
        embedding_scale: embeddings are multiplied by it.
        residual_scale: what a block gives is multiplied by it before it is added to the residual stream.
        logits_scale, logits_soft_cap: as factor and soft cap of `Operations.scale`.
    """

    intermediate_size: int
    rms_norm_eps: float
    qkv_bias: bool
    output_bias: bool
    mlp_bias: bool
    qk_norm: QkNorm | None
    tie_word_embeddings: bool
    ropes: tuple[Rope | None, ...]
    attention_scale: float
    experts: ExpertsConfig | None = None
    head_order: tuple[int, ...] | None = None
    activation: Activation = "silu"
    soft_cap: float | None = None
    embedding_scale: float = 1.0
    residual_scale: float = 1.0
    logits_scale: float = 1.0
    logits_soft_cap: float | None = None

    @property
    def family(self) -> Family:
        return ARCHITECTURES[self.architecture]


def read_decoder_config(folder: ModelFolder, *, dtype: str = "auto", max_model_len: int | None = None) -> DecoderConfig:
    """The decoder that a model folder's config.json describes.

    Args:
        dtype: a name in `DTYPES`, or "auto" for the one that config.json states, else float32.
        max_model_len: the engine's limit; None for the model's.
    Raises:
        ModelLoadError: config.json is no good, or describes what is not supported; the message names what is.
        ConfigError: ``max_model_len`` is more than the model allows.
    """
    try:
        return _read(folder, dtype, max_model_len)
    except _BadConfig as error:
        raise ModelLoadError(f"{folder.source_of('config.json')}: {error}") from error


class _BadConfig(Exception):
    """A config.json is wrong, or describes something that is not supported."""


class _Lacking(_BadConfig):
    """A feature that config.json describes, and that the decoder has not."""


def lacking(folder: ModelFolder) -> str | None:
    """The feature of a config.json of these families that the decoder lacks; None: none, or the file is no good."""
    try:
        _read(folder, "auto", None)
    except _Lacking as error:
        return str(error)
    except (_BadConfig, ConfigError):
        pass
    return None


def _read(folder: ModelFolder, dtype: str, max_model_len: int | None) -> DecoderConfig:
    architecture = _check_architecture(folder.config)
    family = ARCHITECTURES[architecture]
    config = text_config(folder.config)
    if config.get("use_sliding_window") is False and config.get("sliding_window") == 0:
        config = config | {"sliding_window": None}  # as Qwen2-MoE is saved, which has no window then
    _check_numbers(config.get)
    _check_texts(config)
    known = known_fields(config, family) if folder.config["architectures"] == [architecture] else None
    fields = known or _fields_by_transformers(folder, config, family)
    _check_numbers(lambda name: getattr(fields, name, None))
    _check_features(family, fields)
    num_heads, num_kv_heads = fields.num_attention_heads, fields.num_key_value_heads or fields.num_attention_heads
    head_dim = fields.head_dim or fields.hidden_size // num_heads
    if num_heads % num_kv_heads:
        raise _BadConfig(f"num_attention_heads={num_heads} is not a multiple of num_key_value_heads={num_kv_heads}")
    if head_dim % 2 or not head_dim:
        raise _BadConfig(f"head_dim={head_dim} is odd or none; the rotation needs pairs")
    try:
        model_len = _model_len(fields)
        if not 2 <= model_len <= MAX_POSITIONS:
            raise _BadConfig(
                f"max_position_embeddings and rope_parameters make sequences {shorten(model_len)} tokens long; "
                f"2 to {MAX_POSITIONS} is needed"
            )
        model_len = limit_length(model_len, max_model_len)
        ropes, order = _rotations(family, fields, head_dim, model_len)
    except (_BadConfig, ConfigError):
        raise
    except KeyError as error:
        raise _BadConfig(f"rope_parameters {shorten(fields.rope_parameters)} lack {error}") from error
    except Exception as error:  # of values that are no numbers
        raise _BadConfig(f"rope_parameters {shorten(fields.rope_parameters)} cannot be used: {error!r}") from error
    if dtype == "auto":
        dtype = fields.dtype or "float32"
    if dtype not in DTYPES:
        raise _BadConfig(f"dtype {shorten(dtype)} is not supported; set dtype to one of {', '.join(DTYPES)}")
    scale = fields.attention_multiplier
    return DecoderConfig(
        architecture=architecture,
        vocab_size=fields.vocab_size,
        hidden_size=fields.hidden_size,
        intermediate_size=fields.intermediate_size,
        num_layers=fields.num_hidden_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        max_model_len=model_len,
        dtype=DTYPES[dtype],
        rms_norm_eps=fields.rms_norm_eps,
        qkv_bias=_flag(family.qkv_bias, fields),
        output_bias=_flag(family.output_bias, fields),
        mlp_bias=_flag(family.mlp_bias, fields),
        qk_norm=family.qk_norm,
        tie_word_embeddings=fields.tie_word_embeddings,
        caches=attention_specs(_windows(family, fields), num_kv_heads, head_dim),
        ropes=ropes,
        head_order=order,
        attention_scale=(fields.query_pre_attn_scalar or head_dim) ** -0.5 if scale is None else scale,
        activation=ACTIVATIONS[fields.hidden_activation or fields.hidden_act],
        soft_cap=fields.attn_logit_softcapping,
        embedding_scale=fields.hidden_size**0.5 if family.scales_embeddings else fields.embedding_multiplier,
        residual_scale=fields.residual_multiplier,
        logits_scale=1 / fields.logits_scaling,
        logits_soft_cap=fields.final_logit_softcapping,
        experts=_experts(family.experts, fields),
    )


NUM_EXPERTS = ("num_experts", "num_local_experts")
"""Two names of one field; nothing under one does not override the other."""


def known_fields(config: dict[str, Any], family: Family) -> ConfigFields | None:
    """Read a config.json as `transformers.AutoConfig` would.

    A test holds the two against each other.

    Returns:
        None where AutoConfig must read it: it is of another model type, has one of `UNREAD_FIELDS`, has windows and
        does not list their layers, or a field is missing or malformed.
    """
    rope = config.get("rope_scaling") or config.get("rope_parameters")
    if rope is None:
        rope = {}
    if (
        not family.is_read_here
        or config.get("model_type") != family.model_type
        or not UNREAD_FIELDS.isdisjoint(config)
        or any(config.get(name, default) is None is not default for name, default in family.defaults.items())
        or any(name in config and not config[name] for name in NUM_EXPERTS)
        or not isinstance(rope, dict)
    ):
        return None
    rope = {
        "rope_type": rope.get("type", "default"),
        "rope_theta": config.get("rope_theta", family.defaults.get("rope_theta", 10000.0)),
        "original_max_position_embeddings": config.get("max_position_embeddings"),
        **rope,
    }
    dtype = config["dtype"] if config.get("dtype") is not None else config.get("torch_dtype")
    read = {name: value for name, value in config.items() if name not in OF_SOME_FAMILIES - family.reads}
    try:
        fields = msgspec.convert(
            {**family.defaults, **read, "rope_parameters": rope, "dtype": dtype}, type=ConfigFields
        )
    except msgspec.ValidationError:
        return None
    layer_types, num_layers = fields.layer_types, fields.num_hidden_layers
    if layer_types is None:
        if family.windows == "layer_types" and fields.use_sliding_window:
            return None  # each family has a rule of its own for which layers have a window
        layer_types = ["full_attention"] * num_layers
    if (
        (family.windows != "layer_types" and "layer_types" in config)
        or len(layer_types) != num_layers
        or not set(layer_types) <= set(LAYER_TYPES)
        or fields.hidden_size % fields.num_attention_heads
        or dtype not in (None, *DTYPES)
    ):
        return None
    has_window = fields.use_sliding_window or family.windows == "all layers"
    window = fields.sliding_window if has_window else None
    return msgspec.structs.replace(fields, layer_types=layer_types, sliding_window=window)


@quiet_transformers()
def _fields_by_transformers(folder: ModelFolder, stated: dict[str, Any], family: Family) -> ConfigFields:
    """
    Args:
        stated: config.json, or its part about the text.
    """
    import transformers

    try:
        if is_gguf(folder.path):
            config = transformers.CONFIG_MAPPING[folder.config["model_type"]].from_dict(folder.config)
        else:
            config = transformers.AutoConfig.from_pretrained(
                folder.path, local_files_only=True, trust_remote_code=False
            )
        fields = config.get_text_config(decoder=True).to_dict()
        # A wrapper states for its text part whether the head is tied, and may state its dtype.
        stated = {"dtype": stated.get("torch_dtype"), **stated}
        fields |= {name: stated[name] for name in ("dtype", "tie_word_embeddings") if stated.get(name) is not None}
        absent = OF_SOME_FAMILIES - family.reads | {name for name in MAY_BE_NULL if fields.get(name) is None}
        given = {name: value for name, value in fields.items() if name not in absent}
        return msgspec.convert({**given, "sliding_window": given.get("sliding_window") or None}, type=ConfigFields)
    # Its validation raises whatever it likes: ValueError, KeyError, TypeError, errors of its own.
    except Exception as error:
        raise _BadConfig(f"transformers does not understand it: {str(error)[:MAX_SHOWN_CHARS]}") from error


def _check_numbers(get: Callable[[str], Any]) -> None:
    """Refuse an integer of the config that is none, or of another size than any model's; absent ones are fine."""
    for name, (least, most) in NUMBERS.items():
        value = get(name)
        if value is not None and not (type(value) is int and least <= value <= most):
            bounds = f"{least} to {most}" if most < math.inf else f"an integer from {least} on"
            raise _BadConfig(f"{name}={shorten(value)}; {bounds} is needed")
    eps = get("rms_norm_eps")
    if eps is not None and not (isinstance(eps, float) and 0 <= eps < 1):
        raise _BadConfig(f"rms_norm_eps={shorten(eps)}; a float from 0 to 1 is needed")


def _check_texts(config: dict[str, Any]) -> None:
    """Refuse texts in config.json that transformers' own errors would not name."""
    for name in ("rope_scaling", "rope_parameters"):
        if isinstance(config.get(name), str) and config[name]:
            raise _BadConfig(f"{name}={shorten(config[name])}; an object is needed")
    for name in ("dtype", "torch_dtype"):
        value = config.get(name)
        if isinstance(value, str) and value and not hasattr(torch, value.removeprefix("torch.")):
            raise _BadConfig(f"{name}={shorten(value)} is no dtype; supported: {', '.join(DTYPES)}")
    pattern = config.get("sliding_window_pattern")
    if isinstance(pattern, str) and config.get("layer_types") is None:
        raise _BadConfig(f"sliding_window_pattern={shorten(pattern)} is not read: give layer_types, one for each layer")


def _check_architecture(config: dict[str, Any]) -> str:
    names, architecture = config.get("architectures"), native_architecture(config)
    supported = ", ".join(ARCHITECTURES)
    if not isinstance(names, list) or len(names) != 1:
        raise _BadConfig(f"architectures={shorten(names)}; a list of one is needed, of {supported}")
    if architecture is None:
        text = config.get("text_config")
        of_text = f" of text_config {str(text.get('model_type'))[:100]}" if isinstance(text, dict) else ""
        raise _BadConfig(f"architecture {str(names[0])[:100]}{of_text} is not supported; supported: {supported}")
    return architecture


def _check_features(family: Family, fields: ConfigFields) -> None:
    activation = fields.hidden_activation or fields.hidden_act
    if activation not in ACTIVATIONS:
        raise _not_supported(f"activation {shorten(activation)}", ACTIVATIONS)
    for name in FACTORS:
        value = getattr(fields, name)
        if value is not None and not 0 < value < math.inf:
            raise _BadConfig(f"{name}={value}; a number above 0 is needed")
    if family.experts is not None and fields.clip_qkv is not None:
        raise _Lacking(f"clip_qkv={fields.clip_qkv} is not supported; null is")
    if (fields.swiglu_alpha, fields.swiglu_limit) != (1.702, 7.0):
        raise _Lacking(
            f"swiglu_alpha={fields.swiglu_alpha}, swiglu_limit={fields.swiglu_limit}; 1.702 and 7 are needed"
        )
    if fields.use_bidirectional_attention:
        raise _BadConfig("use_bidirectional_attention makes an encoder of it, which generates no text")
    ropes = _ropes_by_type(fields)
    if "" not in ropes and not (family.has_ropes_by_type and all(isinstance(rope, dict) for rope in ropes.values())):
        raise _Lacking(f"rope_parameters by layer type are not supported here: {shorten(fields.rope_parameters)}")
    for rope in ropes.values():
        if str(rope.get("rope_type")) not in ROPE_TYPES:
            raise _not_supported(f"rope type {shorten(rope.get('rope_type'))}", ROPE_TYPES)


def _not_supported(what: str, supported: Iterable[str]) -> _Lacking:
    return _Lacking(f"{what} is not supported; supported: {', '.join(supported)}")


def _flag(value: bool | str, fields: ConfigFields) -> bool:
    return bool(getattr(fields, value)) if isinstance(value, str) else value


def _ropes_by_type(fields: ConfigFields) -> dict[str, RopeParameters]:
    """The parameters of each layer type; of all types under "" where they are the same."""
    rope = fields.rope_parameters
    return rope if any(isinstance(value, dict) for value in rope.values()) else {"": rope}


def _model_len(fields: ConfigFields) -> int:
    """The most tokens that the model is made for.

    With yarn, ``max_position_embeddings`` is often left at the length before stretching, as its authors ask users to
    add the scaling to config.json and nothing else. With ``llama_4_scaling_beta`` queries beyond the length before
    stretching are made longer by their position, which is not done here: up to there it makes no difference.
    """
    lengths = [fields.max_position_embeddings]
    for rope in _ropes_by_type(fields).values():
        if rope.get("llama_4_scaling_beta"):
            return int(rope["original_max_position_embeddings"])
        if rope["rope_type"] == "yarn" and rope.get("factor"):
            lengths.append(int(rope["original_max_position_embeddings"] * rope["factor"]))
    return max(lengths)


def _rotations(
    family: Family, fields: ConfigFields, head_dim: int, model_len: int
) -> tuple[tuple[Rope | None, ...], tuple[int, ...] | None]:
    """How each layer rotates, and in which order a checkpoint has the numbers of a head."""
    num_layers, by_type, positions = fields.num_hidden_layers, _ropes_by_type(fields), fields.max_position_embeddings
    ropes = {name: read_rope(parameters, head_dim, positions, model_len) for name, parameters in by_type.items()}
    for parameters in by_type.values():
        factor = parameters.get("partial_rotary_factor", 1.0)
        if factor != 1.0 and not family.rotates_part:
            raise _Lacking(f"partial_rotary_factor={factor} is not supported for this architecture; 1 is")
    sizes = {rotated_size(parameters, head_dim) for parameters in by_type.values()}
    if len(sizes) > 1:
        raise _Lacking(f"{sizes} numbers of a head turn, by layer type; they must be as many in all layers")
    layer_types = [""] * num_layers if "" in ropes else _layer_types(fields)
    rotates = [True] * num_layers
    if family.rotates == "no_rope_layers" and fields.no_rope_layers is not None:
        rotates = [bool(value) for value in fields.no_rope_layers[:num_layers]]
    elif family.rotates.startswith("layers with a window") and fields.sliding_window is not None:
        rotates = [layer_type == "sliding_attention" for layer_type in _layer_types(fields)]
    of_layers = (ropes[name] if turns else None for name, turns in zip(layer_types, rotates, strict=True))
    return tuple(of_layers), head_order(head_dim, sizes.pop(), is_interleaved=family.is_interleaved)


def _experts(names: ExpertFields | None, fields: ConfigFields) -> ExpertsConfig | None:
    if names is None:
        return None
    step, sizes = 1, dict[str, Any]()
    sizes["num_experts"] = count = fields.num_experts or fields.num_local_experts
    sizes["num_experts_per_tok"] = num_chosen = fields.num_experts_per_tok
    sizes[names.intermediate_size] = getattr(fields, names.intermediate_size)
    if names.has_shared:
        sizes["shared_expert_intermediate_size"] = fields.shared_expert_intermediate_size
    if names.has_plain_layers:
        sizes["decoder_sparse_step"] = step = fields.decoder_sparse_step
    for name, value in sizes.items():
        if not isinstance(value, int) or not 0 < value < 2**24:
            raise _BadConfig(f"its experts: {name}={value!r}; a size is needed")
    assert count is not None
    assert num_chosen is not None
    if num_chosen > count or count > 2**16:
        raise _BadConfig(f"its experts: {num_chosen} of {count!r} experts cannot be chosen")
    plain = (names.has_plain_layers and fields.mlp_only_layers) or ()
    return ExpertsConfig(
        layers=tuple(index not in plain and (index + 1) % step == 0 for index in range(fields.num_hidden_layers)),
        count=count,
        num_chosen=num_chosen,
        intermediate_size=sizes[names.intermediate_size],
        is_normalised=_flag(names.is_normalised, fields),
        shared_size=sizes.get("shared_expert_intermediate_size", 0),
        bias=names.bias,
        activation=names.activation,
    )


def _windows(family: Family, fields: ConfigFields) -> tuple[int | None, ...]:
    window, num_layers = fields.sliding_window, fields.num_hidden_layers
    is_off = "use_sliding_window" in family.reads and not fields.use_sliding_window
    if family.windows == "none" or window is None or is_off:
        return (None,) * num_layers
    if family.windows in ("all layers", "all layers if used"):
        return (window,) * num_layers
    return tuple(window if layer_type == "sliding_attention" else None for layer_type in _layer_types(fields))


def _layer_types(fields: ConfigFields) -> list[str]:
    num_layers, layer_types = fields.num_hidden_layers, fields.layer_types
    if layer_types is None or len(layer_types) != num_layers:
        raise _BadConfig(f"layer_types={shorten(layer_types)}; one for each of {num_layers} is needed")
    for layer_type in layer_types:
        if layer_type not in LAYER_TYPES:
            raise _not_supported(f"layer type {shorten(layer_type)}", LAYER_TYPES)
    return layer_types
