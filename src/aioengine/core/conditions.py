"""Waiting on a loop for something to be so that no event tells: looked at whenever it may have changed."""

from __future__ import annotations

import asyncio
from collections.abc import Callable


class Conditions:
    """Conditions that somebody awaits, each with its future."""

    def __init__(self) -> None:
        self._waits: list[tuple[Callable[[], bool], asyncio.Future[None]]] = []

    def __bool__(self) -> bool:
        return bool(self._waits)

    def add(self, is_so: Callable[[], bool]) -> asyncio.Future[None]:
        """A future that is done after the first `look` at which ``is_so``, or `end_all`."""
        future = asyncio.get_running_loop().create_future()
        self._waits.append((is_so, future))
        return future

    def look(self) -> None:
        """End the waits whose conditions hold."""
        still: list[tuple[Callable[[], bool], asyncio.Future[None]]] = []
        for is_so, future in self._waits:
            if future.done():  # given up
                continue
            if is_so():
                future.set_result(None)
            else:
                still.append((is_so, future))
        self._waits = still

    def end_all(self) -> None:
        """Nothing will change any more: end all waits, be it so or not."""
        waits, self._waits = self._waits, []
        for _, future in waits:
            if not future.done():
                future.set_result(None)
