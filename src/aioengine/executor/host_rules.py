"""Logits processors on a GPU: functions of the host, which must see the tokens so far, so that their step waits."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from torch import Tensor

from aioengine.executor.gpu_batch import GpuBatch, GpuStep
from aioengine.sampler import RuledRows, keep_allowed, run_processors
from aioengine.sampling_params import PENALTIES


class HostLogitsProcessors:
    """What of a step's rules only the host can do."""

    def __init__(self, batch: GpuBatch) -> None:
        self._batch = batch

    def prepare(self, step: GpuStep, failures: dict[int, Exception]) -> Callable[[Tensor], None]:
        """Once the tokens of all steps before are known.

        Args:
            failures: by row of logits, what goes wrong with its processors.
        """
        columns = self._batch.columns
        indices = step.sampled[step.processed]
        rows = step.plan.rows[indices]
        num_tokens = step.plan.starts[indices] + step.plan.num_tokens[indices]
        history = np.zeros((len(rows), int(num_tokens.max())), np.int32)
        for i, (row, count) in enumerate(zip(rows.tolist(), num_tokens.tolist(), strict=True)):
            history[i, :count] = self._batch.known(row)[:count]
        num_prompt_tokens = columns.num_prompt_tokens[rows]
        ruled = RuledRows(
            places=np.array(step.processed, np.int64),
            history=history,
            history_rows=np.arange(len(rows), dtype=np.int32),
            num_tokens=num_tokens,
            num_prompt_tokens=num_prompt_tokens,
            is_before_min=num_tokens - num_prompt_tokens < columns.min_tokens[rows],
            rules=[columns.rules[row] for row in rows.tolist()],
            choice=columns.choice[rows],
            params={name: columns.params[name][rows] for name in PENALTIES},
        )

        def change(logits: Tensor) -> None:
            """Change the logits of the rows of logits that have processors, in place."""
            keep_allowed(logits, ruled)
            failures.update(run_processors(logits, ruled))

        return change
