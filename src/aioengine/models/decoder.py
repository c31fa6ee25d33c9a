"""One decoder for all native families: what differs is in its config.

The parameters are modules, for loading and counting. `Decoder.use` packs their matrices for a device's operations and
makes closures over plain tensors of them, once. A step of a small model on a CPU is as much Python as arithmetic.

A layer is nine operations: the product of q, k and v, their rotation with the cache write, attention, output, addition
and norm in one, gate and up, activation, down, addition and norm again. The addition after a layer's MLP is fused with
the next layer's norm, the last one's with the final norm.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator
from dataclasses import replace
from functools import cached_property

import torch
from torch import Tensor, nn

from aioengine.errors import InvalidRequest
from aioengine.kernels.operations import ExpertWeights, LayerAttention, Operations
from aioengine.kernels.packed_weight import CodedRows, CodedWeight, PackedWeight, Quantization, UnpackedRows, in_panels
from aioengine.models.checkpoint import EMBEDDING, HEAD, CheckpointTensor, checkpoint_tensors
from aioengine.models.decoder_config import DecoderConfig, ExpertsConfig, Rope
from aioengine.models.model import StepContext, move_weights

Product = Callable[[Tensor, StepContext], Tensor]
"""A function [tokens, in_features] → [tokens, out_features] of these tokens' step."""

Layer = Callable[[Tensor, Tensor, StepContext], Tensor]

META = torch.device("meta")


class Linear(nn.Module):
    """y = x Wᵀ + b for several matrices of a checkpoint stacked along the outputs; or an embedding, of rows of W.

    Attributes:
        weight: [out_features, in_features] until `pack`; then the values of the packed weight, in its layout.
        scales: the scales of a packed weight that is quantised.
        packed: weight and scales, packed for ``operations``.
        parts: until `pack`, all matrices of a weight that comes as codes, and where they go; ``weight`` has no memory
            then.
        around: makes another product of the layer's, such as one that adds an adapter's. It counts from the next
            `Decoder.use` on; embeddings and stacked matrices of experts, which are no products, do not ask for it.
    """

    weight: nn.Parameter
    bias: nn.Parameter | None
    scales: nn.Parameter | None
    packed: PackedWeight
    operations: Operations

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        bias: bool,
        dtype: torch.dtype,
        quantization: Quantization | None = None,
    ) -> None:
        super().__init__()
        self.weight = _parameter((out_features, in_features), dtype)
        self.bias = _parameter((out_features,), dtype) if bias else None
        self.scales = None
        self.dtype = dtype
        self.quantization = quantization
        self.parts: list[tuple[CheckpointTensor, Tensor | CodedWeight]] = []
        self.around: Callable[[Product], Product] | None = None
        self.is_packed = False

    def pack(self, operations: Operations) -> None:
        """Bring the weight into the layout of these operations, from any layout."""
        weight: Tensor | UnpackedRows | CodedWeight | CodedRows
        if self.parts:
            weight = self._stack_parts()
        elif self.scales is None:
            weight = self.dense()
        elif self.packed.coding is None:
            weight = UnpackedRows(self.packed, self.operations.unpack)
        else:
            weight = self.operations.unpack_codes(self.packed)
        packed = operations.pack(weight, self.quantization, self.dtype)
        self.weight = _as_parameter(packed.values)
        self.scales = _as_parameter(packed.scales) if packed.scales is not None else None
        # It holds the parameters themselves, whose values `Decoder.move` moves.
        self.packed = replace(packed, values=self.weight, scales=self.scales)
        self.operations = operations
        self.is_packed = True

    def _stack_parts(self) -> Tensor | CodedWeight:
        """All parts as one weight: codes if all parts are codes of one coding, else dense."""
        parts, self.parts = self.parts, []
        coded = [part for _, part in parts if isinstance(part, CodedWeight)]
        if len(coded) == len(parts):
            try:
                stack = CodedWeight.cat(coded)
            except ValueError:
                pass
            else:
                return stack.spread(torch.cat([entry.row_ids(self.weight) for entry, _ in parts]), len(self.weight))
        dense = torch.zeros(self.weight.shape, dtype=self.dtype, device=parts[0][1].device)
        for entry, part in parts:
            if isinstance(part, CodedWeight):
                dense[entry.row_ids(dense)] = part.dense().to(self.dtype)
            else:
                entry.of(dense).copy_(part)
        return dense

    def changes(self, dense: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Pairs of (tensor of the packed weight, new values) that give it the values of ``dense``.

        Raises:
            InvalidRequest: it is kept as codes of a quantised checkpoint, which cannot take other values.
        """
        if self.packed.coding is not None and self.quantization is None:
            raise InvalidRequest(
                "the weights are kept as codes of a quantised checkpoint: update them from a folder of the same format"
            )
        packed = self.operations.pack(dense, self.quantization, self.dtype)
        changes: list[tuple[Tensor, Tensor]] = [(self.weight, packed.values)]
        if self.scales is not None and packed.scales is not None:
            changes.append((self.scales, packed.scales))
        return changes

    def dense(self) -> Tensor:
        """The weight as [out_features, in_features], a copy unless that is its layout; float32 if it is quantised."""
        return self.operations.unpack(self.packed) if self.is_packed else self.weight

    def product(self, out_dtype: torch.dtype | None = None) -> Product:
        """The layer as a function."""
        linear, packed, bias = self.operations.linear, self.packed, self.bias

        def product(x: Tensor, step: StepContext) -> Tensor:
            return linear(x, packed, bias, out_dtype)

        return product if self.around is None else self.around(product)


class Mlp(nn.Module):
    """A gated MLP: down(activation(gate(x)) · up(x))."""

    def __init__(self, config: DecoderConfig, intermediate_size: int, quantization: Quantization | None) -> None:
        super().__init__()
        c = config

        def linear(in_features: int, out_features: int) -> Linear:
            return Linear(in_features, out_features, bias=c.mlp_bias, dtype=c.dtype, quantization=quantization)

        self.activation = c.activation
        self.gate_up = linear(c.hidden_size, 2 * intermediate_size)
        self.down = linear(intermediate_size, c.hidden_size)

    def bind(self, operations: Operations) -> Product:
        """The MLP as a function [tokens, hidden] → [tokens, hidden]."""
        gate_up, down, gated_activation = self.gate_up.product(), self.down.product(), operations.gated_activation
        activation = self.activation
        return lambda x, step: down(gated_activation(gate_up(x, step), activation), step)


class Experts(nn.Module):
    """A mixture of gated MLPs, in the place of one.

    Attributes:
        router: not quantised, since small differences of its logits decide.
        gate_up, down: the matrices of all experts, one below the other; each begins at the start of a panel.
        shared: the MLP of all tokens; its weight is the sigmoid of the router's last logit.
    """

    def __init__(self, config: DecoderConfig, experts: ExpertsConfig, quantization: Quantization | None) -> None:
        super().__init__()
        hidden, of, num_shared = config.hidden_size, experts, int(experts.shared_size > 0)

        def stack(in_features: int, out_features: int) -> Linear:
            rows = of.count * in_panels(out_features)
            return Linear(in_features, rows, bias=of.bias, dtype=config.dtype, quantization=quantization)

        self.hidden, self.of = hidden, of
        self.router = Linear(hidden, of.count + num_shared, bias=of.bias, dtype=config.dtype)
        self.gate_up, self.down = stack(hidden, 2 * of.intermediate_size), stack(of.intermediate_size, hidden)
        self.shared = Mlp(config, of.shared_size, quantization) if num_shared else None

    def bind(self, operations: Operations) -> Product:
        """The mixture as a function [tokens, hidden] → [tokens, hidden]."""
        of, route, experts = self.of, operations.route, operations.experts
        weights = ExpertWeights(
            num_experts=of.count,
            hidden=self.hidden,
            intermediate=of.intermediate_size,
            gate_up=self.gate_up.packed,
            down=self.down.packed,
            gate_up_bias=self.gate_up.bias,
            down_bias=self.down.bias,
            activation=of.activation,
        )
        router = self.router.product(torch.float32)
        shared = self.shared.bind(operations) if self.shared is not None else lambda x, step: None

        def run(x: Tensor, step: StepContext) -> Tensor:
            ids, chosen = route(router(x, step), of.count, of.num_chosen, is_normalised=of.is_normalised)
            return experts(x, ids, chosen, weights, shared(x, step))

        return run


class DecoderLayer(nn.Module):
    """Attention and MLP, each added to the residual stream, with norms before or after them, or both.

    Attributes:
        norms: by their places, as in `Family`.
    """

    def __init__(self, config: DecoderConfig, index: int, quantization: Quantization | None) -> None:
        super().__init__()
        c, dtype = config, config.dtype
        num_qk = c.num_heads + c.num_kv_heads

        def linear(in_features: int, out_features: int, bias: bool) -> Linear:
            return Linear(in_features, out_features, bias=bias, dtype=dtype, quantization=quantization)

        self.config = c
        self.index = index
        self.norms = nn.ParameterDict({place: _parameter((c.hidden_size,), dtype) for place in c.family.norms})
        self.qkv = linear(c.hidden_size, (num_qk + c.num_kv_heads) * c.head_dim, c.qkv_bias)
        # A row for each head, so that queries and keys are normalised by one operation.
        self.qk_norm = _parameter((num_qk, c.head_dim), dtype) if c.qk_norm is not None else None
        self.sinks = _parameter((c.num_heads,), torch.float32) if c.family.has_sinks else None
        self.output = linear(c.num_heads * c.head_dim, c.hidden_size, c.output_bias)
        experts = c.experts if c.experts is not None and c.experts.layers[index] else None
        self.mlp = Mlp(c, c.intermediate_size, quantization) if experts is None else Experts(c, experts, quantization)

    def bind(self, operations: Operations, next_norm: Tensor | None, rope_table: Tensor | None) -> Layer:
        """The layer as a function of (x, residual, step), which adds to ``residual`` and returns the next layer's x.

        x: [tokens, hidden], the residual, normalised where there is a norm before attention.
        """
        c, norms = self.config, self.norms
        attention = LayerAttention(
            index=self.index,
            rope_table=rope_table,
            qk_weight=self.qk_norm,
            eps=c.rms_norm_eps,
            scale=c.attention_scale,
            window=c.windows[self.index],
            soft_cap=c.soft_cap,
            sinks=self.sinks,
            qk_offset=c.family.norm_offset,
            is_qk_norm_wide=c.qk_norm == "all",
        )
        qkv, output, mlp = self.qkv.product(), self.output.product(), self.mlp.bind(operations)
        add_attended = _addition(operations, c, norms.get("output"), norms.get("mlp_input"))
        add_mlp = _addition(operations, c, norms.get("mlp_output"), next_norm)

        def run(x: Tensor, residual: Tensor, step: StepContext) -> Tensor:
            x = add_attended(output(step.attend(qkv(x, step), attention), step), residual)
            return add_mlp(mlp(x, step), residual)

        return run


def _addition(
    operations: Operations, c: DecoderConfig, behind: Tensor | None, before: Tensor | None
) -> Callable[[Tensor, Tensor], Tensor]:
    """A function of (x, residual) that adds a block's output x to ``residual`` and returns the next block's input.

    Args:
        behind, before: the weights of the norms after the block and before the next one; at least one is given.
    """
    eps, offset, scale = c.rms_norm_eps, c.family.norm_offset, c.residual_scale
    if behind is None:
        assert before is not None
        add_rms_norm, weight = operations.add_rms_norm, before
        return lambda x, residual: add_rms_norm(x, residual, weight, eps, offset, scale)
    rms_norm_add, rms_norm, weight_behind = operations.rms_norm_add, operations.rms_norm, behind

    def add(x: Tensor, residual: Tensor) -> Tensor:
        rms_norm_add(x, residual, weight_behind, eps, offset)
        return residual if before is None else rms_norm(residual, before, eps, offset)

    return add


class Decoder(nn.Module):
    """Token ids in, hidden states and logits out; attention and its cache are the caller's.

    Its parameters are made on the meta device, without memory; `aioengine.models.loader.load_decoder` allocates, fills
    and packs them. Call it under ``torch.inference_mode()``.

    Args:
        quantization: of the layers' matrices. The head is int8 then, which has no measurable cost in quality, and so
            is an embedding tied to it. An untied embedding stays dense, since a step reads a few of its rows.

    Attributes:
        rope_tables: tables of `rope_table`, which are no parameters; set by the first `use`.
    """

    rope_tables: dict[Rope | None, Tensor | None]
    is_capturable = True

    def __init__(self, config: DecoderConfig, quantization: Quantization | None = None) -> None:
        super().__init__()
        c = config
        self.config = c
        self.quantization = quantization
        of_head: Quantization | None = "int8" if quantization is not None else None
        with META:
            of_embedding = of_head if c.tie_word_embeddings else None
            self.embedding = Linear(c.hidden_size, c.vocab_size, bias=False, dtype=c.dtype, quantization=of_embedding)
            self.layers = nn.ModuleList(DecoderLayer(c, index, quantization) for index in range(c.num_layers))
            self.norm = _parameter((c.hidden_size,), c.dtype)
            self.head = None
            if not c.tie_word_embeddings:
                self.head = Linear(c.hidden_size, c.vocab_size, bias=False, dtype=c.dtype, quantization=of_head)

    def allocate(self, device: torch.device, without: Container[str] = ()) -> None:
        """Allocate all parameters except those in ``without``, whose values come as ``Linear.parts``."""
        for name, parameter in list(self.named_parameters()):
            if name not in without:
                module, _, attribute = name.rpartition(".")
                with device:
                    values = _parameter(tuple(parameter.shape), parameter.dtype)
                setattr(self.get_submodule(module), attribute, values)

    @property
    def weight_bytes(self) -> int:
        """Bytes of all parameters."""
        return sum(parameter.nbytes for parameter in self.parameters())

    @property
    def operations(self) -> Operations:
        """The operations that its matrices are packed for."""
        return self.embedding.operations

    def use(self, operations: Operations) -> None:
        """Compute with these operations from now on: pack each weight that is not packed for them.

        Takes the memory of one packed weight more, and some MB. An error leaves some weights packed for these
        operations and the others as they were: the decoder can run if it could before.
        """
        try:
            for linear in self.linears():
                if not linear.is_packed or linear.operations is not operations:
                    linear.pack(operations)
            if not hasattr(self, "rope_tables"):
                c, device = self.config, self.embedding.weight.device
                self.rope_tables = {
                    rope: None if rope is None else rope_table(rope, c.max_model_len, c.dtype).to(device)
                    for rope in dict.fromkeys(c.ropes)
                }
        finally:
            if all(linear.is_packed for linear in self.linears()):
                self._bind(operations)

    def _bind(self, operations: Operations) -> None:
        layers = [layer for layer in self.layers if isinstance(layer, DecoderLayer)]  # by their type
        first_norm, *next_norms = [*(layer.norms.get("input") for layer in layers), self.norm]
        self._embed, self._embedding = self.embedding.operations.embed, self.embedding.packed
        c, self._first_norm = self.config, first_norm
        self._scales_embeddings = c.embedding_scale != 1
        self._scales_logits = c.logits_scale != 1 or c.logits_soft_cap is not None
        self._bound = tuple(
            layer.bind(operations, norm, self.rope_tables[rope])
            for layer, norm, rope in zip(layers, next_norms, self.config.ropes, strict=True)
        )
        self._head = (self.embedding if self.head is None else self.head).product(torch.float32)

    def move(self, device: torch.device, *, is_pinned: bool = False) -> None:
        """See `Model.move`."""
        move_weights(list(self.parameters()), device, is_pinned=is_pinned)

    def weights(self) -> Iterator[Tensor]:
        """See `Model.weights`."""
        return self.parameters()

    @cached_property
    def _entries(self) -> dict[str, CheckpointTensor]:
        return checkpoint_tensors(self.config)

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """See `Model.shapes`."""
        return {name: entry.shape for name, entry in self._entries.items()}

    def ties(self) -> dict[str, str]:
        """See `Model.ties`: of two tied tensors some tools save the other one, or both."""
        return {HEAD: EMBEDDING} if self.config.tie_word_embeddings else {}

    def tensors(self, names: Iterable[str]) -> Iterator[tuple[str, Tensor]]:
        """See `Model.tensors`. Neighbours that share a parameter share its dense values."""
        parameter, dense = "", torch.empty(0, dtype=self.config.dtype)
        for name in names:
            entry = self._entries[name]
            if entry.parameter != parameter:
                parameter, dense = entry.parameter, self.dense(entry.parameter).to(self.config.dtype)
            yield name, entry.read(dense).contiguous()

    def changes(self, tensors: dict[str, Tensor]) -> list[tuple[Tensor, Tensor]]:
        """See `Model.changes`."""
        names_of: dict[str, list[str]] = {}
        for name in tensors:
            names_of.setdefault(self._entries[name].parameter, []).append(name)
        changes: list[tuple[Tensor, Tensor]] = []
        for parameter, names in names_of.items():
            dense = self.dense(parameter)
            is_in_place = dense is self.get_parameter(parameter)
            for name in names:
                entry = self._entries[name]
                rows, values = entry.of(dense), entry.arrange(tensors.pop(name).to(self.config.dtype))
                if is_in_place:
                    changes.append((rows, values.expand(rows.shape).contiguous()))
                else:
                    rows.copy_(values)
            if not is_in_place:
                linear = self.linear_of(parameter)
                assert linear is not None
                changes += linear.changes(dense)
        return changes

    def dense(self, name: str) -> Tensor:
        """The values of a parameter, by its name in ``named_parameters``: the parameter, or a dense copy if packed."""
        linear = self.linear_of(name)
        return linear.dense() if linear is not None and name.endswith("weight") else self.get_parameter(name)

    def linear_of(self, name: str) -> Linear | None:
        """The matrix that has the parameter of this name; None if no matrix has it."""
        module = self.get_submodule(name.rpartition(".")[0])
        return module if isinstance(module, Linear) else None

    def linears(self) -> Iterator[Linear]:
        """All matrices, in the order of the modules."""
        return (module for module in self.modules() if isinstance(module, Linear))

    def forward(self, token_ids: Tensor, step: StepContext) -> Tensor:
        """See `Model.__call__`."""
        c, x = self.config, self._embed(token_ids, self._embedding)
        if self._scales_embeddings:
            self.operations.scale(x, c.embedding_scale)
        if step.embeddings is not None:
            x.index_copy_(0, *step.embeddings)
        residual = x
        if self._first_norm is not None:
            x = self.operations.rms_norm(residual, self._first_norm, c.rms_norm_eps, c.family.norm_offset)
        for layer in self._bound:
            x = layer(x, residual, step)
        return x

    def logits(self, hidden: Tensor, step: StepContext) -> Tensor:
        """See `Model.logits`."""
        logits = self._head(hidden, step)
        if self._scales_logits:
            self.operations.scale(logits, self.config.logits_scale, self.config.logits_soft_cap)
        return logits


def rope_table(rope: Rope, num_positions: int, dtype: torch.dtype) -> Tensor:
    """Cosines and signed sines for each position (Su et al., 2021, arXiv:2104.09864), in the halves layout.

    The rotated x is x · cos + roll(x, head_dim / 2) · sin, where sin is negative in its first half.

    Returns:
        [num_positions, 2 · head_dim], cos then sin, in ``dtype``, computed in float32.
    """
    inv_freq = torch.tensor(rope.inv_freq, dtype=torch.float32)
    scale = torch.ones_like(inv_freq).masked_fill_(inv_freq > 0, rope.scale)
    angles = torch.outer(torch.arange(num_positions, dtype=torch.float32), inv_freq)
    cos, sin = angles.cos().mul_(scale), angles.sin().mul_(scale)
    return torch.cat((cos, cos, -sin, sin), dim=-1).to(dtype)


def _parameter(shape: tuple[int, ...], dtype: torch.dtype) -> nn.Parameter:
    return nn.Parameter(torch.empty(shape, dtype=dtype), requires_grad=False)


def _as_parameter(values: Tensor) -> nn.Parameter:
    return values if isinstance(values, nn.Parameter) else nn.Parameter(values, requires_grad=False)
