"""Counters and times of an engine, in vLLM's names.

The engine core makes one `StepRecord` a step and one `RequestMetrics` a request, and hands them to its observers.
`EngineMetrics` is the observer that every engine has: objects of its own, so several engines of one process share
nothing. Nothing here reads a clock, and nothing locks: all of it belongs to the thread of the engine's loop.
"""

from __future__ import annotations

import copy
import math
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar, Generic, Literal, Protocol, TypeVar

import msgspec
import numpy as np
from numpy.typing import NDArray

from aioengine.schemas.plain_struct import PlainStruct

Float64 = NDArray[np.float64]
Int64 = NDArray[np.int64]
Kind = Literal["counter", "gauge", "histogram"]

# vLLM's bounds, with finer ones below: a small model's tokens come within milliseconds.
TIME_TO_FIRST_TOKEN_S = (
    0.001, 0.0025, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0,
    80.0, 160.0, 640.0, 2560.0,
)  # fmt: skip
INTER_TOKEN_LATENCY_S = (
    0.0005, 0.001, 0.002, 0.003, 0.005, 0.0075, 0.01, 0.015, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75,
    1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0,
)  # fmt: skip
REQUEST_TIME_S = (
    0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.2, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0,
    40.0, 50.0, 60.0, 120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0,
)  # fmt: skip
STEP_TIME_S = (
    0.0001, 0.0002, 0.0005, 0.001, 0.002, 0.003, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.2,
    0.3, 0.5, 0.75, 1.0, 2.0, 5.0, 10.0, 30.0,
)  # fmt: skip
LOOP_LAG_S = (
    0.00005, 0.0001, 0.0002, 0.0005, 0.001, 0.002, 0.003, 0.005, 0.0075, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 5.0,
)  # fmt: skip
STEP_TOKENS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
REQUEST_TOKENS = (*(digit * 10**power for power in range(6) for digit in (1, 2, 5)), 10**6)

FINISH_REASONS = ("stop", "length", "abort", "error")
OF_REQUESTS = frozenset((
    "prompt_tokens_by_source", "prompt_tokens_cached", "request_success", "request_prompt_tokens",
    "request_generation_tokens", "request_prefill_kv_computed_tokens", "request_time_per_output_token_seconds",
    "e2e_request_latency_seconds", "request_queue_time_seconds", "request_inference_time_seconds",
    "request_prefill_time_seconds", "request_decode_time_seconds", "num_requests_waiting_for_admission",
))  # fmt: skip
"""Metrics of requests, not steps: of several front ends of one engine each has those of its own requests. The rest is
the same at all of them."""


class StepRecord(msgspec.Struct, frozen=True, kw_only=True, array_like=True, gc=False):
    """One device step, when its result has been applied. Fields are only ever appended, with defaults: it is sent, too.

    Attributes:
        step: the plan's number.
        num_tokens: tokens that it computed.
        num_sampled: tokens that it brought its sequences.
        num_prompt_tokens: the whole prompts, cached parts included, of the requests whose first token it brought.
        device_time_s: how long it held the device.
        step_time_s: from its launch until it was applied.
        loop_lag_s: from its end on the device until the loop noticed; None if the device tells no time.
        inter_token_latencies_s: float64 [m], one for each token that followed another one of its sequence.
        times_to_first_token_s: from the calls of those requests whose first token it brought.
        running, waiting: sequences, after the step; those that wait for admission included.
        blocked: those of ``waiting`` that wait for something else than a row and blocks: a reader that is behind, a
            prefix that another one computes, a pause.
        free_blocks, num_blocks: of the KV cache, after the step.
        preemptions, prefix_cache_queries, prefix_cache_hits: totals since the engine started.
        cached_blocks: those of ``free_blocks`` that hold a cached prefix.
        touched_blocks: that have been in use since the start; a CPU's memory fills with them.
    """

    step: int
    num_tokens: int
    num_sampled: int
    num_prompt_tokens: int
    device_time_s: float
    step_time_s: float
    loop_lag_s: float | None
    inter_token_latencies_s: Float64
    times_to_first_token_s: list[float]
    running: int
    waiting: int
    free_blocks: int
    num_blocks: int
    preemptions: int
    prefix_cache_queries: int
    prefix_cache_hits: int
    blocked: int = 0
    cached_blocks: int = 0
    touched_blocks: int = 0


class RequestMetrics(PlainStruct, frozen=True, kw_only=True, gc=False):
    """Where a request's time went; None where it has not come that far.

    Attributes:
        arrival_time: of the call, in Unix seconds.
        queue_time_s: from the call until its first tokens were scheduled.
        prefill_time_s: from there until its first token.
        decode_time_s: from its first token until its last one.
        inference_time_s: prefill and decode together.
        time_to_first_token_s, e2e_latency_s: from the call until its first token, and until its end.
        mean_inter_token_latency_s: over the tokens that followed another one of the same choice.
        num_generation_tokens: generated for all choices; greedy ones, computed once, count once.
        num_cached_tokens: prompt tokens that the prefix cache had.
    """

    arrival_time: float
    queue_time_s: float | None = None
    prefill_time_s: float | None = None
    decode_time_s: float | None = None
    inference_time_s: float | None = None
    time_to_first_token_s: float | None = None
    mean_inter_token_latency_s: float | None = None
    e2e_latency_s: float | None = None
    num_prompt_tokens: int = 0
    num_generation_tokens: int = 0
    num_cached_tokens: int = 0
    num_preemptions: int = 0


class Observer(Protocol):
    """Sees each step and each request's end. It is called on the loop and must return within microseconds.

    What it raises is logged. KeyboardInterrupt and SystemExit end the loop, as from any callback; where the engine is
    being closed, when it has closed everything.
    """

    def on_step(self, record: StepRecord) -> None:
        """A step's result has been applied."""

    def on_request(self, metrics: RequestMetrics, finish_reasons: tuple[str, ...]) -> None:
        """A request has ended, with one reason for each choice; "error" for all of one that failed."""


class Sample(msgspec.Struct, frozen=True, gc=False):
    """One number of a metric, as the Prometheus text format has them: ``<name><suffix>{<labels>} <value>``."""

    suffix: str
    labels: tuple[tuple[str, str], ...]
    value: float


@dataclass(slots=True)
class Counter:
    """A number that only rises."""

    kind: ClassVar[Kind] = "counter"
    documentation: str
    name: str = ""
    value: int = 0

    def inc(self, amount: int = 1) -> None:
        self.value += amount

    def samples(self) -> Iterator[Sample]:
        yield Sample("_total", (), self.value)


@dataclass(slots=True)
class Gauge:
    """A number that rises and falls."""

    kind: ClassVar[Kind] = "gauge"
    documentation: str
    name: str = ""
    value: float = 0.0

    def samples(self) -> Iterator[Sample]:
        yield Sample("", (), self.value)


class Histogram:
    """How often values fell between bounds. Values that are no finite numbers are left out.

    Args:
        buckets: upper bounds, ascending, each part of its bucket; above the last one is a bucket without a bound.
    """

    __slots__ = ("_bounds", "_bounds_array", "counts", "documentation", "name", "sum")

    kind: ClassVar[Kind] = "histogram"

    def __init__(self, documentation: str, buckets: Sequence[float], name: str = "") -> None:
        self.documentation = documentation
        self.name = name
        self._bounds = [float(bound) for bound in buckets]
        self._bounds_array = np.array(self._bounds)
        self.counts: Int64 = np.zeros(len(buckets) + 1, np.int64)
        self.sum = 0.0

    def observe(self, value: float) -> None:
        if math.isfinite(value):
            self.counts[bisect_left(self._bounds, value)] += 1
            self.sum += value

    def observe_many(self, values: Float64) -> None:
        """Observe each value of a float64 array of one dimension; some microseconds for hundreds."""
        is_finite = np.isfinite(values)
        if not is_finite.all():
            values = values[is_finite]
        buckets = self._bounds_array.searchsorted(values)  # the first bound that is not below the value
        self.counts += np.bincount(buckets, minlength=len(self.counts))
        self.sum += float(np.add.reduce(values))

    @property
    def count(self) -> int:
        return int(self.counts.sum())

    def quantile(self, q: float) -> float | None:
        """Estimate a quantile (0 to 1) as Prometheus' ``histogram_quantile`` does; None without values.

        Within its bucket the values are taken to lie evenly, from 0 in the first one. What lies above the last bound
        is taken for that bound.
        """
        cumulative = np.cumsum(self.counts)
        if not cumulative[-1]:
            return None
        rank = q * float(cumulative[-1])
        bucket = int(cumulative.searchsorted(max(rank, 1e-9)))
        if bucket == len(self._bounds):
            return self._bounds[-1]
        below = float(cumulative[bucket - 1]) if bucket else 0.0
        lower = self._bounds[bucket - 1] if bucket else min(0.0, self._bounds[0])
        return lower + (self._bounds[bucket] - lower) * (rank - below) / float(self.counts[bucket])

    def samples(self) -> Iterator[Sample]:
        cumulative = np.cumsum(self.counts).tolist()
        for bound, count in zip([*map(repr, self._bounds), "+Inf"], cumulative, strict=True):
            yield Sample("_bucket", (("le", bound),), count)
        yield Sample("_sum", (), self.sum)
        yield Sample("_count", (), cumulative[-1])


M = TypeVar("M", bound=Counter | Gauge | Histogram)


class Labeled(Generic[M]):
    """Metrics with labels: ``requests.of("GET", "200").inc()``.

    Args:
        metric: what each of them begins as.
        labels: their names.
        known: values of the labels that are there from the start.
    """

    def __init__(self, metric: M, *labels: str, known: Iterable[tuple[str, ...]] = ()) -> None:
        self.documentation = metric.documentation
        self.name = metric.name
        self.kind: Kind = metric.kind
        self._metric = metric
        self._labels = labels
        self._metrics: dict[tuple[str, ...], M] = {}
        for values in known:
            self.of(*values)

    def of(self, *values: str) -> M:
        """The one whose labels have these values, which is made when it is first asked for."""
        metric = self._metrics.get(values)
        if metric is None:
            metric = self._metrics[values] = copy.deepcopy(self._metric)
        return metric

    def samples(self) -> Iterator[Sample]:
        for values, metric in self._metrics.items():
            labels = tuple(zip(self._labels, values, strict=True))
            for sample in metric.samples():
                yield Sample(sample.suffix, (*labels, *sample.labels), sample.value)


Metric = Counter | Gauge | Histogram | Labeled[Counter] | Labeled[Gauge] | Labeled[Histogram]


class Distribution(PlainStruct, frozen=True, kw_only=True, gc=False):
    """A histogram in four numbers; the quantiles are estimates within a bucket, all None without values."""

    count: int
    mean: float | None
    p50: float | None
    p99: float | None

    @classmethod
    def of(cls, histogram: Histogram) -> Distribution:
        count = histogram.count
        mean = histogram.sum / count if count else None
        return cls(count=count, mean=mean, p50=histogram.quantile(0.5), p99=histogram.quantile(0.99))


class EngineStats(PlainStruct, frozen=True, kw_only=True):
    """An engine's numbers since its start, for a person or for JSON.

    Attributes:
        running, waiting: sequences, now; those that wait for admission included.
        kv_cache_usage: the share of blocks in use now, 0 to 1.
        kv_cache_cached: the share that is free and holds a cached prefix, after the last step.
        kv_cache_touched: the share that has been in use since the start. On a CPU it is what of the KV cache's bytes
            takes memory.
        prefix_cache_hit_rate: the share of looked-up prompt tokens that the cache had; None before the first look.
        finished: choices by how they ended.
        time_to_first_token_s: of requests whose first token has come.
        e2e_latency_s, queue_time_s, prefill_time_s, decode_time_s: of requests that have ended.
        inter_token_latency_s: of tokens.
        step_time_s, device_time_s, loop_lag_s: of steps; see `StepRecord`.
    """

    running: int
    waiting: int
    kv_cache_usage: float
    prefix_cache_hit_rate: float | None
    preemptions: int
    prompt_tokens: int
    generation_tokens: int
    finished: dict[str, int]
    kv_cache_cached: float = 0.0
    kv_cache_touched: float = 0.0
    time_to_first_token_s: Distribution
    inter_token_latency_s: Distribution
    e2e_latency_s: Distribution
    queue_time_s: Distribution
    prefill_time_s: Distribution
    decode_time_s: Distribution
    step_time_s: Distribution
    device_time_s: Distribution
    loop_lag_s: Distribution

    def __repr__(self) -> str:
        ended = ", ".join(f"{reason} {count}" for reason, count in self.finished.items() if count)
        times = (("first token", self.time_to_first_token_s), ("token", self.inter_token_latency_s))
        means = "".join(f"; {name} {1000 * each.mean:.1f} ms" for name, each in times if each.mean is not None)
        return (
            f"<EngineStats running {self.running}, waiting {self.waiting}; KV cache {self.kv_cache_usage:.1%} in use, "
            f"{self.kv_cache_cached:.1%} cached, {self.kv_cache_touched:.1%} touched; {self.prompt_tokens:,} prompt "
            f"and {self.generation_tokens:,} generated tokens{means}; ended: {ended or 'none'}>"
        )


class EngineMetrics:
    """The observer that keeps an engine's metrics. Each is an attribute with its own name (vLLM's, without prefix)."""

    def __init__(self) -> None:
        self.num_requests_running = Gauge("Sequences that are being computed.")
        self.num_requests_waiting = Gauge("Sequences that wait to be computed, those that await admission included.")
        by_reason = "deferred: its reader is behind, another one computes its prefix, or the engine is paused"
        self.num_requests_waiting_for_admission = Gauge(
            "Sequences of those that wait that are still at the caller's side."
        )
        self.num_requests_waiting_by_reason = Labeled(
            Gauge(f"Sequences that wait, by what for; {by_reason}."), "reason"
        )
        self.kv_cache_usage_perc = Gauge("Share of KV-cache blocks in use, 0 to 1.")
        self.kv_cache_cached_perc = Gauge("Share of KV-cache blocks that are free and hold a cached prefix, 0 to 1.")
        self.kv_cache_touched_perc = Gauge("Share of KV-cache blocks that were in use since the start, 0 to 1.")
        self.prefix_cache_queries = Counter("Tokens that the prefix cache was asked for.")
        self.prefix_cache_hits = Counter("Prompt tokens that the prefix cache had.")
        self.num_preemptions = Counter("Sequences that lost their blocks to others.")
        self.prompt_tokens = Counter("Prompt tokens processed, cached ones included.")
        self.prompt_tokens_by_source = Labeled(
            Counter("Prompt tokens of requests that ended, by where they came from."),
            "source",
            known=[("local_compute",), ("local_cache_hit",), ("external_kv_transfer",)],
        )
        self.prompt_tokens_cached = Counter("Prompt tokens, of requests that ended, that the prefix cache had.")
        self.generation_tokens = Counter("Tokens generated.")
        self.request_success = Labeled(
            Counter("Choices that ended, by how they did."),
            "finished_reason",
            known=[(reason,) for reason in FINISH_REASONS],
        )
        self.iteration_tokens_total = Histogram("Tokens computed in a step, in spite of its name.", STEP_TOKENS)
        self.request_prompt_tokens = Histogram("Prompt tokens of a request that ended.", REQUEST_TOKENS)
        self.request_generation_tokens = Histogram("Tokens of all choices of a request that ended.", REQUEST_TOKENS)
        self.request_prefill_kv_computed_tokens = Histogram("Prompt tokens without cached ones.", REQUEST_TOKENS)
        self.time_to_first_token_seconds = Histogram("From the call to the first token.", TIME_TO_FIRST_TOKEN_S)
        self.inter_token_latency_seconds = Histogram("From one token of a sequence to its next.", INTER_TOKEN_LATENCY_S)
        self.request_time_per_output_token_seconds = Histogram(
            "A request's mean time from one token to its next.", INTER_TOKEN_LATENCY_S
        )
        self.e2e_request_latency_seconds = Histogram("From the call to the end.", REQUEST_TIME_S)
        self.request_queue_time_seconds = Histogram("From the call to the first scheduled tokens.", REQUEST_TIME_S)
        self.request_inference_time_seconds = Histogram("From first scheduled tokens to last token.", REQUEST_TIME_S)
        self.request_prefill_time_seconds = Histogram("From first scheduled tokens to first token.", REQUEST_TIME_S)
        self.request_decode_time_seconds = Histogram("From the first token to the last.", REQUEST_TIME_S)
        self.step_time_seconds = Histogram("From a step's launch until applied.", STEP_TIME_S)
        self.device_time_seconds = Histogram("How long a step held the device.", STEP_TIME_S)
        self.loop_lag_seconds = Histogram("From a step's end on the device until the loop noticed.", LOOP_LAG_S)
        for name, metric in vars(self).items():
            metric.name = name
        self._capacity = self.num_requests_waiting_by_reason.of("capacity")
        self._deferred = self.num_requests_waiting_by_reason.of("deferred")

    def on_step(self, record: StepRecord) -> None:
        self.set_load(record.running, record.waiting, record.blocked, record.free_blocks, record.num_blocks)
        self.kv_cache_cached_perc.value = record.cached_blocks / max(record.num_blocks, 1)
        self.kv_cache_touched_perc.value = record.touched_blocks / max(record.num_blocks, 1)
        self.num_preemptions.value = record.preemptions
        self.prefix_cache_queries.value = record.prefix_cache_queries
        self.prefix_cache_hits.value = record.prefix_cache_hits
        self.prompt_tokens.inc(record.num_prompt_tokens)
        self.generation_tokens.inc(record.num_sampled)
        self.iteration_tokens_total.observe(record.num_tokens)
        self.step_time_seconds.observe(record.step_time_s)
        self.device_time_seconds.observe(record.device_time_s)
        if record.loop_lag_s is not None:
            self.loop_lag_seconds.observe(record.loop_lag_s)
        for value_s in record.times_to_first_token_s:
            self.time_to_first_token_seconds.observe(value_s)
        if len(record.inter_token_latencies_s):
            self.inter_token_latency_seconds.observe_many(record.inter_token_latencies_s)

    def set_load(self, running: int, waiting: int, blocked: int, free_blocks: int, num_blocks: int) -> None:
        """Set the gauges: before they are read, since what comes and goes between two steps makes no record."""
        self.num_requests_running.value = running
        self.num_requests_waiting.value = waiting
        self._capacity.value = waiting - blocked
        self._deferred.value = blocked
        self.kv_cache_usage_perc.value = 1.0 - free_blocks / num_blocks if num_blocks else 0.0

    def on_request(self, metrics: RequestMetrics, finish_reasons: tuple[str, ...]) -> None:
        for reason in finish_reasons:
            self.request_success.of(reason).inc()
        self.request_prompt_tokens.observe(metrics.num_prompt_tokens)
        self.request_generation_tokens.observe(metrics.num_generation_tokens)
        for histogram, value_s in (
            (self.e2e_request_latency_seconds, metrics.e2e_latency_s),
            (self.request_queue_time_seconds, metrics.queue_time_s),
            (self.request_inference_time_seconds, metrics.inference_time_s),
            (self.request_prefill_time_seconds, metrics.prefill_time_s),
            (self.request_decode_time_seconds, metrics.decode_time_s),
            (self.request_time_per_output_token_seconds, metrics.mean_inter_token_latency_s),
        ):
            if value_s is not None:
                histogram.observe(value_s)
        if metrics.time_to_first_token_s is not None:  # else it was never computed
            computed = metrics.num_prompt_tokens - metrics.num_cached_tokens
            self.request_prefill_kv_computed_tokens.observe(computed)
            self.prompt_tokens_by_source.of("local_compute").inc(computed)
            self.prompt_tokens_by_source.of("local_cache_hit").inc(metrics.num_cached_tokens)
            self.prompt_tokens_cached.inc(metrics.num_cached_tokens)

    def collect(self) -> Iterator[Metric]:
        """Every metric, for an exporter: its name, documentation, kind and ``samples()``."""
        yield from (metric for name, metric in vars(self).items() if not name.startswith("_"))

    def snapshot(self) -> EngineStats:
        queries = self.prefix_cache_queries.value
        return EngineStats(
            running=int(self.num_requests_running.value),
            waiting=int(self.num_requests_waiting.value),
            kv_cache_usage=self.kv_cache_usage_perc.value,
            kv_cache_cached=self.kv_cache_cached_perc.value,
            kv_cache_touched=self.kv_cache_touched_perc.value,
            prefix_cache_hit_rate=self.prefix_cache_hits.value / queries if queries else None,
            preemptions=self.num_preemptions.value,
            prompt_tokens=self.prompt_tokens.value,
            generation_tokens=self.generation_tokens.value,
            finished={reason: self.request_success.of(reason).value for reason in FINISH_REASONS},
            time_to_first_token_s=Distribution.of(self.time_to_first_token_seconds),
            inter_token_latency_s=Distribution.of(self.inter_token_latency_seconds),
            e2e_latency_s=Distribution.of(self.e2e_request_latency_seconds),
            queue_time_s=Distribution.of(self.request_queue_time_seconds),
            prefill_time_s=Distribution.of(self.request_prefill_time_seconds),
            decode_time_s=Distribution.of(self.request_decode_time_seconds),
            step_time_s=Distribution.of(self.step_time_seconds),
            device_time_s=Distribution.of(self.device_time_seconds),
            loop_lag_s=Distribution.of(self.loop_lag_seconds),
        )
