"""What becomes of a socket's one good connection, among peers that are refused in every way."""

from __future__ import annotations

import asyncio
import socket as plain_sockets
from collections.abc import Callable
from typing import Any

import anyio
import pytest
import zmq
from transport.guarded import Context, guard, plain
from transport.siege import look_until
from transport.strangers import STRANGERS, say

from aioengine.transport.channel import Monitor

on_both_loops = pytest.mark.asyncio(loop_factories=["asyncio", "uvloop"])


async def call_soon(function: Callable[[], Any]) -> None:
    function()


def port_of(address: str) -> int:
    return int(address.rpartition(":")[2])


@on_both_loops
class TestMonitor:
    async def test_a_good_connection_comes_and_goes(self, context: Context) -> None:
        async with guard(context) as guarded:
            peer = guarded.connect(plain())
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
            peer = guarded.connect(plain())
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
            peer = guarded.connect(plain())
            await look_until(monitor, lambda: monitor.has_connected)
            await look_until(monitor, lambda: len(monitor._maybe_good) <= 1)
            assert not monitor.is_gone
            peer.close()
            await look_until(monitor, lambda: monitor.is_gone)

    @pytest.mark.parametrize("set_up", [plain(b"wrong"), lambda _: None], ids=["wrong", "none"])
    async def test_the_side_that_is_refused_knows(self, context: Context, set_up: Any) -> None:
        async with guard(context) as guarded:
            peer, monitor = guarded.connect_watched(set_up)
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
            peer, monitor = guarded.connect_watched(plain())
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
