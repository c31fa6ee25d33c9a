"""The parts that all commands share: flags made from config structs, the event loop, and exit codes.

A field ``max_num_seqs: Annotated[int, Meta(ge=1, description="…")] = 256`` becomes ``--max-num-seqs INTEGER``, with the
description as its help and the struct's own check behind it. A tuple's flag may be given more than once, for one item
each, and so may a dict's: ``--logit-bias 50256=-100``. Fields of types that have no form as text have no flag.
"""

from __future__ import annotations

import functools
import signal
import types
from collections.abc import Callable, Collection, Coroutine
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar, Union, get_args, get_origin

import click
import msgspec

from aioengine.config import is_template
from aioengine.errors import AioEngineError, ConfigError, InvalidRequest
from aioengine.processes.own_process import received_signals
from aioengine.validation import check_field, field_types

if TYPE_CHECKING:
    from rich.console import Console

T = TypeVar("T")

EXIT_FAILURE = 1
EXIT_USAGE = 2
EXIT_INTERRUPTED = 128 + signal.SIGINT

Command = Callable[..., Any]

PLAIN_WIDTH = 140
"""Columns of a table where there is no terminal to ask."""


def choose_exit_code(error: AioEngineError) -> int:
    """2 for wrong arguments, 1 for what failed though they were right."""
    return EXIT_USAGE if isinstance(error, InvalidRequest | ConfigError) else EXIT_FAILURE


def run(main: Coroutine[Any, Any, T]) -> T:
    """Run a command to its end, on uvloop: a command owns its process, and may choose the loop.

    Raises:
        KeyboardInterrupt: Ctrl-C; ``main`` was cancelled and has cleaned up.
    """
    import uvloop

    result: T = uvloop.run(main)
    return result


def is_interrupted() -> bool:
    """Whether SIGINT was the first signal that the last command to run received."""
    return received_signals[:1] == [signal.SIGINT]


def open_console(*, to_stderr: bool = False) -> Console:
    """A console for tables, on stdout or stderr."""
    from rich.console import Console

    console = Console(highlight=False, stderr=to_stderr)
    if not console.is_terminal:
        console.width = PLAIN_WIDTH
    return console


def add_model_argument(command: Command) -> Command:
    """A decorator, the one next to the function: the command's argument MODEL is another name of --model."""

    @click.argument("model_argument", metavar="[MODEL]", required=False)
    @functools.wraps(command)
    def call(*args: Any, model_argument: str | None, **flags: Any) -> Any:
        flags["model"] = choose_model(model_argument, flags["model"])
        return command(*args, **flags)

    return call


def choose_model(argument: str | None, option: str | None) -> str | None:
    """The model that an argument and --model name.

    Raises:
        click.UsageError: they name two.
    """
    if None not in (argument, option) and argument != option:
        raise click.UsageError(f"the argument names the model {argument!r}, and --model {option!r}: give one of them")
    return argument or option


def add_flags(
    struct_type: type[msgspec.Struct], *, absent: str = "{}", only: Collection[str] | None = None
) -> Callable[[Command], Command]:
    """A decorator that gives a click command a flag for each field; `read_flags` takes what the user gave.

    A value that the field cannot take is a usage error that names the flag.

    Args:
        absent: how the help text puts a field's default, in place of ``{}``.
        only: the fields that get one; None: all.
    """

    def decorate(command: Command) -> Command:
        fields = {field.name: field for field in msgspec.structs.fields(struct_type)}
        for name, hint in reversed(field_types(struct_type).items()):
            kind, description = _unwrap(hint)
            if _has_text_form(kind) and (only is None or name in only):
                default = fields[name].default
                if default not in (None, (), msgspec.NODEFAULT):
                    description += f" [default: {absent.format(default)}]"
                command = _option(struct_type, name, kind, description)(command)
        return command

    return decorate


def read_flags(struct_type: type[msgspec.Struct], values: dict[str, Any]) -> dict[str, Any]:
    """The flags of ``struct_type`` that the user gave."""
    names = struct_type.__struct_fields__
    fields = {name: value for name, value in values.items() if name in names and value not in (None, ())}
    if not is_template(file := fields.get("chat_template", "{}")):
        try:
            fields["chat_template"] = Path(file).read_text("utf-8")
        except (OSError, ValueError) as error:
            raise click.UsageError(
                f"--chat-template {file}: no Jinja text, and no file that can be read: {error}"
            ) from None
    return fields


def _option(struct_type: type[msgspec.Struct], name: str, kind: Any, description: str) -> Callable[[Command], Command]:
    flag = "--" + name.replace("_", "-")
    if kind is bool:
        return click.option(f"{flag}/--no-{flag[2:]}", name, default=None, help=description)
    is_dict = get_origin(kind) is dict
    items = [_unwrap(argument)[0] for argument in get_args(kind)] if get_origin(kind) in (tuple, dict) else []

    def check(context: click.Context, option: click.Parameter, value: Any) -> Any:
        def refuse(_: str, message: str) -> Exception:
            return click.BadParameter(message, context, option)

        if value in (None, ()):
            return value
        if is_dict:
            value = _dict_of(value, items, context, option)
        return check_field(struct_type, name, value, refuse)

    settings: dict[str, Any] = {"type": kind, "default": None, "help": description, "callback": check}
    if items:
        settings |= {"type": items[0], "multiple": True, "help": f"{description} (may be given more than once)"}
    if is_dict:
        settings |= {"type": str, "metavar": _form(items)}
    if name == "replicas":
        settings |= {"type": _Replicas(), "multiple": False, "help": description}
    if kind is int and name.endswith("_bytes"):
        settings |= {"type": str, "metavar": "SIZE"}
    if get_origin(kind) is Literal:
        settings |= {"type": str, "metavar": f"[{'|'.join(get_args(kind))}]"}
    return click.option(flag, name, **settings)


class _Replicas(click.ParamType[int | tuple[str, ...]]):
    """How many replicas, or the comma-separated addresses of each."""

    name = "number|addresses"

    def convert(self, value: Any, *_: Any) -> int | tuple[str, ...]:
        return int(value) if value.isdecimal() else tuple(map(str.strip, value.split(",")))


def _dict_of(texts: tuple[str, ...], kinds: list[Any], context: click.Context, option: click.Parameter) -> Any:
    """Read ``key=value`` texts as a dict."""
    key_type, value_type = map(click.types.convert_type, kinds)
    found: dict[Any, Any] = {}
    for text in texts:
        name, equals, item = text.partition("=")
        if not equals:
            raise click.BadParameter(f"{text!r} is not of the form {_form(kinds)}.", context, option)
        key = key_type.convert(name, option, context)
        if key in found:
            raise click.BadParameter(f"{key} is given twice.", context, option)
        found[key] = value_type.convert(item, option, context)
    return found


def _form(kinds: list[Any]) -> str:
    return "=".join(click.types.convert_type(kind).name.upper() for kind in kinds)


def _has_text_form(kind: Any) -> bool:
    is_plain = kind is not Any and not (isinstance(kind, type) and issubclass(kind, msgspec.Struct))
    return is_plain and all(_has_text_form(_unwrap(argument)[0]) for argument in get_args(kind))


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
            hint = next((kind for kind in kinds if get_origin(_unwrap(kind)[0]) is tuple), kinds[0])
        else:
            return hint, description
