"""How torch's threads wait: set in processes of the engine's own, and in no other's. libgomp itself says what holds."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch  # noqa: F401 - brings its OpenMP runtime

from aioengine.processes.own_process import OPENMP_WAITING, SPIN_COUNT

pytestmark = pytest.mark.skipif("libgomp" not in Path("/proc/self/maps").read_text(), reason="torch without libgomp")

DEADLINE_S = 90
LIBGOMP_SPIN_COUNT = 300_000

COMMAND_LINE = """
import sys
from aioengine.cli import main

sys.argv = ["aioengine", "--version"]
try:
    main()
finally:
    import torch  # as a command does that needs it
"""

ENGINE = """
import asyncio, logging
from aioengine import Engine, ProcessOptions

logging.basicConfig(level="INFO")  # what a child prints is logged

async def main():
    async with Engine(process={process}, kv_cache_memory_bytes={memory}) as engine:
        await engine.generate([5, 6, 7], max_tokens=1)

asyncio.run(main())
"""
EMBEDDER = ENGINE.format(process=False, memory=2**25)
CHILD = ENGINE.format(process="ProcessOptions(executor='contract.fakes:make', plugins=('torch',))", memory=512)


def spin_counts(program: str, **own: str) -> list[int]:
    """What each libgomp goes by that the processes of a Python program load."""
    inherited = {name: value for name, value in os.environ.items() if name not in OPENMP_WAITING}
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={**inherited, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "OMP_DISPLAY_ENV": "verbose", **own},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )
    assert done.returncode == 0, done.stdout
    return [int(count) for count in re.findall(r"GOMP_SPINCOUNT = '(\d+)'", done.stdout)]


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("program", "own", "expected"),
    [
        pytest.param(COMMAND_LINE, {"GOMP_SPINCOUNT": "77"}, 77, id="the command line"),
        pytest.param(CHILD, {"OMP_WAIT_POLICY": "passive"}, 0, id="a child", marks=pytest.mark.nightly),
    ],
)
def test_threads_spin_briefly_in_a_process_of_our_own_unless_the_user_says_how_they_wait(
    program: str, own: dict[str, str], expected: int
) -> None:
    assert spin_counts(program) == [SPIN_COUNT]
    assert spin_counts(program, **own) == [expected]


@pytest.mark.nightly
def test_an_embedders_process_is_left_as_it_is() -> None:
    assert spin_counts(EMBEDDER) == [LIBGOMP_SPIN_COUNT]
