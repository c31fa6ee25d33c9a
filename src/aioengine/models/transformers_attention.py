"""Paged attention behind transformers' modelling code, in one of two ways.

"attention": the code calls its attention through transformers' interface, and gets ours. A step is one forward pass
over the tokens of all rows, side by side. "cache": the code computes attention itself, over keys and values that it
gets from a cache object, which reads and writes the paged one: rows of one token go together, padded on the left to
the longest, and the others one after the other.

The two implementations of attention are registered with transformers when this module is imported.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import msgspec
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.cache_utils import Cache, CacheLayerMixin

from aioengine.kernels.attention.paged import StepAttention
from aioengine.kernels.operations import LayerAttention
from aioengine.kernels.torch.quantized import head_dim_of, read_lines
from aioengine.models.model import Attend

PAGED, PROBED = "aioengine_paged", "aioengine_probed"
"""What calls a module's `PagedLayer`, and its `Probe`; transformers makes masks for the second one alone."""

OTHER_BIASES = ("position_bias", "head_mask", "block_sequence_ids")
"""Options of an attention call that change what it computes, and that paged attention has not."""


class Unusable(Exception):
    """Why modelling code cannot compute over paged keys and values."""


class SeesLater(Unusable):
    """Its tokens see those behind them, in whatever way it is run."""


class LayerShape(NamedTuple):
    """What a layer hands to attention, or to its cache.

    Attributes:
        num_heads: of the queries; None where the layer keeps them to itself.
        window: how many of the last keys a token sees, itself included, of those that it is given; None for all.
    """

    num_heads: int | None
    num_kv_heads: int
    key_dim: int
    value_dim: int
    window: int | None


class RunningStep:
    """What the layers of a model attend by: set for each step, by the model that runs it."""

    attend: Attend


class PagedLayer(msgspec.Struct, frozen=True):
    """How an attention module attends, as its ``aioengine_layer``.

    Attributes:
        index, window: as in `LayerAttention`.
        head_dim: of the cache; smaller keys and values are padded with zeros.
    """

    step: RunningStep
    index: int
    window: int | None
    head_dim: int


class Mask(NamedTuple):
    """Stands for the mask that a layer would be given.

    Attributes:
        is_seen: of (sequence, head, query position, key position), positions as tensors.
    """

    is_seen: Callable[..., Any]

    def window(self, num_positions: int) -> int | None:
        """As in `LayerShape`, of a sequence of so many tokens.

        Raises:
            SeesLater: a token sees those behind it.
            Unusable: a token sees others than the last ones.
        """
        keys = torch.arange(num_positions)
        windows = set()
        for query in (num_positions - 1, num_positions // 2, 0):
            seen = self.is_seen(0, 0, torch.tensor(query, dtype=torch.long), keys)
            seen = torch.as_tensor(seen, dtype=torch.bool).expand(num_positions)
            if seen[query + 1 :].any():
                raise SeesLater("its tokens see those behind them: it is an encoder, which generates no text")
            count = int(seen.sum())
            if not seen[max(0, query + 1 - count) : query + 1].all():
                raise Unusable("a token sees others than the last ones before it")
            if count <= query:
                windows.add(count)
        if len(windows) > 1:
            raise Unusable("how many of the last tokens one sees depends on its position")
        return windows.pop() if windows else None


class Probe:
    """Listens to a forward pass of a few tokens, as the ``aioengine_layer`` of all modules: which attend, and how.

    Args:
        num_positions: of the longest sequence.

    Attributes:
        attention: of each module that called its attention, in order.
        cache: what each layer gave to its cache, by its number there.
    """

    def __init__(self, num_positions: int) -> None:
        self._num_positions = num_positions
        self.attention: dict[nn.Module, LayerShape] = {}
        self.cache: dict[int, LayerShape] = {}

    def attend(self, module: nn.Module, q: Tensor, k: Tensor, v: Tensor, mask: Any, options: dict[str, Any]) -> Tensor:
        """Note a call of attention; tensors as transformers gives them, [1, heads, tokens, size]."""
        if module in self.attention:
            raise Unusable("a layer attends twice in a step")
        if k.shape[2] != q.shape[2]:
            raise Unusable("a layer attends to other tokens than those of the sequence")
        for name in OTHER_BIASES:
            if options.get(name) is not None:
                raise Unusable(f"its attention takes a {name}")
        if not isinstance(mask, Mask | None):
            raise Unusable("its attention takes a mask of the model's own")
        window = None if mask is None else mask.window(self._num_positions)
        self.attention[module] = LayerShape(q.shape[1], k.shape[1], k.shape[3], v.shape[3], window)
        return q.new_zeros(1, q.shape[2], q.shape[1], v.shape[3])

    def add(self, index: int, k: Tensor, v: Tensor) -> None:
        """Note what a cache was given."""
        if index in self.cache:
            raise Unusable("a layer writes to its cache twice in a step")
        self.cache[index] = LayerShape(None, k.shape[1], k.shape[3], v.shape[3], None)


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
    """As transformers calls attention: [1, heads, tokens, size] each, to [1, tokens, heads, value size]."""
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
    qkv = torch.cat([_side_by_side(each, own.head_dim) for each in (query, key, value)], dim=1)
    out = own.step.attend(qkv, layer).view(1, num_tokens, num_heads, own.head_dim)
    return out[..., : value.shape[3]], None


def _side_by_side(heads: Tensor, head_dim: int) -> Tensor:
    """[tokens, heads · head_dim], of [1, heads, tokens, size]."""
    padded = F.pad(heads, (0, head_dim - heads.shape[3])) if heads.shape[3] < head_dim else heads
    return padded[0].transpose(0, 1).flatten(1)


def _attend_probed(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, *_: Any, **options: Any
) -> tuple[Tensor, None]:
    return module.aioengine_layer.attend(module, query, key, value, attention_mask, options), None


AttentionInterface.register(PAGED, _attend_paged)
AttentionInterface.register(PROBED, _attend_probed)
AttentionMaskInterface.register(PROBED, lambda mask_function, **_: Mask(mask_function))


class LayersCache(Cache):  # type: ignore[misc]
    """A cache of transformers' whose layers have keys and values, and nothing else."""

    def __init__(self, layers: list[CacheLayerMixin]) -> None:
        super().__init__(layers=layers)

    def _refuse(self, *_: Any, **__: Any) -> Any:
        raise Unusable("its layers keep a state that is not keys and values: a convolution's, or a recurrence's")

    get_conv_state = update_conv_state = get_recurrent_state = update_recurrent_state = has_previous_state = _refuse


class _CacheLayer(CacheLayerMixin):  # type: ignore[misc]
    """A layer of a cache. What transformers does with whole sequences in its own loop is not asked of it.

    Args:
        start: tokens that are there already, of the longest of the rows.
    """

    is_sliding = False

    def __init__(self, start: int) -> None:
        super().__init__()
        self._length = start

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.is_initialized = True

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self._length + query_length, 0

    def get_seq_length(self) -> int:
        return self._length

    def get_max_length(self) -> int:
        return -1


class ProbedCacheLayer(_CacheLayer):
    """A layer of the cache that a `Probe` listens to."""

    def __init__(self, probe: Probe, index: int) -> None:
        super().__init__(0)
        self._probe = probe
        self._index = index

    def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        self._probe.add(self._index, key_states, value_states)
        self._length += key_states.shape[2]
        return key_states, value_states


class Rows:
    """Rows of a step that have equally many tokens in it, and go through the model together.

    Args:
        step: whose rows they are.
        rows, first, starts: int64 [b]: of the block tables; index of the row's first token in the step; its position.
        count: tokens of each.

    Attributes:
        tokens: int64 [b, count], index of each token in the step.
        num_keys: of the longest row, with these tokens. The keys of the others have padding on their left.
        is_key: bool [b, num_keys]: what is none.
        positions: int64 [b, count].
    """

    def __init__(self, step: StepAttention, rows: Tensor, first: Tensor, starts: Tensor, count: int) -> None:
        self._step = step
        ends = starts + count
        self.tokens = first[:, None] + torch.arange(count, device=rows.device)
        self.num_keys = int(ends.max())
        positions = torch.arange(self.num_keys, device=rows.device) - (self.num_keys - ends)[:, None]
        self.is_key = positions >= 0
        self.positions = positions[:, -count:]
        block_size = step.attention.cache.shape[2]
        positions = positions.clamp(min=0)  # for padding any that is there
        (block_table,) = step.attention.block_tables  # no layer has a window, so that all are in one group
        self._slots = block_table[rows[:, None], positions // block_size] * block_size + positions % block_size

    def layers(self, num_layers: int) -> LayersCache:
        """A cache of transformers' over these rows."""
        return LayersCache([_RowsLayer(self, index) for index in range(num_layers)])

    def update(self, index: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Write a layer's new keys and values, and read those of all tokens; of padding, they are another token's.

        Args:
            keys, values: [b, kv_heads, count, size].
        Returns:
            [b, kv_heads, num_keys, size] each.
        """
        attention, tokens = self._step.attention, self.tokens.flatten()
        _, k_cache, v_cache = attention.layers[index]
        head_dim = head_dim_of(k_cache)
        k, v = (
            F.pad(new, (0, head_dim - new.shape[3])).transpose(1, 2).reshape(len(tokens), -1) for new in (keys, values)
        )
        # What writes them rotates queries, too: as many heads as there are of keys will do for it.
        qkv, positions, slots = torch.cat((k, k, v), dim=1), self._step.positions[tokens], self._step.slots[0][tokens]
        attention.operations.rotate_and_write(qkv, positions, slots, None, None, 0.0, k_cache, v_cache)
        k, v = (_lines(cache, self._slots, keys.dtype).transpose(1, 2) for cache in (k_cache, v_cache))
        return k[..., : keys.shape[3]], v[..., : values.shape[3]]


def _lines(cache: Tensor, slots: Tensor, dtype: torch.dtype) -> Tensor:
    """What a cache keeps in some slots: [*slots, kv_heads, head_dim]."""
    if cache.dtype == torch.float8_e4m3fn:  # which indexing does not know
        return cache.view(torch.uint8).flatten(0, 1)[slots].view(cache.dtype).to(dtype)
    return read_lines(cache.flatten(0, 1)[slots], dtype)


class _RowsLayer(_CacheLayer):
    def __init__(self, rows: Rows, index: int) -> None:
        super().__init__(rows.num_keys - rows.tokens.shape[1])
        self._rows = rows
        self._index = index

    def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        self._length = self._rows.num_keys
        return self._rows.update(self._index, key_states, value_states)


def rows_of(step: StepAttention) -> list[Rows]:
    """The rows of a step as they go through a model together. Waits for the device.

    Returns:
        all that have one token, then each of the others; without those of padding.
    """
    made: list[Rows] = []
    if step.decodes is not None:
        decodes = step.decodes[step.decodes[:, 0] >= 0].long()
        if len(decodes):
            made.append(Rows(step, decodes[:, 0], decodes[:, 1], decodes[:, 2] - 1, 1))
    if step.tiles is not None:
        spans: dict[int, list[int]] = {}
        for row, first, count, start in sorted(step.tiles.tolist(), key=lambda tile: tile[3]):
            if row >= 0:
                spans.setdefault(row, [first, start, 0])[2] += count  # the tiles of a row follow each other
        for row, (first, start, count) in spans.items():
            columns = torch.tensor([[row], [first], [start]], dtype=torch.long, device=step.tiles.device)
            made.append(Rows(step, columns[0], columns[1], columns[2], count))
    return made
