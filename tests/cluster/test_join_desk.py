"""Where engines of other machines join: which are admitted, as which rank, and what becomes of them. Real sockets."""

import contextlib
import random
import socket
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import anyio
import pytest
import zmq
from cluster.harness import DEADLINE_S
from nightly import nightly
from transport.wire_samples import HANDSHAKE_FROM_ENGINE, INFO, frames_of

from aioengine import ConfigError, EngineConfig, EngineDead
from aioengine._version import __version__
from aioengine.cluster.remote import JoinDesk
from aioengine.processes.worker_threads import TextWorker
from aioengine.transport import joining
from aioengine.transport.channel import Channel
from aioengine.transport.handshake import EngineRecord, Failing, Goodbye, HandshakeState, Loading, Ready
from aioengine.transport.joining import Endpoint, Handshake, Handshakes, NoFrontEnd
from aioengine.transport.security import ClientKeys, make_keys
from aioengine.transport.wire_errors import to_fault

pytestmark = pytest.mark.usefixtures("quiet_log")

ANY_PORT = "tcp://127.0.0.1:*"
READY = Ready("tcp://127.0.0.1:1", INFO, ("generate",))
CONFIG = EngineConfig(max_num_seqs=33)


class Desk(JoinDesk):
    """One that takes in a further engine as rank 7, or as the rank that it asks for from 7 on."""

    def __init__(self, worker: TextWorker, address: str = ANY_PORT, keys: Path | None = None) -> None:
        self.come: list[int] = []
        super().__init__(
            address, keys and str(keys), CONFIG, range(1, 3), worker,
            find_rank=lambda rank: 7 if rank < 0 else rank if rank >= 7 else None, on_join=self.come.append,
        )  # fmt: skip


@contextlib.asynccontextmanager
async def opened(address: str = ANY_PORT, keys: Path | None = None) -> AsyncIterator[Desk]:
    worker = TextWorker()
    desk = Desk(worker, address, keys)
    await desk.open()
    try:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(desk.run)
            with anyio.fail_after(DEADLINE_S):
                yield desk
            tasks.cancel_scope.cancel()
    finally:
        desk.say_goodbye("the test is over")
        await desk.aclose()
        await worker.aclose()


@contextlib.asynccontextmanager
async def engine(
    desk: Desk | str, rank: int = -1, *, keys: Path | None = None, timeout_s: float = DEADLINE_S, says: Any = None
) -> AsyncIterator[Handshake]:
    """An engine's side of a handshake, which has been greeted, and has said something then."""
    address = desk if isinstance(desk, str) else desk.address
    worker = TextWorker()
    of_keys = await worker.run(lambda: ClientKeys.load(keys), None) if keys is not None else None
    shakers = Handshakes([Endpoint(address, rank, is_local=False, keys=of_keys, timeout_s=timeout_s)], worker)
    try:
        init = await shakers.greet()
        assert init is not None
        assert init.config is not None
        assert init.config.max_num_seqs == 33
        (handshake,) = shakers.joined
        assert handshake._init is not None
        if says is not None:
            handshake.tell(says)
        yield handshake
    finally:
        with anyio.CancelScope(shield=True):
            await shakers.aclose()
            await worker.aclose()


def rank_of(handshake: Handshake) -> int:
    assert handshake._init is not None
    return handshake._init.index


@pytest.fixture
def keys(tmp_path: Path) -> Path:
    """Of the front end; ``bob`` beside it has what bob's machine needs, and ``others`` is another front end's."""
    head, bob = tmp_path / "head", tmp_path / "bob"
    make_keys(head, ["bob", "eve"])
    make_keys(tmp_path / "others", ["bob"])
    (bob / "clients").mkdir(parents=True, mode=0o700)
    for name in ("server.key", "clients/bob.key_secret"):
        (bob / name).write_bytes((head / name).read_bytes())
        (bob / name).chmod(0o600)
    return head


# Ranks


async def test_engines_get_the_ranks_that_they_ask_for_or_the_next_that_is_free() -> None:
    async with opened() as desk, engine(desk, 2, says=READY), engine(desk, says=READY) as any_one:
        assert rank_of(any_one) == 1
        for rank in (1, 2):
            joined = await desk.wait_ready(rank, DEADLINE_S)
            assert (joined.index, joined.ready) == (rank, READY)
        assert not desk.has_place(7)
        async with engine(desk) as further, engine(desk, 9) as ninth:
            assert [rank_of(further), rank_of(ninth)] == [7, 9]
        assert desk.come == [2, 1, 7, 9]


@pytest.mark.parametrize(
    ("rank", "said"),
    [(2, "no remote engine 2 is waited for: it is here already"), (0, "no remote engine 0 is waited for")],
)
async def test_a_rank_that_is_taken_or_not_for_engines_that_join(rank: int, said: str) -> None:
    async with opened() as desk, engine(desk, 2, says=READY):
        with pytest.raises(EngineDead, match=said):
            async with engine(desk, rank):
                pass
        assert (await desk.wait_ready(2, DEADLINE_S)).ready == READY


async def test_another_release_is_turned_away_and_both_sides_say_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    said = f"aioengine {__version__} runs here, not 0.0.1: install the same"
    async with opened() as desk:
        monkeypatch.setattr(joining, "__version__", "0.0.1")
        with pytest.raises(EngineDead, match=f"this engine was turned away: {said}"):
            async with engine(desk):
                pass
        assert f"an engine with no key is turned away (1 so far): {said}" in caplog.messages


async def test_a_rank_that_ended_is_waited_for_and_one_that_left_is_not() -> None:
    async with opened() as desk:
        async with engine(desk, 1, says=READY), engine(desk, 7, says=READY):
            first, further = [await desk.wait_ready(rank, DEADLINE_S) for rank in (1, 7)]
            desk.check(7, INFO, CONFIG)
            assert desk.has_place(7)
        async with engine(desk, 1, says=READY), engine(desk, 7, says=READY):  # both have gone, and come back
            again, further_again = [await desk.wait_ready(rank, DEADLINE_S) for rank in (1, 7)]
            assert again is not first
            assert further_again is not further
            desk.leave(7)
            desk.dismiss(further_again, "it is not needed")
            assert not desk.has_place(7)


# Keys


async def test_a_key_is_both_a_proof_and_how_the_engine_is_reached(keys: Path) -> None:
    async with opened(keys=keys) as desk, engine(desk, 1, keys=keys.parent / "bob", says=READY):
        joined = await desk.wait_ready(1, DEADLINE_S)
        assert joined.key_name == "bob"
        mine, bobs = desk.keys_toward(joined), await anyio.to_thread.run_sync(ClientKeys.load, keys, "bob")
        assert mine is not None
        assert mine.server == bobs.pair.public
        assert bobs.as_server("front end").pair == bobs.pair
        assert mine.pair.public == bobs.server


@pytest.mark.parametrize(("who", "said"), [(None, "it asks for keys"), *nightly(("others", "it asks for other keys"))])
async def test_an_engine_without_the_right_keys_is_not_admitted(who: str | None, said: str, keys: Path) -> None:
    async with opened(keys=keys) as desk:
        with pytest.raises(ConfigError, match=said):
            async with engine(desk, 1, keys=keys.parent / who if who else None):
                pass
        assert desk.come == []


async def test_an_address_of_other_machines_needs_keys() -> None:
    worker = TextWorker()
    with pytest.raises(
        ConfigError, match=r"'tcp://0.0.0.0:5570' can be reached from other machines, and needs keys.*--join-keys"
    ):
        await Desk(worker, "tcp://0.0.0.0:5570").open()
    await worker.aclose()


# Starts that fail


async def test_what_an_engine_says_when_it_cannot_start_is_raised_here() -> None:
    fault = Failing(to_fault(ConfigError("the KV cache is too small")))
    async with opened() as desk, engine(desk, 1, says=fault):
        with pytest.raises(ConfigError, match="the KV cache is too small"):
            await desk.wait_ready(1, DEADLINE_S)
        async with engine(desk, 1, says=READY):
            assert (await desk.wait_ready(1, DEADLINE_S)).ready == READY


@pytest.mark.parametrize(
    ("says", "said"),
    [(None, "is not ready"), (Loading(1, 2), "has not loaded its model"), ("nothing", "has not said HELLO")],
)
async def test_an_engine_that_is_late_is_named_with_what_it_has_done(says: Any, said: str) -> None:
    async with opened() as desk, contextlib.AsyncExitStack() as stack:
        if says != "nothing":
            await stack.enter_async_context(engine(desk, 1, says=says))
        if isinstance(says, Loading):
            progress: list[Any] = []
            with anyio.move_on_after(DEADLINE_S) as scope:
                await desk.wait_ready(1, DEADLINE_S, lambda *of: (progress.append(of), scope.cancel()))  # type: ignore[arg-type, func-returns-value]
            assert progress == [(1, 2)]
        with pytest.raises(EngineDead, match=f"replica 1 is to join at tcp://.*, and {said} within 0.01 s"):
            await desk.wait_ready(1, 0.01)


async def test_one_that_comes_back_as_another_one_is_refused_at_both_ends() -> None:
    async with opened() as desk, engine(desk, 1, says=READY) as handshake:
        await desk.wait_ready(1, DEADLINE_S)
        desk.check(1, INFO, CONFIG)
        desk.check(1, INFO, CONFIG)
        with pytest.raises(ConfigError, match="replica 1 has come back as another one: max_n is 3 there and 128 here"):
            desk.check(1, INFO, EngineConfig(max_num_seqs=33, max_n=3))
        with pytest.raises(ConfigError, match="turned away: replica 1 has come back as another one: max_n"):
            await handshake.hold()


# Ends


@pytest.mark.parametrize("is_wanted_again", [True, False])
async def test_an_engine_that_is_dismissed_hears_whether_another_one_is_wanted(is_wanted_again: bool) -> None:
    async with opened() as desk, engine(desk, 1, says=READY) as handshake:
        joined = await desk.wait_ready(1, DEADLINE_S)
        if not is_wanted_again:
            desk.leave(1)
        desk.dismiss(joined, "it is restarted")
        desk.dismiss(joined, "again, which says nothing")
        assert await handshake.hold() == Goodbye("it is restarted", is_wanted_again)
        assert desk.has_place(1) is is_wanted_again


async def test_the_front_end_s_end_is_said_to_all() -> None:
    async with contextlib.AsyncExitStack() as stack:
        async with opened() as desk:
            engines = [await stack.enter_async_context(engine(desk, rank)) for rank in (1, 2)]
        for handshake in engines:
            assert await handshake.hold() == Goodbye("the test is over", is_wanted_again=False)


async def test_an_engine_waits_for_a_front_end_and_joins_its_successor_with_its_model_loaded(
    free_address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(joining, "RETRY_S", 0.001)
    joined: list[EngineRecord] = []

    async def be_an_engine() -> None:
        async with engine(free_address, 1, says=READY) as handshake:
            goodbye = await handshake.hold()
            assert goodbye == Goodbye("the test is over", is_wanted_again=False)

    with anyio.fail_after(DEADLINE_S):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(be_an_engine)
            worker = TextWorker()
            for _ in range(2):  # each is gone without a word
                desk = Desk(worker, free_address)
                await desk.open()
                async with anyio.create_task_group() as running:
                    running.start_soon(desk.run)
                    joined.append(await desk.wait_ready(1, DEADLINE_S))
                    running.cancel_scope.cancel()
                desk.abandon()
            await worker.aclose()
            async with opened(free_address) as desk:
                joined.append(await desk.wait_ready(1, DEADLINE_S))
    assert [(each.state, each.ready) for each in joined] == [(HandshakeState.READY, READY)] * 3


@pytest.mark.nightly
async def test_an_engine_whose_front_end_stays_away_ends(free_address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(joining, "RETRY_S", 0.001)
    with pytest.raises(NoFrontEnd, match=f"no front end was at {free_address} within 0.01 s"):
        async with engine(free_address, timeout_s=0.01):
            pass
    async with contextlib.AsyncExitStack() as stack:
        async with opened(free_address) as desk:
            handshake = await stack.enter_async_context(engine(desk, 1, timeout_s=0.05))
            desk.abandon()
        with pytest.raises(NoFrontEnd, match=f"the front end at {free_address} has been gone for 0.05 s: no front end"):
            await handshake.hold()


@pytest.fixture
def free_address() -> str:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return f"tcp://127.0.0.1:{server.getsockname()[1]}"


# Hostile peers


async def test_what_strangers_send_harms_nothing(context: zmq.Context[zmq.Socket[bytes]]) -> None:
    rng = random.Random(seed := 20)
    print(f"seed {seed}")
    async with opened() as desk, engine(desk, 1, says=READY):
        joined = await desk.wait_ready(1, DEADLINE_S)
        for _ in range(20):
            socket = context.socket(zmq.DEALER)
            socket.connect(desk.address)
            with contextlib.closing(Channel(socket)) as channel:
                for number in range(20):
                    channel.send(broken(rng, number))
        raw = await anyio.connect_tcp("127.0.0.1", int(desk.address.rpartition(":")[2]))
        async with raw:
            await raw.send(rng.randbytes(4096))
        async with engine(desk, 2, says=READY):
            assert (await desk.wait_ready(2, DEADLINE_S)).ready == READY
        assert await desk.wait_ready(1, DEADLINE_S) is joined
        assert len(desk._machine.engines) <= 22, "a HELLO of a stranger may be a good one, and is one engine"
        assert desk._machine.num_refused > 0


def broken(rng: random.Random, number: int) -> list[bytes]:
    """A message of an engine's in which something is wrong, most likely."""
    frames = frames_of(rng.choice(HANDSHAKE_FROM_ENGINE), rng.choice((0, number)))
    kind = rng.randrange(4)
    if kind == 0:
        return [rng.randbytes(rng.randrange(200)) for _ in range(rng.randrange(1, 4))]
    if kind == 1:
        return [*frames, b"more"]
    frame = bytearray(frames[0])
    for _ in range(rng.randrange(1, 4)):
        frame[rng.randrange(len(frame))] = rng.randrange(256)
    return [bytes(frame[: rng.randrange(len(frame))] if kind == 2 else frame)]
