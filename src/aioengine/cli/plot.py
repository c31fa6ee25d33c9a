"""Figures as a picture: matplotlib, drawn without a screen."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from aioengine.cli.figures import LatencyReport, Level, ThroughputReport
from aioengine.cli.load import Timing

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

SIZE_INCHES = (12.0, 4.6)
DOTS_PER_INCH = 150
SIZE_PIXELS = tuple(round(length * DOTS_PER_INCH) for length in SIZE_INCHES)

_LATENCIES = {"ttft_ms": "time to first token", "itl_ms": "inter-token latency", "e2e_ms": "end to end"}
_LINES = {"p50": ("#1f6fb4", "o"), "p99": ("#d1495b", "s")}


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
    samples_s = {
        "ttft_ms": [timing.ttft_s for timing in timings],
        "itl_ms": [gap for timing in timings for gap in timing.itl_s],
        "e2e_ms": [timing.e2e_s for timing in timings],
    }
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

    figure = Figure(
        figsize=SIZE_INCHES, dpi=DOTS_PER_INCH, layout="constrained"
    )  # no pyplot: nothing global, no screen
    environment, repeats = report.environment, report.workload.repeats
    what = f"{environment.model}, {environment.dtype} on {environment.device}"
    figure.suptitle(f"{title} ({what})", fontsize=14, fontweight="bold")
    small_print = f"{report.workload}{f', {repeats} repeats' if repeats > 1 else ''}\n{environment}"
    figure.supxlabel(small_print, fontsize=8, color="#666666")
    panels: list[Axes] = list(figure.subplots(1, len(_LATENCIES)))
    for axes in panels:
        axes.grid(color="#dddddd", linewidth=0.8)
        axes.set_axisbelow(True)
        axes.spines[["top", "right"]].set_visible(False)
    return figure, panels


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
