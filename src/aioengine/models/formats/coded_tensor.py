"""A matrix of a quantised checkpoint: the tensors that encode it, known by their names, and what they stand for."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable
from dataclasses import replace

import msgspec
import torch
from torch import Tensor

from aioengine.errors import ModelLoadError
from aioengine.kernels.packed_weight import CodedWeight
from aioengine.kernels.torch.quantized import split_codes
from aioengine.models.checkpoint import FILE_DTYPES
from aioengine.models.formats.stored import Files, FileTensor, Stored

Parts = dict[str, FileTensor]
"""The tensors of one module, by the suffixes of their names."""


class BadConfig(Exception):
    """A quantization_config is malformed, or not supported; the message names the field, and what is supported."""


Tensors = dict[str, Tensor]
"""Values of `Parts`, by the same suffixes."""


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
        unread: of those that say nothing of weights: scales of activations and of KV caches.
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


FLOATS = frozenset(FILE_DTYPES)
E4M3 = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
"""The values of the codes of float8_e4m3fn (Micikevicius et al., 2022, arXiv:2209.05433)."""

_MAGNITUDES = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0], dtype=torch.float32)
E2M1 = torch.cat((_MAGNITUDES, -_MAGNITUDES))
"""The values of the codes of 4-bit floats (OCP Microscaling Formats, version 1.0)."""
