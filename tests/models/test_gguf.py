"""GGUF files that llama.cpp's own package wrote, against the checkpoints that they were written from."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from gguf import GGMLQuantizationType as Type
from gguf_checkpoints import dequantized, write_gguf
from nightly import few

from aioengine import Engine
from aioengine.errors import ModelLoadError
from aioengine.kernels.packed_weight import CodedWeight
from aioengine.models.families import read_decoder_config
from aioengine.models.folder import ModelFolder
from aioengine.models.formats.gguf_blocks import BLOCK_FORMATS
from aioengine.models.formats.gguf_file import BLOCKS
from aioengine.models.formats.gguf_tensors import read_gguf
from aioengine.models.formats.safetensors import read_header
from aioengine.models.formats.stored import Files

SIZES = {"hidden_size": 256, "head_dim": 64, "intermediate_size": 256, "num_hidden_layers": 2}
"""Rows of whole blocks of 256."""

FAMILIES = ("llama2", "llama-linear", "llama-yarn", "qwen2", "qwen3")
PROMPTS = ([5, 6, 7, 8, 9, 77, 300], list(range(3, 60)))
MAX_TOKENS = 12
WEIGHTS = "model.safetensors"


@pytest.mark.parametrize("kind", BLOCKS)
def test_tensors_have_the_names_and_the_very_values_of_the_checkpoint(
    kind: str, checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    source = checkpoint("llama2", **SIZES)
    stored = read_gguf(write_gguf(source, tmp_path / "model.gguf", kind=Type[kind]))
    wanted = {entry.name: entry for entry in read_header(dequantized(source, tmp_path / "dense", Type[kind]) / WEIGHTS)}
    assert stored.keys() == wanted.keys()
    with Files() as files:
        for name, entry in stored.items():
            values = entry.read(files)
            assert isinstance(values, CodedWeight) == (kind in BLOCK_FORMATS and len(entry.shape) > 1)
            dense = values.dense() if isinstance(values, CodedWeight) else values.float()
            assert torch.equal(dense, wanted[name].read(files)), name


async def tokens_of(model: Path, **fields: Any) -> list[list[int]]:
    """Greedy answers to `PROMPTS`."""
    defaults = {"dtype": "float32", "kv_cache_memory_bytes": 2**24, "show_progress": False, "num_threads": 1}
    async with Engine(str(model), **{**defaults, **fields}) as engine:
        params = {"max_tokens": MAX_TOKENS, "temperature": 0.0, "ignore_eos": True}
        outputs = [await engine.generate(prompt, **params) for prompt in PROMPTS]
    return [list(output.outputs[0].token_ids) for output in outputs]


def tokens_by_transformers(folder: Path) -> list[list[int]]:
    """As `tokens_of`, in float32."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    model.generation_config.eos_token_id = None
    asked = {"max_new_tokens": MAX_TOKENS, "do_sample": False, "pad_token_id": 0}
    outputs = [model.generate(torch.tensor([prompt]), **asked)[0].tolist() for prompt in PROMPTS]
    return [output[len(prompt) :] for prompt, output in zip(PROMPTS, outputs, strict=True)]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("kind", few(["Q4_K"], BLOCKS))
async def test_an_engine_gives_the_tokens_of_transformers_with_the_dequantised_weights(
    family: str, kind: str, checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    source = checkpoint(family, **SIZES)
    file = write_gguf(source, tmp_path / "model.gguf", kind=Type[kind])
    assert await tokens_of(file) == tokens_by_transformers(dequantized(source, tmp_path / "dense", Type[kind]))


@pytest.mark.parametrize("family", FAMILIES)
def test_the_config_says_what_config_json_says(family: str, checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    source = checkpoint(family, **SIZES)
    found = read_decoder_config(ModelFolder.read(write_gguf(source, tmp_path / "model.gguf")))
    wanted = read_decoder_config(ModelFolder.read(source))
    for name in wanted.__struct_fields__:
        value = getattr(wanted, name)
        # A file's numbers are float32.
        assert getattr(found, name) == (pytest.approx(value, rel=1e-7) if isinstance(value, float) else value), name


def test_a_folder_stands_for_the_file_in_it(checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    source = checkpoint("qwen3", **SIZES)
    file = write_gguf(source, tmp_path / "model.gguf", kind=Type.Q8_0)
    (tmp_path / "mmproj-model.gguf").write_bytes(b"")
    assert ModelFolder.read(tmp_path).path == file
    write_gguf(source, tmp_path / "other.gguf")
    with pytest.raises(ModelLoadError, match="has 2 models: give one of its files"):
        ModelFolder.read(tmp_path)
