"""Both ends of a chunk's size: python -m benchmarks.cpu.chunks [--model 0.6b|30m|demo|FOLDER] [--chunks 32,64,2048]

Some streams decode when a long prompt comes. For each most number of prompt tokens beside decodes
(`EngineConfig.max_mixed_prefill_tokens`):

    alone    a stream's time from one token to the next before the long prompt came, median, ms
    beside   the same until the prompt's first token, median and longest, ms
    TTFT     seconds from the long prompt's arrival to its first token
    W3       output tokens/s of 32 mixed requests that come at once (see `benchmarks.cpu`)

The sizes take turns in each round, each with an engine of its own, all in this process; medians of the rounds.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import statistics
import sys
import tempfile
from collections import defaultdict
from itertools import islice, pairwise
from pathlib import Path
from typing import Any

from aioengine import Engine
from aioengine.kernels.native.compilation import compile_library
from benchmarks.cpu.runner import WARM_UP, run
from benchmarks.cpu.workloads import FIRST_ID, MODEL_HELP, find_model, make_jobs, read_shape
from benchmarks.gpu.command import positive
from benchmarks.gpu.command import run as run_command

STREAM_PROMPT = 32
TOKENS_ALONE = 16
"""Of each stream before the long prompt comes; the first half is not counted, since the streams' prompts lie there."""


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="0.6b", help=MODEL_HELP)
    parser.add_argument("--quantization", choices=["int8", "int4"])
    parser.add_argument("--chunks", type=sizes, default=[16, 64, 256, 2048])
    parser.add_argument("--streams", type=positive(int), default=4)
    parser.add_argument("--prompt", type=positive(int), default=1024, help="tokens of the long one")
    parser.add_argument("--rounds", type=positive(int), default=1)
    parser.add_argument("--without-w3", action="store_true")
    return parser.parse_args()


def sizes(text: str) -> list[int]:
    return [positive(int)(word) for word in text.split(",")]


def main() -> int:
    args = parse()
    compile_library()  # else plain torch would serve the first seconds
    figures: dict[int, list[dict[str, float]]] = defaultdict(list)
    with tempfile.TemporaryDirectory(prefix="aioengine-chunks-") as scratch:
        folder = find_model(args.model, Path(scratch))
        for number in range(args.rounds):
            for chunk in args.chunks if number % 2 == 0 else args.chunks[::-1]:
                figures[chunk].append(asyncio.run(measure(args, folder, chunk)))
                print(f"round {number + 1}, {chunk}: {figures[chunk][-1]}", file=sys.stderr, flush=True)
    names = list(figures[args.chunks[0]][0])
    print("| chunk | " + " | ".join(names) + " |\n" + "|---" * (len(names) + 1) + "|")
    for chunk in args.chunks:
        medians = (statistics.median(figure[name] for figure in figures[chunk]) for name in names)
        print(f"| {chunk} | " + " | ".join(f"{median:,.3g}" for median in medians) + " |")
    return 0


async def measure(args: argparse.Namespace, folder: Path, chunk: int) -> dict[str, float]:
    """The figures of one engine."""
    shape = read_shape(folder)
    max_len = min(4096, shape.max_len)
    options: dict[str, Any] = {"max_model_len": max_len, "max_num_seqs": 64}
    async with Engine(str(folder), quantization=args.quantization, max_mixed_prefill_tokens=chunk, **options) as engine:
        await run(engine, WARM_UP)
        figures = await interrupt(engine, args.streams, min(args.prompt, max_len - 1), shape.vocab, max_len)
        if not args.without_w3:
            figures["W3, tok/s"] = (await run(engine, make_jobs("W3", 0, vocab_size=shape.vocab)))["out_tok_s"]
    return figures


async def interrupt(
    engine: Engine, num_streams: int, prompt_tokens: int, vocab_size: int, max_len: int
) -> dict[str, float]:
    """Let streams run, send a long prompt, and look at both until its first token is there."""
    rng = random.Random(0)
    clock = asyncio.get_running_loop().time
    times: list[list[float]] = [[] for _ in range(num_streams)]
    has_news = asyncio.Condition()

    def prompt(length: int) -> list[int]:
        return [rng.randrange(FIRST_ID, vocab_size) for _ in range(length)]

    async def stream(index: int) -> None:
        async with engine.stream(
            prompt(STREAM_PROMPT),
            max_tokens=max_len - STREAM_PROMPT,
            temperature=0.0,
            ignore_eos=True,
            detokenize=False,
        ) as deltas:
            async for _ in deltas:
                times[index].append(clock())
                async with has_news:
                    has_news.notify_all()

    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(stream(index)) for index in range(num_streams)]
        async with has_news:
            await has_news.wait_for(lambda: all(len(each) >= TOKENS_ALONE for each in times))
        sent_at = clock()
        await engine.generate(prompt(prompt_tokens), max_tokens=1, temperature=0.0, ignore_eos=True, detokenize=False)
        first_at = clock()
        async with has_news:
            await has_news.wait_for(lambda: all(each[-1] > first_at for each in times))
        for task in tasks:
            task.cancel()
    gaps = [gap for each in times for gap in islice(pairwise(each), TOKENS_ALONE // 2, None)]
    beside = [b - a for a, b in gaps if a < first_at and b > sent_at]
    return {
        "alone, ms": 1e3 * statistics.median(b - a for a, b in gaps if b <= sent_at),
        "beside, ms": 1e3 * statistics.median(beside),
        "longest, ms": 1e3 * max(beside),
        "TTFT, s": first_at - sent_at,
    }


if __name__ == "__main__":
    run_command(main)
