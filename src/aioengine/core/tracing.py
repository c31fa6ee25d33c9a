"""OpenTelemetry spans of generations, where the program has OpenTelemetry at hand.

The caller's span lasts from the call to its end. An engine in a process of its own has a span inside it, without the
numbers of tokens, so that a sum of ``gen_ai.usage.*`` over spans counts each token once.

We only ask the API for a tracer: where the program has not imported it there is no provider, and nothing happens. Names
are those of the semantic conventions for gen_ai; names that these do not have are vLLM's. Spans hold no prompts and no
texts.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from aioengine.errors import AioEngineError
from aioengine.outputs.metrics import RequestMetrics
from aioengine.sampling_params import SamplingParams
from aioengine.scheduler.sequence import MAX_TRACEPARENT_CHARS, MAX_TRACESTATE_CHARS, Request

if TYPE_CHECKING:
    from opentelemetry.trace import Span

SYSTEM = "aioengine"
MAX_TEXT_CHARS = 1024
"""The longest text of an attribute: model names and ids are the client's."""
HEADERS = {"traceparent": MAX_TRACEPARENT_CHARS, "tracestate": MAX_TRACESTATE_CHARS}
"""The headers of W3C's Trace Context, in lower case, with their longest values."""


def begin_span(name: str, headers: Mapping[str, str] | None = None) -> tuple[Span | None, dict[str, str]]:
    """Begin a span in the context that ``headers`` name, or else in the current one.

    Returns:
        (the span, None where none is recorded; the headers for spans inside it, which are fields of `Request`).
    """
    given = _usable(headers or {})
    if "opentelemetry.trace" not in sys.modules:
        return None, given
    from opentelemetry import trace
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    propagator = TraceContextTextMapPropagator()
    context = propagator.extract(given) if "traceparent" in given else None
    span = trace.get_tracer(SYSTEM).start_span(name[:MAX_TEXT_CHARS], context=context)
    # A span that is not sampled needs no end: it costs its parent's check and no more.
    inside: dict[str, str] = {}
    propagator.inject(inside, trace.set_span_in_context(span))
    return (span if span.is_recording() else None), _usable(inside)


def _usable(headers: Mapping[str, str]) -> dict[str, str]:
    return {
        name: headers[name]
        for name, max_chars in HEADERS.items()
        if name in headers and headers[name].isascii() and len(headers[name]) <= max_chars
    }


def begin_engine_span(
    request: Request, model: str, num_choices: int
) -> Callable[[str, AioEngineError | None], None] | None:
    """Begin the span of an engine in a process of its own, inside the caller's.

    Returns:
        what to call at the end of each choice, with its finish reason and error; the last end ends the span. None:
        there is no span.
    """
    if not request.traceparent:
        return None
    span, _ = begin_span(f"engine {model}", {name: getattr(request, name) for name in HEADERS})
    finish_reasons: list[str] = []
    first_error: AioEngineError | None = None

    def end_choice(finish_reason: str, error: AioEngineError | None) -> None:
        nonlocal first_error
        finish_reasons.append(finish_reason)
        first_error = first_error or error
        if len(finish_reasons) == num_choices and span is not None:
            request_id = request.request_id[:MAX_TEXT_CHARS]
            attributes = {"gen_ai.request.id": request_id, "gen_ai.response.finish_reasons": finish_reasons}
            end_span(span, attributes, first_error)

    return None if span is None else end_choice


def end_span(span: Span, attributes: Mapping[str, Any], error: BaseException | None = None) -> None:
    """End it; of an error of ours the message, since others' may quote anything."""
    from opentelemetry.trace import Status, StatusCode

    span.set_attributes(attributes)
    if error is not None:
        kind = type(error).__qualname__
        message = str(error)[:MAX_TEXT_CHARS] if isinstance(error, AioEngineError) else ""
        span.set_attribute("error.type", kind)
        span.set_status(Status(StatusCode.ERROR, message or kind))
    span.end()


def gen_ai_attributes(
    *,
    request_id: str,
    model: str,
    operation: str,
    asked: SamplingParams,
    finish_reasons: tuple[str, ...],
    metrics: RequestMetrics | None,
) -> dict[str, Any]:
    """All that is known of a generation: what is not is left out. Times are in seconds.

    Where there are two names for one thing, one is vLLM's, or that of conventions before 1.27, which vLLM still has.
    """
    attributes: dict[str, Any] = {
        "gen_ai.request.id": request_id,
        "gen_ai.response.finish_reasons": finish_reasons or None,
        "gen_ai.usage.num_sequences": len(finish_reasons) or None,
        "gen_ai.operation.name": operation,
        "gen_ai.system": SYSTEM,
        "gen_ai.provider.name": SYSTEM,  # its name since semantic conventions 1.37
        "gen_ai.request.model": model,
        "gen_ai.response.model": model,
        "gen_ai.request.max_tokens": asked.max_tokens,
        "gen_ai.request.temperature": asked.temperature,
        "gen_ai.request.top_p": asked.top_p,
        "gen_ai.request.top_k": asked.top_k,
        "gen_ai.request.n": asked.n,
        "gen_ai.request.choice.count": asked.n,
    }
    if metrics is not None:
        attributes |= {
            "gen_ai.usage.input_tokens": metrics.num_prompt_tokens,
            "gen_ai.usage.prompt_tokens": metrics.num_prompt_tokens,
            "gen_ai.usage.output_tokens": metrics.num_generation_tokens,
            "gen_ai.usage.completion_tokens": metrics.num_generation_tokens,
            "gen_ai.latency.time_to_first_token": metrics.time_to_first_token_s,
            "gen_ai.usage.cached_tokens": metrics.num_cached_tokens,
            "gen_ai.latency.e2e": metrics.e2e_latency_s,
            "gen_ai.latency.time_in_queue": metrics.queue_time_s,
            "gen_ai.latency.time_in_model_prefill": metrics.prefill_time_s,
            "gen_ai.latency.time_in_model_decode": metrics.decode_time_s,
            "gen_ai.latency.time_in_model_inference": metrics.inference_time_s,
        }
    return {
        name: value[:MAX_TEXT_CHARS] if isinstance(value, str) else value
        for name, value in attributes.items()
        if value is not None
    }
