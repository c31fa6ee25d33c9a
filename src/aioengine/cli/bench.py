"""`aioengine bench`: what an engine does here, measured: latency by concurrency, and throughput."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal

import click
import msgspec

from aioengine.cli.command import Command, given, model_argument, options_of, run
from aioengine.cli.figures import Report, environment_of, level_of, plot, show
from aioengine.cli.load import Burst, Job, Jobs, Range, Workload, send
from aioengine.config import EngineConfig, ReplicaOptions
from aioengine.engine import Engine
from aioengine.sampling_params import SamplingParams

FEWEST_REQUESTS = 8
"""At a concurrency, unless told otherwise; twice the concurrency where that is more."""

WARM_UP_TOKENS = 8
"""Of each request before a measurement: what an engine does once for a batch of this size is done then."""

WARM_UP_REQUESTS = 32
"""At most: larger batches bring little that is new."""


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


def _check_file(_: click.Context, option: click.Parameter, path: Path | None) -> Path | None:
    """Refuse what could not be written, before anything is measured."""
    if path is not None and not path.absolute().parent.is_dir():
        raise click.UsageError(f"{path}: there is no folder {path.parent}")
    if path is not None and option.name == "plot_path":
        try:
            import matplotlib  # noqa: F401 - whether it is there is the question
        except ImportError:
            raise click.UsageError("--plot needs matplotlib: pip install 'aioengine[bench]'") from None
    return path


def _shared_options(output_len: str) -> Callable[[Command], Command]:
    """What both benchmarks take."""
    path = click.Path(dir_okay=False, writable=True, allow_dash=True, path_type=Path)
    file: dict[str, Any] = {"type": path, "callback": _check_file}
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
        click.option("--json", "json_path", help='write all figures as JSON; "-": to stdout', **file),
        click.option("--plot", "plot_path", help="draw them as PNG", **file),
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
    help=f"at each concurrency; absent: {FEWEST_REQUESTS}, or twice the concurrency if that is more",
)
@_shared_options(output_len="32")
def latency(concurrency: list[int], num_requests: int | None, **flags: Any) -> None:
    """How long MODEL (absent: the bundled one) takes for requests, by how many are in flight.

    A closed loop: at each concurrency so many clients each send a request, read it to its end, and send the next.
    Every request runs to its full length, past any end-of-sequence token.
    """
    counts = {level: num_requests or max(FEWEST_REQUESTS, 2 * level) for level in concurrency}
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
    """Measure ``counts``: the number of requests by concurrency; then say it in all ways that are asked for."""
    workload = Workload(**{name: flags[name] for name in Workload.__struct_fields__})
    SamplingParams(temperature=workload.temperature)  # a bad one is refused before the model is loaded
    config = given(EngineConfig, flags)
    if replicas := given(ReplicaOptions, flags):
        config["replicas"] = ReplicaOptions(**replicas)
    environment, bursts = run(_measure(counts, workload, config))
    report = Report(benchmark, environment, workload, [level_of(*level) for level in bursts.items()])
    json_path, plot_path = flags["json_path"], flags["plot_path"]
    show(report, to_stderr=str(json_path) == "-")
    if json_path is not None:
        with click.open_file(str(json_path), "w", encoding="utf-8") as file:
            file.write(msgspec.json.format(msgspec.json.encode(report), indent=2).decode() + "\n")
    if plot_path is not None:
        requests = [request for repeats in bursts.values() for burst in repeats for request in burst.requests]
        plot(report, requests, plot_path)


async def _measure(
    counts: dict[int, int], workload: Workload, config: dict[str, Any]
) -> tuple[dict[str, Any], dict[int, list[Burst]]]:
    """What runs, and the bursts by concurrency, one a repeat."""
    bursts: dict[int, list[Burst]] = {concurrency: [] for concurrency in counts}
    async with Engine(**config) as engine:
        jobs = make_jobs(engine, workload)
        with _progress_bar(workload.repeats * sum(counts.values())) as on_done:
            # A machine that drifts shows in the repeats of each level, not as a slope over the levels.
            for concurrency, count in [*counts.items()] * workload.repeats:
                if not bursts[concurrency]:
                    # What is computed once is computed unmeasured.
                    made = jobs.make(concurrency)[:WARM_UP_REQUESTS]
                    short = [Job(job.prompt, min(job.num_output_tokens, WARM_UP_TOKENS)) for job in made]
                    await send(engine, short, len(short), workload.temperature)
                made = jobs.make(count)
                bursts[concurrency].append(await send(engine, made, concurrency, workload.temperature, on_done))
        return environment_of(engine), bursts


def make_jobs(engine: Engine, workload: Workload) -> Jobs:
    """What a workload asks of this engine.

    Raises:
        click.UsageError: the longest request does not fit the model.
    """
    longest_input, limit = workload.input_len.high, engine.info.max_model_len
    if longest_input + workload.output_len.high > limit:
        raise click.UsageError(
            f"{longest_input} tokens in and {workload.output_len.high} out are more than the {limit} that this model "
            "allows: lower --input-len or --output-len"
        )
    return Jobs(workload, engine.info.vocab_size)


@contextlib.contextmanager
def _progress_bar(total: int) -> Iterator[Callable[[int], None]]:
    """A bar on stderr, if that is a terminal; yields what to call with the concurrency as each of ``total`` ends."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    # Two refreshes a second: the bar runs on the cores that are being measured.
    console, is_hidden = Console(stderr=True), not sys.stderr.isatty()
    with Progress(*columns, console=console, transient=True, refresh_per_second=2, disable=is_hidden) as bar:
        task = bar.add_task("warming up", total=total)
        yield lambda concurrency: bar.update(task, advance=1, description=f"{concurrency} in flight")
