"""A storm of prompts that begin alike, come in chunks and have too little room for their keys and values.

Greedy tokens are transformers', of every native family on a device that is late, as a GPU is. Blocks that a window has
passed go to other sequences.
"""

from __future__ import annotations

import asyncio
import random
from pathlib import Path

import pytest
from checkpoints import FAMILIES, make_checkpoint
from equality.conftest import MAX_MODEL_LEN, SEED, Oracle, bytes_a_token, random_ids, starting
from executor.late_device import start_late
from integrity import check_integrity
from nightly import nightly

from aioengine import Engine
from aioengine.config import EngineConfig
from aioengine.models.folder import ModelFolder
from aioengine.models.implementations import read_model_config
from aioengine.outputs.metrics import RequestMetrics, StepRecord
from aioengine.scheduler.cache_layout import make_layout
from aioengine.scheduler.scheduler import Scheduler
from doubles.fake_accelerator import FakeAccelerator

BUDGET, BLOCK_SIZE, MAX_TOKENS = 24, 4, 40
LENGTHS = (1, 7, 23, 40, 66, 90, 90, 90)
"""Tokens of the shared beginning in a prompt; five ids of its own follow."""

WITH_WINDOWS = ("qwen2-window", "mistral")
RUNS = [
    *((family, "cpu", 2) for family in WITH_WINDOWS),
    *nightly(*((family, "cpu", 1) for family in WITH_WINDOWS), *((family, "late", 2) for family in FAMILIES)),
]
"""(family, device, steps in flight)"""


class Held:
    """An observer of how many blocks a sequence has held in each group after a step, at the most."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self.most = [0] * len(scheduler.kv.layout.groups)

    def on_step(self, record: StepRecord) -> None:
        for sequence in self._scheduler.sequences():
            tables = zip(sequence.block_ids, sequence.num_passed_blocks, strict=True)
            for group, (block_ids, passed) in enumerate(tables):
                self.most[group] = max(self.most[group], len(block_ids) - passed)

    def on_request(self, metrics: RequestMetrics, finish_reasons: tuple[str, ...]) -> None:
        pass


@pytest.mark.parametrize(("family", "device", "depth"), RUNS)
async def test_a_storm_in_a_tight_cache_brings_the_tokens_of_transformers(
    family: str, device: str, depth: int, tmp_path: Path
) -> None:
    folder = await asyncio.to_thread(make_checkpoint, tmp_path / family, family)
    rng, oracle = random.Random(SEED), await asyncio.to_thread(Oracle, folder)
    shared = random_ids(rng, max(LENGTHS))
    prompts = [shared[:length] + random_ids(rng, 5) for length in LENGTHS]
    wanted = [oracle.generate(prompt, MAX_TOKENS).token_ids for prompt in prompts]

    async def check(engine: Engine, prompt: list[int], token_ids: list[int]) -> None:
        output = await engine.generate(prompt, max_tokens=MAX_TOKENS, temperature=0.0, ignore_eos=True)
        assert output.outputs[0].token_ids == token_ids

    config = await asyncio.to_thread(lambda: read_model_config(ModelFolder.read(folder), EngineConfig()))
    layout = make_layout(config.caches)
    most = layout.most_held(MAX_MODEL_LEN, BLOCK_SIZE, max_in_flight=depth, max_step_tokens=BUDGET)
    bytes_of_token = await asyncio.to_thread(bytes_a_token, folder)
    fields = {
        "block_size": BLOCK_SIZE,
        "max_num_batched_tokens": BUDGET,
        "max_num_seqs": len(prompts),
        "max_model_len": MAX_MODEL_LEN,
        # A little more than the longest sequence alone takes.
        "kv_cache_memory_bytes": int(1.2 * sum(most) * BLOCK_SIZE * bytes_of_token / len(most)),
    }
    if device == "late":
        fields["executor"] = await start_late(folder, FakeAccelerator(), max_in_flight=depth, **fields)
    async with starting(folder, depth, **fields) as engine:
        assert engine._runtime is not None
        core = engine._runtime.core
        held = Held(core.scheduler)
        engine.add_observer(held)
        for _ in range(2):
            async with asyncio.TaskGroup() as group:
                for prompt, token_ids in zip(prompts, wanted, strict=True):
                    group.create_task(check(engine, prompt, token_ids))
        stats = core.stats()
        reaches = [group.reach for group in layout.groups]
        # Where all layers have windows a sequence grows into what it gives up.
        assert stats.preemptions > 0 or None not in reaches
        assert stats.prefix_cache_hits > 0
        assert stats.free_blocks == stats.num_blocks
        check_integrity(core.scheduler)
        longest = -(-(max(map(len, prompts)) + MAX_TOKENS - 1) // BLOCK_SIZE)
        for of_group, of_most, reach in zip(held.most, most, reaches, strict=True):
            assert of_group == longest if reach is None else of_group <= of_most
            assert reach is None or of_most < longest or family not in WITH_WINDOWS
