"""What is said of a model without its weights is what an engine with them has."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import anyio.to_thread
import msgspec
import pytest
import torch
from gguf import GGMLQuantizationType as Type
from gguf_checkpoints import q4_k_m, write_gguf
from kernels.harness import native
from models.test_formats import FORMATS
from models.test_gguf import SIZES as GGUF_SIZES
from nightly import few, nightly

from aioengine import Engine
from aioengine.config import EngineConfig
from aioengine.errors import ConfigError, ModelLoadError
from aioengine.executor import model_info
from aioengine.executor.model_info import Fit, KVGroupInfo, read_model_info
from aioengine.kernels.operations import plain_torch
from aioengine.models.checkpoint import FILE_DTYPES
from aioengine.models.folder import DEMO_MODEL, ModelFolder
from aioengine.models.formats.gguf_file import BLOCKS
from aioengine.models.loader import load_decoder

MEMORY = 2**26


@pytest.mark.parametrize("quantization", [None, "int8", "int4"])
@pytest.mark.parametrize("dtype", few(["bfloat16"], of=["float32", "bfloat16", "float16"]))
@pytest.mark.parametrize(
    "family", few(["llama3", "qwen3", "mixtral"], of=["llama3", "qwen2", "qwen3", "qwen2-moe", "mixtral"])
)
def test_weights_take_as_many_bytes_as_is_said(
    checkpoint: Callable[..., Path], family: str, dtype: str, quantization: Any
) -> None:
    folder = checkpoint(family, vocab_size=391)
    config = EngineConfig(model=str(folder), dtype=dtype, quantization=quantization, device="cpu")
    said = read_model_info(config)
    decoder = load_decoder(ModelFolder.read(folder), config, operations=native)  # type: ignore[arg-type]
    assert said.weight_bytes == decoder.weight_bytes
    assert said.num_parameters == sum(torch.Size(shape).numel() for shape in decoder.shapes().values())
    assert said.dtype == dtype
    assert [each.format for each in said.formats] == ["F32"]


# The library's, of its own calls of torch.
@pytest.mark.filterwarnings("ignore:An output with one or more elements was resized:UserWarning")
@pytest.mark.parametrize("name", few(["gptq with zeros", "gptq in another order"], of=list(FORMATS)))
def test_quantised_checkpoints_take_as_many_bytes_as_is_said(
    checkpoint: Callable[..., Path], tmp_path: Path, name: str
) -> None:
    folder, _ = FORMATS[name](checkpoint("llama2", tokenizer=True), tmp_path)
    # With one group a row, the dtype in which its numbers are exact differs from matrix to matrix.
    assert_quantised_weights_are_as_said(folder, 0.005 if name == "awq in groups larger than any matrix" else 0.0)


# Sums of Q4_1's numbers are exact in 16 bits in some matrices alone, which no sample tells.
@pytest.mark.parametrize("kind", few(["Q4_K", "Q8_0"], of=[kind for kind in BLOCKS if kind != "Q4_1"]))
def test_gguf_files_take_as_many_bytes_as_is_said(checkpoint: Callable[..., Path], tmp_path: Path, kind: str) -> None:
    file = write_gguf(checkpoint("qwen3", **GGUF_SIZES), tmp_path / "model.gguf", kind=Type[kind])
    assert_quantised_weights_are_as_said(file)


@pytest.mark.parametrize(("family", "kind"), [("llama3", q4_k_m), *nightly(("gpt-oss", Type.MXFP4))])
def test_gguf_files_of_several_types_and_of_stacks_take_as_many_bytes_as_is_said(
    checkpoint: Callable[..., Path], tmp_path: Path, family: str, kind: Any
) -> None:
    file = write_gguf(checkpoint(family, **GGUF_SIZES), tmp_path / "model.gguf", kind=kind)
    assert_quantised_weights_are_as_said(file)


def assert_quantised_weights_are_as_said(folder: Path, tolerance: float = 0.0) -> None:
    for operations, device in ((native, "cpu"), (plain_torch, "cuda")):
        config = EngineConfig(model=str(folder), device=device)
        said = read_model_info(config, memory_bytes=MEMORY)
        decoder = load_decoder(ModelFolder.read(folder), config, operations=operations)
        assert said.weight_bytes == pytest.approx(decoder.weight_bytes, rel=tolerance)
        assert sum(each.file_bytes for each in said.formats) <= sum(
            file.stat().st_size for file in ([folder] if folder.is_file() else folder.glob("model*"))
        )
    if {each.format for each in said.formats}.difference(FILE_DTYPES):
        with pytest.raises(ConfigError, match="quantization=int8 is of checkpoints that are not quantised"):
            read_model_info(EngineConfig(model=str(folder), device="cpu", quantization="int8"))


def test_a_gpu_keeps_weights_as_plain_torch_does(checkpoint: Callable[..., Path]) -> None:
    folder = checkpoint("qwen3", vocab_size=391)
    config = EngineConfig(model=str(folder), device="cuda")
    said = read_model_info(config, memory_bytes=MEMORY)
    decoder = load_decoder(ModelFolder.read(folder), config, operations=plain_torch)
    assert said.weight_bytes == decoder.weight_bytes
    assert said.device == "cuda"
    room = int(0.9 * MEMORY) - said.weight_bytes
    block_bytes = said.block_size * sum(group.bytes_per_token for group in said.kv_groups)
    assert (said.kv_cache_bytes, said.num_kv_blocks) == (room - room % block_bytes, room // block_bytes)
    assert (
        read_model_info(
            EngineConfig(model=str(folder), device="cuda", kv_cache_dtype="fp8"), memory_bytes=MEMORY
        ).kv_cache_dtype
        == "float8_e4m3fn"
    )


@pytest.mark.parametrize("kv_cache_dtype", ["auto", "int8"])
async def test_an_engine_has_the_blocks_that_are_said(checkpoint: Callable[..., Path], kv_cache_dtype: Any) -> None:
    settings: dict[str, Any] = {
        **{"model": str(checkpoint("llama3", tokenizer=True)), "device": "cpu", "max_num_seqs": 1000},
        **{"kv_cache_memory_bytes": 2**20, "kv_cache_dtype": kv_cache_dtype},
    }
    said = await anyio.to_thread.run_sync(read_model_info, EngineConfig(**settings))
    async with Engine(**settings) as engine:
        assert engine.info.num_blocks == said.num_kv_blocks
        assert engine.info.weight_bytes == said.weight_bytes
        assert engine.info.max_model_len == said.max_model_len == said.longest
        assert (
            engine.info.kv_cache_bytes
            == said.num_kv_blocks * sum(group.bytes_per_token for group in said.kv_groups) * said.block_size
        )


def test_what_fits_follows_from_blocks_and_windows(checkpoint: Callable[..., Path]) -> None:
    """Three layers of 2 heads of 16 numbers of 4 bytes, in blocks of 16 tokens: 12 KiB a block."""
    config = EngineConfig(model=str(checkpoint("llama3")), device="cpu", kv_cache_memory_bytes=100 * 12288 + 5)
    said = read_model_info(config)
    assert said.kv_groups == [KVGroupInfo(window=None, num_layers=3, bytes_per_token=768)]
    assert (said.num_kv_blocks, said.longest) == (100, 256)
    assert said.fits == [Fit(num_tokens=256, num_sequences=6)]
    small = read_model_info(EngineConfig(model=config.model, device="cpu", kv_cache_memory_bytes=5 * 12288))
    assert (small.longest, small.fits[-1].num_sequences) == (80, 0)
    windows = EngineConfig(
        model=str(checkpoint("mistral")),
        device="cpu",
        kv_cache_memory_bytes=100 * 12288,
        max_num_batched_tokens=32,
        max_num_seqs=32,
    )
    # The 6 tokens before a window's last and the 32 of a step may lie in 4 blocks of 16.
    assert read_model_info(windows).fits == [Fit(num_tokens=256, num_sequences=25)]


def test_a_mixture_of_experts_says_what_a_token_uses(checkpoint: Callable[..., Path]) -> None:
    said = read_model_info(EngineConfig(model=str(checkpoint("mixtral")), device="cpu"))
    decoder_config = model_info.read_model_config(ModelFolder.read(Path(said.folder)), EngineConfig())
    experts = decoder_config.experts
    assert experts is not None
    of_one = 3 * decoder_config.hidden_size * experts.intermediate_size
    unused = decoder_config.num_layers * (experts.count - experts.num_chosen) * of_one
    assert said.num_active_parameters == said.num_parameters - unused


@pytest.mark.parametrize("family", few(["qwen3", "mixtral"], of=["llama3", "qwen3", "mixtral", "gemma3", "gpt2"]))
def test_a_config_alone_says_as_much_as_with_files(
    checkpoint: Callable[..., Path], tmp_path: Path, family: str
) -> None:
    folder = checkpoint(family)
    shutil.copy(folder / "config.json", tmp_path)
    said, expected = (
        read_model_info(EngineConfig(model=str(model), device="cpu", dtype="float32"), memory_bytes=2**30)
        for model in (tmp_path, folder)
    )
    assert expected.formats != said.formats == []
    assert said == msgspec.structs.replace(expected, folder=str(tmp_path), formats=[])


def test_a_config_alone_does_not_say_how_quantised_weights_are_kept(
    checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    config = json.loads((checkpoint("qwen3") / "config.json").read_text())
    stated = {"quantization_config": {"quant_method": "gptq", "bits": 4, "group_size": 16}}
    (tmp_path / "config.json").write_text(json.dumps(config | stated))
    said = read_model_info(EngineConfig(model=str(tmp_path), device="cpu"))
    dense = read_model_info(EngineConfig(model=str(checkpoint("qwen3")), device="cpu"))
    assert (said.num_parameters, said.kv_groups) == (dense.num_parameters, dense.kv_groups)
    assert (said.weight_bytes, said.kv_cache_bytes, said.longest, said.fits) == (None, None, None, [])


def test_weights_that_are_not_here_and_of_no_stated_dtype_are_taken_for_bfloat16(
    checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    config = json.loads((checkpoint("qwen3") / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "dtype": None}))
    said = read_model_info(EngineConfig(model=str(tmp_path), device="cpu"))
    assert said.dtype == said.kv_cache_dtype == "bfloat16"


def test_no_weights_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Files that end behind their headers, as far as their sizes say, do as well; and there is no network to ask."""
    folder = shutil.copytree(DEMO_MODEL, tmp_path / "model")
    expected = read_model_info(EngineConfig(model=str(folder)), memory_bytes=MEMORY)
    file = folder / "model.safetensors"
    size = file.stat().st_size
    header = 8 + int.from_bytes(file.read_bytes()[:8], "little")
    with file.open("r+b") as weights:
        weights.truncate(header)
        weights.truncate(size)  # a hole
    assert read_model_info(EngineConfig(model=str(folder)), memory_bytes=MEMORY) == expected


def test_what_cannot_be_is_refused_with_the_reason(checkpoint: Callable[..., Path]) -> None:
    model = str(checkpoint("llama3"))
    with pytest.raises(ModelLoadError, match="hf download org/model --revision v1"):
        read_model_info(EngineConfig(model="org/model", revision="v1"))
    with pytest.raises(ConfigError, match="say how much memory"):
        read_model_info(EngineConfig(model=model, device="cuda:5"))
    with pytest.raises(ConfigError, match="quantization='int8' is for a CPU"):
        read_model_info(EngineConfig(model=model, device="cuda", quantization="int8"), memory_bytes=MEMORY)
    with pytest.raises(ConfigError, match="'fp8' needs a GPU"):
        read_model_info(EngineConfig(model=model, device="cpu", kv_cache_dtype="fp8"))
    with pytest.raises(ConfigError, match="max_model_len=1000"):
        read_model_info(EngineConfig(model=model, max_model_len=1000))
