"""The API as an ASGI app, to mount in a Starlette or FastAPI app or to serve alone; and help for routes of your own.

A Starlette handler runs on when its client has left, and a ``StreamingResponse`` answers 200 before the engine has been
asked. With `while_connected` and `StreamResponse` a client that leaves aborts its request, one that stops reading is
cut off, and an engine that has no room still makes a 503.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from typing import Any, TypeVar

from starlette import responses
from starlette.applications import Starlette
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.types import ASGIApp, Receive, Scope, Send

from aioengine.engine import Engine, Stream
from aioengine.errors import AioEngineError, EngineClosed
from aioengine.outputs import CompletionDelta
from aioengine.server.api import Api
from aioengine.server.config import ServerConfig
from aioengine.server.errors import api_error_of
from aioengine.server.exchange import (
    CUT_EXTENSION,
    ClientGone,
    Response,
    WriteMonitor,
    read_headers,
    run_while_connected,
)

T = TypeVar("T")


def create_app(engine: Engine | Callable[[], Engine], config: ServerConfig | None = None) -> Starlette:
    """The OpenAI-compatible API of an engine: ``app.mount("/ai", create_app(engine))``, or served alone.

    Mounted, the host app's lifespan starts and closes the engine, before or after this call. Until it begins to,
    requests hear 503; while it starts the engine beside, they wait for that, and ``/health`` is 503 with STARTING.
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
            api.engine.health()
        except EngineClosed:  # it has not been started
            async with api.engine:
                yield
        else:
            yield

    app = _App(lifespan=lifespan)
    app.state.api = api
    app.router.default = app.serve
    if api.config.allowed_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=list(api.config.allowed_origins),
            allow_methods=["GET", "POST"],
            allow_headers=["*"],
            expose_headers=["x-request-id", "request-id", "retry-after"],
        )
    return app


class _App(Starlette):
    """An app of one endpoint, that of all paths and methods that are no other route's.

    Without other routes Starlette's own layers, which make responses of errors and find routes, have nothing to do:
    each of them would stand between every event of a stream and its client, for 0.8 µs in all.
    """

    def build_middleware_stack(self) -> ASGIApp:
        if self.router.routes:  # a host has added its own
            return super().build_middleware_stack()
        app: ASGIApp = self.serve
        for layer, args, kwargs in reversed(self.user_middleware):
            app = layer(app, *args, **kwargs)
        return app

    async def serve(self, scope: Scope, receive: Receive, send: Send) -> None:
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
        path, root = scope["path"], scope.get("root_path", "")
        if root and path.startswith(root) and path[len(root) : len(root) + 1] in ("", "/"):
            path = path[len(root) :]  # below where the app is mounted
        self.path: str = path or "/"
        self.query = scope.get("query_string", b"").decode("latin-1")
        self.headers: Mapping[str, str] = read_headers(scope["headers"])
        client = scope.get("client")
        self.client = client[0] if client else ""
        self._receive = receive
        self._send = send
        self._is_body_over = False
        self.cut: Callable[[], None] = scope.get("extensions", {}).get(CUT_EXTENSION, _nothing)

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
        raw = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in headers.items()]
        await self._send({"type": "http.response.start", "status": status, "headers": raw})

    async def write(self, data: bytes) -> None:
        await self._send({"type": "http.response.body", "body": data, "more_body": True})

    async def end(self) -> None:
        await self._send({"type": "http.response.body", "body": b"", "more_body": False})

    async def respond(self, response: Response) -> None:
        headers = {**response.headers, "content-length": str(len(response.body))}
        await self.start(response.status, headers)
        await self._send({"type": "http.response.body", "body": response.body, "more_body": False})


# For routes of your own


async def while_connected(request: Request, work: Awaitable[T]) -> T:
    """Await ``work``, such as ``engine.generate(...)``, as long as the request's client is there to hear of it.

    Only once the request's body has been read, as FastAPI has before it calls an endpoint.

    Raises:
        ClientDisconnect: it left, and the work was cancelled; `engine_errors` knows what to do with that.
        Exception: what the work raised, as it is.
    """

    async def do(_: Callable[[], None]) -> T:
        return await work

    try:
        return await run_while_connected(AsgiExchange(request.scope, request.receive, _nothing), do)
    except ClientGone:
        raise ClientDisconnect from None


class StreamResponse(responses.Response):
    """Sends a stream as it comes, and owns it: however this ends, the request ends with it.

    The stream is entered before the response begins, so that what the engine refuses is an error that the app's
    exception handlers answer.

    Args:
        stream: not entered yet.
        encode: what to send of each delta; absent: its text.
        encode_error: what to send where the request fails in the middle; absent: the connection ends without the
            response's end, which clients notice.
        media_type: absent: plain text.
        write_timeout_s: a client that takes nothing for so long is cut off.
    """

    media_type = "text/plain"

    def __init__(
        self,
        stream: Stream,
        encode: Callable[[CompletionDelta], bytes] | None = None,
        *,
        encode_error: Callable[[AioEngineError], bytes] | None = None,
        media_type: str | None = None,
        headers: dict[str, str] | None = None,
        write_timeout_s: float = 30.0,
    ) -> None:
        self.status_code = 200
        self.background = None
        self.media_type = media_type or self.media_type
        self._stream = stream
        self._encode = encode or (lambda delta: delta.text.encode())
        self._encode_error = encode_error
        self._write_timeout_s = write_timeout_s
        self.init_headers({"cache-control": "no-cache", "x-accel-buffering": "no", **(headers or {})})
        del self.headers["content-length"]  # it is not known yet

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        exchange = AsgiExchange(scope, receive, send)

        async def relay(cut: Callable[[], None]) -> None:
            async with self._stream:  # what it refuses is an error before the response begins
                with WriteMonitor(exchange, timeout_s=self._write_timeout_s, on_stuck=cut) as monitor:
                    await monitor.write(exchange.start(self.status_code, dict(self.headers)))
                    try:
                        async for delta in self._stream:
                            if data := self._encode(delta):
                                await monitor.write(exchange.write(data))
                    except AioEngineError as error:
                        if self._encode_error is None:
                            raise
                        await monitor.write(exchange.write(self._encode_error(error)))
                    await monitor.write(exchange.end())

        with contextlib.suppress(ClientGone):
            await run_while_connected(exchange, relay)


async def _answer_error(request: Request, error: Exception) -> responses.Response:
    """The API's answer to an error that the engine raised; 499, nginx's number, to a client that has left."""
    if isinstance(error, ClientDisconnect):
        return responses.Response(status_code=499)
    response = api_error_of(error).response()
    return responses.Response(response.body, response.status, response.headers)


engine_errors: dict[Any, Any] = {AioEngineError: _answer_error, ClientDisconnect: _answer_error}
"""Exception handlers, as ``Starlette(exception_handlers=engine_errors)`` and FastAPI take them: 400 for what the client
did wrong, 503 with ``Retry-After`` for no room, 500 for the rest, with OpenAI's error bodies."""


def _nothing(*_: Any) -> Any:
    """Cuts no connection, and sends no message."""
