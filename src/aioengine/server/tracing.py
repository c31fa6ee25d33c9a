"""OpenTelemetry spans, one a request but for probes, where the program that hosts us has set OpenTelemetry up.

We only ask its API for a tracer: the SDK, sampling and export are the host's choice. Without opentelemetry-api, or
while no provider is set, nothing happens. Names are those of the semantic conventions for HTTP. The spans inside
(`core.tracing`) describe the generations and their numbers of tokens. Spans hold no prompts, no texts and no keys.

If the host's framework is instrumented, the request has a SERVER span already. Ours is then an INTERNAL one inside it,
as the instrumentation of a framework inside another one makes it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from aioengine.core.tracing import HEADERS, MAX_TEXT_CHARS, SYSTEM, end_span
from aioengine.server.metrics import METHODS, UNCOUNTED_HANDLERS
from aioengine.server.record import OTHER_ROUTE, RequestRecord

if TYPE_CHECKING:
    from opentelemetry.trace import Span, SpanContext, TracerProvider

try:
    from opentelemetry import propagate, trace
    from opentelemetry.context import Context
    from opentelemetry.trace import SpanKind, Status, StatusCode
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
except ImportError:
    is_installed = False
else:
    is_installed = True


class Tracing:
    """Begins and ends the spans of requests.

    Args:
        provider: makes the tracer; absent: the process's provider, which may be set later.
    """

    def __init__(self, provider: TracerProvider | None = None) -> None:
        # The API's own tracer uses a provider that is set later, so that it can be made now.
        self._tracer = trace.get_tracer(SYSTEM, tracer_provider=provider) if is_installed else None

    def begin(self, record: RequestRecord, headers: Mapping[str, str]) -> Span | None:
        """Start a request's span, inside the host's span for it, or else under the span that ``traceparent`` names.

        Returns None if it is not recorded. The span is not made current: the work is spread over tasks and callbacks.

        Args:
            headers: with names in lower case.
        """
        record.trace_headers = {name: headers[name] for name in HEADERS if name in headers}
        if self._tracer is None or record.route in UNCOUNTED_HANDLERS:
            return None
        asked = propagate.extract(headers) if "traceparent" in headers else Context()
        method = record.method if record.method in METHODS else "_OTHER"
        is_inside = _is_inside(trace.get_current_span(), trace.get_current_span(asked).get_span_context())
        span = self._tracer.start_span(
            _name(record),
            context=None if is_inside else asked,
            kind=SpanKind.INTERNAL if is_inside else SpanKind.SERVER,
            attributes={"http.request.method": method, "url.path": record.path[:MAX_TEXT_CHARS]},
        )
        # The parent of the engine's own span is this one, which is not current where the engine is called.
        inside: dict[str, str] = {}
        TraceContextTextMapPropagator().inject(inside, trace.set_span_in_context(span))
        record.trace_headers = inside
        # A span that is not sampled needs no end: it costs only the check of its parent.
        return span if span.is_recording() else None

    def end(self, span: Span | None, record: RequestRecord) -> None:
        """End a request's span, if there is one, with the attributes of its complete record."""
        if span is None:
            return
        span.update_name(_name(record))
        error = record.error if record.is_failure else None
        if error is None and (record.outcome not in ("ok", "refused") or record.status >= 500):
            is_told_by_status = record.outcome in ("ok", "error") and record.status >= 500
            span.set_attribute("error.type", str(record.status) if is_told_by_status else record.outcome)
            span.set_status(Status(StatusCode.ERROR, record.outcome))
        end_span(span, _attributes(record), error)


def _is_inside(span: Span, asked: SpanContext) -> bool:
    """Whether the current span is the request's, made by an instrumented host, and not one that the server started in.

    A span that is not sampled has no kind: it is taken for the request's, which then has no span at all.
    """
    current = span.get_span_context()
    if asked.is_valid and asked.trace_id != current.trace_id:
        return False
    if span.is_recording():
        return getattr(span, "kind", None) is SpanKind.SERVER
    return current.is_valid and not current.trace_flags.sampled and not current.is_remote


def _name(record: RequestRecord) -> str:
    """``POST /v1/chat/completions``; never a path that a client made up, of which there may be any number."""
    method = record.method if record.method in METHODS else "HTTP"
    return method if record.route == OTHER_ROUTE else f"{method} {record.route}"


def _attributes(record: RequestRecord) -> dict[str, Any]:
    """The record's attributes, without those that are not known. The first token's time is the client's."""
    told: dict[str, Any] = {
        "http.route": None if record.route == OTHER_ROUTE else record.route,
        "http.response.status_code": record.status or None,
        "client.address": record.client or None,
        "aioengine.outcome": record.outcome,
        "gen_ai.request.id": record.request_id,
        "gen_ai.latency.time_to_first_token": record.first_token_s,
    }
    return {name: value for name, value in told.items() if value is not None}
