"""Starting an engine in a process of its own: HELLO → INIT → READY, as a pure machine and its driver.

The engine sends HELLO to the process that started it, which answers by INIT: the model to serve, and the address. The
engine reports LOADING while it loads the model, then READY with what it offers, or FAILING with the reason. An engine
that serves at an address has another handshake, `wire.Attach` and `wire.Attached`; what it offers is in the second.
"""

from __future__ import annotations

import hmac
from collections import deque
from collections.abc import Callable
from typing import Any

import anyio

from aioengine.config import EngineConfig
from aioengine.core.executor_protocol import ExecutorInfo, LockstepPlace
from aioengine.errors import AioEngineError, ConfigError, EngineDead, ModelLoadError, WireError
from aioengine.transport.channel import Channel
from aioengine.transport.wire import PROTOCOL_VERSION, Fault, Reader, WireMessage, Writer, to_error

FINAL_MESSAGE_S = 0.1
"""How long to wait for a message that was sent before its sender's end."""

HELLO_TIMEOUT_S = 60.0
"""How long a process may take to start Python and send HELLO; it imports no torch before that."""


# From an engine


class Hello(WireMessage, frozen=True, tag=1):
    version: int
    token: str
    """Proves that the receiver started it."""
    pid: int


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
    address: str | None = None
    """Where to serve; None: in a folder of its own."""
    config: EngineConfig | None = None
    plugins: tuple[str, ...] = ()
    """Modules to import first."""
    executor: str | None = None
    """``module:function`` that makes the device side; None: torch's."""
    lockstep: LockstepPlace | None = None
    """Its place in the group that it computes each step with; None: it steps alone."""


class TurnedAway(WireMessage, frozen=True, tag=2):
    version: int
    reason: str


ToEngine = Init | TurnedAway


class Welcome:
    """The side that started an engine and waits for it: a pure machine.

    Args:
        name: of the engine, for errors.
        make_init: called once, when the engine says HELLO; returns what it is to do.
        token: what the engine must show.
        now, start_timeout_s: the engine is READY by then, and says HELLO within `HELLO_TIMEOUT_S`.
    Attributes:
        loaded: (bytes done, bytes in all).
        ready: the engine's offer, once it is ready.
        failure: why the start has failed; None: it has not.
    """

    def __init__(
        self, *, name: str, make_init: Callable[[], Init], token: str, now: float, start_timeout_s: float
    ) -> None:
        self.loaded = (0, 0)
        self.ready: Ready | None = None
        self.failure: AioEngineError | None = None
        self._name = name
        self._make_init = make_init
        self._token = token
        self._hello_by = now + min(HELLO_TIMEOUT_S, start_timeout_s)
        self._ready_by = now + start_timeout_s
        self._start_timeout_s = start_timeout_s
        self._peer: bytes | None = None
        """The engine's routing id, once it has sent HELLO, and the reader of its messages."""
        self._reader: Reader[FromEngine] = Reader(FromEngine)

    @property
    def deadline(self) -> float:
        """When to call `on_time` at the latest."""
        return self._hello_by if self._peer is None else self._ready_by

    def on_message(self, peer: bytes, frames: list[Any]) -> WireMessage | None:
        """Take a message; return the answer to its sender. Foreign messages, and those out of turn, change nothing."""
        is_stranger = peer != self._peer
        reader: Reader[FromEngine] = Reader(FromEngine) if is_stranger else self._reader
        try:
            body = reader.read(frames)
        except WireError:
            return None
        if is_stranger:
            if not isinstance(body, Hello):
                return None
            if body.version != PROTOCOL_VERSION:
                return TurnedAway(PROTOCOL_VERSION, f"version {PROTOCOL_VERSION} is spoken here, not {body.version}")
            if not hmac.compare_digest(body.token.encode(), self._token.encode()):
                return TurnedAway(PROTOCOL_VERSION, "the token is another one")
            if self._peer is not None or self.failure is not None:
                return TurnedAway(PROTOCOL_VERSION, f"{self._name} is here already")
            self._peer, self._reader = peer, reader
            return self._make_init()
        if isinstance(body, Failing):
            self.failure = self.failure or start_error(to_error(body.fault))
        elif isinstance(body, Loading) and self.ready is None:
            self.loaded = (body.done, body.total)
        elif isinstance(body, Ready) and self.failure is None:
            self.ready = self.ready or body
        return None

    def on_exit(self, description: str) -> None:
        """The engine's process has ended."""
        self.failure = self.failure or EngineDead(description)

    def on_time(self, now: float) -> None:
        """Some time has passed."""
        if now >= self.deadline and self.ready is None:
            late = "did not say HELLO" if self._peer is None else f"was not ready within {self._start_timeout_s:g} s"
            self.failure = self.failure or EngineDead(f"{self._name} {late}")


def start_error(error: Exception) -> ConfigError | ModelLoadError | EngineDead:
    """The error of a start, from the reason that the engine has sent."""
    if isinstance(error, ConfigError | ModelLoadError | EngineDead):
        return error
    return EngineDead(f"{type(error).__name__}: {error}")


async def welcome(
    channel: Channel,
    machine: Welcome,
    clock: Callable[[], float],
    *,
    exits: deque[str],
    on_change: Callable[[], None] = lambda: None,
) -> None:
    """Drive a `Welcome` over a ROUTER socket until the engine is ready.

    Args:
        exits: descriptions of the process's end; ``channel`` is woken after an append.
        on_change: called after each message.
    Raises:
        ConfigError, ModelLoadError, EngineDead: it cannot start, or did not in time.
    """
    writers: dict[bytes, Writer] = {}
    while machine.ready is None and machine.failure is None:
        # The engine's final message may still be on its way when its end is known.
        limit_s = FINAL_MESSAGE_S if exits else max(machine.deadline - clock(), 0.0)
        messages: list[list[bytes]] = []
        with anyio.move_on_after(limit_s):
            messages = await channel.receive()
        for peer, *frames in messages:
            answer = machine.on_message(bytes(peer), frames)
            if answer is not None:
                channel.send([peer, writers.setdefault(bytes(peer), Writer()).write(answer)])
            on_change()
        if exits and not messages and machine.failure is None:
            machine.on_exit(exits[0])
        machine.on_time(clock())
    if machine.failure is not None:
        raise machine.failure


def check_init(body: ToEngine) -> Init:
    """The answer to HELLO, checked.

    Raises:
        EngineDead: this engine was turned away.
    """
    if isinstance(body, TurnedAway):
        raise EngineDead(f"this engine was turned away: {body.reason}")
    if body.version != PROTOCOL_VERSION:
        raise EngineDead(f"version {PROTOCOL_VERSION} is spoken here, not {body.version}")
    return body
