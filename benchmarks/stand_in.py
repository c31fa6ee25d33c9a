"""A device that does nothing but take its time, for `transport.py`: in this process, or in an engine's own.

It shares a page of memory, the `Board`, with the benchmark: it has the length of steps, and the time at
which each ended. A token's id is the number of its step, modulo `NUM_IDS`, so that its reader finds how long ago the
step ended: CLOCK_MONOTONIC is the same in all processes of a machine.
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
from aioengine.core.executor_protocol import PendingStep
from aioengine.scheduler.plan import Purpose, StepPlan, StepResult, int32
from aioengine.testing import FakeExecutor

BOARD = "AIOENGINE_BENCH_BOARD"
"""The environment variable that holds the path of a child's board."""

FIRST_ID, NUM_IDS = 512, 1024
"""Tokens of the bundled model that are pieces of ordinary words."""

MAX_MODEL_LEN = 8192
NUM_BLOCKS = 70_000
"""Blocks of 16 tokens: no sequence of any run is preempted."""


class Board:
    """Numbers that two processes share: float64, each written by one side alone."""

    _STEP_TIME, _PID, _LOOP_CPU = range(3)
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

    # Written by the benchmark

    @property
    def step_time_s(self) -> float:
        """Length of each step that is launched from now on; 0: it has ended when it is launched."""
        return self._values[self._STEP_TIME]

    @step_time_s.setter
    def step_time_s(self, value: float) -> None:
        self._values[self._STEP_TIME] = value

    # Written by the device

    @property
    def pid(self) -> int:
        return int(self._values[self._PID])

    @property
    def loop_cpu_s(self) -> float:
        """CPU time of its loop's thread, when it was last asked for."""
        return self._values[self._LOOP_CPU]

    def note_made(self) -> None:
        self._values[self._PID] = os.getpid()

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

    def launch(self, plan: StepPlan) -> PendingStep[StepResult]:  # type: ignore[override]  # no one calls what its steps have more
        return StandInStep(self._board, plan)

    async def perform(self, call: Control) -> Any:
        if not isinstance(call, ExecuteDummyBatch):
            return await super().perform(call)
        self._board.note_cpu()  # it asks for the CPU time
        return None


def make(config: EngineConfig) -> StandIn:
    """For ``ProcessOptions(executor="stand_in:make")``; its board is at the path in the environment."""
    return StandIn(Board(Path(os.environ[BOARD])))
