"""The aiohttp app, by aiohttp's own client."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import aiohttp
import pytest_asyncio
from examples.conftest import Client, running_aiohttp, until

SUM = {"question": "What is 8 + 7?"}


@pytest_asyncio.fixture
async def client() -> AsyncIterator[Client]:
    async with running_aiohttp("aiohttp_app") as served:
        yield served


@pytest_asyncio.fixture
async def session(client: Client) -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession(f"http://127.0.0.1:{client.port}") as opened:
        yield opened


async def test_it_answers(session: aiohttp.ClientSession) -> None:
    async with session.post("/ask", json=SUM) as answer:
        assert await answer.json() == {"answer": "8 + 7 = 15.", "finish_reason": "stop"}


async def test_it_streams_a_story(session: aiohttp.ClientSession) -> None:
    async with session.get("/story", params={"about": "a fox named Ruby"}) as answer:
        pieces = [piece async for piece in answer.content.iter_any()]
    assert len(pieces) > 5
    assert "Ruby" in b"".join(pieces).decode()


async def test_a_client_that_leaves_ends_its_request(client: Client, session: aiohttp.ClientSession) -> None:
    async def ask() -> None:
        async with session.post("/ask", json=SUM):
            pass

    async with client.paused():
        asking = asyncio.get_running_loop().create_task(ask())
        await until(lambda: client.num_live() == 1)
        asking.cancel()
        await client.until_idle()
    assert client.num_aborted() == 1


async def test_a_client_that_leaves_amid_its_story_ends_it(client: Client, session: aiohttp.ClientSession) -> None:
    answer = await session.get("/story")
    assert await answer.content.readany()
    await client.engine.pause("keep")
    assert client.num_live() == 1
    answer.close()
    await client.until_idle()
    assert client.num_aborted() == 1


async def test_an_overloaded_engine_is_a_503_for_all_of_it(client: Client, session: aiohttp.ClientSession) -> None:
    chat = {"messages": [{"role": "user", "content": "Hello"}]}
    async with client.overloaded():
        for asking in (
            session.post("/ask", json=SUM),
            session.get("/story"),
            session.post("/ai/v1/chat/completions", json=chat),
        ):
            async with asking as answer:
                assert answer.status == 503
                assert int(answer.headers["Retry-After"]) >= 1
    await client.until_idle()


async def test_rubbish_is_a_400(client: Client, session: aiohttp.ClientSession) -> None:
    for body in (b"", b"{", b"[]", b"{}", b'{"question": "%s"}' % (b"fox " * 5000)):
        async with session.post("/ask", data=body) as answer:
            assert answer.status == 400
    async with session.get("/story", params={"about": "fox " * 1500}) as answer:
        assert answer.status == 400
        assert (await answer.json())["error"]["message"].startswith("prompt is too long: ")
    assert client.num_live() == 0


async def test_the_api_is_beside_it(session: aiohttp.ClientSession) -> None:
    async with session.post("/ai/v1/completions", json={"prompt": "Once upon a time", "max_tokens": 5}) as answer:
        body = await answer.json()
    assert body["usage"]["completion_tokens"] == 5
