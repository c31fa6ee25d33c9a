"""All tensors of a checkpoint, from the headers of its files and config.json's quantization_config."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from aioengine.errors import ModelLoadError
from aioengine.models.checkpoint import INDEX_FILE, SINGLE_FILE
from aioengine.models.folder import ModelFolder, check_files, find_gguf, read_config, read_json
from aioengine.models.formats import quantised
from aioengine.models.formats.gguf_tensors import read_gguf
from aioengine.models.formats.quantised import BadConfig, Format, find_coded
from aioengine.models.formats.stored import Files, FileTensor, Stored, read_pickled, read_safetensors
from aioengine.models.no_model import why_incomplete
from aioengine.validation import shorten

QUANT_METHODS: dict[str, Callable[[dict[str, Any]], Format]] = {
    "awq": quantised.read_awq_config,
    "bitsandbytes": quantised.read_bitsandbytes_config,
    "compressed-tensors": quantised.read_compressed_config,
    "fbgemm_fp8": quantised.read_fp8_config,
    "fp8": quantised.read_fp8_config,
    "gptq": quantised.read_gptq_config,
    "mxfp4": quantised.read_mxfp4_config,
}
"""By a quantization_config's quant_method: what reads the rest of it."""

KINDS = (
    (SINGLE_FILE, INDEX_FILE, read_safetensors),
    ("pytorch_model.bin", "pytorch_model.bin.index.json", read_pickled),
)
"""Kinds of files, the first that is there counts: a single one, the index of several, and the header's reader."""

LAYER = re.compile(r"(?:model\.|language_model\.)*layers\.(\d+)\.")
"""A tensor of a layer of the text part."""


def read_catalogue(folder: Path) -> dict[str, Stored]:
    """All tensors of a checkpoint, by name.

    The files show which matrices are quantised, not the config's lists of those that are not.

    Args:
        folder: or a GGUF file.
    Raises:
        ModelLoadError: there are no files, one is missing or damaged, the index does not fit them, or they are
            quantised by a method that is not supported, or not as config.json states; or they are a classifier's.
    """
    file = find_gguf(folder)
    if file is not None:
        return read_gguf(file)
    check_files(folder)
    config = folder / "config.json"
    try:
        stated = read_config(folder) if config.is_file() else {}
        coding = read_format(stated)
        tensors = _read_files(folder)
        num_layers, num_extra = (_field(stated, name) for name in ("num_hidden_layers", "num_nextn_predict_layers"))
        if type(num_layers) is int and type(num_extra) is int:
            # Layers behind the last guess tokens beyond the next one, and take no part in that.
            extra = range(num_layers, num_layers + num_extra)
            layer_of = {name: int(layer[1]) for name in tensors if (layer := LAYER.match(name))}
            tensors = {name: tensor for name, tensor in tensors.items() if layer_of.get(name) not in extra}
        for name, tensor in tensors.items():
            if name.startswith(("score.", "classifier.", "qa_outputs.")):
                raise ModelLoadError(
                    f"tensor {name} in {tensor.path} is the head of a model that classifies, and generates no text"
                )
            if coding is None and name.endswith(".qweight"):
                raise ModelLoadError(
                    f"{config} has no quantization_config, and {name} in the files beside it is of a quantised matrix, "
                    "of GPTQ or AWQ: add the one that the model was saved with"
                )
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
    stated = _field(config, "quantization_config")
    if stated is None:
        return None
    method = stated.get("quant_method") if isinstance(stated, dict) else stated
    if not isinstance(stated, dict) or not isinstance(method, str) or method not in QUANT_METHODS:
        hint = '; "desc_act" is of GPTQ: add "quant_method": "gptq"' if method is None and "desc_act" in stated else ""
        raise BadConfig(
            f"quant_method={shorten(method)} is not supported; supported: {', '.join(QUANT_METHODS)}, and GGUF files"
            f"{hint}"
        )
    return QUANT_METHODS[method](stated)


def is_quantised(folder: ModelFolder) -> bool:
    """Whether matrices may come as codes."""
    return find_gguf(folder.path) is not None or _field(folder.config, "quantization_config") is not None


def _field(config: dict[str, Any], name: str) -> Any:
    """A field of a config.json, or of its text_config; None where it is in neither."""
    inner = config.get("text_config")
    holders = (config, inner if isinstance(inner, dict) else {})
    return next((held for holder in holders if (held := holder.get(name)) is not None), None)


def _read_files(folder: Path) -> dict[str, FileTensor]:
    """The tensors as they lie in the files: in the single one, or in those that the index names."""
    for single, index, read_header in KINDS:
        if (folder / single).is_file():
            return {entry.name: entry for entry in read_header(folder / single)}
        if (folder / index).is_file():
            return _read_shards(folder / index, read_header)
    wanted = " or ".join(single for single, *_ in KINDS)
    why = why_incomplete(folder, "download the weights, too")
    raise ModelLoadError(f"{folder} has no weights ({wanted}, or an index of several files): {why}")


def _read_shards(index: Path, read_header: Callable[[Path], Iterator[FileTensor]]) -> dict[str, FileTensor]:
    shard_of = read_json(index).get("weight_map")
    if (
        not isinstance(shard_of, dict)
        or not shard_of
        or not all(isinstance(name, str) and name and Path(name).name == name for name in shard_of.values())
    ):
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
