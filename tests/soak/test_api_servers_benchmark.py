"""`benchmarks/api_servers.py`: a small run of all of it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.nightly
def test_it_measures_one_server_and_two(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "benchmarks.api_servers", "--servers", "1", "2", "--clients", "4"]
    small = ["--seconds", "2", "--rounds", "1", "--json", str(tmp_path / "figures.json")]
    done = subprocess.run([*command, *small], cwd=ROOT, capture_output=True, text=True, timeout=300, check=True)
    assert done.stdout.count("\n| 1 |") == done.stdout.count("\n| 2 |") == 2
    figures = json.loads((tmp_path / "figures.json").read_text())
    assert set(figures) == {"1 short", "1 streams", "2 short", "2 streams"}
    assert all(each["rate"] > 0 for each in figures.values())
