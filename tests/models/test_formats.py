"""Checkpoints in each format: weights are what its own library, or its published layout, makes of the codes."""

import json
import logging
import shutil
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from models.quantised_checkpoints import (
    awq,
    bitsandbytes_4bit,
    bitsandbytes_8bit,
    compressed_tensors,
    fp8,
    gptq,
    is_layers_matrix,
    mxfp4,
    write,
)
from models.reference import FILE, edit_json, edit_tensors, load, logprobs, refused, token_ids
from nightly import few, nightly
from safetensors.torch import load_file, save_file

from aioengine.config import EngineConfig
from aioengine.errors import ConfigError
from aioengine.kernels.packed_weight import CodedWeight
from aioengine.models.checkpoint import HEAD
from aioengine.models.decoder import Decoder, Linear
from aioengine.models.folder import ModelFolder
from aioengine.models.formats.catalogue import QUANT_METHODS, read_catalogue
from aioengine.models.formats.stored import Files
from aioengine.models.implementations import load_model

Checkpoint = Callable[..., Path]
Write = Callable[[Path, Path], tuple[Path, Path]]

QUERY = "model.layers.1.self_attn.q_proj"
HUGE = 2**70
ORDER = torch.randperm(64, generator=torch.Generator().manual_seed(0))


def of_layout(encode: Any, **config: Any) -> Write:
    return lambda source, folder: write(source, folder, encode, config)


def of_library(**scheme: Any) -> Write:
    return lambda source, folder: compressed_tensors(source, folder, **scheme)


def gptq_config(bits: int, group: int, **fields: Any) -> dict[str, Any]:
    return {"quant_method": "gptq", "bits": bits, "group_size": group, **fields}


def sorted_inputs(source: Path, folder: Path) -> tuple[Path, Path]:
    """Of matrices with 64 inputs alone, which ``ORDER`` is of."""
    encode = gptq(4, 32, order=ORDER)
    config = gptq_config(4, 32, desc_act=True)
    return write(source, folder, encode, config, lambda name: is_layers_matrix(name) and "down_proj" not in name)


def with_head(source: Path, folder: Path) -> tuple[Path, Path]:
    is_quantised = lambda name: is_layers_matrix(name) or name == HEAD  # noqa: E731
    return write(source, folder, gptq(4, 32), gptq_config(4, 32, lm_head=True), is_quantised)


TOKENS = {"num_bits": 8, "strategy": "token", "dynamic": True}
NF4 = {"quant_method": "bitsandbytes", "load_in_4bit": True}
FORMATS: dict[str, Write] = {
    "fp8 by blocks": of_layout(fp8(32, 32, ".weight_scale_inv"), quant_method="fp8", weight_block_size=[32, 32]),
    "fp8 by blocks that are not whole": of_layout(
        fp8(48, 128, ".weight_scale_inv"), quant_method="fp8", weight_block_size=[48, 128]
    ),
    "fp8 by tensors": of_layout(fp8(None, None, ".weight_scale_inv", (1,), activation_scale=0.5), quant_method="fp8"),
    "fp8 by outputs": of_layout(
        fp8(1, None, ".weight_scale", (-1, 1), input_scale_ub=1200.0), quant_method="fbgemm_fp8"
    ),
    "fp8 in blocks larger than any matrix": of_layout(
        fp8(None, None, ".weight_scale_inv", (1, 1)), quant_method="fp8", weight_block_size=[HUGE, HUGE]
    ),
    "gptq in groups larger than any matrix": of_layout(gptq(4, -1), **gptq_config(4, HUGE)),
    "awq in groups larger than any matrix": of_layout(
        awq(HUGE), quant_method="awq", bits=4, group_size=HUGE, version="gemm"
    ),
    "gptq": of_layout(gptq(4, 32), **gptq_config(4, 32)),
    "gptq with zeros": of_layout(gptq(4, 32, is_symmetric=False), **gptq_config(4, 32, sym=False)),
    "gptq v2 with zeros": of_layout(
        gptq(4, 16, is_symmetric=False, zeros_less=0), **gptq_config(4, 16, checkpoint_format="gptq_v2")
    ),
    "gptq in 8 bits": of_layout(gptq(8, 32, is_symmetric=False), **gptq_config(8, 32)),
    "gptq by outputs": of_layout(gptq(8, -1), **gptq_config(8, -1)),
    "gptq in another order": sorted_inputs,
    "gptq with the head": with_head,
    "awq": of_layout(awq(32), quant_method="awq", bits=4, group_size=32, version="gemm", zero_point=True),
    "compressed int4": of_library(num_bits=4, type="int", strategy="group", group_size=32),
    "compressed int4 with zeros": of_library(num_bits=4, type="int", symmetric=False, strategy="group", group_size=32),
    "compressed int8 packed": of_library(num_bits=8, type="int", strategy="channel"),
    "compressed int8 packed with zeros": of_library(
        num_bits=8, type="int", symmetric=False, strategy="group", group_size=32
    ),
    "compressed int8": of_library(num_bits=8, type="int", strategy="channel", activations=TOKENS),
    "compressed int8 with zeros": of_library(
        num_bits=8, type="int", symmetric=False, strategy="channel", activations=TOKENS
    ),
    "compressed fp8 by tensors": of_library(num_bits=8, type="float", strategy="tensor"),
    "compressed fp8 by outputs": of_library(
        num_bits=8, type="float", strategy="channel", activations={**TOKENS, "type": "float"}
    ),
    "compressed fp8 by blocks": of_library(num_bits=8, type="float", strategy="block", block_structure=[32, 32]),
    "compressed mxfp4": of_library(
        num_bits=4, type="float", strategy="group", group_size=32, scale_dtype=torch.uint8, zp_dtype=torch.uint8
    ),
    "compressed nvfp4": of_library(
        num_bits=4,
        type="float",
        strategy="tensor_group",
        group_size=16,
        scale_dtype=torch.float8_e4m3fn,
        zp_dtype=torch.float8_e4m3fn,
    ),
    "compressed in several ways": of_library(
        others={"re:.*q_proj": {"num_bits": 8, "type": "int", "strategy": "group", "group_size": 16}},
        num_bits=4,
        type="int",
        strategy="group",
        group_size=32,
    ),
    "compressed as integers and floats": of_library(
        others={"re:.*q_proj": {"num_bits": 8, "type": "float", "strategy": "channel"}},
        num_bits=8,
        type="int",
        strategy="channel",
    ),
    "nf4": of_layout(bitsandbytes_4bit("nf4"), **NF4),
    "nf4 twice": of_layout(bitsandbytes_4bit("nf4", is_nested=True), **NF4),
    "nf4 in blocks across outputs": of_layout(bitsandbytes_4bit("nf4", blocksize=256), **NF4),
    "nf4 in a block a matrix": of_layout(bitsandbytes_4bit("nf4", blocksize=4096), **NF4),
    "fp4": of_layout(bitsandbytes_4bit("fp4"), **NF4),
    "llm.int8": of_layout(bitsandbytes_8bit, quant_method="bitsandbytes", load_in_8bit=True),
}
OF_CHECK = (
    "fp8 by blocks", "gptq with zeros", "gptq in another order", "awq", "compressed int4 with zeros", "compressed int8",
    "compressed nvfp4", "compressed in several ways",
)  # fmt: skip
"""In `make check`; none of bitsandbytes', which is large, and which nightly tests alone have."""

KEPT = {
    "compressed as integers and floats": {True, False},
    "gptq in another order": {False},
    "nf4 in blocks across outputs": {False},
    "nf4 in a block a matrix": {False},
}
"""Whether matrices of layers stay codes, if not all do."""


@pytest.fixture(scope="module")
def made(checkpoint: Checkpoint, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Path, Path]]:
    """The folders of a format's checkpoint and of its dense equal; made once, not to be changed."""
    root, folders = tmp_path_factory.mktemp("formats"), dict[str, tuple[Path, Path]]()

    def make(name: str) -> tuple[Path, Path]:
        if name not in folders:
            folders[name] = FORMATS[name](checkpoint("llama2", tokenizer=True), root / str(len(folders)))
        return folders[name]

    return make


Made = Callable[[str], tuple[Path, Path]]


def assert_near(decoder: Decoder, dense: Path) -> None:
    saved = load_file(dense / FILE)
    for name, tensor in decoder.tensors(decoder.shapes()):
        torch.testing.assert_close(tensor, saved[name], rtol=2e-6, atol=1e-7, msg=lambda text, n=name: f"{n}: {text}")


@pytest.mark.parametrize("name", few(OF_CHECK, FORMATS))
def test_weights_are_what_the_codes_stand_for(made: Made, name: str) -> None:
    coded, dense = made(name)
    decoder = load(coded)
    assert_near(decoder, dense)
    kept = {
        linear.packed.coding is not None
        for layer in decoder.layers
        for linear in layer.modules()
        if isinstance(linear, Linear)
    }
    assert kept == KEPT.get(name, {True})


def test_activations_have_the_configs_dtype(made: Made) -> None:
    coded, dense = made("gptq")
    decoder, ids = load(coded, dtype="bfloat16"), token_ids()
    assert decoder.config.dtype == decoder.norm.dtype == torch.bfloat16
    assert {linear.packed.dtype for linear in decoder.linears()} == {torch.bfloat16}
    difference = (logprobs(decoder, ids).exp() - logprobs(load(dense), ids).exp()).abs().sum(-1).mean()
    assert difference < 0.2


@pytest.mark.parametrize("family", ["mixtral", "qwen3-moe"])
def test_experts_are_coded_where_each_begins_a_panel(checkpoint: Checkpoint, tmp_path: Path, family: str) -> None:
    source = checkpoint(family, **({"moe_intermediate_size": 48} if family == "qwen3-moe" else {}))
    is_quantised = lambda name: ".experts." in name  # noqa: E731
    coded, dense = write(source, tmp_path, gptq(4, 16, is_symmetric=False), gptq_config(4, 16), is_quantised)
    decoder, ids = load(coded), token_ids()
    assert_near(decoder, dense)
    assert any(linear.packed.coding is not None for linear in decoder.linears())
    torch.testing.assert_close(logprobs(decoder, ids), logprobs(load(dense), ids), rtol=0, atol=2e-4)


def test_stacked_experts_of_mxfp4_are_one_below_the_other(tmp_path: Path) -> None:
    blocks, scales, dense = mxfp4(torch.randn(3, 20, 64, generator=torch.Generator().manual_seed(0)))
    name = "model.layers.0.mlp.experts.gate_up_proj"
    save_file({f"{name}_blocks": blocks, f"{name}_scales": scales}, tmp_path / FILE)
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": {"quant_method": "mxfp4"}}))
    (stored,) = read_catalogue(tmp_path).values()
    assert (stored.name, stored.shape, stored.num_bytes) == (name, (3, 64, 20), blocks.nbytes + scales.nbytes)
    with Files() as files:
        read = stored.read(files)
    assert isinstance(read, CodedWeight)
    assert torch.equal(read.dense(), dense.flatten(0, 1))


# What is said of them


def test_what_is_kept_and_what_is_dequantised_is_said_once(made: Made, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="aioengine"):
        load(made("gptq")[0])
        load(made("gptq in another order")[0])
        load(made("gptq")[1])
    kept, dequantised = (record.getMessage() for record in caplog.records)
    assert "21 tensors of GPTQ 4-bit as they are: 70,080 bytes in the files" in kept
    assert "18 tensors of GPTQ 4-bit dequantised: 54,336 bytes in the files, 344,064 kept" in dequantised


def test_a_quantised_checkpoint_is_not_quantised_further(made: Made) -> None:
    with pytest.raises(ConfigError, match="quantization=int4 is of checkpoints that are not quantised"):
        load(made("gptq")[0], quantization="int4")


# Files that torch saved


def as_bin(source: Path, folder: Path, num_files: int = 1) -> Path:
    """The checkpoint with its tensors in so many files that torch saved."""
    shutil.copytree(source, folder, ignore=shutil.ignore_patterns("*.safetensors"))
    tensors = list(load_file(source / FILE).items())
    shards = [dict(tensors[index::num_files]) for index in range(num_files)]
    if num_files == 1:
        torch.save(shards[0], folder / "pytorch_model.bin")
        return folder
    names = [f"pytorch_model-{index + 1:05}-of-{num_files:05}.bin" for index in range(num_files)]
    for name, shard in zip(names, shards, strict=True):
        torch.save(
            {key: torch.nn.Parameter(tensor, tensor.is_floating_point()) for key, tensor in shard.items()},
            folder / name,
        )
    shard_of = {tensor: name for name, shard in zip(names, shards, strict=True) for tensor in shard}
    (folder / "pytorch_model.bin.index.json").write_text(json.dumps({"metadata": {}, "weight_map": shard_of}))
    return folder


@pytest.mark.parametrize("num_files", [1, 3])
@pytest.mark.parametrize("name", ["dense", "gptq"])
def test_files_of_torch_hold_the_same(
    made: Made, checkpoint: Checkpoint, tmp_path: Path, name: str, num_files: int
) -> None:
    source = checkpoint("llama2", tokenizer=True) if name == "dense" else made(name)[0]
    ours, theirs = load(as_bin(source, tmp_path / "bin", num_files)), load(source)
    for (parameter, values), expected in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        assert torch.equal(values, expected), parameter


def with_pickle(content: bytes) -> Callable[[Path], None]:
    """Another pickle in the file's archive."""

    def change(path: Path) -> None:
        with zipfile.ZipFile(path) as archive:
            held = {name: archive.read(name) for name in archive.namelist()}
        with zipfile.ZipFile(path, "w") as archive:
            for name, old in held.items():
                archive.writestr(name, content if name.endswith("data.pkl") else old)

    return change


class Harm:
    def __reduce__(self) -> tuple[Any, ...]:
        return (Path("/tmp").joinpath, ("harm",))


def as_old_layout(path: Path) -> None:
    torch.save(torch.load(path), path, _use_new_zipfile_serialization=False)


@pytest.mark.parametrize(
    ("harm", "named"),
    [
        (lambda path: torch.save({"x": Harm()}, path), "tensors alone"),
        (lambda path: torch.save([torch.zeros(1)], path), "other than dense tensors by name"),
        (lambda path: torch.save({"x": {"y": torch.zeros(1)}}, path), "other than dense tensors by name"),
        (lambda path: torch.save({"x": torch.zeros(2, 2).to_sparse()}, path), "other than dense tensors by name"),
        (lambda path: path.write_bytes(path.read_bytes()[:-1000]), "tensors alone"),
        (lambda path: path.write_bytes(b""), "tensors alone"),
        (with_pickle(b""), "tensors alone"),
        (as_old_layout, "tensors alone"),
    ],
    ids=[
        "code",
        "a list",
        "tensors within",
        "a sparse one",
        "cut short",
        "empty",
        "no pickle",
        "the old layout",
    ],
)
def test_a_file_of_torch_with_anything_else_is_refused(
    checkpoint: Checkpoint, tmp_path: Path, harm: Callable[[Path], object], named: str
) -> None:
    folder = as_bin(checkpoint("llama2"), tmp_path / "bin")
    harm(folder / "pytorch_model.bin")
    refused(folder, named, str(folder / "pytorch_model.bin"))


# What is refused


@pytest.mark.parametrize(
    ("config", "named"),
    [
        ({"quant_method": "hqq"}, f"quant_method='hqq' is not supported; supported: {', '.join(QUANT_METHODS)}"),
        ({}, "quant_method=None"),
        ({"bits": 4, "group_size": 32, "desc_act": False}, 'add "quant_method": "gptq"'),
        (["gptq"], "quant_method=['gptq']"),
        (gptq_config(3, 32), "bits=3"),
        (gptq_config(4, 0), "group_size=0"),
        (gptq_config(4, 32, checkpoint_format="marlin"), "checkpoint_format='marlin'"),
        (gptq_config(4, 32, dynamic={"+:.*": {"bits": 8}}), "dynamic"),
        ({"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemv"}, "version='gemv'"),
        ({"quant_method": "fp8", "weight_block_size": [128]}, "blocks of [128]"),
        ({"quant_method": "compressed-tensors"}, "config_groups=None"),
        ({"quant_method": "compressed-tensors", "transform_config": {"config_groups": {}}}, "transform_config"),
        ({"quant_method": "compressed-tensors", "sparsity_config": {"format": "sparse-24-bitmask"}}, "sparsity_config"),
    ],
)
def test_a_config_that_is_not_supported_is_named(made: Made, copied: Checkpoint, config: Any, named: str) -> None:
    folder = copied(made("gptq")[0])
    edit_json(folder / "config.json", quantization_config=config)
    refused(folder, f"{folder / 'config.json'}: quantization_config", named)


def test_an_early_gptq_config_lies_beside_the_models(made: Made, copied: Checkpoint) -> None:
    folder = copied(made("gptq")[0])
    edit_json(folder / "config.json", quantization_config=...)
    refused(folder, "no quantization_config", ".qweight", "GPTQ")
    (folder / "quantize_config.json").write_text(json.dumps({"bits": 4, "group_size": 32, "desc_act": False}))
    assert_near(load(folder), made("gptq")[1])


@pytest.mark.parametrize("model_path", ["native", "transformers"])
def test_biases_that_add_nothing_are_passed_over(made: Made, copied: Checkpoint, model_path: Any) -> None:
    folder = copied(made("gptq")[0])
    name = f"{QUERY.replace('q_proj', 'o_proj')}.bias"
    edit_tensors(folder, lambda tensors: tensors.update({name: torch.zeros(64)}))
    load_model(ModelFolder.read(folder), EngineConfig(model_path=model_path))
    edit_tensors(folder, lambda tensors: tensors.update({name: torch.ones(64)}))
    refused(folder, f"unexpected tensor {name}", model_path=model_path)


@pytest.mark.parametrize("model_path", ["native", "transformers"])
def test_layers_that_guess_further_tokens_are_passed_over(made: Made, copied: Checkpoint, model_path: Any) -> None:
    folder = copied(made("gptq")[1])
    num_layers = json.loads((folder / "config.json").read_text())["num_hidden_layers"]
    edit_tensors(folder, lambda held: held.update({f"model.layers.{num_layers}.eh_proj.weight": torch.ones(2, 2)}))
    refused(folder, "unexpected tensor", model_path=model_path)
    edit_json(folder / "config.json", num_nextn_predict_layers=1)
    load_model(ModelFolder.read(folder), EngineConfig(model_path=model_path))


def changed(suffix: str, change: Callable[[torch.Tensor], torch.Tensor] | None) -> Callable[[Path], None]:
    def change_held(held: dict[str, torch.Tensor]) -> None:
        tensor = held.pop(QUERY + suffix)
        if change is not None:
            held[QUERY + suffix] = change(tensor)

    return lambda folder: edit_tensors(folder, change_held)


def state_of(**fields: Any) -> Callable[[torch.Tensor], torch.Tensor]:
    def change(state: torch.Tensor) -> torch.Tensor:
        return torch.tensor(list(json.dumps({**json.loads(bytes(state.tolist())), **fields}).encode())).byte()

    return change


STATE = ".weight.quant_state.bitsandbytes__nf4"


@pytest.mark.parametrize(
    ("name", "size"), nightly(("nf4 in a block a matrix", "blocksize"), ("nf4 twice", "nested_blocksize"))
)
def test_blocks_larger_than_a_matrix_are_the_matrix(made: Made, copied: Checkpoint, name: str, size: str) -> None:
    source, dense = made(name)
    folder = copied(source)
    changed(STATE, state_of(**{size: HUGE // 2**8}))(folder)
    assert_near(load(folder), dense)


@pytest.mark.parametrize(
    ("name", "suffix", "change"),
    [
        ("gptq", ".scales", None),
        ("gptq", ".qzeros", None),
        ("gptq", ".scales", lambda scales: scales[:1]),
        ("gptq", ".scales", torch.Tensor.int),
        ("gptq", ".qzeros", lambda zeros: zeros[:, :1]),
        ("gptq", ".qweight", lambda words: words[:4]),
        ("gptq", ".qweight", torch.Tensor.float),
        ("gptq", ".qweight", lambda words: words[:0]),
        ("gptq", ".g_idx", lambda group_of: group_of[:8]),
        ("gptq", ".g_idx", lambda group_of: group_of + 1),
        ("awq", ".qzeros", lambda zeros: zeros[:, :1]),
        ("fp8 by blocks", ".weight_scale_inv", lambda scales: scales[:1]),
        ("fp8 by blocks", ".weight_scale_inv", None),
        ("compressed int4", ".weight_shape", lambda shape: shape * 2),
        ("compressed int4", ".weight_scale", lambda scales: scales[:, :1].repeat(1, 3)),
        ("compressed int4 with zeros", ".weight_zero_point", lambda zeros: zeros[:1]),
        ("compressed int8", ".weight_scale", None),
        *nightly(
            ("nf4", ".weight.absmax", lambda scales: scales[:1]),
            ("nf4", ".weight.quant_map", lambda table: table[:8]),
            ("nf4", ".weight", lambda codes: codes[:8]),
            ("nf4", STATE, state_of(shape=[64, 10**9])),
            ("nf4", STATE, state_of(shape=[32, 64])),
            ("nf4", STATE, state_of(blocksize=0)),
            ("nf4", STATE, state_of(blocksize="many")),
            ("nf4", STATE, lambda state: state[:-3]),
            ("nf4", STATE, lambda state: torch.full((4096,), ord("["), dtype=torch.uint8)),
            ("nf4", STATE, lambda state: state.repeat(100)),
            ("nf4 twice", ".weight.nested_absmax", lambda scales: scales.repeat(2)),
            ("llm.int8", ".SCB", lambda scales: scales[:1]),
        ),
    ],
)  # fmt: skip
def test_tensors_that_do_not_fit_are_named(
    made: Made, copied: Checkpoint, name: str, suffix: str, change: Callable[[torch.Tensor], torch.Tensor] | None
) -> None:
    folder = copied(made(name)[0])
    changed(suffix, change)(folder)
    refused(folder, QUERY, "tensor ")
