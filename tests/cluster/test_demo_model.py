"""The bundled model in float32 at replicas that die: what requests bring is what they bring undisturbed."""

from __future__ import annotations

import asyncio
import signal
from typing import Any

import pytest
from cluster.harness import CONFIG, Reader, brought, cluster, is_alike, outputs_of, plain, reading, until_read

from aioengine import Engine

pytestmark = [pytest.mark.usefixtures("faults", "quiet_log"), pytest.mark.nightly]

MODEL: dict[str, Any] = {
    "dtype": "float32",  # a tie of two tokens is then too rare to be met here
    "max_model_len": 512,
    "num_threads": 1,
    "kv_cache_memory_bytes": 2**25,
}
SCHEMA = {"type": "object", "properties": {"n": {"type": "integer"}, "s": {"type": "string", "maxLength": 30}}}
WORDS = "Once upon a time there was a fox who lived in a tree with an owl. "
KINDS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 0.0, "n": 2},
    {"seed": 1},
    {"seed": 2, "n": 3, "top_p": 0.9},
    {"seed": 3, "logprobs": 3},
    {"seed": 4, "prompt_logprobs": 2},
    {"seed": 5, "structured": SCHEMA, "ignore_eos": False},
    {"seed": 6, "repetition_penalty": 1.3, "presence_penalty": 0.5, "frequency_penalty": 0.2},
    {"seed": 7, "min_p": 0.05, "top_k": 40, "logit_bias": {100: 3.0}},
    {"seed": 8, "max_unread_tokens": 3},
    {"seed": 9, "stop": [" the", "ed "], "ignore_eos": False},
    {"seed": 10, "bad_words": ["fox", "owl"], "min_tokens": 20},
]


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
async def test_greedy_and_seeded_outputs_of_float32_survive_deaths(number: int) -> None:
    readers = [
        Reader(WORDS * (1 + place % 4) + str(place), **{"max_tokens": 150, **kind})
        for place, kind in enumerate(KINDS * 2)
    ]
    async with Engine(**CONFIG, **MODEL) as engine:
        expected = await asyncio.gather(*(engine.generate(each.prompt, **plain(each.sampling)) for each in readers))
    long_ones = [reader for reader in readers if reader.sampling["ignore_eos"]]
    async with cluster(2, executor=None, stall_timeout_s=3.0, **MODEL) as replicas:
        async with reading(replicas.engine, readers):
            for at, rank in ((10, 0), (60, 1)):
                await until_read(long_ones, at)
                await replicas.until_serving_at_least(1)
                if rank in replicas.ranks():
                    replicas.kill(rank, number)
        for found, output in zip(outputs_of(readers), expected, strict=True):
            assert is_alike(found, brought(output))
        await replicas.until_serving(2)
