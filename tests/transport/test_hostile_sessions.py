"""Peers that come in numbers, steal, vanish or do not read, beside one that behaves and gets its tokens."""

from __future__ import annotations

import asyncio
import time

import anyio
import pytest
from nightly import few, nightly
from transport.siege import (
    Peer,
    Siege,
    attach_frames,
    besieged,
    expected_tokens,
    joined,
    params_of,
    request,
)
from transport.strangers import STRANGERS, say
from waiting import until

from aioengine.transport import peers as peers_module
from aioengine.transport import server as server_module
from aioengine.transport import wire
from aioengine.transport.server import EngineServer
from aioengine.transport.wire import PROTOCOL_VERSION, Attached, Refused, Writer

both_ways = pytest.mark.parametrize("scheme", ["ipc", *nightly("tcp")])


@both_ways
class TestAttaching:
    @pytest.mark.nightly
    async def test_more_than_are_possible(self, address: str, monkeypatch: pytest.MonkeyPatch) -> None:
        """They are bounded while they are there, those that were let go included."""
        monkeypatch.setattr(peers_module, "MAX_SESSIONS", 16)
        async with besieged(address) as siege:
            num_attached = num_refused = 0
            for _ in range(20):
                peers = [Peer(siege.server.address) for _ in range(50)]
                for peer in peers:
                    peer.say_raw(attach_frames())
                for peer in peers:
                    answer = await peer.answer()
                    num_attached += isinstance(answer, Attached)
                    num_refused += isinstance(answer, Refused)
                    if isinstance(answer, Attached):
                        peer.writer.number = 1
                        peer.say(wire.Detach())
                    assert len(siege.server.sessions) <= 16
                for peer in peers:
                    peer.vanish()
            assert num_attached >= 15
            assert num_attached + num_refused == 1000
            await until(lambda: len(siege.server.sessions) == 1)
            await siege.peer().join()

    async def test_who_was_let_go_is_not_heard_again(self, address: str) -> None:
        """Neither as before nor anew; it counts as no refusal, since it may not have known."""
        async with besieged(address) as siege:
            peer = siege.peer()
            await peer.join()
            peer.say(wire.Detach())
            for number in range(20):
                peer.say(request(number))
            peer.writer = Writer()
            peer.say(wire.Attach(PROTOCOL_VERSION))
            other = siege.peer()
            await other.join()
            assert siege.num_sessions == 1
            assert siege.num_refused == 0

    async def test_one_that_calls_itself_as_another_does_gets_nothing(self, address: str) -> None:
        async with besieged(address) as siege:
            peer = siege.peer(routing_id=b"mine")
            await peer.join()
            thieves = [siege.peer(routing_id=b"mine") for _ in range(3)]
            for thief in thieves:
                thief.say_raw(attach_frames())
            for number in range(3):
                peer.say(request(number, max_tokens=100))
            await peer.read_until(lambda: len(peer.ended) == 3)
            for number in range(3):
                assert peer.tokens[number] == expected_tokens([1, 2, 3], 100, seed=number)
            assert not any(thief._socket.poll(0) for thief in thieves)
            assert siege.num_sessions == 1

    async def test_whose_connection_has_the_number_of_one_that_has_just_ended(self, address: str) -> None:
        """The end of that one, whenever the server hears of it, does not end this one."""
        async with besieged(address) as siege:
            for number in range(10):
                gone, late = siege.peer(), siege.peer()
                await gone.join()
                gone.vanish()
                await late.join()
                await late.is_served(number)
                late.vanish()

    async def test_whose_connection_has_ended_already(self, address: str) -> None:
        """Its session ends when there is something to be sent."""
        async with besieged(address) as siege:
            peer = siege.peer()
            await peer.join()
            siege.session.connection = -1
            peer.vanish()
            await until(lambda: len(siege.server.sessions) == 1)


@pytest.mark.parametrize("stranger", few(["silent", "http", "NULL", "wrong secret", "malformed HELLO"], of=STRANGERS))
async def test_strangers_neither_become_a_front_end_nor_end_one_nor_hide_its_end(stranger: str) -> None:
    """Some are refused with a failure, some without, some with two; some hang up themselves."""
    async with joined("tcp://127.0.0.1:*") as (siege, peer):
        port = int(siege.server.address.rpartition(":")[2])
        for number in range(3):
            await asyncio.to_thread(say, port, *STRANGERS[stranger])
            await peer.is_served(number)
        assert siege.num_sessions == 1
        peer.vanish()
        await until(lambda: siege.num_sessions == 0)


@both_ways
class TestVanishing:
    async def test_in_the_middle_of_its_requests(self, address: str) -> None:
        async with besieged(address) as siege:
            for _ in range(5):
                peer = siege.peer()
                await peer.join()
                for number in range(4):
                    peer.say(request(number, max_tokens=3000))
                await peer.read_until(lambda peer=peer: len(peer.tokens) == 4)  # type: ignore[misc]
                peer.vanish()
            await until(lambda: len(siege.server.sessions) == 1)
            await until(lambda: len(siege.server.core._live) <= 1)

    @pytest.mark.parametrize("moment", ["at once", "asked", "attached"])
    async def test_while_it_attaches(self, address: str, moment: str) -> None:
        async with besieged(address) as siege:
            for _ in range(10):
                peer = siege.peer()
                if moment == "asked":
                    peer.say_raw(attach_frames())
                elif moment == "attached":
                    await peer.join()
                peer.vanish()
            await siege.is_unharmed()


def small_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(EngineServer, "max_unread", 300)
    monkeypatch.setattr(server_module, "BEHIND_MESSAGES", 50)


@both_ways
class TestOneThatDoesNotRead:
    async def _is_cut_off(self, siege: Siege, peer: Peer) -> None:
        """And its requests end; steps go on meanwhile, for the others."""
        steps_before, good_before = len(siege.executor.plans), siege.num_good
        begin = time.monotonic()
        await until(lambda: siege.num_sessions == 0)
        took_s = time.monotonic() - begin
        await until(lambda: len(siege.server.core._live) <= 1)
        assert len(siege.executor.plans) >= steps_before + 200
        assert siege.num_good > good_before
        assert took_s < 20

    @pytest.mark.parametrize(
        "how", ["reads nothing", "says more", *nightly("reads and does not say so", "says so and does not read")]
    )
    async def test_is_cut_off(self, address: str, how: str, monkeypatch: pytest.MonkeyPatch) -> None:
        """It can say to have read what was sent, and no more: what waits for it has a bound."""
        if how == "says so and does not read" and address.startswith("tcp"):
            pytest.skip("the kernel takes megabytes for it before the engine's queue fills")
        small_bounds(monkeypatch)
        async with joined(address, hwm=1) as (siege, peer):
            peer.say(request(0, max_tokens=3000))

            session = siege.session

            async def go_on() -> None:
                while how != "reads nothing":
                    if how == "reads and does not say so":
                        await peer.channel.receive()
                    else:
                        peer.say(wire.Acknowledge(10**9 if how == "says more" else session._writer.number - 1))
                        await asyncio.sleep(0)

            async with anyio.create_task_group() as tasks:
                tasks.start_soon(go_on)
                await self._is_cut_off(siege, peer)
                tasks.cancel_scope.cancel()

    async def test_hears_why_once_it_reads_again(self, address: str, monkeypatch: pytest.MonkeyPatch) -> None:
        """What it had left unread comes first, whole and in order."""
        small_bounds(monkeypatch)
        async with joined(address) as (siege, peer):
            peer.say(request(0, max_tokens=3000))
            await until(lambda: siege.num_sessions == 0)
            fault = await peer.hears_the_end()
            assert fault.kind == "EngineDead"
            assert "unread" in fault.message
            assert peer.tokens[0] == expected_tokens([1, 2, 3], len(peer.tokens[0]), seed=0)

    async def test_leaves_many_bytes_unread(self, address: str, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(peers_module, "MAX_UNREAD_BYTES", 100_000)
        async with joined(address, hwm=1) as (siege, peer):
            for number in range(8):
                peer.say(request(number, max_tokens=2000, params=params_of(logprobs=20)))
            await until(lambda: siege.num_sessions == 0)

    async def test_hears_of_nobody_else_s_steps_while_it_is_behind(
        self, address: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """One that is idle and does not read is told little, and stays."""
        monkeypatch.setattr(server_module, "BEHIND_MESSAGES", 20)
        monkeypatch.setattr(EngineServer, "max_unread", 60)
        async with joined(address) as (siege, _):
            steps_before = len(siege.executor.plans)
            await until(lambda: len(siege.executor.plans) > steps_before + 300)
            assert siege.num_sessions == 1
            assert len(siege.session._unread) <= 60
