"""The errors that aioengine raises: whose fault it is, and what to do.

"The caller's fault", "try later", "you closed it", "it broke" and "our bug" are different types, because a program does
something different about each. Every message names the thing that was wrong and what would be right.
"""

from __future__ import annotations


class AioEngineError(Exception):
    """Everything that aioengine raises on purpose."""


class InvalidRequest(AioEngineError):
    """The caller's fault (HTTP 400), raised at the call, before anything was queued.

    Attributes:
        param: the field that was wrong, or None where several were.
    """

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class PromptTooLong(InvalidRequest):
    """The prompt does not fit the model.

    Attributes:
        length: tokens in the prompt; at least so many if ``is_lower_bound``.
        limit: the most tokens that a prompt may have here.
        is_lower_bound: the text was too long to be worth counting.
    """

    def __init__(self, length: int, limit: int, *, is_lower_bound: bool = False) -> None:
        count = f"at least {length}" if is_lower_bound else str(length)
        super().__init__(
            f"prompt has {count} tokens; this engine allows {limit} (max_model_len, with room for one output token)",
            param="prompt",
        )
        self.length = length
        self.limit = limit
        self.is_lower_bound = is_lower_bound


class ConfigError(AioEngineError):
    """The engine cannot be started as configured; the message says what to change."""


class ModelLoadError(AioEngineError):
    """The model's files are missing, damaged, or not what its config says; the message names the file or tensor."""


class EngineOverloaded(AioEngineError):
    """Too many requests wait already (HTTP 503).

    Attributes:
        retry_after_s: a guess at when there will be room, in seconds.
    """

    def __init__(self, message: str, *, retry_after_s: float) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class StepFailed(AioEngineError):
    """The device step that held this request broke; the engine goes on with the others.

    The cause is ``__cause__``.

    Attributes:
        dump: a report that a person can read: the plan, the counters and the config. It holds no prompt text.
    """

    def __init__(self, message: str, *, dump: str = "") -> None:
        super().__init__(message)
        self.dump = dump


class EngineClosed(AioEngineError):
    """The engine was closed by your code."""


class EngineDead(AioEngineError):
    """The engine broke; everyone in flight hears it once. Start a new one (in a new process after a sticky CUDA error).

    The cause is ``__cause__``.

    Attributes:
        dump: as in `StepFailed`.
    """

    def __init__(self, message: str, *, dump: str = "") -> None:
        super().__init__(message)
        self.dump = dump

    def anew(self) -> EngineDead:
        """The same error for another who hears it: a shared one would collect all their tracebacks."""
        copy = EngineDead(str(self), dump=self.dump)
        copy.__cause__ = self.__cause__
        return copy


class WireError(AioEngineError):
    """A malformed or foreign peer."""


class InternalError(AioEngineError):
    """A bug in aioengine; please report it."""
