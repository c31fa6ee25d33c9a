"""The built-in page, as it is seen in a browser: the real page, server and engine, in Chromium."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import re
from collections.abc import AsyncIterator
from importlib import resources

import pytest
import pytest_asyncio
from starlette.applications import Starlette
from starlette.routing import Mount
from starlette.types import Receive, Scope, Send

from aioengine import Engine
from aioengine.server import ServerConfig, create_app
from aioengine.server.pages import PAGE

pytest.importorskip("playwright.async_api", reason="the page is tested with playwright")

import json
import shutil
from collections.abc import Callable
from contextlib import asynccontextmanager
from typing import Any

from contract.ways import has_load
from playwright.async_api import Browser, ConsoleMessage, Locator, Page, Request, async_playwright, expect
from server.conftest import listening
from starlette.requests import Request as Asked
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route
from waiting import until

from aioengine.models.folder import DEMO_MODEL
from aioengine.scheduler.plan import RowSampling
from aioengine.text.tokenizer import Tokenizer
from doubles.fake_executor import FakeExecutor

pytestmark = pytest.mark.asyncio(loop_scope="module")

in_depth = pytest.mark.nightly
"""What a browser takes long for. A conversation, an error, a stop and a plot are looked at each time."""

KEY = "a key of the tests"
PLOTS = ["Requests", "KV cache in use", "Tokens per second", "Time to first token", "Inter-token latency", "Loop lag"]
FAILED_TO_LOAD = "Failed to load resource"


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def browser() -> AsyncIterator[Browser]:
    if CHROMIUM is None:
        pytest.skip("no chromium, chromium-browser or google-chrome is installed")
    async with browser_process() as browser:
        yield browser


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def engine() -> AsyncIterator[Engine]:
    """With the bundled model."""
    engine = await Engine.start(seed=1, kv_cache_memory_bytes=2**24)
    yield engine
    await engine.aclose()


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
        options: of the `FakeExecutor`.
    """

    def __init__(self, reply: str, *, is_endless: bool = False, **options: Any) -> None:
        header, answer = _ids("<|im_start|>assistant\n"), _ids(reply + ("" if is_endless else "<|im_end|>"))

        def sample(token_ids: list[int], _: RowSampling) -> int:
            start = len(token_ids) - token_ids[::-1].index(header[0]) - 1 + len(header)
            return answer[(len(token_ids) - start) % len(answer)]

        super().__init__(vocab_size=2048, num_blocks=1024, max_model_len=8192, sampler=sample, **options)


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
async def page_of(browser: Browser, app: Any, config: ServerConfig | None = None, **options: Any) -> AsyncIterator[Tab]:
    """A tab with the page of an app, or of an engine with that device, which is served meanwhile; see `tab_at`."""
    if isinstance(app, Talker):
        async with Engine(executor=app) as engine, page_of(browser, create_app(engine, config), **options) as tab:
            yield tab
    else:
        async with origin_of(app) as origin, tab_at(browser, f"{origin}/", **options) as tab:
            yield tab


# talking


async def test_a_conversation_is_answered_and_remembered(browser: Browser, engine: Engine) -> None:
    app = create_app(engine, ServerConfig(served_model_name=("fox-1",)))
    async with page_of(browser, app) as tab:
        await expect(tab.page.locator("header")).to_contain_text("fox-1")
        await tab.set("Temperature", "0")
        await tab.ask("Hi, I am Tom.")
        await expect(tab.answers).to_have_text(["Nice to meet you, Tom!"])
        await tab.ask("What is my name?")
        await expect(tab.answers).to_have_text(["Nice to meet you, Tom!", "Your name is Tom."])
        await expect(tab.questions).to_have_text(["Hi, I am Tom.", "What is my name?"])
        await expect(tab.notes.last).to_contain_text(re.compile(r"^\d+ tokens · .*first after \d+ ms$"))


@pytest.mark.nightly
@pytest.mark.parametrize("how", ["button", pytest.param("escape", marks=in_depth)])
async def test_stopping_keeps_what_came_and_frees_the_engine_and_a_new_conversation_forgets(
    browser: Browser, how: str
) -> None:
    device = Talker(" and on", is_endless=True, step_time_s=0.005)
    async with Engine(executor=device) as engine, page_of(browser, create_app(engine)) as tab:
        await tab.ask("Talk")
        await expect(tab.answers).to_contain_text("and on and on")
        await (tab.stop.click() if how == "button" else tab.page.keyboard.press("Escape"))
        await expect(tab.notes).to_have_text("stopped")
        await until(has_load(engine, running=0, waiting=0))
        said = await tab.answers.inner_text()
        await tab.ask("Go on")
        await expect(tab.answers).to_have_count(2)
        await expect(tab.answers.last).to_contain_text("and on")
        roles = [(message["role"], message["content"].strip()) for message in tab.asked()[1]["messages"]]
        assert roles == [("user", "Talk"), ("assistant", said.strip()), ("user", "Go on")]
        await tab.page.get_by_role("button", name="New conversation").click()  # which stops the answer
        await expect(tab.questions).to_have_count(0)
        await expect(tab.message).to_be_focused()
        await tab.page.keyboard.type("Second")
        await tab.page.keyboard.press("Enter")
        await expect(tab.answers).to_contain_text("and on")
        await expect(tab.questions).to_have_text("Second")
        assert [message["content"] for message in tab.asked()[2]["messages"]] == ["Second"]
        await tab.stop.click()


MARKDOWN = """# Foxes

A **red** fox, `x = "<b>"`, a [page](https://example.org/a_(b)), snake_case_name, 2 * 3 * 4, ***both***.
- one
  1. inner

     ```python
     def fox():
         return "<script>"
     ```
- two

| a | b |
|---|---|
| 1 | *2* |

> quoted"""
HOSTILE = (
    "<img src=x onerror='document.title=1'> [a](javascript:document.title=1) [b](data:text/html,x) ![c](//evil/x.png)"
)


async def test_an_answers_markdown_is_shown_and_can_be_copied_and_asked_for_again(browser: Browser) -> None:
    async with page_of(browser, Talker(MARKDOWN), permissions=["clipboard-read", "clipboard-write"]) as tab:
        await tab.ask("Talk")
        await expect(tab.notes).to_have_count(1)
        answer = tab.answers
        await expect(answer.locator("h3")).to_have_text("Foxes")
        await expect(answer.locator("strong")).to_have_text(["red", "both"])
        await expect(answer.locator("p code")).to_have_text('x = "<b>"')
        await expect(answer.locator("a")).to_have_attribute("href", "https://example.org/a_(b)")
        await expect(answer.locator("a")).to_have_attribute("rel", "noopener noreferrer")
        await expect(answer.locator("p").first).to_contain_text("snake_case_name, 2 * 3 * 4, both.")
        await expect(answer.locator("ul > li > ol > li > pre[data-language=python]")).to_have_text(
            'def fox():\n    return "<script>"'
        )
        await expect(answer.locator("ul > li")).to_have_count(2)
        await expect(answer.locator("td em")).to_have_text("2")
        await expect(answer.locator("blockquote")).to_have_text("quoted")
        copied = "navigator.clipboard.readText()"
        await tab.page.get_by_role("button", name="Copy the code").click()
        await until_equal(tab, copied, 'def fox():\n    return "<script>"')
        await tab.page.get_by_role("button", name="Copy the answer").click()
        await until_equal(tab, copied, MARKDOWN)
        await tab.page.get_by_role("button", name="Try again").click()
        await expect(tab.notes).to_have_count(1)
        await expect(tab.answers).to_have_count(1)
        await tab.ask("And?")
        await expect(tab.notes).to_have_count(2)
        contents = [[message["content"] for message in asked["messages"]] for asked in tab.asked()]
        assert contents == [["Talk"], ["Talk"], ["Talk", MARKDOWN, "And?"]]
        await expect(tab.page.get_by_role("button", name="Try again")).to_have_count(1)


async def until_equal(tab: Tab, expression: str, value: str) -> None:
    """Wait until an expression of the page's has this value."""
    await tab.page.wait_for_function(f"async (value) => (await {expression}) === value", arg=value)


@in_depth
@pytest.mark.parametrize(
    "text", [HOSTILE, "**" * 3000, "[" * 5000, "x" + "`" * 999, "> " * 500 + "x", "- " * 500 + "x"]
)
async def test_no_text_of_a_model_runs_or_loads_anything_or_holds_the_page(browser: Browser, text: str) -> None:
    pieces = [event(text[start : start + 100]) for start in range(0, len(text), 100)]

    async def say() -> AsyncIterator[bytes]:
        for piece in [*pieces, "[DONE]"]:
            yield f"data: {piece}\n\n".encode()

    async with page_of(browser, app_that_says(say)) as tab:
        await tab.ask("Talk")
        await expect(tab.page.locator(".assistant[aria-busy=false]")).to_have_count(1)
        await expect(tab.answers.locator("img, script, a")).to_have_count(0)
        shown = re.sub(r"\W", "", await tab.answers.inner_text())
        assert shown == re.sub(r"\W", "", text)
        assert await tab.page.title() == "fox · aioengine"


# what goes wrong


IN_SINGLE_BYTES = """
const inBytes = () => new TransformStream({
  transform(chunk, out) { for (const byte of chunk) out.enqueue(new Uint8Array([byte])); }
});
const plainFetch = window.fetch;
window.fetch = async (...request) => {
  const response = await plainFetch(...request);
  return new Response(response.body.pipeThrough(inBytes()), response);
};
"""


@in_depth
@pytest.mark.parametrize("line_end", ["\n", "\r\n", "\r"])
@pytest.mark.parametrize("script", ["", IN_SINGLE_BYTES], ids=["at_once", "byte_by_byte"])
async def test_events_may_come_in_any_pieces(browser: Browser, line_end: str, script: str) -> None:
    two_lines = event("und Käse").replace(' "delta"', line_end + 'data:"delta"')
    lines = [": hello", f"data: {event('Füchse 🦊 ')}", "", "event: x", f"data:{two_lines}", "", "data: [DONE]", ""]

    async def pieces() -> AsyncIterator[bytes]:
        yield "".join(line + line_end for line in lines).encode()

    async with page_of(browser, app_that_says(pieces), script=script) as tab:
        await expect(tab.examples.first).to_have_text("What can you help me with?")  # for any model
        await tab.ask("Hm?")
        await expect(tab.answers).to_have_text("Füchse 🦊 und Käse")
        await expect(tab.stop).to_be_hidden()
        await expect(tab.failure).to_have_count(0)


@in_depth
@pytest.mark.parametrize(
    ("last", "message"),
    [
        (b"", "The connection ended before the answer did."),
        (None, "The connection was lost."),
        (b'data: {"error": {"message": "Out of luck."}}\n\n', "Out of luck."),
    ],
    ids=["ended", "cut", "error"],
)
async def test_an_answer_that_breaks_off_is_not_taken_for_whole(
    browser: Browser, last: bytes | None, message: str
) -> None:
    is_seen = asyncio.Event()

    async def pieces() -> AsyncIterator[bytes]:
        yield f"data: {event('So')}\n\n".encode()
        await is_seen.wait()
        if last is None:
            raise ConnectionResetError
        yield last

    async with page_of(browser, app_that_says(pieces), complaints=FAILED_TO_LOAD) as tab:
        await tab.ask("Hm?")
        await expect(tab.answers).to_have_text("So")
        is_seen.set()
        await expect(tab.failure).to_contain_text("The answer broke off")
        await expect(tab.failure).to_contain_text(message)
        await expect(tab.answers).to_have_text("So")
        await expect(tab.send).to_be_visible()


# the plots


@pytest.mark.nightly
async def test_plots_draw_what_the_engine_did(browser: Browser, engine: Engine) -> None:
    async with page_of(browser, create_app(engine)) as tab:
        await expect(tab.plot("Requests")).to_contain_text("running 0")
        await tab.ask("Tell me a short story about a fox named Ruby.")
        for title in PLOTS:
            for line in await tab.plot(title).locator("path.series").all():
                await expect(line).to_have_attribute("d", re.compile(r"^M[\d.]+ [\d.]+"))
            await expect(tab.plot(title).get_by_role("img")).to_have_attribute("aria-label", re.compile(r"\d"))
        await expect(tab.plot("Time to first token")).to_contain_text(re.compile(r"p50 [\d.]+ (ms|s)"))
        await expect(tab.plot("KV cache in use").locator("text").first).to_contain_text("%")


# where it is opened


@in_depth
async def test_it_works_below_a_prefix_and_with_an_api_key_as_the_password_until_that_is_no_longer_good(
    browser: Browser, engine: Engine
) -> None:
    served = create_app(engine, ServerConfig(api_keys=(KEY,)))

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await served(scope, receive, send)

    login = {"username": "anybody", "password": KEY}
    async with (
        origin_of(Starlette(routes=[Mount("/ai", app)])) as origin,
        tab_at(browser, f"{origin}/ai/", http_credentials=login, complaints=FAILED_TO_LOAD) as tab,
    ):
        await tab.set("Temperature", "0")
        await tab.ask("What is 8 + 7?")
        await expect(tab.answers).to_have_text("8 + 7 = 15.")
        await expect(tab.plot("Requests")).to_contain_text("running 0")
        served = create_app(engine, ServerConfig(api_keys=("another key",)))
        await tab.ask("Hello?")
        help_text = (
            "A key is needed (401)Reload the page to be asked for it. It is the password; any user name will do."
        )
        await expect(tab.failure).to_have_text(help_text)
        await expect(tab.message).to_have_value("Hello?")
        await expect(tab.page.get_by_role("status")).to_contain_text("A key is needed (401). Reload the page")


# its headers


async def test_only_what_is_in_the_page_may_run() -> None:
    answer = PAGE
    policy = dict(part.split(" ", 1) for part in answer.headers["content-security-policy"].split("; "))
    html = answer.body.decode()
    for directive, tag in (("script-src", "script"), ("style-src", "style")):
        (text,) = re.findall(rf"<{tag}[^>]*>(.*?)</{tag}>", html, re.DOTALL)
        assert policy[directive] == f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
    assert policy["default-src"] == policy["base-uri"] == policy["frame-ancestors"] == "'none'"
    assert policy["connect-src"] == "'self'"
    assert "unsafe" not in answer.headers["content-security-policy"]
    assert answer.headers["content-type"] == "text/html; charset=utf-8"
    assert answer.headers["x-content-type-options"] == "nosniff"
    assert answer.headers["referrer-policy"] == "no-referrer"
    assert answer.headers["cache-control"] == "no-cache"


async def test_the_page_names_no_other_place() -> None:
    html = (resources.files("aioengine.server") / "page.html").read_text(encoding="utf-8")
    assert set(re.findall(r"https?://[^\"'\s]+", html)) == {"http://www.w3.org/2000/svg"}
    assert not re.search(r"style=|innerHTML|insertAdjacentHTML|document\.write|\beval\b|@import|url\(", html)
