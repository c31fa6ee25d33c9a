"""Benchmarks of a cluster that need no device, each at its smallest, and what `benchmarks.balance` shows."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from aioengine.testing import run
from benchmarks.balance import POLICIES, WORKLOADS, Figures, Workload, simulate

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


OF_NAME = {workload.name: workload for workload in WORKLOADS}


def figures_of(workload: Workload, policy_name: str) -> Figures:
    (policy,) = (policy for policy in POLICIES if policy.name == policy_name)
    return run(simulate(workload, policy, num_replicas=6, seed=1), seed=1)


@pytest.mark.parametrize("name", OF_NAME)
def test_each_workload_runs(name: str) -> None:
    figures = figures_of(OF_NAME[name]._replace(duration_s=3.0), "session, prefix")
    assert figures.requests > 3
    assert figures.ttft_median_s <= figures.ttft_p99_s


def test_chats_find_their_prefixes_and_wait_less() -> None:
    chats = OF_NAME["chats"]._replace(duration_s=10.0)
    apart, together = (figures_of(chats, name) for name in ("round robin", "session, prefix"))
    assert together.requests == apart.requests
    assert together.hits > apart.hits + 0.1
    assert together.ttft_median_s < apart.ttft_median_s
