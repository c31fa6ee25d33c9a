"""``GET /metrics``: the engine's numbers and those of HTTP, in Prometheus' text format or as OpenMetrics.

What vLLM (V1) exports under the same name and with the same meaning keeps vLLM's prefix and labels, so that its
dashboards work; what is ours alone begins with ``aioengine:``. `SERIES` is that mapping, as data.

Numbers are read on the engine's loop, which owns them, in half a millisecond; a thread writes them as text.
"""

from __future__ import annotations

import contextlib
import os
import resource
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Protocol

import msgspec
from anyio import CapacityLimiter, to_thread
from prometheus_client.utils import floatToGoString

from aioengine.errors import AioEngineError
from aioengine.metrics import (
    INTER_TOKEN_LATENCY_S,
    REQUEST_TIME_S,
    REQUEST_TOKENS,
    Counter,
    EngineMetrics,
    Gauge,
    Histogram,
    RequestMetrics,
    Sample,
    StepRecord,
)
from aioengine.server.exchange import PerLoop
from aioengine.server.record import OTHER_ROUTE, RequestRecord

if TYPE_CHECKING:
    from aioengine.engine import Engine

Kind = Literal["counter", "gauge", "histogram"]
Owner = Literal["engine", "requests", "state", "http", "process"]

OWN_PREFIX = "aioengine:"
TEXT = "text/plain; version=0.0.4; charset=utf-8"
OPENMETRICS = "application/openmetrics-text; version=1.0.0; charset=utf-8"


# The mapping


class Series(msgspec.Struct, frozen=True):
    """One metric of the exposition.

    Attributes:
        owner: where it is counted: "engine": `EngineMetrics`, only while the engine is up; "requests": at the end of
            each of the engine's requests; "state": read from the engine's health and config; "http": `HttpMetrics`;
            "process": `ProcessMetrics`.
        name: without prefix, as it is declared; counters have ``_total`` behind it, histograms ``_bucket`` and so on.
        source: the attribute of its owner; absent: it is called like the series.
        prefix: "vllm": the configured one, since vLLM has the series with this meaning; "own": `OWN_PREFIX`; "none": as
            vLLM's server has it, from the libraries that it uses for HTTP and for metrics; it has no model's labels.
        note: where it differs from vLLM's, or why it is here.
    """

    owner: Owner
    name: str
    source: str = ""
    prefix: Literal["vllm", "own", "none"] = "vllm"
    note: str = ""

    def full_name(self, prefix: str) -> str:
        return {"vllm": prefix, "own": OWN_PREFIX, "none": ""}[self.prefix] + self.name

    def metric_of(self, owner: object) -> Exported:
        metric: Exported = getattr(owner, self.source or self.name)
        return metric


_DEFERRED = "deferred: its reader is behind, another one computes its prefix, or the engine is paused"
_HTTP_ONLY = "requests that came by HTTP"
_AT_END = "counted when a request ends"
_SERVER = "of the process that serves HTTP"

SERIES: tuple[Series, ...] = (
    Series("engine", "num_requests_running"),
    Series("engine", "num_requests_waiting", note="those at the engine's door included"),
    Series("engine", "num_requests_waiting_by_reason", note=_DEFERRED),
    Series("engine", "kv_cache_usage_perc"),
    Series("engine", "prefix_cache_queries"),
    Series("engine", "prefix_cache_hits"),
    Series("engine", "num_preemptions"),
    Series("engine", "prompt_tokens"),
    Series("engine", "generation_tokens"),
    Series("engine", "request_success", note="choices, by finished_reason"),
    Series("engine", "iteration_tokens_total", note="a histogram, in spite of its name"),
    Series("engine", "request_prompt_tokens"),
    Series("engine", "request_generation_tokens"),
    Series("engine", "time_to_first_token_seconds"),
    Series("engine", "inter_token_latency_seconds"),
    Series("engine", "e2e_request_latency_seconds"),
    Series("engine", "request_queue_time_seconds"),
    Series("engine", "request_inference_time_seconds"),
    Series("engine", "request_prefill_time_seconds"),
    Series("engine", "request_decode_time_seconds"),
    # Names that vLLM had until 0.11, and that dashboards of then ask for.
    *(
        Series("engine", old, new, note=f"old name of {new}")
        for old, new in {
            "gpu_cache_usage_perc": "kv_cache_usage_perc",
            "gpu_prefix_cache_queries": "prefix_cache_queries",
            "gpu_prefix_cache_hits": "prefix_cache_hits",
            "time_per_output_token_seconds": "inter_token_latency_seconds",
        }.items()
    ),
    Series("engine", "step_time_seconds", prefix="own"),
    Series("engine", "device_time_seconds", prefix="own"),
    Series("engine", "loop_lag_seconds", prefix="own"),
    Series("requests", "request_time_per_output_token_seconds", "time_per_output_token"),
    Series("requests", "request_prefill_kv_computed_tokens", "prefill_computed"),
    Series("requests", "prompt_tokens_by_source", "by_source", note=_AT_END),
    Series("requests", "prompt_tokens_cached", "cached", note=_AT_END),
    Series("state", "cache_config_info", "cache_config"),
    Series("state", "engine_sleep_state", "sleep_state", note="awake alone: the level is not known here"),
    Series("state", "engine_up", "up", "own"),
    Series("state", "engine_stalled", "stalled", "own"),
    Series("state", "engine_step_age_seconds", "step_age", "own"),
    Series("http", "request_params_n", "params_n", note=_HTTP_ONLY),
    Series("http", "request_params_max_tokens", "params_max_tokens", note=_HTTP_ONLY),
    Series("http", "request_max_num_generation_tokens", "max_choice_tokens", note=_HTTP_ONLY),
    Series("http", "http_requests", "requests", "own"),
    Series("http", "http_request_duration_seconds", "durations", "own"),
    Series("http", "http_requests_in_progress", "in_progress", "own"),
    Series("http", "http_requests_shed", "shed", "own"),
    Series("http", "http_clients_gone", "gone", "own"),
    Series("http", "http_clients_cut", "cut", "own"),
    Series("http", "http_requests", "by_handler", "none", note="without probes, as vLLM has it"),
    Series("http", "http_request_duration_seconds", "handler_durations", "none", note="without probes"),
    Series("process", "process_cpu_seconds", prefix="none", note=_SERVER),
    Series("process", "process_resident_memory_bytes", prefix="none", note=_SERVER),
    Series("process", "process_virtual_memory_bytes", prefix="none", note=_SERVER),
    Series("process", "process_start_time_seconds", prefix="none", note=_SERVER),
    Series("process", "process_open_fds", prefix="none", note=_SERVER),
    Series("process", "process_max_fds", prefix="none", note=_SERVER),
)


# What is counted here

METHODS = ("GET", "POST", "HEAD", "OPTIONS", "PUT", "PATCH", "DELETE")
OTHER_METHOD = "other"
"""Clients may make up as many methods as they like."""
NO_STATUS = "none"
"""The client left before anything was answered."""
UNCOUNTED_HANDLERS = ("/health", "/metrics", "/version", "/load")
"""vLLM leaves probes out of ``http_requests_total``: a scrape a second would be most of it."""
HANDLER_TIME_S = (0.1, 0.5, 1.0)
"""The bounds that vLLM's server has for ``http_request_duration_seconds``."""


class Exported(Protocol):
    """What a metric must offer: those of `aioengine.metrics` do."""

    @property
    def name(self) -> str: ...
    @property
    def documentation(self) -> str: ...
    @property
    def kind(self) -> Kind: ...

    def samples(self) -> Iterator[Sample]: ...


class LabeledValues:
    """A counter or gauge with any number of labels: ``table.values["GET", "200"] = 3``."""

    __slots__ = ("documentation", "kind", "labels", "name", "values")

    def __init__(self, name: str, documentation: str, kind: Literal["counter", "gauge"], *labels: str) -> None:
        self.name = name
        self.documentation = documentation
        self.kind: Literal["counter", "gauge"] = kind
        self.labels = labels
        self.values: dict[tuple[str, ...], float] = {}

    def inc(self, *label_values: str, amount: float = 1) -> None:
        self.values[label_values] = self.values.get(label_values, 0) + amount

    def samples(self) -> Iterator[Sample]:
        suffix = "_total" if self.kind == "counter" else ""
        for label_values, value in self.values.items():
            yield Sample(suffix, tuple(zip(self.labels, label_values, strict=True)), value)


class LabeledHistogram:
    """Histograms of the same bounds, told apart by one label."""

    __slots__ = ("_buckets", "documentation", "histograms", "label", "name")

    kind: Literal["histogram"] = "histogram"

    def __init__(self, name: str, documentation: str, buckets: Sequence[float], label: str) -> None:
        self.name = name
        self.documentation = documentation
        self.label = label
        self._buckets = buckets
        self.histograms: dict[str, Histogram] = {}

    def observe(self, label_value: str, value: float) -> None:
        histogram = self.histograms.get(label_value)
        if histogram is None:
            histogram = self.histograms[label_value] = Histogram(self.name, self.documentation, self._buckets)
        histogram.observe(value)

    def samples(self) -> Iterator[Sample]:
        for label_value, histogram in self.histograms.items():
            for sample in histogram.samples():
                yield Sample(sample.suffix, ((self.label, label_value), *sample.labels), sample.value)


class HttpMetrics:
    """What is counted of HTTP requests, for all engines alike: ``began`` and ``ended``, once each a request.

    Args:
        routes: all templates of paths that there are; any other counts as "other".
    """

    def __init__(self, routes: Iterable[str]) -> None:
        self._routes = frozenset(routes)
        self.requests = LabeledValues(
            "http_requests", "HTTP requests that ended.", "counter", "method", "path", "status"
        )
        self.durations = LabeledHistogram(
            "http_request_duration_seconds", "From a request's first byte to its end.", REQUEST_TIME_S, "path"
        )
        self.in_progress = Gauge("http_requests_in_progress", "HTTP requests being served.")
        self.shed = Counter("http_requests_shed", "HTTP requests refused for want of room.")
        self.gone = Counter("http_clients_gone", "Clients that left before their answer ended.")
        self.cut = Counter("http_clients_cut", "Clients cut off since they stopped reading.")
        self.by_handler = LabeledValues(
            "http_requests", "HTTP requests by class of status.", "counter", "handler", "method", "status"
        )
        self.handler_durations = LabeledHistogram(
            "http_request_duration_seconds", "How long HTTP requests took.", HANDLER_TIME_S, "handler"
        )
        self.params_n = Histogram("request_params_n", "Choices asked for.", (1, 2, 5, 10, 20))
        self.params_max_tokens = Histogram("request_params_max_tokens", "max_tokens asked for.", REQUEST_TOKENS)
        self.max_choice_tokens = Histogram(
            "request_max_num_generation_tokens", "Tokens of a request's longest choice.", REQUEST_TOKENS
        )

    def began(self) -> None:
        self.in_progress.value += 1

    def ended(self, record: RequestRecord) -> None:
        """The request is over; its record is complete."""
        self.in_progress.value -= 1
        method = record.method if record.method in METHODS else OTHER_METHOD
        route = record.route if record.route in self._routes else OTHER_ROUTE
        status = str(record.status) if 100 <= record.status <= 599 else NO_STATUS
        self.requests.inc(method, route, status)
        self.durations.observe(route, record.duration_s)
        if route not in UNCOUNTED_HANDLERS and status != NO_STATUS:
            handler = "none" if route == OTHER_ROUTE else route  # as that library calls it
            self.by_handler.inc(handler, method, f"{status[0]}xx")
            self.handler_durations.observe(handler, record.duration_s)
        if record.outcome == "shed":
            self.shed.inc()
        elif record.outcome == "client_gone":
            self.gone.inc()
        elif record.outcome == "cut":
            self.cut.inc()
        if record.completion_tokens is not None:
            self._generated(record, record.completion_tokens)

    def _generated(self, record: RequestRecord, completion_tokens: int) -> None:
        self.params_n.observe(record.n or 1)
        if record.max_tokens is not None:
            self.params_max_tokens.observe(record.max_tokens)
        if record.max_choice_tokens is not None:
            self.max_choice_tokens.observe(record.max_choice_tokens)
        elif (record.n or 1) == 1 and record.num_prompts == 1:
            self.max_choice_tokens.observe(completion_tokens)


class RequestTotals:
    """The observer of what vLLM counts and `EngineMetrics` does not, from the end of each of the engine's requests."""

    def __init__(self) -> None:
        self.time_per_output_token = Histogram(
            "request_time_per_output_token_seconds",
            "A request's mean time from one token to its next.",
            INTER_TOKEN_LATENCY_S,
        )
        self.prefill_computed = Histogram(
            "request_prefill_kv_computed_tokens", "Prompt tokens computed, cached ones left out.", REQUEST_TOKENS
        )
        self.by_source = LabeledValues(
            "prompt_tokens_by_source", "Prompt tokens by where they came from.", "counter", "source"
        )
        for source in ("local_compute", "local_cache_hit", "external_kv_transfer"):
            self.by_source.inc(source, amount=0)
        self.cached = Counter("prompt_tokens_cached", "Prompt tokens that the prefix cache had.")

    def on_step(self, record: StepRecord) -> None:
        pass

    def on_request(self, metrics: RequestMetrics, finish_reasons: tuple[str, ...]) -> None:
        if metrics.time_to_first_token_s is None:
            return  # it was never computed
        computed = metrics.num_prompt_tokens - metrics.num_cached_tokens
        self.prefill_computed.observe(computed)
        self.by_source.inc("local_compute", amount=computed)
        self.by_source.inc("local_cache_hit", amount=metrics.num_cached_tokens)
        self.cached.inc(metrics.num_cached_tokens)
        if metrics.mean_inter_token_latency_s is not None:
            self.time_per_output_token.observe(metrics.mean_inter_token_latency_s)


class EngineGauges:
    """What is read of an engine at each rendering."""

    def __init__(self) -> None:
        self.up = Gauge("engine_up", "1 while the engine is there; 0: not started, closed or dead.")
        self.stalled = Gauge(
            "engine_stalled", "1 while the device hangs at a step or control call, or the engine's process does."
        )
        self.step_age = Gauge("engine_step_age_seconds", "How long the device has been at its present step.")
        self.sleep_state = LabeledValues(
            "engine_sleep_state", "awake: 0 while the engine sleeps.", "gauge", "sleep_state"
        )
        self.cache_config = LabeledValues(
            "cache_config_info",
            "The KV cache, as labels; always 1.",
            "gauge",
            "block_size",
            "cache_dtype",
            "enable_prefix_caching",
            "gpu_memory_utilization",
            "num_gpu_blocks",
        )

    def read(self, engine: Engine) -> EngineMetrics | None:
        """The engine's metrics, if it is up."""
        try:
            health, metrics = engine.health(), engine.metrics
        except AioEngineError:  # not started, closed or dead
            health, metrics = None, None
        is_up = health is not None and health.status != "DEAD"
        self.up.value = float(is_up)
        self.stalled.value = float(health is not None and health.status == "STALLED")
        self.step_age.value = 0.0 if health is None else health.step_age_s
        if health is None or not is_up:
            self.sleep_state.values.clear()
            return None
        self.sleep_state.values["awake",] = float(not health.is_sleeping)
        if not self.cache_config.values:
            info, config = engine.info, engine.config
            described = (
                info.block_size, info.dtype, config.enable_prefix_caching, config.memory_utilization, info.num_blocks
            )  # fmt: skip
            self.cache_config.values[tuple(map(str, described))] = 1
        return metrics


class ProcessMetrics:
    """What Linux says of this process, by the names of prometheus_client's collector; zeros without a ``/proc``.

    That collector lists all open files each time: with 8,000 of them it held the GIL, and so the loop, for 12 ms.
    """

    def __init__(self) -> None:
        self.process_cpu_seconds = LabeledValues(
            "process_cpu_seconds", "CPU time, of user and system, in seconds.", "counter"
        )
        self.process_resident_memory_bytes = Gauge("process_resident_memory_bytes", "Resident memory.")
        self.process_virtual_memory_bytes = Gauge("process_virtual_memory_bytes", "Virtual memory.")
        self.process_start_time_seconds = Gauge("process_start_time_seconds", "When it started, in Unix seconds.")
        self.process_open_fds = Gauge("process_open_fds", "Open file descriptors.")
        self.process_max_fds = Gauge("process_max_fds", "Most open file descriptors.")

    def read(self) -> None:
        """Read them anew: files, and so not on a loop."""
        self.process_cpu_seconds.values[()] = time.process_time()
        self.process_max_fds.value = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        with contextlib.suppress(OSError):
            pages = [int(number) for number in Path("/proc/self/statm").read_text().split()[:2]]
            self.process_virtual_memory_bytes.value = pages[0] * resource.getpagesize()
            self.process_resident_memory_bytes.value = pages[1] * resource.getpagesize()
            # Linux 6.2 and newer count them here; older ones say 0.
            self.process_open_fds.value = os.stat("/proc/self/fd").st_size or len(os.listdir("/proc/self/fd"))
            if not self.process_start_time_seconds.value:
                ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])  # since the boot
                age_s = time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
                self.process_start_time_seconds.value = time.time() - age_s


# Writing it


class MetricFamily(msgspec.Struct, frozen=True):
    """A metric under the name and labels that it is exported by, and its numbers as they were on the loop."""

    name: str
    metric: Exported
    labels: dict[str, str]
    samples: list[Sample]


def encode(families: Sequence[MetricFamily], content_type: str) -> bytes:
    """The families as text: a microsecond a line, a fifth of what prometheus_client's encoder takes."""
    lines: list[str] = []
    for family in families:
        metric = family.metric
        is_total = metric.kind == "counter" and content_type == TEXT  # OpenMetrics has it in samples alone
        declared = f"{family.name}_total" if is_total else family.name
        lines.append(f"# HELP {declared} {metric.documentation}\n# TYPE {declared} {metric.kind}\n")
        own = {name: _escaped(value) for name, value in family.labels.items()}
        for sample in family.samples:
            labels = {**own, **{name: _escaped(value) for name, value in sample.labels}}
            told = ",".join([f'{name}="{value}"' for name, value in sorted(labels.items())])
            name = f"{family.name}{sample.suffix}{{{told}}}" if told else f"{family.name}{sample.suffix}"
            lines.append(f"{name} {_number(sample.value)}\n")
    if content_type == OPENMETRICS:
        lines.append("# EOF\n")
    return "".join(lines).encode()


_number: Callable[[float], str] = floatToGoString


def _escaped(value: str) -> str:
    return value.replace("\\", r"\\").replace("\n", r"\n").replace('"', r"\"")


class Exposition:
    """What ``GET /metrics`` answers. It may be made before the engine is started, and outlive it.

    Args:
        prefix: of the series that vLLM has, too.
        model_name: the label that dashboards choose a model by.
    """

    def __init__(self, engine: Engine, http_metrics: HttpMetrics, prefix: str, model_name: str) -> None:
        self.engine = engine
        self._prefix = prefix
        self._labels = {"model_name": model_name, "engine": "0"}
        self._http = http_metrics
        self._state = EngineGauges()
        self._totals = RequestTotals()
        self._process = ProcessMetrics()
        self._threads = PerLoop(lambda: CapacityLimiter(1))
        """A thread of its own, since a host's handlers may hold all of anyio's."""
        self._stop_watching: Callable[[], None] | None = None

    def watch(self) -> None:
        """See the ends of the engine's requests from now on, if it is up; idempotent, and then one comparison.

        Call it before a request is handed to the engine, since that may have been started only now.
        """
        if self._stop_watching is None:
            with contextlib.suppress(AioEngineError):  # it is not up
                self._stop_watching = self.engine.add_observer(self._totals)

    def close(self) -> None:
        """Let the engine forget this; idempotent."""
        if self._stop_watching is not None:
            self._stop_watching()
            self._stop_watching = lambda: None

    async def render(self, accept: str | None) -> tuple[bytes, str]:
        """The body, and its content type: OpenMetrics where the client prefers it; whatever the state of the engine."""
        content_type = OPENMETRICS if _prefers_openmetrics(accept) else TEXT
        families = self.families()
        return await to_thread.run_sync(self._write, families, content_type, limiter=self._threads.get()), content_type

    def families(self) -> list[MetricFamily]:
        """All but the process's, as they are now: 0.5 ms."""
        self.watch()
        engine = self._state.read(self.engine)
        owners: dict[Owner, object] = {"requests": self._totals, "state": self._state, "http": self._http}
        return self._families(owners if engine is None else {"engine": engine, **owners})

    def _write(self, families: list[MetricFamily], content_type: str) -> bytes:
        self._process.read()
        return encode([*families, *self._families({"process": self._process})], content_type)

    def _families(self, owners: Mapping[Owner, object]) -> list[MetricFamily]:
        return [self._family(series, owners[series.owner]) for series in SERIES if series.owner in owners]

    def _family(self, series: Series, owner: object) -> MetricFamily:
        metric = series.metric_of(owner)
        # HTTP's own and the process's are no model's, though requests' parameters are.
        labels = {} if series.owner in ("http", "process") and series.prefix != "vllm" else self._labels
        return MetricFamily(series.full_name(self._prefix), metric, labels, list(metric.samples()))


def describe_series(prefix: str = "vllm:") -> list[tuple[str, str, str, str]]:
    """The mapping for a person: full name, kind, what it says, and a note where it differs from vLLM's."""
    owners: dict[Owner, object] = {
        "engine": EngineMetrics(),
        "requests": RequestTotals(),
        "state": EngineGauges(),
        "http": HttpMetrics(()),
        "process": ProcessMetrics(),
    }
    rows: list[tuple[str, str, str, str]] = []
    for series in SERIES:
        metric = series.metric_of(owners[series.owner])
        name = series.full_name(prefix) + ("_total" if metric.kind == "counter" else "")
        rows.append((name, metric.kind, metric.documentation, series.note))
    return rows


def _prefers_openmetrics(accept: str | None) -> bool:
    """Whether an Accept header ranks OpenMetrics at least as high as plain text."""
    qualities = {"application/openmetrics-text": 0.0, "text/plain": 0.0}
    for item in (accept or "").split(","):
        media_type, *options = (part.strip().lower() for part in item.split(";"))
        if media_type in qualities:
            quality = next((option[2:] for option in options if option.startswith("q=")), "1")
            try:
                qualities[media_type] = max(qualities[media_type], float(quality))
            except ValueError:
                pass  # a client's typing error is no reason to be without metrics
    return 0 < qualities["application/openmetrics-text"] >= qualities["text/plain"]
