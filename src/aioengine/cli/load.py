"""A load on an engine, and its figures: latencies, rates, and the CPU time of other programs meanwhile."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import time
from array import array
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NamedTuple

import anyio
import anyio.to_thread
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
