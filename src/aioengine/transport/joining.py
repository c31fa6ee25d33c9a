"""An engine's handshakes with those that it shakes hands with: its parent, and a front end that it joins.

A parent is there. A front end of another machine may come later than its engines, and be gone for a while: an engine
waits for it, and says HELLO again when the connection has ended, with its model loaded.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import anyio

from aioengine._version import __version__
from aioengine.errors import AioEngineError, ConfigError, EngineDead, WireError
from aioengine.processes.worker_threads import TextWorker
from aioengine.transport.addresses import NoServer, check_connect
from aioengine.transport.channel import Channel, Context, Monitor, end_context, make_context
from aioengine.transport.entrance import LINGER_S, TCP_HEARTBEAT_MS, TCP_TIMEOUT_MS
from aioengine.transport.handshake import (
    HELLO_TIMEOUT_S,
    Goodbye,
    Hello,
    Init,
    Ready,
    ToEngine,
    TurnedAway,
    check_init,
    merge_inits,
)
from aioengine.transport.link import NEVER_MS, make_dealer
from aioengine.transport.security import ClientKeys
from aioengine.transport.wire import PROTOCOL_VERSION, Reader, WireMessage, Writer

logger = logging.getLogger("aioengine")

JOIN_TIMEOUT_S = 600.0
"""For a front end to be there."""

RETRY_S = 0.25
"""Between two looks for a front end that is not there."""

MAX_CUT_SHORT = 8
"""Connections in a row that a front end ends at their beginning: by then it does not end itself."""


class NoFrontEnd(EngineDead):
    """The front end that an engine is to join is not there, and was waited for."""


class Endpoint(NamedTuple):
    """A process to shake hands with.

    Attributes:
        rank: which engine to say HELLO as; -1: any.
        token: what it expects; empty where keys are the proof.
        is_local: whether this engine is a child of its machine.
        timeout_s: how long to wait for a front end that is not there, at first and after it was lost.
    """

    address: str
    rank: int = -1
    token: str = ""
    is_local: bool = True
    keys: ClientKeys | None = None
    timeout_s: float = JOIN_TIMEOUT_S


class Handshake:
    """With one of them."""

    def __init__(self, endpoint: Endpoint, context: Context, worker: TextWorker) -> None:
        self._endpoint = endpoint
        self._index = endpoint.rank
        self._context = context
        self._worker = worker
        self._channel: Channel | None = None
        self._monitor: Monitor | None = None
        self._num_cut_short = 0
        self._init: Init | None = None
        self._ready: Ready | None = None

    async def greet(self) -> Init:
        """Say HELLO, and wait for the answer; a front end that is not there is waited for.

        Raises:
            ConfigError: the address is not allowed, or this engine is not admitted there.
            NoFrontEnd: it is not there.
            EngineDead: it turned this engine away, or did not answer in time.
        """
        self._init = await (self._say_hello() if self._endpoint.is_local else self._join())
        return self._init

    def tell(self, body: WireMessage) -> None:
        """Say something; where the connection is lost, only that it serves is said again."""
        if isinstance(body, Ready):
            self._ready = body
        if self._channel is not None:
            self._channel.send([self._writer.write(body)])

    async def hold(self) -> Goodbye:
        """Stay with a front end until it says Goodbye, whatever becomes of the connection.

        Raises:
            NoFrontEnd: it was gone for too long.
            ConfigError: it has turned this engine away, which differs from its other ones.
        """
        assert self._init is not None
        self._index = self._init.index
        while (said := await self._listen()) is None:
            logger.warning("the connection to the front end at %s has ended; looking for it", self._endpoint.address)
            init = await self._rejoin()
            if (init.index, init.config) != (self._init.index, self._init.config):
                return Goodbye("the front end is another one, and asks for another config", is_wanted_again=True)
            if self._ready is not None:
                self.tell(self._ready)
        if isinstance(said, TurnedAway):
            raise ConfigError(f"this engine was turned away: {said.reason}")
        return said

    def close(self, linger_s: float = 0.0) -> None:
        """Idempotent."""
        if self._monitor is not None:
            self._monitor.close()
        if self._channel is not None:
            self._channel.close(linger_s)

    async def _join(self) -> Init:
        address, timeout_s = self._endpoint.address, self._endpoint.timeout_s
        has_said = False
        with anyio.move_on_after(timeout_s):
            while True:
                try:
                    return await self._say_hello()
                except NoServer:
                    if not has_said:
                        logger.info("waiting for a front end at %s, for %g s at most", address, timeout_s)
                        has_said = True
                    await anyio.sleep(RETRY_S)
        raise NoFrontEnd(f"no front end was at {address} within {timeout_s:g} s")

    async def _rejoin(self) -> Init:
        reason: AioEngineError | None = None
        with anyio.move_on_after(self._endpoint.timeout_s):
            while True:
                # At once it may not have seen yet that the connection has ended, and its place is taken.
                await anyio.sleep(RETRY_S)
                try:
                    return await self._say_hello()
                except (ConfigError, EngineDead, WireError) as error:
                    reason = error
        raise NoFrontEnd(
            f"the front end at {self._endpoint.address} has been gone for {self._endpoint.timeout_s:g} s: {reason}"
        )

    async def _say_hello(self) -> Init:
        """Connect once.

        Raises:
            NoServer: no front end is there.
        """
        address, _, token, is_local, keys, _ = self._endpoint
        where = await self._worker.run(partial(check_connect, address, has_keys=keys is not None), None)
        self.close()
        socket = make_dealer(self._context, where, keys)
        socket.reconnect_ivl = NEVER_MS  # what has said no HELLO by a connection is a stranger there
        if where.scheme == "tcp":
            socket.heartbeat_ivl, socket.heartbeat_timeout = TCP_HEARTBEAT_MS, TCP_TIMEOUT_MS
        self._monitor, self._channel = monitor, channel = Monitor(socket), Channel(socket)
        self._writer, self._reader = Writer(), Reader[ToEngine](ToEngine)
        socket.connect(str(where))
        self.tell(Hello(PROTOCOL_VERSION, self._index, token, os.getpid(), is_local, __version__))
        messages: list[list[bytes]] = []
        with anyio.move_on_after(HELLO_TIMEOUT_S) as deadline:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(self._wake_at_end)
                messages = await channel.receive(1)
                tasks.cancel_scope.cancel()
        if messages:
            return check_init(self._reader.read(messages[0]))
        self._num_cut_short = self._num_cut_short + 1 if monitor.is_cut_short else 0
        if monitor.is_denied or self._num_cut_short >= MAX_CUT_SHORT:
            what = "other keys" if keys is not None else "keys"
            raise ConfigError(f"the front end at {where} does not admit this engine: it asks for {what} (--join-keys)")
        if deadline.cancelled_caught and (monitor.has_connected or is_local):
            raise EngineDead(f"no answer to HELLO from {where} within {HELLO_TIMEOUT_S:g} s")
        raise NoServer(f"no front end is at {where}")

    async def _listen(self) -> Goodbye | TurnedAway | None:
        """What it says in the end; None: the connection has ended."""
        said: Goodbye | TurnedAway | None = None
        assert self._channel is not None
        assert self._monitor is not None
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self._wake_at_end)
            while said is None:
                messages = await self._channel.receive()
                if not messages and self._monitor.is_gone:
                    break
                for frames in messages:
                    said = said or self._read_end(frames)
            tasks.cancel_scope.cancel()
        return said

    def _read_end(self, frames: list[bytes]) -> Goodbye | TurnedAway | None:
        try:
            body = self._reader.read(frames)
        except WireError as error:
            logger.warning("refused a message of the front end's: %s", error)
            return None
        return body if isinstance(body, Goodbye | TurnedAway) else None

    async def _wake_at_end(self) -> None:
        assert self._monitor is not None
        assert self._channel is not None
        while not (self._monitor.is_refused or self._monitor.is_gone):
            await self._monitor.look()
        self._channel.wake()


class Handshakes:
    """All handshakes of an engine."""

    def __init__(self, endpoints: Sequence[Endpoint], worker: TextWorker) -> None:
        self._endpoints = endpoints
        self._worker = worker
        self._context: Context | None = None
        self._handshakes: list[Handshake] = []

    @property
    def joined(self) -> list[Handshake]:
        """Those with front ends that this engine has joined."""
        pairs = zip(self._endpoints, self._handshakes, strict=True)
        return [handshake for endpoint, handshake in pairs if not endpoint.is_local]

    async def greet(self) -> Init | None:
        """Say HELLO to all, one after the other; returns what they say together, None without endpoints.

        Raises:
            ConfigError, EngineDead: as `Handshake.greet`.
        """
        if not self._endpoints:
            return None
        self._context = context = make_context()
        self._handshakes = [Handshake(each, context, self._worker) for each in self._endpoints]
        return merge_inits([await handshake.greet() for handshake in self._handshakes])

    def tell(self, body: WireMessage) -> None:
        """Say the same to all."""
        for handshake in self._handshakes:
            handshake.tell(body)

    async def aclose(self) -> None:
        for handshake in self._handshakes:
            handshake.close(LINGER_S)
        await end_context(self._context, self._worker)
