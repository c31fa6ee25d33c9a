"""Why a file or a folder is no model: what it is, and what to do."""

from __future__ import annotations

import re
from pathlib import Path

from aioengine.errors import ModelLoadError

IN_PLACE_OF_FILES = {
    b"version https://git-lfs": "is a Git LFS pointer in place of the file: run `git lfs pull`, or use `hf download`",
    b"<!doctype html": "is a web page in place of the file: download it again",
}
OTHER_FOLDERS = {
    "adapter_config.json": "is an adapter (LoRA), and no model: merge it into its base model, and give the merged one",
    "model_index.json": "is a pipeline of diffusers, which makes images and no text",
}
UNENDED = re.compile(r".*\.(incomplete|part|crdownload|aria2)")
SHARD = re.compile(r"(.+)-\d{5}(-of-\d{5})(\.safetensors|\.bin|\.gguf)")
OTHER_FORMAT = re.compile(r".*\.(bin|pt|pth|ckpt|onnx|h5|msgpack|gguf)")
MODELS_BELOW = ("*/config.json", "snapshots/*/config.json", "*/*.gguf")


def check_begin(path: Path) -> None:
    """Look at the first bytes of a regular file.

    Raises:
        ModelLoadError: something else is in its place, or it cannot be read.
    """
    try:
        with path.open("rb") as file:
            begin = file.read(64).lower()
    except OSError as error:
        raise ModelLoadError(f"{path} cannot be read: {error.strerror or error}") from error
    for other, problem in IN_PLACE_OF_FILES.items():
        if begin.startswith(other):
            raise ModelLoadError(f"{path} {problem}")


def why_incomplete(folder: Path, otherwise: str) -> str:
    """Why a folder lacks its config or its weights; ``otherwise`` where its names give no reason."""
    names = sorted(path.name for path in folder.iterdir())
    for name, problem in OTHER_FOLDERS.items():
        if name in names:
            return f"{folder} {problem}"
    if not names:
        return f"{folder} is empty: give the folder that has the model"
    if unended := next(filter(UNENDED.fullmatch, names), None):
        return f"{unended} is of a download that has not ended: download the model again"
    shard = next(filter(None, map(SHARD.fullmatch, names)), None)
    if "config.json" not in names:
        if shard and shard[3] == ".gguf":
            return f"{shard[1]}-00001{shard[2]}.gguf, the first part of the model, is not there: download it, too"
        below = sorted({path for pattern in MODELS_BELOW for path in folder.glob(pattern)})
        found = [path.parent if path.name == "config.json" else path for path in below]
        if found:
            return f"{'the model is' if len(found) == 1 else f'{len(found)} models are'} below it: give {found[0]}"
        if any(name.startswith("mmproj") for name in names):
            return "its GGUF file is a projector of images, which belongs to a model: put the model's file beside it"
        has_weights = any(name.endswith(".safetensors") for name in names)
        return "the weights are there without it: download the small files, too" if has_weights else otherwise
    if shard:
        return f"{shard[1]}{shard[3]}.index.json, the index of {shard[0]} and the others, is missing: download it, too"
    other = next(filter(OTHER_FORMAT.fullmatch, names), None)
    return f"{other} is another format: save the model as safetensors" if other else otherwise
