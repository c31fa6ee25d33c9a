"""The table's rows that need an engine under load, through the public `Engine` with random weights."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import random
import statistics
import time
import warnings
from collections.abc import Awaitable, Iterator
from typing import Any

import torch

from aioengine import Engine
from benchmarks.gpu.rows import NEEDS_GPU, Result
from benchmarks.gpu.running import (
    ITEM_BYTES,
    Job,
    Load,
    Setting,
    Watch,
    engine,
    make_jobs,
    make_prompt,
)
from benchmarks.gpu.trace import Trace

TICK_S = 0.001
GREEDY: dict[str, Any] = {"temperature": 0.0, "ignore_eos": True}
RULES: dict[str, Any] = {
    "temperature": 0.8,
    "ignore_eos": True,
    "repetition_penalty": 1.1,
    "frequency_penalty": 0.1,
    "presence_penalty": 0.1,
    "logprobs": 5,
}


# The 8B shape


async def large(setting: Setting) -> None:
    sizes = setting.sizes
    longest = max(sizes.context + 4 * sizes.decode_steps, sizes.prefill_tokens + 1)
    async with engine(
        setting, sizes.large, max_num_seqs=max(sizes.batches), max_model_len=min(longest, sizes.large.max_len)
    ) as opened:
        for batch, named in zip(sizes.batches, (1, 64, 256), strict=True):
            row = f"decode, batch {named}"
            await setting.attempt(row, decode(setting, opened, row, batch))
        await setting.attempt("prefill 8k", prefill(setting, opened))
        await setting.attempt("sleep", sleep(setting, opened))


async def decode(setting: Setting, opened: Engine, row: str, batch: int) -> Result:
    """Steps of ``batch`` sequences, each around ``context`` tokens long in the middle of the run."""
    sizes, model = setting.sizes, setting.sizes.large
    # While prompts are computed the first sequences decode already: all of them must still be there afterwards.
    max_tokens = sizes.decode_steps + 2 * -(-batch * sizes.context // sizes.max_batched) + 8
    length = max(1, sizes.context - max_tokens // 2)
    rng = random.Random(batch)
    watch = Watch(opened)
    await asyncio.gather(
        *(opened.generate(make_prompt(model, rng, length), max_tokens=max_tokens, **GREEDY) for _ in range(batch))
    )
    watch.close()
    steps = watch.decode_steps_s(batch)
    if not steps:
        raise RuntimeError(f"no two steps in a row decoded all {batch} sequences")
    step_s = statistics.median(steps)
    context = length + max_tokens / 2
    of_bytes = model.decode_bytes(batch, context, ITEM_BYTES[setting.dtype]) / setting.bounds.copy_bytes_per_s
    of_flops = model.decode_flops(batch, context) / setting.bounds.matrix_flops
    bound_s = of_bytes if batch == 1 else max(of_bytes, of_flops)
    return setting.result(
        row,
        value=step_s * 1e3,
        unit="ms a step",
        bound=bound_s * 1e3,
        bound_of="bandwidth" if bound_s == of_bytes else "matrix",
        ratio=bound_s / step_s,
        details={"tokens/s": batch / step_s, "context": context, "batch": batch, "steps": len(steps)},
    )


async def prefill(setting: Setting, opened: Engine) -> Result:
    """One prompt at a time, from the launch of its first step until its last one is applied."""
    sizes, rng = setting.sizes, random.Random(0)
    seconds = []
    for _ in range(sizes.prefills + 1):
        watch = Watch(opened)
        await opened.generate(make_prompt(sizes.large, rng, sizes.prefill_tokens), max_tokens=1, **GREEDY)
        watch.close()
        (first_at, first), (last_at, _) = watch.steps[0], watch.steps[-1]
        seconds.append(last_at - first_at + first.step_time_s)
    median_s = statistics.median(seconds[1:])
    rate = sizes.large.prefill_flops(sizes.prefill_tokens) / median_s
    return setting.result(
        "prefill 8k",
        value=rate / 1e12,
        unit="TFLOP/s",
        bound=setting.bounds.matrix_flops / 1e12,
        bound_of=f"{setting.bounds.matrix_dtype} matrix rate",
        ratio=rate / setting.bounds.matrix_flops,
        details={"ms": median_s * 1e3, "tokens/s": sizes.prefill_tokens / median_s, "tokens": sizes.prefill_tokens},
    )


async def sleep(setting: Setting, opened: Engine) -> Result:
    """Asleep and awake again at both levels; equal tokens before and after."""
    prompt = make_prompt(setting.sizes.large, random.Random(1), 8)
    before = await opened.generate(prompt, max_tokens=4, **GREEDY)
    details: dict[str, float | str] = {}
    for level in (1, 2):
        free = _free_bytes(setting)
        begin = time.perf_counter()
        await opened.sleep(level)
        asleep = time.perf_counter()
        details[f"freed at level {level}, GB"] = (_free_bytes(setting) - free) / 1e9
        await opened.wake_up()
        details[f"sleep({level}), s"] = asleep - begin
        details[f"wake_up after {level}, s"] = time.perf_counter() - asleep
        after = await opened.generate(prompt, max_tokens=4, **GREEDY)
        if after.outputs[0].token_ids != before.outputs[0].token_ids:
            raise RuntimeError(f"after sleep({level}) the tokens are others")
    return setting.result("sleep", value=float(details["sleep(1), s"]), unit="s, `sleep(1)`", details=details)


def _free_bytes(setting: Setting) -> int:
    return torch.cuda.mem_get_info()[0] if setting.device == "cuda" else 0


# The 0.6B shape


async def small(setting: Setting) -> None:
    sizes = setting.sizes
    async with engine(
        setting,
        sizes.small,
        max_num_seqs=max(sizes.num_requests, sizes.num_streams),
        max_model_len=min(sizes.small.max_len, 4096),
    ) as opened:
        await opened.generate([5, 6, 7], max_tokens=8, **GREEDY)
        await setting.attempt("256 requests, tokens/s", throughput(setting, opened))
        await setting.attempt("256 requests, device busy", busy(setting, opened))
        await setting.attempt("gap between decode steps", gap(setting, opened))
        await setting.attempt("loop lag", loop_lag(setting, opened))
        await setting.attempt("synchronisations and allocations", undisturbed(setting, opened))


def _requests(opened: Engine, jobs: list[Job]) -> list[Awaitable[Any]]:
    return [opened.generate(job.prompt, max_tokens=job.max_tokens, temperature=0.6, ignore_eos=True) for job in jobs]


async def throughput(setting: Setting, opened: Engine) -> Result:
    rates = []
    for seed in range(2):  # the first one compiles and captures what is still missing
        jobs = make_jobs(setting.sizes.small, setting.sizes, seed)
        begin = time.perf_counter()
        outputs = await asyncio.gather(*_requests(opened, jobs))
        seconds = time.perf_counter() - begin
        num_tokens = sum(len(output.outputs[0].token_ids) for output in outputs)
        assert num_tokens == sum(job.max_tokens for job in jobs)
        rates.append(num_tokens / seconds)
    return setting.result(
        "256 requests, tokens/s",
        value=rates[-1],
        unit="tokens/s",
        details={"first run": rates[0], "requests": setting.sizes.num_requests, "seconds": seconds},
    )


async def busy(setting: Setting, opened: Engine) -> Result:
    """Of a stretch of steps in the middle of the requests, by the profiler's trace."""
    row = "256 requests, device busy"
    jobs = make_jobs(setting.sizes.small, setting.sizes, 2)
    watch = Watch(opened)
    num_sampled = sum(job.max_tokens for job in jobs)
    async with Load(*_requests(opened, jobs)) as load:
        await watch.until(lambda: sum(record.num_sampled for _, record in watch.steps) > num_sampled // 4, load.tasks)
        trace = await _trace(setting, opened, watch, load, "busy.json")
    watch.close()
    if setting.device != "cuda":
        return setting.result(row, reason=NEEDS_GPU)
    return setting.result(row, value=100 * trace.busy_share(), unit="%", details={"steps": len(trace.steps)})


async def _trace(setting: Setting, opened: Engine, watch: Watch, load: Load, name: str) -> Trace:
    """Of the next steps."""
    path = setting.folder / name
    num_steps = setting.sizes.traced_steps
    async with opened.profile(path, max_steps=num_steps):
        end = len(watch.steps) + num_steps
        # What has ended meanwhile is traced as far as it went.
        await watch.until(lambda: len(watch.steps) >= end or load.is_over, load.tasks)
    trace = await asyncio.to_thread(Trace.load, path)
    if setting.device == "cuda" and not trace.busy:
        raise RuntimeError("the trace has nothing that ran on the GPU")
    return trace


def _long_streams(setting: Setting, opened: Engine, **sampling: Any) -> list[Awaitable[Any]]:
    """Requests of one length that nothing ends."""
    sizes, rng = setting.sizes, random.Random(3)
    return [
        opened.generate(make_prompt(sizes.small, rng, sizes.stream_prompt), max_tokens=None, **sampling)
        for _ in range(sizes.num_streams)
    ]


async def gap(setting: Setting, opened: Engine) -> Result:
    row = "gap between decode steps"
    watch, batch = Watch(opened), setting.sizes.num_streams
    async with Load(*_long_streams(setting, opened, **GREEDY)) as load:
        await watch.until(lambda: watch.num_decode_steps(batch) > 4, load.tasks)
        trace = await _trace(setting, opened, watch, load, "gap.json")
    watch.close()
    if setting.device != "cuda":
        return setting.result(row, reason=NEEDS_GPU)
    gaps = trace.decode_gaps_us()
    if not gaps:
        raise RuntimeError("the trace has no two decode steps in a row")
    waits = sorted({wait for step in trace.steps for wait in step.waits})
    details: dict[str, float | str] = {"p90, µs": sorted(gaps)[int(0.9 * len(gaps))], "gaps": len(gaps)}
    details["waits in steps"] = ", ".join(waits) or "none"
    return setting.result(row, value=statistics.median(gaps), unit="µs", details=details)


async def loop_lag(setting: Setting, opened: Engine) -> Result:
    """A ticker of 1 ms beside streams that are read token by token: by how much later it runs."""
    lags: list[float] = []
    watch, sizes, rng = Watch(opened), setting.sizes, random.Random(4)

    async def read() -> None:
        while True:
            prompt = make_prompt(sizes.small, rng, sizes.stream_prompt)
            async with opened.stream(prompt, max_tokens=sizes.request_tokens[1], **GREEDY) as stream:
                async for _ in stream:
                    pass

    async def tick() -> None:
        while True:
            begin = time.perf_counter()
            await asyncio.sleep(TICK_S)
            lags.append(time.perf_counter() - begin - TICK_S)

    async with Load(*(read() for _ in range(sizes.num_streams))) as load:
        await watch.until(lambda: watch.num_decode_steps(sizes.num_streams) > 4, load.tasks)
        first, begin = len(watch.steps), time.perf_counter()
        async with Load(tick()):
            await asyncio.sleep(sizes.lag_s)
        seconds = time.perf_counter() - begin
        num_tokens = sum(record.num_sampled for _, record in watch.steps[first:])
    watch.close()
    ordered = sorted(lags)
    return setting.result(
        "loop lag",
        value=1e3 * ordered[int(0.99 * len(ordered))],
        unit="ms",
        details={
            "p50, ms": 1e3 * statistics.median(lags),
            "max, ms": 1e3 * ordered[-1],
            "streams": sizes.num_streams,
            "tokens/s": num_tokens / seconds,
        },
    )


async def undisturbed(setting: Setting, opened: Engine) -> Result:
    """Synchronisations that torch notices, and blocks that its allocator hands out, while every rule is in use."""
    row, sizes = "synchronisations and allocations", setting.sizes
    watch, batch = Watch(opened), sizes.num_streams
    rules = RULES | {"stop_token_ids": [3, 4]}
    async with Load(*_long_streams(setting, opened, **rules, seed=5)) as load:
        await watch.until(lambda: watch.num_decode_steps(batch) > 4, load.tasks)
        with _noticed_syncs(setting) as caught:
            first, allocated = len(watch.steps), _num_allocations(setting)
            await watch.until(lambda: len(watch.steps) >= first + sizes.steady_steps, load.tasks)
            num_allocations = _num_allocations(setting) - allocated
        steps = [record for _, record in watch.steps[first:]]
    watch.close()
    if setting.device != "cuda":
        return setting.result(row, reason=NEEDS_GPU)
    syncs = [str(each.message) for each in caught if "synchroniz" in str(each.message)]
    details: dict[str, float | str] = {
        "synchronisations": len(syncs),
        "allocations": num_allocations,
        "steps": len(steps),
        "of all sequences": sum(record.num_sampled == batch for record in steps),
    }
    return setting.result(row, value=len(syncs) + num_allocations, unit="", details=details)


@contextlib.contextmanager
def _noticed_syncs(setting: Setting) -> Iterator[list[warnings.WarningMessage]]:
    """What torch warns of meanwhile, in all threads."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        if setting.device == "cuda":
            torch.cuda.set_sync_debug_mode("warn")
        try:
            yield caught
        finally:
            if setting.device == "cuda":
                torch.cuda.set_sync_debug_mode("default")


def _num_allocations(setting: Setting) -> int:
    return torch.cuda.memory_stats().get("allocation.all.allocated", 0) if setting.device == "cuda" else 0


# An engine's end


async def life(setting: Setting) -> None:
    await setting.attempt("memory after aclose", memory_after_close(setting))


async def memory_after_close(setting: Setting) -> Result:
    """Of torch's allocator, which all of the engine's memory comes from, and of the driver."""
    row, sizes = "memory after aclose", setting.sizes
    left, details = 0, dict[str, float | str]()
    for turn in (1, 2):
        before, free = _allocated_bytes(setting), _free_bytes(setting)
        async with engine(setting, sizes.small, max_num_seqs=sizes.num_streams, max_model_len=sizes.small.max_len) as e:
            await asyncio.gather(*(e.generate([5 + i, 6, 7], max_tokens=8, **RULES) for i in range(4)))
            details[f"in use, GB, {turn}"] = (_allocated_bytes(setting) - before) / 1e9
        del e
        gc.collect()
        left = max(left, _allocated_bytes(setting) - before)
        # Kernels' code and the context stay with the process: the first turn's is not the engine's to give back.
        details[f"less is free on the device, MB, {turn}"] = (free - _free_bytes(setting)) / 1e6
    if setting.device != "cuda":
        return setting.result(row, reason=NEEDS_GPU)
    return setting.result(row, value=left, unit="bytes", details=details)


def _allocated_bytes(setting: Setting) -> int:
    return torch.cuda.memory_allocated() if setting.device == "cuda" else 0
