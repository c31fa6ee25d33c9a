"""A replica for one front end alone, of several that use the same replicas.

A sequence that has brought down replicas runs isolated (`recovery`). A front end knows its own sequences alone: so it
asks the cluster's owner for a replica that the other front ends leave.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

import anyio

from aioengine.cluster.cluster_core import ClusterCore
from aioengine.errors import AioEngineError

logger = logging.getLogger("aioengine")

CONNECT_S = 10.0
"""For a front end to have a connection to the replica that it has reserved."""


class Reservation:
    """The replica that a front end has for itself, while it has sequences that must be isolated.

    Args:
        core: the front end's.
        reserve: has a replica left by all others; returns its rank.
        release: lets them use it again.
        is_single: whether this front end is the only one now.
    """

    def __init__(
        self,
        core: ClusterCore,
        reserve: Callable[[], Awaitable[int]],
        release: Callable[[int], Awaitable[None]],
        is_single: Callable[[], bool] = lambda: False,
    ) -> None:
        self._core = core
        self._reserve = reserve
        self._release = release
        self._is_single = is_single
        self._rank: int | None = None
        self._is_wanted = asyncio.Event()

    def has(self, rank: int) -> bool:
        """Whether no other front end uses the replica of this rank."""
        return rank == self._rank or self._is_single()

    def ask(self) -> None:
        """Have a replica; `Placing.dispatch` follows. Idempotent."""
        self._is_wanted.set()

    async def run(self) -> None:
        """Reserve a replica whenever one is wanted, until it is needed no more, or has died; until cancelled."""
        while True:
            await self._is_wanted.wait()
            self._is_wanted.clear()
            if self._core.placing.has_isolated:
                try:
                    await self._use_one()
                except AioEngineError as error:  # the isolated sequences wait, and ask again
                    logger.warning("no replica can be had for an isolated request: %s", error)

    async def _use_one(self) -> None:
        core = self._core
        rank = await self._reserve()

        def serves() -> bool:
            return rank in core.replicas and core.replicas[rank].is_serving

        with anyio.move_on_after(CONNECT_S):  # this side may be just about to connect to it
            await core.when(lambda: serves() or not core.placing.has_isolated)
        try:
            self._rank = rank
            core.placing.dispatch()
            await core.when(lambda: not core.placing.has_isolated or not serves())
        finally:
            self._rank = None
        await self._release(rank)
