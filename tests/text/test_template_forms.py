"""A template is given messages in the form that it reads, whatever form the client has given them in.

The templates are shaped as those of well-known families.
"""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from aioengine.errors import InvalidRequest
from aioengine.text.chat_input import check_messages
from aioengine.text.chat_template import render_template
from aioengine.text.template_forms import TemplateForms
from aioengine.text.template_limits import TemplateLimits

USER = {"role": "user", "content": "hi"}
ROME = {"city": "Rome"}


def parts(*texts: str) -> list[dict[str, str]]:
    return [{"type": "text", "text": text} for text in texts]


def call(arguments: Any, call_id: str = "call00001") -> dict[str, Any]:
    return {"id": call_id, "type": "function", "function": {"name": "f", "arguments": arguments}}


def asking(*calls: dict[str, Any], **fields: Any) -> dict[str, Any]:
    return {"role": "assistant", "tool_calls": list(calls), **fields}


def result(text: Any = "sun", call_id: str = "call00001") -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": call_id, "content": text}


def render(template: str, *messages: dict[str, Any], **variables: Any) -> str:
    checked = check_messages(list(messages))
    return render_template(template, checked, TemplateLimits(), add_generation_prompt=False, **variables)


# Contents


PLAIN = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
ADDED = "{% for m in messages %}{{ '[' + m.role + ']' + m.content | trim }}{% endfor %}"
PARTS = "{% for m in messages %}[{{ m.role }}]{% for p in m.content | selectattr('type', 'equalto', 'text') %}<{{ p.text }}>{% endfor %}{% endfor %}"  # noqa: E501
FIRST = "{% for m in messages %}[{{ m.role }}]{{ m.content[0]['text'] }}{% endfor %}"
BOTH = (
    "{% for m in messages %}[{{ m.role }}]{% if m.content is string %}{{ m.content }}"
    "{% else %}{% for p in m.content %}<{{ p.text }}>{% endfor %}{% endif %}{% endfor %}"
)
OF_USERS = (
    "{% for m in messages %}[{{ m.role }}]{% if m.role == 'user' %}{% for p in m.content %}<{{ p.text }}>{% endfor %}"
    "{% else %}{{ m.content | tojson }}{% endif %}{% endfor %}"
)


@pytest.mark.parametrize(
    ("template", "text", "one", "two"),
    [
        (PLAIN, "a", "a", "a\nb"),
        (ADDED, "a", "a", "a\nb"),
        (PARTS, "<a>", "<a>", "<a><b>"),
        (FIRST, "a", "a", "a\nb"),
        (BOTH, "a", "<a>", "<a><b>"),
    ],
    ids=["plain", "added", "parts", "first part", "both"],
)
@pytest.mark.parametrize("role", ["user", "system", "assistant", "tool", "critic"])
def test_contents_are_texts_or_parts_as_the_template_reads_them(
    template: str, text: str, one: str, two: str, role: str
) -> None:
    for given, expected in (("a", text), (parts("a"), one), (parts("a", "b"), two)):
        assert render(template, {"role": role, "content": given}) == f"[{role}]{expected}"


def test_the_forms_of_two_roles_may_differ() -> None:
    chat = [{"role": "system", "content": parts("a", "b")}, {"role": "user", "content": "c"}, result(parts("d", "e"))]
    assert render(OF_USERS, *chat) == '[system]"a\\nb"[user]<c>[tool]"d\\ne"'


def test_a_parts_template_has_an_answer_that_is_continued() -> None:
    chat = [USER, {"role": "assistant", "content": parts("so", "it is ")}]
    assert render(PARTS, *chat, continue_final_message=True) == "[user]<hi>[assistant]<so><it is "
    assert render(ADDED, *chat, continue_final_message=True) == "[user]hi[assistant]so\nit is"


def test_a_developer_is_the_system_to_templates_that_know_none() -> None:
    told = {"role": "developer", "content": "a"}
    assert render(PLAIN + "{# for developers #}", told) == "[system]a"
    assert render(PLAIN + "{% if messages[0].role == 'developer' %}!{% endif %}", told) == "[developer]a!"


# Calls


HEAD = "{% for m in messages %}[{{ m.role }}]{% if m.tool_calls %}"
REST = "{% else %}{{ m.content }}{% endif %}{% endfor %}"
EACH = "{% for c in m.tool_calls %}({{ c.function.name }}"
ADDS = HEAD + EACH + "{{ ' ' + c.function.arguments }}){% endfor %}" + REST
ITERATES = (
    HEAD + EACH + "{% for k, v in c.function.arguments.items() %} {{ k }}={{ v }}{% endfor %}){% endfor %}" + REST
)
DUMPS = HEAD + EACH + " {{ c.function.arguments | tojson }}){% endfor %}" + REST
WRITES = HEAD + EACH + " {{ c.function.arguments }}){% endfor %}" + REST
EITHER = (
    HEAD + EACH + " {{ c.function.arguments if c.function.arguments is string else c.function.arguments | tojson }})"
    "{% endfor %}" + REST
)
OTHERWISE = ITERATES.replace(
    "{% for k, v in", "{% if c.function.arguments is string %} {{ c.function.arguments }}{% else %}{% for k, v in"
).replace("){% endfor %}", "{% endif %}){% endfor %}")
IS_NONE = ADDS.replace("if m.tool_calls", "if m.role == 'assistant' and m.content is none")
IS_ABSENT = ADDS.replace("if m.tool_calls", "if 'content' not in m")


@pytest.mark.parametrize(
    ("template", "of_object", "of_text"),
    [
        (ADDS, '{"city": "Rome"}', '{"city":"Rome"}'),
        (WRITES, '{"city": "Rome"}', '{"city":"Rome"}'),
        (ITERATES, "city=Rome", "city=Rome"),
        (DUMPS, '{"city": "Rome"}', '{"city": "Rome"}'),
        (EITHER, '{"city": "Rome"}', '{"city":"Rome"}'),
        (OTHERWISE, "city=Rome", "city=Rome"),
        (IS_NONE, '{"city": "Rome"}', '{"city":"Rome"}'),
        (IS_ABSENT, '{"city": "Rome"}', '{"city":"Rome"}'),
    ],
    ids=["adds", "writes", "iterates", "dumps", "either", "otherwise", "is none", "is absent"],
)
def test_arguments_are_objects_or_texts_as_the_template_reads_them(template: str, of_object: str, of_text: str) -> None:
    for content in ({}, {"content": None}, {"content": ""}):
        for arguments, expected in ((ROME, of_object), ('{"city":"Rome"}', of_text)):
            seen = render(template, USER, asking(call(arguments), **content), result())
            assert seen == f"[user]hi[assistant](f {expected})[tool]sun"
        twice = render(template, USER, asking(call(json.dumps('{"city": "Rome"}')), **content), result())
        assert twice == f"[user]hi[assistant](f {of_object})[tool]sun"


def test_a_content_beside_calls_is_kept_where_the_template_reads_one_of_them() -> None:
    said = asking(call('{"city": "Rome"}'), content="Let me look.")
    for template in (IS_NONE, IS_ABSENT):
        assert render(template, USER, said) == '[user]hi[assistant]Let me look.[assistant](f {"city": "Rome"})'


ONE_CALL = (
    HEAD + "{% if m.tool_calls | length != 1 %}{{ raise_exception('one call at once') }}{% endif %}"
    "({{ m.tool_calls[0].function.arguments | tojson }})" + REST
)
HARMONY = (
    HEAD + "{% if m.content and m.thinking %}{{ raise_exception('content or thinking') }}{% endif %}"
    "{% if m.content or m.thinking %}<{{ m.content or m.thinking }}>{% endif %}"
    "({{ m.tool_calls[0].function.arguments | tojson }})" + REST
)


@pytest.mark.parametrize("template", [ONE_CALL, HARMONY])
def test_several_calls_are_messages_of_their_own_with_their_results_where_the_template_reads_one(template: str) -> None:
    two = asking(call({"n": 1}, "a"), call('{"n": 2}', "b"))
    expected = '[user]hi[assistant]({"n": 1})[tool]one[assistant]({"n": 2})[tool]two'
    assert render(template, USER, two, result("two", "b"), result("one", "a")) == expected
    assert render(template, USER, two, result("one", "?"), result("two", "?"), USER) == expected + "[user]hi"
    assert render(template, USER, two) == '[user]hi[assistant]({"n": 1})[assistant]({"n": 2})'


@pytest.mark.parametrize("name", ["reasoning_content", "reasoning", "thinking"])
def test_reasoning_and_a_preamble_are_one_where_the_template_reads_one(name: str) -> None:
    both = asking(call(ROME), content="Let me look.", **{name: "Need it."})
    seen = render(HARMONY, USER, both, result())
    assert seen == '[user]hi[assistant]<Need it.\n\nLet me look.>({"city": "Rome"})[tool]sun'


NINE = (
    HEAD + "{% for c in m.tool_calls %}{% if c.id | length != 9 %}{{ raise_exception('nine!') }}{% endif %}"
    "{{ c.id }}{{ c.function.arguments | tojson }}{% endfor %}"
    "{% elif m.role == 'tool' %}{{ m.tool_call_id }}" + REST
)
NAMED = (
    HEAD
    + "{% for c in m.tool_calls %}({{ c.id }} {{ c.function.arguments | tojson }}){% endfor %}"
    + ("{% elif m.role == 'tool' %}{{ m.tool_call_id }}" + REST)
)


def test_ids_are_such_as_the_template_takes() -> None:
    own = "call_0123456789abcdef01234567"
    seen = render(NINE, USER, asking(call(ROME, own)), result(call_id=own))
    match = re.fullmatch(r'\[user\]hi\[assistant\]([a-z0-9]{9})\{"city": "Rome"\}\[tool\]([a-z0-9]{9})', seen)
    assert match is not None
    assert match[1] == match[2]
    assert "abcdef123" in render(NINE, USER, asking(call(ROME, "abcdef123")))
    seen = render(NAMED, USER, asking(call({}, own), call({}, "functions.f:1")), result(call_id=own), asking(call({})))
    assert (
        seen
        == "[user]hi[assistant](functions.f:0 {})(functions.f:1 {})[tool]functions.f:0[assistant](functions.f:2 {})"
    )


def test_calls_that_the_template_does_not_know_are_left_to_it() -> None:
    assert render(PLAIN, USER, asking(call("no JSON"))) == "[user]hi[assistant]"
    for calls in (1, "f", ["f"], [None], [{}], [{"function": "f"}]):
        assert render(PLAIN, USER, {"role": "assistant", "tool_calls": calls}) == "[user]hi[assistant]"
    odd = [{"function": {"arguments": []}, "id": []}, {"function": {"name": "f", "arguments": [1]}, "id": 5}]
    assert render(NINE.replace("c.id | length", "9"), USER, asking(*odd)) == "[user]hi[assistant][][]5[1]"
    assert render(ONE_CALL, USER, asking(*odd[1:], *odd[1:]), result()) == (
        "[user]hi[assistant]([1])[tool]sun[assistant]([1])"
    )


# Tools


TOOLS = "{% for t in tools or [] %}{{ t | tojson }}{% endfor %}" + PLAIN
OF_FIELDS = (
    "{% for t in tools or [] %}{{ t.function.name + ' ' + t.function.description }} "
    "{{ t.function.parameters.properties | tojson }}{% endfor %}" + PLAIN
)


def test_a_template_is_told_of_tools_as_given_but_for_what_it_cannot_do_without() -> None:
    bare: Any = {"type": "function", "function": {"strict": True, "name": "f"}}
    assert (
        render(TOOLS, USER, tools=[bare]) == '{"type": "function", "function": {"strict": true, "name": "f"}}[user]hi'
    )
    assert render(OF_FIELDS, USER, tools=[bare]) == "f  {}[user]hi"
    assert render(PLAIN, USER, tools=[bare, {"name": "f"}]) == "[user]hi"


# What it costs


def test_a_template_is_asked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    forms = TemplateForms(ADDS, {})
    chat = check_messages([USER, asking(call(ROME)), result()])
    forms.fit(chat, has_tools=True)
    monkeypatch.setattr(TemplateForms, "_written", lambda *_: pytest.fail("it is known"))
    assert forms.fit(chat, has_tools=True)[1]["tool_calls"] == [call('{"city": "Rome"}')]


def test_a_template_is_not_asked_about_roles_of_a_clients_making(monkeypatch: pytest.MonkeyPatch) -> None:
    forms = TemplateForms(PARTS, {})
    forms.fit([USER], has_tools=False)
    monkeypatch.setattr(TemplateForms, "_written", lambda *_: pytest.fail("it is asked"))
    for number in range(1000):
        (fitted,) = forms.fit([{"role": f"role{number}", "content": "hi"}], has_tools=False)
        assert fitted["content"] == parts("hi")


def test_a_template_that_takes_long_over_the_small_chats_is_stopped() -> None:
    slow = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
    template = "{% if messages[0].content != 'hello' %}" + slow + "{% endif %}"
    chat = [{"role": "user", "content": "hello"}]
    for _ in range(2):
        with pytest.raises(InvalidRequest, match="it takes longer than"):
            render_template(template, chat, TemplateLimits(0.05), add_generation_prompt=False)
