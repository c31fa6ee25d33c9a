"""The calls of Kimi K2.

    <|tool_calls_section_begin|><|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{"city": "Paris"}
    <|tool_call_end|><|tool_calls_section_end|>

(On one line.) The number counts the calls of a conversation. What stands before the arguments is the call's id: Kimi's
templates write the ids of the history, and the model goes on from them.
"""

from __future__ import annotations

from aioengine.tool_calls.grammars import GrammarWriter, StepFormat, quoted
from aioengine.tool_calls.reading import MAX_KEYWORD_CHARS, Markers, NotACall, Reading, Steps

ALL_BEGIN, ALL_END = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
BEGIN, ARGUMENTS, END = "<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>"
_BEGINS, _HEAD_ENDS = Markers(ALL_BEGIN, BEGIN), Markers(ARGUMENTS)


def _read(reading: Reading) -> Steps[None]:
    while marker := (yield from reading.show_until(_BEGINS)):
        yield from reading.attempt(_read_call(reading, marker))


def _read_call(reading: Reading, marker: str) -> Steps[None]:
    if marker == ALL_BEGIN:
        yield from reading.skip_space()
        yield from reading.expect(BEGIN)
    head = (yield from reading.read_until(_HEAD_ENDS, longest=MAX_KEYWORD_CHARS)).strip()
    name, colon, _ = head.partition(":")
    name = name if name in reading.tools else name.removeprefix("functions.")
    if (yield from reading.skip_space()) != "{":
        raise NotACall
    reading.begin_call(name, call_id=head if colon else None)
    yield from reading.json_value(reading.add_arguments)
    reading.end_call()
    yield from reading.close(END, ALL_END)


def _write(writer: GrammarWriter) -> str:
    arguments = writer.marker(ARGUMENTS)
    call = writer.one_of(
        f"{quoted(f'functions.{tool.name}:')} /[0-9]{{1,4}}/ {arguments} {writer.json(tool.parameters, tool)}"
        for tool in writer.tools
    )
    calls = writer.several(f"{writer.marker(BEGIN)} {call} {writer.marker(END)}", "")
    return writer.finish_marked(ALL_BEGIN, f"{calls} {writer.marker(ALL_END)}", BEGIN, between=None)


KIMI_K2 = StepFormat("kimi_k2", _read, _write, keeps_special_tokens=True)
