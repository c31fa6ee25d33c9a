"""`benchmarks/gpu/waiting.py` runs to its end. Its figures are not judged here."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="timerfd and eventfd are Linux's")


@pytest.mark.nightly
def test_it_fills_its_tables(tmp_path: Path) -> None:
    report = tmp_path / "waiting.json"
    command = [sys.executable, "-m", "benchmarks.gpu.waiting", "--device", "stand-in", "--repeats", "1"]
    process = subprocess.run(
        [*command, "--seconds", "0.2", "--json", str(report)], capture_output=True, text=True, timeout=120, cwd=ROOT
    )
    assert (process.returncode, process.stderr) == (0, "")
    assert "GPU's half is not measured" in process.stdout
    lines = process.stdout.splitlines()
    assert sum(line.startswith("| asyncio, launching, 10 ms | ") for line in lines) == 3
    figures = json.loads(report.read_text())
    assert len(figures["rows"]) == 2 * 3 * 3 * 8
    assert all(row["steps"][0] >= 2 and row["process_cpu_percent"][0] > 0 for row in figures["rows"])
