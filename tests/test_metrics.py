"""Metrics count exactly, estimate within a bucket, and say the same as numbers, as samples and as a log line."""

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from aioengine.core.observers import StatsLog
from aioengine.outputs import CompletionOutput, RequestOutput
from aioengine.outputs.metrics import Distribution, EngineMetrics, Histogram, RequestMetrics, Sample, StepRecord

BOUNDS = (0.001, 0.25, 1.0, 4.0)
# Bounds themselves are the values that a wrong comparison puts into the wrong bucket.
VALUES = st.lists(st.sampled_from([*BOUNDS, 0.0, math.nan, math.inf, -math.inf]) | st.floats(-1.0, 10.0), max_size=300)


def step_record(**changes: Any) -> StepRecord:
    steady: dict[str, Any] = {
        "step": 1,
        "num_tokens": 4,
        "num_sampled": 4,
        "num_prompt_tokens": 0,
        "device_time_s": 0.01,
        "step_time_s": 0.012,
        "loop_lag_s": 0.0003,
        "inter_token_latencies_s": np.zeros(0),
        "times_to_first_token_s": [],
        "running": 4,
        "waiting": 0,
        "free_blocks": 10,
        "num_blocks": 10,
        "preemptions": 0,
        "prefix_cache_queries": 0,
        "prefix_cache_hits": 0,
    }
    return StepRecord(**(steady | changes))


def histogram(values: Sequence[float] = (), bounds: Sequence[float] = BOUNDS) -> Histogram:
    observed = Histogram("How long it took.", bounds)
    observed.observe_many(np.array(values, np.float64))
    return observed


def plain_counts(values: list[float]) -> list[int]:
    finite = [value for value in values if math.isfinite(value)]
    edges = [-math.inf, *BOUNDS, math.inf]
    return [sum(lower < value <= upper for value in finite) for lower, upper in pairwise(edges)]


@given(values=VALUES)
def test_a_histogram_counts_each_finite_value_in_its_bucket(values: list[float]) -> None:
    many, one_by_one = histogram(values), histogram()
    for value in values:
        one_by_one.observe(value)

    finite = [value for value in values if math.isfinite(value)]
    cumulative = np.cumsum(plain_counts(values)).tolist()
    for counted in (many, one_by_one):
        assert counted.counts.tolist() == plain_counts(values)
        assert counted.sum == pytest.approx(math.fsum(finite), abs=1e-9)
        assert list(counted.samples()) == [
            *(
                Sample("_bucket", (("le", repr(bound)),), count)
                for bound, count in zip(BOUNDS, cumulative, strict=False)
            ),
            Sample("_bucket", (("le", "+Inf"),), len(finite)),
            Sample("_sum", (), counted.sum),
            Sample("_count", (), len(finite)),
        ]


@given(values=st.lists(st.floats(0.0, 4.0), min_size=1, max_size=300), q=st.floats(0.0, 1.0))
def test_a_quantile_is_in_the_bucket_of_the_true_one(values: list[float], q: float) -> None:
    true = sorted(values)[max(math.ceil(q * len(values)) - 1, 0)]
    estimate = histogram(values).quantile(q)

    assert estimate is not None
    edges = [0.0, *BOUNDS]
    [(lower, upper)] = [
        (lower, upper) for lower, upper in pairwise(edges) if lower < true <= upper or (true == lower == 0.0)
    ]
    assert lower <= estimate <= upper * (1 + 1e-12)


def test_a_quantile_lies_in_its_bucket_as_if_the_values_lay_evenly() -> None:
    observed = histogram([0.5, 1.5, 1.5, 3.0], (1.0, 2.0, 4.0))
    assert [observed.quantile(q) for q in (0.0, 0.25, 0.5, 0.75, 1.0)] == [0.0, 1.0, 1.5, 2.0, 4.0]
    # What is above the last bound is taken for it, but counts in the mean.
    assert Distribution.of(histogram([100.0])) == Distribution(count=1, mean=100.0, p50=BOUNDS[-1], p99=BOUNDS[-1])


# The whole observer


def fed() -> EngineMetrics:
    """A prompt of 100 tokens, 40 of them cached, and another of 10; three and one tokens; one is aborted."""
    metrics = EngineMetrics()
    totals = {"prefix_cache_queries": 110, "prefix_cache_hits": 40}
    metrics.on_step(
        step_record(num_tokens=64, num_sampled=1, num_prompt_tokens=100, running=1, waiting=1, free_blocks=5, **totals)
    )
    latencies = np.array([0.02])
    metrics.on_step(
        step_record(
            step=2,
            num_tokens=11,
            num_sampled=2,
            num_prompt_tokens=10,
            inter_token_latencies_s=latencies,
            times_to_first_token_s=[0.3],
            **totals,
        )
    )
    metrics.on_step(
        step_record(
            step=3,
            num_tokens=1,
            num_sampled=1,
            loop_lag_s=None,
            inter_token_latencies_s=latencies * 2,
            running=1,
            free_blocks=8,
            preemptions=1,
            **totals,
        )
    )
    metrics.on_request(
        RequestMetrics(
            arrival_time=1e9,
            queue_time_s=0.1,
            prefill_time_s=0.2,
            decode_time_s=0.06,
            inference_time_s=0.26,
            time_to_first_token_s=0.3,
            mean_inter_token_latency_s=0.03,
            e2e_latency_s=0.36,
            num_prompt_tokens=100,
            num_generation_tokens=3,
            num_cached_tokens=40,
        ),
        ("stop", "length"),
    )
    metrics.on_request(RequestMetrics(arrival_time=1e9, num_prompt_tokens=10), ("abort",))
    return metrics


def test_what_the_engine_says_is_in_the_snapshot() -> None:
    stats = fed().snapshot()
    assert (stats.running, stats.waiting, stats.preemptions) == (1, 0, 1)
    assert stats.kv_cache_usage == pytest.approx(0.2)
    assert stats.prefix_cache_hit_rate == pytest.approx(40 / 110)
    assert (stats.prompt_tokens, stats.generation_tokens) == (110, 4)
    assert stats.finished == {"stop": 1, "length": 1, "abort": 1, "error": 0}
    means = {
        "time_to_first_token_s": (1, 0.3),
        "inter_token_latency_s": (2, 0.03),
        "e2e_latency_s": (1, 0.36),
        "queue_time_s": (1, 0.1),
        "prefill_time_s": (1, 0.2),
        "decode_time_s": (1, 0.06),
        "step_time_s": (3, 0.012),
        "device_time_s": (3, 0.01),
        "loop_lag_s": (2, 0.0003),
    }
    for name, (count, mean) in means.items():
        distribution = getattr(stats, name)
        assert (distribution.count, distribution.mean) == (count, pytest.approx(mean)), name
        assert 0 < distribution.p50 <= distribution.p99
    assert 0.015 < stats.inter_token_latency_s.p50 <= 0.025  # type: ignore[operator]


def test_a_snapshot_is_plain_json_also_before_anything_has_happened() -> None:
    for metrics in (EngineMetrics(), fed()):
        stats = metrics.snapshot()
        assert msgspec.json.decode(msgspec.json.encode(stats), type=type(stats)) == stats
    assert EngineMetrics().snapshot().prefix_cache_hit_rate is None


def test_every_metric_is_collected_with_its_name_and_samples() -> None:
    metrics = fed()
    collected = {metric.name: metric for metric in metrics.collect()}
    assert {metric.kind for metric in collected.values()} == {"counter", "gauge", "histogram"}
    assert all(getattr(metrics, name) is metric for name, metric in collected.items())
    samples = {name: list(metric.samples()) for name, metric in collected.items()}
    assert samples["iteration_tokens_total"][-2:] == [Sample("_sum", (), 76.0), Sample("_count", (), 3)]
    assert samples["request_generation_tokens"][-2:] == [Sample("_sum", (), 3.0), Sample("_count", (), 2)]
    assert samples["request_inference_time_seconds"][-2:] == [Sample("_sum", (), 0.26), Sample("_count", (), 1)]
    assert samples["request_success"][0] == Sample("_total", (("finished_reason", "stop"),), 1)


def test_the_load_can_be_set_between_two_steps() -> None:
    metrics = fed()
    metrics.set_load(running=0, waiting=7, blocked=0, free_blocks=10, num_blocks=10)
    stats = metrics.snapshot()
    assert (stats.running, stats.waiting, stats.kv_cache_usage) == (0, 7, 0.0)
    metrics.set_load(running=0, waiting=0, blocked=0, free_blocks=0, num_blocks=0)
    assert metrics.snapshot().kv_cache_usage == 0.0


# The log line


def test_a_log_line_comes_once_an_interval_and_is_about_it() -> None:
    metrics = EngineMetrics()
    metrics.on_step(step_record(num_sampled=1000, preemptions=5, prefix_cache_queries=900, loop_lag_s=0.9))
    log = StatsLog(metrics, interval_s=10.0, now_s=100.0)
    metrics.on_step(
        step_record(
            num_sampled=30,
            num_prompt_tokens=4000,
            running=3,
            waiting=2,
            free_blocks=4,
            preemptions=6,
            prefix_cache_queries=1300,
            prefix_cache_hits=100,
        )
    )
    assert log.poll(109.9) is None
    line = log.poll(110.0)
    assert line is not None
    assert line == (
        "in 10.0 s: prompt 400.0 tokens/s, generation 3.0 tokens/s; running 3, waiting 2, KV cache 60.0 %, "
        "prefix cache hits 25.0 %, preemptions 1"
    )
    assert log.poll(110.0) is None
    assert log.poll(119.9) is None


def test_a_late_line_is_about_the_time_that_has_really_passed() -> None:
    metrics = EngineMetrics()
    log = StatsLog(metrics, interval_s=10.0, now_s=0.0)
    metrics.on_step(step_record(num_sampled=100, loop_lag_s=None))
    line = log.poll(50.0)
    assert line is not None
    assert line.startswith("in 50.0 s: prompt 0.0 tokens/s, generation 2.0 tokens/s; ")
    assert ", prefix cache hits -, preemptions 0" in line


def test_stats_are_shown_in_a_line() -> None:
    metrics = EngineMetrics()
    assert "ended: none" in repr(metrics.snapshot())
    metrics.on_request(RequestMetrics(arrival_time=0.0), ("stop", "stop"))
    metrics.time_to_first_token_seconds.observe(0.5)
    shown = repr(metrics.snapshot())
    assert "ended: stop 2>" in shown
    assert "first token 500.0 ms" in shown
    assert len(shown) < 300
    output = CompletionOutput(index=0, text="ab" * 500, token_ids=[1, 2], finish_reason="stop")
    answer = RequestOutput(request_id="a", prompt=None, prompt_token_ids=[], outputs=[output] * 9, finished=True)
    assert len(repr(answer)) < 1200
    assert "ab…" not in repr(answer)
    assert "2 tokens, stop; …>" in repr(answer)
