"""Spans of requests: what they are called, whose children they are, and what they say and keep to themselves."""

import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from opentelemetry import propagate, trace
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF
from opentelemetry.trace import NonRecordingSpan, SpanContext, SpanKind, StatusCode, TraceFlags
from server.conftest import record_of

from aioengine.errors import StepFailed
from aioengine.outputs.metrics import RequestMetrics
from aioengine.server.record import RequestRecord, Tracing

Traced = Callable[..., ReadableSpan]

TRACE_ID = "0af7651916cd43dd8448eb211c80319c"
PARENT_ID = "b7ad6b7169203331"
TRACEPARENT = f"00-{TRACE_ID}-{PARENT_ID}-01"


@pytest.fixture
def exporter() -> InMemorySpanExporter:
    return InMemorySpanExporter()


@pytest.fixture
def provider(exporter: InMemorySpanExporter) -> Iterator[TracerProvider]:
    # One of our own: the process's can be set only once.
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    yield provider
    provider.shutdown()


@pytest.fixture
def tracing(provider: TracerProvider) -> Tracing:
    return Tracing(provider)


@pytest.fixture
def traced(tracing: Tracing, exporter: InMemorySpanExporter) -> Traced:
    """Begins and ends the span of a record with these headers, and gives it."""

    def trace_one(record: RequestRecord, headers: dict[str, str] | None = None) -> ReadableSpan:
        tracing.end(tracing.begin(record, headers or {}), record)
        (span,) = exporter.get_finished_spans()
        return span

    return trace_one


CHAT = "/v1/chat/completions"


def begun(**fields: Any) -> RequestRecord:
    return record_of(**{"path": CHAT, "route": CHAT, "status": 0, "ended_at": None, **fields})


def test_a_request_tells_how_it_ended_and_leaves_the_tokens_to_the_span_inside(
    tracing: Tracing, exporter: InMemorySpanExporter
) -> None:
    record = begun(route="other")
    span = tracing.begin(record, {})
    record.route, record.model = CHAT, "fox"  # which may be known only later
    record.n, record.max_tokens = 2, 64
    record.status = 200
    record.prompt_tokens, record.completion_tokens, record.finish_reasons = 7, 12, ("stop", "length")
    record.time_to_first_token_s = 0.05
    record.metrics = RequestMetrics(
        arrival_time=1.0, queue_time_s=0.01, prefill_time_s=0.02, decode_time_s=0.5, inference_time_s=0.52,
        time_to_first_token_s=0.03, e2e_latency_s=0.53, num_cached_tokens=4,
    )  # fmt: skip
    tracing.end(span, record)
    (ended,) = exporter.get_finished_spans()
    assert ended.name == "POST /v1/chat/completions"
    assert ended.kind is SpanKind.SERVER
    assert ended.parent is None
    assert ended.status.status_code is StatusCode.UNSET
    assert ended.instrumentation_scope is not None
    assert ended.instrumentation_scope.name == "aioengine"
    assert dict(ended.attributes or {}) == {
        "http.request.method": "POST",
        "url.path": "/v1/chat/completions",
        "http.route": "/v1/chat/completions",
        "http.response.status_code": 200,
        "client.address": "127.0.0.1",
        "aioengine.outcome": "ok",
        "gen_ai.request.id": "req-1",
        "gen_ai.latency.time_to_first_token": 0.05,
    }


def test_a_span_is_the_child_of_the_one_that_the_client_names(traced: Traced) -> None:
    span = traced(begun(status=200), {"traceparent": TRACEPARENT, "tracestate": "x=1"})
    assert span.parent is not None
    assert f"{span.parent.span_id:016x}" == PARENT_ID
    assert span.context is not None
    assert f"{span.context.trace_id:032x}" == TRACE_ID
    assert span.parent.trace_state == {"x": "1"}


@pytest.mark.parametrize("traceparent", [None, "rubbish", TRACEPARENT])
def test_inside_the_span_of_an_instrumented_server_it_is_no_second_server_span(
    traceparent: str | None, provider: TracerProvider, tracing: Tracing, exporter: InMemorySpanExporter
) -> None:
    """As opentelemetry-instrumentation-asgi, -starlette, -fastapi and -aiohttp-server do it."""
    headers = {} if traceparent is None else {"traceparent": traceparent}
    tracer = provider.get_tracer("opentelemetry.instrumentation.asgi")
    with tracer.start_as_current_span("POST /ai", context=propagate.extract(headers), kind=SpanKind.SERVER) as outer:
        record = begun(status=200)
        tracing.end(tracing.begin(record, headers), record)
    inner, server = exporter.get_finished_spans()
    assert (inner.kind, server.kind) == (SpanKind.INTERNAL, SpanKind.SERVER)
    assert inner.parent == outer.get_span_context()
    assert (inner.attributes or {})["gen_ai.request.id"] == "req-1"


@pytest.mark.parametrize(("before", "traceparent"), [(None, None), (None, TRACEPARENT), (TRACEPARENT, TRACEPARENT)])
@pytest.mark.parametrize("is_over", [False, True])
def test_requests_are_no_part_of_what_the_server_was_started_in(
    is_over: bool,
    before: str | None,
    traceparent: str | None,
    provider: TracerProvider,
    traced: Traced,
    exporter: InMemorySpanExporter,
) -> None:
    begun_in, headers = [{} if each is None else {"traceparent": each} for each in (before, traceparent)]
    startup = provider.get_tracer("main").start_span("startup", context=propagate.extract(begun_in))
    with trace.use_span(startup):
        if is_over:
            startup.end()
            exporter.clear()
        span = traced(begun(), headers)
    assert span.kind is SpanKind.SERVER
    assert (span.parent and f"{span.parent.span_id:016x}") == (traceparent and PARENT_ID)


@pytest.mark.parametrize("traceparent", ["", "rubbish", "00-0-0-01", f"00-{'0' * 32}-{PARENT_ID}-01", "é" * 55])
def test_a_bad_traceparent_makes_a_root(traceparent: str, traced: Traced) -> None:
    assert traced(begun(), {"traceparent": traceparent}).parent is None


def test_probes_and_what_is_not_sampled_have_no_span(tracing: Tracing, exporter: InMemorySpanExporter) -> None:
    for path in ("/health", "/metrics", "/load", "/version"):
        record = begun(method="GET", path=path, route=path)
        assert tracing.begin(record, {"traceparent": TRACEPARENT}) is None
        tracing.end(None, record)
    unsampled = {"traceparent": TRACEPARENT.removesuffix("1") + "0"}
    assert tracing.begin(begun(), unsampled) is None
    with trace.use_span(NonRecordingSpan(SpanContext(1, 2, is_remote=False, trace_flags=TraceFlags(0)))):
        assert tracing.begin(begun(), {}) is None
        assert tracing.begin(begun(), {"traceparent": TRACEPARENT}) is not None, "it is another trace's"
    for without in (Tracing(), Tracing(TracerProvider(sampler=ALWAYS_OFF, shutdown_on_exit=False))):
        for headers in ({}, unsampled):
            assert without.begin(begun(), headers) is None
    assert exporter.get_finished_spans() == ()


@pytest.mark.parametrize(
    ("fields", "told", "error_type"),
    [
        ({"status": 500, "outcome": "error", "error": StepFailed("the step broke")}, "the step broke", "StepFailed"),
        ({"status": 200, "outcome": "error", "error": KeyError("a prompt")}, "KeyError", "KeyError"),
        ({"status": 503, "outcome": "shed"}, "shed", "shed"),
        ({"status": 200, "outcome": "client_gone"}, "client_gone", "client_gone"),
        ({"status": 200, "outcome": "cut"}, "cut", "cut"),
        ({"status": 502}, "ok", "502"),
        ({"status": 503, "outcome": "error"}, "error", "503"),
        ({"status": 400, "outcome": "refused", "error": ValueError("a prompt")}, None, None),
    ],
)
def test_what_failed_is_an_error_without_anybodys_texts(
    fields: dict[str, Any], told: str | None, error_type: str | None, traced: Traced
) -> None:
    span = traced(begun(**fields))
    assert span.status.status_code is (StatusCode.ERROR if told else StatusCode.UNSET)
    assert span.status.description == told
    assert (span.attributes or {}).get("error.type") == error_type
    assert "a prompt" not in span.to_json()
    assert span.events == ()


def test_where_no_token_came_no_time_to_the_first_one_is_told(traced: Traced) -> None:
    metrics = RequestMetrics(arrival_time=1.0, e2e_latency_s=0.5)
    span = traced(begun(completion_tokens=0, time_to_first_token_s=0.5, metrics=metrics))
    assert "gen_ai.latency.time_to_first_token" not in (span.attributes or {})


@pytest.mark.parametrize(
    ("fields", "name"),
    [
        ({"method": "GET", "route": "/v1/models/{id}", "path": "/v1/models/fox"}, "GET /v1/models/{id}"),
        ({"method": "GET", "route": "other", "path": "/wp-login.php"}, "GET"),
        ({"method": "BREW", "route": "other", "path": "/"}, "HTTP"),
    ],
)
def test_names_are_few_whatever_clients_make_up(fields: dict[str, str], name: str, traced: Traced) -> None:
    assert traced(begun(**fields)).name == name


def test_long_texts_of_clients_are_cut(traced: Traced) -> None:
    span = traced(begun(path="/" + "x" * 10**6, model="m" * 10**6))
    assert len(span.to_json()) < 10_000


def test_without_opentelemetry_nothing_happens() -> None:
    script = """
import sys
sys.modules["opentelemetry"] = None  # as if it were not installed
from aioengine.server.record import RequestRecord
from aioengine.server.record import Tracing, is_installed
record = RequestRecord(request_id="a", method="GET", path="/", started_at=0.0)
tracing = Tracing()
span = tracing.begin(record, {"traceparent": "x"})
tracing.end(span, record)
print(is_installed, span)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout == "False None\n"
