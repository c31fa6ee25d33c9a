"""The calls of Llama 3.1 and later, where they are JSON.

    {"name": "get_weather", "parameters": {"city": "Paris"}}; {"name": "get_time", "parameters": {}}

A model may leave the semicolon away. They are the whole answer, or follow ``<|python_tag|>``. JSON that is no call is
an answer like others.
"""

from __future__ import annotations

from aioengine.tool_calls.grammars import GrammarWriter, StepFormat, quoted
from aioengine.tool_calls.reading import Markers, Reading, Steps

TAG = "<|python_tag|>"
_TAGS = Markers(TAG)


def _read(reading: Reading) -> Steps[None]:
    if (yield from reading.skip_space()) == "{":
        yield from reading.attempt(_read_calls(reading), is_marked=False)
    while (yield from reading.show_until(_TAGS)):
        yield from reading.attempt(_read_calls(reading))


def _read_calls(reading: Reading) -> Steps[None]:
    first = "{"
    while first == "{":
        yield from reading.json_call(needs_arguments=True)
        yield from reading.close(";")
        first = yield from reading.peek()


def _write(writer: GrammarWriter) -> str:
    call = writer.one_of(writer.json_call(tool, "parameters") for tool in writer.tools)
    return writer.finish_unmarked(TAG, writer.several(call, quoted("; ")), beginning="{")


LLAMA3_JSON = StepFormat("llama3_json", _read, _write, keeps_special_tokens=True)
