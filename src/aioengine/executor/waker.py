"""Wakes an event loop from another thread, by a file descriptor that the loop keeps reading.

``call_soon_threadsafe`` does the same and takes a quarter longer until the waiting coroutine goes on, and twice as long
on a uvloop with other things to do (``benchmarks/gpu/waiting.md``): asyncio sends a byte through a socket and reads
until that is empty, and uvloop goes round once more before it calls.
"""

from __future__ import annotations

import asyncio
import contextvars
import os
import weakref
from collections import deque
from collections.abc import Callable


class Waker:
    """Calls back on a loop, from other threads, in order. To be made on that loop, which it knows weakly.

    Where the loop or the system has no such descriptors it uses ``call_soon_threadsafe``.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = weakref.ref(loop)
        self._callbacks: deque[Callable[[], object]] = deque()
        self._fd = -1
        if hasattr(os, "eventfd"):
            self._fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
            try:
                # In an empty context: the loop would keep alive all that the caller's refers to.
                contextvars.Context().run(loop.add_reader, self._fd, self._on_readable)
            except NotImplementedError:
                self._close()

    def call(self, callback: Callable[[], object]) -> None:
        """Call back on the loop soon; ``callback`` must not raise. Not to be used once `release` may have been called.

        Raises:
            RuntimeError: the loop is closed or gone.
        """
        loop = self._loop()
        if loop is None or loop.is_closed():
            raise RuntimeError("the loop is gone")
        if self._fd < 0:
            loop.call_soon_threadsafe(callback)
        else:
            self._callbacks.append(callback)  # first, or a loop that is quick would not find it
            os.eventfd_write(self._fd, 1)

    def release(self) -> None:
        """On the loop: read no more, and give the descriptor back. Idempotent."""
        loop = self._loop()
        if self._fd >= 0 and loop is not None:
            loop.remove_reader(self._fd)
            self._close()

    def _on_readable(self) -> None:
        os.eventfd_read(self._fd)
        while self._callbacks:
            self._callbacks.popleft()()

    def _close(self) -> None:
        fd, self._fd = self._fd, -1
        os.close(fd)

    def __del__(self) -> None:
        # A loop that was closed before `release` has let go of the descriptor and of this; an open one holds both.
        if self._fd >= 0:
            self._close()
