"""Calls with the name before the arguments: DeepSeek V3 and R1 (since its second version), V3.1, Kimi, Mistral.

    <｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>get_weather
    ```json
    {"city": "Paris"}
    ```<｜tool▁call▁end｜><｜tool▁calls▁end｜>
    <｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁sep｜>{"city": "Paris"}<｜tool▁call▁end｜><｜tool▁calls▁end｜>
    <|tool_calls_section_begin|><|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{}<|tool_call_end|>…
    [TOOL_CALLS]get_weather[ARGS]{"city": "Paris"}[TOOL_CALLS]get_time[CALL_ID]a1B2c3D4e[ARGS]{}

Kimi's number counts the calls of a conversation, and the text before the arguments is the call's id: its templates
write the ids of the history, and the model goes on from them. Mistral's templates accept only ids of nine letters and
digits; an id that the model writes is ignored. A model may omit the separator between a name and its arguments.

Mistral's models wrote a list until version 11 of their tokenizer; it is read after any of these markers:

    [TOOL_CALLS][{"name": "get_weather", "arguments": {"city": "Paris"}}, {"name": "get_time", "arguments": {}}]
"""

from __future__ import annotations

from typing import NamedTuple

from aioengine.tool_calls.calls import short_id
from aioengine.tool_calls.grammars import GrammarWriter, StepFormat, quoted
from aioengine.tool_calls.marked_json import list_writer
from aioengine.tool_calls.reading import MAX_KEYWORD_CHARS, Markers, NotACall, Reading, Steps

ALL_BEGIN, ALL_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
BEGIN, SEPARATOR, END = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"
_LINE_ENDS = Markers("\n")


class _NamedJson(NamedTuple):
    """The texts of a format.

    Attributes:
        begin, end: the markers around a call; ``end`` may be empty.
        separator: the marker before a call's arguments.
        head: the Lark grammar of the text before the arguments, with NAME and SEPARATOR in it.
        tail, between: the text after a call's arguments, and the text between two calls.
        all_begin, all_end: the markers around all calls; empty if there are none.
    """

    begin: str
    separator: str
    end: str
    all_begin: str
    all_end: str
    head: str
    tail: str = ""
    between: str = ""

    def read(self, reading: Reading) -> Steps[None]:
        begins = Markers(*filter(None, (self.all_begin, self.begin)))
        find = reading.show_until if self.all_begin else reading.find_call
        while marker := (yield from find(begins)):
            yield from reading.attempt(self._read_call(reading, marker))

    def _read_call(self, reading: Reading, marker: str) -> Steps[None]:
        first, fence = (yield from reading.skip_space()), ""
        if marker == self.all_begin:
            yield from reading.expect(self.begin)
            first = yield from reading.skip_space()
        if first and first in "[{`":
            yield from reading.json_calls()
        else:
            head = (yield from reading.read_until(Markers(self.separator, "{"), longest=MAX_KEYWORD_CHARS)).strip()
            if reading.marker == "{":
                reading.put_back()
            elif (yield from reading.skip_space()) != "{":
                if head != "function":
                    raise NotACall
                head = (yield from reading.read_until(_LINE_ENDS, longest=MAX_KEYWORD_CHARS)).strip()
                yield from reading.skip_space()
                yield from reading.expect("```json")
                fence = "```"
                if (yield from reading.skip_space()) != "{":
                    raise NotACall
            name, colon, _ = head.partition("[CALL_ID]")[0].strip().partition(":")
            name = name if name in reading.tools else name.removeprefix("functions.")
            reading.begin_call(name, call_id=head if colon else None)
            yield from reading.json_value(reading.add_arguments)
            reading.end_call()
        yield from reading.close(*filter(None, (fence, self.end, self.all_end)))

    def write(self, writer: GrammarWriter) -> str:
        head = self.head.replace("SEPARATOR", writer.marker(self.separator))
        body = writer.one_of(
            f"{head.replace('NAME', tool.name)} {writer.json(tool.parameters, tool)} {quoted(self.tail)}"
            for tool in writer.tools
        )
        if not self.all_begin:
            return writer.finish_marked(self.begin, body, between=self.between)
        call = writer.rule(f"{writer.marker(self.begin)} {body} {writer.marker(self.end)}")
        calls = writer.several(call, quoted(self.between))
        return writer.finish_marked(self.all_begin, f"{calls} {writer.marker(self.all_end)}", self.begin, between=None)


def _read_mistral(reading: Reading) -> Steps[None]:
    make_id = reading.make_id
    reading.make_id = lambda: short_id(make_id())
    return _MISTRAL.read(reading)


_DEEPSEEK = (BEGIN, SEPARATOR, END, ALL_BEGIN, ALL_END)
_KIMI = (
    *("<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>"),
    *("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"),
)
_MISTRAL = _NamedJson("[TOOL_CALLS]", "[ARGS]", "", "", "", '"NAME" SEPARATOR')
DEEPSEEK_V3, DEEPSEEK_V31, KIMI_K2 = (
    StepFormat(name, marks.read, marks.write)
    for name, marks in (
        ("deepseek_v3", _NamedJson(*_DEEPSEEK, r'"function" SEPARATOR "NAME\n```json\n"', "\n```", "\n")),
        ("deepseek_v31", _NamedJson(*_DEEPSEEK, '"NAME" SEPARATOR')),
        ("kimi_k2", _NamedJson(*_KIMI, '"functions.NAME:" /[0-9]{1,4}/ SEPARATOR')),
    )
)
MISTRAL = StepFormat("mistral", _read_mistral, list_writer((_MISTRAL.begin,), ""))
MISTRAL_ARGS = StepFormat("mistral_args", _read_mistral, _MISTRAL.write)
