"""Errors on the wire: each of aioengine's own types, and Python's common ones, come out as what they went in."""

from __future__ import annotations

import builtins
from typing import Any

import msgspec

from aioengine import errors

MAX_MESSAGE_CHARS = 20_000
MAX_DUMP_CHARS = 200_000


class Fault(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """An error as a message.

    Attributes:
        kind: the name of its type, looked up among aioengine's errors and `PLAIN`, nowhere else.
        param, retry_after_s, dump, length, limit, is_lower_bound: of the types that have them.
        errno: of an OSError; with ``filename``.
    """

    kind: str
    message: str
    param: str | None = None
    retry_after_s: float = 0.0
    dump: str = ""
    length: int = 0
    limit: int = 0
    is_lower_bound: bool = False
    errno: int | None = None
    filename: str | None = None


PLAIN: dict[str, type[Exception]] = {
    kind.__name__: kind
    for kind in (
        ArithmeticError, AttributeError, AssertionError, EOFError, IndexError, KeyError, LookupError, MemoryError,
        NotImplementedError, OverflowError, RuntimeError, TypeError, ValueError, ZeroDivisionError,
    )
}  # fmt: skip
"""Python's own that are made of a message alone."""

_OS_ERRORS: dict[str, type[OSError]] = {
    name: kind for name, kind in vars(builtins).items() if isinstance(kind, type) and issubclass(kind, OSError)
}


def to_fault(error: BaseException) -> Fault:
    """The message that stands for an error; the cause's text is part of it, since tracebacks do not travel."""
    kind, message = type(error).__name__, str(error)
    if isinstance(error, errors.PromptTooLong):
        return Fault(
            kind,
            message,
            param=error.param,
            length=error.length,
            limit=error.limit,
            is_lower_bound=error.is_lower_bound,
        )
    if isinstance(error, OSError) and kind in _OS_ERRORS:
        filename = error.filename if isinstance(error.filename, str) else None
        return Fault(kind, error.strerror or message, errno=error.errno, filename=filename)
    if not isinstance(error, errors.AioEngineError) and kind not in PLAIN:
        kind, message = "RuntimeError", f"{kind}: {message}"
    return Fault(
        kind,
        message[:MAX_MESSAGE_CHARS],
        param=getattr(error, "param", None),
        retry_after_s=getattr(error, "retry_after_s", 0.0),
        dump=getattr(error, "dump", "")[:MAX_DUMP_CHARS],
    )


def to_error(fault: Fault) -> Exception:
    """The error that a message stands for, made anew; of an unknown type an `InternalError`."""
    if fault.kind == "PromptTooLong":
        return errors.PromptTooLong(fault.length, fault.limit, is_lower_bound=fault.is_lower_bound)
    if fault.kind in _OS_ERRORS and fault.kind not in PLAIN:
        return _OS_ERRORS[fault.kind](fault.errno, fault.message, fault.filename)
    if fault.kind in PLAIN:
        return PLAIN[fault.kind](fault.message)
    return _own_error(fault)


def _own_error(fault: Fault) -> Exception:
    kind: Any = getattr(errors, fault.kind, None)
    if not (isinstance(kind, type) and issubclass(kind, errors.AioEngineError)):
        return errors.InternalError(f"{fault.kind}: {fault.message}")
    if issubclass(kind, errors.InvalidRequest):
        return kind(fault.message, param=fault.param)
    if issubclass(kind, errors.EngineOverloaded):
        return kind(fault.message, retry_after_s=fault.retry_after_s)
    if issubclass(kind, errors.StepFailed | errors.EngineDead):
        return kind(fault.message, dump=fault.dump)
    return kind(fault.message)
