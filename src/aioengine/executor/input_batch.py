"""The rows as the device keeps them: token history, block tables, sampling columns; and a step's inputs out of them.

All of it is columns, so that a steady decode step takes a few array operations, whatever the number of rows.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from aioengine.executor.row_columns import RowColumns
from aioengine.sampler.rows import PromptTokens, SamplingRows, spans
from aioengine.scheduler.plan import Int32, RowAdded, StepPlan, Want


@dataclass(frozen=True, slots=True, kw_only=True)
class StepInputs:
    """A plan as tensors.

    Attributes:
        token_ids, positions: int64 [tokens], the rows' one after the other.
        sampled: int64 [s], which of the plan's rows want a token sampled.
        last_tokens: int64 [s], where the last tokens of those are in ``token_ids``.
        sampling: what the sampler must know of those.
        prompt: the prompt tokens whose log-probabilities are wanted; None where there are none.
    """

    token_ids: Tensor
    positions: Tensor
    sampled: np.ndarray[tuple[int], np.dtype[np.int64]]
    last_tokens: Tensor
    sampling: SamplingRows
    prompt: PromptTokens | None


class InputBatch:
    """The rows of an executor, up to ``max_num_seqs`` of them."""

    def __init__(self, *, max_num_seqs: int, max_model_len: int, block_size: int) -> None:
        # Zeros cost no memory until they are written, so that room for the longest sequences is free.
        self._history = np.zeros((max_num_seqs, max_model_len + 1), np.int32)
        self._block_tables = np.zeros((max_num_seqs, -(-max_model_len // block_size)), np.int32)
        self._num_blocks = np.zeros(max_num_seqs, np.int32)
        self._columns = RowColumns(max_num_seqs)
        self._block_size = block_size

    def apply(self, plan: StepPlan) -> None:
        """Take in a plan's deltas.

        Raises:
            Exception: the plan does not fit the rows, whose state is unknown from now on.
        """
        self._num_blocks[plan.removed] = 0
        self._columns.remove(plan.removed)
        for added in plan.added:
            self._add(added)
        if len(plan.grown_rows):
            self._grow(plan.grown_rows, plan.grown_blocks)

    def _add(self, added: RowAdded) -> None:
        row = added.row
        self._history[row, : len(added.token_ids)] = added.token_ids
        self._block_tables[row, : len(added.block_ids)] = added.block_ids
        self._num_blocks[row] = len(added.block_ids)
        self._columns.add(added)

    def _grow(self, rows: Int32, block_ids: Int32) -> None:
        """Append ``block_ids[i]`` to the table of ``rows[i]``; a row may stand there several times."""
        order = np.argsort(rows, kind="stable")
        rows, block_ids = rows[order], block_ids[order]
        nth_of_row = np.arange(len(rows)) - np.searchsorted(rows, rows)
        self._block_tables[rows, self._num_blocks[rows] + nth_of_row] = block_ids
        np.add.at(self._num_blocks, rows, 1)

    def inputs(self, plan: StepPlan) -> StepInputs:
        """What the plan's rows compute, on top of the state that the steps before have left."""
        ends = plan.starts + plan.num_tokens
        offsets = np.concatenate(([0], np.cumsum(plan.num_tokens))).astype(np.int32)
        row_of_token = np.repeat(plan.rows, plan.num_tokens)
        positions = spans(plan.starts, plan.num_tokens)
        sampled = np.flatnonzero(plan.wants == Want.LOGITS)
        return StepInputs(
            token_ids=torch.from_numpy(self._history[row_of_token, positions].astype(np.int64)),
            positions=torch.from_numpy(positions),
            sampled=sampled,
            last_tokens=torch.from_numpy(offsets[1:][sampled].astype(np.int64) - 1),
            sampling=self._sampling_rows(plan.rows[sampled], ends[sampled]),
            prompt=self._columns.prompt_tokens(plan, offsets, self._known),
        )

    def _known(self, rows: Int32, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        return self._history[rows, positions].astype(np.int64)

    def _sampling_rows(self, rows: Int32, num_tokens: Int32) -> SamplingRows:
        of = self._columns
        positions = num_tokens - of.num_prompt_tokens[rows]
        ruled = (of.has_rules[rows] | (positions < of.min_tokens[rows])).nonzero()[0]
        return SamplingRows(
            params={name: column[rows] for name, column in of.params.items()},
            seed=of.seed[rows],
            choice=of.choice[rows],
            logprobs=of.logprobs[rows],
            positions=positions,
            num_choices=of.num_choices(rows, positions),
            ruled=of.ruled_rows(ruled, rows[ruled], num_tokens[ruled], self._history, rows[ruled])
            if len(ruled)
            else None,
            logprob_token_ids=of.logprob_token_ids(rows),
        )

    def append(self, plan: StepPlan, inputs: StepInputs, token_ids: Int32) -> None:
        """Put the sampled tokens behind the rows' tokens, where the next step reads them."""
        rows = plan.rows[inputs.sampled]
        self._history[rows, plan.starts[inputs.sampled] + plan.num_tokens[inputs.sampled]] = token_ids
