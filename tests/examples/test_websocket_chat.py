"""The websocket chat, by the `websockets` client, and its page in a browser."""

from __future__ import annotations

import json
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
import pytest_asyncio
from examples.conftest import Client, running_asgi, until
from playwright.async_api import async_playwright, expect
from websockets.asyncio.client import ClientConnection, connect

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
STORY = "Tell me a short story about a fox named Ruby."


@pytest_asyncio.fixture
async def client() -> AsyncIterator[Client]:
    async with running_asgi("websocket_chat") as served:
        yield served


@asynccontextmanager
async def talking(client: Client) -> AsyncIterator[ClientConnection]:
    async with connect(f"ws://127.0.0.1:{client.port}/chat", proxy=None) as connection:
        yield connection


async def hear(connection: ClientConnection) -> dict[str, Any]:
    event: dict[str, Any] = json.loads(await connection.recv())
    return event


async def hear_all(connection: ClientConnection) -> tuple[str, dict[str, Any]]:
    """An answer's text, and the event after it."""
    text = ""
    while "text" in (event := await hear(connection)):
        text += event["text"]
    return text, event


async def say(connection: ClientConnection, text: str) -> tuple[str, dict[str, Any]]:
    await connection.send(text)
    return await hear_all(connection)


async def test_it_remembers_what_was_said_in_each_conversation(client: Client) -> None:
    async with talking(client) as tom, talking(client) as ann:
        assert await say(tom, "Hi, I am Tom.") == ("Nice to meet you, Tom!", {"end": "stop"})
        await say(ann, "Hi, I am Ann.")
        assert await say(tom, "What is my name?") == ("Your name is Tom.", {"end": "stop"})


async def test_an_answer_is_stopped_while_it_streams_and_the_chat_goes_on(client: Client) -> None:
    async with talking(client) as connection:
        await connection.send(STORY)
        assert (await hear(connection))["text"]
        await client.engine.pause("keep")
        await connection.send("/stop")
        assert (await hear_all(connection))[1] == {"end": "abort"}
        await client.engine.resume()
        assert client.num_live() == 0
        assert (await say(connection, "What is 8 + 7?"))[1] == {"end": "stop"}


async def test_one_answer_at_a_time(client: Client) -> None:
    async with talking(client) as connection:
        async with client.paused():
            await connection.send("What is 8 + 7?")
            assert await say(connection, "Hello?") == ("", {"error": "wait for the answer, or /stop it"})
        assert await hear_all(connection) == ("8 + 7 = 15.", {"end": "stop"})


@pytest.mark.parametrize("breaks", [True, False])
async def test_a_client_that_leaves_amid_an_answer_or_breaks_its_connection_ends_it(
    client: Client, breaks: bool
) -> None:
    async with talking(client) as connection:
        await connection.send(STORY)
        assert (await hear(connection))["text"]
        await client.engine.pause("keep")
        assert client.num_live() == 1
        if breaks:
            connection.transport.abort()
    await client.until_idle()
    assert client.num_aborted() == 1


async def test_what_does_not_fit_is_told_and_forgotten(client: Client) -> None:
    async with talking(client) as connection:
        text, event = await say(connection, "fox " * 5000)
        assert text == ""
        assert event["error"].startswith("prompt is too long: ")
        await connection.send(b"\xff\x00 rubbish")
        await hear_all(connection)
        assert await say(connection, "What is 8 + 7?") == ("8 + 7 = 15.", {"end": "stop"})


@pytest.mark.nightly
@pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium")
async def test_the_page_in_a_browser(client: Client) -> None:
    async with async_playwright() as playwright:
        browser = await playwright.chromium.launch(executable_path=CHROMIUM)
        page = await browser.new_page()
        await page.goto(f"http://127.0.0.1:{client.port}/")
        text = page.get_by_role("textbox")
        await text.fill("What is 8 + 7?")
        await text.press("Enter")
        await expect(page.locator("body")).to_contain_text("> What is 8 + 7? 8 + 7 = 15.")
        await client.engine.pause("keep")
        await text.fill(STORY)
        await page.get_by_role("button", name="Say").click()
        await until(lambda: client.num_live() == 1)
        await page.get_by_role("button", name="Stop").click()
        await client.until_idle()
        await client.engine.resume()
        await text.fill("What is 5 + 5?")
        await text.press("Enter")
        await expect(page.locator("body")).to_contain_text("5 + 5 = 10.")
        await browser.close()
