"""Starting engines that run in processes of their own: HELLO → INIT → READY, as a pure machine and its driver.

An engine says HELLO to its parent, is told in INIT where to serve and how it is configured, loads its model, and says
READY with what it offers, or what went wrong. It may shake hands with two: its parent, beside it, and a front end that
several engines share, on this machine or another, which waits for a number of them.
"""

from __future__ import annotations

import enum
import hmac
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import anyio
import msgspec

from aioengine.config import EngineConfig
from aioengine.core.executor_protocol import ExecutorInfo
from aioengine.core.lockstep_protocol import LockstepPlace
from aioengine.errors import AioEngineError, ConfigError, EngineDead, ModelLoadError, WireError
from aioengine.transport.channel import Channel
from aioengine.transport.wire import PROTOCOL_VERSION, Reader, WireMessage, Writer
from aioengine.transport.wire_errors import Fault, to_error

LAST_WORDS_S = 0.1
"""For a message to arrive that was sent before its sender's end."""

HELLO_TIMEOUT_S = 60.0
"""For a process to start Python and say HELLO; it imports no torch before that."""


# From an engine


class Hello(WireMessage, frozen=True, tag=1):
    version: int
    index: int
    token: str
    """Proves that the receiver started it; empty for a front end that engines join by their keys."""
    pid: int
    is_local: bool
    """Whether it runs on the same machine."""
    release: str = ""
    """Of aioengine; engines that join must have the front end's, since tokens of one request may come of several."""


class Loading(WireMessage, frozen=True, tag=2):
    """Bytes of the weights that are there, and all."""

    done: int
    total: int


class Ready(WireMessage, frozen=True, tag=3):
    """It serves."""

    address: str
    info: ExecutorInfo
    supported_tasks: tuple[str, ...]


class Failing(WireMessage, frozen=True, tag=4):
    """It cannot start, and ends now."""

    fault: Fault


FromEngine = Hello | Loading | Ready | Failing


# To an engine


class Init(WireMessage, frozen=True, tag=1):
    version: int
    index: int
    num_engines: int
    address: str | None = None
    """Where to serve; None: in a folder of its own."""
    config: EngineConfig | None = None
    """None: it keeps its own."""
    plugins: tuple[str, ...] = ()
    executor: str | None = None
    """``module:function`` of this machine that makes the device side; None: torch's."""
    own_fields: dict[str, Any] = msgspec.field(default_factory=dict)
    """Fields of ``config`` that are other ones for this engine, whichever config that is."""
    memory: float = 1.0
    """Of the part of the host's memory that ``config`` grants: several engines share that host."""
    lockstep: LockstepPlace | None = None
    """Its place in the group that it computes each step with; None: it steps alone."""


class TurnedAway(WireMessage, frozen=True, tag=2):
    version: int
    reason: str


class Goodbye(WireMessage, frozen=True, tag=3):
    """To an engine that has joined: the front end has no use for it any more, or ends."""

    reason: str
    is_wanted_again: bool
    """Whether another one is to be started in its place."""


ToEngine = Init | TurnedAway | Goodbye


# The side that waits for engines


class HandshakeState(enum.Enum):
    NEW = "new"
    CONNECTED = "connected"
    """It has said HELLO, and was told INIT."""
    READY = "ready"
    FAILED = "failed"


TRANSITIONS: dict[HandshakeState, dict[type[WireMessage], HandshakeState]] = {
    HandshakeState.NEW: {Hello: HandshakeState.CONNECTED},
    HandshakeState.CONNECTED: {
        Loading: HandshakeState.CONNECTED,
        Ready: HandshakeState.READY,
        Failing: HandshakeState.FAILED,
    },
    HandshakeState.READY: {Failing: HandshakeState.FAILED},
    HandshakeState.FAILED: {},
}


@dataclass(eq=False)
class EngineRecord:
    """An engine that is waited for."""

    index: int
    """Its place among all."""
    is_local: bool
    """Whether it runs on this machine."""
    state: HandshakeState = HandshakeState.NEW
    peer: bytes | None = None
    """Its routing id, once it has said HELLO, and the reader of what it says."""
    reader: Reader[FromEngine] = field(default_factory=lambda: Reader(FromEngine))
    writer: Writer = field(default_factory=Writer)
    """Of what it is told."""
    loaded: tuple[int, int] = (0, 0)
    """(bytes done, bytes in all)"""
    ready: Ready | None = None
    """What it offers."""
    failure: AioEngineError | None = None
    """Why it cannot start, or has ended."""
    key_name: str = ""
    """Of the key that it joined by."""
    connection: int = -1
    """The file descriptor of its connection."""

    def take(self, body: FromEngine) -> None:
        """Take a message in.

        Raises:
            WireError: it does not belong to this state.
        """
        state = TRANSITIONS[self.state].get(type(body))
        if state is None:
            raise WireError(f"a {type(body).__name__} from an engine that is {self.state.value}")
        self.state = state
        if isinstance(body, Loading):
            self.loaded = (body.done, body.total)
        elif isinstance(body, Ready):
            self.ready = body


class Welcome:
    """Waits for a number of engines: a pure machine. Local ones have the first indices.

    Args:
        num_local, num_remote: how many of each.
        make_init: what an engine of this index is told.
        token: what local engines must show; remote ones prove themselves by their keys.
        now, start_timeout_s: each engine is READY by then, and says HELLO within `HELLO_TIMEOUT_S`.
        first_remote: the index of the first remote one; absent: behind the local ones.
        release: of aioengine, that remote engines must have; absent: any.
        find_place: called with the index that a remote engine asks for (-1: any) where none is left: the index of a
            place to be made for it, or None.
    Attributes:
        engines: by index.
        failure: why it is over, if it went wrong.
        num_refused: messages that were malformed, foreign or out of turn.
    """

    def __init__(
        self,
        *,
        num_local: int,
        num_remote: int = 0,
        make_init: Callable[[int], Init],
        token: str,
        now: float,
        start_timeout_s: float,
        first_remote: int | None = None,
        release: str | None = None,
        find_place: Callable[[int], int | None] = lambda _: None,
    ) -> None:
        first_remote = num_local if first_remote is None else first_remote
        self.engines = [EngineRecord(index, is_local=True) for index in range(num_local)]
        self.engines += [EngineRecord(first_remote + nth, is_local=False) for nth in range(num_remote)]
        self.failure: AioEngineError | None = None
        self.num_refused = 0
        self._make_init = make_init
        self._token = token
        self._hello_by = now + min(HELLO_TIMEOUT_S, start_timeout_s)
        self._ready_by = now + start_timeout_s
        self._start_timeout_s = start_timeout_s
        self._release = release
        self._find_place = find_place

    @property
    def is_done(self) -> bool:
        """Whether all are ready."""
        return all(engine.state is HandshakeState.READY for engine in self.engines)

    @property
    def deadline(self) -> float:
        """When to call `on_time` at the latest."""
        is_one_new = any(engine.state is HandshakeState.NEW for engine in self.engines)
        return self._hello_by if is_one_new else self._ready_by

    def on_message(
        self, peer: bytes, frames: list[Any], *, connection: int = -1, key_name: str = ""
    ) -> list[tuple[bytes, WireMessage]]:
        """Take a message; returns what is to be sent, and to whom. What does not belong here is refused and counted.

        Args:
            connection, key_name: what is known of its sender.
        """
        try:
            engine = next((engine for engine in self.engines if engine.peer == peer), None)
            if engine is None:
                answer = self._on_stranger(peer, frames)
                for joined in (each for each in self.engines if each.peer == peer):
                    joined.connection, joined.key_name = connection, key_name
                return answer
            body = engine.reader.read(frames)
            engine.take(body)
            if isinstance(body, Failing):
                engine.failure = start_error(to_error(body.fault))
                self._fail(engine.failure)
        except WireError:
            self.num_refused += 1
        return []

    def on_exit(self, index: int, description: str) -> None:
        """The process of a local engine has ended."""
        engine = self.engines[index]
        if engine.state is not HandshakeState.FAILED:
            engine.state = HandshakeState.FAILED
            engine.failure = EngineDead(description)
            self._fail(engine.failure)

    def vacate(self, engine: EngineRecord) -> None:
        """Wait for another one in this engine's place. Idempotent."""
        self.engines = [EngineRecord(each.index, each.is_local) if each is engine else each for each in self.engines]

    def remove(self, engine: EngineRecord) -> None:
        """Wait for none in this engine's place any more. Idempotent."""
        self.engines = [each for each in self.engines if each.index != engine.index]

    def on_time(self, now: float) -> None:
        """Some time has passed."""
        if now >= self.deadline and not self.is_done:
            late = [engine for engine in self.engines if engine.state is not HandshakeState.READY]
            silent = [engine for engine in late if engine.state is HandshakeState.NEW]
            which = ", ".join(f"{e.index} ({'local' if e.is_local else 'remote'})" for e in silent or late)
            what = "did not say HELLO" if silent else f"was not ready within {self._start_timeout_s:g} s"
            self._fail(EngineDead(f"engine {which} {what}"))

    def _on_stranger(self, peer: bytes, frames: list[Any]) -> list[tuple[bytes, WireMessage]]:
        reader: Reader[FromEngine] = Reader(FromEngine)
        body = reader.read(frames)
        if not isinstance(body, Hello):
            raise WireError(f"a {type(body).__name__} before a HELLO")
        engine = self._place_for(body)
        if isinstance(engine, str):
            self.num_refused += 1
            return [(peer, TurnedAway(PROTOCOL_VERSION, engine))]
        engine.take(body)
        engine.peer, engine.reader = peer, reader
        return [(peer, self._make_init(engine.index))]

    def _place_for(self, hello: Hello) -> EngineRecord | str:
        """The engine that says it, or why it is turned away.

        A local engine has its index; a remote one takes the next place, or the one it asks for.
        """
        if hello.version != PROTOCOL_VERSION:
            return f"version {PROTOCOL_VERSION} is spoken here, not {hello.version}"
        if hello.is_local and not hmac.compare_digest(hello.token.encode(), self._token.encode()):
            return "the token is another one"
        if not hello.is_local and self._release not in (None, hello.release):
            return f"aioengine {self._release} runs here, not {hello.release or 'an older one'}: install the same"
        free = [e for e in self.engines if e.state is HandshakeState.NEW and e.is_local == hello.is_local]
        if hello.index >= 0:
            free = [engine for engine in free if engine.index == hello.index]
        if not free and not hello.is_local:
            free = self._make_place(hello.index)
        if free:
            return free[0]
        is_taken = any(e.index == hello.index and e.is_local == hello.is_local for e in self.engines)
        where = "local" if hello.is_local else "remote"
        return f"no {where} engine {hello.index} is waited for{': it is here already' if is_taken else ''}"

    def _make_place(self, asked_for: int) -> list[EngineRecord]:
        index = None if any(engine.index == asked_for for engine in self.engines) else self._find_place(asked_for)
        if index is None:
            return []
        self.engines.append(EngineRecord(index, is_local=False))
        return self.engines[-1:]

    def _fail(self, error: AioEngineError) -> None:
        self.failure = self.failure or error


def start_error(error: Exception) -> ConfigError | ModelLoadError | EngineDead:
    """What an engine that cannot start has said is the reason."""
    if isinstance(error, ConfigError | ModelLoadError | EngineDead):
        return error
    return EngineDead(f"{type(error).__name__}: {error}")


async def welcome(
    channel: Channel,
    machine: Welcome,
    clock: Callable[[], float],
    *,
    exits: deque[tuple[int, str]],
    on_change: Callable[[], None] = lambda: None,
) -> None:
    """Drive a `Welcome` over a ROUTER socket until all engines are ready.

    Args:
        exits: (index, description) of local engines that have ended; ``channel`` is woken after an append.
        on_change: called after each message.
    Raises:
        ConfigError, ModelLoadError, EngineDead: one of them cannot start, or did not in time.
    """
    writers: dict[bytes, Writer] = {}
    while not machine.is_done and machine.failure is None:
        # What an engine has said last may still be on its way when its end is known.
        limit_s = LAST_WORDS_S if exits else max(machine.deadline - clock(), 0.0)
        messages: list[list[bytes]] = []
        with anyio.move_on_after(limit_s):
            messages = await channel.receive()
        for peer, *frames in messages:
            for to, body in machine.on_message(bytes(peer), frames):
                channel.send([to, writers.setdefault(to, Writer()).write(body)])
            on_change()
        if exits and not messages and machine.failure is None:
            machine.on_exit(*exits.popleft())
        machine.on_time(clock())
    if machine.failure is not None:
        raise machine.failure


# The engine's side


def check_init(body: ToEngine) -> Init:
    """An answer to HELLO.

    Raises:
        EngineDead: this engine was turned away.
    """
    if isinstance(body, Goodbye):
        raise EngineDead(f"this engine is not wanted: {body.reason}")
    if isinstance(body, TurnedAway):
        raise EngineDead(f"this engine was turned away: {body.reason}")
    if body.version != PROTOCOL_VERSION:
        raise EngineDead(f"version {PROTOCOL_VERSION} is spoken here, not {body.version}")
    return body


def merge_inits(inits: Sequence[Init]) -> Init:
    """What one or two have said together.

    What the first (the one beside it) says of address and config holds, and code is for it alone to name; the last one,
    which may be shared, says which engine of how many it is.
    """
    first, last = inits[0], inits[-1]
    return msgspec.structs.replace(
        first,
        index=last.index,
        num_engines=last.num_engines,
        address=first.address or last.address,
        config=first.config or last.config,
    )
