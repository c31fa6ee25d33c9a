"""`Connected`: a backend whose core serves at an address already."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from aioengine.config import EngineConfig
from aioengine.core.protocol import CoreHooks
from aioengine.errors import InvalidRequest
from aioengine.executor.in_process import find
from aioengine.models.folder import ModelFolder
from aioengine.processes.progress import OnProgress
from aioengine.transport.client import RemoteCore
from aioengine.transport.link import Link
from aioengine.transport.security import ClientKeys
from aioengine.transport.wire import Attached

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


def known_fields(kind: type[msgspec.Struct], fields: dict[str, Any]) -> dict[str, Any]:
    """The options that this version knows of those that another process has sent."""
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
