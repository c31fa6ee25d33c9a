"""What a checkpoint's tensors are called, and where in a decoder they go."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec
import torch
from torch import Tensor, nn

from aioengine.kernels.packed_weight import in_panels
from aioengine.models.experts import ExpertsConfig
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

    def row_ids(self, parameter: Tensor) -> Tensor:
        """Which rows of the parameter the outputs of the tensor's matrices are, one matrix after the other: int64."""
        return self.of(torch.arange(len(parameter))[:, None]).flatten()

    def read(self, parameter: Tensor) -> Tensor:
        """The tensor as a checkpoint holds it, as a view."""
        rows = self.of(parameter)
        return rows if len(self.shape) == rows.dim() else rows[0]


class StackedTensor(CheckpointTensor, frozen=True):
    """All experts of a layer, [experts, rows, ...]: rows of a parameter in which each expert begins a panel.

    Attributes:
        num_experts: of the tensor; each has ``count`` rows of it.
        is_transposed: [experts, inputs, rows] in the checkpoint.
    """

    num_experts: int
    is_transposed: bool = False

    def of(self, parameter: Tensor) -> Tensor:
        experts = parameter.view(self.num_experts, -1, *parameter.shape[1:])
        rows = experts.narrow(1, self.first, self.count)
        return rows.transpose(1, 2) if self.is_transposed else rows


class ExpertNames(msgspec.Struct, frozen=True, kw_only=True):
    """What a layer's mixture of experts is called in a checkpoint."""

    block: str = "mlp"
    router: str = "gate"
    gate: str = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"


EXPERT_NAMES = {"MixtralForCausalLM": ExpertNames(block="block_sparse_moe", gate="w1", up="w3", down="w2")}
"""By architecture, where they differ."""


def checkpoint_tensors(config: DecoderConfig, *, has_stacks: bool = False) -> dict[str, CheckpointTensor]:
    """For each tensor of a checkpoint, by its name there, where it goes in a decoder with this config.

    A tied head is the embedding, and no tensor of its own.

    Args:
        has_stacks: the experts of a layer are one tensor, as in transformers' memory; else each expert has its own.
    """
    vocab_size, hidden_size = config.vocab_size, config.hidden_size
    tensors = {
        EMBEDDING: CheckpointTensor("embedding.weight", 0, vocab_size, (vocab_size, hidden_size)),
        "model.norm.weight": CheckpointTensor("norm", 0, hidden_size, (hidden_size,)),
    }
    if not config.tie_word_embeddings:
        tensors[HEAD] = CheckpointTensor("head.weight", 0, vocab_size, (vocab_size, hidden_size))
    for index in range(config.num_layers):
        for name, tensor in _layer_tensors(config, index, has_stacks):
            tensors[f"model.layers.{index}.{name}"] = tensor
    return tensors


def _layer_tensors(c: DecoderConfig, index: int, has_stacks: bool) -> Iterator[tuple[str, CheckpointTensor]]:
    layer = f"layers.{index}"
    q, kv, mlp, hidden = c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim, c.intermediate_size, c.hidden_size
    yield "input_layernorm.weight", CheckpointTensor(f"{layer}.input_norm", 0, hidden, (hidden,))
    yield "post_attention_layernorm.weight", CheckpointTensor(f"{layer}.mlp_norm", 0, hidden, (hidden,))
    of_qkv = {"self_attn.q_proj": q, "self_attn.k_proj": kv, "self_attn.v_proj": kv}
    yield from _stacked(f"{layer}.qkv", of_qkv, hidden, c.qkv_bias)
    yield from _stacked(f"{layer}.output", {"self_attn.o_proj": hidden}, q, c.output_bias)
    if c.experts is None or not c.experts.layers[index]:
        yield from _mlp(f"{layer}.mlp", "mlp", hidden, mlp, c.mlp_bias)
    else:
        yield from _expert_tensors(c, c.experts, f"{layer}.mlp", has_stacks)
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


def _mlp(mlp: str, name: str, hidden: int, size: int, bias: bool) -> Iterator[tuple[str, CheckpointTensor]]:
    yield from _stacked(f"{mlp}.gate_up", {f"{name}.gate_proj": size, f"{name}.up_proj": size}, hidden, bias)
    yield from _stacked(f"{mlp}.down", {f"{name}.down_proj": hidden}, size, bias)


def _expert_tensors(
    c: DecoderConfig, experts: ExpertsConfig, mlp: str, has_stacks: bool
) -> Iterator[tuple[str, CheckpointTensor]]:
    names, hidden, size = EXPERT_NAMES.get(c.architecture, ExpertNames()), c.hidden_size, experts.intermediate_size
    block = "mlp" if has_stacks else names.block
    router = {f"{block}.{names.router}": experts.count}
    if experts.shared_size:
        router[f"{block}.shared_expert_gate"] = 1
        yield from _mlp(f"{mlp}.shared", f"{block}.shared_expert", hidden, experts.shared_size, experts.bias)
    yield from _stacked(f"{mlp}.router", router, hidden, experts.bias)
    gate_up, down, prefix = f"{mlp}.gate_up.weight", f"{mlp}.down.weight", f"{block}.experts"
    count = experts.count
    if has_stacks:
        yield f"{prefix}.gate_up_proj", StackedTensor(gate_up, 0, 2 * size, (count, 2 * size, hidden), count)
        yield f"{prefix}.down_proj", StackedTensor(down, 0, hidden, (count, hidden, size), count)
        return
    for expert in range(count):
        first = expert * in_panels(2 * size)
        for name, at in ((names.gate, first), (names.up, first + size)):
            yield f"{prefix}.{expert}.{name}.weight", CheckpointTensor(gate_up, at, size, (size, hidden))
        at = expert * in_panels(hidden)
        yield f"{prefix}.{expert}.{names.down}.weight", CheckpointTensor(down, at, hidden, (hidden, size))
