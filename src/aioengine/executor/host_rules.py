"""Logits processors on a GPU: functions of the host, which must see the tokens so far, so that their step waits."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from aioengine.executor.gpu_batch import GpuBatch, GpuStep
from aioengine.executor.row_columns import RULED_COLUMNS
from aioengine.sampler import RuledRows, keep_allowed, put_rows, run_processors


class HostLogitsProcessors:
    """What of a step's rules only the host can do."""

    def __init__(self, batch: GpuBatch) -> None:
        self._batch = batch

    def prepare(self, step: GpuStep, failures: dict[int, Exception]) -> HostRulesOfStep:
        """Once the tokens of all steps before are known.

        Args:
            failures: by line, what goes wrong with its processors.
        """
        columns = self._batch.columns
        indices = step.sampled[step.processed]
        rows = step.plan.rows[indices]
        num_tokens = step.plan.starts[indices] + step.plan.num_tokens[indices]
        history = np.zeros((len(rows), int(num_tokens.max())), np.int32)
        for line, (row, count) in enumerate(zip(rows.tolist(), num_tokens.tolist(), strict=True)):
            history[line, :count] = self._batch.known(row)[:count]
        num_prompt_tokens = columns.num_prompt_tokens[rows]
        ruled = RuledRows(
            places=np.array(step.processed, np.int64),
            history=history,
            history_rows=np.arange(len(rows), dtype=np.int32),
            num_tokens=num_tokens,
            num_prompt_tokens=num_prompt_tokens,
            is_before_min=num_tokens - num_prompt_tokens < columns.sampling["min_tokens"][rows],
            rules=[columns.rules[row] for row in rows.tolist()],
            **{name: columns.sampling[name][rows] for name in RULED_COLUMNS},
        )
        return HostRulesOfStep(ruled, failures, is_undone=step.features.num_top >= 0)


class HostRulesOfStep:
    """Changes the logits of the lines that have processors, in place, and can undo it."""

    def __init__(self, ruled: RuledRows, failures: dict[int, Exception], *, is_undone: bool) -> None:
        self._ruled = ruled
        self._failures = failures
        self._is_undone = is_undone
        self._before: Tensor | None = None

    def save(self, logits: Tensor) -> None:
        """Keep the logits as the model gave them, if they are to be put back."""
        if self._is_undone:
            self._before = logits.index_select(0, torch.from_numpy(self._ruled.places).to(logits.device))

    def __call__(self, logits: Tensor) -> None:
        keep_allowed(logits, self._ruled)
        self._failures.update(run_processors(logits, self._ruled))

    def undo(self, logits: Tensor) -> None:
        if self._before is not None:
            put_rows(logits, self._ruled.places.tolist(), self._before)
