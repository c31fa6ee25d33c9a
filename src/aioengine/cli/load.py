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


def figures_of(concurrency: int, repeats: list[tuple[list[Reads], float]]) -> Figures:
    """The figures of repeats of `send`."""
    requests = [request for repeat, _ in repeats for request in repeat]
    duration_s = sum(seconds for _, seconds in repeats)
    num_input = sum(request.num_input_tokens for request in requests)
    num_outputs = [sum(sum(request.sizes) for request in repeat) for repeat, _ in repeats]
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
        repeats=[num_output / seconds for num_output, (_, seconds) in zip(num_outputs, repeats, strict=True)],
    )


async def send(
    engine: Engine, jobs: Iterable[Job], concurrency: int, temperature: float = 0.0
) -> tuple[list[Reads], float]:
    """Send all jobs, each when fewer than ``concurrency`` are in flight. Cancelling aborts what runs.

    Returns:
        the requests' reads, and the seconds from the first one's start to the last one's end.
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

    began_at = time.perf_counter()
    try:
        async with anyio.create_task_group() as group:
            for _ in range(concurrency):
                group.start_soon(take_jobs)
    except ExceptionGroup as errors:
        raise errors.exceptions[0] from None
    return done, time.perf_counter() - began_at
