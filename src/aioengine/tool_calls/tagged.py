"""Calls in tags, whose values are plain text that becomes JSON by the tool's schema.

Qwen3-Coder; Seed-OSS has ``<seed:tool_call>``, and values on the line of their tags:

    <tool_call>
    <function=write_file>
    <parameter=path>
    notes.txt
    </parameter>
    </function>
    </tool_call>

MiniMax M2 and DeepSeek V3.2 have all calls in one pair of markers, and DeepSeek marks which values are strings:

    <minimax:tool_call>
    <invoke name="write_file">
    <parameter name="path">notes.txt</parameter>
    </invoke>
    </minimax:tool_call>
    <｜DSML｜function_calls>
    <｜DSML｜invoke name="write_file">
    <｜DSML｜parameter name="path" string="true">notes.txt</｜DSML｜parameter>
    </｜DSML｜invoke>
    </｜DSML｜function_calls>

GLM 4.5 and 4.6; 4.7 writes it without newlines:

    <tool_call>write_file
    <arg_key>path</arg_key>
    <arg_value>notes.txt</arg_value>
    </tool_call>

A model may omit the outer markers where others follow them, and the ends of Qwen3-Coder's tags.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, NamedTuple

from aioengine.tool_calls.calls import Tool
from aioengine.tool_calls.grammars import TOKENS, GrammarWriter, StepFormat, properties_of, quoted, types_of
from aioengine.tool_calls.json_scanner import JsonScanner
from aioengine.tool_calls.reading import MAX_KEYWORD_CHARS, Markers, Reading, Steps
from aioengine.tool_calls.values import as_json, in_string, is_plain, write_arguments


class Tags(NamedTuple):
    """The texts of a format, as a model writes them; white space at their ends may be missing.

    Attributes:
        begin, end: the texts around a call, or around all calls of an answer if ``is_listed``.
        function, parameter: the texts before and after a name; the one before a function's name may be empty.
        json_parameter: the text after the name of a parameter whose value is not plain text, if it differs.
        between: the text between two calls, or their markers.
        next_lines: texts that end a value whose own end is missing.
    """

    begin: str
    end: str
    function: tuple[str, str]
    function_end: str
    parameter: tuple[str, str]
    parameter_end: str
    json_parameter: str = ""
    is_listed: bool = False
    between: str = "\n"
    next_lines: tuple[str, ...] = ()

    @property
    def value_ends(self) -> tuple[str, ...]:
        return (self.parameter_end.rstrip(), self.parameter_end.strip(), *self.next_lines)


class _TagFormat:
    """Reads and writes the calls of a format."""

    def __init__(self, tags: Tags) -> None:
        self._tags = tags
        self._begin, self._function, self._end = tags.begin.rstrip(), tags.function[0], tags.end
        self._begins = Markers(*filter(None, (self._begin, self._function)))
        self._function_end, self._parameter = tags.function_end.rstrip() or tags.end, tags.parameter[0]
        name_end = tags.function[1].rstrip()
        self._name_ends = Markers(name_end) if self._function else Markers("\n", self._parameter, tags.end)
        key_end, *self._before_value = tags.parameter[1].replace("><", ">\n<").split("\n")
        self._key_ends = Markers(*filter(None, (key_end, tags.json_parameter)))
        self._text_end = key_end if tags.json_parameter else ""
        self._value_ends, self._next_lines = Markers(*tags.value_ends), tags.next_lines

    def read(self, reading: Reading) -> Steps[None]:
        while marker := (yield from reading.find_call(self._begins)):
            yield from reading.attempt(self._read_call(reading, marker))

    def _read_call(self, reading: Reading, marker: str) -> Steps[None]:
        if marker == self._begin:
            if (first := (yield from reading.skip_space())) and first in "{[`":
                yield from reading.json_calls()
                yield from reading.close(self._end)
                return
            yield from reading.expect(self._function)
        name = (yield from reading.read_until(self._name_ends, longest=MAX_KEYWORD_CHARS)).strip()
        if not self._function and reading.marker != "\n":
            reading.put_back()
        reading.begin_call(name, "{")
        tool = reading.tools[name]
        properties = properties_of(tool)
        separator = ""
        while True:
            yield from reading.skip_space()
            if (yield from reading.literal(self._function_end)) or (yield from reading.literal(self._end)):
                break
            yield from reading.expect(self._parameter)
            key = yield from reading.read_until(self._key_ends, longest=MAX_KEYWORD_CHARS)
            is_text = reading.marker == self._text_end if self._text_end else None
            for text in self._before_value:
                if text:
                    yield from reading.skip_space()
                    yield from reading.expect(text)
                else:
                    yield from reading.literal("\n")
            head = f"{separator}{json.dumps(key, ensure_ascii=False)}: "
            yield from self._read_value(reading, head, properties.get(key, {}), tool, is_text)
            separator = ", "
        reading.add_arguments("}")
        reading.end_call()
        yield from reading.close(self._end)

    def _read_value(
        self, reading: Reading, head: str, schema: Mapping[str, Any], tool: Tool, is_text: bool | None
    ) -> Steps[None]:
        """Read a parameter's value; ``is_text``: whether its marker is a text's, None if the format marks no texts."""
        types = types_of(schema, tool.parameters)
        if (is_text and ("string" in types or not types)) or (is_text is None and is_plain(schema, types)):
            reading.add_arguments(f'{head}"')
            yield from reading.read_until(self._value_ends, give=lambda text: reading.add_arguments(in_string(text)))
            reading.add_arguments('"')
        else:
            text = yield from reading.read_until(self._value_ends)
            scanner = JsonScanner()
            scanner.scan(text + " ")
            while reading.is_strict and not (scanner.is_done or scanner.is_wrong):  # the tag was in a JSON string
                more = reading.marker + (yield from reading.read_until(self._value_ends))
                scanner.scan(more + " ")
                text += more
            reading.add_arguments(head + as_json(text, types))
        if reading.marker in self._next_lines:
            reading.put_back()

    def write(self, writer: GrammarWriter) -> str:
        tags = self._tags
        end = writer.marker(tags.function_end)
        call = writer.one_of(
            f"{writer.marker(tool.name.join(tags.function))} "
            f"{write_arguments(writer, tool, self._write_parameter)} {end}"
            for tool in writer.tools
        )
        calls = writer.several(call, "") if tags.is_listed else call
        text = f"{quoted(tags.begin[len(self._begin) :])} {calls} {writer.marker(tags.end)}"
        between = None if tags.is_listed else quoted(tags.between)
        return writer.finish_marked(self._begin, text, *filter(None, [self._function]), between=between)

    def _write_parameter(self, writer: GrammarWriter, name: str, schema: Mapping[str, Any], tool: Tool) -> str:
        tags, (before, after) = self._tags, self._tags.parameter
        is_text = is_plain(schema, types_of(schema, tool.parameters))
        head = f"{writer.marker(before)} {name} {writer.marker(after if is_text else tags.json_parameter or after)}"
        if is_text:
            return f"{head} {writer.plain_value(schema, tags.parameter_end, *tags.value_ends[1:])}"
        return f"{head} {writer.json(schema, tool)} {writer.marker(tags.parameter_end)}"


def _format(name: str, tags: Tags) -> StepFormat:
    markers = tuple(TOKENS.findall(" ".join((tags.begin, tags.end, *tags.parameter, tags.parameter_end))))
    made = _TagFormat(tags)
    return StepFormat(name, made.read, made.write, keeps_special_tokens=markers)


_QWEN3_CODER = Tags(
    "<tool_call>\n", "</tool_call>", ("<function=", ">\n"), "</function>\n",
    ("<parameter=", ">\n"), "\n</parameter>\n", next_lines=("\n<parameter=", "\n</function>"),
)  # fmt: skip
_DEEPSEEK_V32 = Tags(
    "<｜DSML｜function_calls>\n", "</｜DSML｜function_calls>",
    ('<｜DSML｜invoke name="', '">\n'), "</｜DSML｜invoke>\n",
    ('<｜DSML｜parameter name="', '" string="true">'), "</｜DSML｜parameter>\n", '" string="false">', is_listed=True,
)  # fmt: skip

TAGGED = (
    _format("qwen3_coder", _QWEN3_CODER),
    _format("seed_oss", _QWEN3_CODER._replace(
        begin="<seed:tool_call>\n", end="</seed:tool_call>", parameter=("<parameter=", ">"),
        parameter_end="</parameter>\n", next_lines=(),
    )),
    _format("minimax_m2", Tags(
        "<minimax:tool_call>\n", "</minimax:tool_call>", ('<invoke name="', '">\n'), "</invoke>\n",
        ('<parameter name="', '">'), "</parameter>\n", is_listed=True,
    )),
    _format("deepseek_v32", _DEEPSEEK_V32),
    _format("deepseek_v4", _DEEPSEEK_V32._replace(begin="<｜DSML｜tool_calls>\n", end="</｜DSML｜tool_calls>")),
    _format("glm45", Tags(
        "<tool_call>", "</tool_call>", ("", "\n"), "", ("<arg_key>", "</arg_key>\n<arg_value>"), "</arg_value>\n",
    )),
    _format("glm47", Tags(
        "<tool_call>", "</tool_call>", ("", ""), "", ("<arg_key>", "</arg_key><arg_value>"), "</arg_value>", between="",
    )),
)  # fmt: skip
