"""Every native family on a device that is late, as a GPU is: greedy tokens are transformers' in a storm of prompts that
begin alike, come in chunks and have too little room for their KV, with two steps in flight."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path

import pytest
from checkpoints import FAMILIES, make_checkpoint
from equality.conftest import MAX_MODEL_LEN, SEED, Oracle, bytes_a_token, random_ids, starting
from executor.late_device import start_late
from integrity import check_integrity
from nightly import few

from aioengine import Engine
from aioengine.config import EngineConfig
from aioengine.models.folder import ModelFolder
from aioengine.models.implementations import read_model_config
from aioengine.scheduler.cache_layout import make_layout
from doubles.fake_accelerator import FakeAccelerator

DEPTH, BUDGET, BLOCK_SIZE = 2, 24, 4
MAX_TOKENS = 40
LENGTHS = (1, 7, 23, 40, 66, 90, 90, 90)
"""Of what a prompt has of the shared beginning; five ids of its own follow."""


def tight_cache(folder: Path) -> int:
    """Bytes for a little more than the longest sequence alone."""
    layout = make_layout(read_model_config(ModelFolder.read(folder), EngineConfig()).caches)
    most = layout.most_held(MAX_MODEL_LEN, BLOCK_SIZE, max_in_flight=DEPTH, max_step_tokens=BUDGET)
    return int(1.2 * sum(most) * BLOCK_SIZE * bytes_a_token(folder) / len(most))


@pytest.mark.nightly
@pytest.mark.parametrize("family", few(["gpt-oss"], of=FAMILIES))
async def test_a_storm_on_a_late_device_brings_the_tokens_of_transformers(family: str, tmp_path: Path) -> None:
    folder = await asyncio.to_thread(make_checkpoint, tmp_path / family, family)
    rng, oracle = random.Random(SEED), await asyncio.to_thread(Oracle, folder)
    shared = random_ids(rng, max(LENGTHS))
    prompts = [shared[:length] + random_ids(rng, 5) for length in LENGTHS]
    wanted = [oracle.generate(prompt, MAX_TOKENS).token_ids for prompt in prompts]

    async def check(engine: Engine, prompt: list[int], token_ids: list[int]) -> None:
        output = await engine.generate(prompt, max_tokens=MAX_TOKENS, temperature=0.0, ignore_eos=True)
        assert output.outputs[0].token_ids == token_ids

    fields = {
        "block_size": BLOCK_SIZE,
        "max_num_batched_tokens": BUDGET,
        "max_num_seqs": len(prompts),
        "max_model_len": MAX_MODEL_LEN,
        "kv_cache_memory_bytes": await asyncio.to_thread(tight_cache, folder),
    }
    executor = await start_late(folder, FakeAccelerator(), max_in_flight=DEPTH, **fields)
    async with starting(folder, DEPTH, executor=executor, **fields) as engine:
        assert engine._runtime is not None
        core = engine._runtime.core
        for _ in range(2):
            async with asyncio.TaskGroup() as group:
                for prompt, token_ids in zip(prompts, wanted, strict=True):
                    group.create_task(check(engine, prompt, token_ids))
        stats = core.stats()
        # Where all layers have windows a sequence grows into what it gives up.
        assert stats.preemptions > 0 or core.scheduler.kv.layout.groups[0].reach is not None
        assert stats.prefix_cache_hits > 0
        assert stats.free_blocks == stats.num_blocks
        check_integrity(core.scheduler)
