"""Errors as clients of the OpenAI API read them: a status, and ``{"error": {"message", "type", "param", "code"}}``.

What went wrong inside stays inside: of an internal error clients learn only that there was one.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import msgspec

from aioengine.errors import (
    LENIENT,
    EngineClosed,
    EngineDead,
    EngineOverloaded,
    InvalidRequest,
    NoTokenLeft,
    OutputNotParsed,
    PromptTooLong,
    StepFailed,
)
from aioengine.server.exchange import Response

JSON_HEADERS = {"content-type": "application/json"}


class ApiError(Exception):
    """A request that is answered by an error.

    Attributes:
        status: of HTTP. The body's "type" follows from it: "server_error" from 500 on.
        code: for the client's program.
        message: for a person; says what to do.
        param: the field that was wrong.
        headers: beside the usual ones.
    """

    def __init__(
        self,
        status: int,
        code: str | None,
        message: str,
        *,
        param: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.code, self.message, self.param = status, code, message, param
        self.headers = dict(headers or {})

    def body(self) -> bytes:
        """The error as JSON."""
        kind = "server_error" if self.status >= 500 else "invalid_request_error"
        error = {"message": self.message, "type": kind, "param": self.param, "code": self.code}
        return msgspec.json.encode({"error": error})

    def response(self) -> Response:
        return Response(self.status, self.body(), {**JSON_HEADERS, **self.headers})


HINTS = {LENIENT: '"strict": false passes it over'}
"""The hints of errors, as HTTP has them; others are for Python programs alone."""


def api_error_of(error: Exception, *, param_names: Mapping[str, str] | None = None) -> ApiError:
    """The error that a client gets for ``error``.

    Args:
        param_names: what the client calls the engine's parameters, where it has other names for them.
    """
    if isinstance(error, ApiError):
        return error
    if isinstance(error, InvalidRequest):
        # The clients' names of parameters of the engine.
        param = {**{"extra_args": "vllm_xargs", "num_sequences": "n"}, **(param_names or {})}.get(
            error.param or "", error.param
        )
        if isinstance(error, PromptTooLong):  # whose beginning clients look for
            return ApiError(400, "context_length_exceeded", error.message, param=param)
        hint = f"; {HINTS[error.hint]}" if error.hint in HINTS else ""
        return ApiError(400, "invalid_value", f"{error.renamed(param or '')}{hint}", param=param)
    if isinstance(error, EngineOverloaded):
        return overloaded(error.message, error.retry_after_s)
    if isinstance(error, EngineClosed):
        return unavailable(f"no requests are taken now: {error.message}")
    if isinstance(error, EngineDead):
        return ApiError(503, "engine_dead", "the engine has stopped working")
    if isinstance(error, NoTokenLeft):
        _, _, why = str(error).partition("NothingAllowed: ")
        return ApiError(400, "no_token_left", f"what is asked for leaves no token to generate: {why or error}")
    if isinstance(error, OutputNotParsed):
        return ApiError(500, "output_not_parsed", error.message)
    if isinstance(error, StepFailed):
        return ApiError(500, "step_failed", "the step that computed this request failed; the log says why")
    return ApiError(500, "internal_error", "an internal error; its request id is in the log")


def unavailable(message: str, **headers: str) -> ApiError:
    """503, for a while that is not known."""
    return ApiError(503, "unavailable", message, headers={"retry-after": "5", **headers})


def overloaded(message: str, retry_after_s: float, **headers: str) -> ApiError:
    """503, with the seconds after which to come again."""
    after = {"retry-after": str(max(1, math.ceil(retry_after_s))), **headers}
    return ApiError(503, "overloaded", message, headers=after)


def invalid_value(name: str, message: str) -> ApiError:
    """A field whose value cannot be taken."""
    return ApiError(400, "invalid_value", message, param=name)


def missing(name: str) -> ApiError:
    """A field that is needed and not there."""
    return ApiError(400, "missing_required_parameter", f"{name} is missing", param=name)


def unsupported(name: str, why: str = "is not supported yet; leave it out") -> ApiError:
    """A field that clients may know from elsewhere, and that would change the answer if it were left out in silence."""
    return ApiError(400, "unsupported_parameter", f"{name} {why}", param=name)
