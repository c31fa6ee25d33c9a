"""Every family from files of every kind, through the whole engine: what transformers makes of their dense equal."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path

import pytest
import torch
from checkpoints import FAMILIES, OTHERS
from models.quantised_checkpoints import awq, bitsandbytes_4bit, fp8, gptq, write
from models.reference import FILE, Checkpoint, reference, token_ids
from models.test_formats import NF4, as_bin, gptq_config
from nightly import few
from safetensors.torch import load_file

from aioengine import Engine, ModelLoadError
from aioengine.config import EngineConfig
from aioengine.models.folder import ModelFolder
from aioengine.models.implementations import load_model

GROUP = 8
"""Divides the sizes of all families."""

CODINGS = {
    "GPTQ": (gptq(4, GROUP), gptq_config(4, GROUP)),
    "AWQ": (awq(GROUP), {"quant_method": "awq", "bits": 4, "group_size": GROUP, "version": "gemm"}),
    "FP8": (fp8(32, 32, ".weight_scale_inv"), {"quant_method": "fp8", "weight_block_size": [32, 32]}),
    "NF4": (bitsandbytes_4bit("nf4"), NF4),
}
KINDS_OF: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(FAMILIES, (".bin", *CODINGS)),
    **dict.fromkeys(OTHERS, (".bin", "GPTQ", "FP8")),
    "gpt2": (".bin", "FP8"),  # its matrices are [in, out], and GPTQ's files have all of them the other way around
}
"""Of each family the kinds of files, beside safetensors, that it is tested with."""

OF_CHECK = [("phi3", "GPTQ"), ("gemma2", "FP8"), ("opt", ".bin")]
MATRIX_OF_LAYER = re.compile(r"(?:.+\.)?(?:layers|h|blocks)\.\d+\..+(?<!gate)(?<!router)\.weight")
NUM_TOKENS, MAX_TOKENS = 24, 8


def written(source: Path, folder: Path, kind: str) -> tuple[Path, Path]:
    """The checkpoint in files of that kind, and its dense equal."""
    if kind == ".bin":
        return as_bin(source, folder / "bin"), source
    matrices = {
        name
        for name, tensor in load_file(source / FILE).items()
        if tensor.dim() == 2 and MATRIX_OF_LAYER.fullmatch(name)
    }
    assert matrices
    encode, config = CODINGS[kind]
    return write(source, folder, encode, config, matrices.__contains__)


@pytest.mark.parametrize(
    ("family", "kind"), few(OF_CHECK, ((family, kind) for family, kinds in KINDS_OF.items() for kind in kinds))
)
async def test_tokens_and_logprobs_are_those_of_the_dense_equal(
    checkpoint: Checkpoint, tmp_path: Path, family: str, kind: str
) -> None:
    folder, dense = await asyncio.to_thread(written, checkpoint(family), tmp_path, kind)
    prompt = token_ids(num_tokens=NUM_TOKENS).tolist()
    async with Engine(
        str(folder), device="cpu", num_threads=1, kv_cache_memory_bytes=2**22, max_model_len=96, show_progress=False
    ) as engine:
        output = await engine.generate(
            prompt, max_tokens=MAX_TOKENS, temperature=0.0, ignore_eos=True, prompt_logprobs=0, logprobs=0
        )
    ids = [*prompt, *output.outputs[0].token_ids]
    lines = [*(output.prompt_logprobs or [])[1:], *(output.outputs[0].logprobs or [])]
    found = torch.tensor([line[token].logprob for line, token in zip(lines, ids[1:], strict=True) if line is not None])
    wanted = await asyncio.to_thread(lambda: reference(dense, torch.tensor(ids[:-1]), attn_implementation="eager"))
    torch.testing.assert_close(found, wanted.gather(1, torch.tensor(ids[1:])[:, None])[:, 0], atol=1e-3, rtol=0)
    assert ids[NUM_TOKENS:] == wanted[NUM_TOKENS - 1 :].argmax(-1).tolist()


def test_coded_matrices_of_gpt2_are_refused(checkpoint: Checkpoint, tmp_path: Path) -> None:
    coded, _ = write(
        checkpoint("gpt2"),
        tmp_path,
        lambda weight: gptq(4, GROUP)(weight.T),
        gptq_config(4, GROUP),
        lambda name: name.endswith("attn.c_attn.weight"),
    )
    with pytest.raises(ModelLoadError, match=r"another shape for tensor .*c_attn\.weight"):
        load_model(ModelFolder.read(coded), EngineConfig())
