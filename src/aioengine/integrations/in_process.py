"""Requests to an engine's HTTP API without a socket, from a caller on the engine's own loop."""

from __future__ import annotations

import asyncio
import contextlib
import functools
from collections.abc import Mapping

import msgspec

from aioengine.engine import Engine
from aioengine.errors import AioEngineError, EngineClosed
from aioengine.server.api import Api
from aioengine.server.config import ServerConfig
from aioengine.server.errors import ApiError, api_error_of
from aioengine.server.exchange import ClientGone, Response

MAX_UNREAD_BYTES = 2**16
"""Bytes of an answer that may be written ahead of its reader; the writer waits then. About 250 tokens of a stream: one
that is not read stops after these and ``max_unread_tokens``."""
NEVER_S = 1e9
NO_RETRY = {"x-should-retry": "false"}
"""The header that keeps OpenAI's clients from retrying."""


class InProcessExchange:
    """An `Exchange` whose client is an object on the same loop.

    The client, which is one task at a time, awaits `head`, then `take` until it returns nothing, or calls `leave` at
    any moment. The API's side is that of every `Exchange`.

    Args:
        path: below the API's root.
        query: behind "?", if any.
        headers: with names in lower case.
        body: the whole request body, since it is in memory already.
        read_timeout_s: how long the client waits for the next bytes; absent: for ever.

    Attributes:
        status: the answer's status, known after `head`; so are its ``response_headers``.
    """

    client = "in-process"

    def __init__(
        self, method: str, path: str, query: str, headers: Mapping[str, str], body: bytes, read_timeout_s: float | None
    ) -> None:
        self.method = method
        self.path = path
        self.query = query
        self.headers = headers
        self.status = 0
        self.response_headers: Mapping[str, str] = {}
        self._body = body
        self._loop = asyncio.get_running_loop()
        self._has_left = False
        self._pieces: list[bytes] = []
        self._num_unread = 0
        """Bytes in `_pieces`."""
        self._max_unread: float = MAX_UNREAD_BYTES
        self._is_whole = False
        """The answer has come to its end."""
        self._is_over = False
        """Nothing more is written: the answer is whole, or will never be."""
        self._reader: asyncio.Future[None] | None = None
        self._writer: asyncio.Future[None] | None = None
        self._watcher: asyncio.Future[None] | None = None
        """Futures of the waits for something to read, for room, and for the client to leave."""
        self._read_timeout_s = read_timeout_s
        self._reads_since = 0.0
        self._timer: asyncio.TimerHandle | None = None

    # The API's side

    async def read(self) -> bytes:
        body, self._body = self._body, b""
        return body

    async def gone(self) -> None:
        while not self._has_left:
            self._watcher = self._loop.create_future()
            await self._watcher

    async def start(self, status: int, headers: Mapping[str, str]) -> None:
        self.status, self.response_headers = status, headers
        _wake(self._reader)

    async def write(self, data: bytes) -> None:
        self._pieces.append(data)
        self._num_unread += len(data)
        _wake(self._reader)
        while self._num_unread > self._max_unread and not self._has_left:
            self._writer = self._loop.create_future()
            await self._writer
        if self._has_left:
            raise ClientGone

    async def end(self) -> None:
        self._is_whole = True
        self.finish()

    async def respond(self, response: Response) -> None:
        await self.start(response.status, response.headers)
        if response.body:
            await self.write(response.body)
        await self.end()

    def cut(self) -> None:
        self._pieces.clear()
        self.finish()

    # The serving task's side

    def finish(self) -> None:
        """Note that nothing more will be written; an answer that was not ended has failed. Idempotent."""
        self._is_over = True
        _wake(self._reader)

    def lift_bound(self) -> None:
        """Let the writer go on to its end, which is near, though nothing may be read until then."""
        self._max_unread = float("inf")
        _wake(self._writer)

    # The client's side

    async def head(self) -> None:
        """Wait until the answer has begun.

        Raises:
            TimeoutError: it did not, for ``read_timeout_s``.
            ConnectionError: it never will.
        """
        while not self.status:
            if self._is_over:
                raise ConnectionError("the request ended without an answer")
            await self._wait()

    async def take(self) -> bytes:
        """Wait for unread bytes and return all of them; return nothing at the answer's end.

        Raises:
            TimeoutError, ConnectionError: as `head`, for the next piece.
        """
        while not (self._pieces or self._is_over):
            await self._wait()
        return self.take_rest()

    def take_rest(self) -> bytes:
        """Return all unread bytes, as `take`, of an answer that is over; also where its loop runs no more."""
        if not self._pieces:
            self._stop_timer()
            if not self._is_whole:
                raise ConnectionError("the answer ended before it was whole")
            return b""
        data = self._pieces[0] if len(self._pieces) == 1 else b"".join(self._pieces)
        self._pieces.clear()
        self._num_unread = 0
        _wake(self._writer)
        return data

    def leave(self) -> None:
        """Stop reading: the engine aborts what it computes for this client. Idempotent, on the loop."""
        self._has_left = True
        if not self._is_over:  # else nothing is computed for it, and a loop that has ended may have ended this wait
            self._pieces.clear()
        _wake(self._watcher)
        _wake(self._writer)
        self._stop_timer()

    def leave_soon(self) -> None:
        """Schedule `leave` from any thread, also during garbage collection."""
        if not self._is_over:
            with contextlib.suppress(RuntimeError):  # the loop is closed, and nothing runs on it
                self._loop.call_soon_threadsafe(self.leave)

    async def _wait(self) -> None:
        """Wait for something new. A timer looks at the clock now and then: a timeout for each wait would cost 4 µs."""
        self._reads_since = self._loop.time()
        if self._timer is None and self._read_timeout_s is not None:
            self._timer = self._loop.call_later(self._read_timeout_s, self._look)
        self._reader = self._loop.create_future()
        try:
            await self._reader
        except BaseException:
            self.leave()
            raise
        finally:
            self._reader = None

    def _look(self) -> None:
        self._timer = None
        if self._reader is None or self._reader.done() or self._read_timeout_s is None:
            return  # the next wait starts a new timer
        due = self._reads_since + self._read_timeout_s
        if self._loop.time() < due:
            self._timer = self._loop.call_at(due, self._look)
        else:
            self._reader.set_exception(TimeoutError(f"nothing came for {self._read_timeout_s:g} s"))

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


def _wake(waiting: asyncio.Future[None] | None) -> None:
    if waiting is not None and not waiting.done():
        waiting.set_result(None)


class InProcessApi:
    """An engine's API for callers on its loop. Each request is served by a task that the engine owns.

    Args:
        config: its settings of hosts, keys and slow clients do not apply here.
    """

    def __init__(self, engine: Engine, config: ServerConfig | None = None) -> None:
        open_to_all = {"api_keys": (), "allowed_hosts": None, "write_timeout_s": NEVER_S}
        self._engine = engine
        self._api = Api(engine, msgspec.structs.replace(config or ServerConfig(), **open_to_all))
        self._open: dict[asyncio.Task[None], InProcessExchange] = {}

    async def begin(self, exchange: InProcessExchange) -> asyncio.Task[None]:
        """Start to serve a request, and wait until its answer has begun. Cancelling leaves the exchange.

        Returns:
            the task that serves it.
        Raises:
            AioEngineError, RuntimeError: no engine can serve it: the engine's loop is another one, or it is closed.
            TimeoutError, ConnectionError: as `InProcessExchange.head`.
        """
        serve = functools.partial(self._serve, exchange)
        task = self._engine._here_or_starting().start_task(serve, "aioengine request", exchange.lift_bound)
        self._open[task] = exchange
        task.add_done_callback(self._open.pop)
        await exchange.head()
        return task

    async def _serve(self, exchange: InProcessExchange) -> None:
        try:
            await self._api.serve(exchange)
        except Exception:
            exchange.cut()  # the log has it
        finally:
            exchange.finish()

    async def aclose(self) -> None:
        """Leave all open exchanges, and wait for their tasks' end."""
        for exchange in self._open.values():
            exchange.leave()
        if self._open:
            await asyncio.wait(list(self._open))

    def is_over(self) -> bool:
        """Whether the engine can serve no further request."""
        try:
            return self._engine.health().status == "DEAD"
        except EngineClosed:  # it has not been started
            return True


def answer_to(error: Exception) -> Response:
    """The answer to a request for which `InProcessApi.begin` raised ``error``."""
    is_ours = isinstance(error, AioEngineError)
    answer = api_error_of(error) if is_ours else ApiError(500, None, str(error))  # a program's own mistake
    return answer.response()
