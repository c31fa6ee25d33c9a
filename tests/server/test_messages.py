"""Anthropic's own client, unchanged, over ``/v1/messages``: answers, events, blocks sent back, counts, errors."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import anthropic
import httpx
import pytest
from anthropic.types import (
    Message,
    MessageCountTokensParams,
    MessageTokensCount,
    RawMessageStreamEvent,
    message_create_params,
)
from anthropic.types.beta import message_create_params as beta_params
from nightly import nightly
from pydantic import BaseModel, TypeAdapter
from server.conftest import Adapter, Served, all_ended, both_adapters, on_both_adapters, serving, serving_fake
from server.scripted import CALL, LOOKS_UP, SOME_JSON, TOKENIZER, WEATHER, anthropic_client, scripted, sse_events
from waiting import until

from aioengine import Engine
from aioengine.server import ServerConfig
from aioengine.server.anthropic_messages import Block, MessageRequest, _input_of
from aioengine.server.schema import known_names
from aioengine.tool_calls.calls import ToolCall

pytestmark = pytest.mark.asyncio(loop_scope="module")

EVENT: TypeAdapter[Any] = TypeAdapter(RawMessageStreamEvent)
HELLO: list[Any] = [{"role": "user", "content": "Hello! Who are you?"}]
ASKED: dict[str, Any] = {"model": "demo", "max_tokens": 60, "extra_body": {"temperature": 0}}
TOOL: dict[str, Any] = {"name": "get_weather", "description": "Tells it.", "input_schema": WEATHER}


class Fox(BaseModel):
    name: str
    age: int


def named(**fields: Any) -> ServerConfig:
    return ServerConfig(served_model_name=("demo",), **fields)


def text_of(message: Message) -> str:
    return "".join(block.text for block in message.content if block.type == "text")


@pytest.fixture
def config() -> ServerConfig:
    return ServerConfig(api_keys=("a-secret-key",), served_model_name=("demo",))


# On the bundled model


@on_both_adapters
async def test_a_message_is_what_the_engine_says(engine: Engine, served: Served) -> None:
    async with all_ended(), anthropic_client(served.url) as client:
        sampling = {"temperature": 0.7, "top_p": 0.9, "top_k": 50, "seed": 3}
        message = await client.messages.create(model="demo", messages=HELLO, max_tokens=60, extra_body=sampling)
    expected = await engine.generate(HELLO, max_tokens=60, **sampling)  # type: ignore[arg-type]
    assert text_of(message) == expected.text
    assert (message.role, message.model, message.stop_reason, message.stop_sequence) == (
        "assistant", "demo", "end_turn", None,
    )  # fmt: skip
    usage = message.usage
    assert usage.input_tokens + (usage.cache_read_input_tokens or 0) == len(expected.prompt_token_ids)
    assert usage.output_tokens == len(expected.outputs[0].token_ids)
    assert message._request_id
    Message.model_validate_json(message.model_dump_json(exclude_unset=True))


@on_both_adapters
async def test_why_it_ended_is_told(served: Served) -> None:
    async with all_ended(), anthropic_client(served.url) as client:
        cut = await client.messages.create(**{**ASKED, "max_tokens": 3}, messages=HELLO)
        stopped = await client.messages.create(**ASKED, messages=HELLO, stop_sequences=["nothing", " tiny"])
        async with client.messages.stream(**ASKED, messages=HELLO, stop_sequences=[" tiny"]) as stream:
            streamed = await stream.get_final_message()
    assert (cut.stop_reason, cut.usage.output_tokens) == ("max_tokens", 3)
    for message in (stopped, streamed):
        assert (message.stop_reason, message.stop_sequence) == ("stop_sequence", " tiny")
        assert text_of(message) == "I am Pip, the"


@on_both_adapters
async def test_an_answer_that_was_begun_is_gone_on_with(engine: Engine, served: Served) -> None:
    begun = [*HELLO, {"role": "assistant", "content": [{"type": "text", "text": "I am Pip, the"}]}]
    async with all_ended(), anthropic_client(served.url) as client:
        message = await client.messages.create(**ASKED, messages=begun)
    expected = await engine.generate(
        [*HELLO, {"role": "assistant", "content": "I am Pip, the"}],
        temperature=0,
        max_tokens=60,
        chat_template_kwargs={"continue_final_message": True},
    )
    assert text_of(message) == expected.text
    assert not text_of(message).startswith("I am")


@on_both_adapters
async def test_tokens_are_counted_as_they_are_used(served: Served) -> None:
    asked: dict[str, Any] = {"model": "demo", "messages": HELLO, "system": [{"type": "text", "text": "Be brief."}]}
    async with all_ended(), anthropic_client(served.url) as client:
        count = await client.messages.count_tokens(**asked)
        usage = (await client.messages.create(**asked, max_tokens=1)).usage
    assert count.input_tokens == usage.input_tokens + (usage.cache_read_input_tokens or 0)
    MessageTokensCount.model_validate_json(count.model_dump_json())


@on_both_adapters
async def test_a_text_has_the_shape_that_was_asked_for(served: Served) -> None:
    messages: list[Any] = [{"role": "user", "content": "A fox, please."}]
    async with all_ended(), anthropic_client(served.url) as client:
        parsed = await client.messages.parse(**ASKED, messages=messages, output_format=Fox)
        older = {"output_format": {"type": "json_schema", "schema": Fox.model_json_schema()}}
        asked = {**ASKED, "messages": messages, "extra_body": {**ASKED["extra_body"], **older}}
        Fox.model_validate_json(text_of(await client.messages.create(**asked)), strict=True)
        async with client.messages.stream(**ASKED, messages=messages, output_format=Fox) as stream:
            final = await stream.get_final_message()
    assert isinstance(parsed.parsed_output, Fox)
    assert final.parsed_output == parsed.parsed_output


async def test_a_forced_call_is_one(folder: Path) -> None:
    tool = json.loads(json.dumps(TOOL))
    tool["input_schema"]["properties"]["city"]["maxLength"] = 8
    async with (
        Engine(seed=1, kv_cache_memory_bytes=2**26, tool_format="hermes") as engine,
        serving(engine, "starlette") as served,
        anthropic_client(served.url) as client,
    ):
        for choice in ({"type": "tool", "name": "get_weather"}, {"type": "any", "disable_parallel_tool_use": True}):
            asked: dict[str, Any] = {**ASKED, "messages": HELLO, "tools": [tool], "tool_choice": choice}
            message = await client.messages.create(**asked)
            (use,) = message.content
            assert use.type == "tool_use"
            assert set(use.input) == {"city"}
            assert message.stop_reason == "tool_use"
            async with client.messages.stream(**asked) as stream:
                final = await stream.get_final_message()
            (streamed,) = final.content
            assert (streamed.type, streamed.input) == ("tool_use", use.input)  # type: ignore[union-attr]


# What the model is scripted to say


EVENTS: list[tuple[str, int | None, Any]] = [
    ("message_start", None, "message"),
    ("ping", None, None),
    ("content_block_start", 0, {"type": "thinking", "thinking": "", "signature": ""}),
    ("content_block_delta", 0, ("thinking_delta", "I look it up.")),
    ("content_block_delta", 0, ("signature_delta", "aioengine")),
    ("content_block_stop", 0, None),
    ("content_block_start", 1, {"type": "text", "text": ""}),
    ("content_block_delta", 1, ("text_delta", "Let me see.")),
    ("content_block_stop", 1, None),
    ("content_block_start", 2, {"type": "tool_use", "id": "ID", "name": "get_weather", "input": {}}),
    ("content_block_delta", 2, ("input_json_delta", '{"city": "Paris"}')),
    ("content_block_stop", 2, None),
    ("content_block_start", 3, {"type": "tool_use", "id": "ID", "name": "get_weather", "input": {}}),
    ("content_block_delta", 3, ("input_json_delta", '{"city": "Rome"}')),
    ("content_block_stop", 3, None),
    ("message_delta", None, {"stop_reason": "tool_use", "stop_sequence": None}),
    ("message_stop", None, None),
]
"""Of `LOOKS_UP`: each event's type, its block's place, and what it says; deltas of one kind put together."""


def table_of(events: list[Any]) -> list[tuple[str, int | None, Any]]:
    rows: list[tuple[str, int | None, Any]] = []
    for event in events:
        said: Any = event.get("content_block") or event.get("delta") or event.get("message", {}).get("type")
        if event["type"] == "content_block_start" and "id" in said:
            said = {**said, "id": "ID"}
        if event["type"] == "content_block_delta":
            kind, text = said.values()
            if rows[-1][0] == event["type"] and rows[-1][2][0] == kind:
                text = rows.pop()[2][1] + text
            said = (kind, text)
        rows.append((event["type"], event.get("index"), said))
    return rows


@both_adapters
async def test_the_events_are_those_of_the_table(folder: Path, adapter: Adapter) -> None:
    asked = {"messages": HELLO, "max_tokens": 500, "tools": [TOOL], "stream": True}
    async with scripted(folder, LOOKS_UP, adapter=adapter) as served:
        answer = await served.http.post("/v1/messages", json=asked)
    assert answer.headers["request-id"] == answer.headers["x-request-id"]
    told = sse_events(answer.content)
    events = [json.loads(data) for _, data in told]
    assert [event["type"] for event in events] == [name for name, _ in told]
    assert table_of(events) == EVENTS
    for name, data in told:
        if name != "ping":
            EVENT.validate_json(data)
    started, ended = events[0]["message"], events[-2]
    assert (started["content"], started["stop_reason"], started["usage"]["output_tokens"]) == ([], None, 0)
    assert started["usage"]["input_tokens"] == ended["usage"]["input_tokens"]
    thinking = ended["usage"]["output_tokens_details"]["thinking_tokens"]
    assert 0 < thinking < ended["usage"]["output_tokens"]


async def test_a_whole_message_is_the_one_of_a_stream(folder: Path) -> None:
    async with scripted(folder, LOOKS_UP) as served:
        asked: dict[str, Any] = {"model": "demo", "max_tokens": 500, "messages": HELLO, "tools": [TOOL]}
        whole = await served.anthropic.messages.create(**asked)
        async with served.anthropic.messages.stream(**asked) as stream:
            final = await stream.get_final_message()
    kept = []
    for message in (whole, final):
        blocks = [block.model_dump(exclude_none=True) for block in message.content]
        kept.append([{**block, "id": "ID"} for block in blocks])
    assert kept[0] == kept[1]
    assert [block["type"] for block in kept[0]] == ["thinking", "text", "tool_use", "tool_use"]
    assert [block["input"] for block in kept[0][2:]] == [{"city": "Paris"}, {"city": "Rome"}]


async def test_uses_and_results_go_back_to_the_model(folder: Path) -> None:
    async with scripted(folder, LOOKS_UP, "Sunny.") as served:
        asked: dict[str, Any] = {"model": "demo", "max_tokens": 500, "tools": [TOOL], "system": "Look it up."}
        first = await served.anthropic.messages.create(**asked, messages=[{"role": "user", "content": "Weather?"}])
        uses = [block for block in first.content if block.type == "tool_use"]
        results: list[Any] = [
            {"type": "tool_result", "tool_use_id": uses[0].id, "content": "sunny"},
            {"type": "tool_result", "tool_use_id": uses[1].id, "content": [{"type": "text", "text": "no such town"}],
             "is_error": True},
            {"type": "text", "text": "And now?"},
        ]  # fmt: skip
        messages: list[Any] = [
            {"role": "user", "content": "Weather?"},
            {"role": "assistant", "content": first.content},
            {"role": "user", "content": results},
        ]
        counted = await served.anthropic.messages.count_tokens(
            **{key: value for key, value in asked.items() if key != "max_tokens"}, messages=messages
        )
        second = await served.anthropic.messages.create(**asked, messages=messages)
        tools, prompt = served.script.prompts[-1].split("<|im_end|>\n", 1)
    assert text_of(second) == "Sunny."
    assert counted.input_tokens == second.usage.input_tokens + (second.usage.cache_read_input_tokens or 0)
    assert '"description": "Tells it."' in tools
    assert prompt == (
        "<|im_start|>system\nLook it up.<|im_end|>\n<|im_start|>user\nWeather?<|im_end|>\n"
        "<|im_start|>assistant\n<think>I look it up.</think>Let me see."
        '<tool_call>{"name": "get_weather", "arguments": {"city": "Paris"}}</tool_call>'
        '<tool_call>{"name": "get_weather", "arguments": {"city": "Rome"}}</tool_call><|im_end|>\n'
        f"<|im_start|>tool\nsunny (of {uses[0].id})<|im_end|>\n"
        f"<|im_start|>tool\nError: no such town (of {uses[1].id})<|im_end|>\n"
        "<|im_start|>user\nAnd now?<|im_end|>\n<|im_start|>assistant\n"
    )


async def test_a_tool_runner_that_offers_threads_sends_the_whole_conversation(folder: Path) -> None:
    @anthropic.beta_async_tool(name="get_weather", input_schema=TOOL["input_schema"])
    async def weather(city: str) -> str:
        """Tells it."""
        return f"sunny in {city}"

    async with scripted(folder, CALL % "Paris", "Sunny.") as served:
        given: list[Any] = [{"role": "user", "content": "Weather?"}]
        runner = served.anthropic.beta.messages.tool_runner(
            model="demo", max_tokens=500, tools=[weather], messages=given
        )
        answer = await runner.until_done()
        prompt = served.script.prompts[-1]
        thread = {"type": "continue", "previous_message_id": "msg-1"}
        refused = await served.http.post("/v1/messages", json={"messages": HELLO, "max_tokens": 5, "thread": thread})
    assert [block.text for block in answer.content if block.type == "text"] == ["Sunny."]
    assert "Weather?" in prompt
    assert "sunny in Paris" in prompt
    assert "thread is not supported" in check_error(refused, 400, "invalid_request_error")
    assert refused.json()["error"]["details"] == {"error_code": "thread_unsupported_request", "unsupported": ["thread"]}


async def test_thinking_is_told_to_the_template(folder: Path) -> None:
    async with scripted(folder, "A.", "B.", "C.", "D.") as served:
        create = served.anthropic.messages.create
        asked: dict[str, Any] = {"model": "demo", "max_tokens": 50, "messages": HELLO}
        await create(**asked)
        await create(**asked, thinking={"type": "disabled"})
        await create(**asked, thinking={"type": "adaptive"}, output_config={"effort": "low"})
        await create(**asked, extra_body={"chat_template_kwargs": {"enable_thinking": 7}})
        told = [prompt.split("<|im_end|>\n")[1] for prompt in served.script.prompts]
    assert [text.removesuffix("<|im_start|>assistant\n") for text in told] == [
        "",
        "enable_thinking: False\n",
        "enable_thinking: True\nreasoning_effort: low\n",
        "enable_thinking: 7\n",
    ]


async def test_thinking_has_the_budget_that_was_given(folder: Path) -> None:
    asked: dict[str, Any] = {"model": "demo", "max_tokens": 400, "messages": HELLO}
    async with scripted(folder, "<think>\n" + "So " * 100, "Yes.") as served:
        message = await served.anthropic.messages.create(**asked, thinking={"type": "enabled", "budget_tokens": 20})
        thinking = message.content[0]
        assert thinking.type == "thinking"
        assert 0 < thinking.thinking.count("So") <= 20
        assert "enable_thinking: True" in served.script.prompts[0]
    async with scripted(folder / "2", reasoning_format="none") as served:
        with pytest.raises(anthropic.BadRequestError, match="reasoning_format"):
            await served.anthropic.messages.create(**asked, thinking={"type": "enabled", "budget_tokens": 20})


async def test_a_use_that_is_cut_ends_the_message_at_its_limit(folder: Path) -> None:
    half = TOKENIZER.encode((CALL % "Paris").partition("ris")[0], add_special_tokens=False)
    async with scripted(folder, CALL % "Paris") as served:
        asked: dict[str, Any] = {"model": "demo", "messages": HELLO, "tools": [TOOL], "max_tokens": len(half)}
        whole = await served.anthropic.messages.create(**asked)
        async with served.anthropic.messages.stream(**asked) as stream:
            final = await stream.get_final_message()
    assert (whole.stop_reason, whole.content) == ("max_tokens", [])
    assert final.stop_reason == "max_tokens"


async def test_arguments_that_are_no_json_are_told_as_they_are() -> None:
    assert _input_of(ToolCall("1", "f", '{"a": 1}')) == {"a": 1}
    assert _input_of(ToolCall("1", "f", '{"a": \\q}')) == {"arguments": '{"a": \\q}'}


# Clients that leave, what fails on the way


async def test_one_that_is_aborted_says_that_it_may_go_on(folder: Path) -> None:
    async with scripted(folder, "A long story", is_manual=True) as served:
        stream = await served.anthropic.messages.create(model="demo", messages=HELLO, max_tokens=50, stream=True)
        started = await anext(stream)
        await served.http.post("/abort", json={"request_id": started.message.id})  # type: ignore[union-attr]
        events = [event async for event in stream]
        assert events[-2].delta.stop_reason == "pause_turn"  # type: ignore[union-attr]
        for step in served.executor.unfinished:
            step.complete()


@both_adapters
async def test_a_step_that_fails_amid_a_stream_is_an_error_event(folder: Path, adapter: Adapter) -> None:
    async with scripted(folder, "A long story of a fox", adapter=adapter) as served:
        served.executor.make_step_fail(3, RuntimeError("secret of the device"))
        stream = await served.anthropic.messages.create(model="demo", messages=HELLO, max_tokens=50, stream=True)
        with pytest.raises(anthropic.APIStatusError) as caught:
            async for _ in stream:
                pass
        assert caught.value.type == "api_error"
        assert "secret" not in str(caught.value.body)


@both_adapters
async def test_a_silent_stream_pings(folder: Path, adapter: Adapter) -> None:
    config = named(keepalive_s=0.02)
    async with scripted(folder, "Yes.", adapter=adapter, config=config, is_manual=True) as served:
        asked = {"messages": HELLO, "max_tokens": 5, "stream": True}
        async with served.http.stream("POST", "/v1/messages", json=asked) as answer:
            pings = 0
            async for line in answer.aiter_lines():
                pings += line == "event: ping"
                if pings == 3:
                    break
        await until(lambda: served.engine.stats().running == 0)
        for step in served.executor.unfinished:
            step.complete()


# Errors, in Anthropic's shape


def check_error(answer: httpx.Response, status: int, kind: str) -> str:
    assert answer.status_code == status, answer.text
    body = answer.json()
    assert set(body) == {"type", "error", "request_id"}
    assert body["type"] == "error"
    details = {"details"} if body["error"]["message"].startswith("thread ") else set()
    assert set(body["error"]) == {"type", "message"} | details
    assert body["error"]["type"] == kind
    assert body["request_id"] == answer.headers["request-id"]
    return str(body["error"]["message"])


USES = {"role": "assistant", "content": [{"type": "tool_use", "id": "1", "name": "f", "input": {}}]}
REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"max_tokens": None}, "max_tokens is missing"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"messages": None}, "messages is missing"),
    ({"messages": []}, "messages is empty"),
    ({"messages": [{"role": "user", "content": []}]}, "messages[0].content is empty"),
    ({"messages": [*HELLO, {"role": "system", "content": []}]}, "messages[1].content is empty"),
    ({"messages": [{"role": "assistant", "content": []}]}, "nothing but empty answers"),
    ({"messages": [*HELLO, *HELLO * 8]}, "more than 8 messages"),
    ({"messages": [{"role": "judge", "content": "a"}]}, "user or assistant"),
    ({"messages": [{"role": "user", "content": [{"type": "image", "source": {"type": "url"}}]}]}, "'image'"),
    ({"messages": [{"role": "user", "content": [{"type": "thinking", "thinking": "a"}]}]}, "'thinking'"),
    ({"messages": [{"role": "user", "content": [{"type": "tool_result"}]}]}, "tool_use_id"),
    ({"messages": [{"role": "assistant", "content": [{"type": "tool_use", "id": "1"}]}]}, "an id or a name"),
    (
        {"messages": [{"role": "assistant", "content": [{"type": "tool_use", "id": "1", "name": "f", "input": []}]}]},
        "no object",
    ),
    ({"messages": [*HELLO, USES]}, "results"),
    ({"system": 5}, "system"),
    ({"system": [{"type": "image"}]}, "system has a part of type 'image'"),
    ({"thinking": {"type": "enabled"}}, "budget_tokens is missing"),
    ({"thinking": {"type": "between_tools"}}, "'between_tools'"),
    ({"thinking": {"type": "adaptive", "display": "omitted"}}, "display"),
    ({"thinking": {"type": "enabled", "budget_tokens": -5}}, "thinking.budget_tokens=-5"),
    ({"output_config": {"format": {"type": "yaml"}}}, "output_config.format"),
    ({"output_format": {"type": "yaml"}}, "output_format"),
    ({"output_config": {"effort": "most"}}, "output_config.effort="),
    ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "web_search_20250305"),
    ({"tools": [TOOL], "tool_choice": {"type": "tool", "name": "other"}}, "no tool"),
    ({"tool_choice": {"type": "any"}}, "no tools"),
    *(
        ({"tools": [TOOL], "tool_choice": choice}, "tool_choice.type is auto, any, none, or tool with the name")
        for choice in ({"type": "zorp"}, {"type": "tool"}, {"type": "function", "name": "get_weather"}, {})
    ),
    ({"container": "c"}, "container"),
    ({"mcp_servers": [{}]}, "mcp_servers"),
    ({"n": 2}, "n is not supported"),
    ({"zzz": 1}, "zzz"),
]


async def test_what_is_not_supported_is_refused(folder: Path) -> None:
    config = named(max_messages=8, unknown_fields="refuse")
    async with scripted(folder, config=config) as served:
        for fields, said in REFUSED:
            body = {"messages": HELLO, "max_tokens": 5, **fields}
            answer = await served.http.post("/v1/messages", json=body)
            assert said in check_error(answer, 400, "invalid_request_error"), fields
        long = {"messages": [{"role": "user", "content": "word " * 5000}], "max_tokens": 5}
        answer = await served.http.post("/v1/messages", json=long)
        check_error(answer, 400, "invalid_request_error")
        counted = await served.http.post("/v1/messages/count_tokens", json={"messages": long["messages"]})
        assert counted.json()["input_tokens"] > 5000
        assert served.executor.plans == []


async def test_every_field_of_the_client_is_known() -> None:
    betas = beta_params.MessageCreateParamsStreaming
    for params in (message_create_params.MessageCreateParamsStreaming, MessageCountTokensParams, betas):
        assert (params.__optional_keys__ | params.__required_keys__) - {"betas"} <= known_names(MessageRequest)


@pytest.mark.parametrize("seed", [0, *nightly(1, 2, 3)])
async def test_whatever_a_field_holds_it_is_taken_or_refused(seed: int) -> None:
    rng = random.Random(seed)
    block = {**dict.fromkeys(Block.__struct_fields__, "a"), "input": {}, "is_error": False}
    async with serving_fake("starlette", ServerConfig(max_messages=8)) as (_, _, _, http):
        for name in [*sorted(known_names(MessageRequest)), *(f"block.{name}" for name in block)]:
            value = rng.choice(SOME_JSON)
            body = {"messages": HELLO, "max_tokens": 1, name: value}
            if name.startswith("block."):
                kinds = ("text", "thinking", "tool_use", "tool_result")
                said = {**block, "type": rng.choice(kinds), name[6:]: value}
                message = {"role": rng.choice(("user", "assistant")), "content": [said]}
                body = {"messages": [message, *HELLO], "max_tokens": 1}
            for path in ("/v1/messages", "/v1/messages/count_tokens"):
                answer = await http.post(path, json=body)
                assert answer.status_code in (200, 400, 404), (body, answer.text)
                if answer.status_code == 400:
                    check_error(answer, 400, "invalid_request_error")


@both_adapters
async def test_each_error_has_its_type(adapter: Adapter, config: ServerConfig) -> None:
    async with serving_fake(adapter, config) as (_, _, _, http):
        body = {"messages": HELLO, "max_tokens": 5}
        key = {"x-api-key": "a-secret-key"}
        for headers in ({}, {"x-api-key": "another-key"}, {"authorization": "Bearer another-key"}):
            check_error(await http.post("/v1/messages", json=body, headers=headers), 401, "authentication_error")
        for path, method, status, kind in (
            ("/v1/messages/batches", "POST", 404, "not_found_error"),
            ("/v1/messages", "GET", 405, "invalid_request_error"),
        ):
            check_error(await http.request(method, path, headers=key), status, kind)
        told = await http.post("/v1/messages", json={**body, "model": "claude"}, headers=key)
        check_error(told, 404, "not_found_error")
        told = await http.post("/v1/messages", content=b"{}", headers=key)
        check_error(told, 415, "invalid_request_error")
        large = json.dumps({**body, "system": "a" * 2**21}).encode()
        told = await http.post("/v1/messages", content=large, headers={**key, "content-type": "application/json"})
        check_error(told, 413, "request_too_large")


@both_adapters
async def test_overload_is_the_status_at_which_the_client_comes_again(folder: Path, adapter: Adapter) -> None:
    config = named(max_concurrent_requests=1)
    async with scripted(folder, "Yes.", adapter=adapter, config=config, is_manual=True) as served:
        asked: dict[str, Any] = {"model": "demo", "messages": HELLO, "max_tokens": 5}
        stream = await served.anthropic.messages.create(**asked, stream=True)
        with pytest.raises(anthropic._exceptions.OverloadedError) as caught:
            await served.anthropic.messages.create(**asked)
        assert (caught.value.status_code, caught.value.type) == (529, "overloaded_error")
        assert caught.value.response.headers["retry-after"]
        answer = await served.http.post("/v1/messages", json=asked)
        check_error(answer, 529, "overloaded_error")
        await stream.close()
        await until(lambda: served.engine.stats().running == 0)
        for step in served.executor.unfinished:
            step.complete()
