"""The benchmark of random kills under load: nothing is lost, doubled or different, in six kills and in two hundred."""

from __future__ import annotations

import importlib
import time
from pathlib import Path
from typing import Any

import pytest
from cluster.mortal import Faults

ROOT = Path(__file__).parents[2]


@pytest.fixture
def kills(monkeypatch: pytest.MonkeyPatch, faults: Faults, quiet_log: None) -> Any:
    """The benchmark's module."""
    monkeypatch.syspath_prepend(ROOT)
    return importlib.import_module("benchmarks.kills")


@pytest.mark.nightly
@pytest.mark.parametrize(("num_kills", "seed"), [(2, 1), (200, 2)])
async def test_random_kills_under_load_lose_nothing(kills: Any, num_kills: int, seed: int) -> None:
    setting = kills.Setting(
        num_kills=num_kills, num_clients=12, num_rolling=1, pause_s=0.3, stall_timeout_s=2.0, seed=seed
    )
    began = time.monotonic()
    report = await kills.Run(setting).run()
    kills.print_report(setting, report, time.monotonic() - began)
    assert report.problems == []
    assert report.kills.total() == num_kills
    assert report.num_broken > 0
    assert report.num_requests_of_rolling > 0
