"""What is refused over a socket: its status, its body, and that the engine never hears of it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
import pytest_asyncio
from server.conftest import Served, all_ended, fake_engine, plain_client, serving

from aioengine.server import ServerConfig

pytestmark = pytest.mark.asyncio(loop_scope="module")

CHAT, COMPLETION = "/v1/chat/completions", "/v1/completions"
HELLO = [{"role": "user", "content": "Hello!"}]
LIMITS = ServerConfig(max_body_bytes=2**16, max_prompts=3, max_messages=3, unknown_fields="refuse")
LENGTH = 128
ENGINE: dict[str, Any] = {"max_n": 8, "max_logprobs": 5, "max_waiting": 16}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def limited() -> AsyncIterator[Served]:
    """An engine that has never computed anything, behind low limits."""
    async with (
        fake_engine(max_model_len=LENGTH, **ENGINE) as (engine, _),
        serving(engine, "starlette", LIMITS) as served,
    ):
        yield served


@pytest_asyncio.fixture(loop_scope="module")
async def limited_http(limited: Served) -> AsyncIterator[httpx.AsyncClient]:
    """A client, and at the end proof that the engine has heard nothing."""
    before = limited.engine.stats()
    async with all_ended(), plain_client(limited.url) as client:
        yield client
    assert limited.engine.stats() == before
    assert before.prompt_tokens == before.running == before.waiting == 0
    assert not any(before.finished.values())


def check(answer: httpx.Response, status: int, param: str | None, code: str | None) -> str:
    """Check an error's body; gives its message."""
    assert answer.headers["content-type"] == "application/json"
    assert answer.headers["x-request-id"]
    body = answer.json()
    assert set(body) == {"error"}
    error = body["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert (answer.status_code, error["param"], error["code"]) == (status, param, code), error["message"]
    assert error["type"] == ("invalid_request_error" if status < 500 else "server_error")
    message: str = error["message"]
    assert message
    assert len(message) < 500
    return message


def chat(**fields: Any) -> dict[str, Any]:
    return {"messages": HELLO, **fields}


def text(**fields: Any) -> dict[str, Any]:
    return {"prompt": "Hello!", **fields}


BAD_SAMPLING: dict[str, list[Any]] = {
    "temperature": [-0.1, 2.1],
    "top_p": [0, 1.1],
    "top_k": [-2],
    "min_p": [-0.1, 1.1],
    "seed": [2**63],
    "n": [0, -1, 9, 10**6],
    "min_tokens": [-1, 10**12],
    "max_tokens": [-1],
    "stop": [[""], ["x" * 1025], ["x"] * 257, ""],
    "stop_token_ids": [[2048], [-1], [1] * 1025],
    "presence_penalty": [2.1],
    "frequency_penalty": [-2.1],
    "repetition_penalty": [0],
    "logit_bias": [{"2048": 1}, {"-1": 1}, {str(i): 0 for i in range(1025)}],
    "allowed_token_ids": [[], [2048]],
    "bad_words": [[""], [" "]],
    "priority": [2**31],
    "request_id": ["", "x" * 1025],
    "cache_salt": ["", "x" * 1025],
    "tenant": ["", "x" * 257],
}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("name", BAD_SAMPLING)
async def test_a_bad_value_is_refused_by_its_fields_name(
    limited_http: httpx.AsyncClient, name: str, stream: bool
) -> None:
    for value in BAD_SAMPLING[name]:
        for path, body in ((CHAT, chat()), (COMPLETION, text())):
            answer = await limited_http.post(path, json={**body, name: value, "stream": stream})
            message = check(answer, 400, name, "invalid_value")
            assert name in message


@pytest.mark.parametrize(
    ("path", "body", "param", "hint"),
    [
        (CHAT, {"prompt": "a"}, "prompt", "is for /v1/completions"),
        (COMPLETION, chat(), "messages", "are for /v1/chat/completions"),
        (CHAT, chat(options={"num_predict": 3}), "options", "max_tokens for num_predict"),
        (COMPLETION, text(options={"num_predict": 3}), "options", "max_tokens for num_predict"),
        ("/v1/responses", {"input": "a", "options": {"num_ctx": 3}}, "options", "--max-model-len"),
    ],
)
async def test_a_field_of_another_path_or_server_is_refused_with_what_to_give_instead(
    limited_http: httpx.AsyncClient, path: str, body: dict[str, Any], param: str, hint: str
) -> None:
    assert hint in check(await limited_http.post(path, json=body), 400, param, "unsupported_parameter")


@pytest.mark.parametrize(
    ("path", "body", "param", "code"),
    [
        (CHAT, chat(max_token=3), "max_token", "unknown_parameter"),
        (CHAT, chat(max_tokens="3"), "max_tokens", "invalid_type"),
        (CHAT, chat(stream=1), "stream", "invalid_type"),
        (CHAT, [], None, "invalid_type"),
        (CHAT, {}, "messages", "missing_required_parameter"),
        (COMPLETION, {}, "prompt", "missing_required_parameter"),
        ("/abort", {}, "request_id", "missing_required_parameter"),
        ("/detokenize", {}, None, "invalid_type"),
        (COMPLETION, text(min_tokens=5, max_tokens=4), "min_tokens", "invalid_value"),
        (CHAT, chat(max_completion_tokens=0), "max_completion_tokens", "invalid_value"),
        (CHAT, chat(max_tokens=0), "max_tokens", "invalid_value"),
        (CHAT, chat(logprobs=True, top_logprobs=6), "top_logprobs", "invalid_value"),
        (CHAT, chat(logprobs=True, top_logprobs=-1), "top_logprobs", "invalid_value"),
        (COMPLETION, text(logprobs=6), "logprobs", "invalid_value"),
        (COMPLETION, text(prompt=[2048]), "prompt", "invalid_value"),
        (COMPLETION, text(prompt=[-1]), "prompt", "invalid_value"),
        (COMPLETION, text(prompt=[[5], [2048]]), "prompt", "invalid_value"),
        (COMPLETION, text(prompt=[2**40]), "prompt", "invalid_value"),
        (CHAT, {"messages": [{"role": "wizard", "content": "Hello!"}]}, "messages", "invalid_value"),
        (CHAT, {"messages": [{"role": "user"}]}, "messages", "invalid_value"),
        (CHAT, chat(add_generation_prompt=True, continue_final_message=True), "add_generation_prompt", "invalid_value"),
        (CHAT, chat(chat_template_kwargs={"documents": []}), "chat_template_kwargs", "invalid_value"),
        (COMPLETION, text(prompt=["a"] * 4), None, "invalid_value"),
        (COMPLETION, text(prompt=[[5]] * 4), None, "invalid_value"),
        (CHAT, {"messages": HELLO * 4}, None, "invalid_value"),
    ],
)
async def test_a_bad_request_names_its_own_field(
    limited_http: httpx.AsyncClient, path: str, body: Any, param: str | None, code: str
) -> None:
    check(await limited_http.post(path, json=body), 400, param, code)


async def test_a_prompt_that_is_too_long_is_refused(limited_http: httpx.AsyncClient) -> None:
    long = "the fox and the owl " * 100
    for body in (text(prompt=long), text(prompt=[long, "a"]), text(prompt=[5] * LENGTH), text(prompt=[[5] * LENGTH])):
        for stream in (False, True):
            answer = await limited_http.post(COMPLETION, json={**body, "stream": stream})
            message = check(answer, 400, "prompt", "context_length_exceeded")
            # What clients look for: langchain_openai 1.7 (_handle_openai_bad_request) the first, and litellm 1.106
            # (is_error_str_context_window_exceeded) the second.
            assert "prompt is too long" in message
            assert f"this model's maximum context length is {LENGTH} tokens" in message
    answer = await limited_http.post(CHAT, json={"messages": [{"role": "user", "content": long}]})
    check(answer, 400, "messages", "context_length_exceeded")


async def test_more_places_than_may_wait_are_refused(limited_http: httpx.AsyncClient) -> None:
    answer = await limited_http.post(COMPLETION, json=text(prompt=["a"] * 3, n=6))
    assert "max_waiting" in check(answer, 400, "n", "invalid_value")


@pytest.mark.parametrize("path", [CHAT, COMPLETION, "/tokenize", "/detokenize", "/abort"])
async def test_a_body_that_is_too_large_is_refused(limited_http: httpx.AsyncClient, path: str) -> None:
    async def pieces() -> AsyncIterator[bytes]:
        for _ in range(70):
            yield b" " * 1000

    for content in (b" " * 70_000, pieces()):
        answer = await limited_http.post(path, content=content, headers={"content-type": "application/json"})
        message = check(answer, 413, None, "request_too_large")
        assert "65,536" in message
        assert answer.headers["connection"] == "close"


async def test_a_body_of_the_largest_size_is_read(limited_http: httpx.AsyncClient) -> None:
    body = b"{" + b" " * (2**16 - 2) + b"}"
    headers = {"content-type": "application/json"}
    check(await limited_http.post(CHAT, content=body, headers=headers), 400, "messages", "missing_required_parameter")


@pytest.mark.parametrize("media_type", ["application/json; charset=utf-8", "Application/JSON", "application/json ;a=b"])
async def test_jsons_media_type_may_say_more(limited_http: httpx.AsyncClient, media_type: str) -> None:
    answer = await limited_http.post("/tokenize", content=b'{"prompt": "a"}', headers={"content-type": media_type})
    assert answer.status_code == 200
