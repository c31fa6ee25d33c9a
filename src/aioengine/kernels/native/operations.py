"""The operations of a decoder's step by native kernels: an `aioengine.kernels.operations.Operations` for CPUs."""

from __future__ import annotations

import torch
from torch import Tensor

from aioengine.errors import InternalError
from aioengine.kernels.native.team import Team
from aioengine.kernels.packed_weight import PackedWeight, Quantization
from aioengine.kernels.torch import products as plain

PANEL = 64
WORD_NUMBERS = {torch.float32: 1, torch.bfloat16: 2, torch.float16: 1, torch.int8: 4}
"""How many numbers a word of a packed weight has."""

ROWS_A_CHUNK = 192
"""So many rows of activations stay in the second-level cache while a panel of weights goes by."""


class NativeOperations:
    """Results are in memory of the operations: valid until the same operation is called again for results as wide.

    Args:
        team: runs the kernels.
    """

    def __init__(self, team: Team) -> None:
        self._team = team
        self._buffers: dict[tuple[str, int, torch.dtype], Tensor] = {}

    def _buffer(self, role: str, num_rows: int, width: int, dtype: torch.dtype) -> Tensor:
        """[num_rows, width], at the same place as the last time unless there was less room."""
        key = role, width, dtype
        buffer = self._buffers.get(key)
        if buffer is None or len(buffer) < num_rows:
            num_kept = 1 << (num_rows - 1).bit_length() if num_rows < 64 else -(-num_rows // 64) * 64
            buffer = self._buffers[key] = torch.empty(num_kept, width, dtype=dtype)
        return buffer[:num_rows]

    # Products with weights

    def pack(self, weight: Tensor, quantization: Quantization | None = None) -> PackedWeight:
        """Into panels of 64 outputs; a weight whose inputs fill no whole words stays as it is."""
        num_outputs, num_inputs = weight.shape
        scales = None
        values = weight
        if quantization == "int8" and num_inputs % 4 == 0:
            values, scales = _quantized(weight)
        elif quantization is not None:
            raise InternalError(f"pack: no native products of {quantization} weights of {num_inputs} inputs")
        elif num_inputs % WORD_NUMBERS[weight.dtype]:
            return plain.pack(weight)
        packed = _in_panels(values)
        if quantization is None and packed.numel() == weight.numel() and weight.is_contiguous():
            packed = weight.view(packed.shape).copy_(packed)
        return PackedWeight(packed, scales, (num_outputs, num_inputs), weight.dtype, quantization or "panels")

    def unpack(self, packed: PackedWeight) -> Tensor:
        if packed.layout == "rows":
            return plain.unpack(packed)
        num_outputs, num_inputs = packed.shape
        panels = packed.values.view(
            -1, num_inputs // WORD_NUMBERS[packed.values.dtype], PANEL, WORD_NUMBERS[packed.values.dtype]
        )
        dense = panels.transpose(1, 2).reshape(-1, num_inputs)[:num_outputs]
        return dense.clone() if packed.scales is None else dense * packed.scales[0, :num_outputs, None]

    def linear(
        self, x: Tensor, packed: PackedWeight, bias: Tensor | None, out_dtype: torch.dtype | None = None
    ) -> Tensor:
        if packed.layout == "rows":
            return plain.linear(x, packed, bias, out_dtype)
        num_rows, (num_outputs, num_inputs) = len(x), packed.shape
        dtype = out_dtype or x.dtype
        out = self._buffer("linear", num_rows, num_outputs, dtype)
        num_panels = -(-num_outputs // PANEL)
        of_int8: tuple[Tensor | int, ...] = ()
        kind, stride = _name(x.dtype), x.stride(0) * x.element_size()
        if packed.scales is not None:
            x, row_scales = self._quantize(x)
            kind, stride, of_int8 = "int8", x.stride(0), (row_scales, packed.scales[0], packed.scales[1])
        self._team.launch(
            f"linear_{kind}_{_name(dtype)}", num_panels * -(-num_rows // ROWS_A_CHUNK),
            x, stride, packed.values, num_inputs // WORD_NUMBERS[packed.values.dtype],
            out, num_outputs * dtype.itemsize, 0 if bias is None else bias,
            num_rows, num_outputs, ROWS_A_CHUNK, num_panels, *of_int8,
        )  # fmt: skip
        return out

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
        if packed.layout == "rows":
            return plain.embed(token_ids, packed)
        num_words = packed.shape[1] // WORD_NUMBERS[packed.dtype]
        out = self._buffer("embed", len(token_ids), packed.shape[1], packed.dtype)
        word_bytes = WORD_NUMBERS[packed.dtype] * packed.dtype.itemsize
        self._team.launch(f"embed_{word_bytes}", len(token_ids), token_ids, packed.values, num_words, out)
        return out


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _in_panels(values: Tensor) -> Tensor:
    """[N, K] → [⌈N / 64⌉, words, 64, numbers of a word], padded with zeros."""
    num_outputs, num_inputs = values.shape
    per_word = WORD_NUMBERS[values.dtype]
    if num_outputs % PANEL:
        values = torch.cat((values, values.new_zeros(-num_outputs % PANEL, num_inputs)))
    words = values.contiguous().view(-1, PANEL, num_inputs // per_word, per_word)
    return words.transpose(1, 2).contiguous()


def _quantized(weight: Tensor) -> tuple[Tensor, Tensor]:
    """int8 [N, K]; float32 [2, ⌈N / 64⌉ · 64]: each output's scale, and the bits of its weights' sum, an int32."""
    weight = weight.float()
    scales = weight.abs().amax(dim=1).div_(127)
    values = weight.div_(scales.clamp(min=1e-38)[:, None]).round_().to(torch.int8)
    of_outputs = torch.zeros(2, -(-len(weight) // PANEL) * PANEL)
    of_outputs[0, : len(weight)] = scales
    of_outputs.view(torch.int32)[1, : len(weight)] = values.sum(dim=1, dtype=torch.int32)
    return values, of_outputs
