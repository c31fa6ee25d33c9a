"""An engine's whole life in a process of its own: its half of the handshake, loading, serving, the end."""

from __future__ import annotations

import asyncio
import importlib
import logging
import os
from collections.abc import Callable, Iterator
from contextlib import AsyncExitStack, ExitStack, contextmanager

import anyio

from aioengine.core.control import TASKS
from aioengine.core.executor_protocol import Executor
from aioengine.core.in_process import InProcess
from aioengine.core.protocol import CLOSE_DEADLINE_S, CoreHooks
from aioengine.errors import ConfigError, EngineDead
from aioengine.processes.own_process import asked_by_signals
from aioengine.processes.progress import LOADING, OnProgress
from aioengine.processes.worker_threads import TextWorker
from aioengine.transport.addresses import PrivateFolder, check_connect
from aioengine.transport.channel import Channel, Context, end_context, make_context
from aioengine.transport.handshake import (
    HELLO_TIMEOUT_S,
    Failing,
    Hello,
    Init,
    Loading,
    Ready,
    ToEngine,
    check_init,
)
from aioengine.transport.link import make_dealer
from aioengine.transport.security import ServerKeys
from aioengine.transport.server import EngineServer
from aioengine.transport.wire import PROTOCOL_VERSION, Reader, WireMessage, Writer, to_fault
from aioengine.validation import load_by_path

logger = logging.getLogger("aioengine")

ENGINE_SOCKET = "engine.sock"

LOADING_EVERY_BYTES = 16 * 2**20
LOADING_EVERY_S = 1.0

LINGER_S = 1.0
"""How long the final message may take to reach the parent."""

LOCKSTEP_MODULE = "aioengine.cluster.lockstep_group"
"""Loaded by name, as it is of a higher floor. Its ``in_lockstep`` has a core step with its group while the context is
open; it is entered when the model is loaded, until all are there."""


async def serve_engine(
    init: Init, keys: ServerKeys | None = None, on_serving: Callable[[EngineServer], None] = lambda _: None
) -> None:
    """Load a model and serve it until SIGTERM or SIGINT, cancellation, or the engine's death.

    Args:
        init: what to serve, and where.
        keys: of the clients that may connect, for addresses that other machines can reach.
        on_serving: called once it serves.
    Raises:
        ConfigError, ModelLoadError, EngineDead: it cannot start, or has died.
    """
    with anyio.CancelScope() as scope, asked_by_signals(lambda _: scope.cancel()):
        await serve_init(init, keys, on_serving=on_serving)
    if scope.cancel_called:
        logger.info("the engine has ended as it was told")


async def serve_for_parent(address: str, token: str) -> None:
    """Serve what the parent asks for until SIGTERM or SIGINT, cancellation, or the engine's death.

    Args:
        address, token: as of `Parent`.
    Raises:
        ConfigError, ModelLoadError, EngineDead: the engine cannot start, or has died; the parent was sent the reason.
    """
    with anyio.CancelScope() as scope, asked_by_signals(lambda _: scope.cancel()):
        worker = TextWorker()
        parent = Parent(address, token, worker)
        try:
            await serve_init(await parent.greet(), None, parent.report)
        except Exception as error:
            parent.report(Failing(to_fault(error)))
            raise
        finally:
            with closing():
                await parent.aclose()
                await worker.aclose()


@contextmanager
def closing() -> Iterator[None]:
    """A way out that a cancellation does not cut short, and what hangs does not hold up for ever."""
    with anyio.CancelScope(shield=True), anyio.move_on_after(CLOSE_DEADLINE_S) as deadline:
        yield
    if deadline.cancelled_caught:
        logger.error("closing took more than %g s; what hangs is left behind", CLOSE_DEADLINE_S)


async def serve_init(
    init: Init,
    keys: ServerKeys | None,
    report: Callable[[WireMessage], None] = lambda _: None,
    on_serving: Callable[[EngineServer], None] = lambda _: None,
) -> None:
    """Load a model and serve it until cancelled, or until the engine's death.

    Args:
        init: what to serve, and where; an address of None is one in a folder of its own.
        report: called with `Loading` now and then, and with `Ready`.
    Raises:
        ConfigError, ModelLoadError, EngineDead: it cannot start, or has died.
    """
    if init.config is None:
        raise ConfigError("it is not said what to serve: give a model")
    worker, dump_worker = TextWorker(), TextWorker()
    starting = ExitStack()
    backend: InProcess | None = None
    server: EngineServer | None = None
    folders: list[PrivateFolder] = []
    try:
        on_progress = starting.enter_context(_sending_progress(report))
        for plugin in init.plugins:
            await worker.run(_import, None, plugin)  # which may take long, and this process may have to end meanwhile
        executor: Executor | None = None
        if init.executor is not None:
            of_group = () if init.lockstep is None else (init.lockstep,)
            executor = load_by_path(init.executor, "executor")(init.config, *of_group)
        backend = InProcess(init.config, executor, CoreHooks(worker, dump_worker, on_capacity=lambda: None))
        files = await backend.find_model()
        await backend.open(on_progress)
        address = init.address
        if address is None:
            # Noted where it is made, so that a start that is cancelled here removes it.
            await worker.run(lambda: folders.append(PrivateFolder()), None)
            address = str(folders[0].address(ENGINE_SOCKET))
        server = EngineServer(backend.core, address, model_path=files.path, keys=keys)
        async with AsyncExitStack() as group:
            if init.lockstep is not None:
                in_lockstep = importlib.import_module(LOCKSTEP_MODULE).in_lockstep
                await group.enter_async_context(in_lockstep(init.lockstep, backend.core))
            await server.open()
            starting.close()
            report(Ready(server.address, backend.core.info, TASKS))
            on_serving(server)
            await server.serve()
    finally:
        starting.close()
        with closing():
            async with AsyncExitStack() as parts:  # closes the last one first, and each, whatever others raise
                for part in (dump_worker, worker, backend):
                    if part is not None:
                        parts.push_async_callback(part.aclose)
                for folder in folders:
                    parts.push_async_callback(worker.run, folder.remove, None)
                if server is not None:
                    parts.push_async_callback(server.aclose)
    if backend is not None and backend.core.death is not None:
        raise EngineDead(str(backend.core.death), dump=backend.core.death.dump)


@contextmanager
def _sending_progress(send: Callable[[WireMessage], None]) -> Iterator[OnProgress]:
    """Send how far the loading is, now and then; and the same again each second, from a loop that goes on."""
    loop, sent = asyncio.get_running_loop(), Loading(0, 0)
    timer: asyncio.TimerHandle

    def on_progress(done: int, total: int, what: str = LOADING) -> None:
        nonlocal sent
        if what != LOADING:
            return  # what follows is short, and has no message
        if done in (0, total) or done - sent.done >= LOADING_EVERY_BYTES:
            sent = Loading(done, total)
            send(sent)

    def send_again() -> None:
        nonlocal timer
        send(sent)
        timer = loop.call_later(LOADING_EVERY_S, send_again)

    timer = loop.call_later(LOADING_EVERY_S, send_again)
    try:
        yield on_progress
    finally:
        timer.cancel()


def _import(module: str) -> object:
    try:
        return importlib.import_module(module)
    except Exception as error:  # a module of the user's own may raise anything
        raise ConfigError(
            f"{module} cannot be imported in the engine's process: {type(error).__name__}: {error}"
        ) from error


class Parent:
    """The process that started this engine.

    Args:
        address: where it waits for the engine.
        token: proves that it started this process.
    """

    def __init__(self, address: str, token: str, worker: TextWorker) -> None:
        self._address = address
        self._token = token
        self._worker = worker
        self._context: Context | None = None
        self._channel: Channel | None = None
        self._writer = Writer()

    async def greet(self) -> Init:
        """Send HELLO, and wait for the answer.

        Raises:
            EngineDead: the parent turned this engine away, or did not answer in time.
        """
        where = await self._worker.run(lambda: check_connect(self._address, has_keys=False), None)
        self._context = make_context()
        socket = make_dealer(self._context, where, None)
        self._channel = channel = Channel(socket)
        socket.connect(str(where))
        self.report(Hello(PROTOCOL_VERSION, self._token, os.getpid()))
        with anyio.move_on_after(HELLO_TIMEOUT_S):
            reader: Reader[ToEngine] = Reader(ToEngine)
            return check_init(reader.read((await channel.receive(1))[0]))
        raise EngineDead(f"no answer to HELLO from {where} within {HELLO_TIMEOUT_S:g} s")

    def report(self, body: WireMessage) -> None:
        if self._channel is not None:
            self._channel.send([self._writer.write(body)])

    async def aclose(self) -> None:
        if self._channel is not None:
            self._channel.close(LINGER_S)
        await end_context(self._context, self._worker)
