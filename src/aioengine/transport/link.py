"""A front end's connection to an engine server, and the control calls that it makes there."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from typing import Any, TypeVar

import anyio
import msgspec
import zmq

from aioengine.core.control import UNBLOCKING_CALLS
from aioengine.errors import AioEngineError, ConfigError, EngineClosed, EngineDead, WireError
from aioengine.processes.worker_threads import TextWorker
from aioengine.transport import wire
from aioengine.transport.addresses import Address, NoServer, check_connect
from aioengine.transport.channel import Channel, Context, Monitor, end_context, make_context
from aioengine.transport.security import ClientKeys
from aioengine.transport.wire import Fault, to_error

LINGER_S = 0.2
"""For a farewell to reach the engine, which would notice without it, too."""

MAX_CALLS = 32
"""Control calls under way; further ones wait for their turn."""

Answer = TypeVar("Answer", bound=wire.WireMessage)

NEVER_MS = 24 * 3600 * 1000
"""Longer than a link lives after it was cut."""


class Link:
    """A session's socket. It never reconnects: what was lost in between could not be known.

    Args:
        kinds: the union of the messages that may come.
    Attributes:
        channel: a DEALER socket; for one task to receive from.
        monitor: of it.
        reader: of what comes by it.
    """

    channel: Channel
    monitor: Monitor

    def __init__(self, worker: TextWorker, kinds: Any = wire.FromEngine) -> None:
        self._worker = worker
        self._context: Context | None = None
        self._writer = wire.Writer()
        self.reader: wire.Reader[Any] = wire.Reader(kinds)

    async def attach(
        self, address: str, keys: ClientKeys | None, answer: type[Answer], *, name: str, timeout_s: float
    ) -> Answer:
        """Reach a server and attach to it, which it answers by such a message.

        Raises:
            ConfigError: the address is not allowed, or no socket can be had.
            EngineDead: no engine serves there, or none of this version, or it does not answer in time.
        """
        try:
            where = await self._worker.run(lambda: check_connect(address, has_keys=keys is not None), None)
        except NoServer as nowhere:
            raise EngineDead(str(nowhere)) from None
        with anyio.move_on_after(timeout_s):
            self._context = make_context()
            try:
                socket = make_dealer(self._context, where, keys)
                # Never, that is. With -1 ZMQ drops a connection that was cut together with what has come by it and was
                # not read yet, the final message above all.
                socket.reconnect_ivl = NEVER_MS
                self.monitor = Monitor(socket)
                self.channel = Channel(socket)
                socket.connect(str(where))
            except zmq.ZMQError as error:
                raise ConfigError(f"cannot connect to {address}: {error.strerror}") from None
            return await self._attach(where, keys, answer, name)
        raise EngineDead(f"no engine answers at {address} within {timeout_s:g} s; is an engine of this version there?")

    def send(self, body: wire.WireMessage) -> None:
        """Send a message, now or as soon as the socket takes it. What may lie there is bounded by what is live."""
        self.channel.send([self._writer.write(body)])

    async def aclose(self) -> None:
        """Send a farewell and close; idempotent."""
        if self._context is None or self._context.closed:
            return
        linger_s = 0.0
        if hasattr(self, "channel") and not (self.channel.socket.closed or self.monitor.is_gone):
            self.send(wire.Detach())
            linger_s = LINGER_S
        self._close_socket(linger_s)
        await end_context(self._context, self._worker)

    def abandon(self) -> None:
        """Close without a word or a wait; from any thread once the loop is gone."""
        if self._context is not None and not self._context.closed:
            self._close_socket(0.0)
            self._context.destroy(linger=0)

    def _close_socket(self, linger_s: float) -> None:
        if hasattr(self, "monitor"):
            self.monitor.close()
        if hasattr(self, "channel"):
            self.channel.close(linger_s)

    async def _attach(self, where: Address, keys: ClientKeys | None, answer: type[Answer], name: str) -> Answer:
        self.send(wire.Attach(wire.PROTOCOL_VERSION, name))
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self._wake_if_refused)
            messages = await self.channel.receive(1)
            tasks.cancel_scope.cancel()
        if not messages:
            problem = ", or it needs keys" if keys is None else ", or not with these keys"
            raise EngineDead(f"no engine serves at {where}{'' if where.scheme == 'ipc' else problem}")
        try:
            body = self.reader.read(messages[0])
        except WireError as error:
            raise EngineDead(f"what answers is no engine of this version: {error}") from None
        if isinstance(body, wire.Refused):
            raise EngineDead(f"the engine at {where} does not serve this front end: {body.reason}")
        if not isinstance(body, answer):
            raise EngineDead(f"what answers at {where} is no engine of this version")
        return body

    async def _wake_if_refused(self) -> None:
        while not (self.monitor.is_refused or self.monitor.is_gone):
            await self.monitor.look()
        self.channel.wake()


def make_dealer(context: Context, where: Address, keys: ClientKeys | None) -> zmq.Socket[bytes]:
    """A socket to connect to an address with."""
    socket = context.socket(zmq.DEALER)
    socket.maxmsgsize = wire.MAX_BYTES
    socket.ipv6 = where.is_ipv6
    if keys is not None and where.scheme == "tcp":
        keys.apply_client(socket)
    return socket


class ControlCalls:
    """Control calls that a front end has made, each until the engine answers it."""

    def __init__(self, link: Link) -> None:
        self._link = link
        self._returned: dict[int, asyncio.Future[Any]] = {}
        self._num_sent = 0
        self._turns = anyio.Semaphore(MAX_CALLS, fast_acquire=True)
        self._end: Callable[[], AioEngineError] | None = None
        """The error of calls that come after the engine's end."""

    async def call(self, control: msgspec.Struct) -> Any:
        """As `RemoteCore.call`."""
        packed = wire.pack_control(control)  # at once: a bad argument is refused now, and none is read later
        # The holders of all turns may wait for just this one.
        async with contextlib.nullcontext() if isinstance(control, UNBLOCKING_CALLS) else self._turns:
            if self._end is not None:
                raise self._end()
            returned: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
            call_id = self._send(packed)
            self._returned[call_id] = returned
            try:
                return await returned
            except asyncio.CancelledError:
                if self._end is None:
                    self._link.send(wire.CancelCall(call_id))
                raise
            finally:
                self._returned.pop(call_id, None)

    def send(self, control: msgspec.Struct) -> None:
        """Send a call whose answer is not awaited."""
        self._send(wire.pack_control(control))

    def _send(self, packed: msgspec.Raw) -> int:
        self._num_sent += 1
        self._link.send(wire.CallControl(self._num_sent, packed))
        return self._num_sent

    def on_returned(self, body: wire.Returned) -> None:
        """The engine has answered a call."""
        returned = self._returned.pop(body.call_id, None)
        if returned is None or returned.done():
            return
        if body.fault is None:
            returned.set_result(body.result)
        else:
            error = to_error(body.fault)
            returned.set_exception(death_of(body.fault) if isinstance(error, EngineClosed) else error)

    def end_all(self, error: Callable[[], AioEngineError]) -> None:
        """The engine has ended: calls under way, and those that wait for their turn, raise ``error``."""
        self._end = error
        for returned in self._returned.values():
            if not returned.done():
                returned.set_exception(error())
        self._returned.clear()


def death_of(fault: Fault) -> EngineDead:
    """The error for this side when an engine has ended: this side has not closed it."""
    error = to_error(fault)
    if isinstance(error, EngineDead):
        return error
    return EngineDead(f"the engine has ended: {error}")
