"""Benchmarks of a cluster that need no device, each at its smallest."""

from __future__ import annotations

import asyncio
import importlib
import inspect
import sys
from typing import Any

import pytest

SMALL: dict[str, dict[str, Any]] = {
    "cluster": {"NUM_REPLICAS": (1, 2), "ROWS": (1, 8), "REPEATS": 1},
    "coordinator": {"NUM_REPLICAS": (2,), "REPEATS": 2},
    "lockstep": {"NUM_STEPS": 10, "NUM_REDUCTIONS": 2, "NUM_WAVES": 2, "REPEATS": 1},
}
ROWS = {
    "cluster": ["| 1 | ", "| 2 | ", "| 8 | ", "fitted: "],
    "coordinator": ["| 2 | "],
    "lockstep": ["seam: ", "reduction of 3: ", "first token, lockstep"],
}


@pytest.mark.nightly
@pytest.mark.parametrize("name", SMALL)
def test_it_prints_its_tables(name: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    benchmark = importlib.import_module(f"benchmarks.{name}")
    for constant, value in SMALL[name].items():
        assert hasattr(benchmark, constant)
        monkeypatch.setattr(benchmark, constant, value)
    monkeypatch.setattr(sys, "argv", [name])
    result = benchmark.main()
    if inspect.isawaitable(result):

        async def wait() -> None:
            await result

        asyncio.run(wait())
    printed = capfd.readouterr().out.splitlines()
    for row in ROWS[name]:
        assert any(line.startswith(row) for line in printed), printed
