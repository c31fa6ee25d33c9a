"""The rows as the device keeps them: token history, block tables, sampling columns; and a step's inputs out of them.

All of it is columns, so that a steady decode step takes a few array operations, whatever the number of rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from aioengine.core.plan import Int32, RowAdded, RowSampling, StepPlan, Want
from aioengine.kernels.metadata import AttentionMetadata
from aioengine.sampler import PromptLines, RowRules, RuledRows, SamplingRows, has_rules, spans


@dataclass(frozen=True, slots=True, kw_only=True)
class StepInputs:
    """A plan as tensors.

    Attributes:
        token_ids, positions: int64 [tokens], the rows' one after the other.
        attention: where their keys and values go, and which they see.
        sampled: int64 [s], which of the plan's rows want a token sampled.
        last_tokens: int64 [s], where the last tokens of those are in ``token_ids``.
        sampling: what the sampler must know of those.
        prompt: the prompt tokens whose log-probabilities are wanted; None where there are none.
    """

    token_ids: Tensor
    positions: Tensor
    attention: AttentionMetadata
    sampled: np.ndarray[tuple[int], np.dtype[np.int64]]
    last_tokens: Tensor
    sampling: SamplingRows
    prompt: PromptLines | None


class InputBatch:
    """The rows of an executor, up to ``max_num_seqs`` of them."""

    def __init__(self, *, max_num_seqs: int, max_model_len: int, block_size: int) -> None:
        # Zeros that nobody has written cost no memory, so that room for the longest sequences is free.
        self._history = np.zeros((max_num_seqs, max_model_len + 1), np.int32)
        self._block_tables = np.zeros((max_num_seqs, -(-max_model_len // block_size)), np.int32)
        self._num_blocks = np.zeros(max_num_seqs, np.int32)
        self._num_prompt_tokens = np.zeros(max_num_seqs, np.int32)
        self._sampling: dict[str, NDArray[Any]] = {
            name: np.zeros(max_num_seqs, dtype) for name, dtype in COLUMN_DTYPES.items()
        }
        self._has_rules = np.zeros(max_num_seqs, np.bool_)
        self._rules = [NO_RULES] * max_num_seqs
        self._families: dict[int, int] = {}
        self._logprob_token_ids: dict[int, NDArray[np.int64]] = {}
        self._block_size = block_size

    def apply(self, plan: StepPlan) -> None:
        """Take in a plan's deltas.

        Raises:
            Exception: the plan does not fit the rows, whose state is unknown from now on.
        """
        self._num_blocks[plan.removed] = 0
        for row in plan.removed.tolist():
            self._rules[row] = NO_RULES  # they may hold functions of the request's
            self._families.pop(row, None)
            self._logprob_token_ids.pop(row, None)
        for added in plan.added:
            self._add(added)
        if len(plan.grown_rows):
            self._grow(plan.grown_rows, plan.grown_blocks)

    def _add(self, added: RowAdded) -> None:
        row = added.row
        self._history[row, : len(added.token_ids)] = added.token_ids
        self._block_tables[row, : len(added.block_ids)] = added.block_ids
        self._num_blocks[row] = len(added.block_ids)
        self._num_prompt_tokens[row] = added.num_prompt_tokens
        sampling = added.sampling
        for name, column in self._sampling.items():
            column[row] = getattr(sampling, name)
        if not sampling.stop_ids:
            self._sampling["min_tokens"][row] = 0  # nothing to mask until then
        self._has_rules[row] = has_rules(sampling)
        self._rules[row] = RowRules.of(sampling) if sampling.stop_ids or self._has_rules[row] else NO_RULES
        if sampling.num_choices > 1:
            self._families[row] = sampling.num_choices
        if sampling.logprob_token_ids:
            self._logprob_token_ids[row] = np.array(sampling.logprob_token_ids, np.int64)

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
        block, offset = np.divmod(positions, self._block_size)
        slots = self._block_tables[row_of_token, block].astype(np.int64) * self._block_size + offset
        num_blocks = -(-int(ends.max()) // self._block_size)
        sampled = np.flatnonzero(plan.wants == Want.LOGITS)
        return StepInputs(
            token_ids=torch.from_numpy(self._history[row_of_token, positions].astype(np.int64)),
            positions=torch.from_numpy(positions),
            attention=AttentionMetadata(
                query_offsets=offsets,
                starts=plan.starts,
                context_lens=ends,
                block_tables=torch.from_numpy(self._block_tables[plan.rows, :num_blocks].astype(np.int64)),
                slot_mapping=torch.from_numpy(slots),
                block_size=self._block_size,
            ),
            sampled=sampled,
            last_tokens=torch.from_numpy(offsets[1:][sampled].astype(np.int64) - 1),
            sampling=self._sampling_rows(plan.rows[sampled], ends[sampled]),
            prompt=self._prompt_lines(plan, offsets),
        )

    def _sampling_rows(self, rows: Int32, num_tokens: Int32) -> SamplingRows:
        columns = {name: self._sampling[name][rows] for name in SAMPLING_COLUMNS}
        positions = num_tokens - self._num_prompt_tokens[rows]
        is_before_min = positions < self._sampling["min_tokens"][rows]
        ruled = (self._has_rules[rows] | is_before_min).nonzero()[0]
        return SamplingRows(
            **columns,
            positions=positions,
            num_choices=self._num_choices(rows, positions) if self._families else None,
            ruled=self._ruled_rows(ruled, rows[ruled], num_tokens[ruled], is_before_min[ruled]) if len(ruled) else None,
            logprob_token_ids=self._logprob_token_ids_of(rows) if self._logprob_token_ids else None,
        )

    def _ruled_rows(
        self, places: NDArray[np.int64], rows: Int32, num_tokens: Int32, is_before_min: NDArray[np.bool_]
    ) -> RuledRows:
        return RuledRows(
            places=places,
            history=self._history,
            history_rows=rows,
            num_tokens=num_tokens,
            num_prompt_tokens=self._num_prompt_tokens[rows],
            is_before_min=is_before_min,
            rules=[self._rules[row] for row in rows.tolist()],
            **{name: self._sampling[name][rows] for name in RULED_COLUMNS},
        )

    def _num_choices(self, rows: Int32, positions: Int32) -> Int32 | None:
        """How many tokens each row brings; None where it is one. Families that have begun are one no more."""
        counts = [self._families.get(row, 1) for row in rows.tolist()]
        num_choices = np.where(positions == 0, counts, 1).astype(np.int32)
        for row in rows[positions > 0].tolist():
            self._families.pop(row, None)
        return num_choices if (num_choices > 1).any() else None

    def _logprob_token_ids_of(self, rows: Int32) -> list[NDArray[np.int64]]:
        return [self._logprob_token_ids.get(row, NO_IDS) for row in rows.tolist()]

    def _prompt_lines(self, plan: StepPlan, offsets: Int32) -> PromptLines | None:
        """Of the rows that ask: each prompt token that follows one which the plan computes."""
        num_top = self._sampling["prompt_logprobs"][plan.rows]
        asking = (num_top >= 0).nonzero()[0]
        if not len(asking):
            return None
        rows, starts = plan.rows[asking], plan.starts[asking]
        # The prompt's last token predicts an output token.
        counts = np.minimum(plan.num_tokens[asking], self._num_prompt_tokens[rows] - 1 - starts).clip(min=0)
        if not counts.any():
            return None
        positions = spans(starts + 1, counts)
        return PromptLines(
            index=np.repeat(asking, counts).astype(np.int32),
            positions=positions.astype(np.int32),
            token_ids=self._history[np.repeat(rows, counts), positions].astype(np.int64),
            predicted_at=spans(offsets[asking], counts),
            num_top=int(num_top[asking].max()),
        )

    def append(self, plan: StepPlan, inputs: StepInputs, token_ids: Int32) -> None:
        """Put the sampled tokens behind the rows' tokens, where the next step reads them."""
        rows = plan.rows[inputs.sampled]
        self._history[rows, plan.starts[inputs.sampled] + plan.num_tokens[inputs.sampled]] = token_ids


SAMPLING_COLUMNS: dict[str, type[np.generic]] = {
    "temperature": np.float32,
    "top_k": np.int32,
    "top_p": np.float32,
    "min_p": np.float32,
    "seed": np.int64,
    "choice": np.int32,
    "logprobs": np.int32,
}
"""What a row's `RowSampling` says that all rows need, as `SamplingRows` has it."""

RULED_COLUMNS: dict[str, type[np.generic]] = {
    "choice": np.int32,
    "repetition_penalty": np.float32,
    "frequency_penalty": np.float32,
    "presence_penalty": np.float32,
}
"""What those with rules need beside it, as `RuledRows` has it."""

COLUMN_DTYPES = {**SAMPLING_COLUMNS, **RULED_COLUMNS, "min_tokens": np.int32, "prompt_logprobs": np.int32}

NO_RULES = RowRules.of(RowSampling())
NO_IDS = np.zeros(0, np.int64)
