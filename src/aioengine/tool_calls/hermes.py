"""The calls of Hermes 2 Pro, Qwen2.5 and Qwen3.

Let me look.
<tool_call>
{"name": "get_weather", "arguments": {"city": "Paris"}}
</tool_call>
<tool_call>
{"name": "get_time", "arguments": {}}
</tool_call>
"""

from __future__ import annotations

from aioengine.tool_calls.grammars import GrammarWriter, StepFormat, quoted
from aioengine.tool_calls.reading import Markers, Reading, Steps

BEGIN, END = "<tool_call>", "</tool_call>"
_BEGINS = Markers(BEGIN)


def _read(reading: Reading) -> Steps[None]:
    while (yield from reading.show_until(_BEGINS)):
        yield from reading.attempt(_read_call(reading))


def _read_call(reading: Reading) -> Steps[None]:
    yield from reading.json_call()
    yield from reading.close(END)


def _write(writer: GrammarWriter) -> str:
    newline = quoted("\n")
    call = writer.one_of(writer.json_call(tool, "arguments") for tool in writer.tools)
    return writer.finish_marked(BEGIN, f"{newline} {call} {newline} {writer.marker(END)}", between=newline)


HERMES = StepFormat("hermes", _read, _write, keeps_special_tokens=(BEGIN, END))
