"""HELLO → INIT → READY: the machine by itself, without a socket. With sockets and processes: test_start."""

import itertools
from typing import Any

import pytest

from aioengine.core.executor_protocol import ExecutorInfo
from aioengine.errors import ConfigError, EngineDead, ModelLoadError
from aioengine.transport.handshake import (
    Failing,
    Hello,
    Init,
    Loading,
    Ready,
    TurnedAway,
    Welcome,
    check_init,
)
from aioengine.transport.wire import PROTOCOL_VERSION, Fault, WireMessage, Writer, to_fault

TOKEN = "f00d"
INFO = ExecutorInfo(num_blocks=8, block_size=16, max_model_len=64, vocab_size=100)
READY = Ready("ipc:///somewhere/engine.sock", INFO, ("generate",))
OTHER_VERSION = PROTOCOL_VERSION + 1


INIT = Init(version=PROTOCOL_VERSION, address="ipc:///e/0")


def hello(*, token: str = TOKEN, version: int = PROTOCOL_VERSION) -> Hello:
    return Hello(version, token, 7)


class Peer:
    """An engine that talks to a `Welcome`."""

    names = itertools.count()

    def __init__(self, machine: Welcome) -> None:
        self.name = f"peer {next(self.names)}".encode()
        self._machine = machine
        self._writer = Writer()

    def send(self, body: WireMessage) -> WireMessage | None:
        """The answer."""
        return self._machine.on_message(self.name, [self._writer.write(body)])


def peer_at(machine: Welcome, *sent: WireMessage) -> Peer:
    """One that has sent so."""
    peer = Peer(machine)
    for body in sent:
        peer.send(body)
    return peer


def make_welcome(**options: Any) -> Welcome:
    options = {"now": 100.0, "start_timeout_s": 600.0, **options}
    return Welcome(name="engine 0", make_init=lambda: INIT, token=TOKEN, **options)


# Each state and each event

FAILING = Failing(Fault("ConfigError", "too small"))
BRING_TO: dict[str, list[WireMessage]] = {
    "new": [],
    "connected": [hello()],
    "ready": [hello(), READY],
    "failed": [hello(), FAILING],
}
TRANSITIONS = {
    ("new", "Hello"): "connected",
    ("connected", "Loading"): "loading",
    ("connected", "Ready"): "ready",
    ("connected", "Failing"): "failed",
    ("ready", "Failing"): "failed",
}


def state_of(machine: Welcome) -> str:
    if machine.failure is not None:
        return "failed"
    if machine.ready is not None:
        return "ready"
    if machine.loaded != (0, 0):
        return "loading"
    return "new" if machine.deadline == 160 else "connected"


@pytest.mark.parametrize("sent", [hello(), Loading(1, 2), READY, FAILING], ids=lambda sent: type(sent).__name__)
@pytest.mark.parametrize("state", BRING_TO)
def test_an_engine_changes_state_as_the_table_has_it_or_is_refused(state: str, sent: WireMessage) -> None:
    machine = make_welcome()
    peer = peer_at(machine, *BRING_TO[state])
    assert state_of(machine) == state
    peer.send(sent)
    assert state_of(machine) == TRANSITIONS.get((state, type(sent).__name__), state)


def test_an_engine_gets_init_loads_and_is_ready() -> None:
    machine = make_welcome()
    peer = Peer(machine)
    assert peer.send(hello()) == INIT
    assert peer.send(Loading(3, 10)) is None
    assert (machine.loaded, machine.ready) == ((3, 10), None)
    assert peer.send(READY) is None
    assert machine.ready == READY
    machine.on_time(1e9)  # a deadline that was met means nothing
    assert machine.failure is None


@pytest.mark.parametrize(
    ("who", "reason"),
    [
        (hello(token="beef"), "the token is another one"),
        (hello(token=""), "the token is another one"),
        (hello(token="ü"), "the token is another one"),
        (hello(version=OTHER_VERSION), f"version {PROTOCOL_VERSION} is spoken here, not {OTHER_VERSION}"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_stranger_is_turned_away(who: Hello, reason: str) -> None:
    machine = make_welcome()
    assert Peer(machine).send(who) == TurnedAway(PROTOCOL_VERSION, reason)
    assert state_of(machine) == "new"


def test_a_second_engine_is_turned_away_and_the_first_stays() -> None:
    machine = make_welcome()
    first = peer_at(machine, hello())
    assert Peer(machine).send(hello()) == TurnedAway(PROTOCOL_VERSION, "engine 0 is here already")
    first.send(READY)
    assert machine.ready


def test_noise_harms_nobody() -> None:
    machine = make_welcome()
    peer = Peer(machine)
    for frames in ([], [b""], [b"\xc1"], [b"x" * 100], [Writer().write(READY)], [Writer().write(hello()), b"more"]):
        assert machine.on_message(b"stranger", frames) is None
    peer.send(hello())
    replayed = [Writer().write(Loading(1, 1))]  # number 0, again
    assert machine.on_message(peer.name, replayed) is None
    assert machine.loaded == (0, 0)
    peer.send(READY)
    assert machine.ready


# Deadlines and failures


@pytest.mark.parametrize(
    ("start_timeout_s", "sent", "deadline", "failure"),
    [
        (600.0, [], 160.0, "engine 0 did not say HELLO"),
        (600.0, [hello()], 700.0, "engine 0 was not ready within 600 s"),
        (2.0, [], 102.0, "engine 0 did not say HELLO"),
    ],
)
def test_a_late_engine_is_a_failure(
    start_timeout_s: float, sent: list[WireMessage], deadline: float, failure: str
) -> None:
    machine = make_welcome(start_timeout_s=start_timeout_s)
    peer_at(machine, *sent)
    assert machine.deadline == deadline
    machine.on_time(deadline - 0.1)
    assert machine.failure is None
    machine.on_time(deadline)
    assert isinstance(machine.failure, EngineDead)
    assert str(machine.failure) == failure


@pytest.mark.parametrize(
    ("error", "comes_out"),
    [
        (ModelLoadError("shard 3 is damaged"), ModelLoadError("shard 3 is damaged")),
        (ConfigError("no such device"), ConfigError("no such device")),
        (EngineDead("the device is lost", dump="a report"), EngineDead("the device is lost")),
        (ZeroDivisionError("by zero"), EngineDead("ZeroDivisionError: by zero")),
        (OSError(28, "No space left"), EngineDead("OSError: [Errno 28] No space left")),
    ],
)
def test_the_reason_of_a_failing_engine_stays_when_it_exits(error: Exception, comes_out: Exception) -> None:
    machine = make_welcome()
    peer_at(machine, hello(), Failing(to_fault(error)))
    machine.on_exit("engine 0 exited with code 1")
    assert type(machine.failure) is type(comes_out)
    assert str(machine.failure) == str(comes_out)


@pytest.mark.parametrize("sent", [[], [hello()], [hello(), READY]], ids=["new", "connected", "ready"])
def test_an_exit_is_a_failure_in_any_state(sent: list[WireMessage]) -> None:
    machine = make_welcome()
    peer_at(machine, *sent)
    machine.on_exit("engine 0 (pid 7) was killed by SIGKILL")
    assert isinstance(machine.failure, EngineDead)
    assert str(machine.failure) == "engine 0 (pid 7) was killed by SIGKILL"


# The engine's side


@pytest.mark.parametrize(
    ("answer", "error"),
    [
        (TurnedAway(PROTOCOL_VERSION, "the token is another one"), "turned away: the token is another one"),
        (Init(OTHER_VERSION), f"version {PROTOCOL_VERSION} is spoken here, not {OTHER_VERSION}"),
    ],
)
def test_an_engine_that_is_turned_away_ends(answer: Any, error: str) -> None:
    assert check_init(INIT) == INIT
    with pytest.raises(EngineDead, match=error):
        check_init(answer)
