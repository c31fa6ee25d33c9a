"""Backends whose core is in another process: `Connected` at an address, `InChild` in a child of this one."""

from __future__ import annotations

import asyncio
import math
import os
import secrets
import sys
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import anyio
import msgspec
import zmq

from aioengine.config import EngineConfig, ProcessOptions
from aioengine.core.executor_protocol import LockstepPlace
from aioengine.core.in_process import clock_of, find
from aioengine.core.protocol import CoreHooks
from aioengine.errors import AioEngineError, ConfigError, EngineDead, InvalidRequest
from aioengine.models.folder import ModelFolder
from aioengine.processes.child import Child
from aioengine.processes.progress import OnProgress
from aioengine.transport.addresses import (
    START_DESCRIPTORS,
    PrivateFolder,
    check_descriptors,
    remove_private,
    remove_stale,
)
from aioengine.transport.channel import Channel, Context, bind, end_context, make_context
from aioengine.transport.child import TOKEN
from aioengine.transport.client import RemoteCore
from aioengine.transport.handshake import Init, Welcome, welcome
from aioengine.transport.link import Link
from aioengine.transport.security import ClientKeys
from aioengine.transport.wire import PROTOCOL_VERSION, Attached

T = TypeVar("T")


async def refuse_function(_: Any, function: Callable[[Any], T]) -> list[T]:
    raise InvalidRequest(
        "a function cannot travel to the engine's process: register it there (aioengine.worker_function, in a module "
        "named in ProcessOptions.plugins), and call it by its name with collective_rpc"
    )


class Connected:
    """A `Backend` for an engine that serves at an address; arguments are as for `Engine.connect`, or loaded keys."""

    core: RemoteCore
    cluster = None

    def __init__(
        self,
        address: str,
        hooks: CoreHooks,
        *,
        model: str | None,
        keys: str | ClientKeys | None,
        client: str | None,
        timeout_s: float,
    ) -> None:
        self._address = address
        self._hooks = hooks
        self._model = model
        self._keys = keys
        self._client = client
        self._timeout_s = timeout_s
        self._link = Link(hooks.worker)

    async def find_model(self) -> ModelFolder:
        if isinstance(self._keys, str):
            self._keys = await self._hooks.worker.run(partial(ClientKeys.load, self._keys, self._client), None)
        self._attached = attached = await self._link.attach(
            self._address, self._keys, Attached, name="a connected front end", timeout_s=self._timeout_s
        )
        # The small files of the model, from the path on the engine's machine if that is this one.
        worker, path = self._hooks.worker, Path(attached.model_path)
        if self._model is None and await worker.run(path.exists, None):
            return await worker.run(ModelFolder.read, None, path)
        config = read_config(attached.config) if self._model is None else EngineConfig(model=self._model)
        return await find(config, worker, with_weights=False)

    async def open(self, on_progress: OnProgress | None = None) -> None:
        self.core = RemoteCore(
            self._link,
            self._attached,
            config=read_config(self._attached.config),
            hooks=self._hooks,
            is_far=self._address.startswith("tcp:"),
            describe_cut=self._describe_cut,
            logs_stats=False,
        )

    apply_model = refuse_function

    async def aclose(self) -> None:
        await self._link.aclose()

    @property
    def where(self) -> str:
        """Its address, for a person."""
        return self._address

    shared_address = where
    """Where further front ends can connect."""

    @property
    def server_key(self) -> str:
        """The public key that it serves by; empty: none."""
        return self._keys.server.decode() if isinstance(self._keys, ClientKeys) else ""

    def kill(self) -> None:
        """Its process is another's."""

    def abandon(self) -> None:
        self._link.abandon()

    async def _describe_cut(self) -> str:
        return f"the connection to {self._address} was cut"


def known_fields(kind: type[msgspec.Struct], fields: dict[str, Any]) -> dict[str, Any]:
    """The options that this version knows of those that another process has sent."""
    return {name: value for name, value in fields.items() if name in kind.__struct_fields__}


def read_config(fields: dict[str, Any]) -> EngineConfig:
    """An engine's config. Raises ConfigError: a value is bad."""
    return EngineConfig(**known_fields(EngineConfig, fields))


START_SOCKET = "start.sock"

ATTACH_TIMEOUT_S = 30.0

MIN_SILENCE_S = 15.0
"""An engine that starts sends a message each second, and less often while an import or another program holds it up."""

EXIT_GRACE_S = 0.05
"""The end of a connection and that of a process are distinguished if the second is known so soon after the first."""


class InChild:
    """A `Backend` whose core is in a child process, which ends with this one.

    Args:
        rank: of the engine, where it is one of several that serve the same model.
        env: added to the process's environment.
        lockstep: its place in a group of them that compute each step together.
    """

    core: RemoteCore
    cluster = None
    server_key = ""
    """Further front ends need none: they are of this machine."""

    def __init__(
        self,
        config: EngineConfig,
        options: ProcessOptions,
        hooks: CoreHooks,
        *,
        rank: int = 0,
        env: Mapping[str, str] | None = None,
        lockstep: LockstepPlace | None = None,
    ) -> None:
        self._config = config
        self._lockstep = lockstep
        self._rank = rank
        self._options = options
        self._hooks = hooks
        self._worker = hooks.worker
        self._env = env or {}
        self.shared_address = "" if hooks.cluster is None else hooks.cluster.shared_address(rank) or ""
        """Where further front ends can connect; empty: nowhere. Its file stays while the engine lives, in a folder that
        is another's to remove."""
        self._link = Link(hooks.worker)
        self._token = secrets.token_hex(16)
        self._child: Child | None = None
        self._folder: PrivateFolder | None = None
        self._handshake: Channel | None = None
        self._served_at: str | None = None
        self._context: Context | None = None
        self._exits: deque[str] = deque()

    # The start

    async def find_model(self) -> ModelFolder:
        """Bind for the handshake and start the process, which looks for the weights itself; find the tokenizer."""

        def make_folder() -> None:
            check_descriptors(START_DESCRIPTORS)
            self._folder = PrivateFolder()  # here, so that a start that is cancelled while it waits removes it

        await self._worker.run(make_folder, None)
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
            "aioengine.transport.child",
            *("--handshake", address),
            env={TOKEN: self._token, **_importing_like_here(), **self._env},
            visible_devices=self._options.visible_devices,
            terminate_s=self._options.stop_timeout_s,
            on_exit=self._take_exit,
        )
        return await find(self._config, self._worker, with_weights=False)

    async def open(self, on_progress: OnProgress | None = None) -> None:
        await self._wait_ready(on_progress)
        assert self._served_at is not None
        try:
            attached = await self._link.attach(
                self._served_at, None, Attached, name="its parent", timeout_s=ATTACH_TIMEOUT_S
            )
        except AioEngineError as error:  # its end, where there is one, is the cause
            exit_message = await self._describe_exit_soon()
            if exit_message is None:
                raise
            raise EngineDead(exit_message) from error
        self.core = RemoteCore(
            self._link,
            attached,
            config=self._config,
            hooks=self._hooks,
            is_far=False,
            describe_cut=self._describe_cut,
            logs_stats=True,
        )
        if self.exit_message is not None:  # meanwhile
            self.core.die(EngineDead(self.exit_message))
        if not self.shared_address:  # from now on this process may be killed and leaves no file
            await self._worker.run(remove_private, None, self._served_at)

    async def _wait_ready(self, on_progress: OnProgress | None) -> None:
        """Wait until the process serves: a message comes at least each ``stall_timeout_s``, or `MIN_SILENCE_S`."""
        cluster = self._hooks.cluster
        silence_s = max(math.inf if cluster is None else cluster.stall_timeout_s, MIN_SILENCE_S)
        clock = clock_of(asyncio.get_running_loop())
        machine = Welcome(
            name=f"engine {self._rank}",
            make_init=self._make_init,
            token=self._token,
            now=clock(),
            start_timeout_s=self._options.start_timeout_s,
        )

        loaded = (0, 0)

        def on_change() -> None:
            nonlocal loaded
            silence.deadline = anyio.current_time() + silence_s
            if on_progress is not None and loaded != machine.loaded:  # else it shows that the process lives
                on_progress(*(loaded := machine.loaded))

        assert self._handshake is not None, "find_model comes first"
        with anyio.CancelScope() as silence:
            await welcome(self._handshake, machine, clock, exits=self._exits, on_change=on_change)
        if silence.cancelled_caught:
            raise EngineDead(f"engine {self._rank} has sent nothing for {silence_s:g} s while it started")
        assert machine.ready is not None
        self._served_at = machine.ready.address

    def _make_init(self) -> Init:
        """The answer to the process's HELLO.

        No other process is to connect, and should this one be killed while the model loads, no file is to be left: the
        folder goes. The engine serves in one of its own, whose name is known when it is there.
        """
        if self._folder is not None:
            self._folder.remove()
        return Init(
            version=PROTOCOL_VERSION,
            address=self.shared_address or None,
            # This side logs load and requests: once is enough.
            config=msgspec.structs.replace(self._config, log_stats_interval_s=0.0, log_requests=False),
            plugins=self._options.plugins,
            executor=self._options.executor,
            lockstep=self._lockstep,
        )

    apply_model = refuse_function

    # The process

    @property
    def where(self) -> str:
        """Its process, for a person."""
        return f"pid {self._child.pid}" if self._child is not None else ""

    @property
    def exit_message(self) -> str | None:
        """How its process has ended, if it has."""
        return self._exits[0] if self._exits else None

    async def _describe_exit_soon(self) -> str | None:
        """How its process has ended, if that is so, or becomes known now."""
        assert self._child is not None
        with anyio.move_on_after(EXIT_GRACE_S):
            await self._child.wait()
        return None if self._child.returncode is None else self._child.describe_exit()

    async def _describe_cut(self) -> str:
        still = f"the connection to its process ({self.where}) was cut, and that is still there"
        return await self._describe_exit_soon() or still

    def _take_exit(self) -> None:
        if self._child is not None and self._handshake is not None:
            self._exits.append(self._child.describe_exit())
            self._handshake.wake()
            if hasattr(self, "core"):
                # Its connection may stay open, as when something that it has started holds that. Its final message
                # comes first.
                death = EngineDead(self._exits[0])
                asyncio.get_running_loop().call_later(EXIT_GRACE_S, self.core.die, death)

    # The end

    def kill(self) -> None:
        if self._child is not None:
            self._child.kill()

    async def aclose(self) -> None:
        if self._child is not None:
            self._child.is_exit_expected = True
        try:
            async with AsyncExitStack() as parts:  # each is closed, whatever others raise
                if self._folder is not None:  # else they are removed, and the worker may have ended
                    parts.push_async_callback(self._worker.run, self._remove_files, None)
                parts.push_async_callback(end_context, self._context, self._worker)
                if self._handshake is not None:
                    parts.callback(self._handshake.close)
                if self._child is not None:
                    parts.push_async_callback(self._child.aclose)
                parts.push_async_callback(self._link.aclose)
        except BaseException:  # such as the deadline of closing, where something else holds the worker
            self.abandon()
            raise

    def abandon(self) -> None:
        self._link.abandon()
        if self._child is not None:
            self._child.abandon()
        if self._handshake is not None:
            self._handshake.close()
        if self._context is not None:
            self._context.destroy(linger=0)
        self._remove_files()

    def _remove_files(self) -> None:
        if self._folder is not None:
            self._folder.remove()
            self._folder = None
        if self._served_at is not None and not self.shared_address:
            remove_private(self._served_at)
        elif self._served_at is not None:  # it was killed, where the file is still there
            remove_stale(self._served_at.removeprefix("ipc://"))


def _importing_like_here() -> dict[str, str]:
    """The process finds the modules that lie beside this program's script, as this one does."""
    beside = [folder for folder in sys.path[:1] if folder and os.path.isabs(folder)]
    known = os.environ.get("PYTHONPATH", "")
    return {"PYTHONPATH": os.pathsep.join([*filter(None, [known]), *beside])} if beside else {}
