"""The shape of a decoder, read from config.json: one table says how the families differ.

transformers takes a second to import, so config.json is read here wherever what `transformers.AutoConfig` would make of
it is known. All else goes through AutoConfig.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Literal

import msgspec
import torch
from torch import Tensor

from aioengine.errors import ConfigError, ModelLoadError
from aioengine.models.experts import ExpertFields, ExpertsConfig
from aioengine.models.folder import ModelFolder
from aioengine.models.model import ModelConfig
from aioengine.validation import shorten

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
    "sliding_window": (1, 2**31),
    "max_window_layers": (0, 4096),
    "num_labels": (0, 2**16),
}
"""config.json's integers: the least and the most of each, far beyond any model. Lists of some of these lengths are
made; all are held against the shapes of the tensors before memory is asked for."""

MAX_SHOWN_CHARS = 500
"""Of what transformers says of a config: some errors hold all of it."""

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
ACTIVATIONS = ("silu", "swish")
LAYER_TYPES = ("full_attention", "sliding_attention")
DEFAULT_ROPE_THETA = 10000.0

UNREAD_FIELDS = frozenset(
    {"auto_map", "configuration_files", "original_max_position_embeddings", "partial_rotary_factor", "per_layer_config"}
)
"""With one of these in config.json transformers reads another file or changes what it read; the file is left to it."""


class ConfigFields(msgspec.Struct, frozen=True):
    """What of config.json describes the decoder, named and typed as in transformers' configs, absent fields filled in.

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
    dtype: str | None = None


MAY_BE_NULL = {field.name for field in msgspec.structs.fields(ConfigFields) if isinstance(field.default, int)}
"""Flags and numbers that transformers leaves null in a config of a family that does not read them."""


class Family(msgspec.Struct, frozen=True, kw_only=True):
    """In what an architecture differs from the plain decoder. A string is the config's field that says it.

    Attributes:
        model_type: transformers' name of its config.
        defaults: of absent fields, where they differ from those of `ConfigFields`.
        qkv_bias, output_bias: of the attention's projections.
        mlp_bias: of the MLP's.
        qk_norm: whether each head's query and key are normalised before the rotation.
        windows: which layers attend to the last ``sliding_window`` tokens only.
        experts: how its config describes a mixture of experts; None: each layer has a plain MLP.
    """

    model_type: str
    defaults: dict[str, Any] = {}
    qkv_bias: bool | str = False
    output_bias: bool | str = False
    mlp_bias: bool | str = False
    qk_norm: bool = False
    windows: Literal["none", "all layers", "all layers if used", "layer_types"] = "none"
    experts: ExpertFields | None = None


ARCHITECTURES = {
    "LlamaForCausalLM": Family(
        model_type="llama", qkv_bias="attention_bias", output_bias="attention_bias", mlp_bias="mlp_bias"
    ),
    "MistralForCausalLM": Family(model_type="mistral", defaults={"num_key_value_heads": 8}, windows="all layers"),
    "Qwen2ForCausalLM": Family(
        model_type="qwen2", defaults={"num_key_value_heads": 32}, qkv_bias=True, windows="layer_types"
    ),
    "Qwen3ForCausalLM": Family(
        model_type="qwen3",
        defaults={"num_key_value_heads": 32, "head_dim": 128},
        qkv_bias="attention_bias",
        output_bias="attention_bias",
        qk_norm=True,
        windows="layer_types",
    ),
    "MixtralForCausalLM": Family(
        model_type="mixtral",
        defaults={
            "num_key_value_heads": 8,
            "rms_norm_eps": 1e-5,
            "rope_theta": 1e6,
            "sliding_window": None,
            "num_local_experts": 8,
            "num_experts_per_tok": 2,
        },
        windows="all layers",
        experts=ExpertFields(),
    ),
    "Qwen2MoeForCausalLM": Family(
        model_type="qwen2_moe",
        defaults={
            "num_key_value_heads": 16,
            "num_experts": 60,
            "num_experts_per_tok": 4,
            "moe_intermediate_size": 1408,
            "shared_expert_intermediate_size": 5632,
            "qkv_bias": True,
        },
        qkv_bias="qkv_bias",
        windows="layer_types",
        experts=ExpertFields(
            intermediate_size="moe_intermediate_size",
            is_normalised="norm_topk_prob",
            has_shared=True,
            has_plain_layers=True,
        ),
    ),
    "Qwen3MoeForCausalLM": Family(
        model_type="qwen3_moe",
        defaults={
            "num_key_value_heads": 4,
            "num_local_experts": 128,
            "num_experts_per_tok": 8,
            "moe_intermediate_size": 768,
        },
        qkv_bias="attention_bias",
        output_bias="attention_bias",
        qk_norm=True,
        windows="all layers if used",
        experts=ExpertFields(
            intermediate_size="moe_intermediate_size", is_normalised="norm_topk_prob", has_plain_layers=True
        ),
    ),
}


class Rope(msgspec.Struct, frozen=True):
    """A rotation of queries and keys by their positions (Su et al., 2021, arXiv:2104.09864).

    Attributes:
        inv_freq: [head_dim / 2], radians a position, float32 values; at 0 a pair of numbers stays as it is.
        scale: cos and sin of the pairs that turn are multiplied by this (1 but for yarn and longrope).
    """

    inv_freq: tuple[float, ...]
    scale: float = 1.0


class DecoderConfig(ModelConfig, frozen=True, kw_only=True):
    """All that the decoder has to know of its shape.

    Attributes:
        ropes: for each layer how it rotates; equal ones share a table.
    """

    intermediate_size: int
    rms_norm_eps: float
    qkv_bias: bool
    output_bias: bool
    mlp_bias: bool
    qk_norm: bool
    tie_word_embeddings: bool
    ropes: tuple[Rope, ...]
    experts: ExpertsConfig | None = None


def read_decoder_config(folder: ModelFolder, *, dtype: str = "auto", max_model_len: int | None = None) -> DecoderConfig:
    """The decoder that a model folder's config.json describes.

    Args:
        dtype: a name in `DTYPES`, or "auto" for the one that config.json states, else float32.
        max_model_len: the engine's limit; None for the model's.
    Raises:
        ModelLoadError: config.json is no good, or describes what is not supported; it says what is.
        ConfigError: ``max_model_len`` is more than the model allows.
    """
    try:
        return _read(folder, dtype, max_model_len)
    except _BadConfig as error:
        raise ModelLoadError(f"{folder.source_of('config.json')}: {error}") from error


class _BadConfig(Exception):
    """What is wrong with a config.json, or not supported."""


def _read(folder: ModelFolder, dtype: str, max_model_len: int | None) -> DecoderConfig:
    architecture = _check_architecture(folder.config)
    family = ARCHITECTURES[architecture]
    config = folder.config
    if config.get("use_sliding_window") is False and config.get("sliding_window") == 0:
        config = config | {"sliding_window": None}  # as Qwen2-MoE is saved, which has no window then
    _check_numbers(config.get)
    fields = known_fields(config, family) or _fields_by_transformers(folder.path)
    _check_numbers(lambda name: getattr(fields, name, None))
    _check_features(fields)
    num_heads, num_kv_heads = fields.num_attention_heads, fields.num_key_value_heads or fields.num_attention_heads
    head_dim = fields.head_dim or fields.hidden_size // num_heads
    if num_heads % num_kv_heads:
        raise _BadConfig(f"num_attention_heads={num_heads} is not a multiple of num_key_value_heads={num_kv_heads}")
    if head_dim % 2 or not head_dim:
        raise _BadConfig(f"head_dim={head_dim} is odd or none; the rotation needs pairs")
    try:
        rope = _rope(fields, head_dim)
        model_len = _model_len(fields)
    except Exception as error:  # of values that are absent or no numbers
        raise _BadConfig(f"rope_parameters {shorten(fields.rope_parameters)} cannot be used: {error!r}") from error
    return DecoderConfig(
        architecture=architecture,
        vocab_size=fields.vocab_size,
        hidden_size=fields.hidden_size,
        intermediate_size=fields.intermediate_size,
        num_layers=fields.num_hidden_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        max_model_len=_limit(model_len, max_model_len),
        dtype=_dtype(fields, dtype),
        rms_norm_eps=fields.rms_norm_eps,
        qkv_bias=_flag(family.qkv_bias, fields),
        output_bias=_flag(family.output_bias, fields),
        mlp_bias=_flag(family.mlp_bias, fields),
        qk_norm=family.qk_norm,
        tie_word_embeddings=fields.tie_word_embeddings,
        windows=_windows(family, fields),
        ropes=(rope,) * fields.num_hidden_layers,
        experts=_experts(family, fields),
    )


def known_fields(config: dict[str, Any], family: Family) -> ConfigFields | None:
    """Read a config.json as `transformers.AutoConfig` would.

    A test holds the two against each other.

    Returns:
        None where AutoConfig must read it: it is of another model type, has one of `UNREAD_FIELDS`, or a field is
        missing or malformed.
    """
    rope = config.get("rope_scaling") or config.get("rope_parameters")
    if rope is None:
        rope = {}
    if (
        config.get("model_type") != family.model_type
        or not UNREAD_FIELDS.isdisjoint(config)
        or any(config.get(name, default) is None is not default for name, default in family.defaults.items())
        or not isinstance(rope, dict)
    ):
        return None
    rope = {
        "rope_type": rope.get("type", "default"),
        "rope_theta": config.get("rope_theta", family.defaults.get("rope_theta", DEFAULT_ROPE_THETA)),
        "original_max_position_embeddings": config.get("max_position_embeddings"),
        **rope,
    }
    dtype = config["dtype"] if config.get("dtype") is not None else config.get("torch_dtype")
    try:
        fields = msgspec.convert(
            {**family.defaults, **config, "rope_parameters": rope, "dtype": dtype}, type=ConfigFields
        )
    except msgspec.ValidationError:
        return None
    layer_types, num_layers = fields.layer_types, fields.num_hidden_layers
    if layer_types is None:
        num_full = fields.max_window_layers
        layer_types = [LAYER_TYPES[index >= num_full] for index in range(num_layers)]
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


def _fields_by_transformers(folder: Path) -> ConfigFields:
    import transformers

    try:
        config = transformers.AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        given = {
            name: value for name, value in config.to_dict().items() if value is not None or name not in MAY_BE_NULL
        }
        return msgspec.convert({**given, "sliding_window": given.get("sliding_window") or None}, type=ConfigFields)
    # Its validation raises whatever it likes: ValueError, KeyError, TypeError, errors of its own.
    except Exception as error:
        raise _BadConfig(f"transformers does not understand it: {str(error)[:MAX_SHOWN_CHARS]}") from error


def _check_numbers(get: Callable[[str], Any]) -> None:
    """Refuse an integer of the config that is none, or of another size than any model's; absent ones are fine."""
    for name, (least, most) in NUMBERS.items():
        value = get(name)
        if value is not None and not (type(value) is int and least <= value <= most):
            raise _BadConfig(f"{name}={shorten(value)}; {least} to {most} is needed")
    eps = get("rms_norm_eps")
    if eps is not None and not (isinstance(eps, float) and 0 <= eps < 1):
        raise _BadConfig(f"rms_norm_eps={shorten(eps)}; a float from 0 to 1 is needed")


def _check_architecture(config: dict[str, Any]) -> str:
    names = config.get("architectures")
    supported = ", ".join(ARCHITECTURES)
    if not isinstance(names, list) or len(names) != 1:
        raise _BadConfig(f"architectures={shorten(names)}; a list of one is needed, of {supported}")
    if not isinstance(names[0], str) or names[0] not in ARCHITECTURES:
        raise _BadConfig(f"architecture {str(names[0])[:100]} is not supported; supported: {supported}")
    return str(names[0])


def _check_features(fields: ConfigFields) -> None:
    if fields.hidden_act not in ACTIVATIONS:
        raise _not_supported(f"activation {shorten(fields.hidden_act)}", ACTIVATIONS)
    rope = fields.rope_parameters
    if any(isinstance(value, dict) for value in rope.values()):
        raise _BadConfig("rope_parameters by layer type are not supported; one for all layers is")
    if str(rope.get("rope_type")) not in ROPE_TYPES:
        raise _not_supported(f"rope type {shorten(rope.get('rope_type'))}", ROPE_TYPES)
    if rope.get("partial_rotary_factor", 1.0) != 1.0:
        raise _BadConfig(f"partial_rotary_factor={rope['partial_rotary_factor']} is not supported; 1 is")


def _not_supported(what: str, supported: Iterable[str]) -> _BadConfig:
    return _BadConfig(f"{what} is not supported; supported: {', '.join(supported)}")


def _flag(value: bool | str, fields: ConfigFields) -> bool:
    return bool(getattr(fields, value)) if isinstance(value, str) else value


def _rope(fields: ConfigFields, head_dim: int) -> Rope:
    rope = fields.rope_parameters
    periods = rope["rope_theta"] ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)
    inv_freq, scale = ROPE_TYPES[rope["rope_type"]](fields, periods)
    values, scale = tuple(inv_freq.tolist()), float(scale)
    if len(values) != head_dim // 2 or not all(0 < value < math.inf for value in [*values, scale]):
        raise ValueError(f"they give {len(values)} frequencies, not {head_dim // 2} between 0 and infinity")
    return Rope(values, scale)


def _linear_rope(fields: ConfigFields, periods: Tensor) -> tuple[Tensor, float]:
    """As if positions were ``factor`` times closer (Chen et al., 2023, arXiv:2306.15595)."""
    return 1.0 / periods / fields.rope_parameters["factor"], 1.0


def _llama3_rope(fields: ConfigFields, periods: Tensor) -> tuple[Tensor, float]:
    """Llama 3.1's: slow rotations become ``factor`` times slower, fast ones stay, and a ramp lies between them."""
    rope, inv_freq = fields.rope_parameters, 1.0 / periods
    factor, low, high = rope["factor"], rope["low_freq_factor"], rope["high_freq_factor"]
    length = rope["original_max_position_embeddings"]
    wavelengths = 2 * math.pi / inv_freq
    is_slow, is_fast = wavelengths > length / low, wavelengths < length / high
    ramp = (length / wavelengths - low) / (high - low)
    between = (1 - ramp) * inv_freq / factor + ramp * inv_freq
    return torch.where(is_slow, inv_freq / factor, torch.where(is_fast, inv_freq, between)), 1.0


def _yarn_rope(fields: ConfigFields, periods: Tensor) -> tuple[Tensor, float]:
    """YaRN's (Peng et al., 2023, arXiv:2309.00071): as Llama 3.1's, with the ramp over dims; cos and sin are scaled."""
    rope, head_dim = fields.rope_parameters, 2 * len(periods)
    factor, length = rope["factor"], rope["original_max_position_embeddings"]
    if factor is None:
        factor = fields.max_position_embeddings / length

    def magnitude(weight: float) -> float:
        return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0

    def dim_that_turns(times: float) -> float:
        return head_dim * math.log(length / (times * 2 * math.pi)) / (2 * math.log(rope["rope_theta"]))

    scale, mscale, mscale_all = rope.get("attention_factor"), rope.get("mscale"), rope.get("mscale_all_dim")
    if scale is None:
        scale = magnitude(mscale) / magnitude(mscale_all) if mscale and mscale_all else magnitude(1.0)
    low, high = dim_that_turns(rope.get("beta_fast") or 32), dim_that_turns(rope.get("beta_slow") or 1)
    if rope.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    ramp = (torch.arange(len(periods), dtype=torch.float32) - low) / ((high - low) or 0.001)
    kept = 1 - ramp.clamp(0, 1)
    return 1.0 / (factor * periods) * (1 - kept) + 1.0 / periods * kept, scale


ROPE_TYPES: dict[str, Callable[[ConfigFields, Tensor], tuple[Tensor, float]]] = {
    "default": lambda _, periods: (1.0 / periods, 1.0),
    "linear": _linear_rope,
    "llama3": _llama3_rope,
    "yarn": _yarn_rope,
}
"""How the plain rotation is changed: from its periods / 2π [head_dim / 2], in positions, to the frequencies
[head_dim / 2], in radians a position, and the factor on cos and sin."""


def _model_len(fields: ConfigFields) -> int:
    """The most tokens that the model is made for.

    With yarn, ``max_position_embeddings`` is often left at the length before stretching, as its authors tell users to
    add the scaling to config.json and nothing else.
    """
    rope = fields.rope_parameters
    if rope["rope_type"] == "yarn" and rope.get("factor"):
        return max(fields.max_position_embeddings, int(rope["original_max_position_embeddings"] * rope["factor"]))
    return fields.max_position_embeddings


def _limit(model_len: int, max_model_len: int | None) -> int:
    if not 2 <= model_len <= MAX_POSITIONS:
        raise _BadConfig(f"max_position_embeddings={shorten(model_len)}; 2 to {MAX_POSITIONS} is needed")
    if max_model_len is not None and max_model_len > model_len:
        raise ConfigError(f"max_model_len={max_model_len} is more than the {model_len} tokens that this model allows")
    return max_model_len or model_len


def _dtype(fields: ConfigFields, name: str) -> torch.dtype:
    if name == "auto":
        name = fields.dtype or "float32"
    if name not in DTYPES:
        raise _BadConfig(f"dtype {shorten(name)} is not supported; set dtype to one of {', '.join(DTYPES)}")
    return DTYPES[name]


def _experts(family: Family, fields: ConfigFields) -> ExpertsConfig | None:
    if family.experts is None:
        return None
    try:
        return family.experts.read(lambda name: getattr(fields, name), fields.num_hidden_layers)
    except ValueError as error:
        raise _BadConfig(f"its experts: {error}") from error


def _windows(family: Family, fields: ConfigFields) -> tuple[int | None, ...]:
    window, num_layers, layer_types = fields.sliding_window, fields.num_hidden_layers, fields.layer_types
    if family.windows == "none" or window is None:
        return (None,) * num_layers
    if family.windows in ("all layers", "all layers if used"):
        return (window,) * num_layers
    if layer_types is None or len(layer_types) != num_layers:
        raise _BadConfig(f"layer_types={shorten(layer_types)}; one for each of {num_layers} is needed")
    for layer_type in layer_types:
        if layer_type not in LAYER_TYPES:
            raise _not_supported(f"layer type {shorten(layer_type)}", LAYER_TYPES)
    return tuple(window if layer_type == "sliding_attention" else None for layer_type in layer_types)
