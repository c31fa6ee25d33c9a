"""An engine under load: opening it, keeping it busy, watching its steps."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import msgspec

from aioengine import Engine
from aioengine.outputs.metrics import RequestMetrics, StepRecord
from benchmarks.gpu.rows import Bounds, Result
from benchmarks.gpu.sizes import Model, Sizes

FIRST_STEPS = 4
"""Of a run of steps to be timed: dropped."""
WAIT_S = 300.0
ITEM_BYTES = {"bfloat16": 2, "float32": 4}


class Setting(msgspec.Struct, frozen=True, kw_only=True):
    """What a part is given.

    Attributes:
        folder: for models without weights, checkpoints and traces; it goes with the run.
        bounds: measured in this run.
        report: called with each result at once, so that what comes later cannot take it along.
    """

    device: str
    sizes: Sizes
    folder: Path
    bounds: Bounds
    report: Callable[[Any], None]

    @property
    def dtype(self) -> str:
        return "bfloat16" if self.device == "cuda" else "float32"

    def result(self, row: str, **fields: Any) -> Result:
        return Result(row=row, device=self.device, **fields)

    async def attempt(self, row: str, measure: Awaitable[Result]) -> None:
        """Report a row, or why there is none; the rows behind it have their turn either way."""
        try:
            self.report(await measure)
        except Exception as error:
            self.report(self.result(row, reason=describe(error)))


def describe(error: BaseException) -> str:
    """In one line; of a group, its first error."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0] if lines else ''}"[:300].replace("|", "/")


def engine(setting: Setting, model: Model, *, max_num_seqs: int, max_model_len: int, **more: Any) -> Engine:
    """An engine of random weights; its KV cache holds ``max_num_seqs`` sequences of ``max_model_len`` if it can."""
    folder = model.save(setting.folder / model.family, setting.dtype)
    fields: dict[str, Any] = {}
    if setting.device != "cuda":
        tokens = max_num_seqs * (max_model_len + 16)
        fields["kv_cache_memory_bytes"] = tokens * model.kv_bytes(ITEM_BYTES[setting.dtype])
    fields |= {
        "load_format": "dummy",
        "device": setting.device,
        "dtype": setting.dtype,
        "max_num_seqs": max_num_seqs,
        "max_model_len": max_model_len,
        "max_num_batched_tokens": max(setting.sizes.max_batched, max_num_seqs),
        "enable_prefix_caching": False,
        "log_stats_interval_s": 0.0,
    }
    return Engine(folder, **(fields | more))


class Watch:
    """Sees an engine's steps.

    Attributes:
        steps: with the time at which each was applied, in seconds.
    """

    def __init__(self, engine: Engine) -> None:
        self.steps: list[tuple[float, StepRecord]] = []
        self.close = engine.add_observer(self)

    def on_step(self, record: StepRecord) -> None:
        self.steps.append((time.perf_counter(), record))

    def on_request(self, metrics: RequestMetrics, finish_reasons: tuple[str, ...]) -> None:
        pass

    def decode_steps_s(self, batch: int) -> list[float]:
        """From one step to the next, where both gave each of ``batch`` sequences a token and did nothing else."""
        is_steady = [record.num_tokens == record.num_sampled == batch for _, record in self.steps]
        times = []
        for i in range(1, len(self.steps)):
            if is_steady[i] and is_steady[i - 1]:
                times.append(self.steps[i][0] - self.steps[i - 1][0])
        # A short run keeps what it has.
        return times[FIRST_STEPS:] or times

    def num_decode_steps(self, batch: int) -> int:
        return sum(record.num_tokens == record.num_sampled == batch for _, record in self.steps)

    async def until(self, is_so: Callable[[], bool], tasks: list[asyncio.Task[Any]]) -> None:
        """Look every millisecond.

        Raises:
            TimeoutError: it was not to be.
            RuntimeError: all of ``tasks``, the load, have ended before.
            Exception: what one of them raised.
        """
        async with asyncio.timeout(WAIT_S):
            while not is_so():
                for task in tasks:
                    if task.done():
                        task.result()
                if all(task.done() for task in tasks):
                    raise RuntimeError("the load ended before the engine was as it was to be")
                await asyncio.sleep(0.001)


class Load:
    """Tasks that keep an engine busy, as a block: at its end they are cancelled, which aborts their requests."""

    def __init__(self, *work: Awaitable[Any]) -> None:
        self._work = work
        self.tasks: list[asyncio.Task[Any]] = []

    @property
    def is_over(self) -> bool:
        return all(task.done() for task in self.tasks)

    async def __aenter__(self) -> Load:
        self._group = asyncio.TaskGroup()
        await self._group.__aenter__()
        self.tasks = [self._group.create_task(_await(each)) for each in self._work]
        return self

    async def __aexit__(self, *raised: Any) -> None:
        for task in self.tasks:
            task.cancel()
        await self._group.__aexit__(*raised)


async def _await(each: Awaitable[Any]) -> Any:
    return await each


class Job(msgspec.Struct, frozen=True):
    """A request: a prompt of ids that are the vocabulary's, and how many tokens it is to bring."""

    prompt: list[int]
    max_tokens: int


def make_jobs(model: Model, sizes: Sizes, seed: int = 0) -> list[Job]:
    """Those of nano-vllm's bench: lengths in and out are uniform."""
    rng = random.Random(seed)
    return [
        Job(make_prompt(model, rng, rng.randint(*sizes.request_tokens)), rng.randint(*sizes.request_tokens))
        for _ in range(sizes.num_requests)
    ]


def make_prompt(model: Model, rng: random.Random, length: int) -> list[int]:
    return [rng.randrange(10, model.vocab) for _ in range(length)]
