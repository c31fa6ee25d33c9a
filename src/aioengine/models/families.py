"""The table of the native families: in what each architecture differs from the plain decoder."""

from __future__ import annotations

from typing import Any, Literal

import msgspec


class ExpertFields(msgspec.Struct, frozen=True, kw_only=True):
    """How a family's config.json and its checkpoints describe its experts. A string of a config is a field's name.

    Attributes:
        intermediate_size: of an expert.
        is_normalised, bias, activation: as in `ExpertsConfig`.
        has_shared: whether there is an expert of all tokens, of ``shared_expert_intermediate_size``.
        has_plain_layers: whether ``mlp_only_layers`` and ``decoder_sparse_step`` name layers without experts.
        block, router, gate, up, down: names of modules in a checkpoint.
        is_transposed: all experts are one tensor there, [experts, inputs, outputs]; else each has its own.
    """

    intermediate_size: str = "intermediate_size"
    is_normalised: bool | str = True
    has_shared: bool = False
    has_plain_layers: bool = False
    bias: bool = False
    activation: Literal["silu", "clamped_silu"] = "silu"
    block: str = "mlp"
    router: str = "gate"
    gate: str = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"
    is_transposed: bool = False


GEMMA_FIELDS = frozenset(
    {
        "hidden_activation",
        "query_pre_attn_scalar",
        "attn_logit_softcapping",
        "final_logit_softcapping",
        "use_bidirectional_attention",
    }
)

NormPlace = Literal["input", "output", "mlp_input", "mlp_output"]
"""Before or behind attention, before or behind the MLP; those behind are before the addition to the residual stream."""

QkNorm = Literal["heads", "all"]

BEFORE: dict[NormPlace, str] = {"input": "input_layernorm", "mlp_input": "post_attention_layernorm"}
BEHIND: dict[NormPlace, str] = {"output": "post_attention_layernorm", "mlp_output": "post_feedforward_layernorm"}
GEMMA_NORMS: dict[NormPlace, str] = {"input": "input_layernorm", "mlp_input": "pre_feedforward_layernorm", **BEHIND}
GLM4_NORMS: dict[NormPlace, str] = {**BEFORE, "output": "post_self_attn_layernorm", "mlp_output": "post_mlp_layernorm"}


class Family(msgspec.Struct, frozen=True, kw_only=True):
    """In what an architecture differs from the plain decoder. A string is the name of the config's field.

    Attributes:
        model_type: transformers' name of its config.
        defaults: of absent fields, where they differ from those of `aioengine.models.decoder_config.ConfigFields`.
        qkv_bias, output_bias: of the attention's projections.
        mlp_bias: of the MLP's.
        qk_norm: what is normalised before the rotation: each head's query and key, or all heads' as one.
        norms: of a layer, by their place: what a checkpoint calls them.
        norm_offset: added to the weights of all norms.
        windows: which layers attend to the last ``sliding_window`` tokens only.
        experts: how its config describes a mixture of experts; None: each layer has a plain MLP.
        has_sinks: each head has a logit that takes part in the softmax of its scores.
        rotates: which layers rotate queries and keys.
        has_ropes_by_type: ``rope_parameters`` are by layer type.
        rotates_part: ``partial_rotary_factor`` counts.
        is_interleaved: numbers that turn together are neighbours in a checkpoint.
        fused: matrices that are one in a checkpoint: "qkv", "gate_up".
        scales_embeddings: by √hidden_size.
        reads: which of `OF_SOME_FAMILIES` count.
        is_read_here: its config.json is read without transformers where that is known to be right, see `known_fields`.
    """

    model_type: str
    defaults: dict[str, Any] = {}
    qkv_bias: bool | str = False
    output_bias: bool | str = False
    mlp_bias: bool | str = False
    qk_norm: QkNorm | None = None
    norms: dict[NormPlace, str] = msgspec.field(default_factory=BEFORE.copy)
    norm_offset: float = 0.0
    windows: Literal["none", "all layers", "all layers if used", "layer_types"] = "none"
    rotates: Literal["all layers", "no_rope_layers", "layers with a window, where some have one"] = "all layers"
    has_ropes_by_type: bool = False
    rotates_part: bool = False
    is_interleaved: bool = False
    fused: tuple[str, ...] = ()
    scales_embeddings: bool = False
    reads: frozenset[str] = frozenset()
    is_read_here: bool = False
    experts: ExpertFields | None = None
    has_sinks: bool = False


BIASES: dict[str, Any] = {"qkv_bias": "attention_bias", "output_bias": "attention_bias"}
ARCHITECTURES = {
    "LlamaForCausalLM": Family(model_type="llama", is_read_here=True, **BIASES, mlp_bias="mlp_bias"),
    "MistralForCausalLM": Family(
        model_type="mistral", is_read_here=True, defaults={"num_key_value_heads": 8}, windows="all layers"
    ),
    "Qwen2ForCausalLM": Family(
        model_type="qwen2",
        is_read_here=True,
        defaults={"num_key_value_heads": 32},
        qkv_bias=True,
        windows="layer_types",
    ),
    "Qwen3ForCausalLM": Family(
        model_type="qwen3",
        is_read_here=True,
        defaults={"num_key_value_heads": 32, "head_dim": 128},
        **BIASES,
        qk_norm="heads",
        windows="layer_types",
    ),
    "Gemma2ForCausalLM": Family(
        model_type="gemma2",
        **BIASES,
        norms=GEMMA_NORMS,
        norm_offset=1.0,
        windows="layer_types",
        scales_embeddings=True,
        reads=GEMMA_FIELDS,
    ),
    "Gemma3ForCausalLM": Family(
        model_type="gemma3_text",
        **BIASES,
        qk_norm="heads",
        norms=GEMMA_NORMS,
        norm_offset=1.0,
        has_ropes_by_type=True,
        windows="layer_types",
        scales_embeddings=True,
        reads=GEMMA_FIELDS - {"attn_logit_softcapping"},  # in its config, and in no product of transformers' code
    ),
    "Phi3ForCausalLM": Family(model_type="phi3", windows="all layers", rotates_part=True, fused=("qkv", "gate_up")),
    "Olmo2ForCausalLM": Family(
        model_type="olmo2",
        **BIASES,
        qk_norm="all",
        norms=BEHIND,
    ),
    "Olmo3ForCausalLM": Family(
        model_type="olmo3",
        **BIASES,
        qk_norm="all",
        norms=BEHIND,
        has_ropes_by_type=True,
        windows="layer_types",
    ),
    "GraniteForCausalLM": Family(
        model_type="granite",
        **BIASES,
        mlp_bias="mlp_bias",
        reads=frozenset({"attention_multiplier", "embedding_multiplier", "residual_multiplier", "logits_scaling"}),
    ),
    "SmolLM3ForCausalLM": Family(
        model_type="smollm3",
        **BIASES,
        mlp_bias="mlp_bias",
        windows="layer_types",
        rotates="no_rope_layers",
        reads=frozenset({"no_rope_layers", "use_sliding_window"}),
    ),
    "GlmForCausalLM": Family(
        model_type="glm",
        qkv_bias="attention_bias",
        rotates_part=True,
        is_interleaved=True,
        fused=("gate_up",),
    ),
    "Glm4ForCausalLM": Family(
        model_type="glm4",
        qkv_bias="attention_bias",
        norms=GLM4_NORMS,
        rotates_part=True,
        is_interleaved=True,
        fused=("gate_up",),
    ),
    "MinistralForCausalLM": Family(model_type="ministral", windows="layer_types"),
    "Ministral3ForCausalLM": Family(model_type="ministral3", windows="all layers"),
    "SeedOssForCausalLM": Family(
        model_type="seed_oss",
        qkv_bias="attention_bias",
        output_bias="attention_out_bias",
        mlp_bias="mlp_bias",
    ),
    "Exaone4ForCausalLM": Family(
        model_type="exaone4",
        qk_norm="heads",
        norms=BEHIND,
        windows="layer_types",
        rotates="layers with a window, where some have one",
    ),
    "MixtralForCausalLM": Family(
        model_type="mixtral",
        is_read_here=True,
        defaults={
            "num_key_value_heads": 8,
            "rms_norm_eps": 1e-5,
            "rope_theta": 1e6,
            "sliding_window": None,
            "num_local_experts": 8,
            "num_experts_per_tok": 2,
        },
        windows="all layers",
        experts=ExpertFields(block="block_sparse_moe", gate="w1", up="w3", down="w2"),
    ),
    "Qwen2MoeForCausalLM": Family(
        model_type="qwen2_moe",
        is_read_here=True,
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
        is_read_here=True,
        defaults={
            "num_key_value_heads": 4,
            "num_local_experts": 128,
            "num_experts_per_tok": 8,
            "moe_intermediate_size": 768,
        },
        **BIASES,
        qk_norm="heads",
        windows="all layers if used",
        experts=ExpertFields(
            intermediate_size="moe_intermediate_size", is_normalised="norm_topk_prob", has_plain_layers=True
        ),
    ),
    "OlmoeForCausalLM": Family(
        model_type="olmoe",
        **BIASES,
        qk_norm="all",
        experts=ExpertFields(is_normalised="norm_topk_prob"),
    ),
    "GptOssForCausalLM": Family(
        model_type="gpt_oss",
        **BIASES,
        windows="layer_types",
        experts=ExpertFields(bias=True, activation="clamped_silu", router="router", is_transposed=True),
        has_sinks=True,
    ),
}

WRAPPERS = (
    "Gemma3ForConditionalGeneration",
    "LlavaForConditionalGeneration",
    "LlavaNextForConditionalGeneration",
    "Mistral3ForConditionalGeneration",
)
"""Models of text and images whose ``text_config`` describes one of these decoders, which is run."""


def native_architecture(config: dict[str, Any]) -> str | None:
    """The one of `ARCHITECTURES` that a config.json, or the text part of one of `WRAPPERS`, describes; else None."""
    names, text = config.get("architectures"), config.get("text_config")
    if not isinstance(names, list) or len(names) != 1 or not isinstance(names[0], str):
        return None
    if names[0] in WRAPPERS and isinstance(text, dict):
        of_text = (name for name, family in ARCHITECTURES.items() if family.model_type == text.get("model_type"))
        return next(of_text, None)
    return names[0] if names[0] in ARCHITECTURES else None


def text_config(config: dict[str, Any]) -> dict[str, Any]:
    """config.json of the text part alone, for one of `WRAPPERS`; any other as it is."""
    architecture = native_architecture(config)
    if architecture is None or config["architectures"] == [architecture]:
        return config
    text, kept = config["text_config"], ("dtype", "torch_dtype", "tie_word_embeddings", "eos_token_id")
    return {**text, **{name: config[name] for name in kept if name in config}, "architectures": [architecture]}
