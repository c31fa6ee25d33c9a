"""Backends whose core is in another process: a child of this one, or one that serves already."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from aioengine.config import EngineConfig, ProcessOptions
from aioengine.core.lockstep_protocol import LockstepPlace
from aioengine.core.protocol import CoreHooks
from aioengine.errors import AioEngineError, EngineDead, InvalidRequest
from aioengine.executor.in_process import find
from aioengine.models.folder import ModelFolder
from aioengine.processes.progress import OnProgress
from aioengine.transport.child_engine import CHILD_MODULE, EXIT_NEWS_S, ChildEngine
from aioengine.transport.client import RemoteCore
from aioengine.transport.handshake import Init
from aioengine.transport.link import Link
from aioengine.transport.security import ClientKeys
from aioengine.transport.wire import PROTOCOL_VERSION, Attached

T = TypeVar("T")

ATTACH_TIMEOUT_S = 30.0


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
        self._attached = attached = await self._link.open(
            self._address, self._keys, name="a connected front end", timeout_s=self._timeout_s
        )
        return await _find_tokenizer(attached, self._model, self._hooks)

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


class InChild:
    """A `Backend` whose core is in a child process, which ends with this one.

    Args:
        rank: of the engine, where it is one of several that serve the same model.
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
        module: str = CHILD_MODULE,
        lockstep: LockstepPlace | None = None,
    ) -> None:
        self._config = config
        self._lockstep = lockstep
        self._rank = rank
        self._options = options
        self._hooks = hooks
        self._address = None if hooks.cluster is None else hooks.cluster.shared_address(rank)
        self._engine = ChildEngine(
            *(rank, options, hooks.worker, self._make_init),
            module=module,
            env=env,
            on_exit=self._on_exit,
            stays=self._address is not None,
        )
        self._link = Link(hooks.worker)

    async def find_model(self) -> ModelFolder:
        await self._engine.begin()
        # What a tokenizer is made of; the engine's process looks for the weights itself.
        return await find(self._config, self._hooks.worker, with_weights=False)

    async def open(self, on_progress: OnProgress | None = None) -> None:
        cluster = self._hooks.cluster
        ready = await self._engine.wait_ready(on_progress, math.inf if cluster is None else cluster.stall_timeout_s)
        try:
            attached = await self._link.open(ready.address, None, name="its parent", timeout_s=ATTACH_TIMEOUT_S)
        except AioEngineError as error:  # its end, where there is one, is the cause
            exit_news = await self._engine.soon_exit_news()
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
        if self._engine.exit_news is not None:  # meanwhile
            self.core.die(EngineDead(self._engine.exit_news))
        # From now on this process may be killed and leaves no file.
        await self._engine.hide()

    apply_model = refuse_function

    async def aclose(self) -> None:
        self._engine.expect_exit()
        try:
            try:
                await self._link.aclose()
            finally:
                await self._engine.aclose()
        except BaseException:  # such as the deadline of closing, where something else holds the worker
            self.abandon()
            raise

    @property
    def shared_address(self) -> str:
        """Where further front ends can connect; empty: nowhere."""
        return self._address or ""

    @property
    def exit_news(self) -> str | None:
        """How its process has ended, if it has."""
        return self._engine.exit_news

    @property
    def where(self) -> str:
        """Its process, for a person."""
        return f"pid {self._engine.pid}" if self._engine.pid is not None else ""

    def kill(self) -> None:
        self._engine.kill()

    def abandon(self) -> None:
        self._link.abandon()
        self._engine.abandon()  # last: it removes files

    def _on_exit(self, description: str) -> None:
        if hasattr(self, "core"):
            # Its connection may not tell, as when something that it has started holds that open. Last words come first.
            asyncio.get_running_loop().call_later(EXIT_NEWS_S, self.core.die, EngineDead(description))

    def _make_init(self) -> Init:
        return Init(
            version=PROTOCOL_VERSION,
            address=self._address,
            # This side logs load and requests: once is enough.
            config=msgspec.structs.replace(self._config, log_stats_interval_s=0.0, log_requests=False),
            plugins=self._options.plugins,
            executor=self._options.executor,
            lockstep=self._lockstep,
        )

    async def _describe_cut(self) -> str:
        still = f"the connection to its process (pid {self._engine.pid}) was cut, and that is still there"
        return await self._engine.soon_exit_news() or still


def known_fields(kind: type[msgspec.Struct], fields: dict[str, Any]) -> dict[str, Any]:
    """What another process has told of its options, which may be of a version that has others."""
    return {name: value for name, value in fields.items() if name in kind.__struct_fields__}


def read_config(fields: dict[str, Any]) -> EngineConfig:
    """An engine's config. Raises ConfigError: a value is bad."""
    return EngineConfig(**known_fields(EngineConfig, fields))


async def _find_tokenizer(attached: Attached, model: str | None, hooks: CoreHooks) -> ModelFolder:
    """The small files of an engine's model, from where its machine has them if that is this one."""
    path = Path(attached.model_path)
    if model is None and await hooks.worker.run(path.exists, None):
        return await hooks.worker.run(ModelFolder.read, None, path)
    config = read_config(attached.config) if model is None else EngineConfig(model=model)
    return await find(config, hooks.worker, with_weights=False)
