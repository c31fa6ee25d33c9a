"""Tools whose schemas refer to themselves, double, or are large: grammars and readers that are linear in them."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest
from llguidance import LLMatcher

from aioengine import InvalidRequest
from aioengine.structured.normalize import normalized
from aioengine.tool_calls.calls import ToolChoice, read_tools
from aioengine.tool_calls.formats import find_tool_format
from aioengine.tool_calls.grammars import types_of
from aioengine.tool_calls.reading import NotACall
from aioengine.tool_calls.values import MAX_LITERAL_CHARS, json_of_literal

FORMATS = ("qwen3_coder", "pythonic", "hermes")
BOTH = {"anyOf": [{"$ref": "#/$defs/A"}, {"$ref": "#/$defs/A"}]}
X = {"$ref": "#/properties/x"}
JSON = [{"type": name} for name in ("string", "number")]
SHAPES: dict[str, Any] = {
    "itself": {"properties": {"x": {"$ref": "#/$defs/A"}}, "$defs": {"A": BOTH}},
    "itself, or a text": {"properties": {"x": {"anyOf": [X, X, {"type": "string"}]}}},
    "one that doubles": {
        "properties": {"x": {"$ref": "#/$defs/d0"}},
        "$defs": {
            **{f"d{n}": {"anyOf": [{"$ref": f"#/$defs/d{n + 1}"}] * 2} for n in range(100)},
            "d100": {"type": "string"},
        },
    },
    "any JSON": {
        "properties": {"x": {"$ref": "#/$defs/J"}},
        "$defs": {"J": {"anyOf": [*JSON, {"type": "array", "items": {"$ref": "#/$defs/J"}}]}},
    },
    "a circle": {
        "properties": {"x": {"$ref": "#/$defs/A"}},
        "$defs": {"A": {"$ref": "#/$defs/B"}, "B": {"$ref": "#/$defs/A"}},
    },
}
TYPES = {"itself": set(), "itself, or a text": {"string"}, "one that doubles": {"string"}, "a circle": set()}
TYPES["any JSON"] = {"string", "number", "array"}


def grammar_of(name: str, parameters: dict[str, Any]) -> str:
    tools = read_tools([{"type": "function", "function": {"name": "f", "parameters": parameters}}])
    return find_tool_format(name).grammar(tools, ToolChoice("required"), parallel=True)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", FORMATS)
def test_a_tool_that_refers_to_itself_has_a_grammar(name: str, shape: str) -> None:
    schema = SHAPES[shape]
    assert len(grammar_of(name, schema)) < 20 * len(json.dumps(schema))
    assert types_of(schema["properties"]["x"], schema) == TYPES[shape]


@pytest.mark.parametrize("name", FORMATS)
def test_arguments_that_refer_to_one_definition_share_it(name: str) -> None:
    values = [f"value {number}" for number in range(2000)]
    schema = {"properties": {f"p{n}": {"$ref": "#/$defs/A"} for n in range(300)}, "$defs": {"A": {"enum": values}}}
    assert len(grammar_of(name, schema)) < 2.5 * len(json.dumps(schema))


def test_what_an_argument_refers_to_is_all_that_is_written_of_its_tool() -> None:
    schema = {
        "properties": {"x": {"items": {"$ref": "#/$defs/A"}}, "y": {"enum": [f"{n}" for n in range(500)]}},
        "$defs": {"A": {"anyOf": [{"$ref": "#/$defs/A"}, {"$ref": "#/$defs/B~1C"}]}, "B/C": {"type": "null"}},
    }
    [text] = [line for line in grammar_of("pythonic", schema).splitlines() if '"items"' in line]
    assert json.loads(text.split("%json ")[1])["$defs"] == {
        "0": {"anyOf": [{"$ref": "#/$defs/0"}, {"$ref": "#/$defs/1"}]},
        "1": {"type": "null"},
    }


@pytest.mark.parametrize("definition", ["Box<int>", "Größe", "a b", "a/b~c"])
@pytest.mark.parametrize("name", FORMATS)
def test_definitions_of_any_name_are_found(name: str, definition: str) -> None:
    reference = {"$ref": f"#/$defs/{definition.replace('~', '~0').replace('/', '~1')}"}
    schema = {
        "properties": {"x": reference, "y": {"type": "array", "items": reference}},
        "$defs": {definition: {"type": "integer"}},
    }
    text = grammar_of(name, normalized(schema))
    assert not LLMatcher.validate_grammar(text)


@pytest.mark.parametrize("required", [True, 5, "x", {"x": 1}, [["x"]], [{}, "x"]])
def test_names_of_required_arguments_that_are_none_are_passed_over(required: Any) -> None:
    assert grammar_of("qwen3_coder", {"properties": {"x": {"type": "integer"}}, "required": required})


@pytest.mark.parametrize("name", ["qwen3_coder", "pythonic"])
def test_a_grammar_that_repeats_a_large_definition_is_refused_before_it_is_written(name: str) -> None:
    values = [f"value {number}" for number in range(4000)]
    options = [{"anyOf": [{"$ref": "#/$defs/A"}, {"const": n}]} for n in range(1000)]
    schema = {"properties": {f"p{n}": option for n, option in enumerate(options)}, "$defs": {"A": {"enum": values}}}
    began = time.thread_time()
    with pytest.raises(InvalidRequest, match="their grammar has more than"):
        grammar_of(name, schema)
    assert time.thread_time() - began < 1


@pytest.mark.parametrize(
    "text",
    [
        '["' + '\\"' * 30_000,
        "['" + "\\'" * 30_000,
        '["' + "\\" * 60_000,
        '"' * 60_000,
        "[" + "'a' " * 15_000,
        "{" * 60_000,
        "-" * 60_000,
        "[" + "1," * 30_000,
        "(" + "a\n" * 30_000,
    ],
    ids=lambda text: text[:4],
)
def test_a_literal_is_read_in_time_that_grows_with_its_length_alone(text: str) -> None:
    assert len(text) <= MAX_LITERAL_CHARS
    began = time.thread_time()
    for end in ("", "]", '"]', "']"):
        try:
            json_of_literal(text + end)
        except NotACall:
            pass
    assert time.thread_time() - began < 2


def test_a_long_literal_is_read_as_json_or_not_at_all() -> None:
    long = "[" + ", ".join(["1"] * MAX_LITERAL_CHARS) + "]"
    assert json_of_literal(long) == long
    with pytest.raises(NotACall):
        json_of_literal(long.replace("1", "True"))
