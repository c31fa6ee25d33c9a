"""Plans as a scheduler would write them, for tests that drive an executor or a runner by hand."""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Container
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from aioengine.core.executor_protocol import Executor, ExecutorInfo
from aioengine.scheduler.plan import Handles, Purpose, RowAdded, RowSampling, StepPlan, StepResult, int32


@dataclass
class PlannedRow:
    """Attributes:
    token_ids: all known ones, with None for each that was sampled on the device and not read yet.
    block_ids: of each group of layers.
    num_computed: how many of them the plans so far compute.
    """

    token_ids: list[int | None]
    num_prompt_tokens: int
    block_ids: list[list[int]]
    num_computed: int = 0
    epoch: int = 0
    num_kept: int | float = math.inf
    """Where its other choices begin, which see what a window before that has."""

    @property
    def num_known(self) -> int:
        return len(self.token_ids)


@dataclass
class PlanWriter:
    """Keeps the rows and the free blocks, hands out blocks in random order, numbers the steps from 1.

    A block is free when no row has it. What the window of a group has passed is free at once, and taken first.

    Attributes:
        windows: of the groups of layers; absent: of those that `executor.tiny_decoder.tiny_config` makes.
        handles: the executor's, where rows have processors or grammars.
        rows: by row.
    """

    num_blocks: int
    block_size: int
    seed: int = 0
    windows: tuple[int | None, ...] = (None, 5)
    handles: Handles = field(default_factory=Handles)
    rows: dict[int, PlannedRow] = field(default_factory=dict)

    @classmethod
    def of(cls, info: ExecutorInfo, seed: int = 0, **fields: Any) -> PlanWriter:
        """For such an executor."""
        return cls(
            info.num_blocks, info.block_size, seed, windows=tuple(group.reach for group in info.layout.groups), **fields
        )

    def __post_init__(self) -> None:
        self._free = list(range(self.num_blocks))
        random.Random(self.seed).shuffle(self._free)
        self._num_holders: Counter[int] = Counter()
        self._step = 0
        self._epoch = 0
        self._added: list[RowAdded] = []
        self._removed: list[int] = []
        self._copied: list[tuple[int, int]] = []

    def add(
        self,
        row: int,
        token_ids: list[int],
        *,
        num_prompt_tokens: int | None = None,
        max_blocks: int | None = None,
        **sampling: Any,
    ) -> None:
        """Let a sequence take a row with the next plan; greedy unless ``sampling`` says otherwise.

        With no more than ``max_blocks`` at first, it grows by as many more as it needs.
        """
        num_blocks = self._num_blocks(len(token_ids))
        num_blocks = num_blocks if max_blocks is None else min(num_blocks, max_blocks)
        blocks = [[self._take() for _ in range(num_blocks)] for _ in self.windows]
        num_prompt_tokens = len(token_ids) if num_prompt_tokens is None else num_prompt_tokens
        state = PlannedRow(list(token_ids), num_prompt_tokens, blocks)
        if sampling.get("num_choices", 1) > 1:
            state.num_kept = num_prompt_tokens
        self._add(row, state, token_ids, sampling)

    def fork(self, parent: int, row: int, first_token: int, **sampling: Any) -> None:
        """Let a sequence with the prompt of ``parent``, whose KV is computed, go on with another token in ``row``.

        It shares the prompt's full blocks and gets a copy of the partial one, with the next plan.
        """
        of_parent = self.rows[parent]
        num_prompt_tokens = of_parent.num_prompt_tokens
        prompt = [token for token in of_parent.token_ids[:num_prompt_tokens] if token is not None]
        num_shared, num_in_partial = divmod(num_prompt_tokens, self.block_size)
        blocks = [block_ids[:num_shared] for block_ids in of_parent.block_ids]
        for of_group, block_ids in zip(blocks, of_parent.block_ids, strict=True):
            self._num_holders.update(block_id for block_id in of_group if block_id >= 0)
            of_group.append(self._take())
            if num_in_partial:
                self._copied.append((block_ids[num_shared], of_group[-1]))
        token_ids = [*prompt, first_token]
        state = PlannedRow([*token_ids], num_prompt_tokens, blocks, num_computed=num_prompt_tokens)
        self._add(row, state, token_ids, sampling)

    def _add(self, row: int, state: PlannedRow, token_ids: list[int], sampling: dict[str, Any]) -> None:
        self._epoch += 1
        state.epoch = self._epoch
        self.rows[row] = state
        processors = self.handles.add_processors(sampling.pop("logits_processors", ()))
        self._added.append(
            RowAdded(
                row=row,
                token_ids=int32(token_ids),
                num_prompt_tokens=state.num_prompt_tokens,
                block_ids=tuple(map(int32, state.block_ids)),
                sampling=RowSampling(**{"temperature": 0.0, **sampling}, logits_processors=processors),
            )
        )

    def remove(self, row: int, *, is_reused_next: bool = False) -> PlannedRow:
        """Free a row with the next plan, and its blocks, which are taken last, or first if ``is_reused_next``."""
        removed = self.rows.pop(row)
        self._removed.append(row)
        self._release([b for block_ids in removed.block_ids for b in block_ids], is_reused_next=is_reused_next)
        return removed

    def _release(self, block_ids: list[int], *, is_reused_next: bool) -> None:
        held = [block_id for block_id in block_ids if block_id >= 0]
        self._num_holders.subtract(held)
        freed = [block for block in held if not self._num_holders[block]]
        self._free = [*self._free, *freed] if is_reused_next else [*freed, *self._free]

    def _pass(self, state: PlannedRow) -> None:
        """Free what later tokens of a row do not see: steps in flight that read it come before its next owner's."""
        for block_ids, window in zip(state.block_ids, self.windows, strict=True):
            if window is not None:
                num_read = min(state.num_computed, state.num_kept)
                passed = int(max(num_read + 1 - window, 0)) // self.block_size
                self._release(block_ids[:passed], is_reused_next=True)
                block_ids[:passed] = [-1] * passed

    def _take(self) -> int:
        block = self._free.pop()
        self._num_holders[block] = 1
        return block

    def _num_blocks(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def plan(self, num_tokens: dict[int, int | None] | None = None, *, pooled: Container[int] = ()) -> StepPlan:
        """The next step: so many tokens for each row, None for all known ones; every row if nothing is given.

        A row whose last known token is computed samples the next one, or brings a vector if it is in ``pooled``.
        """
        chosen = dict.fromkeys(self.rows) if num_tokens is None else num_tokens
        lines, grown = [], []
        for row, count in chosen.items():
            state = self.rows[row]
            start = state.num_computed
            count = state.num_known - start if count is None else count
            state.num_computed += count
            for group, block_ids in enumerate(state.block_ids):
                while len(block_ids) < self._num_blocks(state.num_computed):
                    block_ids.append(self._take())
                    grown.append((len(block_ids), row, group, block_ids[-1]))
            is_last = state.num_computed == state.num_known
            purpose = Purpose.POOL if row in pooled else Purpose.SAMPLE
            lines.append((row, state.epoch, start, count, purpose if is_last else Purpose.NOTHING))
            if is_last and row not in pooled:
                state.token_ids.append(None)
        rows, epochs, starts, counts, purposes = zip(*lines, strict=True) if lines else ((),) * 5
        grown.sort()  # one of each row after the other: their order is that within a row
        self._step += 1
        plan = StepPlan(
            step=self._step,
            removed=int32(self._removed),
            added=tuple(self._added),
            grown_rows=int32([row for _, row, _, _ in grown]),
            grown_groups=int32([group for _, _, group, _ in grown]),
            grown_blocks=int32([block for *_, block in grown]),
            rows=int32(rows),
            epochs=int32(epochs),
            starts=int32(starts),
            num_tokens=int32(counts),
            purposes=int32(purposes).astype("int8"),
            copied_from=int32([source for source, _ in self._copied]),
            copied_to=int32([target for _, target in self._copied]),
        )
        self._added, self._removed, self._copied = [], [], []
        for row in chosen:
            self._pass(self.rows[row])
        return plan

    def read(self, plan: StepPlan, result: StepResult) -> dict[int, int]:
        """Take in a result: the sampled token of each row that had one, the first of several. Checks its form."""
        assert result.step == plan.step
        tokens = {row: choices[0] for row, choices in choices_by_row(plan, result).items() if choices}
        epochs = dict(zip(plan.rows.tolist(), plan.epochs.tolist(), strict=True))
        for row, token in tokens.items():
            state = self.rows.get(row)
            if state is not None and state.epoch == epochs[row]:
                state.token_ids[state.token_ids.index(None)] = token
        return tokens


def choices_by_row(plan: StepPlan, result: StepResult) -> dict[int, list[int]]:
    """{row that wanted a token: sampled tokens, none if it failed}, with the result checked against the plan."""
    assert len(result.offsets) == len(plan.rows) + 1
    assert result.offsets[0] == 0
    assert result.offsets[-1] == len(result.token_ids)
    assert result.token_ids.dtype == result.offsets.dtype == "int32"
    failed = [failure.index for failure in result.failures]
    assert failed == sorted(set(failed))
    pooled = np.flatnonzero(plan.purposes == Purpose.POOL).tolist()
    assert list(result.vectors) == [index for index in pooled if index not in failed]
    tokens = {}
    for index, (row, want) in enumerate(zip(plan.rows.tolist(), plan.purposes.tolist(), strict=True)):
        of_row = result.token_ids[result.offsets[index] : result.offsets[index + 1]].tolist()
        assert bool(of_row) == (want == Purpose.SAMPLE and index not in failed)
        if want == Purpose.SAMPLE:
            tokens[row] = of_row
    return tokens


def tokens_by_row(plan: StepPlan, result: StepResult) -> dict[int, int]:
    """{row: sampled token} of a plan whose rows bring one each where they want one, checked."""
    tokens = choices_by_row(plan, result)
    assert all(len(of_row) == 1 for of_row in tokens.values())
    return {row: of_row[0] for row, of_row in tokens.items()}


PROMPT = tuple((7 * i) % 90 + 3 for i in range(21))


async def run_step(
    executor: Executor, writer: PlanWriter, num_tokens: dict[int, int | None] | None = None
) -> dict[int, int]:
    """Plan a step as `PlanWriter.plan` does, run and read it: {row: sampled token}, the first of several."""
    plan = writer.plan(num_tokens)
    return writer.read(plan, await executor.launch(plan).finish())


async def greedy_tokens(executor: Executor, num_tokens: int = 6, prompt: tuple[int, ...] = PROMPT) -> list[int]:
    """Those of one sequence, which leaves its row."""
    writer = PlanWriter.of(executor.info)
    writer.add(0, list(prompt))
    tokens = [(await run_step(executor, writer))[0] for _ in range(num_tokens)]
    writer.remove(0)
    await run_step(executor, writer)
    return tokens
