"""Answers in each format, with what they are, written out by hand."""

from __future__ import annotations

import functools
import itertools
import json
from collections.abc import Callable, Iterable
from typing import NamedTuple

from aioengine.tool_calls.calls import AnswerParser, Tool, read_tools
from aioengine.tool_calls.formats import find_tool_format

WEATHER = Tool(
    "weather",
    {
        "type": "object",
        "properties": {
            "city": {"type": "string"},
            "days": {"type": "integer", "minimum": 1, "maximum": 9},
            "metric": {"type": "boolean"},
            "place": {
                "type": "object",
                "properties": {"at": {"type": "array", "items": {"type": "number"}, "maxItems": 2}},
                "additionalProperties": False,
            },
            "unit": {"enum": ["C", "F"]},
        },
        "required": ["city"],
        "additionalProperties": False,
    },
    "The weather of a city.",
    strict=True,
)
CLOCK = Tool("clock", {"type": "object", "properties": {}, "additionalProperties": False}, "The time.", strict=True)
NOTE = Tool(
    "clock_note",
    {"type": "object", "properties": {"text": {"type": "string"}, "more": {}}, "required": ["text"]},
)
TOOLS = read_tools([WEATHER, CLOCK, NOTE])


class Seen(NamedTuple):
    """All that came out of an answer, joined.

    Attributes:
        calls: (name, arguments) of the complete calls.
        deltas: (name, arguments) of all that were begun, joined from their deltas.
    """

    content: str
    reasoning: str
    calls: tuple[tuple[str, str], ...]
    is_cut: bool
    deltas: tuple[tuple[str, str], ...]


class Answer(NamedTuple):
    format: str
    title: str
    text: str
    content: str = ""
    calls: tuple[tuple[str, str], ...] = ()
    reasoning: str = ""
    is_cut: bool = False
    cut_call: tuple[str, str] | None = None


def counted_ids() -> Callable[[], str]:
    numbers = itertools.count(100_000_000)
    return lambda: str(next(numbers))


def make_parser(name: str) -> AnswerParser:
    return find_tool_format(name).make_parser(TOOLS, counted_ids())


def read(parser: AnswerParser, pieces: Iterable[str]) -> Seen:
    """Feed the pieces, finish, and hold the deltas to what they promise."""
    content, reasoning = [], []
    begun: dict[int, tuple[str, list[str]]] = {}
    ids: dict[int, str] = {}
    num_complete = 0

    def take(piece: object) -> None:
        nonlocal num_complete
        content.append(piece.content)  # type: ignore[attr-defined]
        reasoning.append(piece.reasoning)  # type: ignore[attr-defined]
        for delta in piece.calls:  # type: ignore[attr-defined]
            if delta.index not in begun:
                assert delta.index == len(begun)
                assert delta.name is not None
                assert delta.id is not None
                ids[delta.index] = delta.id
                begun[delta.index] = (delta.name, [])
            else:
                assert delta.name is None
                assert delta.id is None
            begun[delta.index][1].append(delta.arguments)
        for call in parser.calls[num_complete:]:
            assert (call.id, call.name) in {(ids[index], begun[index][0]) for index in begun}
            assert isinstance(json.loads(call.arguments), dict)
        num_complete = len(parser.calls)

    for text in pieces:
        take(parser.feed(text))
    take(parser.finish())
    deltas = tuple((name, "".join(parts)) for name, parts in begun.values())
    by_id = {ids[index]: delta for index, delta in enumerate(deltas)}
    assert len(by_id) == len(deltas), "an id for each"
    assert all((call.name, call.arguments) == by_id[call.id] for call in parser.calls)
    assert parser.is_cut or len(deltas) == len(parser.calls)
    calls = tuple((call.name, call.arguments) for call in parser.calls)
    return Seen("".join(content), "".join(reasoning), calls, parser.is_cut, deltas)


PARIS = ("weather", '{"city": "Paris"}')
NOW = ("clock", "{}")
NESTED = '{"city": "Paris", "place": {"at": [1.5, -2e3]}, "metric": true}'
ESCAPED = '{"city": "S\\u00e3o \\"Paulo\\" \\\\ {[ 東京 🗼\\n"}'


def _hermes(call: str) -> str:
    return f"<tool_call>\n{call}\n</tool_call>"


def _object(name: str, arguments: str, key: str = "arguments") -> str:
    return f'{{"name": "{name}", "{key}": {arguments}}}'


_WEATHER, _CLOCK = _object("weather", '{"city": "Paris"}'), _object("clock", "{}")

HERMES = [
    Answer("hermes", "no call", "It rains.\n\nBring <b>one</b> umbrella. ", "It rains.\n\nBring <b>one</b> umbrella. "),
    Answer("hermes", "nothing", ""),
    Answer("hermes", "text, then a call", f"Let me see.\n{_hermes(_WEATHER)}", "Let me see.", (PARIS,)),
    Answer("hermes", "one call", _hermes(_WEATHER), "", (PARIS,)),
    Answer("hermes", "two calls", f"{_hermes(_WEATHER)}\n{_hermes(_CLOCK)}", "", (PARIS, NOW)),
    Answer("hermes", "text between calls", f"{_hermes(_WEATHER)}\nand\n{_hermes(_CLOCK)}\n", "\nand", (PARIS, NOW)),
    Answer("hermes", "text after a call", f"{_hermes(_CLOCK)}\n\nDone.\n", "\n\nDone.\n", (NOW,)),
    Answer("hermes", "nested arguments", _hermes(_object("weather", NESTED)), "", (("weather", NESTED),)),
    Answer("hermes", "unicode and escapes", _hermes(_object("weather", ESCAPED)), "", (("weather", ESCAPED),)),
    Answer("hermes", "no arguments", _hermes('{"name": "clock"}'), "", (NOW,)),
    Answer("hermes", "arguments that are null", _hermes(_object("clock", "null")), "", (NOW,)),
    Answer("hermes", "null before the name", _hermes('{"arguments": null, "name": "clock"}'), "", (NOW,)),
    Answer("hermes", "nearly null", _hermes(_object("clock", "nil")), _hermes(_object("clock", "nil"))),
    Answer(
        "hermes",
        "arguments before the name, and others",
        _hermes('{"id": [1], "arguments": {"a": {"name": "x"}}, "type": "function", "name": "clock"}'),
        "",
        (("clock", '{"a": {"name": "x"}}'),),
    ),
    Answer("hermes", "on one line", f"<tool_call>{_WEATHER}</tool_call>", "", (PARIS,)),
    Answer("hermes", "no end", f"<tool_call>\n{_WEATHER}", "", (PARIS,)),
    Answer("hermes", "cut in the end", f"<tool_call>\n{_WEATHER}\n</tool_", "", (PARIS,)),
    Answer("hermes", "cut in the marker", "Well <tool_c", "Well <tool_c"),
    Answer("hermes", "cut in the name", 'Well <tool_call>\n{"name": "wea', "Well", is_cut=True),
    Answer("hermes", "cut behind the marker", "Well <tool_call>", "Well", is_cut=True),
    Answer(
        "hermes",
        "cut in the arguments",
        f"Well {_hermes(_WEATHER)[:-18]}",
        "Well",
        (),
        is_cut=True,
        cut_call=("weather", '{"city": "Par'),
    ),
    Answer(
        "hermes",
        "cut after the arguments",
        '<tool_call>{"name": "clock", "arguments": {}, "i',
        "",
        (),
        is_cut=True,
        cut_call=NOW,
    ),
    Answer("hermes", "no JSON", _hermes("weather(Paris)"), _hermes("weather(Paris)")),
    Answer("hermes", "no object", _hermes("[1]"), _hermes("[1]")),
    Answer("hermes", "arguments that are no object", _hermes(_object("clock", "[]")), _hermes(_object("clock", "[]"))),
    Answer("hermes", "a name that is no text", _hermes('{"name": 1}'), _hermes('{"name": 1}')),
    Answer("hermes", "no name", _hermes('{"arguments": {}}'), _hermes('{"arguments": {}}')),
    Answer(
        "hermes",
        "arguments that go wrong",
        '<tool_call>\n{"name": "weather", "arguments": {"a": 1 2}}\n</tool_call> ok',
        '<tool_call>\n{"name": "weather", "arguments": {"a": 1 2}}\n</tool_call> ok',
        (),
        is_cut=True,
        cut_call=("weather", '{"a": 1 '),
    ),
    Answer(
        "hermes",
        "wrong after the arguments",
        '<tool_call>{"name": "clock", "arguments": {}; ok',
        '<tool_call>{"name": "clock", "arguments": {}; ok',
        (),
        is_cut=True,
        cut_call=NOW,
    ),
    Answer(
        "hermes",
        "a call that goes wrong after another",
        f'{_hermes(_CLOCK)}\n so <tool_call> {{"name": "clock", "arguments": {{a}}}} <tool_call>, you see',
        '\n so <tool_call> {"name": "clock", "arguments": {a}} <tool_call>, you see',
        (NOW,),
        is_cut=True,
        cut_call=("clock", "{"),
    ),
    Answer(
        "hermes",
        "an unknown name",
        f"a {_hermes(_object('launch', '{}'))} b",
        f"a {_hermes(_object('launch', '{}'))} b",
    ),
    Answer(
        "hermes",
        "an unknown name beside a known one",
        f"{_hermes(_object('launch', '{}'))}\n{_hermes(_CLOCK)}",
        _hermes(_object("launch", "{}")),
        (NOW,),
    ),
    Answer("hermes", "a name that begins a tool's", _hermes('{"name": "clo"}'), _hermes('{"name": "clo"}')),
    Answer("hermes", "beginnings of markers", "a < b <tool <<tool_call <tool_ca", "a < b <tool <<tool_call <tool_ca"),
    Answer("hermes", "a beginning before a marker", f"<tool_{_hermes(_CLOCK)}", "<tool_", (NOW,)),
    Answer("hermes", "two markers", f"<tool_call>\n{_hermes(_CLOCK)}", "<tool_call>", (NOW,)),
    Answer(
        "hermes",
        "a marker in a string",
        _hermes(_object("weather", '{"city": "</tool_call><tool_call>"}')),
        "",
        (("weather", '{"city": "</tool_call><tool_call>"}'),),
    ),
    Answer("hermes", "an end alone", "a </tool_call> b", "a </tool_call> b"),
]

_XML_PARIS = "<tool_call>\n<function=weather>\n<parameter=city>\nParis\n</parameter>\n</function>\n</tool_call>"
_XML_CLOCK = "<tool_call>\n<function=clock>\n</function>\n</tool_call>"


def _xml(name: str, **parameters: str) -> str:
    inner = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in parameters.items())
    return f"<tool_call>\n<function={name}>\n{inner}</function>\n</tool_call>"


QWEN3_CODER = [
    Answer("qwen3_coder", "no call", "if a < b: <b>print</b>", "if a < b: <b>print</b>"),
    Answer("qwen3_coder", "text, then a call", f"Let me see.\n\n{_XML_PARIS}", "Let me see.", (PARIS,)),
    Answer("qwen3_coder", "one call", _XML_PARIS, "", (PARIS,)),
    Answer("qwen3_coder", "no arguments", _XML_CLOCK, "", (NOW,)),
    Answer("qwen3_coder", "two calls", f"{_XML_PARIS}\n{_XML_CLOCK}\n", "", (PARIS, NOW)),
    Answer("qwen3_coder", "without the outer marker", "ok <function=clock></function>", "ok", (NOW,)),
    Answer(
        "qwen3_coder",
        "values by their types",
        _xml("weather", city="12", days="12", metric="True", place='{"at": [1, 2]}', unit="F"),
        "",
        (("weather", '{"city": "12", "days": 12, "metric": true, "place": {"at": [1, 2]}, "unit": "F"}'),),
    ),
    Answer(
        "qwen3_coder",
        "values that do not fit",
        _xml("weather", days="soon", metric="12", place="[1", unit="None"),
        "",
        (("weather", '{"days": "soon", "metric": "12", "place": "[1", "unit": "None"}'),),
    ),
    Answer(
        "qwen3_coder",
        "of no type, and undeclared",
        _xml("clock_note", text="t", more="[1]", other="a b"),
        "",
        (("clock_note", '{"text": "t", "more": [1], "other": "a b"}'),),
    ),
    Answer(
        "qwen3_coder",
        "lines, unicode and escapes",
        _xml("weather", city='\n  a "b"\n\n\\n 東京 🗼 </param <x>\n'),
        "",
        (("weather", '{"city": "\\n  a \\"b\\"\\n\\n\\\\n 東京 🗼 </param <x>\\n"}'),),
    ),
    Answer("qwen3_coder", "an empty value", _xml("weather", city=""), "", (("weather", '{"city": ""}'),)),
    Answer(
        "qwen3_coder",
        "values on one line",
        "<function=weather><parameter=city>Rome</parameter><parameter=days>3</parameter></function>",
        "",
        (("weather", '{"city": "Rome", "days": 3}'),),
    ),
    Answer(
        "qwen3_coder",
        "a value without its end before another one",
        "<function=weather>\n<parameter=city>\na\nb\n<parameter=days>\n3\n</parameter>\n</function>",
        "",
        (("weather", '{"city": "a\\nb", "days": 3}'),),
    ),
    Answer(
        "qwen3_coder",
        "a value without its end",
        "<tool_call>\n<function=weather>\n<parameter=days>\n3\n</function>\n</tool_call>",
        "",
        (("weather", '{"days": 3}'),),
    ),
    Answer("qwen3_coder", "no function's end", _XML_PARIS.replace("</function>\n", ""), "", (PARIS,)),
    Answer(
        "qwen3_coder",
        "Python's literals",
        _xml("clock_note", text="['a']", more="['a', True, {'b': None}]", other="[a]"),
        "",
        (("clock_note", '{"text": "[\'a\']", "more": ["a", true, {"b": null}], "other": "[a]"}'),),
    ),
    Answer("qwen3_coder", "no end", _XML_PARIS.removesuffix("\n</tool_call>"), "", (PARIS,)),
    Answer("qwen3_coder", "cut in the name", "a <tool_call>\n<function=wea", "a", is_cut=True),
    Answer(
        "qwen3_coder",
        "cut in a text",
        "a <function=weather>\n<parameter=city>\nPari",
        "a",
        is_cut=True,
        cut_call=("weather", '{"city": "Pari'),
    ),
    Answer(
        "qwen3_coder",
        "cut in a number",
        "<function=weather><parameter=city>\nx\n</parameter><parameter=days>\n1",
        "",
        is_cut=True,
        cut_call=("weather", '{"city": "x"'),
    ),
    Answer("qwen3_coder", "no function", "<tool_call>\n{}\n</tool_call>", "<tool_call>\n{}\n</tool_call>"),
    Answer(
        "qwen3_coder",
        "goes wrong",
        "<tool_call><function=clock>hello</function></tool_call>",
        "<tool_call><function=clock>hello</function></tool_call>",
        is_cut=True,
        cut_call=("clock", "{"),
    ),
    Answer("qwen3_coder", "an unknown name", _xml("launch", code="1"), _xml("launch", code="1")),
    Answer(
        "qwen3_coder", "a name without an end", f"<function={'a' * 300} {_XML_CLOCK}", f"<function={'a' * 300}", (NOW,)
    ),
    Answer(
        "qwen3_coder",
        "a very long name",
        f"<function={'a' * 257}> <function=clock></function>",
        f"<function={'a' * 257}>",
        (NOW,),
    ),
    Answer(
        "qwen3_coder",
        "beginnings of markers",
        "<tool <function <function= <parameter=x> </tool_call",
        "<tool <function <function= <parameter=x> </tool_call",
    ),
]

_LLAMA, _LLAMA_CLOCK = _object("weather", '{"city": "Paris"}', "parameters"), _object("clock", "{}", "parameters")

LLAMA3_JSON = [
    Answer("llama3_json", "no call", " It rains. {a; b}\n", " It rains. {a; b}\n"),
    Answer("llama3_json", "one call", _LLAMA, "", (PARIS,)),
    Answer("llama3_json", "one call with a tag", f"<|python_tag|>{_LLAMA}", "", (PARIS,)),
    Answer("llama3_json", "text, then a call", f"Let me see. <|python_tag|>{_LLAMA}", "Let me see.", (PARIS,)),
    Answer("llama3_json", "text, then a call without a tag", f"Let me see. {_LLAMA}", "Let me see.", (PARIS,)),
    Answer("llama3_json", "two calls", f"\n{_LLAMA}; {_LLAMA_CLOCK}\n", "", (PARIS, NOW)),
    Answer("llama3_json", "two calls on two lines", f"{_LLAMA}\n{_LLAMA_CLOCK}", "", (PARIS, NOW)),
    Answer("llama3_json", "JSON after a call", f'{_LLAMA}\n{{"a": 1}}', '\n{"a": 1}', (PARIS,)),
    Answer("llama3_json", "parameters that are null", _object("clock", "null", "parameters"), "", (NOW,)),
    Answer("llama3_json", "nested arguments", _object("weather", NESTED), "", (("weather", NESTED),)),
    Answer("llama3_json", "unicode and escapes", _object("weather", ESCAPED), "", (("weather", ESCAPED),)),
    Answer("llama3_json", "text after a call", f"{_LLAMA} and so on", " and so on", (PARIS,)),
    Answer("llama3_json", "no call after the semicolon", f"{_LLAMA}; and so on", " and so on", (PARIS,)),
    Answer("llama3_json", "a semicolon at the end", f"<|python_tag|>{_LLAMA}; ", "", (PARIS,)),
    Answer("llama3_json", "JSON", '{"city": "Paris", "name": "weather"} ', '{"city": "Paris", "name": "weather"} '),
    Answer("llama3_json", "JSON with a tool's name", '{"name": "weather"}', '{"name": "weather"}'),
    Answer("llama3_json", "JSON of other things", '{"name": "weather", "wet": 1}', '{"name": "weather", "wet": 1}'),
    Answer("llama3_json", "an unknown name", _object("launch", "{}"), _object("launch", "{}")),
    Answer("llama3_json", "a builtin tool", '<|python_tag|>brave.call(q="x")', '<|python_tag|>brave.call(q="x")'),
    Answer("llama3_json", "cut in the name", '{"name": "wea', '{"name": "wea'),
    Answer("llama3_json", "cut in the arguments", _LLAMA[:-5], "", is_cut=True, cut_call=("weather", '{"city": "Par')),
    Answer("llama3_json", "cut in the tag", "a <|python_", "a <|python_"),
    Answer("llama3_json", "beginnings of tags", "{ <|python <<|python_tag| {", "{ <|python <<|python_tag| {"),
    Answer("llama3_json", "a brace, then a call", f"{{}} <|python_tag|>{_LLAMA_CLOCK}", "{}", (NOW,)),
]

PYTHONIC = [
    Answer("pythonic", "no call", "It rains. [a(b)]", "It rains. [a(b)]"),
    Answer("pythonic", "one call", '[weather(city="Paris")]', "", (PARIS,)),
    Answer("pythonic", "no arguments", " [clock( )]\n", "", (NOW,)),
    Answer("pythonic", "two calls", "[weather(city='Paris'),\n clock()]", "", (PARIS, NOW)),
    Answer("pythonic", "a comma at the end", '[weather(city="Paris",)]', "", (PARIS,)),
    Answer("pythonic", "with tags", "<|python_start|>[clock()]<|python_end|>", "", (NOW,)),
    Answer("pythonic", "text, then a call", "Let me see. <|python_start|>[clock()]", "Let me see.", (NOW,)),
    Answer("pythonic", "text, then a call without a tag", "See [clock()]", "See [clock()]"),
    Answer(
        "pythonic",
        "nested arguments",
        '[weather(city="Paris", place={"at": [1.5, -2e3,]}, metric=True, unit=None)]',
        "",
        (("weather", '{"city": "Paris", "place": {"at": [1.5, -2000.0]}, "metric": true, "unit": null}'),),
    ),
    Answer(
        "pythonic",
        "JSON's spelling",
        '[weather(place={"at": [1.5, -2e3]}, metric=true, unit=null)]',
        "",
        (("weather", '{"place": {"at": [1.5, -2e3]}, "metric": true, "unit": null}'),),
    ),
    Answer(
        "pythonic",
        "unicode and escapes",
        "[weather(city='a, b) \\'\"\\' \\\\ \\x41 \\d 東京 🗼', days=(1, 2))]",
        "",
        (("weather", '{"city": "a, b) \'\\"\' \\\\ A \\\\d 東京 🗼", "days": [1, 2]}'),),
    ),
    Answer("pythonic", "a call and a bracket", "[clock()", "", (NOW,)),
    Answer("pythonic", "text after calls", "[clock()] so", " so", (NOW,)),
    Answer("pythonic", "an unknown name", "[launch(x=1)]", "[launch(x=1)]"),
    Answer("pythonic", "an unknown name after a known one", "[clock(), launch(x=1)]", ", launch(x=1)]", (NOW,)),
    Answer("pythonic", "a list", "[1, 2, (3)]", "[1, 2, (3)]"),
    Answer("pythonic", "a link", "[weather](http://x)", "[weather](http://x)"),
    Answer("pythonic", "cut in the name", "[weat", "[weat"),
    Answer(
        "pythonic",
        "cut in a value",
        '[weather(days=1, city="Par',
        is_cut=True,
        content="",
        cut_call=("weather", '{"days": 1'),
    ),
    Answer(
        "pythonic", "not by name", "[weather('Paris')]", "[weather('Paris')]", is_cut=True, cut_call=("weather", "{")
    ),
    Answer(
        "pythonic",
        "a value that is a name",
        "[weather(days=now, city='x')] ok",
        "[weather(days=now, city='x')] ok",
        is_cut=True,
        cut_call=("weather", "{"),
    ),
    Answer(
        "pythonic",
        "an infinite value",
        "[weather(days=1, city=1e999j)]",
        "[weather(days=1, city=1e999j)]",
        is_cut=True,
        cut_call=("weather", '{"days": 1'),
    ),
    Answer(
        "pythonic",
        "brackets that do not match",
        "[weather(days=[1)]",
        "[weather(days=[1)]",
        is_cut=True,
        cut_call=("weather", "{"),
    ),
    Answer("pythonic", "beginnings", "[[ <|python_start [clock(", "[[ <|python_start [clock("),
]

MISTRAL = [
    Answer("mistral", "no call", "It [rains].", "It [rains]."),
    Answer("mistral", "one call", f"[TOOL_CALLS][{_WEATHER}]", "", (PARIS,)),
    Answer("mistral", "two calls", f"[TOOL_CALLS] [{_WEATHER}, {_CLOCK}]\n", "", (PARIS, NOW)),
    Answer("mistral", "text, then a call", f"Let me see.[TOOL_CALLS][{_WEATHER}]", "Let me see.", (PARIS,)),
    Answer("mistral", "nested arguments", f"[TOOL_CALLS][{_object('weather', NESTED)}]", "", (("weather", NESTED),)),
    Answer("mistral", "escapes", f"[TOOL_CALLS][{_object('weather', ESCAPED)}]", "", (("weather", ESCAPED),)),
    Answer("mistral", "no list's end", f"[TOOL_CALLS][{_WEATHER}", "", (PARIS,)),
    Answer("mistral", "an empty list", "[TOOL_CALLS][]", "[TOOL_CALLS][]"),
    Answer(
        "mistral",
        "an unknown name",
        f"[TOOL_CALLS][{_object('launch', '{}')}]",
        f"[TOOL_CALLS][{_object('launch', '{}')}]",
    ),
    Answer(
        "mistral",
        "an unknown name after a known one",
        f"[TOOL_CALLS][{_CLOCK}, {_object('launch', '{}')}]",
        f", {_object('launch', '{}')}]",
        (NOW,),
    ),
    Answer("mistral", "cut", f"[TOOL_CALLS][{_WEATHER[:-5]}", is_cut=True, cut_call=("weather", '{"city": "Par')),
    Answer("mistral", "beginnings", "[TOOL [[TOOL_CALLS [", "[TOOL [[TOOL_CALLS ["),
    Answer("mistral_args", "one call", '[TOOL_CALLS]weather[ARGS]{"city": "Paris"}', "", (PARIS,)),
    Answer(
        "mistral_args",
        "two calls",
        '[TOOL_CALLS]weather[ARGS]{"city": "Paris"}[TOOL_CALLS]clock[ARGS]{}',
        "",
        (PARIS, NOW),
    ),
    Answer("mistral_args", "text, then a call", "See: [TOOL_CALLS]clock[ARGS]{}", "See:", (NOW,)),
    Answer("mistral_args", "an id", "[TOOL_CALLS]clock[CALL_ID]a1B2c3D4e[ARGS]{} ", "", (NOW,)),
    Answer("mistral_args", "no marker of arguments", '[TOOL_CALLS]weather{"city": "Paris"}', "", (PARIS,)),
    Answer("mistral_args", "an unknown name", "[TOOL_CALLS]launch[ARGS]{}", "[TOOL_CALLS]launch[ARGS]{}"),
    Answer("mistral_args", "no JSON", "[TOOL_CALLS]clock[ARGS]now", "[TOOL_CALLS]clock[ARGS]now"),
    Answer("mistral_args", "cut", "[TOOL_CALLS]clock[ARGS]", is_cut=True),
    Answer(
        "mistral_args", "cut in the arguments", '[TOOL_CALLS]clock[ARGS]{"a', is_cut=True, cut_call=("clock", '{"a')
    ),
]

ALL, ALL_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
ONE, SEP, ONE_END = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"


def _v3(name: str, arguments: str) -> str:
    return f"{ONE}function{SEP}{name}\n```json\n{arguments}\n```{ONE_END}"


def _v31(name: str, arguments: str) -> str:
    return f"{ONE}{name}{SEP}{arguments}{ONE_END}"


DEEPSEEK = [
    answer
    for name, call, between in (("deepseek_v3", _v3, "\n"), ("deepseek_v31", _v31, ""))
    for answer in (
        Answer(name, "no call", "It rains <｜ok｜>. ", "It rains <｜ok｜>. "),
        Answer(name, "one call", f"{ALL}{call(*PARIS)}{ALL_END}", "", (PARIS,)),
        Answer(name, "text, then a call", f"Let me see.\n{ALL}{call(*PARIS)}{ALL_END}", "Let me see.", (PARIS,)),
        Answer(name, "two calls", f"{ALL}{call(*PARIS)}{between}{call(*NOW)}{ALL_END}", "", (PARIS, NOW)),
        Answer(name, "nested arguments", f"{ALL}{call('weather', NESTED)}{ALL_END}", "", (("weather", NESTED),)),
        Answer(name, "escapes", f"{ALL}{call('weather', ESCAPED)}{ALL_END}", "", (("weather", ESCAPED),)),
        Answer(name, "without the outer marker", call(*NOW), "", (NOW,)),
        Answer(name, "no end", f"{ALL}{call(*NOW).removesuffix(ONE_END)}", "", (NOW,)),
        Answer(name, "text after calls", f"{ALL}{call(*NOW)}{ALL_END} so", " so", (NOW,)),
        Answer(
            name, "an unknown name", f"{ALL}{call('launch', '{}')}{ALL_END}", f"{ALL}{call('launch', '{}')}{ALL_END}"
        ),
        Answer(name, "no JSON", f"{ALL}{call('clock', 'now')}", f"{ALL}{call('clock', 'now')}"),
        Answer(name, "cut in the name", f"a {ALL}{call(*NOW)[:30]}", "a", is_cut=True),
        Answer(
            name,
            "cut in the arguments",
            f"{ALL}{call('clock', '~')[: call('clock', '~').index('~')]}{{",
            is_cut=True,
            cut_call=("clock", "{"),
        ),
        Answer(name, "beginnings", f"{ALL[:-1]} {ONE[:-2]} <｜tool▁call", f"{ALL[:-1]} {ONE[:-2]} <｜tool▁call"),
    )
]

THOUGHT = "<|channel|>analysis<|message|>Rain?<|end|>"
TO = "<|start|>assistant<|channel|>commentary to=functions."
JSON = " <|constrain|>json<|message|>"

HARMONY = [
    Answer("harmony", "no markers", "It rains. ", "It rains. "),
    Answer("harmony", "final", "<|channel|>final<|message|>It rains.<|return|>", "It rains."),
    Answer(
        "harmony",
        "reasoning, then final",
        f"{THOUGHT}<|start|>assistant<|channel|>final<|message|>No.",
        "No.",
        (),
        "Rain?",
    ),
    Answer(
        "harmony",
        "reasoning, then a call",
        f'{THOUGHT}{TO}weather{JSON}{{"city": "Paris"}}<|call|>',
        "",
        (PARIS,),
        "Rain?",
    ),
    Answer(
        "harmony", "a call alone", "<|channel|>commentary to=functions.clock <|constrain|>json<|message|>{}", "", (NOW,)
    ),
    Answer(
        "harmony",
        "the recipient first",
        "<|start|>assistant to=functions.clock<|channel|>commentary json<|message|>{}<|call|>",
        "",
        (NOW,),
    ),
    Answer(
        "harmony",
        "two calls",
        f'{TO}weather{JSON}{{"city": "Paris"}}<|call|>{TO}clock{JSON}{{}}<|call|>',
        "",
        (PARIS, NOW),
    ),
    Answer(
        "harmony",
        "a preamble",
        f"<|channel|>commentary<|message|>Let me see.<|end|>{TO}clock{JSON}{{}}<|call|>",
        "Let me see.",
        (NOW,),
    ),
    Answer("harmony", "two thoughts", f"{THOUGHT}<|start|>assistant{THOUGHT}", "", (), "Rain?\nRain?"),
    Answer("harmony", "a builtin tool", "<|channel|>analysis to=python code<|message|>1 + 1<|call|>", "", (), "1 + 1"),
    Answer("harmony", "nested arguments", f"{TO}weather{JSON}{NESTED}<|call|>", "", (("weather", NESTED),)),
    Answer("harmony", "escapes", f"{TO}weather{JSON}{ESCAPED}<|call|>", "", (("weather", ESCAPED),)),
    Answer("harmony", "an unknown name", f"{TO}launch{JSON}{{}}", "{}"),
    Answer("harmony", "no JSON", f"{TO}clock{JSON}now<|call|>", "now"),
    Answer("harmony", "cut in a header", "<|channel|>analysis", is_cut=True),
    Answer(
        "harmony",
        "the recipient at the very beginning",
        f' to=functions.weather<|channel|>commentary{JSON}{{"city": "Paris"}}<|call|>',
        "",
        (PARIS,),
    ),
    Answer("harmony", "a text that begins like a recipient", " today", " today"),
    Answer("harmony", "cut in the recipient", "to=functions.cl", is_cut=True),
    Answer("harmony", "two channels in a header", f"{TO}clock<|channel|>commentary{JSON}{{}}<|call|>", "", (NOW,)),
    Answer("harmony", "a recipient of no namespace", f"{TO[:-10]}clock{JSON}{{}}", "", (NOW,)),
    Answer("harmony", "an empty body", f"{TO}weather{JSON}<|call|>", "", (("weather", "{}"),)),
    Answer("harmony", "nothing to be cut", f"{TO}clock{JSON}", "", (NOW,)),
    Answer("harmony", "cut before the body", f"{TO}weather{JSON}", is_cut=True),
    Answer("harmony", "cut in the end", f"{TO}weather{JSON}<|ca", is_cut=True),
    Answer("harmony", "cut in a thought", THOUGHT[:-4], "", (), "Rain?<|e"),
    Answer(
        "harmony",
        "cut in the arguments",
        f'{THOUGHT}{TO}clock{JSON}{{"a": ',
        "",
        (),
        "Rain?",
        True,
        ("clock", '{"a": '),
    ),
    Answer(
        "harmony",
        "arguments that go wrong",
        f"{TO}clock{JSON}{{]}} so<|end|>",
        "{]} so",
        is_cut=True,
        cut_call=("clock", "{"),
    ),
    Answer("harmony", "a header alone", "<|channel|>final<|end|>x<|message|>y", "x<|message|>y"),
    Answer("harmony", "beginnings", "<|chan <|start| <<|", "<|chan <|start| <<|"),
]

_FENCED = f"```json\n{_WEATHER}\n```"
_INNER = '{"id": "1", "type": "function", "function": ' + _WEATHER + "}"
_TEXTED = _object("weather", json.dumps('{"city": "Paris"}'))
SLIPS = [
    answer
    for name, begin, end in (
        ("hermes", "<tool_call>\n", "\n</tool_call>"),
        ("mistral", "[TOOL_CALLS]", ""),
        ("llama3_json", "<|python_tag|>", ""),
        ("granite", "<|tool_call|>", ""),
        ("phi4_mini", "<|tool_call|>", "<|/tool_call|>"),
        ("nemotron", "<TOOLCALL>", "</TOOLCALL>"),
        ("cohere", "<|START_ACTION|>", "<|END_ACTION|>"),
        ("xlam", "", ""),
    )
    for answer in (
        Answer(name, "a list", f"{begin}[{_WEATHER},\n {_CLOCK}]{end}", "", (PARIS, NOW)),
        Answer(name, "an object", f"{begin}{_WEATHER}{end}", "", (PARIS,)),
        Answer(name, "in a fence", f"{begin}{_FENCED}{end}", "", (PARIS,)),
        Answer(name, "in a fence that does not end", f"{begin}{_FENCED[:-3]}", "", (PARIS,)),
        Answer(name, "OpenAI's spelling", f"{begin}{_INNER}{end}", "", (PARIS,)),
        Answer(name, "another key for the name", f"{begin}{_WEATHER.replace('name', 'function')}{end}", "", (PARIS,)),
        Answer(name, "another key for arguments", f"{begin}{_LLAMA}{end}", "", (PARIS,)),
        Answer(name, "arguments as a text", f"{begin}{_TEXTED}{end}", "", (PARIS,)),
        Answer(name, "no arguments as a text", f"{begin}{_object('clock', json.dumps(''))}{end}", "", (NOW,)),
        Answer(name, "a text that is no object", f'{begin}{_object("clock", json.dumps("[1]"))}{end}',
               f'{begin}{_object("clock", json.dumps("[1]"))}{end}'),
        Answer(name, "text, and a fence without a marker", f"I look:\n{_FENCED}\n", "I look:", (PARIS,)),
        Answer(name, "text, and a list without a marker", f"I look: [{_WEATHER}] so", "I look: so", (PARIS,)),
        Answer(name, "text between calls without markers", f"{_WEATHER}\nand\n{_CLOCK}", "\nand", (PARIS, NOW)),
        Answer(name, "JSON of another kind", f'See {{"a": {_WEATHER}, "b": [{_CLOCK}]}}',
               f'See {{"a": {_WEATHER}, "b": [{_CLOCK}]}}'),
        Answer(name, "an unknown name, and a call in its arguments", f"See {_object('launch', _CLOCK)}",
               f"See {_object('launch', _CLOCK)}"),
        Answer(name, "a fence with a program", "```python\nx = {1: [2, {}]}\n```", "```python\nx = {1: [2, {}]}\n```"),
        Answer(name, "brackets", "[ ] one {two} [x](y) ``` {{a}} [\n1] [{", "[ ] one {two} [x](y) ``` {{a}} [\n1] [{"),
        Answer(name, "cut before it is begun", 'See {"name": "clo', 'See {"name": "clo'),
        Answer(name, "cut when it is begun", 'See {"name": "clock", "arguments": {"a', "See", (), is_cut=True,
               cut_call=("clock", '{"a')),
    )
]  # fmt: skip

COHERE_CALL = '<|START_ACTION|>[\n    {"tool_call_id": "0", "tool_name": "weather", "parameters": {"city": "Paris"}},\n'
COHERE_CALL += '    {"tool_call_id": "1", "tool_name": "clock", "parameters": {}}\n]<|END_ACTION|>'
MARKED_JSON = [
    Answer("granite", "two calls", f"So. <|tool_call|>[{_WEATHER}, {_CLOCK}]", "So.", (PARIS, NOW)),
    Answer("granite", "the marker of others", f"<tool_call>[{_WEATHER}]", "", (PARIS,)),
    Answer("phi4_mini", "two calls", f"<|tool_call|>[{_WEATHER}, {_CLOCK}]<|/tool_call|>", "", (PARIS, NOW)),
    Answer("phi4_mini", "functools", f"So. functools[{_WEATHER}, {_CLOCK}] ok", "So. ok", (PARIS, NOW)),
    Answer("phi4_mini", "no call", "import functools; functools[1]", "import functools; functools[1]"),
    Answer("nemotron", "two calls", f"<TOOLCALL>[{_WEATHER}, {_CLOCK}]</TOOLCALL>", "", (PARIS, NOW)),
    Answer("nemotron", "cut in the end", f"<TOOLCALL>[{_WEATHER}]</TOOL", "", (PARIS,)),
    Answer("cohere", "two calls", COHERE_CALL, "", (PARIS, NOW)),
    Answer("cohere", "a response", "<|START_RESPONSE|>It rains.<|END_RESPONSE|>", "It rains."),
    Answer("cohere", "a text, and a call", f"<|START_TEXT|>So.<|END_TEXT|>{COHERE_CALL}", "So.", (PARIS, NOW)),
    Answer("xlam", "two calls", f"[{_WEATHER}, {_CLOCK}]\n", "", (PARIS, NOW)),
    Answer("xlam", "no call", "[1, 2] and [a(b)]", "[1, 2] and [a(b)]"),
]


def seed_call(name: str, /, **parameters: str) -> str:
    inner = "".join(f"<parameter={key}>{value}</parameter>\n" for key, value in parameters.items())
    return f"<seed:tool_call>\n<function={name}>\n{inner}</function>\n</seed:tool_call>"


def minimax_call(name: str, /, **parameters: str) -> str:
    inner = "".join(f'<parameter name="{key}">{value}</parameter>\n' for key, value in parameters.items())
    return f'<invoke name="{name}">\n{inner}</invoke>\n'


def dsml_call(name: str, /, **parameters: str) -> str:
    """The call of DeepSeek; a value that begins with ~ is none that it calls a string."""
    inner = "".join(
        f'<｜DSML｜parameter name="{key}" string="{"false" if value[:1] == "~" else "true"}">'
        f"{value.removeprefix('~')}</｜DSML｜parameter>\n"
        for key, value in parameters.items()
    )
    return f'<｜DSML｜invoke name="{name}">\n{inner}</｜DSML｜invoke>\n'


def glm_call(line: str, name: str, /, **parameters: str) -> str:
    inner = "".join(
        f"<arg_key>{key}</arg_key>{line}<arg_value>{value}</arg_value>{line}" for key, value in parameters.items()
    )
    return f"<tool_call>{name}{line}{inner}</tool_call>"


MINIMAX, MINIMAX_END = "<minimax:tool_call>\n", "</minimax:tool_call>"
DSML, DSML_END = "<｜DSML｜function_calls>\n", "</｜DSML｜function_calls>"
TAGGED = [
    answer
    for name, begin, end, call, between in (
        ("seed_oss", "", "", seed_call, "\n"),
        ("minimax_m2", MINIMAX, MINIMAX_END, minimax_call, ""),
        ("deepseek_v32", DSML, DSML_END, dsml_call, ""),
        ("deepseek_v4", DSML.replace("function", "tool"), DSML_END.replace("function", "tool"), dsml_call, ""),
        ("glm45", "", "", functools.partial(glm_call, "\n"), "\n"),
        ("glm47", "", "", functools.partial(glm_call, ""), ""),
    )
    for answer in (
        Answer(name, "no call", "if a < b: <b>print</b>", "if a < b: <b>print</b>"),
        Answer(name, "one call", f"{begin}{call('weather', city='Paris')}{end}", "", (PARIS,)),
        Answer(name, "text, then a call", f"So.\n\n{begin}{call('weather', city='Paris')}{end}", "So.", (PARIS,)),
        Answer(name, "two calls", f"{begin}{call('weather', city='Paris')}{between}{call('clock')}{end}\n", "",
               (PARIS, NOW)),
        Answer(name, "text after a call", f"{begin}{call('clock')}{end} so", " so", (NOW,)),
        Answer(name, "values by their types",
               begin + call("weather", city="12", days="12", metric="True", place='{"at": [1, 2]}', unit="F") + end, "",
               (("weather", '{"city": "12", "days": 12, "metric": true, "place": {"at": [1, 2]}, "unit": "F"}'),)),
        Answer(name, "values that do not fit", f"{begin}{call('weather', days='soon', place='[1')}{end}", "",
               (("weather", '{"days": "soon", "place": "[1"}'),)),
        Answer(name, "lines, unicode and escapes",
               begin + call("weather", city='\n  a "b"\n\n\\n 東京 🗼 </param <x>\n') + end, "",
               (("weather", '{"city": "\\n  a \\"b\\"\\n\\n\\\\n 東京 🗼 </param <x>\\n"}'),)),
        Answer(name, "an empty value", f"{begin}{call('weather', city='')}{end}", "", (("weather", '{"city": ""}'),)),
        Answer(name, "no end", f"{begin}{call('weather', city='Paris')}", "", (PARIS,)),
        Answer(name, "an unknown name", f"{begin}{call('launch', x='1')}{end}", f"{begin}{call('launch', x='1')}{end}"),
        Answer(name, "cut in a text", f"a {begin}{call('weather', city='Pari~').partition('~')[0]}", "a", is_cut=True,
               cut_call=("weather", '{"city": "Pari')),
        Answer(name, "JSON of a slip", f"I look: {_WEATHER}", "I look:", (PARIS,)),
    )
]  # fmt: skip
TAGGED += [
    Answer("qwen3_coder", "JSON in the markers", _hermes(_WEATHER), "", (PARIS,)),
    Answer("minimax_m2", "two blocks", "\n".join(2 * [f"{MINIMAX}{minimax_call('clock')}{MINIMAX_END}"]), "",
           (NOW, NOW)),
    Answer("minimax_m2", "cut behind a name", f'{MINIMAX}<invoke name="clock">', is_cut=True, cut_call=("clock", "{")),
    Answer("glm45", "cut behind the name", "a <tool_call>clock\n", "a", is_cut=True, cut_call=("clock", "{")),
    Answer("minimax_m2", "without the outer markers", minimax_call("clock"), "", (NOW,)),
    Answer("deepseek_v32", "what it calls a string", DSML + dsml_call("clock_note", text="1", more="[1]", o="~[1]"), "",
           (("clock_note", '{"text": "1", "more": "[1]", "o": [1]}'),)),
    Answer("deepseek_v32", "what it calls none", DSML + dsml_call("weather", city='~"1"', days="7", unit="~C"), "",
           (("weather", '{"city": "1", "days": 7, "unit": "C"}'),)),
    Answer("glm45", "arguments on the line of the name", glm_call("", "weather", city="Paris"), "", (PARIS,)),
    Answer("glm47", "arguments on lines", glm_call("\n", "weather", city="Paris"), "", (PARIS,)),
    Answer("glm47", "cut in the name", "<tool_call>clo", "", is_cut=True),
    Answer("glm47", "JSON in the markers", _hermes(_WEATHER), "", (PARIS,)),
]  # fmt: skip


def kimi_call(name: str, arguments: str, number: int = 0) -> str:
    head = f"<|tool_call_begin|>functions.{name}:{number}"
    return f"{head}<|tool_call_argument_begin|>{arguments}<|tool_call_end|>"


KIMI_ALL, KIMI_END = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
KIMI_K2 = [
    Answer("kimi_k2", "no call", "It rains <|ok|>.", "It rains <|ok|>."),
    Answer("kimi_k2", "one call", f"{KIMI_ALL}{kimi_call(*PARIS)}{KIMI_END}", "", (PARIS,)),
    Answer("kimi_k2", "two calls", f"So. {KIMI_ALL}{kimi_call(*PARIS)}{kimi_call(*NOW, 1)}{KIMI_END}", "So.",
           (PARIS, NOW)),
    Answer("kimi_k2", "a number twice", f"{KIMI_ALL}{kimi_call(*NOW)}\n{kimi_call(*NOW)}\n{KIMI_END}", "", (NOW, NOW)),
    Answer("kimi_k2", "a name alone", kimi_call(*NOW).replace("functions.", "").replace(":0", ""), "", (NOW,)),
    Answer("kimi_k2", "no namespace", kimi_call(*NOW).replace("functions.", ""), "", (NOW,)),
    Answer("kimi_k2", "nested arguments", KIMI_ALL + kimi_call("weather", NESTED), "", (("weather", NESTED),)),
    Answer("kimi_k2", "an unknown name", KIMI_ALL + kimi_call("launch", "{}"), KIMI_ALL + kimi_call("launch", "{}")),
    Answer("kimi_k2", "no JSON", kimi_call("clock", "now"), kimi_call("clock", "now")),
    Answer("kimi_k2", "cut in the name", f"a {KIMI_ALL}<|tool_call_begin|>functions.clo", "a", is_cut=True),
    Answer("kimi_k2", "cut in the arguments", KIMI_ALL + kimi_call("clock", '{"a~').partition("~")[0], is_cut=True,
           cut_call=("clock", '{"a')),
    Answer("kimi_k2", "no end", KIMI_ALL + kimi_call(*NOW).removesuffix("<|tool_call_end|>"), "", (NOW,)),
]  # fmt: skip

_GEMMA_MIXED = ("weather", '{"city": "São \\"Paulo\\"\\n, {[ 東京 🗼", "place": {"at": [1.5, -2e3]}, "metric": true}')
GEMMA = [
    answer
    for name, begin, quote, end in (
        ("gemma4", "<|tool_call>call:", '<|"|>', "<tool_call|>"),
        ("function_gemma", "<start_function_call>call:", "<escape>", "<end_function_call>"),
    )
    for answer in (
        Answer(name, "no call", "It {rains}: <|x", "It {rains}: <|x"),
        Answer(name, "one call", f"{begin}weather{{city:{quote}Paris{quote}}}{end}", "", (PARIS,)),
        Answer(name, "two calls", f"So.\n{begin}weather{{city:{quote}Paris{quote}}}{end}{begin}clock{{}}{end}", "So.",
               (PARIS, NOW)),
        Answer(name, "values of all kinds",
               begin + 'weather{city:~São "Paulo"\n, {[ 東京 🗼~,place:{at:[1.5,-2e3]},metric:true}'.replace("~", quote)
               + end, "", (_GEMMA_MIXED,)),
        Answer(name, "space, and JSON's own spelling",
               begin + 'weather{ "city" : "Paris" , place: { "at" : [ 1 , 2 ] } }' + end, "",
               (("weather", '{"city": "Paris", "place": {"at": [1, 2]}}'),)),
        Answer(name, "strings in lists, and marked keys", begin + "clock_note{text:~a~,more:[~b~,{~c~:~d~},[],{}]}"
               .replace("~", quote) + end, "",
               (("clock_note", '{"text": "a", "more": ["b", {"c": "d"}, [], {}]}'),)),
        Answer(name, "values by their types", f"{begin}weather{{city:12,days:{quote}3{quote},unit:None}}{end}", "",
               (("weather", '{"city": "12", "days": 3, "unit": "None"}'),)),
        Answer(name, "text after a call", f"{begin}clock{{}}{end} so", " so", (NOW,)),
        Answer(name, "an unknown name", f"{begin}launch{{}}{end}", f"{begin}launch{{}}{end}"),
        Answer(name, "no end", f"{begin}clock{{}}", "", (NOW,)),
        Answer(name, "cut in the name", f"a {begin}clo", "a", is_cut=True),
        Answer(name, "cut in a text", f"a {begin}weather{{city:{quote}Par", "a", is_cut=True,
               cut_call=("weather", '{"city": "Par')),
        Answer(name, "goes wrong", f"{begin}weather{{days:[1}} so", f"{begin}weather{{days:[1}} so", is_cut=True,
               cut_call=("weather", '{"days": [1')),
        Answer(name, "too deep", f"{begin}clock{{a:{'[' * 80}", is_cut=True, cut_call=("clock", '{"a": ' + "[" * 63)),
    )
]  # fmt: skip

LFM2, LFM2_END = "<|tool_call_start|>", "<|tool_call_end|>"
OLMO3, OLMO3_END = "<function_calls>", "</function_calls>"
PYTHONIC_OTHERS = [
    Answer("pythonic", "a line of text, then a call without a tag", "I look.\n\n[clock()]", "I look.", (NOW,)),
    Answer("pythonic", "a list on a line of its own", "See\n[1] and\n[a](b)", "See\n[1] and\n[a](b)"),
    Answer("pythonic", "a call without brackets", "<|python_start|>clock()<|python_end|>", "", (NOW,)),
    Answer("lfm2", "one call", f"{LFM2}[weather(city='Paris')]{LFM2_END}", "", (PARIS,)),
    Answer("lfm2", "two calls", f'So.{LFM2}[weather(city="Paris"), clock()]{LFM2_END}', "So.", (PARIS, NOW)),
    Answer("lfm2", "lines in a string", f"{LFM2}[weather(city='a\n\"b\"\\n', days=1)]{LFM2_END}", "",
           (("weather", '{"city": "a\\n\\"b\\"\\n", "days": 1}'),)),
    Answer("lfm2", "text after calls", f"{LFM2}[clock()]{LFM2_END}I look.", "I look.", (NOW,)),
    Answer("lfm2", "JSON", f"{LFM2}[{_WEATHER}, {_CLOCK}]{LFM2_END}", "", (PARIS, NOW)),
    Answer("lfm2", "an object", f"{LFM2}{_WEATHER}{LFM2_END}", "", (PARIS,)),
    Answer("lfm2", "cut", f"{LFM2}[weather(days=1, city='Pa", is_cut=True, cut_call=("weather", '{"days": 1')),
    Answer("lfm2", "an unknown name", f"{LFM2}[launch()]{LFM2_END}", f"{LFM2}[launch()]{LFM2_END}"),
    Answer("olmo3", "one call", f'{OLMO3}weather(city="Paris"){OLMO3_END}', "", (PARIS,)),
    Answer("olmo3", "two calls", f'So. {OLMO3}\nweather(city="Paris")\nclock()\n{OLMO3_END}\n', "So.", (PARIS, NOW)),
    Answer("olmo3", "JSON's words", f"{OLMO3}weather(metric=true, unit=null)", "",
           (("weather", '{"metric": true, "unit": null}'),)),
    Answer("olmo3", "brackets", f"{OLMO3}[clock(), clock()]{OLMO3_END}", "", (NOW, NOW)),
    Answer("olmo3", "text after a call", f"{OLMO3}clock() so it is", " so it is", (NOW,)),
]  # fmt: skip

ANSWERS = [
    *KIMI_K2,
    *GEMMA,
    *PYTHONIC_OTHERS,
    *TAGGED,
    *SLIPS,
    *MARKED_JSON,
    *HERMES,
    *QWEN3_CODER,
    *LLAMA3_JSON,
    *PYTHONIC,
    *MISTRAL,
    *DEEPSEEK,
    *HARMONY,
]
