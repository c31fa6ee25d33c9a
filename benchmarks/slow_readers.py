"""Do readers who are slow, stall or vanish cost the fast ones anything? And what does one of them hold?

    python benchmarks/slow_readers.py [--repeats 5] [--fast 200] [--others 100] [--json FILE]

The bundled model runs in this process. The fast streams have outputs of a fixed length and are read as they come; their
tokens per second are measured from their start to the last one's end, once without and once with a crowd of others, in
turns, so that a drifting machine hurts both alike. A crowd is there before the fast ones come:

- **stalled**: reads its first delta and then nothing
- **slow**: reads a delta every second, so that no more than five tokens come meanwhile if it is bounded
- **vanished**: leaves the block after three deltas; as many are on their way when the fast ones come

With ``max_unread_tokens`` a stalled stream holds no row and costs no step. Without it, it is computed to its end, and
what is unread is merged: then it costs the fast ones what any other request does. The crowd's outputs are long enough
to last.

A crowd of nobody shows the noise: both halves of its pairs are the same. What a stalled stream holds is counted by
tracemalloc (Python and numpy, the caller's side included) and in KV blocks.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import gc
import statistics
import time
import tracemalloc
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console
from rich.table import Table

from aioengine import Engine, Stream

PROMPT_TOKENS = 16
CROWD_TOKENS = 400
"""Of an output that is to last as long as the fast ones."""
MAX_UNREAD_TOKENS = 4
SLOW_READ_S = 1.0
BYTES_PER_TOKEN = 2 * 4 * 2 * 64 * 2
"""Of KV: keys and values, layers, heads, size of a head, bfloat16."""
MAX_MODEL_LEN = 512


class Crowd(msgspec.Struct, frozen=True, kw_only=True):
    """Who is there beside the fast ones, as shares of ``--others``."""

    name: str
    stalled: float = 0.0
    slow: float = 0.0
    vanished: float = 0.0
    max_unread_tokens: int | None = None


CROWDS = (
    Crowd(name="nobody"),
    Crowd(name="stalled, bounded", stalled=1.0, max_unread_tokens=MAX_UNREAD_TOKENS),
    Crowd(name="stalled, unbounded", stalled=1.0),
    Crowd(name="slow, bounded", slow=1.0, max_unread_tokens=MAX_UNREAD_TOKENS),
    Crowd(name="slow, unbounded", slow=1.0),
    Crowd(name="vanished", vanished=1.0),
    Crowd(name="a third of each, bounded", stalled=0.34, slow=0.33, vanished=0.33, max_unread_tokens=MAX_UNREAD_TOKENS),
)


class Run(msgspec.Struct, frozen=True, kw_only=True):
    """One measurement.

    Attributes:
        tokens_per_s: of the fast ones.
        tokens_per_cpu_s: the same by this process's CPU time, which a busy neighbour does not change.
        max_running: most rows in a step while they ran.
        crowd_tokens: tokens computed for others meanwhile.
    """

    tokens_per_s: float
    tokens_per_cpu_s: float
    max_running: int
    crowd_tokens: int


class Pair(msgspec.Struct, frozen=True, kw_only=True):
    alone: Run
    beside: Run

    @property
    def ratio(self) -> float:
        return self.beside.tokens_per_s / self.alone.tokens_per_s

    @property
    def cpu_ratio(self) -> float:
        return self.beside.tokens_per_cpu_s / self.alone.tokens_per_cpu_s


class Held(msgspec.Struct, frozen=True, kw_only=True):
    """What one stalled stream holds: bytes in Python and numpy, KV blocks, unread tokens."""

    name: str
    num_bytes: float
    num_blocks: float
    num_unread: float


class Figures(msgspec.Struct, frozen=True, kw_only=True):
    fast: int
    others: int
    fast_tokens: int
    pairs: dict[str, list[Pair]]
    held: list[Held]


class MostRunning:
    """An observer that remembers the fullest step."""

    def __init__(self) -> None:
        self.most = 0

    def on_step(self, record: Any) -> None:
        self.most = max(self.most, record.running)

    def on_request(self, metrics: object, finish_reasons: tuple[str, ...]) -> None:
        pass


class Bench:
    """Streams of both kinds over one engine.

    Args:
        engine: started, with rows and blocks for all.
        num_fast, num_others: streams.
        fast_tokens: output of each fast stream.
    """

    def __init__(self, engine: Engine, *, num_fast: int, num_others: int, fast_tokens: int) -> None:
        self.engine = engine
        self.num_fast = num_fast
        self.num_others = num_others
        self.fast_tokens = fast_tokens
        self._num_prompts = 0

    def stream(self, max_tokens: int, max_unread_tokens: int | None = None) -> Stream:
        """A stream of so many tokens with a prompt of its own."""
        self._num_prompts += 1
        number = self._num_prompts
        prompt = [10 + (number // 1000**digit) % 1000 for digit in range(3)] + [20] * (PROMPT_TOKENS - 3)
        return self.engine.stream(
            prompt, max_tokens=max_tokens, max_unread_tokens=max_unread_tokens, ignore_eos=True, seed=number
        )

    async def measure(self, crowd: Crowd | None) -> Run:
        """The fast ones beside a crowd, or alone."""
        observer = MostRunning()
        async with self._crowd(crowd) as num_vanishing:
            tokens_before = self.engine.stats().generation_tokens
            stop_observing = self.engine.add_observer(observer)
            begin, cpu_begin = time.perf_counter(), time.process_time()
            async with asyncio.TaskGroup() as group:
                for _ in range(num_vanishing):
                    group.create_task(self._vanish())
                readers = [group.create_task(self._read()) for _ in range(self.num_fast)]
            seconds, cpu_s = time.perf_counter() - begin, time.process_time() - cpu_begin
            stop_observing()
            num_tokens = sum(reader.result() for reader in readers)
            crowd_tokens = self.engine.stats().generation_tokens - tokens_before - num_tokens
        return Run(
            tokens_per_s=num_tokens / seconds,
            tokens_per_cpu_s=num_tokens / cpu_s,
            max_running=observer.most,
            crowd_tokens=crowd_tokens,
        )

    async def hold(self, name: str, num_streams: int, *, max_tokens: int, max_unread_tokens: int | None) -> Held:
        """Count what stalled streams hold, once nothing more is computed for them."""
        async with contextlib.AsyncExitStack() as streams:  # once, for what is made only then
            await self._stall(streams, 2, max_tokens, max_unread_tokens)
        gc.collect()
        num_free = self._free_blocks()
        tracemalloc.start()
        async with contextlib.AsyncExitStack() as streams:
            opened = await self._stall(streams, num_streams, max_tokens, max_unread_tokens)
            gc.collect()
            num_bytes, _ = tracemalloc.get_traced_memory()
            tracemalloc.stop()
            num_blocks = num_free - self._free_blocks()
            num_unread = sum(len(stream.result.outputs[0].token_ids) - 1 for stream in opened)
        return Held(
            name=name,
            num_bytes=num_bytes / num_streams,
            num_blocks=num_blocks / num_streams,
            num_unread=num_unread / num_streams,
        )

    @contextlib.asynccontextmanager
    async def _crowd(self, crowd: Crowd | None) -> AsyncIterator[int]:
        """The crowd is there and has come as far as it does; gives how many are to come and vanish."""
        if crowd is None:
            yield 0
            return
        num_stalled, num_slow, num_vanished = (
            round(share * self.num_others) for share in (crowd.stalled, crowd.slow, crowd.vanished)
        )
        async with contextlib.AsyncExitStack() as streams, asyncio.TaskGroup() as group:
            slow = [group.create_task(self._read_slowly(crowd.max_unread_tokens)) for _ in range(num_slow)]
            await self._stall(streams, num_stalled, CROWD_TOKENS, crowd.max_unread_tokens, rest=crowd.slow == 0)
            yield num_vanished
            for reader in slow:
                reader.cancel()

    async def _stall(
        self,
        streams: contextlib.AsyncExitStack,
        count: int,
        max_tokens: int,
        max_unread_tokens: int | None,
        *,
        rest: bool = True,
    ) -> list[Stream]:
        """Open so many streams and read one delta of each; wait until bounded ones stand still, or short ones end."""
        opened = []
        for _ in range(count):
            opened.append(await streams.enter_async_context(self.stream(max_tokens, max_unread_tokens)))
        for stream in opened:
            await anext(stream)
        is_still = rest and (max_unread_tokens is not None or max_tokens < CROWD_TOKENS)
        while is_still and self.engine.stats().running:  # noqa: ASYNC110 - no event tells that nothing runs
            await asyncio.sleep(0.005)
        return opened

    async def _read(self) -> int:
        num_tokens = 0
        async with self.stream(self.fast_tokens) as stream:
            async for delta in stream:
                num_tokens += len(delta.token_ids)
        return num_tokens

    async def _read_slowly(self, max_unread_tokens: int | None) -> None:
        async with self.stream(CROWD_TOKENS, max_unread_tokens) as stream:
            async for _ in stream:
                await asyncio.sleep(SLOW_READ_S)

    async def _vanish(self) -> None:
        num_read = 0
        async with self.stream(CROWD_TOKENS) as stream:
            async for _ in stream:
                num_read += 1
                if num_read == 3:
                    return

    def _free_blocks(self) -> int:
        return round((1.0 - self.engine.stats().kv_cache_usage) * self.engine.info.num_blocks)


async def measure_all(args: argparse.Namespace) -> Figures:
    num_streams = args.fast + args.others
    async with Engine(
        max_model_len=MAX_MODEL_LEN,
        max_num_seqs=num_streams,
        max_waiting=num_streams,
        kv_cache_memory_bytes=num_streams * MAX_MODEL_LEN * BYTES_PER_TOKEN,
        max_in_flight=args.max_in_flight,
        num_threads=args.num_threads,
        log_stats_interval_s=0.0,
        show_progress=False,
    ) as engine:
        bench = Bench(engine, num_fast=args.fast, num_others=args.others, fast_tokens=args.tokens)
        pairs: dict[str, list[Pair]] = {crowd.name: [] for crowd in CROWDS}
        for repeat in range(-1, args.repeats):  # the first round is for warming up
            for crowd in CROWDS:
                first, second = (None, crowd) if repeat % 2 else (crowd, None)
                runs = {first: await bench.measure(first), second: await bench.measure(second)}
                if repeat >= 0:
                    pairs[crowd.name].append(Pair(alone=runs[None], beside=runs[crowd]))
        held = [
            await bench.hold(name, args.others, max_tokens=max_tokens, max_unread_tokens=max_unread)
            for name, max_tokens, max_unread in (
                ("bounded, 4 of 400 tokens", CROWD_TOKENS, MAX_UNREAD_TOKENS),
                ("unbounded, 40 tokens", 40, None),
                ("unbounded, 320 tokens", 320, None),
            )
        ]
    return Figures(fast=args.fast, others=args.others, fast_tokens=args.tokens, pairs=pairs, held=held)


def in_short(ratios: list[float]) -> str:
    """The median, and the least and the most."""
    return f"{statistics.median(ratios):.3f} ({min(ratios):.2f}-{max(ratios):.2f})"


def print_figures(figures: Figures) -> None:
    console = Console(width=120)
    title = f"{figures.fast} fast streams of {figures.fast_tokens} tokens beside {figures.others} others"
    table = Table("beside", "alone/s", "beside/s", "ratio", "by CPU time", "rows", "others' tokens", title=title)
    for name, pairs in figures.pairs.items():
        table.add_row(
            name,
            f"{statistics.median(pair.alone.tokens_per_s for pair in pairs):,.0f}",
            f"{statistics.median(pair.beside.tokens_per_s for pair in pairs):,.0f}",
            in_short([pair.ratio for pair in pairs]),
            in_short([pair.cpu_ratio for pair in pairs]),
            str(max(pair.beside.max_running for pair in pairs)),
            f"{statistics.median(pair.beside.crowd_tokens for pair in pairs):,.0f}",
        )
    console.print(table)
    table = Table("a stalled stream", "KiB", "KV blocks", "unread tokens", title="What it holds")
    for held in figures.held:
        table.add_row(held.name, f"{held.num_bytes / 1024:.1f}", f"{held.num_blocks:.1f}", f"{held.num_unread:.1f}")
    console.print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--fast", type=int, default=200)
    parser.add_argument("--others", type=int, default=100)
    parser.add_argument("--tokens", type=int, default=32, help="output of a fast stream")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--max-in-flight", type=int, default=1)
    parser.add_argument("--num-threads", type=int, help="threads of one torch operation")
    parser.add_argument("--json", type=Path, help="write the figures here too")
    args = parser.parse_args()
    figures = asyncio.run(measure_all(args))
    print_figures(figures)
    if args.json is not None:
        args.json.write_bytes(msgspec.json.format(msgspec.json.encode(figures)))


if __name__ == "__main__":
    main()
