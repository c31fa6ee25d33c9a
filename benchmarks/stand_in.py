"""A device that does nothing but take its time, for `transport.py`: in this process, or in an engine's own.

It shares a page of memory, the `Board`, with whoever measures: that says how long steps take and when the device is to
die, and is told when each step has ended. A token's id says which step it came from, modulo `NUM_IDS`, so that whoever
reads a token can tell how long ago its step ended: CLOCK_MONOTONIC is the same in all processes of a machine.
"""

from __future__ import annotations

import asyncio
import mmap
import os
import time
from pathlib import Path
from typing import Any

import numpy as np

from aioengine.config import EngineConfig
from aioengine.core.control import Control, ExecuteDummyBatch
from aioengine.core.executor_protocol import DeviceLost, PendingStep
from aioengine.scheduler.plan import Purpose, StepPlan, StepResult, int32
from aioengine.testing import FakeExecutor

BOARD = "AIOENGINE_BENCH_BOARD"
"""The environment variable that tells a child where its board is."""

FIRST_ID, NUM_IDS = 512, 1024
"""Tokens of the bundled model that are pieces of ordinary words."""

MAX_MODEL_LEN = 8192
NUM_BLOCKS = 70_000
"""Of 16 tokens: no sequence of any run is preempted."""


class Board:
    """Numbers that two processes share: float64, each written by one side alone."""

    _STEP_TIME, _WILL_DIE, _PID, _MADE_AT, _LOOP_CPU, _DIED_AT = range(6)
    _ENDS = 8

    def __init__(self, path: Path) -> None:
        self.path = path
        size = 8 * (self._ENDS + NUM_IDS)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            os.ftruncate(descriptor, size)
            self._values = memoryview(mmap.mmap(descriptor, size)).cast("d")
        finally:
            os.close(descriptor)
        self.ended_at = self._values[self._ENDS :]
        """By a token's id less `FIRST_ID`, when its step ended, by time.monotonic."""

    # What the one who measures says

    @property
    def step_time_s(self) -> float:
        """Of each step that is launched from now on; 0: it has ended when it is launched."""
        return self._values[self._STEP_TIME]

    @step_time_s.setter
    def step_time_s(self, value: float) -> None:
        self._values[self._STEP_TIME] = value

    @property
    def will_die(self) -> bool:
        """Whether the device is lost at the end of the next step."""
        return bool(self._values[self._WILL_DIE])

    @will_die.setter
    def will_die(self, value: bool) -> None:
        self._values[self._WILL_DIE] = value

    # What the device says

    @property
    def pid(self) -> int:
        return int(self._values[self._PID])

    @property
    def made_at(self) -> float:
        """When the device was made, which is the first thing of a model's loading."""
        return self._values[self._MADE_AT]

    @property
    def loop_cpu_s(self) -> float:
        """CPU time of its loop's thread, when it was last asked for."""
        return self._values[self._LOOP_CPU]

    @property
    def died_at(self) -> float:
        return self._values[self._DIED_AT]

    def note_made(self) -> None:
        self._values[self._PID] = os.getpid()
        self._values[self._MADE_AT] = time.monotonic()

    def note_death(self) -> None:
        self._values[self._DIED_AT] = time.monotonic()

    def note_end(self, step: int) -> float:
        now = time.monotonic()
        self.ended_at[step % NUM_IDS] = now
        return now

    def note_cpu(self) -> None:
        self._values[self._LOOP_CPU] = time.thread_time()


class StandInStep:
    """A launched step."""

    def __init__(self, board: Board, plan: StepPlan) -> None:
        self._board = board
        self._plan = plan
        self._done: asyncio.Future[None] | None = None
        self._ended_at_s = 0.0
        step_time_s = board.step_time_s
        if step_time_s > 0.0:
            loop = asyncio.get_running_loop()
            self._done = loop.create_future()
            loop.call_later(step_time_s, self._end)
        else:
            self._ended_at_s = board.note_end(plan.step)

    @property
    def is_done(self) -> bool:
        return self._done is None or self._done.done()

    async def finish(self) -> StepResult:
        if self._done is not None:
            await self._done
        if self._board.will_die:
            self._board.note_death()
            raise DeviceLost("it was told to die")
        samples = self._plan.purposes == Purpose.SAMPLE
        num_tokens = int(samples.sum())
        offsets = np.arange(num_tokens + 1) if num_tokens == len(samples) else np.cumsum([0, *samples.tolist()])
        return StepResult(
            step=self._plan.step,
            offsets=int32(offsets),
            token_ids=int32(np.full(num_tokens, FIRST_ID + self._plan.step % NUM_IDS)),
            device_time_s=self._board.step_time_s,
            ended_at_s=self._ended_at_s,
        )

    def _end(self) -> None:
        assert self._done is not None
        self._ended_at_s = self._board.note_end(self._plan.step)
        if not self._done.done():
            self._done.set_result(None)


class StandIn(FakeExecutor):
    """An `Executor` whose steps cost nothing; whatever else one is asked for is the `FakeExecutor`'s."""

    def __init__(self, board: Board) -> None:
        super().__init__(num_blocks=NUM_BLOCKS, max_model_len=MAX_MODEL_LEN, vocab_size=2048)
        self._board = board
        board.note_made()

    def launch(self, plan: StepPlan) -> PendingStep:  # type: ignore[override]  # no one calls what its steps have more
        return StandInStep(self._board, plan)

    async def perform(self, call: Control) -> Any:
        if not isinstance(call, ExecuteDummyBatch):
            return await super().perform(call)
        self._board.note_cpu()  # it asks for the CPU time
        return None


def make(config: EngineConfig) -> StandIn:
    """For ``ProcessOptions(executor="stand_in:make")``; its board is where the environment says."""
    return StandIn(Board(Path(os.environ[BOARD])))
