"""Figures as tables on a terminal, and the bar while they are being measured."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING

from aioengine.cli.figures import Environment, Figures, LatencyReport, Summary, ThroughputReport, Workload

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

PLAIN_WIDTH = 120
"""Columns where there is no terminal to ask."""

DISTURBING_CORES = 0.1
"""Where other programs used less than this, they are not mentioned."""

_RATES = {"requests": "requests_per_s", "output tokens": "output_tokens_per_s", "all tokens": "total_tokens_per_s"}
_LATENCIES = {"time to first token": "ttft_ms", "inter-token latency": "itl_ms", "end to end": "e2e_ms"}


@contextlib.contextmanager
def progress_bar(total: int) -> Iterator[Callable[[str], None]]:
    """A bar on stderr, if that is a terminal; to be called with a title each time that one of ``total`` is done."""
    if not sys.stderr.isatty():
        yield lambda _: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    # Two refreshes a second: the bar runs on the cores that are being measured.
    with Progress(*columns, console=Console(stderr=True), transient=True, refresh_per_second=2) as bar:
        task = bar.add_task("warming up", total=total)
        yield lambda title: bar.update(task, advance=1, description=title)


def show_latency(report: LatencyReport, *, to_stderr: bool) -> None:
    """A line for each concurrency, in ms; with repeats, how far apart they lie."""
    from rich.table import Table

    has_repeats = report.workload.repeats > 1
    table = Table(title="Latency in ms, by requests in flight")
    for heading in ("in flight", "requests", "TTFT p50", "p99", "ITL p50", "p99", "E2E p50", "p99", "output tok/s"):
        table.add_column(heading, justify="right")
    if has_repeats:
        table.add_column("E2E p50, repeats", justify="right")
    for level in report.levels:
        overall = level.measured.overall
        row = [str(level.concurrency), str(overall.num_requests)]
        for summary in (overall.ttft_ms, overall.itl_ms, overall.e2e_ms):
            row += ["-", "-"] if summary is None else [_number(summary.p50), _number(summary.p99)]
        row.append(_number(overall.output_tokens_per_s))
        if has_repeats:
            row.append(_between(repeat.e2e_ms.p50 for repeat in level.measured.repeats))
        table.add_row(*row)
    console = _console(to_stderr)
    console.print(table)
    _show_what_ran(console, report.environment, report.workload, [level.measured.overall for level in report.levels])


def show_throughput(report: ThroughputReport, *, to_stderr: bool) -> None:
    """Rates, and latencies in ms; with repeats, how far apart they lie."""
    console = _console(to_stderr)
    console.print(_rates(report))
    console.print(_latencies(report))
    _show_what_ran(console, report.environment, report.workload, [report.measured.overall])


def _rates(report: ThroughputReport) -> Table:
    from rich.table import Table

    overall, repeats = report.measured.overall, report.measured.repeats
    table = Table("", title=f"Throughput, {repeats[0].num_requests} requests at once")
    table.add_column("per second", justify="right")
    if len(repeats) > 1:
        table.add_column(f"{len(repeats)} repeats", justify="right")
    for name, field in _RATES.items():
        row = [name, _number(getattr(overall, field))]
        if len(repeats) > 1:
            row.append(_between(getattr(repeat, field) for repeat in repeats))
        table.add_row(*row)
    return table


def _latencies(report: ThroughputReport) -> Table:
    from rich.table import Table

    overall, repeats = report.measured.overall, report.measured.repeats
    table = Table("", title="Latency in ms")
    for heading in ("mean", "p50", "p90", "p99"):
        table.add_column(heading, justify="right")
    if len(repeats) > 1:
        table.add_column(f"p50, {len(repeats)} repeats", justify="right")
    for name, field in _LATENCIES.items():
        summary: Summary | None = getattr(overall, field)
        if summary is not None:
            row = [name, *map(_number, (summary.mean, summary.p50, summary.p90, summary.p99))]
            if len(repeats) > 1:
                row.append(_between(getattr(repeat, field).p50 for repeat in repeats))
            table.add_row(*row)
    return table


def _show_what_ran(console: Console, environment: Environment, workload: Workload, measured: list[Figures]) -> None:
    others_s = sum((figures.other_cores or 0.0) * figures.duration_s for figures in measured)
    other_cores = others_s / sum(figures.duration_s for figures in measured)
    if other_cores >= DISTURBING_CORES:
        console.print(
            f"other programs used {other_cores:.1f} of {environment.num_cores} cores meanwhile",
            style="yellow",
            highlight=False,
        )
    console.print(f"{workload}\n{environment}", highlight=False, markup=False, style="dim")


def _console(to_stderr: bool) -> Console:
    from rich.console import Console

    console = Console(stderr=to_stderr)
    if not console.is_terminal:
        console.width = PLAIN_WIDTH
    return console


def _between(values: Iterable[float]) -> str:
    numbers = list(values)
    return f"{_number(min(numbers))} – {_number(max(numbers))}"


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 1000 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"
