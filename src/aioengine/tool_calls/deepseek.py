"""The calls of DeepSeek V3 (and of R1 since its second version), and those of V3.1.

V3:

    <｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>get_weather
    ```json
    {"city": "Paris"}
    ```<｜tool▁call▁end｜><｜tool▁calls▁end｜>

V3.1:

    <｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁sep｜>{"city": "Paris"}<｜tool▁call▁end｜><｜tool▁calls▁end｜>

One parser reads both.
"""

from __future__ import annotations

from aioengine.tool_calls.grammars import GrammarWriter, StepFormat, quoted
from aioengine.tool_calls.reading import MAX_KEYWORD_CHARS, Markers, NotACall, Reading, Steps

ALL_BEGIN, ALL_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
BEGIN, SEPARATOR, END = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"
FENCE, END_FENCE = "\n```json\n", quoted("\n```")
_BEGINS, _SEPARATORS, _LINE_ENDS = Markers(ALL_BEGIN, BEGIN), Markers(SEPARATOR), Markers("\n")


def _read(reading: Reading) -> Steps[None]:
    while marker := (yield from reading.show_until(_BEGINS)):
        yield from reading.attempt(_read_call(reading, marker))


def _read_call(reading: Reading, marker: str) -> Steps[None]:
    if marker == ALL_BEGIN:
        yield from reading.skip_space()
        yield from reading.expect(BEGIN)
    name = yield from reading.read_until(_SEPARATORS, longest=MAX_KEYWORD_CHARS)
    if (yield from reading.skip_space()) != "{":
        if name.strip() != "function":
            raise NotACall
        name = yield from reading.read_until(_LINE_ENDS, longest=MAX_KEYWORD_CHARS)
        yield from reading.skip_space()
        yield from reading.expect("```json")
        if (yield from reading.skip_space()) != "{":
            raise NotACall
    reading.begin_call(name.strip())
    yield from reading.json_value(reading.add_arguments)
    reading.end_call()
    yield from reading.close("```", END, ALL_END)


def _write_v3(writer: GrammarWriter) -> str:
    separator = writer.marker(SEPARATOR)
    return _write(writer, "\n", [
        f"{quoted('function')} {separator} {quoted(tool.name + FENCE)} {writer.json(tool.parameters, tool)} {END_FENCE}"
        for tool in writer.tools
    ])  # fmt: skip


def _write_v31(writer: GrammarWriter) -> str:
    separator = writer.marker(SEPARATOR)
    return _write(writer, "", [
        f"{quoted(tool.name)} {separator} {writer.json(tool.parameters, tool)}" for tool in writer.tools
    ])  # fmt: skip


def _write(writer: GrammarWriter, between: str, bodies: list[str]) -> str:
    call = writer.rule(f"{writer.marker(BEGIN)} {writer.one_of(bodies)} {writer.marker(END)}")
    calls = writer.several(call, quoted(between))
    return writer.finish_marked(ALL_BEGIN, f"{calls} {writer.marker(ALL_END)}", BEGIN, between=None)


DEEPSEEK_V3 = StepFormat("deepseek_v3", _read, _write_v3, keeps_special_tokens=True)
DEEPSEEK_V31 = StepFormat("deepseek_v31", _read, _write_v31, keeps_special_tokens=True)
