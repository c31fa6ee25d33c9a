"""Errors on the wire: what each type is on the other side."""

from __future__ import annotations

import errno
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from aioengine import errors
from aioengine.transport import wire
from aioengine.transport.wire import MAX_DUMP_CHARS, MAX_MESSAGE_CHARS, Fault, to_error, to_fault

OWN_ERRORS = [
    errors.InvalidRequest("bad", param="stop"),
    errors.InvalidRequest("bad"),
    errors.PromptTooLong(9000, 8192, is_lower_bound=True),
    errors.InvalidRequest("bad stop", param="stop").with_hint("give stop='a'"),
    errors.ConfigError("bad config"),
    errors.ModelLoadError("no model"),
    errors.EngineOverloaded("full", retry_after_s=2.5),
    errors.StepFailed("a step failed", dump="the plan"),
    errors.NoTokenLeft("no token is left", dump="the plan"),
    errors.EngineClosed("closed"),
    errors.EngineDead("dead", dump="last words"),
    errors.WireError("foreign"),
    errors.InternalError("our bug"),
]
PLAIN_ERRORS = [
    ArithmeticError("a"), AttributeError("b"), AssertionError("c"), EOFError("d"), IndexError("e"), LookupError("f"),
    MemoryError("g"), NotImplementedError("h"), OverflowError("i"), RuntimeError("j"), TypeError("k"), ValueError("l"),
    ZeroDivisionError("m"),
]  # fmt: skip


def there_and_back(error: BaseException) -> Exception:
    raw = msgspec.msgpack.encode(to_fault(error))
    return to_error(msgspec.msgpack.decode(raw, type=Fault))


@pytest.mark.parametrize("error", [*OWN_ERRORS, *PLAIN_ERRORS], ids=lambda error: type(error).__name__)
def test_an_error_is_what_it_was(error: Exception) -> None:
    back = there_and_back(error)
    assert type(back) is type(error)
    assert str(back) == str(error)
    assert vars(back) == vars(error)


def test_each_of_our_own_types_is_tried() -> None:
    own = {kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, Exception)}
    raised_by_callers = {errors.OutputNotParsed}
    assert own - {type(error) for error in OWN_ERRORS} <= {errors.AioEngineError, *raised_by_callers}


@pytest.mark.parametrize("name", sorted(wire._OS_ERRORS))
def test_an_os_error_of_pythons_keeps_number_and_file(name: str) -> None:
    kind = wire._OS_ERRORS[name]
    back = there_and_back(kind(errno.EIO, "it broke", "/some/file"))
    assert type(back) is kind
    assert isinstance(back, OSError)
    assert (back.errno, back.strerror, back.filename) == (errno.EIO, "it broke", "/some/file")


@pytest.mark.parametrize(
    ("arguments", "kind"),
    [
        ((errno.ENOENT, "so it says", "/x"), FileNotFoundError),
        ((errno.ENOSPC, "so it says", "/x"), OSError),
        *((arguments, OSError) for arguments in [("a", "b"), (1, 2), (2**70, "x"), (2, "x", 3), (2, "x", b"/f"), ()]),
    ],
)
def test_an_os_error_made_of_anything(arguments: tuple[Any, ...], kind: type[OSError]) -> None:
    back = there_and_back(OSError(*arguments))
    assert isinstance(back, kind)
    if arguments[1:2] == ("so it says",):
        assert back.errno == arguments[0]
    assert "just words" in str(there_and_back(OSError("just words")))


class MyError(Exception):
    pass


class Mute(Exception):
    def __str__(self) -> str:
        raise ValueError("not even this")


def test_an_error_of_the_user_s_own_says_what_it_was() -> None:
    class FileNotFoundError(ValueError):  # noqa: A001 - a known name is no known type
        pass

    odd = MyError("in my function")
    vars(odd).update(param=["no", "text"], dump=None, retry_after_s="soon")  # names that our errors have, too
    for error in (MyError("in my function"), odd):
        back = there_and_back(error)
        assert type(back) is RuntimeError
        assert str(back) == "MyError: in my function"
    assert str(there_and_back(Mute())).startswith("Mute: ")
    assert "mine" in str(there_and_back(FileNotFoundError("mine")))
    assert isinstance(there_and_back(KeyError("missing")), KeyError)


def test_text_that_has_no_utf_8_form() -> None:
    name = "file-\udcff"
    assert str(there_and_back(ValueError(name))) == "file-?"
    assert str(there_and_back(errors.StepFailed(name, dump=name))) == "file-?"
    back = there_and_back(OSError(errno.ENOENT, name, name))
    assert isinstance(back, FileNotFoundError)
    assert back.filename == "file-?"


@pytest.mark.parametrize(
    "kind", ["", "NoSuchThing", "SystemExit", "KeyboardInterrupt", "AioEngineErrors", "Any", "__builtins__", "eval"]
)
def test_an_unknown_kind_is_our_bug(kind: str) -> None:
    back = to_error(Fault(kind, "words"))
    assert type(back) is errors.InternalError
    assert str(back) == f"{kind}: words"


def test_texts_are_cut() -> None:
    fault = to_fault(errors.StepFailed("m" * 2 * MAX_MESSAGE_CHARS, dump="d" * 2 * MAX_DUMP_CHARS))
    assert len(fault.message) <= MAX_MESSAGE_CHARS
    assert len(fault.dump) <= MAX_DUMP_CHARS
    assert len(to_fault(OSError(errno.EIO, "x" * 2 * MAX_MESSAGE_CHARS)).message) <= MAX_MESSAGE_CHARS


KINDS = sorted({*(type(error).__name__ for error in OWN_ERRORS), "OSError", "ValueError"})


@given(st.builds(Fault) | st.builds(Fault, st.sampled_from(KINDS)))
def test_any_fault_makes_an_error(fault: Fault) -> None:
    assert isinstance(to_error(fault), Exception)
