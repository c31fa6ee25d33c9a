"""What is counted of HTTP requests, and the metrics with labels that this takes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Literal

from aioengine.metrics import REQUEST_TIME_S, REQUEST_TOKENS, Counter, Gauge, Histogram, Sample
from aioengine.server.record import OTHER_ROUTE, RequestRecord

METHODS = ("GET", "POST", "HEAD", "OPTIONS", "PUT", "PATCH", "DELETE")
OTHER_METHOD = "other"
"""Clients may make up as many methods as they like."""
NO_STATUS = "none"
"""The client left before anything was answered."""
UNCOUNTED_HANDLERS = ("/health", "/metrics", "/version", "/load")
"""vLLM leaves probes out of ``http_requests_total``: a scrape a second would be most of it."""
HANDLER_TIME_S = (0.1, 0.5, 1.0)
"""The bounds that vLLM's server has for ``http_request_duration_seconds``."""


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
