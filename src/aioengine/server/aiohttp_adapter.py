"""The API as routes of an aiohttp app."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping

from aiohttp import web
from aiohttp.base_protocol import BaseProtocol
from yarl import URL

from aioengine.engine import Engine
from aioengine.errors import AioEngineError
from aioengine.server.api import Api
from aioengine.server.config import ServerConfig
from aioengine.server.errors import ApiError, api_error_of
from aioengine.server.exchange import ClientGone, PerLoop, Response, read_headers


def aiohttp_routes(
    engine: Engine | Callable[[], Engine], config: ServerConfig | None = None, *, prefix: str = ""
) -> list[web.RouteDef]:
    """The OpenAI-compatible API of an engine: ``app.add_routes(aiohttp_routes(engine, prefix="/ai"))``.

    The app may be another one's sub-app. Its own ``cleanup_ctx`` starts and closes the engine. The limit on bodies is
    the config's: aiohttp's ``client_max_size`` has no effect here.

    A client that leaves is noticed by the next write to it, and within 2 ms by a request that writes nothing; at once
    where the app runs with ``handler_cancellation=True``.

    Args:
        engine: belongs to the loop that it is started on, which must be the app's. Or a function that finds it, asked
            at each request: for an app that starts more than once, and has an engine for each time.
        config: limits, API keys and names; absent: the defaults.
        prefix: of all paths; begins with "/" and does not end with one. It may have variables, as aiohttp's paths do.
    """
    api = Api(engine, config)
    prefix = prefix.rstrip("/")
    disconnects = PerLoop(DisconnectWatcher)

    async def add_slash(request: web.Request) -> web.Response:
        # Relative, since a proxy may have taken a part of the path away; "//elsewhere/ai/" would lead to another host.
        name = request.rel_url.raw_path.rpartition("/")[2]
        query = request.rel_url.raw_query_string
        raise web.HTTPTemporaryRedirect(URL(f"./{name}/{'?' + query if query else ''}", encoded=True))

    async def ask_nothing(request: web.Request) -> None:
        """aiohttp's own asks for every body, also for one that is then refused; `AiohttpExchange.read` asks for it."""

    async def handle(request: web.Request) -> web.StreamResponse:
        exchange = AiohttpExchange(request, disconnects.get(), api.config.write_timeout_s)
        await api.serve(exchange)
        if exchange.response is None:  # the client has gone
            return web.Response(status=499)
        return exchange.response

    route = web.route("*", f"{prefix}/{{{PATH_BELOW}:[\\s\\S]*}}", handle, expect_handler=ask_nothing)
    return [web.get(prefix, add_slash), route] if prefix else [route]


PATH_BELOW = "path_below"
"""The variable of the paths that are ours: what is before it may be a sub-app's prefix, and have variables."""


@web.middleware
async def aiohttp_errors(
    request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
) -> web.StreamResponse:
    """A middleware for handlers of your own: what the engine raises becomes 400, 503 or 500, as the API answers it."""
    try:
        return await handler(request)
    except AioEngineError as error:
        response = api_error_of(error).response()
        return web.Response(status=response.status, body=response.body, headers=response.headers)


class DisconnectWatcher:
    """Notices when clients have left, for all requests of an app on one loop.

    aiohttp cancels a handler for that if the app was run so; else only a write fails. So we look: at 256 connections in
    18 µs, and while any request is open that and waking up take 2% of a core. Every 5 ms it is 1%.
    """

    INTERVAL_S = 0.002

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._waiting: dict[asyncio.Future[None], BaseProtocol] = {}
        self._timer: asyncio.TimerHandle | None = None

    async def of(self, request: web.Request) -> None:
        """Wait until the client of ``request`` has left."""
        future: asyncio.Future[None] = self._loop.create_future()
        self._waiting[future] = request.protocol
        if self._timer is None:
            self._timer = self._loop.call_later(self.INTERVAL_S, self._look)
        try:
            await future
        finally:
            self._waiting.pop(future, None)

    def _look(self) -> None:
        for future, protocol in self._waiting.items():
            transport = protocol.transport
            if (transport is None or transport.is_closing()) and not future.done():
                future.set_result(None)
        self._timer = self._loop.call_later(self.INTERVAL_S, self._look) if self._waiting else None


async def _until_taken(request: web.Request) -> None:
    """Wait until the kernel has taken all that was written: aiohttp waits only where more than 64 KiB are left."""
    transport = request.transport
    if transport is None or transport.is_closing() or not transport.get_write_buffer_size():
        return
    transport.set_write_buffer_limits(high=0)
    try:
        await request.writer.drain()
    finally:
        if not transport.is_closing():  # uvloop's raises then
            transport.set_write_buffer_limits()


class WholeResponse(web.Response):
    """A response that aiohttp writes when the handler has returned it: the app's middlewares can still change it.

    A client that does not take it in time is cut off, which no metric counts: the request is over by then.
    """

    def __init__(self, response: Response, request: web.Request, write_timeout_s: float) -> None:
        super().__init__(status=response.status, body=response.body, headers=response.headers)
        self._request = request
        self._write_timeout_s = write_timeout_s

    async def write_eof(self, data: bytes = b"") -> None:
        await super().write_eof(data)
        transport = self._request.transport
        if transport is not None:
            timer = asyncio.get_running_loop().call_later(self._write_timeout_s, transport.abort)
            try:
                await _until_taken(self._request)
            finally:
                timer.cancel()


class AiohttpExchange:
    """An `Exchange` of an aiohttp server."""

    def __init__(self, request: web.Request, disconnects: DisconnectWatcher, write_timeout_s: float) -> None:
        self.method = request.method
        self.path = "/" + request.match_info[PATH_BELOW]
        self.query = request.rel_url.raw_query_string
        # Not as aiohttp decodes them: a key's bytes are then the same in both adapters.
        self.headers: Mapping[str, str] = read_headers(request.raw_headers)
        self.client = request.remote or ""
        self.response: web.StreamResponse | None = None
        self._request = request
        self._disconnects = disconnects
        self._write_timeout_s = write_timeout_s
        self._is_to_be_asked = self.headers.get("expect", "").lower() == "100-continue"

    async def read(self) -> bytes:
        try:
            if self._is_to_be_asked:
                self._is_to_be_asked = False
                await self._request.writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
            return await self._request.content.readany()
        except (ConnectionError, asyncio.IncompleteReadError) as error:
            raise ClientGone from error
        except web.RequestPayloadError as error:  # of a compressed body, or of the framing
            reason = " ".join(str(error).split())
            raise ApiError(400, "invalid_encoding", f"the request's body is damaged: {reason}") from error

    async def gone(self) -> None:
        await self._disconnects.of(self._request)

    async def start(self, status: int, headers: Mapping[str, str]) -> None:
        self.response = web.StreamResponse(status=status, headers=headers)
        await self.response.prepare(self._request)

    async def write(self, data: bytes) -> None:
        assert self.response is not None
        await self.response.write(data)

    async def end(self) -> None:
        assert self.response is not None
        await self.response.write_eof()
        await _until_taken(self._request)

    async def respond(self, response: Response) -> None:
        self.response = WholeResponse(response, self._request, self._write_timeout_s)
        if response.headers.get("connection") == "close":
            self.response.force_close()

    def cut(self) -> None:
        if self._request.transport is not None:
            self._request.transport.abort()
