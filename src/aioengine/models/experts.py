"""Mixtures of experts as config.json describes them: their layers, their number, and how tokens choose."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import msgspec

if TYPE_CHECKING:
    from aioengine.kernels.operations import Activation

MAX_EXPERTS = 2**16


class ExpertsConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The gated MLPs that take the place of a layer's only one.

    Attributes:
        layers: for each layer whether it has experts; the others have a plain MLP.
        count: experts of a layer. num_chosen: experts of a token.
        intermediate_size: of each expert.
        is_normalised: whether the weights of a token's experts sum to 1.
        shared_size: intermediate size of the expert of all tokens, which a sigmoid weighs; 0: there is none.
        bias: whether experts and router have biases.
        activation: as in `Operations.gated_activation`.
    """

    layers: tuple[bool, ...]
    count: int
    num_chosen: int
    intermediate_size: int
    is_normalised: bool
    shared_size: int = 0
    bias: bool = False
    activation: Activation = "silu"


class ExpertFields(msgspec.Struct, frozen=True, kw_only=True):
    """How a family's config.json and its checkpoints describe its experts. A string of a config is a field's name.

    Attributes:
        intermediate_size: of an expert.
        is_normalised, bias, activation: as in `ExpertsConfig`.
        has_shared: whether there is an expert of all tokens, of ``shared_expert_intermediate_size``.
        has_plain_layers: whether ``mlp_only_layers`` and ``decoder_sparse_step`` name layers without experts.
        block, router, gate, up, down: names of modules in a checkpoint.
        is_transposed: all experts are one tensor there, [experts, inputs, outputs]; else each has its own.
    """

    intermediate_size: str = "intermediate_size"
    is_normalised: bool | str = True
    has_shared: bool = False
    has_plain_layers: bool = False
    bias: bool = False
    activation: Activation = "silu"
    block: str = "mlp"
    router: str = "gate"
    gate: str = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"
    is_transposed: bool = False

    def read(self, get: Callable[[str], Any], num_layers: int) -> ExpertsConfig:
        """Read the experts of a config; ``get`` returns a field by its name.

        Raises:
            ValueError: numbers are absent or no sizes of experts.
        """
        count, shared, step = get("num_experts") or get("num_local_experts"), "shared_expert_intermediate_size", 1
        numbers = {
            "num_experts": count,
            **{name: get(name) for name in ("num_experts_per_tok", self.intermediate_size)},
        }
        if self.has_shared:
            numbers[shared] = get(shared)
        if self.has_plain_layers:
            numbers["decoder_sparse_step"] = step = get("decoder_sparse_step")
        for name, value in numbers.items():
            if not isinstance(value, int) or not 0 < value < 2**24:
                raise ValueError(f"{name}={value!r}; a size is needed")
        num_chosen, is_normalised = numbers["num_experts_per_tok"], self.is_normalised
        if num_chosen > count or count > MAX_EXPERTS:
            raise ValueError(f"{num_chosen} of {count!r} experts cannot be chosen")
        plain = (self.has_plain_layers and get("mlp_only_layers")) or ()
        return ExpertsConfig(
            layers=tuple(index not in plain and (index + 1) % step == 0 for index in range(num_layers)),
            count=count,
            num_chosen=num_chosen,
            intermediate_size=numbers[self.intermediate_size],
            is_normalised=bool(get(is_normalised)) if isinstance(is_normalised, str) else is_normalised,
            shared_size=numbers.get(shared, 0),
            bias=self.bias,
            activation=self.activation,
        )
