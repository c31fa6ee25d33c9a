"""`aioengine bench`: measure an engine here, its latency by concurrency, or its throughput."""

from __future__ import annotations

import datetime
import importlib.metadata
import os
import platform
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import click
import msgspec
import numpy as np

import aioengine
from aioengine.cli.command import Command, given, model_argument, open_console, options_of, run
from aioengine.cli.load import Burst, Figures, Job, Range, Workload, figures_of, send
from aioengine.config import EngineConfig, ReplicaOptions
from aioengine.engine import Engine
from aioengine.sampling_params import SamplingParams

FEWEST_REQUESTS = 8
"""The default at a concurrency; twice the concurrency where that is more."""

WARM_UP_TOKENS = 8
"""Length of the requests before a measurement: an engine does then what it does once for a batch of this size."""

WARM_UP_REQUESTS = 32
"""At most: larger batches bring little that is new."""


class Level(msgspec.Struct, frozen=True):
    """The figures at one concurrency, over all repeats and of each: repeats differ by the noise."""

    concurrency: int
    overall: Figures
    repeats: list[Figures]


class Report(msgspec.Struct, frozen=True):
    """The JSON that ``aioengine bench`` writes.

    Attributes:
        environment: what ran, and on what: see `environment_of`.
    """

    benchmark: Literal["latency", "throughput"]
    environment: dict[str, Any]
    workload: Workload
    levels: list[Level]


# The commands


def _range(text: str) -> Range:
    try:
        return Range.parse(text)
    except ValueError as error:
        raise click.BadParameter(str(error)) from None


def _concurrencies(text: str) -> list[int]:
    """``1,2,4``."""
    try:
        concurrencies = sorted({int(part) for part in text.split(",")})
    except ValueError:
        raise click.BadParameter(f"{text!r}: numbers with commas between them are needed, like 1,2,4") from None
    if concurrencies[0] < 1:
        raise click.BadParameter(f"{text!r}: at least 1 is needed")
    return concurrencies


def _check_folder(_: click.Context, __: click.Parameter, path: Path | None) -> Path | None:
    """Refuse what could not be written, before anything is measured."""
    if path is not None and not path.absolute().parent.is_dir():
        raise click.UsageError(f"{path}: there is no folder {path.parent}")
    return path


def _shared_options(output_len: str) -> Callable[[Command], Command]:
    """The flags of both benchmarks."""
    path = click.Path(dir_okay=False, writable=True, allow_dash=True, path_type=Path)
    lengths: dict[str, Any] = {"type": _range, "metavar": "N|LOW:HIGH", "show_default": True}
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
            "--json", "json_path", type=path, callback=_check_folder, help='write all figures as JSON; "-": to stdout'
        ),
        options_of(ReplicaOptions, only=("replicas", "balance")),
        options_of(EngineConfig),
        model_argument,
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
    type=_concurrencies,
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
    config = given(EngineConfig, flags)
    if replicas := given(ReplicaOptions, flags):
        config["replicas"] = ReplicaOptions(**replicas)
    environment, levels = run(_measure(counts, workload, config))
    report = Report(benchmark, environment, workload, levels)
    json_path = flags["json_path"]
    show(report, to_stderr=str(json_path) == "-")
    if json_path is not None:
        with click.open_file(str(json_path), "w", encoding="utf-8") as file:
            file.write(msgspec.json.format(msgspec.json.encode(report), indent=2).decode() + "\n")


# Measuring


async def _measure(
    counts: dict[int, int], workload: Workload, config: dict[str, Any]
) -> tuple[dict[str, Any], list[Level]]:
    """Return the environment, and the figures of each concurrency."""
    bursts: dict[int, list[Burst]] = {concurrency: [] for concurrency in counts}
    async with Engine(**config) as engine:
        jobs = Jobs(engine, workload)
        # A machine that drifts shows in the repeats of each level, not as a slope over the levels.
        for concurrency, count in [*counts.items()] * workload.repeats:
            if not bursts[concurrency]:
                # What is computed once is computed unmeasured.
                made = jobs.make(concurrency)[:WARM_UP_REQUESTS]
                short = [Job(job.prompt, min(job.num_output_tokens, WARM_UP_TOKENS)) for job in made]
                await send(engine, short, len(short), workload.temperature)
            click.echo(f"{concurrency} in flight, {count} requests", err=True)
            bursts[concurrency].append(await send(engine, jobs.make(count), concurrency, workload.temperature))
        return environment_of(engine), [level_of(*level) for level in bursts.items()]


class Jobs:
    """Makes jobs: the lengths repeat with each batch, token ids never do, so that no prefix is cached by chance.

    Raises:
        click.UsageError: the longest request does not fit the model.
    """

    def __init__(self, engine: Engine, workload: Workload) -> None:
        self._lengths = workload.input_len, workload.output_len
        (num_in, num_out), limit = (length.high for length in self._lengths), engine.info.max_model_len
        if num_in + num_out > limit:
            raise click.UsageError(
                f"{num_in} tokens in and {num_out} out are more than the {limit} that this model allows: lower "
                "--input-len or --output-len"
            )
        self._seed = workload.seed
        self._vocab_size = engine.info.vocab_size
        self._ids = np.random.default_rng([workload.seed, 1])

    def make(self, count: int) -> list[Job]:
        draws = np.random.default_rng([self._seed, 2])
        nums = [draws.integers(length.low, length.high, count, endpoint=True).tolist() for length in self._lengths]
        return [
            Job(self._ids.integers(0, self._vocab_size, num_in).tolist(), num_out)
            for num_in, num_out in zip(*nums, strict=True)
        ]


def level_of(concurrency: int, bursts: list[Burst]) -> Level:
    return Level(concurrency, figures_of(bursts), [figures_of([burst]) for burst in bursts])


def environment_of(engine: Engine) -> dict[str, Any]:
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


def show(report: Report, *, to_stderr: bool) -> None:
    """A line for each concurrency: latencies in ms, and rates; with repeats, how far apart they lie."""
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
    console = open_console(to_stderr=to_stderr)
    console.print(table)
    environment = report.environment
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
