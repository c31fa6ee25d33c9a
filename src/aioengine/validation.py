"""Checking the fields of a struct when it is made: msgspec validates what it decodes, not what is constructed."""

from __future__ import annotations

import difflib
import functools
import math
import re
from collections.abc import Callable, Iterable
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

import msgspec
import numpy as np


@functools.cache
def field_types(struct_type: type[msgspec.Struct]) -> dict[str, Any]:
    """The resolved annotation of each field, with its ``msgspec.Meta`` bounds."""
    hints = get_type_hints(struct_type, include_extras=True)
    return {name: hints[name] for name in struct_type.__struct_fields__}


def check_fields(struct: msgspec.Struct, error: Callable[[str, str], Exception]) -> None:
    """Check each field against its annotation and bounds, and normalise it (an int for a float becomes a float).

    Args:
        struct: a frozen struct, in its ``__post_init__``.
        error: makes the exception from (field name, message).
    Raises:
        what ``error`` makes, for the first field that is wrong.
    """
    for name, hint in field_types(type(struct)).items():
        value = getattr(struct, name)
        if isinstance(value, np.generic):
            value = value.item()
        if isinstance(value, float) and math.isnan(value):  # NaN passes every comparison that a bound makes
            raise error(name, f"{name}=nan is not a number")
        try:
            converted = msgspec.convert(value, hint, strict=True)
        except msgspec.ValidationError as exc:
            raise error(name, f"{name}={_shorten(value)}: {_in_python(str(exc))}{_choices(hint)}") from None
        if converted is not getattr(struct, name):
            msgspec.structs.force_setattr(struct, name, converted)


def check_known_fields(
    struct_type: type[msgspec.Struct], names: Iterable[str], error: Callable[[str, str], Exception]
) -> None:
    """Refuse keywords that ``struct_type`` does not have, with the nearest name that it does.

    Raises:
        what ``error`` makes from (name, message), for the first unknown name.
    """
    known = struct_type.__struct_fields__
    for name in names:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else f"; known: {', '.join(known)}"
            raise error(name, f"unknown parameter {name!r}{hint}")


def _in_python(message: str) -> str:
    """msgspec speaks of JSON; say it in Python's words: ``Expected `array`, got `null` - at `$[0]` ``."""
    message = message.replace("`null`", "`None`").replace("| null", "| None").replace("`array`", "`list`")
    message = re.sub(r" - at `\$\[(\d+)\]`", r" (item \1)", message)
    return message[0].lower() + message[1:]


def _choices(hint: Any) -> str:
    names = get_args(hint.__origin__ if get_origin(hint) is Annotated else hint)
    is_choice = get_origin(hint.__origin__ if get_origin(hint) is Annotated else hint) is Literal
    return f"; choose one of {', '.join(map(repr, names))}" if is_choice else ""


def _shorten(value: object) -> str:
    if isinstance(value, str | bytes | list | tuple | dict) and len(value) > 60:
        return f"<{type(value).__name__} of {len(value)}>"
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
