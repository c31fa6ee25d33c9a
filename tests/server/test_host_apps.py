"""What routes of one's own take from the package: responses of streams, errors, and a server beside other things."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import httpx
import msgspec
import pytest
from aiohttp import web
from fastapi import FastAPI
from pydantic import BaseModel
from server.conftest import plain_client, serving_app
from starlette.applications import Starlette
from starlette.middleware.base import BaseHTTPMiddleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Mount, Route
from waiting import Tasks, until

from aioengine import AioEngineError, CompletionDelta, Engine, EngineClosed, Health, RequestOutput
from aioengine.server import (
    HttpLimits,
    ServerConfig,
    StreamResponse,
    aiohttp_errors,
    create_app,
    engine_errors,
    start_server,
    while_connected,
)
from doubles.fake_executor import FakeExecutor

PROMPT = [1, 2, 3]


def slow_engine(**config: int) -> Engine:
    """Its steps end by the test's hand."""
    return Engine(seed=1, executor=FakeExecutor(vocab_size=2048, is_manual=True), **config)


def quick_engine() -> Engine:
    return Engine(seed=1, executor=FakeExecutor(vocab_size=2048))


def num_live(engine: Engine) -> int:
    stats = engine.stats()
    return stats.running + stats.waiting


@asynccontextmanager
async def hosted(make: Callable[[Request], Awaitable[Any] | Response]) -> AsyncIterator[httpx.AsyncClient]:
    """A client of an app with one route, which gives the response that is made, or as JSON what is awaited."""

    async def handler(request: Request) -> Response:
        made = make(request)
        return made if isinstance(made, Response) else JSONResponse(await made)

    app = Starlette(routes=[Route("/", handler)], exception_handlers=engine_errors)
    async with serving_app(app) as url, plain_client(url) as client:
        yield client


async def test_a_stream_response_is_its_deltas_texts_or_encoded_as_it_is_told() -> None:
    asked: dict[str, Any] = {"max_tokens": 30, "seed": 1, "ignore_eos": True}

    def encode(delta: CompletionDelta) -> bytes:
        return b"%d," % len(delta.token_ids)

    async with quick_engine() as engine:
        expected = (await engine.generate(PROMPT, **asked)).text
        async with hosted(lambda _: StreamResponse(engine.stream(PROMPT, **asked))) as client:
            answer = await client.get("/")
        assert answer.text == expected
        assert answer.headers["content-type"] == "text/plain; charset=utf-8"
        assert "content-length" not in answer.headers
        told: dict[str, Any] = {"media_type": "text/csv", "headers": {"x-own": "1"}}
        async with hosted(lambda _: StreamResponse(engine.stream(PROMPT, **asked), encode, **told)) as client:
            answer = await client.get("/")
        assert sum(map(int, answer.text.strip(",").split(","))) == 30
        assert (answer.headers["content-type"], answer.headers["x-own"]) == ("text/csv; charset=utf-8", "1")


@pytest.mark.parametrize("is_at_door", [False, True])
async def test_a_client_that_leaves_ends_the_request_of_a_stream_response(is_at_door: bool) -> None:
    async with (
        slow_engine(max_num_seqs=1, max_waiting=1) as engine,
        hosted(lambda _: StreamResponse(engine.stream(PROMPT, max_tokens=30))) as client,
        AsyncExitStack() as others,
    ):
        for num_others in (1, 2) if is_at_door else ():
            await others.enter_async_context(engine.stream(PROMPT))
            await until(lambda count=num_others: num_live(engine) == count and engine.stats().running)  # type: ignore[misc]
        num_before = num_live(engine)
        async with Tasks() as tasks:
            tasks.start(client.get("/"))
            await until(lambda: num_live(engine) == num_before + 1)
        await until(lambda: num_live(engine) == num_before)


async def test_under_a_middleware_that_wants_a_response_a_departure_is_no_error(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def through(request: Request, call_next: Callable[[Request], Any]) -> Any:
        return await call_next(request)

    async with slow_engine() as engine:
        app = Starlette(routes=[Mount("/ai", create_app(engine))])
        app.add_middleware(BaseHTTPMiddleware, dispatch=through)
        async with serving_app(app) as url, plain_client(url) as client:
            async with Tasks() as tasks:
                tasks.start(client.post("/ai/v1/completions", json={"prompt": PROMPT}))
                await until(lambda: num_live(engine) == 1)
            await until(lambda: num_live(engine) == 0)
    assert [record for record in caplog.records if record.levelno >= logging.ERROR] == []


async def test_a_client_that_leaves_ends_what_was_done_while_it_was_connected() -> None:
    raised: list[BaseException] = []
    async with slow_engine() as engine:

        async def generate(request: Request) -> None:
            try:
                await while_connected(request, engine.generate(PROMPT, max_tokens=30))
            except Exception as error:
                raised.append(error)
                raise

        async with hosted(generate) as client:
            async with Tasks() as tasks:
                tasks.start(client.get("/"))
                await until(lambda: num_live(engine) == 1)
            await until(lambda: num_live(engine) == 0)
            await until(lambda: bool(raised))
    assert [type(error).__name__ for error in raised] == ["ClientDisconnect"]


async def test_what_was_done_while_connected_is_given_back_and_its_errors_are_as_they_were() -> None:
    async with quick_engine() as engine:

        async def generate(request: Request) -> int:
            tokens = int(request.query_params["tokens"])
            output = await while_connected(request, engine.generate(PROMPT, max_tokens=tokens, ignore_eos=True))
            return len(output.outputs[0].token_ids)

        async with hosted(generate) as client:
            assert (await client.get("/", params={"tokens": 7})).json() == 7
            refused = await client.get("/", params={"tokens": 0})
    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == "max_tokens"


async def test_work_that_the_app_cancels_ends_though_its_client_stays() -> None:
    is_gone, cancelled = asyncio.Event(), asyncio.get_running_loop().create_future()
    cancelled.cancel()

    async def receive() -> Any:
        await is_gone.wait()

    request = Request({"type": "http", "method": "GET", "path": "/", "query_string": b"", "headers": []}, receive)
    async with asyncio.timeout(30):
        with pytest.raises(asyncio.CancelledError):
            await while_connected(request, cancelled)


class Story(BaseModel):
    title: str
    output: RequestOutput


async def test_a_fastapi_endpoint_returns_what_the_engine_gave() -> None:
    app = FastAPI()
    asking = {"max_tokens": 3, "ignore_eos": True, "logprobs": 2, "prompt_logprobs": 1, "seed": 7}

    @app.get("/untyped", response_model=None)
    async def untyped() -> object:
        return await engine.generate(PROMPT, request_id="a", **asking)

    @app.get("/typed")
    async def typed() -> RequestOutput:
        return await engine.generate(PROMPT, request_id="a", **asking)

    @app.get("/model", response_model=RequestOutput, response_model_exclude={"metrics"})
    async def model() -> object:
        return await engine.generate(PROMPT, request_id="a", **asking)

    @app.get("/inside")
    async def inside() -> Story:
        return Story(title="Tom", output=await engine.generate(PROMPT, request_id="a", **asking))

    @app.get("/health")
    async def health() -> Health:
        return engine.health()

    @app.get("/deltas")
    async def deltas() -> list[CompletionDelta]:
        async with engine.stream(PROMPT, **asking) as stream:
            return [delta async for delta in stream]

    async with quick_engine() as engine, serving_app(app) as url, plain_client(url) as client:
        output = await engine.generate(PROMPT, request_id="a", **asking)
        told = {**json.loads(json.dumps(output.to_dict())), "metrics": None}
        assert told["outputs"][0]["token_ids"] == output.outputs[0].token_ids
        assert told["outputs"][0]["logprobs"][0].keys() == {str(id_) for id_ in output.outputs[0].logprobs[0]}
        for path in ("/untyped", "/typed"):
            answer = (await client.get(path)).json()
            assert answer.pop("metrics")["num_generation_tokens"] == 3
            assert {**answer, "metrics": None} == told
        assert {**(await client.get("/model")).json(), "metrics": None} == told
        story = Story.model_validate_json((await client.get("/inside")).content)
        assert msgspec.structs.replace(story.output, metrics=None) == msgspec.structs.replace(output, metrics=None)
        assert (await client.get("/health")).json()["status"] == "ALIVE"
        assert [id_ for delta in (await client.get("/deltas")).json() for id_ in delta["token_ids"]] == (
            output.outputs[0].token_ids
        )
        schemas = (await client.get("/openapi.json")).json()["paths"]
        schema = schemas["/typed"]["get"]["responses"]["200"]["content"]["application/json"]["schema"]
        assert {"request_id", "outputs"} <= set(schema["required"])


@pytest.mark.parametrize("is_stream", [False, True])
async def test_an_engine_without_room_is_a_503_that_says_when_to_come_again(is_stream: bool) -> None:
    async with slow_engine(max_num_seqs=1, max_num_batched_tokens=64, max_waiting=1) as engine:

        def make(request: Request) -> Any:
            if is_stream:
                return StreamResponse(engine.stream(PROMPT, on_full="raise"))
            return while_connected(request, engine.generate(PROMPT, on_full="raise"))

        async with hosted(make) as client, engine.stream(PROMPT):
            await until(lambda: engine.stats().running == 1)
            async with engine.stream(PROMPT):
                answer = await client.get("/")
    assert answer.status_code == 503
    assert int(answer.headers["retry-after"]) >= 1
    assert answer.json()["error"]["code"] == "overloaded"


@pytest.mark.parametrize("is_told", [False, True])
async def test_a_stream_that_breaks_ends_its_response_so_that_its_client_notices(is_told: bool) -> None:
    def encode_error(error: AioEngineError) -> bytes:
        return f"[{type(error).__name__}]".encode()

    def make(_: Request) -> Response:
        stream = engine.stream(PROMPT, max_tokens=30, ignore_eos=True)
        return StreamResponse(stream, encode_error=encode_error if is_told else None)

    executor = FakeExecutor(vocab_size=2048)
    executor.make_step_fail(3, RuntimeError("secret internals"))
    async with Engine(seed=1, executor=executor) as engine, hosted(make) as client:
        if is_told:
            assert (await client.get("/")).text.endswith("[StepFailed]")
        else:
            with pytest.raises(httpx.RemoteProtocolError):
                await client.get("/")


async def test_aiohttp_handlers_answer_the_engines_errors_as_the_api_does() -> None:
    async with quick_engine() as engine:

        async def handler(request: web.Request) -> web.Response:
            await engine.generate(PROMPT, max_tokens=0)
            raise AssertionError("it was not refused")

        app = web.Application(middlewares=[aiohttp_errors])
        app.router.add_get("/", handler)
        async with serving_app(app) as url, plain_client(url) as client:
            answer = await client.get("/")
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "max_tokens")


def test_a_server_that_runs_no_asyncio_is_told_so() -> None:
    """As Hypercorn's trio workers run an app: without a loop of asyncio's."""
    app = create_app(quick_engine())

    async def never() -> Any:
        raise AssertionError("nothing is read")

    async def send(message: Any) -> None:
        raise AssertionError("nothing is sent")

    scope = {"type": "http", "method": "GET", "path": "/health", "headers": []}
    with pytest.raises(RuntimeError, match="hypercorn --worker-class asyncio"):
        app(scope, never, send).send(None)  # type: ignore[attr-defined]


# A server beside other things


@pytest.mark.asyncio(loop_factories=["asyncio", "uvloop"])
async def test_a_server_comes_back_serving_and_is_closed_by_hand() -> None:
    async with quick_engine() as engine:
        server = await start_server(engine, ServerConfig(served_model_name=("fox",)), port=0)
        async with plain_client(server.url) as client:
            assert (await client.get("/v1/models")).json()["data"][0]["id"] == "fox"
        await server.aclose()
        await server.aclose()
        with pytest.raises(httpx.ConnectError):
            async with plain_client(server.url) as client:
                await client.get("/health")
        # Another one, on the same engine; and none where it is.
        limits = HttpLimits(max_connections=5)
        async with await start_server(engine, port=0, limits=limits) as again, plain_client(again.url) as client:
            assert (await client.get("/health")).status_code == 200
            assert (await client.get("/version")).status_code == 200
            for name in ("evil.example", "[::1].evil.example"):  # no page of another origin reaches it
                assert (await client.get("/version", headers={"host": name})).status_code in (400, 403)
            with pytest.raises(AioEngineError, match="in use"):
                await start_server(engine, port=int(again.url.rpartition(":")[2]))
    for ended in (engine, quick_engine()):
        with pytest.raises(EngineClosed):
            await start_server(ended, port=0)


@pytest.mark.parametrize(("drain_timeout_s", "finish_reason"), [(30.0, "length"), (0.0, "abort")])
async def test_a_server_that_is_closed_lets_what_runs_end_or_aborts_it(
    drain_timeout_s: float, finish_reason: str
) -> None:
    async with slow_engine() as engine, Tasks() as tasks:
        server = await start_server(engine, port=0)
        async with plain_client(server.url) as client:
            asking = tasks.start(client.post("/v1/completions", json={"prompt": PROMPT, "max_tokens": 1}))
            await until(lambda: num_live(engine) == 1)
            closing = tasks.start(server.aclose(drain_timeout_s=drain_timeout_s))
            app: Any = server._config.app
            await until(lambda: app.state.api.is_draining)  # and /health says so
            executor = engine._running().core.executor
            await until(lambda: bool(executor.unfinished))
            while drain_timeout_s and executor.unfinished:
                executor.unfinished[0].complete()
                await asyncio.sleep(0)
            assert (await asking).json()["choices"][0]["finish_reason"] == finish_reason
            await closing
