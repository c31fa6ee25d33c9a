"""What a soak is asked to do, what it sees, and how that is told."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Self

import msgspec
import numpy as np


class Setting(msgspec.Struct, frozen=True, kw_only=True):
    """What a soak is to do.

    Attributes:
        num_requests: in all; ``num_waves`` parts of them, one after the other.
        concurrency: clients, each with one request at a time.
        num_references: requests that are answered alone first, and come again.
        warm_up: share of the waves before anything is expected to stop growing.
        max_rss_growth_mib: what memory may grow by after the warm-up.
        measures_lag: run a 1 ms ticker beside it.
        deadline_s: after so long it must stand still somewhere, and is given up.
    """

    num_requests: int = 20_000
    num_waves: int = 40
    seed: int = 0
    concurrency: int = 64
    max_in_flight: int = 1
    num_threads: int | None = None
    num_references: int = 64
    warm_up: float = 0.2
    max_rss_growth_mib: float = 16.0
    """An allocator's whims; a kilobyte lost with each request would be as much again."""
    measures_lag: bool = True
    deadline_s: float = 3600.0


class Sample(msgspec.Struct, frozen=True, kw_only=True):
    """What the process holds while the engine has nothing to do, after ``num_requests``."""

    num_requests: int
    rss_mib: float
    num_fds: int
    num_os_threads: int
    num_tasks: int
    num_objects: int
    num_cached_prefixes: int
    num_graphs: int


class Growth(msgspec.Struct, frozen=True, kw_only=True):
    """How much more of something there was at the end than after the warm-up, by a line fitted through the samples.

    Attributes:
        noise: standard deviation of the samples from that line.
        bound: what ``grown`` may be.
    """

    what: str
    first: float
    last: float
    grown: float
    noise: float
    bound: float

    @classmethod
    def fit(cls, what: str, samples: list[Sample], bound: float) -> Self:
        """By least squares, over the samples' ``num_requests``; at least two samples."""
        x = np.array([sample.num_requests for sample in samples], float)
        y = np.array([getattr(sample, what) for sample in samples], float)
        slope, start = np.polyfit(x, y, 1)
        grown, noise = slope * (x[-1] - x[0]), np.std(y - slope * x - start)
        return cls(what=what, first=float(y[0]), last=float(y[-1]), grown=float(grown), noise=float(noise), bound=bound)

    @property
    def is_bounded(self) -> bool:
        return self.grown <= self.bound


class Lag(msgspec.Struct, frozen=True, kw_only=True):
    """By how much a sleep of 1 ms was longer, in ms."""

    p50: float
    p99: float
    max: float


class Report(msgspec.Struct, kw_only=True):
    """What a soak has seen.

    Attributes:
        outcomes: requests by how they ended for their callers.
        ended: choices by how they ended in the engine.
        upsets: how often what befell the whole engine.
        num_accepted, num_ended: requests that the core took, and whose end its observers heard of.
        num_compared, num_different: requests that came again, and those whose tokens were others.
        peaks: the most that was seen of something while the engine was busy.
        violations: what is wrong, a line each; none is as it should be.
        diagnosis: where memory went, if something grew.
    """

    setting: Setting
    seconds: float = 0.0
    outcomes: dict[str, int] = {}
    ended: dict[str, int] = {}
    upsets: dict[str, int] = {}
    num_accepted: int = 0
    num_ended: int = 0
    num_compared: int = 0
    num_different: int = 0
    num_steps: int = 0
    generation_tokens: int = 0
    prompt_tokens: int = 0
    preemptions: int = 0
    prefix_cache_hit_rate: float | None = None
    peaks: dict[str, float] = {}
    samples: list[Sample] = []
    growth: list[Growth] = []
    lag: Lag | None = None
    violations: list[str] = []
    diagnosis: list[str] = []


# What the process holds


def rss_mib() -> float:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


def num_fds() -> int:
    return len(os.listdir("/proc/self/fd"))


def num_os_threads() -> int:
    return len(os.listdir("/proc/self/task"))


# Telling


def print_report(report: Report) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console(width=120)
    setting, seconds = report.setting, report.seconds
    console.print(
        f"{setting.num_requests:,} requests of {setting.concurrency} clients, depth {setting.max_in_flight}, seed "
        f"{setting.seed}: {seconds:,.0f} s, {report.num_steps:,} steps, {report.generation_tokens:,} tokens, "
        f"{report.generation_tokens / seconds:,.0f} tokens/s, {report.preemptions:,} preemptions, prefix cache hits "
        f"{report.prefix_cache_hit_rate or 0.0:.1%}"
    )
    console.print(
        f"accepted {report.num_accepted:,}, ended {report.num_ended:,}; "
        f"came again {report.num_compared:,}, with other tokens {report.num_different}"
    )
    counts: dict[str, Mapping[str, float]] = {
        "for callers": report.outcomes,
        "choices": report.ended,
        "upsets": report.upsets,
        "most": report.peaks,
    }
    table = Table("what", "how often", title="Outcomes")
    for title, counter in counts.items():
        for name, count in counter.items():
            table.add_row(f"{title}: {name}", f"{count:,.0f}")
        table.add_section()
    console.print(table)
    table = Table("what", "after warm-up", "at the end", "grown (fit)", "noise", "bound", title="Held between waves")
    for growth in report.growth:
        numbers = (growth.first, growth.last, growth.grown, growth.noise, growth.bound)
        table.add_row(growth.what, *(f"{number:,.1f}" for number in numbers))
    console.print(table)
    if report.lag is not None:
        lag = report.lag
        console.print(f"loop lag while busy, ms: p50 {lag.p50:.2f}, p99 {lag.p99:.2f}, max {lag.max:.1f}")
    for line in report.diagnosis:
        console.print(line, markup=False)
    for violation in report.violations:
        console.print(f"WRONG: {violation}", markup=False)
    if not report.violations:
        console.print("nothing is held, nothing grows, each request had one end")
