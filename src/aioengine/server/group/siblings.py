"""Messages between the HTTP servers of one port, by way of the process that has started them.

Each server inherits one end of a Unix socket to that process. A frame is four bytes of length, big-endian, and a
message (msgpack). Both sides ask questions, and each question has one answer: a server asks about all servers
together; the process asks servers. At most as many questions are open as HTTP requests are served.
"""

from __future__ import annotations

import asyncio
import contextlib
import io
import itertools
import socket
from collections.abc import Awaitable, Callable

import anyio
import msgspec
from anyio.abc import TaskGroup

from aioengine.config import EngineConfig
from aioengine.errors import ConfigError
from aioengine.server.access_log import LogFormat, logger
from aioengine.server.config import HttpLimits, ServerConfig
from aioengine.server.errors import ApiError, unavailable
from aioengine.server.http_listener import ServerAddress
from aioengine.server.metrics import MetricFamily

MAX_FRAME_BYTES = 2**28
"""Far more than any message has."""
ANSWER_TIMEOUT_S = 10.0
"""Longest wait for an answer. Answers come from a server's memory: a server that takes longer is stuck."""


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
    """A server serves.

    Attributes:
        model: the first name of its model.
    """

    model: str


class Counted(msgspec.Struct, frozen=True, tag="counted"):
    """A server's metrics, sent now and then and as it ends: families, by `encode_families`."""

    families: bytes


class ServerGroup(msgspec.Struct, frozen=True, tag="group"):
    """The present state of all servers, sent to each of them when it changes.

    Attributes:
        num_servers: servers that are to serve.
        num_serving: servers that serve.
        accepts_for: servers that do not serve; the receiver accepts at their sockets, too.
    """

    num_servers: int
    num_serving: int
    accepts_for: list[int] = []


class ReadNumbers(msgspec.Struct, frozen=True, tag="numbers"):
    """Asks for the families of `/metrics`: a server for its own, the process for those of all servers."""


class CountOpen(msgspec.Struct, frozen=True, tag="open"):
    """Asks for the number of requests that are being served."""


class AbortNamed(msgspec.Struct, frozen=True, tag="abort"):
    """Asks to abort the requests of these ids."""

    request_ids: list[str]


Question = ReadNumbers | CountOpen | AbortNamed


class Ask(msgspec.Struct, frozen=True, tag="ask"):
    number: int
    question: Question


class AskAnswer(msgspec.Struct, frozen=True, tag="answer"):
    """The answer to a question; ``body`` is None where answering it has failed."""

    number: int
    body: bytes | None


Message = ServerSettings | Serving | Counted | ServerGroup | Ask | AskAnswer

_encode: Callable[[object], bytes] = msgspec.msgpack.Encoder().encode
_decoder: msgspec.msgpack.Decoder[Message] = msgspec.msgpack.Decoder(Message)
encode_families: Callable[[list[MetricFamily]], bytes] = _encode
decode_families: Callable[[bytes], list[MetricFamily]] = msgspec.msgpack.Decoder(list[MetricFamily]).decode


def frame_of(message: Message) -> bytes:
    body = _encode(message)
    return len(body).to_bytes(4, "big") + body


def receive_settings(end: socket.socket) -> ServerSettings:
    """Wait for the first message to a server; for its process, before that has a loop.

    Raises:
        ConfigError: the other side is gone.
    """
    with end.makefile("rb", buffering=0) as file:  # unbuffered: what follows is the loop's to read
        body = _read_exactly(file, int.from_bytes(_read_exactly(file, 4), "big"))
    settings = _decoder.decode(body)
    assert isinstance(settings, ServerSettings)
    return settings


def _read_exactly(file: io.RawIOBase, num_bytes: int) -> bytes:
    parts = b""
    while len(parts) < num_bytes:
        part = file.read(num_bytes - len(parts))
        if not part:
            raise ConfigError("the process that started this server has gone before it said what to serve")
        parts += part
    return parts


class Peer:
    """One end of a socket between a server and the process that has started it.

    Args:
        end: a connected Unix socket, which `close` closes.
        answer: answers the other side's questions.
        on_message: takes messages that are neither a question nor an answer.
    """

    def __init__(
        self, end: socket.socket, answer: Callable[[Question], Awaitable[bytes]], on_message: Callable[[Message], None]
    ) -> None:
        self._end = end
        self._answer = answer
        self._on_message = on_message
        self._numbers = itertools.count()
        self._asked: dict[int, asyncio.Future[AskAnswer]] = {}
        self._reader: asyncio.StreamReader | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._is_over = False

    async def open(self) -> None:
        """Open the streams for `tell` and `ask`. Must be followed by `run`, or `close`."""
        self._reader, self._writer = await asyncio.open_unix_connection(sock=self._end)

    async def run(self) -> None:
        """Receive messages until the other side closes its end. Cancelling closes this one."""
        reader = self._reader
        assert reader is not None, "open comes first"
        try:
            async with anyio.create_task_group() as tasks:
                with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
                    while True:
                        num_bytes = int.from_bytes(await reader.readexactly(4), "big")
                        if num_bytes > MAX_FRAME_BYTES:
                            raise ConnectionError("no frame is so long")
                        self._take(_decoder.decode(await reader.readexactly(num_bytes)), tasks)
                tasks.cancel_scope.cancel()
        finally:
            self.close()

    def close(self) -> None:
        """Close this end. Idempotent."""
        self._is_over = True
        for asked in self._asked.values():
            if not asked.done():
                asked.set_exception(_gone())
        if self._writer is not None:
            self._writer.close()

    def tell(self, message: Message) -> None:
        """Send a message; it is dropped if the other side is gone."""
        if self._writer is not None and not self._is_over:
            self._writer.write(frame_of(message))

    async def flush(self) -> None:
        """Wait while more than asyncio's limit of sent bytes is buffered here, if the other side is there."""
        if self._writer is not None and not self._is_over:
            with contextlib.suppress(ConnectionError):
                await self._writer.drain()

    async def ask(self, question: Question, timeout_s: float = ANSWER_TIMEOUT_S) -> bytes:
        """Send a question and wait for its answer.

        Raises:
            ApiError: 500: the other side failed to answer; or 503: it is gone, or did not answer in time.
        """
        if self._writer is None or self._is_over:
            raise _gone()
        number = next(self._numbers)
        answer = self._asked[number] = asyncio.get_running_loop().create_future()
        self.tell(Ask(number, question))
        try:
            with anyio.fail_after(timeout_s):
                told = await answer
        except TimeoutError:
            raise unavailable("another server of this port does not answer; try again later") from None
        finally:
            del self._asked[number]
        body: bytes | None = told.body
        if body is None:
            raise ApiError(500, "internal_error", "another server of this port failed at it; its log says why")
        return body

    def _take(self, message: Message, tasks: TaskGroup) -> None:
        if isinstance(message, Ask):
            tasks.start_soon(self._reply, message)
        elif isinstance(message, AskAnswer):
            asked = self._asked.get(message.number)
            if asked is not None and not asked.done():
                asked.set_result(message)
        else:
            self._on_message(message)

    async def _reply(self, asked: Ask) -> None:
        body: bytes | None = None
        try:
            body = await self._answer(asked.question)
        except Exception:
            logger.exception("a question of another server of this port failed")
        self.tell(AskAnswer(asked.number, body))


def _gone() -> ApiError:
    return unavailable("another server of this port has ended; try again later")
