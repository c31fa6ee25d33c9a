"""The command line in this process, for what ends before it generates: a process of its own takes seconds."""

from __future__ import annotations

import sys
from collections.abc import Callable

import pytest

from aioengine.cli import main

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
