"""What becomes of a socket's one good connection, among peers that are refused in every way."""

from __future__ import annotations

import asyncio
import contextlib
import socket as plain_sockets
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import anyio
import pytest
import zmq
from transport.siege import look_until
from transport.strangers import STRANGERS, say

from aioengine.transport.channel import Channel, Monitor
from aioengine.transport.security import ZAP_ENDPOINT, Gate, enforce

on_both_loops = pytest.mark.asyncio(loop_factories=["asyncio", "uvloop"])

Context = zmq.Context[zmq.Socket[bytes]]


@pytest.fixture
def context() -> Iterator[Context]:
    with zmq.Context() as context:
        context.linger = 0
        yield context
        context.destroy(linger=0)


async def call_soon(function: Callable[[], Any]) -> None:
    function()


def port_of(address: str) -> int:
    return int(address.rpartition(":")[2])


class Guarded:
    """A PUSH socket that admits one connection, watched by a `Monitor`; and those who come to it."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self.gate = Gate()
        zap = context.socket(zmq.ROUTER)
        zap.bind(ZAP_ENDPOINT)
        self._zap = Channel(zap)
        self.socket = context.socket(zmq.PUSH)
        self.socket.plain_server = True
        enforce(self.socket, "domain")
        self.gate.allow_once("domain", "user", "secret")
        self.monitor = Monitor(self.socket)
        self.socket.bind("tcp://127.0.0.1:*")
        self.address = self.socket.getsockopt_string(zmq.LAST_ENDPOINT).rstrip("\0")

    async def answer(self) -> None:
        while True:
            for peer, delimiter, *request in await self._zap.receive():
                self._zap.send([peer, delimiter, *self.gate.decide(request)])

    def connect(self, secret: bytes | None) -> zmq.Socket[bytes]:
        socket = self._make(secret)
        socket.connect(self.address)
        return socket

    def connect_watched(self, secret: bytes | None) -> tuple[zmq.Socket[bytes], Monitor]:
        socket = self._make(secret)
        monitor = Monitor(socket)
        socket.connect(self.address)
        return socket, monitor

    def _make(self, secret: bytes | None) -> zmq.Socket[bytes]:
        socket = self._context.socket(zmq.PULL)
        socket.reconnect_ivl = -1
        if secret is not None:
            socket.plain_username, socket.plain_password = b"user", secret
        return socket

    def close(self) -> None:
        self.monitor.close()
        self.socket.close()
        self._zap.close()


@contextlib.asynccontextmanager
async def guard(context: Context) -> AsyncIterator[Guarded]:
    guarded = Guarded(context)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(guarded.answer)
        yield guarded
        tasks.cancel_scope.cancel()
    guarded.close()


@on_both_loops
class TestMonitor:
    async def test_a_good_connection_comes_and_goes(self, context: Context) -> None:
        async with guard(context) as guarded:
            peer = guarded.connect(b"secret")
            await look_until(guarded.monitor, lambda: guarded.monitor.has_connected)
            assert not guarded.monitor.is_gone
            peer.close()
            await look_until(guarded.monitor, lambda: guarded.monitor.is_gone)

    @pytest.mark.parametrize("stranger", STRANGERS)
    async def test_strangers_neither_end_the_good_connection_nor_hide_its_end(
        self, context: Context, stranger: str
    ) -> None:
        """Some are refused with a failure, some without, some with two; some hang up themselves."""
        async with guard(context) as guarded:
            monitor = guarded.monitor
            peer = guarded.connect(b"secret")
            await look_until(monitor, lambda: monitor.has_connected)
            for _ in range(2):
                await asyncio.to_thread(say, port_of(guarded.address), *STRANGERS[stranger])
                await look_until(monitor, lambda: not monitor._open - monitor._maybe_good)
                assert not monitor.is_gone
            guarded.socket.send(b"still there", zmq.DONTWAIT)
            assert await asyncio.to_thread(peer.recv) == b"still there"
            peer.close()
            await look_until(monitor, lambda: monitor.is_gone)

    # Whoever comes first with the secret is the good one.
    @pytest.mark.parametrize("stranger", sorted(STRANGERS.keys() - {"spent secret"}))
    async def test_strangers_that_come_first_are_not_the_good_one(self, context: Context, stranger: str) -> None:
        async with guard(context) as guarded:
            monitor = guarded.monitor
            await asyncio.to_thread(say, port_of(guarded.address), *STRANGERS[stranger])
            peer = guarded.connect(b"secret")
            await look_until(monitor, lambda: monitor.has_connected)
            await look_until(monitor, lambda: len(monitor._maybe_good) <= 1)
            assert not monitor.is_gone
            peer.close()
            await look_until(monitor, lambda: monitor.is_gone)

    @pytest.mark.parametrize("secret", [b"wrong", None], ids=["wrong", "none"])
    async def test_the_side_that_is_refused_knows(self, context: Context, secret: bytes | None) -> None:
        async with guard(context) as guarded:
            peer, monitor = guarded.connect_watched(secret)
            await look_until(monitor, lambda: monitor.is_refused)
            assert not monitor.has_connected
            assert not guarded.monitor.has_connected
            monitor.close()
            peer.close()

    @pytest.mark.parametrize("who", ["nothing", "something else"])
    async def test_a_side_that_reaches_no_engine_knows(self, context: Context, who: str) -> None:
        with plain_sockets.create_server(("127.0.0.1", 0)) as server:
            address = f"tcp://127.0.0.1:{server.getsockname()[1]}"
            if who == "nothing":
                server.close()
            peer = context.socket(zmq.DEALER)
            peer.reconnect_ivl = -1
            monitor = Monitor(peer)
            peer.connect(address)

            def answer() -> None:
                connection, _ = server.accept()
                with connection:
                    connection.sendall(b"HTTP/1.0 400 Bad Request\r\n\r\n" * 9)

            if who == "something else":
                await asyncio.to_thread(answer)
            await look_until(monitor, lambda: monitor.is_refused)
            assert not monitor.has_connected
            monitor.close()
            peer.close()

    async def test_the_connecting_side_knows_of_the_end(self, context: Context) -> None:
        async with guard(context) as guarded:
            peer, monitor = guarded.connect_watched(b"secret")
            await look_until(monitor, lambda: monitor.has_connected)
            guarded.socket.unbind(guarded.address)
            guarded.monitor.close()
            guarded.socket.close()
            await look_until(monitor, lambda: monitor.is_gone)
            assert not monitor.is_refused
            monitor.close()
            monitor.close()
            peer.close()

    async def test_closing_ends_a_look(self, context: Context) -> None:
        async with guard(context) as guarded, anyio.create_task_group() as tasks:
            tasks.start_soon(call_soon, guarded.monitor.close)
            with anyio.fail_after(10):
                await guarded.monitor.look()


async def test_zmq_is_told_to_stop_while_somebody_can_still_hear_its_news(
    context: Context, monkeypatch: pytest.MonkeyPatch
) -> None:
    watched = context.socket(zmq.PUSH)
    monitor = Monitor(watched)
    news = monitor._channel.socket
    was_heard: list[bool] = []
    stop = type(watched).disable_monitor

    def note(socket: Any) -> None:
        was_heard.append(not news.closed)
        stop(socket)

    monkeypatch.setattr(type(watched), "disable_monitor", note)

    monitor.close()
    monitor.close()

    assert was_heard == [True]
    assert news.closed
    watched.close()
