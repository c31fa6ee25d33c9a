"""GPTQ of 4 and 8 bits, as AutoGPTQ and GPTQModel write it, and AWQ of 4 bits in the layout "gemm", as AutoAWQ does.

``scales`` is [groups, out], and the value (code - zero) · scale.

GPTQ (Frantar et al., 2022, arXiv:2210.17323): ``qweight`` is int32 [in · bits / 32, out]: consecutive inputs of an
output share a word, the first in its low bits; ``qzeros`` is int32 [groups, out · bits / 32], packed along the outputs.
The config's ``checkpoint_format`` "gptq", the usual one, has zeros less 1 in ``qzeros``, "gptq_v2" as they are.
``g_idx``, int32 [in], is the group of each input: with ``desc_act`` not the one of those beside it, so that such a
matrix is dequantised.

AWQ (Lin et al., 2023, arXiv:2306.00978): ``qweight`` is int32 [in, out / 8]: eight outputs of an input share a word.
From its low end they are the outputs 0, 2, 4, 6, 1, 3, 5, 7 of the eight. ``qzeros`` is int32 [groups, out / 8],
likewise.
"""

from __future__ import annotations

from functools import partial
from typing import Any, TypeGuard

from torch import Tensor

from aioengine.kernels.packed_weight import CodedWeight
from aioengine.models.formats.coded_tensor import (
    FLOATS,
    BadConfig,
    Format,
    Parts,
    Tensors,
    check,
    check_matrix,
    coded_tensor,
    integers,
    need,
    regrouped,
    split_words,
)
from aioengine.models.formats.stored import Files, Stored
from aioengine.validation import shorten

SUFFIXES = (".qweight", ".qzeros", ".scales", ".g_idx")
ZEROS_LESS = {"gptq": 1, "gptq_v2": 0}
PLACES = [0, 4, 1, 5, 2, 6, 3, 7]
"""The place in a word of AWQ's of each of eight outputs."""


def read_gptq_config(config: dict[str, Any]) -> Format:
    bits, group = config.get("bits"), config.get("group_size")
    written, dynamic = str(config.get("checkpoint_format") or "gptq"), config.get("dynamic") or {}
    if type(bits) is not int or bits not in (4, 8) or not _is_group(group):
        raise BadConfig(
            f"bits={shorten(bits)}, group_size={shorten(group)}; GPTQ of 4 or 8 bits, in groups of "
            "a number of inputs or -1, is supported"
        )
    if written not in ZEROS_LESS:
        raise BadConfig(f"checkpoint_format={shorten(written)} is not supported; supported: {', '.join(ZEROS_LESS)}")
    # Modules behind a minus are not quantised.
    if not isinstance(dynamic, dict) or not all(str(module).startswith("-") for module in dynamic):
        raise BadConfig("bits and groups by module (dynamic) are not supported")
    return Format(suffixes=SUFFIXES, find=partial(_find_gptq, bits, group, ZEROS_LESS[written]))


def read_awq_config(config: dict[str, Any]) -> Format:
    bits, group, version = config.get("bits"), config.get("group_size"), str(config.get("version") or "gemm").lower()
    if bits != 4 or not _is_group(group) or version != "gemm":
        raise BadConfig(
            f"bits={shorten(bits)}, group_size={shorten(group)}, version={shorten(version)}; AWQ of "
            "4 bits, in groups of a number of inputs or -1, of version gemm, is supported"
        )
    return Format(suffixes=SUFFIXES[:3], find=partial(_find_awq, group))


def _is_group(group: object) -> TypeGuard[int]:
    return type(group) is int and (group == -1 or group > 0)


def _find_gptq(bits: int, group: int, zeros_less: int, module: str, parts: Parts, _: Files) -> Stored | None:
    if ".qweight" not in parts:
        return None
    need(module, parts, SUFFIXES[:3])
    num_words, rows = check_matrix(parts[".qweight"], ("I32",))
    columns = num_words * 32 // bits
    group = _check_groups(parts, group, rows, columns, -(-rows * bits // 32))
    if ".g_idx" in parts:
        check(parts[".g_idx"], ("I32",), (columns,))
    middle = 2 ** (bits - 1)

    def decode(tensors: Tensors) -> Tensor | CodedWeight:
        zeros = split_words(tensors[".qzeros"], bits)[:, :rows].T.int()
        zeros = (zeros + zeros_less) % 2**bits - middle
        codes, scales = split_words(tensors[".qweight"].T, bits), tensors[".scales"].T
        coded = integers(codes, bits, scales, zeros if zeros.any() else None, group)
        return regrouped(coded, tensors[".g_idx"], parts[".g_idx"]) if ".g_idx" in tensors else coded

    return coded_tensor(f"{module}.weight", f"GPTQ {bits}-bit", (rows, columns), parts, decode)


def _find_awq(group: int, module: str, parts: Parts, _: Files) -> Stored | None:
    if ".qweight" not in parts:
        return None
    need(module, parts, SUFFIXES[:3])
    columns, num_words = check_matrix(parts[".qweight"], ("I32",))
    rows = num_words * 8
    group = _check_groups(parts, group, rows, columns, num_words)

    def outputs(words: Tensor) -> Tensor:
        """int32 [any, out / 8] → uint8 [out, any]."""
        return split_words(words, 4).view(len(words), -1, 8)[:, :, PLACES].flatten(1).T.contiguous()

    def decode(tensors: Tensors) -> CodedWeight:
        zeros = outputs(tensors[".qzeros"]).int() - 8
        return integers(outputs(tensors[".qweight"]), 4, tensors[".scales"].T, zeros, group)

    return coded_tensor(f"{module}.weight", "AWQ 4-bit", (rows, columns), parts, decode)


def _check_groups(parts: Parts, group: int, rows: int, columns: int, num_words: int) -> int:
    """Check scales and zeros, and return the inputs of a group."""
    group = columns if group == -1 else min(group, columns)
    num_groups = -(-columns // group)
    check(parts[".scales"], FLOATS, (num_groups, rows))
    check(parts[".qzeros"], ("I32",), (num_groups, num_words))
    return group
