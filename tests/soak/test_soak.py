"""A short soak of the real engine: every kind of request, reader and upset at once, and nothing may be left or grow."""

from __future__ import annotations

import importlib
import logging
from pathlib import Path
from typing import Any

import pytest

from aioengine.frontend.admission import Admission

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def soak(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> Any:
    """The benchmark's module. What it logs of requests that it makes fail is no news."""
    caplog.set_level(logging.CRITICAL, "aioengine")
    monkeypatch.syspath_prepend(BENCHMARKS)
    return importlib.import_module("soak")


async def run_mixed_use(soak: Any, num_requests: int, **setting: Any) -> Any:
    report = await soak.Soak(
        soak.Setting(
            num_requests=num_requests,
            num_waves=7,
            concurrency=48,
            num_threads=1,
            num_references=16,
            deadline_s=200.0,
            **setting,
        )
    ).run()
    assert not report.violations, "\n".join(report.violations)
    assert report.samples[-1].num_requests == num_requests
    return report


@pytest.mark.nightly
async def test_mixed_use_ends_once_for_each_request_and_leaves_nothing(soak: Any) -> None:
    report = await run_mixed_use(soak, 200, seed=11, max_in_flight=2)
    assert {"length", "cancelled", "left"} <= set(report.outcomes)
    assert report.num_compared > 2


@pytest.mark.nightly
@pytest.mark.parametrize(("depth", "seed"), [(1, 11), (2, 12)])
async def test_longer_mixed_use_meets_each_outcome_and_upset(soak: Any, depth: int, seed: int) -> None:
    report = await run_mixed_use(soak, 2_000, seed=seed, max_in_flight=depth)
    assert {"length", "stop", "abort", "cancelled", "left", "broken", "overloaded"} <= set(report.outcomes)
    assert any(outcome.startswith("refused: ") for outcome in report.outcomes)
    assert report.num_compared > 20
    assert report.preemptions > 10
    assert report.max_blocked > 0
    assert len(report.upsets) > 3


@pytest.mark.nightly
async def test_a_request_that_is_not_forgotten_is_seen(soak: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Admission, "leave", lambda *_: None)
    setting = soak.Setting(num_requests=40, num_waves=4, num_threads=1, num_references=0)
    report = await soak.Soak(setting).run()
    assert any("not left" in violation for violation in report.violations)


@pytest.mark.parametrize(("lost_each", "is_bounded"), [(0.0, True), (0.0005, True), (0.002, False), (-0.01, True)])
def test_a_leak_is_told_from_noise(soak: Any, lost_each: float, is_bounded: bool) -> None:
    def sample(num_requests: int) -> Any:
        noise = 3.0 * (-1) ** (num_requests // 500)
        rss_mib = 700 + lost_each * num_requests + noise
        return soak.Sample(
            num_requests=num_requests,
            rss_mib=rss_mib,
            num_fds=9,
            num_os_threads=5,
            num_tasks=3,
            num_objects=70,
        )

    growth = soak.Growth.fit("rss_mib", [sample(count) for count in range(4000, 20001, 500)], bound=16.0)
    assert growth.is_bounded is is_bounded
    assert growth.grown == pytest.approx(16000 * lost_each, abs=1.0)
