"""A load on an engine, and its figures: latencies and rates."""

from __future__ import annotations

import dataclasses
import time
from array import array
from collections.abc import Iterable

import anyio
import msgspec
import numpy as np
from numpy.typing import NDArray

from aioengine.engine import Engine
from aioengine.sampling_params import SamplingParams


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


class Job(msgspec.Struct, frozen=True):
    """One request: exactly ``num_output_tokens`` are generated, past any EOS."""

    prompt: list[int]
    num_output_tokens: int


@dataclasses.dataclass(slots=True, eq=False)
class Reads:
    """When the output of one request was read; times are of ``time.perf_counter``, in seconds.

    Attributes:
        sent_at: latencies count from then.
        read_at: of each read that brought output.
        sizes: how much each of those brought, in tokens.
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


class Burst(msgspec.Struct, frozen=True):
    """Requests that were sent together, from the first one's start to the last one's end."""

    requests: list[Reads]
    duration_s: float


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
    """Figures of the requests of ``duration_s`` seconds.

    Attributes:
        ttft_ms, e2e_ms: time to the first token, and to the last.
        itl_ms: time between tokens; None where each request had but one.
    """

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


def figures_of(bursts: list[Burst]) -> Figures:
    """The figures of all bursts together."""
    requests = [request for burst in bursts for request in burst.requests]
    duration_s = sum(burst.duration_s for burst in bursts)
    num_input = sum(request.num_input_tokens for request in requests)
    num_output = sum(sum(request.sizes) for request in requests)
    return Figures(
        num_requests=len(requests),
        num_input_tokens=num_input,
        num_output_tokens=num_output,
        duration_s=duration_s,
        requests_per_s=len(requests) / duration_s,
        output_tokens_per_s=num_output / duration_s,
        total_tokens_per_s=(num_input + num_output) / duration_s,
        ttft_ms=summary_of(request.ttft_s for request in requests),
        itl_ms=summary_of(gap_s for request in requests for gap_s in request.itl_s),
        e2e_ms=summary_of(request.e2e_s for request in requests),
    )


async def send(engine: Engine, jobs: Iterable[Job], concurrency: int, temperature: float = 0.0) -> Burst:
    """Send all jobs, each when fewer than ``concurrency`` are in flight, and time them. Cancelling aborts what runs.

    Raises:
        what the engine raised, of the request that failed first.
    """
    waiting = iter(jobs)
    done: list[Reads] = []

    async def take_jobs() -> None:
        for job in waiting:
            done.append(await _time(engine, job, temperature))

    began_at = time.perf_counter()
    try:
        async with anyio.create_task_group() as group:
            for _ in range(concurrency):
                group.start_soon(take_jobs)
    except ExceptionGroup as errors:
        raise errors.exceptions[0] from None
    return Burst(done, time.perf_counter() - began_at)


async def _time(engine: Engine, job: Job, temperature: float) -> Reads:
    params = SamplingParams(temperature=temperature, max_tokens=job.num_output_tokens, ignore_eos=True)
    reads = Reads(time.perf_counter(), num_input_tokens=len(job.prompt))
    async with engine.stream(job.prompt, params) as stream:
        async for delta in stream:
            if delta.token_ids:
                reads.read_at.append(time.perf_counter())
                reads.sizes.append(len(delta.token_ids))
    return reads
