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
import functools
import inspect
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
from nightly import nightly
from openai import AsyncOpenAI
from starlette.applications import Starlette
from uvicorn.server import ServerState
from waiting import until

from aioengine import Engine
from aioengine.server import HttpLimits, ServerConfig, aiohttp_routes, create_app
from aioengine.server.api import Api
from aioengine.server.http_protocol import HttpProtocol, SharedState
from aioengine.server.record import RequestRecord
from aioengine.testing.fake_executor import Sampler
from doubles.fake_executor import FakeExecutor

Adapter = Literal["starlette", "aiohttp"]
ADAPTERS: tuple[Adapter, ...] = ("starlette", "aiohttp")

both_loops = pytest.mark.asyncio(loop_factories=["asyncio", "uvloop"])
both_adapters = pytest.mark.parametrize("adapter", ["starlette", *nightly("aiohttp")])
on_both_adapters = pytest.mark.parametrize("served", ADAPTERS, indirect=True, scope="module")
each_adapter = pytest.mark.parametrize("adapter", ["serve", *nightly("aiohttp", "uvicorn")])
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
        host = Starlette()
        host.mount(prefix, app)
        return host
    site = web.Application()
    site.add_routes(aiohttp_routes(engine, config, prefix=prefix))
    return site


def api_of(app: Any) -> Api:
    """The API behind an app with nothing else."""
    if isinstance(app, web.Application):
        *_, route = app.router.routes()
        api: Api = inspect.getclosurevars(route.handler).nonlocals["api"]
        return api
    return app.state.api  # type: ignore[no-any-return]


@asynccontextmanager
async def serving_app(app: Any, *, prefix: str = "", has_lifespan: bool = False) -> AsyncIterator[str]:
    """Serve an app of either kind; gives its URL with ``prefix``.

    Args:
        has_lifespan: run an ASGI app's lifespan, too; an aiohttp app's ``cleanup_ctx`` always runs.
    """
    async with all_ended(), listening(app, has_lifespan=has_lifespan) as server:
        yield f"http://127.0.0.1:{server.port}{prefix}"


class Listening(NamedTuple):
    """A server on the test's loop: its port, and what gives the transports of its connections."""

    port: int
    transports: Callable[[], list[asyncio.Transport]]


@asynccontextmanager
async def listening(
    app: Any, *, state: ServerState | None = None, has_lifespan: bool = False, send_buffer: int | None = None
) -> AsyncIterator[Listening]:
    """Serve an app of either kind on a port of its own. At the end its connections are cut.

    Args:
        state: of an ASGI app; with a `SharedState` it is served by our protocol, else by uvicorn's.
        send_buffer: the kernel's for each connection; it grows to megabytes where it is not given.
    """
    # The protocol is named, since asyncio looks at it before it sets TCP_NODELAY: 40 ms an answer.
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.bind(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    if send_buffer is not None:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, send_buffer)  # those of its connections begin so
    is_aiohttp = isinstance(app, web.Application)
    serve = _aiohttp(app, listener) if is_aiohttp else _asgi(app, listener, state or ServerState(), has_lifespan)
    async with serve as transports:
        try:
            yield Listening(port, transports)
        finally:
            for transport in transports():
                transport.abort()


@asynccontextmanager
async def _asgi(
    app: Any, listener: socket.socket, state: Any, has_lifespan: bool
) -> AsyncIterator[Callable[[], list[asyncio.Transport]]]:
    """Without `uvicorn.Server`, which takes the signals of the process and ticks in a task of its own."""
    is_ours = isinstance(state, SharedState)
    config = uvicorn.Config(
        app,
        http=HttpProtocol if is_ours else "httptools",
        ws="none",
        lifespan="on" if has_lifespan else "off",
        log_config=None,
        access_log=False,
        proxy_headers=not is_ours,
        timeout_keep_alive=(state.limits if is_ours else HttpLimits()).keep_alive_timeout_s,
    )
    config.load()
    lifespan = config.lifespan_class(config)
    await lifespan.startup()
    make = functools.partial(config.http_protocol_class, config=config, server_state=state, app_state=lifespan.state)
    server = await asyncio.get_running_loop().create_server(make, sock=listener, backlog=2048)

    def connections() -> set[Any]:
        return state.all() if is_ours else state.connections

    try:
        yield lambda: [connection.transport for connection in connections()]
    finally:
        server.close()
        await until(lambda: not connections() and not state.tasks)
        await lifespan.shutdown()


@asynccontextmanager
async def _aiohttp(
    app: web.Application, listener: socket.socket
) -> AsyncIterator[Callable[[], list[asyncio.Transport]]]:
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
    await runner.setup()
    await web.SockSite(runner, listener, backlog=2048).start()

    def transports() -> list[asyncio.Transport]:
        connections = runner.server.connections if runner.server is not None else []
        return [connection.transport for connection in connections if connection.transport is not None]

    try:
        yield transports
    finally:
        handlers = [task for task in asyncio.all_tasks() if "RequestHandler.start" in repr(task)]
        await runner.cleanup()
        for task in handlers:  # one that lingers over a refused body goes on for 10 s, whatever is cleaned up
            task.cancel()
        await asyncio.gather(*handlers, return_exceptions=True)


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
    *,
    max_model_len: int = 256,
    is_manual: bool = False,
    step_time_s: float = 0.0,
    sampler: Sampler | None = None,
    **config: Any,
) -> AsyncIterator[tuple[Engine, FakeExecutor]]:
    """An engine whose device does as it is told, with the bundled model's tokenizer."""
    device = {} if sampler is None else {"sampler": sampler, "num_blocks": 1024}
    executor = FakeExecutor(
        vocab_size=2048, max_model_len=max_model_len, is_manual=is_manual, step_time_s=step_time_s, **device
    )
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
