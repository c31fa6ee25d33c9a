"""The same done with several things at once."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable
from typing import TypeVar

import anyio

A = TypeVar("A")
T = TypeVar("T")


async def for_each(items: Iterable[A], function: Callable[[A], Awaitable[T]]) -> list[T]:
    """Await ``function`` of all side by side; returns the results in order. What one raises ends the others."""
    items = list(items)
    results: dict[int, T] = {}
    error: Exception | None = None

    async def run(place: int) -> None:
        nonlocal error
        try:
            results[place] = await function(items[place])
        except Exception as raised:
            error = error or raised
            tasks.cancel_scope.cancel()

    async with anyio.create_task_group() as tasks:
        for place in range(len(items)):
            tasks.start_soon(run, place)
    if error is not None:
        raise error
    return [results[place] for place in range(len(items))]
