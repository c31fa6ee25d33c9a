"""Serving alone on a loop: connections, an end that loses nothing, and a server to start in one cell of a notebook.

uvicorn's protocol is driven from here and its `Server` is not: that one captures signals and raises them again, polls,
and waits for idle connections. What is imported with this module is light; uvicorn comes with `Server`.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import warnings
from collections.abc import AsyncGenerator, Callable
from email.utils import formatdate
from typing import TYPE_CHECKING, Any, Literal, Self

import anyio

from aioengine.errors import ConfigError, EngineDead
from aioengine.server.config import HttpLimits, ServerConfig
from aioengine.server.http_listener import BACKLOG, HttpListener, ServerAddress

if TYPE_CHECKING:
    from aioengine.engine import Engine
    from aioengine.server.api import Api
    from aioengine.server.errors import ApiError
    from aioengine.server.http_protocol import SharedState

logger = logging.getLogger("aioengine")

TURNS_TO_TAKE_IN = 5
"""Of the loop, from a connection that the system holds to the app's first step: accepted, made, read, begun."""

TICK_S = 1.0
"""How often the server looks at the engine's health and at connections that are closing."""

ABORT_GRACE_S = 2.0
"""For clients to hear that their requests were aborted; then their connections are ended."""

ABORT_AGAIN_S = 0.05
"""A request whose body was still coming reaches the engine after all were aborted: they are aborted again."""

CONNECTIONS_END_S = 1.0
"""For the loop to close sockets that were cut: it takes a turn."""

TASKS_END_S = 2.0
"""For the app's tasks to end once their connections have."""

LIFESPAN_END_S = 30.0


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
    on_serving: Callable[[str], None] = lambda url: None,
    on_drain: Callable[[], None] = lambda: None,
) -> None:
    """Serve an ASGI app on the running loop until it is asked to stop, and drain then.

    Draining: no client can come any more; what was accepted goes on, each response as its connection's last, for at
    most ``drain_timeout_s``. Then, or when it is asked again, the engine's requests are aborted, so that their clients
    read to the end of a response that says so; those that have not after `ABORT_GRACE_S` are cut off. Cancelling ends
    all connections at once.

    Args:
        app: ASGI 3. Its lifespan is run if it has one.
        listener: where; it is closed in the end.
        stop: asked from the loop's own thread, such as by `asked_by_signals`.
        on_serving: called with the URL once clients can come.
        on_drain: called when draining begins: ``/health`` is to say so from then on.
    Raises:
        ConfigError: the place was taken meanwhile, or the app's lifespan failed to start.
        EngineDead: the engine has died; clients that waited for an answer have had `ABORT_GRACE_S` to read an error.
    """
    server = Server(app, engine, listener, stop, limits or HttpLimits())
    try:
        await server.start()
        on_serving(listener.url)
        await server.wait_for_stop()
        await server.drain(drain_timeout_s, on_drain)
        server.look_at_engine()  # what has ended may have ended by its death
    finally:
        with anyio.CancelScope(shield=True):  # each step has a deadline of its own
            await server.aclose()
    if server.death is not None:
        raise EngineDead(server.death)


class Server:
    """A server's parts, and the order in which they end. What wakes it: being asked, a connection's end, a tick."""

    def __init__(
        self,
        app: Any,
        engine: Engine,
        listener: HttpListener,
        stop: StopRequest,
        limits: HttpLimits,
        lifespan: Literal["auto", "off"] = "auto",
    ) -> None:
        from uvicorn.config import Config

        from aioengine.server.http_protocol import HttpProtocol, SharedState

        self.death: str | None = None
        self.kept: object = None
        """Lives for as long as this serves, since the loop holds us: for what nothing else may hold."""
        self._engine = engine
        self._listener = listener
        self._stop = stop
        self._limits = limits
        self._loop = asyncio.get_running_loop()
        self._changed = asyncio.Event()
        self._state: SharedState = SharedState(limits, on_left=self._changed.set, on_refused=_log_refusal)
        self._config = Config(
            app,
            http=HttpProtocol,
            ws="none",
            lifespan=lifespan,
            log_config=None,
            proxy_headers=False,
            timeout_keep_alive=limits.keep_alive_timeout_s,  # type: ignore[arg-type]
        )
        self._config.load()
        self._lifespan = self._config.lifespan_class(self._config)
        self._is_started = False
        self._servers: list[asyncio.Server] = []
        self._ticker: asyncio.TimerHandle | None = None

    async def start(self) -> None:
        await self._lifespan.startup()
        if self._lifespan.should_exit:
            raise ConfigError("the app did not start; the log says why")
        self._is_started = True
        self._tick()
        await anyio.to_thread.run_sync(self._listener.listen)
        tls: dict[str, Any] = {}
        if self._listener.ssl is not None:
            tls = {"ssl": self._listener.ssl, "ssl_handshake_timeout": self._limits.header_timeout_s}
        for each in self._listener.sockets:
            make = self._loop.create_unix_server if each.family == socket.AF_UNIX else self._loop.create_server
            self._servers.append(await make(self._connect, sock=each, backlog=BACKLOG, **tls))
        self._stop.on_asked = self._changed.set

    async def wait_for_stop(self) -> None:
        """Wait until it is asked to stop, or the engine dies."""
        await self._until(lambda: self._stop.num_asked > 0)

    async def drain(self, timeout_s: float, on_drain: Callable[[], None] = lambda: None) -> None:
        """Let what was accepted end, or abort it."""
        # Connections that the system has accepted are taken over first: closing its socket would reset them.
        for _ in range(TURNS_TO_TAKE_IN):
            await asyncio.sleep(0)
        state = self._state
        await state.wait_for_deferred()
        await asyncio.sleep(0)  # in which the app takes its first step with the last of it
        on_drain()
        state.drain()
        await self._stop_listening()
        if self.death is None and not state.is_idle:
            logger.info("draining: %s, for at most %g s", _count(len(state.connections), "connection"), timeout_s)
            with anyio.move_on_after(timeout_s):
                await self._until(lambda: state.is_idle or self._stop.num_asked > 1)
        if state.is_idle:
            return
        if self.death is None:
            logger.warning("aborting what still runs, on %s", _count(len(state.connections), "connection"))
        with anyio.move_on_after(ABORT_GRACE_S):
            while not state.is_idle:
                self._engine.abort_all()
                self._changed.clear()
                with anyio.move_on_after(ABORT_AGAIN_S):
                    await self._changed.wait()

    async def aclose(self) -> None:
        """End everything at once. Idempotent."""
        if self._ticker is not None:
            self._ticker.cancel()
        self._stop.on_asked = lambda: None
        await self._stop_listening()
        if num_cut := len(self._state.connections):
            logger.warning("cutting off %s", _count(num_cut, "connection"))
        self._state.abort()
        with anyio.move_on_after(CONNECTIONS_END_S):
            while not self._state.is_idle:
                self._changed.clear()
                await self._changed.wait()
        await self._end_tasks()
        if self._is_started:
            with anyio.move_on_after(LIFESPAN_END_S) as deadline:
                await self._lifespan.shutdown()
            if deadline.cancelled_caught:
                logger.error("the app's lifespan did not end within %g s", LIFESPAN_END_S)

    async def _end_tasks(self) -> None:
        """Wait for the app's tasks; cancel those that go on without their client."""
        for is_last in (False, True):
            if self._state.tasks:
                await asyncio.wait(self._state.tasks, timeout=TASKS_END_S)
            if not is_last:
                for task in list(self._state.tasks):
                    task.cancel()
        if self._state.tasks:
            logger.error("%s of the app did not end", _count(len(self._state.tasks), "task"))

    async def _stop_listening(self) -> None:
        for server in self._servers:
            server.close()
        await anyio.to_thread.run_sync(self._listener.close)

    async def _until(self, is_over: Callable[[], bool]) -> None:
        """Wait until it is so, or the engine is dead."""
        while not is_over() and self.death is None:
            self._changed.clear()
            await self._changed.wait()

    def _connect(self) -> asyncio.Protocol:
        made: asyncio.Protocol = self._config.http_protocol_class(  # type: ignore[call-arg]
            config=self._config, server_state=self._state, app_state=self._lifespan.state, _loop=self._loop
        )
        return made

    def _tick(self) -> None:
        self._state.default_headers = [(b"date", formatdate(usegmt=True).encode())]
        self._state.sweep(self._loop.time())
        self.look_at_engine()
        self._ticker = self._loop.call_later(TICK_S, self._tick)

    def look_at_engine(self) -> None:
        """Notice that it has died."""
        health = self._engine.health()
        if health.status == "DEAD" and self.death is None:
            self.death = health.reason
            self._changed.set()


def _log_refusal(client: str, error: ApiError) -> None:
    logger.info("refused %s: %d %s", client or "a client", error.status, error.message)


def _count(number: int, name: str) -> str:
    return f"{number} {name}{'' if number == 1 else 's'}"


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
    from aioengine.server.asgi import create_app

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

        Cancelling cuts off the clients that are still connected.
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
        # cancelling could not be told from another one's.
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

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    def __repr__(self) -> str:
        return f"<HttpServer {self.url}>"
