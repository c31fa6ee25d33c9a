"""The handlers as an ASGI app, to mount in a Starlette or FastAPI app or to serve alone."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AbstractAsyncContextManager

from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Receive, Scope, Send

from aioengine.engine import Engine
from aioengine.errors import EngineClosed
from aioengine.server.api import Api
from aioengine.server.config import ServerConfig
from aioengine.server.exchange import CUT_EXTENSION, ClientGone, Response


def create_app(engine: Engine | Callable[[], Engine], config: ServerConfig | None = None) -> Starlette:
    """The OpenAI-compatible API of an engine: ``app.mount("/ai", create_app(engine))``, or served alone.

    Mounted, the host app's lifespan starts and closes the engine, before or after this call. Until it begins to,
    requests hear 503; while it starts the engine beside, they wait for that, and ``/health`` says 503 and STARTING.
    Served alone, the app starts an engine that has not been started, and closes it at the end.

    Args:
        engine: belongs to the loop that it is started on, which must be the one that serves. Or a function that finds
            it, asked at each request: for a host app that starts more than once, and has an engine for each time.
        config: limits, API keys and names; absent: the defaults.
    Returns:
        an app whose ``state.api`` is the `Api` behind it.
    """
    api = Api(engine, config)

    @contextlib.asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        try:
            if _is_new(api.engine):
                async with api.engine:
                    yield
            else:
                yield
        finally:
            api.close()

    middleware = []
    if api.config.allowed_origins:
        middleware.append(
            Middleware(
                CORSMiddleware,
                allow_origins=list(api.config.allowed_origins),
                allow_methods=["GET", "POST"],
                allow_headers=["*"],
                expose_headers=["x-request-id", "retry-after"],
            )
        )
    return _App(api, middleware, lifespan)


def _is_new(engine: Engine) -> bool:
    try:
        engine.health()
    except EngineClosed:
        return True
    return False


class _App(Starlette):
    """An app of one endpoint, that of all paths and methods that are no other route's.

    Without other routes Starlette's own layers, which make responses of errors and find routes, have nothing to do:
    each of them would stand between every event of a stream and its client, for 0.8 µs in all.
    """

    def __init__(
        self, api: Api, middleware: list[Middleware], lifespan: Callable[[Starlette], AbstractAsyncContextManager[None]]
    ) -> None:
        super().__init__(middleware=middleware, lifespan=lifespan)
        self.state.api = api
        self.router.default = self._serve

    def build_middleware_stack(self) -> ASGIApp:
        if self.router.routes:  # a host has added its own
            return super().build_middleware_stack()
        app: ASGIApp = self._serve
        for layer, args, kwargs in reversed(self.user_middleware):
            app = layer(app, *args, **kwargs)
        return app

    async def _serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            await self.state.api.serve(AsgiExchange(scope, receive, send))
        elif scope["type"] == "lifespan":
            await self.router.lifespan(scope, receive, send)
        else:  # websockets, which it refuses
            await self.router.not_found(scope, receive, send)


class AsgiExchange:
    """An `Exchange` of an ASGI server (ASGI specification 3.0, HTTP)."""

    def __init__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.method: str = scope["method"]
        self.path = _path_below(scope)
        self.headers: Mapping[str, str] = {
            name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]
        }
        client = scope.get("client")
        self.client = client[0] if client else ""
        self._receive = receive
        self._send = send
        self._is_body_over = False
        self._cut: Callable[[], None] | None = scope.get("extensions", {}).get(CUT_EXTENSION)

    async def read(self) -> bytes:
        while not self._is_body_over:
            message = await self._receive()
            if message["type"] == "http.disconnect":
                raise ClientGone
            self._is_body_over = not message.get("more_body", False)
            if body := message.get("body", b""):
                return bytes(body)
        return b""

    async def gone(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass

    async def start(self, status: int, headers: Mapping[str, str]) -> None:
        await self._send({"type": "http.response.start", "status": status, "headers": _raw(headers)})

    async def write(self, data: bytes) -> None:
        await self._send({"type": "http.response.body", "body": data, "more_body": True})

    async def end(self) -> None:
        await self._send({"type": "http.response.body", "body": b"", "more_body": False})

    async def respond(self, response: Response) -> None:
        headers = {**response.headers, "content-length": str(len(response.body))}
        await self.start(response.status, headers)
        await self._send({"type": "http.response.body", "body": response.body, "more_body": False})

    def cut(self) -> None:
        if self._cut is not None:
            self._cut()


def _path_below(scope: Scope) -> str:
    """The path below where the app is mounted."""
    path: str = scope["path"]
    root: str = scope.get("root_path", "")
    if root and path.startswith(root) and path[len(root) : len(root) + 1] in ("", "/"):
        path = path[len(root) :]
    return path or "/"


def _raw(headers: Mapping[str, str]) -> list[tuple[bytes, bytes]]:
    return [(name.encode("latin-1"), value.encode("latin-1")) for name, value in headers.items()]
