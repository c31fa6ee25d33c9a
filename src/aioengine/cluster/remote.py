"""Replicas on other machines: where their engines join, and the backend of one that has."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable
from typing import Any

import anyio
import msgspec
import zmq

from aioengine._version import __version__
from aioengine.cluster.agreement import differences
from aioengine.config import EngineConfig
from aioengine.core.executor_protocol import ExecutorInfo
from aioengine.core.listener import Conditions
from aioengine.core.protocol import CoreHooks
from aioengine.errors import ConfigError, EngineDead
from aioengine.executor.in_process import find
from aioengine.models.folder import ModelFolder
from aioengine.processes.progress import OnProgress
from aioengine.processes.worker_threads import TextWorker
from aioengine.transport.backends import ATTACH_TIMEOUT_S, read_config, refuse_function
from aioengine.transport.client import RemoteCore
from aioengine.transport.entrance import Entrance
from aioengine.transport.handshake import EngineRecord, Goodbye, HandshakeState, Init, TurnedAway, Welcome
from aioengine.transport.link import Link
from aioengine.transport.security import ClientKeys, ServerKeys
from aioengine.transport.wire import PROTOCOL_VERSION, WireMessage, Writer

logger = logging.getLogger("aioengine")

MAX_UNSENT = 64
"""Messages to one engine: an answer, an end."""

LAST_NEWS_S = 0.1
"""For what an engine said last by one connection to come when the other has ended."""


class JoinDesk:
    """Where engines of other machines join: the one socket at which each says HELLO, for its rank or for any.

    Args:
        address: to bind to.
        keys: folder of the keys of those that may join; None where no other machine reaches the address.
        config: what they are told.
        ranks: those that are waited for from the start.
        find_rank: called with the rank that an engine asks for (-1: any) where none is free: that of a further replica,
            or None.
        on_join: called with the rank of each engine that has said HELLO.
    """

    def __init__(
        self,
        address: str,
        keys: str | None,
        config: EngineConfig,
        ranks: range,
        worker: TextWorker,
        *,
        find_rank: Callable[[int], int | None],
        on_join: Callable[[int], None],
    ) -> None:
        self._address = address
        self._keys_folder = keys
        # The front end logs load and requests: once is enough.
        self._config = msgspec.structs.replace(config, log_stats_interval_s=0.0, log_requests=False)
        self._worker = worker
        self._on_join = on_join
        self._keys: ServerKeys | None = None
        self._entrance: Entrance | None = None
        self._conditions = Conditions()
        self._machine = Welcome(
            num_local=0,
            num_remote=len(ranks),
            first_remote=ranks.start,
            make_init=self._make_init,
            token="",
            now=0.0,
            start_timeout_s=float("inf"),  # each replica has a deadline of its own
            release=__version__,
            find_place=find_rank,
        )
        self._lasting = set(ranks)
        """Ranks whose place is kept while nothing is there."""
        self._leaving: set[int] = set()
        """Ranks that are about to end for good."""
        self._offers: dict[int, tuple[ExecutorInfo, EngineConfig]] = {}
        """What has served as each rank."""
        self._num_refused: Counter[str] = Counter()

    async def open(self) -> None:
        """Bind.

        Raises:
            ConfigError: the address cannot be had, or the keys cannot.
        """
        folder = self._keys_folder
        if folder is not None:
            self._keys = await self._worker.run(lambda: ServerKeys.load(folder), None)
        self._entrance = Entrance(
            self._address, self._keys, self._worker, max_unsent=MAX_UNSENT, on_end=self._on_connection_end
        )
        await self._entrance.open()
        logger.info("engines may join at %s", self.address)

    @property
    def address(self) -> str:
        """Where it is bound."""
        return self._entrance.address if self._entrance is not None else self._address

    async def run(self) -> None:
        """Answer engines, until cancelled."""
        assert self._entrance is not None
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self._entrance.watch)
            while True:
                for connection, key_name, peer, *frames in await self._entrance.channel.receive():
                    self._take(connection, key_name, bytes(peer), frames)
                self._conditions.check()

    def say_goodbye(self, reason: str) -> None:
        """Have all engines end. Idempotent."""
        for engine in list(self._machine.engines):
            self._say(engine, Goodbye(reason, is_wanted_again=False))
        self._machine.engines.clear()

    async def aclose(self) -> None:
        """Close. Idempotent."""
        self._conditions.end_all()
        if self._entrance is not None:
            await self._entrance.aclose()

    def abandon(self) -> None:
        """As `Backend.abandon`."""
        if self._entrance is not None:
            self._entrance.abandon()

    # Replicas

    def has_place(self, rank: int) -> bool:
        """Whether the replica of this rank is, or is to be, an engine that joins."""
        return any(engine.index == rank for engine in self._machine.engines)

    async def wait_ready(self, rank: int, timeout_s: float, on_progress: OnProgress | None = None) -> EngineRecord:
        """Wait until an engine serves as this rank.

        Raises:
            ConfigError, ModelLoadError, EngineDead: it has said why it cannot, or is not there in time.
        """
        engine = self._find(rank)
        with anyio.move_on_after(timeout_s):
            while engine is not None:
                if engine.state is HandshakeState.READY:
                    return engine
                if on_progress is not None and engine.loaded[1]:
                    on_progress(*engine.loaded)
                seen = self._news_of(rank)
                await self._conditions.add(lambda seen=seen: self._news_of(rank) != seen)  # type: ignore[misc]
                if engine.failure is not None:
                    raise engine.failure
                engine = self._find(rank)
            raise EngineDead(f"the engine that was to be replica {rank} has gone")
        raise EngineDead(
            f"replica {rank} is to join at {self.address}, and {_describe(engine)} within {timeout_s:g} s: on its "
            "machine, `aioengine engine --join` says why"
        )

    async def last_words(self, engine: EngineRecord) -> str | None:
        """What an engine said in the end, if it did, or does so soon."""
        with anyio.move_on_after(LAST_NEWS_S):
            await self._conditions.add(lambda: engine.failure is not None or engine not in self._machine.engines)
        return str(engine.failure) if engine.failure is not None else None

    def keys_toward(self, engine: EngineRecord) -> ClientKeys | None:
        """To connect to an engine with, which serves by the key that it joined by."""
        return self._keys.toward(engine.key_name) if self._keys is not None else None

    def check(self, rank: int, info: ExecutorInfo, config: EngineConfig) -> None:
        """Compare an engine with those that served as this rank before, which were compared with all others.

        Raises:
            ConfigError: it is another one.
        """
        if rank in self._offers and (found := differences(self._offers[rank], (info, config))):
            reason = f"replica {rank} has come back as another one: {found}"
            self.refuse(rank, reason)
            raise ConfigError(reason)
        self._offers[rank] = (info, config)
        self._lasting.add(rank)

    def refuse(self, rank: int, reason: str) -> None:
        """Tell the engine that serves as this rank that it cannot, and why."""
        engine = self._find(rank)
        if engine is not None:
            self._say(engine, TurnedAway(PROTOCOL_VERSION, reason))
            self._let_go(engine)

    def dismiss(self, engine: EngineRecord, reason: str) -> None:
        """Have an engine end, and wait for another one in its place, unless its rank is leaving. Idempotent."""
        if engine in self._machine.engines:
            self._say(engine, Goodbye(reason, is_wanted_again=engine.index not in self._leaving))
            self._let_go(engine)

    def leave(self, rank: int) -> None:
        """This rank is about to end for good."""
        self._leaving.add(rank)
        self._lasting.discard(rank)
        self._offers.pop(rank, None)

    # What engines say

    def _take(self, connection: int, key_name: str, peer: bytes, frames: list[Any]) -> None:
        assert self._entrance is not None
        # The number may be that of a connection that has just ended, whose engine is not to be taken for this one.
        self._entrance.monitor.catch_up()
        answers = self._machine.on_message(peer, frames, connection=connection, key_name=key_name)
        engine = next((each for each in self._machine.engines if each.peer == peer), None)
        if engine is not None and engine.state is HandshakeState.FAILED:
            logger.warning("engine %d (%s) has ended: %s", engine.index, _origin(engine), engine.failure)
            self._let_go(engine)
        for _, body in answers:
            if engine is not None:
                logger.info("engine %d (%s) has come", engine.index, _origin(engine))
                if self._say(engine, body):
                    self._leaving.discard(engine.index)
                    self._on_join(engine.index)
            elif isinstance(body, TurnedAway):
                self._turn_away(peer, key_name, body)

    def _turn_away(self, peer: bytes, key_name: str, body: TurnedAway) -> None:
        self._num_refused[key_name] += 1
        count = self._num_refused[key_name]
        if count in (1, 10, 100) or count % 1000 == 0:  # a flood is no flood of logs
            whose = f"key {key_name!r}" if key_name else "no key"
            logger.warning("an engine with %s is turned away (%d so far): %s", whose, count, body.reason)
        self._send(peer, Writer(), body)

    def _on_connection_end(self, connection: int) -> None:
        for engine in list(self._machine.engines):
            if engine.peer is not None and engine.connection == connection:
                logger.warning("engine %d (%s) has gone", engine.index, _origin(engine))
                self._let_go(engine)
        self._conditions.check()

    # Within

    def _find(self, rank: int) -> EngineRecord | None:
        return next((engine for engine in self._machine.engines if engine.index == rank), None)

    def _news_of(self, rank: int) -> Any:
        engine = self._find(rank)
        return engine and (engine, engine.state, engine.loaded)

    def _let_go(self, engine: EngineRecord) -> None:
        if engine.index in self._lasting:
            self._machine.vacate(engine)
        else:
            self._machine.remove(engine)

    def _say(self, engine: EngineRecord, body: WireMessage) -> bool:
        """Send something to an engine that is there; whether it was."""
        if engine.peer is None or engine.state is HandshakeState.FAILED:
            return False
        is_there = self._send(engine.peer, engine.writer, body)
        if not is_there:
            self._let_go(engine)
        return is_there

    def _send(self, peer: bytes, writer: Writer, body: WireMessage) -> bool:
        assert self._entrance is not None
        try:
            self._entrance.channel.send_now([peer, writer.write(body)])
        except zmq.ZMQError:  # it has gone, or does not read
            return False
        return True

    def _make_init(self, rank: int) -> Init:
        return Init(version=PROTOCOL_VERSION, index=rank, num_engines=len(self._machine.engines), config=self._config)


def _origin(engine: EngineRecord) -> str:
    return f"key {engine.key_name!r}" if engine.key_name else "without a key"


def _describe(engine: EngineRecord | None) -> str:
    if engine is None or engine.state is HandshakeState.NEW:
        return "has not said HELLO"
    return "has not loaded its model" if engine.loaded[1] else "is not ready"


class OnHost:
    """A `ReplicaBackend` whose core is in an engine of another machine, which joins.

    Attributes:
        address, keys: where the engine serves and the keys to connect to it with, once it is open.
    """

    core: RemoteCore
    cluster = None

    def __init__(
        self, rank: int, desk: JoinDesk, config: EngineConfig, hooks: CoreHooks, *, start_timeout_s: float
    ) -> None:
        self.address = ""
        self.keys: ClientKeys | None = None
        self._rank = rank
        self._desk = desk
        self._config = config
        self._hooks = hooks
        self._start_timeout_s = start_timeout_s
        self._engine: EngineRecord | None = None
        self._link = Link(hooks.worker)

    async def find_model(self) -> ModelFolder:
        return await find(self._config, self._hooks.worker, with_weights=False)

    async def open(self, on_progress: OnProgress | None = None) -> None:
        self._engine = engine = await self._desk.wait_ready(self._rank, self._start_timeout_s, on_progress)
        assert engine.ready is not None
        self.address, self.keys = engine.ready.address, self._desk.keys_toward(engine)
        attached = await self._link.open(self.address, self.keys, name="its front end", timeout_s=ATTACH_TIMEOUT_S)
        config = read_config(attached.config)
        self._desk.check(self._rank, attached.info, config)
        self.core = RemoteCore(
            self._link,
            attached,
            config=config,
            hooks=self._hooks,
            is_far=self.address.startswith("tcp:"),
            describe_cut=self._describe_cut,
            logs_stats=True,
        )

    apply_model = refuse_function

    @property
    def where(self) -> str:
        """Its host's name for keys and its address, for a person."""
        return " ".join(filter(None, (self._engine.key_name, self.address))) if self._engine is not None else ""

    @property
    def shared_address(self) -> str:
        """As `ReplicaBackend.shared_address`: further front ends connect with the keys of the first."""
        return self.address

    @property
    def shared_key(self) -> str:
        """As `ReplicaBackend.shared_key`."""
        return self._engine.key_name if self._engine is not None else ""

    def kill(self) -> None:
        """Its process is another machine's, which is told to end it when this is closed."""

    async def aclose(self) -> None:
        await self._link.aclose()
        if self._engine is not None:
            self._desk.dismiss(self._engine, "its front end has closed it")

    def abandon(self) -> None:
        self._link.abandon()

    async def _describe_cut(self) -> str:
        assert self._engine is not None
        return await self._desk.last_words(self._engine) or f"the connection to {self.where} was cut"
