"""The Starlette app: its own routes, work behind the response, and the mounted API."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import httpx
import pytest_asyncio
from examples.conftest import Client, running_asgi, until
from openai import AsyncOpenAI

WISH = {"about": "a fox named Ruby"}


@pytest_asyncio.fixture
async def client() -> AsyncIterator[Client]:
    async with running_asgi("starlette_app") as served:
        yield served


async def test_it_tells_a_story(client: Client) -> None:
    answer = await client.http.post("/story", json=WISH)
    assert answer.status_code == 200
    assert "Ruby" in answer.json()["story"]
    assert answer.json()["finish_reason"] == "stop"


async def test_a_story_is_written_behind_the_response(client: Client) -> None:
    async with client.paused():
        answer = await client.http.post("/story/later", json=WISH)
        assert (answer.status_code, answer.json()) == (202, {"accepted": WISH["about"]})
        assert (await client.http.get("/stories")).json() == {"stories": []}
    await until(lambda: client.module.stories)
    (story,) = (await client.http.get("/stories")).json()["stories"]
    assert "Ruby" in story


async def test_a_client_that_leaves_ends_its_request(client: Client) -> None:
    async with client.paused():
        asking = asyncio.get_running_loop().create_task(client.http.post("/story", json=WISH))
        await until(lambda: client.num_live() == 1)
        asking.cancel()
        await client.until_idle()
    assert client.num_aborted() == 1
    assert (await client.http.post("/story", json=WISH)).status_code == 200


async def test_an_overloaded_engine_is_a_503_for_all_of_it(client: Client) -> None:
    async with client.overloaded():
        for path in ("/story", "/story/later"):
            answer = await client.http.post(path, json=WISH)
            assert answer.status_code == 503
            assert int(answer.headers["retry-after"]) >= 1
        chat = {"messages": [{"role": "user", "content": "Hello"}]}
        answer = await client.http.post("/ai/v1/chat/completions", json=chat)
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "overloaded")
    await client.until_idle()
    assert client.module.stories == []


async def test_rubbish_is_a_400(client: Client) -> None:
    for body in (b"", b"{", b"[]", b"{}", b'{"about": 7}', b'{"about": "%s"}' % (b"fox " * 5000)):
        answer = await client.http.post("/story", content=body)
        assert (answer.status_code, list(answer.json())) == (400, ["error"])
    assert client.num_live() == 0


async def test_the_official_client_uses_the_mounted_api(client: Client) -> None:
    base_url = f"http://127.0.0.1:{client.port}/ai/v1"
    async with AsyncOpenAI(base_url=base_url, api_key="none", http_client=client.http) as openai:
        stream = await openai.chat.completions.create(
            model="demo", messages=[{"role": "user", "content": "What is 8 + 7?"}], stream=True, temperature=0
        )
        pieces = [chunk.choices[0].delta.content or "" async for chunk in stream]
    assert "".join(pieces) == "8 + 7 = 15."


async def test_the_page_is_below_the_mount(client: Client) -> None:
    page = await client.http.get("/ai/")
    assert page.headers["content-type"].startswith("text/html")
    assert isinstance(page, httpx.Response)
