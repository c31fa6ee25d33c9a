"""An engine's process as a child of this one: started, told what to do, awaited, ended, and what it leaves removed."""

from __future__ import annotations

import asyncio
import math
import os
import secrets
import sys
from collections import deque
from collections.abc import Callable, Mapping

import anyio
import zmq

from aioengine.config import ProcessOptions
from aioengine.errors import ConfigError, EngineDead
from aioengine.executor.in_process import clock_of
from aioengine.processes.child import Child
from aioengine.processes.progress import OnProgress
from aioengine.processes.worker_threads import TextWorker
from aioengine.transport.addresses import (
    START_DESCRIPTORS,
    PrivateFolder,
    check_descriptors,
    remove_private,
    remove_stale,
)
from aioengine.transport.channel import Channel, Context, bind, end_context, make_context
from aioengine.transport.child import TOKEN
from aioengine.transport.handshake import Init, Ready, Welcome, welcome

CHILD_MODULE = "aioengine.transport.child"

START_SOCKET = "start.sock"

MIN_SILENCE_S = 15.0
"""An engine that starts sends a message each second, and less often while an import or another program holds it up."""

EXIT_NEWS_S = 0.05
"""The end of a connection and that of a process are told apart if the second is known so soon after the first."""


class ChildEngine:
    """An engine's process.

    Args:
        rank: of the engine, for its name.
        make_init: what it is told, once it is here.
        module: what it runs: `transport.child`, or one that does more.
        env: added to its environment.
        on_exit: called on the loop, with how, when it has exited.
        stays: the file of the socket that it serves at stays while it lives, for further front ends; its folder is
            another's to remove.
    """

    def __init__(
        self,
        rank: int,
        options: ProcessOptions,
        worker: TextWorker,
        make_init: Callable[[], Init],
        *,
        module: str = CHILD_MODULE,
        env: Mapping[str, str] | None = None,
        on_exit: Callable[[str], None] = lambda _: None,
        stays: bool = False,
    ) -> None:
        self._rank = rank
        self._options = options
        self._worker = worker
        self._make_init = make_init
        self._module = module
        self._env = env or {}
        self._on_exit = on_exit
        self._stays = stays
        self._token = secrets.token_hex(16)
        self._child: Child | None = None
        self._folder: PrivateFolder | None = None
        self._handshake: Channel | None = None
        self._served_at: str | None = None
        self._context: Context | None = None
        self._exits: deque[str] = deque()

    @property
    def pid(self) -> int | None:
        return self._child.pid if self._child is not None else None

    @property
    def returncode(self) -> int | None:
        """As `Child.returncode`."""
        return self._child.returncode if self._child is not None else None

    @property
    def exit_news(self) -> str | None:
        """How it has ended, if it has."""
        return self._exits[0] if self._exits else None

    async def begin(self) -> None:
        """Bind for the handshake and start the process."""
        # Noted where it is made, so that a start that is cancelled here removes it.
        await self._worker.run(self._make_folder, None)
        assert self._folder is not None
        self._context = make_context()
        try:
            socket = self._context.socket(zmq.ROUTER)
        except zmq.ZMQError as error:
            raise ConfigError(f"no socket can be had for the start of the engine's process: {error.strerror}") from None
        address = bind(socket, self._folder.address(START_SOCKET))
        self._handshake = Channel(socket)
        self._child = Child(
            f"engine {self._rank}",
            self._module,
            *("--handshake", address),
            env={TOKEN: self._token, **_importing_like_here(), **self._env},
            visible_devices=self._options.visible_devices,
            terminate_s=self._options.stop_timeout_s,
            on_exit=self._take_exit,
        )

    async def wait_ready(self, on_progress: OnProgress | None = None, stall_timeout_s: float = math.inf) -> Ready:
        """Wait until it serves; `begin` comes first.

        Args:
            stall_timeout_s: seconds without a message, from the first one on, after which it has stalled; at least
                `MIN_SILENCE_S` are waited for one.
        Raises:
            ConfigError, ModelLoadError, EngineDead: it cannot start, or did not in time.
        """
        silence_s = max(stall_timeout_s, MIN_SILENCE_S)
        clock = clock_of(asyncio.get_running_loop())
        machine = Welcome(
            name=f"engine {self._rank}",
            make_init=self._init,
            token=self._token,
            now=clock(),
            start_timeout_s=self._options.start_timeout_s,
        )

        loaded = (0, 0)

        def on_change() -> None:
            nonlocal loaded
            silence.deadline = anyio.current_time() + silence_s
            if on_progress is not None and loaded != machine.loaded:  # else it only says that it lives
                on_progress(*(loaded := machine.loaded))

        assert self._handshake is not None, "begin comes first"
        with anyio.CancelScope() as silence:
            await welcome(self._handshake, machine, clock, exits=self._exits, on_change=on_change)
        if silence.cancelled_caught:
            raise EngineDead(f"engine {self._rank} has sent nothing for {silence_s:g} s while it started")
        assert machine.ready is not None
        self._served_at = machine.ready.address
        return machine.ready

    async def hide(self) -> None:
        """Remove the file of the socket that it serves at, once it is connected to: it may be killed then and leaves
        none."""
        if self._served_at is not None and not self._stays:
            await self._worker.run(remove_private, None, self._served_at)

    async def wait(self) -> str:
        """Wait until it has exited; returns how."""
        assert self._child is not None
        await self._child.wait()
        return self._child.describe_exit()

    async def soon_exit_news(self) -> str | None:
        """How it has ended, if that is so, or becomes known now."""
        with anyio.move_on_after(EXIT_NEWS_S):
            await self.wait()
        return None if self.returncode is None else await self.wait()

    def expect_exit(self) -> None:
        """Its exit is no failure from now on."""
        if self._child is not None:
            self._child.is_exit_expected = True

    async def aclose(self) -> None:
        """End it, as `Child.aclose`. Idempotent."""
        self.expect_exit()
        try:
            if self._child is not None:
                await self._child.aclose()
        finally:
            if self._handshake is not None:
                self._handshake.close()
            try:
                await end_context(self._context, self._worker)
                if self._folder is not None:  # else they are removed, and the worker may have ended
                    await self._worker.run(self._remove_files, None)
            except asyncio.CancelledError:  # the deadline, where something else holds the worker
                self.abandon()
                raise

    def kill(self) -> None:
        """As `Child.kill`."""
        if self._child is not None:
            self._child.kill()

    def abandon(self) -> None:
        """As `Child.abandon`."""
        if self._child is not None:
            self._child.abandon()
        if self._handshake is not None:
            self._handshake.close()
        if self._context is not None:
            self._context.destroy(linger=0)
        self._remove_files()

    def _make_folder(self) -> None:
        check_descriptors(START_DESCRIPTORS)
        self._folder = PrivateFolder()

    def _remove_files(self) -> None:
        if self._folder is not None:
            self._folder.remove()
            self._folder = None
        if self._served_at is not None and not self._stays:
            remove_private(self._served_at)
        elif self._served_at is not None:  # it was killed, where the file is still there
            remove_stale(self._served_at.removeprefix("ipc://"))

    def _take_exit(self) -> None:
        if self._child is not None and self._handshake is not None:
            self._exits.append(self._child.describe_exit())
            self._handshake.wake()
            self._on_exit(self._exits[0])

    def _init(self) -> Init:
        """What the process is told now that it is here.

        No other process is to connect, and should this one be killed while the model loads, no file is to be left: the
        folder goes. The engine serves in one of its own, whose name is known when it is there.
        """
        if self._folder is not None:
            self._folder.remove()
        return self._make_init()


def _importing_like_here() -> dict[str, str]:
    """The process finds the modules that lie beside this program's script, as this one does."""
    beside = [folder for folder in sys.path[:1] if folder and os.path.isabs(folder)]
    known = os.environ.get("PYTHONPATH", "")
    return {"PYTHONPATH": os.pathsep.join([*filter(None, [known]), *beside])} if beside else {}
