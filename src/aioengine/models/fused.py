"""The decoder as a GPU runs it: the same parameters, and as few launches as there are products, norms and attentions.

A layer is nine: norm and addition in one, the product of q, k and v, their rotation with the cache write, attention
(two with splits), output, norm and addition again, gate and up, activation, down. The addition after a layer's MLP is
fused with the next layer's norm, the last one's with the final norm.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from aioengine.kernels.operations import Operations
from aioengine.models.decoder import Decoder, DecoderLayer, Map, rope_table

FusedLayer = Callable[[Tensor, Tensor, "FusedAttend"], Tensor]


class FusedAttend(Protocol):
    """What a layer does between its two products around attention, with the cache behind it."""

    def __call__(self, layer: int, qkv: Tensor, qk_weight: Tensor | None, *, window: int | None) -> Tensor:
        """Normalise and rotate queries and keys, write keys and values to the cache, attend.

        Args:
            layer: from 0.
            qkv: [tokens, (heads + 2 · kv_heads) · head_dim], queries, keys, values, as the product gave them.
            qk_weight: [heads + kv_heads, head_dim], of the norm of each head's query and key; None: they have none.
            window: a query at position p sees the keys at positions above p - window only; None for all up to p.
        Returns:
            [tokens, heads · head_dim], of softmax(q kᵀ / √head_dim) v.
        """
        ...


class FusedDecoder:
    """Token ids in, hidden states and logits out, as `Decoder`. To be called under ``torch.inference_mode()``.

    It holds the decoder's parameters, wherever their values move and whatever these become; a decoder with other
    parameters needs another of these. The decoder need not be bound. Of one that is, packed weights are copied.

    Attributes:
        config: the decoder's.
        rope_table: as `aioengine.models.decoder.rope_table` makes it, beside the parameters.
    """

    def __init__(self, decoder: Decoder, operations: Operations) -> None:
        embedding = decoder.embedding
        self.config = decoder.config
        table: Tensor | None = getattr(decoder, "rope_table", None)
        self.rope_table = rope_table(decoder.config).to(embedding.device) if table is None else table
        layers = list(decoder.decoder_layers())
        first_norm, *next_norms = [*(layer.input_norm for layer in layers), decoder.norm]
        first_weight, first_eps, rms_norm = first_norm.weight, first_norm.eps, operations.rms_norm
        self._embedding = embedding
        self._first_norm: Map = lambda x: rms_norm(x, first_weight, first_eps)
        self._layers = tuple(
            _bind_layer(decoder, layer, operations, norm.weight, norm.eps)
            for layer, norm in zip(layers, next_norms, strict=True)
        )
        self._head = _bind_head(embedding if decoder.head is None else decoder.dense("head.weight"))

    def forward(self, token_ids: Tensor, positions: Tensor, attend: FusedAttend) -> Tensor:
        """One step for tokens of any number of sequences.

        Args:
            token_ids: int32 [tokens], below vocab_size.
            positions: int32 [tokens]. As in `Decoder.forward`, but only ``attend`` needs them, and has them.
            attend: called once a layer, in order.
        Returns:
            [tokens, hidden_size], after the final norm.
        """
        residual = F.embedding(token_ids, self._embedding)
        x = self._first_norm(residual)
        for layer in self._layers:
            x = layer(x, residual, attend)
        return x

    def logits(self, hidden: Tensor) -> Tensor:
        """[n, hidden_size] → float32 [n, vocab_size]."""
        return self._head(hidden)


def _bind_layer(
    decoder: Decoder, layer: DecoderLayer, operations: Operations, next_norm: Tensor, next_eps: float
) -> FusedLayer:
    """The layer as a function of (x, residual, attend), which adds to ``residual`` and returns the next layer's x.

    x: [tokens, hidden], the normalised residual.
    """
    index, window = layer.index, layer.config.windows[layer.index]

    def product(name: str) -> Map:
        weight = decoder.dense(f"layers.{index}.{name}.weight")
        bias = getattr(layer, name).bias
        return lambda x: F.linear(x, weight, bias)

    qkv, output, gate_up, down = product("qkv"), product("output"), product("gate_up"), product("down")
    qk_weight = layer.qk_norm.weight if layer.qk_norm is not None else None
    mlp_norm, mlp_eps = layer.mlp_norm.weight, layer.mlp_norm.eps
    add_rms_norm, gated_activation = operations.add_rms_norm, operations.gated_activation

    def run(x: Tensor, residual: Tensor, attend: FusedAttend) -> Tensor:
        attended = attend(index, qkv(x), qk_weight, window=window)
        x = add_rms_norm(output(attended), residual, mlp_norm, mlp_eps)
        return add_rms_norm(down(gated_activation(gate_up(x))), residual, next_norm, next_eps)

    return run


def _bind_head(weight: Tensor) -> Map:
    """Hidden states to float32 logits.

    On a GPU the product's own float32 sums, where torch gives them: rounding to 16 bits would make ties of logits that
    are none, and a second tensor as large as the vocabulary.
    """
    if weight.is_cuda and weight.dtype != torch.float32 and hasattr(torch.ops.aten.mm, "dtype"):
        # Transposed at each call: a view that is kept would be one of the memory that a moved parameter has left.
        return lambda hidden: torch.mm(hidden, weight.t(), out_dtype=torch.float32)
    return lambda hidden: F.linear(hidden, weight).float()
