"""OpenAI's own client, unchanged, over ``/v1/responses``: answers, events, items sent back, refusals."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from nightly import nightly
from openai import AsyncOpenAI
from openai.types.responses import Response, response_create_params
from pydantic import BaseModel
from server.conftest import Adapter, both_adapters, on_both_adapters, serving_fake
from server.scripted import CALL, EVENT, LOOKS_UP, SOME_JSON, TOOL, named, scripted, sse_events

from aioengine import Engine
from aioengine.server import ServerConfig
from aioengine.server.responses import InputItem, ResponseRequest
from aioengine.server.schema import known_names

pytestmark = pytest.mark.asyncio(loop_scope="module")

FREE_TOOL: dict[str, Any] = {**TOOL, "strict": False}
"""Nothing keeps the model from writing it wrong."""
HELLO = "Hello! Who are you?"


class Fox(BaseModel):
    name: str
    age: int


def without_times(response: Any) -> Any:
    """A response's body, without its ids and times."""
    suffix = response["id"].removeprefix("resp_")
    fields = {**response, "created_at": 0, "completed_at": 0}
    return json.loads(json.dumps(fields).replace(suffix, "X"))


# On the bundled model


@on_both_adapters
async def test_a_response_is_what_the_engine_says(engine: Engine, client: AsyncOpenAI) -> None:
    answer = await client.responses.create(
        model="demo", input=HELLO, temperature=0.7, top_p=0.9, extra_body={"seed": 3}
    )
    messages = [{"role": "user", "content": HELLO}]
    expected = await engine.generate(messages, temperature=0.7, top_p=0.9, seed=3)
    assert answer.output_text == expected.text
    assert answer.status == "completed"
    assert answer.usage is not None
    assert answer.usage.input_tokens == len(expected.prompt_token_ids)
    assert answer.usage.output_tokens == len(expected.outputs[0].token_ids)
    assert answer.usage.total_tokens == answer.usage.input_tokens + answer.usage.output_tokens
    assert (answer.object, answer.model, answer.temperature, answer.top_p) == ("response", "demo", 0.7, 0.9)
    Response.model_validate_json(answer.model_dump_json(by_alias=True, exclude_unset=True))


@on_both_adapters
async def test_an_answer_that_is_cut_says_so(client: AsyncOpenAI) -> None:
    asked: dict[str, Any] = {"model": "demo", "input": HELLO, "temperature": 0, "max_output_tokens": 3}
    answer = await client.responses.create(**asked)
    assert (answer.status, answer.output[0].status) == ("incomplete", "incomplete")  # type: ignore[union-attr]
    assert answer.incomplete_details is not None
    assert answer.incomplete_details.reason == "max_output_tokens"
    assert answer.max_output_tokens == 3
    *_, last = [event async for event in await client.responses.create(**asked, stream=True)]
    assert last.type == "response.incomplete"
    assert last.response.output_text == answer.output_text


@on_both_adapters
async def test_a_text_has_the_shape_that_was_asked_for(client: AsyncOpenAI) -> None:
    asked: dict[str, Any] = {"model": "demo", "input": "A fox, please.", "temperature": 0, "max_output_tokens": 200}
    parsed = await client.responses.parse(**asked, text_format=Fox)
    assert isinstance(parsed.output_parsed, Fox)
    async with client.responses.stream(**asked, text_format=Fox) as stream:
        final = await stream.get_final_response()
    assert final.output_parsed == parsed.output_parsed
    answer = await client.responses.create(**asked, text={"format": {"type": "json_object"}})
    assert answer.output_text.lstrip().startswith("{")
    assert answer.text is not None
    assert answer.text.format is not None
    assert answer.text.format.type == "json_object"


@on_both_adapters
async def test_log_probabilities_are_the_engines(engine: Engine, client: AsyncOpenAI) -> None:
    asked: dict[str, Any] = {
        "model": "demo", "input": HELLO, "temperature": 0, "top_logprobs": 2, "max_output_tokens": 6,
        "include": ["message.output_text.logprobs", "reasoning.encrypted_content"],
    }  # fmt: skip
    answer = await client.responses.create(**asked)
    expected = await engine.generate([{"role": "user", "content": HELLO}], temperature=0, logprobs=2, max_tokens=6)
    told = answer.output[0].content[0].logprobs  # type: ignore[union-attr]
    lines = expected.outputs[0].logprobs
    assert lines is not None
    assert [entry.token for entry in told] == [next(iter(line.values())).decoded_token for line in lines]
    assert {len(entry.top_logprobs) for entry in told} == {2}
    deltas, last = [], None
    async for event in await client.responses.create(**asked, stream=True):
        if event.type == "response.output_text.delta":
            deltas += [entry.token for entry in event.logprobs]
        last = event
    assert deltas == [entry.token for entry in told]
    assert last is not None
    assert last.type == "response.incomplete"
    assert [entry.token for entry in last.response.output[0].content[0].logprobs] == deltas  # type: ignore[union-attr]


@on_both_adapters
async def test_a_conversation_goes_on_where_it_was(engine: Engine, client: AsyncOpenAI) -> None:
    first = await client.responses.create(
        model="demo", input=HELLO, temperature=0, instructions="Be brief.", metadata={"a": "b"}
    )
    second = await client.responses.create(
        model="demo", input="What is 8 + 7?", temperature=0, previous_response_id=first.id
    )
    messages = [
        {"role": "user", "content": HELLO},
        {"role": "assistant", "content": first.output_text},
        {"role": "user", "content": "What is 8 + 7?"},
    ]
    expected = await engine.generate(messages, temperature=0)
    assert second.output_text == expected.text
    assert second.usage is not None
    assert second.usage.input_tokens == len(expected.prompt_token_ids), "the first one's instructions are its own"
    assert second.previous_response_id == first.id
    third = [*first.output, {"role": "user", "content": "What is 8 + 7?"}]
    sent = await client.responses.create(
        model="demo",
        input=[{"role": "user", "content": HELLO}, *third],
        temperature=0,  # type: ignore[list-item]
    )
    assert sent.output_text == expected.text
    assert await client.responses.retrieve(first.id) == first
    assert first.metadata == {"a": "b"}


@on_both_adapters
async def test_what_is_not_stored_cannot_be_found(client: AsyncOpenAI) -> None:
    kept = await client.responses.create(model="demo", input="Hi", max_output_tokens=2)
    await client.responses.delete(kept.id)
    unkept = await client.responses.create(model="demo", input="Hi", max_output_tokens=2, store=False)
    assert unkept.model_dump()["store"] is False
    for response_id in (kept.id, unkept.id, "resp_none", "../models"):
        for ask in (client.responses.retrieve, client.responses.delete):
            with pytest.raises(openai.NotFoundError) as missing:
                await ask(response_id)
            assert missing.value.code == "not_found"
        with pytest.raises(openai.BadRequestError) as caught:
            await client.responses.create(model="demo", input="Hi", previous_response_id=response_id)
        assert (caught.value.code, caught.value.param) == ("previous_response_not_found", "previous_response_id")


@both_adapters
async def test_a_response_is_found_by_its_owner_alone(folder: Path, adapter: Adapter) -> None:
    config = ServerConfig(api_keys=("first-key", "second-key"), tenant_header="X-Tenant", served_model_name=("demo",))
    async with scripted(folder, "A", "B", "C", adapter=adapter, config=config) as served:
        mine = served.openai.with_options(api_key="first-key", default_headers={"x-tenant": "red"})
        others = [
            served.openai.with_options(api_key="second-key", default_headers={"x-tenant": "red"}),
            served.openai.with_options(api_key="first-key", default_headers={"x-tenant": "blue"}),
        ]
        first = await mine.responses.create(model="demo", input="Hi")
        for other in others:
            for ask in (other.responses.retrieve, other.responses.delete):
                with pytest.raises(openai.NotFoundError) as missing:
                    await ask(first.id)
                with pytest.raises(openai.NotFoundError) as unknown:
                    await ask("resp_none")
                assert missing.value.message.replace(first.id, "resp_none") == unknown.value.message
            with pytest.raises(openai.BadRequestError, match="there is no response"):
                await other.responses.create(model="demo", input="Hi", previous_response_id=first.id)
            item: Any = {"type": "item_reference", "id": first.output[0].id}
            with pytest.raises(openai.NotFoundError, match="there is no item"):
                await other.responses.create(model="demo", input=[item])
        by_header = mine.with_options(api_key="none", default_headers={"x-tenant": "red", "x-api-key": "first-key"})
        assert await by_header.responses.retrieve(first.id) == first
        second = await mine.responses.create(model="demo", input="Go on", previous_response_id=first.id)
        assert second.output_text == "B"
        await mine.responses.delete(first.id)


# What the model is scripted to say


EVENTS = [
    ("response.created", None, None),
    ("response.in_progress", None, None),
    ("response.output_item.added", 0, "reasoning"),
    ("response.content_part.added", 0, "reasoning_text"),
    ("response.reasoning_text.delta", 0, "I look it up."),
    ("response.reasoning_text.done", 0, "I look it up."),
    ("response.content_part.done", 0, "reasoning_text"),
    ("response.output_item.done", 0, "reasoning"),
    ("response.output_item.added", 1, "message"),
    ("response.content_part.added", 1, "output_text"),
    ("response.output_text.delta", 1, "Let me see."),
    ("response.output_text.done", 1, "Let me see."),
    ("response.content_part.done", 1, "output_text"),
    ("response.output_item.done", 1, "message"),
    ("response.output_item.added", 2, "function_call"),
    ("response.function_call_arguments.delta", 2, '{"city": "Paris"}'),
    ("response.function_call_arguments.done", 2, '{"city": "Paris"}'),
    ("response.output_item.done", 2, "function_call"),
    ("response.output_item.added", 3, "function_call"),
    ("response.function_call_arguments.delta", 3, '{"city": "Rome"}'),
    ("response.function_call_arguments.done", 3, '{"city": "Rome"}'),
    ("response.output_item.done", 3, "function_call"),
    ("response.completed", None, None),
]
"""Of `LOOKS_UP`: each event's type, its item's place, and what it says; deltas of one item put together."""


def table_of(events: list[Any]) -> list[tuple[str, int | None, str | None]]:
    rows: list[tuple[str, int | None, str | None]] = []
    for event in events:
        said = event.get("delta") or event.get("text") or event.get("arguments")
        said = said or (event.get("item") or event.get("part") or {}).get("type")
        row = (event["type"], event.get("output_index"), said)
        if rows and event["type"].endswith(".delta") and rows[-1][:2] == row[:2]:
            row = (*row[:2], (rows.pop()[2] or "") + said)
        rows.append(row)
    return rows


@both_adapters
async def test_the_events_are_those_of_the_table(folder: Path, adapter: Adapter) -> None:
    asked = {"input": "Weather?", "tools": [TOOL], "stream": True}
    async with scripted(folder, LOOKS_UP, adapter=adapter) as served:
        answer = await served.http.post("/v1/responses", json=asked)
    assert answer.headers["content-type"].startswith("text/event-stream")
    told = sse_events(answer.content)
    events = [json.loads(data) for _, data in told]
    assert [event["type"] for event in events] == [name for name, _ in told]
    assert table_of(events) == EVENTS
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    for _, data in told:
        EVENT.validate_json(data)
    created, progress, completed = events[0]["response"], events[1]["response"], events[-1]["response"]
    assert created == progress
    assert (created["status"], created["output"], created["usage"]) == ("in_progress", [], None)
    done = [event["item"] for event in events if event["type"] == "response.output_item.done"]
    assert completed["output"] == done
    added = {event["output_index"]: event["item"]["id"] for event in events if event["type"].endswith("item.added")}
    assert added == {place: item["id"] for place, item in enumerate(done)}
    assert {event["item_id"] for event in events if "item_id" in event} == set(added.values())
    assert {item["status"] for item in done} == {"completed"}


async def test_a_whole_response_is_the_one_of_a_streams_end(folder: Path) -> None:
    async with scripted(folder, LOOKS_UP) as served:
        asked: dict[str, Any] = {"model": "demo", "input": "Weather?", "tools": [TOOL]}
        async with served.openai.responses.stream(**asked) as stream:
            async for _ in stream:
                pass
            streamed = await stream.get_final_response()
        whole = await served.openai.responses.create(**asked)
        body = whole.model_dump(exclude_unset=True)
        final = streamed.model_dump(exclude_unset=True)
    calls = [item for item in streamed.output if item.type == "function_call"]
    assert [call.parsed_arguments for call in calls] == [{"city": "Paris"}, {"city": "Rome"}]
    for dumped in (body, final):
        for item in dumped["output"]:
            item.pop("parsed_arguments", None)
            for key in ("call_id", "parsed"):
                item.pop(key, None)
            for part in item.get("content") or ():
                part.pop("parsed", None)
        dumped["usage"]["input_tokens_details"] = None  # the second prompt is cached
    assert without_times(body) == without_times(final)
    assert whole.usage is not None
    assert 0 < whole.usage.output_tokens_details.reasoning_tokens < whole.usage.output_tokens


async def test_calls_and_their_results_go_back_to_the_model(folder: Path) -> None:
    async with scripted(folder, LOOKS_UP, "Sunny.", "Sunny, again.") as served:
        question = {"role": "user", "content": [{"type": "input_text", "text": "Weather?"}]}
        asked: dict[str, Any] = {"model": "demo", "tools": [TOOL], "instructions": "Look it up."}
        first = await served.openai.responses.create(**asked, input=[question])
        results: list[Any] = [
            {"type": "function_call_output", "call_id": item.call_id, "output": f"sunny {place}"}
            for place, item in enumerate(first.output)
            if item.type == "function_call"
        ]
        results[1]["output"] = [{"type": "input_text", "text": results[1]["output"]}]
        by_id = await served.openai.responses.create(**asked, input=results, previous_response_id=first.id)
        # As a client's own objects, and with another question, since the script knows prompts apart.
        again: list[Any] = [
            question,
            *first.output,
            *results,
            {"type": "message", "role": "developer", "content": "Go."},
        ]
        by_items = await served.openai.responses.create(**asked, input=again)
        prompts = list(served.script.prompts)
        named_again: list[Any] = [
            {"type": "item_reference", "id": item.id} if item in first.output else item for item in again
        ]
        counted = await served.openai.responses.input_tokens.count(**asked, input=named_again)
        by_name = await served.openai.responses.create(**asked, input=named_again)
        with pytest.raises(openai.NotFoundError, match="names it twice"):
            await served.openai.responses.create(**asked, input=[*named_again, *named_again])
        for gone in ("msg_none", f"{first.output[0].id[:-2]}77", "", "resp_"):
            with pytest.raises(openai.NotFoundError, match="give the item itself"):
                await served.openai.responses.create(model="demo", input=[{"type": "item_reference", "id": gone}])
    assert [by_id.output_text, by_items.output_text] == ["Sunny.", "Sunny, again."]
    assert by_name.output_text == by_items.output_text
    assert by_name.usage is not None
    assert counted.input_tokens == by_name.usage.input_tokens
    first_id, second_id = (result["call_id"] for result in results)
    conversation = (
        "<|im_start|>system\nLook it up.<|im_end|>\n<|im_start|>user\nWeather?<|im_end|>\n"
        "<|im_start|>assistant\n<think>I look it up.</think>Let me see."
        '<tool_call>{"name": "get_weather", "arguments": {"city": "Paris"}}</tool_call>'
        '<tool_call>{"name": "get_weather", "arguments": {"city": "Rome"}}</tool_call><|im_end|>\n'
        f"<|im_start|>tool\nsunny 2 (of {first_id})<|im_end|>\n<|im_start|>tool\nsunny 3 (of {second_id})<|im_end|>\n"
    )
    _, told_by_id, told_by_items = (prompt.split("<|im_end|>\n", 1)[1] for prompt in prompts)  # behind the tools
    assert told_by_id == conversation + "<|im_start|>assistant\n"
    assert told_by_items == conversation + "<|im_start|>system\nGo.<|im_end|>\n<|im_start|>assistant\n"


async def test_roles_and_effort_are_told_in_the_templates_names(folder: Path) -> None:
    async with scripted(folder, "Yes.", "No.") as served:
        asked: list[Any] = [
            {"role": "developer", "content": "Be kind."},
            {
                "role": "system",
                "content": [{"type": "input_text", "text": "Be"}, {"type": "input_text", "text": "fair."}],
            },
            {"role": "user", "content": "Hi"},
        ]
        create = served.openai.responses.create
        answer = await create(model="demo", input=asked, instructions="Be brief.", reasoning={"effort": "low"})
        assert answer.reasoning is not None
        assert answer.reasoning.effort == "low"
        await create(model="demo", input=asked, reasoning={"effort": "none", "summary": "auto"})
        first, second = served.script.prompts
    head = "<|im_start|>system\nBe brief.\n\nBe kind.\n\nBe\nfair.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n"
    assert first == f"{head}enable_thinking: True\nreasoning_effort: low\n<|im_start|>assistant\n"
    assert second == f"{head.replace('Be brief.', '', 1).replace(chr(10) * 3, chr(10))}" + (
        "enable_thinking: False\n<|im_start|>assistant\n"
    )


async def test_log_probabilities_are_of_all_tokens(folder: Path) -> None:
    asked = {"input": "Weather?", "tools": [TOOL], "top_logprobs": 1}
    async with scripted(folder, LOOKS_UP) as served:
        told = sse_events((await served.http.post("/v1/responses", json={**asked, "stream": True})).content)
        whole = (await served.http.post("/v1/responses", json=asked)).json()
    streamed = json.loads(told[-1][1])["response"]
    for response in (streamed, whole):
        (message,) = (item for item in response["output"] if item["type"] == "message")
        assert len(message["content"][0]["logprobs"]) == response["usage"]["output_tokens"]


async def test_a_call_that_is_cut_is_incomplete_in_a_stream(folder: Path) -> None:
    cut = (CALL % "Paris").split(": {", 1)[0] + ': {"city": "Par'
    asked = {"input": "Weather?", "tools": [FREE_TOOL]}
    async with scripted(folder, cut) as served:
        told = sse_events((await served.http.post("/v1/responses", json={**asked, "stream": True})).content)
        whole = (await served.http.post("/v1/responses", json=asked)).json()
    assert told[-1][0] == "response.incomplete"
    response = json.loads(told[-1][1])["response"]
    (call,) = response["output"]
    assert (call["type"], call["status"], call["arguments"]) == ("function_call", "incomplete", '{"city": "Par')
    for one in (response, whole):
        assert (one["status"], one["incomplete_details"]) == ("incomplete", None)
    assert [item["type"] for item in whole["output"]] == ["message"]


async def test_text_behind_a_call_is_a_message_of_its_own(folder: Path) -> None:
    asked = {"input": "Weather?", "tools": [FREE_TOOL], "stream": True}
    async with scripted(folder, f"{CALL % 'Paris'} and so on \u2028\u0085") as served:
        answer = await served.http.post("/v1/responses", json=asked)
    (_, last) = sse_events(answer.content)[-1]
    assert len(answer.text.splitlines()) == answer.text.count("\n"), "some clients end lines at other characters"
    call, message = json.loads(last)["response"]["output"]
    assert (call["type"], message["type"]) == ("function_call", "message")
    assert message["content"][0]["text"].strip(" \u2028\u0085") == "and so on"


async def test_an_answer_of_nothing_is_an_empty_message(folder: Path) -> None:
    async with scripted(folder, "") as served:
        whole = await served.openai.responses.create(model="demo", input="Hi")
        told = sse_events((await served.http.post("/v1/responses", json={"input": "Hi", "stream": True})).content)
    assert (whole.output[0].type, whole.output_text) == ("message", "")
    assert [name for name, _ in told][2:-1] == [
        "response.output_item.added", "response.content_part.added", "response.output_text.done",
        "response.content_part.done", "response.output_item.done",
    ]  # fmt: skip


# What is refused


MESSAGE = {"role": "user", "content": "Hi"}
IMAGE = {"role": "user", "content": [{"type": "input_image", "image_url": "data:"}]}
REFUSED: list[tuple[dict[str, Any], str, str]] = [
    ({"input": None}, "input", "missing_required_parameter"),
    ({"input": []}, "input", "invalid_value"),
    ({"input": 5}, "input", "invalid_type"),
    ({"input": [IMAGE]}, "input", "unsupported_parameter"),
    ({"input": [{"type": "item_reference"}]}, "input", "invalid_value"),
    ({"input": [{"type": "function_call_output", "output": "a"}]}, "input", "invalid_value"),
    ({"input": [{"type": "function_call", "call_id": "1", "arguments": "{}"}]}, "input", "invalid_value"),
    ({"input": [{"role": "judge", "content": "a"}]}, "input", "invalid_value"),
    ({"input": [{"role": "user"}]}, "input", "invalid_value"),
    ({"input": [MESSAGE] * 9}, "input", "invalid_value"),
    ({"instructions": 5}, "instructions", "invalid_type"),
    ({"background": True}, "background", "unsupported_parameter"),
    ({"conversation": "conv_1"}, "conversation", "unsupported_parameter"),
    ({"prompt": {"id": "pmpt_1"}}, "prompt", "unsupported_parameter"),
    ({"truncation": "never"}, "truncation", "unsupported_parameter"),
    ({"max_tokens": 5}, "max_tokens", "unsupported_parameter"),
    ({"n": 2}, "n", "unsupported_parameter"),
    ({"max_output_tokens": 0}, "max_output_tokens", "invalid_value"),
    ({"max_output_tokens": 1.5}, "max_output_tokens", "invalid_type"),
    ({"temperature": 7}, "temperature", "invalid_value"),
    ({"top_logprobs": 1000}, "top_logprobs", "invalid_value"),
    ({"include": ["everything"]}, "include", "invalid_value"),
    ({"metadata": {str(place): "a" for place in range(17)}}, "metadata", "invalid_value"),
    ({"metadata": {"a": 5}}, "metadata", "invalid_type"),
    ({"text": {"format": {"type": "json_schema", "name": "a"}}}, "text", "invalid_value"),
    ({"text": {"format": {"type": "yaml"}}}, "text", "invalid_value"),
    ({"reasoning": {"effort": "most"}}, "reasoning", "invalid_value"),
    ({"tools": [{"type": "zorp"}]}, "tools", "invalid_value"),
    ({"tools": [TOOL], "tool_choice": {"type": "function", "name": "other"}}, "tool_choice", "invalid_value"),
    ({"tool_choice": "required"}, "tool_choice", "invalid_value"),
    ({"stream_options": {"include_obfuscation": False}}, "stream_options", "invalid_value"),
    ({"zzz": 1}, "zzz", "unknown_parameter"),
]


async def test_what_is_not_supported_is_refused_by_name(folder: Path) -> None:
    config = named(max_messages=8, unknown_fields="refuse")
    async with scripted(folder, config=config, max_logprobs=5) as served:
        for fields, param, code in REFUSED:
            answer = await served.http.post("/v1/responses", json={"input": "Hi", **fields})
            assert answer.status_code == 400, fields
            error = answer.json()["error"]
            assert (error["param"] or "input", error["code"]) == (param, code), (fields, error["message"])
        too_long = await served.http.post("/v1/responses", json={"input": "word " * 5000})
        assert too_long.json()["error"]["code"] == "context_length_exceeded"
        assert served.executor.plans == []


async def test_a_conversation_that_grows_too_long_is_refused(folder: Path) -> None:
    async with scripted(folder, "1", "2", config=named(max_messages=3)) as served:
        create = served.openai.responses.create
        first = await create(model="demo", input="a")
        second = await create(model="demo", input="b", previous_response_id=first.id)
        with pytest.raises(openai.BadRequestError, match="more than 3 messages"):
            await create(model="demo", input="c", previous_response_id=second.id)


async def test_hints_and_what_asks_for_nothing_are_taken(folder: Path) -> None:
    async with scripted(folder, "Yes.", config=named(unknown_fields="refuse")) as served:
        body = {
            "input": "Hi", "background": False, "truncation": "auto", "include": [], "tools": [], "n": 1,
            "tool_choice": "auto", "parallel_tool_calls": True, "text": {"verbosity": "low"},
            "user": "a", "safety_identifier": "b", "prompt_cache_key": "c", "service_tier": "auto", "max_tool_calls": 3,
            "instructions": None, "previous_response_id": None, "metadata": None, "stream": False, "top_logprobs": 0,
        }  # fmt: skip
        answer = await served.http.post("/v1/responses", json=body)
        assert answer.status_code == 200, answer.text
        assert answer.json()["output"][0]["content"][0]["text"] == "Yes."


async def test_every_field_of_the_client_is_known() -> None:
    params = response_create_params.ResponseCreateParamsStreaming
    assert params.__optional_keys__ | params.__required_keys__ <= known_names(ResponseRequest)


@pytest.mark.parametrize("seed", [0, *nightly(1, 2, 3)])
async def test_whatever_a_field_holds_it_is_taken_or_refused(seed: int) -> None:
    rng = random.Random(seed)
    item = dict.fromkeys(InputItem.__struct_fields__, "a")
    async with serving_fake("starlette", ServerConfig(max_messages=8)) as (_, _, _, http):
        for name in [*sorted(known_names(ResponseRequest)), *(f"input.{name}" for name in item)]:
            value = rng.choice(SOME_JSON)
            body = {"input": "Hi", "max_output_tokens": 1, name: value}
            if name.startswith("input."):
                kinds = ("message", "reasoning", "function_call", "function_call_output", None)
                body = {"input": [{**item, "role": "user", "type": rng.choice(kinds), name[6:]: value}]}
                body["max_output_tokens"] = 1
            answer = await http.post("/v1/responses", json=body)
            assert answer.status_code in (200, 400, 404), (body, answer.text)
            if "error" in answer.json() and answer.status_code != 200:
                assert answer.json()["error"]["message"], body


async def test_other_methods_are_refused(http: httpx.AsyncClient) -> None:
    for method, path, allowed in (
        ("GET", "/v1/responses", "POST"),
        ("POST", "/v1/responses/resp_1", "GET, DELETE"),
    ):
        answer = await http.request(method, path)
        assert (answer.status_code, answer.headers["allow"]) == (405, allowed)
    for path, hint in (
        ("/v1/responses/compact", "leave messages out"),
        ("/v1/responses/resp_1/items", "nothing at"),
        ("/v1/responses/resp_1/cancel", "close the connection"),
    ):
        answer = await http.post(path, json={})
        assert answer.status_code == 404
        assert hint in answer.json()["error"]["message"]
