"""The rate of requests that a server sustains: tried by open loops of a moment each.

A closed loop would not find it: its workers begin all at once, and what is shed then is no sign of the rate.
"""

from __future__ import annotations

import math

import msgspec
import numpy as np

from serving.figures import MAX_BUSY, Slo, figures_of
from serving.load import Run

MAX_TTFT_MS = 100.0
"""Of the 99th percentile. It is ten times what it is on a quiet server, and less than a full queue makes of it."""
MAX_GROWTH = 1.5
"""Of the median latency, from the first third of an attempt to its last: beyond it a queue is growing that would be
shed in a longer one."""
MAX_SLOWDOWN = 2.0
"""Of the median latency in the last third of an attempt, by that at a light load. A server of hundreds of places takes
many seconds to fill them at a rate that is a tenth too high, and is slow long before it sheds."""
NEAR_ENOUGH = 1.06
"""Between a rate that is sustained and one that is not: the arrivals in an attempt differ by as much, at random."""


class Attempt(msgspec.Struct, frozen=True, kw_only=True):
    """A rate, and what came of it.

    Attributes:
        fault: why it is not sustained; empty: it is.
        is_disturbed: others used the cores.
        growth, slowdown: of the latency, see above.
        client_busy: CPU seconds a second of the generator.
    """

    rate: float
    fault: str
    ttft_p99_ms: float | None
    growth: float
    slowdown: float
    is_disturbed: bool
    client_busy: float | None


class Search(msgspec.Struct, kw_only=True):
    """Doubles the rate until one is not sustained, or halves it until one is; then takes the geometric mean of both."""

    first: float
    attempts: list[Attempt] = []

    @property
    def next_rate(self) -> float:
        sustained, failed = self._sustained, self._failed
        if failed is None:
            return self.first if sustained is None else 2.0 * sustained
        return failed / 2.0 if sustained is None else math.sqrt(sustained * failed)

    @property
    def is_over(self) -> bool:
        sustained, failed = self._sustained, self._failed
        return sustained is not None and failed is not None and failed <= NEAR_ENOUGH * sustained

    @property
    def rate(self) -> float:
        """The highest one that was sustained; where none was, the lowest one that was tried."""
        tried = [attempt.rate for attempt in self.attempts]
        return self._sustained if self._sustained is not None else min(tried, default=self.first)

    @property
    def bound(self) -> str:
        """What to say before the rate, where it is but a bound."""
        return "below " if self._sustained is None else "at least " * bool(self.doubts)

    @property
    def doubts(self) -> list[str]:
        """Why the sustainable rate may be another."""
        if self._sustained is None:
            return ["no rate was sustained: the sustainable one is lower than the lowest that was tried"]
        if not self.is_over:
            below = f", and less than {self._failed:,.0f}/s" if self._failed is not None else ""
            return [f"the search ended early: the server sustains at least so much{below}"]
        beyond = next(one for one in self.attempts if one.rate == self._failed)
        reasons = []
        if beyond.is_disturbed:
            reasons.append(f"others used the cores when {beyond.rate:,.0f}/s failed")
        if beyond.client_busy is not None and beyond.client_busy > MAX_BUSY:
            reasons.append(f"the generator used {beyond.client_busy:.0%} of its core")
        return [f"{reason}: the server sustains at least so much" for reason in reasons]

    @property
    def _sustained(self) -> float | None:
        return max((one.rate for one in self.attempts if not one.fault), default=None)

    @property
    def _failed(self) -> float | None:
        return min((one.rate for one in self.attempts if one.fault), default=None)


def attempt_of(run: Run, rate: float, seconds: float, *, light_s: float, is_disturbed: bool) -> Attempt:
    """Sustained is a rate at which all are answered whole, soon, and the last ones as soon as the first ones.

    Args:
        light_s: the median E2EL at a light load.
    """
    figures = figures_of(run, 0.0, seconds, rate=rate, slo=Slo())
    ttft_p99_ms = None if figures.ttft_ms is None else figures.ttft_ms.p99
    # Nothing is said where one of these is empty.
    first_s = median_e2el_s(run, 0.0, seconds / 3) or light_s
    last_s = median_e2el_s(run, seconds * 2 / 3, seconds) or first_s
    growth, slowdown = last_s / first_s, last_s / light_s
    num_broken = figures.num_scheduled - figures.num_ok - figures.num_shed
    if figures.num_shed:
        fault = f"{figures.shed_share:.1%} shed"
    elif num_broken:
        fault = f"{num_broken} broken or unfinished"
    elif ttft_p99_ms is not None and ttft_p99_ms > MAX_TTFT_MS:
        fault = f"TTFT p99 {ttft_p99_ms:.0f} ms"
    elif growth > MAX_GROWTH:
        fault = f"E2EL × {growth:.1f} at its end"
    else:
        fault = f"E2EL × {slowdown:.1f} of a light load's" if slowdown > MAX_SLOWDOWN else ""
    return Attempt(
        rate=rate,
        fault=fault,
        ttft_p99_ms=ttft_p99_ms,
        growth=growth,
        slowdown=slowdown,
        is_disturbed=is_disturbed,
        client_busy=figures.client_busy,
    )


def median_e2el_s(run: Run, begin: float, end: float) -> float | None:
    """Of the requests that were to be sent from ``begin`` until before ``end`` and answered whole; None: of none."""
    sent = [record for record in run.records if record.kind == "ok" and begin <= record.scheduled_at < end]
    return float(np.median([record.reads.e2e_s for record in sent])) if sent else None
