"""For routes of your own in Starlette and FastAPI apps: what a framework leaves to each handler, done once.

A Starlette handler runs on when its client has left, and a ``StreamingResponse`` says 200 before the engine has been
asked. Here a client that leaves aborts its request, one that stops reading is cut off, and an engine that has no room
still makes a 503.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from aioengine.engine import Stream
from aioengine.errors import AioEngineError
from aioengine.outputs import CompletionDelta
from aioengine.server.asgi import AsgiExchange
from aioengine.server.completions import run_while_connected
from aioengine.server.errors import api_error_of
from aioengine.server.exchange import ClientGone
from aioengine.server.generation import EventWriter

T = TypeVar("T")

WRITE_TIMEOUT_S = 30.0


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


class StreamResponse(Response):
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
        write_timeout_s: float = WRITE_TIMEOUT_S,
    ) -> None:
        self.status_code = 200
        self.background = None
        self.media_type = media_type or self.media_type
        self._stream = stream
        self._encode = encode or _text_of
        self._encode_error = encode_error
        self._write_timeout_s = write_timeout_s
        self.init_headers({"cache-control": "no-cache", "x-accel-buffering": "no", **(headers or {})})
        del self.headers["content-length"]  # nobody knows it yet

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        exchange = AsgiExchange(scope, receive, send)

        async def relay(cut: Callable[[], None]) -> None:
            async with self._stream:  # what it refuses is an error before the response begins
                writer = EventWriter(exchange, timeout_s=self._write_timeout_s, on_stuck=cut)
                try:
                    await writer.start(self.status_code, dict(self.headers))
                    await self._relay(writer)
                    await writer.end()
                finally:
                    writer.close()

        try:
            await run_while_connected(exchange, relay)
        except ClientGone:
            pass  # nobody is there to be told

    async def _relay(self, writer: EventWriter) -> None:
        try:
            async for delta in self._stream:
                if data := self._encode(delta):
                    await writer.write(data)
        except AioEngineError as error:
            if self._encode_error is None:
                raise
            await writer.write(self._encode_error(error))


async def _answer_error(request: Request, error: Exception) -> Response:
    """What the engine raised, as the API answers it."""
    response = api_error_of(error).response()
    return Response(response.body, response.status, response.headers)


async def _answer_nobody(request: Request, error: Exception) -> Response:
    return Response(status_code=499)  # nginx's number for a client that has closed its request


engine_errors: dict[Any, Any] = {AioEngineError: _answer_error, ClientDisconnect: _answer_nobody}
"""Exception handlers, as ``Starlette(exception_handlers=engine_errors)`` and FastAPI take them: 400 for what the client
did wrong, 503 with ``Retry-After`` for no room, 500 for the rest, with OpenAI's error bodies."""


def _text_of(delta: CompletionDelta) -> bytes:
    return delta.text.encode()


async def _nothing(message: Any) -> None:
    raise AssertionError("nothing is sent here")
