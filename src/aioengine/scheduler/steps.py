"""Steps on their way through the device, and what one has brought once its result is applied."""

from __future__ import annotations

from collections import deque
from typing import TypeVar

import msgspec
import numpy as np

from aioengine.scheduler.budget import Work
from aioengine.scheduler.plan import (
    EMPTY,
    Float32,
    Int8,
    Int32,
    PromptLogprobs,
    StepLogprobs,
    StepPlan,
    int32,
)
from aioengine.scheduler.row_table import Bool, Float64, Rows, RowTable
from aioengine.scheduler.sequence import Sequence

Array = TypeVar("Array", Int32, Int8)


class StepInFlight(msgspec.Struct, frozen=True):
    """A plan, and what the scheduler knew when it was made."""

    plan: StepPlan
    rows: Rows
    ends: Int32
    """The position behind the last token that each row computes."""
    sequences: list[Sequence]
    """Sequences that had the rows."""


class StepsInFlight:
    """Steps whose results are not applied yet, the oldest first."""

    def __init__(self, table: RowTable) -> None:
        self._table = table
        self._steps: deque[StepInFlight] = deque()
        self.num_planned = 0
        """Since the start; the number of the next step."""

    def make_plan(
        self,
        work: Work,
        growing: list[Rows],
        grown_blocks: list[int],
        copies: list[tuple[int, int]],
        admitted: list[Sequence],
    ) -> StepPlan:
        """Make the plan of a step, and move its rows on as if it had run.

        Args:
            growing: by group of layers, the rows that get a block.
            grown_blocks: the block of each of them.
            copies: (source, target) ids of blocks to be copied before the step.
            admitted: sequences that have taken a row since the last plan.
        """
        rows, table = work.rows, self._table
        expected = table.expected[rows]
        samples = work.ends == expected
        purposes = table.purpose[rows]
        if np.count_nonzero(samples) < len(rows):
            purposes *= samples
        table.scheduled[rows] = work.ends
        table.expected[rows] = expected + samples
        plan = StepPlan(
            step=self.num_planned,
            removed=table.take_removed(),
            copied_from=int32([source for source, _ in copies]) if copies else EMPTY,
            copied_to=int32([target for _, target in copies]) if copies else EMPTY,
            added=tuple(sequence.introduce() for sequence in admitted),
            grown_rows=_frozen(np.concatenate(growing, dtype=np.int32)) if grown_blocks else EMPTY,
            grown_groups=_groups_of(growing) if grown_blocks else EMPTY,
            grown_blocks=int32(grown_blocks) if grown_blocks else EMPTY,
            rows=_frozen(rows.astype(np.int32)),
            epochs=_frozen(table.epoch[rows]),
            starts=_frozen(work.starts),
            num_tokens=_frozen(work.num_tokens),
            purposes=_frozen(purposes),
        )
        self.num_planned += 1
        running_rows = table.running_rows
        is_all = rows is running_rows or np.array_equal(rows, running_rows)
        sequences = table.running if is_all else table.occupants_of(rows)
        self._steps.append(StepInFlight(plan, rows, work.ends, sequences))
        return plan

    def take_oldest(self, plan: StepPlan) -> StepInFlight:
        """The oldest step, whose plan this must be."""
        step = self._steps.popleft()
        assert step.plan is plan, "results are applied in the order of launches"
        return step


class StepOutput(msgspec.Struct, frozen=True, kw_only=True):
    """Products of an applied result: ``token_ids[i]`` is the newest token of ``sequences[i]``.

    A sequence that ended with its token has its ``finish_reason`` set.

    Attributes:
        result_indices: int32, where ``token_ids`` stood in the result; ``logprobs.index`` speaks of those.
        logprobs: as in the result.
        gaps_s: float64 [m], seconds since the token before, of the tokens that followed one.
        first: the sequences whose first token it brought, but for children.
        prompt_logprobs: about the prompts of these sequences, which have not ended.
        failed: sequences that ended because their own row failed, and why.
        forced: by index, the tokens that follow ``token_ids[index]`` by a grammar, applied as well.
        vectors: of sequences that ended with them.
    """

    sequences: list[Sequence]
    token_ids: list[int]
    result_indices: Int32
    logprobs: StepLogprobs | None
    gaps_s: Float64
    first: list[Sequence]
    prompt_logprobs: list[tuple[Sequence, PromptLogprobs]]
    failed: list[tuple[Sequence, Exception]]
    forced: dict[int, list[int]] = {}
    vectors: list[tuple[Sequence, Float32]] = []


def split_prompt_logprobs(
    logprobs: PromptLogprobs | None, sequences: list[Sequence], is_alive: Bool
) -> list[tuple[Sequence, PromptLogprobs]]:
    """Log-probabilities of prompts by living sequence, which count as handed out from now on."""
    if logprobs is None:
        return []
    indices, starts = np.unique(logprobs.index, return_index=True)
    pieces = []
    for index, start, end in zip(
        indices.tolist(), starts.tolist(), [*starts[1:].tolist(), len(logprobs.index)], strict=True
    ):
        if is_alive[index]:
            columns = (getattr(logprobs, name)[start:end] for name in logprobs.__struct_fields__)
            piece = PromptLogprobs(**dict(zip(logprobs.__struct_fields__, columns, strict=True)))
            sequences[index].num_scored_tokens = max(sequences[index].num_scored_tokens, int(piece.positions[-1]))
            pieces.append((sequences[index], piece))
    return pieces


def _groups_of(growing: list[Rows]) -> Int32:
    """The group of each of these rows, which are by group."""
    groups: Int32 = np.zeros(sum(map(len, growing)), np.int32)
    end = 0
    for rows in growing[:-1]:
        end += len(rows)
        groups[end:] += 1
    return _frozen(groups)


def _frozen(array: Array) -> Array:
    array.setflags(write=False)
    return array
