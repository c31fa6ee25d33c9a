"""The interface between an executor and a model, whichever code computes it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple, Protocol

import msgspec
import torch
from torch import Tensor

from aioengine.errors import ConfigError, InternalError
from aioengine.kernels.operations import LayerAttention, Operations
from aioengine.kernels.packed_weight import Quantization
from aioengine.scheduler.cache_layout import AttentionSpec, CacheSpec, StateSpec


class ModelConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The shape of a model, as far as an executor has to know it.

    Attributes:
        num_heads, num_kv_heads, head_dim: of the attention; ``num_heads`` is a multiple of ``num_kv_heads``.
        max_model_len: most tokens in a sequence: what the model was made for, or less by the engine's limit.
        dtype: of the parameters and of what flows between them.
        caches: what each layer keeps of a sequence, by the index that it has in the cache; a window of
            ``max_model_len`` or more becomes None.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_model_len: int
    dtype: torch.dtype
    caches: tuple[CacheSpec, ...]

    def __post_init__(self) -> None:
        caches = tuple(
            msgspec.structs.replace(spec, window=None)
            if isinstance(spec, AttentionSpec) and (spec.window or 0) >= self.max_model_len
            else spec
            for spec in self.caches
        )
        msgspec.structs.force_setattr(self, "caches", caches)

    @property
    def windows(self) -> tuple[int | None, ...]:
        """For each layer how many of the last keys a token sees, itself included; None for all."""
        return tuple(spec.window if isinstance(spec, AttentionSpec) else None for spec in self.caches)


class StateRows(NamedTuple):
    """Where the states of a step's rows are, in the blocks of a layer. A tensor each, int32 [rows].

    A layer reads the state before each row's first token, and writes those at the boundary and after the last token.

    Attributes:
        first_tokens: index in the step of each row's first token. num_tokens: how many follow, that one included.
        before: the block with the state before the first token; -1: there is none, and the row starts with nothing.
        num_to_boundary: tokens up to the block of the last token, where the row crosses into it; 0: it begins in there.
        at_boundary: the block for the state after those; -1: none.
        after: the block for the state after the last token, often the same as ``before``; -1: the row is padding.
    """

    first_tokens: Tensor
    num_tokens: Tensor
    before: Tensor
    num_to_boundary: Tensor
    at_boundary: Tensor
    after: Tensor


def limit_length(stated: int, max_model_len: int | None) -> int:
    """The most tokens of a sequence: what the model states, or less by the engine's limit.

    Raises:
        ConfigError: the limit is more.
    """
    if max_model_len is not None and max_model_len > stated:
        raise ConfigError(f"max_model_len={max_model_len} is more than the {stated} tokens that this model allows")
    return max_model_len or stated


class GivenEmbeddings(NamedTuple):
    """Vectors in place of the embeddings of some of a step's tokens, as an image's are.

    Attributes:
        tokens: int64 [n], indices of these tokens in the step.
        values: [n, hidden_size], in the model's dtype; scaled already, where the model scales embeddings.
    """

    tokens: Tensor
    values: Tensor


class StepContext(Protocol):
    """One step as a model sees it: attention over the cache, and what differs from token to token.

    Products get it beside their input, so that they may depend on a token's row. A capability that models need to know
    of adds a field here, such as a row's slot of a recurrent state, or the group of ranks that share the step.

    Attributes:
        embeddings: given embeddings, or None. A step that has some is no graph.
    """

    embeddings: GivenEmbeddings | None

    @property
    def positions(self) -> Tensor:
        """int32 [tokens], positions of the tokens in their sequences.

        A model that rotates by several coordinates may want [dimensions, tokens].
        """
        ...

    @property
    def rows(self) -> Tensor:
        """int32 [tokens], the executor's row of each token; for padding the number of rows, one more than the last.

        A table with a line for each row, and one more, can be read at all of them. They are made when first asked for,
        and may be asked for within a graph.
        """
        ...

    def attend(self, qkv: Tensor, layer: LayerAttention) -> Tensor:
        """Normalise and rotate queries and keys, write keys and values to the cache, attend.

        Args:
            qkv: [tokens, (heads + 2 · kv_heads) · head_dim], queries, keys, values, as the product gave them.
            layer: how to attend; called once for each layer, in order.
        Returns:
            [tokens, heads · head_dim].
        """
        ...

    def find_states(self, index: int) -> tuple[Tensor, StateRows]:
        """Find the states of a layer whose spec is a `StateSpec`.

        Args:
            index: of the layer in ``ModelConfig.caches``.
        Returns:
            uint8 [blocks, num_bytes], to be read and written by the layer; and which of them.
        """
        ...


class EmptyStep:
    """A `StepContext` of tokens that belong to no row, and see no keys.

    Args:
        positions: as there.
        num_rows: rows of the executor.
    """

    embeddings: GivenEmbeddings | None = None

    def __init__(self, config: ModelConfig, positions: Tensor, num_rows: int = 0) -> None:
        self.positions = positions
        self._num_rows = num_rows
        self._config = config

    @property
    def rows(self) -> Tensor:
        return torch.full_like(self.positions, self._num_rows)

    def attend(self, qkv: Tensor, layer: LayerAttention) -> Tensor:
        return qkv.new_zeros(len(qkv), self._config.num_heads * self._config.head_dim)

    def find_states(self, index: int) -> tuple[Tensor, StateRows]:
        spec = self._config.caches[index]
        assert isinstance(spec, StateSpec)
        states = torch.empty(0, spec.num_bytes, dtype=torch.uint8, device=self.positions.device)
        none = self.positions.new_full((1,), -1)
        return states, StateRows(
            first_tokens=none + 1,
            num_tokens=none + 1 + len(self.positions),
            before=none,
            num_to_boundary=none + 1,
            at_boundary=none,
            after=none,
        )


class ChosenTokens:
    """A `StepContext` of some of a step's tokens, for the products behind the last layer; it has no attention.

    Args:
        tokens: int [n], indices of the tokens in ``step``.
    """

    embeddings: GivenEmbeddings | None = None

    def __init__(self, step: StepContext, tokens: Tensor) -> None:
        self._step = step
        self._tokens = tokens

    @property
    def positions(self) -> Tensor:
        return self._step.positions.index_select(-1, self._tokens)

    @property
    def rows(self) -> Tensor:
        return self._step.rows.index_select(0, self._tokens)

    def attend(self, qkv: Tensor, layer: LayerAttention) -> Tensor:
        raise InternalError("a product behind the last layer has asked for attention")

    def find_states(self, index: int) -> tuple[Tensor, StateRows]:
        raise InternalError("a product behind the last layer has asked for states")


class Model(Protocol):
    """Token ids in, hidden states and logits out; attention and its cache are the caller's.

    To be called under ``torch.inference_mode()``. Names of tensors are those of a checkpoint.

    Attributes:
        quantization: of the weights, made at load.
        is_capturable: whether a step of given sizes launches the same operations each time, so that it may be recorded.
    """

    quantization: Quantization | None
    is_capturable: bool

    @property
    def config(self) -> ModelConfig: ...

    @property
    def operations(self) -> Operations:
        """The operations that it computes by."""
        ...

    @property
    def weight_bytes(self) -> int:
        """Bytes of all weights."""
        ...

    def use(self, operations: Operations) -> None:
        """Compute by these operations from now on. An error leaves it as fit to run as before."""
        ...

    def __call__(self, token_ids: Tensor, step: StepContext) -> Tensor:
        """Compute one step for tokens of any number of sequences.

        Args:
            token_ids: int32 [tokens], below vocab_size.
        Returns:
            [tokens, hidden_size], after the final norm.
        """
        ...

    def logits(self, hidden: Tensor, step: StepContext) -> Tensor:
        """[n, hidden_size] → float32 [n, vocab_size].

        Args:
            step: the context of these n tokens: that of the step, or `ChosenTokens` of it.
        """
        ...

    def move(self, device: torch.device, *, is_pinned: bool = False) -> None:
        """Move the values of the weights, all or none.

        Args:
            is_pinned: to page-locked memory of the host, from and to which copies are fastest.
        Raises:
            MemoryError: there is no room for them; they are where they were.
        """
        ...

    def weights(self) -> Iterator[Tensor]:
        """All weights as they are kept, in the same order for each model of one config and one way of keeping."""
        ...

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shapes of a checkpoint's tensors, without those that stand for another (`ties`)."""
        ...

    def ties(self) -> dict[str, str]:
        """Tensors that a checkpoint may hold beside, or in place of, the one that they are equal to."""
        ...

    def tensors(self, names: Iterable[str]) -> Iterator[tuple[str, Tensor]]:
        """The values of some of `shapes`, in ``config.dtype``; one after the other, each to be used before the next."""
        ...

    def changes(self, tensors: dict[str, Tensor]) -> list[tuple[Tensor, Tensor]]:
        """The changes by which these tensors become the model's.

        Args:
            tensors: of `shapes` and any dtype, on the host; taken out as it goes.
        Returns:
            pairs of (what is kept, its values to be), of one shape and dtype; the old ones stay until they are copied.
        """
        ...


def move_weights(weights: list[Tensor], device: torch.device, *, is_pinned: bool) -> None:
    """Move tensors as `Model.move` does. Their old memory is freed at the end.

    Raises:
        MemoryError: as there; they are where they were, as after any other error.
    """
    moved: list[Tensor] = []
    try:
        for tensor in weights:
            moved.append(torch.empty(tensor.shape, dtype=tensor.dtype, device=device, pin_memory=is_pinned))
    except RuntimeError as error:
        moved.clear()  # the error's traceback would keep it
        locked = "page-locked " if is_pinned else ""
        num_bytes = sum(tensor.nbytes for tensor in weights)
        raise MemoryError(f"{num_bytes} bytes of {locked}memory on {device}: {error}") from error
    for room, tensor in zip(moved, weights, strict=True):
        room.copy_(tensor.data)
    for room, tensor in zip(moved, weights, strict=True):
        tensor.data = room
