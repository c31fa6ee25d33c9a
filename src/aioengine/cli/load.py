"""A load on an engine, how long each of its requests took, and what other programs did to the machine meanwhile.

Times are of ``time.perf_counter``, in seconds.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread
import msgspec
import numpy as np

from aioengine.engine import Engine
from aioengine.sampling_params import SamplingParams


class Range(msgspec.Struct, frozen=True):
    """A number of tokens, drawn uniformly; both ends are in it."""

    low: int
    high: int

    def __str__(self) -> str:
        return str(self.low) if self.low == self.high else f"{self.low}:{self.high}"


class Job(msgspec.Struct, frozen=True):
    """One request: exactly ``num_output_tokens`` are generated, past any EOS."""

    prompt: str | list[int]
    num_output_tokens: int


class Timing(msgspec.Struct, frozen=True):
    """How one request went.

    Attributes:
        ttft_s: from sending it until its first token could be read.
        itl_s: between tokens; where several were read at once, each has an equal part of the time.
        e2e_s: from sending it until its last token could be read.
    """

    num_input_tokens: int
    num_output_tokens: int
    ttft_s: float
    itl_s: list[float]
    e2e_s: float


class Burst(msgspec.Struct, frozen=True):
    """Requests that were sent together, from the first one's start to the last one's end.

    Attributes:
        other_cpu_s: CPU time that other programs used meanwhile; None where the system does not say.
    """

    timings: list[Timing]
    duration_s: float
    other_cpu_s: float | None = None


class Jobs:
    """Makes jobs: the lengths repeat with each batch, token ids never do, so that no prefix is cached by chance.

    Args:
        text: the prompt of all jobs; None: random token ids.
    """

    def __init__(self, *, text: str | None, input_len: Range, output_len: Range, vocab_size: int, seed: int) -> None:
        self._text = text
        self._lens = (input_len, output_len)
        self._vocab_size = vocab_size
        self._seed = seed
        self._ids = np.random.default_rng([seed, 1])

    def make(self, count: int) -> list[Job]:
        draws = np.random.default_rng([self._seed, 2])
        nums = [draws.integers(length.low, length.high, count, endpoint=True).tolist() for length in self._lens]
        return [Job(self._prompt(num_input), num_output) for num_input, num_output in zip(*nums, strict=True)]

    def _prompt(self, num_tokens: int) -> str | list[int]:
        if self._text is not None:
            return self._text
        ids: list[int] = self._ids.integers(0, self._vocab_size, num_tokens).tolist()
        return ids


def other_cpu_s(stat: Path = Path("/proc/stat")) -> float | None:
    """CPU time since the machine's start that went to other programs, on the cores that this one may use, in seconds.

    Good to some 0.01. What a hypervisor gave to other machines is in it; None where there is no ``stat``.
    """
    with contextlib.suppress(OSError):
        lines = stat.read_text(encoding="ascii").splitlines()
        ours = {f"cpu{core}" for core in os.sched_getaffinity(0)}
        busy_ticks = 0
        for line in lines:
            core, *ticks = line.split()
            if core in ours:  # user nice system idle iowait irq softirq steal …, guests being in user (proc(5))
                busy_ticks += sum(map(int, ticks[:8])) - int(ticks[3]) - int(ticks[4])
        return busy_ticks / os.sysconf("SC_CLK_TCK") - sum(os.times()[:4])
    return None


async def send_beside_others(engine: Engine, jobs: Iterable[Job], **options: Any) -> Burst:
    """As `send`, with what other programs used meanwhile."""
    before = await anyio.to_thread.run_sync(other_cpu_s)
    burst = await send(engine, jobs, **options)
    after = await anyio.to_thread.run_sync(other_cpu_s)
    if before is None or after is None:
        return burst
    return msgspec.structs.replace(burst, other_cpu_s=max(0.0, after - before))


async def send(
    engine: Engine,
    jobs: Iterable[Job],
    *,
    concurrency: int,
    temperature: float = 0.0,
    on_done: Callable[[], object] = lambda: None,
) -> Burst:
    """Send all jobs, each when one of ``concurrency`` places is free, and time them. Cancelling aborts what runs.

    Raises:
        what the engine raised, of the request that heard it first.
    """
    waiting = iter(jobs)
    timings: list[Timing] = []

    async def take_jobs() -> None:
        for job in waiting:
            timings.append(await _time(engine, job, temperature))
            on_done()

    started = time.perf_counter()
    try:
        async with anyio.create_task_group() as group:
            for _ in range(concurrency):
                group.start_soon(take_jobs)
    except BaseExceptionGroup as errors:
        raise next(_leaves(errors)) from None
    return Burst(timings, time.perf_counter() - started)


async def _time(engine: Engine, job: Job, temperature: float) -> Timing:
    params = SamplingParams(temperature=temperature, max_tokens=job.num_output_tokens, ignore_eos=True)
    sent = last = time.perf_counter()
    ttft_s: float | None = None
    itl_s: list[float] = []
    async with engine.stream(job.prompt, params) as stream:
        async for delta in stream:
            now = time.perf_counter()
            count = len(delta.token_ids)
            if ttft_s is not None and count:
                itl_s += [(now - last) / count] * count
            elif count:
                ttft_s = now - sent
            last = now
        output = stream.result
    assert ttft_s is not None, "a request that ends without an error has a token"
    return Timing(
        num_input_tokens=len(output.prompt_token_ids),
        num_output_tokens=len(output.outputs[0].token_ids),
        ttft_s=ttft_s,
        itl_s=itl_s,
        e2e_s=last - sent,
    )


def _leaves(errors: BaseExceptionGroup[BaseException]) -> Iterator[BaseException]:
    for error in errors.exceptions:
        if isinstance(error, BaseExceptionGroup):
            yield from _leaves(error)
        else:
            yield error
