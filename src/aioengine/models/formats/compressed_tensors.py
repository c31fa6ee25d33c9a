"""What the library compressed-tensors writes: integers of 4 and 8 bits, and floats of 4 and 8 bits.

By what a module's tensors are: ``weight`` int8 or float8_e4m3fn [out, in] ("int-quantized", "float-quantized");
``weight_packed`` int32 [out, ⌈in · bits / 32⌉] ("pack-quantized"), codes less 2^(bits - 1) from a word's low end, its
shape in ``weight_shape``; ``weight_packed`` uint8 [out, in / 2] (4-bit floats, the first in the low half). Scales are
``weight_scale``: one, [out, 1] or [out, groups], or a grid of blocks; exponents plus 127, uint8, for "mxfp4", and times
1 / ``weight_global_scale`` for "nvfp4". ``weight_zero_point`` is int8, or packed along the outputs. The value is
(code - zero) · scale. Activations are not quantised, also where a scheme (W8A8, FP8) quantises them.
"""

from __future__ import annotations

import re
from functools import partial
from typing import Any

from torch import Tensor

from aioengine.errors import ModelLoadError
from aioengine.kernels.packed_weight import CodedWeight
from aioengine.kernels.torch.quantized import split_codes
from aioengine.models.formats.coded_tensor import (
    E2M1,
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
from aioengine.models.formats.fp8 import UNREAD, find_fp8, read_block
from aioengine.models.formats.mxfp4 import GROUP as MXFP4_GROUP
from aioengine.models.formats.mxfp4 import decode_mxfp4
from aioengine.models.formats.stored import Files
from aioengine.validation import shorten

SUFFIXES = (
    ".weight_packed", ".weight_scale", ".weight_zero_point", ".weight_shape", ".weight_g_idx", ".weight_global_scale",
    ".weight",
)  # fmt: skip
ACTIVATIONS = (".input_zero_point", ".input_global_scale", ".output_scale", ".output_zero_point")
NVFP4_GROUP = 16

Scheme = dict[str, Any]
"""A config group's ``weights``."""


def read_config(config: dict[str, Any]) -> Format:
    for name in ("sparsity_config", "transform_config"):
        stated = config.get(name)
        if stated and not (isinstance(stated, dict) and stated.get("format") == "dense"):
            raise BadConfig(f"{name} is not supported")
    groups = config.get("config_groups")
    schemes: list[tuple[list[str], Scheme]] = []
    for group in groups.values() if isinstance(groups, dict) else ():
        weights, targets = (group.get("weights"), group.get("targets")) if isinstance(group, dict) else (None, None)
        if isinstance(weights, dict) and isinstance(targets, list):
            schemes.append(([str(target) for target in targets], weights))
    if not schemes:
        raise BadConfig(f"config_groups={shorten(groups)} has no group with targets and weights")
    return Format(suffixes=SUFFIXES, unread=(*UNREAD, *ACTIVATIONS), find=partial(_find, schemes))


def _scheme_of(module: str, schemes: list[tuple[list[str], Scheme]]) -> Scheme:
    """Of the group that names the module, by itself or by a regular expression; else of the first of a kind of it."""
    for targets, scheme in schemes:
        for target in targets:
            if target == module or (target.startswith("re:") and _matches(target.removeprefix("re:"), module)):
                return scheme
    return next((scheme for targets, scheme in schemes if not all(t.startswith("re:") for t in targets)), schemes[0][1])


def _matches(pattern: str, module: str) -> bool:
    try:
        return re.match(pattern, module) is not None
    except re.error as error:
        raise BadConfig(f"target {shorten(pattern)} is no regular expression: {error}") from error


def _find(schemes: list[tuple[list[str], Scheme]], module: str, parts: Parts, files: Files) -> CodedTensor | None:
    scheme = _scheme_of(module, schemes)
    if ".weight_packed" in parts:
        is_of_words = parts[".weight_packed"].format == "I32"
        return _find_packed(scheme, module, parts, files) if is_of_words else _find_float4(module, parts)
    if ".weight" not in parts or ".weight_scale" not in parts:
        return None
    if parts[".weight"].format == "I8":
        return _find_int8(scheme, module, parts)
    return find_fp8(read_block(scheme.get("block_structure")), module, parts, files)


def _group(scheme: Scheme, columns: int) -> int:
    group = scheme.get("group_size")
    return min(group, columns) if type(group) is int and group > 0 else columns


def _check_scales(scheme: Scheme, parts: Parts, rows: int, columns: int) -> int:
    """Inputs of a group."""
    group = _group(scheme, columns)
    check(parts[".weight_scale"], FLOATS, (1,), (rows, 1), (rows, -(-columns // group)))
    return columns if parts[".weight_scale"].shape in ((1,), (rows, 1)) else group


def _find_int8(scheme: Scheme, module: str, parts: Parts) -> CodedTensor:
    rows, columns = check_matrix(parts[".weight"], ("I8",))
    group = _check_scales(scheme, parts, rows, columns)
    if ".weight_zero_point" in parts:
        check(parts[".weight_zero_point"], ("I8",), parts[".weight_scale"].shape)
    return CodedTensor(f"{module}.weight", "INT8", (rows, columns), parts, partial(_decode_int8, group))


def _decode_int8(group: int, tensors: dict[str, Tensor]) -> CodedWeight:
    codes = (tensors[".weight"].short() + 128).byte()
    zeros = tensors.get(".weight_zero_point")
    return _with_zeros(codes, 8, tensors[".weight_scale"], None if zeros is None else zeros.int(), group)


def _find_packed(scheme: Scheme, module: str, parts: Parts, files: Files) -> CodedTensor:
    bits = scheme.get("num_bits")
    if type(bits) is not int or bits not in (4, 8):
        raise BadConfig(f"num_bits={shorten(bits)} of {module}; 4 and 8 are supported")
    need(module, parts, (".weight_scale", ".weight_shape"))
    packed, a_word = parts[".weight_packed"], 32 // bits
    rows, num_words = check_matrix(packed, ("I32",))
    check(parts[".weight_shape"], ("I64", "I32"), (2,))
    stated_rows, columns = parts[".weight_shape"].read(files).tolist()
    if stated_rows != rows or -(-columns // a_word) != num_words:
        raise ModelLoadError(
            f"tensor {packed.name} in {packed.path} has shape {list(packed.shape)}, and its weight_shape is "
            f"{[stated_rows, columns]}"
        )
    group = _check_scales(scheme, parts, rows, columns)
    if ".weight_zero_point" in parts:
        num_groups = parts[".weight_scale"].shape[-1]
        check(parts[".weight_zero_point"], ("I32",), (-(-rows // a_word), num_groups))
    if ".weight_g_idx" in parts:
        check(parts[".weight_g_idx"], ("I32",), (columns,))
    decode = partial(_decode_packed, bits, columns, group, parts)
    return CodedTensor(f"{module}.weight", f"INT{bits} packed", (rows, columns), parts, decode)


def _decode_packed(
    bits: int, columns: int, group: int, parts: Parts, tensors: dict[str, Tensor]
) -> Tensor | CodedWeight:
    codes = split_words(tensors[".weight_packed"], bits)[:, :columns]
    zeros = tensors.get(".weight_zero_point")
    if zeros is not None:
        zeros = split_words(zeros.T, bits)[:, : len(codes)].T.int() - 2 ** (bits - 1)
    coded = _with_zeros(codes, bits, tensors[".weight_scale"], zeros, group)
    group_of = tensors.get(".weight_g_idx")
    if group_of is None or (group_of == -1).all():  # the library's mark of none
        return coded
    return regrouped(coded, group_of, parts[".weight_g_idx"])


def _with_zeros(codes: Tensor, bits: int, scales: Tensor, zeros: Tensor | None, group: int) -> CodedWeight:
    scales = scales.float().expand(len(codes), -1).contiguous()
    return CodedWeight(codes, bits, None, scales, None if zeros is None else -zeros * scales, group)


def _find_float4(module: str, parts: Parts) -> CodedTensor:
    need(module, parts, (".weight_scale",))
    rows, num_bytes = check_matrix(parts[".weight_packed"], ("U8",))
    columns = 2 * num_bytes
    if ".weight_global_scale" not in parts:
        check(parts[".weight_scale"], ("U8",), (rows, -(-columns // MXFP4_GROUP)))
        return CodedTensor(f"{module}.weight", "MXFP4", (rows, columns), parts, _decode_mxfp4)
    check(parts[".weight_scale"], ("F8_E4M3",), (rows, -(-columns // NVFP4_GROUP)))
    check(parts[".weight_global_scale"], ("F32",), (1,))
    return CodedTensor(f"{module}.weight", "NVFP4", (rows, columns), parts, _decode_nvfp4)


def _decode_mxfp4(tensors: dict[str, Tensor]) -> CodedWeight:
    return decode_mxfp4(tensors[".weight_packed"], tensors[".weight_scale"])


def _decode_nvfp4(tensors: dict[str, Tensor]) -> CodedWeight:
    scales = tensors[".weight_scale"].float() / tensors[".weight_global_scale"]
    return CodedWeight(split_codes(tensors[".weight_packed"]), 4, E2M1, scales, None, NVFP4_GROUP)
