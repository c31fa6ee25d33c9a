"""An engine's whole life in a process of its own: handshakes, loading, serving, the end."""

from __future__ import annotations

import importlib
import logging
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import NamedTuple

import anyio
import msgspec

from aioengine.config import EngineConfig
from aioengine.core.control import TASKS
from aioengine.core.executor_protocol import Executor
from aioengine.core.protocol import CLOSE_DEADLINE_S, CoreHooks
from aioengine.errors import ConfigError, EngineDead
from aioengine.executor.in_process import InProcess
from aioengine.import_path import load
from aioengine.own_process import asked_by_signals
from aioengine.progress import LOADING, OnProgress
from aioengine.text.worker import TextWorker
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
    merge_inits,
)
from aioengine.transport.link import make_dealer
from aioengine.transport.security import ClientKeys, ServerKeys
from aioengine.transport.server import EngineServer
from aioengine.transport.wire import PROTOCOL_VERSION, Reader, WireMessage, Writer
from aioengine.transport.wire_errors import to_fault

logger = logging.getLogger("aioengine")

LINGER_S = 1.0
"""For last words to reach the process that started this engine."""

ENGINE_SOCKET = "engine.sock"

LOADING_EVERY_BYTES = 16 * 2**20


class Endpoint(NamedTuple):
    """A process to shake hands with.

    Attributes:
        token: what it expects; empty where keys are the proof.
        is_local: whether this engine is a child of its machine.
    """

    address: str
    token: str = ""
    is_local: bool = True
    keys: ClientKeys | None = None


async def serve_engine(
    endpoints: Sequence[Endpoint],
    *,
    index: int = -1,
    address: str | None = None,
    config: EngineConfig | None = None,
    keys: ServerKeys | None = None,
    plugins: Sequence[str] = (),
    on_serving: Callable[[EngineServer], None] = lambda _: None,
) -> None:
    """Load a model and serve it until SIGTERM or SIGINT, cancellation, or the engine's death.

    Args:
        endpoints: to shake hands with; none for an engine that is started by hand.
        index: which engine to say HELLO as; -1: any.
        address: where to serve; absent: where the endpoints say.
        config: absent: what the endpoints say.
        keys: of the clients that may connect, for addresses that other machines can reach.
        plugins: modules to import first.
        on_serving: called once it serves.
    Raises:
        ConfigError, ModelLoadError, EngineDead: it cannot start, or has died; the endpoints have heard of it.
    """
    with anyio.CancelScope() as scope, asked_by_signals(lambda _: scope.cancel()):
        worker = TextWorker()
        shakers = _Handshakes(endpoints, worker)
        try:
            init = await shakers.greet(index)
            options = _resolve_options(init, address, config, plugins)
            await serve_init(options, keys, shakers.tell, on_serving)
        except Exception as error:
            shakers.tell(Failing(to_fault(error)))
            raise
        finally:
            with _closing():
                await shakers.aclose()
                await worker.aclose()
    if scope.cancel_called:
        logger.info("the engine has ended as it was told")


@contextmanager
def _closing() -> Iterator[None]:
    """A way out that a cancellation does not cut short, and what hangs does not hold up for ever."""
    with anyio.CancelScope(shield=True), anyio.move_on_after(CLOSE_DEADLINE_S) as deadline:
        yield
    if deadline.cancelled_caught:
        logger.error("closing took more than %g s; what hangs is left behind", CLOSE_DEADLINE_S)


def _resolve_options(
    init: Init | None, address: str | None, config: EngineConfig | None, plugins: Sequence[str]
) -> Init:
    """What this side was told and what the endpoints say, together. An address of None: in a folder of its own."""
    if init is None:
        if address is None:
            raise ConfigError("it is not said where to serve: give an address")
        init = Init(version=PROTOCOL_VERSION, index=0, num_engines=1)
    return msgspec.structs.replace(
        init, address=address or init.address, config=config or init.config, plugins=(*plugins, *init.plugins)
    )


async def serve_init(
    init: Init,
    keys: ServerKeys | None,
    tell: Callable[[WireMessage], None],
    on_serving: Callable[[EngineServer], None] = lambda _: None,
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
        await _serve(init, keys, tell, on_serving, worker, dump_worker)
    finally:
        with _closing():
            await worker.aclose()
            await dump_worker.aclose()


async def _serve(
    init: Init,
    keys: ServerKeys | None,
    tell: Callable[[WireMessage], None],
    on_serving: Callable[[EngineServer], None],
    worker: TextWorker,
    dump_worker: TextWorker,
) -> None:
    config = init.config
    if config is None:
        raise ConfigError("it is not said what to serve: give a model")
    hooks = CoreHooks(worker, dump_worker, on_capacity=lambda: None)
    for plugin in init.plugins:
        await worker.run(_import, None, plugin)  # which may take long, and this process be told to end meanwhile
    executor: Executor | None = None
    if init.executor is not None:
        executor = load(init.executor, "executor")(config)
    backend = InProcess(config, executor, hooks)
    folders: list[PrivateFolder] = []
    server: EngineServer | None = None
    try:
        files = await backend.find_model()
        await backend.open(_telling_progress(tell))
        address = init.address
        if address is None:
            # Noted where it is made, so that a start that is cancelled here removes it.
            await worker.run(lambda: folders.append(PrivateFolder()), None)
            address = str(folders[0].address(ENGINE_SOCKET))
        server = EngineServer(backend.core, address, model_path=files.path, keys=keys)
        await server.open()
        tell(Ready(server.address, backend.core.info, TASKS))
        on_serving(server)
        await server.serve()
    finally:
        with _closing():
            if server is not None:
                await server.aclose()
            for folder in folders:
                await worker.run(folder.remove, None)
            await backend.aclose()
    if backend.core.death is not None:
        raise EngineDead(str(backend.core.death), dump=backend.core.death.dump)


def _telling_progress(tell: Callable[[WireMessage], None]) -> OnProgress:
    """Tells how far the loading is, now and then."""
    told_bytes = 0

    def on_progress(done: int, total: int, what: str = LOADING) -> None:
        nonlocal told_bytes
        if what != LOADING:
            return  # what follows is short, and has no message
        if done in (0, total) or done - told_bytes >= LOADING_EVERY_BYTES:
            told_bytes = done
            tell(Loading(done, total))

    return on_progress


def _import(module: str) -> object:
    try:
        return importlib.import_module(module)
    except Exception as error:  # a module of the user's own may raise anything
        raise ConfigError(
            f"{module} cannot be imported in the engine's process: {type(error).__name__}: {error}"
        ) from error


class _Handshakes:
    """This engine's conversations with those it shakes hands with."""

    def __init__(self, endpoints: Sequence[Endpoint], worker: TextWorker) -> None:
        self._endpoints = endpoints
        self._worker = worker
        self._context: Context | None = None
        self._channels: list[tuple[Channel, Writer]] = []

    async def greet(self, index: int) -> Init | None:
        """Say HELLO to all, and wait for what they say together; None without endpoints.

        Raises:
            EngineDead: one of them is not there, turned this engine away, or did not answer in time.
        """
        if not self._endpoints:
            return None
        self._context = make_context()
        for address, token, is_local, keys in self._endpoints:
            where = await self._worker.run(partial(check_connect, address, has_keys=keys is not None), None)
            socket = make_dealer(self._context, where, keys)
            channel, writer = Channel(socket), Writer()
            self._channels.append((channel, writer))
            socket.connect(str(where))
            channel.send([writer.write(Hello(PROTOCOL_VERSION, index, token, os.getpid(), is_local))])
        inits: list[Init] = []
        with anyio.move_on_after(HELLO_TIMEOUT_S):
            # One after the other: all are needed, and a group of tasks would wrap the error that says why one is not.
            for channel, _ in self._channels:
                answer: Reader[ToEngine] = Reader(ToEngine)
                (frames, *_) = await channel.receive()
                inits.append(check_init(answer.read(frames)))
            return merge_inits(inits)
        addresses = ", ".join(endpoint.address for endpoint in self._endpoints)
        raise EngineDead(f"no answer to HELLO from {addresses} within {HELLO_TIMEOUT_S:g} s")

    def tell(self, body: WireMessage) -> None:
        """Say the same to all."""
        for channel, writer in self._channels:
            channel.send([writer.write(body)])

    async def aclose(self) -> None:
        for channel, _ in self._channels:
            channel.close(LINGER_S)
        await end_context(self._context, self._worker)
