"""The operations of a decoder's step by native kernels, for CPUs. What they have no shape for plain torch computes."""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import Tensor

from aioengine.errors import InternalError
from aioengine.kernels.launch_checks import (
    FLOATS,
    check_attention,
    check_experts,
    check_norm,
    check_rotation,
    check_tensor,
)
from aioengine.kernels.native.parts import DTYPES
from aioengine.kernels.native.sizes import (
    CONTEXT_PART,
    HAS_PAIRS,
    MAX_HEAD_DIM,
    MAX_HEADS,
    MAX_ROWS,
    MAX_STATES,
    STEP_INPUTS,
)
from aioengine.kernels.native.team import Team, float_bits
from aioengine.kernels.operations import Activation, ExpertWeights, Operations, PagedKV, plain_torch
from aioengine.kernels.packed_weight import (
    PANEL,
    CodedRows,
    CodedWeight,
    Coding,
    PackedWeight,
    Quantization,
    UnpackedRows,
    row_blocks,
)
from aioengine.kernels.sample_rows import SampleFlag
from aioengine.kernels.torch.quantized import dequantize, int4_rows, pair_codes, quantize, split_codes

HOST = torch.device("cpu")

WORD_NUMBERS = {torch.float32: 1, torch.bfloat16: 2, torch.float16: 1}
"""Numbers in a word of a packed weight."""

LEAST_STEP = 16
"""Inputs of a step of a product with codes, of which there are whole vectors."""

CHUNK = 8192
"""Numbers in a chunk of a layer, about: some microseconds."""

CHUNKS_A_THREAD = 4
SHARES_A_THREAD = 32
"""Shares of a grouped product: the last ones, which end at different times, are a small part of it."""

HEADS_A_CHUNK = 8
NO_WINDOW = 1 << 40
LOG2_E = math.log2(math.e)
"""A factor of the scale and the soft cap: kernels of attention compute by powers of 2."""

ROWS_A_CHUNK = 192
"""Rows of activations in a chunk of a product: they stay in the second-level cache while a panel is read."""

GROUP = 256
"""Logits that share maxima, as `aioengine.kernels.native.draw_kernels` has it."""

PART = 64 * GROUP
"""Logits of a chunk: some microseconds."""


class NativeOperations(Operations):
    """Results lie in buffers of this object, each valid until the operation that gave it is called again.

    Args:
        team: runs the kernels.
    """

    def __init__(self, team: Team) -> None:
        self._team = team
        self._buffers: dict[tuple[str, int, torch.dtype], Tensor] = {}

    def _buffer(self, role: str, num_rows: int, width: int, dtype: torch.dtype) -> Tensor:
        """[num_rows, width], where the last one of this role, width and dtype was, unless that had fewer rows.

        By powers of two: programs keep the buffers that they were captured over, and all those of a role that were
        outgrown are together smaller than the one in use.
        """
        key = role, width, dtype
        buffer = self._buffers.get(key)
        if buffer is None or len(buffer) < num_rows:
            num_kept = 1 << max(num_rows - 1, 0).bit_length()  # what is not written takes no memory
            buffer = self._buffers[key] = torch.empty(num_kept, width, dtype=dtype)
        return buffer[:num_rows]

    # Attention

    def prefill_tile(self, num_heads: int, num_kv_heads: int, head_dim: int) -> int:
        """Tokens that share each segment of keys that is packed."""
        return max(1, MAX_ROWS * num_kv_heads // num_heads)

    def attention_output(self, q: Tensor) -> Tensor:
        return self._buffer("attended", len(q), q.shape[1] * q.shape[2], q.dtype).view(q.shape)

    def attend_prefill(self, q: Tensor, kv: PagedKV, tiles: Tensor, out: Tensor) -> None:
        _check_attention("attend_prefill", q, kv, out)
        check_tensor("attend_prefill: tiles", tiles, (None, 4), torch.int32, HOST)
        k_cache, v_cache, block_tables, scale, window, soft_cap, sinks = kv
        self._team.launch(
            f"attend_prefill_{_name(q.dtype)}", len(tiles) * k_cache.shape[2],
            q, k_cache, v_cache, block_tables, block_tables.shape[1], tiles, out,
            q.shape[1], k_cache.shape[2], q.shape[2], k_cache.shape[1],
            float_bits(scale * LOG2_E), window or NO_WINDOW, float_bits((soft_cap or 0.0) * LOG2_E),
            k_cache.dtype == torch.int8, k_cache.shape[3] * k_cache.element_size(), _or_0(sinks),
        )  # fmt: skip

    def attend_decode(
        self, q: Tensor, kv: PagedKV, decodes: Tensor, out: Tensor, *, num_splits: int, max_context: int
    ) -> None:
        _check_attention("attend_decode", q, kv, out)
        check_tensor("attend_decode: decodes", decodes, (None, 3), torch.int32, HOST)
        k_cache, v_cache, block_tables, scale, window, soft_cap, sinks = kv
        num_heads, head_dim, num_kv_heads, num_decodes = *q.shape[1:], k_cache.shape[2], len(decodes)
        if not has_kernels(num_heads, num_kv_heads, head_dim):
            raise InternalError(f"attend_decode: {num_heads} heads of {head_dim}, {num_kv_heads} KV heads: too many")
        name, num_parts = _name(q.dtype), -(-max_context // CONTEXT_PART)
        num_splits = min(num_splits, num_parts)
        # A few heads whose keys lie side by side, as long as there are chunks for all threads.
        num_slices = -(-CHUNKS_A_THREAD * self._team.num_threads // max(1, num_decodes * num_splits))
        most_heads = min(MAX_HEADS, MAX_STATES // _state_size(head_dim)) // (num_heads // num_kv_heads)
        kv_heads_a_chunk = max(1, min(HEADS_A_CHUNK, num_kv_heads // num_slices, most_heads))
        num_slices = -(-num_kv_heads // kv_heads_a_chunk)
        states: Tensor | int = 0
        if num_splits > 1:
            states = self._buffer("states", num_decodes * num_parts * num_heads, _state_size(head_dim), torch.float32)
        self._team.launch(
            f"attend_decode_{name}", num_decodes * num_slices * num_splits,
            q, k_cache, v_cache, block_tables, block_tables.shape[1], decodes, out,
            num_heads, num_kv_heads, head_dim, k_cache.shape[1],
            float_bits(scale * LOG2_E), window or NO_WINDOW, float_bits((soft_cap or 0.0) * LOG2_E), kv_heads_a_chunk,
            num_splits, states, num_parts, k_cache.dtype == torch.int8, k_cache.shape[3] * k_cache.element_size(),
            _or_0(sinks),
        )  # fmt: skip
        if num_splits > 1:
            self._team.launch(
                f"combine_{name}", num_decodes,
                states, num_parts, decodes, out, num_heads, head_dim, window or NO_WINDOW, _or_0(sinks),
            )  # fmt: skip

    # The decoder's layers

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float, offset: float = 0.0) -> Tensor:
        return self._rms_norm("rms_norm", x, x, weight, None, eps, offset)

    def add_rms_norm(
        self, x: Tensor, residual: Tensor, weight: Tensor, eps: float, offset: float = 0.0, scale: float = 1.0
    ) -> Tensor:
        return self._rms_norm("add_rms_norm", x, residual, weight, None, eps, offset, scale)

    def rms_norm_add(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float, offset: float = 0.0) -> None:
        self._rms_norm("rms_norm_add", x, residual, weight, residual, eps, offset)

    def _rms_norm(
        self,
        kernel: str,
        x: Tensor,
        residual: Tensor,
        weight: Tensor,
        out: Tensor | None,
        eps: float,
        offset: float,
        scale: float = 1.0,
    ) -> Tensor:
        check_norm(x, weight, residual)
        num_rows, width = x.shape
        if out is None:
            out = self._buffer("normed", num_rows, width, x.dtype)
        rows_a_chunk = max(1, CHUNK // max(width, 1))
        self._team.launch(
            f"{kernel}_{_name(x.dtype)}", -(-num_rows // rows_a_chunk),
            x, residual, weight, out, num_rows, width, float_bits(eps), rows_a_chunk, float_bits(offset),
            float_bits(scale),
        )  # fmt: skip
        return out

    def gated_activation(self, gate_up: Tensor, activation: Activation = "silu") -> Tensor:
        check_tensor("gated_activation: gate_up", gate_up, (None, None), FLOATS, HOST)
        num_rows, width = len(gate_up), gate_up.shape[1] // 2
        check_tensor("gated_activation: gate_up", gate_up, (num_rows, 2 * width), FLOATS, HOST)
        out = self._buffer("activated", num_rows, width, gate_up.dtype)
        columns_a_chunk = max(1, min(width, CHUNK // 2))
        rows_a_chunk = max(1, CHUNK // 2 // max(width, 1))
        self._team.launch(
            f"{activation}_{_name(out.dtype)}", -(-num_rows // rows_a_chunk) * -(-width // columns_a_chunk),
            gate_up, out, num_rows, width, rows_a_chunk, columns_a_chunk,
        )  # fmt: skip
        return out

    def scale(self, x: Tensor, factor: float, soft_cap: float | None = None) -> None:
        check_tensor("scale: x", x, (None, None), FLOATS, HOST)
        num_values = x.numel()
        self._team.launch(
            "scale" if x.dtype == torch.float32 else f"scale_{_name(x.dtype)}", -(-num_values // CHUNK),
            x, num_values, CHUNK, float_bits(factor), float_bits(soft_cap or 0.0),
        )  # fmt: skip

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
        arguments = qkv, positions, slots, rope_table, qk_weight, k_cache, v_cache
        num_heads, num_kv_heads, head_dim = check_rotation(*arguments, torch.int8)
        num_tokens, is_int8 = len(qkv), k_cache.dtype == torch.int8
        if is_int8 and head_dim > MAX_HEAD_DIM:
            raise InternalError(f"rotate_and_write: int8 heads of {head_dim}; {MAX_HEAD_DIM} can be done at most")
        q = self._buffer("q", num_tokens, num_heads * head_dim, qkv.dtype).view(-1, num_heads, head_dim)
        tokens_a_chunk = max(1, CHUNK // qkv.shape[1])
        self._team.launch(
            f"rotate_and_write_{_name(qkv.dtype)}", -(-num_tokens // tokens_a_chunk),
            qkv, positions, slots, _or_0(rope_table), rope_table is not None and rope_table.dtype == torch.float32,
            _or_0(qk_weight), float_bits(eps), k_cache, v_cache, q,
            num_tokens, num_heads, num_kv_heads, head_dim, tokens_a_chunk,
            is_int8, k_cache.shape[3] * k_cache.element_size(),
            float_bits(qk_offset), is_qk_norm_wide and qk_weight is not None,
        )  # fmt: skip
        return q

    # Products with weights

    def pack(
        self,
        weight: Tensor | UnpackedRows | CodedWeight | CodedRows,
        quantization: Quantization | None = None,
        dtype: torch.dtype | None = None,
    ) -> PackedWeight:
        """See `pack`. A checkpoint of codes may come where another one was, for which their kernels were not compiled:
        then they stay as plain torch packs them.
        """
        if isinstance(weight, CodedWeight | CodedRows) and "embed_coded" not in self._team.library:
            return super().pack(weight, None, dtype)
        return pack(weight, quantization, dtype)

    def unpack(self, packed: PackedWeight, rows: slice | None = None) -> Tensor:
        if "panels" not in packed.layout:
            return super().unpack(packed, rows)
        if rows is None:
            return UnpackedRows(packed, self.unpack).whole()
        if packed.coding is not None:
            return self.unpack_codes(packed)[rows].dense()
        dense = _of_panels(packed.values, rows)
        if packed.scales is None:
            return dense
        return dequantize(dense, packed.scales[0, rows, None])

    def unpack_codes(self, packed: PackedWeight) -> CodedRows:
        if "panels" not in packed.layout:
            return super().unpack_codes(packed)
        assert packed.scales is not None
        assert packed.coding is not None
        scales, coding = packed.scales, replace(packed.coding, lookup=None)

        def make(rows: slice) -> CodedWeight:
            codes = _codes_of_words(_of_panels(packed.values, rows), coding.bits)
            of_groups, *offsets = (_of_panels(each, rows).float() for each in scales)
            return CodedWeight(
                codes, coding.bits, coding.table, of_groups, offsets[0] if offsets else None, coding.group
            )

        return CodedRows(packed.shape, coding, scales.dtype, len(scales) == 2, HOST, make)

    def linear(
        self, x: Tensor, packed: PackedWeight, bias: Tensor | None, out_dtype: torch.dtype | None = None
    ) -> Tensor:
        if "panels" not in packed.layout:
            return super().linear(x, packed, bias, out_dtype)
        num_outputs = packed.shape[0]
        if bias is not None:
            check_tensor("linear: bias", bias, (num_outputs,), x.dtype, HOST)
        out = self._buffer("linear", len(x), num_outputs, out_dtype or x.dtype)
        num_chunks = -(-num_outputs // PANEL) * -(-len(x) // ROWS_A_CHUNK)
        self._multiply(x, packed, bias, out, num_chunks)
        return out

    def _multiply(
        self,
        x: Tensor,
        packed: PackedWeight,
        bias: Tensor | None,
        out: Tensor,
        num_chunks: int,
        groups: Tensor | int = 0,
    ) -> None:
        """Launch a product with panels.

        Args:
            groups: of a weight that is several matrices: which rows are multiplied with which, see `group_pairs`.
        """
        (num_rows, num_outputs), dtype = out.shape, out.dtype
        check_tensor("linear: x", x, (num_rows, packed.shape[1]), packed.dtype, HOST)
        num_panels = -(-num_outputs // PANEL)
        kind = f"{_name(x.dtype)}_{_name(dtype)}"
        scales: tuple[Tensor | int, ...] = 0, 0, 0
        last: tuple[Tensor | int, ...] = ()
        if packed.coding is not None:
            kind, x, scales, last = self._coded(x, packed, packed.coding, dtype)
        elif packed.scales is not None:
            x, row_scales = self._quantize(x)
            kind, scales = f"int8_{kind}", (row_scales, *packed.scales)
        self._team.launch(
            f"linear_{kind}", num_chunks,
            x, x.stride(0) * x.element_size(), packed.values, packed.values.shape[1], out, num_outputs * dtype.itemsize,
            0 if bias is None else bias, num_rows, num_outputs, ROWS_A_CHUNK, num_panels,
            *scales, 1 if isinstance(groups, Tensor) else self._team.num_threads, groups, num_chunks, *last,
        )  # fmt: skip

    # Mixtures of experts

    def route(self, logits: Tensor, num_experts: int, num_chosen: int, *, is_normalised: bool) -> tuple[Tensor, Tensor]:
        num_tokens, width = logits.shape
        check_tensor("route: logits", logits, (None, None), torch.float32, HOST)
        if not (0 < num_chosen <= num_experts <= width <= num_experts + 1):
            raise InternalError(f"route: {num_chosen} of {num_experts} experts by {width} logits")
        ids = self._buffer("expert_ids", num_tokens, num_chosen, torch.int32)
        weights = self._buffer("expert_weights", num_tokens, num_chosen + width - num_experts, torch.float32)
        self._team.launch("route", num_tokens, logits, width, num_experts, num_chosen, is_normalised, ids, weights)
        return ids, weights

    def experts(
        self, x: Tensor, ids: Tensor, weights: Tensor, of_layer: ExpertWeights, shared: Tensor | None = None
    ) -> Tensor:
        if "panels" not in of_layer.gate_up.layout or "panels" not in of_layer.down.layout:
            return super().experts(x, ids, weights, of_layer, shared)
        hidden, num_experts = of_layer.hidden, of_layer.num_experts
        check_experts(x, ids, weights, hidden, shared)
        num_tokens, num_chosen = ids.shape
        num_pairs = num_tokens * num_chosen
        ends, pair_of_row, row_of_pair = (
            self._buffer(role, length, 1, torch.int32)
            for role, length in (("ends", num_experts), ("pair_of_row", num_pairs), ("row_of_pair", num_pairs))
        )
        most_groups = min(num_experts, num_pairs) + num_pairs // ROWS_A_CHUNK
        groups = self._buffer("groups", 1 + most_groups, 3, torch.int32)
        self._team.launch(
            "group_pairs", 1, ids, num_pairs, num_experts, ROWS_A_CHUNK, ends, pair_of_row, row_of_pair, groups
        )
        gathered = self._buffer("gathered", num_pairs, hidden, x.dtype)
        self._team.launch("gather_pairs", num_pairs, x, hidden * x.element_size(), num_chosen, pair_of_row, gathered)
        gate_up = self._buffer("gate_up", num_pairs, 2 * of_layer.intermediate, x.dtype)
        made = self._buffer("made", num_pairs, hidden, torch.float32)
        self._multiply_groups(gathered, of_layer.gate_up, of_layer.gate_up_bias, gate_up, groups, most_groups)
        activated = self.gated_activation(gate_up, of_layer.activation)
        self._multiply_groups(activated, of_layer.down, of_layer.down_bias, made, groups, most_groups)
        out = self._buffer("experts", num_tokens, hidden, x.dtype)
        self._team.launch(
            f"combine_experts_{_name(x.dtype)}", num_tokens,
            made, row_of_pair, num_chosen, weights, 0 if shared is None else shared, out, hidden,
        )  # fmt: skip
        return out

    def _multiply_groups(
        self, x: Tensor, packed: PackedWeight, bias: Tensor | None, out: Tensor, groups: Tensor, most_groups: int
    ) -> None:
        """Do `_multiply` in chunks that are equal shares of however many groups there turn out to be."""
        if bias is not None:
            check_tensor("experts: bias", bias, (packed.shape[0],), x.dtype, HOST)
        most_items = most_groups * -(-out.shape[1] // PANEL)
        num_chunks = min(most_items, SHARES_A_THREAD * self._team.num_threads)
        self._multiply(x, packed, bias, out, num_chunks, groups)

    def _coded(
        self, x: Tensor, packed: PackedWeight, coding: Coding, dtype: torch.dtype
    ) -> tuple[str, Tensor, tuple[Tensor | int, ...], tuple[Tensor | int, ...]]:
        """The name of the kernel for these codes, activations as it reads them, and its arguments from 88 and 136 on.

        Args:
            dtype: of the result.
        """
        assert packed.scales is not None
        assert coding.lookup is not None
        (num_rows, num_inputs), num_codes = x.shape, 1 << coding.bits
        step, has_pairs = step_of(coding.group, num_inputs), len(coding.lookup) > num_codes
        num_steps = -(-num_inputs // step)
        kind = "pairs" if has_pairs else "float32"
        if coding.bits == 8 and coding.table is not None:
            kind = f"table_{kind}"
        scales, *offsets = packed.scales
        sums: Tensor | int = self._buffer("x_sums", num_rows, num_steps, torch.float32) if offsets else 0
        wide = x
        if not has_pairs and x.dtype != torch.float32:
            wide = self._buffer("wide", num_rows, num_inputs, torch.float32)
        if offsets or wide is not x:
            self._team.launch(
                "prepare_coded", num_rows,
                x, x.stride(0) * x.element_size(), dtype_word(x.dtype), num_inputs, step,
                0 if wide is x else wide, sums, 4 * num_steps,
            )  # fmt: skip
        last = (
            dtype_word(scales.dtype), step * coding.bits // 32,
            num_steps if coding.group >= num_inputs else coding.group // step,
            coding.lookup[num_codes:] if has_pairs else coding.lookup, sums, 4 * num_steps,
            dtype_word(x.dtype), dtype_word(dtype),
        )  # fmt: skip
        return f"coded_{coding.bits}_{kind}", wide, (scales, *(offsets or (0,)), scales.shape[1]), last

    def _quantize(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Unsigned bytes [T, width], with room to whole vectors behind each row, and scales float32 [T, 1]."""
        num_rows, width = x.shape
        quantized = self._buffer("quantized", num_rows, -(-width // PANEL) * PANEL, torch.uint8)
        scales = self._buffer("row_scales", num_rows, 1, torch.float32)
        self._team.launch(
            f"quantize_{_name(x.dtype)}", num_rows,
            x, x.stride(0) * x.element_size(), width, quantized, quantized.stride(0), scales,
        )  # fmt: skip
        return quantized, scales

    def embed(self, token_ids: Tensor, packed: PackedWeight) -> Tensor:
        if "panels" not in packed.layout:
            return super().embed(token_ids, packed)
        check_tensor("embed: token_ids", token_ids, (None,), torch.int32, HOST)
        out = self._buffer("embed", len(token_ids), packed.shape[1], packed.dtype)
        if packed.coding is not None:
            assert packed.scales is not None
            assert packed.coding.lookup is not None
            of_groups, *offsets = packed.scales
            self._team.launch(
                "embed_coded", len(token_ids),
                token_ids, packed.values, packed.values.shape[1], packed.coding.bits,
                of_groups, *(offsets or (0,)), of_groups.shape[1], dtype_word(of_groups.dtype),
                packed.shape[1], packed.coding.group, packed.coding.lookup, out, dtype_word(out.dtype),
            )  # fmt: skip
            return out
        scales = () if packed.scales is None else (packed.scales,)
        word_bytes = WORD_NUMBERS[packed.dtype] * packed.dtype.itemsize
        kernel = f"embed_int8_{_name(packed.dtype)}" if scales else f"embed_{word_bytes}"
        self._team.launch(kernel, len(token_ids), token_ids, packed.values, packed.values.shape[1], *scales, out)
        return out

    # The rows' state

    def put_spans(self, target: Tensor, spans: Tensor, words: Tensor) -> None:
        self._team.launch("put_spans", len(spans), target, target.shape[1], spans, words)

    def copy_rows(self, target: Tensor, source: Tensor, rows: Tensor) -> None:
        self._team.launch("copy_rows", len(rows), target, source, target.shape[1], rows)

    def gather_tokens(
        self, rows: Tensor, history: Tensor, block_tables: Tensor, block_size: int, num_tokens: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        num_groups = len(block_tables)
        token_ids, positions, slots = (
            self._buffer(role, count * num_tokens, 1, torch.int32)[:, 0]
            for role, count in (("token_ids", 1), ("positions", 1), ("slots", num_groups))
        )
        slots = slots.view(num_groups, num_tokens)
        self._team.launch(
            "gather_tokens", len(rows),
            rows, history, history.shape[1], block_tables, block_tables.shape[2], block_size,
            token_ids, positions, slots, num_groups, len(history), num_tokens,
        )  # fmt: skip
        return token_ids, positions, slots

    def rows_of_tokens(self, rows: Tensor, num_rows: int, num_tokens: int) -> Tensor:
        row_of_token = self._buffer("rows_of_tokens", num_tokens, 1, torch.int32)[:, 0]
        self._team.launch("rows_of_tokens", len(rows), rows, num_rows, row_of_token)
        return row_of_token

    def append_tokens(self, history: Tensor, samples: Tensor, token_ids: Tensor) -> None:
        self._team.launch("append_tokens", 1, history, history.shape[1], samples, len(samples), token_ids)

    def copy_blocks(self, caches: Tensor, copied_from: Tensor, copied_to: Tensor) -> None:
        num_caches, num_blocks = caches.shape[:2]
        self._team.launch(
            "copy_blocks", len(copied_from) * num_caches,
            caches, num_caches, num_blocks, caches.nbytes // max(num_caches * num_blocks, 1), copied_from, copied_to,
        )  # fmt: skip

    # Rules

    def edit_logits(self, logits: Tensor, samples: Tensor, sample_of_row: Tensor, edits: Tensor) -> None:
        self._team.launch(
            "edit_logits", 1,
            logits, logits.shape[1], samples, sample_of_row,
            *edits, edits.shape[1],
        )  # fmt: skip

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
        self._team.launch(
            "ends_of_bad_words", len(word_rows),
            samples, sample_of_row, history, history.shape[1], word_rows, word_offsets, word_ids, edit_values,
        )  # fmt: skip

    def penalise(self, logits: Tensor, samples: Tensor, history: Tensor, counters: Tensor) -> None:
        self._team.launch(
            "penalise", len(samples), logits, logits.shape[1], samples, history, history.shape[1], counters
        )

    # Sampling

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
        maxima = self._scan(logits, samples, masks, 0)
        self._team.launch(
            "draw", len(samples),
            logits, logits.shape[1], samples, _or_0(masks), maxima, token_ids, status,
        )  # fmt: skip

    def top_logprobs(self, logits: Tensor, samples: Tensor, log_mass: Tensor, ids: Tensor, logprobs: Tensor) -> None:
        maxima = self._scan(logits, samples, None, SampleFlag.LOGPROBS)
        self._team.launch(
            "top_logprobs", len(samples),
            logits, logits.shape[1], samples, maxima, log_mass, ids.shape[1], ids, logprobs,
        )  # fmt: skip

    def look_up(
        self, logits: Tensor, logits_rows: Tensor, token_ids: Tensor, log_mass: Tensor, logprobs: Tensor, ranks: Tensor
    ) -> None:
        self._team.launch(
            "look_up", len(logits_rows),
            logits, logits.shape[1], logits_rows, token_ids, log_mass, logprobs, ranks,
        )  # fmt: skip

    def _scan(self, logits: Tensor, samples: Tensor, masks: Tensor | None, flags: int) -> Tensor:
        """The maxima of the logits of the samples that have these flags: float32 [s, 16 · groups]."""
        vocab = logits.shape[1]
        maxima = self._buffer("maxima", len(samples), 16 * -(-vocab // GROUP), torch.float32)
        num_parts = -(-vocab // PART)
        self._team.launch(
            "scan_logits", len(samples) * num_parts,
            logits, vocab, samples, _or_0(masks), flags, maxima, num_parts, PART,
        )  # fmt: skip
        return maxima


def has_kernels(num_heads: int, num_kv_heads: int, head_dim: int) -> bool:
    """Whether attention has kernels for heads of these numbers and this size."""
    group = num_heads // num_kv_heads
    return head_dim <= MAX_HEAD_DIM and group <= MAX_HEADS and group * _state_size(head_dim) <= MAX_STATES


def _state_size(head_dim: int) -> int:
    """float32 numbers of a head's state: sums, padded to whole vectors, and two vectors."""
    return -(-head_dim // 16) * 16 + 32


def _check_attention(name: str, q: Tensor, kv: PagedKV, out: Tensor) -> None:
    check_attention(name, q, kv, out, torch.int8)
    head_dim = q.shape[2]
    if head_dim > MAX_HEAD_DIM or (q.dtype == torch.bfloat16 and head_dim % 2):
        raise InternalError(f"{name}: heads of {head_dim} are too large, or odd in bfloat16")


def _or_0(tensor: Tensor | None) -> Tensor | int:
    """The argument of a kernel for a tensor that may be absent."""
    return 0 if tensor is None else tensor


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def pack(
    weight: Tensor | UnpackedRows | CodedWeight | CodedRows,
    quantization: Quantization | None = None,
    dtype: torch.dtype | None = None,
) -> PackedWeight:
    """Into panels of 64 outputs; what has no native product stays as plain torch packs it."""
    num_outputs, num_inputs = weight.shape
    if isinstance(weight, CodedWeight | CodedRows):
        coded = weight.rows() if isinstance(weight, CodedWeight) else weight
        return _pack_coded(coded, dtype or torch.float32)
    dtype = dtype or weight.dtype
    if quantization == "int4":
        return _pack_coded(int4_rows(weight), dtype)
    if quantization == "int8":
        return plain_torch.pack(weight, quantization, dtype) if num_inputs % 4 else _pack_int8(weight, dtype)
    assert isinstance(weight, Tensor)
    per_word = WORD_NUMBERS[weight.dtype]
    if num_inputs % per_word:
        return plain_torch.pack(weight)
    if num_outputs % PANEL or not weight.is_contiguous():
        panels = _room_for_panels(num_outputs, num_inputs // per_word, per_word, weight.dtype)
        for rows in row_blocks(weight.shape):
            panels[_panels_of(rows)] = _in_panels(weight[rows], per_word)
    else:  # in place, one after the other: a panel takes the bytes of its rows
        panels = weight.view(-1, num_inputs // per_word, PANEL, per_word)
        words = weight.view(torch.int16 if weight.dtype == torch.float16 else torch.int32)
        for panel in words.split(PANEL):
            panel.view(-1, PANEL).copy_(panel.t().contiguous())
    return PackedWeight(panels, None, (num_outputs, num_inputs), weight.dtype, "panels")


def _pack_int8(weight: Tensor | UnpackedRows, dtype: torch.dtype) -> PackedWeight:
    """Scales: float32 [2, ⌈N / 64⌉ · 64], the second row the bits of the weights' sums, int32."""
    num_outputs, num_inputs = weight.shape
    panels = _room_for_panels(num_outputs, num_inputs // 4, 4, torch.int8)
    scales = torch.zeros(2, len(panels) * PANEL, dtype=torch.float32)
    for rows in row_blocks(weight.shape):
        values, of_rows = quantize(weight[rows], "int8")
        panels[_panels_of(rows)] = _in_panels(values, 4)
        scales[0, rows] = of_rows[:, 0]
        scales.view(torch.int32)[1, rows] = values.sum(dim=1, dtype=torch.int32)
    return PackedWeight(panels, scales, (num_outputs, num_inputs), dtype, "int8-panels")


def _pack_coded(coded: CodedRows, dtype: torch.dtype) -> PackedWeight:
    """Words of 32 bits as `aioengine.kernels.native.coded_kernels` has them; scales [1 or 2, panels, groups, 64, 1]."""
    (num_outputs, num_inputs), coding = coded.shape, coded.coding
    num_groups = -(-num_inputs // coding.group)
    if num_inputs * coding.bits % 32 or step_of(coding.group, num_inputs) % LEAST_STEP:
        return plain_torch.pack(coded, None, dtype)
    panels = _room_for_panels(num_outputs, num_inputs * coding.bits // 32, 4, torch.uint8)
    scales = torch.empty(1 + coded.has_offsets, len(panels), num_groups, PANEL, 1, dtype=coded.scales_dtype)
    for rows in row_blocks(coded.shape):
        some = coded[rows]
        panels[_panels_of(rows)] = _in_panels(_words_of_codes(some.codes, coding.bits), 4)
        for kept, given in zip(scales, (some.scales, some.offsets), strict=False):
            kept[_panels_of(rows)] = 0 if given is None else _in_panels(given.to(kept.dtype), 1)
    coding = replace(coding, lookup=_lookup(coding, dtype))
    return PackedWeight(panels, scales, (num_outputs, num_inputs), dtype, "coded-panels", coding)


def _lookup(coding: Coding, dtype: torch.dtype) -> Tensor:
    """float32 [2 ** bits], and behind it, where products are of pairs, whole vectors of bfloat16."""
    table = coding.table
    if table is None:
        table = torch.arange(1 << coding.bits).float() - (1 << (coding.bits - 1))
    narrow = table.bfloat16()
    if not HAS_PAIRS or dtype != torch.bfloat16 or not torch.equal(narrow.float().nan_to_num(), table.nan_to_num()):
        return table
    return torch.cat((table, narrow.repeat(2 if coding.bits == 4 else 1).view(torch.float32)))


def step_of(group: int, num_inputs: int) -> int:
    """How many inputs are summed before they are scaled."""
    return STEP_INPUTS if group >= num_inputs else math.gcd(group, STEP_INPUTS)


def dtype_word(dtype: torch.dtype) -> int:
    """The number of a dtype in a kernel's arguments."""
    return DTYPES.index(_name(dtype))


def _words_of_codes(codes: Tensor, bits: int) -> Tensor:
    """[rows, K] → bytes [rows, K · bits / 8]: of a word the codes with even numbers first."""
    num_rows, num_inputs = codes.shape
    ordered = codes.view(num_rows, -1, 16 // bits, 2).transpose(2, 3).reshape(num_rows, num_inputs)
    return ordered if bits == 8 else pair_codes(ordered)


def _codes_of_words(words: Tensor, bits: int) -> Tensor:
    """The reverse of `_words_of_codes`."""
    ordered = words if bits == 8 else split_codes(words)
    return ordered.view(len(words), -1, 2, 16 // bits).transpose(2, 3).reshape(ordered.shape)


def _room_for_panels(num_outputs: int, num_words: int, per_word: int, dtype: torch.dtype) -> Tensor:
    return torch.empty(-(-num_outputs // PANEL), num_words, PANEL, per_word, dtype=dtype)


def _panels_of(rows: slice) -> slice:
    """Where a block of rows lies."""
    return slice(rows.start // PANEL, -(-rows.stop // PANEL))


def _of_panels(panels: Tensor, rows: slice) -> Tensor:
    """A block of rows, [rows, K]."""
    found = panels[_panels_of(rows)]
    return found.transpose(1, 2).reshape(-1, found.shape[1] * found.shape[3])[: rows.stop - rows.start]


def _in_panels(values: Tensor, per_word: int) -> Tensor:
    """[N, K] → [⌈N / 64⌉, words, 64, numbers of a word], padded with zeros; not contiguous."""
    num_outputs, num_inputs = values.shape
    if num_outputs % PANEL:
        values = torch.cat((values, values.new_zeros(-num_outputs % PANEL, num_inputs)))
    return values.contiguous().view(-1, PANEL, num_inputs // per_word, per_word).transpose(1, 2)
