"""`EngineServer`: an engine core that other processes use.

Front ends reach it at one address, a ROUTER socket; each is given an output socket of its own (PUSH) that admits one
connection. The server runs the core, follows each sequence for the front end that asked for it, and ends what a front
end has running when that goes, stops reading, or speaks out of turn. Nothing here ever waits for a front end.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import secrets
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import anyio
import msgspec
import zmq
from zmq.utils import z85

from aioengine.core.control import FILES, TASKS, UNBLOCKING_CALLS, AnyControl, DropWeights
from aioengine.core.engine_core import EngineCore
from aioengine.errors import AioEngineError, ConfigError, EngineClosed, EngineDead, InvalidRequest, WireError
from aioengine.metrics import RequestMetrics, StepRecord
from aioengine.text.worker import TextWorker
from aioengine.transport import wire
from aioengine.transport.addresses import check_bind
from aioengine.transport.channel import Channel, Monitor, bind, end_context, make_context
from aioengine.transport.security import ZAP_ENDPOINT, Gate, ServerKeys, enforce
from aioengine.transport.session import CutOff, Session
from aioengine.transport.wire_errors import to_fault
from aioengine.turns import turns_here

logger = logging.getLogger("aioengine")

PUBLISH_SLICE = 256
"""Tokens handed to followers between the loop's turns: they only note them, in half a microsecond each."""
MAX_SESSIONS = 256
MAX_CALLS = 64
"""Control calls of one front end under way."""
MAX_READERS = 1024
"""Peers that are remembered for what they have said, attached or not."""
CONNECT_TIMEOUT_S = 10.0
"""For a front end to connect to its output socket."""
LINGER_S = 1.0
"""For last words to reach front ends."""
REQUESTS_DOMAIN = "requests"
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
        self._gate = Gate()
        self._sessions: dict[bytes, Session] = {}
        self._readers: dict[bytes, wire.Reader[wire.FromFrontEnd] | None] = {}
        """Of peers that are not attached, the latest ones; None: it has been let go."""
        self._num_sessions = 0
        self._channels: list[Channel] = []
        self._files: set[str] = set()
        """Of the sockets that were bound and are not put away yet; for ipc."""
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
            self._zap = self._make_channel(self._context.socket(zmq.ROUTER))
            self._zap.socket.bind(ZAP_ENDPOINT)
            socket = self._make_socket(zmq.ROUTER)
            if self._keys is not None and self._address.scheme == "tcp":
                for key in self._keys.clients.values():
                    self._gate.allow(REQUESTS_DOMAIN, b"CURVE", key)
                self._keys.apply_server(socket, REQUESTS_DOMAIN)
            self.address = bind(socket, self._address)
            self._files.add(self._address.path)
            self._frontend = self._make_channel(socket, tells_users=True)
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
                self._tasks.start_soon(self._answer_zap)
                self._tasks.start_soon(self._receive)
                self._tasks.start_soon(self._beat)
                await self.core.run()
                self._tasks.cancel_scope.cancel()
        finally:
            self._end_sessions()
            with anyio.CancelScope(shield=True), anyio.move_on_after(2 * LINGER_S):
                await self.aclose()

    async def aclose(self) -> None:
        """Close the sockets; idempotent. `serve` does it by itself."""
        if hasattr(self, "_context") and not self._context.closed:
            for channel in self._channels:
                channel.close(LINGER_S)
            # Waits for last words, and for that long at most.
            await end_context(self._context, self._worker)
            if self._address.scheme == "ipc":
                for path in self._files:
                    await self._worker.run(_remove, None, path)
        await self._worker.aclose()

    # Tasks

    async def _receive(self) -> None:
        while True:
            for user, peer, *frames in await self._frontend.receive():
                await turns_here().take()
                await self._take(user, bytes(peer), frames)

    async def _answer_zap(self) -> None:
        while True:
            for peer, delimiter, *request in await self._zap.receive():
                self._zap.send([peer, delimiter, *self._gate.decide(request)])

    async def _beat(self) -> None:
        interval_s = self.core.config.heartbeat_interval_s
        while True:
            beat = msgspec.structs.replace(self.core.beat(), num_refused=self.num_refused.total())
            self._send_all(lambda session, beat=beat: session.beat(beat))  # type: ignore[misc]
            await anyio.sleep(interval_s)

    async def _watch(self, session: Session) -> None:
        """Follow a front end's connection, and end its session when that ends."""
        monitor = session.monitor
        with anyio.move_on_after(CONNECT_TIMEOUT_S):
            while not (monitor.has_connected or session.is_over):
                await monitor.look()
            session.is_connected = monitor.has_connected
        while session.is_connected and not (monitor.is_gone or session.is_over):
            await monitor.look()
        why = "its connection is gone" if session.is_connected else "it did not connect to its outputs"
        self._end_session(session, why, is_there=False)

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
            self._guarded(session, lambda session: _send_returned(session, returned))

    # Messages

    async def _take(self, user: bytes, peer: bytes, frames: list[Any]) -> None:
        """Act on a message, or refuse it without harm."""
        session = self._sessions.get(peer)
        if session is None and peer not in self._readers:
            self._remember(peer, wire.Reader(wire.FromFrontEnd))
        reader = session.reader if session is not None else self._readers[peer]
        if reader is None:
            return  # what it said meanwhile is of no account
        try:
            body, arrays = reader.read(frames)
            if session is None:
                self._attach(user, peer, reader, body)
            elif isinstance(body, wire.AddRequest):
                await session.add(body, arrays[0])
            else:
                self._act(session, body, arrays)
        except wire.OutOfTurn as error:
            self._refuse(peer, "out of turn", error)
            if error.is_gap and session is not None:
                self._end_session(session, f"messages of it were lost: {error}")
        except WireError as error:
            self._refuse(peer, "malformed", error)

    def _act(self, session: Session, body: wire.FromFrontEnd, arrays: wire.Arrays) -> None:
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
                self._begin_call(session, body, arrays)
            case wire.CancelCall():
                if body.call_id in session.calls:
                    session.calls[body.call_id].cancel()
            case wire.Detach():
                self._end_session(session, "it has left", is_there=False)
            case _:
                raise WireError(f"a {type(body).__name__} in the middle of a session")

    def _begin_call(self, session: Session, call: wire.CallControl, arrays: wire.Arrays) -> None:
        try:
            control = wire.unpack_control(call.control, arrays)
            self._check_call(session, call.call_id, control)
        except InvalidRequest as refusal:
            refused = wire.Returned(call.call_id, fault=to_fault(refusal))
            self._guarded(session, lambda session: session.send(refused))
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

    def _remember(self, peer: bytes, reader: wire.Reader[wire.FromFrontEnd] | None) -> None:
        """Forgotten peers begin anew, and have nothing to lose."""
        if len(self._readers) >= MAX_READERS:
            del self._readers[next(iter(self._readers))]
        self._readers[peer] = reader

    def _attach(
        self, user: bytes, peer: bytes, reader: wire.Reader[wire.FromFrontEnd], body: wire.FromFrontEnd
    ) -> None:
        del self._readers[peer]  # whatever comes of it, the next one begins anew
        if not isinstance(body, wire.Attach):
            raise WireError(f"a {type(body).__name__} from a front end that is not attached")
        try:
            if body.version != wire.PROTOCOL_VERSION:
                raise ConfigError(f"this engine speaks version {wire.PROTOCOL_VERSION} of its protocol")
            if len(self._sessions) >= MAX_SESSIONS:
                raise ConfigError(f"{MAX_SESSIONS} front ends are attached already")
            try:
                session = self._open_session(user, peer, reader, body.name)
            except (zmq.ZMQError, ConfigError) as error:  # no file descriptors are left: the attached ones go on
                raise ConfigError(f"another front end cannot be served now: {error}") from error
        except ConfigError as error:
            logger.warning("a front end is refused: %s", error)
            self._reply(peer, wire.Refused(wire.PROTOCOL_VERSION, str(error)))
        else:
            self._sessions[peer] = session
            self._tasks.start_soon(self._watch, session)
            logger.info("front end %d (%r) is attached", session.index, session.name)

    def _open_session(self, user: bytes, peer: bytes, reader: wire.Reader[wire.FromFrontEnd], name: str) -> Session:
        index, core = self._num_sessions, self.core
        self._num_sessions += 1
        domain, password = f"outputs-{index}", secrets.token_hex(16)
        socket = self._make_socket(zmq.PUSH)
        if self._keys is not None and self._address.scheme == "tcp":
            self._keys.apply_server(socket, domain)
            self._gate.allow(domain, b"CURVE", z85.decode(user), times=1)
        else:
            socket.plain_server = True
            enforce(socket, domain)
            self._gate.allow(domain, b"PLAIN", domain.encode(), password.encode(), times=1)
        beside = self._address.beside(f".{index}.out")
        with contextlib.ExitStack() as undone:
            undone.callback(self._gate.forget, domain)
            undone.callback(socket.close)
            monitor = Monitor(socket)
            undone.callback(monitor.close)
            bound = bind(socket, beside)
            undone.pop_all()
        if beside.scheme == "ipc":
            self._files.add(beside.path)
        self._reply(
            peer,
            wire.Attached(
                version=wire.PROTOCOL_VERSION,
                client_index=index,
                output_address=bound,
                username=domain,
                password=password,
                config=msgspec.structs.asdict(core.config),
                info=core.info,
                eos_token_ids=core.eos_token_ids,
                model_path=str(self._model_path),
                supported_tasks=TASKS,
                first_beat=core.beat(),
                pid=os.getpid(),
                stats=core.stats(),
            ),
        )
        return Session(core, self._worker, peer, index, name, reader, Channel(socket), monitor, self._mark)

    def _end_session(self, session: Session, why: str, *, is_there: bool = True) -> None:
        """Let go of a front end, with last words if it is there; what it has running ends. Idempotent."""
        if session.is_over:
            return
        del self._sessions[session.peer]
        self._remember(session.peer, None)
        logger.info("front end %d (%r) is let go: %s", session.index, session.name, why)
        session.end(EngineDead(f"the engine let this front end go: {why}"), linger_s=LINGER_S if is_there else 0.0)
        self._gate.forget(f"outputs-{session.index}")
        self._tasks.start_soon(self._tidy, session)

    def _end_sessions(self) -> None:
        """The core has ended, and all sequences with it: hand out what is left, and last words."""
        end: AioEngineError = self.core.copy_death() if self.core.death is not None else EngineClosed("it was closed")
        for session in self._sessions.values():
            with contextlib.suppress(CutOff):  # it hears the end next
                session.flush()
            session.end(end, linger_s=LINGER_S)
        self._sessions.clear()

    async def _tidy(self, session: Session) -> None:
        """Put away what a front end has left: its sequences, its socket's file, and weights that it did not commit."""
        for follower in list(session.followers.values()):
            await turns_here().take()
            self.core.finish(follower.sequence, "abort")
        if self._address.scheme == "ipc":
            path = f"{self._address.path}.{session.index}.out"
            await self._worker.run(_remove, None, path)
            self._files.discard(path)
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
        self._send_all(lambda session: session.flush(record))

    def on_step(self, record: StepRecord) -> None:
        """As an `Observer`: the step whose tokens are handed out next."""
        self._record = record

    def on_request(self, metrics: RequestMetrics, finish_reasons: tuple[str, ...]) -> None:
        """As an `Observer`: requests end in the processes where they were made."""

    def _send_all(self, send: Callable[[Session], None]) -> None:
        for session in list(self._sessions.values()):
            self._guarded(session, send)

    def _guarded(self, session: Session, send: Callable[[Session], None]) -> None:
        """Send to a front end, and cut it off if it does not read."""
        try:
            send(session)
        except CutOff as error:
            logger.warning("front end %d (%r) is cut off: %s", session.index, session.name, error)
            self._end_session(session, str(error))

    def _reply(self, peer: bytes, body: wire.WireMessage) -> None:
        self._frontend.send([peer, *wire.Writer().write(body)])

    def _make_channel(self, socket: zmq.Socket[bytes], *, tells_users: bool = False) -> Channel:
        channel = Channel(socket, tells_users=tells_users)
        self._channels.append(channel)
        return channel

    def _make_socket(self, kind: int) -> zmq.Socket[bytes]:
        socket = self._context.socket(kind)
        socket.maxmsgsize = wire.MAX_FRAME_BYTES
        socket.ipv6 = self._address.is_ipv6
        if self._address.scheme == "tcp":
            socket.heartbeat_ivl, socket.heartbeat_timeout = TCP_HEARTBEAT_MS, TCP_TIMEOUT_MS
        return socket


def _send_returned(session: Session, returned: wire.Returned) -> None:
    try:
        session.send(returned)
    except wire.TooLarge as too_large:
        session.send(wire.Returned(returned.call_id, fault=to_fault(too_large)))
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        refusal = InvalidRequest(f"what the call returned is no plain data, and cannot be sent: {error}")
        session.send(wire.Returned(returned.call_id, fault=to_fault(refusal)))


def _remove(path: str) -> None:
    Path(path).unlink(missing_ok=True)
