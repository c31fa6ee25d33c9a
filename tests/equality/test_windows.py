"""Layers with windows, alone and beside others, through the whole engine: greedy tokens are transformers' while blocks
that a window has passed go to other sequences, on the CPU and on a device that is late."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from checkpoints import make_checkpoint
from equality.conftest import MAX_MODEL_LEN, SEED, Oracle, bytes_a_token, random_ids, starting
from executor.late_device import start_late
from integrity import check_integrity
from layouts import layout_of
from nightly import nightly

from aioengine import Engine
from aioengine.outputs.metrics import RequestMetrics, StepRecord
from aioengine.scheduler.scheduler import Scheduler
from doubles.fake_accelerator import FakeAccelerator

BLOCK_SIZE = 4
BUDGET = 24
WINDOWS: dict[str, tuple[int | None, ...]] = {"qwen2-window": (None, 8, 8), "mistral": (8,)}
"""Of the groups of layers."""


class Case(NamedTuple):
    prompt: list[int]
    max_tokens: int
    token_ids: list[int]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A family's folder, and requests for it with what transformers generates."""

    @cache
    def make(family: str) -> tuple[Path, list[Case]]:
        folder = make_checkpoint(tmp_path_factory.mktemp(family), family)
        rng, oracle = random.Random(SEED), Oracle(folder)
        shared = random_ids(rng, 90)
        prompts = [shared[:length] + random_ids(rng, 5) for length in (1, 7, 23, 40, 66, 90, 90, 90)]
        return folder, [Case(prompt, 40, oracle.generate(prompt, 40).token_ids) for prompt in prompts]

    return make


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


@asynccontextmanager
async def serving(folder: Path, device: str, depth: int, **fields: Any) -> AsyncIterator[tuple[Engine, Held]]:
    fields = {"block_size": BLOCK_SIZE, "max_num_batched_tokens": BUDGET, "max_num_seqs": 8, **fields}
    if device == "late":
        fields["max_model_len"] = MAX_MODEL_LEN
        fields["executor"] = await start_late(folder, FakeAccelerator(), max_in_flight=depth, **fields)
    async with starting(folder, depth, **fields) as engine:
        assert engine._runtime is not None
        scheduler: Scheduler = engine._runtime.core.scheduler
        held = Held(scheduler)
        engine.add_observer(held)
        yield engine, held
        check_integrity(scheduler)
        assert scheduler.kv.pools[0].num_free == scheduler.kv.pools[0].num_blocks


async def check(engine: Engine, case: Case) -> None:
    out = await engine.generate(case.prompt, max_tokens=case.max_tokens, temperature=0.0, ignore_eos=True)
    assert out.outputs[0].token_ids == case.token_ids


@pytest.mark.parametrize("family", WINDOWS)
@pytest.mark.parametrize(("device", "depth"), [*nightly(("cpu", 1)), ("cpu", 2), *nightly(("late", 2))])
async def test_prompts_of_many_windows_in_a_pool_that_is_tight(
    checkpoint: Any, family: str, device: str, depth: int
) -> None:
    folder, cases = checkpoint(family)
    layout = layout_of(*WINDOWS[family])
    most = layout.most_held(MAX_MODEL_LEN, BLOCK_SIZE, max_in_flight=depth, max_step_tokens=BUDGET)
    bytes_of_token = await asyncio.to_thread(bytes_a_token, folder)
    kv_bytes = int(1.2 * sum(most) * BLOCK_SIZE * bytes_of_token / len(most))
    async with serving(folder, device, depth, kv_cache_memory_bytes=kv_bytes) as (engine, held):
        for _ in range(2):
            async with asyncio.TaskGroup() as group:
                for case in cases:
                    group.create_task(check(engine, case))
        stats = engine._running().core.stats()
        # Where all layers have windows a sequence grows into what it gives up.
        assert stats.preemptions > 0 or None not in WINDOWS[family]
        assert stats.prefix_cache_hits > 0
        longest = -(-max(len(case.prompt) + case.max_tokens - 1 for case in cases) // BLOCK_SIZE)
        for of_group, of_most, window in zip(held.most, most, WINDOWS[family], strict=True):
            assert of_group == longest if window is None else of_group <= of_most < longest
