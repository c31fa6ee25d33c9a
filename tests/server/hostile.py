"""Clients that do not behave, by raw sockets, and a server on the test's loop to try them on."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import socket
import struct
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

if TYPE_CHECKING:
    from server.conftest import Listening

    from aioengine import Engine
    from aioengine.frontend.runtime import Runtime
    from aioengine.server import ServerConfig
    from aioengine.server.api import Api
    from doubles.fake_executor import FakeExecutor

Adapter = Literal["uvicorn", "serve", "aiohttp"]
"""The ASGI app under uvicorn as it is, the same under the protocol of ``aioengine serve``, or the aiohttp routes."""
Leaving = Literal["close", "reset", "half"]

MAX_TURNS = 1_000_000
GONE = "aioengine:http_clients_gone_total"
CUT = "aioengine:http_clients_cut_total"
READ_TIMEOUT_S = 90.0
"""For the next bytes to come or to be taken: more than any time limit of a server's that a test waits for."""


# A client


class Answer(NamedTuple):
    """A response that was read to its end."""

    status: int
    headers: dict[str, str]
    body: bytes

    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def error(self) -> dict[str, Any]:
        """The error of a body that must be one, and say nothing of what is inside."""
        assert self.headers["content-type"] == "application/json", self
        assert list(self.json()) == ["error"], self
        error: dict[str, Any] = self.json()["error"]
        assert list(error) == ["message", "type", "param", "code"], self
        assert isinstance(error["message"], str), self
        assert error["message"], self
        assert len(error["message"]) < 2000, f"an error of {len(error['message'])} characters"
        assert not any(inside in error["message"] for inside in ("Traceback", "msgspec", ".py", "object at 0x")), self
        return error


class Client:
    """One connection, which reads and writes what it is told to, and nothing by itself."""

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        self._loop = asyncio.get_running_loop()
        self._read = bytearray()

    @classmethod
    async def connect(cls, port: int, *, receive_buffer: int | None = None) -> Client:
        """Connect; a small buffer of the kernel's makes the server feel sooner that nothing is read."""
        connection = socket.socket()
        connection.setblocking(False)
        if receive_buffer is not None:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
        await asyncio.get_running_loop().sock_connect(connection, ("127.0.0.1", port))
        return cls(connection)

    async def send(self, data: bytes) -> None:
        async with asyncio.timeout(READ_TIMEOUT_S):
            await self._loop.sock_sendall(self._socket, data)

    async def post(self, path: str, body: Any, **headers: str) -> None:
        """Send a request, whole."""
        await self.send(request_of("POST", path, body, **headers))

    async def _receive(self) -> None:
        """Read what comes next.

        Raises:
            EOFError: it was the connection's end.
            ConnectionError: the connection broke.
        """
        async with asyncio.timeout(READ_TIMEOUT_S):
            piece = await self._loop.sock_recv(self._socket, 2**16)
        if not piece:
            raise EOFError(f"the connection ended after {bytes(self._read[-500:])!r}")
        self._read += piece

    async def read_exactly(self, num_bytes: int) -> bytes:
        while len(self._read) < num_bytes:
            await self._receive()
        data = bytes(self._read[:num_bytes])
        del self._read[:num_bytes]
        return data

    async def read_until(self, mark: bytes) -> bytes:
        """All up to the mark, with it."""
        while (at := self._read.find(mark)) < 0:
            await self._receive()
        return await self.read_exactly(at + len(mark))

    async def read_to_end(self, *, or_reset: bool = False) -> bytes:
        """All up to the connection's end, which is an orderly one unless a reset will do, too."""
        try:
            while True:
                await self._receive()
        except EOFError:
            pass
        except ConnectionResetError:
            if not or_reset:
                raise
        return await self.read_exactly(len(self._read))

    async def answer(self) -> Answer:
        """The next response, whole; those that say "go on" are left out."""
        while True:
            head = (await self.read_until(b"\r\n\r\n")).decode("latin-1").split("\r\n")
            status = int(head[0].split(" ")[1])
            if status != 100:
                break
        assert head[0].startswith("HTTP/1.1 "), head[0]
        headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in head[1:] if line)}
        return Answer(status, headers, await self._body(headers))

    async def _body(self, headers: dict[str, str]) -> bytes:
        if "content-length" in headers:
            return await self.read_exactly(int(headers["content-length"]))
        if headers.get("transfer-encoding") != "chunked":
            return await self.read_to_end()
        chunks = []
        while size := int(await self.read_until(b"\r\n"), 16):
            chunks.append((await self.read_exactly(size + 2))[:-2])
        await self.read_until(b"\r\n")
        return b"".join(chunks)

    def leave(self, how: Leaving = "close") -> None:
        """Leave: in order, by a reset, or by saying that nothing more will be sent."""
        if how == "half":
            self._socket.shutdown(socket.SHUT_WR)
            return
        if how == "reset":
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self._socket.close()

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        self._socket.close()


def request_of(method: str, path: str, body: Any = None, **headers: str) -> bytes:
    """A request's bytes; a body that is no bytes is sent as JSON."""
    data = b"" if body is None else body if isinstance(body, bytes) else json.dumps(body).encode()
    fields = {"host": "x", "content-type": "application/json", "content-length": str(len(data))}
    fields.update({name.replace("_", "-"): value for name, value in headers.items()})
    lines = [f"{name}: {value}\r\n" for name, value in fields.items() if value]
    return f"{method} {path} HTTP/1.1\r\n{''.join(lines)}\r\n".encode("latin-1") + data


def completion(seed: int = 7, **fields: Any) -> dict[str, Any]:
    """A completion's body; by its seed the request is known in the device's plans."""
    return {"prompt": "Once upon a time", "max_tokens": 100, "ignore_eos": True, "seed": seed, **fields}


def chat(seed: int = 7, **fields: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": "Hi"}]
    return {"messages": messages, "max_tokens": 100, "ignore_eos": True, "seed": seed, **fields}


# A server


class Target:
    """A server on the test's loop, with its engine, its fake device and its API."""

    def __init__(
        self, adapter: Adapter, engine: Engine, executor: FakeExecutor, listening: Listening, api: Api
    ) -> None:
        self.adapter = adapter
        self.engine = engine
        self.executor = executor
        self.port, self.transports = listening
        self.api = api

    @property
    def runtime(self) -> Runtime:
        assert self.engine._runtime is not None
        return self.engine._runtime

    async def connect(self, *, receive_buffer: int | None = None) -> Client:
        return await Client.connect(self.port, receive_buffer=receive_buffer)

    @contextlib.asynccontextmanager
    async def client(self) -> AsyncIterator[Client]:
        with await self.connect() as client:
            yield client

    async def ask(self, path: str, body: Any = None, **headers: str) -> Answer:
        """What a client that behaves gets."""
        async with self.client() as client:
            await client.send(request_of("GET" if body is None else "POST", path, body, **headers))
            return await client.answer()

    async def metric(self, name: str) -> float:
        text = (await self.ask("/metrics")).body.decode()
        lines = [line for line in text.splitlines() if line.startswith((name + " ", name + "{"))]
        return sum(float(line.rpartition(" ")[2]) for line in lines)

    async def until(self, is_so: Callable[[], Any]) -> None:
        """Let all others run until it is so."""
        for _ in range(MAX_TURNS):
            if is_so():
                return
            await asyncio.sleep(0)
        raise AssertionError("it never came to be so")

    async def until_told(self, name: str, value: float) -> None:
        """Wait for a metric to have the value."""
        for _ in range(20_000):
            if (told := await self.metric(name)) >= value:
                break
        assert told == value

    def num_plans_with(self, seed: int, start: int = 0) -> int:
        """How many plans that were launched from number ``start`` on compute tokens of that request."""
        tenants: dict[int, int] = {}
        seeds = []
        for plan in self.executor.plans:
            for row in plan.removed.tolist():
                tenants.pop(row, None)
            tenants.update({added.row: added.sampling.seed for added in plan.added})
            seeds.append({tenants[row] for row in plan.rows.tolist()})
        return sum(seed in some for some in seeds[start:])

    def has_launched(self, num_plans: int) -> bool:
        return len(self.executor.plans) >= num_plans

    @property
    def num_buffered(self) -> int:
        """Bytes that the connections hold for clients which have not read them."""
        return sum(transport.get_write_buffer_size() for transport in self.transports())

    @property
    def num_registered(self) -> int:
        """Requests that the engine knows, in whatever stage."""
        return len(self.runtime.admission.requests)

    @property
    def is_idle(self) -> bool:
        """Nothing is registered, queued or scheduled, and all blocks are free."""
        stats = self.runtime.core.stats()
        return (
            not self.num_registered
            and not self.runtime.admission.num_preparing
            and (stats.running, stats.waiting, stats.blocked) == (0, 0, 0)
            and stats.free_blocks == stats.num_blocks
        )

    def complete_all(self) -> None:
        """End all steps of a manual device."""
        for step in self.executor.unfinished:
            step.complete()

    async def until_idle_slowly(self) -> None:
        """Wait until nothing is left, and let a tick pass between two looks: they are not to be what holds the loop."""
        for _ in range(MAX_TURNS):
            if self.is_idle:
                return
            await asyncio.sleep(Ticker.INTERVAL_S)

    async def idle(self) -> None:
        """Wait until nothing is left of any request."""

        def rests() -> bool:
            if self.executor.is_manual:
                self.complete_all()
            return self.is_idle and not self.executor.unfinished

        await self.until(rests)


@contextlib.asynccontextmanager
async def served(
    adapter: Adapter,
    config: ServerConfig | None = None,
    *,
    engine: dict[str, Any] | None = None,
    model: str | None = None,
    send_buffer: int | None = None,
    **device: Any,
) -> AsyncIterator[Target]:
    """A server of that adapter with a fake device: ``async with served("aiohttp", is_manual=True) as target``.

    Args:
        send_buffer: the kernel's for each connection; it grows to megabytes where it is not given.
    """
    from server.conftest import api_of, app_of, listening

    from aioengine import Engine
    from aioengine.server import HttpLimits
    from aioengine.server.http_protocol import SharedState
    from doubles.fake_executor import FakeExecutor

    executor = FakeExecutor(**{"vocab_size": 2048, "num_blocks": 512, **device})
    async with Engine(model, seed=1, executor=executor, **(engine or {})) as made:
        app = app_of(made, "aiohttp" if adapter == "aiohttp" else "starlette", config)
        state = SharedState(HttpLimits()) if adapter == "serve" else None
        async with listening(app, state=state, send_buffer=send_buffer) as server:
            target = Target(adapter, made, executor, server, api_of(app))
            yield target
            await target.idle()
            made.get_tokenizer()  # it is alive


@contextlib.contextmanager
def heard_errors(without: Sequence[str] = ()) -> Iterator[list[logging.LogRecord]]:
    """All that is logged as an error or with a traceback, by anybody but the loggers of these names."""
    records: list[logging.LogRecord] = []
    handler = logging.Handler()

    def note(record: logging.LogRecord) -> None:
        if (record.levelno >= logging.ERROR or record.exc_info) and record.name not in without:
            records.append(record)

    handler.emit = note  # type: ignore[method-assign]
    logging.getLogger().addHandler(handler)
    try:
        yield records
    finally:
        logging.getLogger().removeHandler(handler)


# How free the loop is


class Ticker:
    """A callback each millisecond: ``with Ticker() as ticker: ...``.

    Attributes:
        held_s: by how much each came late, as far as this process has computed meanwhile, whichever of its threads: the
            rest is what other processes took from it on a busy machine.
    """

    INTERVAL_S = 0.001

    def __init__(self) -> None:
        self.held_s: list[float] = []
        self._loop = asyncio.get_running_loop()

    def __enter__(self) -> Ticker:
        self._computed_s = time.process_time()
        self._due = self._loop.time() + self.INTERVAL_S
        self._timer = self._loop.call_at(self._due, self._tick)
        return self

    def __exit__(self, *_: object) -> None:
        self._timer.cancel()
        self._note()

    def _tick(self) -> None:
        self._note()
        self._due = self._loop.time() + self.INTERVAL_S
        self._timer = self._loop.call_at(self._due, self._tick)

    def _note(self) -> None:
        late_s, computed_s = max(0.0, self._loop.time() - self._due), time.process_time()
        self.held_s.append(min(late_s, computed_s - self._computed_s))
        self._computed_s = computed_s


async def _send_once(port: int, data: bytes) -> tuple[int, str]:
    loop = asyncio.get_running_loop()
    with await Client.connect(port) as client:

        async def write() -> None:
            with contextlib.suppress(ConnectionError):  # refused amid its body: there is an answer
                await client.send(data)

        writing = loop.create_task(write())
        try:
            answer = await client.answer()
        finally:
            writing.cancel()
            await asyncio.gather(writing, return_exceptions=True)
    return answer.status, answer.body[:300].decode(errors="replace")


def send_all(port: int, data: bytes, at_once: int) -> list[tuple[int, str]]:
    """Send a request so many times at once, in a process of its own: the statuses, and how the bodies begin."""

    async def send() -> list[Any]:
        return await asyncio.gather(*(_send_once(port, data) for _ in range(at_once)), return_exceptions=True)

    return [answer if isinstance(answer, tuple) else (0, repr(answer)) for answer in asyncio.run(send())]
