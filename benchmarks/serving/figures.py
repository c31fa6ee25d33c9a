"""The figures of a load on a server: percentiles, goodput, CPU time."""

from __future__ import annotations

import math
from collections import Counter

import msgspec
import numpy as np
from rich.console import Console
from rich.table import Table

from aioengine.cli.bench import Summary, summary_of
from serving.load import Record, Run

MAX_LATENESS_MS = 10.0
"""For a request in a hundred: a generator that sends later than that measures itself."""
MAX_BUSY = 0.9
"""Share of a core: above it the generator is slow to read what came."""
WIDTH = 150


class Slo(msgspec.Struct, frozen=True, kw_only=True):
    """The objectives that a request must keep to be goodput.

    Attributes:
        stall_ms: of the longest gap between two reads. A mean forgives an answer that froze for seconds.
    """

    ttft_ms: float = 1000.0
    tpot_ms: float = 50.0
    stall_ms: float = 500.0

    def is_kept(self, record: Record) -> bool:
        """Whether a request that was answered whole kept the objectives."""
        return (
            record.reads.ttft_s * 1e3 <= self.ttft_ms
            and (record.tpot_s or 0.0) * 1e3 <= self.tpot_ms
            and record.longest_gap_s * 1e3 <= self.stall_ms
        )


class Figures(msgspec.Struct, frozen=True, kw_only=True):
    """The requests that were to be sent in ``seconds`` seconds.

    Attributes:
        rate: requests/s that were to be sent on average; None: all at once.
        num_scheduled: requests that were to be sent and were not dropped.
        num_dropped: not sent in the whole run, since too many were open.
        num_unfinished: cut off at the end of the run.
        errors: how many of each kind; shed ones are none.
        requests_per_s, tokens_per_s: of requests that were answered whole, by when they were to be sent.
        tokens_per_event: of the same.
        goodput_per_s: of ``requests_per_s``, those that kept the objectives.
        ttft_ms, e2el_ms: from when a request was to be sent until its first text, and its last, was read; None: there
            are no samples. Of the same requests, as are the next three.
        tpot_ms: (last - first) / (tokens - 1).
        itl_ms: over the gaps between two reads with text, each once and whole, however many tokens came after it:
            divided by those, a freeze with a burst behind it would look like a steady stream.
        stall_ms: the longest such gap of each request.
        shed_ms: from when a request was to be sent to its whole 503.
        lateness_ms: of the generator: from when a request was to be sent to when it was.
        client_busy, server_busy: CPU seconds a second of the whole run; None without a ``server_pid``.
        client_us, server_us: µs of CPU a token of the whole run.
    """

    rate: float | None
    seconds: float
    num_scheduled: int
    num_ok: int
    num_shed: int
    num_dropped: int
    num_unfinished: int
    errors: dict[str, int]
    requests_per_s: float
    tokens_per_s: float
    tokens_per_event: float | None
    goodput_per_s: float
    ttft_ms: Summary | None
    tpot_ms: Summary | None
    itl_ms: Summary | None
    stall_ms: Summary | None
    e2el_ms: Summary | None
    shed_ms: Summary | None
    lateness_ms: Summary | None
    client_busy: float
    server_busy: float | None
    client_us: float
    server_us: float | None
    mean_output_tokens: float

    @property
    def doubts(self) -> list[str]:
        """Why these figures may be the generator's own, if there is a reason."""
        doubts = []
        is_burst = self.rate is None  # some are the last ones to be sent
        if not is_burst and self.lateness_ms is not None and self.lateness_ms.p99 > MAX_LATENESS_MS:
            doubts.append(f"the generator was late: p99 {self.lateness_ms.p99:.1f} ms")
        if self.client_busy > MAX_BUSY:
            doubts.append(f"the generator used {self.client_busy:.0%} of a core")
        if self.num_dropped:
            doubts.append(f"{self.num_dropped:,} requests were not sent: too many were open")
        return doubts


def figures_of(run: Run, begin: float, end: float, *, rate: float | None, slo: Slo) -> Figures:
    """The figures of the requests that were to be sent from ``begin`` until before ``end``."""
    seconds = end - begin
    records = [record for record in run.records if begin <= record.scheduled_at < end]
    ok = [record for record in records if record.kind == "ok"]
    shed = [record for record in records if record.kind == "shed"]
    num_tokens = sum(record.counter.num_tokens for record in ok)
    num_read = max(1, sum(record.counter.num_tokens for record in run.records))
    gaps_s = [record.reads.gaps_s for record in ok]
    return Figures(
        rate=rate,
        seconds=seconds,
        num_scheduled=len(records),
        num_ok=len(ok),
        num_shed=len(shed),
        num_dropped=run.num_dropped,
        num_unfinished=sum(record.kind == "unfinished" for record in records),
        errors=dict(Counter(record.error for record in records if record.kind == "error")),
        requests_per_s=len(ok) / seconds,
        tokens_per_s=num_tokens / seconds,
        tokens_per_event=num_tokens / sum(sum(record.counter.num_events) for record in ok) if ok else None,
        goodput_per_s=sum(slo.is_kept(record) for record in ok) / seconds,
        ttft_ms=summary_of([record.reads.ttft_s for record in ok]),
        tpot_ms=summary_of([record.tpot_s for record in ok if record.tpot_s is not None]),
        itl_ms=summary_of(np.concatenate(gaps_s)) if gaps_s else None,
        stall_ms=summary_of([record.longest_gap_s for record in ok]),
        e2el_ms=summary_of([record.reads.e2e_s for record in ok]),
        shed_ms=summary_of([record.answered_at - record.scheduled_at for record in shed]),
        lateness_ms=summary_of(
            [record.sent_at - record.scheduled_at for record in records if not math.isnan(record.sent_at)]
        ),
        client_busy=run.client_s / run.seconds,
        server_busy=None if math.isnan(run.server_s) else run.server_s / run.seconds,
        client_us=1e6 * run.client_s / num_read,
        server_us=None if math.isnan(run.server_s) else 1e6 * run.server_s / num_read,
        mean_output_tokens=num_tokens / len(ok) if ok else 0.0,
    )


def print_figures(levels: dict[str, Figures], title: str) -> None:
    """A line for each load in each of two tables, and what is doubtful."""
    console = Console(width=WIDTH)
    columns = ("load", "req/s", "ok/s", "goodput/s", "tokens/s", "shed", "its 503 ms p50/99", "errors")
    table = _table(title, (*columns, "CPU µs/token: here", "server", "busy: here", "server"))
    for name, figures in levels.items():
        unfinished = {"unfinished": figures.num_unfinished} if figures.num_unfinished else {}
        errors = [f"{count} {kind}" for kind, count in {**figures.errors, **unfinished}.items()]
        table.add_row(
            name,
            "all at once" if figures.rate is None else f"{figures.rate:,.1f}",
            *(f"{rate:,.1f}" for rate in (figures.requests_per_s, figures.goodput_per_s, figures.tokens_per_s)),
            f"{figures.num_shed}",
            _format(figures.shed_ms),
            ", ".join(errors) or "-",
            f"{figures.client_us:.1f}",
            "-" if figures.server_us is None else f"{figures.server_us:.1f}",
            f"{figures.client_busy:.2f}",
            "-" if figures.server_busy is None else f"{figures.server_busy:.2f}",
        )
    console.print(table)
    table = _table(None, ("load", "TTFT ms p50/99", "TPOT ms", "ITL ms", "longest stall ms", "E2EL ms", "late ms"))
    for name, figures in levels.items():
        summaries = (figures.ttft_ms, figures.tpot_ms, figures.itl_ms, figures.stall_ms, figures.e2el_ms)
        table.add_row(name, *map(_format, (*summaries, figures.lateness_ms)))
    console.print(table)
    for name, figures in levels.items():
        for doubt in figures.doubts:
            console.print(f"[bold red]{name}: {doubt}[/]")


def _table(title: str | None, columns: tuple[str, ...]) -> Table:
    table = Table(title=title)
    for column in columns:
        table.add_column(column, justify="right")
    return table


def _format(summary: Summary | None) -> str:
    return "-" if summary is None else " / ".join(f"{value:,.1f}" for value in (summary.p50, summary.p99))
