"""How a server ends, and what it loses: nothing. Real clients, and an app and engine that do what they are told."""

from __future__ import annotations

import asyncio
import os
import socket
from pathlib import Path
from typing import Any

import anyio
import anyio.abc
import httpx
import pytest
from server.conftest import both_loops, plain_client
from server.small_app import GET, Running, SmallApp, SmallEngine, leave, listener_at, raw_client, running
from waiting import Tasks, until

from aioengine.errors import EngineDead
from aioengine.server import http_server
from aioengine.server.http_listener import ServerAddress
from aioengine.server.http_server import StopRequest, serve


async def begin_stream(server: Running, tasks: Tasks, name: str = "one") -> asyncio.Task[httpx.Response]:
    """A client that has begun to hear a stream; its task gives the whole response."""

    async def read() -> httpx.Response:
        async with plain_client(server.url) as client:
            return await client.get(f"/stream/{name}")

    heard = tasks.start(read())
    await until(lambda: name in server.engine.running)
    return heard


# Draining


@both_loops
async def test_what_runs_ends_whole_and_no_client_comes_any_more() -> None:
    async with running() as server, Tasks() as tasks:
        heard = await begin_stream(server, tasks)
        server.stop.ask()
        await until(lambda: server.engine.is_draining)
        request = server.engine.running["one"]
        await until(lambda: refuses(server.address))
        for _ in range(100):
            request.go()
        request.end()
        await server.has_ended.wait()
        assert (await heard).text == "token\n" * 100 + "end: stop\n"
        assert server.engine.num_aborts == 0
        assert server.error is None


def refuses(address: tuple[str, int]) -> bool:
    with socket.socket() as late:
        return late.connect_ex(address) != 0


@both_loops
async def test_idle_connections_hold_up_nothing() -> None:
    async with running() as server, raw_client(server) as (reader, writer):
        writer.write(GET % b"health")
        await reader.readuntil(b'"ok"}')
        server.stop.ask()
        with anyio.fail_after(5):
            await server.has_ended.wait()
        assert await reader.read() == b""


@both_loops
async def test_a_connection_that_was_accepted_may_still_ask_and_hears_of_the_drain() -> None:
    async with running() as server, Tasks() as tasks, raw_client(server) as (reader, writer):
        await begin_stream(server, tasks)
        server.stop.ask()
        await until(lambda: refuses(server.address))
        writer.write(GET % b"health")
        answer = await reader.read()
        assert answer.startswith(b"HTTP/1.1 503 ")
        assert b"connection: close\r\n" in answer
        assert answer.endswith(b'{"status": "draining"}')
        server.engine.running["one"].end()


@both_loops
async def test_a_request_that_the_system_has_taken_and_the_server_has_not_seen_is_answered() -> None:
    async with running() as server:
        with socket.create_connection(server.address) as late:
            late.sendall(GET % b"echo")
            server.stop.ask()
            await server.has_ended.wait()
            late.setblocking(False)
            assert late.recv(10_000).startswith(b"HTTP/1.1 200 ")


async def test_a_request_whose_body_is_on_its_way_is_answered() -> None:
    async with running() as server, raw_client(server) as (reader, writer):
        writer.write(b"POST /echo HTTP/1.1\r\nhost: x\r\ncontent-length: 5\r\n\r\nhe")
        await until(lambda: len(server.app.scopes) == 1)
        server.stop.ask()
        await until(lambda: refuses(server.address))
        writer.write(b"llo")
        assert b'"hello"' in await reader.read()


@both_loops
@pytest.mark.parametrize(("drain_timeout_s", "is_asked_again"), [(0.05, False), (1000.0, True)])
async def test_at_the_deadline_or_asked_again_what_runs_is_aborted_and_its_clients_hear_it(
    drain_timeout_s: float, is_asked_again: bool
) -> None:
    async with running(drain_timeout_s=drain_timeout_s) as server, Tasks() as tasks:
        heard = [await begin_stream(server, tasks, name) for name in ("one", "two", "three")]
        server.stop.ask()
        if is_asked_again:
            await until(lambda: refuses(server.address))
            assert server.engine.num_aborts == 0
            server.stop.ask()
        await server.has_ended.wait()
        assert server.error is None
        assert [(await each).text for each in heard] == ["end: abort\n"] * 3


@both_loops
async def test_who_does_not_read_is_cut_off_in_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_server, "ABORT_GRACE_S", 0.05)
    async with running(drain_timeout_s=0.01) as server, raw_client(server) as (_, writer):
        writer.transport.pause_reading()  # type: ignore[attr-defined]
        writer.write(GET % b"flood")
        await until(lambda: len(server.app.scopes) == 1)
        server.stop.ask()
        with anyio.fail_after(20):
            await server.has_ended.wait()
        assert server.error is None


async def test_an_app_that_goes_on_without_its_client_is_cancelled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_server, "ABORT_GRACE_S", 0.01)
    monkeypatch.setattr(http_server, "TASKS_END_S", 0.05)
    ends: list[str] = []

    async def deaf(scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "http":
            ends.append("began")
            try:
                await anyio.sleep_forever()
            finally:
                ends.append("cancelled")

    async with running(drain_timeout_s=0.0, app=deaf) as server, raw_client(server) as (_, writer):
        writer.write(GET % b"x")
        await until(lambda: ends == ["began"])
        server.stop.ask()
        await server.has_ended.wait()
        assert ends == ["began", "cancelled"]


async def test_cancelling_ends_everything_at_once(folder: Path) -> None:
    engine, path, began = SmallEngine(), str(folder / "a.sock"), anyio.Event()
    listener = await listener_at(ServerAddress(uds=path))
    serving: Any = {"engine": engine, "listener": listener, "stop": StopRequest(), "on_serving": lambda _: began.set()}
    async with Tasks() as tasks:
        tasks.start(serve(SmallApp(engine), **serving))
        await began.wait()
        reader, writer = await asyncio.open_unix_connection(path)
        writer.write(GET % b"stream/one")
        await until(lambda: "one" in engine.running)
    try:
        assert b"end" not in await reader.read()
    except ConnectionError:
        pass
    await leave(writer)
    assert os.listdir(folder) == []
    assert engine.ended == ["one end: client_gone"]


# Death


@both_loops
@pytest.mark.parametrize("is_draining", [False, True])
async def test_when_the_engine_dies_its_clients_hear_an_answer_and_the_server_ends(
    is_draining: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_server, "TICK_S", 0.01)
    async with running(drain_timeout_s=1000.0) as server, Tasks() as tasks:
        heard = await begin_stream(server, tasks)
        if is_draining:
            server.stop.ask()
            await until(lambda: server.engine.is_draining)
        server.engine.die("its last words")
        await server.has_ended.wait()
        assert isinstance(server.error, EngineDead)
        assert str(server.error) == "its last words"
        assert (await heard).text == "end: error\n"


async def test_a_stalled_engine_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_server, "TICK_S", 0.001)
    async with running() as server, httpx.AsyncClient(base_url=server.url) as client:
        server.engine.status = "STALLED"
        for _ in range(5):
            assert (await client.get("/health")).status_code == 200
        assert not server.has_ended.is_set()
