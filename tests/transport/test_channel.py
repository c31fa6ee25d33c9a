"""Sockets on a loop: nothing is lost, and no task is starved."""

from __future__ import annotations

import asyncio
import random
import socket as plain_sockets
import time
from collections.abc import AsyncIterator, Callable
from contextlib import closing, suppress
from typing import Any

import anyio
import pytest
import zmq
from nightly import seeds
from transport.siege import look_until
from waiting import Ticker

from aioengine.transport.channel import RECEIVE_BATCH, Channel, Monitor

on_both_loops = pytest.mark.asyncio(loop_factories=["asyncio", "uvloop"])

Context = zmq.Context[zmq.Socket[bytes]]


@pytest.fixture
async def join(context: Context) -> AsyncIterator[Callable[..., tuple[Channel, Channel]]]:
    """``join(zmq.PUSH, zmq.PULL, hwm=...)``: two channels, connected to each other, that are closed at the end."""
    channels: list[Channel] = []

    def make(one: int, other: int, *, hwm: int = 1000, scheme: str = "tcp") -> tuple[Channel, Channel]:
        sockets = [context.socket(one), context.socket(other)]
        for socket in sockets:
            socket.set_hwm(hwm)
        sockets[1].bind("inproc://pair" if scheme == "inproc" else "tcp://127.0.0.1:*")
        sockets[0].connect(sockets[1].getsockopt_string(zmq.LAST_ENDPOINT).rstrip("\0"))
        made = [Channel(socket) for socket in sockets]
        channels.extend(made)
        return made[0], made[1]

    yield make
    for channel in channels:
        channel.close()


async def receive(channel: Channel, count: int) -> list[list[bytes]]:
    messages: list[list[bytes]] = []
    with anyio.fail_after(30):
        while len(messages) < count:
            messages += await channel.receive()
    return messages


def let_sends_look() -> None:
    """ZMQ looks for news in a send only where it has not done so for a millisecond or so, by the CPU's clock."""
    begin = time.perf_counter()
    while time.perf_counter() < begin + 0.005:
        pass


def numbered(count: int) -> list[list[bytes]]:
    return [[b"%d" % n, b"x" * (n % 7)] for n in range(count)]


@on_both_loops
class TestOrder:
    @pytest.mark.parametrize("hwm", [1, 1000])
    @pytest.mark.parametrize("kinds", [(zmq.PUSH, zmq.PULL), (zmq.DEALER, zmq.DEALER), (zmq.PAIR, zmq.PAIR)])
    async def test_messages_come_in_the_order_in_which_they_were_sent_also_if_most_had_to_wait(
        self, join: Any, kinds: tuple[int, int], hwm: int
    ) -> None:
        sender, receiver = join(*kinds, hwm=hwm)
        # Of the large ones more than all buffers on the way hold, however fast ZMQ's threads are.
        messages = [[*message, b"y" * (30_000 if hwm == 1 else 1)] for message in numbered(1000)]
        for message in messages:
            sender.send(message)
        assert sender._backlog or hwm > 1
        assert await receive(receiver, 1000) == messages
        assert not sender._backlog

    async def test_a_peer_that_comes_late_finds_all(self, context: Context) -> None:
        push, pull = context.socket(zmq.PUSH), context.socket(zmq.PULL)
        push.bind("tcp://127.0.0.1:*")
        with closing(Channel(push)) as sender, closing(Channel(pull)) as receiver:
            for message in numbered(100):
                sender.send(message)
            assert len(sender._backlog) == 100
            pull.connect(push.getsockopt_string(zmq.LAST_ENDPOINT).rstrip("\0"))
            assert await receive(receiver, 100) == numbered(100)
            assert not sender._backlog


@on_both_loops
class TestBounds:
    async def test_batches_are_bounded_and_starve_no_other_task(self, join: Any) -> None:
        """ZMQ's own asyncio socket gives others no turn at all while messages are ready."""
        count = 20_000
        sender, receiver = join(zmq.PUSH, zmq.PULL, hwm=0)
        for _ in range(count):
            sender.send([b"x"])
        sizes: list[int] = []
        async with Ticker() as ticker:
            while sum(sizes) < count:
                sizes.append(len(await receiver.receive()))
        assert max(sizes) <= RECEIVE_BATCH
        assert ticker.count >= count // RECEIVE_BATCH - 1


@on_both_loops
class TestWakeUps:
    @pytest.mark.parametrize("seed", seeds(40))
    async def test_sending_takes_no_news_of_what_has_come(self, join: Any, seed: int) -> None:
        """Two sides that each send at random moments, and wait for what the other sends: nobody waits for ever."""
        rng = random.Random(seed)
        count = 60
        sides = join(zmq.DEALER, zmq.DEALER, scheme=rng.choice(["tcp", "inproc"]))

        async def send(channel: Channel) -> None:
            for message in numbered(count):
                for _ in range(rng.choice([0, 0, 0, 1, 3])):
                    await asyncio.sleep(0)
                channel.send(message)

        with anyio.fail_after(30):
            async with anyio.create_task_group() as tasks:
                for channel in sides:
                    tasks.start_soon(send, channel)
                    tasks.start_soon(receive, channel, count)

    async def test_a_send_that_finds_no_room_takes_no_news_of_what_has_come(self, join: Any) -> None:
        one, other = join(zmq.DEALER, zmq.DEALER, hwm=1, scheme="inproc")
        with suppress(zmq.Again):
            while True:
                one.socket.send(b"x", zmq.DONTWAIT)

        async def refuse_more() -> None:
            other.socket.send(b"news", zmq.DONTWAIT)
            let_sends_look()
            one.send([b"x"])
            assert len(one._backlog) == 1

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(refuse_more)
            assert await receive(one, 1) == [[b"news"]]

    async def test_sending_what_had_to_wait_takes_no_news_of_what_has_come(self, join: Any) -> None:
        one, other = join(zmq.DEALER, zmq.DEALER, hwm=1, scheme="inproc")
        for _ in range(20):
            one.send([b"x"])
        send = one._send

        def send_while_something_comes(frames: Any) -> None:
            one._send = send
            other.socket.send(b"news", zmq.DONTWAIT)
            let_sends_look()
            send(frames)

        async def make_room() -> None:
            one._send = send_while_something_comes
            other.socket.recv(zmq.DONTWAIT)

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(make_room)
            assert await receive(one, 1) == [[b"news"]]

    async def test_receiving_takes_no_news_of_room_for_what_has_to_wait(self, join: Any) -> None:
        one, other = join(zmq.DEALER, zmq.DEALER, hwm=1, scheme="inproc")
        for message in numbered(20):
            one.send(message)
        assert one._backlog
        received = other.drain()

        async def receive_the_rest() -> None:
            received.extend(await receive(other, 20 - len(received)))
            tasks.cancel_scope.cancel()

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(receive_the_rest)
            await one.receive()  # looks before the loop hears that there is room
        assert received == numbered(20)

    async def test_wake_ends_one_wait(self, join: Any) -> None:
        _, receiver = join(zmq.PUSH, zmq.PULL)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(asyncio.sleep, 0)
            receiver.wake()
            assert await receiver.receive() == []
            tasks.start_soon(_call_soon, receiver.wake)
            assert await receiver.receive() == []

    async def test_messages_come_before_a_wake(self, join: Any) -> None:
        sender, receiver = join(zmq.PUSH, zmq.PULL, scheme="inproc")
        sender.send([b"first"])
        receiver.wake()
        assert await receiver.receive() == [[b"first"]]
        assert await receiver.receive() == []

    async def test_closing_ends_a_wait(self, join: Any) -> None:
        _, receiver = join(zmq.PUSH, zmq.PULL)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(_call_soon, receiver.close)
            with anyio.fail_after(10):
                assert await receiver.receive() == []
        receiver.close()

    @pytest.mark.parametrize("seed", seeds(20))
    async def test_cancelling_a_receive_loses_nothing(self, join: Any, seed: int) -> None:
        rng = random.Random(seed)
        sender, receiver = join(zmq.PUSH, zmq.PULL)
        received: list[list[bytes]] = []

        async def send() -> None:
            for message in numbered(300):
                sender.send(message)
                if rng.random() < 0.3:
                    await asyncio.sleep(0)

        async def cancel(scope: anyio.CancelScope, turns: int) -> None:
            for _ in range(turns):
                await asyncio.sleep(0)
            scope.cancel()

        with anyio.fail_after(30):
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(send)
                while len(received) < 300:
                    with anyio.CancelScope() as scope:
                        tasks.start_soon(cancel, scope, rng.randrange(4))
                        received += await receiver.receive()
        assert received == numbered(300)


async def _call_soon(function: Callable[[], Any]) -> None:
    function()


@on_both_loops
class TestMonitor:
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

    async def test_closing_ends_a_look(self, context: Context) -> None:
        with context.socket(zmq.PUSH) as watched:
            monitor = Monitor(watched)
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(_call_soon, monitor.close)
                with anyio.fail_after(10):
                    await monitor.look()


async def test_zmq_is_told_to_stop_while_its_news_can_still_be_heard(
    context: Context, monkeypatch: pytest.MonkeyPatch
) -> None:
    was_heard: list[bool] = []
    with context.socket(zmq.PUSH) as watched:
        monitor = Monitor(watched)
        news = monitor._channel.socket
        stop = type(watched).disable_monitor

        def note(socket: Any) -> None:
            was_heard.append(not news.closed)
            stop(socket)

        monkeypatch.setattr(type(watched), "disable_monitor", note)
        for _ in range(2):
            monitor.close()
    assert was_heard == [True]
    assert news.closed
