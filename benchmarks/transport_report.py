"""What `transport.py` has measured, and how it is shown."""

from __future__ import annotations

import statistics
from typing import Any

import msgspec
from rich.console import Console
from rich.table import Table

KINDS = ("in process", "a process")
NUM_CALLERS = 256
"""Who wait for an engine when it dies."""


class Run(msgspec.Struct, frozen=True, kw_only=True):
    """One measurement of one engine.

    Attributes:
        seconds: from `resume` to the last token.
        cpu_us: per token: of the caller's process, of the engine's.
        busy: shares of the time: the caller's loop, the engine's.
        latency_us: p50, p99.
    """

    num_tokens: int
    seconds: float
    cpu_us: tuple[float, float]
    busy: tuple[float, float]
    latency_us: tuple[float, float] | None = None

    @property
    def tokens_per_s(self) -> float:
        return self.num_tokens / self.seconds


class Point(msgspec.Struct, frozen=True, kw_only=True):
    """The runs of both kinds under one load; those at the same place were made one after the other."""

    load: str
    num_streams: int
    runs: dict[str, list[Run]]


class Started(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds from the call to each of these, and of the closing; None: not known."""

    phases: dict[str, float]
    close_s: float | None


class Death(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds from the death to the first and to the last of the callers' errors."""

    first_s: float
    last_s: float


class Figures(msgspec.Struct, kw_only=True):
    about: dict[str, Any]
    latency: list[Point] = []
    rate: list[Point] = []
    starts: dict[str, list[Started]] = {}
    deaths: dict[str, list[Death]] = {}


def spread(values: list[float], form: str = ",.0f", factor: float = 1.0) -> str:
    """The median, and the least and the most."""
    median, least, most = (format(factor * f(values), form) for f in (statistics.median, min, max))
    return f"{median} ({least}–{most})"


def print_figures(figures: Figures) -> None:
    console = Console(width=150)
    if figures.latency:
        title = "µs from the step's end to its reader; medians of the runs (least–most)"
        table = Table(
            "streams", "what", *KINDS, "gained by crossing", "CPU µs a token: here", "engine", "busy", title=title
        )
        for point in figures.latency:
            here, child = (point.runs[kind] for kind in KINDS)
            for place, what in enumerate(("p50", "p99")):
                columns = [[run.latency_us[place] for run in runs if run.latency_us] for runs in (here, child)]
                gained = [b - a for a, b in zip(*columns, strict=True)]
                table.add_row(
                    f"{point.num_streams}",
                    what,
                    *map(spread, columns),
                    spread(gained),
                    *(_cpu(point) if not place else []),
                )
        console.print(table)
    if figures.rate:
        title = "tokens/s, steps at once; medians of the runs (least–most)"
        table = Table("streams", "load", *KINDS, "CPU µs a token: here", "engine", "busy", title=title)
        for point in figures.rate:
            rates = [spread([run.tokens_per_s for run in point.runs[kind]]) for kind in KINDS]
            table.add_row(f"{point.num_streams}", point.load, *rates, *_cpu(point))
        console.print(table)
    if figures.starts:
        names = ("spawned", "HELLO", "device made", "READY", "serving")
        table = Table("start", *names, "closing", title="seconds from the call; medians of the runs (least–most)")
        for what, starts in figures.starts.items():
            columns = [[started.phases[name] for started in starts if name in started.phases] for name in names]
            closings = [started.close_s for started in starts if started.close_s is not None]
            table.add_row(what, *(spread(c, ".3f") if c else "" for c in (*columns, closings)))
        console.print(table)
    if figures.deaths:
        title = f"ms from the death to the errors of {NUM_CALLERS} callers; medians of the runs (least–most)"
        table = Table("death", "runs", "first error", "last error", title=title)
        for what, deaths in figures.deaths.items():
            columns = [[death.first_s for death in deaths], [death.last_s for death in deaths]]
            table.add_row(what, f"{len(deaths)}", *(spread(column, ".1f", 1e3) for column in columns))
        console.print(table)


def _cpu(point: Point) -> list[str]:
    """In process / in a process of its own; and how busy the loops of that one are."""
    here, child = (point.runs[kind] for kind in KINDS)
    median = statistics.median
    return [
        f"{median(r.cpu_us[0] for r in here):.2f} / {median(r.cpu_us[0] for r in child):.2f}",
        f"{median(r.cpu_us[1] for r in child):.2f}",
        f"{median(r.busy[0] for r in child):.2f}, {median(r.busy[1] for r in child):.2f}",
    ]
