"""Figures as tables on a terminal and as pictures, and the bar while they are being measured."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import click

from aioengine.cli.figures import Environment, Figures, LatencyReport, Level, ThroughputReport, samples_of
from aioengine.cli.load import Summary, Timing, Workload

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from rich.console import Console
    from rich.table import Table

PLAIN_WIDTH = 120
"""Columns where there is no terminal to ask."""

DISTURBING_CORES = 0.1
"""Below this, what other programs used is not mentioned."""

SIZE_INCHES = (12.0, 4.6)
DOTS_PER_INCH = 150
SIZE_PIXELS = tuple(round(length * DOTS_PER_INCH) for length in SIZE_INCHES)

_RATES = {"requests": "requests_per_s", "output tokens": "output_tokens_per_s", "all tokens": "total_tokens_per_s"}
_LATENCIES = {"ttft_ms": "time to first token", "itl_ms": "inter-token latency", "e2e_ms": "end to end"}
_LINES = {"p50": ("#1f6fb4", "o"), "p99": ("#d1495b", "s")}


@contextlib.contextmanager
def progress_bar(total: int) -> Iterator[Callable[[int], None]]:
    """A bar on stderr, if that is a terminal; yields what to call with the concurrency as each of ``total`` ends."""
    if not sys.stderr.isatty():
        yield lambda _: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    # Two refreshes a second: the bar runs on the cores that are being measured.
    with Progress(*columns, console=Console(stderr=True), transient=True, refresh_per_second=2) as bar:
        task = bar.add_task("warming up", total=total)
        yield lambda concurrency: bar.update(task, advance=1, description=f"{concurrency} in flight")


def show_latency(report: LatencyReport, *, to_stderr: bool) -> None:
    """A line for each concurrency, in ms; with repeats, how far apart they lie."""
    has_repeats = report.workload.repeats > 1
    headings = ["in flight", "requests", "TTFT p50", "p99", "ITL p50", "p99", "E2E p50", "p99", "output tok/s"]
    rows = []
    for level in report.levels:
        overall, repeats = level.measured.overall, level.measured.repeats
        row = [str(level.concurrency), str(overall.num_requests)]
        for summary in (overall.ttft_ms, overall.itl_ms, overall.e2e_ms):
            row += ["-", "-"] if summary is None else [_number(summary.p50), _number(summary.p99)]
        between = [_between(repeat.e2e_ms.p50 for repeat in repeats)] if has_repeats else []
        rows.append([*row, _number(overall.output_tokens_per_s), *between])
    console = _console(to_stderr)
    title = "Latency in ms, by requests in flight"
    console.print(_table(title, headings + ["E2E p50, repeats"] * has_repeats, rows, justify="right"))
    _show_what_ran(console, report.environment, report.workload, [level.measured.overall for level in report.levels])


def show_throughput(report: ThroughputReport, *, to_stderr: bool) -> None:
    """Rates, and latencies in ms; with repeats, how far apart they lie."""
    overall, repeats = report.measured.overall, report.measured.repeats
    num_repeats, has_repeats = len(repeats), len(repeats) > 1
    rates = []
    for name, field in _RATES.items():
        between = [_between(getattr(repeat, field) for repeat in repeats)] if has_repeats else []
        rates.append([name, _number(getattr(overall, field)), *between])
    latencies = []
    for field, name in _LATENCIES.items():
        summary: Summary | None = getattr(overall, field)
        if summary is not None:
            between = [_between(getattr(repeat, field).p50 for repeat in repeats)] if has_repeats else []
            percentiles = map(_number, (summary.mean, summary.p50, summary.p90, summary.p99))
            latencies.append([name, *percentiles, *between])
    console = _console(to_stderr)
    title = f"Throughput, {repeats[0].num_requests} requests at once"
    console.print(_table(title, ["", "per second"] + [f"{num_repeats} repeats"] * has_repeats, rates))
    headings = ["", "mean", "p50", "p90", "p99"]
    console.print(_table("Latency in ms", headings + [f"p50, {num_repeats} repeats"] * has_repeats, latencies))
    _show_what_ran(console, report.environment, report.workload, [overall])


def _table(title: str, headings: list[str], rows: list[list[str]], justify: Literal["left", "right"] = "left") -> Table:
    """Numbers stand to the right; ``justify`` is of the first column."""
    from rich.table import Table

    table = Table(title=title)
    for number, heading in enumerate(headings):
        table.add_column(heading, justify="right" if number else justify)
    for row in rows:
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


# Pictures


def check_matplotlib() -> None:
    """Make sure, before anything is measured, that a picture can be drawn.

    Raises:
        click.UsageError: matplotlib is not installed; says how to install it.
    """
    try:
        import matplotlib  # noqa: F401 - whether it is there is the question
    except ImportError:
        raise click.UsageError("--plot needs matplotlib: pip install 'aioengine[bench]'") from None


def plot_latency(report: LatencyReport, path: Path) -> None:
    """Write a PNG of `SIZE_PIXELS`: p50 and p99 of each latency over the concurrency; bars span the repeats."""
    figure, panels = _panels("Latency by concurrency", report)
    for axes, (field, name) in zip(panels, _LATENCIES.items(), strict=True):
        levels = [level for level in report.levels if getattr(level.measured.overall, field) is not None]
        axes.set_title(name)
        axes.set_xlabel("requests in flight")
        axes.set_ylabel("ms")
        if not levels:
            axes.text(0.5, 0.5, "one token each", ha="center", transform=axes.transAxes)
            continue
        for percentile, (color, marker) in _LINES.items():
            _draw_line(axes, levels, field, percentile, color, marker)
        _scale_concurrency(axes, [level.concurrency for level in levels])
        axes.set_ylim(bottom=0)
        axes.legend(loc="upper left", frameon=False)
    figure.savefig(path, format="png")


def plot_throughput(report: ThroughputReport, timings: list[Timing], path: Path) -> None:
    """Write a PNG of `SIZE_PIXELS`: for each latency, the share of samples that were no slower."""
    overall = report.measured.overall
    rates = f"{overall.requests_per_s:,.1f} requests/s, {overall.output_tokens_per_s:,.0f} output tokens/s"
    figure, panels = _panels(f"Throughput: {rates}", report)
    samples_s = samples_of(timings)
    for axes, (field, name) in zip(panels, _LATENCIES.items(), strict=True):
        axes.set_title(name)
        axes.set_xlabel("ms")
        axes.set_ylabel("share of tokens" if field == "itl_ms" else "share of requests")
        if samples_s[field]:
            axes.ecdf([1e3 * sample for sample in samples_s[field]], color="#333333")
            summary = getattr(overall, field)
            for percentile, (color, _) in _LINES.items():
                value = getattr(summary, percentile)
                axes.axvline(value, color=color, linestyle="--", label=f"{percentile} {value:,.1f} ms")
            axes.legend(loc="best")
            axes.set_xlim(0, 1.05e3 * max(samples_s[field]))
    figure.savefig(path, format="png")


def _panels(title: str, report: LatencyReport | ThroughputReport) -> tuple[Figure, list[Axes]]:
    from matplotlib.figure import Figure

    # No pyplot: nothing global, no screen.
    figure = Figure(figsize=SIZE_INCHES, dpi=DOTS_PER_INCH, layout="constrained")
    environment, repeats = report.environment, report.workload.repeats
    what = f"{environment.model}, {environment.dtype} on {environment.device}"
    figure.suptitle(f"{title} ({what})", fontsize=14, fontweight="bold")
    small_print = f"{report.workload}{f', {repeats} repeats' if repeats > 1 else ''}\n{environment}"
    figure.supxlabel(small_print, fontsize=8, color="#666666")
    panels: list[Axes] = list(figure.subplots(1, len(_LATENCIES)))
    for axes in panels:
        style_axes(axes)
    return figure, panels


def style_axes(axes: Axes) -> None:
    """A light grid behind the lines, and no frame above and to the right."""
    axes.grid(color="#dddddd", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)


def _draw_line(axes: Axes, levels: list[Level], field: str, percentile: str, color: str, marker: str) -> None:
    concurrencies = [level.concurrency for level in levels]
    values = [getattr(getattr(level.measured.overall, field), percentile) for level in levels]
    axes.plot(concurrencies, values, color=color, marker=marker, markersize=5, label=percentile)
    repeats = [[getattr(getattr(one, field), percentile) for one in level.measured.repeats] for level in levels]
    if all(len(values_of_level) > 1 for values_of_level in repeats):
        lows, highs = [min(values_of_level) for values_of_level in repeats], [max(v) for v in repeats]
        axes.vlines(concurrencies, lows, highs, color=color, linewidth=3, alpha=0.35, label=f"{percentile} of repeats")


def _scale_concurrency(axes: Axes, concurrencies: list[int]) -> None:
    axes.set_xscale("log", base=2)
    axes.set_xticks(concurrencies, labels=[str(concurrency) for concurrency in concurrencies])
    axes.minorticks_off()
