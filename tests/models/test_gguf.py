"""GGUF files that llama.cpp's own package wrote, against the checkpoints that they were written from."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
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
from aioengine.models.loader import check_weights
from aioengine.models.rope import Rope

SIZES = {"hidden_size": 256, "head_dim": 64, "intermediate_size": 256, "num_hidden_layers": 2}
"""Rows of whole blocks of 256."""

SLIDING, FULL = "sliding_attention", "full_attention"
FAMILIES: dict[str, dict[str, Any]] = {
    "llama2": {},
    "llama3": {},
    "llama-linear": {},
    "llama-yarn": {},
    "mistral": {"sliding_window": None},
    "qwen2": {},
    "qwen3": {},
    "mixtral": {"sliding_window": None},
    "qwen2-moe": {"moe_intermediate_size": 64, "shared_expert_intermediate_size": 64, "decoder_sparse_step": 1},
    "qwen3-moe": {"moe_intermediate_size": 64, "mlp_only_layers": []},
    "gemma2": {"query_pre_attn_scalar": 16, "tie_word_embeddings": True},
    "gemma3": {"query_pre_attn_scalar": 16, "num_hidden_layers": 6, "layer_types": [*[SLIDING] * 5, FULL]},
    "phi3": {},
    "phi3-long": {},
    "phi4-mini": {},
    "olmo2": {},
    "granite": {},
    "smollm3": {"num_hidden_layers": 4, "no_rope_layers": [1, 1, 1, 0]},
    "glm4": {},
    "seed-oss": {},
    "exaone4": {"num_hidden_layers": 4, "layer_types": [*[SLIDING] * 3, FULL]},
}
"""Of the families' tiny checkpoints what must be as llama.cpp has it in its code, or whole blocks of 32."""

CHECKED = [("llama3", "Q8_0"), ("qwen3", "BF16"), ("qwen2-moe", "Q8_0"), ("gemma3", "Q4_0"), ("granite", "F16")]
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


@pytest.mark.parametrize(("family", "kind"), few(CHECKED, product(FAMILIES, ("F16", "BF16", "Q8_0", "Q4_0"))))
async def test_an_engine_gives_the_tokens_of_transformers_with_the_dequantised_weights(
    family: str, kind: str, checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    source = checkpoint(family, **FAMILIES[family])
    file = write_gguf(source, tmp_path / "model.gguf", kind=Type[kind])
    assert await tokens_of(file) == tokens_by_transformers(dequantized(source, tmp_path / "dense", Type[kind]))


@pytest.mark.parametrize("kind", few(["Q4_K", "Q6_K"], BLOCKS))
async def test_each_type_runs_at_its_own_width(kind: str, checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    source = checkpoint("qwen2", **SIZES)
    file = write_gguf(source, tmp_path / "model.gguf", kind=Type[kind])
    assert await tokens_of(file) == tokens_by_transformers(dequantized(source, tmp_path / "dense", Type[kind]))


@pytest.mark.parametrize("family", [family for family in FAMILIES if family != "mistral"])  # it is called Llama there
def test_config_and_tensors_are_the_checkpoints(family: str, checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    source = checkpoint(family, **FAMILIES[family])
    file = write_gguf(source, tmp_path / "model.gguf")
    found, wanted = (read_decoder_config(ModelFolder.read(path)) for path in (file, source))
    for name in wanted.__struct_fields__:
        assert near(getattr(found, name), getattr(wanted, name)), name
    check_weights(file, found)


def near(found: Any, wanted: Any) -> bool:
    """Numbers of a GGUF file are float32."""
    if isinstance(wanted, Rope):
        return near((found.inv_freq, found.scale), (wanted.inv_freq, wanted.scale))
    if isinstance(wanted, tuple):
        return len(found) == len(wanted) and all(map(near, found, wanted))
    return bool(found == (pytest.approx(wanted, rel=1e-6) if isinstance(wanted, float) else wanted))


def test_a_folder_stands_for_the_file_in_it(checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    source = checkpoint("qwen3", **SIZES)
    file = write_gguf(source, tmp_path / "model.gguf", kind=Type.Q8_0)
    (tmp_path / "mmproj-model.gguf").write_bytes(b"")
    assert ModelFolder.read(tmp_path).path == file
    write_gguf(source, tmp_path / "other.gguf")
    with pytest.raises(ModelLoadError, match="has 2 models: give one of its files"):
        ModelFolder.read(tmp_path)
