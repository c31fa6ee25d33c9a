"""The demo model's chat template: tools, calls, results and thoughts, rendered by transformers and by the engine."""

from __future__ import annotations

import json
from typing import Any

import pytest
from transformers import AutoTokenizer

from aioengine.models.folder import DEMO_MODEL
from aioengine.text.chat_template import render_template
from aioengine.text.template_limits import TemplateLimits
from demo_model.grammar import END_OF_TEXT, Document, documents
from demo_model.template import CHAT_TEMPLATE, TEXT_MARKS, TOOLS_HEAD, TOOLS_TAIL

TOKENIZER = AutoTokenizer.from_pretrained(DEMO_MODEL)
CLOCK = {"type": "function", "function": {"name": "clock", "parameters": {"type": "object", "properties": {}}}}
ADD = {"type": "function", "function": {"name": "add", "description": "Adds ü.", "parameters": {"type": "object"}}}
HELLO = {"role": "user", "content": "Hello!"}
MAX_FIXED_TOKENS = 60


def call(name: str, arguments: Any) -> dict[str, Any]:
    return {"id": "1", "type": "function", "function": {"name": name, "arguments": arguments}}


def render(messages: list[dict[str, Any]], **variables: Any) -> str:
    """The prompt by transformers, which is the engine's, too."""
    variables = {"add_generation_prompt": False, **variables}
    rendered: str = TOKENIZER.apply_chat_template(messages, tokenize=False, **variables)
    tools = variables.pop("tools", None)
    with_tools = CHAT_TEMPLATE.replace("tools or []", f"{tools!r} or []") if tools else CHAT_TEMPLATE
    assert render_template(with_tools, messages, TemplateLimits(), **variables) == rendered
    return rendered


@pytest.fixture(scope="module")
def chats() -> list[Document]:
    return [document for document in documents("template", 150) if document.messages]


def test_the_shipped_template_is_the_recipes() -> None:
    assert TOKENIZER.chat_template == CHAT_TEMPLATE


def test_a_conversation_is_laid_out_as_it_was_learned(chats: list[Document]) -> None:
    assert any(document.messages[0]["role"] == "system" and document.tools for document in chats)
    assert any(document.messages[0]["role"] != "system" and document.tools for document in chats)
    assert any(document.is_thinking and document.tools for document in chats)
    for document in chats:
        messages, tools = list(document.messages), list(document.tools) or None
        if document.is_thinking:
            prompt = render(messages[:-1], tools=tools, add_generation_prompt=True, enable_thinking=True)
            assert prompt.endswith("<|im_start|>assistant\n<think>\n")
            assert document.text.startswith(prompt)
        else:
            assert render(messages, tools=tools) + END_OF_TEXT == document.text


def test_tools_stand_behind_the_system_text_or_alone() -> None:
    asked = [{"role": "system", "content": "Be kind."}, HELLO]
    tools = json.dumps(CLOCK) + "\n" + json.dumps(ADD, ensure_ascii=False)
    shown = f"{TOOLS_HEAD}\n{tools}\n{TOOLS_TAIL}<|im_end|>\n<|im_start|>user\nHello!<|im_end|>\n"
    assert render(asked, tools=[CLOCK, ADD]) == "<|im_start|>system\nBe kind.\n\n" + shown
    assert render(asked[1:], tools=[CLOCK, ADD]) == "<|im_start|>system\n" + shown
    assert len(TOKENIZER.tokenize(TOOLS_HEAD + TOOLS_TAIL)) < MAX_FIXED_TOKENS


@pytest.mark.parametrize("no_tools", [{}, {"tools": None}, {"tools": []}], ids=str)
def test_without_tools_and_thoughts_nothing_is_said_of_them(no_tools: dict[str, Any]) -> None:
    chat = [{"role": "system", "content": "Be kind."}, HELLO, {"role": "assistant", "content": "Hi."}, HELLO]
    expected = "".join(f"<|im_start|>{message['role']}\n{message['content']}<|im_end|>\n" for message in chat)
    assert render(chat, **no_tools) == expected
    assert render(chat, add_generation_prompt=True, **no_tools) == expected + "<|im_start|>assistant\n"


def test_thinking_opens_a_thought_and_earlier_thoughts_are_left_out() -> None:
    chat = [HELLO, {"role": "assistant", "content": "Hi.", "reasoning_content": "A greeting."}, HELLO]
    plain = render(chat, add_generation_prompt=True)
    assert "A greeting." not in plain
    assert render(chat, add_generation_prompt=True, enable_thinking=True) == plain + "<think>\n"
    assert render(chat, add_generation_prompt=True, enable_thinking=False) == plain
    assert render(chat, enable_thinking=True) == render(chat)


@pytest.mark.parametrize("content", [None, "", "I look."], ids=repr)
@pytest.mark.parametrize("arguments", [{"a": 1, "b": "ü"}, '{"a": 1, "b": "ü"}'], ids=["object", "text"])
def test_calls_stand_behind_the_content_if_there_is_any(content: str | None, arguments: Any) -> None:
    chat = [HELLO, {"role": "assistant", "content": content, "tool_calls": [call("add", arguments), call("clock", {})]}]
    written = (
        '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": "ü"}}\n</tool_call>\n'
        '<tool_call>\n{"name": "clock", "arguments": {}}\n</tool_call><|im_end|>\n'
    )
    begin = f"{content}\n" if content else ""
    assert render(chat).endswith(f"<|im_start|>assistant\n{begin}{written}")


def test_a_message_may_lack_its_content_and_have_no_calls() -> None:
    called = {"role": "assistant", "tool_calls": [call("clock", {})]}
    assert "<tool_call>" in TOKENIZER.apply_chat_template([HELLO, called], tokenize=False)
    for nothing in (None, []):
        message = {"role": "assistant", "content": "Hi.", "tool_calls": nothing}
        assert render([HELLO, message]) == render([HELLO, {"role": "assistant", "content": "Hi."}])


def test_results_that_follow_each_other_share_a_turn() -> None:
    first, second = ({"role": "tool", "tool_call_id": "1", "content": text} for text in ("15", "12:30"))
    one, other = (f"\n<tool_response>\n{text}\n</tool_response>" for text in ("15", "12:30"))
    assert render([HELLO, first, second]).endswith(f"\n<|im_start|>user{one}{other}<|im_end|>\n")
    assert render([first, HELLO, second]) == (
        f"<|im_start|>user{one}<|im_end|>\n<|im_start|>user\nHello!<|im_end|>\n<|im_start|>user{other}<|im_end|>\n"
    )


def test_the_marks_are_tokens_that_decoding_shows() -> None:
    ids = [TOKENIZER.convert_tokens_to_ids(mark) for mark in TEXT_MARKS]
    assert len(set(ids)) == len(TEXT_MARKS)
    assert not set(ids) & set(TOKENIZER.all_special_ids)
    for mark, token_id in zip(TEXT_MARKS, ids, strict=True):
        assert TOKENIZER.encode(f"a{mark}b", add_special_tokens=False).count(token_id) == 1
        assert TOKENIZER.decode([token_id], skip_special_tokens=True) == mark
