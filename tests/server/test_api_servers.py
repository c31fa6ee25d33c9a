"""Which servers are kept, in what order they end, and when they are given up: with fakes, on a virtual clock."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import anyio
import pytest
from waiting import Tasks, turns

from aioengine.errors import EngineDead
from aioengine.server.group.api_servers import END_GRACE_S, MAX_FAILURES, STEADY_S, ApiServers
from aioengine.server.group.channel import ServerGroup
from aioengine.server.http_server import StopRequest

pytestmark = pytest.mark.virtual_clock


async def until(is_so: Callable[[], bool]) -> None:
    """Let the clock run until it is so."""
    with anyio.fail_after(1000):
        while not is_so():  # noqa: ASYNC110 - no event tells
            await anyio.sleep(0.01)


class FakeServer:
    """A server that serves at once unless it is told otherwise, and ends when it is told to."""

    serves = True
    drains = True

    def __init__(self, index: int) -> None:
        self.index = index
        self.told: list[ServerGroup] = []
        self.num_asked_to_end = 0
        self.is_killed = False
        self.made_at = anyio.current_time()
        self.has_exited = False
        self._exit = anyio.Event()

    async def run(self, on_serving: Callable[[], None]) -> None:
        try:
            if self.serves:
                await anyio.sleep(0.5)
                on_serving()
            await self._exit.wait()
        except BaseException:
            self.is_killed = True
            raise
        finally:
            self.has_exited = True

    def die(self) -> None:
        self._exit.set()

    def describe_exit(self) -> str:
        return f"HTTP server {self.index} (pid 7) exited with code 1; its last words: ConfigError: no luck"

    def terminate(self) -> None:
        self.num_asked_to_end += 1
        if self.drains or self.num_asked_to_end > 1:
            self._exit.set()

    def send_group(self, group: ServerGroup) -> None:
        self.told.append(group)


class Running:
    """`ApiServers` of fakes, running in a task."""

    def __init__(self, tasks: Tasks, num_servers: int = 3, **options: object) -> None:
        self.made: list[list[FakeServer]] = [[] for _ in range(num_servers)]
        self.stop = StopRequest()
        self.happened: list[object] = []
        self.servers = ApiServers(
            self._make,
            num_servers,
            drain_timeout_s=30.0,
            on_all_serving=lambda: self.happened.append("all serve"),
            on_exit=lambda index, is_again: self.happened.append((index, is_again)),
            on_stopping=lambda: self.happened.append("stopping"),
            **options,  # type: ignore[arg-type]
        )
        self._tasks = tasks
        self.task = tasks.start(self.servers.run(self.stop))

    def _make(self, index: int) -> FakeServer:
        server = FakeServer(index)
        self.made[index].append(server)
        return server

    @property
    def now(self) -> list[FakeServer]:
        return [each[-1] for each in self.made]

    async def until_all_serve(self) -> None:
        await until(lambda: len(self.servers.serving) == len(self.made))

    async def result(self) -> object:
        return (await self._tasks.end(self.task))[0]


async def test_all_start_side_by_side_and_each_hears_how_many_serve() -> None:
    async with Tasks() as tasks:
        running = Running(tasks)
        begun = anyio.current_time()
        await running.until_all_serve()
        assert anyio.current_time() - begun == pytest.approx(0.5, abs=0.02)
        await turns(3)
        assert running.happened == ["all serve"]
        assert [server.told[-1] for server in running.now] == [ServerGroup(3, 3)] * 3


async def test_one_that_dies_is_started_again() -> None:
    async with Tasks() as tasks:
        running = Running(tasks)
        await running.until_all_serve()
        first, *others = running.now
        first.die()
        await until(lambda: 0 not in running.servers.serving)
        assert [server.told[-1].num_serving for server in others] == [2, 2]
        await running.until_all_serve()
        assert running.now[0] is not first
        assert [server.told[-1] for server in running.now] == [ServerGroup(3, 3)] * 3
        assert running.happened == ["all serve", (0, True)]


async def test_one_that_fails_again_and_again_ends_all_and_says_why() -> None:
    async with Tasks() as tasks:
        running = Running(tasks)
        await running.until_all_serve()
        waits = []
        for number in range(MAX_FAILURES):
            died_at = anyio.current_time()
            running.now[1].die()
            if number < MAX_FAILURES - 1:
                await until(lambda: 1 not in running.servers.serving)
                await running.until_all_serve()
                waits.append(running.now[1].made_at - died_at)
        error = await running.result()
        assert waits == pytest.approx([0.1, 0.2, 0.4, 0.8])
        assert isinstance(error, EngineDead)
        assert str(error).startswith(
            "an HTTP server failed 5 times in a row; the last time: HTTP server 1 (pid 7) exited"
        )
        assert "ConfigError: no luck" in str(error)
        assert [server.num_asked_to_end for server in running.now] == [1, 0, 1]
        assert all(server.has_exited and not server.is_killed for server in running.now)


async def test_deaths_far_apart_are_not_in_a_row() -> None:
    async with Tasks() as tasks:
        running = Running(tasks, 2)
        for _ in range(2 * MAX_FAILURES):
            await running.until_all_serve()
            await anyio.sleep(STEADY_S + 1)
            running.now[1].die()
            await until(lambda: 1 not in running.servers.serving)
        await running.until_all_serve()
        assert len(running.made[1]) == 2 * MAX_FAILURES + 1


@contextmanager
def every_server(**fields: bool) -> Iterator[None]:
    before = {name: getattr(FakeServer, name) for name in fields}
    for name, value in fields.items():
        setattr(FakeServer, name, value)
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(FakeServer, name, value)


async def test_one_that_ends_before_it_ever_served_is_not_started_again() -> None:
    with every_server(serves=False):
        async with Tasks() as tasks:
            running = Running(tasks)
            await turns(5)
            running.now[2].die()
            error = await running.result()
            assert str(error).startswith(
                "an HTTP server could not be started: HTTP server 2 (pid 7) exited with code 1"
            )
            assert [len(each) for each in running.made] == [1, 1, 1]
            assert "all serve" not in running.happened


async def test_one_that_does_not_come_to_serve_is_killed_and_has_failed() -> None:
    with every_server(serves=False):
        async with Tasks() as tasks:
            running = Running(tasks, 1, start_timeout_s=20.0)
            assert str(await running.result()).endswith("HTTP server 0 did not serve within 20 s, and was killed")
            assert running.now[0].is_killed


async def test_told_to_stop_all_end_by_draining_and_none_is_started_again() -> None:
    async with Tasks() as tasks:
        running = Running(tasks)
        await running.until_all_serve()
        running.now[0].die()
        await until(lambda: 0 not in running.servers.serving)
        running.stop.ask()  # while one waits to be started again
        assert running.happened[-1] == "stopping"
        assert await running.result() is None
        assert [server.num_asked_to_end for server in running.now] == [0, 1, 1]
        assert not any(server.is_killed for server in running.now)
        assert [len(each) for each in running.made] == [1, 1, 1]


async def test_told_twice_they_abort_and_those_that_do_not_end_are_killed_at_a_deadline() -> None:
    with every_server(drains=False):
        async with Tasks() as tasks:
            running = Running(tasks)
            await running.until_all_serve()
            running.stop.ask()
            await turns(5)
            assert not running.task.done()
            running.stop.ask()
            assert await running.result() is None
            assert running.happened.count("stopping") == 1

            stuck = Running(tasks)
            await stuck.until_all_serve()
            began = anyio.current_time()
            stuck.stop.ask()
            assert await stuck.result() is None
            assert anyio.current_time() - began == pytest.approx(30.0 + END_GRACE_S)
            assert all(server.is_killed for server in stuck.now)


async def test_told_to_stop_before_they_begin_they_begin_nothing() -> None:
    async with Tasks() as tasks:
        stop = StopRequest()
        stop.ask()
        servers = ApiServers(FakeServer, 2, drain_timeout_s=1.0)
        assert await tasks.end(tasks.start(servers.run(stop))) == [None]


async def test_what_else_fails_ends_them_with_its_reason() -> None:
    async with Tasks() as tasks:
        running = Running(tasks)
        await running.until_all_serve()
        running.servers.fail("engine 0 (pid 8) was killed by SIGKILL")
        assert str(await running.result()) == "engine 0 (pid 8) was killed by SIGKILL"
        assert not any(server.is_killed for server in running.now)
