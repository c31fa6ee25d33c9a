"""HELLO → INIT → READY: the machines by themselves, without a socket. With sockets and processes: test_start."""

import itertools
from typing import Any

import pytest

from aioengine.config import EngineConfig
from aioengine.core.executor_protocol import ExecutorInfo
from aioengine.errors import ConfigError, EngineDead, ModelLoadError
from aioengine.transport.handshake import (
    TRANSITIONS,
    Failing,
    HandshakeState,
    Hello,
    Init,
    Loading,
    Ready,
    TurnedAway,
    Welcome,
    check_init,
    merge_inits,
)
from aioengine.transport.wire import PROTOCOL_VERSION, WireMessage, Writer
from aioengine.transport.wire_errors import Fault, to_fault

TOKEN = "f00d"
INFO = ExecutorInfo(num_blocks=8, block_size=16, max_model_len=64, vocab_size=100)
READY = Ready("ipc:///somewhere/engine.sock", INFO, ("generate",))
OTHER_VERSION = PROTOCOL_VERSION + 1


def init_of(index: int) -> Init:
    return Init(version=PROTOCOL_VERSION, index=index, num_engines=4, address=f"ipc:///e/{index}")


def hello(index: int, *, is_local: bool = True, token: str | None = None, version: int = PROTOCOL_VERSION) -> Hello:
    return Hello(version, index, token if token is not None else TOKEN if is_local else "", 7, is_local)


class Peer:
    """An engine that talks to a `Welcome`."""

    names = itertools.count()

    def __init__(self, machine: Welcome) -> None:
        self.name = f"peer {next(self.names)}".encode()
        self._machine = machine
        self._writer = Writer()

    def says(self, body: WireMessage) -> WireMessage | None:
        """What it is answered."""
        answers = self._machine.on_message(self.name, [self._writer.write(body)])
        assert [to for to, _ in answers] in ([], [self.name])
        return answers[0][1] if answers else None


def peer_at(machine: Welcome, *said: WireMessage) -> Peer:
    """One that has said so."""
    peer = Peer(machine)
    for body in said:
        peer.says(body)
    return peer


def make_welcome(num_local: int = 1, num_remote: int = 0, **options: Any) -> Welcome:
    return Welcome(
        num_local=num_local,
        num_remote=num_remote,
        make_init=init_of,
        token=TOKEN,
        **{"now": 100.0, "start_timeout_s": 600.0, **options},
    )


def states(machine: Welcome) -> str:
    return " ".join(engine.state.value for engine in machine.engines)


# Each state and each event

BRING_TO: dict[HandshakeState, list[WireMessage]] = {
    HandshakeState.NEW: [],
    HandshakeState.CONNECTED: [hello(0)],
    HandshakeState.READY: [hello(0), READY],
    HandshakeState.FAILED: [hello(0), Failing(Fault("ConfigError", "too small"))],
}
SAY: list[WireMessage] = [hello(0), Loading(1, 2), READY, Failing(Fault("ConfigError", "too small"))]


@pytest.mark.parametrize("said", SAY, ids=lambda said: type(said).__name__)
@pytest.mark.parametrize("state", HandshakeState)
def test_an_engine_changes_state_as_the_table_says_or_is_refused(state: HandshakeState, said: WireMessage) -> None:
    machine = make_welcome()
    peer = peer_at(machine, *BRING_TO[state])
    assert (machine.engines[0].state, machine.num_refused) == (state, 0)
    peer.says(said)
    after = TRANSITIONS[state].get(type(said))
    assert machine.engines[0].state is (after or state)
    assert machine.num_refused == (after is None)


def test_an_engine_is_told_init_loads_and_is_ready() -> None:
    machine = make_welcome()
    peer = Peer(machine)
    assert peer.says(hello(0)) == init_of(0)
    assert machine.engines[0].peer == peer.name
    assert peer.says(Loading(3, 10)) is None
    assert machine.engines[0].loaded == (3, 10)
    assert not machine.is_done
    assert peer.says(READY) is None
    assert machine.engines[0].ready == READY
    assert machine.is_done
    machine.on_time(1e9)  # a deadline that was met means nothing
    assert machine.failure is None


# Who may come


@pytest.mark.parametrize("order", sorted({*itertools.permutations([0, 1, -1, -1])}), ids=str)
def test_two_local_and_two_remote_engines_come_in_any_order(order: tuple[int, ...]) -> None:
    machine = make_welcome(2, 2)
    peers = []
    next_remote = itertools.count(2)
    for index in order:
        peers.append(Peer(machine))
        place = next(next_remote) if index < 0 else index
        assert peers[-1].says(hello(index, is_local=index >= 0)) == init_of(place)
    for peer in reversed(peers):
        assert not machine.is_done
        peer.says(READY)
    assert machine.is_done
    assert [engine.is_local for engine in machine.engines] == [True, True, False, False]
    assert machine.num_refused == 0


def test_remote_engines_may_ask_for_their_places() -> None:
    machine = make_welcome(2, 2)
    assert Peer(machine).says(hello(3, is_local=False)) == init_of(3)
    assert Peer(machine).says(hello(-1, is_local=False)) == init_of(2)
    assert states(machine) == "new new connected connected"


@pytest.mark.parametrize(
    ("who", "reason"),
    [
        (hello(0, token="beef"), "the token is another one"),
        (hello(0, token=""), "the token is another one"),
        (hello(0, token="ü"), "the token is another one"),
        (hello(0, version=OTHER_VERSION), f"version {PROTOCOL_VERSION} is spoken here, not {OTHER_VERSION}"),
        (hello(1), "no local engine 1 is waited for"),  # it is a remote one's place
        (hello(7), "no local engine 7 is waited for"),
        (hello(0, is_local=False), "no remote engine 0 is waited for"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_who_does_not_belong_here_is_turned_away_and_counted(who: Hello, reason: str) -> None:
    machine = make_welcome(1, 1)
    assert Peer(machine).says(who) == TurnedAway(PROTOCOL_VERSION, reason)
    assert states(machine) == "new new"
    assert machine.num_refused == 1
    assert Peer(machine).says(hello(0)) == init_of(0)  # the right one may still come


@pytest.mark.parametrize("index", [0, -1])
def test_a_place_that_is_taken_stays_taken(index: int) -> None:
    machine = make_welcome(1, 1)
    first, remote = peer_at(machine, hello(0)), peer_at(machine, hello(-1, is_local=False))
    for is_local in (True, False):
        where = "local" if is_local else "remote"
        answer = Peer(machine).says(hello(index, is_local=is_local))
        is_here = ": it is here already" if index == 0 and is_local else ""
        assert answer == TurnedAway(PROTOCOL_VERSION, f"no {where} engine {index} is waited for{is_here}")
    assert machine.engines[0].peer == first.name
    assert machine.num_refused == 2
    first.says(READY)
    remote.says(READY)
    assert machine.is_done


def test_noise_is_counted_and_harms_nobody() -> None:
    machine = make_welcome()
    peer = Peer(machine)
    for frames in ([], [b""], [b"\xc1"], [b"x" * 100], [Writer().write(READY)], [Writer().write(hello(0)), b"more"]):
        assert machine.on_message(b"stranger", frames) == []
    assert machine.num_refused == 6
    peer.says(hello(0))
    replayed = [Writer().write(Loading(1, 1))]  # number 0, again
    assert machine.on_message(peer.name, replayed) == []
    assert machine.num_refused == 7
    peer.says(READY)
    assert machine.is_done


# Deadlines


@pytest.mark.parametrize(
    ("num_engines", "start_timeout_s", "said", "deadline", "failure"),
    [
        ((2, 2), 600.0, {1: [hello(1)]}, 160.0, "engine 0 (local), 2 (remote), 3 (remote) did not say HELLO"),
        ((2,), 600.0, {0: [hello(0), READY], 1: [hello(1)]}, 700.0, "engine 1 (local) was not ready within 600 s"),
        ((1,), 2.0, {}, 102.0, "engine 0 (local) did not say HELLO"),
    ],
)
def test_who_is_late_is_named(
    num_engines: tuple[int, ...],
    start_timeout_s: float,
    said: dict[int, list[WireMessage]],
    deadline: float,
    failure: str,
) -> None:
    machine = make_welcome(*num_engines, start_timeout_s=start_timeout_s)
    for each in said.values():
        peer_at(machine, *each)
    assert machine.deadline == deadline
    machine.on_time(deadline - 0.1)
    assert machine.failure is None
    machine.on_time(deadline)
    assert isinstance(machine.failure, EngineDead)
    assert str(machine.failure) == failure


# Failures


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
def test_a_failing_engine_is_the_failure_of_all(error: Exception, comes_out: Exception) -> None:
    machine = make_welcome(2)
    peer_at(machine, hello(1), Failing(to_fault(error)))
    assert states(machine) == "new failed"
    assert type(machine.failure) is type(comes_out)
    assert str(machine.failure) == str(comes_out)
    machine.on_exit(1, "engine 1 exited with code 1")  # as it must
    machine.on_exit(0, "engine 0 was killed")
    assert str(machine.failure) == str(comes_out)  # the first one stays


@pytest.mark.parametrize("said", [[], [hello(0)], [hello(0), READY]], ids=["new", "connected", "ready"])
def test_an_exit_is_a_failure_in_any_state(said: list[WireMessage]) -> None:
    machine = make_welcome(1, 1)
    peer_at(machine, *said)
    machine.on_exit(0, "engine 0 (pid 7) was killed by SIGKILL")
    assert states(machine) == "failed new"
    assert isinstance(machine.failure, EngineDead)
    assert str(machine.failure) == "engine 0 (pid 7) was killed by SIGKILL"
    assert not machine.is_done


# The engine's side


def test_of_two_the_first_says_where_and_what_and_the_last_which() -> None:
    here, there = EngineConfig(max_num_seqs=7), EngineConfig(max_num_seqs=9)
    nothing = Init(PROTOCOL_VERSION, 0, 1)
    full = Init(PROTOCOL_VERSION, 2, 3, "ipc:///a", here, ("a", "b"), "m:f")
    shared = Init(PROTOCOL_VERSION, 5, 8, "tcp://127.0.0.1:1", there, ("anybody's",), "other:f")
    assert merge_inits([full]) == full
    # Code is for its parent alone to name; what else the first leaves open the second says.
    assert merge_inits([full, shared]) == Init(PROTOCOL_VERSION, 5, 8, "ipc:///a", here, ("a", "b"), "m:f")
    assert merge_inits([nothing, shared]) == Init(PROTOCOL_VERSION, 5, 8, shared.address, there)


@pytest.mark.parametrize(
    ("said", "error"),
    [
        (TurnedAway(PROTOCOL_VERSION, "the token is another one"), "turned away: the token is another one"),
        (Init(OTHER_VERSION, 0, 1), f"version {PROTOCOL_VERSION} is spoken here, not {OTHER_VERSION}"),
    ],
)
def test_an_engine_that_is_turned_away_ends(said: Any, error: str) -> None:
    assert check_init(init_of(0)) == init_of(0)
    with pytest.raises(EngineDead, match=error):
        check_init(said)
