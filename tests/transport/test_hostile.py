"""Peers that do what they should not, beside one that behaves: it gets its tokens, and nothing of theirs is left."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import anyio
import msgspec
import pytest
from nightly import few, nightly
from transport import wire_samples
from transport.siege import (
    VOCAB_SIZE,
    Peer,
    Siege,
    attach_frames,
    besieged,
    expected_tokens,
    joined,
    look_until,
    params_of,
    request,
)
from transport.strangers import STRANGERS, say
from transport.wire_samples import DIRECTIONS, frames_of, int32
from waiting import until

from aioengine.core import control as c
from aioengine.transport import peers as peers_module
from aioengine.transport import server as server_module
from aioengine.transport import wire
from aioengine.transport.peers import MAX_CALLS
from aioengine.transport.server import EngineServer
from aioengine.transport.wire import PROTOCOL_VERSION, Attached, Refused, Writer

pack = msgspec.msgpack.encode

both_ways = pytest.mark.parametrize("scheme", ["ipc", *nightly("tcp")])


ADD = frames_of(wire_samples.FROM_FRONT_END[2])

STRANGE: dict[str, list[list[bytes]]] = {
    "nothing": [[b""]],
    "no msgpack": [[b"\xc1"]],
    "text": [[b"GET / HTTP/1.0"]],
    "a header cut short": [[attach_frames()[0][:-1]]],
    "a header with more behind": [[attach_frames()[0] + b"\x00"]],
    "a frame too many": [[*attach_frames(), b"extra"]],
    "frames without end": [[attach_frames()[0], *[b"x"] * 1000]],
    "a request before all": [ADD],
    "a request with a frame beside it": [[ADD[0], b"\x01\x02"]],
    "a farewell before all": [frames_of(wire_samples.Sample("", wire.Detach()))],
    "a later number": [attach_frames(5)],
    "a declared length": [[b"\x92\x00\x94\x03\xdd\xff\xff\xff\xff"]],
    "a deep nesting": [[b"\x92\x00\x93\x05\x00" + b"\x91" * 500_000 + b"\xc0"]],
    "a name without end": [[pack([0, [1, PROTOCOL_VERSION, "n" * 100_000]])]],
    "an engine's messages": [frames_of(sample) for sample in wire_samples.FROM_ENGINE[2:7]],
    "a handshake": [
        frames_of(sample)
        for _, samples in list(DIRECTIONS.values())[2:]
        for sample in samples
        if type(sample.body) is not type(samples[0].body)  # which could be taken for an Attach of another version
    ],
}


@both_ways
class TestBeforeAttaching:
    async def test_what_is_no_attach_is_refused_and_counted(self, address: str) -> None:
        async with besieged(address) as siege:
            num_refused = 0
            for what, messages in STRANGE.items():
                peer = siege.peer()
                for frames in messages:
                    peer.say_raw(frames)
                num_refused += len(messages)
                await until(lambda due=num_refused: siege.num_refused == due)  # type: ignore[misc]
                assert siege.num_sessions == 0, what
                await peer.join()  # nothing that was refused counts
                peer.say(wire.Detach())
                await until(lambda: siege.num_sessions == 0)

    async def test_another_version(self, address: str) -> None:
        async with besieged(address) as siege:
            peer = siege.peer()
            peer.say_raw(attach_frames(version=99))
            answer = await peer.answer()
            assert answer == Refused(PROTOCOL_VERSION, f"this engine speaks version {PROTOCOL_VERSION} of its protocol")
            assert siege.num_sessions == 0
            await peer.join()

    async def test_a_frame_that_is_too_large_ends_the_connection(
        self, address: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(wire, "MAX_BYTES", 2**20)
        async with joined(address) as (_, peer):
            peer.say_raw([b"x" * 2**21])
            await look_until(peer.monitor, lambda: peer.monitor.is_gone)

    async def test_many_that_are_forgotten_again(self, address: str, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(peers_module, "MAX_GONE", 16)
        async with besieged(address) as siege:
            for _ in range(50):
                peer = siege.peer()
                await peer.join()
                peer.vanish()
            await until(lambda: len(siege.server.sessions) == 1)
            assert len(siege.server._gone) == 16
            await siege.peer().join()


BAD_REQUESTS: list[dict[str, Any]] = [
    {"request": msgspec.Raw(pack("no request"))},
    {"prompt_token_ids": b"abc"},
    {"prompt_token_ids": [1, 2, 3]},
    {"params": {"temperature": 9.0}},
    {"params": "no params"},
    {"params": msgspec.Raw(b"\x81\xa4stop\xa1\xff")},
    {"traceparent": "t" * 65},
    {"session": "s" * 1_000_000},
    {"params": params_of(n=2**31 - 1, temperature=1.0)},
    {"params": params_of(allowed_token_ids=(2**31 - 1,))},
    {"max_total_tokens": 3},
    {"max_total_tokens": 2**63},
    {"max_total_tokens": -(2**63)},
    {"seed": 2**64 - 1, "priority": 2**63 - 1},
    {"bad_words": ((),)},
    {"bad_words": ((-1,),)},
    {"bad_words": ((1,),) * 100_000},
    {"cache_salt": "s" * 1_000_000},
    {"tenant": "t" * 1_000_000},
    {"request_id": "i" * 1_000_000},
    {"prompt": ()},
    {"prompt": (-1,)},
    {"prompt": (2**31 - 1,)},
    {"prompt": (1,) * 5000},
    {"choice": 1},
    {"choice": -2},
    {"choice": 2**62, "output": int32(5).tobytes()},
    {"output": int32(5).tobytes()},
    {"choice": 0, "output": int32(5, -1).tobytes()},
    {"choice": 0, "output": int32(5, VOCAB_SIZE).tobytes()},
    {"choice": 0, "output": int32(*range(21)).tobytes()},
    {"choice": 0, "output": int32(*[5] * 100_000).tobytes()},
    {"choice": 3, "params": params_of(n=3, temperature=1.0)},
    {"choice": 2, "params": params_of(n=3, temperature=0.0)},
]


@both_ways
class TestInASession:
    async def test_what_is_refused_is_counted_and_the_next_one_is_served(self, address: str) -> None:
        async with joined(address) as (siege, peer):
            malformed = [frames for name, each in STRANGE.items() if name != "a later number" for frames in each]
            for number, frames in enumerate(malformed):
                peer.say_raw(frames)
                await peer.is_served(number)
            family = {"seed": 1, "params": params_of(n=2, temperature=1.0)}
            numbers = (-1, 2**31, 2**64 - 1)
            for number in numbers:
                peer.say_what_is_no_message(request(number, **family))
            out_of_place = (wire.Attach(PROTOCOL_VERSION), wire.Acknowledge(10**6), wire.Acknowledge(2**63))
            for body in out_of_place:
                peer.say(body)
            peer.say(wire.Acknowledge(-1))
            await peer.is_served(len(malformed))
            assert siege.num_refused == len(malformed) + len(numbers) + len(out_of_place)
            assert siege.num_sessions == 1

    async def test_replayed_messages(self, address: str) -> None:
        async with joined(address) as (siege, peer):
            frames = [peer.writer.write(request(0))]
            for _ in range(5):
                peer.say_raw(frames)
            await peer.read_until(lambda: 0 in peer.ended)
            peer.say_raw(frames)
            peer.say_raw(attach_frames())
            await until(lambda: siege.server.num_refused["out of turn"] == 6)
            await peer.is_served(1)
            assert peer.tokens[0] == expected_tokens([1, 2, 3], 20, seed=0)

    async def test_reordered_messages_are_lost_ones(self, address: str) -> None:
        """What is missing cannot be had again: the session ends, and says so."""
        async with joined(address) as (siege, peer):
            peer.say(request(0, max_tokens=1000))
            first, second = ([peer.writer.write(wire.Allow(0, 5))] for _ in range(2))
            peer.say_raw(second)
            peer.say_raw(first)
            assert "messages of it were lost" in (await peer.hears_the_end()).message
            await until(lambda: siege.num_sessions == 0)
            assert siege.server.num_refused["out of turn"] == 1

    async def test_a_bad_request_fails_alone(self, address: str) -> None:
        async with joined(address) as (siege, peer):
            for number, fields in enumerate(BAD_REQUESTS):
                peer.say(request(2 * number, **fields))
                await peer.is_served(2 * number + 1)
                is_long = len(fields.get("prompt", ())) > 4096
                assert peer.ended[2 * number] == ("PromptTooLong" if is_long else "InvalidRequest"), fields
            assert siege.num_refused == 0

    async def test_more_failures_than_a_message_holds_are_told_in_several(self, address: str) -> None:
        async with joined(address) as (siege, peer):
            numbers = range(2 * server_module.MAX_FAILED + 1)
            siege.session.outputs.failed.extend(wire.Failed(number, wire_samples.FAULT) for number in numbers)
            siege.session.mark()
            await peer.read_until(lambda: len(peer.ended) == len(numbers))
            told = [len(body.failed) for body in peer.news if isinstance(body, wire.StepOutputsMessage) and body.failed]
            assert told == [server_module.MAX_FAILED] * 2 + [1]

    async def test_numbers_that_are_taken(self, address: str) -> None:
        """Others of the same number, or whose choices overlap with it, do not disturb the one that is here."""
        async with joined(address) as (_, peer):
            peer.say(request(1, max_tokens=200))
            for seed in (5, 6):
                peer.say(request(1, seed=seed))
            peer.say(request(0, params=params_of(n=3, temperature=1.0)))
            await peer.read_until(lambda: {0, 1, 2} <= peer.ended.keys())
            assert peer.ended == {0: "InvalidRequest", 1: "length", 2: "InvalidRequest"}
            assert peer.tokens[1] == expected_tokens([1, 2, 3], 200, seed=1)

    async def test_ends_and_allowances_of_what_is_not_there_and_of_parts_of_a_family(self, address: str) -> None:
        async with joined(address) as (_, peer):
            peer.say(wire.Finish([0, -1, 2**31, 2**63, 7] * 1000, "abort"))
            peer.say(wire.Finish([], "stop", "a word"))
            peer.say(wire.Allow(0, 5))
            peer.say(wire.Allow(2**63, -(2**63)))
            await peer.is_served(0)
            for first, ended in ((10, [11]), (20, [20]), (30, [32, 30]), (40, [40, 41, 42])):
                peer.say(request(first, params=params_of(n=3, temperature=1.0)))
                peer.say(wire.Finish(ended, "abort"))
                await peer.read_until(lambda first=first: {first, first + 1, first + 2} <= peer.ended.keys())  # type: ignore[misc]

    async def test_more_waiting_requests_than_are_allowed(self, address: str) -> None:
        async with joined(address, max_waiting=2, max_num_seqs=1) as (siege, peer):
            for number in (0, 2):  # of the first two, one waits for the other's row
                peer.say(request(number, max_tokens=1000, params=params_of(n=2, temperature=1.0)))
            await peer.read_until(lambda: len(peer.ended) == 2)
            assert peer.ended == dict.fromkeys((2, 3), "EngineOverloaded")
            peer.say(wire.Finish([0, 1], "abort"))
            await peer.is_served(4)
            assert siege.num_refused == 0


class Odd(Exception):
    dump = 5

    def __str__(self) -> str:
        raise RuntimeError("not even a text")


@both_ways
class TestControlCalls:
    async def test_an_unknown_or_failing_call_fails_its_caller_only(self, address: str) -> None:
        async with joined(address) as (siege, peer):
            calls = [pack(["Explode"]), pack(["Pause", "never"]), b"\xc1", pack(["CollectiveRpc", "no such function"])]
            for call_id, raw in enumerate(calls):
                say = peer.say_what_is_no_message if raw == b"\xc1" else peer.say
                say(wire.CallControl(call_id, msgspec.Raw(raw)))
            await peer.read_until(lambda: len(peer.returned) == 3)
            assert {body.fault and body.fault.kind for body in peer.returned.values()} == {"InvalidRequest"}
            assert siege.num_refused == 1

    @pytest.mark.parametrize(
        ("outcome", "kind"),
        [
            (Odd(), "RuntimeError"),
            *((result, "InvalidRequest") for result in (object(), 2**70, "\udcff", {1: {2: object()}})),
        ],
        ids=["odd failure", "object", "int", "text", "deep"],
    )
    async def test_an_outcome_that_cannot_be_sent(
        self, address: str, outcome: Any, kind: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        async def call(control: Any) -> Any:
            if isinstance(outcome, Exception):
                raise outcome
            return outcome

        async with joined(address) as (siege, peer):
            monkeypatch.setattr(siege.server.core, "call", call)
            peer.say(wire.CallControl(1, wire.pack_control(c.IsSleeping())))
            await peer.read_until(lambda: 1 in peer.returned)
            assert getattr(peer.returned[1].fault, "kind", None) == kind
            peer.say(wire.CallControl(2, msgspec.Raw(pack(["Explode"]))))
            await peer.read_until(lambda: 2 in peer.returned)  # no number was left out

    async def test_calls_under_way_are_bounded(self, address: str, monkeypatch: pytest.MonkeyPatch) -> None:
        gate, num_inside = asyncio.Event(), 0

        async def wait(control: Any) -> Any:
            nonlocal num_inside
            num_inside += 1
            await gate.wait()

        async with joined(address) as (siege, peer):
            monkeypatch.setattr(siege.server.core, "call", wait)
            for call_id in range(300):
                peer.say(wire.CallControl(call_id, wire.pack_control(c.IsSleeping())))
            await peer.read_until(lambda: len(peer.returned) == 300 - MAX_CALLS)
            assert num_inside == MAX_CALLS
            gate.set()
            await peer.read_until(lambda: len(peer.returned) == 300)


# Sessions


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
