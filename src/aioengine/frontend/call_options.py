"""The options of a call beside its prompt and sampling parameters: one definition for keywords, checks and requests."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Annotated, Any, ClassVar, TypeVar

import msgspec
from msgspec import Meta

from aioengine.config import MAX_TEMPLATE_CHARS
from aioengine.frontend.admission import OnFull
from aioengine.frontend.answer_format import ReasoningEffort
from aioengine.sampling_params import SamplingKeywords
from aioengine.scheduler.sequence import (
    MAX_ID_CHARS,
    MAX_PRIORITY,
    MAX_SALT_CHARS,
    MAX_SESSION_CHARS,
    MAX_TENANT_CHARS,
    Request,
)
from aioengine.validation import check_fields, invalid, is_utf8

F = TypeVar("F", bound=Callable[..., Any])


class CallOptions(msgspec.Struct, frozen=True, kw_only=True):
    """The options of `Engine.generate` and `Engine.stream`, whose docstrings describe them; None: absent.

    A field with the name of a `Request`'s, or of a policy's `Incoming`'s, gets there by itself.

    Raises:
        InvalidRequest: a value is bad, which the error names. What needs the model is checked later.
    """

    request_type: ClassVar[type[Request]] = Request
    """The class of the request that the core gets."""

    request_id: Annotated[str, Meta(min_length=1, max_length=MAX_ID_CHARS)]
    priority: Annotated[int, Meta(ge=-MAX_PRIORITY, le=MAX_PRIORITY)] = 0
    cache_salt: Annotated[str, Meta(min_length=1, max_length=MAX_SALT_CHARS)] | None = None
    tenant: Annotated[str, Meta(min_length=1, max_length=MAX_TENANT_CHARS)] | None = None
    session: Annotated[str, Meta(min_length=1, max_length=MAX_SESSION_CHARS)] | None = None
    trace_headers: dict[str, str] | None = None
    """Names in lower case."""
    on_full: OnFull = "wait"
    chat_template_kwargs: Any = None
    chat_template: Annotated[str, Meta(min_length=1, max_length=MAX_TEMPLATE_CHARS)] | None = None
    add_special_tokens: bool | None = None
    tools: Any = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: ReasoningEffort | None = None
    max_unread_tokens: Annotated[int, Meta(ge=1)] | None = None
    stream_interval: Annotated[int, Meta(ge=1)] | None = None

    def __post_init__(self) -> None:
        if isinstance(headers := self.trace_headers, Mapping):
            lowered = {name.lower(): value for name, value in headers.items() if isinstance(name, str)}
            msgspec.structs.force_setattr(self, "trace_headers", lowered)
        check_fields(self, invalid)
        for name in ("request_id", "cache_salt", "chat_template", "tenant", "session"):
            if not is_utf8(getattr(self, name) or ""):
                raise invalid(name, f"{name} has a lone surrogate, which has no UTF-8 form; remove it")


class CallKeywords(SamplingKeywords, total=False):
    """The options that all calls take, as keywords for type checkers, and the sampling parameters.

    A test holds them and `CallOptions` together. A call names those of `OF_SOME_CALLS` itself, if it takes them.
    """

    cache_salt: str | None
    tenant: str | None
    session: str | None
    trace_headers: Mapping[str, str] | None
    on_full: OnFull
    chat_template_kwargs: Mapping[str, Any] | None
    chat_template: str | None
    add_special_tokens: bool | None
    tools: Any
    tool_choice: Any
    parallel_tool_calls: bool | None
    reasoning_effort: ReasoningEffort | None


OF_SOME_CALLS = ("request_id", "priority", "max_unread_tokens", "stream_interval")


def lists_keywords(keywords: Any) -> Callable[[F], F]:
    """A decorator that adds the keywords of ``**options`` to `inspect.signature`, and so to a notebook's completion.

    Args:
        keywords: the TypedDict of ``**options``.
    """
    listed = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=..., annotation=kind)
        for name, kind in keywords.__annotations__.items()
    ]

    def decorate(function: F) -> F:
        signature = inspect.signature(function)
        *named, _ = signature.parameters.values()
        vars(function)["__signature__"] = signature.replace(parameters=[*named, *listed])
        return function

    return decorate
