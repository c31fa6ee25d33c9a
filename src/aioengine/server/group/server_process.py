"""HTTP servers as processes, in the process that starts them: its end of each one, and the hub between them."""

from __future__ import annotations

import contextlib
import math
import socket
from collections.abc import Callable, Iterable

import anyio
from anyio import CapacityLimiter

from aioengine.engine import Engine
from aioengine.errors import ConfigError
from aioengine.processes.child import Child
from aioengine.processes.turns import sleep_on_time
from aioengine.server.errors import ApiError
from aioengine.server.group.numbers import GroupNumbers
from aioengine.server.group.siblings import (
    AbortNamed,
    Counted,
    CountOpen,
    Message,
    Peer,
    Question,
    ReadNumbers,
    ServerGroup,
    ServerSettings,
    Serving,
    decode_families,
    encode_families,
)
from aioengine.server.metrics import HttpMetrics, MetricFamily, read_families, read_process

CHILD_MODULE = "aioengine.server.group.child"
NUMBERS_TIMEOUT_S = 1.0
"""Longest wait for a server's numbers in a scrape; a stuck server's last ones are shown."""
LAST_WORDS_S = 1.0
"""Longest wait for the final messages of a server that has exited."""
TERMINATE_S = 1.0
"""Time to end for a server that is not drained, such as one whose start is given up; then it is killed."""
STALL_TIMEOUT_S = 30.0
"""A server that serves sends a message every two seconds. One that sends none for so long is stopped or stuck."""


class ServerProcess:
    """An HTTP server in a child process; a `ManagedServer` of `ApiServers`."""

    def __init__(self, settings: ServerSettings, hub: Hub) -> None:
        self.name = f"HTTP server {settings.index}"
        self._settings = settings
        self._hub = hub
        self._child: Child | None = None
        self._peer: Peer | None = None
        self._heard_at = math.inf
        """Time of its last message; infinite before the first one, which has no deadline."""
        self._failure: str | None = None
        self._on_serving: Callable[[], None] = lambda: None

    async def run(self, on_serving: Callable[[], None]) -> None:
        self._on_serving = on_serving
        ours, theirs = socket.socketpair()
        with theirs:
            try:
                self._child = self._start(theirs.fileno())
            except ConfigError as error:  # no process, or no descriptor, can be had now
                self._failure = str(error)
                ours.close()
                return
        try:
            await self._talk(ours, self._child)
        finally:
            self._hub.peers.pop(self._settings.index, None)
            await self._child.aclose()

    def _start(self, descriptor: int) -> Child:
        settings = self._settings
        inherited = {descriptor, settings.log_descriptor, *(each for share in settings.shares for each in share)}
        return Child(
            self.name,
            CHILD_MODULE,
            str(descriptor),
            env=settings.environment,
            visible_devices=settings.visible_devices,
            pass_fds=inherited,
            terminate_s=TERMINATE_S,
            on_exit=lambda: None,
        )

    async def _talk(self, ours: socket.socket, child: Child) -> None:
        index = self._settings.index
        peer = self._peer = Peer(ours, lambda question: self._hub.answer(index, question), self._take)
        await peer.open()
        peer.tell(self._settings)
        self._hub.peers[index] = peer
        ended = anyio.Event()

        async def hear() -> None:
            await peer.run()
            ended.set()

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(hear)
            tasks.start_soon(self._watch, tasks.cancel_scope)
            await child.wait()
            with anyio.move_on_after(LAST_WORDS_S):
                await ended.wait()
            tasks.cancel_scope.cancel()

    async def _watch(self, scope: anyio.CancelScope) -> None:
        """Cancel the scope, as a failure, once the server sends no more messages."""
        while True:
            is_on_time = await sleep_on_time(STALL_TIMEOUT_S / 4, STALL_TIMEOUT_S / 4, anyio.current_time)
            if is_on_time and anyio.current_time() - self._heard_at > STALL_TIMEOUT_S:
                self._failure = f"{self.name} has said nothing for {STALL_TIMEOUT_S:g} s, and was killed"
                scope.cancel()
                return

    def _take(self, message: Message) -> None:
        self._heard_at = anyio.current_time()
        if isinstance(message, Serving):
            self._hub.model_name = message.model
            self._on_serving()
        elif isinstance(message, Counted):
            self._hub.numbers.note(self._settings.index, decode_families(message.families))

    def describe_exit(self) -> str:
        if self._failure is None and self._child is not None and self._child.returncode is not None:
            return self._child.describe_exit()
        return self._failure or f"{self.name} was not started"

    def terminate(self) -> None:
        if self._child is not None and self._child.returncode is None:
            self._child.terminate()

    def tell(self, group: ServerGroup) -> None:
        if self._peer is not None:
            self._peer.tell(group)


class Hub:
    """Answers servers' questions about all servers together, and passes on what is for the others.

    Args:
        engine: this process's front end, which has the metrics of all steps; None: there is none.
        prefix: the prefix of metrics, in place of vLLM's.
        group: returns how many servers are to serve, and how many do.
    Attributes:
        peers: the sockets to the servers' processes, by index.
    """

    def __init__(self, engine: Engine | None, prefix: str, group: Callable[[], ServerGroup]) -> None:
        self.peers: dict[int, Peer] = {}
        self.numbers = GroupNumbers()
        self.model_name = ""
        self._engine = engine
        self._prefix = prefix
        self._group = group
        self._limiter = CapacityLimiter(1)

    def on_exit(self, index: int, is_again: bool) -> None:
        """Keep the numbers of a server that has exited; ``is_again``: it is restarted."""
        self.numbers.end(index)
        self.numbers.num_restarts += is_again

    async def answer(self, asking: int, question: Question) -> bytes:
        """Answer a server's question."""
        if isinstance(question, ReadNumbers):
            return encode_families(await self._read_numbers())
        others = [index for index in self.peers if index != asking or isinstance(question, CountOpen)]
        answers = await self._ask_each(others, question)
        if isinstance(question, CountOpen):
            return str(sum(map(int, answers.values()))).encode()
        assert isinstance(question, AbortNamed)
        return b""

    async def _read_numbers(self) -> list[MetricFamily]:
        asked = dict(self.peers)
        for index, body in (await self._ask_each(asked, ReadNumbers())).items():
            if self.peers.get(index) is asked[index]:  # else it has ended, and its numbers are counted already
                self.numbers.note(index, decode_families(body))
        own: list[MetricFamily] = []
        if self._engine is not None:
            families = read_families(self._engine, HttpMetrics(), self._prefix, self.model_name)
            own = [each for each in families if each.is_of_engine]
        own += await anyio.to_thread.run_sync(read_process, limiter=self._limiter)
        group = self._group()
        return self.numbers.total(own, num_servers=group.num_servers, num_serving=group.num_serving)

    async def _ask_each(self, servers: Iterable[int], question: Question) -> dict[int, bytes]:
        """Ask servers; returns the answers that come in time, by server."""
        answers: dict[int, bytes] = {}

        async def ask(index: int, peer: Peer) -> None:
            with contextlib.suppress(ApiError):
                answers[index] = await peer.ask(question, NUMBERS_TIMEOUT_S)

        async with anyio.create_task_group() as tasks:
            for index in servers:
                tasks.start_soon(ask, index, self.peers[index])
        return answers
