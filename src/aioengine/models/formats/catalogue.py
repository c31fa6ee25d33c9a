"""What a checkpoint holds: all its tensors, from the headers of its files."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

from aioengine.errors import ModelLoadError
from aioengine.models.checkpoint import INDEX_FILE, SINGLE_FILE
from aioengine.models.folder import check_files, read_json
from aioengine.models.formats.safetensors import read_header
from aioengine.models.formats.stored import FileTensor, Stored


def read_catalogue(folder: Path) -> dict[str, Stored]:
    """All tensors of a checkpoint, by name.

    Raises:
        ModelLoadError: there are no files, one is missing or damaged, or the index does not fit them.
    """
    check_files(folder)
    return {**_read_files(folder, SINGLE_FILE, INDEX_FILE, read_header)}


def _read_files(
    folder: Path, single: str, index_name: str, read: Callable[[Path], Iterator[FileTensor]]
) -> dict[str, FileTensor]:
    """Of the single file, or of those that the index names."""
    if (folder / single).is_file():
        return {entry.name: entry for entry in read(folder / single)}
    if not (folder / index_name).is_file():
        other = next((p.name for p in sorted(folder.glob("*")) if p.suffix in (".bin", ".pt", ".pth", ".gguf")), None)
        hint = f"; {other} is another format: save the model as safetensors" if other else ""
        raise ModelLoadError(f"{folder} holds neither {single} nor {index_name}{hint}")
    index = folder / index_name
    shard_of = read_json(index).get("weight_map")
    if not isinstance(shard_of, dict) or not shard_of or not all(map(_is_file_name, shard_of.values())):
        raise ModelLoadError(f"{index}: weight_map must give a file of this folder for each tensor")
    stored: dict[str, FileTensor] = {}
    for shard in sorted(set(shard_of.values())):
        for entry in read(folder / shard):
            if entry.name in stored:
                raise ModelLoadError(f"tensor {entry.name} is in two files: {stored[entry.name].path} and {entry.path}")
            stored[entry.name] = entry
    for name, shard in shard_of.items():
        if name not in stored or stored[name].path.name != shard:
            raise ModelLoadError(f"{index} names tensor {name} in {shard}, which lacks it")
    return stored


def _is_file_name(value: object) -> bool:
    return isinstance(value, str) and bool(value) and Path(value).name == value
