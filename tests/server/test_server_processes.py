"""Several HTTP servers of one port as real processes, beside an engine that serves on the test's own loop."""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import anyio
import httpx
import psutil
import pytest
from contract.ways import Opener, until_async
from waiting import Tasks, until

from aioengine import Engine
from aioengine.errors import EngineDead
from aioengine.server.config import HttpLimits, ServerConfig
from aioengine.server.group.channel import ServerSettings
from aioengine.server.group.serve_group import serve_group
from aioengine.server.http_listener import HttpListener, ServerAddress
from aioengine.server.http_server import StopRequest

pytestmark = [
    pytest.mark.asyncio(loop_factories=["uvloop"]),
    pytest.mark.usefixtures("no_stray_process", "children_import_tests"),
]

STORY = {"prompt": [1, 2, 3], "max_tokens": 40, "ignore_eos": True, "temperature": 0}


@pytest.fixture
def children_import_tests(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[1]), prepend=":")


class Port:
    """A port with several servers."""

    def __init__(self, url: str, stop: StopRequest, task: Any, engine: Engine) -> None:
        self.url, self.stop, self.task, self.engine = url, stop, task, engine

    async def ask(self, method: str, path: str, **options: Any) -> httpx.Response:
        """One request on a connection of its own, so that any server may get it."""
        async with httpx.AsyncClient(base_url=self.url, timeout=30) as client:
            return await client.request(method, path, **options)

    async def numbers(self) -> dict[str, float]:
        lines = (await self.ask("GET", "/metrics")).text.splitlines()
        pairs = (line.rpartition(" ") for line in lines if not line.startswith("#"))
        return {name: float(value) for name, _, value in pairs}

    async def group(self) -> tuple[int, int]:
        told = (await self.ask("GET", "/health")).json()["servers"]
        return told["serving"], told["wanted"]


@asynccontextmanager
async def port(num_servers: int, engine_address: str | None = None) -> AsyncIterator[Port]:
    """A port with so many servers, all of which serve.

    Args:
        engine_address: that the servers are told; absent: where the engine is.
    """
    opener = Opener("served")
    urls: list[str] = []
    stop = StopRequest()
    try:
        serving = await opener.serve("make_slow")
        engine = await opener.connect(serving)
        async with Tasks() as tasks:
            listener = await anyio.to_thread.run_sync(HttpListener, ServerAddress(port=0), num_servers)
            settings = ServerSettings(
                index=0,
                num_servers=num_servers,
                shares=[],
                where=listener.where,
                config=ServerConfig(),
                limits=HttpLimits(),
                drain_timeout_s=10.0,
                log_format="text",
                log_descriptor=sys.stderr.fileno(),
                engine_address=engine_address or serving.address,
            )
            task = tasks.start(
                serve_group(settings, [listener], stop, engine=engine, on_serving=lambda _, told: urls.extend(told))
            )
            try:
                await until(lambda: urls or task.done(), timeout_s=60)
                if task.done():
                    await task
                yield Port(urls[0], stop, task, engine)
            finally:
                stop.ask()
                stop.ask()
                await tasks.end(task)
                await anyio.to_thread.run_sync(listener.close)
    finally:
        await opener.aclose()


def servers() -> list[psutil.Process]:
    found = []
    for each in psutil.Process().children():
        with suppress(psutil.NoSuchProcess):  # it ends now
            if "aioengine.server.group.child" in each.cmdline():
                found.append(each)
    return found


async def test_two_servers_are_one_and_a_death_is_its_clients_affair_alone() -> None:
    async with port(2) as served:
        # Any of them answers: a response is found where it was made, and else the error says why; numbers are of both.
        answer = await served.ask("POST", "/v1/responses", json={"input": "Hi", "max_output_tokens": 4})
        response_id = answer.json()["id"]
        asked = [await served.ask("GET", f"/v1/responses/{response_id}") for _ in range(8)]
        assert {each.status_code for each in asked} <= {200, 404}
        for each in asked:
            assert each.status_code == 200 or "another of this port's servers" in each.json()["error"]["message"]
        for _ in range(6):
            assert (await served.ask("POST", "/v1/completions", json=STORY)).status_code == 200
        completions = 'http_requests_total{handler="/v1/completions",method="POST",status="2xx"}'

        async def has_counted(number: int) -> bool:
            return (await served.numbers())[completions] == number

        await until_async(lambda: has_counted(6))  # another server's are up to a second old
        before = await served.numbers()
        assert before['vllm:generation_tokens_total{engine="0",model_name="demo"}'] >= 6 * 40 + 4
        assert before['vllm:generation_tokens_total{engine="0",model_name="demo"}'] < 7 * 40
        assert before["aioengine:api_servers_serving"] == 2

        # What is asked of one is asked of all.
        async with AsyncExitStack() as stack:
            body = {**STORY, "max_tokens": 3000, "stream": True, "request_id": "a-story"}
            client = await stack.enter_async_context(httpx.AsyncClient(base_url=served.url, timeout=30))
            response = await stack.enter_async_context(client.stream("POST", "/v1/completions", json=body))
            lines = response.aiter_lines()
            await anext(lines)
            await until_async(lambda: has_load(served, 1))
            assert (await served.ask("POST", "/abort", json={"request_id": "a-story"})).status_code == 200
            assert '"finish_reason":"abort"' in "".join([line async for line in lines])

        await until_async(lambda: has_counted(7))  # else some of it would end with its server
        before = await served.numbers()
        async with AsyncExitStack() as stack:
            streams = await one_stream_at_each(served, stack)
            victim = servers()[0]
            victim.kill()
            outcomes = [await outcome_of(stream) for stream in streams]
            assert sorted(outcomes) == ["cut", "goes on"]
        answers = [await served.ask("POST", "/v1/completions", json=STORY) for _ in range(8)]
        assert {each.status_code for each in answers} == {200}  # those at its socket wait for the next one
        await until_async(lambda: is_whole(served))
        await until_async(lambda: has_counted(7 + 8))
        after = await served.numbers()
        assert all(after[name] >= value for name, value in before.items() if is_counter(name))
        assert after["aioengine:api_server_restarts_total"] == 1

        # Draining, all refuse at once: no copy of another one's socket accepts.
        async with AsyncExitStack() as stack:
            streams = await one_stream_at_each(served, stack)
            served.stop.ask()
            with anyio.fail_after(5):
                await until_async(lambda: refuses(served))
            for _ in range(20):
                with pytest.raises(httpx.ConnectError):
                    await served.ask("GET", "/health")
            assert [await outcome_of(stream) for stream in streams] == ["goes on", "goes on"]
            served.stop.ask()
            await served.task
        assert not servers()


@pytest.mark.nightly
async def test_a_server_that_is_stuck_holds_up_no_scrape_and_is_killed_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("aioengine.server.group.serve_group.STALL_TIMEOUT_S", 10.0)
    async with port(2) as served:
        for _ in range(10):
            assert (await served.ask("POST", "/v1/completions", json=STORY)).status_code == 200
        before = await served.numbers()
        stuck, other = servers()
        stuck.suspend()
        async with httpx.AsyncClient(base_url=served.url, timeout=1.0) as client:
            with suppress(httpx.TimeoutException):
                while True:  # until one comes to the server that is stuck
                    await client.get("/health", headers={"connection": "close"})
        await until(lambda: stuck.pid not in {each.pid for each in servers()}, timeout_s=60)
        await until_async(lambda: is_whole(served))
        after = await served.numbers()
        assert all(after[name] >= value for name, value in before.items() if is_counter(name))
        assert after["aioengine:api_server_restarts_total"] == 1
        assert other.is_running()


def is_counter(name: str) -> bool:
    return name.partition("{")[0].endswith(("_total", "_count", "_bucket", "_sum"))


async def refuses(served: Port) -> bool:
    try:
        await served.ask("GET", "/health")
    except httpx.TransportError as error:  # one that comes as the sockets are being closed is reset
        return isinstance(error, httpx.ConnectError)
    return False


async def one_stream_at_each(served: Port, stack: AsyncExitStack) -> list[AsyncIterator[str]]:
    """Long streams whose first pieces have come, one at each of two servers."""
    found: dict[int, AsyncIterator[str]] = {}
    while len(found) < 2:
        client = await stack.enter_async_context(httpx.AsyncClient(base_url=served.url, timeout=30))
        body = {"input": "Hi", "max_output_tokens": 3000, "stream": True}
        response = await stack.enter_async_context(client.stream("POST", "/v1/responses", json=body))
        lines = (line.removeprefix("data: ") async for line in response.aiter_lines() if line.startswith("data:"))
        await anext(lines)
        _, own_port = response.extensions["network_stream"].get_extra_info("client_addr")
        (pid,) = [
            server.pid
            for server in servers()
            if any(each.raddr and each.raddr.port == own_port for each in server.net_connections())
        ]
        found.setdefault(pid, lines)
    return list(found.values())


async def outcome_of(stream: AsyncIterator[str]) -> str:
    """Whether hundreds of pieces still come: more than can be under way."""
    try:
        for _ in range(500):
            await anext(stream)
    except httpx.RemoteProtocolError:
        return "cut"
    return "goes on"


async def has_load(served: Port, number: int) -> bool:
    loads = [(await served.ask("GET", "/load")).json()["server_load"] for _ in range(4)]
    return loads == [number] * 4


async def is_whole(served: Port) -> bool:
    return await served.group() == (2, 2)


async def test_a_server_that_cannot_serve_ends_all_with_its_reason() -> None:
    with pytest.raises(EngineDead, match=r"an HTTP server could not be started: HTTP server \d .*no engine serves"):
        async with port(1, engine_address="ipc:///nowhere/engine.sock"):
            pass
    assert not servers()
