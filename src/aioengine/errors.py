"""The errors that aioengine raises: whose fault it is, and what to do.

"The caller's fault", "try later", "you closed it", "it broke" and "our bug" are different types, because a program does
something different about each. Every message names the thing that was wrong and what would be right.
"""

from __future__ import annotations

import traceback
from typing import Any, Self

MAX_TEXT_CHARS = 10_000
MAX_TRACEBACK_LINES = 1000

TRACEBACK, _CAUSE, _CONTEXT = (vars(BaseException)[f"__{name}__"] for name in ("traceback", "cause", "context"))
_EXCEPTIONS = vars(BaseExceptionGroup)["exceptions"]
"""Slots of every exception, whatever a class of the user's puts before them."""


WAIT = "or wait with on_full='wait'"
LENIENT = "Json(schema, lenient=True) passes it over"
"""Hints that more than one place knows."""


class AioEngineError(Exception):
    """Everything that aioengine raises on purpose.

    Attributes:
        hint: what a Python program can write instead; shown behind the `message`, and left out over HTTP.
    """

    hint: str = ""

    @property
    def message(self) -> str:
        """The error's text without its hint."""
        return super().__str__()

    def __str__(self) -> str:
        return f"{self.message}; {self.hint}" if self.hint else self.message

    def with_hint(self, hint: str) -> Self:
        if hint:
            self.hint = hint
        return self

    def anew(self) -> Self:
        """A copy for one request: a shared one would collect the tracebacks of all."""
        copy = type(self).__new__(type(self), *self.args)
        vars(copy).update(vars(self))
        copy.__cause__ = self.__cause__
        return copy


class InvalidRequest(AioEngineError):
    """The caller's fault (HTTP 400), raised at the call, before anything was queued.

    Attributes:
        param: the field that was wrong, or None where several were.
    """

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param

    def renamed(self, name: str) -> str:
        """The message, where it begins with the field's name with another one in its place."""
        rest = self.message.removeprefix(self.param or "")
        is_named = rest != self.message and not f"a{rest[:1]}".isidentifier()
        return f"{name}{rest}" if is_named else self.message


class PromptTooLong(InvalidRequest):
    """The prompt does not fit the model.

    Attributes:
        length: tokens in the prompt; at least so many if ``is_lower_bound``.
        limit: the most tokens that a prompt may have here.
        is_lower_bound: the text was too long to be worth counting.
    """

    def __init__(self, length: int, limit: int, *, is_lower_bound: bool = False) -> None:
        count = f"at least {length}" if is_lower_bound else str(length)
        # LangChain and LiteLLM look for the beginning, as far as the number, and raise errors of their own for it.
        super().__init__(
            f"prompt is too long: this model's maximum context length is {limit + 1} tokens (max_model_len), however "
            f"the prompt has {count} tokens: shorten it to {limit} or fewer, so that there is room for an answer",
            param="prompt",
        )
        self.length = length
        self.limit = limit
        self.is_lower_bound = is_lower_bound


class ConfigError(AioEngineError):
    """The engine cannot be started as configured; the message names the change to make."""


class ModelLoadError(AioEngineError):
    """The model's files are missing, damaged, or do not match its config; the message names the file or tensor."""


class EngineOverloaded(AioEngineError):
    """Too many requests wait already (HTTP 503); or all replicas ended while they performed a control call.

    Attributes:
        retry_after_s: a guess at when there will be room, in seconds.
    """

    def __init__(self, message: str, *, retry_after_s: float) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class OutputNotParsed(AioEngineError):
    """An answer is no value of the ``output_type`` that was asked for: it was cut, or a validator refused it.

    Attributes:
        text: what there is of it.
        output: the `RequestOutput`, with ``parsed`` in those of its choices that are values.
        outputs: of several prompts that `LLM` was given, all their outputs.
    """

    def __init__(self, message: str, text: str = "", output: Any = None) -> None:
        super().__init__(message)
        self.text = text
        self.output = output
        self.outputs: list[Any] = [output]


class StepFailed(AioEngineError):
    """The device step that held this request broke; the engine goes on with the others.

    The cause is ``__cause__``.

    Attributes:
        dump: a report that a person can read: the plan, the counters and the config. It holds no prompt text.
    """

    def __init__(self, message: str, *, dump: str = "") -> None:
        super().__init__(message)
        self.dump = dump


class NoTokenLeft(StepFailed):
    """This request contradicts itself: its grammar and its other rules leave no token to sample.

    The caller's fault, found only when it comes to that.
    """


class EngineClosed(AioEngineError):
    """The engine was closed by your code."""


class EngineDead(AioEngineError):
    """The engine broke; each request hears it once. Start a new one (in a new process after a sticky CUDA error).

    The cause is ``__cause__``.

    Attributes:
        dump: as in `StepFailed`.
    """

    def __init__(self, message: str, *, dump: str = "") -> None:
        super().__init__(message)
        self.dump = dump


class WireError(AioEngineError):
    """A malformed or foreign peer."""


class InternalError(AioEngineError):
    """A bug in aioengine, to be reported; or in a class that it was given, which the message then names."""


def text_of(error: BaseException) -> str:
    """An error's text, of `MAX_TEXT_CHARS` at most; a ``__str__`` of the user's own may raise, or return anything."""
    try:
        return str.__getitem__(str(error), slice(MAX_TEXT_CHARS))
    except BaseException as bad:  # one error must not become another's
        return f"(its text cannot be had: {type(bad).__name__})"


def describe(error: BaseException) -> str:
    """``Type: text``; of a group, that of its first error."""
    while isinstance(error, BaseExceptionGroup):
        error = _EXCEPTIONS.__get__(error)[0]
    return f"{type(error).__name__}: {text_of(error)}"


def traceback_of(error: BaseException) -> list[str]:
    """The lines that Python would print of an error; of too many or too long ones, a part."""
    try:
        lines = "".join(traceback.format_exception(error)).splitlines()
    except Exception:  # it cannot be looked at
        lines = [describe(error)]
    return [line[:MAX_TEXT_CHARS] for line in lines[:MAX_TRACEBACK_LINES] + lines[MAX_TRACEBACK_LINES:][-1:]]


def linked(error: BaseException) -> list[BaseException]:
    """An error and all that it is linked to, by causes, contexts and groups; each once, since they may form a ring."""
    links, found = [error], {}
    while links:
        link = links.pop()
        if id(link) not in found:
            found[id(link)] = link
            links += [other for slot in (_CAUSE, _CONTEXT) if (other := slot.__get__(link)) is not None]
            if isinstance(link, BaseExceptionGroup):
                links += _EXCEPTIONS.__get__(link)
    return list(found.values())
