"""ZMQ sockets on an event loop: one owner each, never blocking, drained in batches with a turn for the loop between.

ZMQ's own asyncio sockets do not yield while messages are ready, so that a full socket starves the loop. Its file
descriptor tells of changes, not of states: a send may take the news of a message that has come. A `Channel`
looks at the socket's state after each send and before each wait.
"""

from __future__ import annotations

import asyncio
import functools
import operator
from collections import deque
from collections.abc import Sequence
from typing import Any

import numpy as np
import zmq
from zmq.utils.monitor import parse_monitor_message

from aioengine.errors import ConfigError
from aioengine.text.worker import TextWorker
from aioengine.transport.addresses import Address

RECEIVE_BATCH = 64
"""Messages handed out before the loop gets its turn."""

ZERO_COPY_BYTES = 64 * 1024
"""Frames from this size on are not copied into ZMQ's memory; below, copying is cheaper than keeping track."""

Frames = list[Any]

# Looked up once: zmq's names are members of enums behind a module's __getattr__.
_EVENTS, _POLLIN, _POLLOUT, _DONTWAIT, _SNDMORE = (
    zmq.EVENTS,
    int(zmq.POLLIN),
    int(zmq.POLLOUT),
    zmq.DONTWAIT,
    zmq.SNDMORE,
)

_FAILURES = (
    zmq.Event.HANDSHAKE_FAILED_AUTH,
    zmq.Event.HANDSHAKE_FAILED_NO_DETAIL,
    zmq.Event.HANDSHAKE_FAILED_PROTOCOL,
)
_BEGINNINGS = (zmq.Event.ACCEPTED, zmq.Event.CONNECTED)
_WATCHED_EVENTS = functools.reduce(
    operator.or_, (*_FAILURES, *_BEGINNINGS, zmq.Event.HANDSHAKE_SUCCEEDED, zmq.Event.DISCONNECTED, zmq.Event.CLOSED)
)


Context = zmq.Context[zmq.Socket[bytes]]


def make_context() -> Context:
    """A context whose sockets drop what is unsent when they are closed, unless they are told otherwise.

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
    """End a context, if there is one, which waits for what its closed sockets linger for; in a thread.

    Sockets that something has left open, such as a start that failed midway, are closed: it would wait for ever.
    """
    if context is not None:
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
        tells_users: put the sender's user id, as the `Gate` named it, before each message that is received.
    """

    def __init__(self, socket: zmq.Socket[bytes], *, tells_users: bool = False) -> None:
        self.socket = socket
        self._tells_users = tells_users
        self._loop = asyncio.get_running_loop()
        self._backlog: deque[Frames] = deque()
        self._waiter: asyncio.Future[None] | None = None
        self._has_yielded = True
        self._is_woken = False
        self._fd: int = socket.FD
        self._loop.add_reader(self._fd, self._look)

    # Sending

    def send(self, frames: Frames) -> None:
        """Send a message, or keep it until the socket takes it. What may lie here is for the caller to bound.

        The frames, and the arrays among them, must stay as they are.
        """
        if self._backlog:
            self._backlog.append(frames)
        else:
            try:
                self._send(frames)
            except zmq.Again:
                self._backlog.append(frames)
        self._look()  # trying, too, takes news off the file descriptor; and there may have come room since

    @property
    def num_backlog(self) -> int:
        """Messages that wait for the socket to take them."""
        return len(self._backlog)

    def _send(self, frames: Sequence[Any]) -> None:
        last = len(frames) - 1
        for index, frame in enumerate(frames):
            flags = _DONTWAIT if index == last else _DONTWAIT | _SNDMORE
            self.socket.send(frame, flags, copy=size_of(frame) < ZERO_COPY_BYTES)

    # Receiving

    async def receive(self) -> list[list[bytes]]:
        """Wait for messages, and return up to `RECEIVE_BATCH` that are there; none if `wake` or `close` ended the wait.

        Every call gives the loop a turn. Cancelling loses nothing.
        """
        if not self._has_yielded:
            await asyncio.sleep(0)
            self._has_yielded = True
        while not (batch := self._drain()):
            if self._is_woken:
                self._is_woken = False
                return []
            self._waiter = self._loop.create_future()
            if self._backlog and not self.socket.closed:
                self._look()  # receiving, too, takes news: that there is room
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

    def _drain(self) -> list[list[bytes]]:
        batch: list[list[bytes]] = []
        if self.socket.closed:  # while its receiver was waiting, or about to
            return batch
        socket = self.socket
        receive = self._receive_with_user if self._tells_users else self._receive_plain
        # Asked for each time: catching what an empty socket raises takes three times as long.
        while len(batch) < RECEIVE_BATCH and socket.getsockopt(_EVENTS) & _POLLIN:  # type: ignore[operator]
            batch.append(receive())
        return batch

    def _receive_plain(self) -> list[bytes]:
        # Copied, though large ones need not be: outputs are small, and a frame that is kept costs 2 µs.
        return self.socket.recv_multipart(_DONTWAIT)

    def _receive_with_user(self) -> list[bytes]:
        frames = self.socket.recv_multipart(_DONTWAIT, copy=False)
        return [_user_of(frames[-1]), *map(_plain, frames)]

    def _look(self) -> None:
        """Act on the socket's state; asking for it takes the news off the file descriptor."""
        while True:
            events = self.socket.getsockopt(_EVENTS)
            assert isinstance(events, int)
            if events & _POLLIN and self._waiter is not None and not self._waiter.done():
                self._waiter.set_result(None)
            if not (events & _POLLOUT and self._backlog):
                return
            self._flush()  # which is sending: look again

    def _flush(self) -> None:
        try:
            while self._backlog:
                self._send(self._backlog[0])
                self._backlog.popleft()
        except zmq.Again:
            pass

    # The end

    def close(self, linger_s: float = 0.0) -> None:
        """Let go of the socket; what it has not sent yet may take so long. Idempotent."""
        if not self.socket.closed:
            if not self._loop.is_closed():
                self._loop.remove_reader(self._fd)
                self.wake()
            self.socket.close(linger=round(1000 * linger_s))


class Monitor:
    """What becomes of a socket's one good connection, among others that may be refused.

    Attributes:
        has_connected: a peer has been there, and was admitted.
        is_refused: this side was not admitted, or no server listens; for sockets that connect.
    """

    def __init__(self, socket: zmq.Socket[bytes]) -> None:
        self._watched = socket
        self._channel = Channel(socket.get_monitor_socket(_WATCHED_EVENTS))
        self._open: set[int] = set()
        """The connections that are there, by their file descriptors."""
        self._maybe_good: set[int] = set()
        """Those that were there when one of them was admitted: ZMQ does not say which one it was."""
        self.has_connected = False
        self.is_refused = False

    @property
    def is_gone(self) -> bool:
        """Whether the good connection has ended.

        Failures are not counted for this: some refused peers end without one, and some with two. One that was being
        refused while the good one was admitted may delay the news, until ZMQ gives it up (30 s).
        """
        return self.has_connected and not self._maybe_good

    async def look(self) -> None:
        """Wait until something has happened."""
        for message in await self._channel.receive():
            news = parse_monitor_message(message)
            self._note(zmq.Event(news["event"]), int(news["value"]))

    def _note(self, event: zmq.Event, value: int) -> None:
        """Take in an event; ``value`` is the connection's file descriptor where it begins and ends."""
        if event in _BEGINNINGS:
            self._open.add(value)
        elif event is zmq.Event.HANDSHAKE_SUCCEEDED:
            if not self.has_connected:
                self._maybe_good = set(self._open)
            self.has_connected = True
        elif event is zmq.Event.DISCONNECTED:
            self._open.discard(value)
            self._maybe_good.discard(value)
            self.is_refused |= not self.has_connected
        else:  # CLOSED, or one of the failures
            self.is_refused = True

    def close(self) -> None:
        """Idempotent; to be called before the watched socket is closed."""
        if not self._channel.socket.closed:
            # In this order: ZMQ's thread tells its news under a lock that the first call needs, and without a receiver
            # it would wait for ever, and this loop for it.
            if not self._watched.closed:
                self._watched.disable_monitor()
            self._channel.close()


def size_of(frame: Any) -> int:
    """Bytes of a frame, which for arrays and their views is not their length."""
    return frame.nbytes if isinstance(frame, np.ndarray | memoryview) else len(frame)


def _plain(frame: zmq.Frame) -> Any:
    """A small frame as bytes, a large one as a view of ZMQ's memory."""
    return frame.bytes if len(frame) < ZERO_COPY_BYTES else frame.buffer


def _user_of(frame: zmq.Frame) -> bytes:
    try:
        user: Any = frame.get("User-Id")
    except zmq.ZMQError:  # none was named
        return b""
    return user.encode() if isinstance(user, str) else bytes(user)
