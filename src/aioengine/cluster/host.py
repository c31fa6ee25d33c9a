"""Engines of a machine without a front end: children that join one elsewhere, watched, and started again."""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Mapping, Sequence
from typing import Any

import anyio

from aioengine.cluster.devices import HostSlots
from aioengine.cluster.side_by_side import for_each
from aioengine.config import EngineConfig, ProcessOptions
from aioengine.errors import ConfigError, EngineDead
from aioengine.processes.backoff import Backoff
from aioengine.processes.own_process import asked_by_signals
from aioengine.processes.worker_threads import TextWorker
from aioengine.transport.child import AGAIN, BAD_CONFIG, NO_FRONT_END
from aioengine.transport.child_engine import ChildEngine
from aioengine.transport.handshake import Init
from aioengine.transport.joining import Endpoint
from aioengine.transport.wire import PROTOCOL_VERSION

logger = logging.getLogger("aioengine")

MAX_RESTARTS = 5
"""Of one engine in a row that may fail."""

BACKOFF_S, MAX_BACKOFF_S = 0.5, 30.0
"""Before one that failed is started again; doubles."""

QUIET_S = 60.0
"""One that has served for so long is taken to fail for the first time."""

LONGEST_START_S = 86400.0
"""An engine has deadlines of its own for what it waits for."""


class EngineHost:
    """The engines.

    Args:
        front_end: where they join, the first of them as its rank, the others as those behind it; -1: as any.
        keys: folder of this machine's keys there.
        num_engines: how many.
        address: where the first serves, the others at the ports behind it; None: where the front end reaches this
            machine, at any port.
        own_fields: fields of the front end's config that are other ones here.
        plugins: modules that they import first.
    """

    def __init__(
        self,
        front_end: Endpoint,
        keys: str | None,
        *,
        num_engines: int,
        address: str | None,
        own_fields: Mapping[str, Any],
        plugins: Sequence[str],
    ) -> None:
        self._num_engines = num_engines
        self._start_rank = front_end.rank
        self._address = address
        self._own_fields = dict(own_fields)
        self._options = ProcessOptions(plugins=tuple(plugins), start_timeout_s=LONGEST_START_S)
        self._more = ["--shared", front_end.address, "--join-timeout", str(front_end.timeout_s)]
        self._more += ["--keys", keys] if keys else []
        self._worker = TextWorker()

    async def run(self) -> None:
        """Serve until the front end says Goodbye to all of them, or SIGTERM or SIGINT.

        Raises:
            ConfigError, ModelLoadError, EngineDead: one of them cannot start, or fails too often.
        """
        with anyio.CancelScope() as scope, asked_by_signals(lambda _: scope.cancel()):
            try:
                self._slots = await self._worker.run(self._find_slots, None)
                await for_each(range(self._num_engines), self._keep)
            finally:
                with anyio.CancelScope(shield=True):
                    await self._worker.aclose()
        logger.info("all engines have ended as %s", "they were told" if scope.cancel_called else "the front end has")

    async def _keep(self, nth: int) -> None:
        """Have an engine until it is not wanted any more."""
        backoff, name = Backoff(BACKOFF_S, MAX_BACKOFF_S, steady_s=QUIET_S), f"engine {self._name(nth)}"
        while True:
            engine = self._make(nth)
            try:
                served_s, reason = await self._serve(engine, name)
            finally:
                with anyio.CancelScope(shield=True):  # which has deadlines of its own
                    await engine.aclose()
            if engine.returncode == 0:
                return
            if engine.returncode == AGAIN:
                continue
            if engine.returncode == BAD_CONFIG:
                raise ConfigError(reason)
            pause_s, num_failures = backoff.failed(served_s), backoff.num_failures
            if engine.returncode == NO_FRONT_END or num_failures > MAX_RESTARTS:
                raise EngineDead(f"{reason} ({num_failures} failures in a row)" if num_failures > 1 else reason)
            logger.warning("%s is started again in %g s: %s", name, pause_s, reason)
            await anyio.sleep(pause_s)

    async def _serve(self, engine: ChildEngine, name: str) -> tuple[float, str]:
        """Start an engine and wait for its end; returns how long it served, in seconds, and how it has ended.

        Raises:
            ConfigError, ModelLoadError: it cannot start, and will not.
        """
        serves_since = math.inf
        try:
            await engine.begin()
            ready = await engine.wait_ready()
            serves_since = anyio.current_time()
            logger.info("%s serves at %s", name, ready.address)
            reason = await engine.wait()
        except EngineDead as error:
            reason = str(error)
            with anyio.move_on_after(self._options.stop_timeout_s):  # it has said why it ends, and does
                await engine.wait()
        return max(0.0, anyio.current_time() - serves_since), reason

    def _make(self, nth: int) -> ChildEngine:
        share = self._slots.take(nth, self._num_engines)
        rank = self._start_rank + nth if self._start_rank >= 0 else -1
        init = Init(
            version=PROTOCOL_VERSION,
            index=0,
            num_engines=self._num_engines,
            address=address_of(self._address, nth),
            plugins=self._options.plugins,
            own_fields=self._own_fields,
            memory=share.memory,
        )
        more = [*self._more, "--rank", str(rank)]
        return ChildEngine(
            self._name(nth),
            share.options(self._options),
            self._worker,
            lambda: init,
            more=more,
            env=share.environment(os.environ),
        )

    def _name(self, nth: int) -> int:
        """What an engine is called in the log: its rank, if that is known."""
        return max(self._start_rank, 0) + nth

    def _find_slots(self) -> HostSlots:
        config = EngineConfig(**{name: value for name, value in self._own_fields.items() if name == "device"})
        return HostSlots.find(config, self._options, self._num_engines)


def address_of(address: str | None, nth: int) -> str | None:
    """Where the engine of this number serves when the first one does at ``address``: at the ports behind that one.

    Raises:
        ConfigError: several cannot serve there.
    """
    if address is None or nth == 0:
        return address
    start, _, port = address.rpartition(":")
    if not address.startswith("tcp:"):
        raise ConfigError(f"{address!r} is for one engine; leave it out, or give tcp://HOST:PORT for several")
    return f"{start}:{int(port) + nth}" if port.isdecimal() and int(port) else address
