"""The fake device of the engine's own tests, which checks everything.

Its KV are the token ids themselves, each with the group of layers, in the blocks that a real device would have. What it
samples is a hash of all the tokens that it reads *through the block tables*, in each group those that its window
leaves, so that a block freed too early, shared wrongly, not copied or not yet written changes the output. It refuses
plans that a device could not run.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from aioengine.core.control import (
    CollectiveRpc,
    CommitWeights,
    Control,
    DropWeights,
    ExecuteDummyBatch,
    SaveShardedState,
    Sleep,
    StageWeights,
    StartProfile,
    StopProfile,
    UpdateWeights,
    WakeTag,
    WakeUp,
    name_of,
)
from aioengine.core.executor_protocol import already_recording, not_recording, weights_asleep
from aioengine.scheduler.plan import StepPlan
from aioengine.testing import fake_executor as public
from aioengine.testing.fake_executor import MEANINGLESS, RowWork, loop_time

T = TypeVar("T")


class FakeStep(public.FakeStep):
    """A launched step, which is noted when it is finished."""

    executor: FakeExecutor

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._launched_at_s = loop_time()

    def span(self) -> dict[str, Any]:
        """The step's event in a Chrome trace, from its launch to its end."""
        name = f"step {self.step} ({len(self.plan.rows)} rows, {int(self.plan.num_tokens.sum())} tokens)"
        times = {"ts": self._launched_at_s * 1e6, "dur": (self.ended_at_s - self._launched_at_s) * 1e6}
        return {"ph": "X", "cat": "user_annotation", "name": name, "pid": 0, "tid": 0, **times}

    async def finish(self) -> Any:
        await self.wait()
        self.executor.events.append(("finish", self.step))
        return await super().finish()


class FakeExecutor(public.FakeExecutor):
    """As `aioengine.testing.FakeExecutor`, with blocks, checks and notes of what was asked.

    It has no weights: calls about them are noted in ``events``, and change nothing.

    Args:
        is_manual: steps end when `complete` is called, and not by themselves.

    Attributes:
        events: ("launch", n) and ("finish", n), and the names of control calls, each with what it was about, in the
            order in which they happened.
        plans: every plan launched.
    """

    step_type = FakeStep

    def __init__(self, *, is_manual: bool = False, **options: Any) -> None:
        super().__init__(**{"vocab_size": 1000, **options})
        self.is_manual = is_manual
        self.events: list[tuple[str, Any]] = []
        self.plans: list[StepPlan] = []
        self._asleep: frozenset[WakeTag] = frozenset()
        self._is_discarded = False
        self._blocks: dict[int, list[list[int]]] = {}
        """By row, the block table of each group."""
        self._kv = np.full((sum(self.info.pool_blocks), self.info.block_size), -1, np.int64)
        self._states: dict[int, list[int]] = {}
        """By block, the tokens whose state it holds."""
        self._row_failures: dict[tuple[int, int], Exception] = {}
        self._profile: list[FakeStep] | None = None
        self._max_profiled_steps = 0

    def make_row_fail(self, step: int, row: int, error: Exception) -> None:
        """When step number ``step`` computes ``row``, it brings a `RowFailure` with ``error``, and no token of the row.

        If the row was to sample it gets a meaningless token, on which later launched steps go on.
        """
        self._row_failures[step, row] = error

    def complete(self) -> None:
        """End the oldest step that runs (for ``is_manual``)."""
        next(step for step in self.unfinished if not step.is_done).complete()

    def launch(self, plan: StepPlan) -> FakeStep:
        assert len(self.unfinished) < self.info.max_in_flight, "more steps in flight than the executor takes"
        assert not self._asleep, f"a plan was launched while these were asleep: {sorted(self._asleep)}"
        self.events.append(("launch", plan.step))
        self.plans.append(plan)
        step = super().launch(plan)
        assert isinstance(step, FakeStep)
        if self._profile is not None and len(self._profile) < self._max_profiled_steps:
            self._profile.append(step)
        return step

    def launch_dummy(self) -> public.FakeLaunch:
        assert len(self.unfinished) < self.info.max_in_flight, "more steps in flight than the executor takes"
        assert not self._asleep, f"a dummy was launched while these were asleep: {sorted(self._asleep)}"
        return super().launch_dummy()

    def _complete_later(self, step: public.FakeLaunch) -> None:
        if not self.is_manual:
            super()._complete_later(step)

    # What it is asked beside steps

    async def perform(self, call: Control) -> Any:
        self._check_open()
        match call:
            case StartProfile():
                if self._profile is not None:
                    raise already_recording()
                self._profile, self._max_profiled_steps = [], call.max_steps
                return None
            case StopProfile():
                await self._stop_profile(Path(call.path))
                return None
        self._note(name_of(call), _about(call))
        match call:
            case Sleep():
                self._is_discarded = self._is_discarded or call.level == 2
                self._kv[:] = -1
                self._states.clear()
                self._asleep = frozenset(("weights", "kv_cache"))
            case WakeUp():
                self._asleep -= set(call.tags)
                self._is_discarded = self._is_discarded and "weights" in self._asleep
            case ExecuteDummyBatch() if "weights" in self._asleep:
                raise weights_asleep("execute_dummy_batch")
        return await super().perform(call)

    async def _stop_profile(self, path: Path) -> None:
        """Write a Chrome trace of the steps that were launched and have ended since the start."""
        profile, self._profile = self._profile, None
        if profile is None:
            raise not_recording()
        spans = [step.span() for step in profile if step.is_done]
        await asyncio.to_thread(path.write_text, json.dumps({"traceEvents": spans}))

    def _note(self, call: str, argument: object) -> None:
        self._check_open()
        self.events.append((call, argument))

    async def apply_model(self, function: Callable[[Any], T]) -> list[T]:
        self._note("apply_model", function)
        await self._launched_steps_end()
        if self.model is None:
            raise weights_asleep("apply_model")
        return [function(self)]

    @property
    def model(self) -> Any:
        """What functions get that are called with the model: the executor itself; None while it sleeps at level 2."""
        return None if self._is_discarded else self

    async def aclose(self) -> None:
        self._profile = None
        self._blocks.clear()
        await super().aclose()

    # What it computes

    def apply(self, plan: StepPlan) -> None:
        for row in plan.removed.tolist():
            self._blocks.pop(row)
        copied_from, copied_to = plan.copied_from.tolist(), plan.copied_to.tolist()
        assert len(set(copied_to)) == len(copied_to), "a block is copied to twice"
        assert not set(copied_from) & set(copied_to), "a block is copied from and to"
        self._kv[copied_to] = self._kv[copied_from]
        for added in plan.added:
            assert added.row not in self._blocks, f"row {added.row} is taken"
            assert len(added.block_ids) == len(self.info.layout.groups), "a row has a table for each group"
            self._blocks[added.row] = [block_ids.tolist() for block_ids in added.block_ids]
        grown = (plan.grown_rows, plan.grown_groups, plan.grown_blocks)
        for row, group, block_id in zip(*(column.tolist() for column in grown), strict=True):
            self._blocks[row][group].append(block_id)
        super().apply(plan)

    def rows(self) -> dict[int, tuple[list[int], list[list[int]]]]:
        """What the device holds: {row: (token ids, block table of each group)}."""
        return {
            number: (list(row.tokens), [list(block_ids) for block_ids in self._blocks[number]])
            for number, row in sorted(self._rows.items())
        }

    def _works(self, plan: StepPlan) -> list[RowWork]:
        works = super()._works(plan)
        assert len({work.number for work in works}) == len(works), "a row stands twice in a plan"
        for work in works:
            self._write(work)
        return works

    def _write(self, work: RowWork) -> None:
        tokens = work.row.tokens
        assert work.end > work.start, "a row computes at least one token"
        assert work.end <= len(tokens), "a token is computed before it is known"
        groups, size = self.info.layout.groups, self.info.block_size
        positions = np.arange(work.start, work.end)
        for number, block_ids in enumerate(self._blocks[work.number]):
            assert work.end <= len(block_ids) * size, "a token has no block to go to"
            if groups[number].is_state:
                before = self._states.get(block_ids[(work.start - 1) // size], []) if work.start else []
                for end in {work.end, max((work.end - 1) // size * size, work.start)} - {work.start}:
                    place = (end - 1) // size
                    assert block_ids[place] >= 0, "a state has no block to go to"
                    self._states[block_ids[place]] = before + tokens[work.start : end]
                continue
            kv = np.array(tokens[work.start : work.end]) * len(groups) + number
            self._kv[self._places(block_ids, positions)] = kv

    def _read(self, work: RowWork) -> list[int]:
        """A row's tokens up to the end of what is computed, each as the KV has it that a group reads in this step."""
        read = np.array(work.row.tokens[: work.end])
        groups = self.info.layout.groups
        for number, (block_ids, group) in enumerate(zip(self._blocks[work.number], groups, strict=True)):
            if group.is_state:
                state = self._states[block_ids[(work.end - 1) // self.info.block_size]]
                read = read if state == read.tolist() else np.full_like(read, -1)
                continue
            first = 0 if group.reach is None else max(work.start + 1 - group.reach, 0)
            seen = np.arange(first, work.end)
            tokens, of_group = np.divmod(self._kv[self._places(block_ids, seen)], len(groups))
            tokens[of_group != number] = -1
            is_wrong = tokens != read[first:]
            read[seen[is_wrong]] = tokens[is_wrong]
        return list(map(int, read))

    def _places(self, block_ids: list[int], positions: NDArray[np.int64]) -> tuple[NDArray[np.int64], ...]:
        """Where the KV of these positions is: blocks, and places in them."""
        blocks = np.array(block_ids)[positions // self.info.block_size]
        assert blocks.min() >= 0, "what a window has passed is read, or written"
        return blocks, positions % self.info.block_size

    def _sample(self, work: RowWork) -> tuple[list[int], Exception | None]:
        error = self._row_failures.pop((work.step, work.number), None)
        is_forced = work.row.grammar is not None and work.end < work.row.grammar.num_tokens
        if work.samples:
            assert is_forced or work.end == len(work.row.tokens), "a token is sampled after the last known one"
            assert work.end < self.info.max_model_len, "the sequence is as long as the model allows"
        if error is None:
            return super()._sample(work)
        if work.samples and work.end == len(work.row.tokens):  # a forced token may be known to the grammar alone
            work.row.tokens.append(MEANINGLESS)
        return [], error


def _about(call: Control) -> object:
    """What `FakeExecutor.events` says of a call beside its name."""
    match call:
        case Sleep():
            return call.level
        case WakeUp():
            return frozenset(call.tags)
        case UpdateWeights() | SaveShardedState():
            return Path(call.folder)
        case StageWeights() | CollectiveRpc():
            return call.name
        case CommitWeights() | DropWeights():
            return call.transfer
    return None
