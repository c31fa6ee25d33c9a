"""Print MODELS.md: which models run, by which path, and the test that shows each line.

    PYTHONPATH=src:tests python tests/models_table.py > MODELS.md

The lines are those of the lists that the tests go through: `checkpoints.FAMILIES` and `checkpoints.OTHERS`,
`models.test_formats_of_families.KINDS_OF`, `models.test_formats.FORMATS`, and those of GGUF files.
`test_models_table.py` holds the page to them.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from checkpoints import FAMILIES, OTHERS
from equality.conftest import LOGPROB_TOLERANCE
from models.test_decoder import TOLERANCES
from models.test_formats import FORMATS
from models.test_formats_of_families import KINDS_OF
from models.test_gguf import FAMILIES as GGUF_FAMILIES

from aioengine.config import EngineConfig
from aioengine.executor.model_info import ModelInfo, read_model_info
from aioengine.models.formats.gguf_file import BLOCKS

DECODER, KNOBS, GGUF = "tests/models/test_decoder.py", "tests/equality/test_knobs.py", "tests/models/test_gguf.py"
TRANSFORMERS, FORMAT = "tests/models/test_transformers_model.py", "tests/models/test_formats.py"
TESTS = {
    "native": f"{DECODER}::test_logprobs_equal_those_of_transformers",
    "half": f"{DECODER}::test_half_precision_is_no_worse_than_in_transformers",
    "tokens": f"{KNOBS}::test_greedy_tokens_are_those_of_transformers",
    "logprobs": f"{KNOBS}::test_logprobs_and_ranks_are_those_of_the_models_logits_before_any_rule",
    "late": "tests/equality/test_late.py::test_a_storm_on_a_late_device_brings_the_tokens_of_transformers",
    "others_half": f"{TRANSFORMERS}::test_bfloat16_is_as_near_as_transformers_own",
    "kinds": "tests/models/test_formats_of_families.py::test_tokens_and_logprobs_are_those_of_the_dense_equal",
    "gguf": f"{GGUF}::test_an_engine_gives_the_tokens_of_transformers_with_the_dequantised_weights",
    "codes": f"{FORMAT}::test_weights_are_what_the_codes_stand_for",
    "gguf_types": f"{GGUF}::test_tensors_have_the_names_and_the_very_values_of_the_checkpoint",
    "known": "tests/test_models_table.py::test_a_known_model_has_the_parameters_that_it_is_published_with",
}

TIED = {"tie_word_embeddings": True}
PHI = {"model_type": "phi3", "pad_token_id": 0}


def _shape(
    vocab_size: int, hidden: int, intermediate: int, layers: int, heads: int, kv_heads: int, head_dim: int | None = None
) -> dict[str, Any]:
    sizes = {
        "vocab_size": vocab_size,
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
    }
    return sizes if head_dim is None else {**sizes, "head_dim": head_dim}


KNOWN: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama3": ("Llama 3.1 8B", "8.03", {**_shape(128_256, 4096, 14_336, 32, 32, 8), "model_type": "llama"}),
    "mistral": (
        "Mistral 7B v0.3",
        "7.25",
        {**_shape(32_768, 4096, 14_336, 32, 32, 8), "model_type": "mistral", "sliding_window": None},
    ),
    "qwen2": ("Qwen2.5 7B", "7.62", {**_shape(152_064, 3584, 18_944, 28, 28, 4), "model_type": "qwen2"}),
    "qwen3": ("Qwen3 8B", "8.19", {**_shape(151_936, 4096, 12_288, 36, 32, 8, 128), "model_type": "qwen3"}),
    "mixtral": (
        "Mixtral 8x7B",
        "46.70",
        {
            **{**_shape(32_000, 4096, 14_336, 32, 32, 8), "model_type": "mixtral", "sliding_window": None},
            **{"num_local_experts": 8, "num_experts_per_tok": 2},
        },
    ),
    "qwen2-moe": (
        "Qwen1.5 MoE A2.7B",
        "14.32",
        {
            **{**_shape(151_936, 2048, 5632, 24, 16, 16), "model_type": "qwen2_moe", "num_experts": 60},
            **{"num_experts_per_tok": 4, "moe_intermediate_size": 1408, "shared_expert_intermediate_size": 5632},
        },
    ),
    "qwen3-moe": (
        "Qwen3 30B A3B",
        "30.53",
        {
            **{**_shape(151_936, 2048, 6144, 48, 32, 4, 128), "model_type": "qwen3_moe"},
            **{"num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768, "norm_topk_prob": True},
            **{"decoder_sparse_step": 1, "mlp_only_layers": []},
        },
    ),
    "olmoe": (
        "OLMoE 1B 7B",
        "6.92",
        {
            **{**_shape(50_304, 2048, 1024, 16, 16, 16), "model_type": "olmoe"},
            **{"num_experts": 64, "num_experts_per_tok": 8},
        },
    ),
    "gpt-oss": (
        "gpt-oss 20B",
        "20.91",
        {
            **{**_shape(201_088, 2880, 2880, 24, 64, 8, 64), "model_type": "gpt_oss", "sliding_window": 128},
            **{"num_local_experts": 32, "num_experts_per_tok": 4},
        },
    ),
    "gemma2": (
        "Gemma 2 2B",
        "2.61",
        {**_shape(256_000, 2304, 9216, 26, 8, 4, 256), **TIED, "model_type": "gemma2", "sliding_window": 4096},
    ),
    "gemma3": (
        "Gemma 3 1B",
        "1.00",
        {**_shape(262_144, 1152, 6912, 26, 4, 1, 256), **TIED, "model_type": "gemma3_text", "sliding_window": 512},
    ),
    "phi3": (
        "Phi-3 mini 4K",
        "3.82",
        {
            **{**_shape(32_064, 3072, 8192, 32, 32, 32), **PHI, "sliding_window": 2047},
            **{"max_position_embeddings": 4096, "original_max_position_embeddings": 4096},
        },
    ),
    "phi4-mini": (
        "Phi-4-mini",
        "3.84",
        {**_shape(200_064, 3072, 8192, 32, 24, 8), **TIED, **PHI, "sliding_window": 262_144},
    ),
    "olmo2": ("OLMo 2 7B", "7.30", {**_shape(100_352, 4096, 11_008, 32, 32, 32), "model_type": "olmo2"}),
    "granite": ("Granite 3.3 2B", "2.53", {**_shape(49_159, 2048, 8192, 40, 32, 8), **TIED, "model_type": "granite"}),
    "smollm3": ("SmolLM3 3B", "3.08", {**_shape(128_256, 2048, 11_008, 36, 16, 4), **TIED, "model_type": "smollm3"}),
    "glm4": (
        "GLM-4 9B 0414",
        "9.40",
        {**_shape(151_552, 4096, 13_696, 40, 32, 2, 128), "model_type": "glm4", "attention_bias": True},
    ),
    "ministral3": (
        "Ministral 3 3B",
        "3.4",
        {**_shape(131_072, 3072, 9216, 26, 32, 8, 128), **TIED, "model_type": "ministral3"},
    ),
    "seed-oss": (
        "Seed-OSS 36B",
        "36.15",
        {
            **{**_shape(155_136, 5120, 27_648, 64, 80, 8, 128), "model_type": "seed_oss"},
            **{"attention_bias": True, "attention_out_bias": False},
        },
    ),
    "exaone4": (
        "EXAONE 4 1.2B",
        "1.28",
        {
            **{**_shape(102_400, 2048, 4096, 30, 32, 8, 64), **TIED, "model_type": "exaone4"},
            **{"sliding_window": None, "layer_types": ["full_attention"] * 30},
        },
    ),
}
"""Family → a model that many have, its billions of parameters as it is published with, and its config's sizes."""

LACKING = f"{TRANSFORMERS}::test_what_the_decoder_lacks_of_a_native_family_goes_by_transformers"
REFUSED_FAMILIES = "tests/models/test_families.py::test_what_does_not_fit_is_refused_with_the_reason"
REFUSED_OTHERS = f"{TRANSFORMERS}::test_what_cannot_run_is_refused_with_the_reason"
REFUSED_FORMATS = f"{FORMAT}::test_a_config_that_is_not_supported_is_named"
REFUSED_GGUF = f"{GGUF}::test_what_is_missing_or_not_supported_is_named"
LEFT_OUT = {
    "encoder-decoder models (T5, BART, Whisper)": (
        "a request has one sequence of keys and values, and no encoder; refused at load",
        REFUSED_OTHERS,
    ),
    "states that are not keys and values (Mamba, RWKV, linear attention, short convolutions)": (
        "what is cached, shared and freed is blocks of keys and values; refused at load",
        REFUSED_OTHERS,
    ),
    "models some of whose layers have no attention (RecurrentGemma)": (
        "each layer has a cache of keys and values; refused at load",
        REFUSED_OTHERS,
    ),
    "layers whose heads differ in number or size (Gemma 4)": (
        "blocks of one size hold any layer's keys and values; refused at load",
        REFUSED_OTHERS,
    ),
    "`dynamic` rotations": (
        "they change with a sequence's length, and with them what is cached; refused at load",
        REFUSED_OTHERS,
    ),
    "longrope that changes with the sequence": (
        "what is cached stays right with one list of factors; `max_model_len` chooses it for all sequences",
        "tests/models/test_families.py::test_long_factors_are_taken_where_a_sequence_may_be_longer_than_the_first_length",
    ),
    "Ministral 3 beyond 16,384 tokens, natively": (
        "queries grow with their position there, one more factor in each kernel that rotates; "
        '`max_model_len` ends there, and `model_path="transformers"` goes on',
        "tests/models/test_families.py::test_queries_that_grow_with_their_position_bound_the_length",
    ),
    "OLMoE with `clip_qkv`, natively": (
        "the product of queries, keys and values has no clamp; runs by transformers' code",
        LACKING,
    ),
    "bidirectional attention (Gemma as an encoder)": ("it generates no text; refused at load", REFUSED_FAMILIES),
    "gated units of the exact GELU, natively": (
        "kernels have those of SiLU and of the GELU by tanh; runs by transformers' code",
        LACKING,
    ),
    "images, sound and video of multimodal models": (
        "their text part runs; inputs other than text are refused",
        "tests/text/test_chat.py::test_malformed_messages_are_the_callers_fault",
    ),
    "GPTQ with act-order (`desc_act`) at its width": (
        "inputs are in another order than their groups: it runs dequantised, which is said at load",
        TESTS["codes"],
    ),
    "bits or groups by module (GPTQ's `dynamic`)": ("one coding a format is read; refused at load", REFUSED_FORMATS),
    "2:4 sparsity and transforms of compressed-tensors": (
        "a further layout, and products around matrices; refused at load",
        REFUSED_FORMATS,
    ),
    "GPTQ and AWQ of GPT-2": (
        "its matrices are [in, out], and those files have them the other way around; refused at load",
        "tests/models/test_formats_of_families.py::test_coded_matrices_of_gpt2_are_refused",
    ),
    "GGUF files of architectures without a native path": (
        "their names are translated for native families alone; refused at load",
        REFUSED_GGUF,
    ),
    "types of GGUF that the table of formats lacks, such as Q2_K and Q3_K": (
        "their codes are in other layouts; refused at load",
        REFUSED_GGUF,
    ),
}
"""What could not be made to fit, why, and the test of what becomes of it."""


INTRODUCTION = """# Models

Made by `PYTHONPATH=src:tests python tests/models_table.py > MODELS.md` from the lists that the tests go through;
`tests/test_models_table.py` holds this page to it. `aioengine info MODEL` says of a model of yours by which path it
runs, what it takes and how much fits. `-k NAME` runs a line's tests, and `-m nightly` those of them that
`make check` leaves to `make nightly`.

Each line is a model with random weights against transformers with the same ones:

- Greedy tokens in float32 are equal: alone, batched, in odd chunks, with prefix hits, preempted, beside aborts and all
  at once, at depth 1 and 2. A few of these are in `make check`, all with `-m nightly`:
  `{tokens}`
- Log-probabilities of these tokens are within {tolerance:g}:
  `{logprobs}`
- Of .bin, GPTQ, AWQ, FP8 and NF4 (*formats*, beside safetensors), against what their codes stand for: equal greedy
  tokens, log-probabilities within 0.001:
  `{kinds}`

## Native

- Log-probabilities in float32 are within 0.0001, token by token:
  `{native}`
- In half precision they are within {half_tolerances} of
  float32's; with experts, where rounding may choose others, those of the median token:
  `{half}`
- Greedy tokens are equal by the GPU's executor, over a fake device that is late:
  `{late}`
- Of GGUF files greedy tokens are equal to transformers' with the dequantised weights:
  `{gguf}`
- *Memory* is what `aioengine info` says of a known model: weights in bfloat16, and the KV cache's bytes a token, or a
  token of the last ones that layers with a window see. Parameters are those that it was published with:
  `{known}`
"""
BY_TRANSFORMERS = """
## By transformers' own code

Shown by the three tests above; formats are dequantised at load. Any other decoder-only architecture that transformers
has runs so, too, if a run without values at load says that it can; else it is refused with the reason. In bfloat16
log-probabilities are at most 1.5 times as far from float32's as transformers' own:
`{others_half}`
"""
OF_FORMATS = """
## Formats

Dense float32, bfloat16 and float16 in safetensors files, one or several, and in `pytorch_model.bin`, of all models.
Native families keep quantised ones at their width, but for those whose inputs or blocks are in another order.
"""


def lines() -> Iterator[str]:
    tolerances = " and ".join(
        f"{largest} ({mean} on average) in {name}" for name, (largest, mean) in TOLERANCES.items()
    )
    yield INTRODUCTION.format(tolerance=LOGPROB_TOLERANCE, half_tolerances=tolerances, **TESTS)
    yield from _table(
        ("name in the tests", "architecture", "formats", "memory", "since"),
        (
            (f"`{name}`", family.architecture, _formats(name), _memory(name), family.since)
            for name, family in FAMILIES.items()
        ),
    )
    yield BY_TRANSFORMERS.format(**TESTS)
    yield from _table(
        ("name in the tests", "architecture", "formats", "since"),
        ((f"`{name}`", family.architecture, _formats(name), family.since) for name, family in OTHERS.items()),
    )
    yield OF_FORMATS
    yield from _table(
        ("format", "shown by"),
        [
            *((name, f"`{TESTS['codes']}[{name}]`") for name in FORMATS),
            *((f"GGUF {kind}", f"`{TESTS['gguf_types']}[{kind}]`") for kind in BLOCKS),
        ],
    )
    yield "\n## What could not be made to fit\n"
    yield from _table(("what", "why", "shown by"), ((what, why, f"`{test}`") for what, (why, test) in LEFT_OUT.items()))


def _formats(name: str) -> str:
    kinds = ["safetensors", *KINDS_OF[name]]
    return ", ".join(kinds + ["GGUF"] * (name in GGUF_FAMILIES))


def _memory(name: str) -> str:
    """Of the known model of this family."""
    if name not in KNOWN:
        return ""
    title, _, config = KNOWN[name]
    found = info_of(FAMILIES[name].architecture, config)
    kv = " and ".join(
        f"{group.bytes_per_token:,} bytes " + (f"of the last {group.window:,}" if group.window else "a token")
        for group in sorted(found.kv_groups, key=lambda group: group.window or 0)
    )
    return f"{title}: {found.weight_bytes / 1e9:.1f} GB, {kv}"


def info_of(architecture: str, config: dict[str, Any]) -> ModelInfo:
    """What `aioengine info` says of a config.json of these sizes, in bfloat16."""
    stated = {"hidden_act": "silu", "rms_norm_eps": 1e-6, "max_position_embeddings": 32_768, "dtype": "bfloat16"}
    stated |= {"architectures": [architecture], "tie_word_embeddings": False, **config}
    with TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(stated))
        return read_model_info(EngineConfig(model=folder, device="cpu"), memory_bytes=2**40)


def _table(headings: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> Iterator[str]:
    yield f"| {' | '.join(headings)} |"
    yield "|" + "---|" * len(headings)
    for row in rows:
        yield f"| {' | '.join(row)} |"


if __name__ == "__main__":
    print("\n".join(lines()))
