"""What belongs to an event loop, for objects that outlive one."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")


class PerLoop(Generic[T]):
    """A lock, or a timer that runs, of an object that lives on several loops, one after another.

    What an earlier loop had is forgotten: that loop may have ended in the middle of anything.

    Args:
        make: asked once on each loop, by the first `get` there.
    """

    def __init__(self, make: Callable[[], T]) -> None:
        self._make = make
        self._made: tuple[asyncio.AbstractEventLoop, T] | None = None

    def get(self) -> T:
        """The running loop's."""
        loop = asyncio.get_running_loop()
        if self._made is None or self._made[0] is not loop:
            self._made = loop, self._make()
        return self._made[1]
