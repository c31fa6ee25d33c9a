"""A GGUF file's description of its model in transformers' form: config.json's fields and the names of tensors.

llama.cpp has names of its own for both (its gguf-py/gguf/constants.py), the same for all architectures, and changes
some values when it converts a checkpoint (its convert_hf_to_gguf.py). `FAMILIES` lists each architecture's differences.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from itertools import product
from typing import Any

import msgspec
import numpy as np

from aioengine.errors import ModelLoadError
from aioengine.models.families import ARCHITECTURES, Family, NormPlace
from aioengine.models.formats.gguf_file import GgufFile, GgufTensor, ending_ids
from aioengine.validation import shorten

Rows = np.ndarray[Any, np.dtype[np.int64]]

ROPE_FACTORS = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")
"""Factors by which each pair of numbers turns slower: the result of Llama 3.1's scaling, and longrope's two lists. They
belong to the config here, and are no tensors of the model."""

OUTER = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
NORMS: dict[NormPlace, str] = {
    "input": "attn_norm",
    "output": "post_attention_norm",
    "mlp_input": "ffn_norm",
    "mlp_output": "post_ffw_norm",
}
"""llama.cpp's names of a layer's norms, by their places."""

INNER = {
    "attn_qkv": "self_attn.qkv_proj",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_sinks": "self_attn.sinks",
    "post_attention_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
    "ffn_gate_shexp": "mlp.shared_expert.gate_proj",
    "ffn_up_shexp": "mlp.shared_expert.up_proj",
    "ffn_down_shexp": "mlp.shared_expert.down_proj",
}
"""Names of a layer's tensors, without "blk.N." and ".weight"; some families have the norm before the MLP here."""

EXPERT = "{expert}"
"""In a name of transformers', where a tensor of llama.cpp is a stack of matrices, one an expert."""

STACKS = {"gate_up_proj": ("ffn_gate_exps", "ffn_up_exps"), "down_proj": ("ffn_down_exps",)}
"""Tensors that hold all experts in transformers, too: those of llama.cpp that make up each, their outputs in turn."""

LAYER = re.compile(r"blk\.(\d+)\.(.+)")
Fields = dict[str, tuple[str, type]]
FIELDS: Fields = {
    "hidden_size": ("embedding_length", int),
    "intermediate_size": ("feed_forward_length", int),
    "num_hidden_layers": ("block_count", int),
    "num_attention_heads": ("attention.head_count", int),
    "num_key_value_heads": ("attention.head_count_kv", int),
    "head_dim": ("attention.key_length", int),
    "max_position_embeddings": ("context_length", int),
    "rms_norm_eps": ("attention.layer_norm_rms_epsilon", float),
}
REQUIRED = FIELDS.keys() - {"head_dim", "num_key_value_heads"}
OF_EXPERTS: Fields = {
    "num_experts": ("expert_count", int),
    "num_experts_per_tok": ("expert_used_count", int),
    "moe_intermediate_size": ("expert_feed_forward_length", int),
}
LOCAL_EXPERTS: Fields = {
    "num_local_experts": OF_EXPERTS["num_experts"],
    "num_experts_per_tok": OF_EXPERTS["num_experts_per_tok"],
}
WINDOW: Fields = {"sliding_window": ("attention.sliding_window", int)}
SOFT_CAPS: Fields = {
    "attn_logit_softcapping": ("attn_logit_softcapping", float),
    "final_logit_softcapping": ("final_logit_softcapping", float),
}
GRANITES: Fields = {
    "attention_multiplier": ("attention.scale", float),
    "embedding_multiplier": ("embedding_scale", float),
    "residual_multiplier": ("residual_scale", float),
    "logits_scaling": ("logit_scale", float),
}
BIASES = {"qkv_bias": "attn_q", "attention_bias": "attn_q", "attention_out_bias": "attn_output", "mlp_bias": "ffn_down"}
"""Fields of a config for biases, and the tensors that have these."""

LAYER_TYPES = ("full_attention", "sliding_attention")
MAX_FACTORS = 2**16
MAX_LAYERS = 4096


class GgufFamily(msgspec.Struct, frozen=True, kw_only=True):
    """The differences of an architecture's files.

    Attributes:
        architecture: transformers' class.
        fields: fields of its config beside `FIELDS`: the metadata's key without the architecture, and its type.
        defaults: fields of its config that llama.cpp has in its code, or that a file may leave out.
        rope: the same of its ``rope_parameters``.
        full_every: each so many-th layer attends to all tokens, where the others have a window; 0: there are none.
        window_theta: ``rope_theta`` of layers with windows where the file has none; None: as of the other layers.
        largest_layers: layers of the family's largest model, which scales queries by ``hidden_size / num_heads``, where
            others scale them by ``head_dim``; 0: ``query_pre_attn_scalar`` is no field of this family.
        has_pairs: the outputs of the projections of queries and keys have the two numbers that turn together as
            neighbours; transformers has them half a head apart.
    """

    architecture: str
    fields: Fields = {}
    defaults: dict[str, Any] = {}
    rope: dict[str, Any] = {}
    full_every: int = 0
    window_theta: float | None = None
    largest_layers: int = 0
    has_pairs: bool = False

    @property
    def native(self) -> Family:
        """The family of the decoder, which has transformers' names."""
        return ARCHITECTURES[self.architecture]

    @property
    def names(self) -> dict[str, str]:
        """transformers' names of a layer's tensors, by llama.cpp's."""
        names = INNER | {NORMS[place]: name for place, name in self.native.norms.items()}
        if "gate_up" in self.native.fused:
            names["ffn_up"] = "mlp.gate_up_proj"
        if (of := self.native.experts) is not None:
            names["ffn_gate_inp"] = f"{of.block}.{of.router}"
            for kind, name in (("gate", of.gate), ("up", of.up), ("down", of.down)):
                names[f"ffn_{kind}_exps"] = f"{of.block}.experts.{EXPERT}.{name}"
        return names

    @property
    def stacks(self) -> dict[str, tuple[str, ...]]:
        """`STACKS` by transformers' names, where the family has them."""
        of = self.native.experts
        has_stacks = of is not None and of.is_transposed
        return {f"mlp.experts.{name}": parts for name, parts in STACKS.items()} if has_stacks else {}


NO_WINDOW = {"sliding_window": None}
GEMMA: dict[str, Any] = {
    "fields": {**WINDOW, **SOFT_CAPS},
    "defaults": {"hidden_activation": "gelu_pytorch_tanh"},
}
FAMILIES = {
    # Mistral's models, too, without windows, which its later models have not.
    "llama": GgufFamily(architecture="LlamaForCausalLM", has_pairs=True),
    "qwen2": GgufFamily(architecture="Qwen2ForCausalLM"),
    "qwen3": GgufFamily(architecture="Qwen3ForCausalLM"),
    "qwen2moe": GgufFamily(
        architecture="Qwen2MoeForCausalLM",
        fields={**OF_EXPERTS, "shared_expert_intermediate_size": ("expert_shared_feed_forward_length", int)},
    ),
    "qwen3moe": GgufFamily(architecture="Qwen3MoeForCausalLM", fields=OF_EXPERTS, defaults={"norm_topk_prob": True}),
    "olmoe": GgufFamily(
        architecture="OlmoeForCausalLM",
        fields={name: OF_EXPERTS[name] for name in ("num_experts", "num_experts_per_tok")},
    ),
    "gemma2": GgufFamily(architecture="Gemma2ForCausalLM", largest_layers=46, **GEMMA),
    "gemma3": GgufFamily(
        architecture="Gemma3ForCausalLM", largest_layers=62, full_every=6, window_theta=10000.0, **GEMMA
    ),
    "phi3": GgufFamily(
        architecture="Phi3ForCausalLM",
        fields={**WINDOW, "original_max_position_embeddings": ("rope.scaling.original_context_length", int)},
    ),
    "olmo2": GgufFamily(architecture="Olmo2ForCausalLM"),
    "granite": GgufFamily(architecture="GraniteForCausalLM", fields=GRANITES, has_pairs=True),
    "smollm3": GgufFamily(architecture="SmolLM3ForCausalLM", has_pairs=True),
    "glm4": GgufFamily(architecture="Glm4ForCausalLM"),
    "seed_oss": GgufFamily(architecture="SeedOssForCausalLM"),
    "mistral3": GgufFamily(architecture="Ministral3ForCausalLM", has_pairs=True, defaults=NO_WINDOW),
    "gpt-oss": GgufFamily(
        architecture="GptOssForCausalLM",
        fields={**WINDOW, **LOCAL_EXPERTS, "intermediate_size": OF_EXPERTS["moe_intermediate_size"]},
        rope={"truncate": False},
        full_every=2,
    ),
    "exaone4": GgufFamily(architecture="Exaone4ForCausalLM", fields=WINDOW, defaults=NO_WINDOW, full_every=4),
}
"""By general.architecture."""

MIXTRAL = GgufFamily(architecture="MixtralForCausalLM", fields=LOCAL_EXPERTS, has_pairs=True)
"""A "llama" with experts."""

OLMO3 = GgufFamily(architecture="Olmo3ForCausalLM", fields=WINDOW, full_every=4)
"""An "olmo2" with windows."""


_EMBEDS = "is an embedding model, and generates no text"
NO_TEXT = {
    **dict.fromkeys(("clip", "mmproj"), "is the projector of images of a model: give the model's own file"),
    **dict.fromkeys(("bert", "nomic-bert", "nomic-bert-moe", "jina-bert-v2", "gemma-embedding", "t5encoder"), _EMBEDS),
    "adapter": "is an adapter (LoRA), and no model: merge it into its base model, and give the merged one",
}
"""Architectures and types of files that generate no text, and why."""


def family_of(file: GgufFile) -> GgufFamily:
    """The family of a file's architecture.

    Raises:
        ModelLoadError: it is not supported.
    """
    name = file.get("general.architecture", str)
    kind = file.get("general.type", str, "model")
    if name in NO_TEXT or kind in NO_TEXT:
        raise ModelLoadError(f"{file.path} {NO_TEXT.get(name) or NO_TEXT[kind]}")
    if name not in FAMILIES:
        raise ModelLoadError(f"{file.path}: architecture {shorten(name)} in GGUF; supported: {', '.join(FAMILIES)}")
    if name == "llama" and file.get("llama.expert_count", int, 0):
        return MIXTRAL
    return OLMO3 if name == "olmo2" and file.get("olmo2.attention.sliding_window", int, 0) else FAMILIES[name]


def config_of(file: GgufFile) -> dict[str, Any]:
    """The model's config.json, as transformers would have saved it.

    Raises:
        ModelLoadError: metadata is missing, malformed or not supported.
    """
    family, prefix = family_of(file), file.metadata["general.architecture"]
    config: dict[str, Any] = {
        "architectures": [family.architecture],
        "model_type": family.native.model_type,
        **family.defaults,
        **{field: f"blk.0.{tensor}.bias" in file.tensors for field, tensor in BIASES.items()},
    }
    for field, (key, kind) in {**FIELDS, **family.fields}.items():
        value = file.get(f"{prefix}.{key}", kind)
        if value is not None:
            config[field] = value
        elif field in REQUIRED:
            raise ModelLoadError(f"{file.path} lacks {prefix}.{key}")
    by_heads = config["hidden_size"] // max(1, config["num_attention_heads"])
    config.setdefault("head_dim", by_heads)
    config.setdefault("num_key_value_heads", config["num_attention_heads"])
    if "original_max_position_embeddings" in family.fields:
        config.setdefault("original_max_position_embeddings", config["max_position_embeddings"])
    if family.largest_layers:
        is_largest = config["num_hidden_layers"] == family.largest_layers
        config["query_pre_attn_scalar"] = by_heads if is_largest else config["head_dim"]
    if family.full_every and config.get("sliding_window", 0) is not None:
        has_window = file.metadata.get(f"{prefix}.attention.sliding_window_pattern")
        if not isinstance(has_window, np.ndarray):
            last = min(config["num_hidden_layers"], MAX_LAYERS)
            has_window = [layer % family.full_every > 0 for layer in range(1, last + 1)]
        config["layer_types"] = [LAYER_TYPES[bool(each)] for each in has_window]
    embedding = file.tensors.get("token_embd.weight")
    if embedding is None:
        raise ModelLoadError(f"{file.path} lacks tensor token_embd.weight")
    config["vocab_size"] = embedding.shape[0]
    config["tie_word_embeddings"] = "output.weight" not in file.tensors
    config["rope_parameters"] = rope = _rope(file, prefix, config) | family.rope
    if family.native.has_ropes_by_type:
        default = family.window_theta or rope["rope_theta"]
        theta = file.get(f"{prefix}.rope.freq_base_swa", float, default)
        of_windows = {"rope_type": "default", "rope_theta": theta}
        config["rope_parameters"] = {"full_attention": rope, "sliding_attention": of_windows}
    # The embedding's, to compute in; bfloat16 if that is quantised, since most models were trained in it.
    config["dtype"] = {"F32": "float32", "F16": "float16"}.get(embedding.type, "bfloat16")
    return config


def _rope(file: GgufFile, prefix: str, config: dict[str, Any]) -> dict[str, Any]:
    def stated(key: str, kind: type, default: Any = None) -> Any:
        return file.get(f"{prefix}.rope.{key}", kind, default)

    head_dim = config["head_dim"]
    rope = {"rope_type": "default", "rope_theta": stated("freq_base", float, 10000.0)}
    num_turned = stated("dimension_count", int, head_dim)
    if num_turned != head_dim:
        rope["partial_rotary_factor"] = num_turned / max(1, head_dim)
    length = stated("scaling.original_context_length", int, config["max_position_embeddings"])
    kind, scale = stated("scaling.type", str, "none"), stated("scaling.attn_factor", float)
    if kind not in ("none", "linear", "yarn", "longrope"):
        raise ModelLoadError(f"{file.path}: rope.scaling.type={shorten(kind)}; supported: linear, yarn, longrope")
    if kind in ("linear", "yarn"):
        rope |= {"rope_type": kind, "factor": stated("scaling.factor", float, 1.0)}
    if kind == "yarn":
        rope["original_max_position_embeddings"] = length
        for name in ("beta_fast", "beta_slow"):
            if (value := stated(f"scaling.yarn_{name}", float)) is not None:
                rope[name] = value
        if multiplier := stated("scaling.yarn_log_multiplier", float):
            rope |= {"mscale": 1.0, "mscale_all_dim": multiplier}
    if (beta := file.get(f"{prefix}.attention.temperature_scale", float)) is not None:
        rope["llama_4_scaling_beta"] = beta
    factors: list[list[float]] = []
    for tensor in (file.tensors[name] for name in ROPE_FACTORS if name in file.tensors):
        if tensor.type != "F32" or math.prod(tensor.shape) > MAX_FACTORS:
            raise ModelLoadError(f"{tensor.path}: tensor {tensor.name} is {tensor.type} of shape {list(tensor.shape)}")
        try:
            values = np.fromfile(tensor.path, "<f4", math.prod(tensor.shape), offset=tensor.offset)
        except OSError as error:
            raise ModelLoadError(f"{tensor.path} cannot be read: {error.strerror or error}") from error
        factors.append([float(value) for value in values])
    if factors:
        # Llama 3.1's scaling is longrope with one list for all lengths.
        rope |= {"rope_type": "longrope", "long_factor": factors[0], "short_factor": factors[-1]}
        rope |= {"original_max_position_embeddings": length, "attention_factor": 1.0 if scale is None else scale}
    return rope


def generation_config_of(file: GgufFile) -> dict[str, Any]:
    """The model's generation_config.json: the tokens that end a text, and the sampling parameters.

    Raises:
        ModelLoadError: metadata is malformed.
    """
    ids = ending_ids(file)
    sampling = {name: file.get(key, (int, float)) for name, key in SAMPLING.items() if key in file.metadata}
    return {"eos_token_id": ids, **sampling} if ids else sampling


SAMPLING = {
    "temperature": "general.sampling.temp",
    "top_k": "general.sampling.top_k",
    "top_p": "general.sampling.top_p",
    "min_p": "general.sampling.min_p",
    "repetition_penalty": "general.sampling.penalty_repeat",
}


def named_tensors(file: GgufFile) -> Iterator[tuple[str, tuple[GgufTensor, Rows | None, bool]]]:
    """Each tensor of the model, by transformers' name: its place, its rows' order, and whether it has 1 added.

    Those of `stacked_tensors` are left out. A tensor without a name in transformers keeps llama.cpp's.

    Raises:
        ModelLoadError: the architecture is not supported.
    """
    family, config = family_of(file), config_of(file)
    names, norm_offset = family.names, family.native.norm_offset
    stacked = {inner for parts in family.stacks.values() for inner in parts}
    num_heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    for tensor in file.tensors.values():
        stem, _, kind = tensor.name.rpartition(".")
        if tensor.name in ROPE_FACTORS:
            continue
        layer, inner = parts.groups() if (parts := LAYER.fullmatch(stem)) else (None, stem)
        if inner in stacked:
            continue
        rows, heads = None, num_heads.get(inner, 0) if family.has_pairs else 0
        if heads > 0 and tensor.shape[0] % (2 * heads) == 0:  # else its shape is wrong, which the loader finds
            # The first numbers of all pairs before the second ones, head by head.
            rows = np.arange(tensor.shape[0]).reshape(heads, -1, 2).swapaxes(1, 2).reshape(-1)
        has_one_added = norm_offset == 1 and inner.endswith("norm")
        name = OUTER.get(stem, stem) if layer is None else f"model.layers.{layer}.{names.get(inner, inner)}"
        if EXPERT in name and len(tensor.shape) > 1:
            for index in range(tensor.shape[0]):
                yield f"{name.replace(EXPERT, str(index))}.{kind}", (tensor[index], None, False)
            continue
        if inner == "ffn_gate_inp_shexp" and len(tensor.shape) == 1:
            tensor = msgspec.structs.replace(tensor, shape=(1, *tensor.shape))
        yield name if inner == "attn_sinks" else f"{name}.{kind}", (tensor, rows, has_one_added)


def stacked_tensors(file: GgufFile) -> Iterator[tuple[str, list[GgufTensor]]]:
    """Each tensor of `GgufFamily.stacks` whose parts are all in the file, by transformers' name.

    Raises:
        ModelLoadError: the architecture is not supported.
    """
    family, num_layers = family_of(file), min(config_of(file)["num_hidden_layers"], MAX_LAYERS)
    for layer, (name, parts), kind in product(range(num_layers), family.stacks.items(), ("weight", "bias")):
        tensors = [file.tensors.get(f"blk.{layer}.{part}.{kind}") for part in parts]
        there = [tensor for tensor in tensors if tensor is not None]
        if len(there) == len(tensors):
            yield f"model.layers.{layer}.{name}{'_bias' if kind == 'bias' else ''}", there
