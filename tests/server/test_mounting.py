"""The API inside other apps, beside their own routes; and what is answered where there is nothing of it."""

from __future__ import annotations

import contextlib
import time
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
from aiohttp import web
from fastapi import FastAPI
from openai import AsyncOpenAI
from server.conftest import (
    Adapter,
    app_of,
    both_adapters,
    events_of,
    fake_engine,
    on_both_adapters,
    openai_client,
    plain_client,
    serving_app,
    serving_fake,
)
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse
from starlette.routing import Mount, Route

from aioengine import Engine
from aioengine.errors import ConfigError
from aioengine.server import ServerConfig, aiohttp_routes, create_app
from aioengine.server.pages import instead_of
from aioengine.testing import FakeExecutor

pytestmark = pytest.mark.asyncio(loop_scope="module")

GETS = ["/", "/health", "/version", "/load", "/metrics", "/v1/models", "/v1/models/demo"]
POSTS = ["/v1/chat/completions", "/v1/completions", "/tokenize", "/detokenize", "/abort"]


def new_engine() -> Engine:
    return Engine(seed=1, executor=FakeExecutor(vocab_size=2048, max_model_len=256))


async def aiohttp_own(request: web.Request) -> web.Response:
    return web.Response(text=f"own {request.path}")


def in_starlette(engine: Engine, kind: type[Starlette] = Starlette) -> Starlette:
    @contextlib.asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        async with engine:
            yield

    async def own(request: Request) -> PlainTextResponse:
        return PlainTextResponse(f"own {request.url.path}")

    routes = [Route("/own", own), Route("/health", own), Mount("/ai", create_app(engine)), Route("/ais", own)]
    return kind(routes=routes, lifespan=lifespan)


def in_fastapi(engine: Engine) -> Starlette:
    return in_starlette(engine, FastAPI)


def in_aiohttp(engine: Engine) -> web.Application:
    async def context(app: web.Application) -> AsyncIterator[None]:
        async with engine:
            yield

    app = web.Application()
    app.cleanup_ctx.append(context)
    app.add_routes([web.get(path, aiohttp_own) for path in ("/own", "/health", "/ais")])
    app.add_routes(aiohttp_routes(engine, prefix="/ai"))
    return app


async def check_everything(url: str) -> None:
    """Each endpoint does its work where the API is mounted."""
    hello: Any = [{"role": "user", "content": "Hello!"}]
    async with openai_client(url) as client, plain_client(url) as http:
        assert [model.id async for model in client.models.list()] == ["demo"]
        assert (await client.models.retrieve("demo")).id == "demo"
        answer = await client.chat.completions.create(model="demo", messages=hello, max_tokens=3)
        assert answer.choices[0].finish_reason is not None
        stream = await client.completions.create(model="demo", prompt="Hello!", max_tokens=3, stream=True)
        assert [chunk async for chunk in stream][-1].choices[0].finish_reason is not None
        tokens = (await http.post("/tokenize", json={"prompt": "Hello!"})).json()["tokens"]
        assert (await http.post("/detokenize", json={"tokens": tokens})).json() == {"prompt": "Hello!"}
        assert (await http.post("/abort", json={"request_id": "a"})).status_code == 200
        for path in GETS:
            assert (await http.get(path)).status_code == 200, path


@pytest.mark.parametrize("host", [in_starlette, in_fastapi, in_aiohttp])
async def test_a_host_keeps_its_routes_and_owns_the_engine(host: Any) -> None:
    engine = new_engine()
    async with serving_app(host(engine), has_lifespan=True) as url:
        await check_everything(f"{url}/ai")
        async with plain_client(url) as http:
            for path in ("/own", "/health", "/ais"):
                assert (await http.get(path)).text == f"own {path}"
            assert (await http.get("/version")).status_code == 404
            assert (await http.get("/ai/own")).json()["error"]["code"] == "not_found"
            page = await http.get("/ai", follow_redirects=True)
            assert (page.status_code, page.url.path) == (200, "/ai/")
            assert page.headers["content-type"].startswith("text/html")
    assert "closed" in repr(engine)


@both_adapters
async def test_an_app_may_have_another_engine_each_time(adapter: Adapter) -> None:
    found: list[Engine] = []
    found.append(new_engine())
    async with serving_app(app_of(lambda: found[-1], adapter)) as url, plain_client(url) as http:
        for _ in range(2):
            async with found[-1]:
                await check_everything(url)
                told = (await http.get("/metrics")).text
                lines = [line for line in told.splitlines() if line.startswith("vllm:request_success_total")]
                assert sum(float(line.rpartition(" ")[2]) for line in lines) == 2
            assert (await http.get("/health")).status_code == 503
            found.append(new_engine())


async def test_two_engines_are_mounted_side_by_side() -> None:
    async with fake_engine() as (one, _), fake_engine(max_model_len=64) as (other, _):
        app = web.Application()
        app.add_routes(aiohttp_routes(one, ServerConfig(served_model_name=("one",)), prefix="/one"))
        app.add_routes(aiohttp_routes(other, ServerConfig(served_model_name=("other",)), prefix="/other/"))
        hosts = [Mount("/one", create_app(one, ServerConfig(served_model_name=("one",))))]
        hosts.append(Mount("/other", create_app(other, ServerConfig(served_model_name=("other",)))))
        for host in (app, Starlette(routes=hosts)):
            async with serving_app(host) as url, plain_client(url) as http:
                for name, length in (("one", 256), ("other", 64)):
                    (model,) = (await http.get(f"/{name}/v1/models")).json()["data"]
                    assert (model["id"], model["max_model_len"]) == (name, length)


async def test_served_alone_the_app_starts_and_closes_its_engine() -> None:
    engine = new_engine()
    async with serving_app(create_app(engine), has_lifespan=True) as url:
        await check_everything(url)
    assert "closed" in repr(engine)


async def test_an_engine_that_runs_already_is_left_running_and_routes_may_be_added_beside_the_api() -> None:
    async with fake_engine() as (engine, _):
        for is_hosts_too in (False, True):
            app = create_app(engine)
            if is_hosts_too:
                app.routes.append(Route("/mine", lambda request: PlainTextResponse("mine")))
            async with serving_app(app, has_lifespan=True) as url, plain_client(url) as http:
                assert (await http.get("/health")).status_code == 200
                assert (await http.get("/nothing")).json()["error"]["code"] == "not_found"
                assert ((await http.get("/mine")).text == "mine") is is_hosts_too
        assert engine.health().status == "ALIVE"


@on_both_adapters
@pytest.mark.parametrize(
    "path",
    ["/v1", "/v1/", "/v1/completions//", "/v2/models", "/V1/models", "/nothing", "/models", "/v1/health",
     "/v1/%63ompletions/x", "/é", "/" + "x" * 2000],
    ids=lambda path: path[:20],
)  # fmt: skip
@pytest.mark.parametrize("method", ["GET", "POST"])
async def test_where_there_is_nothing_it_says_so(http: httpx.AsyncClient, method: str, path: str) -> None:
    answer = await http.request(method, path, json={} if method == "POST" else None)
    assert answer.status_code in (404, 405)
    error = answer.json()["error"]
    assert error["type"] == "invalid_request_error"
    assert error["code"] in ("not_found", "method_not_allowed", "model_not_found")
    assert len(error["message"]) < 300
    assert answer.headers["x-request-id"]


ELSEWHERE = {
    "OpenAI's: /v1/chat/completions": ["/api/chat", "/api/show", "/api/tags", "/api/embed", "/api/blobs/sha256:1"],
    "use /v1/chat/completions": [
        "/v1beta/models/gemini-3-pro:generateContent", "/v1beta/models/a/b:streamGenerateContent", "/v1beta/models",
        "/v1/models/demo:generateContent", "/v1/projects/p/locations/l/publishers/google/models/g:generateContent",
        "/v2/chat", "/v1/chat", "/model/a.b/converse-stream",
    ],
    "out of the base URL": ["/openai/deployments/demo/chat/completions", "/openai/v1/responses"],
    "use /v1/completions": ["/generate", "/generate_stream", "/completion", "/v1/complete", "/v1/engines/a/x"],
    "/load and /metrics": ["/props", "/slots", "/info", "/get_model_info"],
    "an embedding model": ["/v1/embeddings", "/v1/embeddings/", "/v2/embed", "/embed", "/embedding"],
    "scores or classifies": ["/rerank", "/v1/rerank", "/v2/rerank", "/score", "/v1/score", "/pooling", "/classify"],
    "another one for that": [
        "/v1/moderations", "/v1/images/generations", "/v1/images/edits", "/v1/audio/speech", "/v1/videos",
    ],
    "send texts and tools": ["/v1/files", "/v1/files/file-1/content", "/v1/vector_stores", "/v1/assistants"],
    "one by one": ["/v1/batches", "/v1/batches/b/cancel", "/v1/messages/batches"],
    "previous_response_id": ["/v1/conversations", "/v1/conversations/c/items"],
    "leave messages out": ["/v1/responses/compact"],
}  # fmt: skip


@pytest.mark.parametrize("method", ["GET", "POST"])
@pytest.mark.parametrize(("told", "path"), [(told, path) for told, paths in ELSEWHERE.items() for path in paths])
async def test_a_path_of_another_server_hears_what_is_here_in_its_place(
    http: httpx.AsyncClient, method: str, told: str, path: str
) -> None:
    answer = await http.request(method, path, json={} if method == "POST" else None)
    error = answer.json()["error"]
    kind = ("type", "not_found_error") if path.startswith("/v1/messages") else ("code", "unsupported_endpoint")
    if (method, path) == ("GET", "/v1/models/demo:generateContent"):
        kind = ("code", "model_not_found")  # a name may have a colon
    else:
        assert error["message"].startswith(f"there is no {path.removesuffix('/')} here: ")
        assert told in error["message"]
    assert (answer.status_code, error[kind[0]]) == (404, kind[1])


async def test_paths_of_hostile_lengths_are_looked_at_in_no_time() -> None:
    began = time.process_time()
    for part in ("/v1/", ":generate", "/models/a:", "/openai", "a", "/api/chat"):
        assert instead_of("/v1" + part * 20_000) is None
    assert time.process_time() - began < 0.1


async def test_a_prefix_is_taken_off_whether_the_proxy_has_or_not() -> None:
    async with serving_fake("starlette", ServerConfig(root_path="/ai/v2")) as (*_, client):
        for path in ("/ai/v2/v1/models", "/v1/models", "/ai/v2", "/ai/v2/", "/ai/v2/v1/models/demo"):
            assert (await client.get(path)).status_code == 200, path
        for path in ("/ai/v1/models", "/ai/v22/v1/models", "/ai/v2/ai/v2/v1/models"):
            assert (await client.get(path)).status_code == 404, path
    for bad in ("/", "ai", "/ai/", "/a b", "//ai"):
        with pytest.raises(ConfigError, match="root_path"):
            ServerConfig(root_path=bad)


async def test_a_base_url_that_is_wrong_hears_the_path_that_was_meant(http: httpx.AsyncClient) -> None:
    for path, near in (
        ("/chat/completions", "/v1/chat/completions"),
        ("/models", "/v1/models"),
        ("/v1/v1/completions", "/v1/completions"),
        ("/v1/tokenize", "/tokenize"),
    ):
        error = (await http.post(path, json={})).json()["error"]
        assert error["code"] == "not_found"
        assert f"did you mean {near}?" in error["message"]


@on_both_adapters
async def test_a_slash_at_the_end_says_nothing(client: AsyncOpenAI, http: httpx.AsyncClient) -> None:
    for path in GETS:
        answer = await http.get(path.removesuffix("/") + "/")
        assert answer.status_code == 200, path
    for path in POSTS:
        plain, slashed = [await http.post(path + end, json={"model": "?"}) for end in ("", "/")]
        assert (slashed.status_code, slashed.json()) == (plain.status_code, plain.json()), path
    assert (await http.get("/v1/models/demo/")).json()["id"] == "demo"


async def test_a_mount_may_be_in_another_one_or_add_a_slash_and_leave_the_root_path_out() -> None:
    """Litestar's mounts do: below one, each path ends with a slash. Starlette's, one in another, give a root path."""
    async with fake_engine() as (engine, _):
        inner = create_app(engine)
        twice = Starlette(routes=[Mount("/a", Starlette(routes=[Mount("/v1", inner)]))])

        async def app(scope: Any, receive: Any, send: Any) -> None:
            path = scope["path"].removeprefix("/ai")
            await inner({**scope, "path": f"{path.removesuffix('/')}/", "root_path": ""}, receive, send)

        for host, prefix in ((app, "/ai"), (twice, "/a/v1")):
            async with serving_app(host) as url:
                await check_everything(url + prefix)


@on_both_adapters
@pytest.mark.parametrize("path", [*GETS, *POSTS])
async def test_another_method_hears_which_ones_there_are(http: httpx.AsyncClient, path: str) -> None:
    allowed = "GET" if path in GETS else "POST"
    for method in {"GET", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE", "PROPFIND"} - {allowed}:
        answer = await http.request(method, path)
        assert answer.status_code == 405, method
        assert allowed in answer.headers["allow"]
        assert answer.json()["error"]["code"] == "method_not_allowed"


@on_both_adapters
@pytest.mark.parametrize("path", [*GETS, *POSTS, "/nothing"])
async def test_a_head_has_the_status_and_no_body(http: httpx.AsyncClient, path: str) -> None:
    # On one connection: a body that is sent nevertheless would be taken for the next answer.
    for _ in range(3):
        head = await http.head(path)
        assert head.content == b""
        assert head.headers["x-request-id"]
        whole = await http.get(path)
        assert head.status_code == whole.status_code
        assert head.headers["content-type"] == whole.headers["content-type"]


# Other origins


async def test_a_page_of_an_allowed_origin_may_read_answers_also_those_that_lack_a_key() -> None:
    config = ServerConfig(allowed_origins=("https://app.example",), api_keys=("a-secret-key",))
    origin, elsewhere = {"origin": "https://app.example"}, {"origin": "https://evil.example"}
    key = {"authorization": "Bearer a-secret-key"}
    asked = {
        "access-control-request-method": "POST",
        "access-control-request-headers": "authorization, content-type, x-request-id",
    }
    async with serving_fake("starlette", config) as (*_, http):
        preflight = await http.options("/v1/chat/completions", headers={**origin, **asked})
        assert "POST" in preflight.headers["access-control-allow-methods"]
        assert "authorization" in preflight.headers["access-control-allow-headers"].lower()
        told = [preflight]
        for stream in (False, True):
            body = {"prompt": "a", "max_tokens": 2, "stream": stream}
            told.append(await http.post("/v1/completions", json=body, headers={**origin, **key}))
            assert "x-request-id" in told[-1].headers["access-control-expose-headers"].lower()
        events_of(told[-1].content)
        told.append(await http.post("/v1/completions", json={"zzz": 1}, headers=origin))
        assert [answer.status_code for answer in told] == [200, 200, 200, 401]
        assert {answer.headers["access-control-allow-origin"] for answer in told} == {"https://app.example"}

        refused = await http.options("/v1/chat/completions", headers={**elsewhere, **asked})
        assert refused.status_code == 400
        for answer in (refused, await http.get("/version", headers={**elsewhere, **key})):
            assert "access-control-allow-origin" not in answer.headers
    async with serving_fake("starlette", ServerConfig(allowed_origins=("*",))) as (*_, http):
        assert (await http.get("/version", headers=elsewhere)).headers["access-control-allow-origin"] == "*"


@both_adapters
async def test_without_origins_no_page_may_read_anything(adapter: Adapter) -> None:
    async with serving_fake(adapter) as (*_, http):
        answer = await http.get("/version", headers={"origin": "https://any.example"})
        assert not [name for name in answer.headers if name.startswith("access-control")]
        headers = {"origin": "https://any.example", "access-control-request-method": "POST"}
        assert (await http.options("/v1/completions", headers=headers)).status_code == 405


@pytest.mark.parametrize("bad", [Engine, "demo", None])
async def test_what_is_no_engine_is_refused_where_the_app_is_made(bad: Any) -> None:
    with pytest.raises(TypeError, match="an Engine is needed"):
        create_app(bad)
