"""Two engines that serve, and a front end whose sequences go from one to the other at the tokens that a test names."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any, NamedTuple

import anyio
from integrity import check_integrity
from waiting import Tasks, until

from aioengine import Engine, EngineConfig
from aioengine.core.in_process import InProcess
from aioengine.core.listener import Conditions, Listener, SampledLogprobs
from aioengine.core.observers import Observers, UserCode
from aioengine.core.protocol import ClusterHooks, CoreHooks, InFlightSequence
from aioengine.errors import AioEngineError, EngineDead
from aioengine.models.folder import ModelFolder
from aioengine.outputs.metrics import StepRecord
from aioengine.processes.progress import OnProgress
from aioengine.processes.worker_threads import TextWorker
from aioengine.scheduler.sequence import Sequence as Choice
from aioengine.transport.addresses import PrivateFolder
from aioengine.transport.backends import Connected
from aioengine.transport.client import RemoteCore
from aioengine.transport.server import EngineServer

ADDED, STARTED, SCORED = -3, -2, -1
"""Moments before the first token: the request is added, has its row, has some log-probabilities of its prompt."""


class Watched:
    """A listener; ``relay`` hears when a token or a moment has come."""

    def __init__(self, listener: Listener, relay: Relay) -> None:
        self.listener = listener
        self.relay = relay

    @property
    def num_allowed(self) -> int:
        return self.listener.num_allowed

    def on_started(self) -> None:
        self.listener.on_started()
        self.relay.note(STARTED)

    def on_token(self, token_id: int, logprobs: SampledLogprobs | None) -> None:
        self.listener.on_token(token_id, logprobs)
        self.relay.num_tokens += 1
        self.relay.note(self.relay.num_tokens)

    def on_prompt_logprobs(self, position: int, logprobs: list[SampledLogprobs]) -> None:
        self.listener.on_prompt_logprobs(position, logprobs)
        self.relay.note(SCORED)

    def on_end(self) -> None:
        self.listener.on_end()

    def on_error(self, error: AioEngineError) -> None:
        self.listener.on_error(error)


class Relay:
    """A `Backend` and a `Core` of several cores, one of which has all sequences; the others follow in turn.

    Attributes:
        cores: the first one has all sequences.
        dead: those that have died.
        served: the engines.
        on_record: called with each step's record.
        num_tokens: that listeners have heard of.
        num_moved: sequences that have gone on, those with tokens alone.
    """

    def __init__(self, addresses: Sequence[str], hooks: CoreHooks) -> None:
        self.user_code = UserCode()
        self._conditions = Conditions()
        self._hooks = hooks._replace(
            cluster=ClusterHooks(
                self._conditions, self.user_code, lambda record: self.on_record(record), self._on_core_death
            )
        )
        self._backends = [
            Connected(address, self._hooks, model=None, keys=None, client=None, timeout_s=30.0) for address in addresses
        ]
        self.core = self
        self.cores: list[RemoteCore] = []
        self.dead: list[RemoteCore] = []
        self.served: list[Served] = []
        self.on_record: Callable[[StepRecord], None] = lambda _: None
        self.reset()

    # As a backend

    async def find_model(self) -> ModelFolder:
        folders = [await backend.find_model() for backend in self._backends]
        return folders[0]

    async def open(self, on_progress: OnProgress | None = None) -> None:
        for backend in self._backends:
            await backend.open(on_progress)
            self.cores.append(backend.core)
        clock = self.cores[0].clock
        self.observers = Observers(self.user_code, log_interval_s=0.0, now_s=clock())

    async def aclose(self) -> None:
        for backend in self._backends:
            await backend.aclose()

    def abandon(self) -> None:
        for backend in self._backends:
            backend.abandon()

    # As a core

    def __getattr__(self, name: str) -> Any:
        return getattr(self.cores[0], name)

    def add(self, sequence: Choice, listeners: Iterable[Listener], *, arrived_at: float | None = None) -> None:
        self.cores[0].add(sequence, [Watched(listener, self) for listener in listeners], arrived_at=arrived_at)
        self.note(ADDED)

    def finish(self, sequence: Choice, *args: Any) -> None:
        self._core_of(sequence).finish(sequence, *args)

    def unblock(self, sequence: Choice) -> None:
        self._core_of(sequence).unblock(sequence)

    def _core_of(self, sequence: Choice) -> RemoteCore:
        every = (*self.cores, *self.dead)
        return next((core for core in every if core._mirrors.live.get(sequence.order) is sequence), every[0])

    async def run(self) -> None:
        async with anyio.create_task_group() as tasks:
            for core in self.cores:
                tasks.start_soon(core.run)

    # Going on elsewhere

    def note(self, moment: int) -> None:
        if moment in self._cuts:
            self._cuts.remove(moment)
            self.cut()

    def cut(self) -> None:
        """Let all sequences go on in the next core."""
        if self._dies:
            self.cores[0].die(EngineDead("cut"))
        else:
            self.cores.append(self.cores.pop(0))
            self._go_on(self.cores[-1].take_back())

    def _on_core_death(self, in_flight: list[InFlightSequence]) -> None:
        self.dead += [core for core in self.cores if core.death is not None]
        self.cores = [core for core in self.cores if core.death is None]
        self._go_on(in_flight)

    def _go_on(self, in_flight: list[InFlightSequence]) -> None:
        for sequence in [each.sequence for each in in_flight]:
            self.num_moved += bool(sequence.output_ids)
            choices = (sequence, *sequence.children)
            self.cores[0].add(sequence, [choice.listener for choice in choices], arrived_at=sequence.arrived_at)

    def reset(self, *cuts: int, dies: bool = False) -> None:
        """Begin to count anew.

        Args:
            cuts: numbers of tokens, or moments, at which the sequences go on in the next core, each once.
            dies: the core dies then, and is not used again; else they are taken back from it.
        """
        self._cuts, self._dies = set(cuts), dies
        self.num_tokens = self.num_moved = 0


class Served(NamedTuple):
    """An engine, and the task that serves it."""

    server: EngineServer
    task: asyncio.Task[None]


@asynccontextmanager
async def serving(config: EngineConfig, executor: Any = None) -> AsyncIterator[Served]:
    """An engine that is served here, over a torch executor unless another one is given."""
    workers = TextWorker(), TextWorker()
    backend = InProcess(config, executor, CoreHooks(*workers, on_capacity=lambda: None))
    folder = await asyncio.to_thread(PrivateFolder)
    try:
        files = await backend.find_model()
        await backend.open()
        server = EngineServer(backend.core, str(folder.address("engine")), model_path=files.path)
        await server.open()
        async with Tasks() as tasks:  # no task group: a fixture ends in another task
            yield Served(server, tasks.start(server.serve()))
    finally:
        await backend.aclose()
        for worker in workers:
            await worker.aclose()
        await asyncio.to_thread(folder.remove)


@asynccontextmanager
async def relaying(
    config: EngineConfig, *, executors: Sequence[Any] = (None, None), num_links: int = 2
) -> AsyncIterator[tuple[Engine, Relay]]:
    """A front end with so many links to engines over these executors, in turn; at the end nothing is left there."""
    async with AsyncExitStack() as stack:
        served = [await stack.enter_async_context(serving(config, executor)) for executor in executors]
        addresses = [served[index % len(served)].server.address for index in range(num_links)]
        made: list[Relay] = []

        def make_backend(hooks: CoreHooks) -> Relay:
            made.append(Relay(addresses, hooks))
            return made[0]

        engine = Engine()
        engine._make_backend = make_backend
        async with engine:
            (relay,) = made
            relay.served = served
            yield engine, relay
        for core in [each.server.core for each in served if not each.server.core.is_stopped]:
            await until(lambda core=core: not core._live and not core._in_flight)
            check_integrity(core.scheduler)
            stats = core.stats()
            assert (stats.running, stats.waiting, stats.blocked, stats.free_blocks) == (0, 0, 0, stats.num_blocks)
