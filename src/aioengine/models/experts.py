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
    """How a family's config.json describes its experts. A string is the name of the field that holds the value.

    Attributes:
        intermediate_size: of an expert.
        is_normalised, bias, activation: as in `ExpertsConfig`.
        has_shared: whether there is an expert of all tokens, of ``shared_expert_intermediate_size``.
        has_plain_layers: whether ``mlp_only_layers`` and ``decoder_sparse_step`` name layers without experts.
    """

    intermediate_size: str = "intermediate_size"
    is_normalised: bool | str = True
    has_shared: bool = False
    has_plain_layers: bool = False
    bias: bool = False
    activation: Activation = "silu"

    def read(self, get: Callable[[str], Any], num_layers: int) -> ExpertsConfig:
        """Read the experts of a config; ``get`` returns a field by its name.

        Raises:
            ValueError: numbers are absent or no sizes of experts.
        """
        count = get("num_experts") or get("num_local_experts")
        numbers = {"num_experts": count, "num_experts_per_tok": get("num_experts_per_tok")}
        numbers |= {self.intermediate_size: get(self.intermediate_size)}
        if self.has_shared:
            numbers |= {"shared_expert_intermediate_size": get("shared_expert_intermediate_size")}
        if self.has_plain_layers:
            numbers |= {"decoder_sparse_step": get("decoder_sparse_step")}
        for name, value in numbers.items():
            if not isinstance(value, int) or not 0 < value < 2**24:
                raise ValueError(f"{name}={value!r}; a size is needed")
        if numbers["num_experts_per_tok"] > count or count > MAX_EXPERTS:
            raise ValueError(f"{numbers['num_experts_per_tok']} of {count!r} experts cannot be chosen")
        layers = [True] * num_layers
        if self.has_plain_layers:
            plain, step = get("mlp_only_layers") or [], numbers["decoder_sparse_step"]
            layers = [index not in plain and (index + 1) % step == 0 for index in range(num_layers)]
        is_normalised = self.is_normalised
        return ExpertsConfig(
            layers=tuple(layers),
            count=count,
            num_chosen=numbers["num_experts_per_tok"],
            intermediate_size=numbers[self.intermediate_size],
            is_normalised=bool(get(is_normalised)) if isinstance(is_normalised, str) else is_normalised,
            shared_size=numbers.get("shared_expert_intermediate_size", 0),
            bias=self.bias,
            activation=self.activation,
        )
