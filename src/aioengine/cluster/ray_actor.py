"""A replica's side of Ray: the engine in an actor's loop."""

from __future__ import annotations

import asyncio
import logging
import os
from typing import NamedTuple

import anyio

from aioengine.processes.own_process import limit_spinning
from aioengine.transport.engine_process import serve_init
from aioengine.transport.handshake import Failing, Init
from aioengine.transport.security import KeyPair, ServerKeys
from aioengine.transport.wire import Fault, WireMessage, to_fault


class Introduction(NamedTuple):
    """Where an actor was placed.

    Attributes:
        node_id: Ray's, of its node.
        ip: of that node, as others reach it.
        uid: of the user that it runs as.
        key: the public half of the pair that it made; the secret one never travels.
    """

    node_id: str
    ip: str
    pid: int
    uid: int
    key: bytes


class ReplicaActor:
    """An engine that Ray starts: `run` serves it; meanwhile `next_news` and `end` are called beside.

    Ray runs an actor with async methods in one loop, and each call as a task of it. Errors are returned as messages:
    Ray would wrap them.

    Args:
        log_level: of this package's logger; what it writes to stderr Ray shows in the driver's terminal.
    """

    def __init__(self, log_level: int) -> None:
        limit_spinning()
        logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s")
        logging.getLogger("aioengine").setLevel(log_level)
        self._pair = KeyPair.make()
        self._scope = anyio.CancelScope()
        self._news: WireMessage | None = None
        self._has_news = asyncio.Event()

    async def introduce(self) -> Introduction:
        """Return where this is."""
        import ray

        node_id, ip = ray.get_runtime_context().get_node_id(), ray.util.get_node_ip_address()
        return Introduction(node_id, ip, os.getpid(), os.geteuid(), self._pair.public)

    async def run(self, init: Init, client_key: bytes | None) -> Fault | None:
        """Load the model and serve it until `end`; or until it dies, and return what of.

        Args:
            client_key: public, of those that may connect over tcp: this actor's driver, and further front ends that
                have its pair. None: it serves where its driver is, by ipc.
        """
        keys = None if client_key is None else ServerKeys.admitting(self._pair, client_key)
        try:
            with self._scope:
                await serve_init(init, keys, self._tell)
        except Exception as error:  # of plugins and executors it may be any
            fault = to_fault(error)
            self._tell(Failing(fault))
            return fault
        return None

    async def next_news(self) -> WireMessage | None:
        """The newest of `Loading`, `Ready` and `Failing` that was not returned yet, once there is one."""
        await self._has_news.wait()
        self._has_news.clear()
        return self._news

    async def end(self) -> None:
        """Let `run` end."""
        self._scope.cancel()

    def _tell(self, news: WireMessage) -> None:
        self._news = news
        self._has_news.set()
