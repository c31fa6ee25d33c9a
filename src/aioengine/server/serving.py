"""Serving an ASGI app alone: sockets, TLS, and an end that loses nothing.

uvicorn's protocol is driven from here and its `Server` is not: that one captures signals and raises them again, polls,
and waits for idle connections. What is imported with this module is light; uvicorn comes with `serve`.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import ipaddress
import logging
import os
import signal
import socket
import ssl
import stat
from collections.abc import Callable, Iterator
from email.utils import formatdate
from typing import TYPE_CHECKING, Annotated, Any, Literal, Protocol, Self

import anyio
import msgspec
from msgspec import Meta

from aioengine.core.health import Health
from aioengine.errors import ConfigError, EngineDead
from aioengine.validation import check_fields

if TYPE_CHECKING:
    from types import TracebackType

    from aioengine.server.errors import ApiError
    from aioengine.server.http_protocol import SharedState

logger = logging.getLogger("aioengine")

BACKLOG = 2048
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

MAX_SOCKET_PATH_BYTES = 107
"""``sun_path`` of unix(7) without its terminator."""


class HttpLimits(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a connection may do, below the app; a bad value is a `ConfigError` that names the field."""

    max_connections: Annotated[int, Meta(ge=1, description="connections at once; more are answered 503")] = 8192
    header_timeout_s: Annotated[
        float, Meta(gt=0.0, le=3600.0, description="a request's headers must have come within this time")
    ] = 10.0
    keep_alive_timeout_s: Annotated[
        float, Meta(gt=0.0, le=86400.0, description="an idle connection is closed after this time")
    ] = 75.0
    """Longer than clients keep one (5 s in httpx and openai), so that none is closed as a request is sent on it."""
    max_headers: Annotated[int, Meta(ge=1, description="headers of one request")] = 100
    max_header_bytes: Annotated[int, Meta(ge=256, description="bytes of a request's headers")] = 32768
    max_url_bytes: Annotated[int, Meta(ge=16, description="bytes of a request's URL")] = 8192

    def __post_init__(self) -> None:
        check_fields(self, lambda _, message: ConfigError(message))


class ServerAddress(msgspec.Struct, frozen=True, kw_only=True):
    """Where to serve.

    Attributes:
        host: an IP address or a name; every address that a name has is served.
        port: 0 leaves the choice to the system.
        uds: the path of a Unix socket, instead of host and port. It is its owner's alone (mode 0600).
        ssl_certfile, ssl_keyfile: PEM files, for https; the key may be in the certificate's file.
        ssl_keyfile_password: of an encrypted key.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    uds: str | None = None
    ssl_certfile: str | None = None
    ssl_keyfile: str | None = None
    ssl_keyfile_password: str | None = None


class HttpListener:
    """Sockets of one's own for a place to serve at. Everything here may block: call it off the loop.

    TCP ports are taken here, and refuse clients until `listen`: what does not work is known before a model is loaded.

    Raises:
        ConfigError: the place cannot be had, or the certificate is not usable.
    """

    def __init__(self, where: ServerAddress) -> None:
        self.where = where
        self.sockets: list[socket.socket] = []
        self._port = where.port
        self._file: tuple[int, int] | None = None
        """Device and inode of the socket's file."""
        self.ssl = _ssl_context(where)
        try:
            if where.uds is None:
                self.sockets = _bind_tcp(where.host, where.port)
                self._port = self.sockets[0].getsockname()[1]
            else:
                _check_path(where.uds)
        except OSError as error:
            raise ConfigError(f"cannot serve at {self.url}: {error.strerror or error}") from None

    @property
    def url(self) -> str:
        """As a client would write it; with the real port once there is one."""
        if self.where.uds is not None:
            return f"unix:{self.where.uds}"
        host = f"[{self.where.host}]" if ":" in self.where.host else self.where.host
        return f"{'http' if self.ssl is None else 'https'}://{host}:{self._port}"

    @property
    def is_local(self) -> bool:
        """Nobody can reach it from another machine."""
        return all(
            each.family == socket.AF_UNIX or ipaddress.ip_address(each.getsockname()[0]).is_loopback
            for each in self.sockets
        )

    def listen(self) -> None:
        """Let clients come.

        Raises:
            ConfigError: somebody has taken the place meanwhile.
        """
        try:
            if self.where.uds is not None and not self.sockets:
                self._bind_unix(self.where.uds)
            for each in self.sockets:
                each.listen(BACKLOG)
        except OSError as error:
            raise ConfigError(f"cannot serve at {self.url}: {error.strerror or error}") from None

    def close(self) -> None:
        """Refuse clients, and remove the socket's file. Idempotent."""
        for each in self.sockets:
            each.close()
        if self._file is not None and self.where.uds is not None:
            with contextlib.suppress(FileNotFoundError):
                status = os.lstat(self.where.uds)
                if (status.st_dev, status.st_ino) == self._file:  # not one that another server has put there
                    os.unlink(self.where.uds)
            self._file = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _bind_unix(self, path: str) -> None:
        _check_path(path)
        _remove_stale(path)
        made = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sockets = [made]
        # Linux gives the file the socket's own mode as it makes it: there is no moment in which it has another.
        os.fchmod(made.fileno(), 0o600)
        made.bind(path)
        status = os.lstat(path)
        self._file = (status.st_dev, status.st_ino)


def _bind_tcp(host: str, port: int) -> list[socket.socket]:
    """One socket for each address of the host, all at the same port."""
    found = socket.getaddrinfo(host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    sockets: list[socket.socket] = []
    try:
        for family, kind, _, _, address in dict.fromkeys(found):
            # The protocol is named, since asyncio looks at it before it sets TCP_NODELAY.
            made = socket.socket(family, kind, socket.IPPROTO_TCP)
            sockets.append(made)
            made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            _find_the_dead(made)
            if family == socket.AF_INET6:
                made.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            if port == 0 and len(sockets) > 1:
                address = (address[0], sockets[0].getsockname()[1], *address[2:])
            made.bind(address)
    except BaseException:
        for made in sockets:
            made.close()
        raise
    return sockets


def _find_the_dead(made: socket.socket) -> None:
    """A client that waits for its answer sends nothing: one whose machine is gone would be waited for all along."""
    made.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)  # what it accepts inherits these
    for name, value in (("TCP_KEEPIDLE", 60), ("TCP_KEEPINTVL", 15), ("TCP_KEEPCNT", 4)):
        if hasattr(socket, name):
            made.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def _check_path(path: str) -> None:
    """Raise ConfigError if a Unix socket cannot be made here, or somebody serves at it."""
    num_bytes = len(os.fsencode(path))
    if num_bytes > MAX_SOCKET_PATH_BYTES:
        raise ConfigError(f"unix:{path}: the path has {num_bytes} bytes; {MAX_SOCKET_PATH_BYTES} are possible")
    folder = os.path.dirname(os.path.abspath(path))
    if not os.access(folder, os.W_OK | os.X_OK):
        why = "you may not write to it" if os.path.isdir(folder) else "it is not there"
        raise ConfigError(f"cannot serve at unix:{path}: no file can be made in {folder}: {why}")
    if os.path.lexists(path):
        if not stat.S_ISSOCK(os.lstat(path).st_mode):
            raise ConfigError(f"{path} exists and is not a socket; it is not overwritten: choose another path")
        if not _is_stale(path):
            raise ConfigError(f"unix:{path} is in use: another process serves there; end it or choose another path")


def _remove_stale(path: str) -> None:
    if os.path.lexists(path) and _is_stale(path):
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)


def _is_stale(path: str) -> bool:
    """Whether nobody listens on a socket: what a process that was killed leaves."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.setblocking(False)  # with a full backlog it would wait; then somebody listens
        return probe.connect_ex(path) in (errno.ECONNREFUSED, errno.ENOENT)


def _ssl_context(where: ServerAddress) -> ssl.SSLContext | None:
    if where.ssl_certfile is None:
        if where.ssl_keyfile is not None:
            raise ConfigError("ssl_keyfile is for ssl_certfile: give both, or neither")
        return None
    if where.uds is not None:
        raise ConfigError("TLS is for a port: a Unix socket needs none")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.set_alpn_protocols(["http/1.1"])
    files = " and ".join(file for file in (where.ssl_certfile, where.ssl_keyfile) if file is not None)
    try:
        # Never asked for on the terminal, where a service has nobody to answer.
        context.load_cert_chain(where.ssl_certfile, where.ssl_keyfile, password=where.ssl_keyfile_password or "")
    except ssl.SSLError as error:
        why = error.reason.lower().replace("_", " ") if error.reason else "unreadable, or its key needs a password"
        raise ConfigError(f"{files}: no certificate and key that fit together: {why}") from None
    except OSError as error:
        raise ConfigError(f"{files}: {error.strerror or error}") from None
    return context


class StopRequest:
    """Asks a server to end: the first time by draining, the second time at once."""

    def __init__(self) -> None:
        self.num_asked = 0
        self.on_asked: Callable[[], None] = lambda: None
        """Called each time; whoever is to end sets it."""

    def ask(self) -> None:
        self.num_asked += 1
        self.on_asked()


@contextlib.contextmanager
def asked_by_signals(ask: Callable[[signal.Signals], None]) -> Iterator[None]:
    """Call ``ask`` on the running loop for each SIGTERM and SIGINT within the block, for a process of one's own."""
    loop = asyncio.get_running_loop()
    numbers = (signal.SIGTERM, signal.SIGINT)
    for number in numbers:
        loop.add_signal_handler(number, ask, number)
    try:
        yield
    finally:
        for number in numbers:
            loop.remove_signal_handler(number)


class Served(Protocol):
    """What serving needs of an `Engine`."""

    def health(self) -> Health: ...

    def abort_all(self) -> None: ...


async def serve(
    app: Any,
    *,
    engine: Served,
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
    read to the end of a response that says so; who has not read it after `ABORT_GRACE_S` is cut off. Cancelling ends
    all connections at once.

    Args:
        app: ASGI 3. Its lifespan is run if it has one.
        listener: where; it is closed in the end.
        stop: asked from the loop's own thread, such as by `asked_by_signals`.
        on_serving: called with the URL once clients can come.
        on_drain: called when draining begins: ``/health`` is to say so from then on.
    Raises:
        ConfigError: the place was taken meanwhile, or the app's lifespan failed to start.
        EngineDead: the engine has died; who waited for an answer has had `ABORT_GRACE_S` to read an error.
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
        engine: Served,
        listener: HttpListener,
        stop: StopRequest,
        limits: HttpLimits,
        lifespan: Literal["auto", "off"] = "auto",
    ) -> None:
        from uvicorn.config import Config

        from aioengine.server.http_protocol import HttpProtocol, SharedState

        self.death: str | None = None
        self.kept: object = None
        """Lives for as long as this serves: the loop holds us, and nobody else may hold that."""
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
        await state.given()
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
