"""The names of a checkpoint's tensors, and their places in a decoder."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator
from functools import cache
from typing import NamedTuple, TypeVar, cast

import msgspec
import torch
from torch import Tensor

from aioengine.kernels.packed_weight import CodedWeight, in_panels
from aioengine.models.decoder_config import DecoderConfig, ExpertsConfig

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
FILE_DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
Values = TypeVar("Values", bound=Tensor | CodedWeight)
EMBEDDING = "model.embed_tokens.weight"
HEAD = "lm_head.weight"


TEXT_PREFIXES = {
    "language_model.model.": "model.",
    "language_model.lm_head.": "lm_head.",
    "model.language_model.": "model.",
}
"""Prefixes of the text part's tensors in a model of texts and images (two ways), and in the text part alone."""

OTHER_PARTS = re.compile(r"(model\.)?(vision_tower|vision_model|multi_modal_projector|image_newline)\b")

Found = TypeVar("Found")


def of_text(tensors: dict[str, Found]) -> dict[str, Found]:
    """The text part's tensors of a model of texts and images, by the names that they have alone; else all."""
    prefixes = tuple(TEXT_PREFIXES)
    if not any(name.startswith(prefixes) for name in tensors):
        return tensors
    found: dict[str, Found] = {}
    for name, tensor in tensors.items():
        if not OTHER_PARTS.match(name):
            prefix = next((prefix for prefix in prefixes if name.startswith(prefix)), "")
            found[TEXT_PREFIXES.get(prefix, "") + name.removeprefix(prefix)] = tensor
    return found


class CheckpointTensor(msgspec.Struct, frozen=True):
    """Where a checkpoint's tensor goes: rows of a parameter, which it fills, or broadcasts into.

    Attributes:
        parameter: its name in the decoder.
        first, count: which rows of it.
        shape: of the tensor in a checkpoint.
        order: [shape[0]], which row of the tensor each row of the parameter is; None: the same.
    """

    parameter: str
    first: int
    count: int
    shape: tuple[int, ...]
    order: tuple[int, ...] | None = None

    def of(self, parameter: Tensor) -> Tensor:
        """The rows, as a view of the dense parameter; in the tensor's shape, unless it is broadcast."""
        rows = parameter.narrow(0, self.first, self.count)
        return rows.view(self.shape) if rows.numel() == math.prod(self.shape) else rows

    def arrange(self, values: Values) -> Values:
        """The tensor as the parameter has it: its rows in their order there."""
        if self.order is None:
            return values
        return cast(Values, values[torch.tensor(self.order, dtype=torch.long, device=values.device)])

    def row_ids(self, parameter: Tensor) -> Tensor:
        """int64: the rows of the parameter that the tensor's outputs are, one matrix after the other."""
        return self.of(torch.arange(len(parameter))[:, None]).flatten()

    def read(self, parameter: Tensor) -> Tensor:
        """The tensor as a checkpoint holds it, as a view unless its rows are in another order there."""
        rows = self.of(parameter)
        values = rows if len(self.shape) == rows.dim() else rows[0]
        return (
            values
            if self.order is None
            else values[torch.tensor(self.order, dtype=torch.long, device=values.device).argsort()]
        )


class StackedTensor(CheckpointTensor, frozen=True, kw_only=True):
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


def checkpoint_tensors(config: DecoderConfig, stored: Iterable[str] = ()) -> dict[str, CheckpointTensor]:
    """For each tensor of a checkpoint, by its name there, where it goes in a decoder with this config.

    A tied head is the embedding, and no tensor of its own.

    Args:
        stored: the names that a checkpoint has: the experts of a layer may be one tensor, as in transformers' memory.
    """
    has_stacks = any(name.endswith(".experts.gate_up_proj") for name in stored)
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
    family = c.family
    for place, name in family.norms.items():
        yield f"{name}.weight", CheckpointTensor(f"{layer}.norms.{place}", 0, hidden, (hidden,))
    order_q, order_kv = _row_order(c.head_order, c.num_heads), _row_order(c.head_order, c.num_kv_heads)
    of_qkv = [
        Part("self_attn.q_proj", q, order_q),
        Part("self_attn.k_proj", kv, order_kv),
        Part("self_attn.v_proj", kv),
    ]
    if "qkv" in family.fused:
        of_qkv = [Part("self_attn.qkv_proj", q + 2 * kv, _joined(of_qkv))]
    yield from _stacked(f"{layer}.qkv", of_qkv, hidden, c.qkv_bias)
    yield from _stacked(f"{layer}.output", [Part("self_attn.o_proj", hidden)], q, c.output_bias)
    if c.experts is None or not c.experts.layers[index]:
        yield from _mlp(f"{layer}.mlp", "mlp", hidden, mlp, c.mlp_bias, is_fused="gate_up" in family.fused)
    else:
        yield from _expert_tensors(c, c.experts, f"{layer}.mlp", has_stacks)
    if family.has_sinks:
        yield "self_attn.sinks", CheckpointTensor(f"{layer}.sinks", 0, c.num_heads, (c.num_heads,))
    if c.qk_norm is not None:
        norm, is_wide = f"{layer}.qk_norm", c.qk_norm == "all"
        for name, first, count in (("q", 0, c.num_heads), ("k", c.num_heads, c.num_kv_heads)):
            shape, order = ((count * c.head_dim,), count) if is_wide else ((c.head_dim,), 1)
            tensor = CheckpointTensor(norm, first, count, shape, _row_order(c.head_order, order))
            yield f"self_attn.{name}_norm.weight", tensor


class Part(NamedTuple):
    """A matrix of a checkpoint, of those that lie one above the other in one of the decoder.

    Attributes:
        num_rows: its outputs.
        order: as in `CheckpointTensor`.
    """

    name: str
    num_rows: int
    order: tuple[int, ...] | None = None


def _stacked(linear: str, parts: list[Part], in_features: int, bias: bool) -> Iterator[tuple[str, CheckpointTensor]]:
    """The parts' matrices, and their biases."""
    first = 0
    for name, count, order in parts:
        yield f"{name}.weight", CheckpointTensor(f"{linear}.weight", first, count, (count, in_features), order)
        if bias:
            yield f"{name}.bias", CheckpointTensor(f"{linear}.bias", first, count, (count,), order)
        first += count


def _mlp(
    mlp: str, name: str, hidden: int, size: int, bias: bool, *, is_fused: bool = False
) -> Iterator[tuple[str, CheckpointTensor]]:
    gate_up = [Part(f"{name}.gate_proj", size), Part(f"{name}.up_proj", size)]
    if is_fused:
        gate_up = [Part(f"{name}.gate_up_proj", 2 * size)]
    yield from _stacked(f"{mlp}.gate_up", gate_up, hidden, bias)
    yield from _stacked(f"{mlp}.down", [Part(f"{name}.down_proj", hidden)], size, bias)


def _expert_tensors(
    c: DecoderConfig, experts: ExpertsConfig, mlp: str, has_stacks: bool
) -> Iterator[tuple[str, CheckpointTensor]]:
    names, hidden, size = c.family.experts, c.hidden_size, experts.intermediate_size
    assert names is not None
    block = "mlp" if has_stacks else names.block
    router = [Part(f"{block}.{names.router}", experts.count)]
    if experts.shared_size:
        router.append(Part(f"{block}.shared_expert_gate", 1))
        yield from _mlp(f"{mlp}.shared", f"{block}.shared_expert", hidden, experts.shared_size, experts.bias)
    yield from _stacked(f"{mlp}.router", router, hidden, experts.bias)
    gate_up, down, prefix = f"{mlp}.gate_up.weight", f"{mlp}.down.weight", f"{block}.experts"
    count, is_transposed = experts.count, names.is_transposed
    if has_stacks or is_transposed:
        for name, weight, rows, inputs in (("gate_up", gate_up, 2 * size, hidden), ("down", down, hidden, size)):
            shape = (count, inputs, rows) if is_transposed else (count, rows, inputs)
            stack = StackedTensor(weight, 0, rows, shape, num_experts=count, is_transposed=is_transposed)
            yield f"{prefix}.{name}_proj", stack
            if experts.bias:
                bias = StackedTensor(f"{mlp}.{name}.bias", 0, rows, (count, rows), num_experts=count)
                yield f"{prefix}.{name}_proj_bias", bias
        return
    for expert in range(count):
        first = expert * in_panels(2 * size)
        for name, at in ((names.gate, first), (names.up, first + size)):
            yield f"{prefix}.{expert}.{name}.weight", CheckpointTensor(gate_up, at, size, (size, hidden))
    for expert in range(count):  # behind the others, so that neighbours share a parameter
        at = expert * in_panels(hidden)
        yield f"{prefix}.{expert}.{names.down}.weight", CheckpointTensor(down, at, hidden, (hidden, size))


@cache
def _row_order(head_order: tuple[int, ...] | None, num_heads: int) -> tuple[int, ...] | None:
    """The order of the rows of so many heads, one after the other."""
    if head_order is None:
        return None
    return tuple(head * len(head_order) + index for head in range(num_heads) for index in head_order)


def _joined(parts: list[Part]) -> tuple[int, ...] | None:
    """The order of the rows of parts that are one matrix in a checkpoint."""
    if all(part.order is None for part in parts):
        return None
    order: list[int] = []
    for part in parts:
        first = len(order)
        order += (first + row for row in part.order or range(part.num_rows))
    return tuple(order)
