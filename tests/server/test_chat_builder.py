"""Pieces of a chat become the messages that templates want."""

from __future__ import annotations

from aioengine.server.chat_builder import ChatBuilder


def test_what_the_assistant_says_in_one_go_is_one_message() -> None:
    chat = ChatBuilder()
    chat.say("system", "a")
    chat.say("system", "b")
    chat.say("user", "c")
    chat.say("user", "d")
    chat.think("e")
    chat.answer("f")
    chat.call("1", "g", "{}")
    chat.call("2", "h", "{}")
    chat.result("1", "i")
    chat.answer("j")
    chat.answer("k")
    chat.think("l")
    chat.call("3", "m", "{}")
    chat.answer("n")
    functions = [{"id": str(n), "type": "function", "function": {"name": name, "arguments": "{}"}}
                 for n, name in ((1, "g"), (2, "h"), (3, "m"))]  # fmt: skip
    assert chat.messages == [
        {"role": "system", "content": "a\n\nb"},
        {"role": "user", "content": "c"},
        {"role": "user", "content": "d"},
        {"role": "assistant", "content": "f", "reasoning_content": "e", "tool_calls": functions[:2]},
        {"role": "tool", "tool_call_id": "1", "content": "i"},
        {"role": "assistant", "content": "j"},
        {"role": "assistant", "content": "k"},
        {"role": "assistant", "content": "", "reasoning_content": "l", "tool_calls": functions[2:]},
        {"role": "assistant", "content": "n"},
    ]
