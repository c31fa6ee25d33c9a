"""What a benchmark found: figures over requests, and what they were measured on."""

from __future__ import annotations

import datetime
import importlib.metadata
import os
import platform
from typing import Literal

import msgspec

import aioengine
from aioengine.cli.load import Burst, Summary, Timing, Workload, summary_of
from aioengine.engine import Engine


class Figures(msgspec.Struct, frozen=True):
    """What requests did in ``duration_s`` seconds.

    Attributes:
        ttft_ms: time to the first token.
        itl_ms: time between tokens; None where each request had but one.
        e2e_ms: time to the last token.
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
    ttft_ms: Summary
    itl_ms: Summary | None
    e2e_ms: Summary
    other_cores: float | None = None


class Measured(msgspec.Struct, frozen=True):
    """Figures over all repeats together, and of each: how far those lie apart is the noise."""

    overall: Figures
    repeats: list[Figures]


class Level(msgspec.Struct, frozen=True):
    """What was measured with so many requests in flight."""

    concurrency: int
    measured: Measured


class Environment(msgspec.Struct, frozen=True):
    """What ran, and on what.

    Attributes:
        num_threads: threads of one CPU operation as configured; None: torch's number, one in small steps.
        num_cores: cores that this process may use.
        time: when, UTC.
    """

    model: str
    dtype: str
    device: str
    num_threads: int | None
    num_cores: int
    machine: str
    python: str
    torch: str
    aioengine: str
    time: str

    def __str__(self) -> str:
        threads = f"{self.num_threads} threads" if self.num_threads else "torch's threads"
        return (
            f"{self.model} in {self.dtype} on {self.device}, {threads} on {self.num_cores} cores ({self.machine})\n"
            f"aioengine {self.aioengine}, torch {self.torch}, Python {self.python}; {self.time}"
        )


class LatencyReport(msgspec.Struct, frozen=True):
    """What ``aioengine bench latency`` writes as JSON."""

    environment: Environment
    workload: Workload
    levels: list[Level]
    benchmark: Literal["latency"] = "latency"


class ThroughputReport(msgspec.Struct, frozen=True):
    """What ``aioengine bench throughput`` writes as JSON."""

    environment: Environment
    workload: Workload
    measured: Measured
    benchmark: Literal["throughput"] = "throughput"


def measured_of(bursts: list[Burst]) -> Measured:
    """The figures of each burst, and of all together."""
    return Measured(overall=_figures_of(bursts), repeats=[_figures_of([burst]) for burst in bursts])


def environment_of(engine: Engine) -> Environment:
    """What runs, of an engine that has started."""
    return Environment(
        model=engine.config.model or "the bundled model",
        dtype=engine.info.dtype,
        device=engine.info.device,
        num_threads=engine.config.num_threads,
        num_cores=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        machine=platform.machine(),
        python=platform.python_version(),
        torch=importlib.metadata.version("torch"),
        aioengine=aioengine.__version__,
        time=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    )


def _figures_of(bursts: list[Burst]) -> Figures:
    timings = [timing for burst in bursts for timing in burst.timings]
    duration_s = sum(burst.duration_s for burst in bursts)
    num_input = sum(timing.num_input_tokens for timing in timings)
    num_output = sum(timing.num_output_tokens for timing in timings)
    others_s = [burst.other_cpu_s for burst in bursts]
    ttft_ms, itl_ms, e2e_ms = (summary_of(samples) for samples in samples_of(timings).values())
    assert ttft_ms is not None
    assert e2e_ms is not None
    return Figures(
        num_requests=len(timings),
        num_input_tokens=num_input,
        num_output_tokens=num_output,
        duration_s=duration_s,
        requests_per_s=len(timings) / duration_s,
        output_tokens_per_s=num_output / duration_s,
        total_tokens_per_s=(num_input + num_output) / duration_s,
        ttft_ms=ttft_ms,
        itl_ms=itl_ms,
        e2e_ms=e2e_ms,
        other_cores=None if None in others_s else sum(filter(None, others_s)) / duration_s,
    )


def samples_of(timings: list[Timing]) -> dict[str, list[float]]:
    """Seconds, by the names of the fields of `Figures`."""
    return {
        "ttft_ms": [timing.reads.ttft_s for timing in timings],
        "itl_ms": [gap for timing in timings for gap in timing.reads.itl_s.tolist()],
        "e2e_ms": [timing.reads.e2e_s for timing in timings],
    }
