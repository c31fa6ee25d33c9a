"""Several HTTP servers, each a process: started together, started again when one ends, and ended in order.

What a server is does not matter here: tests give it fakes, `ServerProcess` is the real one. Nothing here does I/O.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Protocol

import anyio

from aioengine.errors import EngineDead
from aioengine.processes.backoff import Backoff
from aioengine.server.group.channel import ServerGroup
from aioengine.server.http_server import ABORT_GRACE_S, CONNECTIONS_END_S, TASKS_END_S, StopRequest

logger = logging.getLogger("aioengine")

START_TIMEOUT_S = 120.0
"""For a server to serve, its engine's model loaded where it has one of its own: see `ApiServers`."""
FIRST_BACKOFF_S, MAX_BACKOFF_S = 0.1, 10.0
"""Before a server is started again; it doubles with each failure in a row."""
STEADY_S = 30.0
"""A server that has served for so long is none that fails in a row when it ends."""
MAX_FAILURES = 5
"""In a row: then the servers are given up."""
END_GRACE_S = ABORT_GRACE_S + CONNECTIONS_END_S + 2 * TASKS_END_S + 5.0
"""Time that a server has to end beyond its time for draining; then it is killed."""


class ManagedServer(Protocol):
    """A server, from its start to its exit. To be used by one task."""

    async def run(self, on_serving: Callable[[], None]) -> None:
        """Start it, and return when it has exited. Cancelling ends it, and all that descends from it."""

    def describe_exit(self) -> str:
        """How it ended and why, in one line."""

    def terminate(self) -> None:
        """Have it end: the first time by draining, the second time at once. Does not wait."""

    def send_group(self, group: ServerGroup) -> None:
        """Send it the present state of all servers."""


class ApiServers:
    """Keeps servers running until it is asked to stop, or they cannot be kept (vLLM: `APIServerProcessManager`).

    Args:
        make: makes the server of an index, unstarted; called again for each start.
        num_servers: that are to serve.
        drain_timeout_s: that they have to end; they are killed `END_GRACE_S` later.
        start_timeout_s: for a server to serve; then it is killed and has failed.
        on_all_serving: called when all serve for the first time.
        on_exit: called with the index of a server that has exited, and whether it is to be started again.
        on_stopping: called before the servers are to end.
    Attributes:
        serving: the indices of those that serve.
    """

    def __init__(
        self,
        make: Callable[[int], ManagedServer],
        num_servers: int,
        *,
        drain_timeout_s: float,
        start_timeout_s: float = START_TIMEOUT_S,
        on_all_serving: Callable[[], None] = lambda: None,
        on_exit: Callable[[int, bool], None] = lambda index, is_again: None,
        on_stopping: Callable[[], None] = lambda: None,
    ) -> None:
        self.serving: set[int] = set()
        self._make = make
        self._num_servers = num_servers
        self._drain_timeout_s = drain_timeout_s
        self._start_timeout_s = start_timeout_s
        self._on_all_serving = on_all_serving
        self._on_exit = on_exit
        self._on_stopping = on_stopping
        self._members: dict[int, ManagedServer] = {}
        self._have_served: set[int] = set()
        self._stopping = anyio.Event()
        self._failure: str | None = None

    async def run(self, stop: StopRequest) -> None:
        """Keep the servers until ``stop`` is asked for, and return when they have ended.

        Asked once it lets them drain, asked again it has them abort what still runs. Cancelling ends them at once.

        Raises:
            EngineDead: one could not be started, or failed `MAX_FAILURES` times in a row: all were ended.
        """

        async def kill_late() -> None:
            """Kill what has not ended in time."""
            await self._stopping.wait()
            await anyio.sleep(self._drain_timeout_s + END_GRACE_S)
            logger.error("HTTP servers did not end in time: killed")
            tasks.cancel_scope.cancel()

        stop.on_asked = self._terminate
        if stop.num_asked:
            self._terminate()
        try:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(kill_late)
                async with anyio.create_task_group() as servers:
                    for index in range(self._num_servers):
                        servers.start_soon(self._keep, index)
                tasks.cancel_scope.cancel()
        finally:
            stop.on_asked = lambda: None
        if self._failure is not None:
            raise EngineDead(self._failure)

    def fail(self, reason: str) -> None:
        """End all servers, and have `run` raise."""
        if self._failure is None:
            logger.error("ending all HTTP servers: %s", reason)
            self._failure = reason
        self._terminate()

    @property
    def group(self) -> ServerGroup:
        return ServerGroup(self._num_servers, len(self.serving))

    async def _keep(self, index: int) -> None:
        backoff = Backoff(FIRST_BACKOFF_S, MAX_BACKOFF_S, steady_s=STEADY_S)
        while not self._stopping.is_set():
            served_s, reason = await self._run_once(index)
            if self._stopping.is_set():
                return
            pause_s = backoff.failed(served_s)
            if index not in self._have_served:
                self.fail(f"an HTTP server could not be started: {reason}")
            elif backoff.num_failures >= MAX_FAILURES:
                self.fail(f"an HTTP server failed {backoff.num_failures} times in a row; the last time: {reason}")
            else:
                logger.warning("%s; started again in %g s", reason, pause_s)
                with anyio.move_on_after(pause_s):
                    await self._stopping.wait()

    async def _run_once(self, index: int) -> tuple[float, str]:
        """One life of a server: how long it has served, in seconds, and why it ended."""
        clock = anyio.current_time
        began_s: float | None = None
        member = self._members[index] = self._make(index)

        def send_group() -> None:
            for other in self.serving:
                self._members[other].send_group(self.group)

        def on_serving() -> None:
            nonlocal began_s
            began_s = clock()
            starting.deadline = float("inf")
            self.serving.add(index)
            self._have_served.add(index)
            send_group()
            if len(self._have_served) == self._num_servers and was_first:
                self._on_all_serving()

        was_first = index not in self._have_served
        with anyio.move_on_after(self._start_timeout_s) as starting:
            await member.run(on_serving)
        reason = member.describe_exit()
        if starting.cancelled_caught:
            reason = f"HTTP server {index} did not serve within {self._start_timeout_s:g} s, and was killed"
        self.serving.discard(index)
        self._members.pop(index)
        self._on_exit(index, not self._stopping.is_set())
        send_group()
        return 0.0 if began_s is None else clock() - began_s, reason

    def _terminate(self) -> None:
        if not self._stopping.is_set():
            self._stopping.set()
            self._on_stopping()
        for member in self._members.values():
            member.terminate()
