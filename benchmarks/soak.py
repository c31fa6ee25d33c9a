"""Days of mixed use in minutes: does the engine keep anything that it should have given back?

    python benchmarks/soak.py [--num-requests 20000] [--seed 0] [--concurrency 64] [--max-in-flight 1] [--json FILE]

The bundled model runs in this process with a KV cache that is far too small, so that sequences are preempted all the
time. Clients make requests of every kind (`soak_requests.py`), which are read, left, forgotten, cancelled and aborted
at random moments; meanwhile the engine is paused in each mode, drained, aborted as a whole, and its prefix cache reset.

The requests come in waves. After each one nothing is to do, and everything must be back: blocks, places, names, tasks.
What the process holds then (memory, file descriptors, threads, objects) may not grow from wave to wave: a line is
fitted through it, warm-up aside. Requests that were answered alone at the start come again and must bring the same
tokens. Exits with 1, and a line for each thing that is wrong, if anything is. What is drawn depends on the seed alone;
how it interleaves does not.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import functools
import gc
import heapq
import itertools
import logging
import random
import sys
import threading
import time
import traceback
import tracemalloc
import weakref
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from soak_report import Growth, Lag, Report, Sample, Setting, num_fds, num_os_threads, print_report, rss_mib
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
from aioengine.frontend.request_state import RequestState

MAX_STEP_TOKENS = 128
TICK_S = 0.001
MAX_LAGS = 2**21
MAX_SETTLING_TURNS = 100_000
MAX_TOLD = 20
"""Violations that are told; the others are counted."""


def engine_options(setting: Setting) -> dict[str, Any]:
    """Rows, places and blocks are few: what is asked for never fits."""
    return {
        "dtype": "float32",  # a tie of two tokens is then rare enough to expect the same ones each time
        "max_model_len": MAX_MODEL_LEN,
        "max_num_seqs": 16,
        "max_num_batched_tokens": MAX_STEP_TOKENS,
        "max_waiting": 24,
        "kv_cache_memory_bytes": 40 * 16 * 4096,  # 40 blocks of 16 tokens; the longest sequence needs 32
        "max_in_flight": setting.max_in_flight,
        "num_threads": setting.num_threads,
        "log_stats_interval_s": 0.0,
        "show_progress": False,
    }


class Moments:
    """A clock that counts what happens in the engine, its steps and the ends of requests: an `Observer` of it.

    Readers who rest wait by it. Lest all rest and nothing happens any more, at most a quarter of the clients do.
    """

    def __init__(self) -> None:
        self.now = 0
        self.num_ended = 0
        self.num_clients = 0
        self.is_restless = False
        """Nobody rests: somebody waits for all to end."""
        self._num_resting = 0
        self._due: list[tuple[int, int, Callable[[], object]]] = []
        self._numbers = itertools.count()

    def on_step(self, record: object) -> None:
        self._tick()

    def on_request(self, metrics: object, finish_reasons: tuple[str, ...]) -> None:
        self.num_ended += 1
        self._tick()

    def after(self, num_moments: int, callback: Callable[[], object]) -> None:
        heapq.heappush(self._due, (self.now + num_moments, next(self._numbers), callback))

    async def rest(self, num_moments: int) -> None:
        if self.is_restless or (self._num_resting + 1) * 4 > self.num_clients:
            await asyncio.sleep(0)
            return
        self._num_resting += 1
        try:
            await self.wait(num_moments)
        finally:
            self._num_resting -= 1

    async def wait(self, num_moments: int) -> None:
        passed = asyncio.get_running_loop().create_future()
        self.after(num_moments, lambda: None if passed.done() else passed.set_result(None))
        await passed

    def client_is_done(self) -> None:
        self.num_clients -= 1
        if self._num_resting * 4 > self.num_clients:
            self.hurry()

    def hurry(self) -> None:
        """All that is due later is due now."""
        due, self._due = self._due, []
        for _, _, callback in due:
            asyncio.get_running_loop().call_soon(callback)

    @contextlib.contextmanager
    def restless(self) -> Iterator[None]:
        self.is_restless = True
        self.hurry()
        try:
            yield
        finally:
            self.is_restless = False

    def _tick(self) -> None:
        self.now += 1
        while self._due and self._due[0][0] <= self.now:
            # Not here: this is called in the middle of a step.
            asyncio.get_running_loop().call_soon(heapq.heappop(self._due)[2])


class Reading:
    """What a reader has been given, choice by choice."""

    def __init__(self, wish: Wish, depth: int) -> None:
        limit = wish.streaming.get("max_unread_tokens")
        self._most_at_once = None if limit is None else limit + depth
        self.texts: list[list[str]] = [[] for _ in range(wish.num_choices)]
        self.token_ids: list[list[int]] = [[] for _ in range(wish.num_choices)]
        self.num_lasts = [0] * wish.num_choices
        self.is_whole = True
        """Nothing was left to `Stream.finish`."""

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
    """What a reader's own code raises."""


class Soak:
    """One soak; `run` it once."""

    def __init__(self, setting: Setting) -> None:
        self.setting = setting
        self.report = Report(setting=setting)
        self._rng = random.Random(f"soak {setting.seed}")
        self._heads = draw_heads(self._rng)
        self._references = [draw_reference(self._rng, self._heads) for _ in range(setting.num_references)]
        self._expected: list[list[list[int]]] = []
        self._moments = Moments()
        self._outcomes: Counter[str] = Counter()
        self._upsets: Counter[str] = Counter()
        self._known_ends: Counter[str] = Counter()
        self._num_untold = 0
        """Choices of requests that were accepted perhaps, and whose callers never heard how they ended."""
        self._num_started = 0
        self._num_violations = 0
        self._peaks: Counter[str] = Counter()
        self._open = asyncio.Event()
        self._open.set()
        self._num_drains = 0
        self._lags = np.zeros(MAX_LAGS, np.float32)  # made at once, so that it is no growth
        self._num_lags = 0
        self._is_busy = False
        self._types: list[Counter[str]] = []

    async def run(self) -> Report:
        """Do it, and say what was seen. It raises nothing for what the engine does wrong."""
        report, begin = self.report, time.perf_counter()
        threads_before = set(threading.enumerate())
        async with Engine(**engine_options(self.setting)) as engine:  # what libraries make once is made now
            await engine.generate("Once upon a time", max_tokens=2)
        tasks_before, num_fds_before = asyncio.all_tasks(), num_fds()
        core = await self._serve()
        gc.unfreeze()
        report.seconds = time.perf_counter() - begin
        report.outcomes = dict(self._outcomes.most_common())
        report.upsets = dict(self._upsets.most_common())
        report.peaks = dict(self._peaks)
        if self._num_lags:
            lags_ms = self._lags[: self._num_lags] * 1e3
            p50, p99 = np.percentile(lags_ms, [50, 99])
            report.lag = Lag(p50=float(p50), p99=float(p99), max=float(lags_ms.max()))
        gc.collect()
        self._expect(core() is None, "the engine's core is alive after aclose, and nobody holds the engine")
        self._expect(asyncio.all_tasks() <= tasks_before, "tasks are left after aclose")
        self._expect(num_fds() <= num_fds_before, f"{num_fds() - num_fds_before} file descriptors are left")
        left = [thread.name for thread in set(threading.enumerate()) - threads_before if thread.is_alive()]
        self._expect(not left, f"threads are left after aclose: {left}")
        if self._num_violations > MAX_TOLD:
            report.violations.append(f"... and {self._num_violations - MAX_TOLD} more")
        return report

    # The engine's life

    async def _serve(self) -> Callable[[], object]:
        """Start an engine, soak it, close it; returns what tells whether its core is garbage."""
        async with Engine(**engine_options(self.setting)) as engine:
            self._engine = engine
            assert engine._runtime is not None
            core = self._core = engine._runtime.core
            core.add = functools.partial(self._count_accepted, core.add)  # type: ignore[method-assign]
            admission = engine._runtime.admission
            admission.release = functools.partial(self._count_dismissed, admission.release)  # type: ignore[method-assign]
            engine.add_observer(self._moments)
            try:
                async with asyncio.timeout(self.setting.deadline_s), asyncio.TaskGroup() as group:
                    ticker = group.create_task(self._tick()) if self.setting.measures_lag else None
                    await self._warm_up()
                    await self._answer_references()
                    await self._soak()
                    self._tell_ends()
                    if ticker is not None:
                        ticker.cancel()
            except* TimeoutError:
                self._violate(f"it stood still after {self._num_started} requests: {core.stats()}")
            except* EngineDead as deaths:
                cause = deaths.exceptions[0].__cause__
                self._violate(f"the engine died: {''.join(traceback.format_exception(cause, limit=-8))}")
            alive = weakref.ref(core)
            del self._engine, self._core
        return alive

    def _count_accepted(self, add: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        added = add(*args, **kwargs)
        self.report.num_accepted += 1
        return added

    def _count_dismissed(
        self, release: Callable[[RequestState, int], None], request: RequestState, num_sequences: int
    ) -> None:
        """A request that is aborted at the door is answered and never comes to the core; one that is refused raises."""
        self.report.num_accepted += not num_sequences and sys.exc_info()[0] is None
        release(request, num_sequences)

    async def _warm_up(self) -> None:
        """What libraries make when it is first needed, and keep, is made now: it is no growth.

        oneDNN compiles a kernel for each shape, about half a megabyte each, and keeps 1,024 of them: so here is a step
        of each size. Long texts and chats begin threads.
        """
        for num_tokens in range(1, MAX_STEP_TOKENS + 1):
            prompt = [self._rng.randrange(FIRST_WORD_ID, VOCAB_SIZE) for _ in range(num_tokens)]
            self._note_ends(await self._engine.generate(prompt, max_tokens=1, prompt_logprobs=0))
        for text in ("Tell me about the moon. " * 50, [{"role": "user", "content": "Hello!"}]):
            self._note_ends(await self._engine.generate(text, max_tokens=1))

    async def _answer_references(self) -> None:
        for arguments in self._references:
            output = await self._engine.generate(**arguments)
            self._note_ends(output)
            self._expected.append([choice.token_ids for choice in output.outputs])

    async def _soak(self) -> None:
        setting = self.setting
        sizes = [len(part) for part in np.array_split(np.arange(setting.num_requests), setting.num_waves)]
        num_warm_up = max(1, int(setting.warm_up * setting.num_waves))
        gc.collect()
        gc.freeze()  # what is there already is neither counted nor looked through again
        self._num_tasks = len(asyncio.all_tasks())
        for number, size in enumerate(sizes):
            await self._wave(size)
            await self._settle()
            self.report.samples.append(self._sample())
            if number in (num_warm_up, setting.num_waves - 1):
                self._types.append(_count_types())
        self._judge(self.report.samples[num_warm_up:])
        if not all(growth.is_bounded for growth in self.report.growth):
            await self._diagnose(sizes[-1])

    async def _wave(self, num_requests: int) -> None:
        wishes = (Wish(self._rng, self._heads, self._references) for _ in range(num_requests))
        self._is_busy = True
        self._moments.num_clients = self.setting.concurrency
        async with asyncio.TaskGroup() as group:
            troublemaker = group.create_task(self._upset_now_and_then())
            clients = [group.create_task(self._client(wishes, group)) for _ in range(self.setting.concurrency)]
            await asyncio.wait(clients)
            troublemaker.cancel()
        self._is_busy = False

    async def _settle(self) -> None:
        """Wait until nothing is to do, and see that everything is back."""
        self._moments.hurry()
        for _ in range(MAX_SETTLING_TURNS):
            if self._core.is_drained and len(asyncio.all_tasks()) <= self._num_tasks:
                break
            await asyncio.sleep(0)
        await self._engine.pause("keep")  # the device is idle, too
        core, runtime, stats = self._core, self._engine._runtime, self._engine.stats()
        assert runtime is not None
        inner = core.stats()
        self._check_integrity()
        self._expect(
            inner.free_blocks == inner.num_blocks,
            f"{inner.num_blocks - inner.free_blocks} blocks are in use after {self._num_started} requests",
        )
        rests = {
            "running": inner.running,
            "waiting": inner.waiting,
            "blocked": inner.blocked,
            "unstarted": core.scheduler.num_unstarted,
            "alive in the core": len(core._live) + bool(core._endings),
            "not left": len(runtime.admission.requests),
            "waiting for admission": runtime.admission.num_preparing + len(runtime.admission._waiting),
            "computing a prefix": len(core.kv.cache.pending),
            "running, by stats()": stats.running,
            "waiting, by stats()": stats.waiting,
            "tasks": len(asyncio.all_tasks()) - self._num_tasks,
        }
        for what, count in rests.items():
            self._expect(count == 0, f"{count} {what} after {self._num_started} requests, and nothing is to do")
        self._expect(stats.kv_cache_usage == 0.0, f"stats() tells of {stats.kv_cache_usage:.1%} KV cache in use")
        self._expect(
            self.report.num_accepted == self._moments.num_ended,
            f"{self.report.num_accepted} requests were accepted, and {self._moments.num_ended} have ended",
        )
        await self._engine.resume()

    def _check_integrity(self) -> None:
        try:
            check_integrity(self._core.scheduler)
        except AssertionError as error:
            self._violate(f"the scheduler after {self._num_started} requests: {error}")

    # Clients

    async def _client(self, wishes: Iterator[Wish], group: asyncio.TaskGroup) -> None:
        try:
            for wish in wishes:
                await self._open.wait()
                self._num_started += 1
                task = group.create_task(self._live(wish))
                self._arm(wish, task)
                await asyncio.wait({task})
                outcome = "cancelled" if task.cancelled() else task.result()
                self._outcomes[outcome] += 1
                self._look()
                if outcome == "overloaded":
                    await self._moments.rest(3)
        finally:
            self._moments.client_is_done()

    def _arm(self, wish: Wish, task: asyncio.Task[str]) -> None:
        """Let what strikes the request come when it is to come."""
        if not wish.strike:
            return
        request_id = wish.arguments["request_id"]
        strike = task.cancel if wish.strike == "cancel" else functools.partial(self._engine.abort, request_id)
        if wish.strike_turns is None:
            self._moments.after(wish.strike_moments, strike)
        else:
            _after_turns(wish.strike_turns, strike)

    async def _live(self, wish: Wish) -> str:
        """Make a wish; returns how it ended."""
        try:
            if wish.way == "generate":
                return await self._generate(wish)
            if wish.way == "forgotten":
                return await self._forget(wish)
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

    async def _generate(self, wish: Wish) -> str:
        output = None
        try:
            output = await self._engine.generate(**wish.arguments)
        finally:
            if output is None:
                self._num_untold += wish.num_choices
        return self._end(wish, output)

    async def _stream(self, wish: Wish) -> str:
        stream = self._engine.stream(**wish.arguments, **wish.streaming)
        reading = Reading(wish, self.setting.max_in_flight)
        try:
            async with stream:
                is_left = await self._read(wish, stream, reading)
        finally:
            if stream._state.is_begun:
                self._note_ends(stream.result)
        if is_left:
            return "left"
        if reading.is_whole:
            reading.check(stream.result)
        return self._end(wish, stream.result, is_noted=True)

    async def _read(self, wish: Wish, stream: Stream, reading: Reading) -> bool:
        """Read as the wish says; returns whether the reader has left."""
        if wish.way == "unread":
            await self._moments.rest(wish.rest)
        patience = wish.patience
        async for delta in stream:
            reading.add(delta)
            patience -= 1
            if patience >= 0:
                continue
            if wish.way == "left":
                return True
            if wish.way == "broken":
                raise Broken
            if wish.way == "finish":
                reading.is_whole = False
                await stream.finish()
                return False
            if wish.way == "stalled" and patience == -1:
                await self._moments.rest(wish.rest)
        return False

    async def _forget(self, wish: Wish) -> str:
        num_read = 0
        async for _ in self._deltas(wish):  # dropped unclosed: the loop closes it, some turns later
            num_read += 1
            if num_read > wish.patience:
                break
        return "forgotten"

    async def _deltas(self, wish: Wish) -> AsyncIterator[CompletionDelta]:
        stream = self._engine.stream(**wish.arguments, **wish.streaming)
        try:
            async with stream:
                async for delta in stream:
                    yield delta
        finally:
            if stream._state.is_begun:
                self._note_ends(stream.result)

    def _end(self, wish: Wish, output: RequestOutput, *, is_noted: bool = False) -> str:
        """Look at a request that came to its end; returns how it ended."""
        if not is_noted:
            self._note_ends(output)
        reasons = [choice.finish_reason or "none" for choice in output.outputs]
        if wish.refused_for == "prompt" and output.metrics is not None and output.metrics.queue_time_s is None:
            assert set(reasons) == {"abort"}, "a bad prompt was accepted"  # aborted before anybody looked at it
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

    def _note_ends(self, output: RequestOutput) -> None:
        self._expect(output.finished, f"{output.request_id} was left, and goes on")
        self._known_ends.update(choice.finish_reason or "none" for choice in output.outputs)

    # What befalls the whole engine

    async def _upset_now_and_then(self) -> None:
        upsets = {
            "pause, keep": (8, self._pause_and_keep),
            "pause, wait": (4, self._pause_and_wait),
            "pause, abort": (1, self._pause_and_abort),
            "pause, given up": (4, self._give_up_a_pause),
            "drain": (3, self._drain),
            "reset of the prefix cache": (8, self._engine.reset_prefix_cache),
            "abort of all": (1, self._abort_all),
        }
        weights = [weight for weight, _ in upsets.values()]
        while True:
            await self._moments.wait(self._rng.randint(5, 75))
            name = self._rng.choices(list(upsets), weights)[0]
            self._upsets[name] += 1
            await upsets[name][1]()
            self._check_integrity()

    @contextlib.asynccontextmanager
    async def _paused(self, mode: Any) -> AsyncIterator[None]:
        """Pause, see that the device rests, do something, resume."""
        with contextlib.ExitStack() as stack:
            if mode == "wait":
                stack.enter_context(self._moments.restless())
            try:
                await self._engine.pause(mode)
                num_steps = self._core.executor.stats.num_steps
                yield
                for _ in range(self._rng.choice([0, 1, 20, 200])):
                    await asyncio.sleep(0)
                self._expect(num_steps == self._core.executor.stats.num_steps, f"a step was run in a pause ({mode})")
            finally:
                await self._engine.resume()

    async def _pause_and_keep(self) -> None:
        async with self._paused("keep"):
            pass

    async def _pause_and_wait(self) -> None:
        async with self._paused("wait"):
            self._expect(not self._core.scheduler.table.running, "sequences run after pause('wait')")

    async def _pause_and_abort(self) -> None:
        async with self._paused("abort"):
            self._expect(not self._core.scheduler.table.running, "sequences run after pause('abort')")

    async def _give_up_a_pause(self) -> None:
        """Cancel a pause while it waits: the engine pauses all the same. One resume ends that and a second one."""
        with self._moments.restless():
            try:
                async with asyncio.TaskGroup() as group:
                    pausing = group.create_task(self._engine.pause("wait"))
                    for _ in range(self._rng.randrange(4)):
                        await asyncio.sleep(0)
                    pausing.cancel()
                await self._engine.pause("keep")
            finally:
                await self._engine.resume()

    async def _drain(self) -> None:
        self._num_drains += 1
        self._open.clear()
        try:
            with self._moments.restless():
                await self._engine.drain()
            stats = self._core.stats()
            self._expect(self._core.is_drained, "requests are alive after drain()")
            self._expect(stats.free_blocks == stats.num_blocks, "blocks are in use after drain()")
        finally:
            await self._engine.resume()
            self._open.set()

    async def _abort_all(self) -> None:
        self._engine.abort_all()

    # What is watched

    def _look(self) -> None:
        """Keep the most that was seen of what comes and goes."""
        stats = self._core.stats()
        seen = {
            "running": stats.running,
            "waiting": stats.waiting,
            "blocked": stats.blocked,
            "blocks in use": stats.num_blocks - stats.free_blocks,
            "cached prefixes": len(self._core.kv.cache.ready),
            "registered requests": len(self._engine._runtime.admission.requests) if self._engine._runtime else 0,
        }
        for what, count in seen.items():
            self._peaks[what] = max(self._peaks[what], count)

    def _sample(self) -> Sample:
        num_prefixes, num_blocks = len(self._core.kv.cache.ready), self._core.kv.pool.num_blocks
        self._expect(num_prefixes <= num_blocks, f"{num_prefixes} prefixes are cached in {num_blocks} blocks")
        num_graphs = self._drop_graphs()
        gc.collect()
        return Sample(
            num_requests=self._num_started,
            rss_mib=rss_mib(),
            num_fds=num_fds(),
            num_os_threads=num_os_threads(),
            num_tasks=len(asyncio.all_tasks()),
            num_objects=len(gc.get_objects()),
            num_cached_prefixes=num_prefixes,
            num_graphs=num_graphs,
        )

    def _drop_graphs(self) -> int:
        """Drop the graphs of decode steps, lest they hide what else grows; returns how many there were.

        There is one for each number of rows and combination of sampling that came twice, and mixed use goes on meeting
        new ones: a cache with a bound of its own.
        """
        graphs = self._core.executor._device.runner.graphs
        num_graphs = len(graphs)
        self._expect(num_graphs <= MAX_GRAPHS, f"{num_graphs} graphs are kept; {MAX_GRAPHS} may be")
        graphs.clear()
        graphs._seen.clear()
        return num_graphs

    def _judge(self, samples: list[Sample]) -> None:
        """Fit a line through what was sampled, and hold what it grew by against its bound."""
        bounds = {
            "rss_mib": self.setting.max_rss_growth_mib,
            "num_fds": 0.5,
            "num_os_threads": 0.5,
            "num_tasks": 0.5,
            "num_objects": 200.0,
        }
        for what, bound in bounds.items():
            growth = Growth.fit(what, samples, bound)
            self.report.growth.append(growth)
            self._expect(growth.is_bounded, f"{what} grew by {growth.grown:.1f}; the bound is {bound}")

    async def _diagnose(self, wave_size: int) -> None:
        """Find out where memory goes: a few waves more, watched by tracemalloc, which would be too slow for all."""
        told, early, late = self.report.diagnosis, self._types[0], self._types[-1]
        told += [f"{late[name] - early[name]:+d} objects {name}" for name, _ in (late - early).most_common(12)]
        tracemalloc.start(6)
        await self._wave(wave_size)
        await self._settle()
        gc.collect()
        before = tracemalloc.take_snapshot()
        for _ in range(3):
            await self._wave(wave_size)
            await self._settle()
        gc.collect()
        differences = tracemalloc.take_snapshot().compare_to(before, "traceback")
        tracemalloc.stop()
        for difference in differences[:8]:
            where = " < ".join(
                f"{Path(frame.filename).name}:{frame.lineno}" for frame in reversed(difference.traceback)
            )
            told.append(f"{difference.size_diff:+d} bytes, {difference.count_diff:+d} blocks: {where}")

    def _tell_ends(self) -> None:
        """Compare how requests ended for the engine with how they ended for those who made them."""
        report, stats = self.report, self._engine.stats()
        report.ended = dict(stats.finished)
        report.num_ended = self._moments.num_ended
        report.num_steps = self._core.stats().steps
        report.generation_tokens, report.prompt_tokens = stats.generation_tokens, stats.prompt_tokens
        report.preemptions, report.prefix_cache_hit_rate = stats.preemptions, stats.prefix_cache_hit_rate
        num_outcomes = self._outcomes.total()
        self._expect(
            num_outcomes == self._num_started, f"{self._num_started} requests were made, and {num_outcomes} have ended"
        )
        untold = {reason: count - self._known_ends[reason] for reason, count in report.ended.items()}
        self._expect(
            min(untold.values()) >= 0 and sum(untold.values()) <= self._num_untold,
            f"choices ended as {report.ended} in the engine and as {dict(self._known_ends)} for their callers, "
            f"of which {self._num_untold} at most heard nothing",
        )
        self._expect(
            report.num_different * 1000 <= report.num_compared,
            f"{report.num_different} of {report.num_compared} requests that came again had other tokens",
        )

    async def _tick(self) -> None:
        while True:
            begin, was_busy = time.perf_counter(), self._is_busy
            await asyncio.sleep(TICK_S)
            if was_busy and self._is_busy and self._num_lags < MAX_LAGS:
                self._lags[self._num_lags] = time.perf_counter() - begin - TICK_S
                self._num_lags += 1

    def _expect(self, is_so: bool, otherwise: str) -> None:
        if not is_so:
            self._violate(otherwise)

    def _violate(self, what: str) -> str:
        self._num_violations += 1
        if self._num_violations <= MAX_TOLD:
            self.report.violations.append(what)
        return "wrong"


def _after_turns(num_turns: int, callback: Callable[[], object]) -> None:
    loop = asyncio.get_running_loop()
    if num_turns:
        loop.call_soon(_after_turns, num_turns - 1, callback)
    else:
        loop.call_soon(callback)


def _count_types() -> Counter[str]:
    return Counter(f"{type(item).__module__}.{type(item).__qualname__}" for item in gc.get_objects())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--num-requests", type=int, default=20_000)
    parser.add_argument("--num-waves", type=int, default=40)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--concurrency", type=int, default=64)
    parser.add_argument("--max-in-flight", type=int, default=1)
    parser.add_argument("--num-threads", type=int, default=1, help="threads of one torch operation")
    parser.add_argument("--deadline-s", type=float, default=3600.0)
    parser.add_argument("--json", type=Path, help="write the figures here too")
    args = vars(parser.parse_args())
    file = args.pop("json")
    logging.getLogger("aioengine").setLevel(logging.CRITICAL + 1)  # some requests are made to fail, and are counted
    report = asyncio.run(Soak(Setting(**args)).run())
    print_report(report)
    if file is not None:
        file.write_bytes(msgspec.json.format(msgspec.json.encode(report)))
    sys.exit(bool(report.violations))


if __name__ == "__main__":
    main()
