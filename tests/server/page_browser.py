"""The built-in page in a headless browser, and what it talks to: a server on the test's loop, a device that talks."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Any

from playwright.async_api import Browser, ConsoleMessage, Locator, Page, Request, async_playwright, expect
from server.conftest import listening
from starlette.applications import Starlette
from starlette.requests import Request as Asked
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

from aioengine import Engine
from aioengine.models.folder import DEMO_MODEL
from aioengine.scheduler.plan import RowSampling
from aioengine.server import ServerConfig, create_app
from aioengine.server.pages import PAGE
from aioengine.text.tokenizer import Tokenizer
from doubles.fake_executor import FakeExecutor

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)

TOKENIZER = Tokenizer.load(DEMO_MODEL)


@asynccontextmanager
async def browser_process() -> AsyncIterator[Browser]:
    expect.set_options(timeout=20_000)  # of waits that take milliseconds where nothing else runs
    async with async_playwright() as playwright:
        browser = await playwright.chromium.launch(executable_path=CHROMIUM)
        try:
            yield browser
        finally:
            await browser.close()


@asynccontextmanager
async def origin_of(app: Any) -> AsyncIterator[str]:
    """``http://127.0.0.1:PORT``, where an ASGI app is served."""
    async with listening(app) as server:
        yield f"http://127.0.0.1:{server.port}"


class Tab:
    """The page in a tab of its own.

    Attributes:
        requests: all that the tab has asked for.
        complaints: the errors and warnings of its console, exceptions of scripts included.
    """

    def __init__(self, page: Page) -> None:
        self.page = page
        self.requests: list[Request] = []
        self.complaints: list[str] = []
        page.on("request", lambda request: self.requests.append(request))
        page.on("pageerror", lambda error: self.complaints.append(str(error)))
        page.on("console", self._hear)
        self.message = page.get_by_role("textbox", name="Message", exact=True)
        self.questions = page.locator("article.user .text")
        self.answers = page.locator("article.assistant .text")
        self.folded = page.locator("article.assistant details")
        self.notes = page.locator("article .note")
        self.examples = page.get_by_role("group", name="Examples").get_by_role("button")
        self.failure = page.get_by_role("alert")
        self.send = page.get_by_role("button", name="Send")
        self.stop = page.get_by_role("button", name="Stop")

    def _hear(self, said: ConsoleMessage) -> None:
        if said.type in ("error", "warning"):
            self.complaints.append(said.text)

    async def ask(self, text: str) -> None:
        await self.message.fill(text)
        await self.message.press("Enter")

    async def set(self, label: str, value: str) -> None:
        """Make one of the sampling settings."""
        if not await self.page.get_by_label(label).is_visible():
            await self.page.locator("#settings > summary").click()
        await self.page.get_by_label(label).fill(value)

    def plot(self, title: str) -> Locator:
        return self.page.locator("figure", has=self.page.get_by_role("heading", name=title, exact=True))

    async def expect_end_in_sight(self) -> None:
        await expect(self.page.locator("#end")).to_be_in_viewport()

    def asked(self) -> list[dict[str, Any]]:
        """The bodies of all the chat requests so far."""
        bodies = [request.post_data for request in self.requests if request.url.endswith("/chat/completions")]
        return [json.loads(body or "{}") for body in bodies]


@asynccontextmanager
async def tab_at(
    browser: Browser, url: str, *, complaints: str | None = None, script: str = "", **context: Any
) -> AsyncIterator[Tab]:
    """Open ``url``, and check in the end that the tab has asked for nothing elsewhere, and had no complaints.

    Args:
        complaints: a pattern of those that are expected.
        script: what the tab runs before the page's own.
        context: options of the browser's context, such as ``viewport``.
    """
    opened = await browser.new_context(**context)
    try:
        tab = Tab(await opened.new_page())
        await tab.page.add_init_script(script)
        await tab.page.goto(url)
        yield tab
        elsewhere = [request.url for request in tab.requests if not request.url.startswith(url)]
        # The icon is in the page itself.
        assert all(url.startswith("data:image/") for url in elsewhere), elsewhere
        unexpected = [said for said in tab.complaints if complaints is None or not re.search(complaints, said)]
        assert not unexpected
    finally:
        await opened.close()


def _ids(text: str) -> list[int]:
    return TOKENIZER.encode(text, add_special_tokens=False)


class Talker(FakeExecutor):
    """A device that gives the same reply to every message.

    Args:
        reply: what it says.
        is_endless: it says it again and again.
        hold_after: how the reply begins; once it has said that, the first time, it stops in a step until `go_on`.
        options: of the `FakeExecutor`.
    """

    def __init__(self, reply: str, *, is_endless: bool = False, hold_after: str = "", **options: Any) -> None:
        options = {"num_blocks": 1024, "max_model_len": 8192, **options}
        super().__init__(vocab_size=2048, sampler=self._speaker(reply, is_endless), **options)
        self._hold_after = len(_ids(hold_after)) if hold_after else -1

    def go_on(self) -> None:
        self.is_manual = False
        self.complete()

    def _speaker(self, reply: str, is_endless: bool) -> Callable[[list[int], RowSampling], int]:
        header, answer = _ids("<|im_start|>assistant\n"), _ids(reply + ("" if is_endless else "<|im_end|>"))

        def sample(token_ids: list[int], _: RowSampling) -> int:
            start = len(token_ids) - token_ids[::-1].index(header[0]) - 1 + len(header)
            said = len(token_ids) - start
            if said == self._hold_after:
                self.is_manual, self._hold_after = True, -1
            return answer[said % len(answer)]

        return sample


def event(content: str) -> str:
    """The data of a chat completion's event."""
    return json.dumps({"choices": [{"index": 0, "delta": {"content": content}}]}, ensure_ascii=False)


def app_that_says(pieces: Callable[[], AsyncIterator[bytes]]) -> Starlette:
    """An API that is no engine's: whatever is asked, it sends these pieces of an event stream."""

    async def answer(request: Asked) -> Response:
        return StreamingResponse(pieces(), media_type="text/event-stream")

    async def home(request: Asked) -> Response:
        return Response(PAGE.body, headers=PAGE.headers)

    async def models(request: Asked) -> Response:
        return JSONResponse({"object": "list", "data": [{"id": "fox"}]})

    async def metrics(request: Asked) -> Response:
        return PlainTextResponse("")

    routes = [Route("/", home), Route("/v1/models", models), Route("/metrics", metrics)]
    return Starlette(routes=[*routes, Route("/v1/chat/completions", answer, methods=["POST"])])


@asynccontextmanager
async def page_of(
    browser: Browser, app: Any, config: ServerConfig | None = None, *, formats: Mapping[str, str] = {}, **options: Any
) -> AsyncIterator[Tab]:
    """A tab with the page of an app, or of an engine with that device, which is served meanwhile; see `tab_at`.

    Args:
        formats: of the engine's tool calls and reasoning, as fields of its config.
    """
    if isinstance(app, Talker):
        async with (
            Engine(executor=app, **formats) as engine,
            page_of(browser, create_app(engine, config), **options) as tab,
        ):
            yield tab
    else:
        async with origin_of(app) as origin, tab_at(browser, f"{origin}/", **options) as tab:
            yield tab
