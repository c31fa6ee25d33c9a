"""What config.json is understood to say, and what is refused by name."""

import json
import math
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import ANY

import pytest
import torch
from models.reference import edit_json
from nightly import few, nightly
from transformers import AutoConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from aioengine.errors import ConfigError, ModelLoadError
from aioengine.models import decoder_config
from aioengine.models.decoder_config import (
    UNREAD_FIELDS,
    ConfigFields,
    DecoderConfig,
    Rope,
    known_fields,
    read_decoder_config,
)
from aioengine.models.families import ARCHITECTURES, Family
from aioengine.models.folder import ModelFolder
from aioengine.scheduler.cache_layout import attention_specs
from tests.checkpoints import HALF_ROPE, LLAMA3_ROPE, LONG_ROPE, PLAIN_ROPE, READ_HERE, ROPES_BY_TYPE, YARN_ROPE

Checkpoint = Callable[..., Path]
KNOWN = {name: family for name, family in ARCHITECTURES.items() if family.is_read_here}
ConfigWith = Callable[..., ModelFolder]
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "factor": 2.0,
    "short_factor": [1.0] * 8,
    "long_factor": [2.0] * 8,
}


@pytest.fixture
def config_with(checkpoint: Checkpoint, tmp_path: Path) -> ConfigWith:
    """A folder with the config.json of a family, with fields replaced; ``...`` takes one away."""

    def make(family: str, **fields: Any) -> ModelFolder:
        shutil.copy(checkpoint(family) / "config.json", tmp_path)
        edit_json(tmp_path / "config.json", **fields)
        return ModelFolder.read(tmp_path)

    return make


def test_all_fields_of_a_plain_config(config_with: ConfigWith) -> None:
    config = read_decoder_config(config_with("qwen3", rms_norm_eps=1e-5))
    inv_freq = config.ropes[0].inv_freq
    assert config == DecoderConfig(
        architecture="Qwen3ForCausalLM",
        vocab_size=384,
        hidden_size=64,
        intermediate_size=128,
        num_layers=3,
        num_heads=4,
        num_kv_heads=2,
        head_dim=32,
        max_model_len=256,
        dtype=torch.float32,
        rms_norm_eps=1e-5,
        qkv_bias=False,
        output_bias=False,
        mlp_bias=False,
        qk_norm="heads",
        tie_word_embeddings=True,
        caches=attention_specs((None, None, None), 2, 32),
        ropes=(Rope(inv_freq),) * 3,
        attention_scale=32**-0.5,
    )
    assert inv_freq == pytest.approx([10000.0 ** (-2 * i / 32) for i in range(16)], rel=1e-6)


FEW_FIELDS = {
    "vocab_size": 384,
    "hidden_size": 1024,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 32,
    "max_position_embeddings": 256,
}
OLD_SPELLING = {"rope_theta": 5e5, "torch_dtype": "bfloat16", "rope_parameters": ..., "dtype": ...}
FULL_YARN_ROPE = {
    **YARN_ROPE, "beta_fast": 16, "beta_slow": 2.5, "truncate": False, "mscale": 0.707, "mscale_all_dim": 0.5
}  # fmt: skip
HOSTILE_VALUES = (None, 0, 1, -1, 3, 0.0, 1.5, 10**30, True, False, "", "nn", "half", "silu", [], ["x"], {}, {"x": {}})
CHANGES: dict[str, dict[str, Any]] = {
    "as transformers 5 saves it": {},
    "as transformers 4 saved it": {**OLD_SPELLING, "rope_scaling": None},
    "an old linear rope": {**OLD_SPELLING, "rope_scaling": {"type": "linear", "factor": 4.0}},
    "an old llama3 rope": {**OLD_SPELLING, "rope_scaling": {**LLAMA3_ROPE, "rope_theta": ...}},
    "a yarn rope that says no length": {"rope_parameters": {**YARN_ROPE, "original_max_position_embeddings": ...}},
    "a yarn rope that says all": {"rope_parameters": FULL_YARN_ROPE},
    "a yarn rope with a factor of attention": {"rope_parameters": {**FULL_YARN_ROPE, "attention_factor": 1.2}},
    "a yarn rope whose factor follows": {"rope_parameters": {**YARN_ROPE, "factor": None}},
    "both spellings": {"torch_dtype": "bfloat16", "rope_scaling": LLAMA3_ROPE, "rope_theta": 7.0},
    "no dtype": {"dtype": ...},
    "a window": {"sliding_window": 8, "use_sliding_window": True, "max_window_layers": 2},
    "a window of the default": {"sliding_window": ..., "use_sliding_window": True, "max_window_layers": 0},
    "no window": {"sliding_window": None},
    "no heads": {"head_dim": ..., "num_key_value_heads": ..., "num_attention_heads": 32, "hidden_size": 256},
    "biases": {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True, "hidden_act": "swish"},
}
"""What is changed in a config.json that `ConfigFields` are read from without transformers."""


def without_absent(content: dict[str, Any]) -> dict[str, Any]:
    """The object without the fields, also inner ones, that are ``...``."""
    return {
        name: without_absent(value) if isinstance(value, dict) else value
        for name, value in content.items()
        if value is not ...
    }


def read_both_ways(path: Path, content: dict[str, Any]) -> list[DecoderConfig | type[ModelLoadError]]:
    """What is read of a config.json here, and what by way of transformers."""
    (path / "config.json").write_text(json.dumps(content))
    results: list[DecoderConfig | type[ModelLoadError]] = []
    for read in (known_fields, lambda *_: None):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(decoder_config, "known_fields", read)
            try:
                results.append(read_decoder_config(ModelFolder.read(path)))
            except ModelLoadError:
                results.append(ModelLoadError)
    return results


def rope_of_transformers(path: Path) -> tuple[tuple[float, ...], float]:
    config = AutoConfig.from_pretrained(path)
    inv_freq, scale = ROPE_INIT_FUNCTIONS[config.rope_parameters["rope_type"]](config)
    return tuple(inv_freq.tolist()), scale


@pytest.mark.parametrize(
    "change",
    [
        pytest.param(change, marks=() if place % 3 == 0 else pytest.mark.nightly, id=name)
        for place, (name, change) in enumerate(CHANGES.items())
    ],
)
def test_transformers_reads_the_same(checkpoint: Checkpoint, tmp_path: Path, change: dict[str, Any]) -> None:
    for family in READ_HERE:
        saved = json.loads((checkpoint(family) / "config.json").read_text())
        content = without_absent({**saved, **change})
        architecture = ARCHITECTURES[saved["architectures"][0]]
        fields = known_fields(content, architecture)
        # Of layers with a window each family has a rule of its own, which is transformers' to apply.
        has_rule = architecture.windows == "layer_types" and bool(change.get("use_sliding_window"))
        assert (fields is None) == (has_rule and content.get("layer_types") is None), family
        here, by_transformers = read_both_ways(tmp_path, content)
        assert isinstance(here, DecoderConfig), family
        assert here == by_transformers, family
        if fields is not None and fields.rope_parameters["rope_type"] != "default":
            assert (here.ropes[0].inv_freq, here.ropes[0].scale) == rope_of_transformers(tmp_path), family


HAVE_WINDOWS = {name: family for name, family in ARCHITECTURES.items() if family.windows != "none"}


@pytest.mark.parametrize(("architecture", "family"), HAVE_WINDOWS.items(), ids=HAVE_WINDOWS)
def test_layers_have_the_windows_that_transformers_gives_them(
    tmp_path: Path, architecture: str, family: Family
) -> None:
    for seed in range(12):
        rng, num_layers = random.Random(seed), 5
        fields: dict[str, Any] = {
            "num_hidden_layers": num_layers,
            "use_sliding_window": rng.choice([True, True, False, ...]),
            "sliding_window": rng.choice([8, 8, ..., None, 2**31 - 1]),
            "max_window_layers": rng.choice([0, 1, 2, 4, 5, ...]),
        }
        if family.windows == "layer_types":
            types = [rng.choice(decoder_config.LAYER_TYPES) for _ in range(num_layers)]
            fields["layer_types"] = rng.choice([types, None, ...])
            fields["sliding_window_pattern"] = rng.choice([2, 3, ...])
        content = without_absent(
            {"architectures": [architecture], "model_type": family.model_type, **FEW_FIELDS, **fields}
        )
        (tmp_path / "config.json").write_text(json.dumps(content))
        try:
            theirs = AutoConfig.from_pretrained(tmp_path)
        except ZeroDivisionError:  # EXAONE 4's, of no window and no layer types
            with pytest.raises(ModelLoadError):
                read_decoder_config(ModelFolder.read(tmp_path))
            continue
        config = read_decoder_config(ModelFolder.read(tmp_path))
        window = theirs.sliding_window if (theirs.sliding_window or 0) in range(1, config.max_model_len) else None
        types = ["sliding_attention"] * num_layers if family.windows != "layer_types" else theirs.layer_types
        expected = tuple(window if each == "sliding_attention" else None for each in types)
        if "use_sliding_window" in family.reads and not theirs.use_sliding_window:
            expected = (None,) * num_layers
        assert config.windows == expected, (seed, fields)


def test_gemma_3_has_no_soft_cap_of_scores_as_in_transformers(tmp_path: Path) -> None:
    for architecture, soft_cap in (("Gemma2ForCausalLM", 5.0), ("Gemma3ForCausalLM", None)):
        content = {"architectures": [architecture], "model_type": ARCHITECTURES[architecture].model_type, **FEW_FIELDS}
        (tmp_path / "config.json").write_text(json.dumps({**content, "attn_logit_softcapping": 5.0}))
        assert read_decoder_config(ModelFolder.read(tmp_path)).soft_cap == soft_cap


@pytest.mark.parametrize(("architecture", "family"), KNOWN.items(), ids=KNOWN)
def test_few_fields_are_read_the_same_and_the_rest_is_left_to_transformers(
    tmp_path: Path, architecture: str, family: Family
) -> None:
    content = {"architectures": [architecture], "model_type": family.model_type, **FEW_FIELDS}
    assert known_fields(content, family) is not None
    for left in (*({field: 0.5} for field in UNREAD_FIELDS), {"hidden_size": 33 * 32 + 1}, {"model_type": "gpt2"}):
        assert known_fields({**content, **left}, family) is None, left
    here, by_transformers = read_both_ways(tmp_path, content)
    assert isinstance(here, DecoderConfig)
    assert here == by_transformers
    # Null in a field of other families is not looked at.
    others = {"attention_bias", "mlp_bias", "use_sliding_window", "max_window_layers"}
    others -= {family.qkv_bias, family.output_bias, family.mlp_bias}
    reads_windows = family.windows in ("layer_types", "all layers if used")
    others -= {"use_sliding_window", "max_window_layers"} if reads_windows else set()
    assert read_both_ways(tmp_path, {**content, **dict.fromkeys(others)})[0] == here


@pytest.mark.filterwarnings("ignore")  # of transformers, about such values
@pytest.mark.parametrize("architecture", few(["Qwen2ForCausalLM"], of=KNOWN))
def test_what_transformers_refuses_is_refused(tmp_path: Path, architecture: str) -> None:
    content = {"architectures": [architecture], "model_type": ARCHITECTURES[architecture].model_type, **FEW_FIELDS}
    for field in sorted({*ConfigFields.__struct_fields__, *OLD_SPELLING, "rope_scaling", *UNREAD_FIELDS}):
        for value in (..., *HOSTILE_VALUES):
            here, by_transformers = read_both_ways(tmp_path, without_absent({**content, field: value}))
            assert here == by_transformers, (field, value)


@pytest.mark.parametrize("rope", [*nightly(LLAMA3_ROPE), FULL_YARN_ROPE], ids=["llama3", "yarn"])
def test_a_rope_that_transformers_cannot_use_is_refused(tmp_path: Path, rope: dict[str, Any]) -> None:
    content = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", **FEW_FIELDS}
    # An object in it is taken for a rope of some layers, and a factor of 10**30 for a length beyond any model's.
    values = [value for value in HOSTILE_VALUES if not isinstance(value, dict) and value != 10**30]
    for field in list(rope)[1:]:
        for value in (..., *values):
            changed = without_absent({**content, "rope_parameters": {**rope, field: value}})
            here, by_transformers = read_both_ways(tmp_path, changed)
            assert here == by_transformers, (field, value)
            try:
                expected = rope_of_transformers(tmp_path)
            except Exception:  # errors of every kind
                assert here is ModelLoadError, (field, value)
                continue
            is_usable = all(0 < number < math.inf for number in (*expected[0], expected[1]))
            assert is_usable == isinstance(here, DecoderConfig), (field, value)
            if isinstance(here, DecoderConfig):
                assert (here.ropes[0].inv_freq, here.ropes[0].scale) == expected, (field, value)


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"architectures": ["GPT2LMHeadModel"]}, "GPT2LMHeadModel is not supported"),
    ({"architectures": []}, "architectures=[]"),
    ({"architectures": ...}, "architectures=None"),
    ({"hidden_act": "gelu"}, "activation 'gelu'"),
    ({"architectures": ["LlavaForConditionalGeneration"]}, "LlavaForConditionalGeneration is not supported"),
    (
        {"architectures": ["LlavaForConditionalGeneration"], "text_config": {"model_type": "gpt2"}},
        "text_config gpt2 is not supported",
    ),
    ({"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}}, "rope type 'dynamic'"),
    ({"rope_parameters": {**LONGROPE, "short_factor": [2.0] * 7}}, "rope_parameters"),
    ({"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4}}, "lack 'factor'"),
    ({"rope_scaling": "linear"}, "rope_scaling='linear'; an object is needed"),
    ({"dtype": ..., "torch_dtype": "float8"}, "torch_dtype='float8' is no dtype; supported: float32"),
    ({"sliding_window_pattern": "LLLG"}, "sliding_window_pattern='LLLG' is not read: give layer_types"),
    ({"rope_parameters": {"full_attention": LLAMA3_ROPE}}, "rope_parameters by layer type"),
    ({"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}}, "partial_rotary_factor=0.5"),
    ({"num_key_value_heads": 3}, "num_key_value_heads=3"),
    ({"head_dim": 3}, "head_dim=3"),
    ({"model_type": "no such type"}, "no such type"),
    ({"hidden_size": "many"}, "hidden_size"),
    *(({"num_hidden_layers": value}, "num_hidden_layers=") for value in (0, -1, 2**62, 10**30, 1.5, True)),
    ({"vocab_size": 10**30}, "vocab_size="),
    ({"num_attention_heads": 0}, "num_attention_heads=0"),
    ({"head_dim": 10**9}, "head_dim=1000000000"),
    ({"num_labels": 10**9}, "num_labels=1000000000"),
    ({"max_position_embeddings": 10**30}, "max_position_embeddings="),
    ({"rms_norm_eps": float("nan")}, "rms_norm_eps=nan"),
    ({"rope_parameters": {"rope_type": "default", "rope_theta": float("inf")}}, "rope_parameters"),
    ({"rope_parameters": {"rope_type": "default", "rope_theta": 0}}, "between 0 and infinity; rope_theta=0"),
    ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 10**30}}, "rope_parameters"),
    ({"sliding_window": 0}, "sliding_window=0"),
    ({"sliding_window": -1}, "sliding_window=-1"),
    ({"sliding_window": 1e30}, "sliding_window"),
    ({"dtype": "float64"}, "float64"),
    ({"architectures": ["PhiForCausalLM"]}, ", ".join(ARCHITECTURES)),
]
REFUSED_OF_FAMILIES: list[tuple[str, dict[str, Any], str]] = [
    (
        "qwen2-window",
        {"layer_types": ["full_attention", "chunked_attention", "sliding_attention"]},
        "chunked_attention",
    ),
    ("gemma3-images", {"text_config": {"model_type": "gpt2"}}, "of text_config gpt2 is not supported"),
    ("gemma3", {"rope_parameters": {**ROPES_BY_TYPE, "sliding_attention": HALF_ROPE}}, "partial_rotary_factor=0.5"),
    ("gemma3", {"rope_parameters": PLAIN_ROPE, "use_bidirectional_attention": True}, "use_bidirectional_attention"),
    ("gemma2", {"hidden_activation": "gelu"}, "activation 'gelu'"),
    ("gemma2", {"final_logit_softcapping": -1.0}, "final_logit_softcapping=-1.0"),
    ("granite", {"residual_multiplier": 0}, "residual_multiplier=0"),
    ("glm4", {"rope_parameters": {**HALF_ROPE, "partial_rotary_factor": 0.2}}, "makes 3 of 16 numbers"),
    ("phi3-long", {"rope_parameters": {**LONG_ROPE, "long_factor": [-1.0] * 8}}, "between 0 and infinity"),
    ("olmoe", {"clip_qkv": 8.0}, "clip_qkv=8.0"),
    ("gpt-oss", {"swiglu_limit": 5.0}, "swiglu_limit=5.0"),
    ("mixtral", {"num_experts_per_tok": 6}, "6 of 5 experts"),
    ("mixtral", {"num_experts_per_tok": 0}, "num_experts_per_tok=0"),
    ("qwen3-moe", {"moe_intermediate_size": -1}, "moe_intermediate_size=-1"),
    ("qwen2-moe", {"decoder_sparse_step": 0}, "decoder_sparse_step=0"),
]


@pytest.mark.parametrize(
    ("family", "fields", "named"), [*(("llama2", *each) for each in REFUSED), *REFUSED_OF_FAMILIES]
)
def test_what_is_not_supported_is_named(
    config_with: ConfigWith, family: str, fields: dict[str, Any], named: str
) -> None:
    with pytest.raises(ModelLoadError) as raised:
        read_decoder_config(config_with(family, **fields))
    assert named in str(raised.value)
    assert "config.json" in str(raised.value)


LAYER_TYPES = ["sliding_attention", "full_attention", "sliding_attention"]
OLD_LINEAR = {**OLD_SPELLING, "rope_theta": 500.0, "rope_scaling": {"type": "linear", "factor": 4.0}}
YARN_OF_256 = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 256}
INV_FREQ_OF_LINEAR = pytest.approx([500.0 ** (-2 * i / 16) / 4 for i in range(8)], rel=1e-6)


@pytest.mark.parametrize(
    ("family", "fields", "options", "read"),
    [
        ("mistral", {"sliding_window": None}, {}, {"windows": (None, None, None)}),
        ("qwen2-window", {"layer_types": LAYER_TYPES}, {}, {"windows": (8, None, 8)}),
        *(("mistral", {"sliding_window": w}, {}, {"windows": (w,) * 3}) for w in (1, 255)),
        *(
            ("mistral", {"sliding_window": w}, {}, {"windows": (None,) * 3})
            for w in (256, 2**31 - 1, 2**31, 2**63, 10**30)
        ),
        ("mistral", {"sliding_window": 100}, {"max_model_len": 100}, {"windows": (None,) * 3}),
        ("qwen2-window", {"layer_types": LAYER_TYPES, "sliding_window": 2**31 - 1}, {}, {"windows": (None,) * 3}),
        ("llama2", OLD_LINEAR, {}, {"dtype": torch.bfloat16, "ropes": (Rope(INV_FREQ_OF_LINEAR),) * 3}),
        ("llama2", {"dtype": "float64"}, {"dtype": "float16"}, {"dtype": torch.float16}),
        ("llama2", {}, {}, {"max_model_len": 256}),
        ("llama2", {}, {"max_model_len": 100}, {"max_model_len": 100}),
        # 0.1 ln 4 + 1
        (
            "qwen2",
            {"rope_parameters": YARN_OF_256},
            {},
            {"max_model_len": 1024, "ropes": (Rope(ANY, pytest.approx(1.1386294)),) * 3},
        ),
    ],
)
def test_what_config_json_and_the_engine_say(
    config_with: ConfigWith, family: str, fields: dict[str, Any], options: dict[str, Any], read: dict[str, Any]
) -> None:
    config = read_decoder_config(config_with(family, **fields), **options)
    assert {name: getattr(config, name) for name in read} == read


def test_a_length_beyond_the_models_is_refused(config_with: ConfigWith) -> None:
    with pytest.raises(ConfigError, match="max_model_len=257 is more than the 256 tokens"):
        read_decoder_config(config_with("llama2"), max_model_len=257)


def test_remote_code_is_never_run(config_with: ConfigWith, tmp_path: Path) -> None:
    folder = config_with("llama2", model_type="made_up", auto_map={"AutoConfig": "evil.Config"})
    (tmp_path / "evil.py").write_text(f"import pathlib; pathlib.Path({str(tmp_path / 'ran')!r}).mkdir()")
    with pytest.raises(ModelLoadError):
        read_decoder_config(folder)
    assert not (tmp_path / "ran").exists()
