"""Checkpoints that transformers saved, written as GGUF files by the `gguf` package, as llama.cpp's converter does.

The package is llama.cpp's own, and its names, types and quantisation are the reference here.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
import transformers
from gguf import GGMLQuantizationType as Type
from safetensors.torch import load_file, save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, trainers
from transformers.tokenization_utils_base import generate_merges

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, BYTE = 1, 2, 3, 4, 6
ARCHITECTURES = {
    "llama": "llama",
    "mistral": "llama",
    "mixtral": "llama",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "qwen2_moe": "qwen2moe",
    "qwen3_moe": "qwen3moe",
    "olmoe": "olmoe",
    "gemma2": "gemma2",
    "gemma3_text": "gemma3",
    "phi3": "phi3",
    "olmo2": "olmo2",
    "granite": "granite",
    "smollm3": "smollm3",
    "glm4": "glm4",
    "seed_oss": "seed_oss",
    "exaone4": "exaone4",
    "olmo3": "olmo2",
    "ministral3": "mistral3",
    "gpt_oss": "gpt-oss",
}
"""transformers' model type → llama.cpp's architecture."""

PAIRED = {"llama", "granite", "smollm3", "mistral3"}
ADD_ENDS = (gguf.GGUFWriter.add_eos_token_id, gguf.GGUFWriter.add_eot_token_id)
NUMBERS = {
    "max_position_embeddings": gguf.GGUFWriter.add_context_length,
    "hidden_size": gguf.GGUFWriter.add_embedding_length,
    "num_hidden_layers": gguf.GGUFWriter.add_block_count,
    "intermediate_size": gguf.GGUFWriter.add_feed_forward_length,
    "num_attention_heads": gguf.GGUFWriter.add_head_count,
    "num_key_value_heads": gguf.GGUFWriter.add_head_count_kv,
    "rms_norm_eps": gguf.GGUFWriter.add_layer_norm_rms_eps,
    "vocab_size": gguf.GGUFWriter.add_vocab_size,
    "num_experts": gguf.GGUFWriter.add_expert_count,
    "num_local_experts": gguf.GGUFWriter.add_expert_count,
    "num_experts_per_tok": gguf.GGUFWriter.add_expert_used_count,
    "moe_intermediate_size": gguf.GGUFWriter.add_expert_feed_forward_length,
    "shared_expert_intermediate_size": gguf.GGUFWriter.add_expert_shared_feed_forward_length,
    "sliding_window": gguf.GGUFWriter.add_sliding_window,
    "attn_logit_softcapping": gguf.GGUFWriter.add_attn_logit_softcapping,
    "final_logit_softcapping": gguf.GGUFWriter.add_final_logit_softcapping,
    "attention_multiplier": gguf.GGUFWriter.add_attention_scale,
    "embedding_multiplier": gguf.GGUFWriter.add_embedding_scale,
    "residual_multiplier": gguf.GGUFWriter.add_residual_scale,
    "logits_scaling": gguf.GGUFWriter.add_logit_scale,
}
"""What writes a field of config.json."""

WINDOWED = {"gemma2", "gemma3", "phi3", "exaone4", "olmo2", "gpt-oss"}
EXPERT = re.compile(r"(.+experts)\.(\d+)\.(.+)\.weight")
ROUTERS = ("mlp.gate.weight", "mlp.router.weight", "block_sparse_moe.gate.weight", "shared_expert_gate.weight")
"""They stay float32."""

Kind = Type | Callable[[str], Type]
"""Of a file's matrices: one for all, or by their names in the checkpoint."""


def write_gguf(source: Path, file: Path, *, kind: Kind = Type.F32, pre: str = "gpt-2", num_shards: int = 1) -> Path:
    """Write the checkpoint in a folder, its config and its tokenizer, if it has one, to a GGUF file.

    Matrices are of ``kind``; vectors and routers are float32.
    """
    config = json.loads((source / "config.json").read_text())
    arch = ARCHITECTURES[config["model_type"]]
    file.parent.mkdir(parents=True, exist_ok=True)
    per_shard = -(-len(load_file(source / "model.safetensors")) // num_shards) if num_shards > 1 else 0
    writer = gguf.GGUFWriter(file, arch, split_max_tensors=per_shard)
    _write_config(writer, config, arch)
    if (source / "tokenizer.json").is_file():
        write_tokenizer(writer, source, config["vocab_size"], pre)
    for name, array, its_kind in _tensors(source, config, arch, kind):
        writer.add_tensor(name, array, raw_dtype=its_kind)
    finish(writer)
    return file


def finish(writer: gguf.GGUFWriter) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _tensors(
    source: Path, config: dict[str, Any], arch: str, kind: Kind
) -> Iterator[tuple[str, np.ndarray[Any, Any], Type]]:
    """The model's tensors by llama.cpp's names, and their types."""
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH[arch.upper().replace("-", "_")], config["num_hidden_layers"])
    stacks: dict[str, list[np.ndarray[Any, Any]]] = {}
    tensors = dict(_as_llama_cpp_stacks(load_file(source / "model.safetensors")))
    for name, values in sorted(tensors.items(), key=_in_order):
        if name == "lm_head.weight" and config["tie_word_embeddings"]:
            continue
        its_kind = kind_of(name, values, kind)
        array = values.float().numpy() if its_kind == Type.F32 else quantized(values.float().numpy(), its_kind)
        if arch in PAIRED and ("q_proj" in name or "k_proj" in name):
            array = _pairs(array, config["num_attention_heads" if "q_proj" in name else "num_key_value_heads"])
        if arch.startswith("gemma") and name.endswith("norm.weight"):
            array = array + 1
        expert = EXPERT.fullmatch(name)
        if expert is None:
            yield names.get_name(name, try_suffixes=(".weight", ".bias")), array, its_kind
            continue
        stack = stacks.setdefault(f"{expert[1]}.{expert[3]}", [])
        stack.append(array)
        count = config.get("num_experts") or config.get("num_local_experts")
        if len(stack) == count:
            yield f"{names.get_name(f'{expert[1]}.{expert[3]}')}.weight", np.stack(stack), its_kind


def _as_llama_cpp_stacks(tensors: dict[str, torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
    """With gates and ups of gpt-oss's experts apart, and matrices [experts, out, in], as llama.cpp has them."""
    for name, values in tensors.items():
        stem, _, last = name.rpartition(".")
        matrix, is_bias = last.removesuffix("_bias"), last.endswith("_bias")
        if stem.endswith("experts") and matrix in ("gate_up_proj", "down_proj"):
            values, kind = (values, "bias") if is_bias else (values.mT, "weight")
            parts = {"down_proj": values}
            if matrix == "gate_up_proj":
                parts = {"gate_proj": values[:, ::2], "up_proj": values[:, 1::2]}
            yield from ((f"{stem}.{part}.{kind}", each.contiguous()) for part, each in parts.items())
        else:
            yield f"{name}.weight" if last == "sinks" else name, values


def _in_order(item: tuple[str, Any]) -> tuple[str, int]:
    """Experts by their numbers."""
    expert = EXPERT.fullmatch(item[0])
    return (item[0], 0) if expert is None else (f"{expert[1]}.{expert[3]}", int(expert[2]))


def kind_of(name: str, values: torch.Tensor, kind: Kind) -> Type:
    """In a file whose matrices are of ``kind``."""
    if values.dim() == 1 or name.endswith((*ROUTERS, "bias")):
        return Type.F32
    return kind(name) if callable(kind) else kind


def q4_k_m(name: str) -> Type:
    """Types by names, as llama.cpp mixes them in files that are called so: some values and downs are of 6 bits."""
    is_better = name == "lm_head.weight" or re.search(r"layers\.[02468]\..*(v_proj|down_proj)\.weight", name)
    return Type.Q6_K if is_better else Type.Q4_K


def dequantized(source: Path, folder: Path, kind: Kind) -> Path:
    """A float32 copy of a checkpoint in which matrices have the values that a GGUF file of ``kind`` gives them."""
    folder.mkdir()
    for path in source.iterdir():
        if path.suffix == ".json":
            (folder / path.name).write_bytes(path.read_bytes())
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "dtype": "float32"}))
    tensors = {}
    for name, values in load_file(source / "model.safetensors").items():
        its_kind, is_transposed = kind_of(name, values, kind), values.dim() == 3
        array = (values.mT.contiguous() if is_transposed else values).float().numpy()
        if its_kind != Type.F32:
            array = gguf.quants.dequantize(quantized(array, its_kind), its_kind).reshape(array.shape)
        dense = torch.from_numpy(array.copy())
        tensors[name] = dense.mT.contiguous() if is_transposed else dense
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def quantized(array: np.ndarray, kind: Type) -> np.ndarray:
    """As `gguf.quants.quantize`; of the types that it cannot make, random blocks with about the array's spread."""
    try:
        return gguf.quants.quantize(array, kind)
    except NotImplementedError:
        return random_blocks(array, kind)


def random_blocks(array: np.ndarray, kind: Type) -> np.ndarray:
    """Random codes and group scales; the float16 that scales a block gives it the array's standard deviation.

    The seed is made of the array, so that equal arrays give equal blocks.
    """
    num_values, num_bytes = gguf.GGML_QUANT_SIZES[kind]
    seed = int(np.abs(array).sum() * 1e3) % 2**32
    rng = np.random.default_rng(seed)
    blocks = rng.integers(0, 256, (array.size // num_values, num_bytes), dtype=np.uint8)
    halves = {Type.Q4_K: (0, 2), Type.Q5_K: (0, 2), Type.Q6_K: (208,), Type.IQ4_XS: (0,), Type.IQ4_NL: (0,)}[kind]
    for at in halves:
        blocks[:, at : at + 2] = np.float16(1.0).reshape(1, 1).view(np.uint8)
    spread = gguf.quants.dequantize(blocks, kind).std()
    for at in halves:
        scale = (array.std() / spread * rng.uniform(0.8, 1.2, len(blocks))).astype(np.float16)
        blocks[:, at : at + 2] = scale[:, None].view(np.uint8)
    return blocks.reshape(*array.shape[:-1], -1)


def _pairs(array: np.ndarray, num_heads: int) -> np.ndarray:
    """Rows in the order in which numbers that turn together are neighbours, as llama.cpp wants Llama's."""
    halves = array.reshape(num_heads, 2, array.shape[0] // num_heads // 2, *array.shape[1:])
    return np.ascontiguousarray(halves.swapaxes(1, 2).reshape(array.shape))


def _write_config(writer: gguf.GGUFWriter, config: dict[str, Any], arch: str) -> None:
    writer.add_name("tiny")
    for name, add in NUMBERS.items():
        if config.get(name) is not None and (name != "sliding_window" or arch in WINDOWED):
            add(writer, config[name])
    if arch == "gpt-oss":
        writer.add_expert_feed_forward_length(config["intermediate_size"])
    if config["model_type"] == "olmo3":
        writer.add_sliding_window_pattern([each == "sliding_attention" for each in config["layer_types"]])
    head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    rope = config["rope_parameters"]
    if arch == "mistral3":
        writer.add_rope_scaling_yarn_log_mul(rope["mscale_all_dim"])
        writer.add_attn_temperature_scale(rope["llama_4_scaling_beta"])
    if "full_attention" in rope:
        if arch == "gemma3":
            writer.add_rope_freq_base_swa(rope["sliding_attention"]["rope_theta"])
        rope = rope["full_attention"]
    num_turned = int(head_dim * rope.get("partial_rotary_factor", 1))
    writer.add_rope_dimension_count(num_turned)
    writer.add_rope_freq_base(rope["rope_theta"])
    kind = rope["rope_type"]
    if kind in ("linear", "yarn", "longrope"):
        writer.add_rope_scaling_type(gguf.RopeScalingType(kind))
    if kind in ("linear", "yarn"):
        writer.add_rope_scaling_factor(rope["factor"])
    if kind in ("yarn", "longrope"):
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
    if kind == "longrope":
        writer.add_rope_scaling_attn_factors(rope["attention_factor"])
        for length in ("long", "short"):
            writer.add_tensor(f"rope_factors_{length}.weight", np.array(rope[f"{length}_factor"], np.float32))
    if kind == "llama3":
        writer.add_tensor("rope_freqs.weight", llama3_factors(rope, head_dim))
    ends = config["eos_token_id"]
    for token_id, add in zip([ends, ends] if isinstance(ends, int) else ends, ADD_ENDS, strict=True):
        add(writer, token_id)


def llama3_factors(rope: dict[str, Any], head_dim: int) -> np.ndarray:
    """How many times slower each pair turns by Llama 3.1's scaling."""
    inv_freq = 1.0 / rope["rope_theta"] ** (np.arange(0, head_dim, 2, dtype=np.float32) / head_dim)
    low, high, length = rope["low_freq_factor"], rope["high_freq_factor"], rope["original_max_position_embeddings"]
    turns = length / (2 * np.pi / inv_freq)
    ramp = (turns - low) / (high - low)
    between = 1 / ((1 - ramp) / rope["factor"] + ramp)
    return np.where(turns < low, rope["factor"], np.where(turns > high, 1.0, between)).astype(np.float32)


def write_tokenizer(writer: gguf.GGUFWriter, source: Path, vocab_size: int, pre: str) -> None:
    """A folder's tokenizer, whose texts are split as ``pre`` says, if it is one of bytes."""
    tokenizer = json.loads((source / "tokenizer.json").read_text())
    settings = json.loads((source / "tokenizer_config.json").read_text())
    model, added = tokenizer["model"], {token["id"]: token for token in tokenizer["added_tokens"]}
    texts = {token_id: text for text, token_id in model["vocab"].items()}
    texts |= {token_id: token["content"] for token_id, token in added.items()}
    tokens = [texts.get(token_id, f"[PAD{token_id}]") for token_id in range(vocab_size)]
    types = [_type_of(token_id, text, added, model) for token_id, text in enumerate(tokens)]
    writer.add_tokenizer_model("llama" if model.get("byte_fallback") else "gpt2")
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    if model.get("byte_fallback"):
        # Each merge's result, the earliest the best.
        best = {"".join(merge): -float(rank) for rank, merge in reversed(list(enumerate(model["merges"])))}
        writer.add_token_scores([best.get(token, -1e6) for token in tokens])
        writer.add_add_space_prefix("Prepend" in json.dumps(tokenizer["normalizer"]))
    else:
        writer.add_tokenizer_pre(pre)
        writer.add_token_merges([" ".join(merge) for merge in model["merges"]])
    ids = {text: token_id for token_id, text in texts.items()}
    for name, add in (
        ("bos", writer.add_bos_token_id),
        ("unk", writer.add_unk_token_id),
        ("pad", writer.add_pad_token_id),
    ):
        if settings.get(f"{name}_token"):
            add(ids[settings[f"{name}_token"]])
    ends = (tokenizer["post_processor"] or {}).get("special_tokens", {})
    writer.add_add_bos_token(settings.get("bos_token") in ends)
    template = source / "chat_template.jinja"
    writer.add_chat_template(template.read_text() if template.is_file() else settings["chat_template"])


def sentencepiece(texts: list[str], *, has_prefix: bool) -> Tokenizer:
    """Trained on texts: BPE of characters, as in Llama 2's tokenizer.json: each way to a token is a merge."""
    normalizer = normalizers.Replace(" ", "▁")
    if has_prefix:
        normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizer])
    trained = Tokenizer(models.BPE())
    trained.normalizer = normalizer
    trained.train_from_iterator(texts, trainers.BpeTrainer(vocab_size=120, show_progress=False))
    pieces = sorted(trained.get_vocab().items(), key=lambda item: item[1])
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *(token for token, _ in pieces)]
    vocab = {token: token_id for token_id, token in enumerate(tokens)}
    merges = generate_merges(vocab, {token: -token_id for token, token_id in vocab.items()})
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    tokenizer.normalizer = normalizer
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*steps, *([decoders.Strip(" ", 1, 0)] if has_prefix else [])])
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in tokens[:3]])
    return tokenizer


def save_sentencepiece(folder: Path) -> None:
    """Save such a tokenizer, with no more tokens than the tiny checkpoints have."""
    tokenizer = sentencepiece(["the quick brown fox jumps over the lazy dog"], has_prefix=True)
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", unk_token="<unk>", chat_template="{{ messages }}"
    ).save_pretrained(folder)


def _type_of(token_id: int, text: str, added: dict[int, Any], model: dict[str, Any]) -> int:
    if text == model.get("unk_token"):
        return UNKNOWN
    if token_id in added:
        return CONTROL if added[token_id]["special"] else USER_DEFINED
    is_byte = model.get("byte_fallback") and len(text) == 6 and text.startswith("<0x")
    return BYTE if is_byte else NORMAL
