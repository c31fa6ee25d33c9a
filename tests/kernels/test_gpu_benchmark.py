"""``python -m benchmarks.gpu``: runs to its end without a GPU, and says what each row is."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from kernels.harness import LAUNCHED

REPOSITORY = Path(__file__).parents[2]
TIMEOUT_S = 300
"""Many times what it takes where nothing else runs."""
COMMAND = [sys.executable, "-m", "benchmarks.gpu", "--device", "cpu", "--tiny"]
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}


@pytest.fixture(scope="module")
def gpu() -> Any:
    """Modules of the benchmark, by name."""
    sys.path.insert(0, str(REPOSITORY))
    try:
        names = ("report", "rows", "sizes", "trace")
        modules = {name: importlib.import_module(f"benchmarks.gpu.{name}") for name in names}
    finally:
        sys.path.remove(str(REPOSITORY))
    return type("Gpu", (), modules)


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        arguments, cwd=REPOSITORY, env=ENVIRONMENT, capture_output=True, text=True, timeout=TIMEOUT_S, check=False
    )


# The command on a CPU


@pytest.mark.nightly
def test_it_runs_to_its_end_and_says_that_nothing_was_measured_on_a_gpu(tmp_path: Path, gpu: Any) -> None:
    ended = run(*COMMAND, "--out", str(tmp_path))
    assert ended.returncode == 0, ended.stderr[-4000:]
    lines = (tmp_path / "RESULTS.md").read_text().splitlines()
    for row in gpu.rows.ROWS:
        (line,) = (line for line in lines if line.startswith(f"| {row.workload} | {row.aim} |"))
        assert "| not measured: needs a GPU; " in line
    results = json.loads((tmp_path / "results.json").read_text())
    assert results["failed"] == {}
    assert set(results["results"]) == {row.key for row in gpu.rows.ROWS}
    assert {row["reason"] for row in results["results"].values()} == {"", "needs a GPU"}
    assert all((row["value"] is None) == (row["reason"] != "") for row in results["results"].values())
    assert results["results"]["greedy equality"]["value"] == 0
    assert {kernel["name"] for kernel in results["kernels"]} == LAUNCHED | {"linear"}
    assert {kernel["reason"] for kernel in results["kernels"]} == {""}
