"""AWQ (Lin et al., 2023, arXiv:2306.00978) of 4 bits in the layout "gemm", as AutoAWQ writes it.

``qweight`` is int32 [in, out / 8]: eight outputs of an input share a word, and from its low end they are the outputs
0, 2, 4, 6, 1, 3, 5, 7 of the eight. ``qzeros``, int32 [groups, out / 8], likewise; ``scales`` is [groups, out]. The
value is (code - zero) · scale.
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
    split_words,
)
from aioengine.models.formats.stored import Files
from aioengine.validation import shorten

SUFFIXES = (".qweight", ".qzeros", ".scales")
PLACES = [0, 4, 1, 5, 2, 6, 3, 7]
"""In which place of a word each of eight outputs is."""


def read_config(config: dict[str, Any]) -> Format:
    bits, group, version = config.get("bits"), config.get("group_size"), str(config.get("version") or "gemm").lower()
    if bits != 4 or type(group) is not int or not (group == -1 or group > 0) or version != "gemm":
        raise BadConfig(
            f"bits={shorten(bits)}, group_size={shorten(group)}, version={shorten(version)}; AWQ of "
            "4 bits, in groups of a number of inputs or -1, of version gemm, is supported"
        )
    return Format(suffixes=SUFFIXES, find=partial(_find, group))


def _find(group: int, module: str, parts: Parts, _: Files) -> CodedTensor | None:
    if ".qweight" not in parts:
        return None
    need(module, parts, SUFFIXES)
    columns, num_words = check_matrix(parts[".qweight"], ("I32",))
    group = columns if group == -1 else min(group, columns)
    num_groups = -(-columns // group)
    check(parts[".scales"], FLOATS, (num_groups, num_words * 8))
    check(parts[".qzeros"], ("I32",), (num_groups, num_words))
    return CodedTensor(f"{module}.weight", "AWQ 4-bit", (num_words * 8, columns), parts, partial(_decode, group))


def _decode(group: int, tensors: dict[str, Tensor]) -> CodedWeight:
    scales, zeros = tensors[".scales"].T.float().contiguous(), _split(tensors[".qzeros"])
    return CodedWeight(_split(tensors[".qweight"]), 4, None, scales, (8 - zeros.int()) * scales, group)


def _split(words: Tensor) -> Tensor:
    """int32 [any, out / 8] → uint8 [out, any]."""
    return split_words(words, 4).view(len(words), -1, 8)[:, :, PLACES].flatten(1).T.contiguous()
