"""What a server has of its front ends: one ROUTER socket that they reach, and a session for each that has attached.

What comes is read in its turn, or refused without harm. Nothing here ever waits for a front end: what it leaves unread
is bounded, and one that leaves more is cut off.
"""

from __future__ import annotations

import contextlib
import logging
from collections import Counter, deque
from collections.abc import Awaitable, Callable
from typing import Any, Generic, NamedTuple, TypeVar

import anyio
import zmq

from aioengine.errors import AioEngineError, EngineDead, WireError
from aioengine.processes.turns import turns_here
from aioengine.processes.worker_threads import TextWorker
from aioengine.transport import wire
from aioengine.transport.channel import Channel
from aioengine.transport.entrance import Entrance
from aioengine.transport.security import ServerKeys
from aioengine.transport.wire_errors import to_fault

logger = logging.getLogger("aioengine")

MAX_SESSIONS = 256
MAX_GONE = 1024
"""Peers that are remembered after the end of their connections."""


class Arrival(NamedTuple):
    """A front end that asks to be attached.

    Attributes:
        server: the one that it has come to.
        peer: its routing id there.
        connection: the file descriptor of its connection there.
        number: how many have been attached before.
        name: as it calls itself, for logs.
        reader: of what it says.
    """

    server: PeerServer[Any]
    peer: bytes
    connection: int
    number: int
    name: str
    reader: wire.Reader[Any]


class PeerSession:
    """A front end that is attached.

    Args:
        max_unread_messages, max_unread_bytes: one that leaves more of either unread is cut off.
    """

    def __init__(self, arrival: Arrival, *, max_unread_messages: int, max_unread_bytes: int) -> None:
        self._server, self.peer, self.connection, self.index, self.name, self.reader = arrival
        self.is_over = False
        self.calls: dict[int, anyio.CancelScope] = {}
        """Those under way."""
        self._max_unread_messages, self._max_unread_bytes = max_unread_messages, max_unread_bytes
        self._writer = wire.Writer()
        self._unread: deque[tuple[int, int]] = deque()
        """(message number, bytes) of what it has not said to have read."""
        self._unread_bytes = 0

    @property
    def num_unread(self) -> int:
        return len(self._unread)

    def send(self, body: wire.WireMessage) -> None:
        """Send a message now; one that does not read what it is sent is cut off.

        Raises:
            TooLarge, TypeError, ValueError, OverflowError, RecursionError: as `wire.Writer.write`.
        """
        if self.is_over:
            return
        frame = self._writer.write(body)
        # Results are few, as calls are, and may be large: they are no sign of a reader that has stalled.
        size = 0 if isinstance(body, wire.Returned) else len(frame)
        self._unread.append((self._writer.number - 1, size))
        self._unread_bytes += size
        try:
            self._server.channel.send_now([self.peer, frame])
        except zmq.Again:
            self._server.cut_off(self, "it said to have read messages that it did not read")
        except zmq.ZMQError:
            self._server.forget(self)
        if not self.is_over and (
            len(self._unread) > self._max_unread_messages or self._unread_bytes > self._max_unread_bytes
        ):
            self._server.cut_off(
                self,
                f"it left {len(self._unread):,} messages ({self._unread_bytes:,} bytes) unread; "
                f"{self._max_unread_messages:,} ({self._max_unread_bytes:,}) are allowed",
            )

    def acknowledge(self, number: int) -> None:
        """It has read the messages up to this number.

        Raises:
            WireError: they were not sent yet.
        """
        if number >= self._writer.number:
            raise WireError(f"message {number} is acknowledged, and was not sent yet")
        while self._unread and self._unread[0][0] <= number:
            self._unread_bytes -= self._unread.popleft()[1]

    def end(self, error: AioEngineError) -> None:
        """Say last words."""
        self.is_over = True
        with contextlib.suppress(zmq.ZMQError):  # it is not there, or does not read
            self._server.channel.send_now([self.peer, self._writer.write(wire.Shutdown(to_fault(error)))])


SessionT = TypeVar("SessionT", bound=PeerSession)


class PeerServer(Generic[SessionT]):
    """The front ends at an address.

    Args:
        address: where to be reached: ``ipc:///path`` or ``tcp://host:port``; port 0 is any.
        what: the server's word for itself, for those that are refused.
        keys: of the clients that may connect, for addresses that other machines can reach.
        kinds: the union of the messages that a front end may send; `Attach`, `Acknowledge` and `Detach` among them.
        begin: makes the session of a front end that attaches, and the first message to it.
        act: acts on a message in the middle of a session; what has no place there it refuses with a `WireError`.
        on_left: called with each session when it is let go, once.
        max_unsent: messages to one front end in its queue: a bound for those that say to have read what they did not.
    Attributes:
        address: as it is reached, once `open` has returned.
        channel: the ROUTER socket.
        sessions: by their peers; those that are over, too, until their connections end: they hold what was not read.
        num_refused: frames that were malformed, foreign or out of turn, by why.
    """

    channel: Channel

    def __init__(
        self,
        address: str,
        *,
        what: str,
        keys: ServerKeys | None,
        worker: TextWorker,
        kinds: Any,
        begin: Callable[[Arrival], tuple[SessionT, wire.WireMessage]],
        act: Callable[[SessionT, Any], Awaitable[None]],
        on_left: Callable[[SessionT], None],
        max_unsent: int,
    ) -> None:
        self.address = address
        self.sessions: dict[bytes, SessionT] = {}
        self.num_refused: Counter[str] = Counter()
        self.is_far = False
        """Whether other users may connect: by tcp, without keys."""
        self._what = what
        self._kinds = kinds
        self._begin = begin
        self._act = act
        self._on_left = on_left
        self._next_reader: wire.Reader[Any] = wire.Reader(kinds)
        """Of the next front end: it reads what those say that are not attached, until one of them begins a session."""
        self._gone: deque[bytes] = deque(maxlen=MAX_GONE)
        """Peers whose connections have ended."""
        self._num_sessions = 0
        self._entrance = Entrance(address, keys, worker, max_unsent=max_unsent, on_end=self._on_connection_end)

    @property
    def attached(self) -> list[SessionT]:
        """The sessions that are not over."""
        return [session for session in self.sessions.values() if not session.is_over]

    async def open(self) -> None:
        """Bind to the address. Front ends that come now are answered by `receive`.

        Raises:
            ConfigError: it cannot be had.
        """
        await self._entrance.open()
        self.channel, self.address, self.is_far = self._entrance.channel, self._entrance.address, self._entrance.is_far

    async def aclose(self) -> None:
        """Close the sockets; idempotent."""
        await self._entrance.aclose()

    def abandon(self) -> None:
        """Close without a word or a wait; from any thread once the loop is gone."""
        self._entrance.abandon()

    # Tasks

    async def receive(self) -> None:
        """Act on what comes, until cancelled."""
        while True:
            for connection, _, peer, *frames in await self.channel.receive():
                await turns_here().take()
                await self._take(connection, bytes(peer), frames)

    async def watch(self) -> None:
        """As `Entrance.watch`."""
        await self._entrance.watch()

    # Messages

    async def _take(self, connection: int, peer: bytes, frames: list[Any]) -> None:
        """Act on a message, or refuse it without harm."""
        session = self.sessions.get(peer)
        if session.is_over if session is not None else peer in self._gone:
            return  # what it said meanwhile is of no account
        reader = session.reader if session is not None else self._next_reader
        try:
            body = reader.read(frames)
            if session is None:
                self._next_reader = wire.Reader(self._kinds)
                self._attach(connection, peer, reader, body)
            elif isinstance(body, wire.Acknowledge):
                session.acknowledge(body.number)
            elif isinstance(body, wire.Detach):
                self._end_session(session, "it has left")
            else:
                await self._act(session, body)
        except wire.OutOfTurn as error:
            self._refuse("out of turn", error)
            if error.is_gap and session is not None:
                self._end_session(session, f"messages of it were lost: {error}")
        except WireError as error:
            self._refuse("malformed", error)

    def _refuse(self, why: str, error: Exception) -> None:
        self.num_refused[why] += 1
        if self.num_refused[why] in (1, 10, 100) or self.num_refused[why] % 1000 == 0:  # a flood is no flood of logs
            logger.warning("refused a frame (%s, %d so far): %s", why, self.num_refused[why], error)

    # Sessions

    def _attach(self, connection: int, peer: bytes, reader: wire.Reader[Any], body: wire.WireMessage) -> None:
        if not isinstance(body, wire.Attach) or connection < 0:
            raise WireError(f"a {type(body).__name__} from a front end that is not attached")
        # Its connection may have the number of one that has just ended, whose session is not to be taken for this one.
        self._entrance.monitor.catch_up()
        refusal = None
        if body.version != wire.PROTOCOL_VERSION:
            refusal = f"this {self._what} speaks version {wire.PROTOCOL_VERSION} of its protocol"
        elif len(self.sessions) >= MAX_SESSIONS:
            refusal = f"{MAX_SESSIONS} front ends are attached already"
        if refusal is not None:
            logger.warning("a front end is refused: %s", refusal)
            with contextlib.suppress(zmq.ZMQError):  # it is gone
                refused = wire.Refused(wire.PROTOCOL_VERSION, refusal)
                self.channel.send_now([peer, wire.Writer().write(refused)])
            return
        arrival = Arrival(self, peer, connection, self._num_sessions, body.name, reader)
        logger.info("front end %d (%r) is attached", arrival.number, arrival.name)
        self._num_sessions += 1
        session, first = self._begin(arrival)
        self.sessions[peer] = session
        session.send(first)

    def _on_connection_end(self, connection: int) -> None:
        for session in [each for each in self.sessions.values() if each.connection == connection]:
            self.forget(session)

    def forget(self, session: SessionT) -> None:
        """A front end's connection has ended; what has come by it is not read any more."""
        self._end_session(session, "its connection is gone")
        self.sessions.pop(session.peer, None)
        self._gone.append(session.peer)

    def cut_off(self, session: SessionT, why: str) -> None:
        """A front end does not read what it is sent."""
        logger.warning("front end %d (%r) is cut off: %s", session.index, session.name, why)
        self._end_session(session, why)

    def _end_session(self, session: SessionT, why: str) -> None:
        """Let go of a front end, with last words. Idempotent."""
        if session.is_over:
            return
        logger.info("front end %d (%r) is let go: %s", session.index, session.name, why)
        session.end(EngineDead(f"the {self._what} let this front end go: {why}"))
        self._on_left(session)

    def end_all(self, error: AioEngineError) -> None:
        """The server has come to its end: all front ends hear last words."""
        for session in self.attached:
            session.end(error)
        self.sessions.clear()
