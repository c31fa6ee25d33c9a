"""Texts that no model was asked for: nothing raises, nothing is lost, cuts make no difference, and time is linear."""

from __future__ import annotations

import random
import time
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from nightly import few
from tool_calls.answers import ANSWERS, make_parser, read
from tool_calls.test_answers import cut

from aioengine.tool_calls.calls import Piece
from aioengine.tool_calls.reading import StepParser

FORMATS = sorted({answer.format for answer in ANSWERS})
WHOLE = {name: [answer.text for answer in ANSWERS if answer.format == name and answer.calls] for name in FORMATS}
BITS = (
    "<tool_call>", "</tool_call>", "<function=", "weather", ">", "<parameter=", "city", "</parameter>", "</function>",
    "<|python_tag|>", "<|python_start|>", "<|python_end|>", "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "[", "]", "(", ")",
    "<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>", "<｜tool▁calls▁end｜>",
    "function", "```json\n", "\n```", "<|start|>", "assistant", "<|channel|>", "analysis", "final", "<|message|>",
    "commentary to=functions.clock ", "<|constrain|>json", "<|end|>", "<|call|>", '{"name": "clock"', '"name"', ":",
    '"arguments"', '"parameters"', '"weather"', "{", "}", ",", ";", '"', "'", "\\", "\\u12", "-1.5e", "true", "None",
    "<|tool_call|>", "<|/tool_call|>", "functools[", "<TOOLCALL>", "</TOOLCALL>", "<|START_ACTION|>", "<|END_ACTION|>",
    "<|START_TEXT|>", '"tool_call_id"', '"tool_name"', '"function"', "```", "[{", '"{}"',
    "<seed:tool_call>", "<minimax:tool_call>", '<invoke name="clock">', '<parameter name="city">', "</invoke>",
    "<｜DSML｜function_calls>", '<｜DSML｜invoke name="weather">', '" string="false">', "</｜DSML｜parameter>",
    '<｜DSML｜parameter name="', "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>", "<tool_call>clock",
    "<|tool_calls_section_begin|>", "<|tool_call_begin|>", "functions.clock:0", "<|tool_call_argument_begin|>",
    "<|tool_call>call:", '<|"|>', "<tool_call|>", "<start_function_call>", "<escape>", "city:", "<|tool_call_start|>",
    "<|tool_call_end|>", "<function_calls>", "</function_calls>",
    "=", " ", "\n", "\n\n", "tool", "<", "|", "é", "\ud800", "\x00", "clock(", "{}",
)  # fmt: skip


@st.composite
def scraps(draw: st.DrawFn, name: str) -> str:
    """Whole answers, beginnings of them, and bits of markers, one after the other."""
    whole = st.sampled_from(WHOLE[name])
    begun = st.builds(lambda text, end: text[: end % (len(text) + 1)], whole, st.integers(0, 400))
    return "".join(draw(st.lists(st.one_of(st.sampled_from(BITS), st.sampled_from(BITS), begun, whole), max_size=12)))


@pytest.mark.parametrize("name", few(["harmony", "hermes", "mistral"], of=FORMATS))
@settings(max_examples=30, deadline=None)
@given(data=st.data())
def test_scraps_are_read_the_same_however_they_are_cut(name: str, data: st.DataObject) -> None:
    text = data.draw(scraps(name))
    whole = read(make_parser(name), [text])
    assert read(make_parser(name), text) == whole
    assert read(make_parser(name), cut(text, random.Random(data.draw(st.integers(0, 1000))))) == whole
    if not whole.calls and name != "harmony":
        assert text.startswith(whole.content), "what went wrong is there as it was written"
        assert whole.is_cut or whole.content == text


@pytest.mark.parametrize("name", few(["harmony", "hermes", "mistral"], of=FORMATS))
@settings(max_examples=30, deadline=None)
@given(data=st.data())
def test_nothing_between_scraps_is_lost(name: str, data: st.DataObject) -> None:
    texts = data.draw(st.lists(scraps(name), max_size=4))
    words = [f"§{number}§" for number in range(len(texts))]
    # A header of harmony's is markup, and may have any word in it: its messages are ended before one.
    end = "<|message|>" if name == "harmony" else ""
    seen = read(make_parser(name), ["".join(text + end + word for text, word in zip(texts, words, strict=True))])
    found = seen.content + seen.reasoning + "".join(arguments for _, arguments in seen.deltas)
    lost = [word for word in words if word not in found]
    markup = seen.calls and any(key in text for text in texts for key in ('"id"', '"type"', "_id", "[CALL_ID]", "```"))
    # What is left over when the text is over inside a call is that call's.
    assert not lost or seen.is_cut or markup


# Time


SIZE = 20_000
LONG: dict[str, tuple[str, Callable[[int], str]]] = {
    "text": ("hermes", lambda n: "It rains. " * (n // 10)),
    "space": ("hermes", lambda n: " \n" * (n // 2)),
    "space before a call": ("hermes", lambda n: " \n" * (n // 2) + WHOLE["hermes"][0]),
    "beginnings of markers": ("hermes", lambda n: "<tool_cal" * (n // 9)),
    "a marker after the other": ("hermes", lambda n: "<tool_call>" * (n // 11)),
    "a long argument": ("hermes", lambda n: f'<tool_call>{{"name": "clock", "arguments": {{"a": "{"x" * n}"}}}}'),
    "escapes": ("hermes", lambda n: '<tool_call>{"name": "clock", "arguments": {"a": "' + "\\u00e9" * (n // 6)),
    "arguments before the name": (
        "hermes", lambda n: '<tool_call>{"arguments": {"a": "' + "x" * n + '"}, "name": "clock"}'
    ),
    "a long name": ("hermes", lambda n: '<tool_call>{"name": "' + "x" * n),
    "a long number": ("hermes", lambda n: '<tool_call>{"name": "clock", "arguments": {"a": ' + "1" * n),
    "a list of lists": ("hermes", lambda n: '<tool_call>{"name": "clock", "arguments": {"a": [' + "[]," * (n // 3)),
    "too deep": ("hermes", lambda n: '<tool_call>{"name": "clock", "arguments": {"a": ' + "[" * n),
    "many calls": ("hermes", lambda n: '<tool_call>{"name": "clock"}' * (n // 28)),
    "a long text as a value": ("qwen3_coder", lambda n: "<function=weather><parameter=city>" + "x\n" * (n // 2)),
    "a long list as a value": ("qwen3_coder", lambda n: "<function=weather><parameter=place>" + "x\n" * (n // 2)),
    "many values": (
        "qwen3_coder", lambda n: "<function=weather>" + "<parameter=city>x</parameter>" * (n // 29) + "</function>"
    ),
    "calls with semicolons": ("llama3_json", lambda n: '{"name": "clock", "parameters": {}};' * (n // 36)),
    "JSON that is no call": ("llama3_json", lambda n: '{"type": "' + "x" * n),
    "a long Python value": ("pythonic", lambda n: '[weather(city="' + "x, " * (n // 3) + '")]'),
    "a deep Python value": ("pythonic", lambda n: "[weather(city=" + "[" * n),
    "many signs": ("pythonic", lambda n: "[weather(city=" + "-" * n + "1)]"),
    "a Python list": ("pythonic", lambda n: "[" + "clock(), " * (n // 9)),
    "a list": ("mistral", lambda n: "[TOOL_CALLS][" + '{"name": "clock"}, ' * (n // 19)),
    "a call after the other": ("mistral_args", lambda n: "[TOOL_CALLS]clock[ARGS]{}" * (n // 25)),
    "fenced calls": (
        "deepseek_v3", lambda n: "<｜tool▁call▁begin｜>function<｜tool▁sep｜>clock\n```json\n{}" * (n // 58)
    ),
    "calls in a list without markers": ("hermes", lambda n: "[" + '{"name": "clock", "arguments": {}},' * (n // 34)),
    "braces": ("hermes", lambda n: "{ " * (n // 2)),
    "keys of data": ("hermes", lambda n: '{"a": 1} ' * (n // 9)),
    "fences": ("hermes", lambda n: "```json\n" * (n // 8)),
    "arguments as a text": ("hermes", lambda n: '<tool_call>{"name": "clock", "arguments": "' + "x" * n + '"}'),
    "a long value in a tag": (
        "glm45", lambda n: "<tool_call>weather\n<arg_key>city</arg_key><arg_value>" + "x\n" * (n // 2)
    ),
    "many tags": ("minimax_m2", lambda n: '<invoke name="clock"></invoke>' * (n // 30)),
    "a deep value": ("gemma4", lambda n: "<|tool_call>call:clock{a:" + "[" * n),
    "a long list": ("gemma4", lambda n: "<|tool_call>call:clock{a:[" + "1," * (n // 2)),
    "marks of strings": ("gemma4", lambda n: "<|tool_call>call:clock{a:[" + '<|"|>x<|"|>,' * (n // 12)),
    "many calls of Kimi": (
        "kimi_k2", lambda n: "<|tool_call_begin|>functions.clock:0<|tool_call_argument_begin|>{}" * (n // 66)
    ),
    "lines of calls": ("olmo3", lambda n: "<function_calls>" + "clock()\n" * (n // 8)),
    "a long thought": ("harmony", lambda n: "<|channel|>analysis<|message|>" + "x\n" * (n // 2)),
    "a long header": ("harmony", lambda n: "<|channel|>" + "x" * n),
    "many headers": ("harmony", lambda n: "<|channel|>final<|message|>" * (n // 27)),
}  # fmt: skip


def cpu_s(name: str, text: str) -> float:
    parser = make_parser(name)
    assert isinstance(parser, StepParser)
    begun = time.process_time()
    for at in range(0, len(text), 4):
        assert isinstance(parser.feed(text[at : at + 4]), Piece)
        # What was not taken is copied with each piece: were it long, time would be quadratic.
        assert len(parser._reading.text) < 40
    parser.finish()
    return time.process_time() - begun


@pytest.mark.parametrize("title", few(["a long argument", "a long text as a value", "a long thought"], of=LONG))
def test_time_is_linear_in_the_length_of_an_answer(title: str) -> None:
    name, make = LONG[title]
    short_s, long_s = cpu_s(name, make(SIZE)), cpu_s(name, make(8 * SIZE))
    assert long_s < 24 * short_s + 0.2, (
        "eight times the text takes eight times as long, or sixty-four if it is quadratic"
    )
