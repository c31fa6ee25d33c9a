"""Exceptions that the user's own code may raise, and that break whoever looks at them without care."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn


class Speechless(Exception):
    def __str__(self) -> str:
        raise ZeroDivisionError("no text")

    __repr__ = __str__


class Leaving(Exception):
    def __str__(self) -> str:
        raise SystemExit(3)

    __repr__ = __str__


class Numeric(Exception):
    def __str__(self) -> Any:
        return 7

    __repr__ = __str__


class Endless(Exception):
    def __str__(self) -> str:
        return "x" * 50_000_000


class Guarded(Exception):
    """Its links cannot be looked at, changed or added to."""

    __cause__ = property(lambda self: 1 / 0)  # type: ignore[assignment]
    __context__ = property(lambda self: 1 / 0)  # type: ignore[assignment]
    __traceback__ = property(lambda self: 1 / 0)  # type: ignore[assignment]
    __notes__ = property(lambda self: 1 / 0)

    def add_note(self, note: str) -> NoReturn:
        raise ZeroDivisionError("no notes")


class Unique(Exception):
    """It cannot be copied."""

    def __init__(self, one: int, two: int, *, three: int) -> None:
        super().__init__("unique")

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise TypeError("no copies")


def _own_cause() -> NoReturn:
    error = ValueError("its own cause")
    raise error from error


def _ring() -> NoReturn:
    first, second, third = ValueError("first"), KeyError("second"), OSError("third")
    first.__cause__, second.__context__, third.__cause__ = second, third, first
    raise first


def _group() -> NoReturn:
    error: Exception = ValueError("the innermost")
    for _ in range(2000):
        error = ExceptionGroup("a group", [error])
    raise error


def _raising(error: BaseException) -> Callable[[], NoReturn]:
    def fail() -> NoReturn:
        raise error

    return fail


HOSTILE: dict[str, Callable[[], NoReturn]] = {
    "its own cause": _own_cause,
    "a ring of causes": _ring,
    "groups in groups": _group,
    "its text raises": _raising(Speechless()),
    "its text ends the process": _raising(Leaving()),
    "its text is no text": _raising(Numeric()),
    "its text is endless": _raising(Endless()),
    "its links raise": _raising(Guarded("guarded")),
    "it cannot be copied": _raising(Unique(1, 2, three=3)),
}
"""By what is wrong with them; each raises one."""
