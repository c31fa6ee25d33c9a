"""`aioengine serve`: an OpenAI-compatible server, alone in its process."""

from __future__ import annotations

import atexit
import gc
import logging
import os
import resource
import signal
import sys
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any, Literal

import anyio
import click
from msgspec.structs import replace

from aioengine import Engine
from aioengine.cli.command import exit_code_of, given, options_of, run
from aioengine.config import EngineConfig
from aioengine.errors import AioEngineError, ConfigError, EngineDead
from aioengine.own_process import asked_by_signals
from aioengine.server.config import HttpLimits, ServerConfig
from aioengine.server.http_listener import KEYFILE_PASSWORD_VARIABLE, HttpListener, ServerAddress
from aioengine.server.http_server import StopRequest, serve

if TYPE_CHECKING:
    from aioengine.server.api import Api

logger = logging.getLogger("aioengine")

API_KEY_VARIABLE = "AIOENGINE_API_KEY"
SWITCH_INTERVAL_S = 0.001
LOCAL_HOSTS = ("localhost", "127.0.0.1", "::1")
SPARE_FILES = 512
"""Files that a process needs beside its connections."""


@click.command(name="serve")
@click.argument("model_argument", metavar="[MODEL]", required=False)
@options_of(ServerAddress)
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
@click.option("--keys", metavar="FOLDER", help="keys for --connect, made by `aioengine keys`")
@click.option("--client", metavar="NAME", help="whose of them; may be left out where there are one client's")
@options_of(ServerConfig)
@options_of(HttpLimits)
@options_of(EngineConfig)
def serve_command(
    model_argument: str | None,
    drain_timeout_s: float,
    log_format: Literal["text", "json"],
    process: bool,
    connect: str | None,
    keys: str | None,
    client: str | None,
    **flags: Any,
) -> int:
    """Serve MODEL (absent: the bundled one) over HTTP, as the OpenAI API does, until Ctrl-C or SIGTERM.

    Says on stdout where, once it serves. Told to stop, it takes no new clients, and ends when what runs has ended; told
    again, it ends what runs. API keys come from --api-keys and from AIOENGINE_API_KEY (comma separated).

    Exit codes: 0 after SIGTERM, 130 after Ctrl-C, 1 when the model cannot be loaded, or the engine died or cannot be
    reached; 2 for wrong arguments, or a place that cannot be served at.
    """
    where = given(ServerAddress, flags)
    if "uds" in where and (beside := [name for name in ("host", "port") if name in where]):
        raise click.UsageError(f"--uds is instead of a port: leave --{beside[0]} out")
    if password := os.environ.get(KEYFILE_PASSWORD_VARIABLE):
        where.setdefault("ssl_keyfile_password", password)
    engine_config = given(EngineConfig, flags)
    if model_argument is not None and engine_config.setdefault("model", model_argument) != model_argument:
        raise click.UsageError("give the model once: as MODEL, or with --model")
    start = _engine_to_start(engine_config, process=process, connect=connect, keys=keys, client=client)
    server_config = _server_config(given(ServerConfig, flags))
    limits = HttpLimits(**given(HttpLimits, flags))
    from aioengine.server.access_log import logging_off_loop

    logging.getLogger("uvicorn.error").setLevel(logging.WARNING)  # below that it tells of its own steps
    stop = SignalStop()
    with logging_off_loop(log_format):
        try:
            with HttpListener(ServerAddress(**where)) as listener:
                server_config = _protected(server_config, listener)
                _allow_files(limits.max_connections + SPARE_FILES)
                run(_serve(start, listener, server_config, limits, drain_timeout_s, stop))
        except AioEngineError as error:
            if log_format == "text":
                raise
            # In the log: a line that is no JSON would break its readers. An engine's death while it serves is there.
            if not (stop.has_served and isinstance(error, EngineDead)):
                logger.error("%s", error)
            return exit_code_of(error)
    return stop.exit_code


def _protected(config: ServerConfig, listener: HttpListener) -> ServerConfig:
    """The config with what it leaves open for this place, and a line in the log on whether keys are asked for."""
    if config.api_keys:
        logger.info("asking for an API key")
    elif not listener.is_local:
        logger.warning("%s can be reached from other machines, and asks for no key: see --api-keys", listener.url)
    else:
        logger.info("no API key is asked for")
        if config.allowed_hosts is None and listener.where.uds is None:
            # Any page in a browser here could reach us, by a name of its own that it lets point to this machine.
            config = replace(config, allowed_hosts=tuple(dict.fromkeys((*LOCAL_HOSTS, listener.where.host))))
    return config


class SignalStop(StopRequest):
    """Why the process is to end, as its exit code; and whether the server has come to serve."""

    def __init__(self) -> None:
        super().__init__()
        self.exit_code = 0
        self.has_served = False

    def on_signal(self, number: signal.Signals) -> None:
        if self.num_asked == 0 and number == signal.SIGINT:
            self.exit_code = 128 + number
        self.ask()


def _engine_to_start(
    config: dict[str, Any], *, process: bool, connect: str | None, keys: str | None, client: str | None
) -> Callable[[], Awaitable[Engine]]:
    """What starts the engine; what was asked for is checked now."""
    if connect is None:
        if keys is not None or client is not None:
            raise click.UsageError("--keys and --client are for --connect")
        EngineConfig(**config)
        return lambda: Engine.start(process=process, **config)
    model = config.pop("model", None)
    if process or config:
        flags = ["process"] * process + [name.replace("_", "-") for name in config]
        raise click.UsageError(f"--{flags[0]} is for an engine that is started here, and not for --connect")
    return lambda: Engine.connect(connect, model=model, keys=keys, client=client)


def _server_config(config: dict[str, Any]) -> ServerConfig:
    variable = os.environ.get(API_KEY_VARIABLE)
    keys = [] if variable is None else [key.strip() for key in variable.split(",") if key.strip()]
    # What should have filled it has failed, and no client would be asked for a key.
    if variable is not None and not keys:
        raise ConfigError(f"{API_KEY_VARIABLE} is set, and holds no key: give one, or unset it to ask for none")
    return ServerConfig(**{**config, "api_keys": (*config.get("api_keys", ()), *keys)})


async def _serve(
    start: Callable[[], Awaitable[Engine]],
    listener: HttpListener,
    config: ServerConfig,
    limits: HttpLimits,
    drain_timeout_s: float,
    stop: SignalStop,
) -> None:
    with asked_by_signals(stop.on_signal):
        engine: Engine | None = None
        with anyio.CancelScope() as starting:
            stop.on_asked = starting.cancel
            engine = await start()
        if engine is None:
            logger.info("told to stop while the engine was starting")
            return
        async with engine:
            from aioengine.server import create_app

            app = create_app(engine, config)
            api: Api = app.state.api

            def say_where(url: str) -> None:
                stop.has_served = True
                click.echo(f"serving {api.models.names[0]} at {url}")

            prepare_interpreter()
            await serve(
                app,
                engine=engine,
                listener=listener,
                stop=stop,
                drain_timeout_s=drain_timeout_s,
                limits=limits,
                on_serving=say_where,
                on_drain=api.drain,
            )


def prepare_interpreter() -> None:
    """Settings of a process that serves, once its engine is loaded: threads that switch sooner, and no old garbage.

    Beside a thread that runs Python (templates, tokenizations, a device's dispatch) the loop was late by 1.1 ms instead
    of 5.1, beside two by 1.2 instead of 16, at a hundredth of the thread's own speed and at none of the engine's.
    What was loaded stays, and no full collection looks through it again: 345,000 objects held the loop for 0.1 s.
    """
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    gc.collect()
    gc.freeze()
    # At the exit libraries look for objects that they have made, and print a page on those that are still there.
    atexit.register(gc.unfreeze)


def _allow_files(number: int) -> None:
    """Many systems allow 1,024 open files at first, and many more when asked."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    unlimited = resource.RLIM_INFINITY
    allowed = number if hard == unlimited else min(number, hard)
    if soft != unlimited and soft < allowed:
        resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))
    if allowed < number:
        logger.warning("%d connections may be more than the %d files that this process may open", number, allowed)
