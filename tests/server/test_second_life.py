"""An app is served on one loop after another: what belongs to a loop is made anew there."""

from __future__ import annotations

import asyncio

import httpx

from aioengine import Engine
from aioengine.server import create_app
from aioengine.testing import FakeExecutor

LARGE = {"prompt": "a " * 40_000}
"""It is decoded in turns, one body after the other, and then it is too long."""


def test_an_app_lives_again_on_another_loop() -> None:
    engines: list[Engine] = []
    app = create_app(lambda: engines[-1])

    async def live() -> None:
        async with Engine(seed=1, executor=FakeExecutor(vocab_size=2048)) as engine:
            engines.append(engine)
            async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost") as http:
                large = [http.post("/v1/completions", json=LARGE) for _ in range(8)]
                metrics = [http.get("/metrics") for _ in range(8)]
                answers = await asyncio.gather(*large, *metrics)
        assert [answer.status_code for answer in answers] == [400] * 8 + [200] * 8

    for _ in range(2):
        asyncio.run(live())
    assert app.state.api._num_open == app.state.api._bodies._num_bytes == 0
