"""The record of one HTTP request: filled in while it is served, read at its end by metrics, span and log."""

from __future__ import annotations

from typing import Literal

import msgspec

from aioengine.outputs.metrics import RequestMetrics

Outcome = Literal["ok", "refused", "client_gone", "cut", "shed", "error"]
"""How a request ended.

- ok: the whole response was sent, and it was what was asked for.
- refused: something was wrong with the request, and the whole response (4xx) said what; or an error in the middle of a
  stream did, where that was found only then.
- client_gone: the client left before that.
- cut: the client stopped reading, and the server ended the connection.
- shed: it was refused for want of room (503), before any costly work.
- error: the server's fault: a 5xx, or an error in the middle of a stream. A `/health` that says 503 is one, too, and
  nothing was raised for it.
"""

MESSAGES = "/v1/messages"
"""Where Anthropic's API is."""
OTHER_ROUTE = "other"
"""The route of a path that is none of ours: clients may make up as many paths as they like."""


class RequestRecord(msgspec.Struct, kw_only=True, weakref=True):
    """One HTTP request.

    It holds no prompt, no key, no header but the id and the trace, and nothing after a path's question mark.

    Attributes:
        owner: whose stored responses it may use: the number of its key, and the tenant that a proxy says. Never logged.
        request_id: the client's own if `access_log.request_id_of` found it fit, else made.
        path: below the mount, without the query.
        route: the path's template, such as ``/v1/models/{id}``: what metrics and spans are named by.
        client: the peer's address.
        started_at, ended_at: by ``time.monotonic``.
        status: of the response; 0 while none has begun.
        error: what was raised. With a status of 500 and above, or with the outcome "error", it goes to the log with
            its traceback, and never to the client.
        error_code, error_param: the "code" and "param" of the body that told the client of an error; never its
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
