"""The command line in this process, for what ends before it generates; in one of its own; and in a terminal."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import select
import subprocess
import sys
import termios
import time
from collections.abc import Callable, Iterator

import pytest

from aioengine.cli import main
from aioengine.processes.own_process import COMPILER_OUTLIVES

COMMAND = [sys.executable, "-m", "aioengine"]
DEADLINE_S = 90
# A pseudo-terminal does not tell where its cursor is.
ENVIRONMENT = {**os.environ, "HF_HUB_OFFLINE": "1", "TERM": "xterm", "PROMPT_TOOLKIT_NO_CPR": "1"}


def run(*args: str, stdin: str | bytes = "", **environment: str) -> subprocess.CompletedProcess[str]:
    """`aioengine ARGS` in a process of its own."""
    raw = stdin if isinstance(stdin, bytes) else stdin.encode()
    done = subprocess.run(
        [*COMMAND, *args], input=raw, capture_output=True, timeout=DEADLINE_S, env={**ENVIRONMENT, **environment}
    )
    return subprocess.CompletedProcess(done.args, done.returncode, done.stdout.decode(), done.stderr.decode())


def shell(line: str) -> subprocess.CompletedProcess[str]:
    """A line of a shell, in which `aioengine` is the command."""
    line = line.replace("aioengine", f"{sys.executable} -m aioengine", 1)
    return subprocess.run(line, shell=True, capture_output=True, text=True, timeout=DEADLINE_S, check=False)


CallMain = Callable[..., tuple[int, str, str]]


@pytest.fixture
def call_main(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> CallMain:
    """``call_main(*arguments)`` returns exit code, stdout and stderr."""

    def call(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["aioengine", *arguments])
        monkeypatch.setenv("GOMP_SPINCOUNT", "10000")  # set already, and so left alone
        monkeypatch.setenv(COMPILER_OUTLIVES, "")
        with pytest.raises(SystemExit) as ended:
            main()
        assert isinstance(ended.value.code, int)
        return ended.value.code, *capfd.readouterr()

    return call


class Script:
    """Lines as if they had been typed."""

    def __init__(self, *lines: str) -> None:
        self._lines = iter(lines)

    async def read(self) -> str | None:
        return next(self._lines, None)


class Terminal:
    """A command in a pseudo-terminal of its own, where Ctrl-C is a signal or a key as the program wants it."""

    def __init__(self, *args: str) -> None:
        self._ours, self._theirs = pty.openpty()
        self.modes = termios.tcgetattr(self._theirs)
        self.shown = ""
        self._num_read = 0
        self.process = subprocess.Popen(
            [*COMMAND, *args],
            stdin=self._theirs,
            stdout=self._theirs,
            stderr=self._theirs,
            env=ENVIRONMENT,
            start_new_session=True,
            preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
        )

    def type(self, keys: str) -> None:
        os.write(self._ours, keys.encode())

    def wait_for(self, pattern: str) -> None:
        """Read until the pattern has come, after what was waited for before."""
        deadline = time.monotonic() + DEADLINE_S
        while (found := re.search(pattern, self.shown[self._num_read :])) is None:
            assert time.monotonic() < deadline, f"no {pattern!r} in {self.shown[self._num_read :]!r}"
            self._read(timeout_s=1.0)
        self._num_read += found.end()

    def ends(self) -> int:
        """Its exit code; all of its words are in ``shown`` then."""
        while self.process.poll() is None:
            self._read(timeout_s=0.1)
        while self._read(timeout_s=0.0):
            pass
        assert termios.tcgetattr(self._theirs) == self.modes, "the terminal's modes are not what they were"
        return self.process.returncode

    def _read(self, timeout_s: float) -> bool:
        has_more = bool(select.select([self._ours], [], [], timeout_s)[0])
        if has_more:
            self.shown += os.read(self._ours, 65536).decode(errors="replace")
        return has_more

    def close(self) -> None:
        self.process.kill()
        self.process.wait(DEADLINE_S)
        os.close(self._ours)
        os.close(self._theirs)


@pytest.fixture
def open_terminal() -> Iterator[Callable[..., Terminal]]:
    terminals: list[Terminal] = []

    def opened(*args: str) -> Terminal:
        terminals.append(Terminal(*args))
        return terminals[-1]

    yield opened
    for terminal in terminals:
        terminal.close()
