"""A socket that admits one connection, and peers that ask for it."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Callable

import anyio
import zmq

from aioengine.transport.channel import Channel, Monitor
from aioengine.transport.security import ZAP_ENDPOINT, Gate, ServerKeys, enforce

Context = zmq.Context[zmq.Socket[bytes]]
SetUp = Callable[[zmq.Socket[bytes]], None]
DOMAIN = "domain"


def plain(password: bytes = b"secret") -> SetUp:
    def set_up(socket: zmq.Socket[bytes]) -> None:
        socket.plain_username, socket.plain_password = b"user", password

    return set_up


class Guarded:
    """A PUSH socket that admits one connection, watched by a `Monitor`; and those who come to it.

    Args:
        keys: it admits alice, by her key; without keys the user with the secret.
        is_answering: whether the gate answers.
    """

    def __init__(self, context: Context, keys: ServerKeys | None, *, is_answering: bool) -> None:
        self._context = context
        self.gate = Gate()
        self._zap = Channel(context.socket(zmq.ROUTER))
        if is_answering:
            self._zap.socket.bind(ZAP_ENDPOINT)
        self.socket = context.socket(zmq.PUSH)
        if keys is None:
            self.socket.plain_server = True
            enforce(self.socket, DOMAIN)
            self.gate.allow_once(DOMAIN, "user", "secret")
        else:
            keys.apply_server(self.socket, DOMAIN)
            self.gate.allow_key_once(DOMAIN, keys.clients["alice"])
        self.monitor = Monitor(self.socket)
        self.socket.bind("tcp://127.0.0.1:*")
        self.address = self.socket.getsockopt_string(zmq.LAST_ENDPOINT).rstrip("\0")

    async def answer(self) -> None:
        while True:
            for peer, delimiter, *request in await self._zap.receive():
                self._zap.send([peer, delimiter, *self.gate.decide(request)])

    def connect(self, set_up: SetUp) -> zmq.Socket[bytes]:
        socket = self._make(set_up)
        socket.connect(self.address)
        return socket

    def connect_watched(self, set_up: SetUp) -> tuple[zmq.Socket[bytes], Monitor]:
        socket = self._make(set_up)
        monitor = Monitor(socket)
        socket.connect(self.address)
        return socket, monitor

    def _make(self, set_up: SetUp) -> zmq.Socket[bytes]:
        socket = self._context.socket(zmq.PULL)
        socket.reconnect_ivl = -1
        set_up(socket)
        return socket

    def close(self) -> None:
        self.monitor.close()
        self.socket.close()
        self._zap.close()


@contextlib.asynccontextmanager
async def guard(
    context: Context, keys: ServerKeys | None = None, *, is_answering: bool = True
) -> AsyncIterator[Guarded]:
    guarded = Guarded(context, keys, is_answering=is_answering)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(guarded.answer)
        yield guarded
        tasks.cancel_scope.cancel()
    guarded.close()
