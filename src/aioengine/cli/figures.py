"""What a benchmark found: figures over requests, what they were measured on; both as a table and as a picture."""

from __future__ import annotations

import datetime
import importlib.metadata
import os
import platform
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import msgspec

import aioengine
from aioengine.cli.load import Burst, Reads, Summary, Workload, summary_of
from aioengine.engine import Engine

if TYPE_CHECKING:
    from matplotlib.axes import Axes

PLAIN_WIDTH = 140
"""Columns where there is no terminal to ask."""

DISTURBING_CORES = 0.1
"""Below this, what other programs used is not mentioned."""

SIZE_INCHES = (12.0, 4.6)
DOTS_PER_INCH = 150
SIZE_PIXELS = tuple(round(length * DOTS_PER_INCH) for length in SIZE_INCHES)

_LATENCIES = {"ttft_ms": "time to first token", "itl_ms": "inter-token latency", "e2e_ms": "end to end"}
_LINES = {"p50": ("#1f6fb4", "o"), "p99": ("#d1495b", "s")}


class Figures(msgspec.Struct, frozen=True):
    """What requests did in ``duration_s`` seconds.

    Attributes:
        ttft_ms, e2e_ms: time to the first token, and to the last.
        itl_ms: time between tokens; None where each request had but one.
        other_cores: how many of the cores that this process may use other programs used meanwhile, on average; None
            where the system does not say.
    """

    num_requests: int
    num_input_tokens: int
    num_output_tokens: int
    duration_s: float
    requests_per_s: float
    output_tokens_per_s: float
    total_tokens_per_s: float
    ttft_ms: Summary | None
    itl_ms: Summary | None
    e2e_ms: Summary | None
    other_cores: float | None = None


class Level(msgspec.Struct, frozen=True):
    """What was measured with so many requests in flight, over all repeats and of each: those differ by the noise."""

    concurrency: int
    overall: Figures
    repeats: list[Figures]


class Report(msgspec.Struct, frozen=True):
    """What ``aioengine bench`` writes as JSON.

    Attributes:
        environment: what ran, and on what: see `environment_of`.
    """

    benchmark: Literal["latency", "throughput"]
    environment: dict[str, Any]
    workload: Workload
    levels: list[Level]

    @property
    def setting(self) -> str:
        """What was asked, what ran and on what, in three lines."""
        num_engines = self.environment.get("num_engines", 1)
        times = f", {num_engines} replicas," if num_engines > 1 else ""
        threads = self.environment["num_threads"] or "torch's"
        described = {**self.environment, "threads": threads, "times": times}
        return f"{self.workload}\n" + (
            "{model}{times} in {dtype} on {device}, {threads} threads on {num_cores} cores ({machine})\n"
            "aioengine {aioengine}, torch {torch}, Python {python}; {time}"
        ).format_map(described)


def level_of(concurrency: int, bursts: list[Burst]) -> Level:
    """The figures of all bursts together, and of each."""
    return Level(concurrency, _figures_of(bursts), [_figures_of([burst]) for burst in bursts])


def environment_of(engine: Engine) -> dict[str, Any]:
    """What runs, of an engine that has started.

    ``num_threads``, of one CPU operation, are those configured; None: torch's number. ``num_cores`` are those that this
    process may use. ``time`` is UTC.
    """
    return {
        "model": engine.config.model or "the bundled model",
        "dtype": engine.info.dtype,
        "device": engine.info.device,
        "num_engines": engine.num_engines,
        "num_threads": engine.config.num_threads,
        "num_cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        "machine": platform.machine(),
        "python": platform.python_version(),
        "torch": importlib.metadata.version("torch"),
        "aioengine": aioengine.__version__,
        "time": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    }


def _figures_of(bursts: list[Burst]) -> Figures:
    requests = [request for burst in bursts for request in burst.requests]
    duration_s = sum(burst.duration_s for burst in bursts)
    num_input = sum(request.num_input_tokens for request in requests)
    num_output = sum(sum(request.sizes) for request in requests)
    others_s = [burst.other_cpu_s for burst in bursts]
    ttft_ms, itl_ms, e2e_ms = (summary_of(samples) for samples in samples_of(requests).values())
    return Figures(
        num_requests=len(requests),
        num_input_tokens=num_input,
        num_output_tokens=num_output,
        duration_s=duration_s,
        requests_per_s=len(requests) / duration_s,
        output_tokens_per_s=num_output / duration_s,
        total_tokens_per_s=(num_input + num_output) / duration_s,
        ttft_ms=ttft_ms,
        itl_ms=itl_ms,
        e2e_ms=e2e_ms,
        other_cores=None if None in others_s else sum(filter(None, others_s)) / duration_s,
    )


def samples_of(requests: list[Reads]) -> dict[str, list[float]]:
    """Seconds, by the names of the fields of `Figures`."""
    return {
        "ttft_ms": [request.ttft_s for request in requests],
        "itl_ms": [gap for request in requests for gap in request.itl_s.tolist()],
        "e2e_ms": [request.e2e_s for request in requests],
    }


def show(report: Report, *, to_stderr: bool) -> None:
    """A line for each concurrency: latencies in ms, and rates; with repeats, how far apart they lie."""
    from rich.console import Console
    from rich.table import Table

    has_repeats = report.workload.repeats > 1
    headings = ["in flight", "requests", "TTFT p50", "p99", "ITL p50", "p99", "E2E p50", "p99", "tok/s", "output tok/s"]
    table = Table(title=f"{report.benchmark.capitalize()}, latencies in ms")
    for heading in headings + ["of the repeats"] * has_repeats:
        table.add_column(heading, justify="right")
    for level in report.levels:
        overall = level.overall
        row = [str(level.concurrency), str(overall.num_requests)]
        for summary in (overall.ttft_ms, overall.itl_ms, overall.e2e_ms):
            row += ["-", "-"] if summary is None else [_number(summary.p50), _number(summary.p99)]
        row += [_number(overall.total_tokens_per_s), _number(overall.output_tokens_per_s)]
        rates = [repeat.output_tokens_per_s for repeat in level.repeats]
        table.add_row(*row, *[f"{_number(min(rates))} – {_number(max(rates))}"] * has_repeats)
    console = Console(stderr=to_stderr)
    if not console.is_terminal:
        console.width = PLAIN_WIDTH
    console.print(table)
    measured = [level.overall for level in report.levels]
    others_s = sum((figures.other_cores or 0.0) * figures.duration_s for figures in measured)
    other_cores = others_s / sum(figures.duration_s for figures in measured)
    if other_cores >= DISTURBING_CORES:
        said = f"other programs used {other_cores:.1f} of {report.environment['num_cores']} cores meanwhile"
        console.print(said, style="yellow", highlight=False)
    console.print(report.setting, highlight=False, markup=False, style="dim")


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 1000 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"


# Pictures


def plot(report: Report, requests: list[Reads], path: Path) -> None:
    """Write a PNG of `SIZE_PIXELS`.

    For "latency": p50 and p99 of each latency over the concurrency, where bars span the repeats. For "throughput": for
    each latency, the share of the samples of these requests that were no slower.
    """
    from matplotlib.figure import Figure

    # No pyplot: nothing global, no screen.
    figure = Figure(figsize=SIZE_INCHES, dpi=DOTS_PER_INCH, layout="constrained")
    what = "{model}, {dtype} on {device}".format_map(report.environment)
    figure.suptitle(f"{report.benchmark.capitalize()} ({what})", fontsize=14, fontweight="bold")
    figure.supxlabel(report.setting, fontsize=8, color="#666666")
    samples_s = samples_of(requests)
    for axes, (field, name) in zip(figure.subplots(1, len(_LATENCIES)), _LATENCIES.items(), strict=True):
        style_axes(axes)
        axes.set_title(name)
        levels = [level for level in report.levels if getattr(level.overall, field) is not None]
        if not levels:
            axes.text(0.5, 0.5, "one token each", ha="center", transform=axes.transAxes)
        elif report.benchmark == "latency":
            _plot_by_concurrency(axes, levels, field)
        else:
            axes.set_ylabel("share of tokens" if field == "itl_ms" else "share of requests")
            _plot_shares(axes, levels[0], field, samples_s[field])
    figure.savefig(path, format="png")


def style_axes(axes: Axes) -> None:
    """A light grid behind the lines, and no frame above and to the right."""
    axes.grid(color="#dddddd", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)


def _plot_by_concurrency(axes: Axes, levels: list[Level], field: str) -> None:
    concurrencies = [level.concurrency for level in levels]
    for percentile, (color, marker) in _LINES.items():
        values = [getattr(getattr(level.overall, field), percentile) for level in levels]
        axes.plot(concurrencies, values, color=color, marker=marker, markersize=5, label=percentile)
        repeats = [[getattr(getattr(one, field), percentile) for one in level.repeats] for level in levels]
        lows, highs = [min(each) for each in repeats], [max(each) for each in repeats]
        axes.vlines(concurrencies, lows, highs, color=color, linewidth=3, alpha=0.35)
    axes.set_xscale("log", base=2)
    axes.set_xticks(concurrencies, labels=[str(concurrency) for concurrency in concurrencies])
    axes.minorticks_off()
    axes.set_xlabel("requests in flight")
    axes.set_ylabel("ms")
    axes.set_ylim(bottom=0)
    axes.legend(loc="upper left", frameon=False)


def _plot_shares(axes: Axes, level: Level, field: str, samples_s: list[float]) -> None:
    axes.ecdf([1e3 * sample for sample in samples_s], color="#333333")
    for percentile, (color, _) in _LINES.items():
        value = getattr(getattr(level.overall, field), percentile)
        axes.axvline(value, color=color, linestyle="--", label=f"{percentile} {value:,.1f} ms")
    axes.set_xlabel("ms")
    axes.set_xlim(0, 1.05e3 * max(samples_s))
    axes.legend(loc="best")
