"""A server beside other things on a loop: started in one cell of a notebook, and closed in another."""

from __future__ import annotations

import warnings
from collections.abc import AsyncGenerator
from types import TracebackType
from typing import TYPE_CHECKING, Self

import anyio

from aioengine.engine import Engine
from aioengine.server.asgi import create_app
from aioengine.server.config import ServerConfig
from aioengine.server.serving import HttpLimits, HttpListener, Server, ServerAddress, StopRequest

if TYPE_CHECKING:
    from aioengine.server.api import Api


async def start_server(
    engine: Engine,
    config: ServerConfig | None = None,
    *,
    host: str = "127.0.0.1",
    port: int = 8000,
    uds: str | None = None,
    limits: HttpLimits | None = None,
) -> HttpServer:
    """Serve a started engine on the running loop, and come back: ``server = await start_server(engine)``.

    Of an engine that another task is starting requests wait for that. No signal handlers, no tasks of its own, no
    logging set up. Close it before the engine.

    Args:
        config: limits, API keys and names; absent: the defaults.
        host, port: where; 0 leaves the port to the system. See `HttpServer.url`.
        uds: the path of a Unix socket, instead of host and port.
        limits: of connections.
    Raises:
        ConfigError: the place cannot be had.
        EngineClosed, EngineDead: the engine is not running.
    """
    if engine.health().status != "STARTING":
        engine.describe()  # raises where it is not running
    listener = await anyio.to_thread.run_sync(HttpListener, ServerAddress(host=host, port=port, uds=uds))
    app = create_app(engine, config)
    # The app's lifespan has nothing to start, and would be a task that the loop's end breaks off with a traceback.
    parts = Server(app, engine, listener, StopRequest(), limits or HttpLimits(), lifespan="off")
    server = HttpServer(app.state.api, parts, listener.url)
    try:
        await server._server.start()
        await server._watch_loop()
    except BaseException:
        with anyio.CancelScope(shield=True):  # each step has a deadline of its own
            await server._server.aclose()
        raise
    return server


class HttpServer:
    """A server that runs. Made by `start_server`; ``async with await start_server(engine) as server: ...`` closes it.

    Attributes:
        url: where, such as ``http://127.0.0.1:8000``.
    """

    def __init__(self, api: Api, server: Server, url: str) -> None:
        self.url = url
        self._api = api
        self._server = server
        self._is_closed = False
        self._loops_end = self._at_loops_end()

    async def aclose(self, *, drain_timeout_s: float = 30.0) -> None:
        """Take no more clients, and let what was accepted end for so long; then abort it. Idempotent.

        Cancelling cuts off who is still connected.
        """
        self._is_closed = True
        await self._loops_end.aclose()
        await self._end(drain_timeout_s)

    async def _end(self, drain_timeout_s: float) -> None:
        try:
            await self._server.drain(drain_timeout_s, self._note_draining)
        finally:
            with anyio.CancelScope(shield=True):  # each step has a deadline of its own
                await self._server.aclose()
            self._server.kept = None
            self._api.close()

    async def _watch_loop(self) -> None:
        """From now on a loop that ends before the server is closed ends it, and says what should have been done."""
        self._server.kept = self
        await anext(self._loops_end)

    async def _at_loops_end(self) -> AsyncGenerator[None]:
        # A loop's runner closes the generators that are left, when it has cancelled the tasks: no task is needed, whose
        # cancelling nobody could tell from another one's.
        try:
            yield
        finally:
            if not self._is_closed:
                await self._end(drain_timeout_s=0.0)
                message = f"{self!r} was never closed: use `async with`, or await aclose()"
                warnings.warn(message, ResourceWarning, stacklevel=1, source=self)

    def _note_draining(self) -> None:
        self._api.is_draining = True

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.aclose()

    def __repr__(self) -> str:
        return f"<HttpServer {self.url}>"
