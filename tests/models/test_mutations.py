"""Folders that are wrong in one place: the engine starts from one, or says what is wrong, and soon."""

import json
import os
import selectors
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from models.folder_mutations import __file__ as PROGRAM
from models.folder_mutations import make_bases

SEED = 20_000
NUM_FOLDERS = 2500
PATIENCE_S = 60.0


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("mutations")
    make_bases(root / "bases")
    return root


def outcomes(work: Path, first: int, last: int) -> Iterator[tuple[str, str]]:
    """(what was done to a folder, how the engine's start ended) of each, also of one that hangs or dies."""
    number = first
    while number < last:
        command = [sys.executable, "-W", "ignore", PROGRAM, str(work), str(SEED), str(number), str(last)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as process:
            what = f"number {number}"
            for line in _lines(process):
                record = json.loads(line)
                if "what" in record:
                    what, number = f"seed {SEED + record['number']}, {record['what']}", record["number"] + 1
                else:
                    yield what, record["how"]
                    what = ""
            process.kill()
        if what:
            yield what, f"FAULT: hung, or died with {process.returncode}"
            number = max(number, first + 1)


def _lines(process: subprocess.Popen[bytes]) -> Iterator[bytes]:
    """What it prints; ends with it, or when it has printed nothing for `PATIENCE_S`."""
    assert process.stdout is not None
    rest = b""
    with selectors.DefaultSelector() as selector:
        selector.register(process.stdout, selectors.EVENT_READ)
        while selector.select(PATIENCE_S) and (data := os.read(process.stdout.fileno(), 65536)):
            *lines, rest = (rest + data).split(b"\n")
            yield from lines


def check(work: Path, first: int, last: int) -> None:
    ended = list(outcomes(work, first, last))
    assert len(ended) == last - first
    faults = [f"{what}: {how}" for what, how in ended if how.startswith("FAULT")]
    assert not faults, "\n".join(faults)
    refused = [(what, how) for what, how in ended if not how.startswith("started")]
    # What is wrong is named: the file, or the tensor that config.json makes the file lack.
    unnamed = [f"{what}: {how}" for what, how in refused if str(work) not in how and "tensor " not in how]
    assert not unnamed, "\n".join(unnamed)
    assert len(refused) > (last - first) // 3


@pytest.mark.nightly
def test_an_engine_starts_or_says_what_is_wrong(work: Path) -> None:
    check(work, 0, NUM_FOLDERS)
