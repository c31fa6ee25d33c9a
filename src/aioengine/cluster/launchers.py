"""Where the engines of replicas come from: processes of this machine, or addresses at which they serve already.

Further launchers are `lockstep_launcher` and `ray_launcher`.
"""

from __future__ import annotations

import logging
import os
from functools import partial

import anyio

from aioengine.cluster.devices import HostSlots
from aioengine.cluster.replica import ReplicaBackend
from aioengine.config import EngineConfig, ProcessOptions, ReplicaOptions
from aioengine.core.protocol import CoreHooks
from aioengine.errors import ConfigError, EngineDead
from aioengine.processes.worker_threads import TextWorker
from aioengine.transport.backends import Connected, InChild, read_config
from aioengine.transport.link import Link
from aioengine.transport.security import ClientKeys, client_secret
from aioengine.transport.wire import Attached

logger = logging.getLogger("aioengine")

CONNECT_TIMEOUT_S = 10.0
"""For an engine at an address to answer."""
RETRY_S = 0.5
"""Between two looks for the first engine that answers."""


class Launcher:
    """Makes the backend of each rank: a `MakeBackend` that may hold something for all of them.

    Attributes:
        owns_engines: whether the engines are started here. Engines at addresses are not: the front end starts as soon
            as one answers, and looks for the others without end.
        pair_path: the file with the pair by which front ends connect to the replicas; empty: as `pair_in`.
    """

    owns_engines = True
    pair_path = ""

    def __call__(self, rank: int, hooks: CoreHooks) -> ReplicaBackend:
        """The backend of the replica of a rank, unopened; called again for each start.

        Raises:
            ConfigError: there is no room for it.
        """
        raise NotImplementedError

    async def open(self, worker: TextWorker, config: EngineConfig) -> EngineConfig:
        """Called first, once.

        Args:
            config: of the caller.
        Returns:
            the config of the replicas.
        Raises:
            ConfigError, EngineDead: they cannot be had.
        """
        return config

    def leave(self, rank: int) -> None:
        """The replica of this rank is about to be stopped for good."""

    async def aclose(self) -> None:
        """Called when all backends are closed. Idempotent."""


class ProcessLauncher(Launcher):
    """Launches children of this process, which share this machine."""

    def __init__(self, config: EngineConfig, process: ProcessOptions, num_replicas: int) -> None:
        self._config = config
        self._process = process
        self._num_replicas = num_replicas
        self._ranks: set[int] = set()

    async def open(self, worker: TextWorker, config: EngineConfig) -> EngineConfig:
        find = partial(HostSlots.find, self._config, self._process, self._num_replicas)
        self._slots = await worker.run(find, None)
        return config

    def __call__(self, rank: int, hooks: CoreHooks) -> ReplicaBackend:
        self._ranks.add(rank)
        config, process, env = self._share(rank, max(self._num_replicas, len(self._ranks)))
        return InChild(config, process, hooks, rank=rank, env=env)

    def _share(self, rank: int, num_local: int) -> tuple[EngineConfig, ProcessOptions, dict[str, str]]:
        """Config, options and environment of a rank's engine."""
        share = self._slots.take(rank, num_local)
        return share.config(self._config), share.options(self._process), share.environment(os.environ)

    def leave(self, rank: int) -> None:
        self._ranks.discard(rank)
        self._slots.free(rank)


class AddressLauncher(Launcher):
    """Connects to engines that serve at addresses (`aioengine engine ADDRESS`).

    Raises:
        ConfigError: a setting is that of an engine, which has its own.
    """

    owns_engines = False

    def __init__(self, config: EngineConfig, process: ProcessOptions, options: ReplicaOptions) -> None:
        defaults = EngineConfig(model=config.model)
        names = [name for name in config.__struct_fields__ if getattr(config, name) != getattr(defaults, name)]
        names += [name for name in ("visible_devices", "plugins", "executor") if getattr(process, name)]
        if names:
            raise ConfigError(f"{', '.join(names)}: give it to the engines at {', '.join(options.addresses)}")
        self._options = options
        self._model = config.model
        self._start_timeout_s = process.start_timeout_s
        self._keys: ClientKeys | None = None

    async def open(self, worker: TextWorker, config: EngineConfig) -> EngineConfig:
        """Wait for the first engine that answers; return its config."""
        folder, client = self._options.keys, self._options.client
        if folder is not None:
            self._keys = await worker.run(partial(ClientKeys.load, folder, client), None)
            self.pair_path = str((await worker.run(partial(client_secret, folder, client), None)).absolute())
        reasons: dict[str, str] = {}
        with anyio.move_on_after(self._start_timeout_s):
            while True:
                for address in self._options.addresses:
                    link = Link(worker)
                    try:
                        attached = await link.attach(
                            address, self._keys, Attached, name="a front end of replicas", timeout_s=CONNECT_TIMEOUT_S
                        )
                        return read_config(attached.config)
                    except EngineDead as error:
                        if address not in reasons:
                            logger.warning("waiting for an engine at %s: %s", address, error)
                        reasons[address] = str(error)
                    finally:
                        with anyio.CancelScope(shield=True):
                            await link.aclose()
                await anyio.sleep(RETRY_S)
        raise EngineDead(
            f"no engine answers within {self._start_timeout_s:g} s (start_timeout_s): {'; '.join(reasons.values())}"
        )

    def __call__(self, rank: int, hooks: CoreHooks) -> ReplicaBackend:
        address = self._options.addresses[rank]
        return Connected(address, hooks, model=self._model, keys=self._keys, client=None, timeout_s=CONNECT_TIMEOUT_S)
