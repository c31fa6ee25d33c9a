"""The web apps: they answer and stream, end a request with its client, say overload and bad input, and have the API."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any

import httpx
import pytest
from examples.conftest import Client, running_aiohttp, running_asgi, until
from nightly import few
from openai import AsyncOpenAI

from aioengine import Engine
from aioengine.testing import FakeExecutor

SUM = {"question": "What is 8 + 7?"}
STORY = {"question": "Tell me a short story about a fox named Ruby."}
WISH = {"about": "a fox named Ruby"}
CHAT = {"messages": [{"role": "user", "content": "Hello"}]}
LONG = "fox " * 5000

CALLS: dict[str, list[tuple[str, str, Any]]] = {
    "starlette_app": [("POST", "/story", WISH), ("POST", "/story/later", WISH)],
    "fastapi_dependency": [("POST", "/ask", SUM), ("POST", "/ask/stream", STORY)],
    "aiohttp_app": [("POST", "/ask", SUM), ("GET", "/story", None)],
}
"""Each app's own routes: method, path, body."""
ANSWERED = [(name, *call) for name, calls in CALLS.items() for call in calls if call[1] != "/story/later"]
STREAMED = [("fastapi_dependency", "POST", "/ask/stream", STORY), ("aiohttp_app", "GET", "/story", None)]


def running(name: str) -> AbstractAsyncContextManager[Client]:
    return running_aiohttp(name) if name == "aiohttp_app" else running_asgi(name)


@asynccontextmanager
async def asking(client: Client, method: str, path: str, body: Any) -> AsyncIterator[asyncio.Task[httpx.Response]]:
    """A request that does not get any further; it is cancelled at the end."""
    async with client.paused():
        task = asyncio.get_running_loop().create_task(client.http.request(method, path, json=body))
        await until(lambda: client.num_live() == 1)
        yield task
        task.cancel()
        await client.until_idle()


@pytest.mark.parametrize(
    ("name", "path", "body", "answer"),
    [
        ("fastapi_dependency", "/ask", SUM, {"answer": "8 + 7 = 15.", "finish_reason": "stop", "num_tokens": 10}),
        ("aiohttp_app", "/ask", SUM, {"answer": "8 + 7 = 15.", "finish_reason": "stop"}),
    ],
)
async def test_it_answers_and_the_api_is_beside_it(name: str, path: str, body: Any, answer: dict[str, Any]) -> None:
    async with running(name) as client:
        assert (await client.http.post(path, json=body)).json() == answer
        asked = {"prompt": "Once upon a time", "max_tokens": 5}
        completed = (await client.http.post("/ai/v1/completions", json=asked)).json()
        assert completed["usage"]["completion_tokens"] == 5


@pytest.mark.parametrize(("name", "method", "path", "body"), STREAMED)
async def test_a_stream_comes_in_pieces_and_ends_with_its_client(name: str, method: str, path: str, body: Any) -> None:
    async with running(name) as client:
        about = {"about": "a fox named Ruby"} if method == "GET" else {}
        async with client.http.stream(method, path, json=body, params=about) as answer:
            pieces = [piece async for piece in answer.aiter_text()]
        assert len(pieces) > 5
        assert "Ruby" in "".join(pieces)
        async with client.http.stream(method, path, json=body) as answer:
            texts = answer.aiter_text()
            assert await anext(texts)
            await client.engine.pause("keep")
            assert client.num_live() == 1
        await client.until_idle()
        assert client.num_aborted() == 1


@pytest.mark.parametrize(("name", "method", "path", "body"), few(ANSWERED[:2], of=ANSWERED))
async def test_a_client_that_leaves_before_the_first_token_ends_its_request(
    name: str, method: str, path: str, body: Any
) -> None:
    async with running(name) as client:
        async with asking(client, method, path, body):
            pass
        assert client.num_aborted() == 1
        assert (await client.http.request(method, path, json=body)).status_code == 200


@pytest.mark.parametrize("name", CALLS)
async def test_an_overloaded_engine_is_a_503_for_all_of_it(name: str) -> None:
    async with running(name) as client:
        async with client.overloaded():
            for method, path, body in [*CALLS[name], ("POST", "/ai/v1/chat/completions", CHAT)]:
                answer = await client.http.request(method, path, json=body)
                assert answer.status_code == 503
                assert "wait already" in answer.text or path.startswith("/ai")
                assert int(answer.headers["retry-after"]) >= 1
        await client.until_idle()
        assert not getattr(client.module, "stories", [])


NO_OBJECTS = (b"", b"{", b"[]", b"{}")


@pytest.mark.parametrize(
    ("name", "path", "bodies", "status"),
    [
        ("starlette_app", "/story", [*NO_OBJECTS, b'{"about": 7}', b'{"about": "%s"}' % LONG.encode()], 400),
        ("aiohttp_app", "/ask", [*NO_OBJECTS, b'{"question": "%s"}' % LONG.encode()], 400),
        ("fastapi_dependency", "/ask", [b"{}", b'{"question": ""}', b'{"question": "a", "max_tokens": 0}'], 422),
        ("fastapi_dependency", "/ask/stream", [b"{}", b'{"question": "%s"}' % (b"a" * 4001)], 422),
        ("fastapi_dependency", "/ask", [b'{"question": "%s"}' % (b"x9" * 2000)], 400),
        ("fastapi_dependency", "/ask/stream", [b'{"question": "%s"}' % (b"x9" * 2000)], 400),
    ],
)
async def test_what_does_not_fit_is_refused(name: str, path: str, bodies: list[bytes], status: int) -> None:
    async with running(name) as client:
        for body in bodies:
            answer = await client.http.post(path, content=body, headers={"content-type": "application/json"})
            assert answer.status_code == status
            if b"x9" in body:
                assert answer.json()["error"]["message"].startswith("prompt is too long: ")
        assert client.num_live() == 0


# What one of them has


async def test_a_story_is_written_behind_the_response() -> None:
    async with running("starlette_app") as client:
        async with client.paused():
            answer = await client.http.post("/story/later", json=WISH)
            assert (answer.status_code, answer.json()) == (202, {"accepted": WISH["about"]})
            assert (await client.http.get("/stories")).json() == {"stories": []}
        await until(lambda: client.module.stories)
        (story,) = (await client.http.get("/stories")).json()["stories"]
        assert "Ruby" in story


async def test_the_official_client_uses_the_mounted_api_and_the_page_is_beside_it() -> None:
    async with running("starlette_app") as client:
        base_url = f"http://127.0.0.1:{client.port}/ai/v1"
        async with AsyncOpenAI(base_url=base_url, api_key="none", http_client=client.http) as openai:
            stream = await openai.chat.completions.create(
                model="demo", messages=[{"role": "user", "content": "What is 8 + 7?"}], stream=True, temperature=0
            )
            pieces = [chunk.choices[0].delta.content or "" async for chunk in stream]
            page = await client.http.get("/ai/")
        assert "".join(pieces) == "8 + 7 = 15."
        assert page.headers["content-type"].startswith("text/html")


async def test_another_engine_in_its_place_and_the_endpoints_are_documented() -> None:
    async with (
        running("fastapi_dependency") as client,
        Engine(executor=FakeExecutor(vocab_size=2048, sampler=lambda token_ids, sampling: 2)) as fake,
    ):
        schema = (await client.http.get("/openapi.json")).json()
        assert sorted(schema["paths"]) == ["/ask", "/ask/stream"]
        client.module.app.dependency_overrides[client.module.get_engine] = lambda: fake
        answer = await client.http.post("/ask", json=SUM)
        assert answer.json() == {"answer": "", "finish_reason": "stop", "num_tokens": 1}
