"""The calls of Llama 3.1 and later where they are JSON, and those of xLAM 2, which are a list.

    {"name": "get_weather", "parameters": {"city": "Paris"}}; {"name": "get_time", "parameters": {}}
    [{"name": "get_weather", "arguments": {"city": "Paris"}}, {"name": "get_time", "arguments": {}}]

A model may leave the semicolon away. They are the whole answer, or follow ``<|python_tag|>``. JSON that is no call is
an answer like others.
"""

from __future__ import annotations

import functools

from aioengine.tool_calls.grammars import GrammarWriter, StepFormat, quoted
from aioengine.tool_calls.reading import Markers, Reading, Steps

TAG = "<|python_tag|>"
_TAGS = Markers(TAG)


def _read(beginning: str, reading: Reading) -> Steps[None]:
    if (yield from reading.skip_space()) == beginning:
        yield from reading.attempt(_read_calls(reading), is_marked=False)
    while (yield from reading.find_call(_TAGS)):
        yield from reading.attempt(_read_calls(reading))


def _read_calls(reading: Reading) -> Steps[None]:
    first = "{"
    while first and first in "{[":
        yield from reading.json_calls(needs_arguments=True)
        yield from reading.close(";")
        first = yield from reading.peek()


def _write_llama(writer: GrammarWriter) -> str:
    call = writer.one_of(writer.json_call(tool, "parameters") for tool in writer.tools)
    return writer.finish_unmarked(TAG, writer.several(call, quoted("; ")), beginning="{")


def _write_xlam(writer: GrammarWriter) -> str:
    return writer.finish_unmarked(TAG, writer.json_list("arguments"), beginning="[")


LLAMA3_JSON = StepFormat("llama3_json", functools.partial(_read, "{"), _write_llama, keeps_special_tokens=True)
XLAM = StepFormat("xlam", functools.partial(_read, "["), _write_xlam, keeps_special_tokens=True)
