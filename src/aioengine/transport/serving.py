"""An engine's whole life in a process of its own: loading, serving, the end."""

from __future__ import annotations

import asyncio
import importlib
import logging
from collections.abc import Callable, Iterator
from contextlib import AbstractAsyncContextManager, ExitStack, contextmanager, nullcontext

import anyio

from aioengine.core.control import TASKS
from aioengine.core.engine_core import EngineCore
from aioengine.core.executor_protocol import Executor
from aioengine.core.lockstep_protocol import LockstepPlace
from aioengine.core.protocol import CLOSE_DEADLINE_S, CoreHooks
from aioengine.errors import ConfigError, EngineDead
from aioengine.executor.in_process import InProcess
from aioengine.processes.own_process import asked_by_signals
from aioengine.processes.progress import LOADING, OnProgress
from aioengine.processes.worker_threads import TextWorker
from aioengine.transport.addresses import PrivateFolder
from aioengine.transport.handshake import Init, Loading, Ready
from aioengine.transport.security import ServerKeys
from aioengine.transport.server import EngineServer
from aioengine.transport.wire import WireMessage
from aioengine.validation import load_by_path

logger = logging.getLogger("aioengine")

ENGINE_SOCKET = "engine.sock"

LOADING_EVERY_BYTES = 16 * 2**20
LOADING_EVERY_S = 1.0

EnterGroup = Callable[[LockstepPlace, EngineCore], AbstractAsyncContextManager[None]]
"""Has a core step with its group while the context is open; entered when the model is loaded, until all are there."""


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
    enter_group: EnterGroup | None = None,
) -> None:
    """Load a model and serve it until cancelled, or until the engine's death.

    Args:
        init: what to serve, and where; an address of None is one in a folder of its own.
        report: called with `Loading` now and then, and with `Ready`.
        enter_group: for an engine that ``init`` gives a place in a group.
    Raises:
        ConfigError, ModelLoadError, EngineDead: it cannot start, or has died.
    """
    worker, dump_worker = TextWorker(), TextWorker()
    try:
        await _serve(init, keys, report, on_serving, enter_group, worker, dump_worker)
    finally:
        with closing():
            await worker.aclose()
            await dump_worker.aclose()


async def _serve(
    init: Init,
    keys: ServerKeys | None,
    report: Callable[[WireMessage], None],
    on_serving: Callable[[EngineServer], None],
    enter_group: EnterGroup | None,
    worker: TextWorker,
    dump_worker: TextWorker,
) -> None:
    config = init.config
    if config is None:
        raise ConfigError("it is not said what to serve: give a model")
    hooks = CoreHooks(worker, dump_worker, on_capacity=lambda: None)
    starting = ExitStack()
    backend: InProcess | None = None
    folders: list[PrivateFolder] = []
    server: EngineServer | None = None
    try:
        on_progress = starting.enter_context(_sending_progress(report))
        for plugin in init.plugins:
            await worker.run(_import, None, plugin)  # which may take long, and this process be told to end meanwhile
        executor: Executor | None = None
        if init.executor is not None:
            of_group = () if init.lockstep is None else (init.lockstep,)
            executor = load_by_path(init.executor, "executor")(config, *of_group)
        backend = InProcess(config, executor, hooks)
        files = await backend.find_model()
        await backend.open(on_progress)
        address = init.address
        if address is None:
            # Noted where it is made, so that a start that is cancelled here removes it.
            await worker.run(lambda: folders.append(PrivateFolder()), None)
            address = str(folders[0].address(ENGINE_SOCKET))
        server = EngineServer(backend.core, address, model_path=files.path, keys=keys)
        async with _in_lockstep(init.lockstep, backend.core, enter_group):
            await server.open()
            starting.close()
            report(Ready(server.address, backend.core.info, TASKS))
            on_serving(server)
            await server.serve()
    finally:
        starting.close()
        with closing():
            if server is not None:
                await server.aclose()
            for folder in folders:
                await worker.run(folder.remove, None)
            if backend is not None:
                await backend.aclose()
    if backend is not None and backend.core.death is not None:
        raise EngineDead(str(backend.core.death), dump=backend.core.death.dump)


def _in_lockstep(
    place: LockstepPlace | None, core: EngineCore, enter_group: EnterGroup | None
) -> AbstractAsyncContextManager[None]:
    if place is None:
        return nullcontext()
    if enter_group is None:
        raise ConfigError("an engine in lockstep runs as aioengine.cluster.lockstep_child, and this process does not")
    return enter_group(place, core)


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
