"""Figures as tables."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence

from rich.console import Console
from rich.table import Table

from aioengine.cli.load import Summary
from serving import own
from serving.figures import Figures
from serving.own import Overload, OwnFigures, Round, Setting

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
