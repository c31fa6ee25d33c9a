"""Mixtures of experts in plain torch: the oracle of the grouped products."""

from __future__ import annotations

import torch
from torch import Tensor

from aioengine.kernels.operations import ExpertWeights
from aioengine.kernels.packed_weight import in_panels
from aioengine.kernels.torch.layers import gated_activation
from aioengine.kernels.torch.products import linear, some_rows


def route(logits: Tensor, num_experts: int, num_chosen: int, *, is_normalised: bool) -> tuple[Tensor, Tensor]:
    """As `Operations.route`."""
    of_experts, of_shared = logits[:, :num_experts], logits[:, num_experts:]
    ordered, ids = of_experts.sort(dim=1, descending=True, stable=True)  # `topk` does not say which of equal ones
    chosen, ids = ordered[:, :num_chosen], ids[:, :num_chosen]
    weights = chosen.softmax(1) if is_normalised else of_experts.softmax(1).gather(1, ids)
    return ids.int(), torch.cat((weights, of_shared.sigmoid()), dim=1)


def experts(x: Tensor, ids: Tensor, weights: Tensor, of_layer: ExpertWeights, shared: Tensor | None = None) -> Tensor:
    """As `Operations.experts`."""
    made = x.new_empty((*ids.shape, of_layer.hidden), dtype=torch.float32)
    for expert in ids.unique().tolist():
        token, nth = (ids == expert).nonzero(as_tuple=True)
        of_gate_up, of_down = (_rows_of(expert, size) for size in (2 * of_layer.intermediate, of_layer.hidden))
        gate_up_bias, down_bias = (
            bias[rows] if bias is not None else None
            for bias, rows in ((of_layer.gate_up_bias, of_gate_up), (of_layer.down_bias, of_down))
        )
        gate_up = linear(x[token], some_rows(of_layer.gate_up, of_gate_up), gate_up_bias)
        activated = gated_activation(gate_up, of_layer.activation)
        made[token, nth] = linear(activated, some_rows(of_layer.down, of_down), down_bias, torch.float32)
    total = torch.zeros_like(made[:, 0])
    terms = made.unbind(1) if shared is None else (*made.unbind(1), shared.float())
    for term, weight in zip(terms, weights.unbind(1), strict=True):
        total += term * weight[:, None]
    return total.to(x.dtype)


def _rows_of(expert: int, size: int) -> slice:
    """Where an expert's matrix of so many rows is in a stack of them."""
    first = expert * in_panels(size)
    return slice(first, first + size)
