"""A model whose layers transformers' own code computes, as an executor's `aioengine.models.model.Model`.

A step is one forward pass over the tokens of all rows, as if they were one sequence; paged attention, behind
transformers' attention interface, separates them. It is registered with transformers when this module is imported.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator
from typing import Any

import msgspec
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import AttentionInterface

from aioengine.kernels.operations import LayerAttention, Operations
from aioengine.kernels.packed_weight import Quantization
from aioengine.models.model import StepContext, move_weights
from aioengine.models.transformers.transformers_config import TransformersConfig, arguments_of

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
    lacking = ((heads, own.head_dim - heads.shape[3]) for heads in (query, key, value))
    padded = [F.pad(heads, (0, count)) if count else heads for heads, count in lacking]
    qkv = torch.cat([heads[0].transpose(0, 1).flatten(1) for heads in padded], dim=1)
    out = own.step.context.attend(qkv, layer).view(1, num_tokens, num_heads, own.head_dim)
    return out[..., : value.shape[3]], None


AttentionInterface.register(PAGED, _attend_paged)


class TransformersModel(nn.Module):
    """Token ids in, hidden states and logits out, by a causal language model of transformers'.

    Hidden states are what the model beneath its head gives, and logits what its head makes of them, with whatever its
    code does to them besides.

    Args:
        model: transformers', with its weights; it attends by `PAGED`.

    Attributes:
        model: as given.
    """

    is_capturable = False
    quantization: Quantization | None = None
    operations: Operations

    def __init__(self, config: TransformersConfig, model: Any) -> None:
        super().__init__()
        self.config = config
        self.model = model
        self._step = RunningStep()
        for index, name in enumerate(config.attention):
            layer = PagedLayer(self._step, index, config.windows[index], config.head_dim)
            model.get_submodule(name).aioengine_layer = layer
        self._body = model.get_submodule(config.body)
        self._takes_positions = "position_ids" in arguments_of(self._body)
        # Its own forward pass, around hidden states that are there: no submodule, since it is the same one again.
        self._given = _GivenHidden()
        self._head = (_with_module(model, config.body, self._given),)

    @property
    def weight_bytes(self) -> int:
        """Bytes of all weights, and of the tables beside them."""
        return sum(tensor.nbytes for tensor in self.weights())

    def use(self, operations: Operations) -> None:
        """See `Model.use`; attention alone is computed by them."""
        self.operations = operations

    def forward(self, token_ids: Tensor, step: StepContext) -> Tensor:
        """See `Model.__call__`: all tokens as those of one sequence, which attention separates."""
        self.begin(step)
        inputs = {"input_ids": token_ids[None].long()}
        if step.embeddings is not None:
            embedded = self.model.get_input_embeddings()(token_ids.long())
            inputs = {"inputs_embeds": embedded.index_copy(0, *step.embeddings)[None]}
        if self._takes_positions:
            inputs["position_ids"] = step.positions[None].long()
        output = self._body(use_cache=False, **inputs)
        self._given.kind = type(output)
        hidden: Tensor = output[0][0]
        return hidden

    def begin(self, step: StepContext) -> None:
        """Let the modules that attend do so by this step."""
        self._step.context = step

    def logits(self, hidden: Tensor, step: StepContext) -> Tensor:
        """See `Model.logits`."""
        self._given.hidden = hidden[None]
        no_token = torch.zeros(1, 1, dtype=torch.long, device=hidden.device)
        logits: Tensor = self._head[0](input_ids=no_token, use_cache=False).logits[0].float()
        return logits

    def move(self, device: torch.device, *, is_pinned: bool = False) -> None:
        """See `Model.move`."""
        move_weights(list(self.weights()), device, is_pinned=is_pinned)

    def weights(self) -> Iterator[Tensor]:
        """See `Model.weights`: parameters and buffers, tied ones once."""
        yield from self.parameters()
        yield from self.buffers()

    def _parameters_by_name(self) -> dict[str, Tensor]:
        """Parameters by the checkpoint's names, a tied one by each of its names."""
        found: dict[str, Tensor] = self.model.state_dict(keep_vars=True)
        return found

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """See `Model.shapes`; names as transformers has them in memory, and saves them where it fuses none."""
        ties = self.ties()
        return {name: tuple(each.shape) for name, each in self._parameters_by_name().items() if name not in ties}

    def ties(self) -> dict[str, str]:
        """See `Model.ties`."""
        first: dict[int, str] = {}
        names = ((name, first.setdefault(id(each), name)) for name, each in self._parameters_by_name().items())
        return {name: kept for name, kept in names if name != kept}

    def tensors(self, names: Iterable[str]) -> Iterator[tuple[str, Tensor]]:
        """See `Model.tensors`."""
        found = self._parameters_by_name()
        return ((name, found[name].detach()) for name in names)

    def changes(self, tensors: dict[str, Tensor]) -> list[tuple[Tensor, Tensor]]:
        """See `Model.changes`."""
        found = self._parameters_by_name()
        targets = {name: found[name].detach() for name in tensors}
        return [(target, tensors.pop(name).to(target.dtype)) for name, target in targets.items()]


class _GivenHidden(nn.Module):
    """Stands for the module beneath a head.

    Attributes:
        hidden: [1, n, hidden_size], what it gives.
        kind: of that module's output.
    """

    hidden: Tensor
    kind: type[Any]

    def forward(self, *_: Any, **__: Any) -> Any:
        if issubclass(self.kind, tuple):
            return (self.hidden,)
        return self.kind(last_hidden_state=self.hidden)


def _with_module(root: Any, path: str, module: nn.Module) -> Any:
    """A module that shares all with another, but has one of its modules replaced, by its path."""
    name, _, rest = path.partition(".")
    made = copy.copy(root)
    made._modules = {**root._modules, name: _with_module(root._modules[name], rest, module) if rest else module}
    return made
