"""A small app, served: on the test's own loop, with what a test needs to hold it and to talk to it."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import anyio
from server.small_app import SmallApp, SmallEngine

from aioengine.errors import ConfigError, EngineDead
from aioengine.server.http_listener import HttpListener, ServerAddress
from aioengine.server.http_server import StopRequest, serve

GET = b"GET /%s HTTP/1.1\r\nhost: x\r\n\r\n"


async def listener_at(where: ServerAddress) -> HttpListener:
    return await anyio.to_thread.run_sync(HttpListener, where)


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
async def running(where: ServerAddress | None = None, **options: Any) -> AsyncIterator[Running]:
    server = Running()
    server.app = options.pop("app", server.app)
    began = anyio.Event()

    def on_serving(url: str) -> None:
        server.url = url
        began.set()

    async def run() -> None:
        try:
            with await listener_at(where or ServerAddress(port=0)) as listener:
                await serve(
                    server.app,
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
