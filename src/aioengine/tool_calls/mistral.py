"""The calls of Mistral's models: a list, or since tokenizer version 11 each name before its arguments.

    [TOOL_CALLS][{"name": "get_weather", "arguments": {"city": "Paris"}}, {"name": "get_time", "arguments": {}}]
    [TOOL_CALLS]get_weather[ARGS]{"city": "Paris"}[TOOL_CALLS]get_time[ARGS]{}
    [TOOL_CALLS]get_time[CALL_ID]a1B2c3D4e[ARGS]{}

A model may leave ``[ARGS]`` away. Ids have nine letters and digits: the templates take no others. One that the model
writes is passed over.
"""

from __future__ import annotations

import hashlib

from aioengine.tool_calls.grammars import GrammarWriter, StepFormat, quoted
from aioengine.tool_calls.reading import MAX_KEYWORD_CHARS, Markers, NotACall, Reading, Steps

BEGIN, ARGS, CALL_ID = "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"
_BEGINS, _NAME_ENDS = Markers(BEGIN), Markers(ARGS, "{")


def _read(reading: Reading) -> Steps[None]:
    while (yield from reading.find_call(_BEGINS)):
        yield from reading.attempt(_read_calls(reading))


def _read_calls(reading: Reading) -> Steps[None]:
    if (first := (yield from reading.skip_space())) and first in "[{`":
        yield from reading.json_calls()
        return
    head = yield from reading.read_until(_NAME_ENDS, longest=MAX_KEYWORD_CHARS)
    if reading.marker != ARGS:
        reading.put_back()
    if (yield from reading.skip_space()) != "{":
        raise NotACall
    reading.begin_call(head.partition(CALL_ID)[0].strip())
    yield from reading.json_value(reading.add_arguments)
    reading.end_call()
    yield from reading.close()


def _with_short_ids(reading: Reading) -> Steps[None]:
    make_id = reading.make_id

    def make_short_id() -> str:
        long_id = make_id()
        is_short = len(long_id) == 9 and long_id.isascii() and long_id.isalnum()
        return long_id if is_short else hashlib.sha256(long_id.encode()).hexdigest()[:9]

    reading.make_id = make_short_id
    yield from _read(reading)


def _write_list(writer: GrammarWriter) -> str:
    return writer.finish_marked(BEGIN, writer.json_list("arguments"), between=None)


def _write_args(writer: GrammarWriter) -> str:
    call = writer.one_of(
        f"{quoted(tool.name)} {writer.marker(ARGS)} {writer.json(tool.parameters, tool)}" for tool in writer.tools
    )
    return writer.finish_marked(BEGIN, call, between="")


MISTRAL = StepFormat("mistral", _with_short_ids, _write_list, keeps_special_tokens=True)
MISTRAL_ARGS = StepFormat("mistral_args", _with_short_ids, _write_args, keeps_special_tokens=True)
