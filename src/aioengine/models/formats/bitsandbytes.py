"""What the library bitsandbytes writes: NF4 and FP4 (Dettmers et al., 2023, arXiv:2305.14314), and LLM.int8.

4 bits: ``weight`` is the flattened matrix, two codes a byte, the first in the high half. Blocks of ``blocksize``
neighbours share an ``absmax``; the value is quant_map[code] · absmax. Quantised a second time, ``absmax`` is uint8, and
nested_quant_map[absmax] · nested_absmax + nested_offset of blocks of ``nested_blocksize``. What is no tensor is JSON in
the bytes of ``quant_state.bitsandbytes__nf4`` (or fp4). 8 bits (Dettmers et al., 2022, arXiv:2208.07339): ``weight`` is
int8 [out, in], the value itself times ``SCB`` [out] / 127; activations are not quantised here.
"""

from __future__ import annotations

import json
from functools import partial
from typing import Any

import msgspec
from torch import Tensor

from aioengine.errors import ModelLoadError
from aioengine.kernels.packed_weight import CodedWeight
from aioengine.kernels.torch.quantized import split_codes
from aioengine.models.formats.coded_tensor import FLOATS, CodedTensor, Format, Parts, check, check_matrix, need
from aioengine.models.formats.stored import Files

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


def _find(module: str, parts: Parts, files: Files) -> CodedTensor | None:
    if any(suffix in parts for suffix in STATES):
        return _find_4bit(module, parts, files)
    if ".SCB" not in parts:
        return None
    need(module, parts, (".weight",))
    shape = check_matrix(parts[".weight"], ("I8",))
    check(parts[".SCB"], FLOATS, (shape[0],))
    read = {suffix: parts[suffix] for suffix in (".weight", ".SCB")}
    return CodedTensor(f"{module}.weight", "LLM.int8", shape, read, _decode_int8)


def _decode_int8(tensors: dict[str, Tensor]) -> CodedWeight:
    codes = (tensors[".weight"].short() + 128).byte()
    return CodedWeight(codes, 8, None, tensors[".SCB"].float()[:, None] / 127, None, codes.shape[1])


def _find_4bit(module: str, parts: Parts, files: Files) -> CodedTensor:
    need(module, parts, (".weight", *TABLES))
    state = _read_state(next(parts[suffix] for suffix in STATES if suffix in parts), files)
    count = state.shape[0] * state.shape[1]
    num_blocks = -(-count // state.blocksize)
    state = msgspec.structs.replace(
        state, blocksize=min(state.blocksize, count), nested_blocksize=min(state.nested_blocksize, num_blocks)
    )
    weight, absmax = parts[".weight"], parts[TABLES[0]]
    check(weight, ("U8",), ((count + 1) // 2, 1), (1, (count + 1) // 2))
    check(parts[TABLES[1]], FLOATS, (16,))
    is_nested = absmax.format == "U8"
    check(absmax, ("U8", *FLOATS), (num_blocks,))
    if is_nested:
        need(module, parts, NESTED)
        check(parts[NESTED[0]], FLOATS, (-(-num_blocks // state.nested_blocksize),))
        check(parts[NESTED[1]], FLOATS, (256,))
    read = {suffix: parts[suffix] for suffix in (".weight", *TABLES, *(NESTED if is_nested else ()))}
    return CodedTensor(f"{module}.weight", state.quant_type.upper(), state.shape, read, partial(_decode_4bit, state))


def _read_state(part: Any, files: Files) -> State:
    check(part, ("U8",), part.shape if part.num_bytes <= MAX_STATE_BYTES else (MAX_STATE_BYTES,))
    try:
        state = msgspec.convert(json.loads(bytes(part.read(files).flatten().tolist())), State, strict=False)
        if min(*state.shape, state.blocksize, state.nested_blocksize) < 1:
            raise ValueError("sizes must be at least 1")
    except (ValueError, RecursionError) as error:  # msgspec's and json's are such
        raise ModelLoadError(f"tensor {part.name} in {part.path} is no state of a quantised matrix: {error}") from error
    return state


def _decode_4bit(state: State, tensors: dict[str, Tensor]) -> Tensor | CodedWeight:
    rows, columns = state.shape
    packed, table = tensors[".weight"].reshape(1, -1), tensors[TABLES[1]].float()
    codes = split_codes(packed << 4 | packed >> 4)[0, : rows * columns]
    scales = tensors[TABLES[0]]
    if NESTED[0] in tensors:
        of_block = tensors[NESTED[0]].float().repeat_interleave(state.nested_blocksize)[: len(scales)]
        scales = tensors[NESTED[1]].float()[scales.int()] * of_block + state.nested_offset
    scales = scales.float()
    if columns % state.blocksize == 0:
        return CodedWeight(codes.view(rows, columns), 4, table, scales.view(rows, -1), None, state.blocksize)
    # Blocks that begin in one row and end in another are no groups of inputs.
    return (table[codes.int()] * scales.repeat_interleave(state.blocksize)[: rows * columns]).view(rows, columns)
