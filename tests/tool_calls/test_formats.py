"""Formats by name, and by what a chat template says."""

from __future__ import annotations

import re
from importlib.metadata import EntryPoint, EntryPoints
from typing import Any

import pytest

from aioengine.errors import ConfigError
from aioengine.tool_calls import formats
from aioengine.tool_calls.calls import Tool
from aioengine.tool_calls.formats import detect_tool_format, find_tool_format, register_tool_format
from aioengine.tool_calls.marked_json import HERMES

TEMPLATES = {
    "lfm2": "{{ '<|im_start|>system\\nList of tools: [' + tools | tojson }}",
    "olmo3": "{{ '<functions>' + tools | tojson }}{{ '<function_calls>' + name + '(' + args + ')</function_calls>' }}",
    "kimi_k2": "<|tool_calls_section_begin|><|tool_call_begin|>{{ id }}<|tool_call_argument_begin|>{{ arguments }}",
    "gemma4": "{{ '<|tool_call>call:' + function['name'] + '{' }}",
    "function_gemma": "<start_function_call>call:{{ name }}{",
    "seed_oss": "{{ '<seed:tool_call>\\n<function=' + name + '>\\n<parameter=' + key + '>' }}",
    "minimax_m2": "{% set begin = '<minimax:tool_call>' %}{{ begin + '<invoke name=\"' + name }}",
    "deepseek_v32": "{% set d = '｜DSML｜' %}{{ '<' + d + 'function_calls><' + d + 'invoke name=' }}",
    "deepseek_v4": "{% set d = '｜DSML｜' %}{{ '<' + d + 'tool_calls><' + d + 'invoke name=' }}",
    "glm45": "<tool_call>{function-name}\n<arg_key>{arg-key-1}</arg_key>\n<arg_value>{arg-value-1}</arg_value>",
    "glm47": "<tool_call>{function-name}<arg_key>{arg-key-1}</arg_key><arg_value>{arg-value-1}</arg_value>",
    "granite": "When a tool is required, respond only with <|tool_call|> followed by a JSON list of tools used.",
    "phi4_mini": "{{ '<|tool|>' + (tool['function'] | tojson) + '<|/tool|>' }}",
    "nemotron": "{{ '<TOOLCALL>[' }}{{ '{\"name\": \"' + call.name + '\", \"arguments\": ' }}{{ ']</TOOLCALL>' }}",
    "cohere": '<|START_ACTION|>[{"tool_call_id": "0", "tool_name": "{{ call.name }}", "parameters": {}}]',
    "xlam": '<|start_header_id|>[{"name": "tool_call_name", "arguments": {"arg1": "value1"}}, ...] "parameters": ',
    "hermes": "{{ '<tool_call>\\n{\"name\": \"' + call.name + '\", \"arguments\": ' + args + '}\\n</tool_call>' }}",
    "qwen3_coder": "{{ '<tool_call>\\n<function=' + name + '>\\n<parameter=' + key + '>' }} arguments",
    "llama3_json": "{{ '<|start_header_id|>assistant<|end_header_id|>' }}"
    "{{ '{\"name\": ' + name }}{{ '\"parameters\": ' }}{{ args | tojson }}",
    "pythonic": "{{ '<|start_header_id|>' }}You may write [func_name1(params_name1=params_value1), func_name2()]",
    "mistral": "{{ '[TOOL_CALLS][' }}{{ '{\"name\": ' }}{{ '\"arguments\"' }}{{ ']' }}",
    "mistral_args": "{{ '[TOOL_CALLS]' + name + '[ARGS]' + args }}",
    "deepseek_v3": "{{ '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>' + t + '<｜tool▁sep｜>' + n + '\\n```json' }}",
    "deepseek_v31": "{{ '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>' + name + '<｜tool▁sep｜>' + args }}",
    "harmony": "{{ '<|start|>assistant<|channel|>commentary to=functions.' + name + '<|message|>' }}",
}


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_template_tells_its_format(name: str) -> None:
    assert detect_tool_format(TEMPLATES[name]) == name
    assert find_tool_format(name).name == name


@pytest.mark.parametrize(
    "template",
    [
        "",
        "{{ '<|im_start|>' + message.role + message.content }}",
        TEMPLATES["hermes"] + TEMPLATES["mistral"],
        TEMPLATES["hermes"] + TEMPLATES["harmony"],
        "{{ '<|start_header_id|>' }}{{ message.content }}",
        "{{ '<tool_calls><tool_call>' }}{{ '</tool_call>' }} arguments",
        "{{ ']<]minimax[>[' + '<tool_call>' }}{{ '</tool_call>' }} arguments",
    ],
)
def test_a_template_that_leaves_a_doubt_tells_none(template: str) -> None:
    assert detect_tool_format(template) is None


def test_ids_of_mistrals_calls_are_nine_letters_and_digits() -> None:
    ids = iter(["call_0123456789abcdef", "a1B2c3D4e"])
    parser = find_tool_format("mistral").make_parser([Tool("f")], lambda: next(ids))
    parser.feed('[TOOL_CALLS][{"name": "f", "arguments": {}}, {"name": "f", "arguments": {}}]')
    first, second = (call.id for call in parser.calls)
    assert re.fullmatch(r"[A-Za-z0-9]{9}", first)
    assert second == "a1B2c3D4e"


def test_an_unknown_format_is_refused_with_the_nearest_one() -> None:
    with pytest.raises(ConfigError, match=r"did you mean 'hermes'\?; known: cohere, deepseek_v3"):
        find_tool_format("herms")


def test_a_format_can_be_registered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(formats, "_formats", dict(formats._formats))
    register_tool_format("mine", HERMES)
    assert find_tool_format("mine") is HERMES


def test_what_is_no_format_is_refused_where_it_is_made_known(monkeypatch: pytest.MonkeyPatch) -> None:
    known = EntryPoints([EntryPoint("theirs", "builtins:object", formats.ENTRY_POINT_GROUP)])
    monkeypatch.setattr(formats, "entry_points", lambda **wanted: known.select(**wanted))
    missing = "is no tool format: it has no name, keeps_special_tokens, make_parser, grammar"
    for make_known in (lambda: register_tool_format("mine", object()), lambda: find_tool_format("theirs")):  # type: ignore[arg-type]
        with pytest.raises(ConfigError, match=missing):
            make_known()


def test_a_format_may_be_an_entry_point(monkeypatch: pytest.MonkeyPatch) -> None:
    known = EntryPoints([EntryPoint("theirs", "aioengine.tool_calls.marked_json:HERMES", formats.ENTRY_POINT_GROUP)])

    def entry_points(**wanted: Any) -> EntryPoints:
        return known.select(**wanted)

    monkeypatch.setattr(formats, "_formats", dict(formats._formats))
    monkeypatch.setattr(formats, "entry_points", entry_points)
    assert find_tool_format("theirs") is HERMES
    with pytest.raises(ConfigError, match="theirs"):
        find_tool_format("their")
