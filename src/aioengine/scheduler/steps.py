"""How a step's tokens are shared out among the rows, steps on their way through the device, and their products."""

from __future__ import annotations

from collections import deque
from typing import TypeVar

import msgspec
import numpy as np

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


class Budget(msgspec.Struct, frozen=True, gc=False):
    """Most tokens of a step.

    Attributes:
        max_tokens: of all its rows; at least one a row.
        max_mixed_prefill_tokens: of prompts, in a step in which rows decode, so that these wait no longer for it than
            such a chunk takes (Agrawal et al., Sarathi-Serve, OSDI 2024).
    """

    max_tokens: int
    max_mixed_prefill_tokens: int

    def beside(self, num_decodes: int) -> int:
        """Tokens of a step in which so many rows decode."""
        return min(self.max_tokens, num_decodes + self.max_mixed_prefill_tokens) if num_decodes else self.max_tokens


class Work(msgspec.Struct, frozen=True, gc=False):
    """The work of a step: ``num_tokens[i]`` tokens of ``rows[i]``, from ``starts[i]`` up to ``ends[i]``.

    ``num_left`` more could be in it.
    """

    rows: Rows
    starts: Int32
    num_tokens: Int32
    ends: Int32
    num_left: int


class Claim(msgspec.Struct, frozen=True, gc=False):
    """The share of a step that a sequence without a row is going to take, behind decodes and earlier prefills."""

    num_tokens: int
    num_before: int
    """How many of the running sequences come before it."""


def share_budget(table: RowTable, budget: Budget, claim: Claim | None = None) -> Work:
    """Rows with tokens to compute, and how many each: decodes first, then prefills in order as far as it goes."""
    rows = table.running_rows
    starts = table.scheduled[rows]
    num_tokens = np.minimum(table.expected[rows], table.last[rows]) - starts
    num_wanted = int(num_tokens.sum())
    max_tokens = budget.beside(int(np.count_nonzero(num_tokens == 1)))
    if num_wanted + (claim.num_tokens if claim else 0) > max_tokens:
        num_tokens = _ration(num_tokens, max_tokens, claim)
        num_wanted = int(num_tokens.sum())
    if np.count_nonzero(num_tokens) < len(rows):
        has_some = num_tokens > 0
        rows, starts, num_tokens = rows[has_some], starts[has_some], num_tokens[has_some]
    return Work(rows, starts, num_tokens, starts + num_tokens, max_tokens - num_wanted)


def join(table: RowTable, work: Work, new_rows: Rows) -> Work:
    """Append the first chunks of newly assigned rows; the last one may have to share its prompt out."""
    rows = np.concatenate([work.rows, new_rows])
    starts = table.scheduled[rows]
    new_tokens = table.expected[new_rows] - table.scheduled[new_rows]
    num_left = work.num_left - int(new_tokens.sum())
    new_tokens[-1] += min(num_left, 0)
    num_tokens = np.concatenate([work.num_tokens, new_tokens])
    return Work(rows, starts, num_tokens, starts + num_tokens, max(num_left, 0))


def out_of_blocks(table: RowTable, work: Work) -> list[Rows]:
    """By group of layers the rows that need a block, each as often as it needs one.

    Once where a row decodes; a prompt has all of its own, but for groups with windows.
    """
    growing = []
    for capacity in table.capacity:
        num_lacking = work.ends - capacity[work.rows]
        lacking = (num_lacking > 0).nonzero()[0]
        rows = work.rows[lacking]
        if len(rows) and max(num_lacking[lacking].tolist()) > table.block_size:
            # A prompt's blocks, or those of tokens that a grammar forced.
            rows = np.repeat(rows, -(-num_lacking[lacking] // table.block_size))
        growing.append(rows)
    return growing


def _ration(num_tokens: Int32, max_tokens: int, claim: Claim | None) -> Int32:
    """Cut down what rows want to one step's budget, which is at least one token for each of them."""
    is_decode = num_tokens == 1
    prefills = np.where(is_decode, 0, num_tokens)
    left = max_tokens - np.count_nonzero(is_decode)
    before = np.cumsum(prefills) - prefills
    if claim is not None:
        before[claim.num_before :] += claim.num_tokens
    shares = np.clip(left - before, 0, prefills)
    return np.where(is_decode, 1, shares).astype(np.int32)


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
