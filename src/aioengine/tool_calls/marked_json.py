"""Calls in JSON, an object each or a list of all, mostly between two markers.

Hermes 2 Pro, Qwen2.5, Qwen3, Granite 4, SmolLM3:

    Let me look.
    <tool_call>
    {"name": "get_weather", "arguments": {"city": "Paris"}}
    </tool_call>
    <tool_call>
    {"name": "get_time", "arguments": {}}
    </tool_call>

Granite 3 (which has no second marker), Phi-4-mini, Nemotron Nano 2, and Command R7B and A:

    <|tool_call|>[{"name": "get_weather", "arguments": {"city": "Paris"}}, {"name": "get_time", "arguments": {}}]
    <|tool_call|>[{"name": "get_time", "arguments": {}}]<|/tool_call|>
    <TOOLCALL>[{"name": "get_time", "arguments": {}}]</TOOLCALL>
    <|START_ACTION|>[
        {"tool_call_id": "0", "tool_name": "get_time", "parameters": {}}
    ]<|END_ACTION|>

Llama 3.1 and later, and xLAM 2, which has a list:

    {"name": "get_weather", "parameters": {"city": "Paris"}}; {"name": "get_time", "parameters": {}}

These calls are the whole answer, or follow ``<|python_tag|>``. A model may omit the semicolon. JSON that is no call is
content.

Each format's calls may be an object or a list. The ids that Command writes are ignored: its template numbers the calls
by itself.
"""

from __future__ import annotations

from collections.abc import Callable

from aioengine.tool_calls.grammars import GrammarWriter, StepFormat, quoted
from aioengine.tool_calls.reading import Markers, Reading, Steps

BEGIN, END = "<tool_call>", "</tool_call>"
PYTHON_TAG = "<|python_tag|>"
COHERE_TEXT = ("<|START_RESPONSE|>", "<|END_RESPONSE|>", "<|START_TEXT|>", "<|END_TEXT|>")
"""The markers that Command's models write around content."""


def _reader(
    begins: tuple[str, ...], end: str, markup: tuple[str, ...] = (), *, beginning: str = ""
) -> Callable[[Reading], Steps[None]]:
    """``beginning``: first character of an answer of calls without a marker, of which there may be several."""
    markers = Markers(*begins, *markup)

    def read_calls(reading: Reading) -> Steps[None]:
        first = "{"
        while first and first in "{[":
            yield from reading.json_calls()
            yield from reading.close(*filter(None, [end]))
            first = (yield from reading.peek()) if beginning else ""

    def read(reading: Reading) -> Steps[None]:
        if beginning and (yield from reading.skip_space()) == beginning:
            yield from reading.attempt(read_calls(reading), is_marked=False)
        while marker := (yield from reading.find_call(markers)):
            if marker in markup:
                reading.drop()
                continue
            if marker.endswith("["):  # the list's own
                reading.put_back()
                reading.take(reading.at + len(marker) - 1)
            yield from reading.attempt(read_calls(reading))

    return read


def _write_each(writer: GrammarWriter) -> str:
    newline = quoted("\n")
    call = writer.one_of(writer.json_call(tool, "arguments") for tool in writer.tools)
    return writer.finish_marked(BEGIN, f"{newline} {call} {newline} {writer.marker(END)}", between=newline)


def list_writer(begins: tuple[str, ...], end: str) -> Callable[[GrammarWriter], str]:
    def write(writer: GrammarWriter) -> str:
        calls = f"{writer.json_list('arguments')} {writer.marker(end)}"
        return writer.finish_marked(*begins[:1], calls, *begins[1:], between=None)

    return write


def _write_llama(writer: GrammarWriter) -> str:
    call = writer.one_of(writer.json_call(tool, "parameters") for tool in writer.tools)
    return writer.finish_unmarked(PYTHON_TAG, writer.several(call, quoted("; ")), beginning="{")


def _write_xlam(writer: GrammarWriter) -> str:
    return writer.finish_unmarked(PYTHON_TAG, writer.json_list("arguments"), beginning="[")


def _write_cohere(writer: GrammarWriter) -> str:
    head, item = quoted('{"tool_call_id": "'), quoted("\n    ")
    names = [(tool, quoted(f'", "tool_name": "{tool.name}", "parameters": ')) for tool in writer.tools]
    call = writer.one_of(
        f"{head} /[0-9]{{1,3}}/ {name} {writer.json(tool.parameters, tool)} {quoted('}')}" for tool, name in names
    )
    calls = writer.several(f"{item} {call}", quoted(","))
    newline = quoted("\n]")
    listed = f"{quoted('[')} {calls} {newline} {writer.marker('<|END_ACTION|>')}"
    return writer.finish_marked("<|START_ACTION|>", listed, *COHERE_TEXT, between=None)


HERMES = StepFormat("hermes", _reader((BEGIN,), END), _write_each, keeps_special_tokens=(BEGIN, END))
GRANITE, PHI4_MINI, NEMOTRON = (
    StepFormat(name, _reader(begins, end), list_writer(begins, end))
    for name, begins, end in (
        ("granite", ("<|tool_call|>", BEGIN), ""),
        ("phi4_mini", ("<|tool_call|>", "functools["), "<|/tool_call|>"),
        ("nemotron", ("<TOOLCALL>",), "</TOOLCALL>"),
    )
)
COHERE = StepFormat("cohere", _reader(("<|START_ACTION|>",), "<|END_ACTION|>", COHERE_TEXT), _write_cohere)
LLAMA3_JSON = StepFormat("llama3_json", _reader((PYTHON_TAG,), ";", beginning="{"), _write_llama)
XLAM = StepFormat("xlam", _reader((PYTHON_TAG,), ";", beginning="["), _write_xlam)
