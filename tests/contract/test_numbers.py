"""What an engine tells of itself: its numbers, its records, its health, its log."""

from __future__ import annotations

import asyncio
import logging
import math
from typing import Any

import pytest
from contract.ways import BOTH_LOOPS, has_load
from engine.oracle import Witness
from nightly import nightly
from waiting import until

from aioengine import Engine

pytestmark = pytest.mark.asyncio(loop_scope="module")

PROMPT = list(range(100, 149))
WORD = "xylophone"


@BOTH_LOOPS
async def test_what_was_done_is_counted_as_it_is_in_process(make_engine: Any, make_local: Any, tasks: Any) -> None:
    counts = []
    for engine in (await make_engine(), await make_local()):
        assert engine.stats().finished == {"stop": 0, "length": 0, "abort": 0, "error": 0}
        for seed in range(3):
            await engine.generate(PROMPT, seed=seed, max_tokens=10)
        await engine.generate(PROMPT, seed=9, n=2, max_tokens=5)
        await engine.generate(PROMPT, seed=9, n=2, temperature=0.0, max_tokens=5)
        async with engine.stream(PROMPT, seed=10, max_tokens=100, max_unread_tokens=1) as stream:
            await anext(stream)
            await until(has_load(engine, running=0, waiting=1))
            by_reason = engine.metrics.num_requests_waiting_by_reason
            assert (by_reason.of("capacity").value, by_reason.of("deferred").value) == (0, 1)
        await engine.generate(PROMPT, allowed_token_ids=[2], max_tokens=5)
        stats = engine.stats()
        assert (stats.running, stats.waiting) == (0, 0)
        assert stats.kv_cache_usage == 0.0
        assert stats.time_to_first_token_s.count == 7
        assert stats.e2e_latency_s.count == 7
        assert stats.step_time_s.count == stats.device_time_s.count > 0
        counts.append((stats.finished, stats.prompt_tokens, stats.prefix_cache_hit_rate))
        metrics = engine.metrics
        assert metrics.request_generation_tokens.count == 7
        assert metrics.generation_tokens.value == stats.generation_tokens >= 3 * 10 + 2 * 5 + 5 + 1 + 1
        assert {metric.name for metric in metrics.collect()} >= {"prompt_tokens", "request_success"}
    assert counts[0] == counts[1]
    assert counts[0][0] == {"stop": 1, "length": 7, "abort": 1, "error": 0}
    assert counts[0][1] == 7 * len(PROMPT)


@BOTH_LOOPS
async def test_a_requests_times_are_in_order(engine: Engine) -> None:
    for output in await asyncio.gather(*(engine.generate(PROMPT, seed=seed, max_tokens=20) for seed in range(5))):
        metrics = output.metrics
        assert metrics is not None
        times = (
            metrics.queue_time_s,
            metrics.prefill_time_s,
            metrics.decode_time_s,
            metrics.mean_inter_token_latency_s,
        )
        assert all(time_s is not None and math.isfinite(time_s) and time_s >= 0 for time_s in times)
        assert metrics.queue_time_s + metrics.prefill_time_s == pytest.approx(metrics.time_to_first_token_s, abs=1e-6)
        assert metrics.time_to_first_token_s + metrics.decode_time_s <= metrics.e2e_latency_s + 1e-6
        assert metrics.inference_time_s == pytest.approx(metrics.prefill_time_s + metrics.decode_time_s)
        assert (metrics.num_prompt_tokens, metrics.num_generation_tokens) == (len(PROMPT), 20)
        assert metrics.e2e_latency_s < 60


@BOTH_LOOPS
async def test_observers_see_each_step_and_each_end(engine: Engine) -> None:
    witness, late = Witness(), Witness()
    stop = engine.add_observer(witness)
    await engine.generate(PROMPT, seed=1, max_tokens=10, n=2, cache_salt="observed")
    await until(lambda: sum(record.num_sampled for record in witness.steps) == 20)
    stop()
    stop()
    engine.add_observer(late)()
    await engine.generate(PROMPT, max_tokens=3)
    assert witness.reasons == [("length", "length")]
    assert not late.steps
    steps = [record.step for record in witness.steps]
    assert steps == list(range(steps[0], steps[0] + len(steps)))
    assert sum(record.num_prompt_tokens for record in witness.steps) == len(PROMPT)
    assert sum(record.num_tokens for record in witness.steps) == len(PROMPT) + 2 * 9
    assert sum(len(record.times_to_first_token_s) for record in witness.steps) == 1
    gaps = [gap_s for record in witness.steps for gap_s in record.inter_token_latencies_s.tolist()]
    assert len(gaps) == 18
    for record in witness.steps:
        assert record.step_time_s >= 0
        assert record.device_time_s >= 0
        assert record.loop_lag_s is None or record.loop_lag_s >= 0
        assert 0 <= record.free_blocks <= record.num_blocks
    assert all(gap_s >= 0 for gap_s in gaps)


async def test_an_engine_is_described_as_it_is_in_process(engine: Engine, reference: Engine) -> None:
    assert engine.info == reference.info
    assert engine.describe() == reference.describe()
    assert engine.config == reference.config
    assert engine.get_tokenizer().encode("a fox") == reference.get_tokenizer().encode("a fox")


# Log


@pytest.mark.parametrize(
    ("config", "is_logged", "has_prompt"),
    [
        *nightly(({}, False, False)),
        ({"log_prompts": True}, False, False),
        *nightly(({"log_requests": True}, True, False)),
        ({"log_requests": True, "log_prompts": True}, True, True),
    ],
    ids=["off", "no requests, so no prompts", "requests", "requests and prompts"],
)
async def test_requests_are_logged_as_was_asked_and_prompts_only_then(
    make_engine: Any, caplog: pytest.LogCaptureFixture, config: dict[str, Any], is_logged: bool, has_prompt: bool
) -> None:
    caplog.set_level(logging.DEBUG, "aioengine")
    engine = await make_engine(**config)
    output = await engine.generate(f"a {WORD}", request_id="named", max_tokens=3)
    async with engine.stream(f"the {WORD}", request_id="named, too", max_tokens=50, max_unread_tokens=1) as stream:
        await anext(stream)
    await engine.aclose()
    if is_logged:
        await until(lambda: "named, too" in caplog.text)
    assert ("named" in caplog.text) is is_logged
    ids = ", ".join(map(str, output.prompt_token_ids))
    assert (WORD in caplog.text or ids in caplog.text) is has_prompt
    assert output.text not in caplog.text


async def test_failures_are_reported_without_prompts(make_engine: Any, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, "aioengine")
    engine = await make_engine()
    ids = ", ".join(map(str, engine.get_tokenizer().encode(f"a {WORD}")))
    await engine.collective_rpc("contract.fail_next_step", ["it went wrong"])
    with pytest.raises(Exception, match="it went wrong") as failed:
        await engine.generate(f"a {WORD}", seed=1, max_tokens=3)
    await engine.collective_rpc("contract.lose_device", ["it is gone"])
    with pytest.raises(Exception, match="it is gone"):
        await engine.generate(f"a {WORD}", seed=1, max_tokens=3)
    await engine.aclose()
    for text in (caplog.text, str(failed.value), failed.value.dump):
        assert WORD not in text
        assert ids not in text
