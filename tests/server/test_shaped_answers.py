"""Answers with a shape, as the official client asks for them: schemas, tools, reasoning; whole and streamed."""

from __future__ import annotations

import json
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, Literal

import httpx
import openai
import pydantic
import pytest
from openai import AsyncOpenAI
from server.conftest import ServedFake, on_both_adapters, read, serving_fake

from aioengine.frontend import answer_format
from aioengine.server.generation import warn_once
from doubles.saying import Saying

pytestmark = pytest.mark.asyncio(loop_scope="module")

HELLO: list[Any] = [{"role": "user", "content": "Hello!"}]
CHAT: dict[str, Any] = {"model": "demo", "messages": HELLO, "temperature": 0}


class Animal(pydantic.BaseModel):
    kind: Literal["fox", "owl", "hare"]
    legs: int = pydantic.Field(ge=0, le=8)


ANIMAL = Animal.model_json_schema() | {"additionalProperties": False}
OF_ANIMAL = {"type": "json_schema", "json_schema": {"name": "animal", "strict": True, "schema": ANIMAL}}
SAID = '{"kind": "owl", "legs": 2}'


class GetWeather(pydantic.BaseModel):
    city: Literal["Rome", "Oslo"]


def tool(name: str, strict: bool = False) -> Any:
    schema = {**GetWeather.model_json_schema(), "additionalProperties": False}
    return {"type": "function", "function": {"name": name, "parameters": schema, "strict": strict}}


TOOLS: list[Any] = [tool("get_weather"), tool("get_time")]


def call_of(name: str, city: str) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {{"city": "{city}"}}}}\n</tool_call>'


TWO_CALLS = f"Let me look.\n{call_of('get_weather', 'Oslo')}\n{call_of('get_time', 'Rome')}"
THOUGHT = "<think>\nIs it two? It is two.\n</think>\n\nTwo."


@asynccontextmanager
async def saying(*texts: str, **config: Any) -> AsyncIterator[ServedFake]:
    """A served engine whose model says this, with the bundled model's tokenizer."""
    options = {"max_model_len": 1024, "sampler": Saying(*texts), "tool_format": "hermes"}
    async with serving_fake("starlette", **{**options, **config}) as served:
        yield served


async def refused(call: Any) -> openai.BadRequestError:
    with pytest.raises(openai.BadRequestError) as caught:
        await call
    return caught.value


# Schemas


@on_both_adapters
async def test_a_pydantic_model_is_parsed_from_the_answer(client: AsyncOpenAI) -> None:
    answer = await client.chat.completions.parse(**CHAT, max_tokens=200, response_format=Animal)
    choice = answer.choices[0]
    assert choice.finish_reason == "stop"
    assert isinstance(choice.message.parsed, Animal)
    assert choice.message.parsed == Animal.model_validate_json(choice.message.content or "")


BAD_SCHEMAS: dict[str, Any] = {
    "no schema": {"type": 1},
    "a keyword that cannot be enforced": {"type": "array", "uniqueItems": True},
    "a reference to nothing": {"$ref": "#/$defs/no"},
}


@on_both_adapters
@pytest.mark.parametrize("is_streamed", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("name", BAD_SCHEMAS)
async def test_a_schema_that_cannot_be_enforced_is_a_400(client: AsyncOpenAI, name: str, is_streamed: bool) -> None:
    wrapped = {"type": "json_schema", "json_schema": {"name": "bad", "schema": BAD_SCHEMAS[name]}}
    asked: Any = {**CHAT, "response_format": wrapped, "stream": is_streamed}
    error = await refused(client.chat.completions.create(**asked))
    assert (error.param, error.type) == ("response_format", "invalid_request_error")
    others = ({"guided_regex": "(?=a)b"}, {"guided_grammar": "start: nothing"}, {"structured_outputs": {"regex": "("}})
    for extra in others:
        error = await refused(client.completions.create(model="demo", prompt="a", stream=is_streamed, extra_body=extra))
        assert [error.param] == list(extra)


@on_both_adapters
async def test_a_schema_that_is_not_strict_is_enforced_as_far_as_it_can_be(client: AsyncOpenAI) -> None:
    schema = {"type": "array", "items": {"enum": [1, 2, 3, 4]}, "minItems": 3, "maxItems": 4, "uniqueItems": True}
    wrapped = {"name": "few", "schema": schema}
    told = str(await refused(client.chat.completions.create(**CHAT, response_format=json_format(wrapped))))
    assert '"strict": false' in told
    for strict in (None, True):
        await refused(
            client.chat.completions.create(**CHAT, response_format=json_format({**wrapped, "strict": strict}))
        )
    chat = await client.chat.completions.create(**CHAT, response_format=json_format({**wrapped, "strict": False}))
    text: Any = {"format": {"type": "json_schema", **wrapped, "strict": False}}
    response = await client.responses.create(model="demo", input="Hello!", text=text)
    for said in (chat.choices[0].message.content, response.output_text):
        values = json.loads(said or "")
        assert 3 <= len(values) <= 4
        assert set(values) <= {1, 2, 3, 4}


def json_format(wrapped: dict[str, Any]) -> Any:
    return {"type": "json_schema", "json_schema": wrapped}


CONTRADICTION: dict[str, Any] = {"guided_choice": ["a", "b"], "bad_words": ["a", "b"]}


@pytest.mark.parametrize("path", ["completions", "chat/completions", "responses", "messages"])
async def test_a_contradiction_found_amid_a_stream_is_the_callers(
    http: httpx.AsyncClient, path: str, caplog: pytest.LogCaptureFixture
) -> None:
    prompt = {"completions": {"prompt": "x"}, "responses": {"input": "x"}}.get(path, {"messages": HELLO})
    length = {"max_output_tokens" if path == "responses" else "max_tokens": 5}
    with caplog.at_level(logging.INFO, "aioengine.server"):
        answer = await http.post(f"/v1/{path}", json={**prompt, **length, **CONTRADICTION, "stream": True})
    assert (answer.status_code, "leaves no token" in answer.text) == (200, True), answer.text
    (record,) = [record for record in caplog.records if record.name == "aioengine.server"]
    assert (record.levelname, record.exc_info) == ("INFO", None)
    assert "refused (no_token_left)" in record.message


async def test_an_answer_that_was_cut_is_told_by_the_clients_own_error() -> None:
    async with saying(SAID) as (_, _, client, _):
        with pytest.raises(openai.LengthFinishReasonError):
            await client.chat.completions.parse(**CHAT, max_tokens=3, response_format=Animal)


# Tools


@pytest.mark.parametrize("n", [1, 2])
async def test_streamed_calls_add_up_to_the_whole_ones(n: int) -> None:
    async with saying(TWO_CALLS, call_of("get_time", "Oslo")) as (_, _, client, _):
        asked: Any = {**CHAT, "temperature": 1.0, "tools": TOOLS, "n": n}
        whole = await client.chat.completions.create(**asked)
        chunks = await read(await client.chat.completions.create(**asked, stream=True))
        async with client.chat.completions.stream(**asked) as stream:
            async for _ in stream:
                pass
            by_helper = await stream.get_final_completion()
    first = whole.choices[0]
    assert (first.finish_reason, (first.message.content or "").strip()) == ("tool_calls", "Let me look.")
    assert [(one.function.name, json.loads(one.function.arguments)) for one in first.message.tool_calls or ()] == [
        ("get_weather", {"city": "Oslo"}),
        ("get_time", {"city": "Rome"}),
    ]
    for choice in whole.choices:
        parts = [part for chunk in chunks for part in chunk.choices if part.index == choice.index]
        assert [part.finish_reason for part in parts] == [None] * (len(parts) - 1) + ["tool_calls"]
        assert "".join(part.delta.content or "" for part in parts) == (choice.message.content or "")
        calls: dict[int, dict[str, Any]] = {}
        for delta in (delta for part in parts for delta in part.delta.tool_calls or ()):
            call = calls.setdefault(delta.index, {"id": delta.id, "name": delta.function.name, "arguments": ""})
            assert delta.id in (None, call["id"])
            call["arguments"] += delta.function.arguments
        assert all(call["id"].startswith("call_") for call in calls.values())
        expected = [(call.function.name, call.function.arguments) for call in choice.message.tool_calls or ()]
        assert [(call["name"], call["arguments"]) for call in calls.values()] == expected
        told = by_helper.choices[choice.index].message.tool_calls or ()
        assert [(call.function.name, call.function.arguments) for call in told] == expected


@pytest.mark.parametrize("is_streamed", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize(
    ("choice", "said", "names"),
    [
        ("auto", TWO_CALLS, ["get_weather", "get_time"]),
        ("auto", "No call is needed.", []),
        ("none", TWO_CALLS, []),
        ("required", "I would rather not.", None),
        ("required", call_of("get_time", "Rome"), ["get_time"]),
        ({"type": "function", "function": {"name": "get_time"}}, call_of("get_weather", "Rome"), ["get_time"]),
        ({"type": "function", "function": {"name": "get_time"}}, "I would rather not.", ["get_time"]),
    ],
    ids=str,
)
async def test_a_tool_choice_holds(choice: Any, said: str, names: list[str] | None, is_streamed: bool) -> None:
    async with saying(said) as (_, _, client, _):
        asked: Any = {**CHAT, "tools": TOOLS, "tool_choice": choice, "max_tokens": 300}
        if is_streamed:
            async with client.chat.completions.stream(**asked) as stream:
                chunks = [event.chunk async for event in stream if event.type == "chunk"]
                answer: Any = await stream.get_final_completion()
            assert chunks[0].choices[0].delta.content == ("" if choice in ("auto", "none") else None)
        else:
            answer = await client.chat.completions.create(**asked)
    (one,) = answer.choices
    calls = one.message.tool_calls or []
    assert (one.finish_reason == "tool_calls") == bool(calls)
    if names is None:
        assert calls
    else:
        assert [call.function.name for call in calls] == names
    if choice not in ("auto", "none"):
        assert all(json.loads(call.function.arguments)["city"] in ("Rome", "Oslo") for call in calls)
        assert not one.message.content
    if not calls:
        assert one.message.content == said


CUT = 'Look.\n<tool_call>\n{"name": "get_weather", "arguments": {"city": "Pa'
MALFORMED = 'Look.\n<tool_call>\n{"name": "get_weather", "arguments": {"city": oops}}\n</tool_call>'


@pytest.mark.parametrize(
    ("said", "asked", "text", "reason"),
    [
        (CUT, {}, "Look.", "stop"),
        (CUT[:30], {}, "Look.", "stop"),
        (call_of("get_weather", "Rome"), {"stop": ["Rome"]}, "", "stop"),
        (call_of("get_weather", "Rome"), {"max_tokens": 12}, "", "length"),
        (f"{call_of('get_time', 'Rome')} {CUT}", {}, " Look.", "stop"),
        (MALFORMED, {}, MALFORMED, "stop"),
    ],
    ids=["by its end", "before its name", "by a stop string", "by the limit", "behind another", "malformed"],
)
async def test_a_call_that_is_not_completed_is_none_whole_and_streamed(
    said: str, asked: dict[str, Any], text: str, reason: str
) -> None:
    async with saying(said) as (_, _, client, http):
        whole = await client.chat.completions.create(**CHAT, tools=TOOLS, **asked)
        chunks = await read(await client.chat.completions.create(**CHAT, tools=TOOLS, **asked, stream=True))
        options: dict[str, Any] = {"max_tokens": asked.get("max_tokens", 200), "stop_sequences": asked.get("stop", [])}
        tools = [{"name": name, "input_schema": {"type": "object"}} for name in ("get_weather", "get_time")]
        body = {"messages": HELLO, "tools": tools, "temperature": 0, **options}
        message = (await http.post("/v1/messages", json=body)).json()
        events = (await http.post("/v1/messages", json={**body, "stream": True})).text
    (choice,) = whole.choices
    parts = [part for chunk in chunks for part in chunk.choices]
    assert (choice.finish_reason, parts[-1].finish_reason) == (reason, reason)
    assert (choice.message.content or "", "".join(part.delta.content or "" for part in parts)) == (text, text)
    num_complete = int(said.startswith(call_of("get_time", "Rome")))
    assert len(choice.message.tool_calls or ()) == num_complete
    told = "max_tokens" if reason == "length" else "stop_sequence" if "stop" in asked else "end_turn"
    assert message["stop_reason"] == told
    assert f'"stop_reason":"{told}"' in events
    assert [block["type"] for block in message["content"]].count("tool_use") == num_complete


@pytest.mark.parametrize("choice", [None, "none", "auto", {"type": "auto"}], ids=str)
async def test_tools_of_a_model_that_cannot_call_are_left_out_and_the_log_says_so_once(
    choice: Any, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    warn_once.cache_clear()
    monkeypatch.setattr(answer_format, "detect_tool_format", lambda template: None)
    async with saying("Hello!", tool_format="auto") as (engine, _, client, _):
        assert not engine.has_tools
        asked: Any = {**CHAT, "tools": TOOLS} | ({} if choice is None else {"tool_choice": choice})
        with caplog.at_level(logging.WARNING, "aioengine.server"):
            answers = [await client.chat.completions.create(**asked) for _ in range(2)]
        plain = await client.chat.completions.create(**CHAT)
    assert all(answer.choices[0].message.content == "Hello!" for answer in answers)
    assert {answer.usage.prompt_tokens for answer in (*answers, plain) if answer.usage} == {plain.usage.prompt_tokens}  # type: ignore[union-attr]
    assert [message for message in caplog.messages if "--tool-format" in message] == caplog.messages
    assert len(caplog.messages) == 1


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "get_time"}}], ids=str)
async def test_a_model_that_cannot_call_must_not_be_made_to(choice: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(answer_format, "detect_tool_format", lambda template: None)
    async with saying("Hello!", tool_format="auto") as (engine, _, client, _):
        assert not engine.has_tools
        for is_streamed in (False, True):
            error = await refused(
                client.chat.completions.create(**CHAT, tools=TOOLS, tool_choice=choice, stream=is_streamed)
            )
            assert error.param == "tools"
            assert "tool_format" in error.message


# Reasoning


async def test_reasoning_is_told_apart_whole_and_streamed() -> None:
    async with saying(THOUGHT, reasoning_format="think") as (_, _, client, _):
        whole = await client.chat.completions.create(**CHAT)
        chunks = await read(await client.chat.completions.create(**CHAT, stream=True))
    message: Any = whole.choices[0].message
    assert (message.reasoning_content, message.content) == ("Is it two? It is two.", "Two.")
    assert message.reasoning == message.reasoning_content
    assert whole.usage.completion_tokens_details.reasoning_tokens > 0
    assert whole.usage.completion_tokens_details.reasoning_tokens < whole.usage.completion_tokens
    deltas: list[Any] = [choice.delta for chunk in chunks for choice in chunk.choices]
    assert "".join(delta.content or "" for delta in deltas) == message.content
    pieces = [piece for delta in deltas if (piece := getattr(delta, "reasoning_content", None))]
    assert "".join(pieces) == message.reasoning_content
    assert [delta.reasoning for delta in deltas if getattr(delta, "reasoning", None)] == pieces
    assert len(pieces) > 3
    assert [choice.finish_reason for chunk in chunks for choice in chunk.choices][-1] == "stop"


async def test_reasoning_may_be_left_out() -> None:
    async with saying(THOUGHT, reasoning_format="think") as (_, _, client, _):
        asked: Any = {**CHAT, "extra_body": {"include_reasoning": False}}
        whole = await client.chat.completions.create(**asked)
        chunks = await read(await client.chat.completions.create(**asked, stream=True))
        assert "include_reasoning" not in (whole.model_extra or {})
    assert whole.choices[0].message.content == "Two."
    assert not hasattr(whole.choices[0].message, "reasoning_content")
    deltas = [choice.delta for chunk in chunks for choice in chunk.choices]
    assert "".join(delta.content or "" for delta in deltas) == "Two."
    assert not any(hasattr(delta, "reasoning_content") for delta in deltas)


@pytest.mark.parametrize("name", ["max_thinking_tokens", "thinking_token_budget"])
async def test_a_budget_ends_the_reasoning(name: str) -> None:
    async with saying(THOUGHT, reasoning_format="think") as (_, _, client, _):
        whole = await client.chat.completions.create(**CHAT)
        for budget in (0, 3):
            some = await client.chat.completions.create(**CHAT, extra_body={name: budget})
            said = getattr(some.choices[0].message, "reasoning_content", "") or ""
            assert len(said) < len(whole.choices[0].message.reasoning_content)  # type: ignore[attr-defined]
            assert whole.choices[0].message.reasoning_content.startswith(said)  # type: ignore[attr-defined]
        for bad in (-2, 2.5):
            error = await refused(client.chat.completions.create(**CHAT, extra_body={name: bad}))
            assert error.param == name
        both = {"max_thinking_tokens": 3, "thinking_token_budget": 4}
        assert (await refused(client.chat.completions.create(**CHAT, extra_body=both))).param in both
    async with saying("Two.", reasoning_format="none") as (_, _, client, _):
        error = await refused(client.chat.completions.create(**CHAT, extra_body={name: 3}))
        assert "reasoning_format" in error.message
