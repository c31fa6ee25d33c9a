"""Serving by several processes, in the process that starts them: one port with several HTTP servers, or a port each."""

from __future__ import annotations

import math
import os
import socket
from collections.abc import Callable, Sequence

import anyio
from anyio import CapacityLimiter
from anyio.abc import TaskGroup
from msgspec.structs import replace

from aioengine.cluster.devices import HostSlots
from aioengine.config import EngineConfig, ProcessOptions
from aioengine.engine import Engine
from aioengine.errors import ConfigError, EngineDead
from aioengine.processes.child import Child
from aioengine.processes.turns import sleep_on_time
from aioengine.server.group.api_servers import START_TIMEOUT_S, ApiServers
from aioengine.server.group.channel import (
    AbortNamed,
    Counted,
    Message,
    ServerChannel,
    ServerGroup,
    ServerSettings,
    Serving,
    Sums,
)
from aioengine.server.http_listener import HttpListener
from aioengine.server.http_server import StopRequest
from aioengine.server.metrics import GroupNumbers, HttpMetrics, ServerNumbers, read_families, read_process

STALL_TIMEOUT_S = 30.0
"""A server that serves sends its numbers every second. One that sends none for so long is stopped or stuck."""


class ServerProcess:
    """An HTTP server in a child process; a `ManagedServer` of `ApiServers`."""

    def __init__(self, settings: ServerSettings, hub: Hub) -> None:
        self.name = f"HTTP server {settings.index}"
        self._settings = settings
        self._hub = hub
        self._child: Child | None = None
        self._channel: ServerChannel | None = None
        self._heard_at = math.inf
        """Time of its last message; infinite before the first one, which has no deadline."""
        self._failure: str | None = None

    async def run(self, on_serving: Callable[[], None]) -> None:
        index = self._settings.index
        ours, theirs = socket.socketpair()
        with theirs:
            try:
                settings = self._settings
                sockets = (each for share in settings.shares for each in share)
                child = self._child = Child(
                    self.name,
                    "aioengine.server.group.child",
                    str(theirs.fileno()),
                    env=settings.environment,
                    visible_devices=settings.visible_devices,
                    pass_fds={theirs.fileno(), settings.log_descriptor, *sockets},
                    # For a server that is not drained, such as one whose start is given up; then it is killed.
                    terminate_s=1.0,
                    on_exit=lambda: None,
                )
            except ConfigError as error:  # no process, or no descriptor, can be had now
                self._failure = str(error)
                ours.close()
                return
        try:
            channel = self._channel = self._hub.channels[index] = await ServerChannel.open(ours)
            channel.send(self._settings)
            ended = anyio.Event()
            async with anyio.create_task_group() as tasks:

                async def hear() -> None:
                    while (message := await channel.receive()) is not None:
                        self._take(message, on_serving, tasks)
                    ended.set()

                tasks.start_soon(hear)
                tasks.start_soon(self._watch, tasks.cancel_scope)
                await child.wait()
                # Longest wait for the final messages of a server that has exited.
                with anyio.move_on_after(1.0):
                    await ended.wait()
                tasks.cancel_scope.cancel()
        finally:
            if self._channel is not None:
                self._channel.close()
            self._hub.channels.pop(index, None)
            await child.aclose()

    def _take(self, message: Message, on_serving: Callable[[], None], tasks: TaskGroup) -> None:
        self._heard_at = anyio.current_time()
        if isinstance(message, Serving):
            self._hub.model_name = message.model
            on_serving()
        elif isinstance(message, Counted):
            self._hub.numbers.note(self._settings.index, message.numbers)
            if message.wants_sums:

                async def send_sums() -> None:
                    sums = await self._hub.add_up()
                    if self._channel is not None:
                        self._channel.send(Sums(sums))

                tasks.start_soon(send_sums)
        elif isinstance(message, AbortNamed):
            self._hub.send_to_others(self._settings.index, message)

    async def _watch(self, scope: anyio.CancelScope) -> None:
        """Cancel the scope, as a failure, once the server sends no more messages."""
        while True:
            is_on_time = await sleep_on_time(STALL_TIMEOUT_S / 4, STALL_TIMEOUT_S / 4, anyio.current_time)
            if is_on_time and anyio.current_time() - self._heard_at > STALL_TIMEOUT_S:
                self._failure = f"{self.name} has sent nothing for {STALL_TIMEOUT_S:g} s, and was killed"
                scope.cancel()
                return

    def describe_exit(self) -> str:
        if self._failure is None and self._child is not None and self._child.returncode is not None:
            return self._child.describe_exit()
        return self._failure or f"{self.name} was not started"

    def terminate(self) -> None:
        if self._child is not None and self._child.returncode is None:
            self._child.terminate()

    def send_group(self, group: ServerGroup) -> None:
        if self._channel is not None:
            self._channel.send(group)


class Hub:
    """The numbers of all servers, and the channels by which one reaches the others.

    Args:
        engine: this process's front end, which has the metrics of all steps; None: there is none.
        group: returns how many servers are to serve, and how many do.
    Attributes:
        channels: those to the servers' processes, by index.
    """

    def __init__(self, engine: Engine | None, group: Callable[[], ServerGroup]) -> None:
        self.channels: dict[int, ServerChannel] = {}
        self.numbers = GroupNumbers()
        self.model_name = ""
        self._engine = engine
        self._group = group
        self._limiter = CapacityLimiter(1)

    def on_exit(self, index: int, is_again: bool) -> None:
        """Keep the numbers of a server that has exited; ``is_again``: it is restarted."""
        self.numbers.end(index)
        self.numbers.num_restarts += is_again

    def send_to_others(self, index: int, message: Message) -> None:
        """Send a message to all servers but this one."""
        for other, channel in self.channels.items():
            if other != index:
                channel.send(message)

    async def add_up(self) -> ServerNumbers:
        """The numbers of all servers, with the engine's and this process's."""
        process = await anyio.to_thread.run_sync(read_process, limiter=self._limiter)
        engine = []
        if self._engine is not None:
            families = read_families(self._engine, HttpMetrics(), self.model_name)
            engine = [each for each in families if each.is_of_engine]
        group = self._group()
        return self.numbers.total([*engine, *process], num_servers=group.num_servers, num_serving=group.num_serving)


async def serve_group(
    settings: ServerSettings,
    listeners: Sequence[HttpListener],
    stop: StopRequest,
    *,
    engine: Engine | None = None,
    on_serving: Callable[[str, list[str]], None] = lambda model, urls: None,
) -> None:
    """Serve by several HTTP servers, each a process, until it is asked to stop.

    Then the servers take no new clients, let what runs end as `serve` does, and end. Cancelling ends them at once. A
    server that ends is started again.

    Args:
        settings: of all servers.
        listeners: their sockets are closed when the servers are to end. With ``engine`` one listener, bound for
            ``settings.num_servers``: each server connects to the engine at ``engine_address``. Without it one for each
            server, which starts an engine of ``engine_config`` in its process and knows nothing of the others, for a
            balancer outside; its port refuses clients while it does not serve.
        engine: this process's own front end of the engine; the caller's to close, after this.
        on_serving: called with the model's name and the URLs once all servers serve.
    Raises:
        ConfigError: an address was taken meanwhile, or this machine has not so many GPUs.
        EngineDead: the engine has died; or the servers could not be kept running (`ApiServers`).
    """
    hub = Hub(engine, lambda: servers.group)
    num_servers = settings.num_servers
    if engine is not None:
        await anyio.to_thread.run_sync(listeners[0].bind)
        all_settings = [replace(settings, shares=[[each.fileno() for each in share] for share in listeners[0].shares])]
    else:
        config, num_servers = settings.engine_config or EngineConfig(), len(listeners)
        slots = await anyio.to_thread.run_sync(lambda: HostSlots.find(config, ProcessOptions(), num_servers))
        hosts = [slots.take(index, num_servers) for index in range(num_servers)]
        all_settings = [
            replace(
                settings,
                shares=[[each.fileno() for each in listener.sockets]],
                where=listener.where,
                engine_config=host.config(config),
                visible_devices=host.visible_devices,
                environment=host.environment(os.environ),
            )
            for listener, host in zip(listeners, hosts, strict=True)
        ]

    def make(index: int) -> ServerProcess:
        return ServerProcess(replace(all_settings[index % len(all_settings)], index=index), hub)

    def on_exit(index: int, is_again: bool) -> None:
        if engine is None:
            listeners[index].refuse()  # a balancer is to hear at once that none serves there
        hub.on_exit(index, is_again)

    def let_go() -> None:
        # Clients are refused from here on as the servers close their sockets: this process must not hold them open.
        for listener in listeners:
            listener.let_go()

    servers = ApiServers(
        make,
        num_servers,
        drain_timeout_s=settings.drain_timeout_s,
        # Of an engine, with its model, where each server has its own.
        start_timeout_s=START_TIMEOUT_S if engine is not None else ProcessOptions().start_timeout_s,
        on_all_serving=lambda: on_serving(hub.model_name, [listener.url for listener in listeners]),
        on_exit=on_exit,
        on_stopping=let_go,
    )

    async def watch(engine: Engine) -> None:
        """End the servers when the engine has died."""
        while (health := engine.health()).status != "DEAD":  # noqa: ASYNC110
            await anyio.sleep(1.0)
        servers.fail(health.reason)

    failure: EngineDead | None = None
    async with anyio.create_task_group() as tasks:
        if engine is not None:
            tasks.start_soon(watch, engine)
        try:
            await servers.run(stop)
        except EngineDead as error:  # a group of tasks would wrap it
            failure = error
        tasks.cancel_scope.cancel()
    if failure is not None:
        raise failure
