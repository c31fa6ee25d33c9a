"""Figures as tables and pictures."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table

from aioengine.cli.figures import DOTS_PER_INCH, style_axes
from aioengine.cli.load import Summary
from serving import own
from serving.figures import Bin, Figures
from serving.own import Overload, OwnFigures, Round, Setting

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

SIZE_INCHES = (12.0, 7.4)
BLUE, RED, GREEN, GREY = "#1f6fb4", "#d1495b", "#2a9d63", "#888888"
WIDTH = 150


def print_levels(levels: dict[str, Figures], title: str) -> None:
    """One line for each load in each of three tables: what became of it, latencies, and what it cost."""
    console = Console(width=WIDTH)
    became = ("load", "req/s", "ok/s", "goodput/s", "tokens/s", "shed", "its 503 ms p50/90/99", "errors", "open")
    table = _table(title, became)
    for name, figures in levels.items():
        table.add_row(
            name,
            "all at once" if figures.rate is None else f"{figures.rate:,.1f}",
            f"{figures.requests_per_s:,.1f}",
            f"{figures.goodput_per_s:,.1f}",
            f"{figures.tokens_per_s:,.0f}",
            f"{figures.shed_share:.1%}",
            _percentiles(figures.shed_ms),
            ", ".join(_errors(figures)) or "-",
            f"{figures.num_open:.0f}",
        )
    console.print(table)
    took = ("load", "TTFT ms p50/90/99", "TPOT ms", "ITL ms", "longest stall ms p50/99/max", "E2EL ms p50/90/99")
    table = _table(None, took)
    for name, figures in levels.items():
        latencies = (figures.ttft_ms, figures.tpot_ms, figures.itl_ms)
        stalls = _percentiles(figures.stall_ms, ("p50", "p99", "max"))
        table.add_row(name, *map(_percentiles, latencies), stalls, _percentiles(figures.e2el_ms))
    console.print(table)
    cost = ("load", "tokens/event", "late ms p99", "CPU µs/token: here", "server", "busy: here", "server")
    table = _table(None, cost)
    for name, figures in levels.items():
        table.add_row(
            name,
            _optional(figures.tokens_per_event, ".2f"),
            _optional(figures.lateness_ms.p99 if figures.lateness_ms else None, ".1f"),
            *(_optional(value, ".1f") for value in (figures.client_us, figures.server_us)),
            *(_optional(value, ".2f") for value in (figures.client_busy, figures.server_busy)),
        )
    console.print(table)
    for name, figures in levels.items():
        for doubt in figures.doubts:
            console.print(f"[bold red]{name}: {doubt}[/]")


def _table(title: str | None, columns: Sequence[str]) -> Table:
    table = Table(title=title)
    for column in columns:
        table.add_column(column, justify="right")
    return table


def print_own(figures: OwnFigures) -> None:
    console = Console(width=WIDTH)
    title = f"{figures.setting.streams} streams at once, one core; medians of the rounds (least-most)"
    columns = ("server", "rounds", "tokens/s", "tokens/event", "CPU µs/token", "busy")
    table = _table(title, (*columns, "generator: µs", "busy", "others"))
    for kind, rounds in figures.sustained.items():
        table.add_row(
            kind,
            f"{len(rounds)}",
            ("at least " if own.doubt_of(rounds) else "") + _spread(rounds, lambda one: one.tokens_per_s, ",.0f"),
            _spread(rounds, lambda one: one.tokens_per_event, ".2f"),
            _spread(rounds, lambda one: one.server_us, ".1f"),
            _spread(rounds, lambda one: one.server_busy, ".2f"),
            _spread(rounds, lambda one: one.client_us, ".1f"),
            _spread(rounds, lambda one: one.client_busy, ".2f"),
            _spread(rounds, lambda one: one.others_busy, ".2f"),
        )
    if figures.sustained:
        console.print(table)
    for kind, rounds in figures.sustained.items():
        if doubt := own.doubt_of(rounds):
            console.print(f"[bold red]{kind}: {doubt}[/]")
    if any(one.is_disturbed for rounds in figures.sustained.values() for one in rounds):
        console.print("[bold red]others used these cores all the time: quote no wall-clock figure of this run[/]")
    if figures.overload is not None:
        _print_overload(console, figures.overload, figures.setting)


def _print_overload(console: Console, overload: Overload, setting: Setting) -> None:
    tried = (
        f"{one.rate:,.0f}: {one.fault or 'sustained'}{' (disturbed)' * one.is_disturbed}" for one in overload.attempts
    )
    console.print(f"requests/s tried: {'; '.join(tried)}")
    sustainable = f"sustainable: {overload.bound}{overload.capacity_per_s:,.1f}/s"
    print_levels(overload.phases, f"requests of {setting.overload_tokens} tokens, {setting.endpoint}; {sustainable}")
    for doubt in overload.doubts:
        console.print(f"[bold red]{doubt}[/]")
    full, over = overload.phases["full"], overload.phases["overload"]
    ratios = [
        f"{name} {_ratio(over_ms.p50, full_ms.p50)} (p99 {_ratio(over_ms.p99, full_ms.p99)})"
        for name, over_ms, full_ms in (
            ("TTFT", over.ttft_ms, full.ttft_ms),
            ("TPOT", over.tpot_ms, full.tpot_ms),
            ("E2EL", over.e2el_ms, full.e2el_ms),
        )
        if over_ms is not None and full_ms is not None
    ]
    console.print(f"what is accepted in the overload, by the same when it is just full: {', '.join(ratios) or '-'}")
    recovered = overload.recovered_s
    console.print(f"TTFT as before: {'never' if recovered is None else f'{recovered:.2f} s'} after the overload")
    console.print(f"others used {overload.others_busy:.2f} of the two cores meanwhile")


def _ratio(value: float, base: float) -> str:
    return f"× {value / base:.1f}" if base > 0.0 else "-"


def _spread(rounds: list[Round], of: Callable[[Round], float], form: str) -> str:
    values = [of(one) for one in rounds]
    median, least, most = (format(f(values), form) for f in (statistics.median, min, max))
    return f"{median} ({least}-{most})"


def _percentiles(summary: Summary | None, names: Sequence[str] = ("p50", "p90", "p99")) -> str:
    return "-" if summary is None else " / ".join(_ms(getattr(summary, name)) for name in names)


def _ms(value: float) -> str:
    return f"{value:,.{2 if value < 10 else 1 if value < 100 else 0}f}"


def _errors(figures: Figures) -> list[str]:
    unfinished = {"unfinished": figures.num_unfinished} if figures.num_unfinished else {}
    return [f"{count} {kind}" for kind, count in {**figures.errors, **unfinished}.items()]


def _optional(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


# Pictures


def plot_rates(levels: Sequence[Figures], title: str, path: Path) -> None:
    """Write a PNG: latencies, goodput and what was shed, over the rate."""
    figure, ((ttft, itl), (rates, shed)) = _panels(title)
    asked = [level.rate or 0.0 for level in levels]
    for axes, name, what in ((ttft, "ttft_ms", "time to first token, ms"), (itl, "itl_ms", "time between reads, ms")):
        axes.set_title(what)
        _plot_percentiles(axes, asked, [getattr(level, name) for level in levels])
    rates.set_title("requests/s")
    sent = [level.num_scheduled / level.seconds for level in levels]
    rates.plot(asked, sent, color=GREY, linestyle=":", label="sent")
    rates.plot(asked, [level.requests_per_s for level in levels], color=BLUE, marker="o", markersize=4, label="whole")
    rates.plot(asked, [level.goodput_per_s for level in levels], color=GREEN, marker="s", markersize=4, label="goodput")
    rates.legend(frameon=False)
    shed.set_title("share of requests, %")
    shed.plot(asked, [100 * level.shed_share for level in levels], color=RED, marker="o", markersize=4, label="shed")
    failed = [100 * _share_failed(level) for level in levels]
    shed.plot(asked, failed, color=GREY, marker="s", markersize=4, label="errors and unfinished")
    shed.legend(frameon=False)
    shed.set_ylim(-2, 102)
    for axes in (ttft, itl, rates, shed):
        axes.set_xlabel("requests/s sent")
    figure.savefig(path, format="png")


def plot_over_time(bins: Sequence[Bin], title: str, path: Path, marks: Sequence[float] = ()) -> None:
    """Write a PNG: the same over the time of one run; at ``marks`` the load changes."""
    figure, ((ttft, itl), (tokens, requests)) = _panels(title)
    at = [piece.at + piece.seconds / 2 for piece in bins]
    for axes, name, what in ((ttft, "ttft_ms", "time to first token, ms"), (itl, "itl_ms", "time between reads, ms")):
        axes.set_title(what)
        _plot_percentiles(axes, at, [getattr(piece, name) for piece in bins])
    tokens.set_title("tokens/s")
    tokens.plot(at, [piece.tokens_per_s for piece in bins], color=BLUE)
    requests.set_title("requests/s")
    requests.plot(at, [piece.num_scheduled / piece.seconds for piece in bins], color=GREY, linestyle=":", label="sent")
    shed = [piece.shed_share * piece.num_scheduled / piece.seconds for piece in bins]
    requests.plot(at, [piece.goodput_per_s for piece in bins], color=GREEN, label="goodput")
    requests.plot(at, shed, color=RED, label="shed")
    requests.legend(frameon=False)
    for axes in (ttft, itl, tokens, requests):
        axes.set_xlabel("s")
        for mark in marks:
            axes.axvline(mark, color=GREY, linewidth=0.8, linestyle="--")
    figure.savefig(path, format="png")


def _plot_percentiles(axes: Axes, places: Sequence[float], summaries: Sequence[Summary | None]) -> None:
    for percentile, color in (("p50", BLUE), ("p90", GREY), ("p99", RED)):
        points = [(x, getattr(s, percentile)) for x, s in zip(places, summaries, strict=True) if s is not None]
        if points:
            axes.plot(*zip(*points, strict=True), color=color, marker="o", markersize=3, label=percentile)
    if not axes.lines:
        return
    from matplotlib.ticker import FuncFormatter, LogLocator

    axes.set_yscale("log")
    axes.yaxis.set_minor_locator(LogLocator(subs=(2.0, 5.0)))
    for which in (axes.yaxis.set_major_formatter, axes.yaxis.set_minor_formatter):
        which(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.legend(frameon=False)


def _share_failed(figures: Figures) -> float:
    num_failed = sum(figures.errors.values()) + figures.num_unfinished
    return num_failed / figures.num_scheduled if figures.num_scheduled else 0.0


def _panels(title: str) -> tuple[Figure, list[list[Axes]]]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=SIZE_INCHES, dpi=DOTS_PER_INCH, layout="constrained")
    figure.suptitle(title, fontsize=13, fontweight="bold")
    panels: list[list[Axes]] = figure.subplots(2, 2).tolist()
    for row in panels:
        for axes in row:
            style_axes(axes)
    return figure, panels
