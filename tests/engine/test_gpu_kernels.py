"""The whole path in Triton's interpreter: requests through the public `Engine`, over the kernels and a late device."""

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from checkpoints import cached_checkpoints
from executor.gpu import start_gpu

from aioengine import Engine
from aioengine.executor.gpu_runner import GpuRunner
from aioengine.kernels import triton_operations
from doubles.fake_accelerator import FakeAccelerator

MAX_TOKENS = 3

REQUESTS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 0.9, "seed": 3, "top_k": 7, "top_p": 0.9, "logprobs": 2},
    {"temperature": 1.0, "seed": 4, "repetition_penalty": 1.3, "frequency_penalty": 0.4, "logit_bias": {5: 2.0}},
]
"""All of these share steps, prefill and decode."""


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    return cached_checkpoints(tmp_path_factory.mktemp("checkpoints"))


async def outputs(engine: Engine) -> list[Any]:
    async with engine:
        prompts = [[(7 * i + 3 * request) % 90 + 3 for i in range(9 + request)] for request in range(len(REQUESTS))]
        outs = await asyncio.gather(
            *(
                engine.generate(prompt, max_tokens=MAX_TOKENS, ignore_eos=True, detokenize=False, **request)
                for prompt, request in zip(prompts, REQUESTS, strict=True)
            )
        )
    return [out.outputs[0] for out in outs]


# The interpreter computes with numpy, which says so where a hash wraps around.
@pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")
async def test_the_kernels_bring_the_tokens_of_the_cpu(
    checkpoint: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    # Nothing is compiled here, and to rehearse each kind of step takes minutes.
    monkeypatch.setattr(GpuRunner, "warm_up", lambda self, *, captures_all, on_capture: None)
    folder = checkpoint("qwen3", num_hidden_layers=1, vocab_size=97, tokenizer=True)
    fields = {"dtype": "float32", "cuda_graphs": "off", "max_num_batched_tokens": 32}
    executor = await start_gpu(folder, FakeAccelerator(), triton_operations, **fields)
    common = {"dtype": "float32", "max_num_seqs": 4, "block_size": 4}
    expected = await outputs(Engine(str(folder), device="cpu", **common))
    found = await outputs(Engine(str(folder), executor=executor, **common))
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.token_ids == theirs.token_ids
        assert len(ours.token_ids) == MAX_TOKENS
    for of_ours, of_theirs in zip(found[1].logprobs, expected[1].logprobs, strict=True):
        assert of_ours.keys() == of_theirs.keys()
        for token, line in of_ours.items():
            assert line.rank == of_theirs[token].rank
            assert line.logprob == pytest.approx(of_theirs[token].logprob, abs=1e-4)
