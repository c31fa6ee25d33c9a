"""`aioengine serve`: an OpenAI-compatible server, alone in its process."""

from __future__ import annotations

import contextlib
import logging
import os
import sys
from collections.abc import AsyncIterator, Iterator
from typing import TYPE_CHECKING, Any

import anyio
import click
from msgspec.structs import asdict, replace

from aioengine import Engine
from aioengine.cli.command import (
    EXIT_INTERRUPTED,
    add_flags,
    add_model_argument,
    choose_exit_code,
    is_interrupted,
    read_flags,
    run,
)
from aioengine.config import EngineConfig, ReplicaOptions
from aioengine.errors import AioEngineError, ConfigError, EngineDead
from aioengine.processes.own_process import allow_files, asked_by_signals, prepare_interpreter
from aioengine.server.config import HttpLimits, ServerConfig
from aioengine.server.http_listener import KEYFILE_PASSWORD_VARIABLE, HttpListener, ServerAddress
from aioengine.server.http_server import SPARE_FILES, StopRequest, serve
from aioengine.transport.addresses import PrivateFolder

if TYPE_CHECKING:
    from aioengine.server.access_log import LogFormat
    from aioengine.server.api import Api
    from aioengine.server.group.channel import ServerSettings

logger = logging.getLogger("aioengine")

API_KEY_VARIABLE = "AIOENGINE_API_KEY"
MAX_API_SERVERS = 64
CLUSTER_SOCKET = "cluster.sock"
MAX_PORT = 65535
REPLICA_FLAGS = frozenset(ReplicaOptions.__struct_fields__) - {"drain_timeout_s", "keys", "client"}
"""Without ``drain_timeout_s``: here ``--drain-timeout-s`` is the servers', and that of replicas has no flag. ``--keys``
and ``--client`` are for ``--connect``, too."""


@click.command(name="serve")
@add_flags(ServerAddress)
@click.option(
    "--drain-timeout-s",
    type=click.FloatRange(0),
    default=30.0,
    show_default=True,
    help="what runs has so long to end when the server is told to stop; then it is aborted",
)
@click.option(
    "--log-format", type=click.Choice(["text", "json"]), default="text", show_default=True, help="of the log on stderr"
)
@click.option("--process/--no-process", help="run the engine in a process of its own  [default: no]")
@click.option("--connect", metavar="ADDRESS", help="serve an engine that runs elsewhere (`aioengine engine ADDRESS`)")
@click.option(
    "--keys", metavar="FOLDER", help="keys for --connect, or for --replicas ADDRESSES, made by `aioengine keys`"
)
@click.option(
    "--client",
    metavar="NAME",
    help="name of the client that the keys are of; may be left out where they are one client's",
)
@click.option(
    "--api-servers",
    type=click.IntRange(1, MAX_API_SERVERS),
    default=1,
    show_default=True,
    help="HTTP servers of the port, each a process where there are several",
)
@click.option("--external-lb", is_flag=True, help="serve each replica alone, at --port and the ports after it")
@add_flags(ReplicaOptions, only=REPLICA_FLAGS)
@add_flags(ServerConfig)
@add_flags(HttpLimits)
@add_flags(EngineConfig)
@add_model_argument
def serve_command(drain_timeout_s: float, log_format: LogFormat, **flags: Any) -> int:
    """Serve MODEL (absent: the bundled one) over HTTP, as the OpenAI API does, until Ctrl-C or SIGTERM.

    Prints its address to stdout once it serves. After the first signal it takes no new clients, and ends when running
    requests have ended; a second signal aborts them. API keys come from --api-keys and from AIOENGINE_API_KEY (comma
    separated).

    Exit codes: 0 after SIGTERM, 130 after Ctrl-C, 1 when the model cannot be loaded, or the engine died or cannot be
    reached; 2 for wrong arguments, or a place that cannot be served at.
    """
    given = read_flags(ServerAddress, flags)
    if "uds" in given and (beside := [name for name in ("host", "port") if name in given]):
        raise click.UsageError(f"--uds is instead of a port: leave --{beside[0]} out")
    if password := os.environ.get(KEYFILE_PASSWORD_VARIABLE):
        given.setdefault("ssl_keyfile_password", password)
    where = ServerAddress(**given)
    service = Service(flags, drain_timeout_s, log_format)
    from aioengine.server.access_log import logging_off_loop

    logging.getLogger("uvicorn.error").setLevel(logging.WARNING)  # below that it logs its own steps
    with logging_off_loop(log_format):
        try:
            with contextlib.ExitStack() as opened:
                service.listeners = [opened.enter_context(each) for each in service.open_listeners(where)]
                listener = service.listeners[0]
                if service.config.api_keys:
                    logger.info("asking for an API key")
                elif listener.is_local:
                    logger.info("no API key is asked for")
                else:
                    warning = "%s can be reached from other machines, and asks for no key: see --api-keys"
                    logger.warning(warning, listener.url)
                service.config = listener.with_names(service.config)
                allow_files(service.limits.max_connections + SPARE_FILES)
                run(service.run())
        except AioEngineError as error:
            if log_format == "text":
                raise
            # Logged: a line that is no JSON would break the log's readers. A death while serving is in the log already.
            if not (service.has_served and isinstance(error, EngineDead)):
                logger.error("%s", error)
            return choose_exit_code(error)
    return EXIT_INTERRUPTED if is_interrupted() else 0


def _read_server_config(config: dict[str, Any]) -> ServerConfig:
    variable = os.environ.get(API_KEY_VARIABLE)
    keys = [] if variable is None else [key.strip() for key in variable.split(",") if key.strip()]
    # An empty variable is a mistake: whatever should have filled it failed, and any client would be served.
    if variable is not None and not keys:
        raise ConfigError(f"{API_KEY_VARIABLE} is set, and holds no key: give one, or unset it to ask for none")
    return ServerConfig(**{**config, "api_keys": (*config.get("api_keys", ()), *keys)})


class Service:
    """An engine to be served, over HTTP by one process or several.

    Attributes:
        has_served: whether serving has begun.
    Raises:
        ConfigError, click.UsageError: a value is bad, or flags exclude each other.
    """

    def __init__(self, flags: dict[str, Any], drain_timeout_s: float, log_format: LogFormat) -> None:
        config = read_flags(EngineConfig, flags)
        replicas = {name: value for name, value in read_flags(ReplicaOptions, flags).items() if name in REPLICA_FLAGS}
        self.api_servers: int = flags["api_servers"]
        self.external_lb: bool = flags["external_lb"]
        self.process: bool = flags["process"]
        self.connect: str | None = flags["connect"]
        self.keys: str | None = flags["keys"]
        self.client: str | None = flags["client"]
        self.model: str | None = flags["model"]
        if self.external_lb:
            self._check_external_lb(replicas)
        if self.connect is None:
            has_keys = self.keys is not None or self.client is not None
            if has_keys and not isinstance(replicas.get("replicas"), tuple):
                raise click.UsageError("--keys and --client are for --connect, or for --replicas at addresses")
            self.engine_config = EngineConfig(**config)
            self.replicas = ReplicaOptions(**replicas, keys=self.keys, client=self.client)
        elif here := [*["process"] * self.process, *[name for name in config if name != "model"], *replicas]:
            flag = here[0].replace("_", "-")
            raise click.UsageError(f"--{flag} is for an engine that is started here, and not for --connect")
        self.config = _read_server_config(read_flags(ServerConfig, flags))
        self.limits = HttpLimits(**read_flags(HttpLimits, flags))
        self.drain_timeout_s, self.log_format = drain_timeout_s, log_format
        self.listeners: list[HttpListener] = []
        self.has_served = False
        self._stop = StopRequest()

    def _check_external_lb(self, replicas: dict[str, Any]) -> None:
        """Refuse flags that --external-lb excludes, before `ReplicaOptions` refuses them for other reasons."""
        if others := sorted(replicas.keys() - {"replicas"}):
            flag = others[0].replace("_", "-")
            raise click.UsageError(f"--{flag} is for replicas behind one port: leave it out with --external-lb")
        refusals = {
            "starts its engines itself: leave --connect out": self.connect is not None,
            "has one server for each replica: leave --api-servers out": self.api_servers > 1,
            "has a process for each replica, engine and server: leave --process out": self.process,
            "serves each replica at a port of its own: say in --replicas how many": not isinstance(
                replicas.get("replicas"), int
            ),
        }
        for message, is_so in refusals.items():
            if is_so:
                raise click.UsageError(f"--external-lb {message}")

    def open_listeners(self, where: ServerAddress) -> Iterator[HttpListener]:
        """Yield an open listener for each port to serve at."""
        if not self.external_lb:
            yield HttpListener(where, self.api_servers)
            return
        if where.uds is not None:
            raise click.UsageError("--external-lb serves at ports: leave --uds out")
        last = where.port + self.replicas.num_replicas - 1
        if where.port and last > MAX_PORT:
            raise click.UsageError(f"--external-lb needs ports up to {last}: give a smaller --port")
        for index in range(self.replicas.num_replicas):
            yield HttpListener(replace(where, port=where.port and where.port + index))

    async def run(self) -> None:
        """Serve until a signal asks for the end."""
        with asked_by_signals(lambda _: self._stop.ask()):
            if self.external_lb:
                from aioengine.server.group.serve_group import serve_group

                settings = self._settings(len(self.listeners), engine_config=self.engine_config)
                await serve_group(settings, self.listeners, self._stop, on_serving=self._print_addresses)
                return
            async with self._cluster_address() as cluster_address:
                engine: Engine | None = None
                with anyio.CancelScope() as starting:
                    self._stop.on_asked = starting.cancel
                    engine = await self._start(cluster_address)
                if engine is None:
                    logger.info("told to stop while the engine was starting")
                    return
                async with engine:
                    if self.api_servers == 1:
                        await self._serve_here(engine)
                    else:
                        await self._serve_by_processes(engine, self.connect or f"cluster+{cluster_address}")

    @contextlib.asynccontextmanager
    async def _cluster_address(self) -> AsyncIterator[str | None]:
        """The address at which server processes reach an engine that is started here; None if it needs none."""
        if self.api_servers == 1 or self.connect is not None:
            yield None
        elif self.replicas.cluster_address is not None:
            yield self.replicas.cluster_address
        else:
            folder = await anyio.to_thread.run_sync(PrivateFolder)
            try:
                yield str(folder.address(CLUSTER_SOCKET))
            finally:
                with anyio.CancelScope(shield=True):
                    await anyio.to_thread.run_sync(folder.remove)

    async def _start(self, cluster_address: str | None) -> Engine:
        """Start the engine here, or connect to it."""
        if self.connect is not None:
            return await Engine.connect(self.connect, model=self.model, keys=self.keys, client=self.client)
        options = self.replicas
        if cluster_address is not None:
            options = replace(options, cluster_address=cluster_address)
        is_one = options == ReplicaOptions()
        return await Engine.start(process=self.process, replicas=1 if is_one else options, **asdict(self.engine_config))

    async def _serve_here(self, engine: Engine) -> None:
        from aioengine.server import create_app

        app = create_app(engine, self.config)
        api: Api = app.state.api
        prepare_interpreter()
        await serve(
            app,
            engine=engine,
            listener=self.listeners[0],
            stop=self._stop,
            drain_timeout_s=self.drain_timeout_s,
            limits=self.limits,
            on_serving=lambda server: self._print_addresses(api.model_names[0], [server.url]),
            on_drain=api.drain,
        )

    async def _serve_by_processes(self, engine: Engine, address: str) -> None:
        from aioengine.server.group.serve_group import serve_group

        settings = self._settings(
            self.api_servers,
            engine_address=address,
            engine_model=self.model if self.connect is not None else None,
            engine_keys=self.keys,
            engine_client=self.client,
        )
        await serve_group(settings, self.listeners, self._stop, engine=engine, on_serving=self._print_addresses)

    def _settings(self, num_servers: int, **engine: Any) -> ServerSettings:
        from aioengine.server.group.channel import ServerSettings

        return ServerSettings(
            index=0,
            num_servers=num_servers,
            shares=[],
            where=self.listeners[0].where,
            config=self.config,
            limits=self.limits,
            drain_timeout_s=self.drain_timeout_s,
            log_format=self.log_format,
            log_descriptor=os.dup(sys.stderr.fileno()),  # this process reads each server's own stderr
            **engine,
        )

    def _print_addresses(self, model: str, urls: list[str]) -> None:
        self.has_served = True
        for url in urls:
            click.echo(f"serving {model} at {url}")
