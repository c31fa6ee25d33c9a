"""A sandbox for chat templates, which are untrusted programs: Jinja's immutable one, with steps and sizes counted.

Jinja's sandbox keeps a template from the program around it, but not from looping for long or taking all memory. Here
each iteration of a loop, call, filter, test and operator is a step of a `Rendering`, and an operation whose result
would be too large is refused before it runs. One operation on values of bounded size takes about linear time, so a
template is stopped within some 100 ms of its deadline, apart from the time of compiling it. Filters, globals and tags
are those that transformers gives to templates, except `LEFT_OUT`.
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
from jinja2.filters import do_round, make_attrgetter
from jinja2.parser import Parser
from jinja2.runtime import Context, LoopContext
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Cycler, Namespace
from jinja2.visitor import NodeTransformer

from aioengine.config import MAX_TEMPLATE_CHARS
from aioengine.text.template_limits import ITEM_CHARS, TemplateStopped, current

LEFT_OUT = frozenset({
    "encode", "expandtabs", "format_map", "fromkeys", "maketrans", "pprint", "striptags", "to_bytes", "translate",
    "urlencode", "urlize", "wordwrap", "xmlattr",
})  # fmt: skip
"""Filters and methods that no chat needs, and that may take long or make large results for small arguments."""

MULTIPLIES = frozenset({
    "lstrip", "rfind", "rindex", "rpartition", "rsplit", "rstrip", "strip", "tojson", "trim",
})  # fmt: skip
"""Filters and methods whose time may grow as the text's size times the largest argument's."""

PADS = frozenset({"batch", "center", "ljust", "rjust", "slice", "zfill"})
"""Filters and methods with an argument for the number of items or characters of the result."""

BY_ATTRIBUTE = frozenset({
    "groupby", "join", "map", "max", "min", "rejectattr", "selectattr", "sort", "sum", "unique",
})  # fmt: skip
"""Filters that look up a path such as "a.b.c" in each item."""

TOO_WIDE = {
    "%": re.compile(r"%(\((?![^()%]{0,99}\))|(\([^()%]*\))?[^%a-zA-Z]*(\d{4,}|\*))"),
    "{": re.compile(r"\{([^{}:!]*[.\[]|[^{}]*(\d{4,}|\{))"),
}
"""Patterns by the character that begins a field of a format: fields of four digits or more, of an argument's width, of
a value's attribute, of a key that is long or has parentheses. Each stops at the next field: its time is linear."""


class ChatEnvironment(ImmutableSandboxedEnvironment):
    """The environment of chat templates; see the module."""

    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def __init__(self) -> None:
        extensions = [GenerationTag, loopcontrols]
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=extensions, finalize=_written)
        filters = {**self.filters, "tojson": _to_json, "join": _join, "round": _round}
        self.filters = {name: _checked(name, filters[name]) for name in filters.keys() - LEFT_OUT}
        del self.globals["lipsum"]
        self.globals["raise_exception"] = _raise_exception
        self.globals["strftime_now"] = _strftime_now
        self.tests = {name: _counted(test) for name, test in self.tests.items()}
        self.globals["dict"] = _dict
        self.globals["namespace"] = lambda *args, **kwargs: _Namespace(_dict(*args, **kwargs))

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree = super()._parse(source, name, filename)
        _Counting().visit(tree)
        tree.set_environment(self)
        return tree

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        return attr not in LEFT_OUT and super().is_safe_attribute(obj, attr, value)

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N805 - as in jinja2
        args = tuple(map(_taken, args))
        owner = getattr(getattr(__obj, "__wrapped__", __obj), "__self__", None)  # jinja2 has wrapped "".format
        if isinstance(owner, str):
            named = {name: kwargs[name] for name in kwargs.keys() - {"_loop_vars", "_block_vars"}}  # jinja2's own
            _check("{" if __obj.__name__ == "format" else __obj.__name__, owner, args, named)
        return current().bounded(super().call(__context, __obj, *args, **kwargs))

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        rendering = current()
        if operator == "*":
            for some, times in ((left, right), (right, left)):
                if isinstance(times, int):
                    rendering.check_size(rendering.size_of(some) * times)
        elif operator == "**" and isinstance(left, int) and isinstance(right, int):
            rendering.check_size(left.bit_length() * right)
        elif operator == "%" and isinstance(left, str):
            _check("%", left, right if isinstance(right, tuple) else (right,), {})
        return rendering.bounded(super().call_binop(context, operator, left, right))

    # `_Counting` puts calls of these into templates, and `call` checks their results.

    @staticmethod
    def counted(items: Iterable[Any]) -> Iterator[Any]:
        """Iterate with a step for each item, and bound the size of all items together."""
        rendering, size = current(), 0
        for item in items:
            rendering.step()
            size += rendering.size_of(item)
            rendering.check_size(size)
            yield item

    @staticmethod
    def concat(parts: Iterable[Any]) -> str:
        text: str = current().bounded("".join(ChatEnvironment.counted(map(str, parts))))
        return text

    @staticmethod
    def made(value: Any) -> Any:
        return value


class _Counting(NodeTransformer):
    """Turns loops, ``~``, slices, look-ups, lists, dicts and comparisons into calls of the environment."""

    def visit(self, node: nodes.Node, *args: Any, **kwargs: Any) -> nodes.Node:
        node = super().visit(node, *args, **kwargs)
        match node:
            case nodes.For():
                node.iter = _call("counted", node.iter)
            case nodes.Compare() if not all(isinstance(operand.expr, nodes.Const) for operand in node.ops):
                return _call("made", node)  # two lists may take milliseconds
            case nodes.Concat():
                return _call("concat", nodes.List(node.nodes))
            case nodes.List() | nodes.Tuple(ctx="load") if all(isinstance(item, nodes.Const) for item in node.items):
                return node
            case nodes.Getitem(arg=nodes.Const()):
                return node
            case nodes.List() | nodes.Tuple(ctx="load") | nodes.Dict() | nodes.Getitem():
                return _call("made", node)
        return node


def _call(method: str, *arguments: Any) -> nodes.Call:
    return nodes.Call(nodes.EnvironmentAttribute(method), list(arguments), [], None, None)


class GenerationTag(Extension):
    """``{% generation %}``, with which templates mark a model's own text; a prompt has its body alone."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)


class _Namespace(Namespace):
    """``namespace`` of a template. Its text leaves out its contents, whose size may change."""

    def __repr__(self) -> str:
        return "<Namespace>"


def _dict(*args: Any, **kwargs: Any) -> dict[Any, Any]:
    # Each key may be compared with all before it.
    given = (ChatEnvironment.counted(some.items() if isinstance(some, dict) else some) for some in args)
    return dict(*given, **kwargs)


def _raise_exception(message: str) -> None:
    raise TemplateError(message)


def _strftime_now(format: str) -> str:  # noqa: A002 - its name in transformers
    current().check_size(256 * len(format))  # the C library makes up to 256 characters of each
    return datetime.now().strftime(format)


def _to_json(
    x: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    encoder = json.JSONEncoder(ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
    if indent is None and separators is None:
        return encoder.encode(x)
    return ChatEnvironment.concat(encoder.iterencode(x))  # it may be mostly indents


@pass_environment
def _join(environment: Environment, value: Any, d: Any = "", attribute: Any = None) -> str:
    items = value if attribute is None else _taken(map(make_attrgetter(environment, attribute), value))
    texts = list(map(str, items))
    _check("join", str(d), (texts,), {})
    return str(d).join(texts)


def _round(value: float, precision: int = 0, method: Any = "common") -> float:
    return do_round(value, max(-400, min(precision, 400)), method)  # no float has more digits


def _counted(test: Any) -> Callable[..., Any]:
    """A test that counts as a step, since ``select`` may apply one to many items and yield none."""

    @functools.wraps(test)
    def run(*args: Any, **kwargs: Any) -> Any:
        current().step()
        return test(*args, **kwargs)

    return run


def _checked(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """A filter that counts as a step and has arguments and a result of bounded size."""
    first = 1 if hasattr(function, "jinja_pass_arg") else 0

    @functools.wraps(function)  # with jinja2's marks of filters that are given a context
    def run(*args: Any, **kwargs: Any) -> Any:
        args = tuple(map(_taken, args))
        _check("%" if name == "format" else name, args[first], args[first + 1 :], kwargs)
        return current().bounded(function(*args, **kwargs))

    return run


def _taken(value: Any) -> Any:
    """The argument; a list of bounded size in place of an iterator."""
    if not hasattr(value, "__next__") or isinstance(value, LoopContext | Cycler):
        return value
    return list(ChatEnvironment.counted(value))


def _written(value: Any) -> Any:
    """The text that is written for a value."""
    return value if isinstance(value, str) else current().bounded(str(value))


def _check(name: str, value: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Refuse a filter or text method that would make too much or take too long; formats are named by `TOO_WIDE`."""
    rendering, given = current(), (*args, *kwargs.values())
    size, num_chars = rendering.size_of, 0
    largest = max((some if isinstance(some, int) else size(some) for some in given), default=0)
    if name in BY_ATTRIBUTE:
        rendering.check_size(size(value) * max((some.count(".") for some in given if isinstance(some, str)), default=0))
    if name in MULTIPLIES:
        num_chars = (1 + size(value)) * largest // 64
    elif name in ("list", "slice", "sort") and isinstance(value, str):
        num_chars = ITEM_CHARS * len(value)
    elif name == "groupby":
        num_chars = size(value) * largest // ITEM_CHARS  # each item may get a copy of the default
    elif name == "indent":
        num_chars = size(value) * largest // 4  # an indent of four is the usual one
    elif name in PADS:
        num_chars = largest * (ITEM_CHARS if name in ("batch", "slice") else 1)
    elif name == "replace" and len(given) > 1:
        old, new = (str(kwargs.get(key, given[place])) for place, key in enumerate(("old", "new")))
        num_chars = str(value).count(old) * len(new)
    elif name == "join" and args:
        num_chars = sum(len(value) + size(item) for item in args[0])
    elif name in TOO_WIDE:
        if TOO_WIDE[name].search(str(value)):
            raise TemplateStopped("it formats with a width that is computed or has more than three digits")
        num_chars = str(value).count(name) * (999 + max(map(size, given), default=0))
    elif name in ("title", "wordcount"):
        num_chars = 16 * size(value)  # a regular expression takes 0.1 µs a character, without giving up the GIL
    elif name == "sum" and isinstance(kwargs.get("start", args[-1] if args else 0), list | tuple):
        num_chars = len(value) * size(value)  # each addition copies the list so far
    rendering.check_size(num_chars)


@functools.lru_cache(maxsize=32)
def compile_template(source: str) -> Template:
    """Compile a template, in milliseconds.

    Raises:
        TemplateError: its syntax is wrong, or it is too long.
    """
    if len(source) > MAX_TEMPLATE_CHARS:
        raise TemplateError(f"the template has more than {MAX_TEMPLATE_CHARS:,} characters")
    return ChatEnvironment().from_string(source)
