"""Calls of the history, as chat templates write them for a model, are read as the same calls.

The templates are small ones, of the project's own, that write calls as those of the models do.
"""

from __future__ import annotations

import json
import random
from typing import Any

import pytest
from tool_calls.answers import counted_ids
from tool_calls.test_answers import cut

from aioengine.text.sandbox import compile_template
from aioengine.tool_calls.calls import Tool
from aioengine.tool_calls.formats import detect_tool_format, find_tool_format

OBJECTS = (
    "{% for call in calls %}{{ '{\"name\": \"' + call.name + '\", \"arguments\": ' + call.arguments | tojson + '}' }}"
)
LISTED = OBJECTS + "{% if not loop.last %}, {% endif %}{% endfor %}"
TEXT_OR_JSON = "{{ value if value is string else value | tojson }}"
EACH = "{% for call in calls %}"
PAIRS = "{% for key, value in call.arguments | items %}"
COMMA = "{% if not loop.last %}, {% endif %}"
PYTHON = "{{ call.name + '(' }}" + PAIRS + "{{ key + '=' + value | tojson }}" + COMMA + "{% endfor %})"
DSML = "{% set d = '｜DSML｜' %}{{ '\n\n<' + d + 'function_calls>\n' }}" + EACH
DSML += "{{ '<' + d + 'invoke name=\"' + call.name + '\">\n' }}" + PAIRS
DSML += "{{ '<' + d + 'parameter name=\"' + key + '\" string=\"' + ('true' if value is string else 'false') + '\">' }}"
DSML += TEXT_OR_JSON + "{{ '</' + d + 'parameter>\n' }}{% endfor %}{{ '</' + d + 'invoke>\n' }}{% endfor %}"
DSML += "{{ '</' + d + 'function_calls>' }}"
MARKED = '{% macro of(value) %}{% if value is string %}<|"|>{{ value }}<|"|>'
MARKED += "{% elif value is boolean %}{{ value | tojson }}"
MARKED += "{% elif value is mapping %}{ {%- for key, one in value | dictsort %}"
MARKED += "{{ key }}:{{ of(one) }}{% if not loop.last %},{% endif %}{% endfor -%} }"
MARKED += (
    "{% elif value is sequence %}[{% for one in value %}{{ of(one) }}{% if not loop.last %},{% endif %}{% endfor %}]"
)
MARKED += "{% else %}{{ value }}{% endif %}{% endmacro %}"
TEMPLATES = {
    "hermes": OBJECTS.replace("{{ '{", "{{ '<tool_call>\n{").replace("'}' }}", "'}\n</tool_call>' }}") + "{% endfor %}",
    "granite": "{# a JSON list #}<|tool_call|>[" + LISTED + "]",
    "phi4_mini": "{# <|tool|><|/tool|> #}<|tool_call|>[" + LISTED + "]<|/tool_call|>",
    "nemotron": "<TOOLCALL>[" + LISTED + "]</TOOLCALL>",
    "cohere": "<|START_ACTION|>[\n" + EACH + '    {"tool_call_id": "{{ loop.index0 }}", '
    '"tool_name": "{{ call.name }}", "parameters": {{ call.arguments | tojson }}}'
    "{% if not loop.last %},{% endif %}\n{% endfor %}]<|END_ACTION|>",
    "xlam": '{# [{"name": "tool_call_name", "arguments" #}[' + LISTED + "]",
    "qwen3_coder": EACH + "{{ '\n<tool_call>\n<function=' + call.name + '>\n' }}" + PAIRS
    + "{{ '<parameter=' + key + '>\n' }}" + TEXT_OR_JSON + "{{ '\n</parameter>\n' }}{% endfor %}"
    "{{ '</function>\n</tool_call>' }}{% endfor %}",
    "seed_oss": EACH + "{{ '\n<seed:tool_call>\n<function=' + call.name + '>\n' }}" + PAIRS
    + "{{ '<parameter=' + key + '>' + value | string + '</parameter>\n' }}{% endfor %}"
    "{{ '</function>\n</seed:tool_call>' }}{% endfor %}",
    "minimax_m2": "<minimax:tool_call>\n" + EACH + "{{ '<invoke name=\"' + call.name + '\">\n' }}" + PAIRS
    + "{{ '<parameter name=\"' + key + '\">' }}" + TEXT_OR_JSON + "{{ '</parameter>\n' }}{% endfor %}"
    "{{ '</invoke>\n' }}{% endfor %}</minimax:tool_call>",
    "deepseek_v32": DSML,
    "deepseek_v4": DSML.replace("function_calls", "tool_calls"),
    "glm45": EACH + "{{ '\n<tool_call>' + call.name + '\n' }}" + PAIRS
    + "{{ '<arg_key>' + key + '</arg_key>\n<arg_value>' }}" + TEXT_OR_JSON
    + "{{ '</arg_value>\n' }}{% endfor %}</tool_call>{% endfor %}",
    "pythonic": "{# [func_name1( #}[" + EACH + PYTHON + COMMA + "{% endfor %}]",
    "lfm2": "<|tool_call_start|>[" + EACH
    + PYTHON.replace("tojson", "tojson if value is string or value is mapping else key + '=' + value | string")
    + COMMA + "{% endfor %}]<|tool_call_end|>",
    "olmo3": "<function_calls>" + EACH + PYTHON + "{% if not loop.last %}{{ '\n' }}{% endif %}{% endfor %}"
    "</function_calls>",
    "deepseek_v31": "<｜tool▁calls▁begin｜>" + EACH + "{{ '<｜tool▁call▁begin｜>' + call.name + '<｜tool▁sep｜>' }}"
    "{{ call.arguments | tojson }}<｜tool▁call▁end｜>{% endfor %}<｜tool▁calls▁end｜>",
    "kimi_k2": "<|tool_calls_section_begin|>" + EACH + "{{ '<|tool_call_begin|>' + call.id }}"
    "<|tool_call_argument_begin|>{{ call.arguments | tojson }}<|tool_call_end|>{% endfor %}<|tool_calls_section_end|>",
    "gemma4": MARKED + EACH + "{{ '<|tool_call>call:' + call.name + of(call.arguments) }}<tool_call|>{% endfor %}",
}  # fmt: skip
TEMPLATES["glm47"] = TEMPLATES["glm45"].replace("\n", "")

TEXT = 'São "Paulo"\n  \\n <b>{x}[1], 東京 🗼: a=1 </b>'
TOOLS = [
    Tool("note", {"type": "object", "properties": {
        "text": {"type": "string"}, "count": {"type": "integer"}, "loud": {"type": "boolean"},
        "tags": {"type": "array", "items": {"type": "string"}}, "place": {"type": "object"},
    }}),
    Tool("clock"),
]  # fmt: skip
CALLS: list[list[tuple[str, dict[str, Any]]]] = [
    [("clock", {})],
    [("note", {"text": "12"}), ("clock", {}), ("note", {"text": "true", "loud": False})],
    [("note", {"text": TEXT, "count": -3, "loud": True, "tags": ["a b", "c,d"], "place": {"at": [1.5], "b": {}}})],
    [("note", {"text": "", "tags": [], "place": {}})],
]  # fmt: skip


def rendered(template: str, calls: list[tuple[str, dict[str, Any]]]) -> str:
    given = [
        {"name": name, "arguments": arguments, "id": f"functions.{name}:{number}"}
        for number, (name, arguments) in enumerate(calls)
    ]
    return compile_template(template).render(calls=given)


@pytest.mark.parametrize("name", TEMPLATES)
def test_calls_of_the_history_are_read_as_the_same_calls(name: str) -> None:
    assert detect_tool_format(TEMPLATES[name]) == name
    for seed, calls in enumerate(CALLS):
        text = f"I look.{rendered(TEMPLATES[name], calls)}"
        text = text.removeprefix("I look.") if name in ("pythonic", "xlam") else text
        for pieces in ([text], text, cut(text, random.Random(seed))):
            parser = find_tool_format(name).make_parser(TOOLS, counted_ids())
            content = "".join([*(parser.feed(piece).content for piece in pieces), parser.finish().content])
            assert [(call.name, json.loads(call.arguments)) for call in parser.calls] == calls, text
            assert content == ("" if name in ("pythonic", "xlam") else "I look.")
            if name == "kimi_k2":
                assert [call.id for call in parser.calls] == [
                    f"functions.{tool}:{number}" for number, (tool, _) in enumerate(calls)
                ]


def test_a_number_that_kimi_writes_twice_makes_no_two_calls_of_one_id() -> None:
    parser = find_tool_format("kimi_k2").make_parser(TOOLS, counted_ids())
    parser.feed(2 * rendered(TEMPLATES["kimi_k2"], [("clock", {})]))
    assert [call.id for call in parser.calls] == ["functions.clock:0", "100000000"]
