"""A model's weights into a folder, as a checkpoint that transformers and `Engine` load."""

from __future__ import annotations

import errno
import json
import math
import secrets
import shutil
import stat
from collections.abc import Callable
from fnmatch import fnmatch
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import save_file

from aioengine.errors import InvalidRequest
from aioengine.models.checkpoint import INDEX_FILE, SINGLE_FILE
from aioengine.models.families import text_config
from aioengine.models.folder import SMALL_FILES, ModelFolder
from aioengine.models.loader import LoadStopped
from aioengine.models.model import Model


def save_checkpoint(
    model: Model,
    source: ModelFolder,
    folder: Path,
    *,
    max_shard_bytes: int,
    should_stop: Callable[[], bool] = lambda: False,
) -> list[str]:
    """Write the weights in the model's dtype, with the config and the tokenizer of ``source``. Blocks: for a thread.

    Of a quantised checkpoint that is what its codes stand for, rounded to the dtype, as no quantised one.
    Needs the memory of two files more. ``folder`` may be there: what it holds is replaced once all has been written,
    and weights of another checkpoint leave it; other files stay. A crash in between leaves a folder without weights,
    never one with those of two checkpoints.

    Args:
        max_shard_bytes: of the tensors in a file; a single larger one has a file of its own.
        should_stop: asked between files.
    Returns:
        the names of the weight files, in order.
    Raises:
        InvalidRequest: ``max_shard_bytes`` is less than 1.
        OSError: it cannot be written, or the files of ``source`` are gone.
        LoadStopped: ``should_stop`` returned True.
    """
    if max_shard_bytes < 1:
        raise InvalidRequest(f"max_shard_bytes={max_shard_bytes} must be at least 1", param="max_shard_bytes")
    folder = folder.resolve()
    is_there = folder.is_dir()
    beside = folder if is_there else folder.parent
    if not beside.is_dir():
        raise FileNotFoundError(errno.ENOENT, "there is no folder for it", str(folder))
    part = beside / f".{folder.name}-{secrets.token_hex(4)}.part"
    part.mkdir()
    try:
        names = _write_weights(model, part, max_shard_bytes, should_stop)
        _write_small_files(model, source, part)
        for name in names:  # safetensors makes files that only their owner may read
            (part / name).chmod(stat.S_IMODE((part / "config.json").stat().st_mode))
        if is_there:
            # Without its index, or its only file, shards are not taken for a checkpoint.
            for name in (SINGLE_FILE, INDEX_FILE):
                (folder / name).unlink(missing_ok=True)
            for shard in folder.glob("model-*-of-*.safetensors"):
                shard.unlink()
            last = SINGLE_FILE if names == [SINGLE_FILE] else INDEX_FILE
            for file in sorted(part.iterdir(), key=lambda file: (file.name == last, file.name)):
                file.replace(folder / file.name)
        else:
            part.rename(folder)
    finally:
        shutil.rmtree(part, ignore_errors=True)
    return names


def _write_weights(model: Model, part: Path, max_shard_bytes: int, should_stop: Callable[[], bool]) -> list[str]:
    from huggingface_hub import split_state_dict_into_shards_factory

    item_bytes = model.config.dtype.itemsize
    split = split_state_dict_into_shards_factory(
        model.shapes(),
        get_storage_size=lambda shape: math.prod(shape) * item_bytes,
        filename_pattern="model{suffix}.safetensors",
        max_shard_size=max_shard_bytes,
    )
    for name, shard in split.filename_to_tensors.items():
        if should_stop():
            raise LoadStopped
        try:
            save_file(dict(model.tensors(shard)), part / name, metadata={"format": "pt"})
        except SafetensorError as error:  # it wraps the system's error
            raise OSError(errno.EIO, f"the weights cannot be written: {error}", str(part / name)) from error
    if split.is_sharded:
        index = {"metadata": split.metadata, "weight_map": dict(sorted(split.tensor_to_filename.items()))}
        (part / INDEX_FILE).write_text(json.dumps(index, indent=2) + "\n")
    return list(split.filename_to_tensors)


def _write_small_files(model: Model, source: ModelFolder, part: Path) -> None:
    for file in sorted(source.path.iterdir()):
        wanted = any(fnmatch(file.name, pattern) for pattern in SMALL_FILES)
        if wanted and file.is_file() and not fnmatch(file.name, "*.index.json"):
            shutil.copyfile(file, part / file.name)
    # Loaded in another dtype than the one that they are written in, the weights would bring other tokens.
    dtype = str(model.config.dtype).removeprefix("torch.")
    names = [name for name in ("dtype", "torch_dtype") if name in source.config] or ["dtype"]
    of_all = model.config.architecture in source.config["architectures"]
    config = (source.config if of_all else text_config(source.config)) | dict.fromkeys(names, dtype)
    config.pop("quantization_config", None)  # of the files that were read
    (part / "config.json").write_text(json.dumps(config, indent=2) + "\n")
