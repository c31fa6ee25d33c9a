"""Our side of the workloads, through the public `Engine`: a runner by the contract of `benchmarks.cpu`.

    python -m benchmarks.cpu.runner --model FOLDER --out FILE [--workloads W1,W2] [--reps N]

Beyond the contract each workload's ``itl_s`` has p50 and p99 over all gaps in ``itl_p50_s`` and ``itl_p99_s``.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import resource
import statistics
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks.cpu.workloads import Job, make_jobs, read_shape

TICK_S = 0.001
WARM_UP = [Job([(11 * i + j) % 200 + 20 for i in range(64)], 8) for j in range(4)]


class Read(Job, frozen=True):
    """What one request brought, and when each of its tokens could be read."""

    token_ids: list[int]
    times: list[float]


def since_start_s() -> float:
    """Since this process was made (proc(5): field 22 of its stat, in clock ticks after boot)."""
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    return time.clock_gettime(time.CLOCK_BOOTTIME) - int(fields[19]) / os.sysconf("SC_CLK_TCK")


def peak_bytes() -> int:
    """The most memory that this process has held, and the most that one ended child has."""
    (line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM:"))
    return 1024 * (int(line.split()[1]) + resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss)


async def read(engine: Any, job: Job) -> Read:
    token_ids: list[int] = []
    times: list[float] = []
    async with engine.stream(
        job.prompt, max_tokens=job.num_output, temperature=0.0, ignore_eos=True, detokenize=False
    ) as stream:
        async for delta in stream:
            token_ids += delta.token_ids
            times += [time.perf_counter()] * len(delta.token_ids)
    assert len(token_ids) == job.num_output, f"{len(token_ids)} tokens in place of {job.num_output}"
    return Read(job.prompt, job.num_output, token_ids, times)


async def tick(lags_s: list[float]) -> None:
    """Sleep for 1 ms again and again; note by how much each sleep was longer."""
    while True:
        due = time.perf_counter() + TICK_S
        await asyncio.sleep(TICK_S)
        lags_s.append(time.perf_counter() - due)


async def run(engine: Any, jobs: list[Job], lags_s: list[float] | None = None) -> dict[str, Any]:
    """Send all jobs at once; returns the figures of one repetition."""
    began_at = time.perf_counter()
    async with asyncio.TaskGroup() as group:
        ticker = group.create_task(tick(lags_s)) if lags_s is not None else None
        tasks = [group.create_task(read(engine, job)) for job in jobs]
        await asyncio.wait(tasks)
        if ticker is not None:
            ticker.cancel()
    reads = [task.result() for task in tasks]
    wall_s = max(each.times[-1] for each in reads) - began_at
    gaps_s = sorted(b - a for each in reads for a, b in zip(each.times, each.times[1:], strict=False))
    means_s = [(each.times[-1] - each.times[0]) / (len(each.times) - 1) for each in reads if len(each.times) > 1]
    return {
        "wall_s": wall_s,
        "out_tok_s": sum(job.num_output for job in jobs) / wall_s,
        "prompt_tok_s": sum(len(job.prompt) for job in jobs) / wall_s,
        "ttft_s": statistics.fmean(each.times[0] - began_at for each in reads),
        "itl_s": statistics.fmean(means_s) if means_s else None,
        "itl_p50_s": percentile(gaps_s, 0.5) if gaps_s else None,
        "itl_p99_s": percentile(gaps_s, 0.99) if gaps_s else None,
        "ids": reads[0].token_ids[:16],
    }


def percentile(ordered: list[float], share: float) -> float:
    return ordered[min(len(ordered) - 1, int(len(ordered) * share))]


def engine_options(args: argparse.Namespace) -> dict[str, Any]:
    """Of `EngineConfig`; what is not named here keeps its default."""
    options: dict[str, Any] = {"max_model_len": min(4096, read_shape(Path(args.model)).max_len), "max_num_seqs": 64}
    if args.quantization:
        options["quantization"] = args.quantization
    for pair in args.set:
        name, _, value = pair.partition("=")
        options[name] = int(value) if value.isdigit() else value
    return options


async def measure(args: argparse.Namespace) -> dict[str, Any]:
    import torch

    import aioengine
    from aioengine import Engine

    shape, options = read_shape(Path(args.model)), engine_options(args)
    startup = {"import_s": since_start_s()}
    async with Engine(args.model, **options) as engine:
        startup["ready_s"] = since_start_s()
        await run(engine, [Job(list(range(11, 19)), 1)])
        startup["to_first_token_s"] = since_start_s()
        await run(engine, WARM_UP)
        results = {}
        for workload in filter(None, args.workloads.split(",")):
            lags_s: list[float] | None = [] if args.lag else None
            runs = []
            for repetition in range(args.reps):
                jobs = make_jobs(workload, repetition, vocab_size=shape.vocab, is_tiny=args.tiny)
                runs.append(await run(engine, jobs, lags_s))
            medians = {
                name: statistics.median(each[name] for each in runs)
                for name, value in runs[0].items()
                if isinstance(value, float)
            }
            results[workload] = {"runs": runs, "peak_rss": peak_bytes(), **medians}
            if lags_s is not None:
                lags_s.sort()
                results[workload]["lag_ms"] = [1e3 * percentile(lags_s, share) for share in (0.5, 0.99, 1.0)]
    versions = {"aioengine": aioengine.__version__, "torch": torch.__version__, "python": sys.version.split()[0]}
    return {"versions": versions, "options": options, "startup": startup, "results": results, "peak_rss": peak_bytes()}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", required=True, help="folder")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--workloads", default="W1,W2,W3,W4,W5")
    parser.add_argument("--reps", type=int, default=1)
    parser.add_argument("--quantization")
    parser.add_argument("--set", action="append", default=[], metavar="NAME=VALUE", help="a field of EngineConfig")
    parser.add_argument("--lag", action="store_true", help="a 1 ms ticker on the loop meanwhile")
    parser.add_argument("--tiny", action="store_true")
    args = parser.parse_args()
    args.out.write_text(json.dumps(asyncio.run(measure(args)), indent=1))


if __name__ == "__main__":
    main()
