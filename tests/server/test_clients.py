"""What well-known clients send, as they send it: the answer's message back in their own shape, tools, hints."""

from __future__ import annotations

import gzip
import re
from typing import Any

import httpx
import pytest
from anthropic import AsyncAnthropic
from openai import AsyncOpenAI
from server.conftest import Adapter, both_adapters, fake_engine, on_both_adapters, plain_client, serving, serving_fake

from aioengine.server import ServerConfig

pytestmark = pytest.mark.asyncio(loop_scope="module")

CHAT, COMPLETION = "/v1/chat/completions", "/v1/completions"
HELLO = {"role": "user", "content": "Hello!"}
CALL = {"id": "1", "type": "function", "function": {"name": "get_weather", "arguments": '{"city": "Rome"}'}}
HF_CALL = {**CALL, "function": {**CALL["function"], "description": None}}  # type: ignore[dict-item]
TOOL = {"type": "function", "function": {"name": "get_weather", "parameters": {"type": "object", "properties": {}}}}
TOOLS = [{"type": "function", "function": {**TOOL["function"], "name": f"get_weather_{number}"}} for number in range(4)]

SECOND_TURNS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "openai 3.54, the object": ({"role": "assistant", "content": "Hi.", "refusal": None}, {"max_tokens": 2}),
    "openai 3.54, dumped": (
        {
            "role": "assistant", "content": "Hi.", "refusal": None, "annotations": None, "audio": None,
            "function_call": None, "tool_calls": None,
        },
        {"max_tokens": 2},
    ),
    "openai 3.54, tool calls": ({"role": "assistant", "content": None, "tool_calls": [CALL]}, {"max_tokens": 2}),
    "litellm 1.106": (
        {"role": "assistant", "content": "Hi.", "provider_specific_fields": {"refusal": None}},
        {"max_tokens": 2},
    ),
    "huggingface_hub 2.4": (
        {
            "role": "assistant", "content": "Hi.", "reasoning": None, "tool_call_id": None, "tool_calls": None,
            "refusal": None,
        },
        {"max_tokens": 2, "stream": False},
    ),
    "huggingface_hub 2.4, tool calls": (
        {"role": "assistant", "tool_calls": [HF_CALL], "content": None, "reasoning": None, "tool_call_id": None},
        {"max_tokens": 2, "stream": False},
    ),
    "langchain-openai 1.7": (
        {"role": "assistant", "content": "Hi."},
        {"max_completion_tokens": 2, "stream": False, "tools": [TOOL]},
    ),
    "pydantic-ai 2.68": (
        {"role": "assistant", "content": "Hi."},
        {"max_completion_tokens": 2, "stream": False, "tools": [TOOL], "tool_choice": "auto"},
    ),
    "Open WebUI, with its own fields": (
        {"role": "assistant", "content": [{"type": "text", "text": "Hi.", "cache_control": {"type": "ephemeral"}}]},
        {
            "stream": True, "max_tokens": 2.0, "tools": TOOLS, "tool_choice": "auto", "chat_id": "c", "id": "m",
            "session_id": "s", "features": {"web_search": False}, "variables": {}, "background_tasks": {},
        },
    ),
}  # fmt: skip
"""The answer's message as a client sends it back with its next request, and the request's other fields.

Of bodies that these versions sent to a server; Open WebUI's by its documentation. With tool calls the others send what
openai sends, litellm without the content.
"""


@pytest.mark.parametrize("client", SECOND_TURNS)
async def test_a_clients_own_message_comes_back(http: httpx.AsyncClient, client: str) -> None:
    message, fields = SECOND_TURNS[client]
    answer = await http.post(CHAT, json={"model": "demo", "messages": [HELLO, message, HELLO], **fields})
    assert answer.status_code == 200, answer.text


async def test_a_template_that_cannot_take_a_message_beside_tool_calls_says_so(http: httpx.AsyncClient) -> None:
    messages = [
        HELLO,
        {"role": "assistant", "content": None, "tool_calls": [CALL]},
        {"role": "tool", "tool_call_id": "1", "content": "sunny"},
    ]
    assert (await http.post(CHAT, json={"messages": messages})).status_code == 200
    messages.append({"role": "wizard", "content": "Abracadabra"})
    error = (await http.post(CHAT, json={"messages": messages})).json()["error"]
    assert error["param"] == "messages"
    assert "unknown role wizard: use system, user, assistant or tool" in error["message"]
    assert "leave tool_calls and tool messages out" in error["message"]


@both_adapters
async def test_unknown_fields_are_ignored_or_refused(adapter: Adapter, caplog: pytest.LogCaptureFixture) -> None:
    body = {"prompt": "a", "max_tokens": 1.0, "zzz": 1, "temprature": 0}
    async with fake_engine() as (engine, _):
        async with serving(engine, adapter) as served, plain_client(served.url) as http:
            for _ in range(2):
                assert (await http.post(COMPLETION, json=body)).status_code == 200
            assert (await http.post("/tokenize", json=body)).status_code == 200
        told = [message.split("'")[1] for message in caplog.messages if "unknown field" in message]
        assert told == ["zzz", "temprature", "max_tokens"]  # of /tokenize
        config = ServerConfig(unknown_fields="refuse")
        async with serving(engine, adapter, config) as served, plain_client(served.url) as http:
            error = (await http.post(COMPLETION, json=body)).json()["error"]
            assert (error["param"], error["code"]) == ("zzz", "unknown_parameter")


@on_both_adapters
async def test_what_clients_send_by_other_names_is_taken(http: httpx.AsyncClient) -> None:
    async def ask(path: str, **body: Any) -> Any:
        return (await http.post(path, json={"max_tokens": 5, "temperature": 0, **body})).json()

    told = [{"role": role, "content": "Be brief."} for role in ("system", "developer")]
    answers = [await ask(CHAT, messages=[first, HELLO]) for first in told]
    assert answers[0]["choices"][0]["message"] == answers[1]["choices"][0]["message"]
    chat: Any = {"messages": [HELLO], "tools": [{"type": "function", "function": {"name": "ping", "parameters": {}}}]}
    assert (await ask("/tokenize", **chat))["count"] == (await ask(CHAT, **chat))["usage"]["prompt_tokens"]
    grammar = "start: /[0-9]{3}/"
    both = {"guided_grammar": grammar, "structured_outputs": {"grammar": grammar}}
    (choice,) = (await ask(COMPLETION, prompt="a", guided_decoding_backend="any", **both))["choices"]
    assert re.fullmatch("[0-9]{3}", choice["text"])


@on_both_adapters
async def test_models_are_listed_for_either_client(client: AsyncOpenAI) -> None:
    (ours,) = [model async for model in client.models.list()]
    async with AsyncAnthropic(base_url=str(client.base_url).removesuffix("/v1/"), api_key="none") as anthropic:
        page = await anthropic.models.list()
    assert (page.data[0].id, page.data[0].type, page.data[0].display_name) == (ours.id, "model", ours.id)
    assert int(page.data[0].created_at.timestamp()) == ours.created
    assert (page.has_more, page.first_id, page.last_id) == (False, ours.id, ours.id)


@both_adapters
@pytest.mark.parametrize("encoding", ["gzip", "gzip, gzip"])
async def test_a_compressed_body_is_refused(adapter: Adapter, encoding: str) -> None:
    headers = {"content-type": "application/json", "content-encoding": encoding}
    async with serving_fake(adapter) as (*_, http):
        answer = await http.post("/tokenize", content=gzip.compress(b'{"prompt": "a"}'), headers=headers)
        assert (answer.status_code, answer.json()["error"]["code"]) == (415, "unsupported_encoding")
        plain = await http.post("/tokenize", json={"prompt": "a"}, headers={"content-encoding": "identity"})
        assert plain.status_code == 200


# What the tokenizer is


@both_adapters
async def test_the_tokenizer_is_told_where_that_is_allowed(adapter: Adapter) -> None:
    async with fake_engine() as (engine, _):
        async with serving(engine, adapter) as served, plain_client(served.url) as http:
            answer = await http.get("/tokenizer_info")
            assert answer.status_code == 404
            assert "--enable-tokenizer-info-endpoint" in answer.json()["error"]["message"]
        config = ServerConfig(enable_tokenizer_info_endpoint=True)
        async with serving(engine, adapter, config) as served, plain_client(served.url) as http:
            told = (await http.get("/tokenizer_info")).json()
    assert told["tokenizer_class"] == "PreTrainedTokenizerFast"
    assert (told["eos_token"], told["bos_token"]) == ("<|im_end|>", None)
    assert told["vocab_size"] == 2048
    assert "add_generation_prompt" in told["chat_template"]
