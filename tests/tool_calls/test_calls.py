"""What callers say of tools, in everyone's spelling."""

from __future__ import annotations

import functools
import json
import sys
from typing import Annotated, Any, Literal

import msgspec
import pydantic
import pytest

from aioengine.errors import InvalidRequest
from aioengine.tool_calls.calls import (
    MAX_TOOLS,
    MAX_TOOLS_BYTES,
    Tool,
    ToolChoice,
    read_tool_choice,
    read_tools,
    told_tools,
)

SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
WEATHER = Tool("weather", SCHEMA, "The weather.", strict=True)


@pytest.mark.parametrize(
    "given",
    [
        WEATHER,
        WEATHER.to_dict(),
        {"type": "function", "function": {"name": "weather", "description": "The weather.", "parameters": SCHEMA,
                                          "strict": True}},
        {"type": "function", "name": "weather", "description": "The weather.", "parameters": SCHEMA, "strict": True},
        {"name": "weather", "description": "The weather.", "input_schema": SCHEMA, "strict": True,
         "cache_control": {"type": "ephemeral"}},
        {"type": "custom", "name": "weather", "description": "The weather.", "input_schema": SCHEMA, "strict": True},
    ],
)  # fmt: skip
def test_a_tool_in_everyones_spelling(given: Any) -> None:
    assert read_tools([given]) == (WEATHER,)


def test_a_tool_without_a_schema_takes_no_arguments() -> None:
    for given in ({"name": "now"}, {"type": "function", "function": {"name": "now", "parameters": None}}):
        [tool] = read_tools([given])
        assert tool == Tool("now")
        assert tool.parameters == {"type": "object", "properties": {}, "additionalProperties": False}


def test_none_are_no_tools() -> None:
    assert read_tools(None) == read_tools([]) == ()


def test_a_tool_is_a_copy() -> None:
    schema: dict[str, Any] = {"type": "object", "properties": {}}
    [tool] = read_tools([{"name": "f", "parameters": schema}])
    schema["properties"]["x"] = {}
    assert tool.parameters["properties"] == {}


def test_what_a_chat_template_gets() -> None:
    assert WEATHER.as_openai() == {
        "type": "function",
        "function": {"name": "weather", "description": "The weather.", "parameters": SCHEMA, "strict": True},
    }
    assert Tool("now").as_openai()["function"] == {"name": "now", "parameters": Tool("now").parameters}


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"type": "function", "function": {"strict": None, "name": "f", "x": [1]}, "y": 2}, ...),
        ({"function": {"name": "f"}}, {"type": "function", "function": {"name": "f"}}),
        ({"type": "function", "strict": True, "parameters": SCHEMA, "name": "f"},
         {"type": "function", "function": {"strict": True, "parameters": SCHEMA, "name": "f"}}),
        ({"input_schema": SCHEMA, "name": "f", "cache_control": {"type": "ephemeral"}, "type": "custom"},
         {"type": "function", "function": {"parameters": SCHEMA, "name": "f"}}),
        (Tool("f", SCHEMA), {"type": "function", "function": {"name": "f", "parameters": SCHEMA}}),
        ({"name": "f", "x": object()}, {"type": "function", "function": {"name": "f", "x": "<object>"}}),
    ],
)  # fmt: skip
def test_templates_are_told_of_tools_as_they_were_given(given: Any, told: Any) -> None:
    told = given if told is ... else told
    (seen,) = told_tools([given], read_tools([given]))
    assert json.dumps(seen) == json.dumps(told), "its keys are in their order, too"
    assert told_tools(None, ()) == ()


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"name": "f"}, "must be a list"),
        ("f", "must be a list"),
        ([1], r"tools\[0\]=1: give a function"),
        ([{}], "name"),
        ([{"name": "a b"}], "name"),
        ([{"name": "a\n"}], "name"),
        ([{"name": ""}], "name"),
        ([{"name": "a" * 129}], "name"),
        ([{"name": 1}], "name"),
        ([{"name": "f", "description": 1}], "description"),
        ([{"name": "f", "parameters": []}], "parameters"),
        ([{"name": "f", "parameters": {"type": "string"}}], "type 'object'"),
        ([{"name": "f", "parameters": {"x": object()}}], "object"),
        ([{"name": "f", "description": "\ud800"}], r"tools\[0\]"),
        ([{"name": "f"}, {"name": "f"}], "another tool is called 'f'"),
        ([{"type": "web_search", "name": "f"}], "'web_search' are not supported"),
        ([{"type": "custom", "name": "f", "description": "Any text."}], "'custom' are not supported"),
        ([{"type": "custom", "custom": {"name": "f"}}], "'custom' are not supported"),
        ([lambda x: x], "'<lambda>' is no name: 1 to 128 of A-Z"),
        ([Tool("a b")], "'a b' is no name"),
        ([{"name": f"f{n}"} for n in range(MAX_TOOLS + 1)], "at most 128"),
        ([{"name": "f", "description": "x" * MAX_TOOLS_BYTES}], "at most 1,000,000"),
        ([lambda *args: 1], "no schema"),
    ],
)
def test_what_is_no_tool_is_refused(given: Any, message: str) -> None:
    with pytest.raises(InvalidRequest, match=message) as caught:
        read_tools(given)
    assert caught.value.param == "tools"


def test_a_schema_that_holds_itself_is_refused() -> None:
    schema: dict[str, Any] = {"type": "object"}
    schema["properties"] = schema
    with pytest.raises(InvalidRequest):
        read_tools([{"name": "f", "parameters": schema}])


class Place(msgspec.Struct):
    name: str


def weather(city: str, days: int = 1, unit: Literal["C", "F"] | None = None) -> str:
    """The weather of a city.

    For some days.
    """
    raise NotImplementedError


async def note(text: Annotated[str, msgspec.Meta(max_length=9)], more: list[str], other: Any) -> None:
    raise NotImplementedError


def visit(place: Place) -> None:
    raise NotImplementedError


@pytest.fixture(params=["pydantic", "msgspec"])
def library(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "msgspec":
        monkeypatch.setitem(sys.modules, "pydantic", None)
    return str(request.param)


def test_a_function_is_a_tool(library: str) -> None:
    first, second = read_tools([weather, note])
    assert (first.name, first.description) == ("weather", "The weather of a city.\n\nFor some days.")
    assert first.parameters["required"] == ["city"]
    assert first.parameters["properties"]["city"] == {"type": "string"}
    assert first.parameters["properties"]["days"] == {"type": "integer", "default": 1}
    assert first.parameters["additionalProperties"] is False
    assert second.description == ""
    assert second.parameters["properties"]["more"] == {"type": "array", "items": {"type": "string"}}
    assert second.parameters["properties"]["other"] == {}
    assert second.parameters["required"] == ["text", "more", "other"]


def test_a_function_with_a_struct_is_a_tool_by_msgspec(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pydantic", None)
    [tool] = read_tools([visit])
    assert tool.parameters["properties"]["place"] == {"$ref": "#/$defs/Place"}
    assert tool.parameters["$defs"]["Place"]["properties"] == {"name": {"type": "string"}}


TOOLS = (WEATHER, Tool("now"))


@pytest.mark.parametrize(
    ("given", "choice"),
    [
        (None, ToolChoice("auto")),
        ("auto", ToolChoice("auto")),
        ("none", ToolChoice("none")),
        ("required", ToolChoice("required")),
        ("now", ToolChoice("tool", ("now",))),
        (ToolChoice("tool", ("now",)), ToolChoice("tool", ("now",))),
        ({"type": "function", "function": {"name": "now"}}, ToolChoice("tool", ("now",))),
        ({"type": "function", "name": "now"}, ToolChoice("tool", ("now",))),
        ({"type": "auto", "disable_parallel_tool_use": True}, ToolChoice("auto")),
        ({"type": "any"}, ToolChoice("required")),
        ({"type": "tool", "name": "now"}, ToolChoice("tool", ("now",))),
        ({"type": "none"}, ToolChoice("none")),
        (
            {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "now"}]},
            ToolChoice("required", ("now",)),
        ),
        (
            {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [
                {"type": "function", "function": {"name": "now"}}]}},
            ToolChoice("auto", ("now",)),
        ),
        ({"type": "allowed_tools", "mode": "auto", "tools": []}, ToolChoice("none")),
    ],
)  # fmt: skip
def test_a_choice_in_everyones_spelling(given: Any, choice: ToolChoice) -> None:
    assert read_tool_choice(given, TOOLS) == choice


def test_without_tools_there_is_no_call() -> None:
    assert read_tool_choice(None, ()) == read_tool_choice("auto", ()) == ToolChoice("none")
    for given in ("required", {"type": "any"}):
        with pytest.raises(InvalidRequest, match="there are no tools"):
            read_tool_choice(given, ())


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("noww", "which is no tool; did you mean 'now'"),
        ("nope", "'nope', which is no tool; tools: weather, now"),
        (1, "not understood"),
        ({}, "not understood"),
        ({"type": 1}, "not understood"),
        ({"type": "function"}, "not understood"),
        ({"type": "function", "function": {"name": 1}}, "no tool"),
        ({"type": "tool", "name": "noww"}, "did you mean 'now'"),
        ({"type": "allowed_tools", "mode": "required", "tools": [{"name": "other"}]}, "no tool"),
        ({"type": "allowed_tools", "mode": 1, "tools": []}, "not understood"),
        ({"type": "allowed_tools", "tools": 1}, "not understood"),
        (["auto"], "not understood"),
    ],
)
def test_what_is_no_choice_is_refused(given: Any, message: str) -> None:
    with pytest.raises(InvalidRequest, match=message) as caught:
        read_tool_choice(given, TOOLS)
    assert caught.value.param == "tool_choice"


def test_a_choice_picks_its_tools() -> None:
    assert ToolChoice("auto").pick(TOOLS) == TOOLS
    assert ToolChoice("required", ("now",)).pick(TOOLS) == TOOLS[1:]
    assert ToolChoice("none").pick(TOOLS) == ()


def test_a_function_whose_arguments_have_pydantics_constraints_is_a_tool_that_keeps_them() -> None:
    def draw(number: Annotated[int, pydantic.Field(ge=100, le=102)]) -> None: ...

    [tool] = read_tools([draw])
    assert tool.parameters["properties"]["number"]["minimum"] == 100
    assert tool.parameters["properties"]["number"]["maximum"] == 102


def test_a_default_without_a_json_form_is_passed_over_in_silence() -> None:
    def keep(value: object = object()) -> None: ...

    [tool] = read_tools([keep])  # a warning is an error here
    assert "required" not in tool.parameters
    assert "default" not in tool.parameters["properties"]["value"]


def test_a_function_is_refused_for_its_name_by_what_names_are() -> None:
    def naïve(x: int) -> None: ...

    with pytest.raises(InvalidRequest, match="'naïve' is no name: 1 to 128 of A-Z"):
        read_tools([naïve])


def test_a_class_has_its_own_description_and_no_inherited_one() -> None:
    class Model(pydantic.BaseModel):
        x: int

    class Told(Place):
        """A place.

        With more.
        """

    assert [tool.description for tool in read_tools([Model, Place, Told])] == ["", "", "A place.\n\nWith more."]


def test_what_is_called_and_is_no_function_is_refused() -> None:
    class Called:
        def __call__(self) -> None: ...

    for given in (functools.partial(weather, "Rome"), Called()):
        with pytest.raises(InvalidRequest, match="give one, or a dict in OpenAI's form"):
            read_tools([given])
