"""Servers of one port ask each other by way of the process above: frames, questions, stored responses."""

from __future__ import annotations

import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import msgspec
import pytest
from server.conftest import both_loops
from waiting import Tasks, until

from aioengine.config import EngineConfig
from aioengine.errors import ConfigError
from aioengine.server.config import HttpLimits, ServerConfig
from aioengine.server.errors import ApiError
from aioengine.server.group.siblings import (
    AbortNamed,
    AskStored,
    Counted,
    CountOpen,
    Message,
    Peer,
    Question,
    ReadNumbers,
    ServerGroup,
    ServerSettings,
    Serving,
    frame_of,
    receive_settings,
)
from aioengine.server.http_listener import ServerAddress
from aioengine.server.stored_responses import OwnedId, SharedResponses

SETTINGS = ServerSettings(
    index=1,
    num_servers=2,
    shares=[[4, 5], [6, 7]],
    where=ServerAddress(port=8001, ssl_certfile="cert.pem", ssl_keyfile_password="open sesame"),
    config=ServerConfig(api_keys=("first-secret", "second-secret"), allowed_hosts=("localhost",)),
    limits=HttpLimits(max_connections=7),
    drain_timeout_s=2.5,
    log_format="json",
    log_descriptor=9,
    engine_config=EngineConfig(model="a/model", max_num_seqs=3, logits_processors=("a:b",)),
    visible_devices=(1, "GPU-2"),
    environment={"OMP_NUM_THREADS": "2"},
)


def test_settings_are_heard_as_they_were_said_and_what_follows_stays_in_the_socket() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.sendall(frame_of(SETTINGS) + b"next")
        assert receive_settings(theirs) == SETTINGS
        assert theirs.recv(10) == b"next"


def test_without_settings_a_server_says_why_it_ends() -> None:
    ours, theirs = socket.socketpair()
    with theirs:
        ours.send(b"\0\0")
        ours.close()
        with pytest.raises(ConfigError, match="gone before it said what to serve"):
            receive_settings(theirs)


class Side:
    """One end: answers with what it was asked, in capitals, or as its ``refusal`` says."""

    def __init__(self, end: socket.socket) -> None:
        self.peer = Peer(end, self.answer, self.take)
        self.asked: list[Question] = []
        self.heard: list[Message] = []
        self.refusal: Exception | None = None

    async def answer(self, question: Question) -> bytes:
        self.asked.append(question)
        if self.refusal is not None:
            raise self.refusal
        return msgspec.msgpack.encode(question).upper()

    def take(self, message: Message) -> None:
        self.heard.append(message)


@asynccontextmanager
async def both_sides(tasks: Tasks) -> AsyncIterator[tuple[Side, Side]]:
    one, other = map(Side, socket.socketpair())
    for side in (one, other):
        await side.peer.open()
        tasks.start(side.peer.run())
    try:
        yield one, other
    finally:
        tasks.cancel()


@both_loops
async def test_each_question_has_its_answer_and_messages_come_in_order() -> None:
    async with Tasks() as tasks, both_sides(tasks) as (one, other):
        questions = [ReadNumbers(), CountOpen(), AbortNamed(["a"]), AskStored(1, "copy", "resp_01"), CountOpen()]
        asked = [tasks.start((one if place % 2 else other).peer.ask(each)) for place, each in enumerate(questions)]
        large = Counted(bytes(2**20))
        for message in (Serving("demo"), large, ServerGroup(2, 1, [0])):
            one.peer.tell(message)
        assert await tasks.end(*asked) == [msgspec.msgpack.encode(each).upper() for each in questions]
        await until(lambda: len(other.heard) == 3)
        assert other.heard == [Serving("demo"), large, ServerGroup(2, 1, [0])]


@both_loops
async def test_a_refusal_is_raised_where_the_question_was_asked_and_tells_of_nothing_inside() -> None:
    async with Tasks() as tasks, both_sides(tasks) as (one, other):
        other.refusal = ApiError(404, "not_found", "there is none", param="id")
        with pytest.raises(ApiError) as caught:
            await one.peer.ask(CountOpen())
        error = caught.value
        assert (error.status, error.code, error.message, error.param) == (404, "not_found", "there is none", "id")
        other.refusal = ValueError("of a secret")
        with pytest.raises(ApiError, match="another server of this port failed at it") as caught:
            await one.peer.ask(CountOpen())
        assert "secret" not in caught.value.message


@both_loops
async def test_an_answer_that_does_not_come_is_an_error_in_time_and_at_the_other_side_s_end_at_once() -> None:
    async with Tasks() as tasks:
        ours, theirs = socket.socketpair()
        with theirs:
            one = Side(ours)
            await one.peer.open()
            tasks.start(one.peer.run())
            with pytest.raises(ApiError, match="does not answer") as caught:
                await one.peer.ask(CountOpen(), timeout_s=0.01)
            assert caught.value.status == 503
            waiting = tasks.start(one.peer.ask(CountOpen()))
            await until(lambda: len(one.peer._asked) == 1)
        (error,) = await tasks.end(waiting)
        assert isinstance(error, ApiError)
        assert error.status == 503
        with pytest.raises(ApiError, match="has ended"):
            await one.peer.ask(CountOpen())
        one.peer.tell(ServerGroup(1, 1))  # to a side that is gone: nothing happens


# Stored responses of several servers


class Port:
    """Three servers of one port, each with its stored responses."""

    def __init__(self) -> None:
        self.servers = [SharedResponses(3, 10_000, server=index, num_servers=3, ask=self.ask) for index in range(3)]
        self.num_asked = 0

    async def ask(self, asked: AskStored) -> bytes:
        self.num_asked += 1
        return await self.servers[asked.server].answer(asked)


def body_of(item_id: str) -> bytes:
    item = {"id": item_id, "type": "message", "role": "assistant", "content": "Hello"}
    return msgspec.json.encode({"output": [item]})


async def test_a_response_is_found_at_whichever_server_it_is_asked_for() -> None:
    port = Port()
    response_id = port.servers[2].make_id()
    assert response_id.startswith("resp_02")
    assert len(response_id) == len("resp_") + 40
    item_id = f"msg_{response_id.removeprefix('resp_')}00"
    owned = OwnedId(response_id, "0 red")
    port.servers[2].keep(owned, body_of(item_id), [{"role": "user", "content": "Hi"}], None, [b"a", b"b", b"c"])
    for server in port.servers:
        assert await server.retrieve(owned) == body_of(item_id)
        assert await server.conversation(owned) == [{"role": "user", "content": "Hi"}]
        assert await server.answered(owned) == b'[{"role":"user","content":"Hi"}]'
        assert await server.events(owned, 0) == ([b"b", b"c"], True)
        item = await server.item_finder(owned.owner)(item_id)
        assert (item.role, item.content) == ("assistant", "Hello")
        with pytest.raises(ApiError, match="has ended, and cannot be cancelled"):
            await server.cancel(owned)
        other = OwnedId(response_id, "1 red")
        for ask in (server.retrieve, server.answered, server.cancel, server.delete):
            with pytest.raises(ApiError, match="there is no response"):
                await ask(other)
        assert (await server.look_up(other)).stored is None
    assert port.num_asked == 2 * 11
    await port.servers[0].delete(owned)
    for server in port.servers:
        with pytest.raises(ApiError) as caught:
            await server.retrieve(owned)
        assert (caught.value.status, caught.value.param) == (404, "id")
        with pytest.raises(ApiError) as caught:
            await server.conversation(owned)
        assert (caught.value.code, caught.value.param) == ("previous_response_not_found", "previous_response_id")


@pytest.mark.parametrize(
    "response_id",
    ["resp_", "resp_ff" + 38 * "0", "resp_zz", "", "resp_+2" + 38 * "0", "resp_02", "resp_02" + "0" * 1000],
)
async def test_ids_of_no_server_are_found_nowhere_and_nothing_is_asked(response_id: str) -> None:
    port = Port()
    with pytest.raises(ApiError) as caught:
        await port.servers[1].retrieve(OwnedId(response_id, ""))
    assert caught.value.status == 404
    assert port.num_asked == 0


async def test_what_an_ended_server_had_is_to_go_on_with_as_little_as_what_was_never_stored() -> None:
    async def ask(asked: AskStored) -> bytes:
        raise ApiError(404, "not_found", "the server that had it has ended", param="id")

    server = SharedResponses(3, 10_000, server=0, num_servers=3, ask=ask)
    with pytest.raises(ApiError) as caught:
        await server.conversation(OwnedId("resp_02" + 38 * "0", ""))
    assert (caught.value.status, caught.value.param) == (400, "previous_response_id")
