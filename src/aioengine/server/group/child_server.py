"""One of several HTTP servers, in its own process: an engine, an app, and the channel to the process above."""

from __future__ import annotations

import logging
import os
import socket
import sys

import anyio
import uvloop
from msgspec.structs import asdict

from aioengine.config import EngineConfig
from aioengine.engine import Engine
from aioengine.errors import AioEngineError
from aioengine.processes.own_process import allow_files, asked_by_signals, limit_spinning, prepare_interpreter
from aioengine.server.access_log import logging_off_loop
from aioengine.server.api import Api
from aioengine.server.asgi import create_app
from aioengine.server.group.channel import (
    Counted,
    ServerChannel,
    ServerSettings,
    Serving,
    SiblingServers,
    receive_settings,
)
from aioengine.server.http_listener import HttpListener
from aioengine.server.http_server import SPARE_FILES, StopRequest, serve

logger = logging.getLogger("aioengine")


def run_server(end: socket.socket) -> int:
    """Serve with the settings that come through the socket, until SIGTERM; the process's exit code."""
    settings = receive_settings(end)
    limit_spinning()  # of an engine in this process, before torch is imported
    logging.getLogger("uvicorn.error").setLevel(logging.WARNING)  # below that it logs its own steps
    with (
        open(settings.log_descriptor, "w", encoding="utf-8", errors="backslashreplace", closefd=False) as log,
        logging_off_loop(settings.log_format, stream=log, server=settings.index),
    ):
        allow_files(settings.limits.max_connections + SPARE_FILES)
        try:
            uvloop.run(_run(settings, end))
        except AioEngineError as error:
            # For the process above, which reads this process's stderr for its final message and shows it.
            os.write(sys.stderr.fileno(), f"ERROR aioengine: {type(error).__name__}: {error}\n".encode())
            return 1
    return 0


async def _run(settings: ServerSettings, end: socket.socket) -> None:
    """Serve until it is asked to end.

    Raises:
        AioEngineError: it cannot serve, or its engine has died.
    """
    stop = StopRequest()
    descriptors = settings.shares[settings.index % len(settings.shares)]
    with (
        asked_by_signals(lambda _: stop.ask()),
        HttpListener.inherited(settings.where, descriptors) as listener,
    ):
        engine: Engine | None = None
        with anyio.CancelScope() as starting:
            stop.on_asked = starting.cancel
            if not stop.num_asked:
                if settings.engine_address is None:
                    engine = await Engine.start(**asdict(settings.engine_config or EngineConfig()))
                else:
                    engine = await Engine.connect(
                        settings.engine_address,
                        model=settings.engine_model,
                        keys=settings.engine_keys,
                        client=settings.engine_client,
                    )
        if engine is not None:
            async with engine:
                await _serve(settings, engine, listener, await ServerChannel.open(end), stop)


async def _serve(
    settings: ServerSettings, engine: Engine, listener: HttpListener, channel: ServerChannel, stop: StopRequest
) -> None:
    app = create_app(engine, settings.config)
    api: Api = app.state.api
    siblings = SiblingServers(channel, settings.num_servers)
    if settings.engine_address is not None:
        api.enter_group(siblings)
    failure: AioEngineError | None = None

    def on_drain() -> None:
        """Have no socket go on accepting clients because this process holds it."""
        api.drain()
        if stop.num_asked or len(settings.shares) == 1:
            listener.refuse()  # else, as the engine has died, clients wait until this server is back
        for index, share in enumerate(settings.shares):
            if index != settings.index % len(settings.shares):
                for each in share:
                    os.close(each)

    async def send_numbers() -> None:
        while True:
            # No more numbers than of this time are lost with a server.
            await anyio.sleep(1.0)
            channel.send(Counted(await api.own_numbers()))

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(siblings.run, api.abort)
        tasks.start_soon(send_numbers)
        prepare_interpreter()
        try:
            await serve(
                app,
                engine=engine,
                listener=listener,
                stop=stop,
                drain_timeout_s=settings.drain_timeout_s,
                limits=settings.limits,
                on_serving=lambda _: channel.send(Serving(api.model_names[0])),
                on_drain=on_drain,
            )
        except AioEngineError as error:  # a group of tasks would wrap it
            failure = error
        channel.send(Counted(await api.own_numbers()))
        await channel.flush()
        tasks.cancel_scope.cancel()
    channel.close()
    if failure is not None:
        raise failure
