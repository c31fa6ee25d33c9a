"""Tools as their clients have them: Codex's in namespaces, with free text for input, run by a server; long names."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter
from server.scripted import WEATHER, scripted, sse_events

from aioengine.server.generation import warn_once
from aioengine.server.responses import ClientTool, arguments_of, input_of, read_response_tools

pytestmark = pytest.mark.asyncio(loop_scope="module")

EVENT: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)
GRAMMAR = {"type": "grammar", "syntax": "lark", "definition": "start: /.+/"}
PATCH = '*** Begin Patch\n+ "ä" \\ \u2028\n*** End Patch\n'
TOOLS: list[dict[str, Any]] = [
    {"type": "function", "name": "run", "description": "Runs it.", "parameters": WEATHER, "strict": False},
    {"type": "custom", "name": "apply_patch", "description": "Applies it.", "format": GRAMMAR},
    {
        "type": "namespace",
        "name": "agents",
        "description": "Of agents.",
        "tools": [{"type": "function", "name": "run", "parameters": WEATHER}, {"type": "custom", "name": "tell"}],
    },
    {"type": "web_search", "external_web_access": False},
    {"type": "web_search_preview_2025_03_11"},
    {"type": "local_shell"},
]


def call_of(name: str, **arguments: Any) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments}, ensure_ascii=False)}\n</tool_call>"


SAID = "\n".join((
    call_of("run", city="Rome"), call_of("agents__run", city="Paris"), call_of("apply_patch", input=PATCH),
    call_of("agents__tell", input="Hi"),
))  # fmt: skip
CALLS = [
    {"type": "function_call", "name": "run", "arguments": '{"city": "Rome"}'},
    {"type": "function_call", "name": "run", "namespace": "agents", "arguments": '{"city": "Paris"}'},
    {"type": "custom_tool_call", "name": "apply_patch", "input": PATCH},
    {"type": "custom_tool_call", "name": "tell", "namespace": "agents", "input": "Hi"},
]


def without_ids(items: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{key: value for key, value in item.items() if key not in ("id", "call_id", "status")} for item in items]


async def test_calls_come_back_as_their_client_can_dispatch_them(folder: Path) -> None:
    """Whole and streamed; sent back, the model finds its own calls, and their results."""
    asked: dict[str, Any] = {"model": "demo", "input": "Do it.", "tools": TOOLS, "max_output_tokens": 500}
    async with scripted(folder, SAID, SAID, "Done.") as served:
        whole = (await served.http.post("/v1/responses", json=asked)).json()
        Response.model_validate(whole)
        assert whole["status"] == "completed"
        assert whole["tools"] == TOOLS
        assert without_ids(whole["output"]) == CALLS
        stream = await served.http.post("/v1/responses", json={**asked, "input": "Do it!", "stream": True})
        events = [json.loads(data) for _, data in sse_events(stream.content)]
        for number, event in enumerate(events):
            EVENT.validate_python(event)
            assert event["sequence_number"] == number
        assert without_ids(events[-1]["response"]["output"]) == CALLS
        done = [event["item"] for event in events if event["type"] == "response.output_item.done"]
        assert done == events[-1]["response"]["output"]
        for place, item in enumerate(done):
            field = "input" if item["type"] == "custom_tool_call" else "arguments"
            mine = [event for event in events if event.get("output_index") == place]
            assert "".join(event["delta"] for event in mine if event["type"].endswith(".delta")) == item[field]
            assert [event[field] for event in mine if event["type"].endswith((f"{field}.done",))] == [item[field]]
        results = [
            {"type": f"{item['type']}_output", "call_id": item["call_id"], "output": f"result {place}"}
            for place, item in enumerate(done)
        ]
        user = {"role": "user", "content": "Do it!"}
        again = await served.http.post("/v1/responses", json={**asked, "input": [user, *done, *results]})
        assert again.json()["output"][0]["content"][0]["text"] == "Done."
        first, *_, last = served.script.prompts
    told, said = last.split("<|im_end|>\n<|im_start|>assistant\n")[0], last.split("<|im_start|>assistant\n")[1]
    assert told.startswith(first.split("<|im_end|>\n")[0])
    for name in ("run", "apply_patch", "agents__run", "agents__tell"):
        assert f'"name": "{name}"' in told
    assert "start: /.+/" in told
    assert "web_search" not in told
    assert '{"name": "agents__run", "arguments": {"city": "Paris"}}' in said
    for place, item in enumerate(done):
        assert f"<|im_start|>tool\nresult {place} (of {item['call_id']})" in said


async def test_tools_that_a_server_would_run_are_left_out_and_the_log_says_so(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    warn_once.cache_clear()
    async with scripted(folder, "Hi.", "Hello.") as served:
        with caplog.at_level(logging.WARNING, "aioengine.server"):
            for text in ("a", "b"):
                answer = await served.http.post("/v1/responses", json={"input": text, "tools": TOOLS[3:]})
                assert answer.status_code == 200, answer.text
        count = await served.http.post("/v1/responses/input_tokens", json={"input": "b", "tools": TOOLS})
        assert count.status_code == 200, count.text
    kinds = [record.getMessage().split()[5] for record in caplog.records]
    assert kinds == ["web_search,", "local_shell,"]


async def test_tools_may_come_as_an_item_of_the_input(folder: Path) -> None:
    said = call_of("agents__run", city="Paris")
    async with scripted(folder, said, said) as served:
        user = {"role": "user", "content": "Hi"}
        for own in (TOOLS[:2], [], None):
            items = [
                {"type": "additional_tools", "role": "developer", "tools": TOOLS[2:]},
                {**user, "content": f"{own}"},
            ]
            body = {"input": items, "tools": own}
            if own is None:
                body["input"] = [{"type": "additional_tools", "tools": []}, *items]
            if own != []:
                answer = (await served.http.post("/v1/responses", json=body)).json()
                assert answer["tools"] == [*(own or ()), *TOOLS[2:]]
                assert without_ids(answer["output"]) == [CALLS[1]]
            count = await served.http.post("/v1/responses/input_tokens", json=body)
            assert count.status_code == 200, count.text
        for wrong in ({"a": 1}, "a", "1", 5, [[]], [5], True):
            asked = {"input": [{"type": "additional_tools", "tools": wrong}, user]}
            answer = await served.http.post("/v1/responses", json=asked)
            assert (answer.status_code, answer.json()["error"]["param"]) == (400, "tools"), wrong


async def test_a_choice_names_a_tool_as_its_client_does(folder: Path) -> None:
    custom = call_of("agents__tell", input="Hi")
    async with scripted(folder, custom, custom) as served:
        one = {"type": "custom", "name": "tell", "namespace": "agents"}
        allowed = {"type": "allowed_tools", "mode": "required", "tools": [one, {"type": "web_search"}]}
        for place, choice in enumerate((one, allowed)):
            asked = {"input": f"{place}", "tools": TOOLS, "tool_choice": choice}
            answer = await served.http.post("/v1/responses", json=asked)
            assert without_ids(answer.json()["output"]) == CALLS[3:]
        refused = await served.http.post(
            "/v1/responses", json={"input": "a", "tools": TOOLS, "tool_choice": {"type": "custom", "name": "tell"}}
        )
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "tool_choice")


async def test_reasoning_and_long_names_come_back_in_chats_and_messages(folder: Path) -> None:
    """By both names of the reasoning; names of 128 characters, as those of plugins' tools."""
    name = "m" * 128
    said = f"<think>\nHm.\n</think>\n\n{call_of(name, city='Rome')}"
    user = {"role": "user", "content": "Hi"}
    function = {"name": name, "parameters": WEATHER}
    async with scripted(folder, said, "A.", "B.", said) as served:
        asked = {"messages": [user], "tools": [{"type": "function", "function": function}], "max_tokens": 500}
        answer = (await served.http.post("/v1/chat/completions", json=asked)).json()["choices"][0]["message"]
        assert (answer["reasoning"], answer["reasoning_content"]) == ("Hm.", "Hm.")
        for dropped in ("reasoning", "reasoning_content"):
            message = {key: value for key, value in answer.items() if key != dropped}
            result = {"role": "tool", "tool_call_id": answer["tool_calls"][0]["id"], "content": dropped}
            again = await served.http.post("/v1/chat/completions", json={**asked, "messages": [user, message, result]})
            assert again.status_code == 200, again.text
            assert "<think>Hm.</think>" in served.script.prompts[-1]
        asked = {"messages": [user], "tools": [{"name": name, "input_schema": WEATHER}], "max_tokens": 500}
        blocks = (await served.http.post("/v1/messages", json={"model": "demo", **asked, "system": "a"})).json()
        assert [block.get("name") for block in blocks["content"]] == [None, name]


@pytest.mark.parametrize("arguments", ['{"input": 5}', '{"text": "a"}', "[]", '{"input": "cut', ""])
async def test_what_is_no_input_is_told_as_the_model_has_written_it(arguments: str) -> None:
    assert input_of(arguments) == arguments


@pytest.mark.parametrize("text", ["", PATCH, '{"input": "a"}', "\x00\U0010ffff"])
async def test_an_input_is_what_the_model_is_told_of_it(text: str) -> None:
    assert input_of(arguments_of(text)) == text
    assert ClientTool("f", None, is_custom=True).fields(arguments_of(text)) == {"name": "f", "input": text}


@pytest.mark.parametrize(
    "tool", [1, None, {}, {"type": "zorp"}, {"type": "function"}, {"type": "custom", "name": 5}, {"type": ["mcp"]}]
)
async def test_what_is_no_tool_is_left_for_the_engine_to_refuse(tool: Any) -> None:
    assert read_response_tools([tool], "auto", lambda _: None).functions == [tool]


async def test_a_namespace_without_tools_is_refused(folder: Path) -> None:
    async with scripted(folder) as served:
        for inner in ({"type": "namespace", "name": "a"}, {"type": "namespace", "tools": []}):
            answer = await served.http.post("/v1/responses", json={"input": "Hi", "tools": [inner]})
            assert (answer.status_code, answer.json()["error"]["param"]) == (400, "tools")
        nested = {"type": "namespace", "name": "a", "tools": [{"type": "namespace", "name": "b", "tools": []}]}
        answer = await served.http.post("/v1/responses", json={"input": "Hi", "tools": [nested]})
        assert answer.status_code == 400
