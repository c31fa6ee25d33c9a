"""Checkpoints of the library compressed-tensors: integers of 4 and 8 bits, and floats of 4 and 8 bits.

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
    Format,
    Parts,
    Tensors,
    check,
    check_matrix,
    coded_tensor,
    integers,
    need,
    regrouped,
    signed_codes,
    split_words,
)
from aioengine.models.formats.floats import MXFP4_GROUP, UNREAD, decode_mxfp4, find_fp8, read_block
from aioengine.models.formats.stored import Files, Stored
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
    """The scheme of the group that names the module, or matches it by a regular expression; else that of its kind."""
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


def _find(schemes: list[tuple[list[str], Scheme]], module: str, parts: Parts, files: Files) -> Stored | None:
    scheme = _scheme_of(module, schemes)
    if ".weight_packed" in parts:
        is_of_words = parts[".weight_packed"].format == "I32"
        return _find_packed(scheme, module, parts, files) if is_of_words else _find_float4(module, parts)
    if ".weight" not in parts or ".weight_scale" not in parts:
        return None
    if parts[".weight"].format == "I8":
        return _find_int8(scheme, module, parts)
    return find_fp8(read_block(scheme.get("block_structure")), module, parts, files)


def _check_scales(scheme: Scheme, parts: Parts, rows: int, columns: int) -> int:
    """Check the scales, and return the inputs of a group."""
    stated = scheme.get("group_size")
    group = min(stated, columns) if type(stated) is int and stated > 0 else columns
    check(parts[".weight_scale"], FLOATS, (1,), (rows, 1), (rows, -(-columns // group)))
    return columns if parts[".weight_scale"].shape in ((1,), (rows, 1)) else group


def _find_int8(scheme: Scheme, module: str, parts: Parts) -> Stored:
    rows, columns = check_matrix(parts[".weight"], ("I8",))
    group = _check_scales(scheme, parts, rows, columns)
    if ".weight_zero_point" in parts:
        check(parts[".weight_zero_point"], ("I8",), parts[".weight_scale"].shape)

    def decode(tensors: Tensors) -> CodedWeight:
        scales, zeros = tensors[".weight_scale"], tensors.get(".weight_zero_point")
        return integers(signed_codes(tensors[".weight"]), 8, scales, zeros, group)

    return coded_tensor(f"{module}.weight", "INT8", (rows, columns), parts, decode)


def _find_packed(scheme: Scheme, module: str, parts: Parts, files: Files) -> Stored:
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

    def decode(tensors: Tensors) -> Tensor | CodedWeight:
        codes, zeros = split_words(tensors[".weight_packed"], bits)[:, :columns], tensors.get(".weight_zero_point")
        if zeros is not None:
            zeros = split_words(zeros.T, bits)[:, :rows].T.int() - 2 ** (bits - 1)
        coded, group_of = integers(codes, bits, tensors[".weight_scale"], zeros, group), tensors.get(".weight_g_idx")
        if group_of is None or (group_of == -1).all():  # the library's mark of none
            return coded
        return regrouped(coded, group_of, parts[".weight_g_idx"])

    return coded_tensor(f"{module}.weight", f"INT{bits} packed", (rows, columns), parts, decode)


def _find_float4(module: str, parts: Parts) -> Stored:
    need(module, parts, (".weight_scale",))
    rows, num_bytes = check_matrix(parts[".weight_packed"], ("U8",))
    columns, is_nvfp4 = 2 * num_bytes, ".weight_global_scale" in parts
    group, of_scales = (NVFP4_GROUP, "F8_E4M3") if is_nvfp4 else (MXFP4_GROUP, "U8")
    check(parts[".weight_scale"], (of_scales,), (rows, -(-columns // group)))
    if is_nvfp4:
        check(parts[".weight_global_scale"], ("F32",), (1,))

    def decode(tensors: Tensors) -> CodedWeight:
        pairs, scales = tensors[".weight_packed"], tensors[".weight_scale"]
        if not is_nvfp4:
            return decode_mxfp4(pairs, scales)
        return CodedWeight(split_codes(pairs), 4, E2M1, scales.float() / tensors[".weight_global_scale"], None, group)

    return coded_tensor(f"{module}.weight", "NVFP4" if is_nvfp4 else "MXFP4", (rows, columns), parts, decode)
