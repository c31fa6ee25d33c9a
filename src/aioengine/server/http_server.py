"""Serving alone on a loop: connections, an end that loses nothing, and a server to start in one cell of a notebook.

uvicorn's protocol is driven from here and its `Server` is not: that one captures signals and raises them again, polls,
and waits for idle connections. What is imported with this module is light; uvicorn comes with the first server.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import socket
from collections.abc import Callable
from email.utils import formatdate
from typing import TYPE_CHECKING, Any, Self

import anyio

from aioengine.errors import EngineDead
from aioengine.server.config import HttpLimits, ServerConfig
from aioengine.server.http_listener import BACKLOG, HttpListener, ServerAddress

if TYPE_CHECKING:
    from aioengine.engine import Engine

logger = logging.getLogger("aioengine")

SPARE_FILES = 512
"""Files that a process needs beside its connections."""
TICK_S = 1.0
"""How often the server looks at the engine's health and at connections that are closing."""
ABORT_GRACE_S = 2.0
"""For clients to hear that their requests were aborted; then their connections are ended."""
CONNECTIONS_END_S = 1.0
"""For the loop to close sockets that were cut: it takes a turn."""
TASKS_END_S = 2.0
"""For the app's tasks to end once their connections have."""


class StopRequest:
    """Asks a server to end: the first time by draining, the second time at once."""

    def __init__(self) -> None:
        self.num_asked = 0
        self.on_asked: Callable[[], None] = lambda: None
        """Called each time; set by what is to end."""

    def ask(self) -> None:
        self.num_asked += 1
        self.on_asked()


async def serve(
    app: Any,
    *,
    engine: Engine,
    listener: HttpListener,
    stop: StopRequest,
    drain_timeout_s: float = 30.0,
    limits: HttpLimits | None = None,
    on_serving: Callable[[HttpServer], None] = lambda server: None,
    on_drain: Callable[[], None] = lambda: None,
) -> None:
    """Serve an ASGI app on the running loop until it is asked to stop, and drain then.

    Draining: no client can come any more; what was accepted goes on, each response as its connection's last, for at
    most ``drain_timeout_s``. Then, or when it is asked again, the engine's requests are aborted, so that their clients
    read to the end of an aborted response; those that have not after `ABORT_GRACE_S` are cut off. Cancelling ends
    all connections at once.

    Args:
        app: ASGI 3. Its lifespan is not run: the engine has been started, and is closed by what has started it.
        listener: where; it is closed in the end.
        stop: asked from the loop's own thread, such as by `asked_by_signals`.
        on_serving: called once clients can come.
        on_drain: called when draining begins: ``/health`` is to report it from then on.
    Raises:
        ConfigError: the place was taken meanwhile.
        EngineDead: the engine has died; clients that waited for an answer have had `ABORT_GRACE_S` to read an error.
    """
    server = HttpServer(app, engine, listener, limits, stop=stop, on_drain=on_drain)
    try:
        await server._start()
        on_serving(server)
        await server._until(lambda: stop.num_asked > 0)
        await server._drain(drain_timeout_s)
        server._look_at_engine()  # what has ended may have ended by its death
    finally:
        await server._end()
    if server._death is not None:
        raise EngineDead(server._death)


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
        config: limits, API keys and names; absent: the defaults. Without keys and ``allowed_hosts`` a server of this
            machine alone answers to localhost and ``host`` only.
        host, port: where; 0 leaves the port to the system. See `HttpServer.url`.
        uds: the path of a Unix socket, instead of host and port.
        limits: of connections.
    Raises:
        ConfigError: the place cannot be had.
        EngineClosed, EngineDead: the engine is not running.
    """
    from aioengine.server.asgi import create_app

    if engine.health().status != "STARTING":
        engine.describe()  # raises where it is not running
    listener = await anyio.to_thread.run_sync(HttpListener, ServerAddress(host=host, port=port, uds=uds))
    app = create_app(engine, listener.with_names(config or ServerConfig()))
    server = HttpServer(app, engine, listener, limits, on_drain=app.state.api.drain)
    try:
        await server._start()
    except BaseException:
        await server._end()
        raise
    return server


class HttpServer:
    """A server that runs. Made by `start_server`; ``async with await start_server(engine) as server: ...`` closes it.

    Attributes:
        url: where, such as ``http://127.0.0.1:8000``.
    """

    # What wakes it is `_changed`: being asked to stop, a connection's end, the engine's death. While it serves the loop
    # holds it, by its ticks.

    def __init__(
        self,
        app: Any,
        engine: Engine,
        listener: HttpListener,
        limits: HttpLimits | None,
        *,
        stop: StopRequest | None = None,
        on_drain: Callable[[], None] = lambda: None,
    ) -> None:
        from uvicorn.config import Config

        from aioengine.server.http_protocol import HttpProtocol, SharedState

        self.url = listener.url
        self._death: str | None = None
        self._engine = engine
        self._listener = listener
        self._stop = stop or StopRequest()
        self._on_drain = on_drain
        self._limits = limits or HttpLimits()
        self._loop = asyncio.get_running_loop()
        self._changed = asyncio.Event()
        self._state = SharedState(self._limits, on_left=self._changed.set)
        self._config = Config(
            app,
            http=HttpProtocol,
            ws="none",
            lifespan="off",
            log_config=None,
            proxy_headers=False,
            timeout_keep_alive=self._limits.keep_alive_timeout_s,  # type: ignore[arg-type]
        )
        self._config.load()
        self._connect = functools.partial(HttpProtocol, self._config, self._state, {})
        self._servers: list[asyncio.Server] = []
        self._ticker: asyncio.TimerHandle | None = None

    async def aclose(self, *, drain_timeout_s: float = 30.0) -> None:
        """Take no more clients, and let what was accepted end for so long; then abort it. Idempotent.

        Cancelling cuts off the clients that are still connected.
        """
        try:
            await self._drain(drain_timeout_s)
        finally:
            await self._end()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    def __repr__(self) -> str:
        return f"<HttpServer {self.url}>"

    async def _start(self) -> None:
        self._tick()
        await anyio.to_thread.run_sync(self._listener.listen)
        tls: dict[str, Any] = {}
        if self._listener.ssl is not None:
            tls = {"ssl": self._listener.ssl, "ssl_handshake_timeout": self._limits.header_timeout_s}
        for each in self._listener.sockets:
            make = self._loop.create_unix_server if each.family == socket.AF_UNIX else self._loop.create_server
            self._servers.append(await make(self._connect, sock=each, backlog=BACKLOG, **tls))
        self._stop.on_asked = self._changed.set

    async def _drain(self, timeout_s: float) -> None:
        """Let what was accepted end, or abort it."""
        # Connections that the system has accepted are taken over first: closing its socket would reset them.
        # From there to the app's first step are some turns of the loop: accepted, made, read, begun.
        for _ in range(5):
            await asyncio.sleep(0)
        state = self._state
        await state.wait_for_deferred()
        await asyncio.sleep(0)  # in which the app takes its first step with the last of it
        self._on_drain()
        state.drain()
        await self._stop_listening()
        if self._death is None and not state.is_idle:
            logger.info("draining for at most %g s; connections: %d", timeout_s, len(state.connections))
            with anyio.move_on_after(timeout_s):
                await self._until(lambda: state.is_idle or self._stop.num_asked > 1)
        if state.is_idle:
            return
        if self._death is None:
            logger.warning("aborting what still runs; connections: %d", len(state.connections))
        with anyio.move_on_after(ABORT_GRACE_S):
            while not state.is_idle:
                self._engine.abort_all()
                self._changed.clear()
                # A request whose body was still coming reaches the engine after the others were aborted.
                with anyio.move_on_after(0.05):
                    await self._changed.wait()

    async def _end(self) -> None:
        """End everything at once. Idempotent."""
        with anyio.CancelScope(shield=True):  # each step has a deadline of its own
            if self._ticker is not None:
                self._ticker.cancel()
            self._stop.on_asked = lambda: None
            await self._stop_listening()
            if num_cut := len(self._state.connections):
                logger.warning("connections cut off: %d", num_cut)
            self._state.abort()
            with anyio.move_on_after(CONNECTIONS_END_S):
                while not self._state.is_idle:
                    self._changed.clear()
                    await self._changed.wait()
            tasks = self._state.tasks
            if tasks:
                await asyncio.wait(tasks, timeout=TASKS_END_S)
            for task in list(tasks):  # they go on without their client
                task.cancel()
            if tasks:
                await asyncio.wait(tasks, timeout=TASKS_END_S)
            if tasks:
                logger.error("%d tasks of the app did not end", len(tasks))

    async def _stop_listening(self) -> None:
        for server in self._servers:
            server.close()
        await anyio.to_thread.run_sync(self._listener.close)

    async def _until(self, is_over: Callable[[], bool]) -> None:
        """Wait until it is so, or the engine is dead."""
        while not is_over() and self._death is None:
            self._changed.clear()
            await self._changed.wait()

    def _tick(self) -> None:
        self._state.default_headers = [(b"date", formatdate(usegmt=True).encode())]
        self._state.sweep(self._loop.time())
        self._look_at_engine()
        self._ticker = self._loop.call_later(TICK_S, self._tick)

    def _look_at_engine(self) -> None:
        """Notice that it has died."""
        health = self._engine.health()
        if health.status == "DEAD" and self._death is None:
            self._death = health.reason
            self._changed.set()
