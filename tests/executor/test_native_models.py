"""Models of each dtype and quantisation by just those parts of the native kernels that are theirs."""

from __future__ import annotations

from typing import Any

import pytest
from nightly import nightly

from aioengine import ConfigError, Engine


@pytest.mark.parametrize("quantization", [None, "int8", "int4"])
@pytest.mark.parametrize("dtype", [*nightly("float32"), "bfloat16", *nightly("float16")])
async def test_a_model_finds_all_its_kernels(dtype: str, quantization: str | None) -> None:
    config = {"dtype": dtype, "quantization": quantization, "kv_cache_memory_bytes": 2**22, "max_model_len": 128}
    async with Engine(**config) as engine:
        for params in ({"temperature": 0.0}, {"seed": 1, "top_p": 0.9, "logprobs": 2, "prompt_logprobs": 1}):
            output = await engine.generate("Once upon a time", max_tokens=8, ignore_eos=True, **params)
            assert len(output.outputs[0].token_ids) == 8


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        *(({"num_threads": number}, "num_threads") for number in (0, -1, 10_000, 1.5, True)),
        ({"quantization": "int7"}, "choose one of 'int4', 'int8'"),
        ({"dtype": "int8"}, "choose one of 'auto', 'bfloat16'"),
        ({"kv_cache_dtype": "int4"}, "choose one of 'auto', 'fp8', 'int8'"),
    ],
)
async def test_values_that_a_cpu_cannot_take_are_refused_before_a_model_is_loaded(
    fields: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        await Engine.start("no such model", **fields)
