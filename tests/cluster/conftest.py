"""For tests whose replicas die: where their files go, what befalls their starts, and that nothing is left of them."""

import logging
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import zmq
from cluster.mortal import FAULTS, STEP_TIME, Faults

TESTS = str(Path(__file__).parents[1])


@pytest.fixture
def runtime(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder of its own for sockets, since the paths of those are short; empty again in the end."""
    folder = Path(tempfile.mkdtemp(prefix="kill-", dir="/tmp"))
    for name in ("XDG_RUNTIME_DIR", "TMPDIR"):
        monkeypatch.setenv(name, str(folder))
    yield folder
    left = os.listdir(folder)
    shutil.rmtree(folder)
    assert left == []


@pytest.fixture
def faults(runtime: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, no_stray_process: None) -> Iterator[Faults]:
    """What befalls processes of `cluster.mortal`; in the end none of them is left, nor a descriptor."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([TESTS, os.environ.get("PYTHONPATH", "")]))
    monkeypatch.setenv(FAULTS, str(tmp_path))
    monkeypatch.setenv(STEP_TIME, "0.002")
    num_descriptors = len(os.listdir("/proc/self/fd"))
    yield Faults(tmp_path)
    assert psutil.Process().children(recursive=True) == []  # zombies included
    assert len(os.listdir("/proc/self/fd")) <= num_descriptors + 2  # a loop's own may still be open


@pytest.fixture
def quiet_log(quiet_log: None, caplog: pytest.LogCaptureFixture) -> None:
    """Deaths are logged, and are no news here."""
    caplog.set_level(logging.INFO, "aioengine")


@pytest.fixture
def context() -> Iterator[zmq.Context[zmq.Socket[bytes]]]:
    """Of sockets that drop what is unsent."""
    with zmq.Context() as context:
        context.linger = 0
        yield context
        context.destroy(linger=0)
