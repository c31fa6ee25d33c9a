"""An engine over a fake device, watched: what it has launched, what it holds, what it leaves behind."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import functools
import logging
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager
from typing import Any

import pytest
from integrity import check_integrity
from nightly import nightly
from waiting import Tasks

from aioengine import Engine
from aioengine.core.engine_core import EngineCore
from aioengine.frontend.runtime import Runtime
from aioengine.scheduler.plan import RowSampling
from aioengine.testing import VirtualClockLoop, sample_hash
from aioengine.text.tokenizer import Tokenizer
from doubles.fake_executor import FakeExecutor

VOCAB_SIZE = 2048
STEP_TIME_S = 0.01

Serve = Callable[..., AbstractAsyncContextManager["Served"]]


def is_virtual() -> bool:
    return isinstance(asyncio.get_running_loop(), VirtualClockLoop)


class Served:
    """A started engine, its fake device, and what a test wants to know of both.

    A request is told from the others by its ``seed``, which is part of what the device is told about a row.
    """

    def __init__(self, engine: Engine, executor: FakeExecutor, script: dict[tuple[int, ...], list[int]]) -> None:
        self.engine = engine
        self.executor = executor
        self.script = script
        self.num_held = 0
        """Texts that `hold_tokenizing` has held."""

    @property
    def runtime(self) -> Runtime:
        assert self.engine._runtime is not None
        return self.engine._runtime

    @property
    def core(self) -> EngineCore:
        return self.runtime.core

    @property
    def tokenizer(self) -> Tokenizer:
        return self.runtime.require_tokenizer()

    @property
    def num_free_blocks(self) -> int:
        return self.core.stats().free_blocks

    def say(self, prompt: str | list[int], text: str | list[int]) -> list[int]:
        """From now on the model continues ``prompt`` with ``text``; returns its ids."""
        prompt_ids = self.tokenizer.encode(prompt) if isinstance(prompt, str) else prompt
        ids = self.tokenizer.encode(text) if isinstance(text, str) else text
        self.script[tuple(prompt_ids)] = ids
        return ids

    def seeds_of_plans(self, start: int = 0) -> list[set[int]]:
        """Whose tokens each launched plan computes, from plan number ``start`` on."""
        tenants: dict[int, int] = {}
        seeds = []
        for plan in self.executor.plans:
            for row in plan.removed.tolist():
                del tenants[row]
            tenants.update({added.row: added.sampling.seed for added in plan.added})
            seeds.append({tenants[row] for row in plan.rows.tolist()})
        return seeds[start:]

    def first_runs(self) -> list[int]:
        """Seeds in the order in which their requests first got a row."""
        return list(dict.fromkeys(added.sampling.seed for plan in self.executor.plans for added in plan.added))

    def has_run(self, seed: int) -> bool:
        return any(seed in seeds for seeds in self.seeds_of_plans())

    def hold_tokenizing(self) -> threading.Event:
        """Long texts stay in their thread until the event is set. Meanwhile a virtual clock stands still."""
        gate = threading.Event()
        encode = self.tokenizer.encode

        def gated(text: str, **options: Any) -> list[int]:
            self.num_held += 1
            assert gate.wait(30), "nobody let it go on"
            return encode(text, **options)

        self.tokenizer.encode = gated  # type: ignore[method-assign]
        return gate

    async def until(self, is_so: Callable[[], Any]) -> None:
        """Let others run until it is so."""
        # Threads take real time, which passes a turn at a time on a real loop.
        for _ in range(10_000 if is_virtual() else 1_000_000):
            if is_so():
                return
            await self.turn()
        raise AssertionError("it never came to be so")

    async def turn(self) -> None:
        """Let all others run once; on a virtual clock also let a little time pass."""
        await asyncio.sleep(STEP_TIME_S / 10 if is_virtual() else 0)

    async def rest(self) -> None:
        """Wait until the engine has nothing to do, ending the steps of a manual device."""

        def is_at_rest() -> bool:
            self.complete_all()
            return not (self.core._in_flight or self.core.scheduler.sequences())

        await self.until(is_at_rest)

    async def rest_until_done(self, tasks: list[asyncio.Task[Any]]) -> None:
        """End the steps of a manual device until these tasks are done, and the engine has nothing to do."""
        await self.rest()
        while not all(task.done() for task in tasks):
            await self.rest()
            await self.turn()

    def complete_all(self) -> None:
        """End all steps of a manual device that are launched now."""
        if self.executor.is_manual:
            for step in self.executor.unfinished:
                step.complete()

    def assert_nothing_is_held(self) -> None:
        """No request is registered, queued or scheduled, and all blocks are free."""
        assert not self.runtime.admission.requests
        assert self.runtime.admission.num_preparing == 0
        assert not self.runtime.admission._waiting
        check_integrity(self.core.scheduler)
        stats = self.core.stats()
        assert (stats.running, stats.waiting, stats.blocked) == (0, 0, 0)
        assert self.core.scheduler.num_unstarted == 0
        assert stats.free_blocks == stats.num_blocks


_load_once = functools.cache(Tokenizer.load)


@pytest.fixture(autouse=True)
def each_tokenizer_is_loaded_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Loading the demo's is most of a start's time, and there are two thousand starts here."""
    # A copy, since tests replace methods of theirs.
    monkeypatch.setattr(Tokenizer, "load", lambda folder: copy.copy(_load_once(folder)))


@pytest.fixture
def make_executor() -> Callable[..., FakeExecutor]:
    """Make a fake device of the demo model's vocabulary; ``depth`` is ``max_in_flight``.

    On a virtual clock its steps take 10 ms, and none elsewhere.
    """

    def make(*, depth: int = 1, script: dict[tuple[int, ...], list[int]] | None = None, **options: Any) -> FakeExecutor:
        options.setdefault("step_time_s", STEP_TIME_S if is_virtual() else 0.0)
        options.setdefault("vocab_size", VOCAB_SIZE)
        vocab_size = options["vocab_size"]
        scripted = {} if script is None else script

        def sample(token_ids: list[int], sampling: RowSampling) -> int:
            for prompt, continuation in scripted.items():
                position = len(token_ids) - len(prompt)
                if 0 <= position < len(continuation) and tuple(token_ids[: len(prompt)]) == prompt:
                    return continuation[position]
            # Above the special tokens: an output ends where the script or a limit ends it.
            return 3 + sample_hash(token_ids, sampling, vocab_size=vocab_size - 3)

        return FakeExecutor(max_in_flight=depth, sampler=sample, **options)

    return make


@pytest.fixture
def serve(make_executor: Callable[..., FakeExecutor]) -> Serve:
    """``async with serve(depth=2, config={...}, num_blocks=...) as served``: an engine that is closed at the end.

    If the block ends well the engine comes to rest first, and must then hold nothing.
    """

    @contextlib.asynccontextmanager
    async def start(
        *, config: dict[str, Any] | None = None, model: str | None = None, **options: Any
    ) -> AsyncIterator[Served]:
        script: dict[tuple[int, ...], list[int]] = {}
        executor = make_executor(script=script, **options)
        async with Engine(model, executor=executor, **(config or {})) as engine:
            served = Served(engine, executor, script)
            yield served
            if served.core.death is None and not served.runtime.is_closing:
                await served.rest()
                served.assert_nothing_is_held()
        assert executor.is_closed

    return start


@pytest.fixture
def tasks() -> Tasks:
    return Tasks()


@pytest.fixture(params=[*nightly(1, 2), 4], ids=lambda depth: f"depth{depth}")
def depth(request: pytest.FixtureRequest) -> int:
    """Steps in flight."""
    return request.param


@pytest.fixture(autouse=True)
def every_error_is_heard(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fail a passing test in which asyncio had to log an error: of a callback, or of a task that nobody asked."""
    num_failed = request.session.testsfailed
    records: list[logging.LogRecord] = []
    handler = logging.Handler(logging.ERROR)
    handler.emit = records.append  # type: ignore[method-assign]
    logger = logging.getLogger("asyncio")
    logger.addHandler(handler)
    yield
    logger.removeHandler(handler)
    if records and request.session.testsfailed == num_failed and not request.node.get_closest_marker("leaves_tasks"):
        pytest.fail("\n".join(logging.Formatter().format(record) for record in records), pytrace=False)
