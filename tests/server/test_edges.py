"""Corners of the HTTP server that a client or a host app comes to by bad luck."""

from __future__ import annotations

import asyncio
import gzip
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import anyio
import httpx
import pytest
from server.conftest import both_adapters, events_of, fake_engine, plain_client, serving, serving_app, serving_fake
from server.hostile import completion, served
from starlette.applications import Starlette
from starlette.middleware.base import BaseHTTPMiddleware
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route
from waiting import until

from aioengine import Engine
from aioengine.server import ServerConfig, StreamResponse, create_app, engine_errors
from aioengine.server.asgi import AsgiExchange
from aioengine.server.generation import EventWriter
from aioengine.testing import FakeExecutor

CHAT = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 3, "ignore_eos": True}
TEXT = {"prompt": [1, 2, 3], "max_tokens": 3, "ignore_eos": True}


def long_engine() -> Engine:
    return Engine(seed=1, executor=FakeExecutor(vocab_size=2048, max_model_len=4096, num_blocks=1024))


# A merged delta with log-probabilities


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
async def test_a_stream_that_was_not_read_for_long_tells_all_log_probabilities_then(path: str) -> None:
    """All of it is made before anything is read: one delta, and many events."""
    async with long_engine() as engine, serving(engine, "starlette") as served:
        body = (CHAT if "chat" in path else TEXT) | {"stream": True, "max_tokens": 400, "seed": 1}
        asked = {"logprobs": True, "top_logprobs": 5} if "chat" in path else {"logprobs": 5}
        async with plain_client(served.url) as client:
            answer = await client.post(path, json=body | asked)
    choices = [event["choices"][0] for event in events_of(answer.content)]
    assert len(choices) >= 5  # no more than 500 log-probabilities are encoded in a turn
    if "chat" in path:
        told = [entry for choice in choices if choice["logprobs"] for entry in choice["logprobs"]["content"]]
    else:
        told = [token for choice in choices if choice["logprobs"] for token in choice["logprobs"]["tokens"]]
        offsets = [at for choice in choices if choice["logprobs"] for at in choice["logprobs"]["text_offset"]]
        assert offsets == [len("".join(told[:place])) for place in range(400)]
    assert len(told) == 400


# Writers


class StuckExchange:
    """Takes nothing; ends when it is cut."""

    def __init__(self) -> None:
        self.is_cut = False

    async def start(self, *given: Any) -> None:
        await asyncio.get_running_loop().create_future()

    write = end = start

    def cut(self) -> None:
        self.is_cut = True


@pytest.mark.virtual_clock
@pytest.mark.parametrize("stage", ["start", "write", "end"])
async def test_a_client_that_takes_nothing_is_cut_after_the_timeout_at_each_stage(stage: str) -> None:
    exchange = StuckExchange()
    loop = asyncio.get_running_loop()
    with anyio.CancelScope() as scope:
        writer = EventWriter(
            exchange,  # type: ignore[arg-type]  # of an exchange a writer needs no more
            timeout_s=30.0,
            on_stuck=scope.cancel,
            idle_s=15.0,
            on_idle=lambda: None,
        )
        await anyio.sleep(7)
        began = loop.time()
        await {"start": lambda: writer.start(200, {}), "write": lambda: writer.write(b"x"), "end": writer.end}[stage]()
    assert exchange.is_cut
    assert loop.time() - began == pytest.approx(30.0, abs=0.01)
    writer.close()


# Hosts


@asynccontextmanager
async def hosted(app: Any) -> AsyncIterator[httpx.AsyncClient]:
    async with serving_app(app) as url, plain_client(url) as client:
        yield client


async def test_routes_of_ones_own_in_the_created_app_are_served_beside_the_api() -> None:
    async with fake_engine() as (engine, _):
        app = create_app(engine)
        app.routes.append(Route("/mine", lambda request: PlainTextResponse("mine")))
        async with hosted(app) as client:
            assert (await client.get("/mine")).text == "mine"
            assert (await client.get("/health")).json()["status"] == "ALIVE"
            assert (await client.get("/nothing")).json()["error"]["code"] == "not_found"


async def test_under_a_middleware_that_wants_a_response_a_departure_is_no_error(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def through(request: Request, call_next: Callable[[Request], Any]) -> Response:
        return await call_next(request)

    async with fake_engine(is_manual=True) as (engine, _):
        app = Starlette()
        app.add_middleware(BaseHTTPMiddleware, dispatch=through)
        app.mount("/ai", create_app(engine))
        async with hosted(app) as client:
            asking = asyncio.get_running_loop().create_task(client.post("/ai/v1/completions", json=TEXT))
            await until(lambda: engine.stats().running == 1)
            asking.cancel()
            await until(lambda: engine.stats().running == 0)
    assert [record for record in caplog.records if record.levelno >= logging.ERROR] == []


async def test_a_client_that_leaves_a_stream_response_at_the_door_gives_its_turn_back() -> None:
    async with fake_engine(is_manual=True, max_num_seqs=1, max_waiting=1) as (engine, _):

        async def handler(request: Request) -> Response:
            return StreamResponse(engine.stream([1, 2, 3]))  # it waits for a place

        app = Starlette(routes=[Route("/", handler)], exception_handlers=engine_errors)
        async with hosted(app) as client, engine.stream([1]):
            await until(lambda: engine.stats().running == 1)
            async with engine.stream([1]):
                waiting = engine.stats().waiting
                asking = asyncio.get_running_loop().create_task(client.get("/"))
                await until(lambda: engine.stats().waiting == waiting + 1)
                asking.cancel()
                await until(lambda: engine.stats().waiting == waiting)


async def test_an_engine_that_was_not_started_says_what_to_do(caplog: pytest.LogCaptureFixture) -> None:
    engine = Engine(seed=1, executor=FakeExecutor(vocab_size=2048))
    host = Starlette()
    host.mount("/ai", create_app(engine))
    async with hosted(host) as client:
        for _ in range(2):
            answer = await client.post("/ai/v1/completions", json=TEXT)
            assert answer.status_code == 503
            assert "has not been started" in answer.json()["error"]["message"]
    told = [record for record in caplog.records if record.levelno == logging.WARNING and "503" in record.message]
    assert len(told) == 1


@pytest.mark.parametrize("bad", [Engine, "demo", None])
def test_what_is_no_engine_is_refused_where_the_app_is_made(bad: Any) -> None:
    with pytest.raises(TypeError, match="an Engine is needed"):
        create_app(bad)


@both_adapters
async def test_a_name_that_is_not_ours_is_refused_where_ours_are_known(adapter: Any) -> None:
    config = ServerConfig(allowed_hosts=("localhost", "127.0.0.1", "::1"))
    async with serving_fake(adapter, config) as (*_, client):
        for ours in ("localhost", "LOCALHOST:8000", "127.0.0.1:1", "[::1]:8000"):
            assert (await client.get("/v1/models", headers={"host": ours})).status_code == 200
        for other in ("evil.example", "127.0.0.1.evil.example:80", "localhost.evil"):
            refused = await client.post("/v1/completions", json=TEXT, headers={"host": other})
            assert (refused.status_code, refused.json()["error"]["code"]) == (403, "host_not_allowed")
            assert (await client.get("/health", headers={"host": other})).status_code == 200


async def test_a_request_id_of_the_body_is_the_requests_id_where_no_header_has_one() -> None:
    async with serving_fake("starlette") as (*_, client):
        alone = await client.post("/v1/completions", json=TEXT | {"request_id": "mine"})
        both = await client.post(
            "/v1/completions", json=TEXT | {"request_id": "mine"}, headers={"x-request-id": "of-the-header"}
        )
        bad = await client.post("/v1/completions", json=TEXT | {"request_id": "two\nlines"})
    assert (alone.json()["id"], alone.headers["x-request-id"]) == ("cmpl-mine", "mine")
    assert (both.json()["id"], both.headers["x-request-id"]) == ("cmpl-mine", "of-the-header")
    assert (bad.status_code, bad.json()["error"]["param"]) == (400, "request_id")


async def test_too_many_prompts_for_the_engine_are_told_by_a_field_that_clients_know() -> None:
    body = TEXT | {"prompt": [[1]] * 8}
    async with serving_fake("starlette", max_waiting=4) as (*_, client):
        answer = await client.post("/v1/completions", json=body)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "n")


async def test_a_compressed_body_without_its_checksum_is_damaged() -> None:
    headers = {"content-type": "application/json", "content-encoding": "gzip"}
    async with serving_fake("starlette") as (*_, client):
        answer = await client.post("/tokenize", content=gzip.compress(b'{"prompt": "a"}')[:-4], headers=headers)
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "invalid_encoding")


async def test_echo_alone_counts_no_tokens_in_its_events() -> None:
    body = TEXT | {"echo": True, "max_tokens": 0, "stream": True}
    options = {"include_usage": True, "continuous_usage_stats": True}
    async with serving_fake("starlette") as (*_, client):
        answer = await client.post("/v1/completions", json=body | {"stream_options": options})
    assert [event["usage"]["completion_tokens"] for event in events_of(answer.content)] == [0, 0, 0]


async def test_an_exchange_that_breaks_once_its_response_has_begun_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    async def fail(exchange: AsgiExchange, data: bytes) -> None:
        raise RuntimeError("the framework broke")

    monkeypatch.setattr(AsgiExchange, "write", fail)
    async with served("serve") as target, target.client() as client:
        await client.post("/v1/completions", completion(stream=True))
        assert (await client.read_to_end()).startswith(b"HTTP/1.1 200 ")
