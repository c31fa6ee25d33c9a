"""GGUF files that llama.cpp's own package wrote, against the checkpoints that they were written from."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import gguf
import gguf_checkpoints
import huggingface_hub
import numpy as np
import pytest
import torch
import transformers
from checkpoints import SCALED_ROPE, YARN_ROPE
from gguf import GGMLQuantizationType as Type
from gguf_checkpoints import dequantized, finish, q4_k_m, save_sentencepiece, write_gguf
from models.reference import load, logprobs, reference, token_ids
from models.test_decoder import TOLERANCES
from nightly import few, nightly

from aioengine import Engine
from aioengine.errors import InvalidRequest, ModelLoadError
from aioengine.kernels.packed_weight import CodedWeight
from aioengine.models.decoder import Linear
from aioengine.models.decoder_config import Rope, read_decoder_config
from aioengine.models.folder import DEMO_MODEL, ModelFolder
from aioengine.models.formats.gguf_file import BLOCKS
from aioengine.models.formats.gguf_tensors import BLOCK_FORMATS, read_gguf
from aioengine.models.formats.stored import Files, read_safetensors
from aioengine.models.loader import check_weights

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
    "olmoe": {"intermediate_size": 64},
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
    "olmo3": {},
    "ministral3": {"rope_parameters": {**SCALED_ROPE, "mscale": 1.0, "mscale_all_dim": 1.0}},
    "gpt-oss": {"intermediate_size": 64, "rope_parameters": {**YARN_ROPE, "truncate": False}},
}
"""Of the families' tiny checkpoints what must be as llama.cpp has it in its code, or whole blocks of 32."""

CHECKED = [("gemma3", "Q4_0"), ("gpt-oss", "MXFP4"), ("wide", "Q4_K"), ("wide", "Q6_K")]
PROMPTS = ([5, 6, 7, 8, 9, 77, 300], list(range(3, 60)))
MAX_TOKENS = 12
GREEDY: dict[str, Any] = {"max_tokens": MAX_TOKENS, "temperature": 0.0, "ignore_eos": True}
WEIGHTS = "model.safetensors"


@pytest.mark.parametrize("kind", few(["BF16", "Q4_0", "Q6_K", "MXFP4"], of=BLOCKS))
def test_tensors_have_the_names_and_the_very_values_of_the_checkpoint(
    kind: str, checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    source = checkpoint("llama2", **SIZES)
    stored = read_gguf(write_gguf(source, tmp_path / "model.gguf", kind=Type[kind]))
    wanted = {
        entry.name: entry for entry in read_safetensors(dequantized(source, tmp_path / "dense", Type[kind]) / WEIGHTS)
    }
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
        outputs = [await engine.generate(prompt, **GREEDY) for prompt in PROMPTS]
    return [list(output.outputs[0].token_ids) for output in outputs]


def tokens_by_transformers(folder: Path) -> list[list[int]]:
    """As `tokens_of`, in float32."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    model.generation_config.eos_token_id = None
    asked = {"max_new_tokens": MAX_TOKENS, "do_sample": False, "pad_token_id": 0}
    outputs = [model.generate(torch.tensor([prompt]), **asked)[0].tolist() for prompt in PROMPTS]
    return [output[len(prompt) :] for prompt, output in zip(PROMPTS, outputs, strict=True)]


@pytest.mark.parametrize(
    ("family", "kind"),
    few(CHECKED, [*product(FAMILIES, ("F16", "BF16", "Q8_0", "Q4_0", "MXFP4")), *product(["wide"], BLOCKS)]),
)
async def test_an_engine_gives_the_tokens_of_transformers_with_the_dequantised_weights(
    family: str, kind: str, checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    source = checkpoint("qwen2", **SIZES) if family == "wide" else checkpoint(family, **FAMILIES[family])
    file = write_gguf(source, tmp_path / "model.gguf", kind=Type[kind])
    assert await tokens_of(file) == tokens_by_transformers(dequantized(source, tmp_path / "dense", Type[kind]))


@pytest.fixture
def mixed(checkpoint: Callable[..., Path], tmp_path: Path) -> tuple[Path, Path]:
    """A file whose types are mixed as Q4_K_M files' are, and its dense equal."""
    source = checkpoint("llama3", **SIZES)
    return write_gguf(source, tmp_path / "model.gguf", kind=q4_k_m), dequantized(source, tmp_path / "dense", q4_k_m)


async def test_tokens_of_mixed_types_are_those_of_the_dequantised_weights(mixed: tuple[Path, Path]) -> None:
    file, dense = mixed
    assert await tokens_of(file) == tokens_by_transformers(dense)


def test_mixed_types_stay_codes_those_of_one_product_in_the_widest_of_them(mixed: tuple[Path, Path]) -> None:
    file, dense = mixed
    decoder, ids = load(file, dtype="float32"), token_ids()
    torch.testing.assert_close(logprobs(decoder, ids), reference(dense, ids), atol=1e-4, rtol=0)
    codings = {
        name: (linear.packed.coding.bits, linear.packed.coding.group)
        for name, linear in decoder.named_modules()
        if isinstance(linear, Linear) and linear.packed.coding is not None
    }
    of_4_bits, of_6_bits = (4, 32), (8, 16)
    assert codings == {
        "embedding": of_4_bits,
        "head": of_6_bits,
        "layers.0.qkv": of_6_bits,
        "layers.1.qkv": of_4_bits,
        **{f"layers.{index}.{name}": of_4_bits for index in range(2) for name in ("output", "mlp.gate_up")},
        "layers.0.mlp.down": of_6_bits,
        "layers.1.mlp.down": of_4_bits,
    }


@pytest.mark.parametrize("family", few(["qwen3"], FAMILIES))
def test_logprobs_of_a_bfloat16_file_are_the_checkpoints_and_within_the_tolerance(
    family: str, checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    source, ids = checkpoint(family, dtype=torch.bfloat16, **FAMILIES[family]), token_ids()
    decoder = load(write_gguf(source, tmp_path / "model.gguf", kind=Type.BF16))
    assert decoder.config.dtype == torch.bfloat16
    found = logprobs(decoder, ids)
    assert torch.equal(found, logprobs(load(source, dtype="bfloat16"), ids))
    if decoder.config.experts is None:  # rounding may have a token choose other experts, and then all is another
        error, (largest, mean) = (found - reference(source, ids)).abs(), TOLERANCES["bfloat16"]
        assert error.max() < largest
        assert error.mean() < mean


@pytest.mark.parametrize("family", [family for family in FAMILIES if family != "mistral"])  # it is called Llama there
def test_config_and_tensors_are_the_checkpoints(family: str, checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    source = checkpoint(family, **FAMILIES[family])
    file = write_gguf(source, tmp_path / "model.gguf")
    found, wanted = (read_decoder_config(ModelFolder.read(path)) for path in (file, source))
    for name in wanted.__struct_fields__:
        assert near(getattr(found, name), getattr(wanted, name)), name
    check_weights(file, found)


def near(found: Any, wanted: Any) -> bool:
    """Equal, but for frequencies that went through factors in float32."""
    if not isinstance(wanted, tuple) or not isinstance(wanted[0], Rope):
        return bool(found == wanted)
    pairs = zip(found, wanted, strict=True)
    return all(found.inv_freq == pytest.approx(wanted.inv_freq, rel=1e-6) for found, wanted in pairs if wanted)


def test_a_folder_stands_for_the_file_in_it(checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    source = checkpoint("qwen3", **SIZES)
    file = write_gguf(source, tmp_path / "model.gguf", kind=Type.Q8_0)
    (tmp_path / "mmproj-model.gguf").write_bytes(b"")
    assert ModelFolder.read(tmp_path).path == file
    write_gguf(source, tmp_path / "other.gguf")
    with pytest.raises(ModelLoadError, match="has 2 models: give one of its files"):
        ModelFolder.read(tmp_path)


@pytest.mark.parametrize("window", [8, 256, 2**31 - 1, 2**31])
def test_a_window_of_all_that_there_may_be_is_none(
    window: int, checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    source = checkpoint("gemma2", **FAMILIES["gemma2"], sliding_window=window)
    read = read_decoder_config(ModelFolder.read(write_gguf(source, tmp_path / "model.gguf")))
    assert set(read.windows) == ({8, None} if window == 8 else {None})


def test_a_model_in_several_files_is_one(checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    source = checkpoint("qwen3")
    whole = write_gguf(source, tmp_path / "whole.gguf")
    write_gguf(source, tmp_path / "shards" / "model.gguf", num_shards=3)
    first, second, third = sorted((tmp_path / "shards").iterdir())
    assert ModelFolder.read(first.parent).path == first
    stored, wanted = read_gguf(first), read_gguf(whole)
    assert stored.keys() == wanted.keys()
    assert {entry.path for entry in stored.values()} == {first, second, third}
    with Files() as files:
        assert all(torch.equal(stored[name].read(files), wanted[name].read(files)) for name in wanted)
    with pytest.raises(ModelLoadError, match="is a later part of a model: give "):
        read_gguf(second)
    third.unlink()
    with pytest.raises(
        ModelLoadError, match=r"is one of 3 files; of the others 1 are missing: .*-00003-of-00003\.gguf"
    ):
        read_gguf(first)


async def test_a_chat_begins_with_the_bos_that_its_template_leaves_out(
    checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    source = shutil.copytree(checkpoint("llama2"), tmp_path / "source")
    save_sentencepiece(source)
    settings = {**json.loads((source / "tokenizer.json").read_text())}
    single = [{"SpecialToken": {"id": "<s>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}]
    special = {"<s>": {"id": "<s>", "ids": [1], "tokens": ["<s>"]}}
    settings["post_processor"] = {"type": "TemplateProcessing", "single": single, "pair": [], "special_tokens": special}
    (source / "tokenizer.json").write_text(json.dumps(settings))
    (source / "chat_template.jinja").write_text("{{ messages[0].content }}")
    file, chat = write_gguf(source, tmp_path / "model.gguf"), [{"role": "user", "content": "the fox"}]
    async with Engine(str(file), kv_cache_memory_bytes=2**24, show_progress=False, num_threads=1) as engine:
        output = await engine.generate(chat, max_tokens=1)
        text = await engine.generate("the fox", max_tokens=1)
        counted, without = [await engine.tokenize(chat, add_special_tokens=adds) for adds in (None, False)]
    assert list(output.prompt_token_ids) == list(text.prompt_token_ids) == counted
    assert counted == [1, *without]


@pytest.mark.parametrize("count", ["2", ["2"], [2, 2], 2.0, True])
def test_a_number_of_files_that_is_none_is_named(count: Any, tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "model-00001-of-00002.gguf", "llama")
    writer.add_key_value("split.count", count, gguf.GGUFValueType.get_type(count))
    finish(writer)
    with pytest.raises(ModelLoadError, match=r"split\.count="):
        read_gguf(tmp_path / "model-00001-of-00002.gguf")


@pytest.mark.parametrize(
    ("file", "asked"), [("q/model.gguf", "q/model.gguf"), ("m-00001-of-00004.gguf", "m-*-of-00004.gguf")]
)
def test_a_file_of_a_hub_model_is_downloaded_alone(
    file: str, asked: str, checkpoint: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def download(model: str, *, allow_patterns: list[str], **_: object) -> str:
        assert (model, allow_patterns) == ("org/name", [asked])
        write_gguf(checkpoint("qwen3"), tmp_path / file)
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    assert ModelFolder.resolve(f"org/name:{file}").path == tmp_path / file


@pytest.mark.parametrize(
    ("model", "problem"),
    [
        ("org/name:model.bin", "a file of a hub model must be a .gguf"),
        ("missing/model.gguf", "there is no file missing/model.gguf"),
        ("./model.gguf", "there is no file model.gguf"),
    ],
)
def test_a_name_of_no_file_is_refused(model: str, problem: str) -> None:
    with pytest.raises(ModelLoadError, match=problem):
        ModelFolder.resolve(model)


@pytest.mark.parametrize("fields", [{}, *nightly({"process": True})])
async def test_the_bundled_model_tells_the_same_story(fields: dict[str, Any], tmp_path: Path) -> None:
    file = write_gguf(DEMO_MODEL, tmp_path / "demo.gguf", kind=Type.BF16, pre="smollm")
    assert await story(file, **fields) == await story(None)


async def story(model: Path | None, **fields: Any) -> str:
    given = {} if model is None else {"model": str(model)}
    async with Engine(**given, kv_cache_memory_bytes=2**24, show_progress=False, **fields) as engine:
        chat = [{"role": "user", "content": "Tell me a story of 3 dogs."}]
        return (await engine.generate(chat, max_tokens=16, temperature=0.0)).text


async def test_weights_are_updated_from_files_of_the_same_format(
    checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    files = [write_gguf(checkpoint("qwen3", seed=seed), tmp_path / f"{seed}.gguf", kind=Type.Q8_0) for seed in range(2)]
    dense = write_gguf(checkpoint("qwen3"), tmp_path / "dense.gguf")
    wanted = await tokens_of(files[1])
    async with Engine(str(files[0]), dtype="float32", kv_cache_memory_bytes=2**24, show_progress=False) as engine:
        await engine.update_weights(str(files[1]))
        outputs = [await engine.generate(prompt, **GREEDY) for prompt in PROMPTS]
        assert [list(output.outputs[0].token_ids) for output in outputs] == wanted
        with pytest.raises(ModelLoadError, match="of another format than the one that runs"):
            await engine.update_weights(str(dense))
        with pytest.raises(InvalidRequest, match="has no files of a tokenizer to save"):
            await engine.save_sharded_state(str(tmp_path / "saved"))


@pytest.mark.parametrize(
    ("architecture", "kind", "problem"),
    [
        ("mamba", Type.F32, "architecture 'mamba' in GGUF; supported: llama, qwen2"),
        ("llama", Type.Q3_K, "tensor 'token_embd.weight' is of type Q3_K; supported: F32, F16, BF16, Q4_0"),
        ("llama", Type.IQ2_XS, "tensor 'token_embd.weight' is of type IQ2_XS; supported"),
        ("llama", Type.F32, "lacks llama.embedding_length"),
    ],
)
def test_what_is_missing_or_not_supported_is_named(architecture: str, kind: Type, problem: str, tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "model.gguf", architecture)
    num_values, num_bytes = gguf.GGML_QUANT_SIZES[kind]
    dtype = np.float32 if kind == Type.F32 else np.uint8
    writer.add_tensor("token_embd.weight", np.zeros((2, num_bytes if num_values > 1 else 8), dtype), raw_dtype=kind)
    finish(writer)
    with pytest.raises(ModelLoadError, match=problem) as raised:
        ModelFolder.read(tmp_path / "model.gguf")
    assert str(tmp_path / "model.gguf") in str(raised.value)


def test_stacks_that_are_one_for_us_must_be_alike(checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    file = write_gguf(
        checkpoint("gpt-oss"), tmp_path / "model.gguf", kind=lambda name: Type.Q8_0 if "up_proj" in name else Type.F16
    )
    with pytest.raises(
        ModelLoadError, match=r"ffn_gate_exps\.weight and .*ffn_up_exps\.weight are no stacks of one type"
    ):
        read_gguf(file)


def test_vectors_that_are_quantised_are_refused(
    checkpoint: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gguf_checkpoints, "kind_of", lambda *_: Type.Q8_0)
    file = write_gguf(checkpoint("llama2"), tmp_path / "model.gguf")
    with pytest.raises(ModelLoadError, match=r"norm\.weight is GGUF Q8_0, in which no vectors can be"):
        read_gguf(file)
