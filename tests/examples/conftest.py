"""The examples, used as a reader would: apps served on a real socket by the test's own loop, scripts as processes."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import os
import signal
import socket
import ssl
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from types import ModuleType

import anyio
import httpx
import pytest
import uvicorn
from aiohttp import web

from aioengine import Engine
from aioengine.models.folder import DEMO_MODEL

EXAMPLES = Path(__file__).parents[2] / "examples"
PROMPT = [5, 6, 7]
TIMEOUT_S = 60.0
NO_TLS = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
"""For clients of plain sockets: reading the machine's certificates takes each of them 20 ms."""


def load(name: str) -> ModuleType:
    """An example as a fresh module: its engine and its app belong to one loop, and a test has one of its own."""
    spec = importlib.util.spec_from_file_location(f"example_{name}", EXAMPLES / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # pydantic looks annotations up there
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def greedy_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The bundled model, which by itself draws its tokens, with a generation config that leaves nothing to chance."""
    folder = tmp_path_factory.mktemp("models") / "demo"
    folder.mkdir()
    for file in DEMO_MODEL.iterdir():
        (folder / file.name).symlink_to(file)
    config = folder / "generation_config.json"
    sampling = json.loads(config.read_text()) | {"temperature": 0.0, "top_p": 1.0}
    config.unlink()
    config.write_text(json.dumps(sampling))
    return folder


@pytest.fixture(autouse=True)
def examples_are_greedy(greedy_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Give the examples a model whose answers can be told in advance."""
    monkeypatch.setenv("MODEL", str(greedy_model))


class Client:
    """A served example.

    Attributes:
        http: for its address.
        port: where it is served, on the loopback.
    """

    def __init__(self, module: ModuleType, engine: Engine, http: httpx.AsyncClient, port: int) -> None:
        self.module = module
        self.engine = engine
        self.http = http
        self.port = port

    async def until_idle(self) -> None:
        """Wait until nothing runs and nothing waits."""
        await until(lambda: self.num_live() == 0)

    def num_live(self) -> int:
        stats = self.engine.stats()
        return stats.running + stats.waiting

    def num_aborted(self) -> int:
        return self.engine.stats().finished["abort"]

    @asynccontextmanager
    async def paused(self) -> AsyncIterator[None]:
        """Within it no request gets any further, so that none ends by itself."""
        await self.engine.pause("keep")
        yield
        await self.engine.resume()

    @asynccontextmanager
    async def overloaded(self) -> AsyncIterator[None]:
        """Within it as many requests wait as may."""
        async with self.paused(), AsyncExitStack() as stack:
            for _ in range(self.engine.config.max_waiting):
                await stack.enter_async_context(self.engine.stream(PROMPT, max_tokens=1))
            yield


async def until(is_so: Callable[[], bool]) -> None:
    """Wait for what another task on this loop brings about."""
    with anyio.fail_after(TIMEOUT_S):
        while not is_so():  # noqa: ASYNC110
            await anyio.sleep(0.001)


@asynccontextmanager
async def running_asgi(name: str) -> AsyncIterator[Client]:
    """Serve an example's app by uvicorn, with its lifespan."""
    module = load(name)
    config = uvicorn.Config(module.app, log_config=None, lifespan="on")
    config.load()
    # Not `serve`, whose main loop sees once in 0.1 s that it is to end.
    server = uvicorn.Server(config)
    server.lifespan = config.lifespan_class(config)
    # The protocol is named, since asyncio looks at it before it sets TCP_NODELAY.
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.bind(("127.0.0.1", 0))
    listener.listen()
    await server.startup(sockets=[listener])
    assert not server.should_exit
    try:
        async with client_of(module, module.engine, listener.getsockname()[1]) as client:
            yield client
    finally:
        for listening in server.servers:
            listening.close()
        for connection in list(server.server_state.connections):
            connection.shutdown()
        await until(lambda: not server.server_state.connections and not server.server_state.tasks)
        await server.lifespan.shutdown()


@asynccontextmanager
async def running_aiohttp(name: str) -> AsyncIterator[Client]:
    """Serve an example's aiohttp app, with its ``cleanup_ctx``, and as its own last line does."""
    module = load(name)
    app = module.make_app()
    runner = web.AppRunner(app, access_log=None, handler_cancellation=True, shutdown_timeout=5.0)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        async with client_of(module, app[module.ENGINE], runner.addresses[0][1]) as client:
            yield client
    finally:
        await runner.cleanup()


@asynccontextmanager
async def client_of(module: ModuleType, engine: Engine, port: int) -> AsyncIterator[Client]:
    before = asyncio.all_tasks()
    url = f"http://127.0.0.1:{port}"
    async with httpx.AsyncClient(base_url=url, verify=NO_TLS, timeout=TIMEOUT_S, trust_env=False) as http:
        yield Client(module, engine, http, port)
    # Those of connections end when the client has left.
    await until(lambda: asyncio.all_tasks() <= before | {asyncio.current_task()})


class Process:
    """An example that runs as a script; its output goes to a file, which cannot fill up."""

    def __init__(self, output: Path, name: str, *args: str) -> None:
        self._output = output
        # Development mode shows what is closed too late, and by whom nothing was awaited.
        command = [sys.executable, "-X", "dev", "-u", str(EXAMPLES / f"{name}.py"), *args]
        with output.open("wb") as file:
            self._process = subprocess.Popen(
                command, stdout=file, stderr=subprocess.STDOUT, env=os.environ | {"PORT": "0"}, cwd=output.parent
            )

    def output(self) -> str:
        return self._output.read_text()

    def is_running(self) -> bool:
        return self._process.poll() is None

    def interrupt(self) -> None:
        self._process.send_signal(signal.SIGINT)

    async def ended(self) -> int:
        """Wait for its end; the exit status."""
        await until(lambda: not self.is_running())
        return self._process.returncode

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Callable[..., Process]]:
    """Run an example as a script; it is ended with the test."""
    processes: list[Process] = []

    def start(name: str, *args: str) -> Process:
        processes.append(Process(tmp_path / f"{name}-{len(processes)}.txt", name, *args))
        return processes[-1]

    yield start
    for process in processes:
        process.kill()
