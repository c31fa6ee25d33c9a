"""Pieces of a chat become the messages that templates want."""

from __future__ import annotations

import json

import msgspec

from aioengine.server.anthropic_messages import MessageRequest, read_chat
from aioengine.server.decoding import read_messages
from aioengine.server.responses import ResponseRequest, read_input
from aioengine.text.chat_input import check_messages
from aioengine.text.chat_template import render_template
from aioengine.text.template_limits import TemplateLimits

HARMONY = (  # as the template of gpt-oss takes messages
    "{% for m in messages %}[{{ m.role }}]{% if m.tool_calls %}"
    "{% if m.content and m.thinking %}{{ raise_exception('not both') }}{% endif %}{{ m.content or m.thinking }}"
    "({{ m.tool_calls[0].function.arguments | tojson }}){% else %}{{ m.content }}{% endif %}{% endfor %}"
)


async def test_a_history_is_the_same_prompt_over_each_api() -> None:
    def function(number: int) -> dict[str, object]:
        return {
            "id": f"{number}",
            "type": "function",
            "function": {"name": "f", "arguments": json.dumps({"n": number})},
        }

    asked = {"role": "assistant", "content": "Let me look.", "reasoning_content": "Need it."}
    chat = [
        {"role": "user", "content": "Weather?"},
        {**asked, "tool_calls": [function(1), function(2)]},
        *({"role": "tool", "tool_call_id": f"{number}", "content": f"sun {number}"} for number in (1, 2)),
    ]
    blocks = [
        {"type": "thinking", "thinking": "Need it."},
        {"type": "text", "text": "Let me look."},
        *({"type": "tool_use", "id": f"{number}", "name": "f", "input": {"n": number}} for number in (1, 2)),
    ]
    results = [{"type": "tool_result", "tool_use_id": f"{number}", "content": f"sun {number}"} for number in (1, 2)]
    anthropics = [chat[0], {"role": "assistant", "content": blocks}, {"role": "user", "content": results}]
    items = [
        chat[0],
        {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "Need it."}]},
        {"role": "assistant", "content": [{"type": "output_text", "text": "Let me look."}]},
        *({"type": "function_call", "call_id": f"{n}", "name": "f", "arguments": json.dumps({"n": n})} for n in (1, 2)),
        *({"type": "function_call_output", "call_id": f"{n}", "output": f"sun {n}"} for n in (1, 2)),
    ]

    async def nothing_stored(_: str) -> object:
        raise AssertionError

    said = msgspec.json.decode(json.dumps({"messages": anthropics, "max_tokens": 1}), type=MessageRequest)
    asking = msgspec.json.decode(json.dumps({"input": items}), type=ResponseRequest)
    for messages in (
        read_messages(msgspec.Raw(json.dumps(chat).encode()), 9),
        read_chat(said, 9),
        await read_input(asking, 9, nothing_stored),  # type: ignore[arg-type]
    ):
        assert render_template(HARMONY, check_messages(messages), TemplateLimits(), add_generation_prompt=True) == (
            '[user]Weather?[assistant]Need it.\n\nLet me look.({"n": 1})[tool]sun 1[assistant]({"n": 2})[tool]sun 2'
        )
