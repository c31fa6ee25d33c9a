"""Chat messages are checked, then rendered by the model's template in a sandbox."""

import copy
import dataclasses
import json
from enum import IntEnum
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import pydantic
import pytest

from aioengine.errors import InvalidRequest, ModelLoadError
from aioengine.text.chat_input import check_messages, copy_messages, open_messages, parse_arguments
from aioengine.text.chat_template import render_template
from aioengine.text.loading import load_tokenizer
from aioengine.text.template_limits import TemplateLimits
from aioengine.text.tokenizer import Tokenizer
from aioengine.tool_calls.calls import ToolCall

USER = {"role": "user", "content": "hi"}


def render(template: str, messages: object = (USER,), **named_tokens: str) -> str:
    checked = check_messages(messages)
    return render_template(template, checked, TemplateLimits(), add_generation_prompt=True, **named_tokens)


@pytest.mark.parametrize(
    ("given", "checked"),
    [
        *(
            ({"content": given}, {"content": seen})
            for given, seen in (
                (["one", {"text": "two"}], [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]),
                (
                    [{"type": "input_text", "text": "in"}, {"type": "output_text", "text": "out", "annotations": []}],
                    [{"type": "text", "text": "in"}, {"type": "text", "text": "out"}],
                ),
                ([{"type": "refusal", "refusal": "no"}], [{"type": "text", "text": "no"}]),
                (None, ""),
                ([], []),
            )
        ),
        ({"content": None, "refusal": "no"}, {"content": "no", "refusal": "no"}),
        ({"content": "hi", "tool_calls": []}, {"content": "hi"}),
        ({"content": "hi", "name": "Ada", "tool_calls": None}, {"content": "hi", "name": "Ada"}),
        *(
            ({**content, "tool_calls": [{"function": {"name": "f"}}]}, {"content": "", "tool_calls": ...})
            for content in ({}, {"content": None}, {"content": ""})
        ),
    ],
)
def test_a_message_is_a_role_and_a_text_and_what_else_is_in_it(given: dict[str, Any], checked: dict[str, Any]) -> None:
    checked = {name: given[name] if value is ... else value for name, value in checked.items()}
    assert check_messages([{"role": "user", **given}]) == [{"role": "user", **checked}]


def test_messages_are_copied_as_plain_data() -> None:
    class Text(str):
        pass

    class Number(IntEnum):
        ONE = 1

    @dataclasses.dataclass
    class Call:
        id: int

    class Model:
        def model_dump(self) -> dict[str, Any]:
            return {"a": 1}

    inner = ["x"]
    message = {"content": Text("hi"), "n": np.int64(3), "calls": (Call(Number.ONE), Model()), "of": {1}, "l": inner}
    [copied] = copy_messages([message])
    assert type(copied["content"]) is str
    assert type(copied["calls"][0]["id"]) is int
    inner.append(inner)  # type: ignore[arg-type]
    assert copied == {"content": "hi", "n": 3, "calls": ({"id": 1}, {"a": 1}), "of": "<set>", "l": ["x"]}
    with pytest.raises(InvalidRequest, match="deeper than 32 levels"):
        copy_messages([message])


def calling(arguments: Any, **fields: Any) -> dict[str, Any]:
    return {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": arguments}}], **fields}


FILE: Any = {"file": '[{,\\"' * 90_000}
"""One value, full of what stands around values."""


@pytest.mark.parametrize("role", ["assistant", "tool"])
def test_an_answer_or_a_result_needs_no_content(role: str) -> None:
    assert check_messages([{"role": role}]) == [{"role": role, "content": ""}]


def test_thinking_among_an_answers_parts_is_its_reasoning() -> None:
    text = {"type": "text", "text": "hi"}
    thoughts: list[Any] = [{"type": "thinking", "thinking": "a"}, {"type": "thinking", "thinking": [text, "b"]}]
    (checked,) = check_messages([{"role": "assistant", "content": [*thoughts, text]}])
    assert checked == {"role": "assistant", "content": [text], "reasoning_content": "a\nhi\nb"}
    (checked,) = check_messages([{"role": "assistant", "content": thoughts[:1], "reasoning": "c"}])
    assert checked == {"role": "assistant", "content": [], "reasoning": "c"}


@pytest.mark.parametrize(
    ("given", "seen"),
    [
        ('{"city": "Rome"}', {"city": "Rome"}),
        ("", {}),
        ('"{\\"city\\": \\"Rome\\"}"', {"city": "Rome"}),
        ('{"city": "Ro', None),
        ("[1]", None),
        ("[" * 100_000, None),
        (json.dumps(FILE), FILE),
        ('{"a": [%s1]}' % ("1," * 5000), None),
        ('{"a": "' + '"' * 20_000, None),
    ],
    ids=lambda value: str(value)[:12],
)
def test_a_calls_arguments_are_decoded_where_that_is_quick(given: str, seen: Any) -> None:
    assert parse_arguments(given) == seen


@pytest.mark.parametrize("calls", [1, "f", ["f"], [None], [{}], [{"function": "f"}], ({"function": {}},)])
def test_calls_of_another_shape_are_the_templates_business(calls: Any) -> None:
    (checked,) = check_messages([{"role": "assistant", "tool_calls": calls}])
    assert list(checked["tool_calls"]) == list(calls) if isinstance(calls, tuple) else calls == checked["tool_calls"]


# As Qwen2.5's and Llama 3.1's templates render a call, and as one does that knows none.
CALLS = (
    "{% for c in messages[-1].tool_calls %}{% set c = c.function %}"
    '{"name": "{{ c.name }}", "arguments": {{ c.arguments | tojson }}}{% endfor %}'
)
ARGUMENTS = "{% for c in messages[-1].tool_calls %}{{ c.function.arguments.items() | list }}{% endfor %}"


def test_a_call_is_rendered_as_models_were_trained() -> None:
    assert render(CALLS, [USER, calling('{"city": "Rome"}')]) == '{"name": "f", "arguments": {"city": "Rome"}}'
    assert render(ARGUMENTS, [USER, calling('{"city": "Rome"}')]) == "[('city', 'Rome')]"
    with pytest.raises(InvalidRequest, match="leave tool_calls and tool messages out"):
        render(ARGUMENTS, [USER, calling("no JSON")])


@pytest.mark.parametrize(
    ("messages", "problem"),
    [
        ("hi", "non-empty list"),
        ([], "non-empty list"),
        (None, "non-empty list"),
        ([USER, "hi"], "message 1 is a str"),
        ([{"content": "hi"}], "message 0 has no role"),
        ([{"role": 1, "content": "hi"}], "message 0 has no role"),
        ([{"role": "user"}], "message 0 has no content"),
        ([{"role": "system"}], "message 0 has no content"),
        ([{"role": "user", "content": 5}], "has an int as content"),
        ([{"role": "user", "content": [5]}], "content part that is an int"),
        ([{"role": "user", "content": [{"type": "image_url", "image_url": "x"}]}], "content part of type 'image_url'"),
        ([{"role": "user", "content": [{"type": ["text"], "text": "x"}]}], "content part that is a dict"),
        ([{"role": "user", "content": [{"type": "thinking", "thinking": "x"}]}], "content part of type 'thinking'"),
        ([{"role": "user", "content": [{"type": "text"}]}], "content part"),
    ],
)
def test_malformed_messages_are_the_callers_fault(messages: Any, problem: str) -> None:
    with pytest.raises(InvalidRequest, match=problem) as raised:
        check_messages(messages)
    assert raised.value.param == "prompt"


@pytest.mark.parametrize(
    ("template", "problem"),
    [
        ("{{ messages[0].content + 1 }}", "can only concatenate"),
        ("{{ messages[7].content.x }}", "has no element 7"),
        ("{{ 1 / 0 }}", "division by zero"),
        ("{{ raise_exception('no such role') }}", "no such role"),
        ("{{ messages[0].update({'content': 'x'}) }}", "attribute 'update' of 'dict' object is unsafe"),
    ],
)
def test_a_template_that_fails_is_an_invalid_request(template: str, problem: str) -> None:
    with pytest.raises(InvalidRequest, match=f"chat template does not take these messages: .*{problem}") as raised:
        render(template)
    assert raised.value.param == "prompt"


@pytest.mark.parametrize("template", ["{% for x %}", "{% if %}", "{{ 1 | no_such_filter }}", "{{ 1 " + "+ 1" * 90_000])
def test_a_template_that_does_not_parse_is_the_fault_of_who_gave_it(template: str, qwen_folder: Path) -> None:
    tokenizer = Tokenizer(load_tokenizer(qwen_folder))
    theirs = copy.copy(tokenizer)
    theirs.chat_templates = {"default": template}
    with pytest.raises(ModelLoadError, match=r"the model's chat template does not parse: .*; give another"):
        theirs.render_chat([USER])
    with pytest.raises(InvalidRequest, match="chat template does not parse: ") as raised:
        tokenizer.render_chat([USER], chat_template=template)
    assert raised.value.param == "chat_template"


def test_a_template_sees_the_named_tokens() -> None:
    assert render("{{ bos_token }}{{ eos_token is defined }}", bos_token="<s>") == "<s>False"


def test_lists_of_objects_are_chats() -> None:
    class Message(pydantic.BaseModel):
        role: str
        content: str

    @dataclasses.dataclass
    class Plain:
        role: str
        content: str

    for kind in (Message, Plain, MappingProxyType):
        given = [kind({**USER}) if kind is MappingProxyType else kind(**USER)]  # type: ignore[operator]
        assert open_messages(given) == open_messages(tuple(given)) == [USER]
    for other in ("hi", [1, 2], [USER], [[USER]], [], np.zeros(3), [Message], None):
        assert open_messages(other) is other


def test_an_answers_calls_are_a_messages() -> None:
    (asked,) = check_messages(copy_messages([{"role": "assistant", "tool_calls": [ToolCall("1", "f", "{}")]}]))
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    assert asked == {"role": "assistant", "content": "", "tool_calls": [call]}


def test_langchains_messages_are_openais() -> None:
    messages = pytest.importorskip("langchain_core.messages")
    call = {"name": "f", "args": {"city": "Rome"}, "id": "1", "type": "tool_call"}
    chat = [
        messages.HumanMessage("hi"),
        messages.AIMessage("", tool_calls=[call]),
        messages.ToolMessage("sun", tool_call_id="1"),
    ]
    human, asked, told = check_messages(open_messages(chat))
    assert (human, told) == (USER, {"role": "tool", "content": "sun", "tool_call_id": "1"})
    assert asked["tool_calls"][0]["function"] == {"name": "f", "arguments": '{"city": "Rome"}'}
