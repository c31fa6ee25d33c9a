"""Days of mixed use in minutes: does the engine keep anything that it should have given back?

    python benchmarks/soak.py [--num-requests 20000] [--seed 0] [--concurrency 64] [--max-in-flight 1]

The bundled model runs in this process with a KV cache that is far too small, so that sequences are preempted all the
time. Clients make requests of every kind (`soak_requests.py`), which are read, left, cancelled and aborted at random
moments; meanwhile the engine is paused in each mode, drained, aborted as a whole, and its prefix cache reset.

The requests come in waves. After each one nothing is to do, and everything must be back: blocks, places, names, tasks.
What the process holds then (memory, file descriptors, threads, objects) may not grow from wave to wave: a line is
fitted through it, warm-up aside. Requests that were answered alone at the start come again and must bring the same
tokens. Exits with 1, and a line for each thing that is wrong, if anything is. What is drawn depends on the seed alone;
how it interleaves does not.
"""

from __future__ import annotations

import argparse
import asyncio
import functools
import gc
import logging
import os
import random
import sys
import threading
import time
import traceback
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any, Self

import msgspec
import numpy as np
from soak_requests import FIRST_WORD_ID, MAX_MODEL_LEN, VOCAB_SIZE, Wish, draw_heads, draw_reference

sys.path.append(str(Path(__file__).parents[1] / "tests"))

from integrity import check_integrity

from aioengine import (
    CompletionDelta,
    Engine,
    EngineClosed,
    EngineDead,
    EngineOverloaded,
    InvalidRequest,
    RequestOutput,
    StepFailed,
    Stream,
)
from aioengine.executor.graphs import MAX_GRAPHS

MAX_STEP_TOKENS = 128
MOMENT_S = 0.002
"""About a step."""
MAX_SETTLING_TURNS = 100_000
MAX_VIOLATIONS = 20
"""Violations that are listed; the others are counted."""


class Setting(msgspec.Struct, frozen=True, kw_only=True):
    """A soak.

    Attributes:
        num_requests: in all; ``num_waves`` parts of them, one after the other.
        concurrency: clients, each with one request at a time.
        num_references: requests that are answered alone first, and come again.
        warm_up: share of the waves before anything is expected to stop growing.
        max_rss_growth_mib: the most that memory may grow after the warm-up: an allocator's whims; a kilobyte lost with
            each request would be as much again.
        deadline_s: after so long it must stand still somewhere, and is given up.
    """

    num_requests: int = 20_000
    num_waves: int = 40
    seed: int = 0
    concurrency: int = 64
    max_in_flight: int = 1
    num_threads: int | None = None
    num_references: int = 64
    warm_up: float = 0.2
    max_rss_growth_mib: float = 16.0
    deadline_s: float = 3600.0


class Sample(msgspec.Struct, frozen=True, kw_only=True):
    """Memory, descriptors, threads and objects of the process, after ``num_requests``, while the engine is idle."""

    num_requests: int
    rss_mib: float
    num_fds: int
    num_os_threads: int
    num_tasks: int
    num_objects: int

    @classmethod
    def take(cls, num_requests: int) -> Self:
        gc.collect()
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        return cls(
            num_requests=num_requests,
            rss_mib=pages * os.sysconf("SC_PAGE_SIZE") / 2**20,
            num_fds=len(os.listdir("/proc/self/fd")),
            num_os_threads=len(os.listdir("/proc/self/task")),
            num_tasks=len(asyncio.all_tasks()),
            num_objects=len(gc.get_objects()),
        )


class Growth(msgspec.Struct, frozen=True, kw_only=True):
    """How much more of something there was at the end than after the warm-up, by a line fitted through the samples.

    Attributes:
        noise: standard deviation of the samples from that line.
        bound: the most that ``grown`` may be.
    """

    name: str
    first: float
    last: float
    grown: float
    noise: float
    bound: float

    @classmethod
    def fit(cls, name: str, samples: list[Sample], bound: float) -> Self:
        """By least squares, over the samples' ``num_requests``; at least two samples."""
        x = np.array([sample.num_requests for sample in samples], float)
        y = np.array([getattr(sample, name) for sample in samples], float)
        slope, start = np.polyfit(x, y, 1)
        grown, noise = slope * (x[-1] - x[0]), np.std(y - slope * x - start)
        return cls(name=name, first=float(y[0]), last=float(y[-1]), grown=float(grown), noise=float(noise), bound=bound)

    @property
    def is_bounded(self) -> bool:
        return self.grown <= self.bound


class Report(msgspec.Struct, kw_only=True):
    """The outcome of a soak.

    Attributes:
        outcomes: requests by how they ended for their callers.
        ended: choices by how they ended in the engine.
        upsets: how often each upset came.
        num_compared, num_different: requests that came again, and those whose tokens were others.
        max_blocked: the most sequences that were blocked at once.
        violations: a line for each thing that is wrong.
    """

    setting: Setting
    seconds: float = 0.0
    outcomes: dict[str, int] = {}
    ended: dict[str, int] = {}
    upsets: dict[str, int] = {}
    num_compared: int = 0
    num_different: int = 0
    num_steps: int = 0
    generation_tokens: int = 0
    preemptions: int = 0
    max_blocked: int = 0
    samples: list[Sample] = []
    growth: list[Growth] = []
    violations: list[str] = []


class Reading:
    """The deltas that a reader has been given, choice by choice."""

    def __init__(self, wish: Wish, depth: int) -> None:
        limit = wish.streaming.get("max_unread_tokens")
        self._most_at_once = None if limit is None else limit + depth
        self.texts: list[list[str]] = [[] for _ in range(wish.num_choices)]
        self.token_ids: list[list[int]] = [[] for _ in range(wish.num_choices)]
        self.num_lasts = [0] * wish.num_choices

    def add(self, delta: CompletionDelta) -> None:
        assert not self.num_lasts[delta.index], "a delta came after the last one"
        if self._most_at_once is not None:
            unread = len(delta.token_ids)
            assert unread <= self._most_at_once, f"{unread} tokens lay unread, and {self._most_at_once} may"
        self.texts[delta.index].append(delta.text)
        self.token_ids[delta.index] += delta.token_ids
        self.num_lasts[delta.index] += delta.finish_reason is not None

    def check(self, result: RequestOutput) -> None:
        assert set(self.num_lasts) == {1}, f"choices had {self.num_lasts} last deltas"
        for text, token_ids, output in zip(self.texts, self.token_ids, result.outputs, strict=True):
            assert "".join(text) == output.text, "the deltas' text is not the result's"
            assert token_ids == output.token_ids, "the deltas' tokens are not the result's"


class Broken(Exception):
    """A reader's own error."""


class Soak:
    """One soak; `run` it once."""

    def __init__(self, setting: Setting) -> None:
        self.setting = setting
        self.report = Report(setting=setting)
        self._rng = random.Random(f"soak {setting.seed}")
        self._heads = draw_heads(self._rng)
        self._references = [draw_reference(self._rng, self._heads) for _ in range(setting.num_references)]
        self._expected: list[list[list[int]]] = []
        self._outcomes: Counter[str] = Counter()
        self._upsets: Counter[str] = Counter()
        self._num_started = 0
        self._open = asyncio.Event()
        self._open.set()
        self._num_drains = 0

    async def run(self) -> Report:
        """Do it, and return what was seen. It raises nothing for what the engine does wrong."""
        report, begin = self.report, time.perf_counter()
        threads_before = set(threading.enumerate())
        async with Engine(**self._engine_options()) as engine:  # what libraries make once is made now
            await engine.generate("Once upon a time", max_tokens=2)
        tasks_before, before = asyncio.all_tasks(), Sample.take(0)
        await self._serve()
        gc.unfreeze()
        report.seconds = time.perf_counter() - begin
        report.outcomes, report.upsets = dict(self._outcomes.most_common()), dict(self._upsets.most_common())
        num_fds = Sample.take(0).num_fds - before.num_fds
        self._expect(asyncio.all_tasks() <= tasks_before, "tasks are left after aclose")
        self._expect(num_fds <= 0, f"{num_fds} file descriptors are left")
        left = [thread.name for thread in set(threading.enumerate()) - threads_before if thread.is_alive()]
        self._expect(not left, f"threads are left after aclose: {left}")
        return report

    def _engine_options(self) -> dict[str, Any]:
        """Rows, places and blocks are few: what is asked for never fits."""
        return {
            "dtype": "float32",  # a tie of two tokens is then rare enough to expect the same ones each time
            "max_model_len": MAX_MODEL_LEN,
            "max_num_seqs": 16,
            "max_num_batched_tokens": MAX_STEP_TOKENS,
            "max_waiting": 24,
            "kv_cache_memory_bytes": 40 * 16 * 4096,  # 40 blocks of 16 tokens; the longest sequence needs 32
            "max_in_flight": self.setting.max_in_flight,
            "num_threads": self.setting.num_threads,
            "log_stats_interval_s": 0.0,
            "show_progress": False,
        }

    async def _serve(self) -> None:
        """Start an engine, soak it, close it."""
        async with Engine(**self._engine_options()) as engine:
            self._engine = engine
            assert engine._runtime is not None
            self._core = engine._runtime.core
            try:
                async with asyncio.timeout(self.setting.deadline_s):
                    await self._warm_up()
                    for arguments in self._references:
                        output = await engine.generate(**arguments)
                        self._expected.append([choice.token_ids for choice in output.outputs])
                    await self._run_waves()
            except* TimeoutError:
                self._violate(f"it stood still after {self._num_started} requests: {self._core.stats()}")
            except* EngineDead as deaths:
                cause = deaths.exceptions[0].__cause__
                self._violate(f"the engine died: {''.join(traceback.format_exception(cause, limit=-8))}")
            report, stats = self.report, engine.stats()
            report.ended = dict(stats.finished)
            report.num_steps, report.preemptions = self._core.stats().steps, stats.preemptions
            report.generation_tokens = stats.generation_tokens
            del self._engine, self._core
        num_ends = self._outcomes.total()
        self._expect(num_ends == self._num_started, f"{self._num_started} requests were made, and {num_ends} ended")
        self._expect(
            report.num_different * 1000 <= report.num_compared,
            f"{report.num_different} of {report.num_compared} requests that came again had other tokens",
        )

    async def _warm_up(self) -> None:
        """Let libraries make what they make at first need, and keep: it is no growth.

        oneDNN compiles a kernel for each shape, about half a megabyte each, and keeps 1,024 of them: so here is a step
        of each size. Long texts and chats begin threads.
        """
        for num_tokens in range(1, MAX_STEP_TOKENS + 1):
            prompt = [self._rng.randrange(FIRST_WORD_ID, VOCAB_SIZE) for _ in range(num_tokens)]
            await self._engine.generate(prompt, max_tokens=1, prompt_logprobs=0)
        for text in ("Tell me about the moon. " * 50, [{"role": "user", "content": "Hello!"}]):
            await self._engine.generate(text, max_tokens=1)

    async def _run_waves(self) -> None:
        setting, samples = self.setting, self.report.samples
        num_warm_up = max(1, int(setting.warm_up * setting.num_waves))
        gc.collect()
        gc.freeze()  # what is there already is neither counted nor looked through again
        self._num_tasks = len(asyncio.all_tasks())
        for part in np.array_split(np.arange(setting.num_requests), setting.num_waves):
            await self._run_wave(len(part))
            await self._settle()
            self._drop_graphs()
            samples.append(Sample.take(self._num_started))
        bounds = {"num_fds": 0.5, "num_os_threads": 0.5, "num_tasks": 0.5, "num_objects": 200.0}
        for name, bound in {"rss_mib": setting.max_rss_growth_mib, **bounds}.items():
            growth = Growth.fit(name, samples[num_warm_up:], bound)
            self.report.growth.append(growth)
            self._expect(growth.is_bounded, f"{name} grew by {growth.grown:.1f}; the bound is {bound}")

    async def _run_wave(self, num_requests: int) -> None:
        wishes = (Wish(self._rng, self._heads, self._references) for _ in range(num_requests))
        async with asyncio.TaskGroup() as group:
            troublemaker = group.create_task(self._upset_now_and_then())
            clients = [group.create_task(self._run_client(wishes, group)) for _ in range(self.setting.concurrency)]
            await asyncio.wait(clients)
            troublemaker.cancel()

    async def _settle(self) -> None:
        """Wait until nothing is to do, and see that everything is back."""
        for _ in range(MAX_SETTLING_TURNS):
            if self._core.is_drained and len(asyncio.all_tasks()) <= self._num_tasks:
                break
            await asyncio.sleep(0)
        await self._engine.pause("keep")  # the device is idle, too
        core, runtime = self._core, self._engine._runtime
        assert runtime is not None
        inner = core.stats()
        self._check_integrity()
        remaining = {
            "blocks in use": inner.num_blocks - inner.free_blocks,
            "running": inner.running,
            "waiting": inner.waiting,
            "alive in the core": len(core._live) + bool(core._endings),
            "not left": len(runtime.admission.requests),
            "waiting for admission": runtime.admission.num_preparing + len(runtime.admission._waiting),
            "computing a prefix": len(core.kv.cache.pending),
            "tasks": len(asyncio.all_tasks()) - self._num_tasks,
        }
        for name, count in remaining.items():
            self._expect(count == 0, f"{count} {name} after {self._num_started} requests, and nothing is to do")
        await self._engine.resume()

    def _check_integrity(self) -> None:
        try:
            check_integrity(self._core.scheduler)
        except AssertionError as error:
            self._violate(f"the scheduler after {self._num_started} requests: {error}")

    def _drop_graphs(self) -> None:
        """Drop the graphs of decode steps, lest they hide what else grows.

        There is one for each number of rows and combination of sampling that came twice, and mixed use goes on meeting
        new ones: a cache with a bound of its own.
        """
        graphs = self._core.executor._device.runner.graphs
        self._expect(len(graphs) <= MAX_GRAPHS, f"{len(graphs)} graphs are kept; {MAX_GRAPHS} may be")
        graphs.clear()
        graphs._seen.clear()

    # Clients

    async def _run_client(self, wishes: Iterator[Wish], group: asyncio.TaskGroup) -> None:
        loop = asyncio.get_running_loop()
        for wish in wishes:
            await self._open.wait()
            self._num_started += 1
            task = group.create_task(self._make(wish))
            if wish.strike:
                request_id = wish.arguments["request_id"]
                abort = functools.partial(self._engine.abort, request_id)
                loop.call_later(wish.strike_moments * MOMENT_S, task.cancel if wish.strike == "cancel" else abort)
            await asyncio.wait({task})
            outcome = "cancelled" if task.cancelled() else task.result()
            self._outcomes[outcome] += 1
            self.report.max_blocked = max(self.report.max_blocked, self._core.stats().blocked)
            if outcome == "overloaded":
                await asyncio.sleep(MOMENT_S)

    async def _make(self, wish: Wish) -> str:
        """Make a request; returns how it ended."""
        try:
            if wish.way == "generate":
                return self._judge(wish, await self._engine.generate(**wish.arguments))
            return await self._stream(wish)
        except InvalidRequest as error:
            if error.param == wish.refused_for:
                return f"refused: {error.param}"
            return self._violate(f"refused for {error.param}, not for {wish.refused_for}: {error}")
        except EngineOverloaded as error:
            if wish.arguments["on_full"] == "raise":
                return "overloaded"
            return self._violate(f"overloaded, though it would wait: {error}")
        except EngineClosed as error:
            return "refused while draining" if self._num_drains else self._violate(f"{error!r}")
        except StepFailed as error:
            return "failed" if wish.may_fail else self._violate(f"{error!r}")
        except Broken:
            return "broken"
        except Exception:
            return self._violate(f"{wish.way} {wish.arguments!r:.500}: {traceback.format_exc(limit=-6)}")

    async def _stream(self, wish: Wish) -> str:
        stream = self._engine.stream(**wish.arguments, **wish.streaming)
        reading = Reading(wish, self.setting.max_in_flight)
        try:
            async with stream:
                outcome = await self._read(wish, stream, reading)
        finally:
            if stream._state.is_begun:
                self._expect(stream.result.finished, f"{stream.result.request_id} was left, and goes on")
        if outcome == "left":
            return outcome
        if not outcome:
            reading.check(stream.result)
        return self._judge(wish, stream.result)

    async def _read(self, wish: Wish, stream: Stream, reading: Reading) -> str:
        """Read as the wish has it; returns how the reader left, or nothing."""
        if wish.way == "unread":
            await asyncio.sleep(wish.rest * MOMENT_S)
        patience = wish.patience
        async for delta in stream:
            reading.add(delta)
            patience -= 1
            if patience >= 0:
                continue
            if wish.way == "left":
                return "left"
            if wish.way == "broken":
                raise Broken
            if wish.way == "finish":
                await stream.finish()
                return "finish"
            if wish.way == "stalled" and patience == -1:
                await asyncio.sleep(wish.rest * MOMENT_S)
        return ""

    def _judge(self, wish: Wish, output: RequestOutput) -> str:
        """Look at a request that came to its end; returns how it ended."""
        reasons = [choice.finish_reason or "none" for choice in output.outputs]
        if wish.refused_for == "prompt" and output.metrics is not None and output.metrics.queue_time_s is None:
            assert set(reasons) == {"abort"}, "a bad prompt was accepted"  # aborted before anything looked at it
            return "abort"
        assert wish.refused_for is None, f"a bad {wish.refused_for} was accepted"
        assert len(reasons) == wish.num_choices, f"{len(reasons)} choices came, not {wish.num_choices}"
        limit, allowed = wish.arguments["max_tokens"], set(wish.arguments.get("allowed_token_ids", ()))
        for choice in output.outputs:
            assert len(choice.token_ids) <= limit, f"{len(choice.token_ids)} tokens came, and {limit} were allowed"
            assert not allowed or allowed.issuperset(choice.token_ids), "a token came that is not allowed"
        if wish.repeats is not None and "abort" not in reasons:
            self.report.num_compared += 1
            if [choice.token_ids for choice in output.outputs] != self._expected[wish.repeats]:
                self.report.num_different += 1
        return "+".join(sorted(set(reasons)))

    # Upsets of the whole engine

    async def _upset_now_and_then(self) -> None:
        upsets: dict[str, tuple[int, Callable[[], Awaitable[None]]]] = {
            "pause, keep": (8, functools.partial(self._pause, "keep")),
            "pause, wait": (4, functools.partial(self._pause, "wait")),
            "pause, abort": (1, functools.partial(self._pause, "abort")),
            "drain": (3, self._drain),
            "reset of the prefix cache": (8, self._engine.reset_prefix_cache),
            "abort of all": (1, self._abort_all),
        }
        weights = [weight for weight, _ in upsets.values()]
        while True:
            await asyncio.sleep(self._rng.randint(5, 75) * MOMENT_S)
            name = self._rng.choices(list(upsets), weights)[0]
            self._upsets[name] += 1
            await upsets[name][1]()
            self._check_integrity()

    async def _pause(self, mode: Any) -> None:
        """Pause, see that the device rests, resume."""
        try:
            await self._engine.pause(mode)
            num_steps = self._core.executor.stats.num_steps
            if mode != "keep":
                self._expect(not self._core.scheduler.table.running, f"sequences run after pause({mode!r})")
            for _ in range(self._rng.choice([0, 1, 20, 200])):
                await asyncio.sleep(0)
            self._expect(num_steps == self._core.executor.stats.num_steps, f"a step was run in a pause ({mode})")
        finally:
            await self._engine.resume()

    async def _drain(self) -> None:
        self._num_drains += 1
        self._open.clear()
        try:
            await self._engine.drain()
            stats = self._core.stats()
            self._expect(self._core.is_drained, "requests are alive after drain()")
            self._expect(stats.free_blocks == stats.num_blocks, "blocks are in use after drain()")
        finally:
            await self._engine.resume()
            self._open.set()

    async def _abort_all(self) -> None:
        self._engine.abort_all()

    def _expect(self, is_so: bool, otherwise: str) -> None:
        if not is_so:
            self._violate(otherwise)

    def _violate(self, violation: str) -> str:
        if len(self.report.violations) < MAX_VIOLATIONS:
            self.report.violations.append(violation)
        return "wrong"


def print_report(report: Report) -> None:
    setting, seconds = report.setting, report.seconds
    print(
        f"{setting.num_requests:,} requests of {setting.concurrency} clients, depth {setting.max_in_flight}, seed "
        f"{setting.seed}: {seconds:,.0f} s, {report.num_steps:,} steps, {report.generation_tokens:,} tokens, "
        f"{report.preemptions:,} preemptions; came again {report.num_compared:,}, with other tokens "
        f"{report.num_different}"
    )
    for title, counts in {"for callers": report.outcomes, "choices": report.ended, "upsets": report.upsets}.items():
        print(f"{title}: {', '.join(f'{name} {count:,}' for name, count in counts.items())}")
    for growth in report.growth:
        line = f"{growth.name}: {growth.first:,.1f} after the warm-up, {growth.last:,.1f} at the end, "
        print(line + f"grown by {growth.grown:,.1f} (noise {growth.noise:,.1f}, bound {growth.bound:g})")
    for violation in report.violations:
        print(f"WRONG: {violation}")
    if not report.violations:
        print("nothing is held, nothing grows, each request had one end")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--num-requests", type=int, default=20_000)
    parser.add_argument("--num-waves", type=int, default=40)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--concurrency", type=int, default=64)
    parser.add_argument("--max-in-flight", type=int, default=1)
    parser.add_argument("--num-threads", type=int, default=1, help="threads of one torch operation")
    parser.add_argument("--deadline-s", type=float, default=3600.0)
    args = vars(parser.parse_args())
    logging.getLogger("aioengine").setLevel(logging.CRITICAL + 1)  # some requests are made to fail, and are counted
    report = asyncio.run(Soak(Setting(**args)).run())
    print_report(report)
    sys.exit(bool(report.violations))


if __name__ == "__main__":
    main()
