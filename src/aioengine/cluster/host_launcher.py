"""Replicas of this host, which are children, and of others, which join: their launcher."""

from __future__ import annotations

import os
from collections.abc import Callable

from aioengine.cluster.devices import HostSlots
from aioengine.cluster.launcher import Launcher
from aioengine.cluster.remote import JoinDesk, OnHost
from aioengine.cluster.replica import ReplicaBackend
from aioengine.config import EngineConfig, ProcessOptions, ReplicaOptions
from aioengine.core.protocol import CoreHooks
from aioengine.processes.worker_threads import TextWorker
from aioengine.transport.backends import InChild


class HostLauncher(Launcher):
    """The launcher of children of this process, which share this host, and of engines that join."""

    def __init__(self, config: EngineConfig, process: ProcessOptions, options: ReplicaOptions) -> None:
        self._config = config
        self._process = process
        self._options = options
        self._local: set[int] = set()
        self._desk: JoinDesk | None = None

    async def open(
        self, worker: TextWorker, *, find_rank: Callable[[int], int | None], on_join: Callable[[int], None]
    ) -> None:
        self._slots = await worker.run(
            lambda: HostSlots.find(self._config, self._process, self._options.num_local), None
        )
        if self._options.join_address is not None:
            ranks = range(self._options.num_local, self._options.replicas)
            self._desk = JoinDesk(
                self._options.join_address,
                self._options.join_keys,
                self._config,
                ranks,
                worker,
                find_rank=find_rank,
                on_join=on_join,
            )
            await self._desk.open()

    def __call__(self, rank: int, hooks: CoreHooks) -> ReplicaBackend:
        if self._desk is not None and self._desk.has_place(rank):
            return OnHost(rank, self._desk, self._config, hooks, start_timeout_s=self._process.start_timeout_s)
        num_local = max(self._options.num_local, len(self._local | {rank}))
        share = self._slots.take(rank, num_local)
        self._local.add(rank)
        config, process = share.config(self._config), share.options(self._process)
        return InChild(config, process, hooks, rank=rank, env=share.environment(os.environ))

    async def run(self) -> None:
        if self._desk is not None:
            await self._desk.run()

    def leave(self, rank: int) -> None:
        self._local.discard(rank)
        self._slots.free(rank)
        if self._desk is not None:
            self._desk.leave(rank)

    def refuse(self, rank: int, reason: str) -> None:
        if self._desk is not None:
            self._desk.refuse(rank, reason)

    def say_goodbye(self, reason: str) -> None:
        if self._desk is not None:
            self._desk.say_goodbye(reason)

    async def aclose(self) -> None:
        if self._desk is not None:
            await self._desk.aclose()

    def abandon(self) -> None:
        if self._desk is not None:
            self._desk.abandon()
