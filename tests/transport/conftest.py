"""For tests with engines in processes of their own: where their files go, and what a failing test leaves."""

import logging
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import zmq
from transport.life_scripts.devices import FIFO

TESTS = str(Path(__file__).parents[1])


@pytest.fixture
def runtime(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """A folder of its own for sockets, since the paths of those are short; and the FIFO of the devices."""
    folder = Path(tempfile.mkdtemp(prefix="life-", dir="/tmp"))
    for name in ("XDG_RUNTIME_DIR", "TMPDIR"):
        monkeypatch.setenv(name, str(folder))
    monkeypatch.setenv("PYTHONPATH", TESTS, prepend=os.pathsep)
    os.mkfifo(tmp_path / "fifo")
    monkeypatch.setenv(FIFO, str(tmp_path / "fifo"))
    yield folder
    shutil.rmtree(folder)


@pytest.fixture
def context() -> Iterator[zmq.Context[zmq.Socket[bytes]]]:
    """Of sockets that drop what is unsent; those that a test leaves are closed."""
    with zmq.Context() as context:
        context.linger = 0
        yield context
        context.destroy(linger=0)


@pytest.fixture
def address(tmp_path_factory: pytest.TempPathFactory, scheme: str) -> str:
    """Of an engine that a test serves, by its parameter ``scheme``."""
    return f"ipc://{tmp_path_factory.mktemp('s')}/engine" if scheme == "ipc" else "tcp://127.0.0.1:*"


@pytest.fixture
def quiet_log(quiet_log: None, caplog: pytest.LogCaptureFixture) -> None:
    """Nothing is printed; handlers that tests add hear what children say, too."""
    caplog.set_level(logging.INFO, "aioengine")
