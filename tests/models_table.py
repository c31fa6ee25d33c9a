"""Print MODELS.md: which models run, by which path, and the test that shows each line.

    PYTHONPATH=src:tests python tests/models_table.py > MODELS.md

The lines are those of the lists that the tests go through: `checkpoints.FAMILIES` and `checkpoints.OTHERS`,
`models.test_formats.FORMATS`, and the GGUF types. `test_models_table.py` holds the page to them.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from checkpoints import FAMILIES, OTHERS, Family
from equality.conftest import LOGPROB_TOLERANCE
from models.test_decoder import TOLERANCES
from models.test_formats import FORMATS
from models.test_gguf import FAMILIES as GGUF_FAMILIES

from aioengine.models.checkpoint import checkpoint_tensors
from aioengine.models.families import read_decoder_config
from aioengine.models.folder import ModelFolder
from aioengine.models.formats.gguf_file import BLOCKS

NATIVE_TEST = "tests/models/test_decoder.py::test_logprobs_equal_those_of_transformers"
OTHERS_TEST = "tests/models/test_transformers_model.py"
FORMATS_TEST = "tests/models/test_formats.py::test_weights_are_what_the_codes_stand_for"
GGUF_TEST = "tests/models/test_gguf.py::test_tensors_have_the_names_and_the_very_values_of_the_checkpoint"

KNOWN: dict[str, tuple[str, float, dict[str, Any]]] = {
    "LlamaForCausalLM": (
        "Llama 3.1 8B",
        8.03,
        {
            **{"model_type": "llama", "vocab_size": 128_256, "hidden_size": 4096, "intermediate_size": 14_336},
            **{"num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8},
        },
    ),
    "MistralForCausalLM": (
        "Mistral 7B v0.3",
        7.25,
        {
            **{"model_type": "mistral", "vocab_size": 32_768, "hidden_size": 4096, "intermediate_size": 14_336},
            **{"num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "sliding_window": None},
        },
    ),
    "Qwen2ForCausalLM": (
        "Qwen2.5 7B",
        7.62,
        {
            **{"model_type": "qwen2", "vocab_size": 152_064, "hidden_size": 3584, "intermediate_size": 18_944},
            **{"num_hidden_layers": 28, "num_attention_heads": 28, "num_key_value_heads": 4},
        },
    ),
    "Qwen3ForCausalLM": (
        "Qwen3 8B",
        8.19,
        {
            **{"model_type": "qwen3", "vocab_size": 151_936, "hidden_size": 4096, "intermediate_size": 12_288},
            **{"num_hidden_layers": 36, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128},
        },
    ),
    "MixtralForCausalLM": (
        "Mixtral 8x7B",
        46.70,
        {
            **{"model_type": "mixtral", "vocab_size": 32_000, "hidden_size": 4096, "intermediate_size": 14_336},
            **{"num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "sliding_window": None},
            **{"num_local_experts": 8, "num_experts_per_tok": 2},
        },
    ),
    "Qwen3MoeForCausalLM": (
        "Qwen3 30B A3B",
        30.53,
        {
            **{"model_type": "qwen3_moe", "vocab_size": 151_936, "hidden_size": 2048, "intermediate_size": 6144},
            **{"num_hidden_layers": 48, "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128},
            **{"num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768, "norm_topk_prob": True},
            **{"decoder_sparse_step": 1, "mlp_only_layers": []},
        },
    ),
}
"""Architecture → a model that many have, its billions of parameters as it is published with, and its config's sizes."""

LEFT_OUT = {
    "encoder-decoder models (T5, BART, Whisper)": "a request has one sequence of keys and values, and no encoder; "
    "refused at load (`tests/cli/test_info.py::test_a_model_that_cannot_run_ends_with_its_reason`)",
    "images, sound and video of multimodal models": "their text part runs; inputs other than text are refused",
    "GGUF files of architectures without a native path": "their names are translated for native families alone",
    "types of GGUF that the table of formats lacks, such as Q2_K and Q3_K": "their codes are in other layouts",
    "GPTQ with act-order (`desc_act`)": "inputs in another order than their groups: dequantised at load, which is said",
    "bits or groups by module (GPTQ's `dynamic`)": "one coding a format is read; refused with the reason",
}
"""What could not be made to fit, and why."""


INTRODUCTION = """# Models

Made by `PYTHONPATH=src:tests python tests/models_table.py > MODELS.md` from the lists that the tests go through;
`tests/test_models_table.py` holds this page to it. `aioengine info MODEL` says of a model of yours by which path it
runs, what it takes and how much fits.

Each line is a model with random weights against transformers with the same ones: the same greedy tokens, and
log-probabilities within {tolerance:g}, in float32. In half precision those of native families stay within
{half} of float32's.
`tests/equality/test_knobs.py::test_greedy_tokens_are_those_of_transformers` has native families alone, batched, in odd
chunks, with prefix hits, preempted, beside aborts and all at once, at depth 1 and 2; all of them with `make nightly`.

## Native

Shown by `{native}`, run by `-k NAME`.
*Memory* is of a known model, weights in bfloat16 and KV a token; of any other `aioengine info` says it.
"""
BY_TRANSFORMERS = """
## By transformers' own code

Shown by `{others}`, run by `-k NAME`. Any other decoder-only architecture that
transformers has runs so, too, if a run without values at load says that it can; else it is refused with the reason.
"""
OF_FORMATS = """
## Formats

Dense float32, bfloat16 and float16 in safetensors files, one or several, and in `pytorch_model.bin`, of all models.
Native families keep quantised ones at their width, but for those whose inputs or blocks are in another order.
"""


def lines() -> Iterator[str]:
    half = ", ".join(f"{largest} ({mean} on average) in {name}" for name, (largest, mean) in TOLERANCES.items())
    yield INTRODUCTION.format(tolerance=LOGPROB_TOLERANCE, half=half, native=NATIVE_TEST)
    yield from _table(
        ("name in the tests", "architecture", "formats", "memory", "since"),
        (
            (f"`{name}`", family.architecture, _formats(name), _memory(family), family.since)
            for name, family in FAMILIES.items()
        ),
    )
    yield BY_TRANSFORMERS.format(others=OTHERS_TEST)
    yield from _table(
        ("name in the tests", "architecture", "formats", "since"),
        (
            (f"`{name}`", family.architecture, "safetensors, .bin, quantised ones dequantised", family.since)
            for name, family in OTHERS.items()
        ),
    )
    yield OF_FORMATS
    yield from _table(
        ("format", "shown by"),
        [
            *((name, f"`{FORMATS_TEST}[{name}]`") for name in FORMATS),
            *((f"GGUF {kind}", f"`{GGUF_TEST}[{kind}]`") for kind in BLOCKS),
        ],
    )
    yield "\n## What could not be made to fit\n"
    yield from _table(("what", "why"), LEFT_OUT.items())


def _formats(name: str) -> str:
    return "safetensors, .bin, quantised" + (", GGUF" if name in GGUF_FAMILIES else "")


def _memory(family: Family) -> str:
    """Of the known model of this architecture, once."""
    name, _, config = KNOWN.get(family.architecture, ("", 0.0, {}))
    if not name or next(each for each in FAMILIES.values() if each.architecture == family.architecture) is not family:
        return ""
    parameters, kv_bytes = sizes(family.architecture, config)
    return f"{name}: {2 * parameters / 1e9:.1f} GB, {kv_bytes:,} bytes a token"


def sizes(architecture: str, config: dict[str, Any]) -> tuple[int, int]:
    """Parameters, and bytes of KV a token in bfloat16."""
    stated = {"hidden_act": "silu", "rms_norm_eps": 1e-6, "max_position_embeddings": 32_768, "dtype": "bfloat16"}
    stated |= {"architectures": [architecture], "tie_word_embeddings": False, **config}
    model = read_decoder_config(ModelFolder(path=Path(), config=stated, generation_config={}))
    parameters = sum(math.prod(tensor.shape) for tensor in checkpoint_tensors(model).values())
    return parameters, 2 * 2 * model.num_layers * model.num_kv_heads * model.head_dim


def _table(headings: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> Iterator[str]:
    yield f"| {' | '.join(headings)} |"
    yield "|" + "---|" * len(headings)
    for row in rows:
        yield f"| {' | '.join(row)} |"


if __name__ == "__main__":
    print("\n".join(lines()))
