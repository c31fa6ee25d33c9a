"""One decoder for the dense families (Llama, Mistral, Qwen2, Qwen3): what differs is in its config.

The parameters are modules, for loading and counting. `Decoder.bind` turns them into closures over plain tensors, once,
since a step of a small model on a CPU is as much Python as arithmetic: attribute look-ups and module calls took a tenth
of it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from aioengine.models.families import DecoderConfig

Map = Callable[[Tensor], Tensor]
Layer = Callable[[Tensor, Tensor, Tensor, "Attend"], None]

# Prepacked, a float32 product takes 10 µs more with one row, and half the time with several; from about this many
# weights on the gain is larger than the loss. bfloat16 always gains.
MIN_PACKED_FLOAT32 = 1 << 17
# The layout is chosen for about this many rows; for one row it is as fast as the one chosen for one, and a row's result
# does not change with the number of rows beside it.
PACKED_FOR_ROWS = 16
PACKED_HEAD = "_packed_head"
META = torch.device("meta")


class Attend(Protocol):
    """Attention of one layer, with the cache behind it."""

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor, *, window: int | None) -> Tensor:
        """Write this step's keys and values to the cache, then attend.

        Args:
            layer: from 0.
            q: [tokens, heads, head_dim], rotated; the last dim contiguous, the others strided, as in ``k`` and ``v``.
            k, v: [tokens, kv_heads, head_dim], of this step; k rotated.
            window: a query at position p sees the keys at positions above p - window only; None for all up to p.
        Returns:
            [tokens, heads, head_dim], of softmax(q kᵀ / √head_dim) v.
        """
        ...


class Linear(nn.Module):
    """y = x Wᵀ + b, of several matrices of a checkpoint stacked along the outputs."""

    def __init__(self, in_features: int, out_features: int, *, bias: bool, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = _parameter((out_features, in_features), dtype)
        self.bias = _parameter((out_features,), dtype) if bias else None

    def bind(self) -> Map:
        """The product as a function [rows, in] → [rows, out]; repacks the weight where that is faster."""
        self.pack()
        weight, bias = self.weight, self.bias
        return _packed_linear(weight, bias) if weight.is_mkldnn else lambda x: F.linear(x, weight, bias)

    def pack(self) -> None:
        """Repack the weight where that is faster. Idempotent."""
        if not self.weight.is_mkldnn and _is_worth_packing(self.weight):
            self.weight = nn.Parameter(_pack(self.weight), requires_grad=False)


class RMSNorm(nn.Module):
    """x / √(mean(x²) + ε) · w, computed in float32 (Zhang and Sennrich, 2019, arXiv:1910.07467).

    Args:
        shape: of w; the mean is over the last of its dims.
    """

    def __init__(self, shape: tuple[int, ...], eps: float, *, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = _parameter(shape, dtype)
        self.eps = eps

    def bind(self) -> Map:
        """The norm as a function [..., *shape] → [..., *shape].

        As x / hypot(‖x‖, √(nε)) · √n w: the same, in 4 operations instead of the 7 that torch's own takes on a CPU.
        """
        size, dtype = self.weight.shape[-1], self.weight.dtype
        floor = torch.tensor(math.sqrt(size * self.eps), dtype=torch.float32)
        scale = self.weight.float() * math.sqrt(size)
        norm = torch.linalg.vector_norm

        def run(x: Tensor) -> Tensor:
            return x.div(norm(x, 2, -1, True, dtype=torch.float32).hypot_(floor)).mul_(scale).to(dtype)

        return run


class DecoderLayer(nn.Module):
    """Attention and MLP, each on a normalised input and added to the residual stream."""

    def __init__(self, config: DecoderConfig, index: int) -> None:
        super().__init__()
        c, dtype = config, config.dtype
        num_qk = c.num_heads + c.num_kv_heads
        self.config = c
        self.index = index
        self.input_norm = RMSNorm((c.hidden_size,), c.rms_norm_eps, dtype=dtype)
        self.qkv = Linear(c.hidden_size, (num_qk + c.num_kv_heads) * c.head_dim, bias=c.qkv_bias, dtype=dtype)
        # A line for each head, so that queries and keys are normalised by one operation.
        self.qk_norm = RMSNorm((num_qk, c.head_dim), c.rms_norm_eps, dtype=dtype) if c.qk_norm else None
        self.output = Linear(c.num_heads * c.head_dim, c.hidden_size, bias=c.output_bias, dtype=dtype)
        self.mlp_norm = RMSNorm((c.hidden_size,), c.rms_norm_eps, dtype=dtype)
        self.gate_up = Linear(c.hidden_size, 2 * c.intermediate_size, bias=c.mlp_bias, dtype=dtype)
        self.down = Linear(c.intermediate_size, c.hidden_size, bias=c.mlp_bias, dtype=dtype)

    def bind(self) -> Layer:
        """The layer as a function of (residual, cos, sin, attend), which adds to ``residual``.

        residual: [tokens, hidden]; cos, sin: [tokens, 1, head_dim], sin negative in its first half.
        """
        c, index = self.config, self.index
        num_heads, num_kv_heads, head_dim, half = c.num_heads, c.num_kv_heads, c.head_dim, c.head_dim // 2
        num_qk, intermediate_size, window = num_heads + num_kv_heads, c.intermediate_size, c.windows[index]
        input_norm, qkv, output = self.input_norm.bind(), self.qkv.bind(), self.output.bind()
        mlp_norm, gate_up, down = self.mlp_norm.bind(), self.gate_up.bind(), self.down.bind()
        qk_norm = self.qk_norm.bind() if self.qk_norm is not None else None
        split, roll, silu = torch.split_with_sizes, torch.roll, F.silu

        def run(residual: Tensor, cos: Tensor, sin: Tensor, attend: Attend) -> None:
            heads = qkv(input_norm(residual)).view(-1, num_qk + num_kv_heads, head_dim)
            qk, v = split(heads, (num_qk, num_kv_heads), 1)
            if qk_norm is not None:
                qk = qk_norm(qk)
            rotated = (qk * cos).addcmul_(roll(qk, half, -1), sin)
            q, k = split(rotated, (num_heads, num_kv_heads), 1)
            residual.add_(output(attend(index, q, k, v, window=window).flatten(1)))
            gate, up = split(gate_up(mlp_norm(residual)), (intermediate_size, intermediate_size), 1)
            residual.add_(down(silu(gate).mul_(up)))

        return run


class Decoder(nn.Module):
    """Token ids in, hidden states and logits out; attention and its cache are the caller's.

    Its parameters are made without values, by default on the meta device, without memory;
    `aioengine.models.loader.load_decoder` gives them some. To be called under ``torch.inference_mode()``.
    """

    rope_table: Tensor
    _packed_head: nn.Parameter | None

    def __init__(self, config: DecoderConfig, device: torch.device = META) -> None:
        super().__init__()
        c = config
        self.config = c
        with device:
            self.embedding = _parameter((c.vocab_size, c.hidden_size), c.dtype)
            self.layers = nn.ModuleList(DecoderLayer(c, index) for index in range(c.num_layers))
            self.norm = RMSNorm((c.hidden_size,), c.rms_norm_eps, dtype=c.dtype)
            self.head = None
            if not c.tie_word_embeddings:
                self.head = Linear(c.hidden_size, c.vocab_size, bias=False, dtype=c.dtype)
        self.register_parameter(PACKED_HEAD, None)
        self._bound: tuple[Layer, ...] = ()

    @property
    def weight_bytes(self) -> int:
        """Bytes of all parameters."""
        return sum(parameter.nbytes for parameter in self.parameters())

    def bind(self, on_layer: Callable[[], None] = lambda: None) -> None:
        """Make ready to run, once the parameters have their values; to be called again when they change.

        Repacks large matrices for the CPU one by one, each freeing its old form. A tied head shares the embedding's
        memory, but for one that is worth packing: that is a second copy, since a product reads all of it at each step.

        Args:
            on_layer: called after each layer; what it raises ends the binding.
        """
        self.make_rope_table()
        self._packed_head = None
        self._bind_products(on_layer)

    def make_rope_table(self) -> None:
        """Make what follows from the config, on the parameters' device."""
        self.rope_table = rope_table(self.config).to(self.embedding.device)

    def move(self, device: torch.device, *, is_pinned: bool = False) -> None:
        """Move the values of the parameters, not of a bound decoder; all or none. What they leave goes at the end.

        Args:
            is_pinned: to page-locked memory of the host, from and to which copies are fastest.
        Raises:
            MemoryError: there is no room for them. They are where they were, as after any other error.
        """
        assert not self._bound, "its functions hold the parameters where they are"
        moved: list[Tensor] = []
        try:
            for parameter in self.parameters():
                shape, dtype = parameter.shape, parameter.dtype
                moved.append(torch.empty(shape, dtype=dtype, device=device, pin_memory=is_pinned))
        except RuntimeError as error:
            moved.clear()  # the error's traceback would keep it
            locked = "page-locked " if is_pinned else ""
            raise MemoryError(f"{self.weight_bytes} bytes of {locked}memory on {device}: {error}") from error
        for room, parameter in zip(moved, self.parameters(), strict=True):
            room.copy_(parameter.data)
        for room, parameter in zip(moved, self.parameters(), strict=True):
            parameter.data = room

    def _bind_products(self, on_layer: Callable[[], None] = lambda: None) -> None:
        bound = []
        for layer in self.decoder_layers():
            bound.append(layer.bind())
            on_layer()
        self._bound = tuple(bound)
        self._final_norm = self.norm.bind()
        self._head = self.head.bind() if self.head is not None else self._bind_tied_head()

    def dense(self, name: str) -> Tensor:
        """The values of a parameter, by its name in ``named_parameters``: a copy of one that is packed, or itself."""
        parameter = self.get_parameter(name)
        return parameter.to_dense(self.config.dtype) if parameter.is_mkldnn else parameter

    def with_parameters(self, changed: Iterable[tuple[str, Tensor]]) -> Decoder:
        """A decoder that is ready to run, with other values for some parameters; this one stays as it is.

        What does not change they share.

        Args:
            changed: name and dense values, taken one by one, each packed before the next. It keeps the tensors.
        """
        other = Decoder(self.config)
        held = dict(self.named_parameters())
        packed_head = held.pop(PACKED_HEAD, None)
        for name, parameter in held.items():
            other._set(name, parameter, is_packed=False)
        for name, value in changed:
            other._set(name, nn.Parameter(value, requires_grad=False), is_packed=bool(self._bound))
            if name == "embedding":
                packed_head = None
        if packed_head is not None:
            other._set(PACKED_HEAD, packed_head, is_packed=False)
        other.rope_table = self.rope_table
        if self._bound:
            other._bind_products()
        return other

    def _set(self, name: str, parameter: nn.Parameter, *, is_packed: bool) -> None:
        path, _, attribute = name.rpartition(".")
        module = self.get_submodule(path)
        setattr(module, attribute, parameter)
        if is_packed and isinstance(module, Linear):
            module.pack()

    def decoder_layers(self) -> Iterator[DecoderLayer]:
        """``layers``, by their type."""
        for layer in self.layers:
            assert isinstance(layer, DecoderLayer)
            yield layer

    def _bind_tied_head(self) -> Map:
        weight = self.embedding
        if not _is_worth_packing(weight):
            return lambda x: F.linear(x, weight)
        if self._packed_head is None:
            self._packed_head = nn.Parameter(_pack(weight), requires_grad=False)
        return _packed_linear(self._packed_head, None)

    def forward(self, token_ids: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """One step for tokens of any number of sequences.

        Args:
            token_ids: int64 [tokens], below vocab_size.
            positions: int64 [tokens], below max_model_len.
            attend: called once a layer, in order.
        Returns:
            [tokens, hidden_size], after the final norm.
        """
        assert self._bound, "bind() comes first"
        residual = F.embedding(token_ids, self.embedding)
        # One look-up for both halves of the table; a view for each, with a dim for the heads.
        cos, sin = torch.split_with_sizes(
            F.embedding(positions, self.rope_table).unsqueeze_(1), (self.config.head_dim, self.config.head_dim), -1
        )
        for layer in self._bound:
            layer(residual, cos, sin, attend)
        return self._final_norm(residual)

    def logits(self, hidden: Tensor) -> Tensor:
        """[n, hidden_size] → float32 [n, vocab_size]."""
        return self._head(hidden).float()


def rope_table(config: DecoderConfig) -> Tensor:
    """Cosines and signed sines for each position (Su et al., 2021, arXiv:2104.09864), in the halves layout.

    The rotated x is x · cos + roll(x, head_dim / 2) · sin, where sin is negative in its first half.

    Returns:
        [max_model_len, 2 · head_dim], cos then sin, in the config's dtype, computed in float32.
    """
    angles = torch.outer(torch.arange(config.max_model_len, dtype=torch.float32), torch.tensor(config.inv_freq))
    cos, sin = angles.cos().mul_(config.rope_scale), angles.sin().mul_(config.rope_scale)
    return torch.cat((cos, cos, -sin, sin), dim=-1).to(config.dtype)


def _parameter(shape: tuple[int, ...], dtype: torch.dtype) -> nn.Parameter:
    return nn.Parameter(torch.empty(shape, dtype=dtype), requires_grad=False)


def _is_worth_packing(weight: Tensor) -> bool:
    if weight.device.type != "cpu" or not torch._C._has_mkldnn:
        return False
    if weight.dtype == torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return weight.dtype == torch.float32 and weight.numel() >= MIN_PACKED_FLOAT32


def _pack(weight: Tensor) -> Tensor:
    packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight, PACKED_FOR_ROWS)
    return packed


def _packed_linear(packed: Tensor, bias: Tensor | None) -> Map:
    # The overload itself: looking it up by the arguments took 2 µs a call.
    product = torch.ops.mkldnn._linear_pointwise.default
    return lambda x: product(x, packed, bias, "none", [], "")
