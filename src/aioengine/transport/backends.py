"""Backends whose core is in another process: a child of this one, or one that serves already."""

from __future__ import annotations

import asyncio
import os
import secrets
import sys
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import anyio
import msgspec
import zmq

from aioengine.config import EngineConfig, ProcessOptions
from aioengine.core.protocol import CoreHooks
from aioengine.errors import AioEngineError, ConfigError, EngineDead, InvalidRequest
from aioengine.executor.in_process import clock_of, find
from aioengine.models.folder import ModelFolder
from aioengine.progress import OnProgress
from aioengine.transport.addresses import START_DESCRIPTORS, PrivateFolder, check_descriptors, remove_private
from aioengine.transport.channel import Channel, Context, bind, end_context, make_context
from aioengine.transport.child import TOKEN
from aioengine.transport.client import RemoteCore
from aioengine.transport.handshake import Init, Welcome, welcome
from aioengine.transport.link import Link
from aioengine.transport.process import Child
from aioengine.transport.security import ClientKeys
from aioengine.transport.wire import PROTOCOL_VERSION, Attached

T = TypeVar("T")

CHILD_MODULE = "aioengine.transport.child"

START_SOCKET = "start.sock"

ATTACH_TIMEOUT_S = 30.0

EXIT_NEWS_S = 0.05
"""The end of a connection and that of a process are told apart if the second is known so soon after the first."""


async def refuse_function(_: Any, function: Callable[[Any], T]) -> list[T]:
    raise InvalidRequest(
        "a function cannot travel to the engine's process: register it there (aioengine.worker_function, in a module "
        "named in ProcessOptions.plugins), and call it by its name with collective_rpc"
    )


class Connected:
    """A `Backend` for an engine that serves at an address; arguments are as for `Engine.connect`."""

    core: RemoteCore
    cluster = None

    def __init__(
        self,
        address: str,
        hooks: CoreHooks,
        *,
        model: str | None,
        keys: str | None,
        client: str | None,
        timeout_s: float,
    ) -> None:
        self._address = address
        self._hooks = hooks
        self._model = model
        self._keys_folder = keys
        self._client = client
        self._timeout_s = timeout_s
        self._link = Link(hooks.worker)

    async def find_model(self) -> ModelFolder:
        keys, folder = None, self._keys_folder
        if folder is not None:
            keys = await self._hooks.worker.run(lambda: ClientKeys.load(folder, self._client), None)
        self._attached = attached = await self._link.open(
            self._address, keys, name="a connected front end", timeout_s=self._timeout_s
        )
        return await _find_tokenizer(attached, self._model, self._hooks)

    async def open(self, on_progress: OnProgress | None = None) -> None:
        self.core = RemoteCore(
            self._link,
            self._attached,
            config=_read_config(self._attached.config),
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

    def abandon(self) -> None:
        self._link.abandon()

    async def _describe_cut(self) -> str:
        return f"the connection to {self._address} was cut"


class InChild:
    """A `Backend` whose core is in a child process, which ends with this one.

    Args:
        rank: of the engine, where it is one of several that serve the same model.
    """

    core: RemoteCore
    cluster = None

    def __init__(self, config: EngineConfig, options: ProcessOptions, hooks: CoreHooks, *, rank: int = 0) -> None:
        self._config = config
        self._rank = rank
        self._options = options
        self._hooks = hooks
        self._token = secrets.token_hex(16)
        self._child: Child | None = None
        self._folder: PrivateFolder | None = None
        self._handshake: Channel | None = None
        self._served_at: str | None = None
        self._link = Link(hooks.worker)
        self._context: Context | None = None
        self._exits: deque[tuple[int, str]] = deque()

    async def find_model(self) -> ModelFolder:
        # Noted where it is made, so that a start that is cancelled here removes it.
        await self._hooks.worker.run(self._make_folder, None)
        self._begin()
        # What a tokenizer is made of; the engine's process looks for the weights itself.
        return await find(self._config, self._hooks.worker, with_weights=False)

    async def open(self, on_progress: OnProgress | None = None) -> None:
        clock = clock_of(asyncio.get_running_loop())
        machine = Welcome(
            num_local=1,
            make_init=self._make_init,
            token=self._token,
            now=clock(),
            start_timeout_s=self._options.start_timeout_s,
        )

        def on_change() -> None:
            done, total = machine.engines[0].loaded
            if on_progress is not None and total:
                on_progress(done, total)

        assert self._handshake is not None, "find_model comes first"
        await welcome(self._handshake, machine, clock, exits=self._exits, on_change=on_change)
        ready = machine.engines[0].ready
        assert ready is not None
        self._served_at = ready.address
        try:
            attached = await self._link.open(ready.address, None, name="its parent", timeout_s=ATTACH_TIMEOUT_S)
        except AioEngineError as error:  # its end, where there is one, is the cause
            exit_news = await self._exit_news()
            if exit_news is None:
                raise
            raise EngineDead(exit_news) from error
        self.core = RemoteCore(
            self._link,
            attached,
            config=self._config,
            hooks=self._hooks,
            is_far=False,
            describe_cut=self._describe_cut,
            logs_stats=True,
        )
        if self._exits:  # meanwhile
            self.core.die(EngineDead(self._exits[0][1]))
        # From now on this process may be killed and leaves no file.
        await self._hooks.worker.run(remove_private, None, ready.address)

    apply_model = refuse_function

    async def aclose(self) -> None:
        if self._child is not None:
            self._child.is_exit_expected = True
        try:
            await self._link.aclose()
        finally:
            try:
                if self._child is not None:
                    await self._child.aclose()
            finally:
                if self._handshake is not None:
                    self._handshake.close()
                try:
                    await end_context(self._context, self._hooks.worker)
                    await self._hooks.worker.run(self._remove_files, None)
                except asyncio.CancelledError:  # the deadline, where something else holds the worker
                    self.abandon()
                    raise

    @property
    def where(self) -> str:
        """Its process, for a person."""
        return f"pid {self._child.pid}" if self._child is not None else ""

    def abandon(self) -> None:
        if self._child is not None:
            self._child.abandon()
        if self._handshake is not None:
            self._handshake.close()
        if self._context is not None:
            self._context.destroy(linger=0)
        self._link.abandon()
        self._remove_files()

    def _make_folder(self) -> None:
        check_descriptors(START_DESCRIPTORS)
        self._folder = PrivateFolder()

    def _remove_files(self) -> None:
        if self._folder is not None:
            self._folder.remove()
        if self._served_at is not None:
            remove_private(self._served_at)

    def _begin(self) -> None:
        """Bind for the handshake and start the process."""
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
            CHILD_MODULE,
            *("--handshake", address, "--index", "0"),
            env={TOKEN: self._token, **_importing_like_here()},
            visible_devices=self._options.visible_devices,
            terminate_s=self._options.stop_timeout_s,
            on_exit=self._on_exit,
        )

    def _on_exit(self) -> None:
        if self._child is not None and self._handshake is not None:
            self._exits.append((0, self._child.describe_exit()))
            self._handshake.wake()
            if hasattr(self, "core"):
                # Its connection may not tell, as when something that it has started holds that open. Last words come
                # first.
                death = EngineDead(self._exits[0][1])
                asyncio.get_running_loop().call_later(EXIT_NEWS_S, self.core.die, death)

    async def _exit_news(self) -> str | None:
        """How the process has ended, if that is so, or becomes known now."""
        assert self._child is not None
        with anyio.move_on_after(EXIT_NEWS_S):
            await self._child.wait()
        return None if self._child.returncode is None else self._child.describe_exit()

    def _make_init(self, index: int) -> Init:
        """What the process is told now that it is here.

        No other process is to connect, and should this one be killed while the model loads, no file is to be left: the
        folder goes. The engine serves in one of its own, whose name is known when it is there.
        """
        if self._folder is not None:
            self._folder.remove()
        return Init(
            version=PROTOCOL_VERSION,
            index=self._rank,
            num_engines=1,
            # This side logs load and requests: once is enough.
            config=msgspec.structs.replace(self._config, log_stats_interval_s=0.0, log_requests=False),
            plugins=self._options.plugins,
            executor=self._options.executor,
        )

    async def _describe_cut(self) -> str:
        assert self._child is not None
        still = f"the connection to its process (pid {self._child.pid}) was cut, and that is still there"
        return await self._exit_news() or still


def _importing_like_here() -> dict[str, str]:
    """The process finds the modules that lie beside this program's script, as this one does."""
    beside = [folder for folder in sys.path[:1] if folder and os.path.isabs(folder)]
    known = os.environ.get("PYTHONPATH", "")
    return {"PYTHONPATH": os.pathsep.join([*filter(None, [known]), *beside])} if beside else {}


def _read_config(fields: dict[str, Any]) -> EngineConfig:
    """An engine's config, of a version that may have settings which this one does not know.

    Raises:
        ConfigError: a value is bad.
    """
    known = EngineConfig.__struct_fields__
    return EngineConfig(**{name: value for name, value in fields.items() if name in known})


async def _find_tokenizer(attached: Attached, model: str | None, hooks: CoreHooks) -> ModelFolder:
    """The small files of an engine's model, from where its machine has them if that is this one."""
    path = Path(attached.model_path)
    if model is None and await hooks.worker.run(path.exists, None):
        return await hooks.worker.run(ModelFolder.read, None, path)
    config = _read_config(attached.config) if model is None else EngineConfig(model=model)
    return await find(config, hooks.worker, with_weights=False)
