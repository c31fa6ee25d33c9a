"""Benchmarks of a cluster that need no device, each at its smallest."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SMALL = {
    "cluster": {"NUM_REPLICAS": (1, 2), "ROWS": (1, 8), "REPEATS": 1},
    "lockstep": {"NUM_STEPS": 10, "NUM_WAVES": 2, "REPEATS": 1},
}
ROWS = {
    "cluster": ["| 1 | ", "| 2 | ", "| 8 | ", "fitted: "],
    "lockstep": ["seam: ", "reduction of 3: ", "first token, lockstep"],
}
RUN = """
import asyncio, inspect
from benchmarks import {name} as benchmark

for constant, value in {small}.items():
    assert hasattr(benchmark, constant)
    setattr(benchmark, constant, value)
asyncio.run(benchmark.main()) if inspect.iscoroutinefunction(benchmark.main) else benchmark.main()
"""


@pytest.mark.nightly
@pytest.mark.parametrize("name", SMALL)
def test_it_prints_its_tables(name: str) -> None:
    """In a process of its own, since one of them starts others that stay until it ends."""
    command = [sys.executable, "-c", RUN.format(name=name, small=SMALL[name])]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=True)
    printed = done.stdout.splitlines()
    for row in ROWS[name]:
        assert any(line.startswith(row) for line in printed), printed
