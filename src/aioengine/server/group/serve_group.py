"""Serving by several processes: one port with several HTTP servers, or a replica a port."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence

import anyio
from msgspec.structs import replace

from aioengine.cluster.devices import HostSlots
from aioengine.config import EngineConfig, ProcessOptions
from aioengine.engine import Engine
from aioengine.errors import EngineDead
from aioengine.server.group.api_servers import ApiServers
from aioengine.server.group.channel import ServerSettings
from aioengine.server.group.server_process import Hub, ServerProcess
from aioengine.server.http_listener import HttpListener
from aioengine.server.http_server import StopRequest

HEALTH_EVERY_S = 1.0
"""How often the process looks at its engine's health, as a server does."""


async def serve_with_servers(
    settings: ServerSettings,
    listener: HttpListener,
    engine: Engine,
    stop: StopRequest,
    *,
    on_serving: Callable[[str, list[str]], None] = lambda model, urls: None,
) -> None:
    """Serve one port by several HTTP servers, each a process that connects to an engine, until it is asked to stop.

    Then the servers take no new clients, let what runs end as `serve` does, and end. The engine is the caller's to
    close, after that. Cancelling ends the servers at once.

    Args:
        settings: of all servers; ``num_servers`` says how many, ``engine_address`` what they connect to.
        listener: bound for so many servers; its sockets are closed when the servers are told to end.
        engine: this process's own front end of the engine that the servers connect to.
        on_serving: called with the model's name and the URL once all servers serve.
    Raises:
        ConfigError: the place was taken meanwhile.
        EngineDead: the engine has died; or the servers could not be kept running (`ApiServers`).
    """
    await anyio.to_thread.run_sync(listener.bind)
    shares = [[each.fileno() for each in share] for share in listener.shares]
    hub = Hub(engine, lambda: servers.group)
    servers = ApiServers(
        lambda index: ServerProcess(replace(settings, index=index, shares=shares), hub),
        settings.num_servers,
        drain_timeout_s=settings.drain_timeout_s,
        on_all_serving=lambda: on_serving(hub.model_name, [listener.url]),
        on_exit=hub.on_exit,
        # Clients are refused from here on as the servers close their sockets: this process must not hold them open.
        on_stopping=listener.let_go,
    )
    failure: EngineDead | None = None
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(_watch, engine, servers)
        try:
            await servers.run(stop)
        except EngineDead as error:  # a group of tasks would wrap it
            failure = error
        tasks.cancel_scope.cancel()
    if failure is not None:
        raise failure


async def _watch(engine: Engine, servers: ApiServers) -> None:
    """End the servers when the engine has died."""
    while True:
        health = engine.health()
        if health.status == "DEAD":
            servers.fail(health.reason)
            return
        await anyio.sleep(HEALTH_EVERY_S)


async def serve_replica_a_port(
    settings: ServerSettings,
    listeners: Sequence[HttpListener],
    stop: StopRequest,
    *,
    on_serving: Callable[[str, list[str]], None] = lambda model, urls: None,
) -> None:
    """Serve several engines, each by a process of its own at a port of its own, for a balancer outside.

    Each process is what `serve` makes of one engine: it knows nothing of the others, and its ``/metrics`` and
    ``/health`` are its own. One that ends is started again; its port refuses clients meanwhile.

    Args:
        settings: of all; ``engine_config`` is that of each engine.
        listeners: one for each; their sockets are closed when the servers are told to end.
    Raises:
        ConfigError: this machine has not so many GPUs.
        EngineDead: they could not be kept running (`ApiServers`).
    """
    hub = Hub(None, lambda: servers.group)

    config, num_engines = settings.engine_config or EngineConfig(), len(listeners)
    slots = await anyio.to_thread.run_sync(lambda: HostSlots.find(config, ProcessOptions(), num_engines))
    host_shares = [slots.take(index, num_engines) for index in range(num_engines)]

    def make(index: int) -> ServerProcess:
        host = host_shares[index]
        own = replace(
            settings,
            index=index,
            shares=[[each.fileno() for each in listeners[index].sockets]],
            where=listeners[index].where,
            engine_config=host.config(config),
            visible_devices=host.visible_devices,
            environment=host.environment(os.environ),
        )
        return ServerProcess(own, hub)

    def on_exit(index: int, is_again: bool) -> None:
        listeners[index].refuse()  # a balancer is to hear at once that none serves there
        hub.on_exit(index, is_again)

    def let_go() -> None:
        for listener in listeners:
            listener.let_go()

    servers = ApiServers(
        make,
        len(listeners),
        drain_timeout_s=settings.drain_timeout_s,
        start_timeout_s=ProcessOptions().start_timeout_s,  # of an engine, with its model
        on_all_serving=lambda: on_serving(hub.model_name, [listener.url for listener in listeners]),
        on_exit=on_exit,
        on_stopping=let_go,
    )
    await servers.run(stop)
