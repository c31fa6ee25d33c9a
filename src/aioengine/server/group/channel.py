"""Messages between an HTTP server and the process that has started it, over a Unix socket.

A frame is four bytes of length, big-endian, and a message (msgpack). Numbers go one way: a server sends its own, each
second and when it is scraped; the process adds them up, and answers a scraped server with the sums.
"""

from __future__ import annotations

import asyncio
import socket
from collections import deque
from collections.abc import Awaitable, Callable
from typing import NamedTuple

import anyio
import msgspec

from aioengine.config import EngineConfig
from aioengine.errors import ConfigError
from aioengine.server.access_log import LogFormat
from aioengine.server.config import HttpLimits, ServerConfig
from aioengine.server.errors import unavailable
from aioengine.server.http_listener import ServerAddress
from aioengine.server.metrics import ServerNumbers

SUMS_TIMEOUT_S = 10.0
"""Longest wait for the sums of all servers. They come from memory: a process that takes longer is stuck."""


class ServerSettings(msgspec.Struct, frozen=True, kw_only=True, tag="settings"):
    """The first message to a server: its settings, with secrets, which no command line shows.

    Attributes:
        index: this server's place among ``num_servers``.
        shares: descriptors of the sockets of each server; its own are ``shares[index]``, or those of the only share.
        log_descriptor: the file that its log goes to.
        engine_address: the engine to connect to; None: the server starts one of ``engine_config`` in its process.
        engine_model: where to find the tokenizer, as for `Engine.connect`.
        engine_keys, engine_client: as for `Engine.connect`.
        visible_devices: CUDA_VISIBLE_DEVICES of the server's process; None: as in the process that starts it.
        environment: variables of the server's process, added to those of this one.
    """

    index: int
    num_servers: int
    shares: list[list[int]]
    where: ServerAddress
    config: ServerConfig
    limits: HttpLimits
    drain_timeout_s: float
    log_format: LogFormat
    log_descriptor: int
    engine_address: str | None = None
    engine_model: str | None = None
    engine_keys: str | None = None
    engine_client: str | None = None
    engine_config: EngineConfig | None = None
    visible_devices: tuple[int | str, ...] | None = None
    environment: dict[str, str] = {}


class Serving(msgspec.Struct, frozen=True, tag="serving"):
    """A server serves; ``model`` is the first name of its model."""

    model: str


class Counted(msgspec.Struct, frozen=True, tag="counted"):
    """A server's numbers; ``wants_sums``: it waits for the `Sums` of all servers."""

    numbers: ServerNumbers
    wants_sums: bool = False


class Sums(msgspec.Struct, frozen=True, tag="sums"):
    """The numbers of all servers together."""

    numbers: ServerNumbers


class AbortNamed(msgspec.Struct, frozen=True, tag="abort"):
    """Abort the requests of these ids; from one server, and passed on to the others."""

    request_ids: list[str]


class ServerGroup(msgspec.Struct, frozen=True, tag="group"):
    """The present state of all servers, sent to each of them when it changes.

    Attributes:
        num_servers: servers that are to serve.
        num_serving: servers that serve.
    """

    num_servers: int
    num_serving: int


Message = ServerSettings | Serving | Counted | Sums | AbortNamed | ServerGroup

_encode: Callable[[object], bytes] = msgspec.msgpack.Encoder().encode
_decoder: msgspec.msgpack.Decoder[Message] = msgspec.msgpack.Decoder(Message)


def frame_of(message: Message) -> bytes:
    body = _encode(message)
    return len(body).to_bytes(4, "big") + body


def receive_settings(end: socket.socket) -> ServerSettings:
    """Wait for the first message to a server; for its process, before that has a loop.

    Raises:
        ConfigError: the other side is gone.
    """

    def read(num_bytes: int) -> bytes:
        data = b""
        while len(data) < num_bytes:
            piece = end.recv(num_bytes - len(data))  # no more: what follows is the loop's to read
            if not piece:
                raise ConfigError("the process that started this server is gone before it sent its settings")
            data += piece
        return data

    settings = _decoder.decode(read(int.from_bytes(read(4), "big")))
    assert isinstance(settings, ServerSettings)
    return settings


class ServerChannel(NamedTuple):
    """One end of the socket, on a loop."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter

    @classmethod
    async def open(cls, end: socket.socket) -> ServerChannel:
        return cls(*await asyncio.open_unix_connection(sock=end))

    def send(self, message: Message) -> None:
        """Send a message; it is dropped if the other side is gone."""
        if not self.writer.is_closing():
            self.writer.write(frame_of(message))

    async def receive(self) -> Message | None:
        """The next message; None: the other side is gone."""
        try:
            num_bytes = int.from_bytes(await self.reader.readexactly(4), "big")
            # Far more than any message has.
            if num_bytes > 2**28:
                return None
            return _decoder.decode(await self.reader.readexactly(num_bytes))
        except (asyncio.IncompleteReadError, ConnectionError):
            return None

    async def flush(self) -> None:
        """Wait while more than asyncio's limit of sent bytes is buffered here, if the other side is there."""
        try:
            await self.writer.drain()
        except ConnectionError:
            pass

    def close(self) -> None:
        """Close this end. Idempotent."""
        self.writer.close()


class SiblingServers:
    """The other servers of a port, reached by way of the process above.

    Attributes:
        num_servers: servers of the port that are to serve.
        num_serving: servers that do.
    """

    def __init__(self, channel: ServerChannel, num_servers: int) -> None:
        self.num_servers, self.num_serving = num_servers, 0
        self._channel = channel
        self._waiting: deque[asyncio.Future[ServerNumbers]] = deque()

    def abort(self, request_ids: list[str]) -> None:
        """Have the other servers abort these requests. Does not wait."""
        self._channel.send(AbortNamed(request_ids))

    async def add_up(self, own: ServerNumbers) -> ServerNumbers:
        """The numbers of all servers together, given this one's.

        Raises:
            ApiError: 503: they did not come in time.
        """
        waiter: asyncio.Future[ServerNumbers] = asyncio.get_running_loop().create_future()
        self._waiting.append(waiter)
        self._channel.send(Counted(own, wants_sums=True))
        try:
            with anyio.fail_after(SUMS_TIMEOUT_S):
                return await waiter
        except TimeoutError:
            raise unavailable("the process of all servers does not answer; try again later") from None

    async def run(self, abort: Callable[[list[str]], Awaitable[None]]) -> None:
        """Take messages until the other side is gone; ``abort`` ends requests of this server."""
        while (message := await self._channel.receive()) is not None:
            if isinstance(message, ServerGroup):
                self.num_serving = message.num_serving
            elif isinstance(message, AbortNamed):
                await abort(message.request_ids)
            elif isinstance(message, Sums):  # for the first that waits: all of them have been counted
                waiter = self._waiting.popleft()
                if not waiter.done():
                    waiter.set_result(message.numbers)
