"""Servers of one port ask each other by way of the process above; each has its own stored responses."""

from __future__ import annotations

import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import httpx
import msgspec
import pytest
from server.conftest import both_loops, fake_engine
from waiting import Tasks, until

from aioengine.config import EngineConfig
from aioengine.errors import ConfigError
from aioengine.server.api import Api
from aioengine.server.asgi import create_app
from aioengine.server.config import HttpLimits, ServerConfig
from aioengine.server.errors import ApiError
from aioengine.server.group.siblings import (
    AbortNamed,
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
from aioengine.server.stored_responses import OwnedId, StoredResponses

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
    """One end: answers with what it was asked, in capitals, or fails."""

    def __init__(self, end: socket.socket) -> None:
        self.peer = Peer(end, self.answer, self.take)
        self.asked: list[Question] = []
        self.heard: list[Message] = []
        self.failure: Exception | None = None

    async def answer(self, question: Question) -> bytes:
        self.asked.append(question)
        if self.failure is not None:
            raise self.failure
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
        questions = [ReadNumbers(), CountOpen(), AbortNamed(["a"]), CountOpen()]
        asked = [tasks.start((one if place % 2 else other).peer.ask(each)) for place, each in enumerate(questions)]
        large = Counted(bytes(2**20))
        for message in (Serving("demo"), large, ServerGroup(2, 1, [0])):
            one.peer.tell(message)
        assert await tasks.end(*asked) == [msgspec.msgpack.encode(each).upper() for each in questions]
        await until(lambda: len(other.heard) == 3)
        assert other.heard == [Serving("demo"), large, ServerGroup(2, 1, [0])]


@both_loops
async def test_a_failure_is_raised_where_the_question_was_asked_tells_nothing_and_is_logged(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with Tasks() as tasks, both_sides(tasks) as (one, other):
        other.failure = ValueError("of a secret")
        with pytest.raises(ApiError, match="another server of this port failed at it") as caught:
            await one.peer.ask(CountOpen())
        assert caught.value.status == 500
        assert "secret" not in caught.value.message
        assert "ValueError: of a secret" in caplog.text


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


async def ended(ask: Callable[[OwnedId], object], owned: OwnedId) -> object:
    answer = ask(owned)
    return await answer if isinstance(answer, Awaitable) else answer


async def test_each_server_of_a_port_has_its_own_responses_and_says_so_of_those_that_it_does_not_have() -> None:
    alone, *several = (StoredResponses(3, 10_000) for _ in range(3))
    for server in several:
        server.is_one_of_several = True
    owned = OwnedId(several[0].make_id(), "0 red")
    several[0].keep(owned, b"{}", [{"role": "user", "content": "Hi"}], None)
    assert await several[0].retrieve(owned) == b"{}"
    for server in (alone, several[1]):
        find = server.item_finder("0 red")
        asked: list[Callable[[OwnedId], object]] = [
            server.retrieve, server.cancel, server.answered, server.conversation, server.delete,
            lambda owned, server=server: server.events(owned, 0), lambda owned, find=find: find("msg_0"),
        ]  # fmt: skip
        for ask in asked:
            with pytest.raises(ApiError) as caught:
                await ended(ask, owned)
            assert caught.value.status == (400 if ask == server.conversation else 404)
            assert ("another of this port's servers" in caught.value.message) is (server is not alone)


async def test_several_servers_of_a_port_take_no_response_in_the_background() -> None:
    asked = {"input": "Hi", "background": True, "max_output_tokens": 2}
    async with fake_engine() as (engine, _):
        app = create_app(engine)
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost") as http:
            assert (await http.post("/v1/responses", json=asked)).status_code == 200
            api: Api = app.state.api
            api.enter_group(lambda: ServerGroup(2, 2), api.answer)
            for stream in (False, True):
                refused = await http.post("/v1/responses", json={**asked, "stream": stream})
                error = refused.json()["error"]
                assert (refused.status_code, error["param"]) == (400, "background")
                assert "run one server, or several at ports of their own" in error["message"]
            assert (await http.post("/v1/responses", json={**asked, "background": False})).status_code == 200
