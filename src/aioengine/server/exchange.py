"""What the handlers see of HTTP, whatever framework carries it; and watching a client while it is answered."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable, Iterable, Mapping
from typing import Generic, Protocol, Self, TypeVar

import anyio
import msgspec

from aioengine.turns import turns_here

T = TypeVar("T")

PIECE_BYTES = 2**16
"""Of an answer, given to the connection at once, where it stays until the client reads."""
CUT_EXTENSION = "aioengine.cut"
"""Of an ASGI scope's ``extensions``: a function that ends the connection at once. Our own server has it."""


class ClientGone(Exception):
    """The client has left, and reads no answer."""


class ClientCut(ClientGone):
    """The client has not read for so long that it was cut off."""


class Response(msgspec.Struct, frozen=True):
    """An answer that is whole.

    Attributes:
        status: of HTTP.
        body: bytes.
        headers: names in lower case; `Exchange.respond` adds the length.
    """

    status: int
    body: bytes
    headers: dict[str, str]


class Exchange(Protocol):
    """One HTTP request and the response to it. One task uses it, and another one may wait in `gone`.

    Attributes:
        method: in capitals.
        path: below where the handlers are mounted; begins with "/". The handlers take a slash off its end.
        query: of the target, behind "?", as it was sent.
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
        ...

    async def gone(self) -> None:
        """Wait until the client has left. Only once the body has been read to its end."""
        ...

    async def start(self, status: int, headers: Mapping[str, str]) -> None:
        """Begin a response that is written in pieces. This, `write` and `end` wait while the client reads more slowly
        than it is written to: see `WriteMonitor`.

        Raises:
            ClientGone, ConnectionError: the client has left; where a framework does not say so, nothing happens.
        """
        ...

    async def write(self, data: bytes) -> None: ...

    async def end(self) -> None: ...

    async def respond(self, response: Response) -> None:
        """Give a whole response."""
        ...

    def cut(self) -> None:
        """End the connection at once, with what is still buffered for the client. Idempotent.

        Where the server offers no way to, the connection ends when its owner closes it.
        """
        ...


def read_headers(raw: Iterable[tuple[bytes, bytes]]) -> dict[str, str]:
    """Headers by their names in lower case; the values of a name that came several times are joined by commas.

    RFC 9110, section 5.3, joins them so. Neither the first nor the last of two Hosts, keys or tenants counts then: a
    client and a proxy in front of us could read different ones.
    """
    headers: dict[str, str] = {}
    for raw_name, raw_value in raw:
        name, value = raw_name.decode("latin-1").lower(), raw_value.decode("latin-1")
        headers[name] = f"{headers[name]}, {value}" if name in headers else value
    return headers


async def run_while_connected(exchange: Exchange, work: Callable[[Callable[[], None]], Awaitable[T]]) -> T:
    """Do the work as long as the client is there to hear of it.

    Args:
        work: is given what ends it with `ClientCut`: the client does not read.
    Raises:
        ClientGone, ClientCut: the work was cancelled.
        CancelledError: the work was cancelled by itself, as where it awaits a task that was.
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

        # The work is the child: each token resumes what it is awaited by, and a server's layers are many (1 µs).
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
    """Looks now and then at how the writing of a response goes: the clock before each write costs 0.1 µs, and a timeout
    around it would cost 4. A context manager.

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
        """Await what `Exchange.start`, `Exchange.write` or `Exchange.end` gave.

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
        """Write much in pieces, each within the timeout.

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
    """A lock, or a timer that runs, of an object that lives on several loops, one after another: made anew by the first
    `get` on each, since an earlier loop may have ended in the middle of anything."""

    def __init__(self, make: Callable[[], T]) -> None:
        self._make = make
        self._made: tuple[asyncio.AbstractEventLoop, T] | None = None

    def get(self) -> T:
        """The running loop's."""
        loop = asyncio.get_running_loop()
        if self._made is None or self._made[0] is not loop:
            self._made = loop, self._make()
        return self._made[1]
