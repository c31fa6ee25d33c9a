"""The shape of a decoder, read from a transformers config: one table says how the families differ."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Literal

import msgspec
import torch
import transformers
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from aioengine.errors import ConfigError, ModelLoadError
from aioengine.models.folder import ModelFolder
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
"""config.json's integers: the least and the most of each, far beyond any model. transformers fills lists by some of
them; all are held against the shapes of the tensors before memory is asked for."""

MAX_SHOWN_CHARS = 500
"""Of what transformers says of a config: some errors hold all of it."""

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
ROPE_TYPES = ("default", "linear", "llama3", "yarn")
ACTIVATIONS = ("silu", "swish")


class Family(msgspec.Struct, frozen=True, kw_only=True):
    """In what an architecture differs from the plain decoder. A string is the config's field that says it.

    Attributes:
        qkv_bias, output_bias: of the attention's projections.
        mlp_bias: of the MLP's.
        qk_norm: whether each head's query and key are normalised before the rotation.
        windows: which layers attend to the last ``sliding_window`` tokens only.
    """

    qkv_bias: bool | str = False
    output_bias: bool | str = False
    mlp_bias: bool | str = False
    qk_norm: bool = False
    windows: Literal["none", "all layers", "layer_types"] = "none"


ARCHITECTURES = {
    "LlamaForCausalLM": Family(qkv_bias="attention_bias", output_bias="attention_bias", mlp_bias="mlp_bias"),
    "MistralForCausalLM": Family(windows="all layers"),
    "Qwen2ForCausalLM": Family(qkv_bias=True, windows="layer_types"),
    "Qwen3ForCausalLM": Family(
        qkv_bias="attention_bias", output_bias="attention_bias", qk_norm=True, windows="layer_types"
    ),
}


class DecoderConfig(msgspec.Struct, frozen=True, kw_only=True):
    """All that the decoder has to know of its shape.

    Attributes:
        num_heads, num_kv_heads, head_dim: of the attention; ``num_heads`` is a multiple of ``num_kv_heads``.
        max_model_len: most tokens in a sequence: what the model was made for, or less where the engine says so.
        dtype: of the parameters and of what flows between them.
        windows: for each layer how many of the last keys a token sees, itself included; None for all.
        inv_freq: [head_dim / 2], radians a position, float32 values.
        rope_scale: cos and sin are multiplied by this (1 but for yarn).
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_model_len: int
    dtype: torch.dtype
    rms_norm_eps: float
    qkv_bias: bool
    output_bias: bool
    mlp_bias: bool
    qk_norm: bool
    tie_word_embeddings: bool
    windows: tuple[int | None, ...]
    inv_freq: tuple[float, ...]
    rope_scale: float = 1.0


def read_decoder_config(folder: ModelFolder, *, dtype: str = "auto", max_model_len: int | None = None) -> DecoderConfig:
    """The decoder that a model folder's config.json describes.

    Args:
        dtype: a name in `DTYPES`, or "auto" for the one that config.json states, else float32.
        max_model_len: the engine's limit; None for the model's.
    Raises:
        ModelLoadError: config.json is no good, or describes what is not supported; it says what is.
        ConfigError: ``max_model_len`` is more than the model allows.
    """
    where = folder.path / "config.json"
    architecture = _check_architecture(folder)
    _check_numbers(folder.config.get, where)
    try:
        hf = transformers.AutoConfig.from_pretrained(folder.path, local_files_only=True, trust_remote_code=False)
    # Its validation raises whatever it likes: ValueError, KeyError, TypeError, errors of its own.
    except Exception as error:
        problem = str(error)[:MAX_SHOWN_CHARS]
        raise ModelLoadError(f"{where} is not a config that transformers understands: {problem}") from error
    _check_numbers(lambda name: getattr(hf, name, None), where)
    _check_features(hf, where)
    family = ARCHITECTURES[architecture]
    head_dim = getattr(hf, "head_dim", None) or hf.hidden_size // hf.num_attention_heads
    if hf.num_attention_heads % hf.num_key_value_heads:
        raise ModelLoadError(
            f"{where}: num_attention_heads={hf.num_attention_heads} is not a multiple of "
            f"num_key_value_heads={hf.num_key_value_heads}"
        )
    if head_dim % 2 or not head_dim:
        raise ModelLoadError(f"{where}: head_dim={head_dim} is odd or none; the rotation needs pairs")
    try:
        inv_freq, rope_scale = _rope(hf, head_dim)
        model_len = _model_len(hf)
    except Exception as error:  # of transformers' functions, and of values that are no numbers
        rope = shorten(hf.rope_parameters)
        raise ModelLoadError(f"{where}: rope_parameters {rope} cannot be used: {error!r}") from error
    return DecoderConfig(
        architecture=architecture,
        vocab_size=hf.vocab_size,
        hidden_size=hf.hidden_size,
        intermediate_size=hf.intermediate_size,
        num_layers=hf.num_hidden_layers,
        num_heads=hf.num_attention_heads,
        num_kv_heads=hf.num_key_value_heads,
        head_dim=head_dim,
        max_model_len=_limit(model_len, max_model_len, where),
        dtype=_dtype(hf, dtype, where),
        rms_norm_eps=hf.rms_norm_eps,
        qkv_bias=_flag(family.qkv_bias, hf),
        output_bias=_flag(family.output_bias, hf),
        mlp_bias=_flag(family.mlp_bias, hf),
        qk_norm=family.qk_norm,
        tie_word_embeddings=bool(hf.tie_word_embeddings),
        windows=_windows(family, hf, where),
        inv_freq=inv_freq,
        rope_scale=rope_scale,
    )


def _check_numbers(get: Callable[[str], Any], where: object) -> None:
    """Refuse an integer of the config that is none, or of another size than any model's; absent ones are fine."""
    for name, (least, most) in NUMBERS.items():
        value = get(name)
        if value is not None and not (type(value) is int and least <= value <= most):
            raise ModelLoadError(f"{where}: {name}={shorten(value)}; {least} to {most} is needed")
    eps = get("rms_norm_eps")
    if eps is not None and not (isinstance(eps, int | float) and 0 <= eps < 1):
        raise ModelLoadError(f"{where}: rms_norm_eps={shorten(eps)}; a number from 0 to 1 is needed")


def _check_architecture(folder: ModelFolder) -> str:
    where = folder.path / "config.json"
    names = folder.config.get("architectures")
    supported = ", ".join(ARCHITECTURES)
    if not isinstance(names, list) or len(names) != 1:
        raise ModelLoadError(f"{where}: architectures={shorten(names)}; a list of one is needed, of {supported}")
    if not isinstance(names[0], str) or names[0] not in ARCHITECTURES:
        raise ModelLoadError(f"{where}: architecture {str(names[0])[:100]} is not supported; supported: {supported}")
    quantization = folder.config.get("quantization_config")
    if quantization is not None:
        method = quantization.get("quant_method", "unnamed") if isinstance(quantization, dict) else quantization
        raise ModelLoadError(f"{where}: quantised checkpoints are not supported yet (quant_method {str(method)[:100]})")
    return str(names[0])


def _check_features(hf: Any, where: object) -> None:
    if hf.hidden_act not in ACTIVATIONS:
        raise ModelLoadError(
            f"{where}: activation {shorten(hf.hidden_act)} is not supported; supported: {', '.join(ACTIVATIONS)}"
        )
    rope = hf.rope_parameters or {}
    rope_type = rope.get("rope_type", "default")
    if any(isinstance(value, dict) for value in rope.values()):
        raise ModelLoadError(f"{where}: rope_parameters by layer type are not supported; one for all layers is")
    if rope_type not in ROPE_TYPES:
        raise ModelLoadError(
            f"{where}: rope type {shorten(rope_type)} is not supported; supported: {', '.join(ROPE_TYPES)}"
        )
    if rope.get("partial_rotary_factor", 1.0) != 1.0:
        raise ModelLoadError(f"{where}: partial_rotary_factor={rope['partial_rotary_factor']} is not supported; 1 is")


def _flag(value: bool | str, hf: Any) -> bool:
    return bool(getattr(hf, value)) if isinstance(value, str) else value


def _rope(hf: Any, head_dim: int) -> tuple[tuple[float, ...], float]:
    """The rotation's frequencies (Su et al., 2021, arXiv:2104.09864) and the factor on cos and sin."""
    rope = hf.rope_parameters
    if rope["rope_type"] == "default":
        exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
        inv_freq, scale = 1.0 / (rope["rope_theta"] ** exponents), 1.0
    else:
        inv_freq, scale = ROPE_INIT_FUNCTIONS[rope["rope_type"]](hf)
    values, scale = tuple(inv_freq.tolist()), float(scale)
    if len(values) != head_dim // 2 or not all(0 < value < math.inf for value in [*values, scale]):
        raise ValueError(f"they give {len(values)} frequencies, not {head_dim // 2} between 0 and infinity")
    return values, scale


def _model_len(hf: Any) -> int:
    """The most tokens that the model is made for.

    With yarn, ``max_position_embeddings`` is often left at the length before stretching, as its authors tell users to
    add the scaling to config.json and nothing else.
    """
    rope = hf.rope_parameters
    stated: int = hf.max_position_embeddings
    if rope["rope_type"] == "yarn" and rope.get("factor"):
        return max(stated, int(rope["original_max_position_embeddings"] * rope["factor"]))
    return stated


def _limit(model_len: object, max_model_len: int | None, where: object) -> int:
    if not isinstance(model_len, int) or not 2 <= model_len <= MAX_POSITIONS:
        raise ModelLoadError(f"{where}: max_position_embeddings={shorten(model_len)}; 2 to {MAX_POSITIONS} is needed")
    if max_model_len is not None and max_model_len > model_len:
        raise ConfigError(f"max_model_len={max_model_len} is more than the {model_len} tokens that this model allows")
    return max_model_len or model_len


def _dtype(hf: Any, name: str, where: object) -> torch.dtype:
    if name != "auto":
        return DTYPES[name]
    dtype = getattr(hf, "dtype", None) or torch.float32
    dtype = DTYPES.get(dtype, dtype) if isinstance(dtype, str) else dtype
    if dtype not in DTYPES.values():
        raise ModelLoadError(
            f"{where}: dtype {shorten(dtype)} is not supported; set dtype to one of {', '.join(DTYPES)}"
        )
    return dtype


def _windows(family: Family, hf: Any, where: object) -> tuple[int | None, ...]:
    window: int | None = getattr(hf, "sliding_window", None)
    num_layers: int = hf.num_hidden_layers
    if family.windows == "none" or window is None:
        return (None,) * num_layers
    if family.windows == "all layers":
        return (window,) * num_layers
    kinds = {"full_attention": None, "sliding_attention": window}
    if not isinstance(hf.layer_types, list) or len(hf.layer_types) != num_layers:
        raise ModelLoadError(
            f"{where}: layer_types={shorten(hf.layer_types)}; one for each of {num_layers} layers is needed"
        )
    unknown = [layer_type for layer_type in hf.layer_types if layer_type not in kinds]
    if unknown:
        raise ModelLoadError(
            f"{where}: layer type {shorten(unknown[0])} is not supported; supported: {', '.join(kinds)}"
        )
    return tuple(kinds[layer_type] for layer_type in hf.layer_types)
