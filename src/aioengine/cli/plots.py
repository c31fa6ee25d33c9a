"""Figures as pictures."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from aioengine.cli.figures import Level, Report, samples_of
from aioengine.cli.load import Reads

if TYPE_CHECKING:
    from matplotlib.axes import Axes

SIZE_INCHES = (12.0, 4.6)
DOTS_PER_INCH = 150
SIZE_PIXELS = tuple(round(length * DOTS_PER_INCH) for length in SIZE_INCHES)

_LATENCIES = {"ttft_ms": "time to first token", "itl_ms": "inter-token latency", "e2e_ms": "end to end"}
_LINES = {"p50": ("#1f6fb4", "o"), "p99": ("#d1495b", "s")}


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
