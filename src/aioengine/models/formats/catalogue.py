"""What a checkpoint holds: all its tensors, from the headers of its files and config.json's quantization_config."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from aioengine.errors import ModelLoadError
from aioengine.models.checkpoint import INDEX_FILE, SINGLE_FILE
from aioengine.models.folder import ModelFolder, check_files, find_gguf, read_json
from aioengine.models.formats import awq, bitsandbytes, compressed_tensors, fp8, gptq, mxfp4, pickled, safetensors
from aioengine.models.formats.coded_tensor import BadConfig, Format, find_coded
from aioengine.models.formats.gguf_tensors import read_gguf
from aioengine.models.formats.stored import Files, FileTensor, Stored
from aioengine.validation import shorten

QUANT_METHODS: dict[str, Callable[[dict[str, Any]], Format]] = {
    "awq": awq.read_config,
    "bitsandbytes": bitsandbytes.read_config,
    "compressed-tensors": compressed_tensors.read_config,
    "fbgemm_fp8": fp8.read_config,
    "fp8": fp8.read_config,
    "gptq": gptq.read_config,
    "mxfp4": mxfp4.read_config,
}
"""By a quantization_config's quant_method: what reads the rest of it."""

KINDS = (
    (SINGLE_FILE, INDEX_FILE, safetensors.read_header),
    (pickled.SINGLE_FILE, pickled.INDEX_FILE, pickled.read_header),
)
"""Of files, the first that is there: a single one, the index of several, and what reads the header of one."""


def read_catalogue(folder: Path) -> dict[str, Stored]:
    """All tensors of a checkpoint, by name.

    Which matrices are quantised the files say, not the config's lists of those that are not.

    Args:
        folder: or a GGUF file.
    Raises:
        ModelLoadError: there are no files, one is missing or damaged, the index does not fit them, or they are
            quantised by a method that is not supported, or otherwise than it says.
    """
    file = find_gguf(folder)
    if file is not None:
        return read_gguf(file)
    check_files(folder)
    config = folder / "config.json"
    try:
        coding = read_format(read_json(config)) if config.is_file() else None
        tensors = _read_files(folder)
        if coding is None:
            return {**tensors}
        with Files() as files:
            return find_coded(tensors, coding, files)
    except BadConfig as error:
        raise ModelLoadError(f"{config}: quantization_config: {error}") from error


def read_format(config: dict[str, Any]) -> Format | None:
    """How a checkpoint with this config.json is quantised; None: it is not.

    Raises:
        BadConfig: by a method that is not supported, or in a way that is not.
    """
    stated = _stated(config)
    if stated is None:
        return None
    method = stated.get("quant_method") if isinstance(stated, dict) else stated
    if not isinstance(stated, dict) or not isinstance(method, str) or method not in QUANT_METHODS:
        raise BadConfig(
            f"quant_method={shorten(method)} is not supported; supported: {', '.join(QUANT_METHODS)}, and GGUF files"
        )
    return QUANT_METHODS[method](stated)


def is_quantised(folder: ModelFolder) -> bool:
    """Whether matrices may come as codes."""
    return find_gguf(folder.path) is not None or _stated(folder.config) is not None


def _stated(config: dict[str, Any]) -> Any:
    """A config.json's quantization_config, if there is one."""
    inner = config.get("text_config")
    holders = (config, inner if isinstance(inner, dict) else {})
    return next((held for holder in holders if (held := holder.get("quantization_config")) is not None), None)


def _read_files(folder: Path) -> dict[str, FileTensor]:
    """The tensors as they lie in the files: in the single one, or in those that the index names."""
    for single, index, read_header in KINDS:
        if (folder / single).is_file():
            return {entry.name: entry for entry in read_header(folder / single)}
        if (folder / index).is_file():
            return _read_shards(folder / index, read_header)
    other = next((p.name for p in sorted(folder.glob("*")) if p.suffix in (".bin", ".pt", ".pth")), None)
    hint = f"; {other} is another format: save the model as safetensors" if other else ""
    raise ModelLoadError(
        f"{folder} holds none of {', '.join(file for single, index, _ in KINDS for file in (single, index))}{hint}"
    )


def _read_shards(index: Path, read_header: Callable[[Path], Iterator[FileTensor]]) -> dict[str, FileTensor]:
    shard_of = read_json(index).get("weight_map")
    if not isinstance(shard_of, dict) or not shard_of or not all(map(_is_file_name, shard_of.values())):
        raise ModelLoadError(f"{index}: weight_map must give a file of this folder for each tensor")
    stored: dict[str, FileTensor] = {}
    for shard in sorted(set(shard_of.values())):
        for entry in read_header(index.parent / shard):
            if entry.name in stored:
                raise ModelLoadError(f"tensor {entry.name} is in two files: {stored[entry.name].path} and {entry.path}")
            stored[entry.name] = entry
    for name, shard in shard_of.items():
        if name not in stored or stored[name].path.name != shard:
            raise ModelLoadError(f"{index} names tensor {name} in {shard}, which lacks it")
    return stored


def _is_file_name(value: object) -> bool:
    return isinstance(value, str) and bool(value) and Path(value).name == value
