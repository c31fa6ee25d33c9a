"""Chat messages are checked, then rendered by the model's template in a sandbox."""

import json
from pathlib import Path
from typing import Any

import pytest
from text.conftest import chat_ids

from aioengine.errors import InvalidRequest
from aioengine.text.chat_input import check_messages
from aioengine.text.chat_template import render_template
from aioengine.text.tokenizer import Tokenizer

USER = {"role": "user", "content": "hi"}


def render(template: str, messages: object = (USER,), **named_tokens: str) -> str:
    checked = check_messages(messages)
    return render_template(template, checked, add_generation_prompt=True, named_tokens=named_tokens)


def test_a_chat_is_what_the_template_says(folder: Path) -> None:
    tokenizer = Tokenizer.load(folder)
    assert tokenizer.render_chat([USER]) == "<s><|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert tokenizer.render_chat([USER], add_generation_prompt=False) == "<s><|im_start|>user\nhi<|im_end|>\n"


def test_text_parts_become_one_text() -> None:
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    assert check_messages([{"role": "user", "content": parts}]) == [{"role": "user", "content": "one\ntwo"}]


def test_other_keys_reach_the_template_unless_they_are_none() -> None:
    message = {"role": "user", "content": "hi", "name": "Ada", "tool_calls": None}
    assert check_messages([message]) == [{"role": "user", "content": "hi", "name": "Ada"}]


def calling(arguments: Any, **fields: Any) -> dict[str, Any]:
    return {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": arguments}}], **fields}


@pytest.mark.parametrize("fields", [{}, {"content": None}, {"content": ""}])
def test_a_tool_call_needs_no_content(fields: dict[str, Any]) -> None:
    call = {"role": "assistant", **fields, "tool_calls": [{"function": {"name": "f"}}]}
    assert check_messages([call]) == [{"role": "assistant", "content": "", "tool_calls": call["tool_calls"]}]
    assert render("{{ messages[0].role + messages[0]['content'] }}", [call]) == "assistant"


FILE = {"file": '[{,\\"' * 90_000}
"""One value, full of what stands around values."""


@pytest.mark.parametrize(
    ("given", "seen"),
    [
        ('{"city": "Rome"}', {"city": "Rome"}),
        ("", {}),
        ({"city": "Rome"}, {"city": "Rome"}),
        ('{"city": "Ro', '{"city": "Ro'),
        ("[1]", "[1]"),
        ("[" * 100_000, "[" * 100_000),
        (json.dumps(FILE), FILE),
        ('{"a": [%s1]}' % ("1," * 5000), '{"a": [%s1]}' % ("1," * 5000)),
        ('{"a": "' + '"' * 20_000, '{"a": "' + '"' * 20_000),
        (None, None),
    ],
    ids=lambda value: str(value)[:12],
)
def test_a_calls_arguments_are_what_templates_expect(given: Any, seen: Any) -> None:
    message = calling(given)
    (checked,) = check_messages([message])
    assert checked["tool_calls"] == [{"function": {"name": "f", "arguments": seen}}]
    assert message == calling(given), "the caller's own stay as they are"


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
        ([{"role": "user", "content": None}], "message 0 has no content"),
        ([{"role": "user", "content": 5}], "has an int as content"),
        ([{"role": "user", "content": ["hi"]}], "content part"),
        ([{"role": "user", "content": [{"type": "image_url", "image_url": "x"}]}], "content part"),
        ([{"role": "user", "content": [{"type": "text"}]}], "content part"),
    ],
)
def test_malformed_messages_are_the_callers_fault(messages: Any, problem: str) -> None:
    with pytest.raises(InvalidRequest, match=problem) as raised:
        check_messages(messages)
    assert raised.value.param == "prompt"


def test_what_the_template_refuses_is_the_callers_fault(folder: Path) -> None:
    with pytest.raises(InvalidRequest, match="no such role") as raised:
        chat_ids(Tokenizer.load(folder), [{"role": "forbidden", "content": "hi"}])
    assert raised.value.param == "prompt"


@pytest.mark.parametrize(
    "template", ["{% if %}", "{{ messages[0].content + 1 }}", "{{ messages[7].content.x }}", "{{ 1 / 0 }}"]
)
def test_a_template_that_fails_is_an_invalid_request(template: str) -> None:
    with pytest.raises(InvalidRequest, match="chat template does not take"):
        render(template)


def test_a_template_cannot_change_the_callers_messages() -> None:
    messages = [dict(USER)]
    with pytest.raises(InvalidRequest):
        render("{{ messages[0].update({'content': 'x'}) }}", messages)
    assert messages == [USER]


def test_a_template_sees_the_named_tokens() -> None:
    assert render("{{ bos_token }}{{ eos_token is defined }}", bos_token="<s>") == "<s>False"
