"""Engines served on real sockets, by both adapters: the ASGI app under uvicorn, and the routes of an aiohttp app.

The server runs on the test's own loop. A test of a module whose loop is the module's
(``pytestmark = pytest.mark.asyncio(loop_scope="module")``) takes these:

- ``engine``: the bundled model, started once a module.
- ``served``: it, served by Starlette; `on_both_adapters` runs a test once for each adapter.
- ``client``, ``http``: the official client, and a plain one, to ``served``; what they leave running fails the test.

`serving` serves an engine of the test's own, `serving_fake` a `fake_engine`, and `serving_app` any app.
"""

from __future__ import annotations

import asyncio
import json
import shutil
import socket
import ssl
import tempfile
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Literal, NamedTuple

import httpx
import openai
import pytest
import pytest_asyncio
import uvicorn
from aiohttp import web
from openai import AsyncOpenAI
from waiting import until

from aioengine import Engine
from aioengine.server import ServerConfig, aiohttp_routes, create_app
from aioengine.server.record import RequestRecord
from aioengine.testing import FakeExecutor

Adapter = Literal["starlette", "aiohttp"]
ADAPTERS: tuple[Adapter, ...] = ("starlette", "aiohttp")

both_loops = pytest.mark.asyncio(loop_factories=["asyncio", "uvloop"])
both_adapters = pytest.mark.parametrize("adapter", ADAPTERS)
on_both_adapters = pytest.mark.parametrize("served", ADAPTERS, indirect=True, scope="module")
each_adapter = pytest.mark.parametrize("adapter", ["uvicorn", "serve", "aiohttp"])
"""Of the servers that `hostile.served` makes."""


class Served(NamedTuple):
    """An engine that is served.

    Attributes:
        url: where the API is mounted, without a slash at its end.
    """

    adapter: Adapter
    engine: Engine
    url: str


@asynccontextmanager
async def serving(
    engine: Engine, adapter: Adapter, config: ServerConfig | None = None, *, prefix: str = ""
) -> AsyncIterator[Served]:
    """Serve an engine, which others start and close, under ``prefix``."""
    async with serving_app(app_of(engine, adapter, config, prefix=prefix), prefix=prefix) as url:
        yield Served(adapter, engine, url)


def app_of(
    engine: Engine | Callable[[], Engine], adapter: Adapter, config: ServerConfig | None = None, *, prefix: str = ""
) -> Any:
    """An app with nothing but the engine's API."""
    if adapter == "starlette":
        app = create_app(engine, config)
        if not prefix:
            return app
        from starlette.applications import Starlette

        host = Starlette()
        host.mount(prefix, app)
        return host
    site = web.Application()
    site.add_routes(aiohttp_routes(engine, config, prefix=prefix))
    return site


@asynccontextmanager
async def serving_app(app: Any, *, prefix: str = "", has_lifespan: bool = False) -> AsyncIterator[str]:
    """Serve an app of either kind; gives its URL with ``prefix``.

    Args:
        has_lifespan: run an ASGI app's lifespan, too; an aiohttp app's ``cleanup_ctx`` always runs.
    """
    serve = _serving_aiohttp(app) if isinstance(app, web.Application) else _serving_asgi(app, has_lifespan)
    async with all_ended(), serve as port:
        yield f"http://127.0.0.1:{port}{prefix}"


@asynccontextmanager
async def _serving_asgi(app: Any, has_lifespan: bool) -> AsyncIterator[int]:
    """uvicorn without its own main loop, whose ticks of 0.1 s every test would wait for."""
    config = uvicorn.Config(
        app, http="httptools", ws="none", lifespan="on" if has_lifespan else "off", log_config=None, log_level="warning"
    )
    config.load()
    server = uvicorn.Server(config)
    server.lifespan = config.lifespan_class(config)
    # The protocol is named, since asyncio looks at it before it sets TCP_NODELAY: 40 ms an answer.
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.bind(("127.0.0.1", 0))
    await server.startup(sockets=[listener])
    try:
        yield listener.getsockname()[1]
    finally:
        for listening in server.servers:
            listening.close()
        for connection in list(server.server_state.connections):
            connection.shutdown()
        await until(lambda: not server.server_state.connections and not server.server_state.tasks)
        await server.lifespan.shutdown()


@asynccontextmanager
async def _serving_aiohttp(app: web.Application) -> AsyncIterator[int]:
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=5.0)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        yield runner.addresses[0][1]
    finally:
        await runner.cleanup()


@asynccontextmanager
async def all_ended() -> AsyncIterator[None]:
    """Wait, at the end, for the tasks that have begun meanwhile: those of connections end when the client has left."""
    before = asyncio.all_tasks()
    yield
    await until(lambda: asyncio.all_tasks() <= before | {asyncio.current_task()})


NO_TLS = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
"""For clients of plain sockets: reading the machine's certificates takes each of them 20 ms."""


@asynccontextmanager
async def plain_client(url: str, **options: Any) -> AsyncIterator[httpx.AsyncClient]:
    """A client of what is served at ``url``."""
    async with httpx.AsyncClient(base_url=url, verify=NO_TLS, timeout=20.0, **options) as client:
        yield client


@asynccontextmanager
async def openai_client(url: str, **options: Any) -> AsyncIterator[AsyncOpenAI]:
    """The official client of what is served at ``url``, which tries nothing twice unless told to."""
    given = {"api_key": "not-needed", "max_retries": 0, "timeout": 20.0, **options}
    inner = openai.DefaultAsyncHttpxClient(verify=NO_TLS)
    async with AsyncOpenAI(base_url=f"{url}/v1", http_client=inner, **given) as client:
        yield client


@asynccontextmanager
async def fake_engine(
    *, max_model_len: int = 256, is_manual: bool = False, step_time_s: float = 0.0, **config: Any
) -> AsyncIterator[tuple[Engine, FakeExecutor]]:
    """An engine whose device does as it is told, with the bundled model's tokenizer."""
    executor = FakeExecutor(vocab_size=2048, max_model_len=max_model_len, is_manual=is_manual, step_time_s=step_time_s)
    async with Engine(seed=1, executor=executor, **config) as engine:
        yield engine, executor


class ServedFake(NamedTuple):
    """A fake engine that is served, and clients of it."""

    engine: Engine
    executor: FakeExecutor
    client: AsyncOpenAI
    http: httpx.AsyncClient


@asynccontextmanager
async def serving_fake(
    adapter: Adapter, config: ServerConfig | None = None, **options: Any
) -> AsyncIterator[ServedFake]:
    """Serve a `fake_engine` with these options: ``async with serving_fake("aiohttp") as (engine, _, _, http)``."""
    async with (
        fake_engine(**options) as (engine, executor),
        serving(engine, adapter, config) as served,
        openai_client(served.url) as client,
        plain_client(served.url) as http,
    ):
        yield ServedFake(engine, executor, client, http)


def record_of(**fields: Any) -> RequestRecord:
    """A completion's record, as far as its fields are given: one that has ended, after a quarter of a second."""
    known: dict[str, Any] = {
        "request_id": "req-1",
        "method": "POST",
        "path": "/v1/completions",
        "route": "/v1/completions",
        "client": "127.0.0.1",
        "started_at": 10.0,
        "ended_at": 10.25,
        "status": 200,
    }
    return RequestRecord(**{**known, **fields})


def events_of(body: bytes) -> list[Any]:
    """A stream's events (HTML standard, section 9.2.6), decoded; the last one is ``[DONE]``, and not among them."""
    text = body.decode()
    assert text.endswith("\n\n")
    datas = []
    for block in text.removesuffix("\n\n").split("\n\n"):
        if block.startswith(":"):  # a comment says that the server is there
            continue
        (line,) = block.split("\n")
        name, _, value = line.partition(": ")
        assert name == "data"
        datas.append(value)
    assert datas.pop() == "[DONE]"
    return [json.loads(data) for data in datas]


async def read(stream: AsyncIterator[Any]) -> list[Any]:
    return [chunk async for chunk in stream]


def texts_of(body: bytes) -> dict[int, str]:
    """Each choice's text in the events of a completion's stream, put together."""
    texts: dict[int, str] = {}
    for event in events_of(body):
        for choice in event["choices"]:
            texts[choice["index"]] = texts.get(choice["index"], "") + choice["text"]
    return texts


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder of its own, since the paths of sockets are short."""
    made = Path(tempfile.mkdtemp(prefix="serving-", dir="/tmp"))
    yield made
    shutil.rmtree(made)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def engine() -> AsyncIterator[Engine]:
    # In float32, where the same seed gives the same tokens whatever runs beside it.
    async with Engine(seed=1, dtype="float32", kv_cache_memory_bytes=2**27) as engine:
        yield engine


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def served(engine: Engine, request: pytest.FixtureRequest) -> AsyncIterator[Served]:
    async with serving(engine, getattr(request, "param", "starlette")) as served:
        yield served


@pytest_asyncio.fixture(loop_scope="module")
async def client(served: Served) -> AsyncIterator[AsyncOpenAI]:
    async with all_ended(), openai_client(served.url) as client:
        yield client


@pytest_asyncio.fixture(loop_scope="module")
async def http(served: Served) -> AsyncIterator[httpx.AsyncClient]:
    async with all_ended(), plain_client(served.url) as client:
        yield client
