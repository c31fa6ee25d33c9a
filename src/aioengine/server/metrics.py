"""``GET /metrics``: the engine's numbers and those of HTTP, in Prometheus' text format or as OpenMetrics.

Metrics that vLLM (V1) exports by the same name and with the same meaning keep vLLM's prefix and labels, so that its
dashboards work; our own begin with ``aioengine:``. Names of HTTP without a prefix are those of vLLM's server, and
``process_`` is the prefix of Prometheus' clients for a process. Metrics of HTTP and of the process have no labels of
the model.

Numbers are read on the engine's loop, which owns them, in half a millisecond; a thread writes them as text.
"""

from __future__ import annotations

import os
import resource
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from aioengine.core.protocol import ReplicaStatus
from aioengine.errors import AioEngineError
from aioengine.outputs.metrics import (
    OF_REQUESTS,
    REQUEST_TIME_S,
    REQUEST_TOKENS,
    Counter,
    Gauge,
    Histogram,
    Kind,
    Labeled,
    Sample,
)
from aioengine.server.record import METHODS, OTHER_ROUTE, UNCOUNTED_HANDLERS, RequestRecord

if TYPE_CHECKING:
    from aioengine.engine import Engine

VLLM_PREFIX, OWN_PREFIX = "vllm:", "aioengine:"
TEXT = "text/plain; version=0.0.4; charset=utf-8"
OPENMETRICS = "application/openmetrics-text; version=1.0.0; charset=utf-8"

OLD_NAMES = {
    "gpu_cache_usage_perc": "kv_cache_usage_perc",
    "gpu_prefix_cache_queries": "prefix_cache_queries",
    "gpu_prefix_cache_hits": "prefix_cache_hits",
    "time_per_output_token_seconds": "inter_token_latency_seconds",
}
"""Names that vLLM had until 0.11, and older dashboards ask for."""
AT_DOOR = "num_requests_waiting_for_admission"
NOT_VLLMS = (
    "kv_cache_cached_perc", "kv_cache_touched_perc", "step_time_seconds", "device_time_seconds", "loop_lag_seconds",
    AT_DOOR,
)  # fmt: skip


class HttpMetrics:
    """Metrics of HTTP requests, for all engines alike; ``began`` and ``ended`` are called once each a request."""

    def __init__(self) -> None:
        self.requests = Labeled(
            Counter("HTTP requests that ended.", "aioengine:http_requests"), "method", "path", "status"
        )
        self.durations = Labeled(
            Histogram(
                "From a request's first byte to its end.", REQUEST_TIME_S, "aioengine:http_request_duration_seconds"
            ),
            "path",
        )
        self.in_progress = Gauge("HTTP requests being served.", "aioengine:http_requests_in_progress")
        self.shed = Counter("HTTP requests refused for want of room.", "aioengine:http_requests_shed")
        self.gone = Counter("Clients that left before their answer ended.", "aioengine:http_clients_gone")
        self.cut = Counter("Clients cut off since they stopped reading.", "aioengine:http_clients_cut")
        self.by_handler = Labeled(
            Counter("HTTP requests by class of status, without probes, as vLLM has it.", "http_requests"),
            "handler",
            "method",
            "status",
        )
        self.handler_durations = Labeled(
            # The bounds that vLLM's server has for ``http_request_duration_seconds``.
            Histogram("How long HTTP requests took, without probes.", (0.1, 0.5, 1.0), "http_request_duration_seconds"),
            "handler",
        )
        self.params_n = Histogram("Choices asked for by HTTP.", (1, 2, 5, 10, 20), "vllm:request_params_n")
        self.params_max_tokens = Histogram(
            "max_tokens asked for by HTTP.", REQUEST_TOKENS, "vllm:request_params_max_tokens"
        )
        self.max_choice_tokens = Histogram(
            "Tokens of the longest choice of a request by HTTP.",
            REQUEST_TOKENS,
            "vllm:request_max_num_generation_tokens",
        )

    def began(self) -> None:
        self.in_progress.value += 1

    def ended(self, record: RequestRecord) -> None:
        """The request is over; its record is complete."""
        self.in_progress.value -= 1
        method = record.method if record.method in METHODS else "other"
        # Without a status the client left before anything was answered.
        self.requests.of(method, record.route, str(record.status) if record.status else "none").inc()
        self.durations.of(record.route).observe(record.duration_s)
        if record.route not in UNCOUNTED_HANDLERS and record.status:
            handler = "none" if record.route == OTHER_ROUTE else record.route  # as that library calls it
            self.by_handler.of(handler, method, f"{record.status // 100}xx").inc()
            self.handler_durations.of(handler).observe(record.duration_s)
        if early := {"shed": self.shed, "client_gone": self.gone, "cut": self.cut}.get(record.outcome):
            early.inc()
        if record.n is not None and record.max_choice_tokens is not None:
            self.params_n.observe(record.n)
            self.max_choice_tokens.observe(record.max_choice_tokens)
            if record.max_tokens is not None:
                self.params_max_tokens.observe(record.max_tokens)


MOVED = "replica_moved"
"""The one metric of replicas that each front end counts of its own requests; the others are the same for all."""
REPLICA_METRICS: tuple[tuple[str, Kind, str, Callable[[ReplicaStatus], float]], ...] = (
    ("replica_serving", "gauge", "1 while the replica serves.", lambda r: r.state == "serving"),
    ("replica_num_requests_running", "gauge", "Sequences that the replica computes.", lambda r: r.running),
    ("replica_num_requests_waiting", "gauge", "Sequences that wait at the replica.", lambda r: r.waiting),
    (
        *("replica_kv_cache_usage_perc", "gauge", "Share of the replica's KV-cache blocks in use, 0 to 1."),
        lambda r: 1 - r.free_blocks / r.num_blocks if r.num_blocks else 0.0,
    ),
    ("replica_restarts", "counter", "How often the replica was started again.", lambda r: r.num_restarts),
    (MOVED, "counter", "Sequences that were at the replica and went on at another.", lambda r: r.num_moved),
)
"""Metrics of each replica, labelled by its rank, if there are several."""


class MetricFamily(NamedTuple):
    """A metric as it is exported: its numbers, read on the loop, and the labels that all of them have.

    Attributes:
        is_of_engine: all front ends of the engine have the same numbers; else they are this front end's alone.
    """

    name: str
    kind: Kind
    documentation: str
    samples: list[Sample]
    labels: tuple[tuple[str, str], ...]
    is_of_engine: bool = False


class ServerNumbers(msgspec.Struct, frozen=True):
    """The numbers of one server of a port, or of all of them together.

    Attributes:
        families: those of HTTP and of the process; in a sum the engine's, too.
        num_open: requests of work that are being served.
    """

    families: list[MetricFamily]
    num_open: int


def read_families(engine: Engine, http: HttpMetrics, model_name: str) -> list[MetricFamily]:
    """Read all metrics but the process's, whatever the state of the engine; takes 0.5 ms.

    Args:
        model_name: the label that dashboards choose a model by.
    """
    families: list[MetricFamily] = []
    of_model = (("model_name", model_name), ("engine", "0"))

    def add(name: str, kind: Kind, documentation: str, samples: Iterable[Sample], *, is_of_engine: bool = True) -> None:
        is_of_http = name.removeprefix(OWN_PREFIX).startswith("http_")  # has no labels of the model
        families.append(
            MetricFamily(name, kind, documentation, list(samples), () if is_of_http else of_model, is_of_engine)
        )

    def add_gauge(name: str, documentation: str, value: float, **labels: object) -> None:
        shown = tuple((label, str(label_value)) for label, label_value in labels.items())
        add(name, "gauge", documentation, [Sample("", shown, float(value))])

    try:
        health, metrics = engine.health(), engine.metrics
    except AioEngineError:  # not started, closed or dead
        health = None
    is_up = health is not None and health.status != "DEAD"
    if health is not None and is_up:
        by_name = {metric.name: metric for metric in metrics.collect()}
        for name, metric in by_name.items():
            owner = OWN_PREFIX if name in NOT_VLLMS else VLLM_PREFIX
            is_shared = name not in OF_REQUESTS
            add(owner + name, metric.kind, metric.documentation, metric.samples(), is_of_engine=is_shared)
        for old, name in OLD_NAMES.items():
            add(VLLM_PREFIX + old, by_name[name].kind, f"Old name of {name}.", by_name[name].samples())
        asleep = "awake: 0 while the engine sleeps; the level is not known here."
        add_gauge("vllm:engine_sleep_state", asleep, not health.is_sleeping, sleep_state="awake")
        info, config = engine.info, engine.config
        add_gauge(
            "vllm:cache_config_info",
            "The KV cache, as labels; always 1.",
            1,
            block_size=info.block_size,
            cache_dtype=info.dtype,
            enable_prefix_caching=config.enable_prefix_caching,
            gpu_memory_utilization=config.memory_utilization,
            num_gpu_blocks=info.num_blocks,
        )
    is_stalled = health is not None and health.status == "STALLED"
    stalled = "1 while the device hangs at a step or control call, or the engine's process does."
    step_age_s = 0.0 if health is None else health.step_age_s
    add_gauge("aioengine:engine_up", "1 while the engine is there; 0: not started, closed or dead.", is_up)
    add_gauge("aioengine:engine_stalled", stalled, is_stalled)
    add_gauge("aioengine:engine_step_age_seconds", "How long the device has been at its present step.", step_age_s)
    if replicas := engine.replicas() if is_up else []:
        for name, kind, documentation, value in REPLICA_METRICS:
            suffix = "_total" if kind == "counter" else ""
            samples = [Sample(suffix, (("rank", str(each.rank)),), float(value(each))) for each in replicas]
            add(OWN_PREFIX + name, kind, documentation, samples, is_of_engine=name != MOVED)
    for metric in vars(http).values():
        add(metric.name, metric.kind, metric.documentation, metric.samples(), is_of_engine=False)
    return families


def read_process() -> list[MetricFamily]:
    """Numbers of this process, by the names of Prometheus' clients; none without /proc. Call it off the loop."""
    try:
        stat = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
        boot = Path("/proc/stat").read_text().partition("\nbtime ")[2].split(maxsplit=1)[0]
        num_files = len(os.listdir("/proc/self/fd"))
        max_files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    except OSError:
        return []
    ticks_s, page_bytes = os.sysconf("SC_CLK_TCK"), os.sysconf("SC_PAGE_SIZE")
    user, system, started, virtual, resident = (int(stat[place]) for place in (11, 12, 19, 20, 21))  # proc(5)
    numbers: tuple[tuple[str, Kind, str, float], ...] = (
        ("virtual_memory_bytes", "gauge", "Virtual memory size in bytes.", virtual),
        ("resident_memory_bytes", "gauge", "Resident memory size in bytes.", resident * page_bytes),
        ("start_time_seconds", "gauge", "Start time of the process, in Unix seconds.", int(boot) + started / ticks_s),
        ("cpu_seconds", "counter", "User and system CPU time spent in seconds.", (user + system) / ticks_s),
        ("open_fds", "gauge", "Number of open file descriptors.", num_files),
        ("max_fds", "gauge", "Maximum number of open file descriptors.", max_files),
    )
    return [family_of(f"process_{name}", kind, about, value) for name, kind, about, value in numbers]


def family_of(name: str, kind: Kind, documentation: str, value: float) -> MetricFamily:
    """A family of one number."""
    return MetricFamily(name, kind, documentation, [Sample("_total" if kind == "counter" else "", (), value)], ())


def content_type_for(accept: str) -> str:
    """OpenMetrics for a client that takes it, else Prometheus' text format."""
    return OPENMETRICS if "application/openmetrics-text" in accept.lower() else TEXT


def encode(families: list[MetricFamily], content_type: str) -> bytes:
    """The families as text; a microsecond a line."""
    lines: list[str] = []
    for family in families:
        is_total = family.kind == "counter" and content_type == TEXT  # OpenMetrics has it in samples alone
        declared = f"{family.name}_total" if is_total else family.name
        lines.append(f"# HELP {declared} {family.documentation}\n# TYPE {declared} {family.kind}\n")
        for sample in family.samples:
            labels = sorted((*family.labels, *sample.labels))
            shown = ",".join([f'{name}="{_escaped(value)}"' for name, value in labels])
            name = f"{family.name}{sample.suffix}{{{shown}}}" if shown else f"{family.name}{sample.suffix}"
            lines.append(f"{name} {float(sample.value)!r}\n")
    if content_type == OPENMETRICS:
        lines.append("# EOF\n")
    return "".join(lines).encode()


def _escaped(value: str) -> str:
    return value.replace("\\", r"\\").replace("\n", r"\n").replace('"', r"\"")


Key = tuple[str, tuple[tuple[str, str], ...]]
"""A sample's suffix and labels."""

OF_FIRST = ("process_start_time_seconds", "process_max_fds")
"""Numbers of processes that have no sum: those of the process that has started the others stand for all."""


class GroupNumbers:
    """The numbers of servers, the ended ones included: no counter ever goes back, whichever server dies.

    What a server had counted since it last sent its numbers is lost with it.
    """

    def __init__(self) -> None:
        self._last: dict[int, ServerNumbers] = {}
        self._ended: list[MetricFamily] = []
        self.num_restarts = 0

    def note(self, server: int, numbers: ServerNumbers) -> None:
        """Keep the present numbers of a server, by its index."""
        self._last[server] = numbers

    def end(self, server: int) -> None:
        """A server has ended: its counters stay, its gauges are gone."""
        if (last := self._last.pop(server, None)) is not None:
            self._ended = add_up([self._ended, [each for each in last.families if each.kind != "gauge"]])

    def total(self, own: list[MetricFamily], *, num_servers: int, num_serving: int) -> ServerNumbers:
        """The numbers of all together.

        Args:
            own: of the process that asks: the engine's, and its own process's.
        """
        rest = [each for each in own if not each.is_of_engine]
        summed = add_up([rest, self._ended, *(each.families for each in self._last.values())])
        at_door = [each.samples[0].value for each in summed if each.name == OWN_PREFIX + AT_DOOR]
        engine = [each for each in own if each.is_of_engine]
        for place, family in enumerate(engine):  # what waits at the engine, with what waits at servers
            name = family.name.rpartition(":")[2]
            if sum(at_door) and name in ("num_requests_waiting", "num_requests_waiting_by_reason"):
                samples = [
                    Sample(each.suffix, each.labels, each.value + sum(at_door))
                    if not each.labels or ("reason", "capacity") in each.labels
                    else each
                    for each in family.samples
                ]
                engine[place] = family._replace(samples=samples)
        restarts = "HTTP servers that were started again."
        families = [
            *engine,
            *summed,
            family_of("aioengine:api_servers", "gauge", "HTTP servers that are to serve.", num_servers),
            family_of("aioengine:api_servers_serving", "gauge", "HTTP servers that do.", num_serving),
            family_of("aioengine:api_server_restarts", "counter", restarts, self.num_restarts),
        ]
        return ServerNumbers(families, sum(each.num_open for each in self._last.values()))


def add_up(parts: Iterable[Iterable[MetricFamily]]) -> list[MetricFamily]:
    """The sum of families with equal names, label by label, in the order in which they first come."""
    found: dict[str, MetricFamily] = {}
    sums: dict[str, dict[Key, float]] = {}
    for families in parts:
        for family in families:
            if family.name in OF_FIRST and family.name in found:
                continue
            found.setdefault(family.name, family)
            values = sums.setdefault(family.name, {})
            for sample in family.samples:
                key = (sample.suffix, sample.labels)
                values[key] = values.get(key, 0) + sample.value
    return [
        family._replace(samples=[Sample(*key, value) for key, value in sums[name].items()])
        for name, family in found.items()
    ]
