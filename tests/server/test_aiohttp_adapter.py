"""What is aiohttp's own: sub-apps and prefixes, how it learns that a client has left, and what it writes by itself."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from aiohttp import web
from server.conftest import app_of, both_loops, fake_engine, openai_client, plain_client, serving_app
from server.hostile import CUT, GONE, Client, Target, completion, request_of, served
from waiting import turns

from aioengine import Engine
from aioengine.server import ServerConfig, aiohttp_routes
from aioengine.server.aiohttp_adapter import DisconnectWatcher

LEAVER = 7


# Where it is mounted


def in_sub_app(engine: Engine, outer: str, prefix: str) -> web.Application:
    sub, app = web.Application(), web.Application()
    sub.add_routes(aiohttp_routes(engine, prefix=prefix))
    app.add_subapp(outer, sub)
    return app


def in_two_sub_apps(engine: Engine) -> web.Application:
    app = web.Application()
    app.add_subapp("/a", in_sub_app(engine, "/b", "/v1"))
    return app


def apps(engine: Engine) -> list[tuple[web.Application, str]]:
    """Each with where the API is."""
    return [
        (in_sub_app(engine, "/ai", ""), "/ai"),
        (in_sub_app(engine, "/ai", "/x"), "/ai/x"),
        (in_sub_app(engine, "/ai", "/{tenant}/x"), "/ai/bob/x"),
        (in_two_sub_apps(engine), "/a/b/v1"),
        (app_of(engine, "aiohttp", prefix="/{tenant}/ai"), "/bob/ai"),
        (app_of(engine, "aiohttp", prefix=r"/{path}/{tenant:\d+}"), "/a%20b/17"),
    ]


async def test_it_works_wherever_it_is_mounted() -> None:
    async with fake_engine() as (engine, _):
        for app, prefix in apps(engine):
            async with (
                serving_app(app) as url,
                openai_client(url + prefix) as client,
                plain_client(url + prefix) as http,
            ):
                assert [model.id async for model in client.models.list()] == ["demo"], prefix
                assert (await http.get("/v1/models/d%65mo")).json()["id"] == "demo", prefix
                stream = await client.completions.create(model="demo", prompt="Hello!", max_tokens=3, stream=True)
                assert [chunk async for chunk in stream][-1].choices[0].finish_reason is not None
                assert (await http.get("/")).headers["content-type"].startswith("text/html")
                nothing = (await http.get("/nothing")).json()["error"]
                assert (nothing["code"], "'/nothing'" in nothing["message"]) == ("not_found", True)


@pytest.mark.parametrize(
    "path",
    ["/v1/%6dodels", "/v1/models/d%65mo", "/v1/models/a%2Fb", "/v1/models/a%252Fb", "/v1/models/a%25b", "/%C3%A9",
     "/v1%2Fmodels", "//v1/models", "/ai/v1/models", "/a%20b+c", "/v1/models?a=%2F", "/%7Bpath_below%7D"],
)  # fmt: skip
async def test_a_path_is_read_as_on_the_other_adapter(path: str) -> None:
    answers = []
    async with fake_engine() as (engine, _):
        for app in (app_of(engine, "starlette", prefix="/ai"), app_of(engine, "aiohttp", prefix="/ai")):
            async with serving_app(app) as url, raw_client(url) as client:
                await client.send(request_of("GET", "/ai" + path))
                answer = await client.answer()
                told = answer.json().get("error") or [model["id"] for model in answer.json().get("data", ())]
                answers.append((answer.status, told))
    assert answers[0] == answers[1]


@pytest.mark.parametrize(
    ("prefix", "asked", "location"),
    [
        ("/ai", "/ai", "./ai/"),
        ("/ai", "/ai?page=1&next=%2F", "./ai/?page=1&next=%2F"),
        ("/{tenant}/ai", "/bob/ai", "./ai/"),
        ("/ai/{tenant}", "/ai/a%20b%2Fc", "./a%20b%2Fc/"),
        ("/ai/{tenant}", "/ai/http:", "./http:/"),
        ("/{any:.*}/ai", "//elsewhere.example/ai", "./ai/"),
    ],
)
async def test_the_prefix_alone_leads_to_the_page_wherever_that_is(prefix: str, asked: str, location: str) -> None:
    async with fake_engine() as (engine, _), serving_app(app_of(engine, "aiohttp", prefix=prefix)) as url:
        async with raw_client(url) as client:
            await client.send(request_of("GET", asked))
            answer = await client.answer()
            assert (answer.status, answer.headers["location"]) == (307, location)
        if not asked.startswith("//"):
            async with plain_client(url) as http:
                page = await http.get(asked, follow_redirects=True)
                assert (page.status_code, page.headers["content-type"][:9]) == (200, "text/html")


async def test_the_hosts_middlewares_may_change_a_whole_answer() -> None:
    @web.middleware
    async def mark(request: web.Request, handler: Any) -> web.StreamResponse:
        response: web.StreamResponse = await handler(request)
        response.headers["x-marked"] = "yes"
        return response

    async with fake_engine() as (engine, _):
        app = web.Application(middlewares=[mark])
        app.add_routes(aiohttp_routes(engine))
        async with serving_app(app) as url, plain_client(url) as http:
            assert (await http.get("/v1/models")).headers["x-marked"] == "yes"


@asynccontextmanager
async def raw_client(url: str) -> AsyncIterator[Client]:
    with await Client.connect(int(url.rpartition(":")[2].partition("/")[0])) as client:
        yield client


# Clients that leave, while the device goes on


async def num_steps_after_leaving(target: Target, *, is_stream: bool) -> int:
    with await target.connect() as client:
        await client.post("/v1/completions", completion(LEAVER, stream=is_stream, max_tokens=4000))
        await target.until(lambda: target.num_plans_with(LEAVER) > 5)
        num_plans = len(target.executor.plans)
        client.leave()
        await target.until(lambda: target.num_registered == 0)
    await target.idle()
    await target.until_told(GONE, 1)
    return target.num_plans_with(LEAVER, num_plans)


GOES_ON: dict[str, Any] = {"step_time_s": 0.001, "max_model_len": 4096}
BEGUN = 2
"""Steps that the device and the scheduler are at when the socket tells."""


@both_loops
@pytest.mark.parametrize(
    ("how", "is_stream", "more"),
    [("look", False, 3), ("look", True, 3), ("write", True, 1), ("cancel", False, 1), ("cancel", True, 1)],
)
async def test_who_leaves_is_computed_for_some_milliseconds_at_most(
    how: str, is_stream: bool, more: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a look each 2 ms, however busy the machine: steps and looks are timers of one loop; without looks by a
    stream's next write; or at once, in an app that cancels its handlers."""
    if how != "look":
        monkeypatch.setattr(DisconnectWatcher, "INTERVAL_S", 3600.0)
    if how == "cancel":
        runner = functools.partialmethod(web.AppRunner.__init__, handler_cancellation=True)
        monkeypatch.setattr(web.AppRunner, "__init__", runner)
    async with served("aiohttp", **GOES_ON) as target:
        assert await num_steps_after_leaving(target, is_stream=is_stream) <= BEGUN + more


async def test_one_timer_looks_for_all_and_ends_with_the_last() -> None:
    async with served("aiohttp", **GOES_ON) as target:
        looking = count_looks(asyncio.get_running_loop())
        clients = [await target.connect() for _ in range(20)]
        for client in clients:
            await client.post("/v1/completions", completion(max_tokens=4000))
        await target.until(lambda: target.num_registered == 20)
        await target.until(looking)  # it is not waited for while it runs
        assert looking() == 1
        for client in clients:
            client.leave()
        await target.until(lambda: target.num_registered == 0)
        await target.until(lambda: not looking())
        await turns(2)  # of which a look that went on would begin another one
        assert not looking()


def count_looks(loop: Any) -> Any:
    """How many looks are waited for, of all that is."""

    def count() -> int:
        handles = [handle for handle in loop._scheduled if not handle.cancelled()]
        return sum(isinstance(getattr(handle._callback, "__self__", None), DisconnectWatcher) for handle in handles)

    return count


# Clients that do not read what is small


@both_loops
async def test_a_small_answer_that_is_read_in_time_comes_whole() -> None:
    async with served("aiohttp", ServerConfig(write_timeout_s=30.0), send_buffer=4096) as target:
        size = len((await target.ask("/metrics")).body)
        with await target.connect(receive_buffer=4096) as client:
            await client.send(request_of("GET", "/metrics") * 3)
            await target.until(lambda: target.num_buffered)
            await turns(1000)
            for _ in range(3):
                assert abs(len((await client.answer()).body) - size) < size // 10


@both_loops
async def test_the_end_of_a_small_stream_that_is_not_read_is_not_kept() -> None:
    async with served("aiohttp", ServerConfig(write_timeout_s=0.2), send_buffer=4096, max_model_len=512) as target:
        with await target.connect(receive_buffer=4096) as client:
            await client.post("/v1/completions", completion(stream=True, max_tokens=200))
            await target.until_told(CUT, 1)
            await target.until(lambda: not target.num_buffered)
            assert b"[DONE]" not in await client.read_to_end()
        assert await target.metric(GONE) == 0
