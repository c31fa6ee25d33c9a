"""Quantised matrices of checkpoints: the tensors that encode one, known by their names, and the weight that these mean.

A section a library, with how its files encode a matrix. Activations are not quantised here, also where a scheme
quantises them: products are of activations as they are.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Container, Iterable
from dataclasses import replace
from functools import partial
from typing import Any, TypeGuard

import msgspec
import torch
from torch import Tensor

from aioengine.errors import ModelLoadError
from aioengine.kernels.packed_weight import CodedWeight
from aioengine.kernels.torch.quantized import split_codes
from aioengine.models.checkpoint import FILE_DTYPES
from aioengine.models.formats.stored import Files, FileTensor, Stored
from aioengine.validation import shorten

FLOATS = frozenset(FILE_DTYPES)
E4M3 = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
"""The values of the codes of float8_e4m3fn (Micikevicius et al., 2022, arXiv:2209.05433)."""

_MAGNITUDES = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0], dtype=torch.float32)
E2M1 = torch.cat((_MAGNITUDES, -_MAGNITUDES))
"""The values of the codes of 4-bit floats (OCP Microscaling Formats, version 1.0)."""

Parts = dict[str, FileTensor]
"""The tensors of one module, by the suffixes of their names."""


Tensors = dict[str, Tensor]
"""Values of `Parts`, by the same suffixes."""


class BadConfig(Exception):
    """A quantization_config is malformed, or not supported; the message names the field, and what is supported."""


def coded_tensor(
    name: str, kind: str, shape: tuple[int, ...], parts: Parts, decode: Callable[[Tensors], Tensor | CodedWeight]
) -> Stored:
    """A tensor that several tensors encode.

    Args:
        kind: its ``format``.
        parts: the tensors that are read; they have been checked by their headers.
        decode: makes the weight of the parts' values; dense where no `CodedWeight` could be it.
    """
    path, num_bytes = next(iter(parts.values())).path, sum(part.num_bytes for part in parts.values())

    def read(files: Files) -> Tensor | CodedWeight:
        return decode({suffix: part.read(files) for suffix, part in parts.items()})

    return Stored(name, path, kind, shape, num_bytes, read)


class Format(msgspec.Struct, frozen=True, kw_only=True):
    """How a kind of quantised checkpoint encodes matrices.

    Attributes:
        suffixes: of the tensors that may encode one, each behind the name of its module.
        unread: of those that do not concern weights: scales of activations and of KV caches.
        find: the matrix of a module, of its name and tensors; None: they are dense ones. Raises
            ModelLoadError and BadConfig.
    """

    suffixes: tuple[str, ...]
    unread: tuple[str, ...] = ()
    find: Callable[[str, Parts, Files], Stored | None]


def find_coded(tensors: dict[str, FileTensor], coding: Format, files: Files) -> dict[str, Stored]:
    """The catalogue of a quantised checkpoint: whatever is not encoded in it stays as it is."""
    found: dict[str, Stored] = {}
    modules: dict[str, Parts] = {}
    for name, tensor in tensors.items():
        suffix = next((suffix for suffix in coding.suffixes if name.endswith(suffix)), None)
        if suffix is not None:
            modules.setdefault(name.removesuffix(suffix), {})[suffix] = tensor
        elif not name.endswith(coding.unread):
            found[name] = tensor
    for module, parts in modules.items():
        coded = coding.find(module, parts, files)
        found |= {coded.name: coded} if coded is not None else {part.name: part for part in parts.values()}
    return found


def need(module: str, parts: Parts, suffixes: Iterable[str]) -> None:
    """See that a module has all of these tensors.

    Raises:
        ModelLoadError: one is missing.
    """
    for suffix in suffixes:
        if suffix not in parts:
            there = next(iter(parts.values()))
            raise ModelLoadError(f"the checkpoint lacks tensor {module}{suffix}, beside {there.name} in {there.path}")


def check(part: FileTensor, formats: Container[str], *shapes: tuple[int, ...]) -> None:
    """See that a tensor has one of these dtypes and shapes.

    Raises:
        ModelLoadError: it has not.
    """
    where = f"tensor {part.name} in {part.path}"
    if part.format not in formats:
        raise ModelLoadError(f"{where} is {part.format}, in which the quantised matrix cannot be")
    if part.shape not in shapes:
        wanted = " or ".join(str(list(shape)) for shape in shapes)
        raise ModelLoadError(
            f"{where} has shape {list(part.shape)}; the quantised matrix that it is of makes it {wanted}"
        )


def check_matrix(part: FileTensor, formats: Container[str]) -> tuple[int, int]:
    """Check a matrix of any shape but an empty one, as `check` does; returns (rows, columns)."""
    check(part, formats, part.shape)
    if len(part.shape) != 2 or not all(part.shape):
        raise ModelLoadError(f"tensor {part.name} in {part.path} has shape {list(part.shape)}; a matrix is needed")
    return part.shape[0], part.shape[1]


def split_words(words: Tensor, bits: int) -> Tensor:
    """int32 [rows, words] → uint8 [rows, words · 32 / bits]: codes of 4 or 8 bits, those of a word from its low end."""
    codes = words.contiguous().view(torch.uint8)
    return split_codes(codes) if bits == 4 else codes


def integers(codes: Tensor, bits: int, scales: Tensor, zeros: Tensor | None, group: int) -> CodedWeight:
    """The weight (code - 2^(bits - 1) - zero) · scale.

    Args:
        codes: uint8 [out, in].
        scales, zeros: [out or 1, groups] each; None: no zeros.
    """
    scales = scales.float().expand(len(codes), -1).contiguous()
    return CodedWeight(codes, bits, None, scales, None if zeros is None else -zeros.int() * scales, group)


def signed_codes(values: Tensor) -> Tensor:
    """int8 → uint8: codes, of which `integers` takes 128 away."""
    return (values.short() + 128).byte()


def regrouped(coded: CodedWeight, group_of: Tensor, part: FileTensor) -> Tensor | CodedWeight:
    """A matrix whose inputs are in these groups, int32 [in]: itself if they are; else dense, in float32.

    Raises:
        ModelLoadError: there is no such group; it names ``part``, which they come from.
    """
    columns, num_groups = coded.shape[1], coded.scales.shape[1]
    if torch.equal(group_of, torch.arange(columns, dtype=torch.int32) // coded.group):
        return coded
    if group_of.min() < 0 or group_of.max() >= num_groups:
        raise ModelLoadError(f"tensor {part.name} in {part.path} names groups other than 0 to {num_groups - 1}")
    # A coded one would want its inputs in another order than the matrix before it gives them in.
    scales, offsets = (each if each is None else each[:, group_of] for each in (coded.scales, coded.offsets))
    assert scales is not None
    return replace(coded, scales=scales, offsets=offsets, group=1).dense()


# Floats of 8 and 4 bits

SCALES = (".weight_scale_inv", ".weight_scale")
UNREAD = (".input_scale", ".activation_scale", ".input_scale_ub", ".k_scale", ".v_scale", ".q_scale")
MXFP4_SUFFIXES = ("_blocks", "_scales")
MXFP4_GROUP = 32


def read_fp8_config(config: dict[str, Any]) -> Format:
    """FP8 ("fp8", "fbgemm_fp8"): ``weight`` is float8_e4m3fn [out, in], and an entry's value is itself times its scale.

    Scales are ``weight_scale_inv`` (Qwen, DeepSeek, in spite of the name) or ``weight_scale``: one; or [out] or
    [out, 1]; or [⌈out / b0⌉, ⌈in / b1⌉], where the config's ``weight_block_size`` is [b0, b1].
    """
    block = read_block(config.get("weight_block_size"))
    return Format(suffixes=(*SCALES, ".weight"), unread=UNREAD, find=partial(find_fp8, block))


def read_block(value: object) -> tuple[int, int] | None:
    """Outputs and inputs of a block, from a list of both; None: there are none."""
    if value is None:
        return None
    if not isinstance(value, list) or len(value) != 2 or not all(type(size) is int and size > 0 for size in value):
        raise BadConfig(f"blocks of {shorten(value)}; two integers are needed")
    return value[0], value[1]


def find_fp8(block: tuple[int, int] | None, module: str, parts: Parts, _: Files) -> Stored | None:
    """The matrix of ``.weight`` and its scales, as `Format.find`.

    Args:
        block: outputs and inputs of a block; None: there are none.
    """
    scale = next((parts[suffix] for suffix in SCALES if suffix in parts), None)
    if scale is None or ".weight" not in parts or parts[".weight"].format != "F8_E4M3":
        return None
    rows, columns = check_matrix(parts[".weight"], ("F8_E4M3",))
    shapes: list[tuple[int, ...]] = [(), (1,), (1, 1), (rows,), (rows, 1)]
    num_rows, num_columns = rows, columns
    if block is not None:
        num_rows, num_columns = min(block[0], rows), min(block[1], columns)
        shapes.append((-(-rows // num_rows), -(-columns // num_columns)))
    check(scale, FLOATS, *shapes)
    is_by_block = block is not None and scale.shape == shapes[-1]

    def decode(tensors: Tensors) -> CodedWeight:
        codes, scales = tensors[".weight"].view(torch.uint8), tensors[".scale"].float()
        if is_by_block:
            return CodedWeight(codes, 8, E4M3, scales.repeat_interleave(num_rows, 0)[:rows], None, num_columns)
        return CodedWeight(codes, 8, E4M3, scales.reshape(-1, 1).expand(rows, 1).contiguous(), None, columns)

    return coded_tensor(
        f"{module}.weight", "FP8", (rows, columns), {".weight": parts[".weight"], ".scale": scale}, decode
    )


def read_mxfp4_config(_: dict[str, Any]) -> Format:
    """MXFP4 (OCP Microscaling Formats, version 1.0): groups of 32 share a power of 2. gpt-oss's experts are stacked.

    ``…_blocks`` is uint8 [experts, out, groups, 16], two codes a byte, the first in its low half. ``…_scales`` is uint8
    [experts, out, groups], exponents plus 127. transformers' dense tensor is the transposed one, [experts, in, out]; a
    `CodedWeight` has the experts' outputs one below the other, [experts · out, in].
    """
    return Format(suffixes=MXFP4_SUFFIXES, find=_find_mxfp4)


def _find_mxfp4(module: str, parts: Parts, _: Files) -> Stored | None:
    need(module, parts, MXFP4_SUFFIXES)
    blocks, scales = parts["_blocks"], parts["_scales"]
    if len(blocks.shape) != 4 or not all(blocks.shape):
        raise ModelLoadError(f"tensor {blocks.name} in {blocks.path} has shape {list(blocks.shape)}; four are needed")
    experts, rows, num_groups, _bytes = blocks.shape
    check(blocks, ("U8",), (experts, rows, num_groups, MXFP4_GROUP // 2))
    check(scales, ("U8",), (experts, rows, num_groups))

    def decode(tensors: Tensors) -> CodedWeight:
        return decode_mxfp4(tensors["_blocks"].flatten(2).flatten(0, 1), tensors["_scales"].flatten(0, 1))

    return coded_tensor(module, "MXFP4", (experts, num_groups * MXFP4_GROUP, rows), parts, decode)


def decode_mxfp4(pairs: Tensor, exponents: Tensor) -> CodedWeight:
    """The weight of uint8 [out, in / 2] and uint8 [out, in / 32]."""
    scales = torch.ldexp(torch.ones(exponents.shape, dtype=torch.float32), exponents.int() - 127)
    return CodedWeight(split_codes(pairs), 4, E2M1, scales, None, MXFP4_GROUP)


# The library compressed-tensors

COMPRESSED_SUFFIXES = (
    ".weight_packed", ".weight_scale", ".weight_zero_point", ".weight_shape", ".weight_g_idx", ".weight_global_scale",
    ".weight",
)  # fmt: skip
ACTIVATIONS = (".input_zero_point", ".input_global_scale", ".output_scale", ".output_zero_point")
NVFP4_GROUP = 16

Scheme = dict[str, Any]
"""A config group's ``weights``."""


def read_compressed_config(config: dict[str, Any]) -> Format:
    """Integers and floats of 4 and 8 bits, by the tensors of a module; the value is (code - zero) · scale.

    ``weight`` is int8 or float8_e4m3fn [out, in] ("int-quantized", "float-quantized"). ``weight_packed`` is int32 [out,
    ⌈in · bits / 32⌉] ("pack-quantized"), codes less 2^(bits - 1) from a word's low end, its shape in ``weight_shape``;
    or uint8 [out, in / 2], 4-bit floats, the first in the low half. Scales are ``weight_scale``: one, [out, 1] or [out,
    groups], or a grid of blocks; exponents plus 127, uint8, for "mxfp4", and times 1 / ``weight_global_scale`` for
    "nvfp4". ``weight_zero_point`` is int8, or packed along the outputs.
    """
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
    return Format(suffixes=COMPRESSED_SUFFIXES, unread=(*UNREAD, *ACTIVATIONS), find=partial(_find_compressed, schemes))


def _scheme_of(module: str, schemes: list[tuple[list[str], Scheme]]) -> Scheme:
    """The scheme of the group that names the module, or matches it by a regular expression; else that of its kind."""
    for targets, scheme in schemes:
        for target in targets:
            try:
                if target == module or (target.startswith("re:") and re.match(target.removeprefix("re:"), module)):
                    return scheme
            except re.error as error:
                raise BadConfig(f"target {shorten(target)} is no regular expression: {error}") from error
    return next((scheme for targets, scheme in schemes if not all(t.startswith("re:") for t in targets)), schemes[0][1])


def _find_compressed(schemes: list[tuple[list[str], Scheme]], module: str, parts: Parts, files: Files) -> Stored | None:
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


# GPTQ, as AutoGPTQ and GPTQModel write it, and AWQ, as AutoAWQ does

GPTQ_SUFFIXES = (".qweight", ".qzeros", ".scales", ".g_idx")
ZEROS_LESS = {"gptq": 1, "gptq_v2": 0}
PLACES = [0, 4, 1, 5, 2, 6, 3, 7]
"""The place in a word of AWQ's of each of eight outputs."""


def read_gptq_config(config: dict[str, Any]) -> Format:
    """GPTQ of 4 and 8 bits (Frantar et al., 2022, arXiv:2210.17323): (code - zero) · scale, ``scales`` [groups, out].

    ``qweight`` is int32 [in · bits / 32, out]: consecutive inputs of an output share a word, the first in its low bits.
    ``qzeros`` is int32 [groups, out · bits / 32], packed along the outputs. The config's ``checkpoint_format`` "gptq",
    the usual one, has zeros less 1 in ``qzeros``, "gptq_v2" as they are. ``g_idx``, int32 [in], is the group of each
    input: with ``desc_act`` not the one of those beside it, so that such a matrix is dequantised.
    """
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
    return Format(suffixes=GPTQ_SUFFIXES, find=partial(_find_gptq, bits, group, ZEROS_LESS[written]))


def read_awq_config(config: dict[str, Any]) -> Format:
    """AWQ of 4 bits in the layout "gemm" (Lin et al., 2023, arXiv:2306.00978); scales and values as GPTQ's.

    ``qweight`` is int32 [in, out / 8]: eight outputs of an input share a word. From its low end they are the outputs 0,
    2, 4, 6, 1, 3, 5, 7 of the eight. ``qzeros`` is int32 [groups, out / 8], packed in the same way.
    """
    bits, group, version = config.get("bits"), config.get("group_size"), str(config.get("version") or "gemm").lower()
    if bits != 4 or not _is_group(group) or version != "gemm":
        raise BadConfig(
            f"bits={shorten(bits)}, group_size={shorten(group)}, version={shorten(version)}; AWQ of "
            "4 bits, in groups of a number of inputs or -1, of version gemm, is supported"
        )
    return Format(suffixes=GPTQ_SUFFIXES[:3], find=partial(_find_awq, group))


def _is_group(group: object) -> TypeGuard[int]:
    return type(group) is int and (group == -1 or group > 0)


def _find_gptq(bits: int, group: int, zeros_less: int, module: str, parts: Parts, _: Files) -> Stored | None:
    if ".qweight" not in parts:
        return None
    need(module, parts, GPTQ_SUFFIXES[:3])
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
    need(module, parts, GPTQ_SUFFIXES[:3])
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


# The library bitsandbytes

STATES = (".weight.quant_state.bitsandbytes__nf4", ".weight.quant_state.bitsandbytes__fp4")
TABLES = (".weight.absmax", ".weight.quant_map")
NESTED = (".weight.nested_absmax", ".weight.nested_quant_map")
BITSANDBYTES_SUFFIXES = (*STATES, *TABLES, *NESTED, ".weight", ".SCB", ".weight_format")
MAX_STATE_BYTES = 4096


class State(msgspec.Struct, frozen=True):
    """The JSON: shape is [out, in]."""

    quant_type: str
    blocksize: int
    shape: tuple[int, int]
    nested_blocksize: int = 1
    nested_offset: float = 0.0


def read_bitsandbytes_config(_: dict[str, Any]) -> Format:
    """NF4 and FP4 (Dettmers et al., 2023, arXiv:2305.14314), and LLM.int8 (2022, arXiv:2208.07339).

    4 bits: ``weight`` is the flattened matrix, two codes a byte, the first in the high half. Blocks of ``blocksize``
    neighbours share an ``absmax``; the value is quant_map[code] · absmax. Quantised a second time, ``absmax`` is uint8,
    and nested_quant_map[absmax] · nested_absmax + nested_offset of blocks of ``nested_blocksize``. The rest is JSON in
    the bytes of ``quant_state.bitsandbytes__nf4`` (or fp4). 8 bits: ``weight`` is int8 [out, in], the value itself
    times ``SCB`` [out] / 127.
    """
    return Format(suffixes=BITSANDBYTES_SUFFIXES, find=_find_bitsandbytes)


def _find_bitsandbytes(module: str, parts: Parts, files: Files) -> Stored | None:
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
    part = next(parts[suffix] for suffix in STATES if suffix in parts)
    check(part, ("U8",), part.shape if part.num_bytes <= MAX_STATE_BYTES else (MAX_STATE_BYTES,))
    try:
        state = msgspec.convert(json.loads(bytes(part.read(files).flatten().tolist())), State, strict=False)
        if min(*state.shape, state.blocksize, state.nested_blocksize) < 1:
            raise ValueError("sizes must be at least 1")
    except (ValueError, RecursionError) as error:  # msgspec's and json's are such
        raise ModelLoadError(f"tensor {part.name} in {part.path} is no state of a quantised matrix: {error}") from error
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
