"""An engine that this loop serves at an address; and a way to it that can be cut, or go silent."""

import contextlib
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from typing import Self

import anyio
from anyio.abc import SocketAttribute, SocketStream

from aioengine.config import EngineConfig
from aioengine.core.executor_protocol import Executor
from aioengine.core.in_process import InProcess
from aioengine.core.protocol import CoreHooks
from aioengine.processes.worker_threads import TextWorker
from aioengine.transport.security import ServerKeys
from aioengine.transport.server import EngineServer


@contextlib.asynccontextmanager
async def served(
    address: str,
    executor: Executor,
    *,
    keys: ServerKeys | None = None,
    kind: type[EngineServer] = EngineServer,
    **config: float,
) -> AsyncIterator[EngineServer]:
    """A server that runs; `EngineServer.address` is where."""
    worker, dump_worker = TextWorker(), TextWorker()
    around = CoreHooks(worker, dump_worker, on_capacity=lambda: None)
    backend = InProcess(EngineConfig(**config), executor, around)  # type: ignore[arg-type]
    try:
        files = await backend.find_model()
        await backend.open()
        server = kind(backend.core, address, model_path=files.path, keys=keys)
        await server.open()
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(server.serve)
            yield server
            tasks.cancel_scope.cancel()
    finally:
        await backend.aclose()
        await worker.aclose()
        await dump_worker.aclose()


class Forwarder:
    """Hands on what comes to ``address`` by TCP, in both directions."""

    address: str

    def __init__(self) -> None:
        self.is_silent = False
        self._target = ("", 0)
        self._scopes: set[anyio.CancelScope] = set()

    async def __aenter__(self) -> Self:
        self._stack = AsyncExitStack()
        listener = await self._stack.enter_async_context(await anyio.create_tcp_listener(local_host="127.0.0.1"))
        tasks = await self._stack.enter_async_context(anyio.create_task_group())
        self._stack.callback(tasks.cancel_scope.cancel)
        port = listener.extra(SocketAttribute.local_port)
        self.address = f"tcp://127.0.0.1:{port}"
        tasks.start_soon(listener.serve, self._forward)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stack.aclose()

    def to(self, address: str) -> str:
        """From now on those who come are taken there. → where to come."""
        host, _, port = address.removeprefix("tcp://").rpartition(":")
        self._target = (host, int(port))
        return self.address

    def cut(self) -> None:
        """Close all connections, on both sides."""
        for scope in self._scopes:
            scope.cancel()

    def be_silent(self) -> None:
        """From now on all that comes is lost, the ends of connections included."""
        self.is_silent = True

    async def _forward(self, near: SocketStream) -> None:
        async with near, await anyio.connect_tcp(*self._target) as far, anyio.create_task_group() as tasks:
            self._scopes.add(tasks.cancel_scope)
            tasks.start_soon(self._pump, near, far, tasks.cancel_scope)
            tasks.start_soon(self._pump, far, near, tasks.cancel_scope)
        self._scopes.discard(tasks.cancel_scope)

    async def _pump(self, source: SocketStream, sink: SocketStream, scope: anyio.CancelScope) -> None:
        with contextlib.suppress(anyio.EndOfStream, anyio.BrokenResourceError, anyio.ClosedResourceError):
            async for data in source:
                if not self.is_silent:
                    await sink.send(data)
        if not self.is_silent:
            scope.cancel()
