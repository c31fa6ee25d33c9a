"""`EngineServer`: an engine core that other processes use.

Front ends reach it at one address, a ROUTER socket. The server runs the core, follows each sequence for the front end
that asked for it, and ends what a front end has running when that goes, stops reading, or speaks out of turn. Nothing
here ever waits for a front end.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import Counter, deque
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import anyio
import msgspec
import zmq

from aioengine.core.control import FILES, UNBLOCKING_CALLS, AnyControl, DropWeights
from aioengine.core.engine_core import EngineCore
from aioengine.errors import AioEngineError, ConfigError, EngineClosed, EngineDead, InvalidRequest, WireError
from aioengine.metrics import RequestMetrics, StepRecord
from aioengine.text.worker import TextWorker
from aioengine.transport import wire
from aioengine.transport.addresses import check_bind
from aioengine.transport.channel import Channel, Monitor, bind, end_context, make_context
from aioengine.transport.security import ZAP_ENDPOINT, ServerKeys
from aioengine.transport.session import MAX_UNREAD_MESSAGES, Session
from aioengine.transport.wire_errors import to_fault
from aioengine.turns import turns_here

logger = logging.getLogger("aioengine")

PUBLISH_SLICE = 256
"""Tokens handed to followers between the loop's turns: they only note them, in half a microsecond each."""
MAX_SESSIONS = 256
MAX_CALLS = 64
"""Control calls of one front end under way."""
MAX_GONE = 1024
"""Peers that are remembered after the end of their connections."""
MAX_UNSENT = 3 * MAX_UNREAD_MESSAGES
"""Messages to one front end in its queue: a bound for those that say to have read what they did not."""
LINGER_S = 1.0
"""For last words to reach front ends."""
TCP_HEARTBEAT_MS, TCP_TIMEOUT_MS = 2_000, 15_000
"""A machine that is gone says nothing; ZMQ's own heartbeats find that out."""


class EngineServer:
    """Serves an engine core to other processes.

    Args:
        core: not running yet; `serve` runs it.
        address: where to be reached: ``ipc:///path`` or ``tcp://host:port``; port 0 is any.
        model_path: the model's folder, which front ends look for a tokenizer in.
        keys: of the clients that may connect, for addresses that other machines can reach.
    Attributes:
        address: as it is reached, once `open` has returned.
        num_refused: frames that were malformed, foreign or out of turn, by why.
    """

    def __init__(self, core: EngineCore, address: str, *, model_path: Path, keys: ServerKeys | None = None) -> None:
        self.core = core
        self.address = address
        self.num_refused: Counter[str] = Counter()
        self._asked_for = address
        self._model_path = model_path
        self._keys = keys
        self._sessions: dict[bytes, Session] = {}
        """By their peers; those that are over, too, until their connections end: they hold what was not read."""
        self._next_reader: wire.Reader[wire.FromFrontEnd] = wire.Reader(wire.FromFrontEnd)
        """Of the next front end: it reads what those say that are not attached, until one of them begins a session."""
        self._gone: deque[bytes] = deque(maxlen=MAX_GONE)
        """Peers whose connections have ended."""
        self._left: deque[Session] = deque()
        """To be tidied, by a task that stands: one made for each, which a loop's end cancelled before its first turn,
        left a warning about its coroutine."""
        self._has_left = asyncio.Event()
        self._num_sessions = 0
        self._zap: Channel | None = None
        self._closing = contextlib.ExitStack()
        self._is_bound = False
        self._record: StepRecord | None = None
        self._is_marked = False
        self._worker = TextWorker()

    async def open(self) -> None:
        """Bind to the address. Front ends that come now are answered by `serve`.

        Raises:
            ConfigError: it cannot be had.
        """
        self._address = await self._worker.run(
            lambda: check_bind(self._asked_for, has_keys=self._keys is not None), None
        )
        self._context = make_context()
        try:
            socket = self._context.socket(zmq.ROUTER)
            socket.router_mandatory = True  # else it would drop what a peer has no room for
            socket.sndhwm = MAX_UNSENT
            socket.maxmsgsize = wire.MAX_BYTES
            socket.ipv6 = self._address.is_ipv6
            if self._address.scheme == "tcp":
                socket.heartbeat_ivl, socket.heartbeat_timeout = TCP_HEARTBEAT_MS, TCP_TIMEOUT_MS
                if self._keys is not None:
                    self._zap = Channel(self._context.socket(zmq.ROUTER))
                    self._closing.callback(self._zap.close)
                    self._zap.socket.bind(ZAP_ENDPOINT)
                    self._keys.apply_server(socket)
            self._frontend = Channel(socket, tells_connections=True)
            self._closing.callback(self._frontend.close, LINGER_S)
            self._monitor = Monitor(socket, self._on_connection_end)
            self._closing.callback(self._monitor.close)
            self.address = bind(socket, self._address)
            self._is_bound = True
        except (ConfigError, zmq.ZMQError):
            with anyio.CancelScope(shield=True):
                await self.aclose()
            raise

    async def serve(self) -> None:
        """Run the core and serve it until cancelled, or until the core dies; then everything is closed.

        Every front end hears the end: `EngineDead` with what the core died of, or that the engine was closed.
        """
        if not self.core.config.log_stats_interval_s:
            self.core.observers.stop_metrics()  # each front end has its own, made of the same records
        self.core.observers.add(self)
        self.core.on_published = self._flush
        self.core.publish_slice = PUBLISH_SLICE
        try:
            async with anyio.create_task_group() as self._tasks:
                if self._keys is not None and self._zap is not None:
                    self._tasks.start_soon(self._keys.admit, self._zap)
                self._tasks.start_soon(self._or_break, self._receive)
                self._tasks.start_soon(self._watch)
                self._tasks.start_soon(self._beat)
                self._tasks.start_soon(self._or_break, self._tidy)
                await self.core.run()
                self._tasks.cancel_scope.cancel()
        finally:
            self._end_sessions()
            with anyio.CancelScope(shield=True), anyio.move_on_after(2 * LINGER_S):
                await self.aclose()

    async def aclose(self) -> None:
        """Close the sockets; idempotent. `serve` does it by itself."""
        if hasattr(self, "_context") and not self._context.closed:
            self._closing.close()
            # Waits for last words, and for that long at most.
            await end_context(self._context, self._worker)
            if self._address.scheme == "ipc" and self._is_bound:
                await self._worker.run(lambda: Path(self._address.path).unlink(missing_ok=True), None)
        await self._worker.aclose()

    # Tasks

    async def _or_break(self, task: Callable[[], Awaitable[None]]) -> None:
        """Run a task that calls the core; what it raises is what the core dies of, for all to hear."""
        try:
            await task()
        except Exception as error:
            self.core.break_down(error)

    async def _receive(self) -> None:
        while True:
            for connection, peer, *frames in await self._frontend.receive():
                await turns_here().take()
                await self._take(connection, bytes(peer), frames)

    async def _watch(self) -> None:
        while True:
            await self._monitor.look()

    async def _beat(self) -> None:
        interval_s = self.core.config.heartbeat_interval_s
        while True:
            beat = msgspec.structs.replace(self.core.beat(), num_refused=self.num_refused.total())
            for session in list(self._sessions.values()):
                session.beat(beat)
            await anyio.sleep(interval_s)

    async def _call(self, session: Session, call_id: int, control: AnyControl) -> None:
        """Perform a control call and send its caller what it brought."""
        with session.calls[call_id]:
            try:
                returned = wire.Returned(call_id, await self.core.call(control))
                session.note_transfer(control)
            except Exception as error:  # whatever it was, its caller alone hears it
                returned = wire.Returned(call_id, fault=to_fault(error))
            finally:
                del session.calls[call_id]
            _send_returned(session, returned)

    # Messages

    async def _take(self, connection: int, peer: bytes, frames: list[Any]) -> None:
        """Act on a message, or refuse it without harm."""
        session = self._sessions.get(peer)
        if session.is_over if session is not None else peer in self._gone:
            return  # what it said meanwhile is of no account
        reader = session.reader if session is not None else self._next_reader
        try:
            body = reader.read(frames)
            if session is None:
                self._next_reader = wire.Reader(wire.FromFrontEnd)
                self._attach(connection, peer, reader, body)
            elif isinstance(body, wire.AddRequest):
                await session.add(body)
            else:
                self._act(session, body)
        except wire.OutOfTurn as error:
            self._refuse(peer, "out of turn", error)
            if error.is_gap and session is not None:
                self._end_session(session, f"messages of it were lost: {error}")
        except WireError as error:
            self._refuse(peer, "malformed", error)

    def _act(self, session: Session, body: wire.FromFrontEnd) -> None:
        match body:
            case wire.Finish():
                session.finish(body)
            case wire.Allow():
                follower = session.followers.get(body.number)
                if follower is not None:
                    follower.allow(body.num_allowed)
            case wire.Acknowledge():
                session.acknowledge(body.number)
            case wire.CallControl():
                self._begin_call(session, body)
            case wire.CancelCall():
                if body.call_id in session.calls:
                    session.calls[body.call_id].cancel()
            case wire.Detach():
                self._end_session(session, "it has left")
            case _:
                raise WireError(f"a {type(body).__name__} in the middle of a session")

    def _begin_call(self, session: Session, call: wire.CallControl) -> None:
        try:
            control = wire.unpack_control(call.control)
            self._check_call(session, call.call_id, control)
        except InvalidRequest as refusal:
            session.send(wire.Returned(call.call_id, fault=to_fault(refusal)))
            return
        session.calls[call.call_id] = anyio.CancelScope()
        self._tasks.start_soon(self._call, session, call.call_id, control)

    def _check_call(self, session: Session, call_id: int, control: AnyControl) -> None:
        if call_id in session.calls:
            raise InvalidRequest(f"a call of number {call_id} is under way already")
        if len(session.calls) >= MAX_CALLS and not isinstance(control, UNBLOCKING_CALLS):
            raise InvalidRequest(f"{MAX_CALLS} control calls of this front end are under way already; wait for some")
        if isinstance(control, FILES) and self._address.scheme == "tcp" and self._keys is None:
            raise InvalidRequest(
                "any user of the machine can connect to this address, and this call reads or writes files as the "
                "engine's user: serve at an ipc:// address, or with keys (`aioengine keys`)"
            )

    def _refuse(self, peer: bytes, why: str, error: Exception) -> None:
        self.num_refused[why] += 1
        if self.num_refused[why] in (1, 10, 100) or self.num_refused[why] % 1000 == 0:  # a flood is no flood of logs
            logger.warning("refused a frame (%s, %d so far): %s", why, self.num_refused[why], error)

    # Sessions

    def _attach(
        self, connection: int, peer: bytes, reader: wire.Reader[wire.FromFrontEnd], body: wire.FromFrontEnd
    ) -> None:
        if not isinstance(body, wire.Attach) or connection < 0:
            raise WireError(f"a {type(body).__name__} from a front end that is not attached")
        # Its connection may have the number of one that has just ended, whose session is not to be taken for this one.
        self._monitor.catch_up()
        refusal = None
        if body.version != wire.PROTOCOL_VERSION:
            refusal = f"this engine speaks version {wire.PROTOCOL_VERSION} of its protocol"
        elif len(self._sessions) >= MAX_SESSIONS:
            refusal = f"{MAX_SESSIONS} front ends are attached already"
        if refusal is not None:
            logger.warning("a front end is refused: %s", refusal)
            with contextlib.suppress(zmq.ZMQError):  # it is gone
                refused = wire.Refused(wire.PROTOCOL_VERSION, refusal)
                self._frontend.send_now([peer, wire.Writer().write(refused)])
            return
        core = self.core
        session = Session(
            *(core, self._worker, self._frontend, peer, connection),
            index=self._num_sessions,
            name=body.name,
            reader=reader,
            mark=self._mark,
            cut_off=self._cut_off,
            forget=self._forget,
        )
        self._num_sessions += 1
        self._sessions[peer] = session
        logger.info("front end %d (%r) is attached", session.index, session.name)
        attached = wire.Attached(
            version=wire.PROTOCOL_VERSION,
            config=msgspec.structs.asdict(core.config),
            info=core.info,
            eos_token_ids=core.eos_token_ids,
            model_path=str(self._model_path),
            first_beat=core.beat(),
            stats=core.stats(),
        )
        session.send(attached)

    def _on_connection_end(self, connection: int) -> None:
        for session in [each for each in self._sessions.values() if each.connection == connection]:
            self._forget(session)

    def _forget(self, session: Session) -> None:
        """A front end's connection has ended; what has come by it is not read any more."""
        self._end_session(session, "its connection is gone")
        self._sessions.pop(session.peer, None)
        self._gone.append(session.peer)

    def _cut_off(self, session: Session, why: str) -> None:
        """A front end does not read what it is sent."""
        logger.warning("front end %d (%r) is cut off: %s", session.index, session.name, why)
        self._end_session(session, why)

    def _end_session(self, session: Session, why: str) -> None:
        """Let go of a front end, with last words; what it has running ends. Idempotent."""
        if session.is_over:
            return
        logger.info("front end %d (%r) is let go: %s", session.index, session.name, why)
        session.end(EngineDead(f"the engine let this front end go: {why}"))
        self._left.append(session)
        self._has_left.set()

    def _end_sessions(self) -> None:
        """The core has ended, and all sequences with it: hand out what is left, and last words."""
        end: AioEngineError = self.core.copy_death() if self.core.death is not None else EngineClosed("it was closed")
        for session in list(self._sessions.values()):
            session.flush()
            if not session.is_over:
                session.end(end)
        self._sessions.clear()

    async def _tidy(self) -> None:
        """Put away what front ends have left: their sequences, and weights that they did not commit."""
        while True:
            await self._has_left.wait()
            self._has_left.clear()
            while self._left:
                session = self._left.popleft()
                for follower in list(session.followers.values()):
                    await turns_here().take()
                    self.core.finish(follower.sequence, "abort")
                for transfer in session.transfers:
                    with contextlib.suppress(AioEngineError):  # the engine is ending, and they with it
                        await self.core.call(DropWeights(transfer))

    # Sending

    def _mark(self) -> None:
        """There is news beside a step's: send it at the end of this turn of the loop, or with the step."""
        if not self._is_marked and not self.core.is_publishing:
            self._is_marked = True
            asyncio.get_running_loop().call_soon(self._flush_marked)

    def _flush_marked(self) -> None:
        if not self.core.is_publishing:  # else it goes with the step
            self._flush()

    def _flush(self) -> None:
        self._is_marked = False
        record, self._record = self._record, None
        for session in list(self._sessions.values()):
            session.flush(record)

    def on_step(self, record: StepRecord) -> None:
        """As an `Observer`: the step whose tokens are handed out next."""
        self._record = record

    def on_request(self, metrics: RequestMetrics, finish_reasons: tuple[str, ...]) -> None:
        """As an `Observer`: requests end in the processes where they were made."""


def _send_returned(session: Session, returned: wire.Returned) -> None:
    try:
        session.send(returned)
    except wire.TooLarge as too_large:
        session.send(wire.Returned(returned.call_id, fault=to_fault(too_large)))
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        refusal = InvalidRequest(f"what the call returned is no plain data, and cannot be sent: {error}")
        session.send(wire.Returned(returned.call_id, fault=to_fault(refusal)))
