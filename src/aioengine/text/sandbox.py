"""Chat templates as programs of strangers: in Jinja's immutable sandbox, with their steps and sizes counted.

The sandbox keeps a template from the program around it, but not from looping for long or asking for all memory. Here
each iteration of a loop, call, filter and operator is a step of a `Rendering`, and an operation whose result would be
too large is refused before it runs. One operation on values of bounded size takes about linear time: a template is
stopped within some 100 ms of its deadline. Filters, globals and tags are those that transformers gives to templates,
but for `LEFT_OUT`.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Callable, Iterable, Iterator
from datetime import datetime
from typing import Any

from jinja2 import Environment, Template, TemplateError, nodes, pass_environment
from jinja2.ext import Extension, loopcontrols
from jinja2.filters import make_attrgetter
from jinja2.parser import Parser
from jinja2.runtime import Context, LoopContext
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Cycler, Namespace
from jinja2.visitor import NodeTransformer

from aioengine.text.template_limits import ITEM_CHARS, TemplateStopped, current

LEFT_OUT = frozenset({
    "encode", "expandtabs", "format_map", "fromkeys", "maketrans", "pprint", "striptags", "to_bytes", "translate",
    "urlencode", "urlize", "wordwrap", "xmlattr",
})  # fmt: skip
"""Filters and methods that no chat needs, and that take long over little or make much of little."""

SEARCHES = frozenset({"lstrip", "rfind", "rindex", "rpartition", "rsplit", "rstrip", "strip", "trim"})
"""Filters and methods that take the time of the text times what they look for."""

MAX_SOUGHT_CHARS = 64

MAX_INDENT = 64

_PERCENT_WIDTH = re.compile(r"%(\([^)]*\))?[^%a-zA-Z]*(\d{4,}|\*)")
_BRACE_WIDTH = re.compile(r"\{([^{}:!]*[.\[]|[^{}]*(\d{4,}|\{))")
"""Fields of a format with a width of four digits or more, with one that is an argument, or of a value's attribute."""


class ChatEnvironment(ImmutableSandboxedEnvironment):
    """The environment of chat templates; see the module."""

    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def __init__(self) -> None:
        extensions = [GenerationTag, loopcontrols]
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=extensions, finalize=_written)
        filters = {**self.filters, "tojson": _to_json, "join": _join}
        self.filters = {name: _checked(name, filters[name]) for name in filters.keys() - LEFT_OUT}
        del self.globals["lipsum"]
        self.globals["raise_exception"] = _raise_exception
        self.globals["strftime_now"] = _strftime_now
        self.globals["dict"] = _dict
        self.globals["namespace"] = lambda *args, **kwargs: _Namespace(_dict(*args, **kwargs))

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree: nodes.Template = _Counting().visit(super()._parse(source, name, filename))
        tree.set_environment(self)
        return tree

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        return attr not in LEFT_OUT and super().is_safe_attribute(obj, attr, value)

    @staticmethod
    def concat(texts: Iterable[str]) -> str:
        """Join what a template, a macro or a block has written."""
        rendering, written, size = current(), [], 0
        for text in texts:
            size += len(text)
            rendering.check_size(size)
            written.append(text)
        rendering.step(size)
        return "".join(written)

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N805 - as in jinja2
        args = tuple(map(_taken, args))
        owner = getattr(getattr(__obj, "__wrapped__", __obj), "__self__", None)  # jinja2 has wrapped "".format
        if isinstance(owner, str):
            named = {name: value for name, value in kwargs.items() if name not in ("_loop_vars", "_block_vars")}
            _check(f".{__obj.__name__}", owner, *args, **named)
        return current().bounded(super().call(__context, __obj, *args, **kwargs))

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        rendering = current()
        if operator == "*":
            for some, times in ((left, right), (right, left)):
                if isinstance(times, int):
                    rendering.check_size(rendering.size_of(some) * times)
        elif operator == "**" and isinstance(left, int) and isinstance(right, int):
            rendering.check_bits(left.bit_length() * right)
        elif operator == "%" and isinstance(left, str):
            _check("format", left, *(right if isinstance(right, tuple) else (right,)))
        return rendering.bounded(super().call_binop(context, operator, left, right))

    # `_Counting` puts calls of these into templates, and `call` checks their results.

    @staticmethod
    def counted(items: Iterable[Any]) -> Iterator[Any]:
        rendering = current()
        for item in items:
            rendering.step()
            yield item

    @staticmethod
    def joined(*parts: Any) -> str:
        return ChatEnvironment.concat(map(str, parts))

    @staticmethod
    def made(value: Any) -> Any:
        return value


class _Counting(NodeTransformer):
    """Makes loops, ``~``, slices, lists and dicts calls of the environment."""

    def visit_For(self, node: nodes.For) -> nodes.Node:  # noqa: N802 - as in jinja2
        self.generic_visit(node)
        node.iter = _call("counted", node.iter)
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        return _call("joined", *node.nodes)

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        return _call("made", node) if isinstance(node.arg, nodes.Slice) else node

    def visit_List(self, node: nodes.List | nodes.Tuple | nodes.Dict) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        items = node.items if not isinstance(node, nodes.Dict) else [pair.value for pair in node.items]
        is_constant = all(isinstance(item, nodes.Const) for item in items)
        return node if is_constant or getattr(node, "ctx", "load") != "load" else _call("made", node)

    visit_Tuple = visit_Dict = visit_List  # noqa: N815


def _call(method: str, *arguments: Any) -> nodes.Call:
    return nodes.Call(nodes.EnvironmentAttribute(method), list(arguments), [], None, None)


class GenerationTag(Extension):
    """``{% generation %}``, with which templates mark what a model has written; a prompt has its body alone."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)


class _Namespace(Namespace):
    """``namespace`` of a template: its text is without its contents, whose size may change."""

    def __repr__(self) -> str:
        return "<Namespace>"


def _dict(*args: Any, **kwargs: Any) -> dict[Any, Any]:
    pairs = args[0].items() if args and isinstance(args[0], dict) else [pair for some in args for pair in some]
    return dict(ChatEnvironment.counted(pairs), **kwargs)  # each key may be compared with all before it


def _raise_exception(message: str) -> None:
    raise TemplateError(message)


def _strftime_now(format: str) -> str:  # noqa: A002 - its name in transformers
    current().check_size(1000 * len(format))  # one field may be long
    return datetime.now().strftime(format)


# Filters


def _to_json(
    x: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    if (isinstance(indent, int) and indent > MAX_INDENT) or (isinstance(indent, str) and len(indent) > MAX_INDENT):
        raise TemplateStopped(f"it indents JSON by more than {MAX_INDENT} characters")
    encoder = json.JSONEncoder(ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
    if indent is None and separators is None:
        return encoder.encode(x)
    return ChatEnvironment.concat(encoder.iterencode(x))  # it may be mostly indents


@pass_environment
def _join(environment: Environment, value: Any, d: Any = "", attribute: Any = None) -> str:
    items = value if attribute is None else _taken(map(make_attrgetter(environment, attribute), value))
    texts = list(map(str, items))
    _check(".join", str(d), texts)
    return str(d).join(texts)


def _checked(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """A filter as a step whose arguments and result are of bounded size."""
    first = 1 if hasattr(function, "jinja_pass_arg") else 0
    is_to_check = name in SEARCHES or name in RESULT_CHARS

    @functools.wraps(function)  # with jinja2's marks of filters that are given a context
    def run(*args: Any, **kwargs: Any) -> Any:
        args = tuple(map(_taken, args))
        if is_to_check:
            _check(name, *args[first:], **kwargs)
        return current().bounded(function(*args, **kwargs))

    return run


def _taken(value: Any) -> Any:
    """An argument; an iterator as a list of bounded size."""
    if not hasattr(value, "__next__") or isinstance(value, LoopContext | Cycler):
        return value
    rendering, taken, size = current(), [], 0
    for item in value:
        size += ITEM_CHARS + rendering.size_of(item)
        rendering.check_size(size)
        rendering.step()
        taken.append(item)
    return taken


def _written(value: Any) -> Any:
    """A value as the text that is written in its place."""
    return value if isinstance(value, str) else current().bounded(str(value))


# Sizes of results, before they are made


def _check(name: str, value: Any, /, *args: Any, **kwargs: Any) -> None:
    """Refuse a filter, or a text's method (with a dot before its name), that would make too much or take too long."""
    if name.lstrip(".") in SEARCHES:
        if any(isinstance(some, str) and len(some) > MAX_SOUGHT_CHARS for some in (*args, *kwargs.values())):
            raise TemplateStopped(f"it calls {name} with a text of more than {MAX_SOUGHT_CHARS} characters")
    elif name in RESULT_CHARS:
        current().check_size(RESULT_CHARS[name](value, *args, **kwargs))


def _of_number(value: Any, *args: Any, **kwargs: Any) -> int:
    return max((some for some in (*args, *kwargs.values()) if isinstance(some, int)), default=0)


def _of_replace(text: Any, old: Any, new: Any, count: Any = None) -> int:
    return len(str(text)) + str(text).count(str(old)) * len(str(new))


def _of_indent(text: str, width: int | str = 4, *_: Any, **__: Any) -> int:
    return len(text) + (text.count("\n") + 1) * (len(width) if isinstance(width, str) else width)


def _of_join(separator: str, items: Iterable[Any]) -> int:
    return sum(len(separator) + current().size_of(item) for item in items)


def _of_sum(items: Any, attribute: Any = None, start: Any = 0) -> int:
    """Lists are copied once for each that is added."""
    return 0 if isinstance(start, int | float) else len(items) * current().size_of(items)


def _of_round(value: Any, precision: int = 0, method: Any = None) -> int:
    """A power of ten is computed, in quadratic time."""
    return precision**2


def _of_percents(text: Any, /, *args: Any, **kwargs: Any) -> int:
    return _of_fields(str(text), "%", _PERCENT_WIDTH, (*args, *kwargs.values()))


def _of_braces(text: str, /, *args: Any, **kwargs: Any) -> int:
    return _of_fields(text, "{", _BRACE_WIDTH, (*args, *kwargs.values()))


def _of_fields(text: str, begin: str, too_wide: re.Pattern[str], values: Iterable[Any]) -> int:
    if too_wide.search(text):
        raise TemplateStopped("it formats with a width that is computed or has more than three digits")
    return len(text) + text.count(begin) * (999 + max(map(current().size_of, values), default=0))


RESULT_CHARS: dict[str, Callable[..., int]] = {
    **dict.fromkeys(("center", ".center", ".ljust", ".rjust", ".zfill", "batch", "slice"), _of_number),
    **dict.fromkeys(("replace", ".replace"), _of_replace),
    "indent": _of_indent,
    ".join": _of_join,
    "sum": _of_sum,
    "round": _of_round,
    "format": _of_percents,
    ".format": _of_braces,
}
"""Upper bounds of the characters that filters make, and methods of texts, of their arguments."""


@functools.lru_cache(maxsize=32)
def compile_template(source: str) -> Template:
    """Compile a template, in milliseconds.

    Raises:
        TemplateError: its syntax is wrong.
    """
    return ChatEnvironment().from_string(source)
