"""`aioengine bench`: measure an engine here, its latency by concurrency, or its throughput."""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import importlib.metadata
import os
import platform
import sys
import time
from array import array
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Literal, NamedTuple

import anyio
import anyio.to_thread
import click
import msgspec
import numpy as np
from numpy.typing import NDArray

import aioengine
from aioengine.cli.command import Command, add_flags, add_model_argument, open_console, read_flags, run
from aioengine.config import EngineConfig, ReplicaOptions
from aioengine.engine import Engine
from aioengine.sampling_params import SamplingParams

FEWEST_REQUESTS = 8
"""The default at a concurrency; twice the concurrency where that is more."""

WARM_UP_TOKENS = 8
"""Length of the requests before a measurement: an engine does then what it does once for a batch of this size."""

WARM_UP_REQUESTS = 32
"""At most: larger batches bring little that is new."""


# A load, and its figures


class Range(msgspec.Struct, frozen=True):
    """A number of tokens, drawn uniformly; both ends are in it."""

    low: int
    high: int

    @classmethod
    def parse(cls, text: str) -> Range:
        """Read ``64``, or ``32:128``.

        Raises:
            ValueError: it is neither.
        """
        low, colon, high = text.partition(":")
        try:
            drawn = cls(int(low), int(high) if colon else int(low))
        except ValueError:
            raise ValueError(f"{text!r}: a number or a range like 32:128 is needed") from None
        if not 1 <= drawn.low <= drawn.high:
            raise ValueError(f"{text!r}: at least 1 is needed, and the lower end first")
        return drawn

    def __str__(self) -> str:
        return str(self.low) if self.low == self.high else f"{self.low}:{self.high}"


Job = tuple[list[int], int]
"""A request: the token ids of its prompt, and the number of output tokens, generated past any EOS."""


@dataclasses.dataclass(slots=True, eq=False)
class Reads:
    """The reads of one request's output; times are of ``time.perf_counter``, in seconds.

    Attributes:
        sent_at: latencies count from then.
        read_at: of each read that brought output.
        sizes: the tokens of each.
    """

    sent_at: float
    read_at: array[float] = dataclasses.field(default_factory=lambda: array("d"))
    sizes: array[int] = dataclasses.field(default_factory=lambda: array("L"))
    num_input_tokens: int = 0

    @property
    def ttft_s(self) -> float:
        """Time to the first token."""
        return self.read_at[0] - self.sent_at

    @property
    def e2e_s(self) -> float:
        """Time to the last token."""
        return self.read_at[-1] - self.sent_at

    @property
    def gaps_s(self) -> NDArray[np.float64]:
        """[reads - 1], between two reads, whole, however many tokens came with the second one."""
        return np.diff(np.frombuffer(self.read_at))

    @property
    def itl_s(self) -> NDArray[np.float64]:
        """[tokens after the first read], between tokens: those that were read at once share the gap equally."""
        sizes = np.array(self.sizes[1:], np.int64)
        return np.repeat(self.gaps_s / sizes, sizes)


class Summary(msgspec.Struct, frozen=True):
    """Milliseconds, over the samples of all requests; percentiles are interpolated linearly."""

    mean: float
    p50: float
    p90: float
    p99: float
    max: float


def summary_of(samples_s: Iterable[float] | NDArray[np.float64]) -> Summary | None:
    """Summarise seconds; None: there are none."""
    samples_ms = np.fromiter(samples_s, np.float64) * 1e3
    if not len(samples_ms):
        return None
    p50, p90, p99 = np.percentile(samples_ms, [50, 90, 99]).tolist()
    return Summary(mean=float(samples_ms.mean()), p50=p50, p90=p90, p99=p99, max=float(samples_ms.max()))


class Figures(msgspec.Struct, frozen=True):
    """The figures at one concurrency, over all repeats, of ``duration_s`` seconds together.

    Attributes:
        ttft_ms, e2e_ms: time to the first token, and to the last.
        itl_ms: time between tokens; None where each request had but one.
        repeats: output tokens/s of each repeat: how far apart they lie is the noise.
        other_cores: how many of the cores that this process may use other programs used meanwhile, on average; None
            where the system does not report it.
    """

    concurrency: int
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
    repeats: list[float]
    other_cores: float | None = None


class Repeat(NamedTuple):
    """The requests of one `send`, its seconds from the first one's start to the last one's end, and `other_cpu_s`."""

    requests: list[Reads]
    duration_s: float
    other_cpu_s: float | None = None


def figures_of(concurrency: int, repeats: list[Repeat]) -> Figures:
    """The figures of repeats of `send`."""
    requests = [request for repeat in repeats for request in repeat.requests]
    duration_s = sum(repeat.duration_s for repeat in repeats)
    num_input = sum(request.num_input_tokens for request in requests)
    num_outputs = [sum(sum(request.sizes) for request in repeat.requests) for repeat in repeats]
    others_s = [repeat.other_cpu_s for repeat in repeats]
    return Figures(
        concurrency=concurrency,
        num_requests=len(requests),
        num_input_tokens=num_input,
        num_output_tokens=sum(num_outputs),
        duration_s=duration_s,
        requests_per_s=len(requests) / duration_s,
        output_tokens_per_s=sum(num_outputs) / duration_s,
        total_tokens_per_s=(num_input + sum(num_outputs)) / duration_s,
        ttft_ms=summary_of(request.ttft_s for request in requests),
        itl_ms=summary_of(gap_s for request in requests for gap_s in request.itl_s),
        e2e_ms=summary_of(request.e2e_s for request in requests),
        repeats=[num_output / repeat.duration_s for num_output, repeat in zip(num_outputs, repeats, strict=True)],
        other_cores=None if None in others_s else sum(filter(None, others_s)) / duration_s,
    )


def other_cpu_s(stat: Path = Path("/proc/stat")) -> float | None:
    """CPU seconds since the machine's start that went to other programs, on the cores that this one may use.

    They are good to some 0.01, and include what a hypervisor gave to other machines; None where there is no ``stat``.
    """
    with contextlib.suppress(OSError):
        ours = {f"cpu{core}" for core in os.sched_getaffinity(0)}
        busy_ticks = 0
        for line in stat.read_text(encoding="ascii").splitlines():
            core, *ticks = line.split()
            if core in ours:  # user nice system idle iowait irq softirq steal …, guests being in user (proc(5))
                busy_ticks += sum(map(int, ticks[:8])) - int(ticks[3]) - int(ticks[4])
        return busy_ticks / os.sysconf("SC_CLK_TCK") - sum(os.times()[:4])
    return None


async def send(
    engine: Engine,
    jobs: Iterable[Job],
    concurrency: int,
    temperature: float = 0.0,
    on_done: Callable[[], object] = lambda: None,
) -> Repeat:
    """Send all jobs, each when fewer than ``concurrency`` are in flight. Cancelling aborts what runs.

    Args:
        on_done: called each time that a request has ended.
    Raises:
        what the engine raised, of the request that failed first.
    """
    waiting = iter(jobs)
    done: list[Reads] = []

    async def take_jobs() -> None:
        for prompt, num_output_tokens in waiting:
            params = SamplingParams(temperature=temperature, max_tokens=num_output_tokens, ignore_eos=True)
            reads = Reads(time.perf_counter(), num_input_tokens=len(prompt))
            async with engine.stream(prompt, params) as stream:
                async for delta in stream:
                    if delta.token_ids:
                        reads.read_at.append(time.perf_counter())
                        reads.sizes.append(len(delta.token_ids))
            done.append(reads)
            on_done()

    before = await anyio.to_thread.run_sync(other_cpu_s)
    began_at = time.perf_counter()
    try:
        async with anyio.create_task_group() as group:
            for _ in range(concurrency):
                group.start_soon(take_jobs)
    except ExceptionGroup as errors:
        raise errors.exceptions[0] from None
    duration_s = time.perf_counter() - began_at
    after = await anyio.to_thread.run_sync(other_cpu_s)
    return Repeat(done, duration_s, None if before is None or after is None else max(0.0, after - before))


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
