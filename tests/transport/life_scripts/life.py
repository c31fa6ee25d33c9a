"""An engine with its process, taken to one stage of its life, where it waits for what is done to it."""

import asyncio
import contextlib
import logging
import os
import signal
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import anyio
from anyio.abc import TaskGroup
from transport.life_scripts.devices import FIFO, GO

from aioengine import Engine, ProcessOptions
from aioengine.errors import AioEngineError
from aioengine.processes.child import Child
from aioengine.transport import backends
from aioengine.transport.link import Link

STAGES = ("spawned", "loading", "ready", "idle", "busy", "asleep", "closing")
"""spawned: its process has not said HELLO; ready: it has said READY, and nobody is attached to it yet."""

START_TIMEOUT_S = 3.0
STOP_TIMEOUT_S = 0.3

_DEVICES = {"loading": "slow_to_load", "busy": "held", "closing": "clinging"}


class Life:
    """Says in lines what happens: ``child PID``, ``at STAGE``, then how requests, the start and the engine end.

    Args:
        has_deadline: the start gives up soon.
    Attributes:
        engine: once it has started.
        child_pid: once there is one.
    """

    def __init__(self, stage: str, *, says: Callable[[str], None], has_deadline: bool = False) -> None:
        self.engine: Engine | None = None
        self.child_pid = 0
        self._stage = stage
        self._says = says
        self._start_timeout_s = START_TIMEOUT_S if has_deadline else 60.0
        self._goes_on = asyncio.Event()
        self._is_told = False
        self._num_running = 0
        self._has_token = asyncio.Event()

    def go_on(self, *, is_told: bool = True) -> None:
        """Leave the stage.

        Args:
            is_told: the child, too, is let go on from where it waits; else all is closed as it is.
        """
        self._is_told = is_told
        if is_told and self._stage == "spawned":
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.child_pid, signal.SIGCONT)
        if is_told and self._stage in _DEVICES:
            os.write(self._fifo, GO)
        self._goes_on.set()

    async def run(self) -> None:
        device = _DEVICES.get(self._stage, "told")
        options = ProcessOptions(
            executor=f"transport.life_scripts.devices:{device}",
            start_timeout_s=self._start_timeout_s,
            stop_timeout_s=STOP_TIMEOUT_S,
        )
        with self._hooks():
            async with anyio.create_task_group() as callers:
                try:
                    self.engine = engine = await Engine.start(
                        process=options, heartbeat_interval_s=0.05, heartbeat_timeout_s=0.2
                    )
                except AioEngineError as error:
                    self._says(f"start failed: {type(error).__name__}: {error}")
                    return
                try:
                    await self._serve(engine, callers)
                finally:
                    with anyio.CancelScope(shield=True):
                        await engine.aclose()
        self._says("closed")

    async def _serve(self, engine: Engine, callers: TaskGroup) -> None:
        if self._stage == "asleep":
            await engine.sleep(1)
        if self._stage in ("busy", "asleep", "closing"):
            for number in range(2):
                self._num_running += 1
                callers.start_soon(self._call, engine, number)
        if self._stage in ("busy", "closing"):
            await self._has_token.wait()
        if self._stage == "closing":
            callers.start_soon(engine.aclose)  # says "closing"
        else:
            self._reach()
        await self._goes_on.wait()
        if self._is_told:
            if self._stage == "asleep":
                with contextlib.suppress(AioEngineError):
                    await engine.wake_up()
            if self._stage == "idle":
                self._num_running += 1
                await self._call(engine, 0)
            while self._num_running:  # noqa: ASYNC110
                await asyncio.sleep(0)

    async def _call(self, engine: Engine, number: int) -> None:
        ended = "finished"
        try:
            async with engine.stream([5, 6, 7 + number], max_tokens=30, ignore_eos=True) as stream:
                async for _ in stream:
                    self._has_token.set()
        except AioEngineError as error:
            ended = f"{type(error).__name__}: {error}"
        self._num_running -= 1
        self._says(f"request {number}: {ended}")

    def _reach(self) -> None:
        self._says(f"at {self._stage}")

    @contextlib.contextmanager
    def _hooks(self) -> Iterator[None]:
        # Held: what nobody has read is lost when nobody has it open.
        self._fifo = os.open(os.environ[FIFO], os.O_RDWR | os.O_NONBLOCK)
        logger, listener = logging.getLogger("aioengine"), logging.Handler()
        listener.emit = self._on_record  # type: ignore[method-assign]
        logger.addHandler(listener)
        open_link = Link.attach

        async def open_later(link: Link, *args: Any, **options: Any) -> Any:
            if self._stage == "ready":
                self._reach()
                await self._goes_on.wait()
            return await open_link(link, *args, **options)

        with (
            mock.patch.object(backends, "Child", self._make_child),
            mock.patch.object(Link, "attach", open_later),
            mock.patch.object(backends, "ATTACH_TIMEOUT_S", min(self._start_timeout_s, 10.0)),
        ):
            yield
        logger.removeHandler(listener)
        os.close(self._fifo)

    def _make_child(self, *args: Any, **options: Any) -> Child:
        child = Child(*args, **options)
        self.child_pid = child.pid
        self._says(f"child {child.pid}")
        if self._stage == "spawned":
            os.kill(child.pid, signal.SIGSTOP)
            os.waitid(os.P_PID, child.pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)
            self._reach()
        return child

    def _on_record(self, record: logging.LogRecord) -> None:
        if record.getMessage() == f"engine 0: {self._stage}":  # the devices of "loading" and "closing" say so
            self._reach()
