"""The handlers' interface to HTTP, whatever framework carries it; and work that ends when its client leaves."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable, Iterable, Mapping
from typing import Generic, Protocol, Self, TypeVar

import anyio
import msgspec

from aioengine.processes.turns import turns_here

T = TypeVar("T")

PIECE_BYTES = 2**16
"""Bytes of an answer given to the connection at once; they stay there until the client reads."""
CUT_EXTENSION = "aioengine.cut"
"""Name of an ASGI extension of our own server: a function that ends the connection at once."""


class ClientGone(Exception):
    """The client has left, and reads no answer."""


class ClientCut(ClientGone):
    """The client has not read for so long that it was cut off."""


class Response(msgspec.Struct, frozen=True):
    """An answer that is whole.

    Attributes:
        status: the HTTP status.
        body: the whole body.
        headers: names in lower case; `Exchange.respond` adds the length.
    """

    status: int
    body: bytes
    headers: dict[str, str]


class Exchange(Protocol):
    """One HTTP request and the response to it. One task uses it, and another one may wait in `gone`.

    Attributes:
        method: in capitals.
        path: the path below the handlers' mount; begins with "/". The handlers take a slash off its end.
        query: the target's query without its "?", as it was sent.
        headers: see `read_headers`.
        client: the peer's address, for the log.
    """

    method: str
    path: str
    query: str
    headers: Mapping[str, str]
    client: str

    async def read(self) -> bytes:
        """The next piece of the request's body; empty at its end.

        Raises:
            ClientGone: the rest will not come.
        """

    async def gone(self) -> None:
        """Wait until the client has left. Call it only once the body has been read to its end."""

    async def start(self, status: int, headers: Mapping[str, str]) -> None:
        """Begin a response that is written in pieces. This, `write` and `end` wait while the client reads more slowly
        than it is written to: see `WriteMonitor`.

        Raises:
            ClientGone, ConnectionError: the client has left; some frameworks do not report it, and drop the data.
        """

    async def write(self, data: bytes) -> None: ...

    async def end(self) -> None: ...

    async def respond(self, response: Response) -> None:
        """Send a whole response."""

    def cut(self) -> None:
        """End the connection at once, and drop what is still buffered for the client. Idempotent.

        If the server has no function for that, the connection ends when its owner closes it.
        """


def read_headers(raw: Iterable[tuple[bytes, bytes]]) -> dict[str, str]:
    """Headers by their names in lower case; the values of a name that came several times are joined by commas.

    RFC 9110, section 5.3, joins them so. Of two Hosts, keys or tenants neither is chosen: the client and a proxy in
    front of us could choose different ones.
    """
    headers: dict[str, str] = {}
    for raw_name, raw_value in raw:
        name, value = raw_name.decode("latin-1").lower(), raw_value.decode("latin-1")
        headers[name] = f"{headers[name]}, {value}" if name in headers else value
    return headers


async def run_while_connected(exchange: Exchange, work: Callable[[Callable[[], None]], Awaitable[T]]) -> T:
    """Do the work, and cancel it when the client leaves.

    Args:
        work: takes a function that ends it with `ClientCut`, for a client that does not read.
    Raises:
        ClientGone, ClientCut: the client has left or was cut off, and the work was cancelled.
        CancelledError: the work ended with it, as when it awaits a task that was cancelled.
        Exception: what the work raised.
    """
    results: list[T] = []
    errors: list[Exception] = []
    gone: list[ClientGone] = []
    async with anyio.create_task_group() as group:

        def leave(reason: ClientGone) -> None:
            gone.append(reason)
            group.cancel_scope.cancel()

        async def do() -> None:
            try:
                results.append(await work(lambda: leave(ClientCut())))
            except asyncio.CancelledError:
                pass  # the group would keep it, and all frames of the work with it
            except Exception as error:  # a group would wrap it
                errors.append(error)
            group.cancel_scope.cancel()

        # The work is a child task: awaited here, each token would resume all frames of the server's layers, too (1 µs).
        group.start_soon(do)
        await exchange.gone()
        await turns_here().take()  # a thousand that leave together end one after the other
        leave(ClientGone())
    if results:
        return results[0]
    if not (errors or gone):
        raise asyncio.CancelledError
    raise (errors or gone).pop()  # the error's traceback has this frame, which must not have the error


class WriteMonitor:
    """Checks by a timer whether a write of a response is stuck, or nothing has been written. A context manager.

    Reading the clock before each write costs 0.1 µs; a timeout around each would cost 4.

    Args:
        timeout_s: how long one write may wait for its client; then the connection is cut, and ``on_stuck`` called.
        idle_s: how long nothing may be written before ``on_idle`` is called, and again after each such time.
    """

    def __init__(
        self,
        exchange: Exchange,
        *,
        timeout_s: float,
        on_stuck: Callable[[], None],
        idle_s: float = math.inf,
        on_idle: Callable[[], None] = lambda: None,
    ) -> None:
        self._exchange = exchange
        self._timeout_s = timeout_s
        self._on_stuck = on_stuck
        self._idle_s = idle_s
        self._on_idle = on_idle
        self._loop = asyncio.get_running_loop()
        self._is_writing = False
        self._since = self._loop.time()
        """When the last write began."""
        self._interval_s = min(timeout_s, idle_s)

    def __enter__(self) -> Self:
        self._timer = self._loop.call_later(self._interval_s, self._look)
        return self

    def __exit__(self, *_: object) -> None:
        self._timer.cancel()

    async def write(self, writing: Awaitable[None]) -> None:
        """Await a call of `Exchange.start`, `Exchange.write` or `Exchange.end`.

        Raises:
            ClientGone: the client has left.
        """
        self._since = self._loop.time()
        self._is_writing = True
        try:
            await writing
        except ConnectionError as error:
            raise ClientGone from error
        self._is_writing = False

    async def write_pieces(self, data: bytes) -> None:
        """Write data of any length in pieces, each within the timeout.

        Raises:
            ClientGone: the client has left.
        """
        for first in range(0, len(data), PIECE_BYTES):
            await self.write(self._exchange.write(data[first : first + PIECE_BYTES]))

    def _look(self) -> None:
        now = self._loop.time()
        if self._is_writing and now - self._since >= self._timeout_s:
            self._exchange.cut()
            self._on_stuck()
            return
        next_at = now + self._interval_s
        if self._is_writing:
            next_at = self._since + self._timeout_s
        elif now - self._since >= self._idle_s:
            self._since = now
            self._on_idle()
        self._timer = self._loop.call_at(next_at, self._look)


class PerLoop(Generic[T]):
    """A value for each loop, such as a lock or a timer, of an object that is used on one loop after another.

    The first `get` on a loop makes its value: an earlier loop may have ended while its own was in use."""

    def __init__(self, make: Callable[[], T]) -> None:
        self._make = make
        self._made: tuple[asyncio.AbstractEventLoop, T] | None = None

    def get(self) -> T:
        """The running loop's value."""
        loop = asyncio.get_running_loop()
        if self._made is None or self._made[0] is not loop:
            self._made = loop, self._make()
        return self._made[1]
