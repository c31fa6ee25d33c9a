"""A thousand requests with random cancels on the real engine."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from checkpoints import NUM_SPECIAL, make_checkpoint
from equality.conftest import MAX_MODEL_LEN, VOCAB_SIZE, starting
from integrity import check_integrity
from nightly import nightly

from aioengine import Engine, InvalidRequest

NUM_REQUESTS = 1000


def make_request(rng: random.Random, shared: list[int]) -> tuple[list[int], dict[str, Any]]:
    """A prompt, one in three with a shared beginning, and sampling parameters; one in fifty is invalid."""
    start = shared[: rng.choice([0, 0, 20, 40])]
    prompt = start + [rng.randrange(NUM_SPECIAL, VOCAB_SIZE) for _ in range(rng.randint(1, 60))]
    params: dict[str, Any] = {"max_tokens": rng.randint(1, 24), "seed": rng.randrange(1000)}
    params["temperature"] = rng.choice([0.0, 0.7, 1.3])
    params["ignore_eos"] = rng.random() < 0.5
    if rng.random() < 0.1:
        params["stop_token_ids"] = [rng.randrange(VOCAB_SIZE) for _ in range(20)]
    if rng.random() < 0.1:
        params["logprobs"] = rng.randint(0, 5)
    if rng.random() < 0.02:
        params["top_p"] = 7.0
    return prompt, params


async def request(engine: Engine, rng: random.Random, shared: list[int], ends: Counter[str]) -> None:
    """Run one request in one of the ways that there are, and note its one end."""
    prompt, params = make_request(rng, shared)
    way = rng.choice(["generate", "stream", "leave", "abort", "cancel"])
    request_id = f"{way}-{rng.randrange(50)}"  # ids repeat
    patience = rng.randint(0, 6)
    try:
        if way in ("generate", "cancel"):
            out = await engine.generate(prompt, request_id=request_id, **params)
            assert out.finished
            ends[str(out.outputs[0].finish_reason)] += 1
            return
        async with engine.stream(prompt, request_id=request_id, **params) as stream:
            async for _ in stream:
                patience -= 1
                if way == "leave" and patience < 0:
                    ends["left"] += 1
                    return
                if way == "abort" and patience < 0:
                    engine.abort(request_id)
            result = stream.result
            assert result.finished
            ends[str(result.outputs[0].finish_reason)] += 1
    except InvalidRequest as error:
        ends[f"invalid {error.param}"] += 1


@pytest.mark.nightly
@pytest.mark.parametrize(("depth", "seed"), [(2, 1), *nightly((1, 1), (1, 2), (2, 2))])
async def test_a_thousand_requests_end_once_each_and_leave_nothing(tmp_path: Path, depth: int, seed: int) -> None:
    rng = random.Random(seed)
    shared = [rng.randrange(NUM_SPECIAL, VOCAB_SIZE) for _ in range(40)]
    ends: Counter[str] = Counter()
    async with starting(
        make_checkpoint(tmp_path, "qwen3"),
        depth,
        max_num_seqs=32,
        max_num_batched_tokens=160,
        max_waiting=40,
        kv_cache_memory_bytes=4 * MAX_MODEL_LEN * 2 * 3 * 2 * 32 * 4,
    ) as engine:
        tasks: list[asyncio.Task[None]] = []
        async with asyncio.TaskGroup() as group:
            for _ in range(NUM_REQUESTS):
                tasks.append(group.create_task(request(engine, rng, shared, ends)))
                for _ in range(rng.choice([0, 0, 0, 1, 2, 5])):
                    await asyncio.sleep(0)
                if rng.random() < 0.15:
                    rng.choice(tasks).cancel()
        assert engine._runtime is not None
        core = engine._runtime.core
        check_integrity(core.scheduler)
        stats = core.stats()
        assert stats.free_blocks == stats.num_blocks
        assert stats.running == stats.waiting == stats.blocked == 0
        assert not engine._runtime.admission.requests
    cancelled = sum(task.cancelled() for task in tasks)
    assert sum(ends.values()) + cancelled == NUM_REQUESTS
    assert {"length", "stop", "abort", "left", "invalid top_p"} <= set(ends), ends
    assert cancelled > 20
