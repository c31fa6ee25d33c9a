"""Paged attention behind transformers' attention interface: modelling code calls its attention, and gets ours.

A step is one forward pass over the tokens of all rows, as if they were one sequence; attention separates them. The
implementation of attention is registered with transformers when this module is imported.
"""

from __future__ import annotations

from typing import Any

import msgspec
import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import AttentionInterface

from aioengine.kernels.operations import LayerAttention
from aioengine.models.model import StepContext

PAGED = "aioengine_paged"
"""The name of this implementation of attention. It calls a module's `PagedLayer`."""


class RunningStep:
    """The step that the layers of a model attend by: set for each step by the model that runs it."""

    context: StepContext


class PagedLayer(msgspec.Struct, frozen=True):
    """How an attention module attends, as its attribute ``aioengine_layer``.

    Attributes:
        index, window: as in `LayerAttention`.
        head_dim: of the cache; smaller keys and values are padded with zeros.
    """

    step: RunningStep
    index: int
    window: int | None
    head_dim: int


def _attend_paged(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    *,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Attend as transformers calls attention: [1, heads, tokens, size] each → [1, tokens, heads, value size]."""
    own: PagedLayer = module.aioengine_layer
    num_heads, num_tokens, key_dim = query.shape[1:]
    layer = LayerAttention(
        index=own.index,
        rope_table=None,
        qk_weight=None,
        eps=0.0,
        scale=key_dim**-0.5 if scaling is None else float(scaling),
        window=own.window,
        soft_cap=softcap,
        sinks=s_aux,
    )
    qkv = torch.cat([_heads_by_token(each, own.head_dim) for each in (query, key, value)], dim=1)
    out = own.step.context.attend(qkv, layer).view(1, num_tokens, num_heads, own.head_dim)
    return out[..., : value.shape[3]], None


def _heads_by_token(heads: Tensor, head_dim: int) -> Tensor:
    """[1, heads, tokens, size] → [tokens, heads · head_dim]."""
    padded = F.pad(heads, (0, head_dim - heads.shape[3])) if heads.shape[3] < head_dim else heads
    return padded[0].transpose(0, 1).flatten(1)


AttentionInterface.register(PAGED, _attend_paged)
