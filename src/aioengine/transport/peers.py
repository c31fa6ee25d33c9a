"""A server of front ends: one ROUTER socket that they reach, and a session for each that has attached.

What comes is read in its turn, or refused without harm. Nothing here ever waits for a front end: what it leaves unread
is bounded, and one that leaves more is cut off.
"""

from __future__ import annotations

import contextlib
import logging
from abc import ABC, abstractmethod
from collections import Counter, deque
from pathlib import Path
from typing import Any, ClassVar, Generic, NamedTuple, TypeVar

import anyio
import msgspec
import zmq
from anyio.abc import TaskGroup

from aioengine.errors import AioEngineError, ConfigError, EngineDead, InvalidRequest, WireError
from aioengine.processes.turns import turns_here
from aioengine.processes.worker_threads import TextWorker
from aioengine.transport import wire
from aioengine.transport.addresses import Address, check_bind
from aioengine.transport.channel import Channel, Monitor, bind, end_context, make_context
from aioengine.transport.security import ZAP_ENDPOINT, ServerKeys
from aioengine.transport.wire import to_fault

logger = logging.getLogger("aioengine")

MAX_SESSIONS = 256
MAX_GONE = 1024
"""Peers that are remembered after the end of their connections."""

MAX_UNREAD_BYTES = 64 * 2**20
"""A front end that leaves more unread, or more than `PeerServer.max_unread` messages, is cut off."""

MAX_CALLS = 64
"""Control calls of one front end under way."""

LINGER_S = 1.0
"""Longest wait at the end for final messages to reach front ends."""

TCP_HEARTBEAT_MS, TCP_TIMEOUT_MS = 2_000, 15_000
"""ZMQ's own heartbeats find a machine that has gone without closing its connection."""


class Arrival(NamedTuple):
    """A front end that asks to be attached.

    Attributes:
        server: the server that it has come to.
        peer: its routing id there.
        connection: the file descriptor of its connection there.
        number: how many have been attached before.
        name: its own name, for logs.
        reader: of its messages.
    """

    server: PeerServer[Any]
    peer: bytes
    connection: int
    number: int
    name: str
    reader: wire.Reader[Any]


class PeerSession:
    """A front end that is attached."""

    def __init__(self, arrival: Arrival) -> None:
        self._server, self.peer, self.connection, self.index, self.name, self.reader = arrival
        self.is_over = False
        self.calls: dict[int, anyio.CancelScope] = {}
        """Control calls under way."""
        self._writer = wire.Writer()
        self._unread: deque[tuple[int, int]] = deque()
        """(message number, bytes) of each message that it has not acknowledged."""
        self._unread_bytes = 0

    @property
    def num_unread(self) -> int:
        return len(self._unread)

    def send(self, body: wire.WireMessage) -> None:
        """Send a message now; a front end that does not read its messages is cut off.

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
        max_unread = self._server.max_unread
        if not self.is_over and (len(self._unread) > max_unread or self._unread_bytes > MAX_UNREAD_BYTES):
            self._server.cut_off(
                self,
                f"it left {len(self._unread):,} messages ({self._unread_bytes:,} bytes) unread; "
                f"{max_unread:,} ({MAX_UNREAD_BYTES:,}) are allowed",
            )

    def send_returned(self, returned: wire.Returned) -> None:
        """Send the result of a call, or that it cannot be sent."""
        try:
            self.send(returned)
        except wire.TooLarge as too_large:
            self.send(wire.Returned(returned.call_id, fault=to_fault(too_large)))
        except (TypeError, ValueError, OverflowError, RecursionError) as error:
            refusal = InvalidRequest(f"what the call returned is no plain data, and cannot be sent: {error}")
            self.send(wire.Returned(returned.call_id, fault=to_fault(refusal)))

    def acknowledge(self, number: int) -> None:
        """Note that it has read the messages up to this number.

        Raises:
            WireError: they were not sent yet.
        """
        if number >= self._writer.number:
            raise WireError(f"message {number} is acknowledged, and was not sent yet")
        while self._unread and self._unread[0][0] <= number:
            self._unread_bytes -= self._unread.popleft()[1]

    def end(self, error: AioEngineError) -> None:
        """Send the final message."""
        self.is_over = True
        with contextlib.suppress(zmq.ZMQError):  # it is not there, or does not read
            self._server.channel.send_now([self.peer, self._writer.write(wire.Shutdown(to_fault(error)))])


SessionT = TypeVar("SessionT", bound=PeerSession)


class PeerServer(ABC, Generic[SessionT]):
    """A server of front ends at an address.

    Args:
        address: where to be reached: ``ipc:///path`` or ``tcp://host:port``; port 0 is any.
        keys: of the clients that may connect, for addresses that other machines can reach.
    Attributes:
        address: as it is reached, once `open` has returned.
        is_far: whether other users may connect: by tcp, without keys.
        channel: the ROUTER socket; each message comes behind its connection.
        sessions: by their peers; those that are over, too, until their connections end: they hold what was not read.
        num_refused: frames that were malformed, foreign or out of turn, by why.
    """

    kinds: ClassVar[Any]
    """The union of the messages that a front end may send; `Attach`, `Acknowledge`, `Detach` and calls among them."""
    title: ClassVar[str]
    """The server's word for itself, for front ends that are refused."""
    unbounded_calls: ClassVar[tuple[type[Any], ...]] = ()
    """Kinds of calls that are performed beside `MAX_CALLS` others, which may wait for just such a one."""

    max_unread: ClassVar[int] = 4096
    """Messages that a front end may leave unread: minutes of steps."""

    channel: Channel
    _tasks: TaskGroup
    """In which calls are performed."""

    def __init__(self, address: str, *, keys: ServerKeys | None, worker: TextWorker) -> None:
        self.address = self._given_address = address
        self.is_far = False
        self.sessions: dict[bytes, SessionT] = {}
        self.num_refused: Counter[str] = Counter()
        self._keys = keys
        self._worker = worker
        self._next_reader: wire.Reader[Any] = wire.Reader(self.kinds)
        """Reader of the messages of those that are not attached, until one of them begins a session."""
        self._gone: deque[bytes] = deque(maxlen=MAX_GONE)
        """Peers whose connections have ended."""
        self._num_sessions = 0
        self._zap: Channel | None = None
        self._closing = contextlib.ExitStack()
        self._is_bound = False

    # What a server of some kind does

    @abstractmethod
    def begin_session(self, arrival: Arrival) -> tuple[SessionT, wire.WireMessage]:
        """Make the session of a front end that attaches, and the first message to it."""

    @abstractmethod
    async def act_on(self, session: SessionT, body: Any) -> None:
        """Act on a message in the middle of a session that is no call. Raises WireError if it has no place there."""

    @abstractmethod
    def unpack_call(self, raw: msgspec.Raw) -> Any:
        """Read a control call. Raises InvalidRequest if it cannot be performed."""

    @abstractmethod
    async def perform_call(self, session: SessionT, call: Any) -> Any:
        """Perform a control call; whatever this raises, its caller alone gets it."""

    @abstractmethod
    def on_left(self, session: SessionT) -> None:
        """A front end was let go; called once a session."""

    # Its socket

    async def open(self) -> None:
        """Bind to the address. Front ends that come now are answered by `receive`.

        Raises:
            ConfigError: the address is not allowed, or in use.
        """
        has_keys = self._keys is not None
        self._where = await self._worker.run(lambda: check_bind(self._given_address, has_keys=has_keys), None)
        self.is_far = self._where.scheme == "tcp" and not has_keys
        self._context = make_context()
        try:
            self._bind(self._where)
        except (ConfigError, zmq.ZMQError):
            with anyio.CancelScope(shield=True):
                await self.close_sockets()
            raise

    def _bind(self, where: Address) -> None:
        socket = self._context.socket(zmq.ROUTER)
        socket.router_mandatory = True  # else it would drop what a peer has no room for
        socket.sndhwm = 3 * self.max_unread  # a bound for those that acknowledge what they did not read
        socket.maxmsgsize = wire.MAX_BYTES
        socket.ipv6 = where.is_ipv6
        if where.scheme == "tcp":
            socket.heartbeat_ivl, socket.heartbeat_timeout = TCP_HEARTBEAT_MS, TCP_TIMEOUT_MS
            if self._keys is not None:
                self._zap = Channel(self._context.socket(zmq.ROUTER))
                self._closing.callback(self._zap.close)
                self._zap.socket.bind(ZAP_ENDPOINT)
                self._keys.apply_server(socket)
        self.channel = Channel(socket, tells_origin=True)
        self._closing.callback(self.channel.close, LINGER_S)
        self._monitor = Monitor(socket, self._on_connection_end)
        self._closing.callback(self._monitor.close)
        self.address = bind(socket, where)
        self._is_bound = True

    async def close_sockets(self) -> None:
        """Close the sockets; idempotent."""
        if hasattr(self, "_context") and not self._context.closed:
            self._closing.close()
            # Waits for final messages, and for that long at most.
            await end_context(self._context, self._worker)
            if self._where.scheme == "ipc" and self._is_bound:
                await self._worker.run(lambda: Path(self._where.path).unlink(missing_ok=True), None)

    def abandon(self) -> None:
        """Close without a word or a wait; from any thread once the loop is gone."""
        if hasattr(self, "_context") and not self._context.closed:
            self._closing.close()
            self._context.destroy(linger=0)

    # Tasks

    async def receive(self) -> None:
        """Act on what comes, until cancelled."""
        while True:
            for connection, peer, *frames in await self.channel.receive():
                await turns_here().take()
                await self._take(connection, bytes(peer), frames)

    async def watch(self) -> None:
        """Admit those with keys, and note which connections end, until cancelled."""
        async with anyio.create_task_group() as tasks:
            if self._keys is not None and self._zap is not None:
                tasks.start_soon(self._keys.admit, self._zap)
            while True:
                await self._monitor.look()

    # Messages

    async def _take(self, connection: int, peer: bytes, frames: list[Any]) -> None:
        """Act on a message, or refuse it without harm."""
        session = self.sessions.get(peer)
        if session.is_over if session is not None else peer in self._gone:
            return  # its messages do not count any more
        reader = session.reader if session is not None else self._next_reader
        try:
            body = reader.read(frames)
            if session is None:
                self._next_reader = wire.Reader(self.kinds)
                self._attach(connection, peer, reader, body)
                return
            match body:
                case wire.Acknowledge():
                    session.acknowledge(body.number)
                case wire.Detach():
                    self._end_session(session, "it has left")
                case wire.CallControl():
                    self._begin_call(session, body)
                case wire.CancelCall():
                    if body.call_id in session.calls:
                        session.calls[body.call_id].cancel()
                case _:
                    await self.act_on(session, body)
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

    # Calls

    def _begin_call(self, session: SessionT, body: wire.CallControl) -> None:
        """Perform a call in a task of its own, or refuse it."""
        try:
            call = self.unpack_call(body.control)
            if body.call_id in session.calls:
                raise InvalidRequest(f"a call of number {body.call_id} is under way already")
            if len(session.calls) >= MAX_CALLS and not isinstance(call, self.unbounded_calls):
                raise InvalidRequest(f"{MAX_CALLS} control calls of this front end are under way; wait for some")
        except InvalidRequest as refusal:
            session.send(wire.Returned(body.call_id, fault=to_fault(refusal)))
            return
        session.calls[body.call_id] = anyio.CancelScope()
        self._tasks.start_soon(self._run_call, session, body.call_id, call)

    async def _run_call(self, session: SessionT, call_id: int, call: Any) -> None:
        with session.calls[call_id]:
            try:
                returned = wire.Returned(call_id, await self.perform_call(session, call))
            except Exception as error:
                returned = wire.Returned(call_id, fault=to_fault(error))
            finally:
                del session.calls[call_id]
            session.send_returned(returned)

    # Sessions

    @property
    def attached(self) -> list[SessionT]:
        """The sessions that are not over."""
        return [session for session in self.sessions.values() if not session.is_over]

    def _attach(self, connection: int, peer: bytes, reader: wire.Reader[Any], body: wire.WireMessage) -> None:
        if not isinstance(body, wire.Attach) or connection < 0:
            raise WireError(f"a {type(body).__name__} from a front end that is not attached")
        # Its connection may have the number of one that has just ended, whose session is not to be taken for this one.
        self._monitor.catch_up()
        refusal = None
        if body.version != wire.PROTOCOL_VERSION:
            refusal = f"this {self.title} speaks version {wire.PROTOCOL_VERSION} of its protocol"
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
        session, first = self.begin_session(arrival)
        self.sessions[peer] = session
        session.send(first)

    def _on_connection_end(self, connection: int) -> None:
        for session in [each for each in self.sessions.values() if each.connection == connection]:
            self.forget(session)

    def forget(self, session: SessionT) -> None:
        """Let go of a front end whose connection has ended; what has come by it is not read any more."""
        self._end_session(session, "its connection is gone")
        self.sessions.pop(session.peer, None)
        self._gone.append(session.peer)

    def cut_off(self, session: SessionT, why: str) -> None:
        """Let go of a front end that does not read its messages."""
        logger.warning("front end %d (%r) is cut off: %s", session.index, session.name, why)
        self._end_session(session, why)

    def _end_session(self, session: SessionT, why: str) -> None:
        """Let go of a front end, with a final message. Idempotent."""
        if session.is_over:
            return
        logger.info("front end %d (%r) is let go: %s", session.index, session.name, why)
        session.end(EngineDead(f"the {self.title} let this front end go: {why}"))
        self.on_left(session)

    def end_sessions(self, error: AioEngineError) -> None:
        """Send all front ends their final message: the server ends."""
        for session in self.attached:
            session.end(error)
        self.sessions.clear()
