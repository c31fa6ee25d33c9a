"""What a child writes: logged line by line, its end kept as last words. Nothing that a child writes holds the loop."""

from __future__ import annotations

import asyncio
import fcntl
import logging
import os
import re
import termios
from collections import deque
from collections.abc import Iterable
from typing import IO

from aioengine.transport.child_life import read_log_line

logger = logging.getLogger("aioengine")

READ_BYTES = 8192
"""At once; then the loop goes on with others. With the lines below at most about 2 ms."""

MAX_LINES_PER_READ = 100
MAX_LINE_BYTES = 4096
MAX_LAST_LINES = 64
MAX_LAST_BYTES = 16_384

_TRACEBACK = "Traceback (most recent call last):"
_TELLING = re.compile(r"\b(\w*Error|ERROR|CRITICAL|Fatal \w+)\b")


class ChildOutput:
    """The reading end of a pipe that a child writes to.

    Each line goes to the ``aioengine`` logger. Who writes faster than they can be logged waits at the full pipe, and of
    many short lines that come at once all but the first are only counted.

    Args:
        name: of the child, put before each line.
        pipe: unbuffered; closed in the end.
    """

    def __init__(self, name: str, pipe: IO[bytes], loop: asyncio.AbstractEventLoop) -> None:
        self._name = name
        self._pipe = pipe
        self._loop = loop
        self._rest = b""
        """The beginning of a line whose end has not come yet."""
        self._tail: deque[str] = deque(maxlen=MAX_LAST_LINES)
        os.set_blocking(pipe.fileno(), False)
        loop.add_reader(pipe.fileno(), self._on_readable)

    @property
    def tail(self) -> tuple[str, ...]:
        """The last lines, at most `MAX_LAST_LINES` and `MAX_LAST_BYTES`."""
        num_bytes, first = 0, len(self._tail)
        for line in reversed(self._tail):
            num_bytes += len(line.encode())
            if num_bytes > MAX_LAST_BYTES:
                break
            first -= 1
        return tuple(self._tail)[first:]

    def finish(self) -> None:
        """Read what the pipe holds now, and close it. Whoever still writes, a child's own child, is not waited for."""
        if self._pipe.closed:
            return
        left = int.from_bytes(fcntl.ioctl(self._pipe.fileno(), termios.FIONREAD, bytes(4)), "little")
        if left > 0:
            self._feed(self._read(left))
        self.close()

    def close(self) -> None:
        """Stop reading. On the loop, or when it is closed."""
        if self._pipe.closed:
            return
        if not self._loop.is_closed():
            self._loop.remove_reader(self._pipe.fileno())
        self._pipe.close()
        if self._rest:
            self._take([self._rest])
            self._rest = b""

    def _on_readable(self) -> None:
        data = self._read(READ_BYTES)
        if data == b"":
            self.close()
        elif data is not None:
            self._feed(data)

    def _read(self, num_bytes: int) -> bytes | None:
        """None: there is nothing now; empty: nobody writes any more."""
        try:
            return os.read(self._pipe.fileno(), num_bytes)
        except BlockingIOError:
            return None

    def _feed(self, data: bytes | None) -> None:
        *lines, rest = (self._rest + (data or b"")).split(b"\n")
        if len(rest) > MAX_LINE_BYTES:  # no line, or a very long one: it must not pile up
            lines.append(rest)
            rest = b""
        self._rest = rest
        self._take(lines)

    def _take(self, lines: list[bytes]) -> None:
        for line in lines[-MAX_LAST_LINES:]:
            self._tail.append(_as_text(line))
        for line in lines[:MAX_LINES_PER_READ]:
            level, message = read_log_line(_as_text(line))
            if message.strip():
                logger.log(level, "%s: %s", self._name, message)
        if len(lines) > MAX_LINES_PER_READ:
            logger.info("%s: … %d more lines at once", self._name, len(lines) - MAX_LINES_PER_READ)


def _as_text(line: bytes) -> str:
    """A progress bar rewrites its line: of that the last state."""
    shown = line[-MAX_LINE_BYTES:].rstrip(b"\r").rpartition(b"\r")[2] if b"\r" in line else line[:MAX_LINE_BYTES]
    return shown.decode(errors="replace")


def telling_line(lines: Iterable[str]) -> str:
    """The line that says best why a process ended: what its last traceback or error says, else its last line."""
    telling, last, is_in_traceback = "", "", False
    for line in lines:
        text = read_log_line(line)[1]
        if not text.strip():
            continue
        last = text
        if text.endswith(_TRACEBACK):
            is_in_traceback = True
        elif is_in_traceback:
            if not text[0].isspace():
                telling, is_in_traceback = text, False
        elif _TELLING.search(line):
            telling = text
    return (telling or last).strip()
