"""Every way in which an engine can be had, opened alike."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import anyio
import pytest
from contract import fakes

from aioengine import Engine, EngineConfig
from aioengine.config import ProcessOptions
from aioengine.core.in_process import InProcess
from aioengine.core.protocol import CoreHooks
from aioengine.processes.worker_threads import TextWorker
from aioengine.transport.addresses import PrivateFolder
from aioengine.transport.server import EngineServer

BOTH_LOOPS = pytest.mark.asyncio(loop_scope="module", loop_factories=["asyncio", "uvloop"])
"""Both at night. On each change uvloop for the way "served", where both sides are on it, and asyncio for others."""
WAYS = ("in_process", "served", "child")
REMOTE = ("served", "child")
DEADLINE_S = 20.0
"""Of a wait that takes milliseconds."""
SOON_BEATS: dict[str, Any] = {"heartbeat_interval_s": 0.02, "log_stats_interval_s": 0.0}


class Serving:
    """An `EngineServer` in this loop, by hand: what ``aioengine engine`` runs in a process of its own."""

    address: str

    def __init__(self, config: EngineConfig, device: str) -> None:
        self._workers = TextWorker(), TextWorker()
        around = CoreHooks(*self._workers, on_capacity=lambda: None)
        self._backend = InProcess(config, getattr(fakes, device)(config), around)
        self._folder: PrivateFolder | None = None
        self._scope = anyio.CancelScope()

    async def open(self, scheme: str) -> None:
        if scheme == "ipc":
            self._folder = await asyncio.to_thread(PrivateFolder)
            asked_for = f"ipc://{self._folder.path}/engine.sock"
        else:
            asked_for = "tcp://127.0.0.1:0"
        files = await self._backend.find_model()
        await self._backend.open()
        server = EngineServer(self._backend.core, asked_for, model_path=files.path)
        await server.open()
        self.address = server.address
        self._task = asyncio.get_running_loop().create_task(self._serve(server), name="server")

    async def _serve(self, server: EngineServer) -> None:
        with self._scope:
            await server.serve()

    async def aclose(self) -> None:
        self._scope.cancel()
        await asyncio.wait({self._task})
        self._task.result()
        await self._backend.aclose()
        for worker in self._workers:
            await worker.aclose()
        if self._folder is not None:
            await asyncio.to_thread(self._folder.remove)


class Opener:
    """Opens engines of one way, and closes them all.

    Args:
        way: one of `WAYS`, or "tcp".
    """

    def __init__(self, way: str) -> None:
        self.way = way
        self._closers: list[Callable[[], Awaitable[None]]] = []

    async def open(self, device: str = "make", **config: Any) -> Engine:
        """A started engine over `fakes.make`, or another device."""
        config = {**SOON_BEATS, **config}
        if self.way == "in_process":
            engine = await Engine.start(executor=getattr(fakes, device)(EngineConfig(**config)), **config)
        elif self.way == "child":
            engine = await Engine.start(process=ProcessOptions(executor=f"contract.fakes:{device}"), **config)
        else:
            return await self.connect(await self.serve(device, **config))
        self._closers.append(engine.aclose)
        return engine

    async def serve(self, device: str = "make", **config: Any) -> Serving:
        """An engine that serves, for those who connect to it."""
        serving = Serving(EngineConfig(**{**SOON_BEATS, **config}), device)
        await serving.open("tcp" if self.way == "tcp" else "ipc")
        self._closers.append(serving.aclose)
        return serving

    async def connect(self, serving: Serving) -> Engine:
        engine = await Engine.connect(serving.address)
        self._closers.append(engine.aclose)
        return engine

    def forget(self, opened: Engine | Serving) -> None:
        """The test has closed it."""
        self._closers.remove(opened.aclose)

    async def aclose(self) -> None:
        while self._closers:
            await self._closers.pop()()


async def until_async(is_so: Callable[[], Awaitable[Any]]) -> None:
    """Ask until it is so."""
    with anyio.fail_after(DEADLINE_S):
        while not await is_so():  # noqa: ASYNC110 - no event tells
            await asyncio.sleep(0)


def has_load(engine: Engine, *, running: int | None = None, waiting: int | None = None) -> Callable[[], bool]:
    """Whether the engine says that so many sequences run, and wait."""

    def is_so() -> bool:
        stats = engine.stats()
        return running in (None, stats.running) and waiting in (None, stats.waiting)

    return is_so


def told(output: Any) -> Any:
    """All that a request has brought, but for its name, its times, and what happened to be cached."""
    return (output.prompt, output.prompt_token_ids, output.outputs, output.finished, output.prompt_logprobs)


def ids_of(output: Any) -> list[list[int]]:
    return [completion.token_ids for completion in output.outputs]


def reasons_of(output: Any) -> list[str | None]:
    return [completion.finish_reason for completion in output.outputs]


async def error_of(work: Awaitable[Any]) -> Exception:
    """The error that it raises."""
    try:
        await work
    except Exception as error:
        return error
    raise AssertionError("it raised nothing")


async def same_output(engine: Engine, reference: Engine, prompt: Any, **sampling: Any) -> Any:
    """What a request brings, which is the same of both."""
    output = await engine.generate(prompt, **sampling)
    assert told(output) == told(await reference.generate(prompt, **sampling))
    return output


async def same_error(engine: Engine, reference: Engine, call: Callable[[Engine], Awaitable[Any]]) -> Any:
    """`described`, which is the same of both."""
    here, there = [described(await error_of(call(each))) for each in (engine, reference)]
    assert here == there
    return here


def described(error: Exception) -> tuple[type, str, Any]:
    """What a caller sees of an error."""
    return type(error), str(error), getattr(error, "param", None)
