"""The built-in page, as it is seen in a browser: the real page, server and engine, in Chromium."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import hashlib
import json
import re
from collections.abc import AsyncIterator
from importlib import resources
from typing import Any

import pytest
import pytest_asyncio
from starlette.applications import Starlette
from starlette.routing import Mount
from starlette.types import Receive, Scope, Send

from aioengine import Engine
from aioengine.server import ServerConfig, create_app
from aioengine.server.page import PAGE

pytest.importorskip("playwright.async_api", reason="the page is tested with playwright")

from contract.ways import has_load
from playwright.async_api import Browser, Route, expect
from server.page_browser import CHROMIUM, Tab, Talker, app_that_says, browser_process, event, origin_of, page_of, tab_at
from waiting import until

pytestmark = pytest.mark.asyncio(loop_scope="module")

in_depth = pytest.mark.nightly
"""What a browser takes long for. A conversation, an error, a stop and a plot are looked at each time."""

KEY = "a key of the tests"
PLOTS = ["Requests", "KV cache in use", "Tokens per second", "Time to first token", "Inter-token latency", "Loop lag"]
PHONE: dict[str, Any] = {"viewport": {"width": 360, "height": 740}, "is_mobile": True, "has_touch": True}
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


@in_depth
async def test_examples_are_there_at_first_and_the_bundled_model_can_answer_them(
    browser: Browser, engine: Engine
) -> None:
    app = create_app(engine, ServerConfig(served_model_name=("fox-1",)))
    async with page_of(browser, app) as tab:
        await tab.set("Temperature", "0")
        answers = {
            "Tell me a short story about a fox named Ruby.": re.compile("fox.*Ruby", re.DOTALL),
            "What is 8 + 7?": "8 + 7 = 15.",
            "How many legs does a spider have?": "A spider has 8 legs.",
            "Hi, I am Tom.": "Nice to meet you, Tom!",
        }
        await expect(tab.examples).to_have_text(list(answers))
        for question, answer in answers.items():
            await tab.page.get_by_role("button", name=question).click()
            await expect(tab.questions).to_have_text(question)
            await expect(tab.examples.first).to_be_hidden()
            await expect(tab.answers).to_have_text(answer)
            await expect(tab.notes).to_have_count(1)
            await tab.page.get_by_role("button", name="New conversation").click()
            await expect(tab.examples).to_have_count(4)
        assert [len(asked["messages"]) for asked in tab.asked()] == [1, 1, 1, 1]


@in_depth
async def test_an_answer_appears_as_it_is_made_and_its_end_stays_in_sight_unless_what_is_further_up_is_read(
    browser: Browser,
) -> None:
    lines = [f"Line {number}.\n" for number in range(90)]
    device = Talker("".join(lines), hold_after="".join(lines[:60]))
    async with page_of(browser, device) as tab:
        log = tab.page.get_by_role("log")
        await tab.ask("Talk")
        await expect(tab.answers).to_contain_text("Line 59.")
        await expect(log).to_have_attribute("aria-busy", "true")
        await expect(tab.send).to_be_hidden()
        await tab.expect_end_in_sight()
        await tab.questions.scroll_into_view_if_needed()
        device.go_on()
        await expect(tab.answers).to_contain_text("Line 89.")
        await expect(log).to_have_attribute("aria-busy", "false")
        await expect(tab.stop).to_be_hidden()
        await expect(tab.questions).to_be_in_viewport()
        await tab.ask("More")
        await expect(tab.answers.last).to_contain_text("Line 89.")
        await tab.expect_end_in_sight()


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


@in_depth
async def test_settings_are_sent_and_those_left_alone_are_not(browser: Browser) -> None:
    async with page_of(browser, Talker("Yes.")) as tab:
        await tab.ask("One")
        await expect(tab.notes).to_have_count(1)
        chosen = {
            "Temperature": "0.5",
            "Top p": ".9",
            "Max tokens": "1",
            "Seed": "7",
            "System message": "Be brief.",
        }
        for label, value in chosen.items():
            await tab.set(label, value)
        await expect(tab.page.locator("#settings > summary")).to_have_text(
            "Sampling: temperature 0.5, top p 0.9, max tokens 1, seed 7, system message"
        )
        await tab.ask("Two")
        await expect(tab.notes.last).to_contain_text("cut off by max tokens")
        first, second = tab.asked()
        assert first.keys() == {"model", "messages", "stream", "stream_options"}
        assert second["messages"][0] == {"role": "system", "content": "Be brief."}
        assert second.items() >= {"temperature": 0.5, "top_p": 0.9, "max_tokens": 1, "seed": 7}.items()
        await tab.set("Seed", "seven")
        await tab.page.locator("#settings > summary").click()
        await tab.ask("Three")
        await expect(tab.page.get_by_label("Seed")).to_be_focused()
        await expect(tab.page.get_by_label("Seed")).to_be_visible()
        assert len(tab.asked()) == 2, "what is no number is not sent"


TOOLS = [{"type": "function", "function": {"name": "get_weather", "parameters": {"type": "object"}}}]
FORMATS = {"tool_format": "hermes", "reasoning_format": "think"}
THOUGHT, ARGUMENTS = "Is it <b>cold</b>? I will look.", '{"city": "Oslo"}'
CALLING = f"""<think>
{THOUGHT}
</think>

Let me look.
<tool_call>
{{"name": "get_weather", "arguments": {ARGUMENTS}}}
</tool_call>"""


@in_depth
async def test_reasoning_and_calls_are_folded_and_grow_as_they_are_made(browser: Browser) -> None:
    talker = Talker(CALLING, hold_after="<think>\nIs it <b>")
    async with page_of(browser, talker, formats=FORMATS) as tab:
        await tab.set("Tools", json.dumps(TOOLS))
        await expect(tab.page.locator("#settings > summary")).to_have_text("Sampling: 1 tool")
        await tab.ask("Is it cold in Oslo?")
        reasoning = tab.folded.first
        await expect(reasoning.locator("summary")).to_have_text("Reasoning")
        await expect(reasoning.locator(".folded")).not_to_be_visible()
        await reasoning.locator("summary").click()
        await expect(reasoning.locator(".folded")).to_have_text("Is it <b>")
        talker.go_on()
        await expect(reasoning.locator(".folded")).to_have_text(THOUGHT)
        await expect(tab.answers).to_have_text(["Let me look."])
        await expect(tab.folded).to_have_count(2)
        call = tab.folded.last
        await expect(call.locator("summary")).to_have_text("Call of get_weather")
        await expect(call.locator(".folded")).to_have_text(ARGUMENTS)
        await expect(call.locator(".folded")).not_to_be_visible()
        await expect(tab.notes.last).to_contain_text("asks for calls")
        await tab.ask("And now?")
        await expect(tab.notes).to_have_count(2)
        first, second = tab.asked()
        assert first["tools"] == TOOLS
        (told,) = second["messages"][1]["tool_calls"]
        assert told["function"] == {"name": "get_weather", "arguments": ARGUMENTS}
        assert THOUGHT not in json.dumps(second["messages"])


@in_depth
async def test_enter_sends_shift_enter_makes_a_line_and_html_is_text_from_both_sides(browser: Browser) -> None:
    html = '<img src=x onerror="document.title=1"><b>bold</b>'
    async with page_of(browser, Talker(html)) as tab:
        await expect(tab.message).to_be_focused()
        await tab.page.keyboard.type(html)
        await tab.page.keyboard.press("Shift+Enter")
        await tab.page.keyboard.type("Two")
        await expect(tab.message).to_have_value(f"{html}\nTwo")
        await tab.page.keyboard.press("Enter")
        await expect(tab.message).to_have_value("")
        await expect(tab.questions).to_have_text(f"{html}\nTwo")
        await expect(tab.answers).to_have_text(html)
        await expect(tab.page.locator("#log img, #log b")).to_have_count(0)
        assert tab.asked()[0]["messages"] == [{"role": "user", "content": f"{html}\nTwo"}]


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


@in_depth
async def test_a_busy_server_is_said_to_be_and_can_be_asked_again(browser: Browser) -> None:
    device = Talker(" and on", is_endless=True, step_time_s=0.005)
    only_one = ServerConfig(max_concurrent_requests=1)
    async with Engine(executor=device) as engine, origin_of(create_app(engine, only_one)) as origin:
        url = f"{origin}/"
        async with tab_at(browser, url) as first, tab_at(browser, url, complaints=FAILED_TO_LOAD) as tab:
            await first.ask("Talk")
            await expect(first.answers).to_contain_text("and on")
            await tab.ask("Talk to me, too")
            await expect(tab.failure).to_contain_text("The server cannot answer now (503)")
            await expect(tab.failure).to_contain_text(re.compile(r"try again in \d+ s"))
            await first.stop.click()
            await until(has_load(engine, running=0))
            await tab.page.get_by_role("button", name="Try again").click()
            await expect(tab.answers).to_contain_text("and on")
            await expect(tab.failure).to_have_count(0)
            await expect(tab.questions).to_have_text(["Talk to me, too"])
            await tab.stop.click()


@pytest.mark.nightly
async def test_a_bad_setting_is_named_and_the_next_question_starts_afresh(browser: Browser) -> None:
    async with page_of(browser, Talker("Yes."), complaints=FAILED_TO_LOAD) as tab:
        await tab.set("Temperature", "7")
        await tab.ask("One")
        await expect(tab.failure).to_contain_text("The server refuses this (400)")
        await expect(tab.failure).to_contain_text("temperature")
        await tab.set("Temperature", "1")
        await tab.ask("Two")
        await expect(tab.answers).to_have_text("Yes.")
        assert tab.asked()[1]["messages"] == [{"role": "user", "content": "Two"}]

        # What is being written when a message is refused stays, and the message can be sent again.
        async def slowly(route: Route) -> None:
            await tab.message.fill("Four")
            await route.continue_()

        await tab.page.route("**/chat/completions", slowly, times=1)
        await tab.set("Temperature", "7")
        await tab.ask("Three")
        await expect(tab.failure).to_contain_text("The server refuses this (400)")
        await expect(tab.message).to_have_value("Four")
        await tab.set("Temperature", "1")
        await tab.page.get_by_role("button", name="Try again").click()
        await expect(tab.answers).to_have_text(["Yes.", "Yes."])
        await expect(tab.message).to_have_value("Four")
        await expect(tab.questions).to_have_text(["Two", "Three"])


@in_depth
async def test_a_server_that_has_gone_is_missed(browser: Browser, engine: Engine) -> None:
    async with contextlib.AsyncExitStack() as server:
        origin = await server.enter_async_context(origin_of(create_app(engine)))
        async with tab_at(browser, f"{origin}/", complaints=FAILED_TO_LOAD) as tab:
            await expect(tab.plot("Requests")).to_contain_text("running 0")
            await server.aclose()
            await tab.ask("Hello?")
            await expect(tab.failure).to_contain_text("The server does not answer")
            await expect(tab.page.get_by_role("status")).to_contain_text("The server does not answer")


@in_depth
async def test_a_full_context_is_said_to_be_and_the_message_can_go_to_a_new_conversation(browser: Browser) -> None:
    device = Talker("Yes.", max_model_len=100)
    async with page_of(browser, device, complaints=FAILED_TO_LOAD, **PHONE) as tab:
        long = "long " * 50
        await tab.ask("One " + long)
        await expect(tab.answers).to_have_text("Yes.")
        await tab.ask("Two " + long)
        await expect(tab.failure).to_contain_text("The conversation is longer than the model can take")
        await expect(tab.failure).to_contain_text(
            re.compile(r"maximum context length is 100 tokens .* the prompt has \d+")
        )
        await expect(tab.failure.get_by_role("button")).to_have_text(["New conversation"])
        await expect(tab.message).to_have_value(("Two " + long).strip())
        await expect(tab.failure).to_be_in_viewport(ratio=1)
        await tab.failure.get_by_role("button").click(trial=True, timeout=2000)  # the composer does not cover it
        await tab.ask("Three")  # a shorter message may still fit
        await expect(tab.failure).to_have_count(0)
        await expect(tab.notes).to_have_count(2)
        contents = [message["content"].strip() for message in tab.asked()[-1]["messages"]]
        assert contents == [("One " + long).strip(), "Yes.", "Three"]

        await tab.ask("Two " + long)
        await tab.failure.get_by_role("button").click()
        await expect(tab.failure).to_have_count(0)
        await expect(tab.questions).to_have_count(0)
        await expect(tab.message).to_be_focused()
        await expect(tab.message).to_have_value(("Two " + long).strip())
        await tab.page.keyboard.press("Enter")
        await expect(tab.answers).to_have_text("Yes.")
        assert tab.asked()[-1]["messages"] == [{"role": "user", "content": ("Two " + long).strip()}]


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


@in_depth
async def test_numbers_are_those_between_two_polls_whatever_their_prefix(browser: Browser, engine: Engine) -> None:
    polls = [0]

    def exposition() -> str:
        polls[0] += 1
        many = 10 * polls[0]
        return f"""# HELP my:num_requests_running Sequences.
my:num_requests_running{{model_name="a",engine="0"}} 2.0
my:num_requests_running{{model_name="a",engine="1"}} 1.0
my:num_requests_waiting 1234
my:kv_cache_usage_perc{{le="x"}} 0.125
my:cached_prompt_tokens_total 7e9
my:time_to_first_token_seconds_bucket{{model_name="a",le="0.01"}} 500
my:time_to_first_token_seconds_bucket{{model_name="a",le="0.02"}} {500 + many}
my:time_to_first_token_seconds_bucket{{model_name="a",le="+Inf"}} {500 + many}
loop_lag_seconds_bucket{{le="0.0001"}} 0
loop_lag_seconds_bucket{{le="+Inf"}} {many}
"""

    async with page_of(browser, create_app(engine)) as tab:
        await tab.page.route("**/metrics", lambda route: route.fulfill(body=exposition()))
        await expect(tab.plot("Time to first token")).to_contain_text("p50 15 ms")
        await expect(tab.plot("Time to first token")).to_contain_text("p99 20 ms")
        await expect(tab.plot("Loop lag")).to_contain_text("p99 100 µs")  # all lies above the last bound
        await expect(tab.plot("Requests")).to_contain_text("running 3")
        await expect(tab.plot("Requests")).to_contain_text("waiting 1,234")
        await expect(tab.plot("KV cache in use")).to_contain_text("13 %")
        await expect(tab.plot("Inter-token latency")).to_contain_text("p50 –")


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


async def overflow(tab: Tab) -> int:
    """By how many pixels the page is wider than the screen."""
    width: int = await tab.page.evaluate("document.documentElement.scrollWidth - window.innerWidth")
    return width


@in_depth
async def test_a_phone_shows_all_of_it_without_scrolling_sideways(browser: Browser) -> None:
    reply = "https://example.com/" + "a" * 200
    async with page_of(browser, Talker(reply), complaints=FAILED_TO_LOAD, **PHONE) as tab:
        assert await overflow(tab) == 0
        await expect(tab.examples).to_have_count(4)
        for example in await tab.examples.all():
            await expect(example).to_be_in_viewport(ratio=1)
            assert ((await example.bounding_box()) or {})["height"] >= 44, "a finger is so wide"
        await tab.ask("b" * 200)
        await expect(tab.answers).to_have_text(reply)
        await tab.expect_end_in_sight()
        await tab.set("Temperature", "7")
        await tab.ask("One more?")
        await expect(tab.failure).to_be_in_viewport()
        assert await overflow(tab) == 0
        for field in await tab.page.locator("input, textarea").all():
            assert await field.evaluate("(field) => parseFloat(getComputedStyle(field).fontSize)") >= 16
        await tab.plot(PLOTS[-1]).scroll_into_view_if_needed()
        await expect(tab.plot(PLOTS[-1])).to_be_in_viewport()


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
