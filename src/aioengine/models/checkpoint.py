"""What a checkpoint's tensors are called, and where in a decoder they go."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec
import torch
from torch import Tensor, nn

from aioengine.models.families import DecoderConfig

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
FILE_DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
EMBEDDING = "model.embed_tokens.weight"
HEAD = "lm_head.weight"


class CheckpointTensor(msgspec.Struct, frozen=True):
    """Where a checkpoint's tensor goes: rows of a parameter, which it fills, or broadcasts into.

    Attributes:
        parameter: its name in the decoder.
        first, count: which rows of it.
        shape: of the tensor in a checkpoint.
    """

    parameter: str
    first: int
    count: int
    shape: tuple[int, ...]

    def of(self, parameter: Tensor) -> Tensor:
        """The rows, as a view of the dense parameter."""
        return parameter.narrow(0, self.first, self.count)

    def within(self, decoder: nn.Module) -> Tensor:
        """As `of`, of a decoder whose parameters are not packed."""
        return self.of(decoder.get_parameter(self.parameter))

    def read(self, parameter: Tensor) -> Tensor:
        """The tensor as a checkpoint holds it, as a view."""
        rows = self.of(parameter)
        return rows if len(self.shape) == rows.dim() else rows[0]


def checkpoint_tensors(config: DecoderConfig) -> dict[str, CheckpointTensor]:
    """For each tensor of a checkpoint, by its name there, where it goes in a decoder with this config.

    A tied head is the embedding, and no tensor of its own.
    """
    vocab_size, hidden_size = config.vocab_size, config.hidden_size
    tensors = {
        EMBEDDING: CheckpointTensor("embedding.weight", 0, vocab_size, (vocab_size, hidden_size)),
        "model.norm.weight": CheckpointTensor("norm", 0, hidden_size, (hidden_size,)),
    }
    if not config.tie_word_embeddings:
        tensors[HEAD] = CheckpointTensor("head.weight", 0, vocab_size, (vocab_size, hidden_size))
    for index in range(config.num_layers):
        for name, tensor in _layer_tensors(config, f"layers.{index}"):
            tensors[f"model.layers.{index}.{name}"] = tensor
    return tensors


def _layer_tensors(c: DecoderConfig, layer: str) -> Iterator[tuple[str, CheckpointTensor]]:
    q, kv, mlp, hidden = c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim, c.intermediate_size, c.hidden_size
    yield "input_layernorm.weight", CheckpointTensor(f"{layer}.input_norm", 0, hidden, (hidden,))
    yield "post_attention_layernorm.weight", CheckpointTensor(f"{layer}.mlp_norm", 0, hidden, (hidden,))
    of_qkv = {"self_attn.q_proj": q, "self_attn.k_proj": kv, "self_attn.v_proj": kv}
    yield from _stacked(f"{layer}.qkv", of_qkv, hidden, c.qkv_bias)
    yield from _stacked(f"{layer}.output", {"self_attn.o_proj": hidden}, q, c.output_bias)
    yield from _stacked(f"{layer}.mlp.gate_up", {"mlp.gate_proj": mlp, "mlp.up_proj": mlp}, hidden, c.mlp_bias)
    yield from _stacked(f"{layer}.mlp.down", {"mlp.down_proj": hidden}, mlp, c.mlp_bias)
    if c.qk_norm:
        norm = f"{layer}.qk_norm"
        yield "self_attn.q_norm.weight", CheckpointTensor(norm, 0, c.num_heads, (c.head_dim,))
        yield "self_attn.k_norm.weight", CheckpointTensor(norm, c.num_heads, c.num_kv_heads, (c.head_dim,))


def _stacked(
    linear: str, parts: dict[str, int], in_features: int, bias: bool
) -> Iterator[tuple[str, CheckpointTensor]]:
    """Matrices (and biases) that lie one above the other, each with so many outputs."""
    first = 0
    for name, count in parts.items():
        yield f"{name}.weight", CheckpointTensor(f"{linear}.weight", first, count, (count, in_features))
        if bias:
            yield f"{name}.bias", CheckpointTensor(f"{linear}.bias", first, count, (count,))
        first += count
