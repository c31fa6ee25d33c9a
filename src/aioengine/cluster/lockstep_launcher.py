"""Replicas that are one group in lockstep: they start together, follow each other's waves, and end together."""

from __future__ import annotations

import contextlib
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from functools import partial

from aioengine.cluster.launchers import ProcessLauncher
from aioengine.cluster.lockstep import WaveCoordinator, WaveReport
from aioengine.config import EngineConfig, ProcessOptions
from aioengine.core.executor_protocol import LockstepPlace
from aioengine.core.health import Beat
from aioengine.core.protocol import CoreHooks, InFlightSequence
from aioengine.errors import ConfigError, EngineDead, describe
from aioengine.models.folder import ModelFolder
from aioengine.processes.progress import OnProgress
from aioengine.transport.backends import InChild


class LockstepLauncher(ProcessLauncher):
    """Launches engines of this machine that step together.

    A rank's second backend starts a new group: the other engines end, and must be started again, too.
    """

    def __init__(self, config: EngineConfig, process: ProcessOptions, num_ranks: int) -> None:
        super().__init__(config, process, num_ranks)
        self._group = LockstepMembers(num_ranks)

    def __call__(self, rank: int, hooks: CoreHooks) -> LockstepMember:
        if rank in self._group.members:
            self._group.end(rank, "it starts again")
        if self._group.death is not None:
            self._group = LockstepMembers(self._num_replicas)
        return LockstepMember(self._group, rank, *self._share(rank, self._num_replicas), hooks)


class LockstepMembers:
    """The members of one start of a group, and their coordinator.

    Attributes:
        death: why the group is over; None: it is not.
    """

    def __init__(self, num_ranks: int) -> None:
        self.num_ranks = num_ranks
        self.members: dict[int, LockstepMember] = {}
        self.death: EngineDead | None = None
        self._coordinator = WaveCoordinator(num_ranks)
        self._culprit = -1
        """The rank that ended first; -1: none."""
        self._in_flight: list[tuple[LockstepMember, list[InFlightSequence]]] = []
        """In-flight sequences of dead members, handed over when all members are dead: else one about to die may get
        them."""
        self._is_ending = False
        self._folder: str | None = None

    def make_store(self) -> str:
        """The path at which the ranks meet, in a private folder, which rank 0 removes when all have met. For the
        worker's thread.

        Raises:
            ConfigError: the folder cannot be made.
        """
        if self._folder is None:
            try:
                self._folder = tempfile.mkdtemp(prefix="aioengine-lockstep-")
            except OSError as error:
                raise ConfigError(f"no folder can be made for engines in lockstep to meet: {error}") from error
        return f"{self._folder}/store"

    def remove_store(self) -> None:
        """Remove the folder. Idempotent; for the worker's thread."""
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)

    def on_beat(self, rank: int, beat: Beat) -> None:
        if self.death is not None:
            return
        for other in self._coordinator.on_report(rank, WaveReport(beat.wave, beat.is_wave_running)):
            if other in self.members and self.members[other].has_core:  # else it starts after its first beat
                self.members[other].core.start_wave(self._coordinator.known.wave)

    def on_death(self, member: LockstepMember, in_flight: list[InFlightSequence]) -> None:
        """Take the in-flight sequences of a core that has died, by itself or with the group."""
        self._in_flight.append((member, in_flight))
        if self.death is None:
            # Other ranks lose their connections to a killed one, and may report that before its exit is known.
            exited = next((other for other in self.members.values() if other.exit_message is not None), None)
            first = exited or member
            self.end(first.rank, first.exit_message or str(member.core.death))
        elif not self._is_ending:
            self._hand_over()

    def end(self, rank: int, reason: str) -> None:
        """End all ranks, since one has ended and the others cannot compute without it. Idempotent."""
        if self.death is not None:
            return
        self._culprit = rank
        self.death = EngineDead(f"rank {rank} of its lockstep group has ended: {reason}")
        self._is_ending = True
        for member in self.members.values():
            member.end_with_group(self.death if member.rank != rank else EngineDead(reason))
        self._is_ending = False
        self._hand_over()

    def _hand_over(self) -> None:
        ended, self._in_flight = self._in_flight, []
        for member, in_flight in ended:
            is_unaffected = member.rank != self._culprit
            member.hand_over([each._replace(is_unaffected=is_unaffected) for each in in_flight])


class LockstepMember(InChild):
    """A `ReplicaBackend` of one rank."""

    def __init__(
        self,
        group: LockstepMembers,
        rank: int,
        config: EngineConfig,
        process: ProcessOptions,
        env: Mapping[str, str],
        hooks: CoreHooks,
    ) -> None:
        self.rank = rank
        self._group = group
        self._start_timeout_s = process.start_timeout_s
        self._given_cluster = hooks.cluster
        if hooks.cluster is not None:
            hooks = hooks._replace(cluster=hooks.cluster._replace(on_death=partial(group.on_death, self)))
        super().__init__(config, process, hooks, rank=rank, env=env)
        group.members[rank] = self

    @property
    def has_core(self) -> bool:
        """Whether the rank serves, or has served."""
        return hasattr(self, "core")

    async def find_model(self) -> ModelFolder:
        store = await self._hooks.worker.run(self._group.make_store, None)
        self._lockstep = LockstepPlace(self.rank, self._group.num_ranks, store, self._start_timeout_s)
        with self._ending_group():
            return await super().find_model()

    async def open(self, on_progress: OnProgress | None = None) -> None:
        with self._ending_group():
            await super().open(on_progress)
        self.core.on_beat = lambda beat: self._group.on_beat(self.rank, beat)

    def end_with_group(self, death: EngineDead) -> None:
        """End this rank, since a rank of the group has ended, this one or another. Idempotent."""
        if self.has_core:
            self.core.die(death)
        else:
            self.kill()

    async def aclose(self) -> None:
        self._group.end(self.rank, "it was closed")
        await super().aclose()
        await self._hooks.worker.run(self._group.remove_store, None)

    def abandon(self) -> None:
        super().abandon()
        self._group.remove_store()

    @contextlib.contextmanager
    def _ending_group(self) -> Iterator[None]:
        """End the group at an error in the block; if the group has ended, raise the reason of its end instead."""
        if self._group.death is not None:
            raise self._group.death.anew()
        try:
            yield
        except Exception as error:
            if self._group.death is not None:
                raise self._group.death.anew() from error
            self._group.end(self.rank, describe(error))
            raise

    def hand_over(self, in_flight: list[InFlightSequence]) -> None:
        assert self._given_cluster is not None
        self._given_cluster.on_death(in_flight)
