"""The FastAPI app: typed answers, streams that end with their client, errors by handlers, a replaced engine."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio
from examples.conftest import Client, events, running_asgi, until

from aioengine import CompletionDelta, Engine, StepFailed, Stream
from aioengine.testing import FakeExecutor

SUM = {"question": "What is 8 + 7?"}
STORY = {"question": "Tell me a short story about a fox named Ruby."}


@pytest_asyncio.fixture
async def client() -> AsyncIterator[Client]:
    async with running_asgi("fastapi_dependency") as served:
        yield served


async def test_it_answers(client: Client) -> None:
    answer = await client.http.post("/ask", json=SUM)
    assert answer.json() == {"answer": "8 + 7 = 15.", "finish_reason": "stop", "num_tokens": 10}


async def test_it_streams(client: Client) -> None:
    answer = await client.http.post("/ask/stream", json=STORY)
    assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
    deltas = events(answer.text)
    assert len(deltas) > 5
    assert "Ruby" in "".join(delta["text"] for delta in deltas)
    assert [delta["finish_reason"] for delta in deltas[-2:]] == [None, "stop"]


@pytest.mark.parametrize("path", ["/ask", "/ask/stream"])
async def test_a_client_that_leaves_before_the_first_token_ends_its_request(client: Client, path: str) -> None:
    async with client.paused():
        asking = asyncio.get_running_loop().create_task(client.http.post(path, json=STORY))
        await until(lambda: client.num_live() == 1)
        asking.cancel()
        await client.until_idle()
    assert client.num_aborted() == 1


async def test_a_client_that_leaves_amid_its_stream_ends_its_request(client: Client) -> None:
    async with client.http.stream("POST", "/ask/stream", json=STORY) as answer:
        lines = answer.aiter_lines()
        assert (await anext(lines)).startswith("data: {")
        await client.engine.pause("keep")
        assert client.num_live() == 1
    await client.until_idle()
    assert client.num_aborted() == 1


async def test_a_client_that_leaves_amid_a_write_ends_its_request(client: Client) -> None:
    written: list[CompletionDelta] = []

    def large_event(delta: CompletionDelta) -> bytes:
        written.append(delta)
        return b"x" * 2**24  # more than sockets hold

    client.module.event = large_event
    body = json.dumps(STORY).encode()
    _, writer = await asyncio.open_connection("127.0.0.1", client.port)
    writer.write(b"POST /ask/stream HTTP/1.1\r\nhost: a\r\ncontent-type: application/json\r\n")
    writer.write(b"content-length: %d\r\n\r\n%s" % (len(body), body))
    await until(lambda: len(written) == 1)
    await client.engine.pause("keep")
    assert client.num_live() == 1
    writer.transport.abort()
    await client.until_idle()
    assert client.num_aborted() == 1


@pytest.mark.parametrize("path", ["/ask", "/ask/stream"])
async def test_an_overloaded_engine_is_a_503(client: Client, path: str) -> None:
    async with client.overloaded():
        answer = await client.http.post(path, json=SUM)
        assert answer.status_code == 503
        assert "wait already" in answer.json()["error"]["message"]
        assert int(answer.headers["retry-after"]) >= 1
    await client.until_idle()
    assert (await client.http.post(path, json=SUM)).status_code == 200


@pytest.mark.parametrize("path", ["/ask", "/ask/stream"])
async def test_what_does_not_fit_is_refused(client: Client, path: str) -> None:
    for body in ({}, {"question": ""}, {"question": "a", "max_tokens": 0}, {"question": "a" * 4001}):
        assert (await client.http.post(path, json=body)).status_code == 422
    too_long = await client.http.post(path, json={"question": "x9" * 2000})
    assert too_long.status_code == 400
    assert too_long.json()["error"]["message"].startswith("prompt is too long: ")


async def test_a_stream_that_breaks_says_so(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    take = Stream.take

    def fail_after_some(stream: Stream) -> object:
        if stream.result.outputs[0].token_ids[3:]:
            raise StepFailed("secret internals")
        return take(stream)

    monkeypatch.setattr(Stream, "take", fail_after_some)
    answer = await client.http.post("/ask/stream", json=STORY)
    assert answer.status_code == 200
    assert events(answer.text)[-1] == {"error": "StepFailed"}
    await client.until_idle()


async def test_another_engine_in_its_place(client: Client) -> None:
    async with Engine(executor=FakeExecutor(vocab_size=2048, sampler=lambda token_ids, sampling: 2)) as fake:
        client.module.app.dependency_overrides[client.module.get_engine] = lambda: fake
        answer = await client.http.post("/ask", json=SUM)
    assert answer.json() == {"answer": "", "finish_reason": "stop", "num_tokens": 1}


async def test_the_api_is_beside_it_and_the_endpoints_are_documented(client: Client) -> None:
    assert (await client.http.get("/ai/v1/models")).json()["data"][0]["id"] == "demo"
    schema = (await client.http.get("/openapi.json")).json()
    assert sorted(schema["paths"]) == ["/ask", "/ask/stream"]
