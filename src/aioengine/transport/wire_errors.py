"""Errors on the wire: each of aioengine's own types, and Python's common ones, come out as what they went in."""

from __future__ import annotations

import builtins
from typing import Any

import msgspec

from aioengine import errors

MAX_MESSAGE_CHARS = 10_000
MAX_DUMP_CHARS = 200_000


class Fault(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """An error as a message.

    Attributes:
        kind: the name of its type, looked up among aioengine's errors and `PLAIN`, nowhere else.
        param, retry_after_s, dump, length, limit, is_lower_bound: of the types that have them.
        errno: of an OSError; with ``filename``.
        hint: of one of aioengine's own, which its message is without.
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
    hint: str = ""


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


_FIELDS: dict[str, tuple[str, ...]] = {
    "InvalidRequest": ("param",),
    "PromptTooLong": ("length", "limit", "is_lower_bound"),
    "EngineOverloaded": ("retry_after_s",),
    "StepFailed": ("dump",),
    "NoTokenLeft": ("dump",),
    "EngineDead": ("dump",),
}
"""The fields of aioengine's own errors beside their messages."""


def to_fault(error: BaseException) -> Fault:
    """The message that stands for an error; the cause's text is part of it, since tracebacks do not travel."""
    kind, message = type(error).__name__, _text_of(error)
    if isinstance(error, errors.AioEngineError):
        own = next(base.__name__ for base in type(error).__mro__ if vars(errors).get(base.__name__) is base)
        fields = {name: getattr(error, name) for name in _FIELDS.get(own, ())}
        if "dump" in fields:
            fields["dump"] = cut(fields["dump"], MAX_DUMP_CHARS)
        hint = cut(error.hint, MAX_MESSAGE_CHARS) if isinstance(error.hint, str) else ""
        return Fault(own, message.removesuffix(f"; {hint}") if hint else message, hint=hint, **fields)
    # The attributes of others may be anything.
    if isinstance(error, OSError) and kind in _OS_ERRORS:
        filename = cut(error.filename, MAX_MESSAGE_CHARS) if isinstance(error.filename, str) else None
        if isinstance(error.errno, int) and abs(error.errno) < 2**31:
            strerror = cut(error.strerror, MAX_MESSAGE_CHARS) if isinstance(error.strerror, str) else message
            return Fault(kind, strerror, errno=error.errno, filename=filename)
        return Fault(kind, message, filename=filename)
    return Fault(kind, message) if kind in PLAIN else Fault("RuntimeError", f"{kind}: {message}"[:MAX_MESSAGE_CHARS])


def _text_of(error: BaseException) -> str:
    # A KeyError shows its key by repr, and will do so when it is made again.
    is_key = type(error) is KeyError and len(error.args) == 1 and isinstance(error.args[0], str)
    return cut(error.args[0] if is_key else errors.text_of(error), MAX_MESSAGE_CHARS)


def cut(text: str, max_chars: int) -> str:
    """The part of a text that can be sent: file names may hold what has no UTF-8 form."""
    return text[:max_chars].encode(errors="replace").decode()


def to_error(fault: Fault) -> Exception:
    """Make the error that a message stands for; of an unknown type an `InternalError`."""
    if fault.kind in PLAIN:
        return PLAIN[fault.kind](fault.message)
    if fault.kind in _OS_ERRORS:
        of_system = _OS_ERRORS[fault.kind]
        return (
            of_system(fault.message) if fault.errno is None else of_system(fault.errno, fault.message, fault.filename)
        )
    kind: Any = getattr(errors, fault.kind, None)
    if not (isinstance(kind, type) and issubclass(kind, errors.AioEngineError)):
        return errors.InternalError(f"{fault.kind}: {fault.message}")
    fields = {name: getattr(fault, name) for name in _FIELDS.get(fault.kind, ())}
    made: errors.AioEngineError = kind(**fields) if kind is errors.PromptTooLong else kind(fault.message, **fields)
    return made.with_hint(fault.hint)
