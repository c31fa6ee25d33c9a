"""Calls in a section of their own: DeepSeek V3 and R1 (since its second version), V3.1, and Kimi K2.

    <｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>get_weather
    ```json
    {"city": "Paris"}
    ```<｜tool▁call▁end｜><｜tool▁calls▁end｜>
    <｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁sep｜>{"city": "Paris"}<｜tool▁call▁end｜><｜tool▁calls▁end｜>
    <|tool_calls_section_begin|><|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{}<|tool_call_end|>…

Kimi's number counts the calls of a conversation, and what stands before the arguments is the call's id: its templates
write the ids of the history, and the model goes on from them.
"""

from __future__ import annotations

from typing import NamedTuple

from aioengine.tool_calls.grammars import GrammarWriter, StepFormat, quoted
from aioengine.tool_calls.reading import MAX_KEYWORD_CHARS, Markers, NotACall, Reading, Steps

ALL_BEGIN, ALL_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
BEGIN, SEPARATOR, END = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"
_LINE_ENDS = Markers("\n")


class _Section(NamedTuple):
    """The texts of a format; ``head``: what precedes a call's arguments, in Lark, with NAME and SEPARATOR in it."""

    all_begin: str
    all_end: str
    begin: str
    separator: str
    end: str
    head: str
    tail: str = ""
    between: str = ""

    def read(self, reading: Reading) -> Steps[None]:
        begins = Markers(self.all_begin, self.begin)
        while marker := (yield from reading.show_until(begins)):
            yield from reading.attempt(self._read_call(reading, marker))

    def _read_call(self, reading: Reading, marker: str) -> Steps[None]:
        if marker == self.all_begin:
            yield from reading.skip_space()
            yield from reading.expect(self.begin)
        head = (yield from reading.read_until(Markers(self.separator), longest=MAX_KEYWORD_CHARS)).strip()
        if (yield from reading.skip_space()) != "{":
            if head != "function":
                raise NotACall
            head = (yield from reading.read_until(_LINE_ENDS, longest=MAX_KEYWORD_CHARS)).strip()
            yield from reading.skip_space()
            yield from reading.expect("```json")
            if (yield from reading.skip_space()) != "{":
                raise NotACall
        name, colon, _ = head.partition(":")
        name = name if name in reading.tools else name.removeprefix("functions.")
        reading.begin_call(name, call_id=head if colon else None)
        yield from reading.json_value(reading.add_arguments)
        reading.end_call()
        yield from reading.close("```", self.end, self.all_end)

    def write(self, writer: GrammarWriter) -> str:
        head = self.head.replace("SEPARATOR", writer.marker(self.separator))
        body = writer.one_of(
            f"{head.replace('NAME', tool.name)} {writer.json(tool.parameters, tool)} {quoted(self.tail)}"
            for tool in writer.tools
        )
        call = writer.rule(f"{writer.marker(self.begin)} {body} {writer.marker(self.end)}")
        calls = writer.several(call, quoted(self.between))
        return writer.finish_marked(self.all_begin, f"{calls} {writer.marker(self.all_end)}", self.begin, between=None)


_DEEPSEEK = (ALL_BEGIN, ALL_END, BEGIN, SEPARATOR, END)
_KIMI = (
    "<|tool_calls_section_begin|>",
    "<|tool_calls_section_end|>",
    "<|tool_call_begin|>",
    "<|tool_call_argument_begin|>",
    "<|tool_call_end|>",
)
DEEPSEEK_V3, DEEPSEEK_V31, KIMI_K2 = (
    StepFormat(name, section.read, section.write, keeps_special_tokens=True)
    for name, section in (
        ("deepseek_v3", _Section(*_DEEPSEEK, r'"function" SEPARATOR "NAME\n```json\n"', "\n```", "\n")),
        ("deepseek_v31", _Section(*_DEEPSEEK, '"NAME" SEPARATOR')),
        ("kimi_k2", _Section(*_KIMI, '"functions.NAME:" /[0-9]{1,4}/ SEPARATOR')),
    )
)
