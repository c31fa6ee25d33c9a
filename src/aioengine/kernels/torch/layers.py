"""Plain torch oracles of the decoder's operations and of those on the rows' state, as in `Operations`."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from aioengine.kernels.operations import Activation
from aioengine.kernels.sampling.sample_rows import SampleFlag, SampleRow
from aioengine.kernels.torch.quantized import head_dim_of, quantize_lines

MAX_FLOAT8 = torch.finfo(torch.float8_e4m3fn).max


def rms_norm(x: Tensor, weight: Tensor, eps: float, offset: float = 0.0) -> Tensor:
    return _rms_norm_float32(x, weight, eps, offset).to(x.dtype)


def add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, offset: float = 0.0, scale: float = 1.0
) -> Tensor:
    residual.copy_(residual.float() + x.float() * scale)
    return rms_norm(residual, weight, eps, offset)


def rms_norm_add(x: Tensor, residual: Tensor, weight: Tensor, eps: float, offset: float = 0.0) -> None:
    residual.copy_(residual.float() + _rms_norm_float32(x, weight, eps, offset))


def gated_activation(gate_up: Tensor, activation: Activation = "silu") -> Tensor:
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


def scale(x: Tensor, factor: float, soft_cap: float | None = None) -> None:
    scaled = x.float() * factor
    x.copy_(scaled if soft_cap is None else soft_cap * torch.tanh(scaled / soft_cap))


def rotate_and_write(
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
    num_kv_heads, head_dim = k_cache.shape[2], head_dim_of(k_cache)
    num_heads = qkv.shape[1] // head_dim - 2 * num_kv_heads
    heads = qkv.view(len(qkv), num_heads + 2 * num_kv_heads, head_dim)
    qk, v = torch.split_with_sizes(heads.float(), (num_heads + num_kv_heads, num_kv_heads), 1)
    if qk_weight is not None:
        if is_qk_norm_wide:
            parts = zip(*(x.split((num_heads, num_kv_heads), -2) for x in (qk, qk_weight)), strict=True)
            normed = [_rms_norm_float32(x.flatten(1), weight.flatten(), eps, qk_offset) for x, weight in parts]
            qk = torch.cat(normed, 1).view_as(qk)
        else:
            qk = _rms_norm_float32(qk, qk_weight, eps, qk_offset)
    if rope_table is not None:
        cos, sin = rope_table[positions.long(), None].float().chunk(2, dim=-1)
        qk = qk * cos + qk.roll(head_dim // 2, dims=-1) * sin
    q, k = torch.split_with_sizes(qk, (num_heads, num_kv_heads), 1)
    written = (slots >= 0).nonzero()[:, 0]
    for values, cache in ((k, k_cache), (v, v_cache)):
        if cache.dtype == torch.float8_e4m3fn:
            # Beyond its range float8 has nothing but NaN.
            values = values.clamp(-MAX_FLOAT8, MAX_FLOAT8)
        values = values[written]
        kept = quantize_lines(values.flatten(0, 1)) if cache.dtype == torch.int8 else values.to(cache.dtype)
        # Indexing does not know float8.
        lines = cache.view(_same_size(cache.dtype)).flatten(0, 1)
        lines[slots[written].long()] = kept.view(lines.dtype).view(-1, *lines.shape[1:])
    return q.to(qkv.dtype)


def put_spans(target: Tensor, spans: Tensor, words: Tensor) -> None:
    for line, column, first, num_words in spans[spans[:, 0] >= 0].tolist():
        target[line, column : column + num_words] = words[first : first + num_words]


def gather_tokens(
    rows: Tensor, history: Tensor, block_tables: Tensor, block_size: int, num_tokens: int
) -> tuple[Tensor, Tensor, Tensor]:
    counts = rows[:, 3].long()
    row, start, first, begin = (
        column.long().repeat_interleave(counts) for column in (*rows[:, :3].unbind(1), counts.cumsum(0) - counts)
    )
    offset = torch.arange(num_tokens, device=rows.device) - begin
    known = row >= 0
    row, position = row.clamp(min=0), torch.where(known, start + offset, 0)
    block = block_tables[:, row, position // block_size]
    slot = torch.where(known, block * block_size + position % block_size, -1)
    found = torch.cat((torch.where(known, history[row, position], 0)[None], position[None], slot)).int()
    placed = torch.empty_like(found).index_copy_(1, first + offset, found)
    return placed[0], placed[1], placed[2:]


def rows_of_tokens(rows: Tensor, num_rows: int, num_tokens: int) -> Tensor:
    # No size depends on values, so that a graph can record it. Of two rows at one place one has no tokens: it is first.
    row, _, first, count = rows.unbind(1)
    begins, order = (2 * first + (count > 0)).sort()
    tokens = torch.arange(num_tokens, dtype=torch.int32, device=rows.device)
    found = row[order[torch.searchsorted(begins, 2 * tokens + 1, right=True) - 1]]
    return torch.where(found >= 0, found, num_rows)


def append_tokens(history: Tensor, samples: Tensor, token_ids: Tensor) -> None:
    counts = (samples[:, SampleRow.LOGITS_ROW] >= 0) & (samples[:, SampleRow.FLAGS] & int(SampleFlag.FIRST) != 0)
    rows, ends = samples[counts, SampleRow.ROW].long(), samples[counts, SampleRow.END].long()
    history[rows, ends] = token_ids[counts]


def copy_blocks(caches: Tensor, copied_from: Tensor, copied_to: Tensor) -> None:
    blocks = caches.view(_same_size(caches.dtype))
    for source, target in zip(copied_from.tolist(), copied_to.tolist(), strict=True):
        if source >= 0 and target >= 0:
            blocks[:, target] = blocks[:, source]


def _rms_norm_float32(x: Tensor, weight: Tensor, eps: float, offset: float = 0.0) -> Tensor:
    x = x.float()
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * (weight.float() + offset)


def _same_size(dtype: torch.dtype) -> torch.dtype:
    """A dtype of as many bytes that all operations know: not all know float8."""
    return torch.uint8 if dtype.itemsize == 1 else dtype
