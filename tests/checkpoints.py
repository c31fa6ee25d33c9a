"""Tiny random checkpoints of each supported family, saved by transformers, for tests that want real files.

The weights are large, so that a token's logits depend on the whole context, the likeliest token leads clearly, and
greedy outputs are diverse: wrong positions, windows or caches give other tokens, and rounding does not.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

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

FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama2": ("Llama", {}),
    "llama3": ("Llama", {"rope_parameters": LLAMA3_ROPE}),
    "llama-linear": (
        "Llama",
        {"rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0}},
    ),
    "llama-yarn": ("Llama", {"rope_parameters": YARN_ROPE}),
    "mistral": ("Mistral", {"sliding_window": 8}),
    "qwen2": ("Qwen2", {}),
    "qwen2-window": ("Qwen2", WINDOW_OF_SOME),
    "qwen3": ("Qwen3", {"head_dim": 32, "tie_word_embeddings": True}),
    "mixtral": ("Mixtral", {"num_local_experts": 5, "num_experts_per_tok": 2}),
    "qwen2-moe": ("Qwen2Moe", {**EXPERTS, "shared_expert_intermediate_size": 48, "decoder_sparse_step": 2}),
    "qwen3-moe": ("Qwen3Moe", {**EXPERTS, "norm_topk_prob": True, "mlp_only_layers": [1], "head_dim": 32}),
}
"""Family → transformers' name for it, and in what its config differs from `COMMON`."""


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
        family: a key of `FAMILIES`.
        shards: how many files the weights are spread over, about.
        tokenizer: whether to save `byte_tokenizer` beside it.
        overrides: fields of the transformers config.
    """
    name, differences = FAMILIES[family]
    config_type = getattr(transformers, f"{name}Config")
    config = config_type(**{**COMMON, **differences, **overrides}, dtype=dtype)
    with torch.device("meta"):
        model = getattr(transformers, f"{name}ForCausalLM")(config)
    model = _with_random_weights(model, seed, dtype)
    model.generation_config = transformers.GenerationConfig(
        bos_token_id=config.bos_token_id, eos_token_id=config.eos_token_id, pad_token_id=config.pad_token_id
    )
    num_bytes = sum(parameter.nbytes for parameter in model.parameters())
    model.save_pretrained(folder, max_shard_size=num_bytes // shards if shards > 1 else "5GB")
    if tokenizer:
        save_byte_tokenizer(folder)
    return folder


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


def _with_random_weights(model: Any, seed: int, dtype: torch.dtype) -> Any:
    generator = torch.Generator().manual_seed(seed)
    values = {}
    for name, parameter in model.named_parameters():  # tied ones come once
        noise = torch.randn(parameter.shape, generator=generator)
        if name.endswith("norm.weight"):
            # Query and key norms set how sharp the attention is.
            values[name] = (1.5 if "self_attn" in name else 1.0) + 0.2 * noise
        elif name.endswith("bias"):
            values[name] = 0.5 * noise
        else:
            # About the same spread of what a product gives for each size of its input.
            gain = 3.2 if "embed_tokens" in name or "lm_head" in name else 1.6
            values[name] = gain * parameter.shape[-1] ** -0.5 * noise
        values[name] = values[name].to(dtype)
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
