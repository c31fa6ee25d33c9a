"""The header of a GGUF file: its metadata, its vocabulary, and where its tensors lie. Needs no torch.

The format is llama.cpp's (github.com/ggml-org/ggml, docs/gguf.md): little-endian, a count of tensors and of key-value
pairs, the pairs, a description of each tensor, and from the next multiple of the alignment on their data. The `gguf`
package reads it, too: it makes some numpy arrays for each token, which takes 100 times as long, 20 s for a vocabulary
of 150,000, trusts each length, and brings what downloads and shows progress.

The rules of the vocabulary are llama.cpp's, too (its src/llama-vocab.cpp): files name few of the tokens that end a
text, and their converters know many by their texts.
"""

from __future__ import annotations

import math
import os
import re
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

import msgspec
import numpy as np

from aioengine.errors import ModelLoadError
from aioengine.models.no_model import check_begin
from aioengine.validation import shorten

MAGIC = b"GGUF"
VERSIONS = (2, 3)
DEFAULT_ALIGNMENT = 32
MAX_HEADER_BYTES = 256 * 2**20
"""Ten times the largest vocabulary with its merges."""

MAX_PAIRS = 2**16
MAX_TENSORS = 2**18
MAX_STRINGS = 2**22
"""In a list: of a vocabulary, or of its merges."""

MAX_DIMS = 4
MAX_NAME_BYTES = 2**16
MAX_SHOWN_SHARDS = 8
SHARD_NAME = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf")

NUMBER_TYPES = {
    0: "u1", 1: "i1", 2: "<u2", 3: "<i2", 4: "<u4", 5: "<i4", 6: "<f4", 7: "?", 10: "<u8", 11: "<i8", 12: "<f8",
}  # fmt: skip
"""Types of metadata: the number, and numpy's name."""

STRING, LIST = 8, 9

TENSOR_TYPES = {
    0: "F32", 1: "F16", 2: "Q4_0", 3: "Q4_1", 6: "Q5_0", 7: "Q5_1", 8: "Q8_0", 9: "Q8_1", 10: "Q2_K", 11: "Q3_K",
    12: "Q4_K", 13: "Q5_K", 14: "Q6_K", 15: "Q8_K", 16: "IQ2_XXS", 17: "IQ2_XS", 18: "IQ3_XXS", 19: "IQ1_S",
    20: "IQ4_NL", 21: "IQ3_S", 22: "IQ2_S", 23: "IQ4_XS", 24: "I8", 25: "I16", 26: "I32", 27: "I64", 28: "F64",
    29: "IQ1_M", 30: "BF16", 34: "TQ1_0", 35: "TQ2_0", 39: "MXFP4",
}  # fmt: skip
BLOCKS = {
    "F32": (1, 4), "F16": (1, 2), "BF16": (1, 2), "Q4_0": (32, 18), "Q4_1": (32, 20), "Q5_0": (32, 22),
    "Q5_1": (32, 24), "Q8_0": (32, 34), "Q4_K": (256, 144), "Q5_K": (256, 176), "Q6_K": (256, 210),
    "IQ4_NL": (32, 18), "IQ4_XS": (256, 136), "MXFP4": (32, 17),
}  # fmt: skip
"""The types that are supported: how many neighbours of a row are stored together, and in how many bytes."""


class GgufTensor(msgspec.Struct, frozen=True):
    """A tensor as the header describes it.

    Attributes:
        type: a key of `BLOCKS`.
        shape: outermost first, as torch has it.
        offset: of its first byte in the file.
    """

    name: str
    path: Path
    type: str
    shape: tuple[int, ...]
    offset: int

    @property
    def num_bytes(self) -> int:
        num_values, num_bytes = BLOCKS[self.type]
        return math.prod(self.shape) // num_values * num_bytes

    def __getitem__(self, index: int) -> GgufTensor:
        """One of the tensors that are stacked in this one."""
        shape = self.shape[1:]
        offset = self.offset + index * (self.num_bytes // self.shape[0])
        return msgspec.structs.replace(self, shape=shape, offset=offset)


class GgufFile(msgspec.Struct, frozen=True):
    """The header of a file, or of all files that a model was split into.

    Attributes:
        path: the file, the first of several.
        metadata: by key: numbers, strings, lists of strings, and arrays of numbers, of the first file.
        tensors: by name.
    """

    path: Path
    metadata: dict[str, Any]
    tensors: dict[str, GgufTensor]

    @classmethod
    def read(cls, path: Path) -> GgufFile:
        """Read the header; of a model in several files, those of all of them.

        Raises:
            ModelLoadError: a file cannot be read, is damaged, holds what is not supported, or is not the first of
                several.
        """
        first = _read_header(path)
        for other in _other_shards(path, first.get("split.count", int, 1)):
            for name, tensor in _read_header(other).tensors.items():
                if first.tensors.setdefault(name, tensor) is not tensor:
                    raise ModelLoadError(f"tensor {name} is in two files: {first.tensors[name].path} and {other}")
        return first

    def get(self, key: str, kind: type | tuple[type, ...], default: Any = None) -> Any:
        """The metadata's value for a key.

        Raises:
            ModelLoadError: it is of another type than ``kind``.
        """
        value = self.metadata.get(key)
        if value is None:
            return default
        if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
            raise ModelLoadError(f"{self.path}: {key}={shorten(value)} is a {type(value).__name__}")
        return value


def all_shards(path: Path) -> Path:
    """A pattern of the files that a model was split into, of which this is one; or this, if it was not."""
    parts = SHARD_NAME.fullmatch(path.name)
    return path if parts is None else path.with_name(f"{parts['stem']}-*-of-{parts['count']}.gguf")


def _other_shards(path: Path, count: int) -> Iterator[Path]:
    """The files beside ``path`` that hold the rest of its model."""
    if count in (0, 1):
        return
    parts = SHARD_NAME.fullmatch(path.name)
    if parts is None or int(parts["count"]) != count:
        raise ModelLoadError(f"{path} states split.count={count}, and is not named NAME-00001-of-{count:05}.gguf")
    if int(parts["number"]) != 1:
        raise ModelLoadError(f"{path} is a later part of a model: give {parts['stem']}-00001-of-{parts['count']}.gguf")
    others = [path.with_name(f"{parts['stem']}-{number:05}-of-{count:05}.gguf") for number in range(2, count + 1)]
    if missing := [other.name for other in others if not other.exists()]:
        names = ", ".join(missing[:MAX_SHOWN_SHARDS]) + (", …" if missing[MAX_SHOWN_SHARDS:] else "")
        raise ModelLoadError(f"{path} is one of {count} files; of the others {len(missing)} are missing: {names}")
    yield from others


def _read_header(path: Path) -> GgufFile:
    try:
        with path.open("rb") as file:
            return _Header(path, file).read()
    except FileNotFoundError as error:
        raise ModelLoadError(f"{path} is missing") from error
    except OSError as error:
        raise ModelLoadError(f"{path} cannot be read: {error.strerror or error}") from error
    except _Damaged as error:
        check_begin(path)
        raise ModelLoadError(f"{path}: {error}") from error


class _Damaged(Exception):
    """A header is malformed."""


class _Header:
    """Reads a header from its beginning. No length in it is believed before the file is known to have as much."""

    def __init__(self, path: Path, file: BinaryIO) -> None:
        self._path, self._file = path, file
        self._num_bytes = os.fstat(file.fileno()).st_size
        self._left = min(self._num_bytes, MAX_HEADER_BYTES)

    def read(self) -> GgufFile:
        if self._left < len(MAGIC) or self._take(len(MAGIC)) != MAGIC:
            raise _Damaged("it does not begin as a GGUF file does")
        (version,) = self._unpack("<I")
        if version not in VERSIONS:
            order = ", or is of a big-endian machine" if not version & 0xFFFF else ""
            raise _Damaged(f"GGUF of version {version}{order}; supported: {', '.join(map(str, VERSIONS))}")
        num_tensors, num_pairs = self._unpack("<QQ")
        if num_tensors > MAX_TENSORS or num_pairs > MAX_PAIRS:
            raise _Damaged(f"it states {num_tensors} tensors and {num_pairs} keys, more than any model")
        metadata: dict[str, Any] = {}
        for _ in range(num_pairs):
            key = self._string(MAX_NAME_BYTES)
            if key in metadata:
                raise _Damaged(f"key {shorten(key)} is there twice")
            metadata[key] = self._value(key, *self._unpack("<I"))
        described = [self._tensor() for _ in range(num_tensors)]
        alignment = metadata.get("general.alignment", DEFAULT_ALIGNMENT)
        if type(alignment) is not int or alignment <= 0:
            raise _Damaged(f"general.alignment={shorten(alignment)} is no number of bytes")
        first = -(-self._file.tell() // alignment) * alignment
        tensors: dict[str, GgufTensor] = {}
        for tensor in described:
            if tensor.name in tensors:
                raise _Damaged(f"tensor {tensor.name} is there twice")
            tensors[tensor.name] = placed = msgspec.structs.replace(tensor, offset=first + tensor.offset)
            if placed.offset + placed.num_bytes > self._num_bytes:
                raise _Damaged(f"tensor {tensor.name} lies beyond the file's end: it is damaged, or cut short")
        return GgufFile(self._path, metadata, tensors)

    def _tensor(self) -> GgufTensor:
        name = self._string(MAX_NAME_BYTES)
        (num_dims,) = self._unpack("<I")
        if not 1 <= num_dims <= MAX_DIMS:
            raise _Damaged(f"tensor {shorten(name)} has {num_dims} dimensions")
        shape = self._unpack(f"<{num_dims}Q")[::-1]
        number, offset = self._unpack("<IQ")
        kind = TENSOR_TYPES.get(number, f"number {number}")
        if kind not in BLOCKS:
            raise _Damaged(f"tensor {shorten(name)} is of type {kind}; supported: {', '.join(BLOCKS)}")
        if 0 in shape or shape[-1] % BLOCKS[kind][0]:
            raise _Damaged(f"tensor {shorten(name)} of type {kind} has shape {list(shape)}")
        return GgufTensor(name, self._path, kind, shape, offset)

    def _value(self, key: str, kind: int) -> Any:
        if kind in NUMBER_TYPES:
            (number,) = self._numbers(kind, 1)
            # The shortest decimals are those that it was made of: 1e-06, and not 9.999999974752427e-07.
            return float(str(number)) if number.dtype == np.float32 else number.item()
        if kind == STRING:
            return self._string()
        if kind != LIST:
            raise _Damaged(f"{shorten(key)} is of type {kind}, which GGUF does not have")
        inner, count = self._unpack("<IQ")
        if inner in NUMBER_TYPES:
            return self._numbers(inner, count)
        if inner != STRING:
            raise _Damaged(f"{shorten(key)} is a list of type {inner}; numbers and strings are supported")
        if count > MAX_STRINGS:
            raise _Damaged(f"{shorten(key)} states {count} strings, more than any vocabulary")
        return [self._string() for _ in range(count)]

    def _numbers(self, kind: int, count: int) -> np.ndarray[Any, Any]:
        dtype = np.dtype(NUMBER_TYPES[kind])
        return np.frombuffer(self._take(dtype.itemsize * count), dtype)

    def _string(self, max_bytes: int = MAX_HEADER_BYTES) -> str:
        (length,) = self._unpack("<Q")
        try:
            return self._take(length if length <= max_bytes else MAX_HEADER_BYTES).decode()
        except UnicodeDecodeError as error:
            raise _Damaged("it has a string that is not UTF-8") from error

    def _unpack(self, form: str) -> tuple[int, ...]:
        return struct.unpack(form, self._take(struct.calcsize(form)))

    def _take(self, count: int) -> bytes:
        self._left -= count
        if self._left < 0:
            raise _Damaged("the header is damaged, or the file is cut short")
        return self._file.read(count)


NORMAL, UNKNOWN, CONTROL, USER_DEFINED = 1, 2, 3, 4
"""Types of tokens, as llama.cpp numbers them."""

ROLES = {
    "bos_token": "bos",
    "eos_token": "eos",
    "unk_token": "unknown",
    "sep_token": "seperator",
    "pad_token": "padding",
    "mask_token": "mask",
}
"""transformers' names of tokens → the beginning of their metadata's keys."""

SENTENCEPIECE = "llama"
DEFAULT_IDS = {"bos": 1, "eos": 2, "unknown": 0}
"""Ids of roles in a sentencepiece vocabulary whose file does not name them."""

END_ROLES = ("eos", "eot", "eom", "fim_pad", "fim_rep", "fim_sep")
END_TEXTS = {
    "<|eot_id|>", "<|eom_id|>", "<|im_end|>", "<|end|>", "<|return|>", "<|call|>", "<|flush|>", "<|calls|>",
    "<end_of_turn>", "<|endoftext|>", "<|end_of_text|>", "<end_of_utterance>", "</s>", "<eos>", "<turn|>",
    "<|tool_response>", "<EOT>", "_<EOT>", "[EOT]", "[EOS]", "[e~[", "<｜end▁of▁sentence｜>", "<|fim_pad|>",
    "<fim-pad>", "<fim_pad>", "<PAD>", "[PAD]", "<|fim_repo|>", "<|repo_name|>", "<fim-repo>", "<REPO>", "<reponame>",
    "<|file_sep|>",
}  # fmt: skip
"""Tokens that end a turn, a text or a piece of code in any vocabulary that has them, whatever their type."""


def tokens_of(file: GgufFile) -> list[str]:
    """The vocabulary, by ids; empty where the file has none."""
    tokens: list[str] = file.get("tokenizer.ggml.tokens", list, [])
    return tokens


def token_types(file: GgufFile) -> list[int]:
    """The type of each token; all are normal where the file has no types.

    Raises:
        ModelLoadError: there are more or fewer types than tokens.
    """
    tokens, types = tokens_of(file), file.metadata.get("tokenizer.ggml.token_type")
    if types is None:
        return [NORMAL] * len(tokens)
    if len(types) != len(tokens):
        raise ModelLoadError(f"{file.path}: {len(tokens)} tokens and {len(types)} types of tokens")
    return list(map(int, types))


def id_of_role(file: GgufFile, role: str) -> int | None:
    """The token that the file names for a role, such as "bos"; None if it names none.

    Ids outside the vocabulary count as not given, as in llama.cpp: converters have written -1 for none.
    """
    token_id: int | None = file.get(f"tokenizer.ggml.{role}_token_id", int)
    num_tokens = len(tokens_of(file))
    is_known = token_id is not None and (0 <= token_id < num_tokens or not num_tokens)
    if not is_known and file.metadata.get("tokenizer.ggml.model") == SENTENCEPIECE:
        token_id = DEFAULT_IDS.get(role, num_tokens)
        is_known = token_id < num_tokens
    return token_id if is_known else None


def ending_ids(file: GgufFile) -> list[int]:
    """The tokens that end a text: those that the file names, and those of `END_TEXTS`.

    "<|end|>" is left out if the vocabulary has other tokens that end a turn, as harmony's: it ends one of several
    messages there. "</s>" is left out if it is no control token, as in Gemma's vocabulary: it is HTML there.

    Raises:
        ModelLoadError: metadata is malformed.
    """
    ids = dict.fromkeys(token_id for role in END_ROLES if (token_id := id_of_role(file, role)) is not None)
    listed = file.get("tokenizer.ggml.eos_token_ids", (np.ndarray, list), [])
    ids |= dict.fromkeys(token_id.item() if isinstance(token_id, np.generic) else token_id for token_id in listed)
    types = token_types(file)
    known = {
        token: token_id
        for token_id, token in enumerate(tokens_of(file))
        if token in END_TEXTS and (token != "</s>" or types[token_id] == CONTROL)
    }
    if known.keys() & {"<|call|>", "<|calls|>"} and known.keys() & {"<|return|>", "<|flush|>"}:
        ids.pop(known.pop("<|end|>", -1), None)
    return list(ids | dict.fromkeys(known.values()))
