"""Apps that live twice: on a loop that ends in the middle of things, and then on another one."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from typing import Any

import anyio
import pytest
from aiohttp import web
from server.conftest import Adapter, api_of, both_adapters, serving_app
from server.hostile import Client, completion, request_of
from waiting import until

from aioengine import Engine
from aioengine.server import ServerConfig, aiohttp_routes, create_app
from aioengine.testing import FakeExecutor

LARGE = request_of("POST", "/v1/completions", completion(prompt="a " * 40_000))
"""It is decoded in turns, and then it is too long."""
ENDLESS = {"max_tokens": 25_000}
"""As many steps of a millisecond as no test waits for."""


class House:
    """An app, and the engine that it finds now."""

    def __init__(self, adapter: Adapter) -> None:
        config = ServerConfig(max_concurrent_requests=100)
        self.engine: Engine | None = None
        if adapter == "aiohttp":
            # What lives twice are the routes: an application of aiohttp's is bound to one loop.
            routes = aiohttp_routes(self._find, config)
            self._app: Callable[[], Any] = lambda: _application(routes)
        else:
            app = create_app(self._find, config)
            self._app = lambda: app
        self.api = api_of(self._app())

    def _find(self) -> Engine:
        assert self.engine is not None
        return self.engine

    async def host(self, begun: asyncio.Future[int]) -> None:
        """Serve until cancelled."""
        executor = FakeExecutor(vocab_size=2048, max_model_len=30_000, num_blocks=8192, step_time_s=0.001)
        async with Engine(seed=1, executor=executor) as self.engine, serving_app(self._app()) as url:
            begun.set_result(int(url.rpartition(":")[2]))
            await asyncio.Event().wait()

    @property
    def num_running(self) -> int:
        return self._find().stats().running

    @property
    def is_decoding(self) -> bool:
        return self.api._bodies._decoding.get().locked()


def _application(routes: list[web.RouteDef]) -> web.Application:
    app = web.Application()
    app.add_routes(routes)
    return app


def live(house: House, life: Callable[[int], Awaitable[None]]) -> None:
    """One life on a loop of its own, whose end cancels whatever still goes on there, in no order."""

    async def main() -> None:
        loop = asyncio.get_running_loop()
        begun = loop.create_future()
        hosting.append(loop.create_task(house.host(begun)))
        await life(await begun)

    hosting: list[asyncio.Task[None]] = []
    with asyncio.Runner(loop_factory=asyncio.SelectorEventLoop) as runner:
        runner.run(main())
    assert hosting[0].cancelled()


async def check_all_is_well(house: House, port: int) -> None:
    """Large bodies that contend, and clients that leave."""

    async def upload() -> tuple[int, Any]:
        with await Client.connect(port) as client:
            await client.send(LARGE)
            answer = await client.answer()
            return answer.status, answer.error["code"]

    assert await asyncio.gather(*(upload() for _ in range(8))) == [(400, "context_length_exceeded")] * 8
    metrics = house.api._metrics_of_http
    num_gone = metrics.gone.value
    for is_stream in (False, True):
        with await Client.connect(port) as client:
            await client.post("/v1/completions", completion(stream=is_stream, **ENDLESS))
            await until(lambda: house.num_running == 1)
        await until(lambda: house.num_running == 0)
    await until(lambda: metrics.in_progress.value == 0)
    assert metrics.gone.value == num_gone + 2
    assert house.api._num_open == 0
    assert house.api._bodies._num_bytes == 0


@pytest.mark.filterwarnings("ignore:the event loop ended before the engine was closed")
# anyio wraps a task's coroutine: one whose task the loop's end cancels before its first turn was never awaited
@pytest.mark.filterwarnings("ignore:.*coroutine 'run_while_connected:RuntimeWarning")
@pytest.mark.filterwarnings("ignore:.*coroutine .*run_while_connected:pytest.PytestUnraisableExceptionWarning")
@both_adapters
def test_an_app_lives_again_after_a_loop_that_ended_in_the_middle_of_things(adapter: Adapter) -> None:
    house = House(adapter)
    with contextlib.ExitStack() as open_clients:

        async def first(port: int) -> None:
            await check_all_is_well(house, port)
            for is_stream in (False, True):
                client = open_clients.enter_context(await Client.connect(port))
                await client.post("/v1/completions", completion(stream=is_stream, **ENDLESS))
            await until(lambda: house.num_running == 2)
            for _ in range(8):
                client = open_clients.enter_context(await Client.connect(port))
                await client.send(LARGE)
            with anyio.fail_after(20):
                while not house.is_decoding:  # noqa: ASYNC110
                    await asyncio.sleep(0)

        live(house, first)
        live(house, lambda port: check_all_is_well(house, port))
