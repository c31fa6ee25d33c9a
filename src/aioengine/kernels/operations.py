"""The operations of a decoder's step: the contract of each, and its plain torch form.

`plain_torch` is the set of these forms. It runs on any device, computes what no kernel does, and is what kernels are
tested against. A kernel replaces one operation of a device's set: `aioengine.kernels.triton` on a GPU, and
`aioengine.kernels.native.native_operations` on a CPU.

Shapes are those of one step: T tokens, h query heads, g KV heads, d head size, n rows of logits, s samples (tokens to
be sampled), V vocabulary. Unless noted, tensors are contiguous and on one device, and ``x`` stands for float32,
bfloat16 or float16. The launchers of kernels raise InternalError where tensors do not fit each other.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.nn import functional as F

from aioengine.kernels.packed_weight import (
    CodedRows,
    CodedWeight,
    PackedWeight,
    Quantization,
    UnpackedRows,
    in_panels,
)
from aioengine.kernels.sample_rows import SampleFlag, SampleRow, Status, param_of
from aioengine.kernels.torch.attention import attend, sum_dtype
from aioengine.kernels.torch.draws import chunks, draw_tokens, is_allowed, rows_of
from aioengine.kernels.torch.quantized import (
    coded_rows,
    embed_quantized,
    head_dim_of,
    int4_rows,
    multiply,
    pack_coded,
    pack_int8,
    quantize_lines,
    read_lines,
    some_rows,
    unpack_quantized,
)
from aioengine.kernels.torch.tables import as_integers, put_where

Operation = TypeVar("Operation", bound=Callable[..., Any])

MAX_FLOAT8 = torch.finfo(torch.float8_e4m3fn).max


def waits_for_device(form: Operation) -> Operation:
    """A decorator of plain torch forms that read what the device has computed: no CUDA graph records them."""
    form.waits_for_device = True  # type: ignore[attr-defined]
    return form


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerAttention:
    """How one layer attends: all that a step asks of it between the products before and behind attention.

    Attributes:
        index: of the layer, from 0: where its keys and values are.
        rope_table: as in `Operations.rotate_and_write`; layers of a kind share one. None: not rotated.
        qk_weight, eps, qk_offset, is_qk_norm_wide: of the norm of queries and keys, as there.
        scale, window, soft_cap, sinks: as in `PagedKV`.
    """

    index: int
    rope_table: Tensor | None
    qk_weight: Tensor | None
    eps: float
    scale: float
    window: int | None
    soft_cap: float | None = None
    sinks: Tensor | None = None
    qk_offset: float = 0.0
    is_qk_norm_wide: bool = False


Activation = Literal["silu", "gelu_tanh", "clamped_silu"]
"""SiLU(x) = x · σ(x), or GELU by tanh: x / 2 · (1 + tanh(√(2/π) · (x + 0.044715 · x³))) (Hendrycks and Gimpel, 2016,
arXiv:1606.08415); or gpt-oss's, x · σ(1.702 · x), of the gate cut off above 7, times up + 1, with up cut off beyond ±7.
"""


class PagedKV(NamedTuple):
    """The keys and values of a layer, and how they are attended to.

    Attributes:
        k_cache, v_cache: as in `Operations.rotate_and_write`; hold this step's tokens already.
        block_tables: int32 [rows, blocks of the longest], of all the executor's rows.
        scale: of the scores.
        window: the most positions that a query sees, itself included; None: all.
        soft_cap: c, above 0: each score s, scaled already, becomes c · tanh(s / c); None: it stays.
        sinks: float32 [h], the score of one more key for each query head, neither scaled nor capped, which counts in
            the softmax's sum alone (Agarwal et al., 2025, arXiv:2508.10925); None: there is none.
    """

    k_cache: Tensor
    v_cache: Tensor
    block_tables: Tensor
    scale: float
    window: int | None
    soft_cap: float | None = None
    sinks: Tensor | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertWeights:
    """The gated MLPs that a layer's tokens choose among, for `Operations.experts`.

    An expert's matrix begins at a multiple of `PANEL` rows, so that it can be packed and read like a matrix alone; rows
    behind it, up to the next, mean nothing.

    Attributes:
        num_experts: E.
        hidden, intermediate: sizes of an expert's inputs and outputs, and between its matrices.
        gate_up: E matrices [2 · intermediate, hidden] one below the other, in each the gate first.
        down: E matrices [hidden, intermediate] one below the other.
        gate_up_bias, down_bias: x, a number for each row of these; None: there are none.
    """

    num_experts: int
    hidden: int
    intermediate: int
    gate_up: PackedWeight
    down: PackedWeight
    gate_up_bias: Tensor | None = None
    down_bias: Tensor | None = None
    activation: Activation = "silu"


class Operations:
    """A device's operations. An attribute of the object replaces the plain torch form of its name.

    Attributes:
    """

    def has_kernel(self, operation: str) -> bool:
        """Whether a kernel computes the operation of this name, not plain torch."""
        return getattr(getattr(self, operation), "__func__", None) is not vars(Operations)[operation]

    @property
    def is_capturable(self) -> bool:
        """Whether a CUDA graph records all of them."""
        return not any(hasattr(getattr(self, name), "waits_for_device") for name in NAMES)

    # Products with weights

    def pack(
        self,
        weight: Tensor | UnpackedRows | CodedWeight | CodedRows,
        quantization: Quantization | None = None,
        dtype: torch.dtype | None = None,
    ) -> PackedWeight:
        """Bring a weight into the layout that `linear` and `embed` read; the result takes the place of ``weight``.

        Not quantised, the result is in the memory of ``weight``: either ``weight`` itself, so that later changes of it
        count, or its bytes in another order. Quantised, it has memory of its own, and is made block by block. Codes
        stay at their width where `linear` reads them; else the result is dense, and `PackedWeight.coding` is None.

        Args:
            weight: [out_features, in_features], x; to be quantised it may also be the rows of another packed weight.
                Or codes, which are not quantised further.
            quantization: "int8": symmetric, with a scale for each output. "int4": with a scale for each group of
                inputs of each output. What `unpack` gives of such a weight is packed without a further error.
            dtype: of what it is multiplied with and of its embeddings; None: as ``weight``, float32 of codes.
        """
        if isinstance(weight, CodedWeight | CodedRows):
            return pack_coded(weight.rows() if isinstance(weight, CodedWeight) else weight, dtype or torch.float32)
        if quantization == "int4":
            return pack_coded(int4_rows(weight), dtype or weight.dtype)
        if quantization == "int8":
            return pack_int8(weight, dtype or weight.dtype)
        assert isinstance(weight, Tensor)
        rows, columns = weight.shape
        return PackedWeight(weight, None, (rows, columns), weight.dtype, "rows")

    def unpack(self, packed: PackedWeight, rows: slice | None = None) -> Tensor:
        """The dense matrix: a copy, unless ``packed.layout`` is "rows".

        Args:
            rows: one of its `row_blocks`, to be unpacked alone; None: all.
        Returns:
            [out_features, in_features], as it was packed; float32 where it is quantised, in which its values are exact.
        """
        if packed.scales is None:
            return packed.values if rows is None else packed.values[rows]
        return UnpackedRows(packed, unpack_quantized).whole() if rows is None else unpack_quantized(packed, rows)

    def unpack_codes(self, packed: PackedWeight) -> CodedRows:
        """Return the codes that `pack` was given, exactly; for weights that have a ``coding``."""
        assert packed.scales is not None
        assert packed.coding is not None
        has_offsets, device = len(packed.scales) == 2, packed.values.device
        make = partial(coded_rows, packed)
        return CodedRows(packed.shape, packed.coding, packed.scales.dtype, has_offsets, device, make)

    def linear(
        self, x: Tensor, packed: PackedWeight, bias: Tensor | None, out_dtype: torch.dtype | None = None
    ) -> Tensor:
        """x · Wᵀ + b, summed in float32.

        Args:
            x: [T, in_features], of ``packed.dtype``. With "int8" weights each row is rounded to int8 values with a
                scale for that row, and the sums are exact integers.
            bias: [out_features], same dtype, or None.
            out_dtype: of the result, rounded to once where the device can; None: as ``x``.
        Returns:
            [T, out_features].
        """
        return multiply(x, packed, bias, out_dtype or x.dtype)

    def embed(self, token_ids: Tensor, packed: PackedWeight) -> Tensor:
        """Rows of a matrix of whatever layout: a tied embedding and head are one weight.

        Args:
            token_ids: int32 [T], below out_features.
        Returns:
            [T, in_features], of ``packed.dtype``, in memory of its own.
        """
        if packed.scales is not None:
            return embed_quantized(token_ids, packed)
        return F.embedding(token_ids, packed.values)

    # The decoder

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float, offset: float = 0.0) -> Tensor:
        """x / √(mean(x²) + ε) · (w + offset), in float32, rounded once (Zhang and Sennrich, 2019, arXiv:1910.07467).

        Args:
            x: [T, hidden]; weight: [hidden], same dtype.
        Returns:
            [T, hidden], same dtype.
        """
        return _normalise(x, weight, eps, offset).to(x.dtype)

    def add_rms_norm(
        self, x: Tensor, residual: Tensor, weight: Tensor, eps: float, offset: float = 0.0, scale: float = 1.0
    ) -> Tensor:
        """Add ``x`` · scale to ``residual`` in place (rounded to its dtype), and return `rms_norm` of the sum.

        Args:
            x, residual: [T, hidden], same dtype.
        """
        residual.copy_(residual.float() + x.float() * scale)
        return _normalise(residual, weight, eps, offset).to(x.dtype)

    def rms_norm_add(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float, offset: float = 0.0) -> None:
        """Add `rms_norm` of ``x`` to ``residual`` in place, rounded once, to its dtype.

        Args:
            x, residual: [T, hidden], same dtype.
        """
        residual.copy_(residual.float() + _normalise(x, weight, eps, offset))

    def gated_activation(self, gate_up: Tensor, activation: Activation = "silu") -> Tensor:
        """activation(gate) · up, in float32, rounded once (Shazeer, 2020, arXiv:2002.05202).

        Args:
            gate_up: [T, 2 · intermediate], gate first; for "clamped_silu" gate and up in turn, number by number.
        Returns:
            [T, intermediate].
        """
        activated: Tensor
        up: Tensor
        if activation == "clamped_silu":
            gate, up = gate_up.float().unflatten(-1, (-1, 2)).unbind(-1)
            gate, up = gate.clamp(max=7.0), up.clamp(-7.0, 7.0)
            activated, up = gate * torch.sigmoid(1.702 * gate), up + 1.0
        else:
            gate, up = gate_up.float().chunk(2, dim=-1)
            activated = F.silu(gate) if activation == "silu" else F.gelu(gate, approximate="tanh")
        return (activated * up).to(gate_up.dtype)

    def scale(self, x: Tensor, factor: float, soft_cap: float | None = None) -> None:
        """Multiply by ``factor`` in place, in float32, rounded once; with a soft cap c each product y becomes
        c · tanh(y / c) before that.

        Args:
            x: [any, any].
        """
        scaled = x.float() * factor
        x.copy_(scaled if soft_cap is None else soft_cap * torch.tanh(scaled / soft_cap))

    def route(self, logits: Tensor, num_experts: int, num_chosen: int, *, is_normalised: bool) -> tuple[Tensor, Tensor]:
        """Choose each token's experts: those of the highest logits (Shazeer et al., 2017, arXiv:1701.06538).

        Args:
            logits: float32 [T, E], or [T, E + 1], the last that of an expert which all tokens share.
            num_experts: E. num_chosen: k, at most E.
            is_normalised: the weights are a softmax over the chosen, else over all E.
        Returns:
            ids: int32 [T, k], by falling logits, of equal ones the lowest id first.
            weights: float32 [T, k], or [T, k + 1], the last the sigmoid of the shared expert's logit.
        """
        of_experts, of_shared = logits[:, :num_experts], logits[:, num_experts:]
        ordered, ids = of_experts.sort(dim=1, descending=True, stable=True)  # `topk` chooses any of equal ones
        chosen, ids = ordered[:, :num_chosen], ids[:, :num_chosen]
        weights = chosen.softmax(1) if is_normalised else of_experts.softmax(1).gather(1, ids)
        return ids.int(), torch.cat((weights, of_shared.sigmoid()), dim=1)

    @waits_for_device
    def experts(
        self, x: Tensor, ids: Tensor, weights: Tensor, of_layer: ExpertWeights, shared: Tensor | None = None
    ) -> Tensor:
        """Σ weight · down(activation(gate_up(x))) over each token's experts, of which no others are read.

        Products round as `linear` and `gated_activation` do, but for the last, whose float32 sums are weighted, added
        in the order of ``ids`` and rounded once: a token's result does not depend on the other tokens.

        Args:
            x: [T, hidden].
            ids: int32 [T, k], below E. weights: float32 [T, k]; with ``shared`` [T, k + 1].
            shared: [T, hidden], same dtype as ``x``: what the shared expert made of it, added last.
        Returns:
            [T, hidden], same dtype as ``x``.
        """
        made = x.new_empty((*ids.shape, of_layer.hidden), dtype=torch.float32)
        for expert in ids.unique().tolist():
            token, nth = (ids == expert).nonzero(as_tuple=True)
            of_gate_up, of_down = (_rows_of(expert, size) for size in (2 * of_layer.intermediate, of_layer.hidden))
            gate_up_bias, down_bias = (
                bias[rows] if bias is not None else None
                for bias, rows in ((of_layer.gate_up_bias, of_gate_up), (of_layer.down_bias, of_down))
            )
            gate_up = multiply(x[token], some_rows(of_layer.gate_up, of_gate_up), gate_up_bias, x.dtype)
            activated = Operations.gated_activation(self, gate_up, of_layer.activation)
            made[token, nth] = multiply(activated, some_rows(of_layer.down, of_down), down_bias, torch.float32)
        total = torch.zeros_like(made[:, 0])
        terms = made.unbind(1) if shared is None else (*made.unbind(1), shared.float())
        for term, weight in zip(terms, weights.unbind(1), strict=True):
            total += term * weight[:, None]
        return total.to(x.dtype)

    def rotate_and_write(
        self,
        qkv: Tensor,
        positions: Tensor,
        slots: Tensor,
        rope_table: Tensor | None,
        qk_weight: Tensor | None,
        eps: float,
        k_cache: Tensor,
        v_cache: Tensor,
        qk_offset: float = 0.0,
        *,
        is_qk_norm_wide: bool = False,
    ) -> Tensor:
        """Normalise each head's query and key (where there is a weight), rotate them (Su et al., 2021,
        arXiv:2104.09864, halves layout), and write keys and values to the cache.

        Args:
            qkv: [T, (h + 2 g) · d]: queries, keys, values.
            positions: int32 [T].
            slots: int32 [T], where the key and value go in the cache seen as [blocks · block_size, g, d]; -1: nowhere.
            rope_table: [positions, 2 · d], cos then sin, sin negative in its first half; rotated = x · cos +
                roll(x, d / 2) · sin. Same dtype as ``qkv``, or float32. None: nothing is rotated.
            qk_weight: [h + g, d], of `rms_norm` over each head, or None.
            qk_offset: added to the weight, as there.
            is_qk_norm_wide: a token's queries of all heads are normalised as one row, and so are its keys.
            k_cache, v_cache: [blocks, block_size, g, d], same dtype as ``qkv``; on a GPU also float8_e4m3fn, which
                saturates; on a CPU also int8 [blocks, block_size, g, d + 4], where the last 4 bytes are the scale, in
                float32, of what is before them.
        Returns:
            q: [T, h, d].
        """
        num_kv_heads, head_dim = k_cache.shape[2], head_dim_of(k_cache)
        num_heads = qkv.shape[1] // head_dim - 2 * num_kv_heads
        heads = qkv.view(len(qkv), num_heads + 2 * num_kv_heads, head_dim)
        qk, v = torch.split_with_sizes(heads.float(), (num_heads + num_kv_heads, num_kv_heads), 1)
        if qk_weight is not None:
            if is_qk_norm_wide:
                parts = zip(*(x.split((num_heads, num_kv_heads), -2) for x in (qk, qk_weight)), strict=True)
                normed = [_normalise(x.flatten(1), weight.flatten(), eps, qk_offset) for x, weight in parts]
                qk = torch.cat(normed, 1).view_as(qk)
            else:
                qk = _normalise(qk, qk_weight, eps, qk_offset)
        if rope_table is not None:
            cos, sin = rope_table[positions.long(), None].float().chunk(2, dim=-1)
            qk = qk * cos + qk.roll(head_dim // 2, dims=-1) * sin
        q, k = torch.split_with_sizes(qk, (num_heads, num_kv_heads), 1)
        for values, cache in ((k, k_cache), (v, v_cache)):
            if cache.dtype == torch.float8_e4m3fn:
                # Beyond its range float8 has nothing but NaN.
                values = values.clamp(-MAX_FLOAT8, MAX_FLOAT8)
            is_int8 = cache.dtype == torch.int8
            lines = quantize_lines(values.flatten(0, 1)) if is_int8 else values.to(cache.dtype)
            into = as_integers(cache)
            put_where(into.flatten(0, 1), slots, lines.view(into.dtype).view(-1, *into.shape[2:]), slots >= 0)
        return q.to(qkv.dtype)

    def attention_output(self, q: Tensor) -> Tensor:
        """Room for what `attend_decode` and `attend_prefill` write, uninitialised, until it is next asked for.

        Returns:
            [T, h, d], same dtype as ``q``.
        """
        return torch.empty_like(q)

    @waits_for_device
    def attend_decode(
        self, q: Tensor, kv: PagedKV, decodes: Tensor, out: Tensor, *, num_splits: int, max_context: int
    ) -> None:
        """Attend single query tokens to their rows' cached keys, long contexts in splits (Dao et al., 2023,
        "Flash-Decoding").

        Args:
            q: [T, h, d].
            decodes: int32 [m, 3]: row, index of its token in ``q`` and ``out``, context length with this token. Row -1
                is padding: the token's row of ``out`` becomes 0.
            out: [T, h, d], same dtype as ``q``; the tokens of ``decodes`` are written, no others.
            num_splits: into how many parts, 1 or more, each context is cut; parts beyond a short context are empty.
            max_context: no context is longer; a bound for the grid, not more.
        """
        rows, tokens, contexts = decodes.unbind(1)
        is_padding = rows < 0
        out[tokens[is_padding].long()] = 0
        assert (is_padding | ((contexts > 0) & (contexts <= max_context))).all()
        tiles = torch.stack((rows, tokens, torch.ones_like(rows), contexts - 1), dim=1)
        Operations.attend_prefill(self, q, kv, tiles, out)

    @waits_for_device
    def attend_prefill(self, q: Tensor, kv: PagedKV, tiles: Tensor, out: Tensor) -> None:
        """Attend tiles of consecutive query tokens to their rows' cached keys, causally (Dao, 2023, arXiv:2307.08691).

        Args:
            tiles: int32 [m, 4]: row, index of the first token in ``q``, number of tokens (1 to ``prefill_tile``),
                position of the first token. Row -1 is padding: nothing is done.
            q, out: as in `attend_decode`.
        """
        k_cache, v_cache, block_tables, scale, window, soft_cap, sinks = kv
        for row, first_token, num_tokens, position in tiles.tolist():
            if row < 0:
                continue
            here = slice(first_token, first_token + num_tokens)
            first_seen = 0 if window is None else max(position + 1 - window, 0)
            seen = torch.arange(first_seen, position + num_tokens, device=q.device)
            blocks, offsets = block_tables[row][seen // k_cache.shape[1]].long(), seen % k_cache.shape[1]
            k, v = (read_lines(cache[blocks, offsets], sum_dtype(q)) for cache in (k_cache, v_cache))
            out[here] = attend(q[here], k, v, scale, window, soft_cap, sinks).to(out.dtype)

    def prefill_tile(self, num_heads: int, num_kv_heads: int, head_dim: int) -> int:
        """The most query tokens in a tile of `attend_prefill`."""
        return 256  # large, as each tile is a turn of a Python loop

    # The rows' state

    def put_spans(self, target: Tensor, spans: Tensor, words: Tensor) -> None:
        """Copy spans of words into rows of a table.

        Args:
            target: int32 [rows, width], changed in place.
            spans: int32 [m, 4]: row, first column, first word, number of words. Row -1 is padding. None overlap, in
                the table or in the words.
            words: int32 [any].
        """
        if not len(spans):
            return
        row, column, first, num_words = spans.unbind(1)
        is_span = (row >= 0) & (num_words > 0)
        # Each word's span is the last that begins at the word or before it.
        begins, order = torch.where(is_span, first, len(words)).sort()
        word = torch.arange(len(words), dtype=torch.int32, device=words.device)
        nth = torch.searchsorted(begins, word, right=True) - 1
        span = order.index_select(0, nth.clamp(min=0))
        offset = word - first[span]
        places = row[span].long() * target.shape[1] + column[span] + offset
        put_where(target.view(-1), places, words, (nth >= 0) & (offset < num_words[span]))

    def copy_rows(self, target: Tensor, source: Tensor, rows: Tensor) -> None:
        """Copy rows of a table to the same rows of another.

        Args:
            target, source: int32 [any, width]; the first is changed in place.
            rows: int32 [m]; -1: padding. No row is there twice.
        """
        for chunk in chunks(len(rows), target.shape[1], device=rows.device):
            values = source.index_select(0, rows[chunk].clamp(min=0))
            put_where(target, rows[chunk], values, rows[chunk] >= 0)

    def gather_tokens(
        self, rows: Tensor, history: Tensor, block_tables: Tensor, block_size: int, num_tokens: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Look up the ids of a step's tokens, their positions, and the slots of their keys and values.

        Args:
            rows: int32 [b, 4]: row, position of its first token, index of that in the step, number of tokens. Row -1
                is padding: its tokens become id 0 at position 0 with slot -1.
            history: int32 [all rows, any].
            block_tables: int32 [groups, all rows, any].
            num_tokens: T; the rows cover all of them.
        Returns:
            token_ids, positions: int32 [T] each. slots: int32 [groups, T].
        """
        nth = _rows_of_tokens(rows, num_tokens)
        token = torch.arange(num_tokens, dtype=torch.int32, device=rows.device)
        row, start, first, _ = rows.index_select(0, nth).unbind(1)
        is_known = row >= 0
        row = row.clamp(min=0)
        position = torch.where(is_known, start + token - first, 0)
        block = block_tables[:, row, position // block_size]
        slot = torch.where(is_known, block * block_size + position % block_size, -1)
        return torch.where(is_known, history[row, position], 0), position, slot

    def rows_of_tokens(self, rows: Tensor, num_rows: int, num_tokens: int) -> Tensor:
        """The row of each token of a step.

        Args:
            rows: as in `gather_tokens`.
            num_rows: of the executor; tokens of padding get this number.
        Returns:
            int32 [T].
        """
        row = rows[:, 0].index_select(0, _rows_of_tokens(rows, num_tokens))
        return torch.where(row >= 0, row, num_rows)

    def append_tokens(self, history: Tensor, samples: Tensor, token_ids: Tensor) -> None:
        """Put the tokens of the samples that have `SampleFlag.FIRST` at the ends of their rows' histories, in place.

        Args:
            history: int32 [rows, any]. token_ids: int32 [s].
            samples: int32 [s, SAMPLE_WORDS], as in `aioengine.kernels.sample_rows`.
        """
        rows, ends = samples[:, SampleRow.ROW].long(), samples[:, SampleRow.END]
        put_where(history.view(-1), rows * history.shape[1] + ends, token_ids, _is_first(samples))

    def copy_blocks(self, caches: Tensor, copied_from: Tensor, copied_to: Tensor) -> None:
        """Copy whole blocks in each of several caches, in place.

        Args:
            caches: [any, blocks, block_size, g, d].
            copied_from, copied_to: int32 [c]; no block is in both, and none twice in the second; -1: nothing.
        """
        blocks = as_integers(caches).transpose(0, 1)
        copied = blocks.index_select(0, copied_from.clamp(min=0))
        put_where(blocks, copied_to, copied, (copied_from >= 0) & (copied_to >= 0))

    # Rules: logits are changed in place. Only samples that have `SampleFlag.FIRST` count.

    def edit_logits(self, logits: Tensor, samples: Tensor, sample_of_row: Tensor, edits: Tensor) -> None:
        """Add to logits, in place; -inf masks, whatever is there, NaN and +inf too.

        Several edits may meet on one logit: they add up, and one mask is enough.

        Args:
            logits: float32 [n, V]; samples: int32 [s, SAMPLE_WORDS].
            sample_of_row: int32 [rows], the first sample of each row; -1: it does not sample in this step.
            edits: int32 [4, e]: rows; tokens; the bits of what is added, a float32; and the output positions below
                which the edits are made. Row -1 is padding; edits of rows that do not sample are passed over.
        """
        if not edits.shape[1] or not len(samples) or not len(logits):
            return
        rows, tokens, _, until = edits
        values = edits[2].view(torch.float32)
        sample, is_sampled = _first_samples(samples, sample_of_row, rows)
        words = samples[sample]
        is_made = is_sampled & (tokens >= 0) & (tokens < logits.shape[1])
        is_made &= words[:, SampleRow.OUTPUT_POSITION] < until
        places = torch.where(is_made, words[:, SampleRow.LOGITS_ROW].long() * logits.shape[1] + tokens, 0)
        is_mask, flat = is_made & (values == -torch.inf), logits.view(-1)
        flat.index_add_(0, places, torch.where(is_made & ~is_mask, values, 0.0))
        # Edits that are no masks repeat the first that is one; where there is none they write what is there.
        places = torch.where(is_mask, places, places.index_select(0, is_mask.int().argmax(0, keepdim=True)))
        flat.index_copy_(0, places, flat.index_select(0, places).masked_fill_(is_mask.any(), -torch.inf))

    def ends_of_bad_words(
        self,
        samples: Tensor,
        sample_of_row: Tensor,
        history: Tensor,
        word_rows: Tensor,
        word_offsets: Tensor,
        word_ids: Tensor,
        edit_values: Tensor,
    ) -> None:
        """For bad words of several tokens: whether the row's *output* ends with all but the word's last token.

        Args:
            word_rows: int32 [w]; -1: padding. word_offsets: int32 [w + 1] and word_ids: int32 [any]: the tokens of each
                word but its last.
            edit_values: float32 [w], becomes -inf where it does, else 0: for `edit_logits` with the words' last tokens.
        """
        if not len(samples) or not len(word_rows):
            edit_values.zero_()
            return
        sample, is_sampled = _first_samples(samples, sample_of_row, word_rows)
        ids = torch.arange(len(word_ids), dtype=torch.int32, device=word_ids.device)
        word = torch.searchsorted(word_offsets, ids, right=True) - 1
        is_inside, word = word < len(word_rows), word.clamp(max=len(word_rows) - 1)
        of_sample = samples[sample[word]]
        before_end = word_offsets[1:][word] - ids
        is_output = is_inside & is_sampled[word] & (before_end <= of_sample[:, SampleRow.OUTPUT_POSITION])
        at = torch.where(is_output, of_sample[:, SampleRow.END] - before_end, 0)
        row = torch.where(is_output, of_sample[:, SampleRow.ROW], 0)
        is_other = is_inside & (~is_output | (history[row, at] != word_ids))
        num_others = torch.zeros_like(word_rows).index_add_(0, word, is_other.int())
        edit_values.copy_(torch.where(is_sampled & (num_others == 0), -torch.inf, 0.0))

    @waits_for_device
    def penalise(self, logits: Tensor, samples: Tensor, history: Tensor, counters: Tensor) -> None:
        """Penalties on tokens that were there already, in place: repetition (Keskar et al., 2019, arXiv:1909.05858) on
        those of prompt and output, then frequency and presence on those of the output.

        Args:
            history: int32 [rows, any]; ids of V and above are passed over.
            counters: int32 [s or more, V], zeros, which it leaves as zeros.
            Samples without penalties are passed over.
        """
        params = [param_of(samples, f"{name}_penalty") for name in ("repetition", "frequency", "presence")]
        penalties = torch.stack(params)  # the counters are left alone: a row's tokens are counted by sorting them
        is_penalised = _is_first(samples) & (penalties != penalties.new_tensor([[1.0], [0.0], [0.0]])).any(dim=0)
        for sample in is_penalised.nonzero()[:, 0].tolist():
            repetition, frequency, presence = penalties[:, sample]
            words = samples[sample].tolist()
            of_row, of_logits_row = history[words[SampleRow.ROW]], logits[words[SampleRow.LOGITS_ROW]]
            end = words[SampleRow.END]
            if repetition != 1:
                known = _known(of_row[:end], logits.shape[1])
                before = of_logits_row[known]
                of_logits_row[known] = torch.where(before > 0, before / repetition, before * repetition)
            if frequency != 0 or presence != 0:
                output = _known(of_row[end - words[SampleRow.OUTPUT_POSITION] : end], logits.shape[1])
                output, counts = output.unique(return_counts=True)
                of_logits_row[output] = of_logits_row[output] - frequency * counts - presence

    # Sampling

    @waits_for_device
    def draw(
        self,
        logits: Tensor,
        samples: Tensor,
        masks: Tensor | None,
        token_ids: Tensor,
        status: Tensor,
        *,
        has_filters: bool,
        is_greedy: bool,
    ) -> None:
        """Choose each sample's token: the highest logit at temperature 0, else by Gumbel noise over what min-p, then
        top-k, then top-p keep.

        Tokens of equal logits are kept or dropped together; of equal scores the lowest id wins. +inf is chosen for
        certain. The noise is that of (seed, choice, output position, token id) in
        `aioengine.kernels.torch.draws.gumbel`.

        Args:
            logits: float32 [n, V]; only read.
            samples: int32 [s, SAMPLE_WORDS].
            masks: int32 [m, ⌈V / 32⌉]: bit ``t % 32`` of word ``t // 32`` says that token t is allowed; None: no sample
                has one.
            token_ids, status: int32 [s], written; padding becomes 0 and `Status.SAMPLED`.
            has_filters: False: no sample has a top-k, top-p or min-p, which takes one pass over the logits.
            is_greedy: True: all temperatures are 0.
        """
        for chunk in chunks(len(samples), logits.shape[1]):
            words = samples[chunk]
            is_padding = words[:, SampleRow.LOGITS_ROW] < 0
            x = rows_of(logits, words[:, SampleRow.LOGITS_ROW].clamp(min=0))
            if masks is not None:
                mask = words[:, SampleRow.MASK]
                allowed = is_allowed(masks[mask.clamp(min=0).long()], x.shape[1])
                x = x.masked_fill((mask >= 0)[:, None] & ~allowed, -torch.inf)
            top, tokens = x.amax(dim=1), x.argmax(dim=1)  # of several the first
            if not is_greedy:
                drawn = ((param_of(words, "temperature") > 0) & ~is_padding).nonzero()[:, 0]
                tokens[drawn] = draw_tokens(rows_of(x, drawn), top[drawn], words[drawn], has_filters=has_filters)
            failed = torch.where(top.isnan(), Status.NOT_A_NUMBER, Status.NOTHING_LEFT)
            status[chunk] = failed.masked_fill_((top > -torch.inf) | is_padding, Status.SAMPLED)
            token_ids[chunk] = tokens.masked_fill_(~(top > -torch.inf) | is_padding, 0).int()

    # Log-probabilities, of logits as the model gave them

    @waits_for_device
    def top_logprobs(self, logits: Tensor, samples: Tensor, log_mass: Tensor, ids: Tensor, logprobs: Tensor) -> None:
        """The k likeliest tokens in the rows of logits of samples with `SampleFlag.LOGPROBS`; outputs of others stay.

        Args:
            log_mass: float32 [s], logsumexp of the row of logits.
            ids: int32 [s, k], the likeliest first, of equal ones the lowest id; k may be 0, and is at most V.
            logprobs: float32 [s, k].
        """
        is_wanted = (samples[:, SampleRow.LOGITS_ROW] >= 0) & (samples[:, SampleRow.FLAGS] & SampleFlag.LOGPROBS != 0)
        wanted, k = is_wanted.nonzero()[:, 0], ids.shape[1]
        for chunk in chunks(len(wanted), logits.shape[1]):
            of_samples = rows_of(logits, samples[wanted[chunk], SampleRow.LOGITS_ROW])
            mass = torch.logsumexp(of_samples, dim=-1)
            log_mass[wanted[chunk]] = mass
            lowest_of = of_samples.topk(k).values if k else ()
            for sample, x, lowest in zip(wanted[chunk], of_samples, lowest_of, strict=False):
                near = (~(x < lowest[-1])).nonzero()[:, 0]
                order = x[near].argsort(descending=True, stable=True)[:k]  # stable: of equal ones the lowest id first
                ids[sample] = near[order].int()
                logprobs[sample] = x[near[order]] - log_mass[sample]

    def look_up(
        self, logits: Tensor, logits_rows: Tensor, token_ids: Tensor, log_mass: Tensor, logprobs: Tensor, ranks: Tensor
    ) -> None:
        """A token's log-probability in a row of logits, and its rank: 1 plus the number of tokens with a higher logit.

        Args:
            logits_rows: int32 [m], rows of ``logits``; -1: passed over. token_ids: int32 [m], below V.
            log_mass: float32 [m], of each of those rows.
            logprobs: float32 [m]; ranks: int32 [m]; both are written.
        """
        for pairs in chunks(len(logits_rows), logits.shape[1], device=logits.device):
            is_wanted = logits_rows[pairs] >= 0
            of_pairs = logits.index_select(0, logits_rows[pairs].clamp(min=0))
            values = of_pairs.gather(1, torch.where(is_wanted, token_ids[pairs], 0)[:, None].long())
            higher = (of_pairs > values).sum(dim=-1, dtype=torch.int32)
            logprobs[pairs] = torch.where(is_wanted, values[:, 0] - log_mass[pairs], logprobs[pairs])
            ranks[pairs] = torch.where(is_wanted, 1 + higher, ranks[pairs])


NAMES = [name for name in vars(Operations) if not name.startswith(("_", "is_", "has_"))]
"""Names of all operations."""

plain_torch = Operations()


def _normalise(x: Tensor, weight: Tensor, eps: float, offset: float) -> Tensor:
    """`Operations.rms_norm` before it is rounded: float32."""
    x = x.float()
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * (weight.float() + offset)


def _rows_of(expert: int, size: int) -> slice:
    """Where an expert's matrix of so many rows is in a stack of them."""
    first = expert * in_panels(size)
    return slice(first, first + size)


def _rows_of_tokens(rows: Tensor, num_tokens: int) -> Tensor:
    """int64 [T]: which of ``rows``, as in `Operations.gather_tokens`, each token is of."""
    # The last row that begins at the token or before it, and has tokens.
    begins, order = torch.where(rows[:, 3] > 0, rows[:, 2], num_tokens).sort()
    token = torch.arange(num_tokens, dtype=torch.int32, device=rows.device)
    return order[torch.searchsorted(begins, token, right=True) - 1]


def _is_first(samples: Tensor) -> Tensor:
    """Bool [s]: the samples that are no padding, and the first of their rows of logits."""
    return (samples[:, SampleRow.LOGITS_ROW] >= 0) & (samples[:, SampleRow.FLAGS] & SampleFlag.FIRST != 0)


def _first_samples(samples: Tensor, sample_of_row: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
    """int64 [any]: the first sample of each of ``rows``; and bool [any]: there is one. Padding has none."""
    sample = torch.where(rows >= 0, sample_of_row[rows.clamp(min=0).long()], -1).long()
    is_there = sample >= 0
    sample = sample.clamp(min=0)
    return sample, is_there & _is_first(samples)[sample]


def _known(tokens: Tensor, vocab: int) -> Tensor:
    """int64 [any]: the tokens that the model has."""
    return tokens[(tokens >= 0) & (tokens < vocab)].long()
