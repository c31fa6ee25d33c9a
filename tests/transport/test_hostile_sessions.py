"""Peers that come in numbers, steal, vanish or do not read, beside one that behaves and gets its tokens."""

from __future__ import annotations

import asyncio
import os
import resource
import time
from typing import Any
from unittest import mock

import anyio
import msgspec
import pytest
from nightly import nightly
from transport.siege import (
    Peer,
    Siege,
    attach_frames,
    besieged,
    expected_tokens,
    joined,
    look_until,
    num_fds,
    params_of,
    request,
)
from transport.strangers import STRANGERS, say
from waiting import until

from aioengine.errors import ConfigError
from aioengine.transport import server as server_module
from aioengine.transport import session as session_module
from aioengine.transport import wire
from aioengine.transport.wire import PROTOCOL_VERSION, Attached, Refused, Writer

both_ways = pytest.mark.parametrize("scheme", ["ipc", *nightly("tcp")])


@both_ways
class TestAttaching:
    async def test_thousands_that_never_take_their_outputs(self, address: str, monkeypatch: pytest.MonkeyPatch) -> None:
        """They are bounded while they are there, and let go after a while."""
        monkeypatch.setattr(server_module, "MAX_SESSIONS", 16)
        monkeypatch.setattr(server_module, "CONNECT_TIMEOUT_S", 0.1)
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
                    assert siege.num_sessions < 16
                for peer in peers:
                    peer.vanish()
            assert num_attached >= 15
            assert num_attached + num_refused == 1000
            await until(lambda: siege.num_sessions == 0)
            await siege.peer().join()

    async def test_who_was_let_go_is_not_heard_again(self, address: str) -> None:
        """Neither as before nor anew; it counts as no refusal, since it may not have known."""
        async with besieged(address) as siege:
            peer = siege.peer()
            await peer.attach()
            peer.say(wire.Detach())
            for number in range(20):
                peer.say(*request(number))
            peer.writer = Writer()
            peer.say(wire.Attach(PROTOCOL_VERSION))
            other = siege.peer()
            await other.join()
            assert siege.num_sessions == 1
            assert siege.num_refused == 0

    async def test_no_file_descriptors_left(self, address: str) -> None:
        """Whoever comes then is told so, and those who are here go on."""
        async with joined(address) as (siege, here):
            late = siege.peer()
            await look_until(late.monitor, lambda: late.monitor.has_connected)
            limits = resource.getrlimit(resource.RLIMIT_NOFILE)
            highest = max(map(int, os.listdir("/proc/self/fd")))
            resource.setrlimit(resource.RLIMIT_NOFILE, (min(highest + 1, limits[0]), limits[1]))
            held = []
            try:
                while True:
                    try:
                        held.append(os.open("/dev/null", os.O_RDONLY))
                    except OSError:
                        break
                late.say_raw(attach_frames())
                refused = await late.answer()
                await siege.is_unharmed()
            finally:
                resource.setrlimit(resource.RLIMIT_NOFILE, limits)
                for fd in held:
                    os.close(fd)
            assert isinstance(refused, Refused)
            assert "cannot be served now" in refused.reason
            await late.join()
            await here.is_served(0)

    async def test_outputs_that_cannot_be_bound_leave_nothing(
        self, address: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        async with besieged(address) as siege:
            with monkeypatch.context() as patch:
                patch.setattr(server_module, "bind", mock.Mock(side_effect=ConfigError("taken")))
                peer = siege.peer()
                await look_until(peer.monitor, lambda: peer.monitor.has_connected)
                fds_before = num_fds()
                peer.say_raw(attach_frames())
                refused = await peer.answer()
                await until(lambda: num_fds() <= fds_before)
            assert isinstance(refused, Refused)
            assert refused.reason == "another front end cannot be served now: taken"
            assert not siege.server._gate._credentials


@both_ways
class TestOutputs:
    @pytest.mark.parametrize("password", ["right", b"wrong", None], ids=["right", "wrong", "none"])
    async def test_a_second_one_who_wants_them_gets_none(self, address: str, password: Any) -> None:
        async with besieged(address) as siege:
            peer = siege.peer()
            attached = await peer.join()
            shown = attached.password.encode() if password == "right" else password
            thief = siege.peer()
            thieves = [thief.pull(attached, shown) for _ in range(3)]
            for _, monitor in thieves:
                await look_until(monitor, lambda monitor=monitor: monitor.is_refused)  # type: ignore[misc]
            for number in range(3):
                peer.say(*request(number, max_tokens=100))
            await peer.read_until(lambda: len(peer.ended) == 3)
            for number in range(3):
                assert peer.tokens[number] == expected_tokens([1, 2, 3], 100, seed=number)
            for socket, monitor in thieves:
                assert not socket.poll(0)
                assert not monitor.has_connected
                monitor.close()
            assert siege.num_sessions == 1

    async def test_the_secret_of_a_session_that_is_over_opens_nothing(self, address: str) -> None:
        async with besieged(address) as siege:
            peer = siege.peer()
            attached = await peer.attach()
            peer.say(wire.Detach())
            await until(lambda: siege.num_sessions == 0)
            assert not siege.server._gate._credentials
            other = await siege.peer().join()
            stolen = msgspec.structs.replace(attached, output_address=other.output_address)
            _, monitor = peer.pull(stolen, stolen.password.encode())
            await look_until(monitor, lambda: monitor.is_refused)
            monitor.close()


@pytest.mark.parametrize("stranger", STRANGERS)
async def test_strangers_neither_become_a_front_end_nor_end_one_nor_hide_its_end(stranger: str) -> None:
    """Some are refused with a failure, some without, some with two; some hang up themselves."""
    async with besieged("tcp://127.0.0.1:*") as siege:
        peer = siege.peer()
        attached = await peer.attach()
        monitor = siege.session.monitor

        async def come_to(address: str) -> None:
            await asyncio.to_thread(say, int(address.rpartition(":")[2]), *STRANGERS[stranger])

        await come_to(attached.output_address)
        await until(lambda: not monitor._open)
        assert not monitor.has_connected
        await peer.connect_outputs(attached)
        for address in (siege.server.address, attached.output_address, attached.output_address):
            await come_to(address)
        await until(lambda: not monitor._open - monitor._maybe_good)
        assert not monitor.is_gone
        await peer.is_served(0)
        peer.vanish()
        await until(lambda: siege.num_sessions == 0)


@both_ways
class TestVanishing:
    @pytest.mark.parametrize("is_all", [True, False], ids=["with all", "with its outputs alone"])
    async def test_in_the_middle_of_its_requests(self, address: str, is_all: bool) -> None:
        async with besieged(address) as siege:
            for _ in range(5):
                peer = siege.peer()
                await peer.join()
                for number in range(4):
                    peer.say(*request(number, max_tokens=3000))
                await peer.read_until(lambda peer=peer: len(peer.tokens) == 4)  # type: ignore[misc]
                assert peer.outputs is not None
                (peer.vanish if is_all else peer.outputs.close)()
            await until(lambda: siege.num_sessions == 0)
            await until(lambda: len(siege.server.core._live) <= 1)

    @pytest.mark.parametrize("moment", ["at once", "asked", "attached", "connecting"])
    async def test_while_it_attaches(self, address: str, moment: str, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(server_module, "CONNECT_TIMEOUT_S", 0.1)
        async with besieged(address) as siege:
            for _ in range(10):
                peer = siege.peer()
                if moment == "asked":
                    peer.say_raw(attach_frames())
                elif moment != "at once":
                    attached = await peer.attach()
                    if moment == "connecting":
                        _, monitor = peer.pull(attached, attached.password.encode())
                        monitor.close()
                peer.vanish()
            await siege.is_unharmed()


def small_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session_module, "MAX_UNREAD_MESSAGES", 300)
    monkeypatch.setattr(session_module, "BEHIND_MESSAGES", 50)


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

    @pytest.mark.parametrize("how", ["reads nothing", "reads and does not say so", "says so and does not read"])
    async def test_is_cut_off(self, address: str, how: str, monkeypatch: pytest.MonkeyPatch) -> None:
        """It can say to have read what has left the engine, and no more: what waits there has a bound."""
        small_bounds(monkeypatch)
        async with joined(address, hwm=1) as (siege, peer):
            peer.say(*request(0, max_tokens=3000))

            async def go_on() -> None:
                assert peer.outputs is not None
                while how != "reads nothing":
                    if how == "reads and does not say so":
                        await peer.outputs.receive()
                    else:
                        peer.say(wire.Acknowledge(10**9))
                        await asyncio.sleep(0)

            async with anyio.create_task_group() as tasks:
                tasks.start_soon(go_on)
                await self._is_cut_off(siege, peer)
                tasks.cancel_scope.cancel()

    async def test_hears_why_once_it_reads_again(self, address: str, monkeypatch: pytest.MonkeyPatch) -> None:
        """Within the time that last words have; what it had left unread comes first, whole and in order."""
        small_bounds(monkeypatch)
        async with joined(address) as (siege, peer):
            peer.say(*request(0, max_tokens=3000))
            await until(lambda: siege.num_sessions == 0)
            fault = await peer.hears_the_end()
            assert fault.kind == "EngineDead"
            assert "unread" in fault.message
            assert peer.tokens[0] == expected_tokens([1, 2, 3], len(peer.tokens[0]), seed=0)

    async def test_leaves_many_bytes_unread(self, address: str, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(session_module, "MAX_UNREAD_BYTES", 100_000)
        async with joined(address, hwm=1) as (siege, peer):
            for number in range(8):
                peer.say(*request(number, max_tokens=2000, params=params_of(logprobs=20)))
            await until(lambda: siege.num_sessions == 0)

    async def test_hears_of_nobody_else_s_steps_while_it_is_behind(
        self, address: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """One that is idle and does not read is told little, and stays."""
        monkeypatch.setattr(session_module, "BEHIND_MESSAGES", 20)
        monkeypatch.setattr(session_module, "MAX_UNREAD_MESSAGES", 60)
        async with joined(address) as (siege, _):
            steps_before = len(siege.executor.plans)
            await until(lambda: len(siege.executor.plans) > steps_before + 300)
            assert siege.num_sessions == 1
            assert len(siege.session._unread) <= 60
