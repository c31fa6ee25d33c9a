"""`aioengine bench`: measure an engine here, its latency by concurrency, or its throughput."""

from __future__ import annotations

import datetime
import importlib.metadata
import os
import platform
import sys
from collections.abc import Callable
from typing import Any, Literal

import click
import msgspec
import numpy as np

import aioengine
from aioengine.cli.command import Command, add_flags, add_model_argument, open_console, read_flags, run
from aioengine.cli.load import Figures, Job, Range, Repeat, figures_of, send
from aioengine.config import EngineConfig, ReplicaOptions
from aioengine.engine import Engine
from aioengine.sampling_params import SamplingParams

FEWEST_REQUESTS = 8
"""The default at a concurrency; twice the concurrency where that is more."""

WARM_UP_TOKENS = 8
"""Length of the requests before a measurement: an engine does then what it does once for a batch of this size."""

WARM_UP_REQUESTS = 32
"""At most: larger batches bring little that is new."""


class Workload(msgspec.Struct, frozen=True):
    """The requests of a benchmark: prompts of random token ids."""

    input_len: Range
    output_len: Range
    temperature: float
    seed: int
    repeats: int

    def __str__(self) -> str:
        sampling = "greedy" if self.temperature == 0 else f"temperature {self.temperature}"
        lengths = f"{self.input_len} random tokens in, {self.output_len} tokens out"
        return f"{lengths}, {sampling}, seed {self.seed}, {self.repeats} repeats"


class Report(msgspec.Struct, frozen=True):
    """The JSON that ``aioengine bench`` writes; ``environment`` is that of `describe_environment`."""

    benchmark: Literal["latency", "throughput"]
    environment: dict[str, Any]
    workload: Workload
    levels: list[Figures]


# The commands


def _read_range(text: str) -> Range:
    try:
        return Range.parse(text)
    except ValueError as error:
        raise click.BadParameter(str(error)) from None


def _read_concurrencies(text: str) -> list[int]:
    try:
        concurrencies = sorted({int(part) for part in text.split(",")})
    except ValueError:
        raise click.BadParameter(f"{text!r}: numbers with commas between them are needed, like 1,2,4") from None
    if concurrencies[0] < 1:
        raise click.BadParameter(f"{text!r}: at least 1 is needed")
    return concurrencies


def _shared_options(output_len: str) -> Callable[[Command], Command]:
    """The flags of both benchmarks."""
    lengths: dict[str, Any] = {"type": _read_range, "metavar": "N|LOW:HIGH", "show_default": True}
    options: list[Callable[[Command], Command]] = [
        click.option("--input-len", default="64", help="tokens of a prompt, drawn by --seed", **lengths),
        click.option("--output-len", default=output_len, help="tokens of an answer", **lengths),
        click.option("--temperature", type=float, default=0.0, show_default=True, help="0 is greedy"),
        click.option("--seed", type=click.IntRange(0), default=0, show_default=True, help="of lengths and tokens"),
        click.option(
            "--repeats", type=click.IntRange(1), default=3, show_default=True,
            help="measure everything so often: how far apart the repeats lie is the noise",
        ),
        click.option(
            "--json", "json_file", type=click.File("w", "utf-8", lazy=False),
            help='write all figures as JSON; "-": to stdout',
        ),
        add_flags(ReplicaOptions, only=("replicas", "balance")),
        add_flags(EngineConfig),
        add_model_argument,
    ]  # fmt: skip

    def decorate(command: Command) -> Command:
        for option in reversed(options):
            command = option(command)
        return command

    return decorate


@click.group()
def bench() -> None:
    """Measure an engine on this machine."""


@bench.command()
@click.option(
    "--concurrency",
    type=_read_concurrencies,
    metavar="N,N,...",
    default="1,2,4,8,16,32,64",
    show_default=True,
    help="requests in flight; each that ends is followed by the next",
)
@click.option(
    "--num-requests",
    type=click.IntRange(1),
    help=f"at each concurrency of not more; absent: {FEWEST_REQUESTS}, or twice the concurrency if that is more",
)
@_shared_options(output_len="32")
def latency(concurrency: list[int], num_requests: int | None, **flags: Any) -> None:
    """How long MODEL (absent: the bundled one) takes for requests, by how many are in flight.

    A closed loop: at each concurrency so many clients each send a request, read it to its end, and send the next.
    Every request runs to its full length, past any end-of-sequence token.
    """
    levels = [level for level in concurrency if num_requests is None or level <= num_requests] or concurrency
    counts = {level: num_requests or max(FEWEST_REQUESTS, 2 * level) for level in levels}
    _measure_and_report("latency", counts, flags)


@bench.command()
@click.option("--num-prompts", type=click.IntRange(1), default=128, show_default=True, help="sent all at once")
@_shared_options(output_len="64")
def throughput(num_prompts: int, **flags: Any) -> None:
    """How much MODEL (absent: the bundled one) gets done when all requests come at once.

    Every request runs to its full length, past any end-of-sequence token.
    """
    _measure_and_report("throughput", {num_prompts: num_prompts}, flags)


def _measure_and_report(
    benchmark: Literal["latency", "throughput"], counts: dict[int, int], flags: dict[str, Any]
) -> None:
    """Measure ``counts``, the number of requests by concurrency; then print the table, and write the JSON."""
    workload = Workload(**{name: flags[name] for name in Workload.__struct_fields__})
    SamplingParams(temperature=workload.temperature)  # a bad one is refused before the model is loaded
    config = read_flags(EngineConfig, flags)
    if replicas := read_flags(ReplicaOptions, flags):
        config["replicas"] = ReplicaOptions(**replicas)
    report = Report(benchmark, *run(_measure(counts, workload, config)))
    file = flags["json_file"]
    show_report(report, to_stderr=file is not None and file.name == "<stdout>")
    if file is not None:
        file.write(msgspec.json.format(msgspec.json.encode(report), indent=2).decode() + "\n")


# Measuring


async def _measure(
    counts: dict[int, int], workload: Workload, config: dict[str, Any]
) -> tuple[dict[str, Any], Workload, list[Figures]]:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    repeats: dict[int, list[Repeat]] = {concurrency: [] for concurrency in counts}
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    console, is_hidden = Console(stderr=True), not sys.stderr.isatty()
    # Two refreshes a second: the bar runs on the cores that are being measured.
    bar = Progress(*columns, console=console, transient=True, refresh_per_second=2, disable=is_hidden)
    async with Engine(**config) as engine:
        with bar:
            task = bar.add_task("warming up", total=workload.repeats * sum(counts.values()))
            # A machine that drifts shows in the repeats of each level, not as a slope over the levels.
            for batch, (concurrency, count) in enumerate([*counts.items()] * workload.repeats, len(counts)):
                if not repeats[concurrency]:
                    # What is computed once is computed unmeasured.
                    made = make_jobs(engine, workload, min(concurrency, WARM_UP_REQUESTS), batch - len(counts))
                    short = [(ids, min(num, WARM_UP_TOKENS)) for ids, num in made]
                    await send(engine, short, len(short), workload.temperature)
                bar.update(task, description=f"{concurrency} in flight")
                jobs = make_jobs(engine, workload, count, batch)
                burst = await send(engine, jobs, concurrency, workload.temperature, lambda: bar.advance(task))
                repeats[concurrency].append(burst)
        return describe_environment(engine), workload, [figures_of(*level) for level in repeats.items()]


def make_jobs(engine: Engine, workload: Workload, count: int, batch: int) -> list[Job]:
    """Draw a batch: the lengths repeat with each, token ids never do, so that no prefix is cached by chance.

    Raises:
        click.UsageError: the longest request does not fit the model.
    """
    lengths, limit = (workload.input_len, workload.output_len), engine.info.max_model_len
    num_in, num_out = (length.high for length in lengths)
    if num_in + num_out > limit:
        raise click.UsageError(
            f"{num_in} tokens in and {num_out} out are more than the {limit} that this model allows: lower --input-len "
            "or --output-len"
        )
    ids, draws = np.random.default_rng([workload.seed, 1, batch]), np.random.default_rng([workload.seed, 2])
    nums = [draws.integers(length.low, length.high, count, endpoint=True).tolist() for length in lengths]
    return [(ids.integers(0, engine.info.vocab_size, num).tolist(), out) for num, out in zip(*nums, strict=True)]


def describe_environment(engine: Engine) -> dict[str, Any]:
    """Describe an engine that has started, and its machine.

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


# The table


def show_report(report: Report, *, to_stderr: bool) -> None:
    """A line for each concurrency: latencies in ms, and rates; with repeats, how far apart they lie."""
    from rich.table import Table

    has_repeats = report.workload.repeats > 1
    headings = ["in flight", "requests", "TTFT p50", "p99", "ITL p50", "p99", "E2E p50", "p99", "tok/s", "output tok/s"]
    table = Table(title=f"{report.benchmark.capitalize()}, latencies in ms")
    for heading in headings + ["of the repeats"] * has_repeats:
        table.add_column(heading, justify="right")
    for level in report.levels:
        row = [str(level.concurrency), str(level.num_requests)]
        for summary in (level.ttft_ms, level.itl_ms, level.e2e_ms):
            row += ["-", "-"] if summary is None else [_number(summary.p50), _number(summary.p99)]
        row += [_number(level.total_tokens_per_s), _number(level.output_tokens_per_s)]
        rates = level.repeats
        table.add_row(*row, *[f"{_number(min(rates))} – {_number(max(rates))}"] * has_repeats)
    console = open_console(to_stderr=to_stderr)
    console.print(table)
    environment = report.environment
    others_s = sum((level.other_cores or 0.0) * level.duration_s for level in report.levels)
    other_cores = others_s / sum(level.duration_s for level in report.levels)
    if other_cores >= 0.1:  # less does not disturb
        used = f"other programs used {other_cores:.1f} of {environment['num_cores']} cores meanwhile"
        console.print(used, style="yellow")
    num_engines = environment.get("num_engines", 1)
    times = f", {num_engines} replicas," if num_engines > 1 else ""
    threads = environment["num_threads"] or "torch's"
    setting = f"{report.workload}\n" + (
        "{model}{times} in {dtype} on {device}, {threads} threads on {num_cores} cores ({machine})\n"
        "aioengine {aioengine}, torch {torch}, Python {python}; {time}"
    ).format_map({**environment, "threads": threads, "times": times})
    console.print(setting, markup=False, style="dim")


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 1000 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"
