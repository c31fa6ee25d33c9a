"""Tiny random checkpoints of each supported family, saved by transformers, for tests that want real files.

The weights are large, so that a token's logits depend on the whole context, the likeliest token leads clearly, and
greedy outputs are diverse: wrong positions, windows or caches give other tokens, and rounding does not.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from itertools import cycle, islice
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import pytest
import torch
import transformers

from aioengine.models.families import ARCHITECTURES

BOS, EOS, PAD = 1, 2, 0
NUM_SPECIAL = 3

COMMON: dict[str, Any] = {
    "vocab_size": 384,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "tie_word_embeddings": False,
    "bos_token_id": BOS,
    "eos_token_id": EOS,
    "pad_token_id": PAD,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN_ROPE = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 64}
WINDOW_OF_SOME = {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1}
EXPERTS = {"num_experts": 7, "num_experts_per_tok": 3, "moe_intermediate_size": 40}

SLIDING, FULL = "sliding_attention", "full_attention"
SOME_WINDOWS = {"sliding_window": 8, "layer_types": [SLIDING, FULL, SLIDING]}
PLAIN_ROPE = {"rope_type": "default", "rope_theta": 10000.0}
ROPES_BY_TYPE = {SLIDING: PLAIN_ROPE, FULL: {"rope_type": "linear", "rope_theta": 5000.0, "factor": 2.0}}
# transformers takes the long factors once a sequence is longer than the original length, and our engine for all, if any
# may be: at 1 they agree.
LONG_ROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0 + 0.1 * index for index in range(8)],
    "long_factor": [2.0 + 0.3 * index for index in range(8)],
    "original_max_position_embeddings": 1,
    "attention_factor": 1.05,  # twice in each score: more would make half precision far worse than it is
}
SHORT_ROPE = {
    **LONG_ROPE,
    "partial_rotary_factor": 0.75,
    "short_factor": [1.0 + 0.2 * index for index in range(6)],
    "long_factor": [9.0] * 6,
    "original_max_position_embeddings": 256,
}
HALF_ROPE = {**PLAIN_ROPE, "partial_rotary_factor": 0.5}
SCALED_ROPE = {**YARN_ROPE, "original_max_position_embeddings": 256, "factor": 2.0, "llama_4_scaling_beta": 0.1}
GEMMA = {"hidden_activation": "gelu_pytorch_tanh", "query_pre_attn_scalar": 24, **SOME_WINDOWS}
GEMMA3 = {**GEMMA, "rope_parameters": ROPES_BY_TYPE}
MULTIPLIERS = {
    "embedding_multiplier": 2.0,
    "residual_multiplier": 0.6,
    "attention_multiplier": 0.3,
    "logits_scaling": 0.8,
}
VISION = {
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "patch_size": 14,
}


class Family(NamedTuple):
    """A family of models, as tests make one of it.

    Attributes:
        transformers: what its classes there are called, before Config and ForCausalLM.
        differences: of its config from `COMMON`.
        config: what its config is called behind that.
        wrapper: what the classes of a model of texts and images are called, whose text part it is.
        is_whole: ``differences`` is all of its config.
    """

    transformers: str
    differences: Mapping[str, Any] = MappingProxyType({})
    config: str = "Config"
    wrapper: str = ""
    is_whole: bool = False

    @property
    def architecture(self) -> str:
        """As config.json names it."""
        return f"{self.wrapper}ForConditionalGeneration" if self.wrapper else f"{self.transformers}ForCausalLM"


FAMILIES: dict[str, Family] = {
    "llama2": Family("Llama", {}),
    "llama3": Family("Llama", {"rope_parameters": LLAMA3_ROPE}),
    "llama-linear": Family(
        "Llama",
        {"rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0}},
    ),
    "llama-yarn": Family("Llama", {"rope_parameters": YARN_ROPE}),
    "mistral": Family("Mistral", {"sliding_window": 8}),
    "qwen2": Family("Qwen2", {}),
    "qwen2-window": Family("Qwen2", WINDOW_OF_SOME),
    "qwen3": Family("Qwen3", {"head_dim": 32, "tie_word_embeddings": True}),
    "mixtral": Family("Mixtral", {"num_local_experts": 5, "num_experts_per_tok": 2}),
    "qwen2-moe": Family("Qwen2Moe", {**EXPERTS, "shared_expert_intermediate_size": 48, "decoder_sparse_step": 2}),
    "qwen3-moe": Family("Qwen3Moe", {**EXPERTS, "norm_topk_prob": True, "mlp_only_layers": [1], "head_dim": 32}),
    "olmoe": Family("Olmoe", {"num_experts": 6, "num_experts_per_tok": 2, "intermediate_size": 40}),
    "gpt-oss": Family(
        "GptOss", {**SOME_WINDOWS, "num_local_experts": 5, "num_experts_per_tok": 3, "intermediate_size": 48}
    ),
    "gemma2": Family("Gemma2", {**GEMMA, "attn_logit_softcapping": 5.0, "final_logit_softcapping": 6.0}),
    "gemma3": Family("Gemma3", GEMMA3, config="TextConfig"),
    "gemma3-images": Family("Gemma3", GEMMA3, config="TextConfig", wrapper="Gemma3"),
    "phi3": Family("Phi3", {"sliding_window": 8}),
    "phi3-long": Family("Phi3", {"rope_parameters": LONG_ROPE, "original_max_position_embeddings": 1}),
    "phi4-mini": Family("Phi3", {"rope_parameters": SHORT_ROPE, "original_max_position_embeddings": 256}),
    "olmo2": Family("Olmo2"),
    "olmo3": Family("Olmo3", {**SOME_WINDOWS, "rope_parameters": {SLIDING: PLAIN_ROPE, FULL: YARN_ROPE}}),
    "granite": Family("Granite", MULTIPLIERS),
    "smollm3": Family("SmolLM3", {"no_rope_layers": [1, 0, 1]}),
    "glm": Family("Glm", {"rope_parameters": HALF_ROPE, "attention_bias": True}),
    "glm4": Family("Glm4", {"rope_parameters": HALF_ROPE, "attention_bias": True}),
    "ministral": Family("Ministral", SOME_WINDOWS),
    "ministral3": Family("Ministral3", {"rope_parameters": SCALED_ROPE, "max_position_embeddings": 512}),
    "mistral3-images": Family("Mistral", {"sliding_window": None}, wrapper="Mistral3"),
    "seed-oss": Family("SeedOss", {"attention_bias": True, "attention_out_bias": True}),
    "exaone4": Family("Exaone4", SOME_WINDOWS),
}
"""What the native decoder runs, by a name of ours: several of a family where its layers may differ."""

PLAIN: dict[str, Any] = {"vocab_size": 384, "bos_token_id": BOS, "eos_token_id": EOS, "pad_token_id": PAD}
SIZES = {key: COMMON[key] for key in ("hidden_size", "num_hidden_layers", "num_attention_heads")}
LIKE_LLAMA = {**COMMON, "num_hidden_layers": 2}
del LIKE_LLAMA["head_dim"]
LIKE_GPT2 = {**PLAIN, "n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 256}
OPT = {**PLAIN, **SIZES, "ffn_dim": 128, "max_position_embeddings": 256, "word_embed_proj_dim": 64}
DEEPSEEK = {
    **LIKE_LLAMA,
    "num_key_value_heads": 4,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 12,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "moe_intermediate_size": 32,
}

OTHERS: dict[str, Family] = {
    "gpt2": Family("GPT2", LIKE_GPT2, is_whole=True),
    "gpt-neox": Family("GPTNeoX", LIKE_LLAMA, is_whole=True),
    "cohere": Family("Cohere", {**LIKE_LLAMA, "logit_scale": 0.5}, is_whole=True),
    "cohere2": Family("Cohere2", {**LIKE_LLAMA, "sliding_window": 8, "layer_types": [SLIDING, FULL]}, is_whole=True),
    "stablelm": Family("StableLm", LIKE_LLAMA, is_whole=True),
    "opt": Family("OPT", OPT, is_whole=True),
    "phi": Family("Phi", LIKE_LLAMA, is_whole=True),
    "starcoder2": Family("Starcoder2", {**LIKE_LLAMA, "sliding_window": 24}, is_whole=True),
    "nemotron": Family("Nemotron", LIKE_LLAMA, is_whole=True),
    "gptj": Family("GPTJ", {**LIKE_GPT2, "rotary_dim": 8}, is_whole=True),
    "gpt-bigcode": Family("GPTBigCode", LIKE_GPT2, is_whole=True),
    "deepseek-v3": Family("DeepseekV3", DEEPSEEK, is_whole=True),
}
"""What has no native path, and runs by transformers' code."""

READ_HERE = [
    name
    for name, family in FAMILIES.items()
    if family.architecture in ARCHITECTURES and ARCHITECTURES[family.architecture].is_read_here
]
"""Those whose config.json is read without transformers."""


def make_checkpoint(
    folder: Path,
    family: str,
    *,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    shards: int = 1,
    tokenizer: bool = False,
    **overrides: Any,
) -> Path:
    """Save a random model to ``folder`` (created) and return it.

    Args:
        family: a key of `FAMILIES` or `OTHERS`.
        shards: how many files the weights are spread over, about.
        tokenizer: whether to save `byte_tokenizer` beside it.
        overrides: fields of the transformers config.
    """
    of = (FAMILIES | OTHERS)[family]
    fields = {**({} if of.is_whole else COMMON), **of.differences, **overrides}
    for name in ("layer_types", "no_rope_layers"):
        if name in of.differences and name not in overrides:
            fields[name] = [*islice(cycle(fields[name]), fields["num_hidden_layers"])]
    config = getattr(transformers, of.transformers + of.config)(**fields, dtype=dtype)
    whole = config
    if of.wrapper:
        is_tied = config.tie_word_embeddings
        whole = getattr(transformers, f"{of.wrapper}Config")(
            text_config=config, vision_config={**VISION, "image_size": 28}, tie_word_embeddings=is_tied, dtype=dtype
        )
    with torch.device("meta"):
        make = transformers.AutoModelForCausalLM.from_config if of.is_whole else getattr(transformers, of.architecture)
        model = make(whole)
    model = _with_random_weights(model, seed, dtype, of.is_whole)
    model.generation_config = transformers.GenerationConfig(
        bos_token_id=config.bos_token_id, eos_token_id=config.eos_token_id, pad_token_id=config.pad_token_id
    )
    num_bytes = sum(parameter.nbytes for parameter in model.parameters())
    model.save_pretrained(folder, max_shard_size=num_bytes // shards if shards > 1 else "5GB")
    if tokenizer:
        save_byte_tokenizer(folder)
    return folder


def load_reference(folder: Path, **options: Any) -> Any:
    """transformers' own model of a checkpoint; options as ``from_pretrained`` has them."""
    architecture = json.loads((folder / "config.json").read_text())["architectures"][0]
    return getattr(transformers, architecture).from_pretrained(folder, **options).eval()


def cached_checkpoints(root: Path) -> Callable[..., Path]:
    """`make_checkpoint` without its folder: the same arguments give the same folder under ``root``, made once.

    What it gives is shared between tests: copy it before changing it.
    """
    made: dict[str, Path] = {}

    def checkpoint(family: str, **arguments: Any) -> Path:
        key = json.dumps([family, arguments], sort_keys=True, default=str)
        if key not in made:
            made[key] = make_checkpoint(root / f"{len(made)}-{family}", family, **arguments)
        return made[key]

    return checkpoint


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """`make_checkpoint` without its folder; the same arguments give the same folder, for all tests."""
    return cached_checkpoints(tmp_path_factory.mktemp("checkpoints"))


def _with_random_weights(model: Any, seed: int, dtype: torch.dtype, is_whole: bool) -> Any:
    generator = torch.Generator().manual_seed(seed)
    values = {}
    for name, parameter in model.named_parameters():  # tied ones come once
        noise = torch.randn(parameter.shape, generator=generator)
        if name.endswith("norm.weight") or (parameter.dim() == 1 and name.endswith("weight")):
            # Query and key norms set how sharp the attention is. Gemma's weights are added to 1.
            mean = (1.5 if "self_attn" in name else 1.0) - ("Gemma" in type(model).__name__)
            values[name] = mean + 0.2 * noise
        elif name.endswith("bias"):
            # Added to the residual stream, or by the last norm, much of it makes one token the likeliest anywhere.
            values[name] = (0.1 if is_whole else 0.5) * noise
        else:
            # About the same spread of what a product gives for each size of its input.
            # What a tied embedding gives for a token would else be, above all, that token.
            of_tied = any(part in name for part in ("wte", "word_embeddings"))
            gain = 3.2 if "embed_tokens" in name or "lm_head" in name else 0.8 if of_tied else 1.6
            values[name] = gain * parameter.shape[-1] ** -0.5 * noise
        values[name] = values[name].to(dtype)
    kept = model.state_dict()
    values |= {name: torch.zeros_like(each, device="cpu") for name, each in model.named_buffers() if name in kept}
    model.load_state_dict(values, assign=True, strict=False)
    model.tie_weights()
    assert not any(parameter.is_meta for parameter in model.parameters())
    return model


def save_byte_tokenizer(folder: Path) -> None:
    """Save a tokenizer in which each byte is a token, at 3 + the byte's place in the byte-level alphabet.

    With ``<pad>`` 0, ``<s>`` 1 (put before each text), ``</s>`` 2, and a chat template.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors

    specials = ["<pad>", "<s>", "</s>"]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: token_id for token_id, token in enumerate([*specials, *alphabet])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(specials)
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", BOS)])
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        bos_token="<s>",
        eos_token="</s>",
        chat_template=(
            "{{ bos_token }}{% for message in messages %}[{{ message['role'] }}]{{ message['content'] }}\n{% endfor %}"
            "{% if add_generation_prompt %}[assistant]{% endif %}"
        ),
    ).save_pretrained(folder)
