"""The channel between HTTP servers of one port and their parent: settings, sums of numbers, aborts, silence."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial

import anyio
import pytest
from msgspec.structs import replace
from server.conftest import both_loops, fake_engine
from server.test_group_numbers import counter
from waiting import Tasks, turns, until

from aioengine.config import EngineConfig
from aioengine.errors import ConfigError
from aioengine.server.api import Api
from aioengine.server.asgi import create_app
from aioengine.server.config import HttpLimits, ServerConfig
from aioengine.server.errors import ApiError
from aioengine.server.group.channel import (
    AbortNamed,
    Counted,
    ServerChannel,
    ServerGroup,
    ServerSettings,
    Serving,
    SiblingServers,
    Sums,
    frame_of,
    receive_settings,
)
from aioengine.server.group.serve_group import STALL_TIMEOUT_S, Hub, ServerProcess
from aioengine.server.http_listener import ServerAddress
from aioengine.server.metrics import ServerNumbers
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


NOTHING = ServerNumbers([], 0)


def test_settings_arrive_as_they_were_sent_and_what_follows_stays_in_the_socket() -> None:
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
        with pytest.raises(ConfigError, match="gone before it sent its settings"):
            receive_settings(theirs)


@asynccontextmanager
async def servers_of(hub: Hub, num_servers: int) -> AsyncIterator[list[tuple[SiblingServers, Api]]]:
    """Servers of one port, with both ends of their channels in this process."""
    found: list[tuple[SiblingServers, Api]] = []
    channels: list[ServerChannel] = []

    async def hear(server: ServerProcess, channel: ServerChannel) -> None:
        async with anyio.create_task_group() as tasks:
            while (message := await channel.receive()) is not None:
                server._take(message, lambda: None, tasks)

    async with fake_engine() as (engine, _), Tasks() as tasks:
        for index in range(num_servers):
            server = ServerProcess(replace(SETTINGS, index=index), hub)
            ours, theirs = [await ServerChannel.open(end) for end in socket.socketpair()]
            channels += [ours, theirs]
            server._channel = hub.channels[index] = ours
            api: Api = create_app(engine).state.api
            siblings = SiblingServers(theirs, num_servers)
            api.enter_group(siblings)
            tasks.start(hear(server, ours))
            tasks.start(siblings.run(api.abort))
            found.append((siblings, api))
        try:
            yield found
        finally:
            for channel in channels:
                channel.close()
            tasks.cancel()


def make_hub() -> Hub:
    return Hub(None, lambda: ServerGroup(2, 2))


def requests_of(numbers: ServerNumbers) -> float:
    (family,) = [each for each in numbers.families if each.name == "requests"]
    return family.samples[0].value


@both_loops
async def test_a_scraped_server_gets_the_sums_with_its_newest_numbers() -> None:
    hub = make_hub()
    async with servers_of(hub, 2) as ((one, _), (other, other_api)):
        hub.numbers.note(0, ServerNumbers([counter("requests", 7)], 3))
        sums = [await other.add_up(ServerNumbers([counter("requests", number)], number)) for number in (1, 2)]
        assert [(requests_of(each), each.num_open) for each in sums] == [(8, 4), (9, 5)]
        hub.on_exit(0, True)  # its counters stay
        sum_ = await other.add_up(ServerNumbers([counter("requests", 2)], 2))
        assert (requests_of(sum_), sum_.num_open) == (9, 2)
        assert (await one.add_up(await other_api.own_numbers())).num_open == 2


@both_loops
async def test_an_abort_reaches_the_other_servers_and_the_group_all() -> None:
    hub, aborted = make_hub(), list[tuple[int, str]]()
    async with servers_of(hub, 3) as servers:
        for index, (_, api) in enumerate(servers):
            api.engine.abort = lambda name, index=index: aborted.append((index, name))  # type: ignore[method-assign]
            api._find_engine = lambda engine=api.engine: engine
        servers[1][0].abort(["cmpl-a"])
        await until(lambda: len(aborted) == 6)
        assert {name for _, name in aborted} == {"cmpl-a", "a"}
        hub.send_to_others(-1, ServerGroup(3, 2))
        await until(lambda: [each.num_serving for each, _ in servers] == [2, 2, 2])


@both_loops
async def test_sums_that_do_not_come_are_an_error_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("aioengine.server.group.channel.SUMS_TIMEOUT_S", 0.01)
    ours, theirs = [await ServerChannel.open(end) for end in socket.socketpair()]
    with pytest.raises(ApiError, match="does not answer") as caught:
        await SiblingServers(theirs, 2).add_up(NOTHING)
    assert caught.value.status == 503
    assert await ours.receive() == Counted(NOTHING, wants_sums=True)
    ours.close()
    assert await theirs.receive() is None
    theirs.send(AbortNamed([]))  # to a side that is gone: nothing happens
    theirs.close()


@both_loops
async def test_messages_come_whole_and_in_order() -> None:
    ours, theirs = [await ServerChannel.open(end) for end in socket.socketpair()]
    sent = [Serving("demo"), Sums(ServerNumbers([counter("a" * 2**20, 1)], 0)), ServerGroup(2, 1), SETTINGS]
    for message in sent:
        ours.send(message)
    assert [await theirs.receive() for _ in sent] == sent
    ours.close()
    theirs.close()


@pytest.mark.virtual_clock
async def test_a_silent_server_is_given_up_but_not_for_what_its_parent_has_slept() -> None:
    server = ServerProcess(SETTINGS, make_hub())
    scope = anyio.CancelScope()

    def hear() -> None:
        server._take(Counted(NOTHING), lambda: None, None)  # type: ignore[arg-type]

    async with Tasks() as tasks:
        watching = tasks.start(server._watch(scope))
        await anyio.sleep(10 * STALL_TIMEOUT_S)
        assert not scope.cancel_called, "before it serves it has another deadline"
        hear()
        asyncio.get_running_loop()._now += 10 * STALL_TIMEOUT_S  # type: ignore[attr-defined]  # as by SIGSTOP
        await turns(5)
        assert not scope.cancel_called
        hear()  # what lay in the socket
        heard_at = anyio.current_time()
        await tasks.end(watching)
        assert scope.cancel_called
        assert STALL_TIMEOUT_S < anyio.current_time() - heard_at <= 1.5 * STALL_TIMEOUT_S
        assert "has sent nothing for 30 s" in server.describe_exit()


def test_each_server_of_a_port_has_its_own_responses_and_says_so_of_those_that_it_does_not_have() -> None:
    alone, *several = (StoredResponses(3, 10_000) for _ in range(3))
    for server in several:
        server.is_one_of_several = True
    owned = OwnedId(several[0].make_id(), "0 red")
    several[0].keep(owned, b"{}", [{"role": "user", "content": "Hi"}], None)
    assert several[0].find(owned).body == b"{}"
    for server in (alone, several[1]):
        find_item = server.item_finder("0 red")
        for ask, status in (
            (server.find, 404),
            (partial(server.find, is_previous=True), 400),
            (server.delete, 404),
            (lambda _, find_item=find_item: find_item("msg_0"), 404),
        ):
            with pytest.raises(ApiError) as caught:
                ask(owned)
            assert caught.value.status == status
            assert ("another of this port's servers" in caught.value.message) is (server is not alone)
