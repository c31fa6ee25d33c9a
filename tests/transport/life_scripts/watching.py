"""Watching processes and engines: until a line was said, until one is stopped, dead, healthy."""

import asyncio
import contextlib
import logging
import os
import re
import select
import subprocess
import sys
import time
from collections.abc import AsyncIterator

import anyio
import psutil
from waiting import until

from aioengine import Engine

DEADLINE_S = 60.0
"""For what should take milliseconds: a busy machine fails no test."""


async def health_is(engine: Engine, status: str, reason: str) -> None:
    """Wait until the engine's health is this, and its reason has that in it."""
    await until(lambda: (health := engine.health()).status == status and reason in health.reason, timeout_s=DEADLINE_S)


class Lines:
    """What a `Life` in this process has said."""

    def __init__(self) -> None:
        super().__init__()
        self.said: list[str] = []
        self._came = asyncio.Event()

    def add(self, line: str) -> None:
        self.said.append(line)
        self._came.set()

    async def hears(self, *patterns: str) -> list[re.Match[str]]:
        """Wait until a line of each pattern has been said."""
        with anyio.fail_after(DEADLINE_S):
            while True:
                found = [self._match(pattern) for pattern in patterns]
                if None not in found:
                    return [match for match in found if match is not None]
                self._came.clear()
                await self._came.wait()

    def _match(self, pattern: str) -> re.Match[str] | None:
        return next((match for text in self.said if (match := re.fullmatch(pattern, text))), None)


class Ear(Lines, logging.Handler):
    """What is logged in this process, the lines of children included."""

    def __init__(self) -> None:
        super().__init__()
        self.records: list[logging.LogRecord] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.records.append(record)
        self.add(record.getMessage())

    def forget(self) -> None:
        self.records.clear()
        self.said.clear()


def is_dead(pid: int) -> bool:
    """Whether it has ended, within the deadline; an orphan's zombie is for init to reap."""
    try:
        pidfd = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        return bool(select.select([pidfd], [], [], DEADLINE_S)[0])
    finally:
        os.close(pidfd)


def until_stopped(pid: int) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while psutil.Process(pid).status() != psutil.STATUS_STOPPED:
        assert time.monotonic() < deadline


class Script:
    """A script that says in lines what happens, such as ``life_scripts.family``."""

    def __init__(self, *command: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", *command], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
        )
        self.said: list[str] = []
        self._rest = b""

    def hears(self, pattern: str) -> re.Match[str]:
        """Wait until it has said so."""
        while True:
            for line in self.said:
                if match := re.fullmatch(pattern, line):
                    return match
            assert self._read(), f"it ended, and had said {self.said}"

    def end(self) -> int:
        """Wait for its end. → its returncode."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        while self._read():
            pass
        code = self.process.wait(DEADLINE_S)
        self.process.stdin.close()
        self.process.stdout.close()
        return code

    def go_on(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(b"go on\n")
        self.process.stdin.flush()

    def _read(self) -> bool:
        assert self.process.stdout is not None
        fd = self.process.stdout.fileno()
        assert select.select([fd], [], [], DEADLINE_S)[0], f"it said nothing more than {self.said}"
        data = os.read(fd, 65536)
        *lines, self._rest = (self._rest + data).split(b"\n")
        self.said += [line.decode() for line in lines]
        return bool(data)


@contextlib.asynccontextmanager
async def engine_command(address: str, **config: float) -> AsyncIterator[tuple[Script, str]]:
    """``aioengine engine`` with a fake device, and where it serves."""
    flags = [word for name, value in config.items() for word in (f"--{name.replace('_', '-')}", str(value))]
    script = Script("aioengine", "engine", address, "--plugin", "transport.life_scripts.no_torch", *flags)
    try:
        yield script, (await anyio.to_thread.run_sync(script.hears, "serving at (.*)"))[1]
    finally:
        script.process.kill()
        await anyio.to_thread.run_sync(script.end)


def ends_of(said: list[str]) -> dict[str, list[str]]:
    """What each request heard in the end, all of it."""
    ends: dict[str, list[str]] = {}
    for line in said:
        if match := re.fullmatch(r"(request \d+): (.*)", line):
            ends.setdefault(match[1], []).append(match[2])
    return ends
