"""An engine's whole life in a process of its own: handshakes, loading, serving, the end."""

from __future__ import annotations

import asyncio
import importlib
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any

import anyio
import msgspec

from aioengine.config import MOST_HOST_SHARE, EngineConfig
from aioengine.core.control import TASKS
from aioengine.core.engine_core import EngineCore
from aioengine.core.executor_protocol import Executor
from aioengine.core.lockstep_protocol import LockstepPlace
from aioengine.core.protocol import CLOSE_DEADLINE_S, CoreHooks
from aioengine.errors import AioEngineError, ConfigError, EngineDead
from aioengine.executor.in_process import InProcess
from aioengine.processes.own_process import asked_by_signals
from aioengine.processes.progress import LOADING, OnProgress
from aioengine.processes.worker_threads import TextWorker
from aioengine.transport.addresses import PrivateFolder, address_toward
from aioengine.transport.handshake import Failing, Goodbye, Init, Loading, Ready
from aioengine.transport.joining import Endpoint, Handshake, Handshakes
from aioengine.transport.security import ServerKeys
from aioengine.transport.server import EngineServer
from aioengine.transport.wire import PROTOCOL_VERSION, WireMessage
from aioengine.transport.wire_errors import to_fault
from aioengine.validation import load_by_path

logger = logging.getLogger("aioengine")

ENGINE_SOCKET = "engine.sock"

LOADING_EVERY_BYTES = 16 * 2**20
LOADING_EVERY_S = 1.0


FRONT_END = "front end"
"""What the one that an engine joins is called among the clients that it admits."""

EnterGroup = Callable[[LockstepPlace, EngineCore], AbstractAsyncContextManager[None]]
"""Has a core step with its group while the context is open; entered when the model is loaded, until all are there."""


async def serve_engine(
    endpoints: Sequence[Endpoint],
    *,
    address: str | None = None,
    config: EngineConfig | None = None,
    own_fields: Mapping[str, Any] | None = None,
    keys: ServerKeys | None = None,
    plugins: Sequence[str] = (),
    on_serving: Callable[[EngineServer], None] = lambda _: None,
    enter_group: EnterGroup | None = None,
) -> Goodbye | None:
    """Load a model and serve it until SIGTERM or SIGINT, cancellation, or the engine's death.

    Args:
        endpoints: to shake hands with; none for an engine that is started by hand.
        address: where to serve; absent: where the endpoints say, or where one of another machine reaches this one.
        config: absent: what the endpoints say.
        own_fields: fields of that which are other ones here.
        keys: of the clients that may connect, for addresses that other machines can reach; absent: those of a front end
            that is joined with keys.
        plugins: modules to import first.
        on_serving: called once it serves.
        enter_group: for an engine that the endpoints give a place in a group.
    Returns:
        what the front end that it has joined said in the end; None: it was told to end here.
    Raises:
        ConfigError, ModelLoadError, EngineDead: it cannot start, or has died; the endpoints have heard of it.
    """
    goodbye: Goodbye | None = None
    with anyio.CancelScope() as scope, asked_by_signals(lambda _: scope.cancel()):
        worker = TextWorker()
        shakers = Handshakes(endpoints, worker)
        try:
            init = await shakers.greet()
            options = _resolve_options(init, address, config, own_fields or {}, plugins)
            for each in endpoints:
                if options.address is None and not each.is_local:
                    own = await worker.run(partial(address_toward, each.address, has_keys=each.keys is not None), None)
                    options = msgspec.structs.replace(options, address=own)
                if keys is None and each.keys is not None:
                    keys = each.keys.as_server(FRONT_END)
            goodbye = await _serve_while_wanted(options, keys, shakers, on_serving, enter_group)
        except Exception as error:
            shakers.tell(Failing(to_fault(error)))
            raise
        finally:
            with _closing():
                await shakers.aclose()
                await worker.aclose()
    if scope.cancel_called:
        logger.info("the engine has ended as it was told")
    elif goodbye is not None:
        logger.info("the engine has ended: %s", goodbye.reason)
    return goodbye


async def _serve_while_wanted(
    options: Init,
    keys: ServerKeys | None,
    shakers: Handshakes,
    on_serving: Callable[[EngineServer], None],
    enter_group: EnterGroup | None,
) -> Goodbye | None:
    """Serve until the engine ends, or a front end that it has joined says so or is gone."""
    goodbye: Goodbye | None = None
    failure: Exception | None = None

    async def hold(handshake: Handshake) -> None:
        nonlocal goodbye, failure
        try:
            goodbye = await handshake.hold()
        except AioEngineError as error:
            failure = error
        tasks.cancel_scope.cancel()

    async with anyio.create_task_group() as tasks:
        for handshake in shakers.joined:
            tasks.start_soon(hold, handshake)
        try:
            await serve_init(options, keys, shakers.tell, on_serving, enter_group)
        except Exception as error:  # as it is: the group would wrap it
            failure = failure or error
        tasks.cancel_scope.cancel()
    if failure is not None:
        raise failure
    return goodbye


@contextmanager
def _closing() -> Iterator[None]:
    """A way out that a cancellation does not cut short, and what hangs does not hold up for ever."""
    with anyio.CancelScope(shield=True), anyio.move_on_after(CLOSE_DEADLINE_S) as deadline:
        yield
    if deadline.cancelled_caught:
        logger.error("closing took more than %g s; what hangs is left behind", CLOSE_DEADLINE_S)


def _resolve_options(
    init: Init | None,
    address: str | None,
    config: EngineConfig | None,
    own_fields: Mapping[str, Any],
    plugins: Sequence[str],
) -> Init:
    """What this side was told and what the endpoints say, together. An address of None: in a folder of its own."""
    if init is None:
        if address is None:
            raise ConfigError("it is not said where to serve: give an address")
        init = Init(version=PROTOCOL_VERSION, index=0, num_engines=1)
    config = config or init.config
    own_fields = {**init.own_fields, **own_fields}
    if config is not None and own_fields:
        config = EngineConfig(**{**msgspec.structs.asdict(config), **own_fields})
    if config is not None and init.memory != 1.0:
        share = (config.memory_utilization or MOST_HOST_SHARE) * init.memory
        config = msgspec.structs.replace(config, memory_utilization=share)
    return msgspec.structs.replace(
        init, address=address or init.address, config=config, plugins=(*plugins, *init.plugins)
    )


async def serve_init(
    init: Init,
    keys: ServerKeys | None,
    tell: Callable[[WireMessage], None],
    on_serving: Callable[[EngineServer], None] = lambda _: None,
    enter_group: EnterGroup | None = None,
) -> None:
    """Load a model and serve it until cancelled, or until the engine's death.

    Args:
        init: what to serve, and where; an address of None is one in a folder of its own.
        tell: hears `Loading` now and then, and `Ready`.
    Raises:
        ConfigError, ModelLoadError, EngineDead: it cannot start, or has died.
    """
    worker, dump_worker = TextWorker(), TextWorker()
    try:
        await _serve(init, keys, tell, on_serving, enter_group, worker, dump_worker)
    finally:
        with _closing():
            await worker.aclose()
            await dump_worker.aclose()


async def _serve(
    init: Init,
    keys: ServerKeys | None,
    tell: Callable[[WireMessage], None],
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
        on_progress = starting.enter_context(_sending_progress(tell))
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
            tell(Ready(server.address, backend.core.info, TASKS))
            on_serving(server)
            await server.serve()
    finally:
        starting.close()
        with _closing():
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
