"""ZMQ sockets on an event loop: one owner each, never blocking, drained in batches with a turn for the loop between.

ZMQ's own asyncio sockets do not yield while messages are ready, so that a full socket starves the loop. Its file
descriptor signals changes, not states: a send may consume the signal of a message that has come. A `Channel`
looks at the socket's state after each send and before each wait.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import operator
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import zmq
from zmq.utils.monitor import parse_monitor_message

from aioengine.errors import ConfigError
from aioengine.processes.worker_threads import TextWorker
from aioengine.transport.addresses import Address

RECEIVE_BATCH = 64
"""Messages handed out before the loop gets its turn."""

Frames = Sequence[bytes]

# Looked up once: zmq's names are members of enums behind a module's __getattr__.
_EVENTS, _POLLIN, _POLLOUT = zmq.EVENTS, int(zmq.POLLIN), int(zmq.POLLOUT)
_DONTWAIT, _SNDMORE = zmq.DONTWAIT, zmq.SNDMORE

_WATCHED_EVENTS = functools.reduce(
    operator.or_,
    (
        *(zmq.Event.HANDSHAKE_SUCCEEDED, zmq.Event.HANDSHAKE_FAILED_AUTH, zmq.Event.HANDSHAKE_FAILED_PROTOCOL),
        *(zmq.Event.HANDSHAKE_FAILED_NO_DETAIL, zmq.Event.DISCONNECTED, zmq.Event.CLOSED),
    ),
)


Context = zmq.Context[zmq.Socket[bytes]]


def make_context() -> Context:
    """A context whose sockets drop what is unsent when they are closed, unless closing gives them time.

    Raises:
        ConfigError: there is no file descriptor for it.
    """
    try:
        context: Context = zmq.Context()
    except zmq.ZMQError as error:
        raise ConfigError(f"no sockets to an engine's process can be had: {error.strerror}") from None
    context.linger = 0
    return context


async def end_context(context: Context | None, worker: TextWorker) -> None:
    """End a context, if one is there and open, in a thread: that waits for what its closed sockets linger for.

    Sockets that something has left open, such as a start that failed midway, are closed: it would wait for ever.
    """
    if context is not None and not context.closed:
        await worker.run(context.destroy, None, 0)


def bind(socket: zmq.Socket[bytes], address: Address) -> str:
    """Bind, and return the address as others reach it.

    Raises:
        ConfigError: it cannot be had.
    """
    try:
        socket.bind(str(address))
    except zmq.ZMQError as error:
        raise ConfigError(f"cannot serve at {address}: {error.strerror}; choose another address") from None
    return socket.getsockopt_string(zmq.LAST_ENDPOINT).rstrip("\0")


class Channel:
    """A ZMQ socket on the running loop, with one task that receives from it.

    Args:
        socket: bound or connected; closed with the channel.
        tells_origin: put before each message the file descriptor of the connection that it came by; -1: not known.
    """

    def __init__(self, socket: zmq.Socket[bytes], *, tells_origin: bool = False) -> None:
        self.socket = socket
        self._tells_origin = tells_origin
        self._loop = asyncio.get_running_loop()
        self._backlog: deque[Frames] = deque()
        self._waiter: asyncio.Future[None] | None = None
        self._has_yielded = True
        self._is_woken = False
        self._fd: int = socket.FD
        self._loop.add_reader(self._fd, self._look)

    # Sending

    def send(self, frames: Frames) -> None:
        """Send a message, or keep it until the socket takes it. What may lie here is for the caller to bound."""
        if self._backlog:
            self._backlog.append(frames)
        else:
            try:
                self._send(frames)
            except zmq.Again:
                self._backlog.append(frames)
        self._look()  # trying, too, clears the file descriptor; and there may be room by now

    def send_now(self, frames: Frames) -> None:
        """Send a message that is not to wait here.

        Raises:
            zmq.ZMQError: the socket does not take it: `zmq.Again` where too much lies there unsent. Of a ROUTER that is
                mandatory both are about this message's peer alone, and it does not take what is for none.
        """
        try:
            self._send(frames)
        finally:
            self._look()

    def _send(self, frames: Frames) -> None:
        *before, last = frames
        for frame in before:
            self.socket.send(frame, _DONTWAIT | _SNDMORE)
        self.socket.send(last, _DONTWAIT)

    # Receiving

    async def receive(self, limit: int = RECEIVE_BATCH) -> list[list[Any]]:
        """Wait for messages, and return up to ``limit`` that are there; none if `wake` or `close` ended the wait.

        Every call gives the loop a turn. Cancelling loses nothing.
        """
        if not self._has_yielded:
            await asyncio.sleep(0)
            self._has_yielded = True
        while not (batch := self.drain(limit)):
            if self._is_woken:
                self._is_woken = False
                return []
            self._waiter = self._loop.create_future()
            if self._backlog and not self.socket.closed:
                self._look()  # receiving, too, clears the sign that there is room
            try:
                await self._waiter
            finally:
                self._waiter = None
        self._has_yielded = False
        return batch

    def wake(self) -> None:
        """Let `receive` return, once, when nothing is there."""
        self._is_woken = True
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def drain(self, limit: int = RECEIVE_BATCH) -> list[list[Any]]:
        """The messages that are there, up to ``limit``."""
        batch: list[list[Any]] = []
        if self.socket.closed:  # while its receiver was waiting, or about to
            return batch
        socket = self.socket
        receive = self._receive_with_origin if self._tells_origin else socket.recv_multipart
        # Asked for each time: catching what an empty socket raises takes three times as long.
        while len(batch) < limit and int(socket.getsockopt(_EVENTS)) & _POLLIN:
            batch.append(receive(_DONTWAIT))
        return batch

    def _receive_with_origin(self, flags: int) -> list[Any]:
        frames = self.socket.recv_multipart(flags, copy=False)
        try:
            connection = frames[-1].get(zmq.SRCFD)
        except zmq.ZMQError:  # by an old version of ZMTP, which no front end speaks
            connection = -1
        return [connection, *(frame.bytes for frame in frames)]

    def _look(self) -> None:
        """Act on the socket's state; asking for it clears the file descriptor."""
        while True:
            events = int(self.socket.getsockopt(_EVENTS))
            if events & _POLLIN and self._waiter is not None and not self._waiter.done():
                self._waiter.set_result(None)
            if not (events & _POLLOUT and self._backlog):
                return
            with contextlib.suppress(zmq.Again):  # sending changes the state: look again
                while self._backlog:
                    self._send(self._backlog[0])
                    self._backlog.popleft()

    # The end

    def close(self, linger_s: float = 0.0) -> None:
        """Let go of the socket; what it has not sent yet may take so long. Idempotent."""
        if not self.socket.closed:
            if not self._loop.is_closed():
                self._loop.remove_reader(self._fd)
                self.wake()
            self.socket.close(linger=round(1000 * linger_s))


class Monitor:
    """Watches a socket's connections.

    Args:
        on_end: called with the file descriptor of each connection that has ended.
    Attributes:
        has_connected: a peer has been there, and was admitted.
        is_refused: this side was not admitted, or no server listens; for sockets that connect.
        is_gone: the connection has ended; for sockets that connect once.
    """

    def __init__(self, socket: zmq.Socket[bytes], on_end: Callable[[int], None] = lambda _: None) -> None:
        self._watched = socket
        self._on_end = on_end
        self._channel = Channel(socket.get_monitor_socket(_WATCHED_EVENTS))
        self.has_connected = self.is_refused = self.is_gone = False

    async def look(self) -> None:
        """Wait until something has happened."""
        self._note(await self._channel.receive())

    def catch_up(self) -> None:
        """Take in what has happened so far: all that came before a message that the watched socket has handed out."""
        while messages := self._channel.drain():
            self._note(messages)

    def _note(self, messages: list[list[bytes]]) -> None:
        for message in messages:
            event = parse_monitor_message(message)
            if event["event"] == zmq.Event.HANDSHAKE_SUCCEEDED:
                self.has_connected = True
            elif not self.has_connected:
                self.is_refused = True
            elif event["event"] == zmq.Event.DISCONNECTED:
                self.is_gone = True
                self._on_end(int(event["value"]))

    def close(self) -> None:
        """Idempotent; to be called before the watched socket is closed."""
        if not self._channel.socket.closed:
            # In this order: ZMQ's thread sends its events under a lock that the first call needs. Without a receiver it
            # would wait for ever, and this loop for it.
            if not self._watched.closed:
                self._watched.disable_monitor()
            self._channel.close()
