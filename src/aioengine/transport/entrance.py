"""A ROUTER socket at an address that peers reach, with keys where other machines can."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path

import anyio
import zmq

from aioengine.errors import ConfigError
from aioengine.processes.worker_threads import TextWorker
from aioengine.transport import wire
from aioengine.transport.addresses import Address, check_bind
from aioengine.transport.channel import Channel, Monitor, bind, end_context, make_context
from aioengine.transport.security import ZAP_ENDPOINT, ServerKeys

LINGER_S = 1.0
"""For last words to reach peers."""
TCP_HEARTBEAT_MS, TCP_TIMEOUT_MS = 2_000, 15_000
"""A machine that is gone says nothing; ZMQ's own heartbeats find that out."""


class Entrance:
    """The socket, what becomes of its connections, and the gate before it.

    Args:
        address: where to be reached: ``ipc:///path`` or ``tcp://host:port``; port 0 is any.
        keys: of the clients that may connect, for addresses that other machines can reach.
        max_unsent: messages to one peer in its queue.
        on_end: called with the file descriptor of each connection that has ended.
    Attributes:
        address: as it is reached, once `open` has returned.
        is_far: whether other users may connect: by tcp, without keys.
        channel: the socket; each message comes behind its connection and the name of the key that it came by.
        monitor: of it.
    """

    channel: Channel
    monitor: Monitor

    def __init__(
        self,
        address: str,
        keys: ServerKeys | None,
        worker: TextWorker,
        *,
        max_unsent: int,
        on_end: Callable[[int], None],
    ) -> None:
        self.address = address
        self.is_far = False
        self._asked_for = address
        self._keys = keys
        self._worker = worker
        self._max_unsent = max_unsent
        self._on_end = on_end
        self._zap: Channel | None = None
        self._closing = contextlib.ExitStack()
        self._is_bound = False

    async def open(self) -> None:
        """Bind to the address.

        Raises:
            ConfigError: it cannot be had.
        """
        self._where = await self._worker.run(lambda: check_bind(self._asked_for, has_keys=self._keys is not None), None)
        self.is_far = self._where.scheme == "tcp" and self._keys is None
        self._context = make_context()
        try:
            self._bind(self._where)
        except (ConfigError, zmq.ZMQError):
            with anyio.CancelScope(shield=True):
                await self.aclose()
            raise

    def _bind(self, where: Address) -> None:
        socket = self._context.socket(zmq.ROUTER)
        socket.router_mandatory = True  # else it would drop what a peer has no room for
        socket.sndhwm = self._max_unsent
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
        self.monitor = Monitor(socket, self._on_end)
        self._closing.callback(self.monitor.close)
        self.address = bind(socket, where)
        self._is_bound = True

    async def watch(self) -> None:
        """Admit those with keys, and note which connections end, until cancelled."""
        async with anyio.create_task_group() as tasks:
            if self._keys is not None and self._zap is not None:
                tasks.start_soon(self._keys.admit, self._zap)
            while True:
                await self.monitor.look()

    async def aclose(self) -> None:
        """Close the sockets; idempotent."""
        if hasattr(self, "_context") and not self._context.closed:
            self._closing.close()
            # Waits for last words, and for that long at most.
            await end_context(self._context, self._worker)
            if self._where.scheme == "ipc" and self._is_bound:
                await self._worker.run(lambda: Path(self._where.path).unlink(missing_ok=True), None)

    def abandon(self) -> None:
        """Close without a word or a wait; from any thread once the loop is gone."""
        if hasattr(self, "_context") and not self._context.closed:
            self._closing.close()
            self._context.destroy(linger=0)
