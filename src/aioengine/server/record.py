"""The record of one HTTP request: filled in while it is served, read at its end by metrics, span and log."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal

import msgspec

from aioengine.core.tracing import HEADERS, MAX_TEXT_CHARS, SYSTEM, end_span
from aioengine.outputs.metrics import RequestMetrics

Outcome = Literal["ok", "refused", "client_gone", "cut", "shed", "error"]
"""How a request ended.

- ok: the whole response was sent, and it was what was asked for.
- refused: something was wrong with the request, and the whole response (4xx) reported it; or an error in the middle of
  a stream did, where that was found only then.
- client_gone: the client left before that.
- cut: the client stopped reading, and the server ended the connection.
- shed: it was refused for want of room (503), before any costly work.
- error: the server's fault: a 5xx, or an error in the middle of a stream. A `/health` of 503 is one, too, and
  nothing was raised for it.
"""

MESSAGES = "/v1/messages"
"""Where Anthropic's API is."""
METHODS = ("GET", "POST", "HEAD", "OPTIONS", "PUT", "PATCH", "DELETE")
"""Methods with a label of their own; others, which clients can make up, are "other"."""
OPEN_PATHS = ("/health", "/ping")
"""Paths of probes, which have no key; ``/ping`` is SageMaker's. Both have the same answer."""
UNCOUNTED_HANDLERS = (*OPEN_PATHS, "/metrics", "/version", "/load")
"""vLLM leaves probes out of ``http_requests_total``: a scrape a second would be most of it."""
OTHER_ROUTE = "other"
"""The route of a path that is none of ours: clients may make up as many paths as they like."""


class RequestRecord(msgspec.Struct, kw_only=True, weakref=True):
    """One HTTP request.

    It holds no prompt, no key, no header but the id and the trace, and nothing after a path's question mark.

    Attributes:
        owner: whose stored responses it may use: the number of its key, and the tenant of a proxy. Never logged.
        request_id: the client's own if `access_log.request_id_of` found it fit, else made.
        path: below the mount, without the query.
        route: the path's template, such as ``/v1/models/{id}``: what metrics and spans are named by.
        client: the peer's address.
        started_at, ended_at: by ``time.monotonic``.
        status: of the response; 0 while none has begun.
        error: what was raised. With a status of 500 and above, or with the outcome "error", it goes to the log with
            its traceback, and never to the client.
        error_code, error_param: the "code" and "param" of the body that reported an error; never its
            message, which may quote the client.
        model: the served name that the request chose.
        n, max_tokens: as the engine takes them, where the request has them.
        prompt_tokens, completion_tokens: of all prompts and choices; None for a request that generates nothing.
        max_choice_tokens: of the longest choice.
        finish_reasons: one for each choice.
        time_to_first_token_s: as the client saw it, from `started_at`.
        metrics: the engine's own times; of the first prompt where there are several.
        trace_headers: of the span that the engine's are to be inside of.
    """

    request_id: str
    method: str
    path: str
    started_at: float
    owner: str = ""
    route: str = OTHER_ROUTE
    client: str = ""
    ended_at: float | None = None
    status: int = 0
    outcome: Outcome = "ok"
    error: BaseException | None = None
    error_code: str | None = None
    error_param: str | None = None
    model: str | None = None
    n: int | None = None
    max_tokens: int | None = None
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    max_choice_tokens: int | None = None
    finish_reasons: tuple[str, ...] = ()
    time_to_first_token_s: float | None = None
    metrics: RequestMetrics | None = None
    trace_headers: dict[str, str] = {}

    @property
    def id_headers(self) -> dict[str, str]:
        """Headers with the request's id; Anthropic's clients know it by another name."""
        names = ("x-request-id", "request-id") if self.path.startswith(MESSAGES) else ("x-request-id",)
        return dict.fromkeys(names, self.request_id)

    @property
    def duration_s(self) -> float:
        """From its start to its end."""
        return 0.0 if self.ended_at is None else self.ended_at - self.started_at

    @property
    def first_token_s(self) -> float | None:
        """To the first token: as the client saw it, or else as the engine did; None where none has come.

        A request that is aborted before sends its client an event, too, that has no token.
        """
        if self.completion_tokens == 0:
            return None
        if self.time_to_first_token_s is not None or self.metrics is None:
            return self.time_to_first_token_s
        return self.metrics.time_to_first_token_s

    @property
    def is_failure(self) -> bool:
        """It was the server's fault. A 503 that sheds is none: that is what was asked of an overloaded server."""
        return self.outcome == "error" or (self.status >= 500 and self.outcome != "shed")


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
        record.trace_headers = {}
        TraceContextTextMapPropagator().inject(record.trace_headers, trace.set_span_in_context(span))
        # A span that is not sampled needs no end: it costs only the check of its parent.
        return span if span.is_recording() else None

    def end(self, span: Span | None, record: RequestRecord) -> None:
        """End a request's span, if there is one, with the attributes of its complete record."""
        if span is None:
            return
        span.update_name(_name(record))
        error = record.error if record.is_failure else None
        if error is None and (record.outcome not in ("ok", "refused") or record.status >= 500):
            is_by_status = record.outcome in ("ok", "error") and record.status >= 500
            span.set_attribute("error.type", str(record.status) if is_by_status else record.outcome)
            span.set_status(Status(StatusCode.ERROR, record.outcome))
        attributes: dict[str, Any] = {
            "http.route": None if record.route == OTHER_ROUTE else record.route,
            "http.response.status_code": record.status or None,
            "client.address": record.client or None,
            "aioengine.outcome": record.outcome,
            "gen_ai.request.id": record.request_id,
            "gen_ai.latency.time_to_first_token": record.first_token_s,
        }
        end_span(span, {name: value for name, value in attributes.items() if value is not None}, error)


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
