"""Models of each dtype and quantisation by just those parts of the native kernels that are theirs."""

from __future__ import annotations

import pytest

from aioengine import Engine


@pytest.mark.parametrize("quantization", [None, "int8", "int4"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
async def test_a_model_finds_all_its_kernels(dtype: str, quantization: str | None) -> None:
    config = {"dtype": dtype, "quantization": quantization, "kv_cache_memory_bytes": 2**22, "max_model_len": 128}
    async with Engine(**config) as engine:
        for params in ({"temperature": 0.0}, {"seed": 1, "top_p": 0.9, "logprobs": 2, "prompt_logprobs": 1}):
            output = await engine.generate("Once upon a time", max_tokens=8, ignore_eos=True, **params)
            assert len(output.outputs[0].token_ids) == 8
