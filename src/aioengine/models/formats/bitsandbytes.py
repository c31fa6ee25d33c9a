"""Checkpoints of the library bitsandbytes: NF4 and FP4 (Dettmers et al., 2023, arXiv:2305.14314), and LLM.int8.

4 bits: ``weight`` is the flattened matrix, two codes a byte, the first in the high half. Blocks of ``blocksize``
neighbours share an ``absmax``; the value is quant_map[code] · absmax. Quantised a second time, ``absmax`` is uint8, and
nested_quant_map[absmax] · nested_absmax + nested_offset of blocks of ``nested_blocksize``. What is no tensor is JSON in
the bytes of ``quant_state.bitsandbytes__nf4`` (or fp4). 8 bits (Dettmers et al., 2022, arXiv:2208.07339): ``weight`` is
int8 [out, in], the value itself times ``SCB`` [out] / 127; activations are not quantised here.
"""

from __future__ import annotations

import json
from typing import Any

import msgspec
from torch import Tensor

from aioengine.errors import ModelLoadError
from aioengine.kernels.packed_weight import CodedWeight
from aioengine.kernels.torch.quantized import split_codes
from aioengine.models.formats.coded_tensor import (
    FLOATS,
    Format,
    Parts,
    Tensors,
    check,
    check_matrix,
    coded_tensor,
    integers,
    need,
    signed_codes,
)
from aioengine.models.formats.stored import Files, FileTensor, Stored

STATES = (".weight.quant_state.bitsandbytes__nf4", ".weight.quant_state.bitsandbytes__fp4")
TABLES = (".weight.absmax", ".weight.quant_map")
NESTED = (".weight.nested_absmax", ".weight.nested_quant_map")
SUFFIXES = (*STATES, *TABLES, *NESTED, ".weight", ".SCB", ".weight_format")
MAX_STATE_BYTES = 4096


class State(msgspec.Struct, frozen=True):
    """The JSON: shape is [out, in]."""

    quant_type: str
    blocksize: int
    shape: tuple[int, int]
    nested_blocksize: int = 1
    nested_offset: float = 0.0


def read_config(_: dict[str, Any]) -> Format:
    return Format(suffixes=SUFFIXES, find=_find)


def _find(module: str, parts: Parts, files: Files) -> Stored | None:
    if any(suffix in parts for suffix in STATES):
        return _find_4bit(module, parts, files)
    if ".SCB" not in parts:
        return None
    need(module, parts, (".weight",))
    shape = check_matrix(parts[".weight"], ("I8",))
    check(parts[".SCB"], FLOATS, (shape[0],))

    def decode(tensors: Tensors) -> CodedWeight:
        scales = tensors[".SCB"].float()[:, None] / 127
        return integers(signed_codes(tensors[".weight"]), 8, scales, None, shape[1])

    return coded_tensor(
        f"{module}.weight", "LLM.int8", shape, {name: parts[name] for name in (".weight", ".SCB")}, decode
    )


def _find_4bit(module: str, parts: Parts, files: Files) -> Stored:
    need(module, parts, (".weight", *TABLES))
    state = _read_state(next(parts[suffix] for suffix in STATES if suffix in parts), files)
    rows, columns = state.shape
    count = rows * columns
    num_blocks, size = -(-count // state.blocksize), min(state.blocksize, count)
    nested_size = min(state.nested_blocksize, num_blocks)
    weight, absmax = parts[".weight"], parts[TABLES[0]]
    check(weight, ("U8",), ((count + 1) // 2, 1), (1, (count + 1) // 2))
    check(parts[TABLES[1]], FLOATS, (16,))
    is_nested = absmax.format == "U8"
    check(absmax, ("U8", *FLOATS), (num_blocks,))
    if is_nested:
        need(module, parts, NESTED)
        check(parts[NESTED[0]], FLOATS, (-(-num_blocks // nested_size),))
        check(parts[NESTED[1]], FLOATS, (256,))

    def decode(tensors: Tensors) -> Tensor | CodedWeight:
        packed, table = tensors[".weight"].reshape(1, -1), tensors[TABLES[1]].float()
        codes = split_codes(packed << 4 | packed >> 4)[0, :count]
        scales = tensors[TABLES[0]]
        if is_nested:
            of_block = tensors[NESTED[0]].float().repeat_interleave(nested_size)[: len(scales)]
            scales = tensors[NESTED[1]].float()[scales.int()] * of_block + state.nested_offset
        scales = scales.float()
        if columns % size == 0:
            return CodedWeight(codes.view(rows, columns), 4, table, scales.view(rows, -1), None, size)
        # Blocks that begin in one row and end in another are no groups of inputs.
        return (table[codes.int()] * scales.repeat_interleave(size)[:count]).view(rows, columns)

    read = {suffix: parts[suffix] for suffix in (".weight", *TABLES, *(NESTED if is_nested else ()))}
    return coded_tensor(f"{module}.weight", state.quant_type.upper(), state.shape, read, decode)


def _read_state(part: FileTensor, files: Files) -> State:
    check(part, ("U8",), part.shape if part.num_bytes <= MAX_STATE_BYTES else (MAX_STATE_BYTES,))
    try:
        state = msgspec.convert(json.loads(bytes(part.read(files).flatten().tolist())), State, strict=False)
        if min(*state.shape, state.blocksize, state.nested_blocksize) < 1:
            raise ValueError("sizes must be at least 1")
    except (ValueError, RecursionError) as error:  # msgspec's and json's are such
        raise ModelLoadError(f"tensor {part.name} in {part.path} is no state of a quantised matrix: {error}") from error
    return state
