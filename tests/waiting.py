"""Tasks of a test, and waiting for what they and others bring about."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import anyio


async def turns(count: int) -> None:
    """Let other tasks run for so many turns of the loop."""
    for _ in range(count):
        await asyncio.sleep(0)


async def until(is_so: Callable[[], Any], *, timeout_s: float = 20.0) -> None:
    """Let others run, other tasks and threads, until it is so. By far the most of these waits take milliseconds."""
    with anyio.fail_after(timeout_s):
        while not is_so():  # noqa: ASYNC110 - no event tells
            await asyncio.sleep(0)


class Ticker:
    """Counts the turns of the loop that another task gets: ``async with Ticker() as ticker``."""

    def __init__(self) -> None:
        self.count = 0

    async def __aenter__(self) -> Ticker:
        self._task = asyncio.get_running_loop().create_task(self._tick())
        return self

    async def __aexit__(self, *error: object) -> None:
        self._task.cancel()
        await asyncio.wait({self._task})

    async def _tick(self) -> None:
        while True:
            self.count += 1
            await asyncio.sleep(0)


class Tasks:
    """Tasks by hand, whose results and errors are looked at one by one; leaving the context cancels and awaits all."""

    def __init__(self) -> None:
        self._tasks: list[asyncio.Task[Any]] = []

    def start(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.append(task)
        return task

    async def end(self, *tasks: asyncio.Task[Any]) -> list[Any]:
        """Wait for these (or all) and return each one's result or error."""
        return await asyncio.gather(*(tasks or self._tasks), return_exceptions=True)

    def cancel(self) -> None:
        for task in self._tasks:
            task.cancel()

    async def __aenter__(self) -> Tasks:
        return self

    async def __aexit__(self, *error: object) -> None:
        self.cancel()
        await self.end()
