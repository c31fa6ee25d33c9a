"""A plain ASGI app with an engine of its own: what serving needs of both, and no more; and it served, on the test's
own loop."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import anyio

from aioengine.core.health import Health
from aioengine.errors import ConfigError, EngineDead
from aioengine.server.http_listener import HttpListener, ServerAddress
from aioengine.server.http_server import HttpServer, StopRequest, serve


class SmallEngine:
    """Requests that stream a line at a time: as many as each is allowed, until it is ended or aborted."""

    def __init__(self) -> None:
        self.status: Any = "ALIVE"
        self.reason = ""
        self.is_draining = False
        self.num_aborts = 0
        self.running: dict[str, Request] = {}
        self.ended: list[str] = []

    def health(self) -> Health:
        return Health(status=self.status, reason=self.reason)

    def abort_all(self) -> None:
        self.num_aborts += 1
        for request in list(self.running.values()):
            request.end("abort")

    def die(self, reason: str) -> None:
        self.status, self.reason = "DEAD", reason
        for request in list(self.running.values()):
            request.end("error")


class Request:
    """One stream: `go` lets it write a line, `end` ends it."""

    def __init__(self) -> None:
        self.lines: asyncio.Queue[str] = asyncio.Queue()

    def go(self, line: str = "token") -> None:
        self.lines.put_nowait(line)

    def end(self, reason: str = "stop") -> None:
        self.lines.put_nowait(f"end: {reason}")


class SmallApp:
    """``GET /health``, ``POST /echo`` (gives the body back), ``GET /stream/NAME``, ``GET /flood``, ``POST /early``
    (answers 413 and reads nothing)."""

    def __init__(self, engine: SmallEngine) -> None:
        self.engine = engine
        self.scopes: list[Any] = []
        self.num_floods_ended = 0

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "lifespan":
            raise NotImplementedError("it has none")
        self.scopes.append(scope)
        path = scope["path"]
        if path == "/health":
            status = 503 if self.engine.is_draining else 200
            await respond(send, status, {"status": "draining" if self.engine.is_draining else "ok"})
        elif path.startswith("/stream/"):
            await self._stream(path.removeprefix("/stream/"), receive, send)
        elif path == "/early":
            await respond(send, 413, {"error": "too large"})
        elif path == "/flood":
            await self._flood(send)
        else:
            await respond(send, 200, {"path": path, "body": (await body_of(receive)).decode()})

    async def _stream(self, name: str, receive: Any, send: Any) -> None:
        await body_of(receive)
        self.engine.running[name] = request = Request()
        try:
            async with asyncio.TaskGroup() as group:
                gone = group.create_task(receive())
                gone.add_done_callback(lambda _: request.end("client_gone"))
                await start(send, 200)
                while True:
                    line = await request.lines.get()
                    is_last = line.startswith("end:")
                    await send({"type": "http.response.body", "body": f"{line}\n".encode(), "more_body": not is_last})
                    if is_last:
                        break
                gone.cancel()
            self.engine.ended.append(f"{name} {line}")
        except asyncio.CancelledError:
            self.engine.ended.append(f"{name} cancelled")
            raise
        finally:
            del self.engine.running[name]

    async def _flood(self, send: Any) -> None:
        """Write more than any buffer holds."""
        await start(send, 200)
        for _ in range(1000):
            await send({"type": "http.response.body", "body": b"x" * 2**16, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})
        self.num_floods_ended += 1


async def body_of(receive: Any) -> bytes:
    body = b""
    while True:
        message = await receive()
        body += message.get("body", b"")
        if not message.get("more_body"):
            return body


async def start(send: Any, status: int, length: int | None = None) -> None:
    headers = [] if length is None else [(b"content-length", str(length).encode())]
    await send({"type": "http.response.start", "status": status, "headers": headers})


async def respond(send: Any, status: int, body: Any) -> None:
    data = json.dumps(body).encode()
    await start(send, status, len(data))
    await send({"type": "http.response.body", "body": data, "more_body": False})


GET = b"GET /%s HTTP/1.1\r\nhost: x\r\n\r\n"


async def listener_at(where: ServerAddress, num_servers: int = 1) -> HttpListener:
    return await anyio.to_thread.run_sync(HttpListener, where, num_servers)


class Running:
    """A server that runs, and the engine behind it."""

    def __init__(self) -> None:
        self.engine = SmallEngine()
        self.app: Any = SmallApp(self.engine)
        self.stop = StopRequest()
        self.url = ""
        self.error: BaseException | None = None
        self.has_ended = anyio.Event()

    @property
    def address(self) -> tuple[str, int]:
        host, _, port = self.url.removeprefix("http://").rpartition(":")
        return host, int(port)


@asynccontextmanager
async def running(where: ServerAddress | None = None, *, app: Any = None, **options: Any) -> AsyncIterator[Running]:
    server, began = Running(), anyio.Event()

    def on_serving(started: HttpServer) -> None:
        server.url = started.url
        began.set()

    async def run() -> None:
        try:
            with await listener_at(where or ServerAddress(port=0)) as listener:
                await serve(
                    app or server.app,
                    engine=server.engine,
                    listener=listener,
                    stop=server.stop,
                    on_serving=on_serving,
                    on_drain=lambda: setattr(server.engine, "is_draining", True),
                    **options,
                )
        except (ConfigError, EngineDead) as error:
            server.error = error
        finally:
            server.has_ended.set()
            began.set()

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(run)
        with anyio.fail_after(20):
            await began.wait()
        yield server
        server.stop.ask()
        server.stop.ask()
        with anyio.fail_after(20):
            await server.has_ended.wait()


@asynccontextmanager
async def raw_client(server: Running) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    reader, writer = await asyncio.open_connection(*server.address)
    try:
        yield reader, writer
    finally:
        await leave(writer)


async def leave(writer: asyncio.StreamWriter) -> None:
    """Close a connection, which the server may have ended before, and wait until its socket is."""
    writer.transport.abort()
    with contextlib.suppress(OSError):
        await writer.wait_closed()
