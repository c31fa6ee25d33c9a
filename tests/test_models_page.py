"""docs/models.md names what runs, and `aioengine info` knows the parameters of models that many have."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from checkpoints import FAMILIES

from aioengine.config import EngineConfig
from aioengine.executor.model_info import read_model_info
from aioengine.models.families import ARCHITECTURES, WRAPPERS
from aioengine.models.formats.catalogue import QUANT_METHODS
from aioengine.models.formats.gguf_families import FAMILIES as GGUF_FAMILIES
from aioengine.models.formats.gguf_file import BLOCKS

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "models.md").read_text()


def test_the_page_names_each_architecture_and_each_format() -> None:
    names = [*ARCHITECTURES, *WRAPPERS, *QUANT_METHODS, *GGUF_FAMILIES, *BLOCKS]
    assert [name for name in names if not re.search(rf"\b{re.escape(name)}\b", PAGE)] == []


def test_the_tests_that_the_page_names_are_there() -> None:
    named = re.findall(r"`(tests/[\w/]+\.py)`", PAGE)
    assert named
    assert all((ROOT / file).is_file() for file in named)


SIZES = (
    "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
)  # fmt: skip
TIED = {"tie_word_embeddings": True}
PHI = {"pad_token_id": 0}
KNOWN: dict[str, tuple[str, tuple[int, ...], dict[str, Any]]] = {
    "llama3": ("8.03", (128_256, 4096, 14_336, 32, 32, 8), {}),
    "mistral": ("7.25", (32_768, 4096, 14_336, 32, 32, 8), {"sliding_window": None}),
    "qwen2": ("7.62", (152_064, 3584, 18_944, 28, 28, 4), {}),
    "qwen3": ("8.19", (151_936, 4096, 12_288, 36, 32, 8), {"head_dim": 128}),
    "mixtral": ("46.70", (32_000, 4096, 14_336, 32, 32, 8), {"num_local_experts": 8, "num_experts_per_tok": 2}),
    "qwen2-moe": (
        "14.32",
        (151_936, 2048, 5632, 24, 16, 16),
        {
            **{"num_experts": 60, "num_experts_per_tok": 4, "moe_intermediate_size": 1408},
            "shared_expert_intermediate_size": 5632,
        },
    ),
    "qwen3-moe": (
        "30.53",
        (151_936, 2048, 6144, 48, 32, 4),
        {
            **{"num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768, "head_dim": 128},
            **{"decoder_sparse_step": 1, "mlp_only_layers": []},
        },
    ),
    "olmoe": ("6.92", (50_304, 2048, 1024, 16, 16, 16), {"num_experts": 64, "num_experts_per_tok": 8}),
    "gpt-oss": (
        "20.91",
        (201_088, 2880, 2880, 24, 64, 8),
        {"head_dim": 64, "sliding_window": 128, "num_local_experts": 32, "num_experts_per_tok": 4},
    ),
    "gemma2": ("2.61", (256_000, 2304, 9216, 26, 8, 4), {**TIED, "head_dim": 256, "sliding_window": 4096}),
    "gemma3": ("1.00", (262_144, 1152, 6912, 26, 4, 1), {**TIED, "head_dim": 256, "sliding_window": 512}),
    "phi3": ("3.82", (32_064, 3072, 8192, 32, 32, 32), {**PHI, "sliding_window": 2047}),
    "phi4-mini": ("3.84", (200_064, 3072, 8192, 32, 24, 8), {**TIED, **PHI}),
    "olmo2": ("7.30", (100_352, 4096, 11_008, 32, 32, 32), {}),
    "granite": ("2.53", (49_159, 2048, 8192, 40, 32, 8), TIED),
    "smollm3": ("3.08", (128_256, 2048, 11_008, 36, 16, 4), TIED),
    "glm4": ("9.40", (151_552, 4096, 13_696, 40, 32, 2), {"head_dim": 128, "attention_bias": True}),
    "ministral3": ("3.4", (131_072, 3072, 9216, 26, 32, 8), {**TIED, "head_dim": 128}),
    "seed-oss": (
        "36.15",
        (155_136, 5120, 27_648, 64, 80, 8),
        {"head_dim": 128, "attention_bias": True, "attention_out_bias": False},
    ),
    "exaone4": (
        "1.28",
        (102_400, 2048, 4096, 30, 32, 8),
        {**TIED, "head_dim": 64, "sliding_window": None, "layer_types": ["full_attention"] * 30},
    ),
}
"""Family → the billions of parameters that a model of it is published with, and its config."""


@pytest.mark.parametrize("family", KNOWN)
def test_a_known_model_has_the_parameters_that_it_is_published_with(family: str, tmp_path: Path) -> None:
    billions, sizes, fields = KNOWN[family]
    architecture = FAMILIES[family].architecture
    config = {
        "architectures": [architecture],
        "model_type": ARCHITECTURES[architecture].model_type,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 32_768,
        "dtype": "bfloat16",
        "tie_word_embeddings": False,
        **dict(zip(SIZES, sizes, strict=True)),
        **fields,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    found = read_model_info(EngineConfig(model=str(tmp_path), device="cpu"), memory_bytes=2**40)
    assert f"{found.num_parameters / 1e9:.{len(billions.partition('.')[2])}f}" == billions
