"""The rows as the device keeps them: token history, block tables, sampling columns; and a step's inputs out of them.

All of it is columns, so that a steady decode step takes a few array operations, whatever the number of rows.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from aioengine.core.plan import Int32, RowAdded, StepPlan, Want
from aioengine.kernels.metadata import AttentionMetadata
from aioengine.sampler import SamplingRows


@dataclass(frozen=True, slots=True, kw_only=True)
class StepInputs:
    """A plan as tensors.

    Attributes:
        token_ids, positions: int64 [tokens], the rows' one after the other.
        attention: where their keys and values go, and which they see.
        sampled: int64 [s], which of the plan's rows want a token sampled.
        last_tokens: int64 [s], where the last tokens of those are in ``token_ids``.
        sampling: what the sampler must know of those.
    """

    token_ids: Tensor
    positions: Tensor
    attention: AttentionMetadata
    sampled: np.ndarray[tuple[int], np.dtype[np.int64]]
    last_tokens: Tensor
    sampling: SamplingRows


class InputBatch:
    """The rows of an executor, up to ``max_num_seqs`` of them."""

    def __init__(self, *, max_num_seqs: int, max_model_len: int, block_size: int) -> None:
        # Zeros that nobody has written cost no memory, so that room for the longest sequences is free.
        self._history = np.zeros((max_num_seqs, max_model_len + 1), np.int32)
        self._block_tables = np.zeros((max_num_seqs, -(-max_model_len // block_size)), np.int32)
        self._num_blocks = np.zeros(max_num_seqs, np.int32)
        self._num_prompt_tokens = np.zeros(max_num_seqs, np.int32)
        self._sampling = {name: np.zeros(max_num_seqs, dtype) for name, dtype in SAMPLING_DTYPES.items()}
        self._stop_ids: list[tuple[int, ...]] = [()] * max_num_seqs
        self._block_size = block_size

    def apply(self, plan: StepPlan) -> None:
        """Take in a plan's deltas.

        Raises:
            Exception: the plan does not fit the rows, whose state is unknown from now on.
        """
        self._num_blocks[plan.removed] = 0
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
        for name, column in self._sampling.items():
            column[row] = getattr(added.sampling, name)
        self._stop_ids[row] = added.sampling.stop_ids

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
        positions = np.arange(offsets[-1]) - np.repeat(offsets[:-1] - plan.starts, plan.num_tokens)
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
        )

    def _sampling_rows(self, rows: Int32, ends: Int32) -> SamplingRows:
        columns = {name: column[rows] for name, column in self._sampling.items()}
        stop_ids = [self._stop_ids[row] for row in rows.tolist()]
        return SamplingRows(**columns, positions=ends - self._num_prompt_tokens[rows], stop_ids=stop_ids)

    def append(self, plan: StepPlan, inputs: StepInputs, token_ids: Int32) -> None:
        """Put the sampled tokens behind the rows' tokens, where the next step reads them."""
        rows = plan.rows[inputs.sampled]
        self._history[rows, plan.starts[inputs.sampled] + plan.num_tokens[inputs.sampled]] = token_ids


SAMPLING_DTYPES = {
    "temperature": np.float32,
    "top_k": np.int32,
    "top_p": np.float32,
    "min_p": np.float32,
    "seed": np.int64,
    "choice": np.int32,
    "min_tokens": np.int32,
    "logprobs": np.int32,
}
"""The columns that a row's `RowSampling` fills, of those that `SamplingRows` has."""
