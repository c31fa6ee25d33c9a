"""Command-line flags made from config structs: one definition, several faces.

A field ``max_num_seqs: Annotated[int, Meta(ge=1, description="…")] = 256`` becomes ``--max-num-seqs INTEGER``, with the
description as its help and the struct's own check behind it.
"""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import click
import msgspec

from aioengine.validation import field_types

Command = Callable[..., Any]


def options_of(struct_type: type[msgspec.Struct], *, absent: str = "{}") -> Callable[[Command], Command]:
    """A decorator that gives a click command a flag for each field; absent flags are None, and left out by `given`.

    Args:
        absent: how the help text puts a field's default, in place of ``{}``.
    """

    def decorate(command: Command) -> Command:
        fields = {field.name: field for field in msgspec.structs.fields(struct_type)}
        for name, hint in reversed(field_types(struct_type).items()):
            command = _option(name, hint, fields[name].default, absent)(command)
        return command

    return decorate


def given(struct_type: type[msgspec.Struct], values: dict[str, Any]) -> dict[str, Any]:
    """The flags of ``struct_type`` that the user gave."""
    names = struct_type.__struct_fields__
    return {name: value for name, value in values.items() if name in names and value not in (None, ())}


def _option(name: str, hint: Any, default: Any, absent: str) -> Callable[[Command], Command]:
    kind, description = _unwrap(hint)
    flag = "--" + name.replace("_", "-")
    is_told = default not in (None, (), msgspec.NODEFAULT)
    shown = f"{description} [default: {absent.format(default)}]" if is_told else description
    if kind is bool:
        return click.option(f"{flag}/--no-{flag[2:]}", name, default=None, help=shown)
    if get_origin(kind) is tuple:
        item, _ = _unwrap(get_args(kind)[0])
        return click.option(flag, name, type=item, multiple=True, help=f"{shown} (may be given more than once)")
    if get_origin(kind) is Literal:
        return click.option(flag, name, type=click.Choice(get_args(kind)), default=None, help=shown)
    return click.option(flag, name, type=kind, default=None, help=shown)


def _unwrap(hint: Any) -> tuple[Any, str]:
    """The type to parse and the description in an annotation: metadata and None are taken off, a tuple goes first."""
    description = ""
    while True:
        if get_origin(hint) is Annotated:
            metas = [meta for meta in hint.__metadata__ if isinstance(meta, msgspec.Meta)]
            description = next((meta.description for meta in metas if meta.description), description)
            hint = hint.__origin__
        elif get_origin(hint) in (Union, types.UnionType):
            kinds = [kind for kind in get_args(hint) if kind is not type(None)]
            hint = next((kind for kind in kinds if get_origin(kind) is tuple), kinds[0])
        else:
            return hint, description
