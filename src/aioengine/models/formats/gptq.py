"""GPTQ (Frantar et al., 2022, arXiv:2210.17323) of 4 and 8 bits, as AutoGPTQ and GPTQModel write it.

``qweight`` is int32 [in · bits / 32, out]: consecutive inputs of an output share a word, the first in its low bits.
``scales`` is [groups, out], ``qzeros`` int32 [groups, out · bits / 32], packed along the outputs. The value is
(code - zero) · scale. The config's ``checkpoint_format`` "gptq", the usual one, has zeros less 1 in ``qzeros``,
"gptq_v2" as they are. ``g_idx``, int32 [in], says which group an input is in: with ``desc_act`` not the one of those
beside it, so that such a matrix is dequantised.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import Tensor

from aioengine.kernels.packed_weight import CodedWeight
from aioengine.models.formats.coded_tensor import (
    FLOATS,
    BadConfig,
    CodedTensor,
    Format,
    Parts,
    check,
    check_matrix,
    need,
    regrouped,
    split_words,
)
from aioengine.models.formats.stored import Files
from aioengine.validation import shorten

SUFFIXES = (".qweight", ".qzeros", ".scales", ".g_idx")
BITS = (4, 8)
ZEROS_LESS = {"gptq": 1, "gptq_v2": 0}


def read_config(config: dict[str, Any]) -> Format:
    bits, group = config.get("bits"), config.get("group_size")
    written, dynamic = str(config.get("checkpoint_format") or "gptq"), config.get("dynamic") or {}
    if type(bits) is not int or bits not in BITS or type(group) is not int or not (group == -1 or group > 0):
        raise BadConfig(
            f"bits={shorten(bits)}, group_size={shorten(group)}; GPTQ of 4 or 8 bits, in groups of "
            "a number of inputs or -1, is supported"
        )
    if written not in ZEROS_LESS:
        raise BadConfig(f"checkpoint_format={shorten(written)} is not supported; supported: {', '.join(ZEROS_LESS)}")
    if not isinstance(dynamic, dict) or any(
        not str(module).startswith("-") for module in dynamic
    ):  # those are not quantised
        raise BadConfig("bits and groups by module (dynamic) are not supported")
    return Format(suffixes=SUFFIXES, find=partial(_find, bits, group, ZEROS_LESS[written]))


def _find(bits: int, group: int, zeros_less: int, module: str, parts: Parts, _: Files) -> CodedTensor | None:
    if ".qweight" not in parts:
        return None
    need(module, parts, SUFFIXES[:3])
    a_word = 32 // bits
    num_words, rows = check_matrix(parts[".qweight"], ("I32",))
    columns = num_words * a_word
    group = columns if group == -1 else min(group, columns)
    num_groups = -(-columns // group)
    check(parts[".scales"], FLOATS, (num_groups, rows))
    check(parts[".qzeros"], ("I32",), (num_groups, -(-rows // a_word)))
    if ".g_idx" in parts:
        check(parts[".g_idx"], ("I32",), (columns,))
    decode = partial(_decode, bits, group, zeros_less, parts)
    return CodedTensor(f"{module}.weight", f"GPTQ {bits}-bit", (rows, columns), parts, decode)


def _decode(bits: int, group: int, zeros_less: int, parts: Parts, tensors: dict[str, Tensor]) -> Tensor | CodedWeight:
    codes, scales = split_words(tensors[".qweight"].T, bits), tensors[".scales"].T.float()
    zeros = split_words(tensors[".qzeros"], bits)[:, : len(codes)].T.int()
    zeros = (zeros + zeros_less) % 2**bits
    offsets = (2 ** (bits - 1) - zeros) * scales if (zeros != 2 ** (bits - 1)).any() else None
    coded = CodedWeight(codes, bits, None, scales.contiguous(), offsets, group)
    return coded if ".g_idx" not in tensors else regrouped(coded, tensors[".g_idx"], parts[".g_idx"])
