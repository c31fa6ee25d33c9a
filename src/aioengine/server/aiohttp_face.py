"""The handlers as routes of an aiohttp app."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping

from aiohttp import web

from aioengine.engine import Engine
from aioengine.errors import AioEngineError
from aioengine.server.api import Api
from aioengine.server.exchange import ClientGone, Response
from aioengine.server.faults import fault_of
from aioengine.server.server_config import ServerConfig


def aiohttp_routes(
    engine: Engine | Callable[[], Engine], config: ServerConfig | None = None, *, prefix: str = ""
) -> list[web.RouteDef]:
    """The OpenAI-compatible API of an engine: ``app.add_routes(aiohttp_routes(engine, prefix="/ai"))``.

    The app's own ``cleanup_ctx`` starts and closes the engine. The limit on bodies is the config's: aiohttp's
    ``client_max_size`` has no say here.

    Args:
        engine: belongs to the loop that it is started on, which must be the app's. Or a function that finds it, asked
            at each request.
        config: limits, API keys and names; absent: the defaults.
        prefix: of all paths; begins with "/" and does not end with one.
    """
    api = Api(engine, config)
    prefix = prefix.rstrip("/")
    departures = Departures()

    async def handle(request: web.Request) -> web.StreamResponse:
        exchange = AiohttpExchange(request, prefix, departures)
        await api.serve(exchange)
        if exchange.response is None:  # the client has gone: nobody reads this
            return web.Response(status=499)
        return exchange.response

    async def add_slash(request: web.Request) -> web.Response:
        raise web.HTTPTemporaryRedirect(request.path + "/")

    routes = [web.route("*", prefix + r"/{path:[\s\S]*}", handle, expect_handler=_say_nothing_yet)]
    return [web.get(prefix, add_slash), *routes] if prefix else routes


@web.middleware
async def aiohttp_errors(
    request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
) -> web.StreamResponse:
    """A middleware for handlers of your own: what the engine raises becomes 400, 503 or 500, as the API answers it."""
    try:
        return await handler(request)
    except AioEngineError as error:
        response = fault_of(error).response()
        return web.Response(status=response.status, body=response.body, headers=response.headers)


async def _say_nothing_yet(request: web.Request) -> None:
    """aiohttp's own would ask for every body, also for one that is then refused; `AiohttpExchange.read` asks for it."""


class Departures:
    """Tells when clients have left, for all requests of an app.

    aiohttp cancels a handler for that if the app was run so, and else tells only who writes. Looking at 256 connections
    takes 50 µs.
    """

    INTERVAL_S = 0.02

    def __init__(self) -> None:
        self._waiting: dict[asyncio.Future[None], web.Request] = {}
        self._is_looking = False

    async def of(self, request: web.Request) -> None:
        """Wait until the client of ``request`` has left."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[None] = loop.create_future()
        self._waiting[future] = request
        if not self._is_looking:
            self._is_looking = True
            loop.call_later(self.INTERVAL_S, self._look, loop)
        try:
            await future
        finally:
            self._waiting.pop(future, None)

    def _look(self, loop: asyncio.AbstractEventLoop) -> None:
        for future, request in self._waiting.items():
            if (request.transport is None or request.transport.is_closing()) and not future.done():
                future.set_result(None)
        self._is_looking = bool(self._waiting)
        if self._is_looking:
            loop.call_later(self.INTERVAL_S, self._look, loop)


class AiohttpExchange:
    """An `Exchange` of an aiohttp server."""

    def __init__(self, request: web.Request, prefix: str, departures: Departures) -> None:
        self.method = request.method
        self.path = request.path.removeprefix(prefix) or "/"
        # Not as aiohttp decodes them: a key's bytes are then the same on both faces.
        self.headers: Mapping[str, str] = {
            name.decode("latin-1").lower(): value.decode("latin-1") for name, value in request.raw_headers
        }
        self.client = request.remote or ""
        self.response: web.StreamResponse | None = None
        self._request = request
        self._departures = departures
        self._is_to_be_asked = self.headers.get("expect", "").lower() == "100-continue"

    async def read(self) -> bytes:
        try:
            if self._is_to_be_asked:
                self._is_to_be_asked = False
                await self._request.writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
            return await self._request.content.readany()
        except (ConnectionError, asyncio.IncompleteReadError) as error:
            raise ClientGone from error

    async def gone(self) -> None:
        await self._departures.of(self._request)

    async def start(self, status: int, headers: Mapping[str, str]) -> None:
        self.response = web.StreamResponse(status=status, headers=headers)
        await self._prepare(self.response)

    async def write(self, data: bytes) -> None:
        assert self.response is not None, "it has not been started"
        try:
            await self.response.write(data)
        except ConnectionError as error:
            raise ClientGone from error

    async def end(self) -> None:
        assert self.response is not None, "it has not been started"
        try:
            await self.response.write_eof()
            await self._request.writer.drain()
        except ConnectionError as error:
            raise ClientGone from error

    async def respond(self, response: Response) -> None:
        # aiohttp sends what its handler returns.
        self.response = web.Response(status=response.status, body=response.body, headers=response.headers)
        if response.headers.get("connection") == "close":
            self.response.force_close()

    def cut(self) -> None:
        if self._request.transport is not None:
            self._request.transport.abort()

    async def _prepare(self, response: web.StreamResponse) -> None:
        try:
            await response.prepare(self._request)
        except ConnectionError as error:
            raise ClientGone from error
