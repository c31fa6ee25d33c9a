"""Checkpoints in each format: weights are what its own library, or its published layout, makes of the codes."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from models.quantised_checkpoints import (
    FILE,
    awq,
    bitsandbytes_4bit,
    bitsandbytes_8bit,
    compressed_tensors,
    fp8,
    gptq,
    is_layers_matrix,
    write,
)
from models.reference import load
from safetensors.torch import load_file

from aioengine.models.checkpoint import HEAD
from aioengine.models.decoder import Decoder, Linear

Checkpoint = Callable[..., Path]
Write = Callable[[Path, Path], tuple[Path, Path]]

QUERY = "model.layers.1.self_attn.q_proj"
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
    "nf4": of_layout(bitsandbytes_4bit("nf4"), **NF4),
    "nf4 twice": of_layout(bitsandbytes_4bit("nf4", is_nested=True), **NF4),
    "nf4 in blocks across outputs": of_layout(bitsandbytes_4bit("nf4", blocksize=256), **NF4),
    "fp4": of_layout(bitsandbytes_4bit("fp4"), **NF4),
    "llm.int8": of_layout(bitsandbytes_8bit, quant_method="bitsandbytes", load_in_8bit=True),
}
KEPT = {"gptq in another order": {False}, "nf4 in blocks across outputs": {False}}
"""Whether matrices of layers stay codes, if not all do."""
ROUNDING = {"compressed nvfp4": 2**-7}
"""Of values, if not float32's: this one the library gives in bfloat16."""


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


def assert_near(decoder: Decoder, dense: Path, rounding: float = 2e-6) -> None:
    saved = load_file(dense / FILE)
    for name, tensor in decoder.tensors(decoder.shapes()):
        torch.testing.assert_close(
            tensor, saved[name], rtol=rounding, atol=1e-7, msg=lambda text, n=name: f"{n}: {text}"
        )


# The library's, of its own calls of torch.
@pytest.mark.filterwarnings("ignore:An output with one or more elements was resized:UserWarning")
@pytest.mark.parametrize("name", FORMATS)
def test_weights_are_what_the_codes_stand_for(made: Made, name: str) -> None:
    coded, dense = made(name)
    decoder = load(coded)
    assert_near(decoder, dense, ROUNDING.get(name, 2e-6))
    kept = {
        linear.packed.coding is not None
        for layer in decoder.layers
        for linear in layer.modules()
        if isinstance(linear, Linear)
    }
    assert kept == KEPT.get(name, {True})
