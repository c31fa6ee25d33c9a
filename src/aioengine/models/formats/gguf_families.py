"""What a GGUF file says of its model, in transformers' words: config.json's fields and the names of tensors.

llama.cpp has names of its own for both (its gguf-py/gguf/constants.py), the same for all architectures, and changes
some values when it converts a checkpoint (its convert_hf_to_gguf.py). The table here says where an architecture
differs.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import numpy as np

from aioengine.errors import ModelLoadError
from aioengine.models.formats.gguf_file import GgufFile, GgufTensor
from aioengine.validation import shorten

Rows = np.ndarray[Any, np.dtype[np.int64]]

ROPE_FACTORS = "rope_freqs.weight"
"""By how much slower each pair of numbers turns: what Llama 3.1's scaling comes to."""

NOT_OF_THE_MODEL = (ROPE_FACTORS,)
"""Tensors that are read with the config."""

OUTER = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
INNER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
"""Of a layer's tensors, without "blk.N." and ".weight"."""

FIELDS: dict[str, tuple[str, type]] = {
    "hidden_size": ("embedding_length", int),
    "intermediate_size": ("feed_forward_length", int),
    "num_hidden_layers": ("block_count", int),
    "num_attention_heads": ("attention.head_count", int),
    "num_key_value_heads": ("attention.head_count_kv", int),
    "head_dim": ("attention.key_length", int),
    "max_position_embeddings": ("context_length", int),
    "rms_norm_eps": ("attention.layer_norm_rms_epsilon", float),
}
EXPERT = "{expert}"
LAYER = re.compile(r"blk\.(\d+)\.(.+)")
REQUIRED = FIELDS.keys() - {"head_dim", "num_key_value_heads"}


class GgufFamily(msgspec.Struct, frozen=True, kw_only=True):
    """In what the files of an architecture differ.

    Attributes:
        architecture: transformers' class.
        model_type: of its config.
        names: of a layer's tensors, where they differ from `INNER`.
        fields: of its config beside `FIELDS`: the metadata's key without the architecture, and its type.
        has_pairs: whether the outputs of the projections of queries and keys are in the order in which the two numbers
            that turn together are neighbours; transformers has them half a head apart.
        has_one_added: whether the weights of norms are what the normalised values are multiplied with; transformers
            keeps them less one.
        more: further fields of the config.
    """

    architecture: str
    model_type: str
    names: dict[str, str] = {}
    fields: dict[str, tuple[str, type]] = {}
    has_pairs: bool = False
    has_one_added: bool = False
    more: Callable[[GgufFile], dict[str, Any]] = lambda file: {}

    def name_of(self, inner: str) -> str:
        """Of a layer's tensor, with `EXPERT` in place of an expert's number."""
        return self.names.get(inner) or INNER.get(inner, inner)


def _biases(file: GgufFile) -> dict[str, Any]:
    return {"attention_bias": "blk.0.attn_q.bias" in file.tensors, "mlp_bias": "blk.0.ffn_up.bias" in file.tensors}


FAMILIES = {
    # Mistral's models, too: without its windows, which its later ones have not.
    "llama": GgufFamily(architecture="LlamaForCausalLM", model_type="llama", has_pairs=True, more=_biases),
    "qwen2": GgufFamily(architecture="Qwen2ForCausalLM", model_type="qwen2"),
    "qwen3": GgufFamily(architecture="Qwen3ForCausalLM", model_type="qwen3", more=_biases),
}
"""By general.architecture."""


def family_of(file: GgufFile) -> GgufFamily:
    """Raises:
    ModelLoadError: the architecture is not supported.
    """
    name = file.get("general.architecture", str)
    if name not in FAMILIES:
        raise ModelLoadError(f"{file.path}: architecture {shorten(name)} in GGUF; supported: {', '.join(FAMILIES)}")
    return FAMILIES[name]


def config_of(file: GgufFile) -> dict[str, Any]:
    """The model's config.json, as transformers would have saved it.

    Raises:
        ModelLoadError: metadata is missing or malformed, or says what is not supported.
    """
    family, prefix = family_of(file), file.metadata["general.architecture"]
    config: dict[str, Any] = {"architectures": [family.architecture], "model_type": family.model_type}
    for field, (key, kind) in {**FIELDS, **family.fields}.items():
        value = file.get(f"{prefix}.{key}", kind)
        if value is not None:
            config[field] = value
        elif field in REQUIRED:
            raise ModelLoadError(f"{file.path} lacks {prefix}.{key}")
    if "head_dim" not in config and config["num_attention_heads"]:
        config["head_dim"] = config["hidden_size"] // config["num_attention_heads"]
    config.setdefault("num_key_value_heads", config["num_attention_heads"])
    return {
        **config,
        "vocab_size": _vocab_size(file),
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "rope_parameters": _rope(file, prefix, config),
        "dtype": _dtype(file),
        **family.more(file),
    }


def _vocab_size(file: GgufFile) -> int:
    embedding = file.tensors.get("token_embd.weight")
    if embedding is None:
        raise ModelLoadError(f"{file.path} lacks tensor token_embd.weight")
    return embedding.shape[0]


def _dtype(file: GgufFile) -> str:
    """To compute in: that of the embedding; where it is quantised bfloat16, in which most models were trained."""
    return {"F32": "float32", "F16": "float16"}.get(file.tensors["token_embd.weight"].type, "bfloat16")


def _rope(file: GgufFile, prefix: str, config: dict[str, Any]) -> dict[str, Any]:
    head_dim = config["head_dim"]
    num_turned = file.get(f"{prefix}.rope.dimension_count", int, head_dim)
    rope = {"rope_type": "default", "rope_theta": file.get(f"{prefix}.rope.freq_base", float, 10000.0)}
    if num_turned != head_dim:
        rope["partial_rotary_factor"] = num_turned / head_dim
    kind = file.get(f"{prefix}.rope.scaling.type", str, "none")
    if kind in ("linear", "yarn"):
        rope["rope_type"] = kind
        rope["factor"] = file.get(f"{prefix}.rope.scaling.factor", float, 1.0)
    elif kind not in ("none", "longrope"):
        raise ModelLoadError(
            f"{file.path}: {prefix}.rope.scaling.type={shorten(kind)}; supported: linear, yarn, longrope"
        )
    if kind == "yarn":
        length = file.get(f"{prefix}.rope.scaling.original_context_length", int)
        rope["original_max_position_embeddings"] = length or config["max_position_embeddings"]
    if ROPE_FACTORS in file.tensors:
        factors = _numbers(file.tensors[ROPE_FACTORS])
        rope |= {"rope_type": "longrope", "short_factor": factors, "long_factor": factors, "attention_factor": 1.0}
    return rope


def _numbers(tensor: GgufTensor) -> list[float]:
    """Of a small tensor in float32."""
    if tensor.type != "F32" or math.prod(tensor.shape) > MAX_NUMBERS:
        raise ModelLoadError(f"{tensor.path}: tensor {tensor.name} is {tensor.type} of shape {list(tensor.shape)}")
    try:
        values = np.fromfile(tensor.path, "<f4", math.prod(tensor.shape), offset=tensor.offset)
    except OSError as error:
        raise ModelLoadError(f"{tensor.path} cannot be read: {error.strerror or error}") from error
    return [float(value) for value in values]


MAX_NUMBERS = 2**16


def generation_config_of(file: GgufFile) -> dict[str, Any]:
    """The model's generation_config.json: which tokens end a text, and how it is to be sampled.

    Raises:
        ModelLoadError: metadata is malformed.
    """
    keys = ("tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id", "tokenizer.ggml.eom_token_id")
    ids = dict.fromkeys(file.get(key, int) for key in keys if key in file.metadata)
    sampling = {name: file.get(key, (int, float)) for name, key in SAMPLING.items() if key in file.metadata}
    return {"eos_token_id": list(ids), **sampling} if ids else sampling


SAMPLING = {
    "temperature": "general.sampling.temp",
    "top_k": "general.sampling.top_k",
    "top_p": "general.sampling.top_p",
    "min_p": "general.sampling.min_p",
    "repetition_penalty": "general.sampling.penalty_repeat",
}


def named_tensors(file: GgufFile) -> Iterator[tuple[str, tuple[GgufTensor, Rows | None, bool]]]:
    """Each tensor of the model, by transformers' name: where it lies, its rows' order, whether it has 1 added.

    One that transformers has no name for keeps llama.cpp's.

    Raises:
        ModelLoadError: the architecture is not supported.
    """
    family, config = family_of(file), config_of(file)
    num_heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    for tensor in file.tensors.values():
        stem, _, kind = tensor.name.rpartition(".")
        if tensor.name in NOT_OF_THE_MODEL or not stem:
            continue
        layer, inner = parts.groups() if (parts := LAYER.fullmatch(stem)) else (None, stem)
        rows = _halves(tensor.shape[0], num_heads[inner]) if family.has_pairs and inner in num_heads else None
        has_one_added = family.has_one_added and inner.endswith("norm")
        name = OUTER.get(stem, stem) if layer is None else f"model.layers.{layer}.{family.name_of(inner)}"
        if EXPERT not in name:
            yield f"{name}.{kind}", (tensor, rows, has_one_added)
            continue
        for index in range(tensor.shape[0]):
            yield f"{name.replace(EXPERT, str(index))}.{kind}", (tensor[index], None, False)


def _halves(num_rows: int, num_heads: int) -> Rows | None:
    """Which rows are the first of a head's pairs, which the second, and so on for each head."""
    if num_heads <= 0 or num_rows % (2 * num_heads):
        return None  # its shape is wrong, which is told where all shapes are compared
    return np.arange(num_rows).reshape(num_heads, -1, 2).swapaxes(1, 2).reshape(-1)
