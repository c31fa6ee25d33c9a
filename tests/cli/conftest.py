"""The command line in this process, for what ends before it generates: a process of its own takes seconds."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable

import pytest

from aioengine.cli import main

COMMAND = [sys.executable, "-m", "aioengine"]
DEADLINE_S = 90


def run(*args: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
    """`aioengine ARGS` in a process of its own."""
    env = {**os.environ, "HF_HUB_OFFLINE": "1"}
    return subprocess.run(
        [*COMMAND, *args], input=stdin, capture_output=True, text=True, timeout=DEADLINE_S, check=False, env=env
    )


CallMain = Callable[..., tuple[int, str, str]]


@pytest.fixture
def call_main(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> CallMain:
    """``call_main(*arguments)`` returns exit code, stdout and stderr."""

    def call(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["aioengine", *arguments])
        monkeypatch.setenv("GOMP_SPINCOUNT", "10000")  # set already, and so left alone
        with pytest.raises(SystemExit) as ended:
            main()
        assert isinstance(ended.value.code, int)
        return ended.value.code, *capfd.readouterr()

    return call
