"""Chat templates as programs of strangers: in Jinja's sandbox, with their time and their sizes bounded.

Jinja's immutable sandbox keeps a template from the program around it, but not from looping for long or asking for all
memory. Here each iteration of a loop, each call, filter and operator is a step, which checks the time; and an operation
whose result would be larger than any prompt is refused before it runs. One operation on values of bounded size takes
about linear time, so that a template is stopped within some 100 ms of its deadline and holds the GIL for no longer.
Filters, globals and tags are those that transformers gives to templates, but for filters that take long over little.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Callable, Iterable, Iterator
from datetime import datetime
from typing import Any

from jinja2 import Template, TemplateError, nodes, pass_eval_context
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace
from jinja2.visitor import NodeTransformer

from aioengine.text.lanes import TemplateStopped, count, max_chars, step

ITEM_CHARS = 64
"""Size of an item of a list or dict, beside its texts."""

MAX_BITS = 2**14
"""Bits of an integer."""

MAX_ARGUMENT = 2**20
"""Largest integer argument of a filter or method: a width, a count."""

MAX_PLACES = 400
"""Decimals of `round`; no float has so many."""

MAX_COMPARED = 2 * 10**8
"""Characters of the text times those sought, of searches from the right and of strips: 0.2 ns each."""

MAX_WORDS_CHARS = 2**18
"""Characters that a filter of words is given: 50 ms."""

_LEFT_OUT = ("lipsum", "pprint", "striptags", "urlencode", "urlize", "wordwrap", "xmlattr")
"""Filters of Jinja's for web pages, which take long over short texts."""

_WIDTH = re.compile(r"%(\([^)]*\))?[^%a-zA-Z]*(\d{5,}|\*)|\{[^{}]*(\d{5,}|\{)")
"""In a format: a width of five digits or more, or one that is an argument."""

_WIDE = re.compile(r"%(\([^)]*\))?[^%a-zA-Z]*\d{3,4}|\{[^{}]*\d{3,4}")


class ChatEnvironment(ImmutableSandboxedEnvironment):
    """The environment of chat templates; see the module."""

    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def __init__(self) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=[GenerationTag, loopcontrols])
        self.filters["tojson"] = _to_json
        kept = {name: function for name, function in self.filters.items() if name not in _LEFT_OUT}
        self.filters = {name: _stepping(name, function) for name, function in kept.items()}
        del self.globals["lipsum"]
        self.globals["raise_exception"] = _raise_exception
        self.globals["strftime_now"] = lambda format: datetime.now().strftime(format)  # noqa: A006 - its name there
        self.globals["dict"] = _Dict()
        self.globals["namespace"] = _Namespace

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree: nodes.Template = _Counting().visit(super()._parse(source, name, filename))
        tree.set_environment(self)
        return tree

    @staticmethod
    def concat(texts: Iterable[str]) -> str:
        """Join what a template, a macro or a block has written."""
        written, size = [], 0
        for text in texts:
            size += len(text)
            _check_size(size)
            written.append(text)
        count(size)
        return "".join(written)

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N805 - as in jinja2
        step()
        args = tuple(map(_taken, args))
        owner = getattr(getattr(__obj, "__wrapped__", __obj), "__self__", None)  # jinja2 has wrapped "".format
        if isinstance(owner, str | bytes | int | float):
            _check_method(owner if isinstance(owner, str | bytes) else "", __obj.__name__, args, kwargs)
        return _bounded(super().call(__context, __obj, *args, **kwargs))

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        step()
        if operator == "*":
            for some, times in ((left, right), (right, left)):
                if isinstance(times, int) and isinstance(some, str | list | tuple):
                    _check_size(_size(some) * times)
        if operator == "**" and isinstance(left, int) and isinstance(right, int):
            _check_bits(left.bit_length() * right)
        if operator == "%" and isinstance(left, str):
            _check_format(left, right)
        return _bounded(super().call_binop(context, operator, left, right))

    # What `_Counting` puts in: loops, ``~``, and what puts a list, tuple or dict together. Being called is a step, and
    # checks the result's size.

    @staticmethod
    def counted(items: Iterable[Any]) -> Iterator[Any]:
        for item in items:
            step()
            yield item

    @staticmethod
    def joined(*parts: Any) -> str:
        return ChatEnvironment.concat(map(str, parts))

    @staticmethod
    def made(value: Any) -> Any:
        return value


class _Counting(NodeTransformer):
    """Makes loops, ``~``, lists and dicts calls of the environment."""

    def visit_For(self, node: nodes.For) -> nodes.Node:  # noqa: N802 - as in jinja2
        self.generic_visit(node)
        node.iter = _call("counted", node.iter)
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        return _call("joined", *node.nodes)

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
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_written"), [], [], body).set_lineno(line)

    @pass_eval_context
    def _written(self, context: nodes.EvalContext, caller: Callable[[], str]) -> str:
        return caller()


class _Dict:
    """``dict`` of a template: it has no attributes of the class."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        pairs = args[0].items() if args and isinstance(args[0], dict) else [pair for some in args for pair in some]
        return dict(ChatEnvironment.counted(pairs), **kwargs)

    def fromkeys(self, keys: Iterable[Any], value: Any = None) -> dict[Any, Any]:
        return dict.fromkeys(ChatEnvironment.counted(keys), value)  # each may be compared with all before it


class _Namespace(Namespace):
    """``namespace`` of a template: refuses names that begin with an underscore, and has a text without its contents."""

    def __init__(*args: Any, **kwargs: Any) -> None:  # so that a template's may be called self
        self, args = args[0], args[1:]
        attributes = dict(*args, **kwargs)
        for name in attributes:
            _Namespace._check_name(name)
        Namespace.__init__(self, attributes)

    def __setitem__(self, name: str, value: Any) -> None:
        _Namespace._check_name(name)
        Namespace.__setitem__(self, name, value)

    def __repr__(self) -> str:
        return "<Namespace>"

    @staticmethod
    def _check_name(name: object) -> None:
        if isinstance(name, str) and name.startswith("_"):
            raise SecurityError(f"a namespace of a chat template has no names that begin with _, such as {name!r}")


def _raise_exception(message: str) -> None:
    raise TemplateError(message)


def _to_json(
    x: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    if (isinstance(indent, int) and indent > 64) or (isinstance(indent, str) and len(indent) > 64):
        raise TemplateStopped("it indents JSON by more than 64 characters")
    encoder = json.JSONEncoder(ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
    if indent is None:
        return encoder.encode(x)
    return ChatEnvironment.concat(ChatEnvironment.counted(encoder.iterencode(x)))  # deep ones are mostly indents


def _stepping(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """Make a filter a step, with arguments and a result of bounded size."""

    @functools.wraps(function)  # with jinja2's marks of filters that are given a context
    def run(*args: Any, **kwargs: Any) -> Any:
        step()
        first = 1 if hasattr(function, "jinja_pass_arg") else 0
        args = tuple(map(_taken, args))
        value, further = args[first], args[first + 1 :]
        if name == "join" and hasattr(value, "__len__"):
            _check_size(len(value) * max(map(_size, [*further[:1], *kwargs.values()]), default=0))
        _check_method(value if isinstance(value, str) else "", name, further, kwargs)
        if name == "unique":  # each may be compared with all before it
            args = (*args[:first], ChatEnvironment.counted(value), *further)
        return _bounded(function(*args, **kwargs))

    return run


def _check_method(text: str | bytes, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Refuse a call of a text's method, or of a filter, that would make too much or take too long."""
    for argument in (*args, *kwargs.values()):
        if isinstance(argument, int) and abs(argument) > MAX_ARGUMENT:
            raise TemplateStopped(f"it calls {name} with a number above {MAX_ARGUMENT}")
    if name in ("rfind", "rindex", "rsplit", "rpartition", "strip", "lstrip", "rstrip", "trim"):
        # From the left Python searches in linear time.
        sought = max(map(_size, (*args, *kwargs.values())), default=0)
        if sought > 64 and sought * (len(text) if "strip" in name else len(text) - sought) > MAX_COMPARED:
            raise TemplateStopped(f"it calls {name} on a long text with a long one")
    if name in ("title", "wordcount") and args == () and len(text) > MAX_WORDS_CHARS:
        raise TemplateStopped(f"it calls {name} on more than {MAX_WORDS_CHARS} characters")
    if name == "sum" and any(isinstance(some, str | list | tuple) for some in (*args[1:], kwargs.get("start"))):
        raise TemplateStopped("it calls sum on what are no numbers")
    if name == "round" and any(isinstance(some, int) and abs(some) > MAX_PLACES for some in (*args, *kwargs.values())):
        raise TemplateStopped(f"it calls round with more than {MAX_PLACES} places")
    if isinstance(text, bytes):
        return
    if name in ("format", "format_map"):
        _check_format(text, (*args, *kwargs.values()))
    elif name == "replace" and len(args) > 1 and isinstance(args[0], str) and isinstance(args[1], str):
        _check_size((text.count(args[0]) * len(args[1])) + len(text))
    elif name == "join" and args and not isinstance(args[0], str) and isinstance(args[0], list | tuple | dict):
        _check_size(sum(map(_size, args[0])) + len(args[0]) * len(text))
    elif name in ("indent", "expandtabs"):
        width = max([4, *(_size(a) if isinstance(a, str) else a for a in (*args, *kwargs.values()) if a)])
        _check_size((text.count("\n") + text.count("\t") + 1) * width)
    elif name == "translate":
        raise TemplateStopped("it calls translate, which is not supported")


def _check_format(text: str, values: Any) -> None:
    if _WIDTH.search(text):
        raise TemplateStopped("it formats with a width of more than four digits, or with one that is computed")
    _check_size(len(_WIDE.findall(text)) * 9999)
    num_fields = max(text.count("%"), text.count("{"))
    if num_fields > 1:
        largest = max(map(_whole_size, values if isinstance(values, tuple) else (values,)), default=0)
        _check_size(num_fields * largest)


def _taken(value: Any) -> Any:
    """An argument; an iterator as a list of bounded size."""
    if not isinstance(value, Iterator):
        return value
    taken, size = [], 0
    for item in ChatEnvironment.counted(value):
        size += ITEM_CHARS + _size(item)
        _check_size(size)
        taken.append(item)
    return taken


def _bounded(value: Any) -> Any:
    """Count a value that has been made, refuse one that is too large, and return it."""
    if isinstance(value, int):
        _check_bits(value.bit_length())
    _check_size(_size(value))
    count(_size(value))
    _whole_size(value)
    return value


def _whole_size(value: Any) -> int:
    """Characters of all texts in a value; a text that occurs twice counts twice, as in the value's own text."""
    size = len(value) if isinstance(value, str | bytes) else 0
    waiting: list[Any] = [value] if isinstance(value, list | tuple | dict) else []
    while waiting:
        some = waiting.pop()
        if isinstance(some, str):
            size += len(some)
        elif isinstance(some, dict):
            waiting += some.keys()
            waiting += some.values()
        elif isinstance(some, list | tuple):
            waiting += some
        size += ITEM_CHARS
        _check_size(size + ITEM_CHARS * len(waiting))
    return size


def _size(value: Any) -> int:
    """Lower bound of a value's size in characters: without what is in its items."""
    if isinstance(value, str | bytes):
        return len(value)
    return len(value) * ITEM_CHARS if isinstance(value, list | tuple | dict) else 0


def _check_size(size: int) -> None:
    limit = max_chars()
    if size > limit:
        num_items = limit // ITEM_CHARS
        raise TemplateStopped(f"it makes a text of more than {limit} characters, or a list of {num_items} items")


def _check_bits(num_bits: int) -> None:
    if num_bits > MAX_BITS:
        raise TemplateStopped(f"it computes an integer of more than {MAX_BITS} bits")


@functools.lru_cache(maxsize=32)
def compile_template(source: str) -> Template:
    """Compile a template, in milliseconds.

    Raises:
        TemplateError: its syntax is wrong.
    """
    return ChatEnvironment().from_string(source)
