"""A coordinator and its front ends, which here are bare sockets."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from typing import Any

import anyio
import msgspec
import pytest
from transport.siege import Peer
from waiting import Tasks, turns, until

from aioengine.cluster import coordinator as coordinator_module
from aioengine.cluster import coordinator_messages as m
from aioengine.cluster.coordinator import Coordinator
from aioengine.config import EngineConfig, ReplicaOptions
from aioengine.errors import AioEngineError, EngineClosed, InvalidRequest
from aioengine.processes.worker_threads import TextWorker
from aioengine.transport import wire


def counts_of(*running: int) -> m.Counts:
    size = len(running)
    return m.Counts(list(range(size)), list(running), [1] * size, [2] * size, [100] * size)


class FakeCluster:
    """What a coordinator asks of a cluster, noted."""

    config = EngineConfig(max_num_seqs=7)
    options = ReplicaOptions(replicas=2, balance="load")
    pair_path = "/run/pair"

    def __init__(self) -> None:
        self.there = [m.Member(rank, "serving", 0, f"ipc:///run/{rank}") for rank in range(2)]
        self.running = [0, 0]
        self.asked: list[str] = []
        self.num_looks = 0

    def members(self) -> list[m.Member]:
        return list(self.there)

    def counts(self) -> m.Counts:
        self.num_looks += 1
        return counts_of(*self.running)

    async def scale(self, replicas: int) -> None:
        if replicas > 9:
            raise InvalidRequest("too many", param="replicas")
        self.asked.append(f"scale {replicas}")

    async def restart(self) -> None:
        self.asked.append("restart")

    def lend(self, rank: int, is_lent: bool) -> None:
        self.asked.append(f"{'lend' if is_lent else 'take back'} {rank}")

    def final_error(self) -> AioEngineError:
        return EngineClosed("it was closed")

    def change(self, rank: int, **fields: Any) -> None:
        self.there[rank] = msgspec.structs.replace(self.there[rank], **fields)


class FrontEnd(Peer):
    """A front end, which reads when it is told to."""

    def __init__(self, address: str, **options: Any) -> None:
        super().__init__(address, kinds=m.FromCoordinator, **options)
        self.num_calls = 0

    async def attach_to_cluster(self) -> m.AttachedToCluster:
        self.say(wire.Attach(wire.PROTOCOL_VERSION, self.name))
        attached = await self.answer()
        assert isinstance(attached, m.AttachedToCluster), attached
        return attached

    async def hears(self, expected: wire.WireMessage) -> None:
        await self.read_until(lambda: expected in self.news)

    def ask(self, call: m.ClusterCall) -> int:
        self.num_calls += 1
        self.say(wire.CallControl(self.num_calls, wire.pack_control(call)))
        return self.num_calls

    async def call(self, call: m.ClusterCall) -> Any:
        number = self.ask(call)
        await self.read_until(lambda: number in self.returned)
        returned = self.returned[number]
        return returned.result if returned.fault is None else returned.fault

    async def is_answered(self) -> None:
        assert await self.call(m.RestartReplicas()) is None


class Served:
    """A coordinator that runs, and its front ends."""

    def __init__(self, cluster: FakeCluster, coordinator: Coordinator) -> None:
        self.cluster = cluster
        self.coordinator = coordinator
        self.front_ends: list[FrontEnd] = []

    def new(self, **options: Any) -> FrontEnd:
        self.front_ends.append(FrontEnd(self.coordinator.address, **options))
        return self.front_ends[-1]

    async def attach(self, **options: Any) -> FrontEnd:
        front_end = self.new(**options)
        await front_end.attach_to_cluster()
        return front_end

    @property
    def num_attached(self) -> int:
        return len(self.coordinator.attached)

    @property
    def num_refused(self) -> int:
        return self.coordinator.num_refused.total()


@contextlib.asynccontextmanager
async def served(address: str) -> AsyncIterator[Served]:
    cluster, worker = FakeCluster(), TextWorker()
    here = Served(cluster, Coordinator(cluster, address, worker=worker))
    try:
        await here.coordinator.open()
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(here.coordinator.serve)
            yield here
            tasks.cancel_scope.cancel()
    finally:
        for front_end in here.front_ends:
            front_end.vanish()
        await worker.aclose()


@pytest.fixture
def address(tmp_path_factory: pytest.TempPathFactory) -> str:
    return f"ipc://{tmp_path_factory.mktemp('c')}/cluster"


@pytest.fixture
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    """Counts are looked at in each turn of the loop."""
    monkeypatch.setattr(coordinator_module, "PUBLISH_INTERVAL_S", 0.0)


class TestTelling:
    async def test_a_front_end_is_told_at_once_who_is_there(self, address: str) -> None:
        async with served(address) as here:
            here.cluster.running = [3, 4]
            for index in range(2):
                attached = await here.new().attach_to_cluster()
                assert (attached.index, attached.members.members) == (index, here.cluster.there)
                assert attached.counts == counts_of(3, 4)
                assert (attached.config["max_num_seqs"], attached.options["balance"]) == (7, "load")
                assert attached.pair_path == "/run/pair"

    async def test_several_hear_the_same(self, address: str, often: None) -> None:
        async with served(address) as here:
            front_ends = [await here.attach() for _ in range(3)]
            for running in ([1, 0], [1, 5], [0, 0]):
                here.cluster.running = running
                here.cluster.change(running[0], state=f"state {running[1]}")
                here.coordinator.announce()
                for front_end in front_ends:
                    await front_end.hears(m.Membership(here.cluster.there))
                    await front_end.hears(counts_of(*running))
            told = [[body for body in each.news if isinstance(body, m.Counts)] for each in front_ends]
            assert told[0] == told[1] == told[2]

    async def test_what_has_not_changed_is_not_told(self, address: str, often: None) -> None:
        async with served(address) as here:
            front_end = await here.attach()
            for _ in range(10):
                here.coordinator.announce()
            looks = here.cluster.num_looks
            await until(lambda: here.cluster.num_looks > looks + 10)
            await front_end.is_answered()
            assert [type(body) for body in front_end.news] == [wire.Returned]

    async def test_nothing_is_looked_at_while_no_front_end_is_there(self, address: str, often: None) -> None:
        async with served(address) as here:
            front_end = await here.attach()
            front_end.say(wire.Detach())
            await until(lambda: not here.num_attached)
            await turns(20)
            looks = here.cluster.num_looks
            await turns(200)
            assert here.cluster.num_looks == looks
            here.cluster.running = [9, 9]
            front_end = await here.attach()
            here.cluster.running = [8, 8]
            await front_end.hears(counts_of(8, 8))

    async def test_they_hear_the_end_and_why(self, address: str) -> None:
        async with served(address) as here:
            front_ends = [await here.attach() for _ in range(2)]
            async with anyio.create_task_group() as tasks:
                for front_end in front_ends:
                    tasks.start_soon(front_end.hears_the_end)
                here.coordinator._tasks.cancel_scope.cancel()
            ends = [each.news[-1] for each in front_ends]
            assert [end.fault.message for end in ends if isinstance(end, wire.Shutdown)] == ["it was closed"] * 2


@pytest.mark.virtual_clock
async def test_counts_are_told_at_most_every_100_ms() -> None:
    """By the interval alone: the loop's clock is virtual, and no socket is looked at."""
    cluster, worker = FakeCluster(), TextWorker()
    coordinator = Coordinator(cluster, "ipc:///nowhere", worker=worker)
    told: list[float] = []

    class Session:
        is_over = is_behind = False
        counts: m.Counts | None = None

        def send(self, body: m.Counts) -> None:
            told.append(anyio.current_time())

    coordinator.sessions[b"one"] = Session()  # type: ignore[assignment]
    begin = anyio.current_time()
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(coordinator._publish)
        for running in range(100):
            cluster.running = [running, running]
            await anyio.sleep(0.01)
        tasks.cancel_scope.cancel()
    await worker.aclose()
    assert 10 <= len(told) <= 11
    assert [round(each - begin, 6) for each in told] == pytest.approx([0.1 * place for place in range(len(told))])


class TestDraining:
    async def test_waits_for_the_front_ends_that_were_told(self, address: str) -> None:
        async with served(address) as here, Tasks() as tasks:
            leaving, staying = await here.attach(), await here.attach()
            here.cluster.change(1, state="draining")
            here.coordinator.announce()
            late = await here.attach()
            waiting = tasks.start(here.coordinator.wait_drained(1))
            for front_end in (leaving, staying):
                await front_end.hears(m.Membership(here.cluster.there))
            late.say(m.Drained(1))
            staying.say(m.Drained(0))
            leaving.vanish()
            await staying.is_answered()
            await until(lambda: here.num_attached == 2)
            assert not waiting.done()
            staying.say(m.Drained(1))
            await tasks.end(waiting)
            await here.coordinator.wait_drained(0)

    async def test_is_over_for_one_that_drains_no_more(self, address: str) -> None:
        async with served(address) as here:
            await here.attach()
            here.cluster.change(1, state="draining")
            here.coordinator.announce()
            here.cluster.change(1, state="backing off")
            here.coordinator.announce()
            await here.coordinator.wait_drained(1)


class TestReserving:
    async def test_is_done_when_the_others_have_left(self, address: str) -> None:
        async with served(address) as here:
            holder, other = await here.attach(), await here.attach()
            here.cluster.running = [3, 1]  # the second one has less to do
            asked = holder.ask(m.Reserve())
            reserved = m.Membership([here.cluster.there[0], state_of(here.cluster.there[1], "reserved")])
            await other.hears(reserved)
            late = here.new()
            assert (await late.attach_to_cluster()).members == reserved
            assert asked not in holder.returned
            other.say(m.Drained(1))
            await holder.read_until(lambda: asked in holder.returned)
            assert holder.returned[asked].result == 1
            assert not any(isinstance(body, m.Membership) for body in holder.news)
            assert here.cluster.asked == ["lend 1"]
            assert await other.call(m.Release(1)) is None  # which is not its own
            assert await holder.call(m.Release(1)) is None
            await late.hears(m.Membership(here.cluster.there))
            assert here.cluster.asked == ["lend 1", "take back 1"]

    async def test_leaves_the_last_one_of_several_to_all(self, address: str) -> None:
        async with served(address) as here:
            one, other = await here.attach(), await here.attach()
            async with reading(one, other):
                first = one.ask(m.Reserve())
                reserved = m.Membership([state_of(here.cluster.there[0], "reserved"), here.cluster.there[1]])
                await until(lambda: reserved in other.news)
                second = other.ask(m.Reserve())
                other.say(m.Drained(0))
                await until(lambda: first in one.returned)
                assert second not in other.returned
                one.say(wire.Detach())  # what it had is free again
                await until(lambda: second in other.returned)

    async def test_ends_with_the_replica(self, address: str) -> None:
        async with served(address) as here:
            holder, other = await here.attach(), await here.attach()
            asked = holder.ask(m.Reserve())
            await other.hears(m.Membership([state_of(here.cluster.there[0], "reserved"), here.cluster.there[1]]))
            here.cluster.change(0, state="backing off")
            here.coordinator.announce()  # before the other one has left it: another one is reserved
            await other.hears(m.Membership([here.cluster.there[0], state_of(here.cluster.there[1], "reserved")]))
            other.say(m.Drained(1))
            await holder.read_until(lambda: asked in holder.returned)
            assert holder.returned[asked].result == 1
            assert here.cluster.asked == ["lend 0", "take back 0", "lend 1"]

    async def test_of_the_owner_s_is_of_all_others_alike(self, address: str) -> None:
        async with served(address) as here, Tasks() as tasks:
            front_end = await here.attach()
            reserving = tasks.start(here.coordinator.reserve(coordinator_module.OWNER))
            await front_end.hears(m.Membership([state_of(here.cluster.there[0], "reserved"), here.cluster.there[1]]))
            reserving.cancel()
            await front_end.hears(m.Membership(here.cluster.there))


def state_of(member: m.Member, state: str) -> m.Member:
    return msgspec.structs.replace(member, state=state)


class TestCalls:
    async def test_are_the_cluster_s(self, address: str) -> None:
        async with served(address) as here:
            front_end = await here.attach()
            assert await front_end.call(m.Scale(3)) is None
            assert await front_end.call(m.RestartReplicas()) is None
            assert here.cluster.asked == ["scale 3", "restart"]
            refused = await front_end.call(m.Scale(10))
            assert (refused.kind, refused.message, refused.param) == ("InvalidRequest", "too many", "replicas")

    @pytest.mark.parametrize(
        "raw",
        [
            b"\xc0",
            msgspec.msgpack.encode({"type": "Scale"}),
            msgspec.msgpack.encode({"type": "Scale", "replicas": 0}),
            msgspec.msgpack.encode({"type": "Scale", "replicas": 2**40}),
            msgspec.msgpack.encode({"type": "Sleep", "level": 1}),
        ],
    )
    async def test_that_are_none_fail_their_caller(self, address: str, raw: bytes) -> None:
        async with served(address) as here:
            front_end = await here.attach()
            front_end.say(wire.CallControl(77, msgspec.Raw(raw)))
            await front_end.read_until(lambda: 77 in front_end.returned)
            fault = front_end.returned[77].fault
            assert fault is not None
            assert fault.kind == "InvalidRequest"
            await front_end.is_answered()


@contextlib.asynccontextmanager
async def reading(*front_ends: FrontEnd) -> AsyncIterator[None]:
    """They read and answer meanwhile."""

    async def read(front_end: FrontEnd) -> None:
        while True:
            await front_end.read()

    async with anyio.create_task_group() as tasks:
        for front_end in front_ends:
            tasks.start_soon(read, front_end)
        yield
        tasks.cancel_scope.cancel()


class TestOneThatDoesNotRead:
    async def test_is_told_no_more_counts_and_then_what_is_so(
        self, address: str, often: None, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(coordinator_module, "BEHIND_MESSAGES", 8)
        async with served(address) as here:
            stopped, other = await here.attach(), await here.attach()
            async with reading(other):
                (session, _) = here.coordinator.attached
                for running in range(100):
                    here.cluster.running = [running, running]
                    looks = here.cluster.num_looks
                    await until(lambda looks=looks: here.cluster.num_looks > looks + 1)  # type: ignore[misc]
                assert session.num_unread == 8
                here.cluster.change(0, state="draining")
                here.coordinator.announce()
            await stopped.hears(m.Membership(here.cluster.there))
            assert counts_of(99, 99) not in stopped.news
            stopped.say(wire.Acknowledge(stopped.reader.due - 1))
            await stopped.hears(counts_of(99, 99))
